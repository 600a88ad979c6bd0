"""The compiled kernels as torch operators, torch.ops.nvfp4.*: profiles name them, and fake tensors
and tracing know the shapes of their results. Arguments as in cpu_library.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4.backends import cpu_library

_LIBRARY = torch.library.Library("nvfp4", "DEF")
_RANDOM = "Tensor? bits, int[] address, Tensor? sample, Tensor? position"
_ROTATION = "int hadamard, bool down, Tensor? signs"


def _operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines nvfp4::NAME, for CPU tensors and for fake ones; returns what calls it."""
    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"nvfp4::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nvfp4, name).default


def _blocks(x: Tensor, br: int, bc: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((-(-x.shape[0] // br), -(-x.shape[1] // bc)), dtype=dtype)


def _amax_shapes(x: Tensor, br: int, bc: int, hadamard: int, *_: Any) -> tuple[Tensor, Tensor]:
    rotated = x.new_empty(x.shape if hadamard else (0, 0), dtype=torch.bfloat16)
    return _blocks(x, br, bc, torch.float32), rotated


def _quantize_shapes(
    x: Tensor, amax: Tensor | None, br: int, bc: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, _blocks(x, br, bc, torch.uint8), x.new_empty((), dtype=torch.float32)


block_amax = _operator(
    f"block_amax(Tensor x, int br, int bc, {_ROTATION}) -> (Tensor, Tensor)",
    cpu_library.block_amax,
    _amax_shapes,
)
encode = _operator(
    f"encode(Tensor x, Tensor scale, int br, int bc, str format, {_RANDOM}) -> Tensor",
    cpu_library.encode,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.uint8),
)
quantize = _operator(
    f"quantize(Tensor x, Tensor? amax, int br, int bc, {_ROTATION}, str format, str scale_format, "
    f"int rule, float limit, float target, {_RANDOM}) -> (Tensor, Tensor, Tensor)",
    cpu_library.quantize,
    _quantize_shapes,
)
decode = _operator(
    "decode(Tensor codes, Tensor scale, int br, int bc, str format, str scale_format, "
    "Tensor? amax, float limit) -> Tensor",
    cpu_library.decode,
    lambda codes, *_: codes.new_empty(codes.shape, dtype=torch.float32),
)
finish = _operator(
    "finish(Tensor(a!) y, float[] factors, Tensor? add) -> ()", cpu_library.finish, lambda *_: None
)
finish_bf16 = _operator(
    "finish_bf16(Tensor y, float[] factors, Tensor? add) -> Tensor",
    cpu_library.finish_bf16,
    lambda y, *_: torch.empty_like(y, dtype=torch.bfloat16),
)
promote = _operator(
    "promote(Tensor p, Tensor scale_a, Tensor scale_b, bool exact, Tensor(a!) total) -> ()",
    cpu_library.promote,
    lambda *_: None,
)
