"""Planted faults: a linear that computes something else than the plan says is always found."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nvfp4 import backends
from nvfp4.numerics.quantize import quantize
from nvfp4.precision import audit
from nvfp4.precision.apply import apply_precision
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.operands import GEMMS
from nvfp4.precision.policy import PrecisionConfig, Rule
from nvfp4.precision.presets import PRESETS

CONFIG = PrecisionConfig(
    default="nvfp4", rules=(Rule("bf16", match="0"), Rule("fp8_block", match="4"))
)


@pytest.fixture
def model():
    """BF16, NVFP4 and FP8 linears in a row, and their plan."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)]
    model = nn.Sequential(*layers).bfloat16()
    return model, apply_precision(model, CONFIG, echo=None)


def step(model, passes=1):
    """`passes` micro-batches of one step under recording; the log."""
    with audit.recording() as log:
        for index in range(passes):
            x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
            with use_context(StepContext(0, 0, 2 * index)):
                y = model(x)
            y.float().sum().backward()
    return log


def backend(monkeypatch, **functions):
    monkeypatch.setattr(backends, "_active", replace(backends.choose("reference"), **functions))


def test_what_ran_is_what_was_planned(model):
    model, plan = model
    log = step(model, passes=3)
    assert len(log.records) == 3 * 3 * 3
    assert audit.compare(log, plan, 3) == []
    assert audit.compare(log, plan) == []
    audit.check(log, plan, {"fprop": 3, "dgrad": 3, "wgrad": 3})
    seen = {(r.name, r.gemm): r for r in log.records}
    wgrad = seen["2", "wgrad"]
    assert wgrad.shape == (128, 128, 32) and wgrad.out_dtype == "fp32"
    assert wgrad.backend == "reference"
    assert wgrad.operands["grad_output"]["rounding"] == "stochastic"
    assert wgrad.operands["input"]["hadamard"] == 16
    assert seen["0", "fprop"].operands == {
        "input": {"format": "bf16"},
        "weight": {"format": "bf16"},
    }
    assert seen["4", "dgrad"].operands["weight"]["block"] == "128x128"


def test_nothing_is_collected_outside_of_recording(model):
    log = step(model[0])
    step(model[0])
    assert len(log.records) == 9


def test_silent_bf16_quantiser_is_caught(model, monkeypatch):
    """A quantiser that returns its input: the loss would look perfect."""
    model, plan = model
    backend(monkeypatch, quantize=lambda tensor, spec, random_bits=None: tensor)
    lines = audit.compare(step(model), plan, 1)
    assert (
        "2 fprop: input was bf16, the plan says e2m1 1x16 nearest" in lines
        and "4 wgrad: grad_output was bf16, the plan says e4m3 1x128 fp32-scales nearest" in lines
    )
    assert len(lines) == 12 and not any(line.startswith("0 ") for line in lines)


def test_bypassing_module_is_caught(model):
    """A module whose forward was replaced by plain F.linear never reports."""
    model, plan = model
    linear = model[2]
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias)
    with pytest.raises(audit.AuditError) as caught:
        audit.check(step(model), plan, 1)
    text = str(caught.value)
    assert "2 fprop: ran 0 times, expected 1; 2 dgrad: ran 0 times, expected 1; 2 wgrad:" in text
    assert "\n" not in text and caught.value.exit_code == 2


def test_missing_and_additional_calls_are_caught(model):
    model, plan = model
    model[2].weight.requires_grad_(False)
    assert audit.compare(step(model), plan) == ["2 wgrad: ran 0 times, expected at least 1"]
    model[2].weight.requires_grad_()
    assert audit.compare(step(model, passes=2), plan, {"fprop": 2, "dgrad": 2, "wgrad": 4}) == [
        f"{name} wgrad: ran 2 times, expected 4" for name in "024"
    ]


