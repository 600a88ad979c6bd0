"""The rotation: orthogonal, exact before its one BF16 rounding, and gone from wgrad."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_oracle import rotate, rotation

from nvfp4.errors import UserError
from nvfp4.numerics import hadamard
from nvfp4.numerics.gemm import gemm
from nvfp4.numerics.quantize import quantize
from nvfp4.numerics.spec import QuantSpec


@pytest.mark.parametrize("signs", ["fixed", "none"])
def test_matrix_is_orthogonal_and_is_sylvesters(signs):
    matrix = hadamard.matrix(signs)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    assert (matrix.abs() == 0.25).all()
    np.testing.assert_array_equal(matrix, rotation(0xD7E8 if signs == "fixed" else 0))


def test_fixed_signs():
    signs = (hadamard.matrix("fixed")[:, 0] * 4).int().tolist()
    assert signs == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert sum(1 << i for i, s in enumerate(signs) if s < 0) == hadamard.SIGN_MASK == 55272


def random_bf16(seed, shape, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randn(shape, generator=generator) * spread)).bfloat16()


@pytest.mark.parametrize("spread", [0, 2, 8])
def test_rotate_equals_exact_sums_rounded_once(spread):
    x = random_bf16(spread, (24, 32), spread)
    ours = hadamard.rotate(x)
    assert ours.dtype == torch.bfloat16
    np.testing.assert_array_equal(ours.float().numpy(), rotate(x.float().numpy()))
    matrix = hadamard.matrix().tolist()
    for row in range(4):
        group = [Fraction(v) for v in x[row, :16].tolist()]
        for j in range(16):
            exact = sum((v * Fraction(matrix[i][j]) for i, v in enumerate(group)), Fraction(0))
            # float(Fraction) is correctly rounded, so this is exact -> FP64 -> FP32 -> BF16.
            assert torch.tensor(float(exact)).float().bfloat16() == ours[row, j]


def test_input_dtype_does_not_matter_and_wrong_width_is_an_error():
    x = random_bf16(1, (4, 48), 1)
    assert torch.equal(hadamard.rotate(x), hadamard.rotate(x.float()))
    assert torch.equal(hadamard.rotate(x.t().contiguous().t()), hadamard.rotate(x))
    with pytest.raises(UserError, match=r"multiple of 16, got \(4, 40\)"):
        hadamard.rotate(x[:, :40])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 4), spread=st.sampled_from([0, 1, 3]))
def test_rotation_cancels_in_wgrad(seed, groups, spread):
    # dw = dy^T x with both rotated along the tokens equals the product without rotation, but for
    # the BF16 rounding of the two rotated operands: 2^-9 relative each, norms by Cauchy-Schwarz.
    tokens = 16 * groups
    x, dy = random_bf16(seed, (tokens, 32), spread), random_bf16(seed + 1, (tokens, 16), spread)
    rotated = gemm(hadamard.rotate(dy.t()), hadamard.rotate(x.t()))
    plain = gemm(dy.t(), x.t())
    bound = 2.1 * 2**-9 * torch.outer(dy.float().norm(dim=0), x.float().norm(dim=0)) + 1e-30
    assert ((rotated - plain).abs() <= bound).all()


def test_quantised_wgrad_with_rotation_approximates_the_plain_product():
    spec = QuantSpec(hadamard=16)
    x, dy = random_bf16(3, (64, 32), 0), random_bf16(4, (64, 48), 0)
    dw = gemm(quantize(dy.t(), spec), quantize(x.t(), spec))
    exact = dy.double().t() @ x.double()
    error = (dw - exact).norm() / exact.norm()
    assert error < 0.2  # two operands of FP4, about 10 % noise each
