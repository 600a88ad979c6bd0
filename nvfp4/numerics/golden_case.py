"""One golden case: its arrays, and what the words of its names say.

Options are words of the case name, then of the file name: `2d`/`1d`, `rht`/`norht`, `nosign`,
`external`, `1dw`, `pow2`, `1x128`/`128x128`, `e5m2`, `4over6`, `rowscaled`, `mxfp4`, `mxfp8`,
`current`, `delayed`, scale rules. A case named `input` holds inputs of the cases whose names begin
with theirs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4.numerics.gemm import gemm
from nvfp4.numerics.quantize import dequantize, quantize


@dataclass(frozen=True)
class Arithmetic:
    """The functions that are compared: the definition's, or those of a backend."""

    quantize: Callable[..., Any] = quantize
    dequantize: Callable[..., Any] = dequantize
    gemm: Callable[..., Any] = gemm


def words(name: str) -> list[str]:
    """The words of a file or case name; `no_rht` counts as norht, `row_scaled` as rowscaled."""
    joined = re.sub(r"no[_-](rht|signs?)", r"no\1", name.lower())
    return re.split(r"[_\-/. ]+", joined.replace("row_scaled", "rowscaled"))


@dataclass(slots=True)
class Check:
    """`actual` is what this floor gives for `array`; tolerance is relative to the largest value.

    without_negative_zero: the codes with 0 where x * enc is exactly -0. Transformer Engine's Python
    reference drops that sign, its kernels and this floor keep it; both decode to the same numbers.
    """

    array: str
    label: str
    actual: Tensor
    tolerance: float | None = None
    without_negative_zero: Tensor | None = None


@dataclass
class Case:
    """Arrays by name. `used` were inputs, `superseded` have a _kernel sibling that decides.

    shared: the arrays of the file's case `input`. arithmetic: what has quantize, dequantize, gemm.
    """

    file: str
    name: str
    arrays: dict[str, np.ndarray]
    shared: dict[str, np.ndarray] = field(default_factory=dict)
    arithmetic: Any = Arithmetic()
    used: set[str] = field(default_factory=set)
    superseded: set[str] = field(default_factory=set)

    @cached_property
    def _words(self) -> tuple[list[str], list[str]]:
        return words(self.name), words(self.file)

    def says(self, yes: str, no: str = "") -> bool:
        """Whether the last word of `yes` or `no` in the case name, else in the file name, is a yes.

        The last one, because shapes come first: bf16_128x128_1x128_pow2 has blocks of 1x128.
        """
        for name_words in self._words:
            for word in reversed(name_words):
                if word in yes.split() or word in no.split():
                    return word in yes.split()
        return False

    def label(self, array: str) -> str:
        """CASE/ARRAY as in the file."""
        return f"{self.name}/{array}" if self.name else array

    def check(self, array: str, actual: Tensor, tolerance: float | None = None) -> Check:
        """This floor's value of one array."""
        return Check(array, self.label(array), actual, tolerance)

    def tensor(self, array: str) -> Tensor:
        """An input array; uint16 are BF16 bit patterns. ValueError if the case lacks it."""
        if array not in self.arrays and array not in self.shared:
            raise ValueError(f"input {array} is missing")
        self.used.add(array)
        values = np.ascontiguousarray({**self.shared, **self.arrays}[array])
        if values.dtype == np.uint16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def find(self, name: str) -> str | None:
        """The array that holds input `name`: with or without its dtype suffix."""
        found = [name + suffix for suffix in ("", "_bf16", "_fp16", "_fp32")]
        own = next((array for array in found if array in self.arrays), None)
        return own or next((array for array in found if array in self.shared), None)

    @property
    def shared_input(self) -> str | None:
        """The input of the file that this case's name begins with, if it has none of its own."""
        first = re.split(r"[_\-/. ]+", self.name)[0]
        return first if self.shared and self.find("x") is None and self.find(first) else None

    def matrix(self, name: str) -> Tensor:
        """Input `name` as a matrix (leading dimensions flattened)."""
        values = self.tensor(self.find(name) or name)
        return values.reshape(-1, values.shape[-1])


def unimplemented(case: Case) -> str | None:
    """The format of this case if this floor does not have it, else None."""
    elsewhere = ("mxfp6", "mxint8", "hif4", "nf4", "int4", "if4")
    return next((name for name in elsewhere if case.says(name)), None)
