"""Rules to plan: who decides, what is refused, and in which words."""

import csv
import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from nvfp4.errors import UserError
from nvfp4.models.configs import list_linears
from nvfp4.models.registry import get_model
from nvfp4.precision.operands import GEMMS, facts, label, policy_from_dict
from nvfp4.precision.plan import describe
from nvfp4.precision.policy import (
    LinearInfo,
    PrecisionConfig,
    Rule,
    Switch,
    bf16_blocks,
    known_policies,
    resolve,
    select_blocks,
)
from nvfp4.precision.presets import PRESETS


def linears(depth=6):
    """A toy hybrid: even blocks are mixers with two linears, odd ones MLPs with two."""
    rows = []
    for block in range(depth):
        name = f"decoder.layers.{block}"
        if block % 2 == 0:
            rows.append(LinearInfo(f"{name}.mixer.in_proj", "mamba.in_proj", block, 160, 64))
            rows.append(LinearInfo(f"{name}.mixer.out_proj", "mamba.out_proj", block, 64, 128))
        else:
            rows.append(LinearInfo(f"{name}.mlp.linear_fc1", "mlp.up", block, 256, 64))
            rows.append(LinearInfo(f"{name}.mlp.linear_fc2", "mlp.down", block, 64, 256))
    return rows


def plan_of(**precision):
    return resolve(linears(), PrecisionConfig(**precision))


def policies_by_block(plan):
    return {row.block: row.policy.name for row in plan.rows}


