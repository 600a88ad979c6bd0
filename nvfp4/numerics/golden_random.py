"""What each array of a golden case about randomness should be: stochastic rounding, Philox, signs.

Every function yields one Check per array it knows.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nvfp4.numerics import formats, hadamard, philox, scaling
from nvfp4.numerics.golden_case import Case, Check
from nvfp4.numerics.golden_formats import known
from nvfp4.numerics.quantize import (
    QuantizedTensor,
    apply_encode_scale,
    decode_block_scale,
)
from nvfp4.numerics.spec import NVFP4


def signs_of(case: Case) -> str:
    return "none" if case.says("nosign nosigns", "sign signs") else "fixed"


def scaled_by(x: Tensor, q: QuantizedTensor) -> Tensor:
    """fl(x * enc) for a (rotated) matrix x: what was rounded to the codes of q. float32 (M, K)."""
    assert q.amax is not None, "NVFP4 has one"
    limit = scaling.second_level_range(q.spec)
    encode_scale = scaling.nvfp4_encode_scale(
        decode_block_scale(q), scaling.tensor_encode_scale(q.amax, limit)
    )
    tiles = x.float().unflatten(0, (-1, q.spec.block_shape[0])).unflatten(2, (-1, 16))
    return apply_encode_scale(tiles, encode_scale).reshape(q.shape)


def stochastic_checks(case: Case) -> Iterator[Check]:
    """x_scaled -> code_lo, code_hi, p_hi_ideal, p_hi_8bit, by trying all 256 random bytes.

    x_scaled is an input unless the case has x, or rht_xt_bf16 (rotated already), to make it from.
    """
    source, form = ("x", "row") if case.find("x") else ("rht_xt", "col")
    if case.find(source) is None:
        scaled = case.tensor("x_scaled")
    else:
        x = case.matrix(source)
        if form == "row" and "s_row" not in case.arrays and "s_col" in case.arrays:
            x, form = x.t(), "col"
        q = case.arithmetic.quantize(x, NVFP4)
        scaled = scaled_by(x, q)
        forms = {"x_scaled": scaled, f"s_{form}": q.block_scale, f"amax_{form}": q.amax}
        yield from known(case, forms)
    yield from known(case, _probabilities(case, scaled))


def _probabilities(case: Case, scaled: Tensor) -> dict[str, Tensor]:
    def encode(byte: int) -> Tensor:
        random_bits = torch.full_like(scaled, byte, dtype=torch.uint8)
        return formats.encode(scaled, formats.E2M1, random_bits)

    low = encode(0)
    above = low + (low & 7 < 7)  # the neighbour away from zero; none beyond 6
    trials = torch.stack([encode(byte) for byte in range(256)])
    if not ((trials == low) | (trials == above)).all():
        raise ValueError("stochastic rounding gave a code that is no neighbour of its value")
    value = scaled.double().abs().clamp(max=formats.E2M1.max_value)
    near, far = (formats.decode(code, formats.E2M1).double().abs() for code in (low, above))
    fraction = torch.where(far > near, (value - near) / (far - near), 0.0)
    moved = (trials != low).sum(0).double() / 256
    found = {"p_hi_ideal": fraction, "p_hi_8bit": moved}
    for name in found.keys() & case.arrays.keys():
        if case.arrays[name].dtype == np.float32:
            found[name] = found[name].float()
    return {"code_lo": low, "code_hi": torch.where(fraction > 0, above, low), **found}


def philox_checks(case: Case) -> Iterator[Check]:
    """table: rows [seed, subsequence, offset, n, r0..r3] with counter (offset + n, subsequence)."""
    table = case.arrays["table"].astype(np.uint64)
    seed, subsequence, offset, call = table[:, :4].T

    def halves(value: np.ndarray) -> list[Tensor]:
        parts = (value & np.uint64(0xFFFFFFFF), value >> np.uint64(32))
        return [torch.from_numpy(part.astype(np.int64)) for part in parts]

    counter = (*halves(offset + call), *halves(subsequence))
    drawn = philox.philox4x32_10(counter, tuple(halves(seed)))
    inputs = torch.from_numpy(table[:, :4].view(np.int64))
    yield case.check("table", torch.cat((inputs, torch.stack(drawn, dim=1)), dim=1))


def rotation_checks(case: Case) -> Iterator[Check]:
    """H = D H16 / 4, sign = the diagonal of D, mask = bits of its negative entries."""
    matrix = hadamard.matrix(signs_of(case)).float()
    mask = torch.tensor(hadamard.SIGN_MASK if signs_of(case) == "fixed" else 0)
    yield from known(case, {"H": matrix, "sign": matrix[:, 0] * 4, "mask": mask})
