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
from nvfp4.models.rope import apply_rotary, rotary_angles


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


def attention(**arguments):
    groups = SimpleNamespace(cp=OneRank())
    return CoreAttention(SimpleNamespace(), 1, None, "self", pg_collection=groups, **arguments)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_is_that_of_transformers_llama(dtype, theta):
    """Equal bits in FP32, values and gradients; in BF16 the FP32 values rounded once."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    length, batch, heads, width = 40, 2, 3, 16
    x = torch.randn(length, batch, heads, width).to(dtype)
    upstream = torch.randn_like(x)
    ours = x.clone().requires_grad_()
    turned = apply_rotary(ours, rotary_angles(torch.arange(length), width, theta))
    turned.backward(upstream)

    config = LlamaConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(length)[None])
    theirs = x.float().requires_grad_()
    wide = theirs.permute(1, 2, 0, 3)
    expected = llama.apply_rotary_pos_emb(wide, wide, cos, sin)[0].permute(2, 0, 1, 3)
    expected.backward(upstream.float())
    assert turned.dtype == ours.grad.dtype == dtype
    assert torch.equal(turned, expected.to(dtype))
    assert torch.equal(ours.grad, theirs.grad.to(dtype))


def test_rope_knows_distances_only():
    q, k = torch.randn(2, 1, 1, 1, 32).expand(2, 9, 1, 1, 32)  # the same at every place
    scores = []
    for start in (0, 100):
        angles = rotary_angles(torch.arange(start, start + 9), 32, 10000.0)
        turned = (apply_rotary(t, angles).squeeze() for t in (q, k))
        scores.append(next(turned) @ next(turned).T)
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=2e-4)
    assert scores[0].diagonal().std() < 1e-5  # one distance, one product
    assert scores[0][0].std() > 0.1  # several distances


def test_attention_turns_queries_and_keys_and_nothing_else():
    q, k, v = (torch.randn(9, 2, heads, 8) for heads in (6, 2, 2))
    angles = rotary_angles(torch.arange(9), 8, 100.0)
    expected = attention()(apply_rotary(q, angles), apply_rotary(k, angles), v)
    assert torch.equal(attention(rope_theta=100.0)(q, k, v), expected)
    assert not torch.equal(attention()(q, k, v), expected)


class SecondOfTwo(OneRank):
    def size(self):
        return 2

    def rank(self):
        return 1


def test_rope_under_context_parallelism_counts_places_in_the_whole_sequence(monkeypatch):
    whole = [torch.randn(8, 1, 2, 4) for _ in range(3)]
    mine = zigzag_positions(8, 2, torch.device("cpu"))
    angles = rotary_angles(torch.arange(8), 4, 50.0)
    turned_key = apply_rotary(whole[1], angles)
    gathered = []

    def gather(piece, group):
        gathered.append(piece)
        return (turned_key if len(gathered) == 1 else whole[2])[mine.flatten()]

    monkeypatch.setattr("nvfp4.models.attention.gather_from_sequence_parallel_region", gather)
    part = attention(rope_theta=50.0)
    part.cp_group = SecondOfTwo()
    got = part(*(t[mine[1]] for t in whole))
    assert torch.equal(gathered[0], turned_key[mine[1]])
    torch.testing.assert_close(got, attention(rope_theta=50.0)(*whole)[mine[1]])


def test_zigzag_deals_two_chunks_to_every_rank():
    assert zigzag_positions(8, 2, torch.device("cpu")).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag_positions(6, 1, torch.device("cpu")).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_squared_relu():
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    assert squared_relu(x).tolist() == [0.0, 0.0, 0.25, 9.0]
