"""The shipped recipes: complete, documented, and what the papers say."""

from pathlib import Path

import pytest

from nvfp4.config import Recipe, list_recipes, load_recipe
from nvfp4.config_check import check, flat
from nvfp4.config_files import read, shipped, value_at
from nvfp4.config_schema import Run
from nvfp4.models.configs import count_parameters, list_linears
from nvfp4.models.pattern import parse_pattern
from nvfp4.models.registry import get_model

FOLDER = Path(__file__).parent.parent / "recipes"
TINY = ("tiny_bf16", "tiny_fp8", "tiny_nvfp4")
LARGE = tuple(f"nemotron_nano_12b_v2_{name}" for name in ("bf16", "fp8", "nvfp4"))


def test_every_file_is_shipped_with_a_purpose():
    files = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")}
    assert set(shipped()) == files == set(list_recipes())
    assert {"base", *TINY, *LARGE} <= files
    for name, purpose in list_recipes().items():
        assert len(purpose) > 20, f"{name}.yaml starts without a comment line that says what for"


def test_readme_has_a_row_for_every_recipe():
    text = (FOLDER / "README.md").read_text()
    for name in shipped():
        assert text.count(f"| [{name}.yaml]({name}.yaml) |") == 1


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


@pytest.mark.parametrize("name", ["base", *TINY, *LARGE])
def test_shipped_recipe_passes_check_and_survives_being_resolved(name, tmp_path):
    lines: list[str] = []
    assert check(name, [], echo=lines.append) == 0
    recipe = load_recipe(name)
    assert recipe.run.name == name and recipe.run.dir == f"runs/{name}"
    text = "\n".join(lines)
    for fact in (f"{recipe.steps:,} steps", f"{recipe.tokens_per_step:,} tokens", recipe.run.dir):
        assert fact in text
    check(name, [], resolved=True, echo=lines.append)
    (tmp_path / "resolved.yaml").write_text(lines[-1])
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


def test_tiny_recipes_differ_in_precision_alone():
    runs = {name: flat(load_recipe(name).model_dump(mode="json")) for name in TINY}
    for name in TINY[1:]:
        differing = {key for key in runs[name] if runs[name][key] != runs["tiny_bf16"].get(key)}
        assert differing == {
            "run.name", "run.dir", "parity.against", "precision.default",
            "precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16",
        }  # fmt: skip
        assert runs[name]["parity.against"] == "runs/tiny_bf16"
        assert runs[name]["parity.tolerance"] == 0.015


def test_tiny_model_is_the_family_in_small():
    recipe = load_recipe("tiny_nvfp4")
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


@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_have_the_published_values(name):
    recipe = load_recipe(name)
    assert recipe.model == get_model("nemotron_nano_12b_v2")
    assert count_parameters(recipe.model) == 12_310_001_152
    assert recipe.tokens_per_step == 6_029_312
    assert recipe.train.tokens == 10**13 and recipe.steps == 1_658_565
    assert (recipe.optim.lr, recipe.schedule.min_lr) == (4.5e-4, 4.5e-6)
    assert (recipe.optim.betas, recipe.optim.weight_decay) == ((0.9, 0.95), 0.1)
    assert recipe.decay_steps == round(0.2 * recipe.steps)


def test_large_recipes_keep_the_published_blocks_in_bf16():
    def blocks(name):
        rows = load_recipe(name).plan.rows
        return {row.block for row in rows if row.policy.name == "bf16"}

    assert blocks(LARGE[0]) == set(range(62))
    assert blocks(LARGE[1]) == {0, 60, 61}
    assert blocks(LARGE[2]) == {0, 1, *range(54, 62)}
    plan = load_recipe(LARGE[2]).plan
    assert sum(row.policy.name == "bf16" for row in plan.rows) == 20 and len(plan.rows) == 124


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