def test_default_first_and_last():
    plan = plan_of(default="nvfp4", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert list(policies_by_block(plan).values()) == ["bf16", "nvfp4", "nvfp4", "nvfp4"] + 2 * [
        "bf16"
    ]
    reasons = {row.block: row.reason for row in plan.rows}
    assert reasons == {0: "first block", 1: "default", 2: "default", 3: "default",
                       4: "last 2 blocks", 5: "last 2 blocks"}  # fmt: skip


def test_first_rule_that_matches_decides():
    plan = plan_of(
        default="nvfp4",
        num_layers_at_start_in_bf16=1,
        rules=(
            Rule("fp8_block", match="*.mixer.out_proj"),
            Rule("bf16", kind="mamba.*", blocks="0..2"),
            Rule("fp32", blocks=-1),
        ),
    )
    chosen = {(row.block, row.kind): row.policy.name for row in plan.rows}
    assert chosen[0, "mamba.out_proj"] == "bf16"  # the first block comes before any rule
    assert chosen[2, "mamba.out_proj"] == "fp8_block" and chosen[2, "mamba.in_proj"] == "bf16"
    assert chosen[4, "mamba.out_proj"] == "fp8_block" and chosen[4, "mamba.in_proj"] == "nvfp4"
    assert chosen[3, "mlp.up"] == "nvfp4" and chosen[5, "mlp.up"] == "fp32"
    assert plan.policy_of("decoder.layers.5.mlp.linear_fc2").name == "fp32"


@pytest.mark.parametrize(
    ("expression", "blocks"),
    [
        ("3", {3}), (3, {3}), (-1, {9}), ("0..1", {0, 1}), ("-2..", {8, 9}), ("-3..-2", {7, 8}),
        ("0..1, 5,-1", {0, 1, 5, 9}), ("8..9,9", {8, 9}),
    ],
)  # fmt: skip
def test_block_expressions(expression, blocks):
    assert select_blocks(expression, 10, "here") == blocks


@pytest.mark.parametrize("expression", ["", "0-1", "a", "1:3", "..3", "1...3"])
def test_block_expressions_that_cannot_be_read(expression):
    with pytest.raises(UserError, match=r"here: cannot read .*; write indices and ranges such as"):
        select_blocks(expression, 10, "here")


@pytest.mark.parametrize("expression", ["10", "-11", "8..10"])
def test_block_expressions_outside_the_model(expression):
    with pytest.raises(UserError, match=r"does not fit a model of 10 blocks \(0 to 9\)"):
        select_blocks(expression, 10, "here")


def mine(**policy):
    """A recipe that defines one policy."""
    return dict(policies={"mine": policy})


def both_ends(start, end, default="bf16"):
    return dict(default=default, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)


ERRORS = [
    (dict(default="nvpf4"),
     "precision.default: unknown policy 'nvpf4'; did you mean nvfp4? allowed: fp32, bf16, fp8_cu"),
    (dict(rules=(Rule("fp8", match="*"),)),
     "precision.rules[0].use: unknown policy 'fp8'; did you mean fp8_current?"),
    (dict(rules=(Rule("bf16", match="layers.*"),)),
     "precision.rules[0]: match 'layers.*' fits no linear; the 12 names run from decoder"),
    (dict(rules=(Rule("bf16", kind="mamba.inproj"),)),
     "precision.rules[0].kind: unknown kind 'mamba.inproj'; did you mean mamba.in_proj?"),
    (dict(rules=(Rule("bf16"),)),
     "precision.rules[0] selects nothing; give match, kind or blocks"),
    (dict(rules=(Rule("bf16", blocks="6"),)),
     "precision.rules[0].blocks: '6' does not fit a model of 6 blocks (0 to 5)"),
    (dict(rules=(Rule("bf16", kind="mlp.*", blocks="0"),)),
     "precision.rules[0] (kind 'mlp.*' blocks '0') matches no linear"),
    (dict(num_layers_at_start_in_bf16=1, rules=(Rule("bf16", blocks="0"),)),
     "(blocks '0') decides nothing: its 2 linears are already decided by first block"),
    (dict(rules=(Rule("bf16", blocks="0..1"), Rule("nvfp4", match="*.0.*"))),
     "(match '*.0.*') decides nothing: its 2 linears are already decided by rules[0] blocks '0.."),
    (both_ends(2, 4, "nvfp4"),
     "precision: 2 first and 4 last blocks in bf16 leave none of the 6 blocks for 'nvfp4'"),
    (both_ends(3, 4), "leave none of the 6 blocks"),
    (both_ends(0, -1), "precision.num_layers_at_end_in_bf16 is -1; it must be a whole number"),
    (dict(policies={"nvfp4": {}}), "precision.policies.nvfp4: this is the name of a preset"),
    (mine(base="nvfp"),
     "precision.policies.mine.base: unknown policy 'nvfp'; did you mean nvfp4?"),
    (mine(base="nvfp4", fporp=None),
     "precision.policies.mine: unknown key 'fporp'; did you mean fprop?"),
    (mine(base="nvfp4", fprop={"grad_output": None}),
     "precision.policies.mine.fprop: unknown operand 'grad_output'; allowed: input, weight"),
    (mine(base="nvfp4", fprop={"input": {"round": "x"}}),
     "precision.policies.mine.fprop.input: unknown field 'round'; did you mean rounding?"),
    (mine(base="nvfp4", fprop={"input": {"block": "1x17"}}),
     "precision.policies.mine.fprop.input: unknown block '1x17'; did you mean 1x1"),
    (mine(base="nvfp4", fprop={"input": {"format": "e3m2"}}),
     "precision.policies.mine.fprop.input: unknown format 'e3m2'; did you mean e"),
    (mine(base="nvfp4", fprop=["bf16"]),
     "precision.policies.mine.fprop: ['bf16'] is no operand table; write null, the name of a"),
    (mine(base="nvfp4", dgrad="mxpf8"),
     "precision.policies.mine.dgrad: unknown policy 'mxpf8'; did you mean mxfp8?"),
    (mine(fprop={"input": {"format": "e2m1"}}),
     "mine.fprop.input: the base policy does not quantise this operand, so its spec must be"),
    (mine(base="nvfp4", dgrad={"source": "forwards"}),
     "mine.dgrad.source: unknown source 'forwards'; did you mean forward? allowed: original, forw"),
    (mine(base="nvfp4", fprop={"source": "forward"}), "mine.fprop: unknown operand 'source'"),
    (mine(base="nvfp4", accumulate="fp16"),
     "precision.policies.mine.accumulate: unknown accumulate 'fp16'; did you mean fp"),
    (mine(base="nvfp4", split="means"), "mine.split: unknown split 'means'; did you mean mean?"),
    (mine(base="fp8_delayed", amax_history=0),
     "precision.policies.mine: amax_history is 0; it must be a whole number from 1"),
    (mine(base="fp8_delayed", margin=-1), "mine: margin is -1; it must be a whole number from 0"),
    (mine(base="fp8_delayed", split="mean"), "mine: split mean does not go with delayed scaling"),
    (mine(base="nvfp4", split="hot_channels"),
     "mine: split_fraction is 0.0; hot_channels needs a share of the input features above 0"),
    (mine(base="nvfp4", split_fraction="x"), "mine.split_fraction: 'x' is no number"),
    (mine(base="nvfp4", split_fraction=0.1), "mine: split_fraction is 0.1, but split is none"),
    (mine(base="bf16", split="hot_channels", split_fraction=0.1),
     "mine: split hot_channels: fprop.input must be quantised, and not rotated"),
    (mine(base="nvfp4", by_kind=["attention.*"]), "mine.by_kind: ['attention.*'] is no mapping"),
    (dict(default="mine", **mine(base="nvfp4", by_kind={"mlp.*": "mxfp"})),
     "precision.policies.mine.by_kind: unknown policy 'mxfp'; did you mean mxfp8?"),
    (mine(base="nvfp4", wgrad={"input": {"hadamard": 0}}),
     "precision.policies.mine: wgrad: both operands must be rotated alike for the rotation"),
    (mine(base="nvfp4", wgrad={"input": {"signs": "none"}}),
     "grad_output has hadamard 16 with fixed signs, input has hadamard 16 with none signs"),
    (mine(base="nvfp4", wgrad={"input": None}),
     "grad_output has hadamard 16 with fixed signs, input has hadamard 0 with no signs"),
    (mine(base="quartet2", fprop={"input": {"hadamard": 16}, "weight": {"hadamard": 16}}),
     "mine: dgrad.source forward: the weight of fprop is rotated along another dimension"),
    (mine(base="four_over_six", fprop={"input": {"hadamard": 16}, "weight": {"hadamard": 16}}),
     "mine.fprop.input: scale_rule: four_over_six_mse goes neither with hadamard nor with round"),
    (mine(base="mxfp8", accumulate="sequential16"),
     "mine: accumulate sequential16 is the order of NVFP4's reference; fprop.input is e4m3 with"),
    (dict(default="fp8_block, nvfp4"),
     "precision.default names fp8_block and nvfp4 for the same linears; write one of them, and"),
    (dict(rules=(Rule("fp8_block", kind="mlp.*"), Rule("nvfp4", kind="mlp.*"))),
     "decided by rules[0] kind 'mlp.*', for fp8_block instead of nvfp4; delete one of the two"),
    (both_ends(0.5, 0.6, "nvfp4"), "3 first and 4 last blocks in bf16 leave none of the 6 blocks"),
    (both_ends(0, 1.5), "num_layers_at_end_in_bf16 is 1.5; it must be a whole number of blocks"),
    (mine(compute_dtype="fp16"), "precision.policies.mine.compute_dtype: unknown dtype 'fp16'"),
    (mine(name="yours"), "precision.policies.mine.name is 'yours'; leave it out, or write 'mine'"),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "message"), ERRORS)
