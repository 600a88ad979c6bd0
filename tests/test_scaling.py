"""Scales of NVFP4 and FP8 blocks at the edges, each against a formula in NumPy float32."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_oracle import FLT_MAX, e4m3

from nvfp4.numerics import scaling
from nvfp4.numerics.formats import E4M3, decode

f32 = np.float32
AMAX = st.floats(width=32, min_value=0, allow_nan=False, allow_infinity=False)


def blocks(values):
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, 1, -1)


def test_block_amax_ignores_nan_and_signs():
    nan, inf = float("nan"), float("inf")
    assert scaling.block_amax(blocks([1.0, -3.0, nan, -nan, 2.0])).item() == 3.0
    assert scaling.block_amax(blocks([nan, -nan, nan, nan])).item() == 0.0
    assert scaling.block_amax(blocks([nan, -inf, 5.0, 0.0])).item() == inf
    assert scaling.block_amax(blocks([-0.0, 0.0])).item() == 0.0
    assert scaling.block_amax(blocks([1e-45, -1e-44])).item() == f32(1e-44)


def test_block_amax_of_tiles():
    x = torch.arange(4 * 6, dtype=torch.float32).view(2, 2, 3, 2)
    assert torch.equal(scaling.block_amax(x), x.amax(dim=(1, 3)))
    assert scaling.tensor_amax(scaling.block_amax(x)).item() == 23
    assert scaling.tensor_amax(torch.zeros(0, 3)).item() == 0


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (0.0, 1.0),
        (float("inf"), 1.0),
        (2688.0, 1.0),
        (1e-36, FLT_MAX),  # 2688 / 1e-36 overflows
        (1e-45, FLT_MAX),
        (3.4028235e38, f32(2688) / f32(3.4028235e38)),
        (3.0, 896.0),
    ],
)
def test_tensor_encode_scale_at_its_edges(amax, expected):
    assert scaling.tensor_encode_scale(torch.tensor(amax)).item() == float(expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(amax=AMAX, part=st.floats(0, 1, width=32))
def test_every_nvfp4_scale_equals_its_formula_in_numpy(amax, part):
    amax = f32(amax)
    b = amax * f32(part)
    with np.errstate(all="ignore"):
        s = min(f32(2688) / amax, FLT_MAX) if amax > 0 else f32(1)
        new = e4m3(np.minimum(b * (s * f32(1 / 6)), FLT_MAX))
        old = e4m3(np.minimum(b / f32(6) * s, FLT_MAX))
        encode = np.minimum(f32(1) / (new.astype(f32) * (f32(1) / s)), FLT_MAX)
        decoded = new.astype(f32) * amax * f32(1 / 2688)
    tensor_scale = scaling.tensor_encode_scale(torch.tensor(amax))
    code = scaling.nvfp4_block_scale(torch.tensor([b]), tensor_scale, "current")
    assert tensor_scale.item() == s
    assert code.item() == new.view(np.uint8)
    legacy = scaling.nvfp4_block_scale(torch.tensor([b]), tensor_scale, "before_2_14")
    assert legacy.item() == old.view(np.uint8)
    value = decode(code, E4M3)
    assert scaling.nvfp4_encode_scale(value, tensor_scale).item() == encode
    assert scaling.nvfp4_decode_scale(value, torch.tensor(amax)).item() == decoded


def test_a_block_scale_is_never_nan_and_saturates_at_448():
    # A stale amax far below the data: other tools stored NaN bytes here.
    b = torch.tensor([1e4, 1e30, float("inf"), 448.0, 464.0, 465.0]) * 6
    code = scaling.nvfp4_block_scale(b, torch.tensor(1.0), "current")
    assert (code == 0x7E).all()
    assert (decode(code, E4M3) == 448).all()


def test_subnormal_scales_are_kept_and_smaller_ones_become_zero():
    b = torch.tensor([2.0**-9, 2.0**-10, 2.0**-10 * 1.01, 2.0**-11, 0.0]) * 6
    code = scaling.nvfp4_block_scale(b, torch.tensor(1.0), "before_2_14")
    assert code.tolist() == [1, 0, 1, 0, 0]


def test_zero_scale_gives_the_largest_encode_scale():
    encode = scaling.nvfp4_encode_scale(torch.tensor([0.0, 1.0]), torch.tensor(2.0))
    assert encode.tolist() == [float(FLT_MAX), 2.0]


def test_python_number_over_tensor_would_be_two_roundings():
    # Why scaling.py divides tensor by tensor: PyTorch's number / tensor is number * (1 / tensor).
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = (np.full(4096, 2688, f32) / amax.numpy()).astype(f32)
    np.testing.assert_array_equal(scaling.tensor_encode_scale(amax).numpy(), exact)
    assert (2688.0 * amax.reciprocal()).ne(torch.from_numpy(exact)).any()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(amax=AMAX)
def test_fp8_scales(amax):
    b = torch.tensor([f32(amax)])
    plain = scaling.fp8_encode_scale(b, 448.0, False, scaling.FLT_MAX)
    with np.errstate(all="ignore"):
        expected = f32(448) / f32(amax) if amax > 0 else f32(1)
    assert plain.item() == min(expected, FLT_MAX)
    pow2 = scaling.fp8_encode_scale(b, 448.0, True, scaling.FLT_MAX)
    assert pow2 <= plain < 2 * pow2.double()
    assert np.frexp(pow2.item())[0] == 0.5
    assert b.double() * pow2.double() <= 448
    assert scaling.fp8_decode_scale(pow2).item() == f32(1) / f32(pow2.item())


def test_fp8_scale_of_infinite_zero_and_tiny_blocks():
    b = torch.tensor([float("inf"), 0.0, 1e-40])
    bf16_max = scaling.BF16_MAX
    assert scaling.fp8_encode_scale(b, 448.0, False, bf16_max).tolist() == [1.0, 1.0, bf16_max]
    assert scaling.fp8_encode_scale(b, 448.0, True, bf16_max).tolist() == [1.0, 1.0, 2.0**127]
