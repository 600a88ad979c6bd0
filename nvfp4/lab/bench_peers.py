"""Other libraries that quantise to NVFP4 on this machine: their time, and where they differ.

Compared are dequantised values. A library that multiplies scales in another order differs in the
last digit although codes and scales are the same, so elements further off are counted apart.
"""

import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4.backends import Backend
from nvfp4.lab.bench_modes import numbers
from nvfp4.lab.timing import in_turn
from nvfp4.machine import version_of
from nvfp4.numerics.spec import NVFP4

LAST_DIGIT = 1e-5  # relative; neighbouring FP4 numbers are at least 1 / 7 apart


@dataclass(frozen=True, slots=True)
class Peer:
    """seconds: None if it did not run, for the reason given; differ, far: numbers of elements."""

    name: str
    version: str
    seconds: float | None = None
    reason: str = ""
    differ: int = 0
    far: int = 0

    @property
    def bits(self) -> str:
        """How its values compare with ours, in words."""
        if not self.differ:
            return "equal"
        if not self.far:
            return "equal codes and scales, last digits differ"
        return f"{self.far} elements have another code or scale"


def _torchao(x: Tensor) -> Tensor:
    at = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    scale = at.per_tensor_amax_to_scale(x.abs().max())
    return at.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)


def _compressed_tensors(x: Tensor) -> Tensor:
    at = importlib.import_module("compressed_tensors.quantization")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    helpers = importlib.import_module("compressed_tensors.quantization.utils")
    args = at.QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    level = helpers.generate_gparam(x.min(), x.max())
    blocks = x.reshape(x.shape[0], -1, 16)
    scale, zero = helpers.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=level
    )
    return forward.fake_quantize(x, scale, zero, args, global_scale=level)


def _modelopt(x: Tensor) -> Tensor:
    at = importlib.import_module("modelopt.torch.quantization.qtensor")
    q, scale, level = at.NVFP4QTensor.quantize(x, 16)
    return q.dequantize(scale=scale, double_scale=level, block_sizes={-1: 16})


def _fouroversix(x: Tensor) -> Tensor:
    at = importlib.import_module("fouroversix")
    config = at.QuantizationConfig(backend="pytorch", scale_rule="static_6")
    return at.dequantize(at.quantize(x, config), x.dtype)


def _ml_dtypes(x: Tensor) -> Tensor:
    """Transformer Engine's formulas in NumPy, with the casts of ml_dtypes."""
    ml_dtypes = importlib.import_module("ml_dtypes")
    import numpy as np

    f32 = np.float32
    values = x.numpy().reshape(x.shape[0], -1, 16)
    amax = np.abs(values).max()
    level = f32(2688) / amax
    block = np.abs(values).max(-1, keepdims=True) * (level * f32(1 / 6))
    scale = np.minimum(block, f32(448)).astype(ml_dtypes.float8_e4m3fn).astype(f32)
    with np.errstate(divide="ignore"):
        encode = np.minimum(f32(1) / (scale * (f32(1) / level)), np.finfo(f32).max)
    codes = np.clip(values * encode, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(f32)
    return torch.from_numpy((codes * (scale * amax * f32(1 / 2688))).reshape(x.shape))


PEERS: dict[str, Callable[[Tensor], Tensor]] = {
    "torchao": _torchao,
    "ml_dtypes": _ml_dtypes,
    "nvidia-modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fouroversix": _fouroversix,
}


def peers(backend: Backend, size: int, turns: int) -> list[Peer]:
    """Quantise + dequantise of one size x size float32 matrix by us and by all that are installed.

    The first is this toolkit.
    """
    x = numbers(size, size)
    ours = lambda: backend.dequantize(backend.quantize(x, NVFP4))  # noqa: E731
    want = ours()
    found = [Peer("nvfp4", version_of("nvfp4") or "", in_turn({"": ours}, turns=turns)[0].median)]
    logging.getLogger().setLevel(logging.ERROR)
    for name, function in PEERS.items():
        version = version_of(name)
        if version is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = function(x).float()
                seconds = in_turn({"": lambda f=function: f(x)}, turns=turns)[0].median
        except Exception as error:  # whatever a library of another project may raise
            line = str(error).splitlines()[0] if str(error) else ""
            found.append(Peer(name, version, reason=f"{type(error).__name__}: {line}"))
            continue
        apart = got != want
        far = (got - want).abs() > LAST_DIGIT * want.abs()
        found.append(Peer(name, version, seconds, "", int(apart.sum()), int(far.sum())))
    return found
