"""The shipped recipes: complete, documented, and what the papers say."""

import re
from functools import cache
from pathlib import Path

import pytest

from nvfp4.config import Recipe, RecipeError, list_recipes, load_recipe
from nvfp4.config_check import check, flat, recipes, report
from nvfp4.config_files import read, shipped, value_at
from nvfp4.config_schema import Run
from nvfp4.models.configs import count_parameters, list_linears
from nvfp4.models.pattern import parse_pattern
from nvfp4.models.registry import get_model
from nvfp4.precision.operands import GEMMS
from nvfp4.precision.presets import PRESETS

FOLDER = Path(__file__).parent.parent / "recipes"
TINY = ("tiny_bf16", "tiny_fp8", "tiny_nvfp4")
LARGE = tuple(f"nemotron_nano_12b_v2_{name}" for name in ("bf16", "fp8", "nvfp4"))
# name -> tokens, tokens per step, peak learning rate, its last value, decay, parameters
PUBLISHED = {
    "nemotron_nano_12b_v2": (10**13, 6_029_312, 4.5e-4, 4.5e-6, 0.2, 12_310_001_152),
    "nemotron_h_8b": (10**12, 6_291_456, 8e-4, 8e-6, 0.15, 8_084_075_520),
    "transformer_1p2b": (10**12, 6_291_456, 1.2e-3, 1.2e-5, 0.15, 1_291_929_600),
}
# Every ablation of arXiv 2509.25149 that we know of
ABLATIONS = (
    "Fig. 4", "Fig. 6a", "Fig. 6b", "Fig. 7", "App. D cost", "App. D detail", "Fig. 8", "Fig. 9",
    "Fig. 10", "E.3", "Fig. 11", "Fig. 12", "Fig. 13", "Fig. 14", "E.2",
)  # fmt: skip
# Recipe -> operands that are not those of NVFP4
CHANGED = {
    "fig04_no_sr": "dgrad.grad_output wgrad.grad_output",
    "fig04_no_rht": "wgrad.grad_output wgrad.input",
    "fig04_no_2d": "fprop.weight dgrad.weight",
    "fig04_fewer_bf16": "",
    "fig07_forward": "fprop:bf16",
    "fig07_backward": "fprop.weight dgrad:bf16 wgrad:bf16",
    "appd_backward_2d": "dgrad:bf16 wgrad:bf16",
    "fig08_naive": "fprop.weight dgrad.grad_output dgrad.weight wgrad.grad_output wgrad.input",
    "fig08_last4": "fprop.weight dgrad.grad_output dgrad.weight wgrad.grad_output wgrad.input",
    "fig08_last4_2d": "dgrad.grad_output wgrad.grad_output wgrad.input",
    "fig08_last4_2d_rht": "dgrad.grad_output wgrad.grad_output",
    "fig09_first4": "",
    "fig09_first2_last2": "",
    "fig10_none": "dgrad.grad_output wgrad.grad_output",
    "fig10_activations": "fprop.input dgrad.grad_output wgrad.grad_output wgrad.input",
    "fig10_weights": "fprop.weight dgrad.grad_output dgrad.weight wgrad.grad_output",
    "fig10_backward": "dgrad.weight wgrad.input",
    "e3_dgrad": "wgrad.grad_output",
    "e3_wgrad": "dgrad.grad_output",
    "fig11_none": "fprop.weight dgrad.weight wgrad.grad_output wgrad.input",
    "fig11_wgrad": "fprop.weight dgrad.weight",
    "fig11_fprop": "fprop.input fprop.weight dgrad.weight wgrad.grad_output wgrad.input",
    "fig11_dgrad": "fprop.weight dgrad.grad_output dgrad.weight wgrad.grad_output wgrad.input",
    "fig12_hadamard4": "wgrad.grad_output wgrad.input",
    "fig12_hadamard128": "wgrad.grad_output wgrad.input",
    "fig13_signs_none": "wgrad.grad_output wgrad.input",
    "fig13_signs_step": "wgrad.grad_output wgrad.input",
    "fig14_weights_same_dim": "fprop.weight dgrad.weight",
    "fig14_weights_other_dim": "fprop.weight dgrad.weight",
    "fig14_activations_same_dim": "wgrad.grad_output wgrad.input",
    "fig14_activations_other_dim": "wgrad.grad_output wgrad.input",
}


