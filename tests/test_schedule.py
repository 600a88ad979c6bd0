"""precision.schedule: when a switch begins, what it changes, what it says."""

from itertools import pairwise

import pytest

from nvfp4.config import RecipeError, load_recipe
from nvfp4.config_check import report
from nvfp4.errors import UserError
from nvfp4.precision.operands import GEMMS
from nvfp4.precision.plan import describe
from nvfp4.precision.policy import PrecisionConfig
from nvfp4.precision.presets import PRESETS
from nvfp4.precision.schedule import Switch, first_step, switched_policy

ONE_D = "precision.policies={one_d: {base: nvfp4, fprop: {weight: {block: 1x16}}}}"


def recipe(schedule: str, *more: str):
    """tiny_nvfp4 (12 blocks, the last in BF16; 120 steps of 2048 tokens) with a schedule."""
    return load_recipe("tiny_nvfp4", [f"precision.schedule={schedule}", ONE_D, *more])


@pytest.mark.parametrize(
    ("at", "step"),
    [
        (0.82, 83),  # 82 of 100 steps are over
        (0.28, 29),  # 0.28 x 100 is above 28 in binary; the decimal counts
        (0.005, 2),
        ({"step": 50}, 50),
        ({"step": 100}, 100),
        ({"tokens": 500}, 6),  # five steps of 100 tokens are over when step 6 begins
        ({"tokens": 501}, 7),
        ({"tokens": 9.9e3}, 100),
    ],
)
def test_the_first_step_that_begins_at_or_after_the_point(at, step):
    assert first_step(at, "here", steps=100, tokens_per_step=100) == step


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (1.2, "here is 1.2; write one of: a fraction of the run such as 0.82, {tokens: N}, {step"),
        (1, "here is 1; write"),
        (True, "here is True; write"),
        ("half", "here is 'half'; write"),
        ({"steps": 3}, "here is {'steps': 3}; write"),
        ({"step": 3, "tokens": 4}, "; write one of"),
        ({"step": 2.5}, "here.step is 2.5; it must be a whole number"),
        ({"tokens": "many"}, "here.tokens is 'many'; it must be a whole number"),
        ({"tokens": 1e99}, "below 2**63"),
        ({"step": 1}, "the start of the run; choose step 2 to 100"),
        ({"tokens": 0}, "the start of the run"),
        ({"step": 101}, "but the run has 100 steps (10,000 tokens); choose step 2 to 100"),
        ({"tokens": 10_000}, "the first step to begin then is 101, but the run has 100 steps"),
        (0.999, "the first step to begin then is 101"),
    ],
)  # fmt: skip
def test_points_that_no_step_has(at, message):
    with pytest.raises(UserError) as caught:
        first_step(at, "here", steps=100, tokens_per_step=100)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_switch_changes_the_named_gemms_of_quantised_linears_and_nothing_else():
    run = recipe("[{at: 0.75, gemms: [fprop, wgrad], to: bf16}]")
    (switch,) = run.switches
    assert (switch.step, switch.tokens) == (91, 90 * 2048)
    assert switch.text == "fprop, wgrad to bf16 in 20 of 24 linears"
    for old, new in zip(run.plan.rows, switch.plan.rows, strict=True):
        if old.policy.name == "bf16":  # the BF16 blocks
            assert new == old and new.name not in switch.changed
        else:
            assert new.policy.name == "nvfp4+fprop,wgrad:bf16" and new.name in switch.changed
            assert not any(new.policy.operands("fprop").values())
            assert not any(new.policy.operands("wgrad").values())
            assert new.policy.dgrad == PRESETS["nvfp4"].dgrad
            assert new.reason == "default; schedule[0] from step 91"
    assert [run.plan_at(step) for step in (1, 90, 91, 120)] == [
        run.plan, run.plan, switch.plan, switch.plan,
    ]  # fmt: skip
    assert run.plans == (run.plan, switch.plan)


