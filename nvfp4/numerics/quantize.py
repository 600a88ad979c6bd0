"""QuantizedTensor, and the way there and back.

The contraction of the GEMM is always the last dimension. The columnwise copy of x is therefore
quantize(x.t(), spec).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4.errors import UserError
from nvfp4.numerics import eden, four_over_six, hadamard, mx, scaling
from nvfp4.numerics.formats import E4M3, FORMATS, UE5M3, decode, decode_e8m0, encode
from nvfp4.numerics.philox import RandomBits
from nvfp4.numerics.spec import QuantSpec

INPUT_MAX = {  # largest number of each input dtype
    torch.float32: scaling.FLT_MAX,
    torch.bfloat16: scaling.BF16_MAX,
    torch.float16: 65504.0,
}
_SCALE_FORMATS = {"e4m3": E4M3, "ue5m3": UE5M3}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A quantised matrix (M, K) as plain tensors. Blocks of (r, c) elements share a scale.

    codes        (M, K) uint8, one element code per byte
    block_scale  (ceil(M/r), ceil(K/c)): E4M3, UE5M3 or E8M0 codes (uint8), or float32 decode
                 scales for FP8
    amax         float32: () of the tensor, (M, 1) of its rows, (M, K/128) of outer blocks, as
                 spec.second_level says (a second-level scale is range/amax); None without one
    spec         how it was made; a rotated tensor (spec.hadamard) holds rotated values
    signs        (d,) +-1: the sign vector of the rotation where spec.signs is layer or step

    Invariants: codes were computed from exactly the stored scales (MS-EDEN: from the scales before
    their correction); no code of an FP4 tensor exceeds 15.
    """

    codes: Tensor
    block_scale: Tensor
    amax: Tensor | None
    spec: QuantSpec
    signs: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        rows, columns = self.codes.shape
        return rows, columns


