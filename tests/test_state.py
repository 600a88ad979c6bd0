"""Delayed scaling: what is remembered, when it rolls, what writes to it."""

import pytest
import torch
from torch import nn

from nvfp4.errors import UserError
from nvfp4.numerics import scaling
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.plan import LinearInfo, PlanRow, PrecisionPlan
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, needed, use_state

K, N, T = 64, 32, 48


def policy(**changes):
    return policy_from_dict("p", {"base": "fp8_delayed", **changes}, PRESETS, "here")


def plan_of(one):
    row = PlanRow.of(LinearInfo("fc", "linear", -1, N, K), one, "test")
    return PrecisionPlan((row,))


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator).bfloat16() for s in ((T, K), (N, K), (T, N))]


def step(one, x, w, dy, state, grad=True):
    x, w = x.clone().requires_grad_(grad), nn.Parameter(w.clone())
    with use_state(state), use_context(StepContext(0, 0)), torch.set_grad_enabled(grad):
        y = linear(x, w, policy=one, name="fc", layer=0)
        if grad:
            y.backward(dy)
    return (y.detach(), x.grad, w.grad)


def amax(tensor):
    return tensor.float().abs().max().item()


def test_constant_tensors_are_as_with_current_scaling():
    """With the same tensors in every step the history says what the tensor says."""
    x, w, dy = tensors()
    state = MethodState(plan_of(policy()))
    current = step(PRESETS["fp8_current"], x, w, dy, None)
    for _ in range(3):  # the first has no history
        for one, other in zip(step(policy(), x, w, dy, state), current, strict=True):
            assert torch.equal(one, other)
        state.update()
    # Twice as large inputs with the old scale clip: their own scale would not.
    clipped = step(policy(), 2 * x, w, dy, state)[0]
    assert not torch.equal(clipped, step(PRESETS["fp8_current"], 2 * x, w, dy, None)[0])
    # With a margin of one bit there is room for them.
    roomy = policy(margin=1)
    state = MethodState(plan_of(roomy))
    step(roomy, x, w, dy, state)
    state.update()
    error = step(roomy, 2 * x, w, dy, state)[0] - 2 * current[0]
    assert error.abs().max() < 0.2 * (clipped - 2 * current[0]).abs().max()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_history_rolls_once_per_step(algorithm):
    one = policy(amax_history=3, amax_algorithm=algorithm)
    state = MethodState(plan_of(one))
    x, w, dy = tensors()
    sizes = [1.0, 4.0, 2.0, 0.5, 0.25, 0.125]
    for index, size in enumerate(sizes):
        for part in (0.5, 1.0):  # two micro-batches: the larger counts
            step(one, part * size * x, w, dy, state)
        state.update()
        saved = state.state_dict()
        assert list(saved) == ["fc.input", "fc.weight", "fc.grad_output"]
        used, *history = saved["fc.input"].tolist()
        expected = [size * amax(x) for size in reversed(sizes[: index + 1])][:3]
        assert history == expected + [0.0] * (3 - len(expected))
        assert used == (max(expected) if algorithm == "max" else expected[0])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_are_those_of_transformer_engines_rule(algorithm):
    """amax and equation (1) against scaling.delayed_scale, which keeps scales and another order."""
    one = policy(amax_history=3, amax_algorithm=algorithm, margin=1)
    state = MethodState(plan_of(one))
    history, scale = torch.zeros(3), torch.ones(())
    for amax_now in (2.0, 8.0, 0.0, 4.0, torch.inf, 1.0, 1.0, 0.0, 0.0, 0.0, 3.0):
        now = torch.tensor(amax_now)
        state.observe("fc", "input", now, training=True)
        state.update()
        scale = scaling.delayed_scale(history, now, scale, 448.0, 1, algorithm)
        history = scaling.roll_history(history, now)
        ours = scaling.fp8_encode_scale(state.amax[0], 448.0 / 2, False, scaling.FLT_MAX)
        assert ours == scale


def test_amax_of_zero_or_infinity_keeps_the_former():
    one = policy(amax_history=1)
    state = MethodState(plan_of(one))
    x, w, dy = tensors()
    for tensor in (x, 0 * x, torch.full_like(x, torch.inf)):
        step(one, tensor, w, dy, state)
        state.update()
        assert state.state_dict()["fc.input"][0] == amax(x)


def test_evaluation_reads_and_never_writes():
    x, w, dy = tensors()
    state = MethodState(plan_of(policy()))
    step(policy(), x, w, dy, state)
    state.update()
    before = {key: value.clone() for key, value in state.state_dict().items()}
    scaled = step(policy(), 4 * x, w, dy, state, grad=False)[0]
    assert not state.seen.any()
    assert not torch.equal(scaled, step(PRESETS["fp8_current"], 4 * x, w, dy, None, grad=False)[0])
    assert all(torch.equal(before[key], value) for key, value in state.state_dict().items())


def test_saved_and_resumed():
    x, w, dy = tensors()
    one, other = MethodState(plan_of(policy())), MethodState(plan_of(policy()))
    for seed in range(3):
        step(policy(), *tensors(seed), one)
        one.update()
    other.load_state_dict({key: value.clone() for key, value in one.state_dict().items()})
    for ours, theirs in zip(
        step(policy(), x, w, dy, one), step(policy(), x, w, dy, other), strict=True
    ):
        assert torch.equal(ours, theirs)
    one.update(), other.update()
    assert torch.equal(one.history, other.history) and torch.equal(one.amax, other.amax)
    # After a switch to BF16 forward only the gradients remain.
    switched = MethodState(plan_of(policy(fprop=None)))
    assert list(switched.rows) == ["fc.grad_output", "fc.weight", "fc.input"]
    switched.take(one)
    for key, value in switched.state_dict().items():
        assert torch.equal(value, one.state_dict()[key])


def test_errors_say_what_is_missing():
    x, w, dy = tensors()
    with pytest.raises(UserError, match="policy p takes scales from earlier steps but no MethodSt"):
        step(policy(), x, w, dy, None)
    with pytest.raises(UserError, match="the scale of input is delayed, but this MethodState"):
        step(policy(), x, w, dy, MethodState(plan_of(PRESETS["bf16"])))
    state = MethodState(plan_of(policy(amax_history=4)))
    with pytest.raises(UserError, match="method state: fc.input is missing, the plan needs a hist"):
        state.load_state_dict({})
    with pytest.raises(UserError, match=r"fc.input has shape \(3,\), the plan needs a histo"):
        state.load_state_dict({"fc.input": torch.zeros(3)})


def test_needed():
    assert needed(plan_of(policy())) and not needed(plan_of(PRESETS["fp8_current"]))
    MethodState(plan_of(PRESETS["bf16"])).update()  # nothing to do
