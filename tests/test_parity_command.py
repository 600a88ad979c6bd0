"""`nvfp4 parity`: where its settings come from, what it prints, writes and answers."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from test_parity import change, write_run

from nvfp4.errors import UserError
from nvfp4.lab.compare import Settings, compare
from nvfp4.lab.parity import parity, parity_of
from nvfp4.lab.plots import parity_figure
from nvfp4.lab.runs import load_run

# --- settings --------------------------------------------------------------------------------


def test_settings_come_from_the_compared_runs_and_arguments_go_first(tmp_path):
    a = write_run(tmp_path / "a", recipe={"parity": {"tolerance": 0.5}})
    b = write_run(tmp_path / "b", salt=1, recipe={"parity": {"window_tokens": 819_200}})
    by_recipe = parity_of([a, b]).settings
    assert (by_recipe.tolerance, by_recipe.tolerance_from) == (0.015, "the recipe")
    assert by_recipe.window(2_457_600) == 819_200
    by_hand = parity_of([a, b], tolerance=0.01, window_fraction=0.5, confidence=0.9).settings
    assert (by_hand.tolerance, by_hand.tolerance_from) == (0.01, "--tolerance")
    assert by_hand.window(2_457_600) == 1_228_800 and by_hand.confidence == 0.9


def test_recipes_that_disagree_ask_for_a_choice(tmp_path):
    paths = [
        write_run(tmp_path / name, steps=60, recipe={"parity": {"tolerance": tolerance}})
        for name, tolerance in (("a", 0.1), ("b", 0.01), ("c", 0.02))
    ]
    with pytest.raises(UserError, match="0.01 in b, 0.02 in c: choose one with --tolerance"):
        parity_of(paths)
    assert len(parity_of(paths, tolerance=0.01).comparisons) == 2


def test_one_run_is_compared_with_the_reference_its_recipe_names(tmp_path):
    a = write_run(tmp_path / "a", steps=60)
    b = write_run(tmp_path / "b", steps=60, recipe={"parity": {"against": str(a)}})
    assert parity_of([b]).reference.name == "a"
    with pytest.raises(UserError, match="names no parity.against"):
        parity_of([a])


@pytest.mark.parametrize(
    "bad",
    [{"tolerance": -0.1}, {"tolerance": math.nan}, {"window_fraction": 0.0}, {"window_tokens": -1},
     {"confidence": 1.0}, {"confidence": 95}, {"window_tokens": 1e6, "window_fraction": 0.1}],
)  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, bad):
    pair = write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)
    with pytest.raises(UserError, match="|".join(bad)):
        parity_of(pair, **bad)


def test_a_missing_tolerance_is_asked_for(tmp_path):
    pair = [
        write_run(tmp_path / name, steps=30, recipe={"parity": {"tolerance": None}})
        for name in "ab"
    ]
    with pytest.raises(UserError, match="pass --tolerance"):
        parity_of(pair)


def test_one_run_is_no_comparison(tmp_path):
    with pytest.raises(UserError, match="two runs or more"):
        compare([load_run(write_run(tmp_path / "a", steps=30))], Settings(0.01))


# --- the command -----------------------------------------------------------------------------


def test_the_command_prints_writes_and_answers(tmp_path):
    paths = [
        write_run(tmp_path / "bf16"),
        write_run(tmp_path / "fp8", gap=0.002, salt=1),
        write_run(tmp_path / "nvfp4", gap=0.03, salt=2),
    ]
    lines = []
    assert parity(paths, echo=lines.append) == 4
    text = "\n".join(lines)
    assert all(len(line) <= 100 for line in lines[:-1])
    assert "tolerance   relative gap of 1.50% (from the recipe)" in text
    assert lines[-1] == f"PASS fp8, FAIL nvfp4   figure: {tmp_path}/nvfp4/parity.png"

    data = json.loads((tmp_path / "nvfp4" / "parity.json").read_text())
    assert data["verdict"] == "FAIL"
    assert [c["verdict"] for c in data["comparisons"]] == ["PASS", "FAIL"]
    train = data["comparisons"][1]["train"]
    assert train["low"] < 0.03 < train["high"] and train["points"] == 30
    assert f"[{100 * train['low']:+.2f}, {100 * train['high']:+.2f}]%" in text
    assert data["comparisons"][1]["valid"]["tokens"] == 300 * 8192

    with Image.open(tmp_path / "nvfp4" / "parity.png") as image:
        assert image.format == "PNG" and image.size == (1600, 1200)
        assert len(np.unique(np.asarray(image.convert("L")))) > 50  # something is drawn
    assert not list(tmp_path.glob("*/*.part"))


def test_the_same_input_gives_the_same_files(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", gap=0.01, salt=1)]
    for out in ("x", "y"):
        assert parity(paths, out=tmp_path / out, echo=lambda line: None) == 0
    x, y = ((tmp_path / out / "parity.json").read_bytes() for out in ("x", "y"))
    assert x == y


def test_broken_and_unfinished_runs_are_drawn_and_written_too(tmp_path):
    paths = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "nan", edit=change(0, math.nan)),
        write_run(tmp_path / "live", positions=range(1, 8)),
    ]
    assert parity(paths, echo=lambda line: None) == 4
    data = json.loads((tmp_path / "live" / "parity.json").read_text())
    assert data["comparisons"][0]["train"]["relative_gap"] is None
    assert (tmp_path / "live" / "parity.png").stat().st_size > 10_000


def test_inconclusive_is_no_failure(tmp_path):
    paths = [write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)]
    lines = []
    assert parity(paths, out=tmp_path / "out", echo=lines.append) == 0
    assert lines[-1].startswith("INCONCLUSIVE b   figure: ")


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    paths = [write_run(tmp_path / "a", steps=30), write_run(tmp_path / "b", steps=30)]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot write the report there"):
        parity(paths, out=tmp_path / "file", echo=lambda line: None)


def test_parity_needs_no_torch(tmp_path):
    write_run(tmp_path / "a", steps=30)
    write_run(tmp_path / "b", steps=30)
    code = "import sys; from nvfp4.lab.parity import parity; parity(sys.argv[1:]); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("b/parity.png")


def test_figures_mark_a_switch_of_precision(tmp_path):
    """A line through both panels at the tokens where the switch's step began, with its text."""

    def edit(rows):
        rows[199]["switch"] = "fprop to bf16 in 20 of 24 linears"

    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", salt=1, edit=edit)]
    figure = parity_figure(parity_of(paths))
    upper, lower = figure.axes
    at = 199 * 16 * 512 / 1e6
    for axes in (upper, lower):
        marks = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [list(line.get_xdata()) for line in marks] == [[at, at]]
    texts = {text.get_text(): text for text in upper.texts}
    assert texts["fprop to bf16"].xy[0] == at  # pyright: ignore[reportAttributeAccessIssue]
