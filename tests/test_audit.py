"""Planted faults: a linear that computes something else than the plan says is always found."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nvfp4 import backends
from nvfp4.numerics import philox
from nvfp4.numerics.quantize import quantize
from nvfp4.precision import audit
from nvfp4.precision import call as bits_module
from nvfp4.precision import linear as linear_module
from nvfp4.precision.apply import apply_precision
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.fingerprints import fingerprint, repeated
from nvfp4.precision.operands import GEMMS
from nvfp4.precision.policy import PrecisionConfig, Rule
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, needed, use_state

RANDOM_BITS = bits_module.random_bits
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
    assert wgrad.backend == backends.choose().name
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
            "0", "fprop", {"input": x, "weight": x.half()}, (16, 128, 64), x.dtype, "reference"
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


# --- accumulation, backend, shape, autocast ---------------------------------------------------


def one_gemm(**changes):
    """The log of one BF16 fprop of linear "0", as planned but for the changes."""
    x = torch.randn(16, 64).bfloat16()
    call: Any = dict(name="0", gemm="fprop", operands={"input": x, "weight": x},
                     shape=(16, 128, 64), out_dtype=x.dtype, backend="reference")  # fmt: skip
    call |= changes
    with audit.recording() as log:
        audit.record(**call)
    return log


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, None),
        ({"accumulate": "sequential16"}, "accumulation was sequential16, the plan says fp32"),
        ({"backend": "fast"}, "ran on fast, not on reference"),
        ({"out_dtype": torch.float16}, "result in float16"),
        ({"shape": (16, 64, 64)}, None),  # a tensor-parallel shard of the 128 x 64 weight
        ({"shape": (16, 96, 64)}, "weight was 96 x 64, the plan says 128 x 64 or a shard of it"),
        ({"shape": (16, 64, 32)}, "weight was 64 x 32, the plan says 128 x 64 or a shard of it"),
    ],
)
def test_how_a_gemm_ran_is_compared(model, change, line):
    lines = audit.compare(one_gemm(**change), model[1], names=["0"], backend="reference")
    lines = [found for found in lines if ": ran 0 times" not in found]
    assert lines == ([f"0 fprop: {line}"] if line else [])


def test_an_autocast_around_a_gemm_is_caught(model, monkeypatch):
    """Without the linear's own protection, autocast would round the FP32 products to BF16."""
    model, plan = model
    with torch.autocast("cpu", torch.bfloat16):
        assert audit.compare(step(model), plan, 1) == []  # the linear keeps it out
    monkeypatch.setattr(linear_module, "_exact", lambda like: nullcontext())
    with torch.autocast("cpu", torch.bfloat16):
        lines = audit.compare(step(model), plan, 1)
    assert "2 fprop: an autocast to bf16 was on" in lines and len(lines) == 9


def test_an_autocast_that_rounds_the_input_of_fp32_linears_is_caught():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plan = apply_precision(model, "fp32", exclude=(), echo=None)
    model.insert(1, nn.Conv1d(4, 4, 1))  # autocast makes its result BF16
    plan = replace(plan, rows=tuple(row for row in plan.rows if row.name == "1"))
    for enabled, expected in ((False, []), (True, ["1: was given bf16, the plan computes in fp32; "
                                                   "is autocast on?"])):  # fmt: skip
        with audit.recording() as log, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(torch.randn(2, 4, 16, requires_grad=True)).sum().backward()
        assert audit.compare(log, plan) == expected


# --- random bits ------------------------------------------------------------------------------


def test_bits_of_several_micro_batches_are_all_different(model):
    model, plan = model
    log = step(model, passes=4)
    assert {bits.key for bits in log.bits} == {
        ("2", gemm, "grad_output") for gemm in ("dgrad", "wgrad")
    }
    assert sum(len(bits.rows) for bits in log.bits) == 4 * 2 * 32
    assert audit.compare(log, plan, 4) == []


