"""The error of every GEMM against the product of the unquantised operands."""

import json
import math

import pytest
import torch
from engine_runs import rows, small

from nvfp4.engine import gemm_error
from nvfp4.engine.parallel import World
from nvfp4.engine.train import train
from nvfp4.numerics.quantize import dequantize, quantize
from nvfp4.numerics.spec import NVFP4, NVFP4_2D
from nvfp4.precision import collect
from nvfp4.precision.collect import Sums
from nvfp4.precision.context import StepContext, use_context
from nvfp4.precision.linear import linear
from nvfp4.precision.policy import LinearInfo, PrecisionConfig, resolve
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.state import MethodState, needed, use_state


def tensors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_linear(policy: str, calls: int = 1) -> dict[str, torch.Tensor]:
    """Forward and backward of one linear; all results and operands."""
    weight = tensors(48, 32, seed=1).requires_grad_()
    for call in range(calls):
        x = tensors(1, 64, 32, seed=2 + call).requires_grad_()
        dy = tensors(1, 64, 48, seed=50 + call)
        weight.grad = None
        with use_context(StepContext(seed=1, step=1)):
            y = linear(x, weight, policy=PRESETS[policy], name="one", layer=0)
        y.backward(dy)
    assert weight.grad is not None and x.grad is not None
    return {"x": x[0], "w": weight, "dy": dy[0], "y": y[0], "dx": x.grad[0], "dw": weight.grad}


def by_gemm(errors: collect.GemmErrors) -> dict[str, dict]:
    return {row["gemm"]: row for row in errors.summary()["linears"]}


@pytest.mark.parametrize("policy", ["bf16", "fp8_block", "nvfp4"])
def test_errors_are_those_of_the_executed_gemms(policy):
    with collect.observing() as errors:
        t = run_linear(policy)
    x, w, dy = (t[key].detach().double() for key in ("x", "w", "dy"))
    expected = {"fprop": (t["y"], x @ w.t()), "dgrad": (t["dx"], dy @ w)}
    found = by_gemm(errors)
    for gemm, (got, exact) in expected.items():
        error = ((got.detach().double() - exact).norm() / exact.norm()).item()
        assert found[gemm]["relative_error"] == pytest.approx(error, rel=1e-4)
        assert found[gemm]["quantised"] == (policy != "bf16")
    # dw comes back in BF16 here, but was FP32 when it was observed
    error = ((t["dw"].double() - dy.t() @ x).norm() / (dy.t() @ x).norm()).item()
    assert found["wgrad"]["relative_error"] == pytest.approx(error, abs=3e-3)
    assert all(row["calls"] == 1 for row in found.values())


def test_the_ordering_of_formats():
    size = {}
    for policy in ("fp32", "bf16", "fp8_block", "nvfp4"):
        with collect.observing() as errors:
            run_linear(policy)
        size[policy] = [row["relative_error"] for row in by_gemm(errors).values()]
    for low, high in (("fp32", "bf16"), ("fp8_block", "nvfp4")):
        assert all(a < b for a, b in zip(size[low][:2], size[high][:2], strict=True))
    assert max(size["fp32"]) < 1e-5 and 0.05 < min(size["nvfp4"]) < 0.3


def test_sqnr_of_operands_and_none_where_they_are_rotated():
    with collect.observing() as errors:
        t = run_linear("nvfp4")
    found = by_gemm(errors)
    for role, spec, tensor in (("input", NVFP4, t["x"]), ("weight", NVFP4_2D, t["w"])):
        plain = tensor.detach().float()
        noise = (dequantize(quantize(plain.bfloat16(), spec)) - plain).norm()
        expected = 20 * math.log10(plain.norm() / noise)
        assert found["fprop"]["sqnr_db"][role] == pytest.approx(expected, rel=1e-5)
    assert list(found["dgrad"]["sqnr_db"]) == ["grad_output", "weight"]
    assert found["wgrad"]["sqnr_db"] == {}  # both rotated: their gain shows in the GEMM