@cache
def loaded(name: str) -> Recipe:
    """A shipped recipe, read once for all tests here."""
    return load_recipe(name)


def test_every_file_is_shipped_with_a_purpose():
    files = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")}
    assert set(shipped()) == files == set(list_recipes())
    assert {"base", *TINY, *LARGE} <= files
    for name, purpose in list_recipes().items():
        assert len(purpose) > 20, f"{name}.yaml starts without a comment line that says what for"


def test_readme_has_a_row_for_every_recipe():
    text = (FOLDER / "README.md").read_text()
    for name in shipped():
        if "/" not in name:
            assert text.count(f"| [{name}.yaml]({name}.yaml) |") == 1


def test_every_ablation_of_the_paper_has_its_recipes():
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| ((?:Fig|App|E)\.[^|]*?) \|(.*)$", text, re.M)
    assert [label for label, _ in rows] == list(ABLATIONS)
    linked = {label: re.findall(r"\]\(([\w/]+)\.yaml\)", row) for label, row in rows}
    assert all(linked.values())
    ablations = [name for name in shipped() if name.startswith("ablations/")]
    for name in ablations:
        owners = [label for label, names in linked.items() if name in names]
        assert len(owners) == 1, f"{name} is linked from {owners}"
        assert f"[{name.split('/')[1]}]({name}.yaml)" in text
        purpose = list_recipes()[name]
        assert purpose.startswith(owners[0].split(" ")[0]) or purpose.startswith("App. E")
    assert set().union(*linked.values()) <= set(shipped())


def test_recipes_of_a_folder_are_grouped(capsys):
    recipes()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert "    fig07_backward fig07_both fig07_both_late fig07_forward" in lines
    assert "  Fig. 7 (12B, which direction goes to BF16 at the end)" in lines
    assert not any(line.startswith("ablations/fig") for line in lines)


def test_a_recipe_of_a_folder_is_suggested_by_its_bare_name():
    with pytest.raises(RecipeError, match='did you mean "ablations/fig04_no_sr"?') as error:
        load_recipe("fig04_no_sr")
    assert f"ablations/ ({sum('/' in name for name in shipped())})" in str(error.value)


def test_base_has_exactly_the_keys_and_defaults_of_the_schema():
    """Written out, not merged: a key that base.yaml forgets would still get its default."""
    written, _ = read(FOLDER / "base.yaml")
    default = Recipe(run=Run(name="")).model_dump(mode="json")
    assert written["run"].pop("dir") == "runs/${run.name}" and default["run"].pop("dir") == "runs/"
    assert list(flat(written)) == list(flat(default))
    assert flat(written) == flat(default)
    assert load_recipe("base", ["run.name=run"]) == Recipe()


def test_base_explains_every_key():
    lines = (FOLDER / "base.yaml").read_text().splitlines()
    data, places = read(FOLDER / "base.yaml")
    for key, place in places.items():
        if key and not isinstance(value_at(data, key), dict):
            line = lines[int(place.rsplit(":", 1)[1]) - 1]
            assert "#" in line, f"{line.strip()} has no comment"


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_passes_check_and_survives_being_written_out(name):
    recipe = loaded(name)
    stem = name.rpartition("/")[2]
    assert recipe.run.name == stem and recipe.run.dir == f"runs/{stem}"
    text = "\n".join(report(recipe, name))
    for fact in (f"{recipe.steps:,} steps", f"{recipe.tokens_per_step:,} tokens", recipe.run.dir):
        assert fact in text
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize("name", ["base", "tiny_nvfp4", "ablations/fig10_backward"])
def test_check_prints_a_resolved_recipe_that_loads_as_the_same(name, tmp_path):
    lines: list[str] = []
    assert check(name, [], resolved=True, echo=lines.append) == 0
    (tmp_path / "resolved.yaml").write_text(lines[-1])
    assert load_recipe(tmp_path / "resolved.yaml") == loaded(name)


