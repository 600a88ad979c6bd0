"""The compiled kernels (cpu_kernels.cpp) as torch operators on plain tensors.

setup.py compiles them where there is a C++ compiler. The library has a plain C interface and knows
nothing of torch: it is opened with ctypes and gets pointers, in one record (`Job`).

A matrix is described as it lies in memory, (R, C) with blocks of br x bc values there; for a
transposed operand that is the untransposed tensor with blocks down its columns.
"""

import ctypes
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4.errors import MachineError, UserError
from nvfp4.numerics import philox
from nvfp4.numerics.formats import E4M3, UE5M3

FORMAT_NUMBERS = {"e2m1": 0, "e4m3": 1, "e5m2": 2}
SCALE_FORMATS = {"e4m3": (0, E4M3), "ue5m3": (1, UE5M3)}
SMALL = 1 << 15  # values below which a second thread costs more than it brings

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Job(ctypes.Structure):
    """The record `Job` of cpu_kernels.cpp, field by field."""

    _fields_ = [
        ("x", _POINTER), ("R", _INTEGER), ("C", _INTEGER), ("row_stride", _INTEGER),
        ("br", _INTEGER), ("bc", _INTEGER), ("x_is_bf16", _INTEGER), ("threads", _INTEGER),
        ("format", _INTEGER), ("scale_format", _INTEGER), ("scale_rule", _INTEGER),
        ("hadamard", _INTEGER), ("hadamard_down", _INTEGER), ("limit", _FLOAT),
        ("inverse_target", _FLOAT), ("signs", _POINTER), ("rotated", _POINTER),
        ("block_amax", _POINTER), ("amax", _POINTER), ("given_amax", _INTEGER),
        ("block_scale", _POINTER), ("encode_scale", _POINTER), ("codes", _POINTER),
        ("random_bytes", _POINTER), ("sample", _POINTER), ("position", _POINTER),
        ("key0", _INTEGER), ("key1", _INTEGER), ("tag", _INTEGER), ("feature_offset", _INTEGER),
        ("scale", _POINTER), ("scale_table", _POINTER), ("out", _POINTER),
    ]  # fmt: skip


def library_file() -> Path | None:
    """The compiled library beside this file, None if it was not compiled."""
    return next(iter(sorted(Path(__file__).parent.glob("_cpu_kernels*.so"))), None)