def test_errors_are_one_line_with_the_answer(precision, message):
    with pytest.raises(UserError) as caught:
        plan_of(**precision)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_dimension_that_does_not_divide():
    odd = [LinearInfo("layers.0.fc", "mlp.up", 0, 40, 64)]
    resolve(odd, PrecisionConfig(default="fp8_block"))  # partial blocks of 128 are fine
    with pytest.raises(
        UserError, match=r"layers.0.fc: out_features is 40, which nvfp4 cannot cut"
    ) as e:
        resolve(odd, PrecisionConfig(default="nvfp4"))
    assert 'exclude it by precision.rules=[{use: bf16, match: "layers.0.fc"}]' in str(e.value)
    excluded = PrecisionConfig(default="nvfp4", rules=(Rule("bf16", match="layers.0.fc"),))
    assert resolve(odd, excluded).policy_of("layers.0.fc").name == "bf16"


@pytest.mark.parametrize(("kind", "out", "in_"), [("mlp.up", 80, 64), ("mlp.down", 64, 80)])
def test_dimension_that_does_not_divide_on_each_rank(kind, out, in_):
    one = [LinearInfo("fc", kind, 0, out, in_)]
    nvfp4 = PrecisionConfig(default="nvfp4")
    resolve(one, nvfp4)
    resolve(one, nvfp4, tensor_model_parallel_size=5)
    with pytest.raises(UserError, match=r"is 80, .* blocks of 16 on 2 tensor-parallel ranks"):
        resolve(one, nvfp4, tensor_model_parallel_size=2)


