"""Convolution, norms, attention and activation, each against its formula."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from nvfp4.errors import UserError
from nvfp4.models.attention import CoreAttention, zigzag_positions
from nvfp4.models.mamba2 import causal_conv_silu, cuda_kernels
from nvfp4.models.mlp import squared_relu
from nvfp4.models.norm import GatedGroupRMSNorm, RMSNorm


class OneRank:
    """A process group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


def config(**fields):
    defaults = dict(layernorm_epsilon=1e-5, params_dtype=torch.float32, sequence_parallel=False)
    return SimpleNamespace(**defaults | fields)


@pytest.mark.parametrize("length", [1, 3, 4, 50])
def test_convolution_is_causal_and_the_last_tap_sees_the_present(length):
    x, weight, bias = torch.randn(length, 2, 6), torch.randn(6, 1, 4), torch.randn(6)
    expected = F.conv1d(x.permute(1, 2, 0), weight, bias, padding=3, groups=6)[..., :length]
    got = causal_conv_silu(x, weight, bias)
    torch.testing.assert_close(got, F.silu(expected).permute(2, 0, 1), rtol=1e-5, atol=1e-5)


def test_convolution_in_bf16_rounds_once():
    x, weight, bias = (torch.randn(s).bfloat16() for s in ((20, 2, 6), (6, 1, 4), (6,)))
    exact = causal_conv_silu(x.float(), weight.float(), bias.float())
    assert torch.equal(causal_conv_silu(x, weight, bias), exact.bfloat16())


def test_every_missing_cuda_kernel_has_a_reason():
    for name, kernel in cuda_kernels().items():
        assert callable(kernel) or "cannot be imported" in kernel, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype):
    norm = RMSNorm(config(params_dtype=dtype, sequence_parallel=True), 24)
    assert norm.weight.dtype == dtype and norm.weight.sequence_parallel is True
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 2, 24).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(norm(x).double(), exact, rtol=tolerance, atol=1e-7)


def test_gated_norm_gates_first_and_normalises_each_group():
    norm = GatedGroupRMSNorm(12, 3, 1e-5, torch.float32, OneRank())
    with torch.no_grad():
        norm.weight.normal_()
    x, z = torch.randn(5, 2, 12), torch.randn(5, 2, 12)
    gated = (x * z * torch.sigmoid(z)).view(5, 2, 3, 4)
    exact = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x, z), exact.view(5, 2, 12) * norm.weight)


def attention():
    return CoreAttention(
        SimpleNamespace(), 1, None, "self", pg_collection=SimpleNamespace(cp=OneRank())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_causal_softmax_with_shared_keys(dtype):
    q, k, v = (torch.randn(9, 2, heads, 8).to(dtype) for heads in (6, 2, 2))
    keys, values = (t.double().repeat_interleave(3, 2) for t in (k, v))
    scores = torch.einsum("ibhc,jbhc->bhij", q.double(), keys) / math.sqrt(8)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    exact = torch.einsum("bhij,jbhc->ibhc", weights, values).reshape(9, 2, 48)
    got = attention()(q, k, v)
    assert got.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


def test_attention_refuses_what_it_would_ignore():
    q = torch.randn(4, 1, 2, 8)
    for argument in ("attention_mask", "attention_bias", "packed_seq_params"):
        with pytest.raises(UserError, match="pass no mask, bias or packing"):
            attention()(q, q, q, **{argument: torch.ones(1)})


def test_zigzag_deals_two_chunks_to_every_rank():
    assert zigzag_positions(8, 2, torch.device("cpu")).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag_positions(6, 1, torch.device("cpu")).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_squared_relu():
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    assert squared_relu(x).tolist() == [0.0, 0.0, 0.25, 9.0]
