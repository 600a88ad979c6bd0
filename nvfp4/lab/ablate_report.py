"""An ablation as a text table, as Markdown to paste, and as JSON. Plain functions of a Table."""

import json
import math
import os
from pathlib import Path
from typing import Any

from nvfp4.lab.ablate_table import GEMMS, Gap, Row, Table
from nvfp4.lab.report import columns, tokens

SCHEMA = 1


def header(table: Table) -> list[str]:
    """What was trained, and what gap and interval mean."""
    count = len(table.seeds)
    reference, percent = table.rows[0].name, f"{table.confidence:.0%}"
    seeds = (
        f"seed {table.seeds[0]}" if count == 1 else f"seeds {table.seeds[0]} to {table.seeds[-1]}"
    )
    if count == 1:
        what = (
            f"training loss of the last {tokens(table.window)} tokens against {reference}; "
            f"{percent} block bootstrap of one seed, another seed may move it further"
        )
    else:
        what = (
            f"final validation loss against {reference}, paired by seed; "
            f"{percent} Student t over {count} seeds"
        )
    return [
        f"{table.recipe}: {table.steps:,} steps, {tokens(table.tokens)} tokens, {seeds}",
        f"gap: {what}",
        "GEMM error: ||y - a b^T|| / ||a b^T|| in the last step, mean over linears that quantise "
        "it (else all)",
    ]


def cells(table: Table) -> list[list[str]]:
    """The table as text, the head first."""
    loss = "valid loss" if len(table.seeds) == 1 else "valid loss, mean"
    interval = f"{table.confidence:.0%} interval"
    errors = [f"{gemm} error" for gemm in GEMMS]
    return [["variant", loss, "gap", interval, *errors], *map(_row, table.rows)]


def text(table: Table) -> list[str]:
    """Lines for the terminal."""
    notes = _notes(table)
    lines = [*header(table), "", *columns(cells(table))]
    return [*lines, "", *(f"note: {note}" for note in notes)] if notes else lines


def _notes(table: Table) -> list[str]:
    """What the variants change beside precision, and why runs diverged."""
    notes = [note for row in table.rows for note in row.notes]
    return notes + [
        f"{row.name} seed {seed}: {outcome.reason}"
        for row in table.rows
        for seed, outcome in zip(table.seeds, row.outcomes, strict=True)
        if outcome.kind == "diverged" and outcome.reason
    ]


def markdown(table: Table, command: str) -> str:
    """The same to paste into a document."""
    head, *rows = cells(table)
    lines = [
        f"`{command}`", "", *(f"{line}  " for line in header(table)), "",
        "| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]  # fmt: skip
    notes = [f"- {note}" for note in _notes(table)]
    return "\n".join([*lines, "", *notes] if notes else lines).rstrip() + "\n"


def as_dict(table: Table, command: str) -> dict[str, Any]:
    """What ablate.json holds. Gaps and errors are fractions (0.01 = 1 %), losses nats per token."""
    return {
        "schema": SCHEMA,
        "command": command,
        "recipe": table.recipe,
        "reference": table.rows[0].name,
        "seeds": list(table.seeds),
        "steps": table.steps,
        "tokens": table.tokens,
        "confidence": table.confidence,
        "interval": "block bootstrap of one seed" if table.window else "Student t over seeds",
        "window_tokens": table.window or None,
        "variants": [
            {
                "name": row.name,
                "runs": [
                    {"seed": seed, "outcome": outcome.kind, "step": outcome.step,
                     "reason": outcome.reason or None, "valid_loss": loss}
                    for seed, outcome, loss in zip(
                        table.seeds, row.outcomes, row.losses, strict=True
                    )
                ],
                "valid_loss": row.loss,
                "gap": _gap_dict(row.gap),
                "gemm_error": {gemm: row.errors.get(gemm) for gemm in GEMMS},
                "notes": list(row.notes),
            }
            for row in table.rows
        ],
        "pairs": [
            {"variant": a, "against": b, **(_gap_dict(gap) or {})}
            for (a, b), gap in table.pairs.items()
        ],
    }  # fmt: skip


def write(table: Table, folder: Path, command: str) -> None:
    """ablate.json and ablate.md, each whole or not at all."""
    data = json.dumps(as_dict(table, command), indent=1, allow_nan=False) + "\n"
    for name, content in (("ablate.json", data), ("ablate.md", markdown(table, command))):
        part = folder / f"{name}.part"
        part.write_text(content, encoding="utf-8")
        os.replace(part, folder / name)


def _row(row: Row) -> list[str]:
    loss = "-" if row.loss is None else f"{row.loss:.4f}"
    errors = [_percent(row.errors.get(gemm)) for gemm in GEMMS]
    if row.trouble:
        return [row.name, loss, row.trouble, "-", *errors]
    if row.gap is None:
        return [row.name, loss, "-", "-", *errors]
    return [row.name, loss, _signed(row.gap.gap), _interval(row.gap), *errors]


def _signed(value: float) -> str:
    return f"{value:+.2%}" if math.isfinite(value) else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value >= 1000 else f"{100 * value:.3g}%"


def _interval(gap: Gap) -> str:
    if gap.low is None or gap.high is None:
        return "-"
    return f"[{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]%"


def _gap_dict(gap: Gap | None) -> dict[str, Any] | None:
    if gap is None or not math.isfinite(gap.gap):
        return None
    return {"relative": gap.gap, "low": gap.low, "high": gap.high, "by_seed": list(gap.by_seed)}


def unfinished(table: Table) -> list[str]:
    """`nvfp4 seed 3: reason` of every run that failed; diverged ones have their row."""
    return [
        f"{row.name} seed {seed}: {outcome.reason}"
        for row in table.rows
        for seed, outcome in zip(table.seeds, row.outcomes, strict=True)
        if outcome.kind == "failed"
    ]
