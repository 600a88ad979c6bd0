"""Compiled CPU kernels: the bits of nvfp4.numerics at about the speed of memory.

A transposed operand comes as a view (`x.t()`) and is quantised where it lies, in blocks down the
columns of x; codes and scales of the result are views again. Products are FP32 matrix products of
exact operands, as in the definition; the matrix library sums in the same order whichever way its
operands lie.

Compiled is what touches every element: maxima, rotation by 4, 16 or 64, element codes, random
bytes, decoding, and scaling and rounding of products. Scales of NVFP4 under a tensor amax are
compiled too; those of the other formats are computed for each block by the definition itself.
`by_definition` says what is left to it altogether.
"""

from typing import Any

import torch
from torch import Tensor

from nvfp4.backends import cpu_library, reference
from nvfp4.backends import cpu_ops as compiled
from nvfp4.errors import MachineError, UserError
from nvfp4.numerics import gemm as products
from nvfp4.numerics import hadamard, scaling
from nvfp4.numerics import quantize as definition
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.quantize import QuantizedTensor
from nvfp4.numerics.spec import QuantSpec

_ROTATIONS = (4, 16, 64)  # sizes with an exact 1/sqrt(size)
_RULES = {"current": 0, "headroom": 0, "before_2_14": 1}
_NO_ADDRESS = [0, 0, 0, 0]


def unsupported_reason() -> str | None:
    """Why this backend cannot run here: not compiled, or tensors live on a GPU."""
    try:
        cpu_library.library()
    except MachineError as error:
        return str(error).removeprefix("backend cpu: ")
    return None


def description() -> str:
    """Which code that is here."""
    return f"compiled kernels, {cpu_library.instructions()}"


def by_definition(spec: QuantSpec) -> str:
    """What of a spec numerics.quantize computes element by element; empty if nothing."""
    if spec.scale_rule == "eden":
        return "eden"
    if spec.scale_rule.startswith("four_over_six"):
        return "choice of four or six"
    if spec.hadamard and spec.hadamard not in _ROTATIONS:
        return f"rotation by {spec.hadamard}"
    return ""