def _sources() -> str:
    """SHA-256 of the sources beside this file, as setup.py has it compiled into the library."""
    files = sorted(Path(__file__).parent.glob("cpu_*.[ch]*"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@lru_cache
def library() -> ctypes.CDLL:
    """The opened library. MachineError if there is none or it is not of these sources."""
    file = library_file()
    if file is None:
        raise MachineError(
            "backend cpu: its kernels were not compiled; "
            "install a C++ compiler (g++ or clang++) and nvfp4 again"
        )
    try:
        opened = ctypes.CDLL(str(file))
        opened.nvfp4_sources.restype = ctypes.c_char_p
        found = opened.nvfp4_sources().decode()
    except (OSError, AttributeError) as error:
        raise MachineError(f"backend cpu: {file.name} cannot be opened: {error}") from None
    if found != _sources():
        raise MachineError(
            f"backend cpu: {file.name} was compiled from other sources; install nvfp4 again"
        )
    opened.nvfp4_instructions.restype = ctypes.c_char_p
    for name in ("amax", "scales", "decode", "encode", "quantize", "philox"):
        getattr(opened, f"nvfp4_{name}").argtypes = [ctypes.POINTER(Job)]
    for name in ("encode", "quantize", "philox", "finite"):
        getattr(opened, f"nvfp4_{name}").restype = _INTEGER
    p, i = _POINTER, _INTEGER
    opened.nvfp4_finish.argtypes = [p, i, p, i, p, p, i, i]
    opened.nvfp4_promote.argtypes = [p, i, i, p, i, p, i, p, i]
    opened.nvfp4_finite.argtypes = [p, i, i]
    return opened


def instructions() -> str:
    """Which instruction set the kernels use here: AVX-512, AVX2 or baseline."""
    return library().nvfp4_instructions().decode()


def threads(values: int) -> int:
    """torch's thread count, or one where there is little to do."""
    return 1 if values < SMALL else torch.get_num_threads()


def _at(x: Tensor, *dtypes: torch.dtype) -> int:
    """Address of a contiguous CPU tensor of one of the dtypes, for code that trusts it."""
    if x.dtype not in dtypes or x.device.type != "cpu" or not x.is_contiguous():
        raise TypeError(
            f"backend cpu: a contiguous CPU tensor of {dtypes} is needed, "
            f"got {x.dtype} on {x.device} with strides {x.stride()}"
        )
    return x.data_ptr()


def _describe(x: Tensor, br: int, bc: int) -> dict[str, Any]:
    """Fields of Job that describe a matrix whose rows are contiguous, and its blocks."""
    rows, columns = x.shape
    if x.device.type != "cpu" or (columns > 1 and x.stride(1) != 1):
        raise TypeError(f"backend cpu: rows on the CPU are needed, got strides {x.stride()}")
    return {
        "x": x.data_ptr(), "R": rows, "C": columns, "row_stride": x.stride(0), "br": br, "bc": bc,
        "x_is_bf16": x.dtype == torch.bfloat16, "threads": threads(rows * columns),
    }  # fmt: skip


def _blocks(x: Tensor, br: int, bc: int) -> tuple[int, int]:
    return -(-x.shape[0] // br), -(-x.shape[1] // bc)


def _random(bits: Tensor | None, address: list[int], sample: Tensor | None,
            position: Tensor | None) -> dict[str, Any]:  # fmt: skip
    """Fields of Job for random bytes (R, C), or for the address of them."""
    if sample is None or position is None:
        return {} if bits is None else {"random_bytes": _at(bits, torch.uint8)}
    key0, key1, tag, feature = address
    return {
        "sample": _at(sample, torch.int64), "position": _at(position, torch.int64),
        "key0": key0, "key1": key1, "tag": tag, "feature_offset": feature,
    }  # fmt: skip


def _run(name: str, job: Job) -> None:
    if not getattr(library(), f"nvfp4_{name}")(job):
        raise UserError("random address: a sample or position does not fit in 32 bits")


def block_amax(
    x: Tensor, br: int, bc: int, hadamard: int, down: bool, signs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(blocks) float32 maxima of magnitudes, and the rotated matrix in BF16 (x's shape, or empty).

    hadamard: group size or 0; down: groups run down the columns; signs: (hadamard,) float64 signs
    over sqrt(hadamard).
    """
    found = torch.empty(_blocks(x, br, bc), dtype=torch.float32)
    rotated = torch.empty(x.shape if hadamard else (0, 0), dtype=torch.bfloat16)
    job = Job(
        **_describe(x, br, bc), hadamard=hadamard, hadamard_down=down,
        signs=None if signs is None else _at(signs, torch.float64), rotated=rotated.data_ptr(),
        block_amax=_at(found, torch.float32),
    )  # fmt: skip
    library().nvfp4_amax(job)
    return found, rotated


def encode(
    x: Tensor, encode_scale: Tensor, br: int, bc: int, format: str, bits: Tensor | None,
    address: list[int], sample: Tensor | None, position: Tensor | None,
) -> Tensor:  # fmt: skip
    """Element codes (R, C) of x times the encode scale of its block."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    job = Job(
        **_describe(x, br, bc), **_random(bits, address, sample, position),
        encode_scale=_at(encode_scale, torch.float32), format=FORMAT_NUMBERS[format],
        codes=codes.data_ptr(),
    )  # fmt: skip
    _run("encode", job)
    return codes


def quantize(
    x: Tensor, amax: Tensor | None, br: int, bc: int, hadamard: int, down: bool,
    signs: Tensor | None, format: str, scale_format: str, rule: int, limit: float, target: float,
    bits: Tensor | None, address: list[int], sample: Tensor | None, position: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(codes (R, C), block scale codes, amax ()) under one amax for the tensor.

    rule 0: scale = b * fl(S * fl(1/target)); rule 1: fl(b / 6) * S. S = limit / amax.
    """
    blocks = _blocks(x, br, bc)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(blocks, dtype=torch.uint8)
    work = torch.empty(2, *blocks, dtype=torch.float32)  # maxima and encode scales
    rotated = torch.empty(x.shape, dtype=torch.bfloat16) if hadamard else None
    found = torch.empty((), dtype=torch.float32) if amax is None else amax.clone()
    job = Job(
        **_describe(x, br, bc), **_random(bits, address, sample, position), hadamard=hadamard,
        hadamard_down=down, signs=None if signs is None else _at(signs, torch.float64),
        rotated=None if rotated is None else rotated.data_ptr(), block_amax=work.data_ptr(),
        encode_scale=work.data_ptr() + 4 * scales.numel(), amax=_at(found, torch.float32),
        given_amax=amax is not None, format=FORMAT_NUMBERS[format],
        scale_format=SCALE_FORMATS[scale_format][0], scale_rule=rule, limit=limit,
        inverse_target=1.0 / target, block_scale=scales.data_ptr(), codes=codes.data_ptr(),
    )  # fmt: skip
    _run("quantize", job)
    return codes, scales, found


@lru_cache
def _table(scale_format: str) -> Tensor:
    """Values of the 256 bytes as a scale; unused ones are 0."""
    values = SCALE_FORMATS[scale_format][1].values()[:256]
    return torch.tensor([*values, *[0.0] * (256 - len(values))], dtype=torch.float32)


def decode(
    codes: Tensor, scale: Tensor, br: int, bc: int, format: str, scale_format: str,
    amax: Tensor | None, limit: float,
) -> Tensor:  # fmt: skip
    """code * scale in float32 (R, C). scale: float32, or codes of scale_format (uint8), then with
    an amax times fl(. * amax) * fl(1/limit)."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    job = Job(
        **_describe(codes, br, bc), format=FORMAT_NUMBERS[format], codes=_at(codes, torch.uint8),
        out=out.data_ptr(),
    )  # fmt: skip
    if scale.dtype == torch.uint8:
        job.block_scale, job.scale_table = _at(scale, torch.uint8), _table(scale_format).data_ptr()
        if amax is not None:
            job.amax, job.inverse_target = _at(amax, torch.float32), 1.0 / limit
    else:
        job.scale = _at(scale, torch.float32)
    library().nvfp4_decode(job)
    return out


def finish(y: Tensor, factors: list[float], add: Tensor | None) -> None:
    """y (M, N) float32 times each factor in order, plus `add`, rounded every time; in place."""
    _finish(y, factors, add, y)


def finish_bf16(y: Tensor, factors: list[float], add: Tensor | None) -> Tensor:
    """As finish, and then rounded once more; y is left as it is."""
    out = torch.empty(y.shape, dtype=torch.bfloat16)
    _finish(y, factors, add, out)
    return out


def _finish(y: Tensor, factors: list[float], add: Tensor | None, out: Tensor) -> None:
    numbers = (ctypes.c_float * len(factors))(*factors)
    library().nvfp4_finish(
        _at(y, torch.float32), y.numel(), ctypes.addressof(numbers), len(factors),
        None if add is None else _at(add, torch.float32), out.data_ptr(),
        out.dtype == torch.bfloat16, threads(y.numel()),
    )  # fmt: skip


def promote(p: Tensor, scale_a: Tensor, scale_b: Tensor, exact: bool, total: Tensor) -> None:
    """total (M, N) += p scaled by scale_a (M,), any stride, and scale_b (N,), contiguous."""
    library().nvfp4_promote(
        _at(p, torch.float32), *p.shape, scale_a.data_ptr(), scale_a.stride(0),
        _at(scale_b, torch.float32), exact, _at(total, torch.float32), threads(p.numel()),
    )  # fmt: skip


def random_bytes(bits: philox.RandomBits) -> Tensor:
    """`RandomBits.tensor()` of a plain address (not of scales, not turned)."""
    out = torch.empty(bits.sample.shape[0], bits.num_features, dtype=torch.uint8)
    sample, position = bits.sample.contiguous(), bits.position.contiguous()
    address = _random(None, bits.numbers(), sample, position)
    _run("philox", Job(**_describe(out, 1, 1), **address, codes=out.data_ptr()))
    return out


def finite(x: Tensor) -> bool:
    """Whether a contiguous float32 or bfloat16 tensor holds neither NaN nor infinity."""
    at = _at(x, torch.float32, torch.bfloat16)
    return bool(library().nvfp4_finite(at, x.numel(), x.dtype == torch.bfloat16))