def test_other_policy_than_planned_is_caught(model):
    model, plan = model
    model[0].policy = PRESETS["nvfp4"]
    assert "0 fprop: input was e2m1 1x16 nearest, the plan says bf16" in audit.compare(
        step(model), plan
    )


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (dict(rounding="nearest"),
         "2 dgrad: grad_output was e2m1 1x16 nearest, the plan says e2m1 1x16 stochastic"),
        (dict(hadamard=0),
         "2 wgrad: input was e2m1 1x16 nearest, the plan says e2m1 1x16 nearest hadamard16"),
        (dict(signs="none"),
         "2 wgrad: input was e2m1 1x16 nearest hadamard16 none-signs, the plan says e2m1 1x16 neare"
         "st hadamard16"),
        (dict(scale_rule="before_2_14"),
         "2 fprop: input was e2m1 1x16 before_2_14 nearest, the plan says e2m1 1x16 nearest"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_quantiser_with_another_option_is_caught(model, monkeypatch, fault, line):
    model, plan = model

    def faulty(tensor, spec, random_bits=None):
        spec = replace(spec, **fault) if spec.format == "e2m1" else spec
        bits = random_bits if spec.rounding == "stochastic" else None
        return quantize(tensor, spec, random_bits=bits)

    backend(monkeypatch, quantize=faulty)
    assert line in audit.compare(step(model), plan)


@pytest.mark.parametrize("lie", ["codes", "scales", "amax", "type"])
def test_data_that_do_not_fit_their_spec_are_caught(model, monkeypatch, lie):
    """The spec alone proves nothing: bytes, scales and amax are looked at."""
    model, plan = model

    def faulty(tensor, spec, random_bits=None):
        q = quantize(tensor, spec, random_bits=random_bits)
        if spec.format != "e2m1":
            return q
        return {
            "codes": replace(q, codes=q.codes + 16),
            "scales": replace(q, block_scale=q.block_scale[:, :1]),
            "amax": replace(q, amax=None),
            "type": (q.codes, q.block_scale),
        }[lie]

    q = faulty(torch.randn(16, 32), PRESETS["nvfp4"].fprop.input)
    assert audit.observe(q)["format"].startswith("invalid")
    with audit.recording() as log:
        audit.record(
            "2", "fprop", {"input": q, "weight": q}, (1, 1, 1), torch.bfloat16, "reference"
        )
    assert "2 fprop: input was invalid" in "\n".join(audit.compare(log, plan))


def test_plain_operands_of_a_wrong_dtype_are_caught(model):
    """Such as an autocast would leave behind."""
    _, plan = model
    x = torch.randn(16, 16)
    with audit.recording() as log:
        audit.record(
            "0", "fprop", {"input": x, "weight": x.half()}, (1, 1, 1), x.dtype, "reference"
        )
    lines = [line for line in audit.compare(log, plan) if "ran" not in line]
    assert lines == [
        "0 fprop: input was fp32, the plan says bf16",
        "0 fprop: weight was float16, the plan says bf16",
    ]


def test_linears_outside_the_plan(model):
    """The output layer may run, but not quantised; other ranks' linears are not expected here."""
    model, plan = model
    smaller = replace(plan, rows=plan.rows[1:])
    log = step(model)
    assert audit.compare(log, smaller, 1) == []  # "0" ran in bf16
    assert set(audit.compare(log, plan, 1, names=["0", "4"])) == {
        f"2 {gemm}: quantised, but the plan does not have it" for gemm in GEMMS
    }
    rest = replace(log, records=[r for r in log.records if r.name != "2"])
    assert audit.compare(rest, plan, 1, names=["0", "4"]) == []


def test_weight_gradients_below_fp32_are_caught(model, monkeypatch):
    model, plan = model
    gemm = backends.choose("reference").gemm
    backend(
        monkeypatch, gemm=lambda a, b, out_dtype, **_: gemm(a, b, out_dtype=out_dtype).bfloat16()
    )
    lines = audit.compare(step(model), plan)
    assert "2 wgrad: result in bf16" in lines
    assert all(" wgrad: " in line for line in lines)