def _as_it_lies(x: Tensor) -> tuple[Tensor, bool]:
    """The matrix with contiguous rows, and whether that is the transpose of x."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return (x if x.stride(1) == 1 else x.contiguous()), False
    if x.stride(0) == 1:
        return x.t(), True
    return x.contiguous(), False


def _turn(x: Tensor, turned: bool) -> Tensor:
    return x.t() if turned else x


def quantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    random_bits: Tensor | RandomBits | None = None,
    signs: Tensor | None = None,
) -> QuantizedTensor:
    """numerics.quantize: same arguments, same errors, same bits."""
    definition.check_arguments(x, spec, amax, scale, random_bits, signs)
    if x.device.type != "cpu":
        raise UserError(f"backend cpu: quantize got a tensor on {x.device}; run.backend: reference")
    given: dict[str, Any] = {"amax": amax, "scale": scale, "signs": signs}
    if not x.numel() or spec.scale_rule == "eden":
        if isinstance(random_bits, RandomBits) and not random_bits.scales:
            random_bits = _bytes(random_bits)
        return definition.quantize(x.contiguous(), spec, random_bits=random_bits, **given)
    overflow = definition.INPUT_MAX[x.dtype]
    values, size = x if x.dtype != torch.float16 else x.float(), spec.hadamard
    if size and size not in _ROTATIONS:
        vector = spec.signs if signs is None else signs
        values, size = hadamard.rotate(values.contiguous(), vector, size), 0
    lies, turned = _as_it_lies(values)
    rows, columns = (1, lies.shape[1]) if spec.block == "tensor" else spec.block_shape
    block = (columns, rows) if turned and spec.block != "tensor" else (rows, columns)
    rotation = _rotation(spec, signs, size, turned)
    random = _random(random_bits, turned)
    if spec.second_level == "tensor" and spec.scale_rule in _RULES:
        given_amax = None if amax is None else amax.float().reshape(()).contiguous()
        codes, scales, amax = compiled.quantize(
            lies, given_amax, *block, *rotation, spec.format, spec.block_scale,
            _RULES[spec.scale_rule], scaling.second_level_range(spec), scaling.block_target(spec),
            *random,
        )  # fmt: skip
        return QuantizedTensor(_turn(codes, turned), _turn(scales, turned), amax, spec, signs)
    most, rotated = compiled.block_amax(lies, *block, *rotation)
    if spec.block == "tensor":
        most, block = most.max().reshape(1, 1), (lies.shape[0], lies.shape[1])
    blocks = definition.as_blocks(values.float(), spec) if "four_over" in spec.scale_rule else None
    block_scale, encode_scale, amax = definition.block_scales(
        _turn(most, turned).contiguous(), spec, amax, scale, overflow, blocks
    )
    encode_scale = _turn(encode_scale, turned).contiguous()
    source = rotated if size else lies
    codes = compiled.encode(source, encode_scale, *block, spec.format, *random)
    return QuantizedTensor(_turn(codes, turned), block_scale, amax, spec, signs)


def _rotation(
    spec: QuantSpec, signs: Tensor | None, size: int, turned: bool
) -> tuple[int, bool, Tensor | None]:
    """Arguments of the compiled rotation: size, direction, signs / sqrt(size)."""
    if not size:
        return 0, False, None
    vector = hadamard.sign_vector(size, spec.signs) if signs is None else signs.double()
    return size, turned, vector * size**-0.5


def _bytes(bits: RandomBits) -> Tensor:
    found = cpu_library.random_bytes(bits)
    return found.t() if bits.turned else found


def _random(
    bits: Tensor | RandomBits | None, turned: bool
) -> tuple[Tensor | None, list[int], Tensor | None, Tensor | None]:
    """Bytes as the matrix lies, or their address where its rows are the tokens of the address."""
    if bits is None:
        return None, _NO_ADDRESS, None, None
    if isinstance(bits, RandomBits) and bits.turned == turned:
        return None, bits.numbers(), bits.sample.contiguous(), bits.position.contiguous()
    plain = _bytes(bits) if isinstance(bits, RandomBits) else bits
    return _turn(plain, turned).contiguous(), _NO_ADDRESS, None, None


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """numerics.transpose without a copy: codes and scales are views."""
    if not q.spec.tiled:
        return definition.transpose(q)  # raises the error
    return QuantizedTensor(q.codes.t(), q.block_scale.t(), q.amax, q.spec)


def _times(q: QuantizedTensor, scale: Tensor, amax: Tensor | None = None) -> Tensor:
    """Element codes times the scale of their block, as float32.

    scale: float32 for each block, or their codes; those are times the tensor's amax over the range
    where that is given.
    """
    codes, turned = _as_it_lies(q.codes)
    rows, columns = (1, 1) if q.spec.block == "tensor" else q.spec.block_shape
    block = (columns, rows) if turned else (rows, columns)
    if scale.numel() == 1:
        block = (codes.shape[0], codes.shape[1])
    limit = 1.0 if amax is None else scaling.second_level_range(q.spec)
    found = compiled.decode(
        codes.contiguous(), _turn(scale, turned).contiguous(), *block, q.spec.format,
        q.spec.block_scale, amax, limit,
    )  # fmt: skip
    return _turn(found, turned)


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """numerics.dequantize: same values."""
    if not q.codes.numel():
        return definition.dequantize(q, dtype)
    if q.spec.second_level == "tensor":
        assert q.amax is not None
        return _times(q, q.block_scale, q.amax).to(dtype)
    return _times(q, definition.decode_scale(q)).to(dtype)


def _values(q: QuantizedTensor) -> Tensor:
    """The element codes as float32, without any scale."""
    return _times(q, torch.ones(1, 1))


def _operand(operand: products.Operand) -> Tensor:
    """What is multiplied: numerics.decode_operand, or a plain tensor in float32."""
    if isinstance(operand, Tensor):
        return operand.float()
    if operand.spec.block == "tensor":
        return _values(operand)
    if operand.spec.block_scale in cpu_library.SCALE_FORMATS:
        return _times(operand, operand.block_scale)
    return _times(operand, definition.decode_block_scale(operand))


def _promoted(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """numerics.gemm.fp8_blocks: per 128 of the contraction a product, scaled and added up."""
    codes_a, codes_b = _values(a), _values(b)
    scale_a, scale_b = (
        q.block_scale.repeat_interleave(q.spec.block_shape[0], 0)[: q.shape[0]] for q in (a, b)
    )
    exact = a.spec.block_scale == b.spec.block_scale == "pow2"
    total = torch.zeros(a.shape[0], b.shape[0])
    for index, start in enumerate(range(0, a.shape[1], 128)):
        part = slice(start, start + 128)
        p = (codes_a[:, part] @ codes_b[:, part].t()).float()  # less under an autocast
        columns = scale_b[:, index].contiguous()
        compiled.promote(p, scale_a[:, index], columns, exact, total)
    return total


def finite(x: Tensor) -> bool:
    """Whether x, not empty, holds neither NaN nor infinity."""
    lies = x if x.is_contiguous() else x.t() if x.dim() == 2 else x
    if not lies.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16):
        return reference.finite(x)
    return cpu_library.finite(lies)


def kernel(a: products.Operand, b: products.Operand, accumulate: str = "fp32") -> str:
    """As numerics.gemm.kernel, and what of the operands the definition has quantised."""
    left = [by_definition(q.spec) for q in (a, b) if isinstance(q, QuantizedTensor)]
    found = products.kernel(a, b, accumulate)
    names = dict.fromkeys(name for name in left if name)
    return f"{found}; by the definition: {', '.join(names)}" if names else found


def gemm(
    a: products.Operand,
    b: products.Operand,
    *,
    out_dtype: torch.dtype = torch.float32,
    alpha: str = "kernel",
    accumulate: str = "fp32",
    accumulator: Tensor | None = None,
) -> Tensor:
    """numerics.gemm: same arguments, same errors, same bits."""
    path = products.kernel(a, b, accumulate)
    plain = path in ("matmul fp32", "fp8_blocks") and a.shape[0] and b.shape[0] and a.shape[1]
    if not plain or out_dtype not in (torch.float32, torch.bfloat16):
        return products.gemm(
            a, b, out_dtype=out_dtype, alpha=alpha, accumulate=accumulate, accumulator=accumulator
        )
    products.check_operands(a, b, alpha, accumulate)
    if path == "fp8_blocks":
        assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
        y = _promoted(a, b)
    else:
        y = torch.mm(_operand(a), _operand(b).t()).float()  # less under an autocast
    factors = [factor.item() for factor in products.scalar_factors(a, b, alpha)]
    rows = [q for q in (a, b) if products.level(q) == "row"]
    if not rows:
        add = None if accumulator is None else accumulator.contiguous()
        if out_dtype == torch.bfloat16:
            return compiled.finish_bf16(y, factors, add)
        compiled.finish(y, factors, add)
        return y
    compiled.finish(y, factors, None)
    for q in rows:
        assert isinstance(q, QuantizedTensor) and q.amax is not None
        y = y.mul_(q.amax if q is a else q.amax.t())
    if accumulator is not None:
        y = y.add_(accumulator)
    return y.to(out_dtype)