def test_backward_leaves_fp4_and_weights_go_from_tiles_to_rows():
    run = recipe(
        "[{at: 0.5, gemms: [dgrad, wgrad], to: bf16}, {at: 0.5, gemms: [fprop], to: one_d}]"
    )
    (switch,) = run.switches
    assert switch.text == (
        "dgrad, wgrad to bf16 in 20 of 24 linears; fprop to one_d in 20 of 24 linears"
    )
    policy = switch.plan.policy_of(switch.changed[0])
    assert policy.fprop.weight and policy.fprop.weight.block == "1x16"
    assert policy.fprop.input == PRESETS["nvfp4"].fprop.input
    assert not any(policy.operands("dgrad").values())


def test_switches_add_up_in_order_of_their_steps_and_select_as_rules_do():
    run = recipe(
        "[{at: {step: 100}, gemms: [fprop], to: bf16},"
        " {at: {step: 50}, gemms: [dgrad], to: fp8_block, kind: 'mlp.*', blocks: '0..4'},"
        " {at: {step: 50}, gemms: [dgrad], to: bf16, kind: 'mamba.*'}]"
    )
    early, late = run.switches
    assert (early.step, late.step) == (50, 100)
    assert early.text == ("dgrad to fp8_block in 4 of 24 linears; dgrad to bf16 in 8 of 24 linears")
    names = {row.policy.name for row in late.plan.rows}
    assert names == {
        "bf16", "nvfp4+fprop:bf16", "nvfp4+dgrad:fp8_block+fprop:bf16",
        "nvfp4+dgrad:bf16+fprop:bf16",
    }  # fmt: skip
    for before, after in pairwise(run.plans):
        for old, new in zip(before.rows, after.rows, strict=True):
            changed = [g for g in GEMMS if getattr(old.policy, g) != getattr(new.policy, g)]
            assert changed in ([], ["dgrad"], ["fprop"])


