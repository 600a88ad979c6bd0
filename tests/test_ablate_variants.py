"""What `nvfp4 ablate` trains: policies, recipes, changed keys, seeds; and what it refuses."""

import pytest

from nvfp4.cli import main
from nvfp4.lab.ablate_variants import entries, expand


def recipes(policies="", variants=(), reference="bf16", recipe="tiny_nvfp4", changes=(), seeds=1):
    """variant name -> recipe of its first seed"""
    _, found = expand(
        entries(policies, variants, reference), recipe, changes, seeds=seeds, out=None
    )
    return {variant.name: variant.recipes[0] for variant in found}


def test_a_policy_keeps_the_precision_section_and_a_plain_one_is_for_all_linears():
    found = recipes(
        "nvfp4,fp8_block,fp32", changes=["precision.rules=[{use: nvfp4, kind: mlp.up}]"]
    )
    assert list(found) == ["bf16", "nvfp4", "fp8_block", "fp32"]
    assert found["fp8_block"].precision.num_layers_at_start_in_bf16 == 1
    assert {row.policy.name for row in found["bf16"].plan.rows} == {"bf16"}
    assert {row.policy.name for row in found["fp32"].plan.rows} == {"fp32"}
    assert found["fp32"].train.dtype == "fp32" and found["bf16"].train.dtype == "bf16"
    assert all(one.metrics.gemm_error == "last" for one in found.values())


def test_a_recipe_lends_its_precision_section_only(tmp_path):
    late = tmp_path / "late.yaml"
    late.write_text("base: tiny_nvfp4\noptim: {lr: 1.0}\nprecision: {default: fp8_block}\n")
    found = recipes(f"tiny_fp8,{late}", recipe="tiny_bf16")
    assert list(found) == ["bf16", "tiny_fp8", "late"]
    assert found["late"].precision.default == "fp8_block"
    assert found["late"].optim == found["bf16"].optim


def test_variants_change_keys_and_values_may_hold_commas():
    found = recipes(
        variants=[
            "first:precision.num_layers_at_end_in_bf16=0",
            "mine:precision.policies.own={base: nvfp4, dgrad: null},precision.default=own",
            "rules:fp8_block,precision.rules=[{use: bf16, kind: mlp.up}, {use: nvfp4, blocks: 3}]",
        ],
        reference="first",
    )
    assert list(found) == ["first", "mine", "rules"]
    assert found["first"].precision.num_layers_at_start_in_bf16 == 1
    assert found["mine"].plan.policies["own"].dgrad.weight is None
    assert len(found["rules"].precision.rules) == 2


def test_seeds_follow_the_recipe_and_variants_share_all_but_precision():
    asked = entries("nvfp4", ["last:nvfp4,precision.num_layers_at_start_in_bf16=0"], "bf16")
    out, found = expand(asked, "tiny_nvfp4", ["run.seed=5"], seeds=3, out=None)
    assert str(out) == "runs/ablate_tiny_nvfp4"
    for variant in found:
        assert [one.run.seed for one in variant.recipes] == [5, 6, 7]
        assert variant.recipes[2].run.dir == f"{out}/{variant.name}_s7"
        same = found[0].recipes[0]
        assert variant.recipes[0].model_copy(
            update={"run": same.run, "precision": same.precision}
        ) == same  # fmt: skip


WRONG = {
    "--policies nvfp5": "--policies: unknown policy 'nvfp5'; did you mean nvfp4? allowed: fp32",
    "--policies nvfp4 --seeds 0": "--seeds 0: at least one seed is needed",
    "--policies nvfp4 --jobs 0": "--jobs 0: at least one run at a time",
    "--policies nvfp4,nvfp4": "nvfp4 is there twice; name one of them: --variant OTHER:nvfp4",
    "--policies nvfp4 --variant nvfp4:bf16": "nvfp4 is there twice",
    "--policies bf16": "nothing to compare with bf16; give --policies A,B or --variant NAME:",
    "": "nothing to compare with bf16",
    "--policies nvfp4 --reference bf61": "--reference: unknown policy 'bf61'; did you mean bf16?",
    "--variant x": "--variant x: write NAME:a.b=c,d.e=f or NAME:POLICY,a.b=c",
    "--variant x:nvfp3": "--variant x: unknown policy 'nvfp3'; did you mean nvfp4?",
    "--variant ../x:nvfp4": "--variant: '../x' cannot name a run",
    "--variant x:model.hidden_size=8": "model.hidden_size is the same for all variants; give it",
    "--variant x:train.steps=8": "--variant x: train.steps is the same for all variants",
    "--variant x:precision.defualt=nvfp4": 'variant x: command line: precision.defualt: unknown',
    "--variant x:precision.default=nvfp5": "variant x: command line: precision.default: unknown",
    "--policies nvfp4 train.stepz=3": "command line: train.stepz: unknown key",
    "--policies missing.yaml": "recipe 'missing.yaml' not found",
    "--policies nvfp4 --sedes 3": "--sedes: unknown option; did you mean --seeds?",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_answered_in_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["ablate", "tiny_nvfp4", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert WRONG[words] in err
    assert not list(tmp_path.iterdir())
