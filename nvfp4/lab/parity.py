"""`nvfp4 parity RUN_REF RUN ...`: does the loss still match? Prints, draws, writes, answers.

The statistics are in compare.py and bootstrap.py, the words in report.py, the figure in plots.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvfp4.errors import UserError
from nvfp4.lab.compare import Parity, Settings, compare
from nvfp4.lab.report import last_line, table, write_json
from nvfp4.lab.runs import Run, load_run, load_runs

EXIT_OK = 0
EXIT_FAIL = 4

__all__ = ["compare", "load_run", "parity", "parity_of"]


def parity(
    paths: Sequence[str | Path],
    *,
    tolerance: float | None = None,
    window_tokens: float | None = None,
    window_fraction: float | None = None,
    confidence: float | None = None,
    out: str | Path | None = None,
    echo: Callable[[str], object] = print,
) -> int:
    """Compare run folders with the first of them; 4 if any verdict is FAIL, else 0.

    Prints a table and one line per run through `echo`, and writes parity.json and parity.png into
    `out` (default: the folder of the last run). What is not given is read from the recipes of the
    compared runs (`parity.tolerance`, `parity.window_tokens` or `parity.window_fraction`,
    `parity.confidence`). A single path is compared with its recipe's `parity.against`.

    UserError: unreadable folders, different data, settings missing or contradictory.
    """
    result = parity_of(
        paths,
        tolerance=tolerance,
        window_tokens=window_tokens,
        window_fraction=window_fraction,
        confidence=confidence,
    )
    for line in table(result):
        echo(line)
    from nvfp4.lab.plots import parity_figure, save_png  # matplotlib, after the table is on screen

    folder = Path(out) if out is not None else result.comparisons[-1].run.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(result, folder / "parity.json")
        save_png(parity_figure(result), folder / "parity.png")
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write the report there ({error.strerror}); choose another --out"
        ) from None
    echo(last_line(result, folder / "parity.png"))
    return EXIT_FAIL if result.verdict == "FAIL" else EXIT_OK


def parity_of(
    paths: Sequence[str | Path],
    *,
    tolerance: float | None = None,
    window_tokens: float | None = None,
    window_fraction: float | None = None,
    confidence: float | None = None,
) -> Parity:
    """The comparison behind `parity`, for notebooks: nothing is printed or written."""
    if window_tokens is not None and window_fraction is not None:
        raise UserError("window_tokens and window_fraction are both given; give one of them")
    runs = load_runs(_with_reference(paths))
    given = {
        "tolerance": tolerance,
        "window_tokens": window_tokens,
        "window_fraction": window_fraction,
        "confidence": confidence,
    }
    return compare(runs, _settings(runs[1:], given))


def _with_reference(paths: Sequence[str | Path]) -> list[str | Path]:
    if len(paths) != 1:
        return list(paths)
    against = load_run(paths[0]).setting("parity.against")
    if not against:
        raise UserError(
            f"{paths[0]} is one run, and its recipe names no parity.against; "
            "give the reference first: nvfp4 parity REFERENCE RUN"
        )
    return [against, *paths]


def _settings(candidates: Sequence[Run], given: dict[str, float | None]) -> Settings:
    """Arguments first, then what the recipes of the compared runs agree on."""
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    decided = set(chosen)
    if decided & {"window_tokens", "window_fraction"}:
        decided |= {"window_tokens", "window_fraction"}  # one replaces both of the recipe
    for key in (key for key in given if key not in decided):
        value = _agreed(candidates, key)
        if value is not None:
            chosen[key] = value
    if "tolerance" not in chosen:
        raise UserError("no recipe of the compared runs sets parity.tolerance; pass --tolerance")
    source = "the recipe" if given["tolerance"] is None else "--tolerance"
    return Settings(**chosen, tolerance_from=source)


def _agreed(candidates: Sequence[Run], key: str) -> Any:
    values = {run.name: run.setting(f"parity.{key}") for run in candidates}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{value} in {name}" for name, value in values.items())
        option = key.replace("_", "-")
        raise UserError(f"parity.{key} is {shown}: choose one with --{option}")
    return next(iter(values.values()), None)