@pytest.mark.parametrize(
    ("schedule", "key", "message"),
    [
        ("[{at: 0.5, gemms: [frop], to: bf16}]", "0.gemms",
         "unknown gemm 'frop'; did you mean fprop? allowed: fprop, dgrad, wgrad"),
        ("[{at: 0.5, gemms: [], to: bf16}]", "0.gemms", "is empty; name some of fprop, dgrad"),
        ("[{at: 0.5, gemms: fprop, to: bf16}]", "0.gemms", 'a list is due here, got "fprop"'),
        ("[{at: 0.5, gemms: [fprop], to: bf61}]", "0.to", "unknown policy 'bf61'; did you mean b"),
        ("[{at: 0.5, gemms: [fprop]}]", "0.to", "missing"),
        ("[{at: 0.5, gemms: [fprop], to: bf16, kinds: x}]", "0.kinds", 'did you mean "kind"?'),
        ("[{at: 0.5, gemms: [fprop], to: bf16, kind: mpl.up}]", "0.kind", "did you mean mlp.up?"),
        ("[{at: 0.5, gemms: [fprop], to: bf16, blocks: 12}]", "0.blocks",
         "'12' does not fit a model of 12 blocks"),
        ("[{at: 2.0, gemms: [fprop], to: bf16}]", "0.at", "is 2.0; write one of: a fraction"),
        ("[{at: {step: 121}, gemms: [fprop], to: bf16}]", "0.at", "but the run has 120 steps"),
        ("[{at: 0.5, gemms: [fprop], to: fp32}]", "0.to", "is 'fp32', which computes in fp32"),
        ("[{at: 0.5, gemms: [fprop], to: nvfp4}]", "0", "changes nothing: none of its 24 linears"),
        ("[{at: 0.5, gemms: [fprop], to: bf16, blocks: 11}]", "0",
         "none of its 2 linears (bf16) has a quantised fprop that differs from 'bf16'"),
        ("[{at: 0.5, gemms: [fprop, dgrad], to: bf16}, {at: {step: 61}, gemms: [dgrad], to: bf16}]",
         "1", "dgrad of decoder.layers.1.mlp.linear_fc1 is switched twice at step 61, before by "
         "entry 0; let one of the two begin at another point"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_key_and_answer(schedule, key, message):
    with pytest.raises(RecipeError) as caught:
        recipe(schedule)
    (line,) = caught.value.lines
    assert f"precision.schedule.{key}: " in line and message in line


def test_an_override_reaches_into_a_switch():
    schedule = "[{at: 0.5, gemms: [fprop], to: bf16}]"
    assert recipe(schedule, "precision.schedule.0.at.step=33").switches[0].step == 33
    assert recipe(schedule, "train.steps=200").switches[0].step == 101


def test_a_recipe_with_a_schedule_reads_back(tmp_path):
    run = recipe("[{at: {tokens: 1e5}, gemms: [fprop], to: bf16, kind: 'mlp.*'}]")
    (tmp_path / "again.yaml").write_text(run.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == run


def test_check_shows_each_switch():
    text = "\n".join(report(recipe("[{at: 0.75, gemms: [fprop], to: bf16}]"), "x"))
    line = "from step 91 of 120   after 184,320 tokens   fprop to bf16 in 20 of 24 linears"
    assert line in text
    assert "nvfp4+fprop:bf16: 20 of 24 linears" in text.split(line)[1]


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("fp32", "bf16")])
@pytest.mark.parametrize("gemms", [["fprop"], ["dgrad", "wgrad"]], ids=["forward", "backward"])
def test_every_method_can_leave_for_bf16_late(name, gemms):
    """The switch of the paper's appendix D, in either direction; the other GEMMs stay as told."""
    before, bf16 = PRESETS[name], PRESETS["bf16"]
    after = switched_policy(before, gemms, bf16)
    for gemm in GEMMS:
        assert describe(after, gemm) == describe(bf16 if gemm in gemms else before, gemm)
    assert (after is before) == (not any(before.quantised(gemm) for gemm in gemms))


def last_policy(default: str, schedule: str, *more: str):
    """Of an MLP, after all switches."""
    run = load_recipe(
        "tiny_bf16", [f"precision.default={default}", f"precision.schedule={schedule}", *more]
    )
    return run.switches[-1].plan.policy_of("decoder.layers.1.mlp.linear_fc1")


def test_what_the_target_says_about_all_gemms_comes_along_where_nothing_else_changes():
    policies = (
        "precision.policies={slow: {base: nvfp4, accumulate: blackwell, dgrad: null, wgrad: null},"
        "long: {base: fp8_delayed, amax_history: 7}}"
    )
    after = last_policy("nvfp4", "[{at: 0.5, gemms: [fprop], to: long}]", policies)
    assert after.amax_history == 7 and after.delayed() == ("input", "weight")
    backward = "[{at: 0.3, gemms: [dgrad, wgrad], to: bf16}, {at: 0.5, gemms: [fprop], to: slow}]"
    after = last_policy("fp8_block", backward, policies)
    assert after.accumulation("fprop") == "blackwell"
    with pytest.raises(RecipeError) as caught:  # dgrad and wgrad would add up so too
        last_policy("nvfp4", "[{at: 0.5, gemms: [fprop], to: slow}]", policies)
    (line,) = caught.value.lines
    assert "nvfp4 with fprop of slow and its own dgrad, wgrad is no policy" in line
    assert "precision.schedule.0: " in line


def test_a_method_by_kind_is_resolved_for_each_linear():
    run = load_recipe(
        "tiny_bf16",
        ["precision.default=nvfp4", "precision.schedule=[{at: 0.5, gemms: [fprop], to: both}]",
         "precision.policies={both: {base: mxfp8, by_kind: {'mlp.*': bf16}}}"],
    )  # fmt: skip
    names = {row.kind: row.policy.name for row in run.switches[0].plan.rows}
    assert names["mlp.up"] == "nvfp4+fprop:bf16" and names["mamba.in_proj"] == "nvfp4+fprop:both"


def test_plain_pytorch_has_no_steps():
    from torch import nn

    from nvfp4.precision.apply import apply_precision

    config = PrecisionConfig("nvfp4", schedule=(Switch(at=0.5, gemms=("fprop",), to="bf16"),))
    with pytest.raises(UserError, match="apply_precision knows no steps, so precision.schedule"):
        apply_precision(nn.Sequential(nn.Linear(16, 16)), config, echo=None)