def test_policies_of_a_recipe():
    known = known_policies(
        PrecisionConfig(
            policies={
                "no_sr": {"base": "nvfp4", "dgrad": {"grad_output": {"rounding": "nearest"}}},
                "forward_only": {"base": "no_sr", "dgrad": None, "wgrad": None},
                "weights_bf16": {"base": "nvfp4", "fprop": {"weight": None}},
                "from_nothing": {"fprop": {"input": {"format": "e2m1", "block": "1x16"}}},
            }
        )
    )
    paper = PRESETS["nvfp4"]
    no_sr = known["no_sr"]
    assert no_sr.dgrad.grad_output == replace(paper.dgrad.grad_output, rounding="nearest")
    assert no_sr.fprop == paper.fprop and no_sr.wgrad == paper.wgrad
    assert no_sr.dgrad.weight == paper.dgrad.weight
    forward_only = known["forward_only"]
    assert forward_only.fprop == paper.fprop and not any(
        forward_only.operands(gemm)[role] for gemm in ("dgrad", "wgrad")
        for role in forward_only.operands(gemm)
    )  # fmt: skip
    assert known["weights_bf16"].fprop.weight is None
    assert known["weights_bf16"].fprop.input == paper.fprop.input
    assert (
        known["from_nothing"].fprop.input.block == "1x16"
        and known["from_nothing"].compute_dtype == "bf16"
    )


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda p: p.name)
def test_policy_survives_json(policy):
    data = json.loads(json.dumps(policy.to_dict()))
    assert policy_from_dict(policy.name, data, {}, "here") == policy
    assert list(data)[:5] == ["name", "compute_dtype", *GEMMS]
    assert "\n" not in repr(policy) and hash(policy) == hash(replace(policy))


def operands(name):
    """Role -> what a reader of the table needs to know, for a preset."""
    return {
        f"{gemm}.{role}": label(facts(spec, "bf16"))
        for gemm in GEMMS
        for role, spec in PRESETS[name].operands(gemm).items()
    }


NAMES = (
    "fp32 bf16 fp8_current fp8_delayed fp8_block mxfp8 mxfp4_ocp mxfp4_paper nvfp4 nvfp4_naive "
    "nvfp4_1d nvfp4_row_scaled four_over_six nemotron3 quartet2 averis ue5m3 mxfp4_tseng"
)


def test_every_published_method_is_a_preset():
    assert set(NAMES.split()) <= PRESETS.keys()


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("fp8_current", ["e4m3 tensor fp32-scales nearest"] * 2
         + ["e5m2 tensor fp32-scales nearest", "e4m3 tensor fp32-scales nearest"] * 2),
        ("mxfp8", ["e4m3 1x32 e8m0-scales rceil nearest"] * 6),
        ("nvfp4_naive", ["e2m1 1x16 nearest"] * 6),
        ("mxfp4_ocp", ["e2m1 1x32 e8m0-scales floor nearest"] * 6),
        ("mxfp4_paper", [
            "e2m1 1x32 e8m0-scales rceil nearest", "e2m1 32x32 e8m0-scales rceil nearest",
            "e2m1 1x32 e8m0-scales rceil stochastic", "e2m1 32x32 e8m0-scales rceil nearest",
            "e2m1 1x32 e8m0-scales rceil stochastic hadamard32",
            "e2m1 1x32 e8m0-scales rceil nearest hadamard32"]),
        ("nvfp4_row_scaled", [
            "e2m1 1x16 row-amax nearest", "e2m1 16x16 nearest", "e2m1 1x16 stochastic",
            "e2m1 16x16 nearest", "e2m1 1x16 stochastic hadamard16",
            "e2m1 1x16 nearest hadamard16"]),
        ("four_over_six", [
            "e2m1 1x16 four_over_six_mse range256 nearest",
            "e2m1 16x16 four_over_six_mse range256 nearest", "e2m1 1x16 stochastic",
            "e2m1 16x16 four_over_six_mse range256 nearest", "e2m1 1x16 stochastic hadamard16",
            "e2m1 1x16 nearest hadamard16"]),
        ("quartet2", ["e2m1 1x16 nearest"] * 2
         + ["e2m1 1x16 eden nearest hadamard128 step-signs"] * 4),
        ("mxfp4_tseng", ["bf16"] * 2
         + ["e2m1 1x32 e8m0-scales floor_3_4 stochastic hadamard64 step-signs"] * 4),
    ],
)  # fmt: skip
def test_operands_of_presets(name, table):
    assert list(operands(name).values()) == table


