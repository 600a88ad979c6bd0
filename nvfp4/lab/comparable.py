"""May two runs be compared, and do they differ in precision alone? Looks at data and recipes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nvfp4.errors import UserError
from nvfp4.lab.runs import Run

# how a run was watched and stored, and where: no influence on its loss
WITHOUT_EFFECT = (
    "base",
    "run.name",
    "run.dir",
    "metrics",
    "checkpoint",
    "parity",
    "data.cache_dir",
    "data.num_workers",
)
PRECISION = ("precision", "train.dtype")


def require_same_data(ref: Run, run: Run) -> None:
    """UserError naming both runs unless each step of both read as much of the same data."""
    if ref.data_hash != run.data_hash:
        raise UserError(
            f"{ref.path} and {run.path} were trained on different data (data_hash "
            f"{ref.data_hash[:12]} and {run.data_hash[:12]}): their losses cannot be compared"
        )
    lengths = ref.setting("model.seq_length"), run.setting("model.seq_length")
    if lengths[0] != lengths[1]:
        raise UserError(
            f"{ref.path} has model.seq_length {lengths[0]} and {run.path} {lengths[1]}: "
            "the loss per token depends on it; train both with the same"
        )
    _, i, j = np.intersect1d(ref.steps, run.steps, assume_unique=True, return_indices=True)
    if not np.array_equal(ref.train.tokens[i], run.train.tokens[j]):
        raise UserError(
            f"{ref.path} takes {ref.tokens_per_step:,.0f} tokens per step and {run.path} "
            f"{run.tokens_per_step:,.0f}: they share no batches; "
            "train both with the same train.global_batch_size"
        )


def recipe_differences(
    ref: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """(key, value in ref, value in other) of all settings beyond precision that can move the loss.

    Paths of data are left out: the data hash decides about data, wherever it lies.
    """
    a, b = dict(_flatten(ref)), dict(_flatten(other))
    return [
        (key, a.get(key), b.get(key))
        for key in sorted({**a, **b})
        if a.get(key) != b.get(key) and _matters(key)
    ]


def recipe_notes(ref: Run, run: Run) -> Iterator[str]:
    """What the recipes say against reading the gap as an effect of precision; one line each."""
    differences = recipe_differences(ref.recipe, run.recipe)
    if differences:
        shown = ", ".join(f"{key} ({a} / {b})" for key, a, b in differences[:6])
        more = f" and {len(differences) - 6} more" if len(differences) > 6 else ""
        yield (
            f"{run.name} differs from {ref.name} in more than precision: {shown}{more}; "
            "the gap is not about precision alone"
        )
    if any(key == "run.seed" for key, _, _ in differences):
        yield f"{run.name} has another seed than {ref.name}: other batches, so nothing is paired"


def _matters(key: str) -> bool:
    if key.startswith("data.") and key.endswith(".path"):
        return False
    return not any(key == skip or key.startswith(f"{skip}.") for skip in WITHOUT_EFFECT + PRECISION)


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty section is a leaf too."""
    if isinstance(node, Mapping) and node:
        children = list(node.items())
    elif isinstance(node, list) and node:
        children = list(enumerate(node))
    else:
        yield prefix, node
        return
    for key, child in children:
        yield from _flatten(child, f"{prefix}.{key}" if prefix else str(key))
