"""The three GEMMs of a linear against FP64 on decoded operands, the dtype contract, padding."""

import math
from dataclasses import replace

import pytest
import torch
from policy_oracle import LAYER, SEED, STEP, three_gemms
from torch import nn

from nvfp4 import backends
from nvfp4.errors import UserError
from nvfp4.numerics.quantize import quantize, transpose
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.plan import LinearInfo, PlanRow, PrecisionPlan
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, use_state

B, S, K, N = 3, 128, 256, 128  # batch, sequence, input and output features
HERE = StepContext(SEED, STEP)

# The paper's policy with weights in 1x16: dgrad quantises the transposed weight afresh.
ROW_WEIGHTS = policy_from_dict(
    "row_weights",
    {
        "base": "nvfp4",
        "fprop": {"weight": {"block": "1x16"}},
        "dgrad": {"weight": {"block": "1x16"}},
    },
    PRESETS,
    "here",
)
FORWARD_ONLY = policy_from_dict(
    "forward_only", {"base": "nvfp4", "dgrad": None, "wgrad": None}, PRESETS, "here"
)
BACKWARD_ONLY = policy_from_dict("backward_only", {"base": "nvfp4", "fprop": None}, PRESETS, "here")
ONE_SIDED = policy_from_dict(
    "one_sided", {"base": "nvfp4", "fprop": {"weight": None}}, PRESETS, "here"
)
POLICIES = [*PRESETS.values(), ROW_WEIGHTS, FORWARD_ONLY, BACKWARD_ONLY, ONE_SIDED]
NEAREST = policy_from_dict(
    "nearest",
    {
        "base": "nvfp4",
        "dgrad": {"grad_output": {"rounding": "nearest"}},
        "wgrad": {"grad_output": {"rounding": "nearest"}},
    },
    PRESETS,
    "here",
)
by_name = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