def test_tiny_recipes_differ_in_precision_alone():
    runs = {name: flat(loaded(name).model_dump(mode="json")) for name in TINY}
    for name in TINY[1:]:
        differing = {key for key in runs[name] if runs[name][key] != runs["tiny_bf16"].get(key)}
        assert differing == {
            "run.name", "run.dir", "parity.against", "precision.default",
            "precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16",
        }  # fmt: skip
        assert runs[name]["parity.against"] == "runs/tiny_bf16"
        assert runs[name]["parity.tolerance"] == 0.015


def test_tiny_model_is_the_family_in_small():
    recipe = loaded("tiny_nvfp4")
    model, blocks = recipe.model, parse_pattern(recipe.model.pattern)
    assert count_parameters(model) >= 1_000_000
    assert blocks.count("attention") >= 2 and blocks.count("mamba") >= 3
    assert model.hidden_size % 64 == model.ffn_hidden_size % 64 == model.vocab_size % 64 == 0
    for linear in list_linears(model):
        assert linear.in_features % 64 == 0 and linear.out_features % 16 == 0
    in_bf16 = {row.block for row in recipe.plan.rows if row.policy.name == "bf16"}
    assert in_bf16 == {0, len(blocks) - 1}
    assert len(in_bf16) / len(blocks) == pytest.approx(10 / 62, abs=0.01)  # the paper's share
    assert recipe.accumulation(1) == 2 and recipe.accumulation(2) == 1


