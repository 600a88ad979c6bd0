"""Run folders as they are found on disk, and which losses of two of them are paired."""

import numpy as np
import pytest
from test_parity import HASH, interval_of, judge, write_run

from nvfp4.errors import UserError
from nvfp4.lab.compare import align
from nvfp4.lab.runs import Curve, load_run

# --- run folders -----------------------------------------------------------------------------


def test_a_run_is_read_as_written(tmp_path):
    run = load_run(write_run(tmp_path / "a", steps=60))
    assert run.name == "a" and run.data_hash == HASH and run.finished
    assert run.tokens_per_step == 8192 and run.planned_tokens == 60 * 8192
    assert run.train.tokens[-1] == 60 * 8192 and len(run.train) == 60
    assert list(run.valid.tokens) == [50 * 8192, 60 * 8192]
    assert run.perf == ()


@pytest.mark.parametrize("tail", ['{"step": 61, "tok', '{"step": 6', "{"])
def test_a_row_in_the_making_is_left_out(tmp_path, tail):
    folder = write_run(tmp_path / "a", steps=60)
    with open(folder / "metrics.jsonl", "a") as out:
        out.write(tail)
    assert len(load_run(folder).train) == 60


def test_a_whole_last_row_needs_no_newline(tmp_path):
    folder = write_run(tmp_path / "a", steps=60)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip("\n"))
    assert len(load_run(folder).train) == 60


BAD_FILES = [
    ("metrics.jsonl", None, "metrics.jsonl: missing"),
    ("metrics.jsonl", b"", "metrics.jsonl: no training step"),
    ("metrics.jsonl", b'{"step": 1, "tok\n{"step": 2}\n', "metrics.jsonl:1: not a JSON row"),
    ("metrics.jsonl", b"[1]\n", "metrics.jsonl:1: a row must be a JSON object"),
    ("metrics.jsonl", b'{"step": 1, "tokens": 8}\n', 'metrics.jsonl:1: "loss" is missing'),
    ("metrics.jsonl", b'{"step": 1, "tokens": 8, "loss": "low"}\n', '"loss" is "low", not a num'),
    ("metrics.jsonl", b'{"step": 0, "tokens": 0, "loss": 1}\n', "must be positive"),
    (
        "metrics.jsonl",
        b'{"step": 2, "tokens": 8, "loss": 1}\n{"step": 1, "tokens": 4, "loss": 1}\n',
        "metrics.jsonl:2: step 1 (4 tokens) comes after step 2",
    ),
    ("metrics.jsonl", b'{"step": 1}\n\xff\xfe\n', "metrics.jsonl:2: not UTF-8"),
    ("perf.jsonl", b"nonsense\n", "perf.jsonl:1: not a JSON row"),
    ("recipe.yaml", None, "recipe.yaml: missing"),
    ("recipe.yaml", b"run: {name: a\ntrain: [\n", "recipe.yaml:"),
    ("recipe.yaml", b"", "recipe.yaml:1: not a recipe"),
    ("env.json", None, "env.json: missing"),
    ("env.json", b'{\n"data_hash": \n}', "env.json:3: not JSON"),
    ("env.json", b"[]", "env.json:1: must be a JSON object"),
]


@pytest.mark.parametrize("name, content, message", BAD_FILES)
def test_unreadable_files_are_named_in_one_line(tmp_path, name, content, message):
    folder = write_run(tmp_path / "a", steps=30)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_run(folder)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(folder / name) in str(error.value)


def test_a_missing_folder_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="no such run folder; make it with `nvfp4 train"):
        load_run(tmp_path / "nothing")


# --- alignment -------------------------------------------------------------------------------


def test_alignment_keeps_common_token_counts_only():
    x = Curve(np.array([2, 4, 6, 8]), np.array([1.0, 2.0, 3.0, 4.0]))
    ref = Curve(np.array([3, 4, 8, 9]), np.array([10.0, 20.0, 30.0, 40.0]))
    pair = align(x, ref)
    assert list(pair.tokens) == [4, 8]
    assert list(pair.x) == [2.0, 4.0] and list(pair.ref) == [20.0, 30.0]
    assert pair.gap == pytest.approx(6 / 50 - 1)
    assert list(pair.between(4, 8).tokens) == [8]  # (start, end]: the batch that ends there


def test_runs_logged_at_other_steps_meet_where_both_logged(tmp_path):
    every_step = write_run(tmp_path / "a", steps=600)
    third = write_run(tmp_path / "b", steps=600, positions=range(3, 601, 3), gap=0.01, salt=1)
    comparison = judge(every_step, third)
    assert list(comparison.train.tokens) == [8192 * step for step in range(3, 601, 3)]
    assert interval_of(comparison).points == 20


def test_runs_without_a_common_token_count_are_refused(tmp_path):
    odd = write_run(tmp_path / "a", steps=99, positions=range(1, 100, 2))
    even = write_run(tmp_path / "b", steps=99, positions=range(2, 100, 2))
    with pytest.raises(UserError, match="no common token count"):
        judge(odd, even)


def test_other_data_is_refused_with_both_names(tmp_path):
    a = write_run(tmp_path / "a", steps=60)
    b = write_run(tmp_path / "b", steps=60, data_hash="ffff00001111")
    with pytest.raises(UserError) as error:
        judge(a, b)
    assert all(part in str(error.value) for part in (str(a), str(b), HASH[:12], "ffff00001111"))


def test_a_run_without_data_hash_is_refused(tmp_path):
    a = write_run(tmp_path / "a", steps=60)
    with pytest.raises(UserError, match='b/env.json: "data_hash" is missing'):
        judge(a, write_run(tmp_path / "b", steps=60, data_hash=None))


def test_other_batches_are_refused(tmp_path):
    a = write_run(tmp_path / "a", steps=60)
    with pytest.raises(UserError, match="share no batches; train both with the same"):
        judge(a, write_run(tmp_path / "b", steps=60, batch=32))
    with pytest.raises(UserError, match="model.seq_length 512 and .* 256"):
        judge(a, write_run(tmp_path / "c", steps=60, batch=32, seq=256))
