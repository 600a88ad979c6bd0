"""Parity in words and as data: the terminal table and parity.json."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvfp4.lab.bootstrap import REPLICATES, SEED, Interval
from nvfp4.lab.compare import Comparison, Pair, Parity
from nvfp4.lab.runs import Run

SCHEMA = 1  # of parity.json


def table(parity: Parity) -> list[str]:
    """What `nvfp4 parity` prints before its last line; 80 columns of plain text for short names."""
    ref = parity.reference
    longest = max(parity.comparisons, key=lambda c: c.end)
    settings = parity.settings
    window = f"{tokens(longest.end - longest.window_start)} tokens, {len(longest.last)} steps"
    paired = all(c.paired for c in parity.comparisons)
    order = "paired batch by batch" if paired else "not paired, as the seeds differ"
    lines = [
        f"reference   {ref.name}, {tokens(ref.train.tokens[-1])} tokens in {ref.steps[-1]:,} steps "
        f"of {ref.tokens_per_step:,.0f}; data {ref.data_hash[:12]}",
        f"judged      training loss of the last {window}, {order}",
        f"tolerance   relative gap of {settings.tolerance:.2%} (from {settings.tolerance_from})",
        "",
    ]
    interval = f"{settings.confidence:.0%} interval"
    head = ["", "train loss", "gap", "relative", interval, "valid", "relative"]
    lines += columns([head, _reference_row(parity), *map(_run_row, parity.comparisons)])
    lines += ["", *_stage_table(parity)]
    notes = [note for c in parity.comparisons for note in c.notes]
    if any(c.interval for c in parity.comparisons):
        notes.append("the interval is about these runs; another seed may move the gap further")
    lines += ["", *(f"note: {note}" for note in notes)] if notes else []
    return [*lines, "", *(verdict_line(c) for c in parity.comparisons)]


def verdict_line(comparison: Comparison) -> str:
    return f"{comparison.verdict:<12}  {comparison.run.name}: {comparison.reason}"


def last_line(parity: Parity, figure: Path) -> str:
    """The verdict of each run and the figure, on one line."""
    verdicts = ", ".join(f"{c.verdict} {c.run.name}" for c in parity.comparisons)
    return f"{verdicts}   figure: {figure}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text, first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def tokens(count: float) -> str:
    """1234567 -> "1.23 M"; three digits."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:.0f}"


def as_dict(parity: Parity) -> dict[str, Any]:
    """What parity.json holds. Gaps are fractions (0.01 = 1 %), losses nats per token."""
    settings = parity.settings
    return {
        "schema": SCHEMA,
        "verdict": parity.verdict,
        "settings": {
            "tolerance": settings.tolerance,
            "tolerance_from": settings.tolerance_from,
            "window_tokens": settings.window_tokens,
            "window_fraction": None if settings.window_tokens else settings.window_fraction,
            "confidence": settings.confidence,
            "bootstrap": {"replicates": REPLICATES, "seed": SEED},
        },
        "reference": _run_dict(parity.reference),
        "comparisons": [_comparison_dict(c) for c in parity.comparisons],
    }


def write_json(parity: Parity, path: Path) -> None:
    """Write parity.json, whole or not at all; NaN and Inf become null, as JSON has neither."""
    text = json.dumps(_finite(as_dict(parity)), indent=2, allow_nan=False) + "\n"
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _reference_row(parity: Parity) -> list[str]:
    longest = max(parity.comparisons, key=lambda c: c.end)
    loss = f"{longest.last.ref.mean():.4f}" if longest.last.gap is not None else "-"
    valid = parity.reference.valid.values
    return [
        parity.reference.name, loss, "", "", "", f"{valid[-1]:.4f}" if len(valid) else "-", "",
    ]  # fmt: skip


def _run_row(c: Comparison) -> list[str]:
    row = [c.run.name]
    if c.last.gap is None:
        row += ["-", "-", "-"]
    else:
        x, ref = c.last.x.mean(), c.last.ref.mean()
        row += [f"{x:.4f}", f"{x - ref:+.4f}", f"{c.last.gap:+.2%}"]
    row.append(_interval(c.interval) if c.interval else "-")
    if c.valid_gap is None:
        return [*row, "-", "-"]
    return [*row, f"{c.valid.x[-1]:.4f}", f"{c.valid_gap:+.2%}"]


def _interval(interval: Interval) -> str:
    return f"[{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]%"


def _stage_table(parity: Parity) -> list[str]:
    head = ["relative gap after"]
    head += [f"{tokens(stop)}" for stop, _ in parity.comparisons[0].stages]
    rows = [
        [c.run.name, *("-" if gap is None else f"{gap:+.2%}" for _, gap in c.stages)]
        for c in parity.comparisons
    ]
    return columns([head, *rows])


def _run_dict(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "data_hash": run.data_hash,
        "recipe_hash": run.env.get("recipe_hash"),
        "seed": run.setting("run.seed"),
        "steps": int(run.steps[-1]),
        "tokens": int(run.train.tokens[-1]),
        "finished": run.finished,
    }


def _comparison_dict(c: Comparison) -> dict[str, Any]:
    known = c.last.gap is not None
    return {
        **_run_dict(c.run),
        "verdict": c.verdict,
        "reason": c.reason,
        "notes": list(c.notes),
        "train": {
            "window": [c.window_start, c.end],
            "points": len(c.last),
            "paired": c.paired,
            "loss": float(c.last.x.mean()) if known else None,
            "reference_loss": float(c.last.ref.mean()) if known else None,
            "relative_gap": c.last.gap,
            "low": c.interval.low if c.interval else None,
            "high": c.interval.high if c.interval else None,
            "block_length": c.interval.block_length if c.interval else None,
        },
        "valid": _valid_dict(c.valid.final),
        "stages": [{"tokens": stop, "relative_gap": gap} for stop, gap in c.stages],
    }


def _valid_dict(final: Pair) -> dict[str, Any] | None:
    if len(final) == 0:
        return None
    return {
        "tokens": int(final.tokens[0]),
        "loss": float(final.x[0]),
        "reference_loss": float(final.ref[0]),
        "relative_gap": final.gap,
    }


def _finite(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node
