"""The commands: thin, quick where they need no torch, one line for every mistake, exit codes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nvfp4
from nvfp4 import cli
from nvfp4.errors import MachineError, UserError

ROOT = Path(__file__).parent.parent
NO_TORCH = (
    "import sys; sys.modules.update(torch=None, numpy=None, megatron=None);"
    "from nvfp4.cli import main; sys.exit(main(sys.argv[1:]))"
)


def python(*args: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["check", "nemotron_nano_12b_v2_nvfp4"],
        ["check", "tiny_nvfp4", "--diff", "base"],
        ["recipes"],
    ],
    ids=" ".join,
)
def test_recipes_are_checked_where_torch_cannot_be_imported(words):
    done = python("-c", NO_TORCH, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_help_needs_no_package_at_all():
    code = NO_TORCH.replace("torch=None", "torch=None, pydantic=None, omegaconf=None, yaml=None")
    done = python("-c", code, "train", "--help")
    assert done.returncode == 0 and "torchrun" in done.stdout


def test_the_three_ways_to_call_are_one():
    as_module = python("-m", "nvfp4", "--version")
    assert as_module.stdout == f"nvfp4 {nvfp4.__version__}\n"
    script = Path(sys.executable).with_name("nvfp4")
    if script.exists():  # installed
        done = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == as_module.stdout


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_teaches(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert re.search(rf"^examples:\n  nvfp4 {verb}", text, re.MULTILINE)


def test_overview_lists_every_verb(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(words) == 0
        text = capsys.readouterr().out
        assert all(re.search(rf"^  {verb} +\w", text, re.MULTILINE) for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_examples_in_help_are_valid_command_lines(verb):
    _, examples = cli.help_of(cli.VERBS[verb])
    for line in examples.splitlines():
        command = re.split(r" {3,}| > ", line)[0].replace("'", "").split()
        assert command[0] == "torchrun" or command[0] == "nvfp4"
        words = command[command.index("nvfp4") + 1 :]
        cli.parse(words[0], words[1:])


WRONG_USAGE = {
    "chekc tiny_nvfp4": "nvfp4: 'chekc' is no verb; did you mean check? verbs: recipes, check, "
    "doctor, tokenize, train, parity, ablate, verify, bench, inspect",
    "frobnicate": "nvfp4: 'frobnicate' is no verb; verbs: recipes, check, doctor, tokenize, train, "
    "parity, ablate, verify, bench, inspect",
    "check": "nvfp4 check: the following arguments are required: RECIPE; see nvfp4 check --help",
    "check tiny_nvfp4 --train.steps=5": "nvfp4 check: --train.steps=5: write train.steps=5; "
    "keys of a recipe take no dashes",
    "train tiny_nvfp4 --train.steps 5": "nvfp4 train: --train.steps: write train.steps; "
    "keys of a recipe take no dashes",
    "check tiny_nvfp4 --resovled": "nvfp4 check: --resovled: unknown option; "
    "did you mean --resolved?",
    "recipes tiny": "nvfp4 recipes: tiny: unknown argument; see nvfp4 recipes --help",
    "parity a b --tolerance small": "nvfp4 parity: argument --tolerance: invalid float value: "
    "'small'; see nvfp4 parity --help",
    "verify": "nvfp4 verify: the following arguments are required: --golden; "
    "see nvfp4 verify --help",
    "tokenize a.txt --output x": "nvfp4 tokenize: one of the arguments --tokenizer --vocab-size "
    "is required; see nvfp4 tokenize --help",
    "train tiny_nvfp4 optim.lr=fast": 'nvfp4 train: command line: optim.lr: a number is due here, '
    'got "fast"',
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG_USAGE)
def test_wrong_usage_is_answered_in_one_line(words, capsys):
    assert cli.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", WRONG_USAGE[words] + "\n")


def test_options_and_overrides_may_stand_anywhere(capsys):
    assert cli.main("check --diff tiny_nvfp4 tiny_nvfp4 optim.lr=1 ".split()) == 0
    first = capsys.readouterr().out
    assert cli.main("check tiny_nvfp4 optim.lr=1 --diff tiny_nvfp4".split()) == 0
    assert capsys.readouterr().out == first == "optim.lr: 0.003 -> 1.0\n"


def test_several_mistakes_are_one_line_each(capsys):
    assert cli.main(["check", "tiny_nvfp4", "trian.steps=1", "optim.lrr=2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("nvfp4 check: command line: ") for line in lines)


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("that is wrong"), 2), (MachineError("that is wrong"), 3)],
    ids=["user", "machine"],
)
def test_errors_of_the_user_and_of_the_machine(error, code, monkeypatch, capsys):
    def refuse(path):
        raise error

    monkeypatch.setattr("nvfp4.inspect.inspect", refuse)
    assert cli.main(["inspect", "x"]) == code
    assert capsys.readouterr().err == "nvfp4 inspect: that is wrong\n"


def test_exit_codes_of_the_verbs_pass_through(monkeypatch):
    seen = []
    monkeypatch.setattr("nvfp4.lab.parity.parity", lambda **given: seen.append(given) or 4)
    monkeypatch.setattr("nvfp4.doctor.doctor", lambda: 3)
    monkeypatch.setattr(
        "nvfp4.numerics.golden.verify", lambda folder, arithmetic: seen.append(folder) or 1
    )
    assert cli.main("parity a b --tolerance 0.01 --out c".split()) == 4
    assert cli.main(["doctor"]) == 3
    assert cli.main(["verify", "--golden", "d"]) == 1
    nothing = dict.fromkeys(["window_tokens", "window_fraction", "confidence"])
    assert seen == [{"paths": ["a", "b"], "tolerance": 0.01, "out": "c", **nothing}, Path("d")]


def test_train_gets_the_recipe_and_batch_is_checked_before(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("nvfp4.engine.train.train", lambda recipe: seen.append(recipe) or 0)
    assert cli.main(["train", "tiny_nvfp4", "train.steps=50"]) == 0
    assert seen[0].steps == 50 and seen[0].precision.default == "nvfp4"
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", "tiny_nvfp4"]) == 2
    assert "x 3 data-parallel ranks = 12" in capsys.readouterr().err
    assert len(seen) == 1


def test_tokenize_passes_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "nvfp4.data.tokenize.tokenize",
        lambda inputs, output, **rest: seen.append((inputs, output, rest)),
    )
    assert cli.main("tokenize a b.txt --output c --vocab-size 300 --workers 2".split()) == 0
    rest = {"tokenizer": None, "vocab_size": 300, "text_column": "text", "workers": 2}
    assert seen == [(["a", "b.txt"], "c", {**rest, "overwrite": False})]


def test_the_unexpected_keeps_its_traceback_and_exits_with_1():
    code = (
        "import sys, nvfp4.doctor; nvfp4.doctor.doctor = lambda: 1 / 0;"
        "from nvfp4.cli import main; sys.exit(main(['doctor']))"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("division by zero\n")


def test_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -u -m nvfp4 check tiny_nvfp4 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("recipe      tiny_nvfp4")


def test_other_ranks_leave_recipe_errors_to_rank_0(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SECONDS_FOR_RANK_0", 0)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", "tiny_nvfp4", "train.steps=x"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_torchrun_shows_a_recipe_error_once():
    done = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "nvfp4", "train", "tiny_nvfp4", "trian.steps=5",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 1  # torchrun's own answer to any failed process
    assert done.stderr.count('command line: trian: unknown key; did you mean "train"?') == 1
    assert "in complain" not in done.stderr  # no traceback


def test_torchrun_keeps_the_traceback_of_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def fail(recipe):
        raise RuntimeError("disk is full")

    monkeypatch.setattr("nvfp4.engine.train.train", fail)
    with pytest.raises(RuntimeError):
        cli.main(["train", "tiny_nvfp4"])
    assert "disk is full" in (tmp_path / "error.json").read_text()


def test_public_names_are_there_and_lazy():
    done = python(
        "-c", "import sys, nvfp4; dir(nvfp4); print(len(sys.modules), 'torch' in sys.modules)"
    )
    assert done.stdout.split()[1] == "False"
    for name in nvfp4.__all__:
        assert getattr(nvfp4, name) is not None
    assert set(nvfp4.__all__) <= set(dir(nvfp4))
    assert {name for names in nvfp4._HOME.values() for name in names} == set(nvfp4.__all__)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        nvfp4.quantise  # noqa: B018
