"""Golden vectors: every .npz of a folder against this floor (`nvfp4 verify --golden DIR`).

A file holds arrays named CASE/ARRAY. What an array should equal follows from the names of its file,
case and array alone (golden_case.py, golden_checks.py): any folder of this format can be checked.
Comparison is by bit pattern; only NaN equals every NaN. A check with a tolerance allows that much,
and codes without a _kernel array may have lost the sign of an exact -0 (golden_case.Check).
"""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvfp4.errors import UserError
from nvfp4.numerics.golden_case import Arithmetic, Case, Check, unimplemented
from nvfp4.numerics.golden_checks import checks_of

DEFINITION = Arithmetic()

_UNREADABLE = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error)
_WRONG_CASE = (ValueError, KeyError, IndexError, RuntimeError, TypeError, AttributeError)


@dataclass(slots=True)
class FileReport:
    """What became of one file. `compared` and `equal` count arrays; `skipped` names the others."""

    name: str
    cases: int = 0
    compared: int = 0
    equal: int = 0
    difference: str = ""  # the first one, or why the file cannot be used
    unimplemented: dict[str, int] = field(default_factory=dict)  # format -> cases
    skipped: list[str] = field(default_factory=list)
    superseded: int = 0  # arrays whose _kernel sibling decided

    @property
    def ok(self) -> bool:
        """No difference: everything compared was equal."""
        return not self.difference

    def lines(self) -> Iterator[str]:
        """The report as text: one line, and a second one for a difference."""
        missing = ", ".join(f"{name} ({count} cases)" for name, count in self.unimplemented.items())
        if self.compared == 0 and self.difference:
            yield f"{self.name}: {self.difference}"
            return
        if self.compared == 0:
            yield f"{self.name}: not implemented: {missing}"
            return
        text = f"{self.name}: {self.cases} cases, {self.compared} arrays compared"
        text += f", {self.equal} equal"
        if missing:
            text += f"; not implemented: {missing}"
        if self.superseded:
            text += f"; {self.superseded} decided by their _kernel arrays instead"
        if self.skipped:
            listed = ", ".join(self.skipped[:3]) + (", ..." if len(self.skipped) > 3 else "")
            text += f"; {len(self.skipped)} not compared ({listed})"
        yield text
        if self.difference:
            yield f"  first difference: {self.difference}"


def _bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns; for floats every NaN becomes one pattern."""
    if array.dtype.kind != "f":
        return array
    array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.view(f"u{array.dtype.itemsize}")


def _one_bf16_nan(patterns: np.ndarray) -> np.ndarray:
    """BF16 bit patterns with one NaN: which one a cast gives depends on the processor."""
    return np.where((patterns & 0x7FFF) > 0x7F80, 0x7FC0, patterns).astype(np.uint16)


def _as_numpy(actual: torch.Tensor, like: np.ndarray) -> np.ndarray:
    actual = actual.detach().cpu().contiguous()
    if actual.dtype == torch.bfloat16:
        return _one_bf16_nan(actual.view(torch.int16).numpy().view(np.uint16))
    array = actual.numpy()
    # Integers may have another width here (PyTorch has few unsigned ones); floats may not.
    both_integers = like.dtype.kind in "iu" and array.dtype.kind in "iu"
    return array.astype(like.dtype) if both_integers else array


def compare(check: Check, expected: np.ndarray) -> str:
    """Empty if equal (or within check.tolerance of the largest value), else where it differs."""
    actual = _as_numpy(check.actual, expected)
    if check.actual.dtype == torch.bfloat16 and expected.dtype == np.uint16:
        expected = _one_bf16_nan(expected)
    if check.without_negative_zero is not None:
        reference = _as_numpy(check.without_negative_zero, expected)
        if np.array_equal(reference, expected):
            return ""
    if actual.shape != expected.shape and actual.size == expected.size == 1:
        actual = actual.reshape(expected.shape)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{check.label} is {expected.dtype} {list(expected.shape)}, "
            f"this floor gives {actual.dtype} {list(actual.shape)}"
        )
    wrong = _bits(actual) != _bits(expected)
    if check.tolerance is not None:
        with np.errstate(invalid="ignore"):
            gap = np.abs(actual.astype(np.float64) - expected)
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        wrong &= ~(gap <= check.tolerance * largest)
    if not wrong.any():
        return ""
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{check.label} {list(where)}: expected {expected[where]}, got {actual[where]} "
        f"({int(wrong.sum())} of {wrong.size} differ)"
    )


def _cases(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """CASE -> ARRAY -> values; a name without a slash belongs to the case ''."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as data:
        for name in data.files:
            case, _, array = name.rpartition("/")
            cases.setdefault(case, {})[array] = data[name]
    return cases


def _check_case(case: Case, report: FileReport) -> None:
    results: dict[str, list[str]] = {}
    try:
        for check in checks_of(case):
            results.setdefault(check.array, []).append(compare(check, case.arrays[check.array]))
    except _WRONG_CASE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = f"case {case.name}" if case.name else "the file"
        report.difference = report.difference or f"{where} cannot be evaluated: {reason}"
    for name in case.arrays:
        if name in results:
            failure = next(filter(None, results[name]), "")
            report.compared += 1
            report.equal += not failure
            report.difference = report.difference or failure
        elif name in case.superseded:
            report.superseded += 1
        elif name not in case.used:
            report.skipped.append(case.label(name))


def check_file(path: Path, arithmetic: Any = DEFINITION) -> FileReport:
    """Compares one .npz. Never raises for what the file holds: the report says what is wrong."""
    report = FileReport(path.name)
    try:
        cases = _cases(path)
    except _UNREADABLE as error:
        kind = type(error).__name__
        report.difference = f"cannot be read as .npz ({kind}); is the file complete?"
        return report
    shared = cases.pop("input", {}) if len(cases) > 1 else {}
    for name, arrays in cases.items():
        case = Case(path.stem, name, arrays, shared, arithmetic)
        report.cases += 1
        missing = unimplemented(case)
        if missing is None:
            _check_case(case, report)
        else:
            report.unimplemented[missing] = report.unimplemented.get(missing, 0) + 1
    if not (report.compared or report.difference or report.unimplemented):
        report.difference = (
            "no array in it has a known name; expected CASE/ARRAY with inputs x, w, dy "
            "and results such as q_row, s_row, amax_row"
        )
    return report


def verify(
    folder: Path | str, echo: Callable[[str], object] = print, arithmetic: Any = DEFINITION
) -> int:
    """Compares every .npz of `folder`, one line per file. Returns 0 if all are equal, else 1.

    arithmetic: whose quantize, dequantize and gemm are compared, e.g. a backend's.
    Formats that are not implemented say so and do not count.
    UserError: there is no such folder, or no .npz in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"--golden {folder}: no such folder; expected one with .npz files")
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(f"--golden {folder}: no .npz file in it")
    reports = []
    for path in paths:
        reports.append(check_file(path, arithmetic))
        for line in reports[-1].lines():
            echo(line)
    compared, equal = sum(r.compared for r in reports), sum(r.equal for r in reports)
    bad = sum(not r.ok for r in reports)
    if not compared and not bad:
        echo("nothing was compared: no file here holds a format that is implemented")
    echo(
        f"{len(reports)} files: {compared} arrays compared, {equal} equal; "
        f"{bad} files with differences"
    )
    return 1 if bad else 0
