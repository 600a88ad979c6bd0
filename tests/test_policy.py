"""Rules to plan: who decides, what is refused, and in which words."""

import csv
import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from nvfp4.errors import UserError
from nvfp4.models.configs import list_linears
from nvfp4.models.registry import get_model
from nvfp4.precision.operands import GEMMS, policy_from_dict
from nvfp4.precision.policy import (
    LinearInfo,
    PrecisionConfig,
    Rule,
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


@pytest.mark.parametrize("expression", ["10", "-11", "8..10", "5..3"])
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
     "precision.default: unknown policy 'nvpf4'; did you mean nvfp4? allowed: fp32, bf16, fp8_bl"),
    (dict(rules=(Rule("fp8", match="*"),)),
     "precision.rules[0].use: unknown policy 'fp8'; did you mean fp8_block?"),
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
    (both_ends(0, -1), "precision.num_layers_at_end_in_bf16 is -1; it must be 0"),
    (dict(policies={"nvfp4": {}}), "precision.policies.nvfp4: this is the name of a preset"),
    (mine(base="nvfp"),
     "precision.policies.mine.base: unknown policy 'nvfp'; did you mean nvfp4?"),
    (mine(base="nvfp4", fporp=None),
     "precision.policies.mine: unknown key 'fporp'; did you mean fprop?"),
    (mine(base="nvfp4", fprop={"grad_output": None}),
     "precision.policies.mine.fprop: unknown operand 'grad_output'; allowed: input, weight"),
    (mine(base="nvfp4", fprop={"input": {"round": "x"}}),
     "precision.policies.mine.fprop.input: unknown field 'round'; did you mean rounding?"),
    (mine(base="nvfp4", fprop={"input": {"block": "1x32"}}),
     "precision.policies.mine.fprop.input: block: '1x32' is not one of"),
    (mine(base="nvfp4", fprop="bf16"), "precision.policies.mine.fprop: 'bf16' is no operand table"),
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
    assert "exclude it by precision.rules=[{use: bf16, match: layers.0.fc}]" in str(e.value)
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
    assert list(data) == ["name", "compute_dtype", *GEMMS]


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
    assert [PRESETS[name].multiples["tokens"] for name in ("fp32", "bf16", "fp8_block", "nvfp4")] == [1, 1, 1, 16]


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