def numbers(*shape, seed=0, scale=1.0):
    """BF16 values with a wide spread between and within the rows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    return (values * torch.exp(torch.randn(*shape, generator=generator)) * scale).bfloat16()


def fresh_state(policy):
    """A MethodState for one linear of this policy."""
    row = PlanRow.of(LinearInfo("fc", "linear", -1, N, K), policy, "test")
    return MethodState(PrecisionPlan((row,)))


def run(policy, x, w, dy, *, bias=None, main_grad=False, context=HERE, **kwargs):
    """y, dx, dw (and db) of one forward and backward; x is (batch, sequence, features)."""
    x, w = x.clone().requires_grad_(), nn.Parameter(w.clone())
    if main_grad:
        w.main_grad = torch.zeros(w.shape)
    if bias is not None:
        bias = nn.Parameter(bias.clone())
    with use_context(context), use_state(fresh_state(policy)):
        y = linear(x, w, policy=policy, name="fc", layer=LAYER, bias=bias, **kwargs)
        y.backward(dy)
    dw = w.main_grad if main_grad else w.grad
    return (y.detach(), x.grad, dw) + (() if bias is None else (bias.grad,))


def oracle(policy, x, w, dy):
    """y, dx, dw in FP64; see policy_oracle."""
    return three_gemms(policy, x.reshape(-1, K), w, dy.reshape(-1, N), S)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_rounded_once(got, exact):
    """got is `exact` rounded to BF16, but for FP32 sums that fell on the other side of a tie.

    Sums that cancel to zero in FP32 leave 1e-17 in FP64; that is no difference.
    """
    once = exact.to(torch.bfloat16).reshape(got.shape)
    error = (got.float() - once.float()).abs()
    differ = error > 1e-9 * once.abs().max()
    assert differ.double().mean() <= 1e-3
    allowed = once.float().abs() * 2**-7 + 1e-6 * once.float().abs().max()
    assert (error <= allowed)[differ].all()


@by_name
def test_three_gemms_against_fp64(policy):
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1, scale=0.1), numbers(B, S, N, seed=2)
    y, dx, dw = run(policy, x, w, dy, main_grad=True)
    exact_y, exact_dx, exact_dw = oracle(policy, x, w, dy)
    assert y.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32
    assert_rounded_once(y, exact_y)
    assert_rounded_once(dx, exact_dx)
    assert (dw - exact_dw).abs().max() <= 1e-6 * exact_dw.abs().max()


@by_name
def test_three_gemms_in_fp32(policy):
    """compute_dtype fp32: no BF16 rounding of y and dx, so the match is that of FP32 sums."""
    policy = replace(policy, compute_dtype="fp32")
    x, w, dy = (
        t.float() for t in (numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2))
    )
    got, exact = run(policy, x, w, dy), oracle(policy, x, w, dy)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one.reshape(other.shape) - other).abs().max() <= 2e-6 * other.abs().max()


def test_bf16_policy_is_what_a_gpu_does():
    """Against BF16 F.linear of this PyTorch: BF16 operands, FP32 sums, one rounding."""
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2)
    y, dx, dw = run(PRESETS["bf16"], x, w, dy)
    ours = (y, dx, dw)
    x, w = x.requires_grad_(), nn.Parameter(w)
    y = nn.functional.linear(x, w)
    y.backward(dy)
    for one, other in zip(ours, (y, x.grad, w.grad), strict=True):
        assert one.dtype == other.dtype and relative(one, other) < 2e-4


def test_dgrad_uses_the_transposed_weight_of_forward(monkeypatch):
    """16x16 and 128x128 weights are quantised once; dgrad's operand is their exact transpose."""
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2)
    for name, weights in (("nvfp4", 1), ("fp8_block", 1), ("row_weights", 2)):
        policy = ROW_WEIGHTS if name == "row_weights" else PRESETS[name]
        seen, gemms = [], []

        def watched(tensor, spec, seen=seen, **kwargs):
            seen.append(tuple(tensor.shape))
            return quantize(tensor, spec, **kwargs)

        reference = backends.choose("reference")

        def product(a, b, gemms=gemms, backend=reference, **kwargs):
            gemms.append((a, b))
            return backend.gemm(a, b, **kwargs)

        monkeypatch.setattr(backends, "_active", replace(reference, quantize=watched, gemm=product))
        run(policy, x, w, dy)
        assert sum(shape in ((N, K), (K, N)) for shape in seen) == weights
        forward, backward = gemms[0][1], gemms[1][1]
        if weights == 1:
            expected = transpose(forward)
            assert torch.equal(backward.codes, expected.codes)
            assert torch.equal(backward.block_scale, expected.block_scale)


def test_weight_is_rounded_to_bf16_first():
    """FP32 tensors under a BF16 policy: the same numbers as if they were stored in BF16."""
    x, w, dy = numbers(B, S, K).float(), torch.randn(N, K), numbers(B, S, N, seed=2).float()
    x = x * 1.001  # no longer BF16 values
    for policy in (PRESETS["nvfp4"], PRESETS["bf16"]):
        wide = run(policy, x, w, dy)
        narrow = run(policy, x.bfloat16(), w.bfloat16(), dy.bfloat16(), main_grad=True)
        for one, other in zip(wide, narrow, strict=True):
            assert one.dtype == torch.float32
            assert torch.equal(one, other.float())


def test_main_grad_accumulates_in_fp32():
    """dw never passes through BF16: two micro-batches add up exactly as FP32 numbers."""
    policy, w = PRESETS["nvfp4"], nn.Parameter(numbers(N, K, seed=1))
    passes = [(numbers(B, S, K, seed=s), numbers(B, S, N, seed=10 + s)) for s in (0, 1)]
    alone = [
        run(policy, x, w.detach(), dy, main_grad=True, context=StepContext(SEED, STEP, B * i))[2]
        for i, (x, dy) in enumerate(passes)
    ]
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(N, K), False
    hooked = []
    w.register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.clone()))
    for i, (x, dy) in enumerate(passes):
        with use_context(StepContext(SEED, STEP, B * i)):
            y = linear(x.requires_grad_(), w, policy=policy, name="fc", layer=LAYER)
        y.backward(dy)
    assert torch.equal(w.main_grad, alone[0] + alone[1])
    assert not torch.equal(w.main_grad, w.main_grad.bfloat16().float())
    assert w.grad_added_to_main_grad is True
    # Megatron's hook needs a gradient to fire, and a shared weight needs it to be zero.
    assert len(hooked) == 2 and all(g.dtype == w.dtype and not g.any() for g in hooked)