def check_arguments(
    x: Tensor,
    spec: QuantSpec,
    amax: Tensor | None,
    scale: Tensor | None,
    random_bits: Tensor | RandomBits | None,
    signs: Tensor | None,
) -> None:
    """Whether the arguments of `quantize` go together; UserError where they do not."""
    if x.dim() != 2:
        raise UserError(
            f"quantize needs a matrix (flatten the leading dimensions), got {tuple(x.shape)}"
        )
    if x.dtype not in INPUT_MAX:
        raise UserError(f"quantize needs float32, bfloat16 or float16, got {x.dtype}")
    rows, columns = spec.multiples
    if x.shape[0] % rows or x.shape[1] % columns:
        kind = "NVFP4" if spec.block_scale == "e4m3" else f"{spec.format} with {spec.block} blocks"
        what = (
            f"both dimensions to be multiples of {rows}"
            if rows == columns
            else f"rows in multiples of {rows} and columns of {columns}"
        )
        raise UserError(f"{kind} needs {what}, got {tuple(x.shape)}")
    if amax is not None and spec.second_level == "none":
        raise UserError(
            f"quantize: amax does not go with block {spec.block}, it has no tensor scale"
        )
    if amax is not None:
        shapes = {"row": (x.shape[0], 1), "outer128": (x.shape[0], x.shape[1] // 128)}
        shape = shapes.get(spec.second_level, ())
        if tuple(amax.shape) != shape and not (shape == () and amax.numel() == 1):
            raise UserError(f"quantize: amax must have shape {shape}, got {tuple(amax.shape)}")
    if (scale is not None) != (spec.scale_rule == "delayed"):
        raise UserError("quantize: scale goes with scale_rule delayed, and delayed needs it")
    random_signs = spec.hadamard and spec.signs in ("layer", "step")
    if (signs is not None) != bool(random_signs):
        raise UserError(
            "quantize: signs go with a rotation by signs layer or step, which need them"
        )
    if spec.random is None and random_bits is not None:
        raise UserError("quantize: random_bits do not go with rounding nearest")
    if spec.random is not None:
        shape = x.shape if spec.random == "elements" else (x.shape[0], x.shape[1] // 16)
        if random_bits is None:
            what = "rounding stochastic" if spec.random == "elements" else "scale_rule eden"
            per = "element" if spec.random == "elements" else "block"
            raise UserError(f"quantize: {what} needs random_bits, one byte per {per}")
        dtype = random_bits.dtype if isinstance(random_bits, Tensor) else torch.uint8
        if tuple(random_bits.shape) != tuple(shape) or dtype != torch.uint8:
            raise UserError(
                f"quantize: random_bits must be uint8 {tuple(shape)}, "
                f"got {dtype} {tuple(random_bits.shape)}"
            )


def as_blocks(x: Tensor, spec: QuantSpec) -> Tensor:
    """(M, K) as (R, r, C, c), zero padded to whole blocks."""
    m, k = x.shape
    rows, columns = (max(m, 1), max(k, 1)) if spec.block == "tensor" else spec.block_shape
    if m % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -m % rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _matrix(blocks: Tensor, m: int, k: int) -> Tensor:
    """Inverse of `as_blocks`: (R, r, C, c) as (M, K), the padding cut away."""
    return blocks.flatten(2).flatten(0, 1)[:m, :k]


def _per_element(scale: Tensor) -> Tensor:
    """(R, C) scales, shaped to broadcast over (R, r, C, c)."""
    return scale[:, None, :, None]


def apply_encode_scale(blocks: Tensor, encode_scale: Tensor) -> Tensor:
    """fl(x * enc): one multiplication, one rounding. blocks (R, r, C, c), encode_scale (R, C)."""
    return blocks * _per_element(encode_scale)


def quantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    random_bits: Tensor | RandomBits | None = None,
    signs: Tensor | None = None,
) -> QuantizedTensor:
    """x as element codes and block scales along its last dimension; scaling.py has the formulas.

    x: (M, K) float32, bfloat16 or float16. With spec.hadamard it is rotated first.
    amax: float32 of the second level's shape; replaces the operand's own amax (which may be a
    maximum over ranks). scale: float32 (), the encode scale of delayed scaling.
    random_bits: uint8, (M, K) for rounding stochastic, (M, K/16) for the scales of MS-EDEN; as
    spec.random says; or their address. signs: (spec.hadamard,) +-1 for spec.signs layer and step.
    NaN is ignored in every amax and becomes +6 (FP4) or NaN (FP8), in MS-EDEN its whole rotated
    group NaN; a rotation spreads NaN and infinity over the group. The code of infinity is the
    largest element. An infinite amax of the second level makes all values under it infinite, or NaN
    where a code or scale is 0. An infinite block amax gives MX the scale 2^127, next to which usual
    values become 0, and FP8 with float scales the scale 1: infinity is then the largest element.
    UserError: wrong shape or dtype, or an argument that the spec needs or does not take.
    Source: Transformer Engine 2.20 quantize_transpose_nvfp4.cuh; blockwise FP8: recipe_common.cuh.
    """
    check_arguments(x, spec, amax, scale, random_bits, signs)
    if isinstance(random_bits, RandomBits):
        random_bits = random_bits.tensor()
    vector = spec.signs if signs is None else signs
    values = hadamard.rotate(x, vector, spec.hadamard) if spec.hadamard else x
    blocks = as_blocks(values.float(), spec)
    block_amax = scaling.block_amax(blocks)
    block_scale, encode_scale, amax = block_scales(
        block_amax, spec, amax, scale, INPUT_MAX[x.dtype], blocks
    )
    scaled = apply_encode_scale(blocks, encode_scale)
    bits = as_blocks(random_bits, spec) if spec.random == "elements" else None  # pyright: ignore
    codes = _matrix(encode(scaled, FORMATS[spec.format], bits), *x.shape)
    if spec.scale_rule == "eden":
        assert random_bits is not None
        factor = eden.correction(_matrix(scaled, *x.shape), codes, spec.hadamard)
        factor = factor.repeat_interleave(spec.hadamard // 16, 1)
        block_scale = eden.corrected_scale(decode(block_scale, E4M3), factor, random_bits)
    return QuantizedTensor(codes, block_scale, amax, spec, signs)


def block_scales(
    block_amax: Tensor,
    spec: QuantSpec,
    amax: Tensor | None,
    scale: Tensor | None,
    input_max: float,
    blocks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(block scales as stored, what elements are times, second-level amax) from the block maxima.

    block_amax: (R, C) float32; input_max: largest number of the input's dtype; blocks: the values
    (R, r, C, c), which the four_over_six rules look at; amax, scale: as in quantize.
    """
    if spec.second_level != "none":
        if amax is None:
            amax = scaling.second_level_amax(block_amax, spec.second_level)
        else:
            amax = amax.float().reshape(() if spec.second_level == "tensor" else amax.shape)
        return *_two_level_scales(blocks, block_amax, amax, spec), amax
    fmt = FORMATS[spec.format]
    if spec.block_scale == "e8m0":
        block_scale = mx.block_scale(block_amax, fmt, spec.scale_rule)
        return block_scale, mx.encode_scale(block_scale, spec.scale_rule), None
    overflow = scaling.FLT_MAX if spec.block == "tensor" else input_max
    encode_scale = scaling.fp8_encode_scale(
        block_amax, fmt.max_value, spec.block_scale == "pow2", overflow
    )
    if scale is not None:
        encode_scale = scale.float().reshape(1, 1)
    return scaling.fp8_decode_scale(encode_scale), encode_scale, None


def _two_level_scales(
    blocks: Tensor | None, block_amax: Tensor, amax: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor]:
    """(block scale codes, encode scales), both (R, C), under a second level with this amax."""
    limit, rule = scaling.second_level_range(spec), spec.scale_rule
    second = scaling.per_block(amax, spec.second_level)
    tensor_scale = scaling.tensor_encode_scale(second, limit)
    if rule.startswith("four_over_six"):
        assert blocks is not None
        block_scale = four_over_six.block_scale(
            blocks, block_amax, tensor_scale, second, limit, rule
        )
    elif rule == "eden":
        block_scale = eden.block_scale(block_amax, tensor_scale)
    elif rule == "headroom" or spec.block_scale == "ue5m3":
        block_scale = scaling.block_scale_to(
            block_amax, tensor_scale, scaling.block_target(spec), _SCALE_FORMATS[spec.block_scale]
        )
    else:
        block_scale = scaling.nvfp4_block_scale(block_amax, tensor_scale, rule)
    decoded = decode(block_scale, _SCALE_FORMATS[spec.block_scale])
    return block_scale, scaling.nvfp4_encode_scale(decoded, tensor_scale)


def decode_block_scale(q: QuantizedTensor) -> Tensor:
    """Block scales as float32 (R, C), exact; without the second level."""
    if q.spec.block_scale == "e8m0":
        return decode_e8m0(q.block_scale)
    if q.spec.block_scale in _SCALE_FORMATS:
        return decode(q.block_scale, _SCALE_FORMATS[q.spec.block_scale])
    return q.block_scale


def decode_operand(q: QuantizedTensor) -> Tensor:
    """code * block scale, without what scales whole rows: what a GEMM multiplies. (M, K) float32.

    For NVFP4 every value is exact, in BF16 too (6 significant bits, 2^-10 to 2688); so it is for
    MX (codes times a power of two) and for FP8 with one scale per tensor (the codes, its scale is
    left to the GEMM). For FP8 blocks with float32 scales it is rounded once.
    """
    if q.spec.block == "tensor":
        return decode(q.codes, FORMATS[q.spec.format])
    return _scaled_codes(q, decode_block_scale(q))


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """code * decode scale in float32, then one rounding to dtype. Returns (M, K).

    A rotated tensor stays rotated.
    """
    return _scaled_codes(q, decode_scale(q)).to(dtype)


def decode_scale(q: QuantizedTensor) -> Tensor:
    """What dequantize multiplies the codes of a block by: float32 (R, C).

    Two levels in the order of the dequantise kernel: fl(scale * A) * fl(1/range), range 2688 for
    NVFP4.
    """
    scale = decode_block_scale(q)
    if q.amax is not None:
        amax = scaling.per_block(q.amax, q.spec.second_level)
        return scaling.nvfp4_decode_scale(scale, amax, scaling.second_level_range(q.spec))
    if q.spec.block_scale == "e8m0":
        return scale * mx.operand_factor(q.spec.scale_rule)
    return scale


def _scaled_codes(q: QuantizedTensor, scale: Tensor) -> Tensor:
    blocks = as_blocks(decode(q.codes, FORMATS[q.spec.format]), q.spec)
    return _matrix(blocks.mul_(_per_element(scale)), *q.shape)


def transpose(q: QuantizedTensor) -> QuantizedTensor:
    """The quantised transpose, exactly; only square blocks of unrotated values have one."""
    if not q.spec.tiled:
        what = "the rotation runs" if q.spec.hadamard else f"blocks of {q.spec.block} run"
        raise UserError(
            f"transpose: {what} along one dimension; quantize the transposed tensor instead, or "
            "use square blocks or block tensor without hadamard"
        )
    return QuantizedTensor(q.codes.t().contiguous(), q.block_scale.t().contiguous(), q.amax, q.spec)
