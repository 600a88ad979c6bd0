"""What an ablation trains: one recipe for each variant and seed.

A variant is a start and what is changed on top of it:

    nvfp4                                   a policy: RECIPE with precision.default=nvfp4
    recipes/late.yaml                       a recipe: RECIPE with the precision section of that one
    NAME:a.b=c,d.e=f                        RECIPE itself, with changed keys
    NAME:nvfp4,a.b=c                        a policy or a recipe, with changed keys

The precision section of RECIPE (BF16 blocks at both ends, rules, schedule) stays in place for a
policy that quantises. One that does not, such as bf16, is for all linears: a reference in which
some rule still quantises would be none. train.dtype follows the policy's compute dtype.

Everything that the variants must share to be comparable is RECIPE's: model, data, batches, steps.
Seed number i of all variants is run.seed + i: the same initial weights and the same order of data.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4.config import Recipe, RecipeError, finish, load_recipe
from nvfp4.config_files import Draft, shipped
from nvfp4.errors import UserError
from nvfp4.precision.operands import Policy, unknown
from nvfp4.precision.policy import known_policies

# A comma that separates changed keys, not one inside a value such as [{use: bf16, kind: mlp.up}].
_COMMA = re.compile(r",\s*(?=[A-Za-z_]\w*(?:\.\w+)+=)")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")
_OWN = re.compile(r"(precision|optim|schedule)\.|train\.(dtype|clip_grad)=")  # what may differ


@dataclass(frozen=True, slots=True)
class Entry:
    """A variant as it was asked for. start: policy or recipe, None for RECIPE as it is."""

    name: str
    start: str | None
    changes: tuple[str, ...] = ()
    option: str = "--policies"


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the table: one recipe per seed, in the order of the seeds."""

    name: str
    recipes: tuple[Recipe, ...]


def entries(policies: str, variants: Sequence[str], reference: str) -> list[Entry]:
    """What was asked for, the reference first; UserError in one line for what cannot be read."""
    found = [_policy(word, "--policies") for word in _words(policies)]
    found += [_variant(text) for text in variants]
    names = [entry.name for entry in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{name} is there twice; name one of them: --variant OTHER:{name}")
    same = [e for e in found if e.start == reference and not e.changes]
    first = ([e for e in found if e.name == reference] or same)[:1]
    rest = [entry for entry in found if entry not in first]
    if not rest:
        raise UserError(
            f"nothing to compare with {reference}; give --policies A,B or --variant NAME:a.b=c"
        )
    return [*(first or [_policy(reference, "--reference")]), *rest]


def expand(
    asked: Sequence[Entry], recipe: str, overrides: Sequence[str], *, seeds: int, out: Path | None
) -> tuple[Path, list[Variant]]:
    """The folder of the ablation, and its variants with a recipe per seed.

    UserError, RecipeError: seeds, a policy, a key or a value that does not exist or fit.
    """
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: at least one seed is needed")
    base = load_recipe(recipe, overrides)
    base.accumulation(1)
    out = out or Path("runs") / f"ablate_{base.run.name}"
    return out, [_expanded(entry, base, seeds, out) for entry in asked]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _policy(word: str, option: str) -> Entry:
    name = Path(word).stem if word.endswith((".yaml", ".yml")) else word.rstrip("/").split("/")[-1]
    return Entry(_checked(name, option), word, option=option)


def _variant(text: str) -> Entry:
    name, colon, rest = text.partition(":")
    if not colon or not rest.strip():
        raise UserError(f"--variant {text}: write NAME:a.b=c,d.e=f or NAME:POLICY,a.b=c")
    head, *changes = _COMMA.split(rest.strip())
    start = None
    if "=" in head:
        changes = [head, *changes]
    else:
        start = head.strip()
    option = f"--variant {_checked(name.strip(), '--variant')}"
    for change in changes:
        if "=" in change and not _OWN.match(change):
            key = change.partition("=")[0]
            raise UserError(
                f"{option}: {key} is the same for all variants; give it after RECIPE instead"
            )
    return Entry(name.strip(), start, tuple(changes), option)


def _checked(name: str, option: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{option}: {name!r} cannot name a run; use letters, digits and _, then also . + -"
        )
    return name


def _expanded(entry: Entry, base: Recipe, seeds: int, out: Path) -> Variant:
    data = _start(entry, base)
    data["metrics"]["gemm_error"] = "last"
    try:
        recipe = finish(Draft(Path(f"variant {entry.name}"), data), entry.changes)
    except RecipeError as error:
        lines = [line.removeprefix(f"variant {entry.name}: ") for line in error.lines]
        raise RecipeError(*(f"variant {entry.name}: {line}" for line in lines)) from None
    recipes = []
    for seed in range(base.run.seed, base.run.seed + seeds):
        name = f"{entry.name}_s{seed}"
        own = {"name": name, "dir": str(out / name), "seed": seed}
        run = type(recipe.run).model_validate({**recipe.run.model_dump(), **own})
        recipes.append(recipe.model_copy(update={"run": run}))
    return Variant(entry.name, tuple(recipes))


def _start(entry: Entry, base: Recipe) -> dict[str, Any]:
    """RECIPE as plain data, with the precision section that the variant starts from."""
    data = base.model_dump(mode="json")
    if entry.start is None:
        return data
    known = known_policies(base.precision)
    if entry.start in known:
        policy = known[entry.start]
        plain = policy == Policy(policy.name, policy.compute_dtype)
        section = {"policies": data["precision"]["policies"]} if plain else data["precision"]
        data["precision"] = {**section, "default": policy.name}
        data["train"] = {**data["train"], "dtype": policy.compute_dtype}
    elif _is_recipe(entry.start):
        other = load_recipe(entry.start).model_dump(mode="json")
        data["precision"] = other["precision"]
        data["train"] = {**data["train"], "dtype": other["train"]["dtype"]}
    else:
        raise unknown("policy", entry.start, known, entry.option)
    return data


def _is_recipe(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) or "/" in word or word in shipped()