def test_no_two_recipes_share_a_run_folder():
    stems = [name.rpartition("/")[2] for name in shipped()]
    assert len(set(stems)) == len(stems)


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_large_recipes_have_the_published_values(model, precision):
    tokens, tokens_per_step, lr, min_lr, decay, parameters = PUBLISHED[model]
    recipe = loaded(f"{model}_{precision}")
    assert recipe.model == get_model(model)
    assert count_parameters(recipe.model) == parameters
    assert recipe.tokens_per_step == tokens_per_step
    assert recipe.train.tokens == tokens and recipe.steps == -(-tokens // tokens_per_step)
    assert (recipe.optim.lr, recipe.schedule.min_lr) == (lr, min_lr)
    assert (recipe.optim.betas, recipe.optim.weight_decay) == ((0.9, 0.95), 0.1)
    assert recipe.decay_steps == round(decay * recipe.steps)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_model_has_one_recipe_that_its_runs_differ_from_in_precision_alone(model):
    runs = [name for name in shipped() if name.startswith(f"{model}_")]
    reference = flat(loaded(f"{model}_bf16").model_dump(mode="json"))
    for name in runs:
        values = flat(loaded(name).model_dump(mode="json"))
        differing = {key for key in values if values[key] != reference.get(key)}
        sections = {key.split(".")[0] for key in differing}
        assert sections <= {"run", "precision", "parity"}


@pytest.mark.parametrize("name", CHANGED)
def test_ablations_change_the_operands_that_they_ask_about(name):
    """Against NVFP4, at the end of the run; bf16 stands for every operand of a GEMM."""
    recipe = loaded(f"ablations/{name}")
    plan = recipe.switches[-1].plan if recipe.switches else recipe.plan
    (policy,) = (p for p in plan.policies.values() if p.name != "bf16")
    reference = PRESETS["nvfp4"]
    changed = set()
    for gemm in GEMMS:
        operands = policy.operands(gemm)
        if not any(operands.values()):
            changed.add(f"{gemm}:bf16")
            continue
        for role, spec in operands.items():
            if spec != reference.operands(gemm)[role]:
                changed.add(f"{gemm}.{role}")
    assert changed == set(CHANGED[name].split())


@pytest.mark.parametrize("name", [name for name in shipped() if name.startswith("ablations/")])
def test_ablations_change_precision_and_keep_the_model(name):
    """Against the file that they name as their base: the same model, data and learning rate."""
    base = read(FOLDER / f"{name}.yaml")[0]["base"]
    base = base.removesuffix(".yaml")
    values, reference = (flat(loaded(r).model_dump(mode="json")) for r in (name, base))
    differing = {key for key in values if values[key] != reference.get(key)}
    sections = {key.split(".")[0] for key in differing}
    extra = {"fig06b": "train", "fig04_fewer": "checkpoint", "e2": "metrics"}
    allowed = {value for key, value in extra.items() if name.startswith(f"ablations/{key}")}
    assert sections <= {"run", "precision", "parity", *allowed}
    if "fig06b" not in name and name != "ablations/fig07_forward":
        assert "precision" in sections


def test_large_recipes_keep_the_published_blocks_in_bf16():
    def blocks(name):
        rows = loaded(name).plan.rows
        return {row.block for row in rows if row.policy.name == "bf16"}

    assert blocks(LARGE[0]) == set(range(62))
    assert blocks(LARGE[1]) == {0, 60, 61}
    assert blocks(LARGE[2]) == {0, 1, *range(54, 62)}
    plan = loaded(LARGE[2]).plan
    assert sum(row.policy.name == "bf16" for row in plan.rows) == 20 and len(plan.rows) == 124
    assert blocks("nemotron_h_8b_nvfp4") == blocks("nemotron_h_8b_mxfp4") == set(range(44, 52))
    plan = loaded("nemotron_h_8b_nvfp4").plan
    shares = [row.policy.name == "bf16" for row in plan.rows]
    assert sum(shares) / len(shares) == pytest.approx(0.154, abs=5e-4)
    # the last four layers of the transformer are eight blocks: attention and MLP
    assert blocks("transformer_1p2b_nvfp4") == set(range(32, 40))
    assert blocks("ablations/fig09_first4") == set(range(8))
    assert blocks("ablations/fig09_first2_last2") == {*range(4), *range(36, 40)}
    assert blocks("ablations/fig04_fewer_bf16") == set(range(58, 62))


def test_the_late_switch_is_that_of_the_paper():
    """Forward alone goes to BF16 at 8.2 of 10 trillion tokens, in every linear that was NVFP4."""
    recipe = loaded("nemotron_nano_12b_v2_nvfp4_late_switch")
    assert recipe.plan == loaded(LARGE[2]).plan
    (switch,) = recipe.switches
    assert switch.step == -(-8_200_000_000_000 // recipe.tokens_per_step) + 1
    changed = 0
    for before, after in zip(recipe.plan.rows, switch.plan.rows, strict=True):
        assert not any(after.policy.operands("fprop").values())
        for gemm in ("dgrad", "wgrad"):
            assert after.policy.operands(gemm) == before.policy.operands(gemm)
        changed += before.policy != after.policy
    assert changed == 104


def test_check_groups_every_linear(capsys):
    check("nemotron_nano_12b_v2_nvfp4", [])
    table = capsys.readouterr().out.split("because of\n")[1].split("\n\n")[0].splitlines()
    assert sum(int(line.split()[1]) for line in table) == 124
    assert sum(float(line.split()[2]) for line in table) == pytest.approx(100, abs=0.5)
    assert any("54,56,58,60" in line and "last 8 blocks" in line for line in table)


def test_diff_shows_only_what_differs(capsys):
    check("tiny_nvfp4", ["optim.lr=1"], against="tiny_nvfp4")
    assert capsys.readouterr().out == "optim.lr: 0.003 -> 1.0\n"
    check("tiny_nvfp4", [], against="tiny_nvfp4")
    assert capsys.readouterr().out == "tiny_nvfp4 and tiny_nvfp4 resolve to the same recipe\n"
    check("tiny_fp8", [], against="tiny_bf16")
    assert 'precision.default: "bf16" -> "fp8_block"\n' in capsys.readouterr().out


def test_readme_lists_every_policy_and_its_example_loads(tmp_path):
    text = (FOLDER / "README.md").read_text().partition("## Policies")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")][1:]
    named = [name.strip() for row in rows for name in row.split(",")]
    assert sorted(named) == sorted(PRESETS)
    example = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    (tmp_path / "mine.yaml").write_text("\n".join(["base: tiny_bf16", *example]))
    recipe = load_recipe(tmp_path / "mine.yaml", ["model.mamba.state_dim=24"])
    assert {"mine", "mixed"} <= recipe.plan.policies.keys() and len(recipe.switches) == 1
