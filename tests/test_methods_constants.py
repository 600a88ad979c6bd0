"""Constants and groupings that no golden vector holds, each by a computation of its own."""

import ml_dtypes
import numpy as np
import pytest
import torch

from nvfp4.numerics import accumulate, hadamard, scaling
from nvfp4.numerics.formats import E2M1, E4M3, UE5M3, decode
from nvfp4.numerics.gemm import gemm
from nvfp4.numerics.quantize import dequantize, quantize
from nvfp4.numerics.spec import FP8_TENSOR, MXFP8, NVFP4, QuantSpec

FIXED_128 = 0xE00ECA_28C696F6_544FAA8C_6749D7E8


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_ms_eden_against_numpy():
    """Codes and scales from the published formulas in FP64, with blocks whose scale would be 0."""
    x = normal(1, 16, 256)
    x[8:] *= 1e-6
    signs = hadamard.sign_vector(128, "none")
    spec = QuantSpec(scale_rule="eden", hadamard=128, signs="none")
    byte = torch.randint(0, 256, (16, 16), generator=torch.Generator().manual_seed(2)).byte()
    q = quantize(x, spec, random_bits=byte)
    z = hadamard.rotate(x, signs, 128).double().numpy()
    v = 6 / (17 / 16 * 0.93)
    s = np.abs(z).max() / (255.99 * v)
    blocks = z.reshape(16, 16, 16)
    b = (np.abs(blocks).max(2) / v / s).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    b = b.astype(np.float64)
    assert (b[8:] == 0).all() and (b[:8] > 0).all()
    b[b == 0] = 1
    z = (blocks / (b * s)[..., None]).reshape(16, 256)
    codes = z.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    same = codes.view(np.uint8) == q.codes.numpy()
    assert same.mean() > 0.999
    value = codes.astype(np.float64)
    group = (z * z).reshape(16, 2, 128).sum(2), (z * value).reshape(16, 2, 128).sum(2)
    c = np.where(group[1] == 0, 1, group[0] / np.where(group[1] == 0, 1, group[1]))
    exact = b * c.repeat(8, 1)
    stored = decode(q.block_scale, E4M3).double().numpy()
    assert (np.abs(stored - exact) < exact / 8).all()  # one of both neighbours
    up = stored > exact * (1 + 1e-6)
    assert up.any() and not up.all()


def test_blackwell_sums_64_products_at_once():
    """1.5 units of 64's last place beside it: 2 if they are summed first, 1 if cut off after it."""
    a = torch.zeros(1, 64)
    a[0, 0], a[0, 40], a[0, 50] = 64.0, 3 * 2.0**-19, 3 * 2.0**-19
    assert accumulate.blackwell(a, torch.ones(1, 64)).item() == 64 + 2 * 2.0**-17


def test_split128_adds_matmuls_of_128():
    a, b = normal(3, 24, 512), normal(4, 40, 512)
    parts = [a[:, i : i + 128] @ b[:, i : i + 128].t() for i in range(0, 512, 128)]
    assert torch.equal(accumulate.split128(a, b), parts[0] + parts[1] + parts[2] + parts[3])


def test_the_largest_block_has_the_largest_scale():
    """b = A: headroom aims it at 96/17 under 448, UE5M3 at 6 under its largest code."""
    x = normal(5, 16, 256)
    block = int(x.abs().argmax()) // 16
    headroom = quantize(x, QuantSpec(scale_rule="headroom"))
    assert decode(headroom.block_scale, E4M3).flatten()[block] == 448
    spec = QuantSpec(block_scale="ue5m3")
    assert quantize(x, spec).block_scale.flatten()[block] == 254
    assert decode(torch.tensor([254], dtype=torch.uint8), UE5M3).item() == 114688
    assert scaling.block_target(spec) == 6
    limit = scaling.second_level_range(headroom.spec)
    enc = scaling.nvfp4_encode_scale(
        torch.tensor(448.0), scaling.tensor_encode_scale(x.abs().max(), limit)
    )
    assert (x.abs().max() * enc).item() == pytest.approx(96 / 17, rel=1e-6)


def test_three_quarters_of_an_element():
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([4.0, 7.9, 2.0, -1.0, 0.3])
    q = quantize(x, QuantSpec("e2m1", "1x32", "e8m0", "floor_3_4", "none"))
    assert q.block_scale.item() == 127
    assert decode(q.codes, E2M1)[0, :5].tolist() == [3.0, 6.0, 1.5, -1.0, 0.0]
    torch.testing.assert_close(dequantize(q)[0, :3], torch.tensor([4.0, 8.0, 2.0]))


def test_fixed_signs_never_change():
    signs = hadamard.sign_vector(128, "fixed")
    assert sum(1 << i for i, sign in enumerate(signs.tolist()) if sign < 0) == FIXED_128


@pytest.mark.parametrize("other", [None, FP8_TENSOR, NVFP4, MXFP8])
def test_products_without_elements(other):
    empty, none = torch.zeros(0, 256), torch.zeros(32, 0)
    full = normal(6, 32, 256)
    second, zero = (x if other is None else quantize(x, other) for x in (full, none))
    assert gemm(quantize(empty, FP8_TENSOR), second).shape == (0, 32)
    assert torch.equal(gemm(quantize(none, FP8_TENSOR), zero), torch.zeros(32, 32))
