"""Which code computes the numbers. All backends give the same bits; they differ in speed only.

A backend is a module beside this one with

    unsupported_reason() -> str | None     why it cannot run on this machine
    description() -> str                   which code that is here
    quantize, dequantize, transpose, gemm  as in nvfp4.numerics, equal to them bit for bit
    finite(x) -> bool                      whether x holds neither NaN nor infinity
    kernel(a, b, accumulate) -> str        which code its gemm takes for a pair, for the audit

The choice is made once, before training, and nothing falls back afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from nvfp4.errors import MachineError, UserError

NAMES = ("cpu", "reference")  # fastest first: `auto` takes the first that this machine supports


@dataclass(frozen=True, slots=True)
class Backend:
    """A chosen backend: its name, one line per backend looked at, and its functions."""

    name: str
    reasons: tuple[str, ...]
    quantize: Callable[..., Any]
    dequantize: Callable[..., Any]
    transpose: Callable[..., Any]
    gemm: Callable[..., Any]
    finite: Callable[[Any], bool]
    kernel: Callable[..., str]


def _module(name: str) -> ModuleType:
    return import_module(f"nvfp4.backends.{name}")


def unsupported_reason(name: str) -> str | None:
    """Why a backend cannot run on this machine, None if it can."""
    return _module(name).unsupported_reason()


def choose(requested: str = "auto") -> Backend:
    """The requested backend, or with `auto` the first in NAMES that this machine supports.

    Raises UserError at an unknown name, MachineError if the requested one cannot run here.
    """
    if requested not in ("auto", *NAMES):
        allowed = ", ".join(("auto", *NAMES))
        raise UserError(f"run.backend: unknown backend {requested!r}; allowed: {allowed}")
    reasons = []
    for name in NAMES if requested == "auto" else (requested,):
        module, reason = _module(name), unsupported_reason(name)
        if reason is None:
            why = "first one supported here" if requested == "auto" else "requested"
            reasons.append(f"{name}: chosen, {why}; {module.description()}")
            return Backend(
                name, tuple(reasons), module.quantize, module.dequantize, module.transpose,
                module.gemm, module.finite, module.kernel,
            )  # fmt: skip
        reasons.append(f"{name}: {reason}")
    raise MachineError(f"run.backend={requested} cannot run on this machine; {'; '.join(reasons)}")


_active: Backend | None = None


def activate(backend: Backend) -> None:
    """Let every linear of this process use a backend from now on."""
    global _active
    _active = backend


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """The same for what runs inside."""
    global _active
    before = _active
    activate(backend)
    try:
        yield
    finally:
        _active = before


def active() -> Backend:
    """The backend the linears use: the activated one, else the automatic choice."""
    if _active is None:
        activate(choose())
    assert _active is not None
    return _active