def test_nemotron3_by_kind():
    """Attention in BF16, Mamba's output projection in MXFP8, as the technical reports say."""
    plan = plan_of(default="nemotron3", num_layers_at_end_in_bf16=1)
    chosen = {(row.block, row.kind): (row.policy.name, row.reason) for row in plan.rows}
    assert chosen[0, "mamba.in_proj"] == ("nemotron3", "default")
    assert chosen[0, "mamba.out_proj"] == ("mxfp8", "default, nemotron3 by_kind mamba.out_proj")
    assert chosen[5, "mlp.up"] == ("bf16", "last block")
    assert plan.notes == (
        "note: nemotron3 has bf16 for attention.*, and this model has no such linear",
    )
    assert plan.notes[0] in plan.summary()
    own = dict(default="own", policies={"own": {"base": "nemotron3", "by_kind": {"mlp.*": "fp32"}}})
    assert {row.policy.name for row in plan_of(**own).rows} == {"own", "fp32"}
    assert not plan_of(**own).notes


def test_unused_policies_are_noted():
    defined = {
        "base_of_used": {"base": "nvfp4"},
        "gemm_of_used": {"base": "mxfp8"},
        "used": {"base": "base_of_used", "dgrad": "gemm_of_used"},
        "idle": {"base": "nvfp4"},
        "by_its_kind": {"base": "nvfp4", "by_kind": {"mlp.*": "later"}},
        "later": {"base": "nvfp4"},
        "of_a_switch": {"base": "bf16"},
    }
    plan = plan_of(
        default="used",
        rules=(Rule("by_its_kind", blocks=-1),),
        policies=defined,
        schedule=(Switch(at=0.5, gemms=("fprop",), to="of_a_switch"),),
    )
    assert plan.notes == ("note: no linear uses precision.policies.idle",)