def faulty_bits(monkeypatch, change):
    """Let the linear draw bits at another address, or others altogether."""
    draw = RANDOM_BITS
    for module in (bits_module, philox):  # for means and signs, and for elements
        monkeypatch.setattr(module, "random_bits", lambda **address: change(draw, address))


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (lambda draw, a: torch.zeros_like(draw(**a)),
         "2 dgrad: 62 rows of random bits of grad_output were used again by itself"),
        (lambda draw, a: draw(**{**a, "gemm": 1}),  # wgrad has dgrad's
         "2 dgrad: 64 rows of random bits of grad_output were used again by 2 wgrad grad_output"),
        (lambda draw, a: draw(**{**a, "sample": a["sample"] % 2}),  # both micro-batches alike
         "2 dgrad: 32 rows of random bits of grad_output were used again by itself"),
        (lambda draw, a: draw(**{**a, "position": a["position"] // 2}),  # two neighbours alike
         "2 dgrad: 32 rows of random bits of grad_output were used again by itself"),
    ],
    ids=["constant", "gemm", "micro-batch", "position"],
)  # fmt: skip
def test_the_same_random_bits_twice_are_caught(model, monkeypatch, fault, first):
    model, plan = model
    faulty_bits(monkeypatch, fault)
    lines = audit.compare(step(model, passes=2), plan, 2)
    assert first in lines, lines
    with pytest.raises(audit.AuditError, match="rows of random bits"):
        audit.check(step(model, passes=2), plan, 2)


def test_bits_of_a_weight_may_come_again_in_the_next_micro_batch():
    """It is rounded once per micro-batch, each time alike; two weights must not share them."""
    bits = torch.randint(256, (16, 32), dtype=torch.uint8)
    with audit.recording() as log:
        audit.record_bits("a", "fprop", "weight", bits)
        audit.record_bits("a", "fprop", "weight", bits)
    assert list(repeated(log.bits)) == []
    with audit.recording() as log:
        audit.record_bits("a", "fprop", "weight", bits)
        audit.record_bits("b", "fprop", "weight", bits)
        audit.record_bits("a", "fprop", "input", bits)
        audit.record_bits("a", "fprop", "input", bits)
    assert list(repeated(log.bits)) == [
        "a fprop: 16 rows of random bits of weight were used again by b fprop weight",
        "b fprop: 16 rows of random bits of weight were used again by a fprop input",
        "a fprop: 16 rows of random bits of input were used again by itself",
    ]
    recomputed = [bits for bits in log.bits if bits.role == "input"]
    assert list(repeated(recomputed, recomputed=True)) == []


def test_short_rows_are_compared_as_a_whole():
    """Rows of few bytes repeat by chance."""
    few = torch.zeros(64, 4, dtype=torch.uint8)
    with audit.recording() as log:
        audit.record_bits("a", "wgrad", "input", few)
        audit.record_bits("a", "wgrad", "grad_output", few + 1)
    assert list(repeated(log.bits)) == []
    with audit.recording() as log:
        audit.record_bits("a", "wgrad", "input", few)
        audit.record_bits("b", "wgrad", "input", few)
    assert len(list(repeated(log.bits))) == 1


def test_equal_fingerprints_mean_equal_rows():
    """Small differences anywhere in a row, and swapped words, give other fingerprints."""
    bits = torch.randint(256, (1, 40), dtype=torch.uint8)
    rows = [bits]
    for column in range(40):
        rows.append(bits.clone())
        rows[-1][0, column] ^= 1
    rows.append(bits.roll(8, 1))
    assert len(fingerprint(torch.cat(rows)).unique()) == 42
    assert fingerprint(bits).equal(fingerprint(torch.cat([bits, bits[:, :0]], 1)))


def test_stochastic_rounding_without_bits_is_caught(model, monkeypatch):
    """A backend that takes none from the linear and rounds by numbers of its own."""
    model, plan = model
    monkeypatch.setattr(audit, "record_bits", lambda *args: None)
    assert audit.compare(step(model), plan, 1) == [
        f"2 {gemm}: grad_output was rounded stochastically 1 times, random bits were drawn 0 times"
        for gemm in ("dgrad", "wgrad")
    ]


# --- every method -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "fp32"])
def test_every_preset_runs_as_planned(name):
    """Two micro-batches under the audit: formats, bits and all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128)).bfloat16()
    plan = apply_precision(model, name, exclude=(), echo=None)
    state = MethodState(plan) if needed(plan) else None
    with audit.recording() as log, use_state(state):
        for index in range(2):
            x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
            with use_context(StepContext(0, 1, 2 * index)):
                y = model(x)
            y.float().square().sum().backward()
    assert audit.compare(log, plan, 2, backend=backends.choose().name) == []
    random = any(plan.rows[0].policy.random(gemm) for gemm in GEMMS)
    drawn_bits = any(spec.random for spec in plan.rows[0].policy.specs)
    assert bool(log.bits) == drawn_bits and (random or not drawn_bits)


def test_wrong_accumulation_is_caught(model):
    model, plan = model
    model[2].policy = replace(model[2].policy, accumulate="sequential16")
    assert audit.compare(step(model), plan) == [
        f"2 {gemm}: accumulation was sequential16, the plan says fp32"
        for gemm in ("fprop", "dgrad", "wgrad")
    ]
