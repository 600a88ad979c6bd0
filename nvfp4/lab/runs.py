"""Reads run folders: what a training run left behind, as plain records. Writes nothing.

A run folder holds (written by `nvfp4 train`, read here)

    metrics.jsonl   one row per step: step, tokens (cumulative), loss; valid_loss where evaluated;
                    switch where the precision changed
    recipe.yaml     the resolved recipe; env.json: data_hash, versions, device, backend
    perf.jsonl      wall-clock values; optional here, since no comparison depends on them

A run may still be training while it is read: a last line without its newline is a row that is
just being written, and is left out unless it is complete. Everything else that cannot be read is an
error with file and line.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvfp4.errors import UserError


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A quantity along training. tokens: (n,) int64, strictly increasing; values: (n,) float64."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run folder. Losses are mean cross entropies in nats per token; tokens are cumulative."""

    path: Path  # as the user gave it
    name: str
    recipe: Mapping[str, Any]
    env: Mapping[str, Any]
    steps: NDArray[np.int64]  # (n,), the steps of `train`
    train: Curve
    valid: Curve  # may be empty
    perf: tuple[Mapping[str, Any], ...]
    switches: tuple[tuple[float, str], ...] = ()  # (tokens when it happened, what changed)

    @property
    def data_hash(self) -> str:
        """What the run was trained on; UserError if env.json does not say."""
        value = self.env.get("data_hash")
        if not isinstance(value, str) or not value:
            raise UserError(
                f'{self.path / "env.json"}: "data_hash" is missing; without it nobody knows '
                "whether two runs read the same data"
            )
        return value

    @property
    def tokens_per_step(self) -> float:
        return float(self.train.tokens[-1] / self.steps[-1])

    @property
    def planned_tokens(self) -> float:
        """Where the recipe ends: train.steps times the tokens of a step, or train.tokens."""
        train = self.recipe.get("train") or {}
        if train.get("steps"):
            return train["steps"] * self.tokens_per_step
        if train.get("tokens"):
            return float(train["tokens"])
        raise UserError(f"{self.path / 'recipe.yaml'}: neither train.steps nor train.tokens is set")

    @property
    def finished(self) -> bool:
        """Within one step of the plan: train.tokens need not be a whole number of steps."""
        return bool(self.train.tokens[-1] > self.planned_tokens - self.tokens_per_step)

    def setting(self, key: str, default: Any = None) -> Any:
        """The recipe's value at a dotted key such as `parity.tolerance`; `default` if not there."""
        node: Any = self.recipe
        for part in key.split("."):
            if not isinstance(node, Mapping) or node.get(part) is None:
                return default
            node = node[part]
        return node


def load_run(path: str | Path) -> Run:
    """Read a run folder. UserError in one line, with file and line, for anything unreadable."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such run folder; make it with `nvfp4 train RECIPE run.dir={folder}`"
        )
    metrics = folder / "metrics.jsonl"
    rows = _read_jsonl(metrics)
    if not rows:
        raise UserError(f"{metrics}: no training step in it yet")
    steps, train, valid = _curves(metrics, rows)
    perf = folder / "perf.jsonl"
    return Run(
        path=folder,
        name=folder.resolve().name,
        recipe=_read_recipe(folder / "recipe.yaml"),
        env=_read_env(folder / "env.json"),
        steps=steps,
        train=train,
        valid=valid,
        perf=tuple(row for _, row in _read_jsonl(perf)) if perf.exists() else (),
        switches=_switches(rows, float(train.tokens[-1] / steps[-1])),
    )


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read several run folders; folders of the same name are told apart by the path as given."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    return [replace(run, name=str(run.path)) for run in runs]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; is {path.parent} a run folder?") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; the file is damaged") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row) pairs, without a last line that has no newline and is no whole row yet."""
    lines = _read_text(path).split("\n")
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            reason = f"{error.msg}, column {error.colno}"
            raise UserError(f"{path}:{number}: not a JSON row ({reason})") from None
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number}: a row must be a JSON object, not {line.strip()[:40]}"
            )
        rows.append((number, row))
    return rows


def _number(path: Path, line: int, row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        found = "is missing" if key not in row else f"is {json.dumps(value)}, not a number"
        raise UserError(f'{path}:{line}: "{key}" {found}')
    return value


def _curves(
    path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]
) -> tuple[NDArray[np.int64], Curve, Curve]:
    steps, tokens, losses, valid = [], [], [], []
    for line, row in rows:
        step, count = (_number(path, line, row, key) for key in ("step", "tokens"))
        if steps and not (step > steps[-1] and count > tokens[-1]):
            raise UserError(
                f"{path}:{line}: step {step} ({count} tokens) comes after step {steps[-1]} "
                f"({tokens[-1]} tokens); did two runs write into this folder?"
            )
        if step < 1 or count < 1:
            raise UserError(f"{path}:{line}: step {step}, tokens {count}: both must be positive")
        steps.append(step)
        tokens.append(count)
        losses.append(_number(path, line, row, "loss"))
        if "valid_loss" in row:
            valid.append((count, _number(path, line, row, "valid_loss")))
    return (
        np.array(steps, dtype=np.int64),
        Curve(np.array(tokens, dtype=np.int64), np.array(losses, dtype=np.float64)),
        Curve(
            np.array([count for count, _ in valid], dtype=np.int64),
            np.array([loss for _, loss in valid], dtype=np.float64),
        ),
    )


def _switches(
    rows: Sequence[tuple[int, Mapping[str, Any]]], tokens_per_step: float
) -> tuple[tuple[float, str], ...]:
    """Changes of precision, one step before the end of their row's step, which its tokens say."""
    return tuple(
        (row["tokens"] - tokens_per_step, str(row["switch"])) for _, row in rows if "switch" in row
    )


def _read_env(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        env = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(env, dict):
        raise UserError(f"{path}:1: must be a JSON object")
    return env


def _read_recipe(path: Path) -> dict[str, Any]:
    """As plain data: runs of an older version stay readable when the schema has moved on."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = _read_text(path)
    try:
        recipe = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{line}: not a recipe ({reason})") from None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a recipe ({reason})") from None
    if not isinstance(recipe, dict) or not recipe:
        raise UserError(f"{path}:1: not a recipe (no sections in it)")
    return {str(key): value for key, value in recipe.items()}