def test_mixed_directions():
    """Any GEMM may be done as any policy does it, and its FLOPs count by themselves."""
    mixed = {
        "fp4_then_mx": {"base": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8"},
        "only_backward": {"base": "nvfp4", "fprop": "bf16"},
    }
    plan = plan_of(
        default="fp4_then_mx", rules=(Rule("only_backward", kind="mlp.*"),), policies=mixed
    )
    first, last = plan.rows[0].policy, plan.rows[-1].policy
    assert first.fprop == PRESETS["nvfp4"].fprop and first.wgrad == PRESETS["mxfp8"].wgrad
    assert last.fprop == PRESETS["bf16"].fprop and last.wgrad == PRESETS["nvfp4"].wgrad
    assert first.multiples == {"tokens": 16, "out_features": 16, "in_features": 16}
    mlp = plan.flops_shares()["only_backward"]
    shares = plan.format_shares()
    assert shares == pytest.approx({
        "e2m1": (1 - mlp) / 3 + 2 * mlp / 3, "e4m3": 2 * (1 - mlp) / 3, "bf16": mlp / 3,
    })  # fmt: skip
    assert f"GEMM FLOPs by format: e2m1 {100 * shares['e2m1']:.1f} %" in plan.summary()


def test_fractions_of_the_depth():
    """Rounded up, exactly: 0.07 of 100 are 7 although 0.07 * 100 is above 7 in floating point."""
    for fraction, depth, blocks in [(0.15, 62, 10), (0.07, 100, 7), (0.5, 6, 3), (0.01, 6, 1)]:
        assert bf16_blocks(PrecisionConfig(num_layers_at_end_in_bf16=fraction), depth) == (
            0,
            blocks,
        )
    plan = plan_of(default="nvfp4", num_layers_at_end_in_bf16=0.3)
    assert [row.policy.name for row in plan.rows].count("bf16") == 4
    section = TypeAdapter(PrecisionConfig)
    for value, kind in ((2, int), (0.15, float)):
        read = section.validate_python({"num_layers_at_end_in_bf16": value})
        assert type(read.num_layers_at_end_in_bf16) is kind


def test_words_tell_policies_apart():
    """Resuming compares them: every field that changes numbers changes what describe says."""
    changes = [
        {}, {"accumulate": "fp64"}, {"split": "mean"}, {"dgrad": {"source": "forward"}},
        {"split": "hot_channels", "split_fraction": 0.1},
        {"split": "hot_channels", "split_fraction": 0.2},
        {"wgrad": {role: {"signs": "step"} for role in ("grad_output", "input")}},
        {"fprop": {"input": {"second_level": "row"}}},
    ]  # fmt: skip
    policies = [policy_from_dict("p", {"base": "nvfp4", **one}, PRESETS, "here") for one in changes]
    policies += [
        policy_from_dict("p", {"base": "fp8_delayed", **one}, PRESETS, "here")
        for one in ({}, {"amax_history": 16}, {"amax_algorithm": "most_recent"}, {"margin": 1})
    ]
    words = [" ".join(describe(policy, gemm) for gemm in GEMMS) for policy in policies]
    assert len(set(words)) == len(words)


def test_the_presets_are_the_papers():
    """The operand table of the paper, section 4 and appendix C; and its FP8 run."""
    nvfp4 = PRESETS["nvfp4"]
    table = {
        f"{gemm}.{role}": (spec.format, spec.block, spec.rounding, spec.hadamard)
        for gemm in GEMMS
        for role, spec in nvfp4.operands(gemm).items()
    }
    assert table == {
        "fprop.input": ("e2m1", "1x16", "nearest", 0),
        "fprop.weight": ("e2m1", "16x16", "nearest", 0),
        "dgrad.grad_output": ("e2m1", "1x16", "stochastic", 0),
        "dgrad.weight": ("e2m1", "16x16", "nearest", 0),
        "wgrad.grad_output": ("e2m1", "1x16", "stochastic", 16),
        "wgrad.input": ("e2m1", "1x16", "nearest", 16),
    }
    fp8 = PRESETS["fp8_block"]
    assert {(spec.format, spec.block_scale, spec.rounding) for spec in fp8.specs} == {
        ("e4m3", "fp32", "nearest")
    }
    assert [fp8.fprop.weight.block, fp8.dgrad.weight.block] == ["128x128"] * 2
    assert not PRESETS["bf16"].specs and not PRESETS["fp32"].specs
    assert [
        PRESETS[name].multiples["tokens"] for name in ("fp32", "bf16", "fp8_block", "nvfp4")
    ] == [1, 1, 1, 16]


def test_12b_keeps_20_of_124_linears_in_bf16():
    """arXiv 2509.25149 appendix A: first 2 and last 8 blocks, 16 % of the linears."""
    config = get_model("nemotron_nano_12b_v2")
    precision = PrecisionConfig(
        default="nvfp4", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=8
    )
    plan = resolve(list_linears(config), precision, tensor_model_parallel_size=4)
    names = [row.policy.name for row in plan.rows]
    assert len(names) == 124 and names.count("bf16") == 20
    kept = {row.block for row in plan.rows if row.policy.name == "bf16"}
    assert kept == {0, 1, *range(54, 62)}


def test_table_csv_and_shares(tmp_path):
    plan = plan_of(default="nvfp4", rules=(Rule("bf16", kind="mlp.*"),))
    mixers, mlps = 160 * 64 + 64 * 128, 2 * 256 * 64  # weights of one block of each sort
    assert plan.flops_shares()["bf16"] == pytest.approx(mlps / (mixers + mlps), rel=1e-12)
    assert sum(plan.flops_shares().values()) == pytest.approx(1, rel=1e-12)
    table = plan.table()
    for row in plan.rows:
        line = next(line for line in table.splitlines() if row.name in line)
        assert f"{row.out_features} x {row.in_features}" in line and row.reason in line
    assert "nvfp4: 6 of 12 linears, 36.0 % of their GEMM FLOPs" in table
    assert "wgrad  grad_output e2m1 1x16 stochastic hadamard16; input e2m1 1x16 nearest" in table
    plan.write_csv(tmp_path / "plan.csv")
    with open(tmp_path / "plan.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row.name for row in plan.rows]
    assert {row["dgrad"] for row in rows if row["policy"] == "bf16"} == {
        "grad_output bf16; weight bf16"
    }


def test_unknown_linear():
    with pytest.raises(UserError, match="the precision plan has no linear 'output_layer'"):
        plan_of().policy_of("output_layer")


def test_the_recipe_section_refuses_unknown_keys():
    section = TypeAdapter(PrecisionConfig)
    good = {
        "default": "nvfp4",
        "rules": [{"use": "bf16", "blocks": 3}],
        "policies": {"a": {"base": "nvfp4"}},
    }
    assert section.validate_python(good).rules == (Rule("bf16", blocks=3),)
    for bad in ({"defualt": "nvfp4"}, {"rules": [{"use": "bf16", "block": "3"}]}):
        with pytest.raises(ValidationError, match="(?i)unexpected|extra"):
            section.validate_python(bad)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"base": "bf16", "fprop": "chon"}, "fprop: chon does it as .* split hot_channels"),
        ({"base": "bf16", "dgrad": "averis"}, "dgrad: averis does it as .* split mean"),
        ({"base": "nvfp4", "dgrad": "nemotron3"}, "nemotron3 stands for other policies by_kind"),
        ({"base": "nvfp4", "dgrad": "study"}, "dgrad: study does it as .* accumulate blackwell"),
        ({"base": "nvfp4", "dgrad": "history"}, "dgrad: history does it as .* history 5 max"),
        ({"base": "nvfp4", "margin": 3}, "margin: 3 has no effect: no operand has scale_rule"),
        ({"base": "bf16", "accumulate": "blackwell"}, "has no effect: no GEMM has two quantised"),
        ({"base": "nvfp4", "osci_every": 70}, "osci_every: 70 has no effect: weight_hook is none"),
        ({"base": "fp8_delayed", "margin": 2000}, "margin is 2000; it must be .* from 0 to 100"),
        ({"base": "fp8_delayed", "amax_history": 10**12}, "must be a whole number from 1 to"),
    ],
)  # fmt: skip
def test_a_gemm_by_name_is_exact_and_fields_have_an_effect(data, text):
    defined = {
        "study": {"base": "nvfp4", "accumulate": "blackwell"},
        "history": {"base": "fp8_delayed", "amax_history": 5},
    }
    with pytest.raises(UserError, match=text):
        plan_of(default="x", policies={**defined, "x": data})


def test_what_a_gemm_by_name_needs_may_be_said_too():
    history = {"base": "fp8_delayed", "amax_history": 5}
    both = {"base": "nvfp4", "dgrad": "history", "amax_history": 5}
    plan = plan_of(default="x", policies={"history": history, "x": both})
    assert plan.rows[0].policy.dgrad == PRESETS["fp8_delayed"].dgrad


def test_by_kind_does_not_chain():
    chained = {"base": "nvfp4", "by_kind": {"mamba.*": "nemotron3"}}
    with pytest.raises(UserError, match="nemotron3 stands for other policies by kind itself"):
        plan_of(default="x", policies={"x": chained})


@pytest.mark.parametrize("value", [float("nan"), True, 1.0, -0.5, "two"])
def test_counts_of_blocks_are_whole_numbers_or_fractions(value):
    with pytest.raises(UserError, match="num_layers_at_end_in_bf16 is "):
        plan_of(default="nvfp4", num_layers_at_end_in_bf16=value)


def test_a_range_that_runs_backwards_is_said_to():
    with pytest.raises(UserError, match="'5..3' runs backwards; write the smaller index first"):
        select_blocks("5..3", 10, "here")