def test_calls_add_up_as_norms():
    with collect.observing() as errors:
        run_linear("nvfp4", calls=2)
    with collect.observing() as single:
        run_linear("nvfp4")
    whole, first = errors.sums["one", "fprop"], single.sums["one", "fprop"]
    assert whole.calls == 2 and (whole.values > first.values).all()
    single.add(("one", "fprop"), first)
    assert first.calls == 2


def test_nobody_observes_by_default_and_nothing_changes():
    assert not collect.active()
    plain = run_linear("nvfp4")
    with collect.observing():
        assert collect.active()
        observed = run_linear("nvfp4")
    assert all(torch.equal(plain[key], observed[key]) for key in plain)


def test_a_product_of_zeros_has_no_error():
    zeros = torch.zeros(16, 16)
    with collect.observing() as errors:
        for gemm in ("fprop", "dgrad"):
            collect.observe("z", gemm, operands=(zeros, zeros), originals=(zeros, zeros), y=zeros)
    summary = errors.summary()
    assert [row["relative_error"] for row in summary["linears"]] == [None, None]
    assert summary["mean"] == dict.fromkeys(
        ("fprop", "dgrad", "wgrad"), {"quantised": None, "all": None}
    )
    json.dumps(summary, allow_nan=False)


def test_sums_of_all_ranks_are_added(monkeypatch):
    with collect.observing() as errors:
        run_linear("nvfp4")
    with collect.observing() as other:
        run_linear("nvfp4", calls=2)
        other.add(("elsewhere", "fprop"), Sums(torch.ones(6, dtype=torch.float64), 1))

    def gather(into, mine):
        into[:] = [mine, other]

    monkeypatch.setattr(gemm_error.dist, "all_gather_object", gather)
    world = World(rank=0, size=2, device=torch.device("cpu"), dp_rank=0, dp_size=2, owned=False)
    total = gemm_error._over_ranks(errors, world)
    assert total.sums["one", "wgrad"].calls == 3 and total.sums["elsewhere", "fprop"].calls == 1


def test_the_last_step_of_a_run_is_observed_and_the_run_stays_the_same(tmp_path):
    keys = ["precision.default=nvfp4", "precision.num_layers_at_end_in_bf16=1", "train.steps=2",
            "schedule.warmup_steps=1"]  # fmt: skip
    train(small(tmp_path / "plain", *keys))
    train(small(tmp_path / "seen", *keys, "metrics.gemm_error=last"))
    assert rows(tmp_path / "plain") == rows(tmp_path / "seen")
    assert not (tmp_path / "plain" / "gemm_error.json").exists()
    seen = json.loads((tmp_path / "seen" / "gemm_error.json").read_text())
    plan = small(tmp_path / "seen", *keys).plan
    assert seen["step"] == 2
    assert {(row["linear"], row["gemm"]) for row in seen["linears"]} == {
        (name, gemm)
        for name in [*(row.name for row in plan.rows), "output_layer"]
        for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert {row["linear"] for row in seen["linears"] if row["quantised"]} == {
        row.name for row in plan.rows if row.policy.specs
    }
    assert all(row["calls"] == 2 for row in seen["linears"])
    for gemm in ("fprop", "dgrad", "wgrad"):
        mean = seen["mean"][gemm]
        assert 0.01 < mean["all"] < mean["quantised"] < 0.5


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_stays_near_the_exact_product(policy):
    """A rotation that does not cancel, or a split that is not put back, would show as 100 %."""
    weight, dy = tensors(128, 128, seed=1).requires_grad_(), tensors(1, 128, 128, seed=3)
    x = tensors(1, 128, 128, seed=2).requires_grad_()
    plan = resolve(
        [LinearInfo("one", "mlp.up", 0, 128, 128)], PrecisionConfig(default=policy)
    )  # fmt: skip
    state = MethodState(plan) if needed(plan) else None
    with collect.observing() as errors, use_state(state):
        with use_context(StepContext(seed=1, step=1)):
            y = linear(x, weight, policy=plan.rows[0].policy, name="one", layer=0)
        y.backward(dy)
    found = by_gemm(errors)
    assert list(found) == ["fprop", "dgrad", "wgrad"]
    assert max(row["relative_error"] for row in found.values()) < 0.3
    assert all(decibel > 10 for row in found.values() for decibel in row["sqnr_db"].values())
