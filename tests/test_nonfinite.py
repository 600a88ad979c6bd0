"""NaN and Inf in operands are counted and located, whatever the policy and the format."""

import pytest
import torch
from torch import nn

from nvfp4.precision.apply import apply_precision
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.nonfinite import watching
from nvfp4.precision.operands import policy_from_dict
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, use_state

WIDTH = 128
QUANTISED = [one for one in PRESETS.values() if one.specs]


class Poison(torch.autograd.Function):
    """Identity whose gradient gets one NaN and two infinities."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dy.view(-1)[3], dy.view(-1)[5], dy.view(-1)[7] = torch.nan, torch.inf, -torch.inf
        return dy


def lines(policy, *, x=None, weight=False, gradient=False):
    """What is seen in one pass through two linears, with faults planted in the second."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "down": nn.Linear(WIDTH, WIDTH)})
    plan = apply_precision(model, policy, echo=None)
    if weight:
        with torch.no_grad():
            model["down"].weight[2, 3] = torch.inf
    hidden = torch.randn(64, WIDTH, requires_grad=True)
    with use_state(MethodState(plan)), use_context(StepContext(0, 0)), watching() as seen:
        hidden = model["up"](hidden)
        if x is not None:
            hidden = hidden + x
        y = model["down"](hidden)
        (Poison.apply(y) if gradient else y).sum().backward()
    return seen.lines()


@pytest.mark.parametrize("policy", QUANTISED, ids=lambda policy: policy.name)
def test_located_for_every_preset(policy):
    fprop, dgrad = policy.quantised("fprop"), policy.quantised("dgrad")
    assert dgrad
    x = torch.zeros(64, WIDTH)
    x[5, 6] = x[7, 8] = torch.nan
    assert f"down {'fprop' if fprop else 'wgrad'} input: 2 NaN" in lines(policy, x=x)
    assert f"down {'fprop' if fprop else 'dgrad'} weight: 1 Inf" in lines(policy, weight=True)
    assert lines(policy, gradient=True)[0] == "down dgrad grad_output: 1 NaN, 2 Inf"
    assert lines(policy) == []


def test_only_quantised_gemms_are_watched():
    """BF16 hands a NaN on; and what fprop leaves out, wgrad looks at."""
    x = torch.full((64, WIDTH), torch.nan)
    assert lines(PRESETS["bf16"], x=x) == []
    only = policy_from_dict("only", {"base": "nvfp4", "fprop": None, "dgrad": None}, PRESETS, "")
    assert lines(only, x=x)[-1] == f"down wgrad input: {64 * WIDTH} NaN"
    assert lines(only, gradient=True)[0] == "down wgrad grad_output: 1 NaN, 2 Inf"


def test_large_numbers_are_finite():
    """3e38 + 3e38 overflows; neither of them does."""
    assert lines(PRESETS["nvfp4"], x=torch.full((64, WIDTH), 3e38)) == []


def test_without_a_watcher_a_warning_says_it():
    from nvfp4.precision.apply import apply_precision
    from nvfp4.precision.context import StepContext, use_context

    model = torch.nn.Linear(128, 128)
    apply_precision(model, "nvfp4", echo=None)
    x = torch.ones(16, 128)
    x[3, 3] = float("nan")
    with (
        use_context(StepContext(seed=0, step=0)),
        pytest.warns(RuntimeWarning, match="fprop input holds NaN or infinity"),
    ):
        model(x)