def test_bias():
    """y = x w^T + b rounded once; db is the sum of the unquantised grad_output."""
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2)
    bias = numbers(N, seed=3)
    for policy in (PRESETS["bf16"], PRESETS["nvfp4"]):
        y, _, _, db = run(policy, x, w, dy, bias=bias)
        assert_rounded_once(y.view(-1, N), oracle(policy, x, w, dy)[0] + bias.double())
        assert torch.equal(db, dy.float().sum((0, 1)).bfloat16())


@pytest.mark.parametrize(("name", "bits"), [("fp8_block", 4), ("nvfp4", 6)])
def test_error_is_a_small_multiple_of_bf16s(name, bits):
    """`bits` fewer mantissa bits than BF16 make 2^bits times its error; twice that is allowed."""
    x, w = torch.randn(256, 256), torch.randn(256, 256)
    dy = torch.randn(256, 256)
    exact = (x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double())
    ours, bf16 = (run(PRESETS[policy], x, w, dy) for policy in (name, "bf16"))
    for one, plain, true in zip(ours, bf16, exact, strict=True):
        assert relative(one, true) <= 2 * 2**bits * relative(plain, true)
        assert relative(one, true) > 2 * relative(plain, true)  # and it is quantised at all


def test_stochastic_rounding_is_unbiased():
    """The mean of dx over steps approaches that of unrounded gradients, as 1/sqrt(steps)."""
    x, w, dy = numbers(1, S, K), numbers(N, K, seed=1), numbers(1, S, N, seed=2)
    exact = oracle(
        replace(PRESETS["nvfp4"], dgrad=replace(NEAREST.dgrad, grad_output=None)), x, w, dy
    )[1]
    draws = [run(PRESETS["nvfp4"], x, w, dy, context=StepContext(1, s))[1] for s in range(64)]
    draws = torch.stack(draws).double().view(64, -1, K)
    single = relative(draws[0], exact)
    assert 0.02 < single < 0.4
    assert relative(draws.mean(0), exact) < 0.2 * single  # 1/8 expected; 8-bit bias is below 1/256


@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_padding_is_neutral(tokens):
    """Any number of tokens equals the same tokens followed by zero rows, in all three GEMMs."""
    x, w, dy = numbers(tokens, K), numbers(N, K, seed=1), numbers(tokens, N, seed=2)
    more = 16 * math.ceil(tokens / 16) + 16 - tokens  # one whole block of zeros too many
    padded = [nn.functional.pad(t, (0, 0, 0, more)) for t in (x, dy)]
    y, dx, dw = run(NEAREST, x, w, dy, main_grad=True)
    long_y, long_dx, long_dw = run(NEAREST, padded[0], w, padded[1], main_grad=True)
    assert torch.equal(y, long_y[:tokens]) and not long_y[tokens:].any()
    assert torch.equal(dx, long_dx[:tokens]) and not long_dx[tokens:].any()
    assert (dw - long_dw).abs().max() <= 1e-6 * dw.abs().max()


@pytest.mark.parametrize("tokens", [1000, 1008])
def test_padding_keeps_the_gradient_right(tokens):
    """dw of a ragged last block is as close to the exact one as that of whole blocks."""
    x, w, dy = torch.randn(tokens, K), torch.randn(N, K), torch.randn(tokens, N)
    dw = run(PRESETS["nvfp4"], x, w, dy)[2]
    assert relative(dw, dy.double().t() @ x.double()) < 0.2


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda policy: policy.name)
def test_no_tokens_at_all(policy):
    y, dx, dw = run(policy, torch.zeros(0, 4, K), torch.randn(N, K), torch.zeros(0, 4, N))
    assert y.shape == (0, 4, N) and dx.shape == (0, 4, K) and not dw.any()


