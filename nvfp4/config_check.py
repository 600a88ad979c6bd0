"""`nvfp4 check`: what a recipe comes to, in one screen. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from nvfp4.config import list_recipes, load_recipe
from nvfp4.config_files import find, shown
from nvfp4.config_schema import Recipe
from nvfp4.models.configs import count_parameters
from nvfp4.models.pattern import parse_pattern
from nvfp4.precision.policy import PlanRow, PrecisionPlan

Echo = Callable[[str], None]
WIDTH = 12


def check(
    name: str,
    overrides: list[str],
    *,
    resolved: bool = False,
    against: str | None = None,
    echo: Echo = print,
) -> int:
    """Validates a recipe and prints what it comes to; RecipeError if it is wrong.

    resolved: print the resolved recipe instead, which is itself a recipe.
    against: print the keys that differ from this other recipe instead.
    """
    recipe = load_recipe(name, overrides)
    if against is not None:
        lines = list(difference(load_recipe(against), recipe))
        for line in lines or [f"{name} and {against} resolve to the same recipe"]:
            echo(line)
    elif resolved:
        echo(recipe.to_yaml().rstrip())
    else:
        for line in report(recipe, shown(find(name))):
            echo(line)
    return 0


def report(recipe: Recipe, source: str) -> Iterator[str]:
    """The facts of a recipe, one topic per line."""
    model, train, schedule, parallel = recipe.model, recipe.train, recipe.schedule, recipe.parallel

    def topic(name: str, *facts: str) -> str:
        return f"{name:<{WIDTH}}{'   '.join(facts)}"

    yield topic("recipe", recipe.run.name, source)
    yield topic("run", recipe.run.dir, f"seed {recipe.run.seed}", f"backend {recipe.run.backend}")
    yield topic(
        "model", model.name, f"{amount(count_parameters(model))} parameters", blocks(recipe)
    )
    yield topic(
        "data",
        ", ".join(f"{source.path} ({source.weight:g})" for source in recipe.data.train),
        f"tokenizer {recipe.data.tokenizer or 'trained on the text'}, {model.vocab_size:,} entries",
    )
    yield topic(
        "batch",
        f"{train.global_batch_size} x {model.seq_length:,} = {recipe.tokens_per_step:,} tokens",
        f"micro-batch {train.micro_batch_size}",
        train.dtype,
    )
    given = "train.steps" if train.steps else f"train.tokens {train.tokens:,}"
    yield topic(
        "length",
        f"{recipe.steps:,} steps",
        f"{amount(recipe.steps * recipe.tokens_per_step)} tokens",
        f"from {given}",
    )
    stable = recipe.steps - schedule.warmup_steps - recipe.decay_steps
    yield topic(
        "schedule",
        f"{schedule.name}: {schedule.warmup_steps:,} warm-up, {stable:,} stable, "
        f"{recipe.decay_steps:,} decay ({schedule.decay_style})",
        f"lr {recipe.optim.lr:g} -> {schedule.min_lr:g}",
    )
    yield topic(
        "parallel",
        f"tensor {parallel.tensor_model_parallel_size}",
        f"pipeline {parallel.pipeline_model_parallel_size}",
        f"context {parallel.context_parallel_size}",
        f"run on {parallel.model_parallel_size} x N processes, N dividing "
        f"{train.global_batch_size // train.micro_batch_size}",
    )
    yield topic(
        "checkpoint",
        f"every {recipe.checkpoint.every:,} steps, the newest {recipe.checkpoint.keep} stay",
        f"evaluation every {recipe.metrics.valid_every:,} steps",
    )
    yield topic(
        "parity",
        f"against {recipe.parity.against or '-'}",
        f"tolerance {100 * recipe.parity.tolerance:g} %",
        f"{100 * recipe.parity.confidence:g} % interval",
    )
    yield ""
    yield from precision(recipe.plan)
    if recipe.switches:
        yield ""
        yield from switches(recipe)


def switches(recipe: Recipe) -> Iterator[str]:
    """When precision changes during the run, and what each policy does from then on."""
    for switch in recipe.switches:
        yield (
            f"{'switch':<{WIDTH}}from step {switch.step:,} of {recipe.steps:,}   after "
            f"{switch.tokens:,} tokens   {switch.text}"
        )
        yield from (f"  {line}" for line in switch.plan.summary().splitlines())


def precision(plan: PrecisionPlan) -> Iterator[str]:
    """Every linear, grouped by policy, reason and kind; then what each policy does in each GEMM."""
    groups: dict[tuple[str, str, str], list[PlanRow]] = {}
    for row in plan.rows:
        groups.setdefault((row.policy.name, row.reason, row.kind), []).append(row)
    total = sum(row.flops for row in plan.rows)
    table = [("precision", "linears", "share", "kind", "blocks", "because of")]
    for (policy, reason, kind), rows in groups.items():
        share = f"{100 * sum(row.flops for row in rows) / total:.1f} %"
        table.append((policy, str(len(rows)), share, kind, ranges([r.block for r in rows]), reason))
    table[1:] = sorted(table[1:], key=lambda line: (line[0], line[5]))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    widths[0] = max(widths[0], WIDTH - 2)
    for line in table:
        cells = [
            cell.rjust(width) if column in (1, 2) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield from plan.summary().splitlines()


def ranges(numbers: list[int]) -> str:
    """Block indices, short: [0, 2, 9, 10, 11] -> "0,2,9-11"; a long list is cut in the middle."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return ",".join(words if len(words) <= 8 else [*words[:4], "...", *words[-3:]])


def blocks(recipe: Recipe) -> str:
    """How many blocks of each kind the pattern has."""
    names = parse_pattern(recipe.model.pattern)
    counts = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return f"{len(names)} blocks: {counts}"


def amount(number: int) -> str:
    """1874416 -> "1.87 M"."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def difference(old: Recipe, new: Recipe) -> Iterator[str]:
    """The keys in which two resolved recipes differ: `train.steps: 150 -> 50`."""
    before, after = flat(old.model_dump(mode="json")), flat(new.model_dump(mode="json"))
    for key in [*before, *(key for key in after if key not in before)]:
        left, right = before.get(key), after.get(key)
        if left != right:
            yield f"{key}: {json.dumps(left)} -> {json.dumps(right)}"


def flat(data: Any, key: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay whole."""
    if not isinstance(data, dict) or not data:
        return {key: data}
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= flat(value, f"{key}.{name}" if key else name)
    return found


def recipes(echo: Echo = print) -> int:
    """Prints the shipped recipes with their purpose, and where the files are."""
    found = list_recipes()
    for name, purpose in found.items():
        echo(f"{name:<{max(map(len, found)) + 2}}{purpose}")
    echo(f"\nfiles in {find('base').parent}; start your own with the line  base: tiny_nvfp4")
    return 0