@pytest.mark.parametrize("shape", [(K,), (16, K), (2, 3, 16, K)])
def test_any_number_of_leading_dimensions(shape):
    x, w = numbers(*shape), numbers(N, K, seed=1)
    y = linear(x, w, policy=FORWARD_ONLY, name="fc", layer=0)
    assert y.shape == (*shape[:-1], N)
    flat = linear(x.view(-1, K), w, policy=FORWARD_ONLY, name="fc", layer=0)
    assert torch.equal(y.view(-1, N), flat)


def test_only_what_is_needed_is_computed_and_kept():
    """x once and not copied; the weight as codes; nothing for a frozen weight's wgrad."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    def saved(policy, x, w):
        kept.clear()
        with (
            use_context(StepContext(0, 0)),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ):
            linear(x, w, policy=policy, name="fc", layer=0)
        return list(kept)

    x, w = numbers(B * S, K).requires_grad_(), nn.Parameter(numbers(N, K, seed=1))
    tensors = saved(PRESETS["nvfp4"], x, w)
    assert sorted(t.dtype.itemsize * t.numel() for t in tensors) == [
        4, N * K // 256, N * K, 2 * B * S * K,
    ]  # fmt: skip
    assert any(t.data_ptr() == x.data_ptr() for t in tensors)
    tensors = saved(PRESETS["bf16"], x, w)
    assert {t.data_ptr() for t in tensors} == {x.data_ptr(), w.data_ptr()}
    assert saved(PRESETS["bf16"], x.detach(), w)[0].data_ptr() == x.data_ptr()
    frozen = saved(PRESETS["nvfp4"], x, w.detach())
    assert all(t.data_ptr() != x.data_ptr() for t in frozen)


def test_frozen_weight_and_input_without_gradient():
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2)
    _, dx, dw = run(PRESETS["nvfp4"], x, w, dy)
    with use_context(StepContext(SEED, STEP)):
        free = x.clone().requires_grad_()
        linear(free, w, policy=PRESETS["nvfp4"], name="fc", layer=LAYER).backward(dy)
        assert torch.equal(free.grad, dx)
    with use_context(StepContext(SEED, STEP)):
        parameter = nn.Parameter(w.clone())
        linear(x, parameter, policy=PRESETS["nvfp4"], name="fc", layer=LAYER).backward(dy)
        assert torch.equal(parameter.grad, dw)


def test_autocast_changes_nothing():
    x, w, dy = numbers(B, S, K), numbers(N, K, seed=1), numbers(B, S, N, seed=2)
    for policy in (PRESETS["nvfp4"], PRESETS["fp32"]):
        plain = run(policy, x, w, dy)
        with torch.autocast("cpu", torch.bfloat16):
            for one, other in zip(run(policy, x, w, dy), plain, strict=True):
                assert torch.equal(one, other)


def test_errors_name_the_linear():
    w, policy = numbers(N, K), PRESETS["nvfp4"]
    cases = [
        (numbers(16, K).half(), w, "linear 'fc': input is torch.float16; it must be bfloat16 or"),
        (numbers(16, K), w.double(), "linear 'fc': weight is torch.float64"),
        (numbers(16, 32), w, f"linear 'fc': input has 32 features, the weight takes {K}"),
        (
            numbers(16, K),
            numbers(40, K),
            "linear 'fc': out_features is 40, not a multiple of 16 as nvfp4",
        ),
    ]
    for x, weight, message in cases:
        with pytest.raises(UserError) as caught:
            linear(x, weight, policy=policy, name="fc", layer=0)
        assert message in str(caught.value) and "\n" not in str(caught.value)
