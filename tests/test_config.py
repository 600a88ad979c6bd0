"""Recipes: every careless mistake gets one line that says where it is and what would be right."""

import pickle
import re
from pathlib import Path

import pytest

from nvfp4.config import Recipe, RecipeError, load_recipe
from nvfp4.config_files import shipped
from nvfp4.config_schema import Run, Train

TINY = "base: tiny_nvfp4\n"


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Tests write `mine.yaml` into a folder of their own and name it as a user would."""
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> Recipe:
    Path("mine.yaml").write_text(text)
    return load_recipe("mine.yaml", overrides)


def mistakes(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as error:
        load(text, *overrides)
    assert error.value.exit_code == 2
    assert str(error.value).splitlines() == list(error.value.lines)
    return list(error.value.lines)


# One change at a time to a recipe that is right: what was written, and the whole answer.
WRONG_FILES = {
    "misspelled section": (
        "modle: {hidden_size: 64}\n",
        'mine.yaml:2: modle: unknown key; did you mean "model"?',
    ),
    "misspelled key": (
        "model:\n  hiden_size: 64\n",
        'mine.yaml:3: model.hiden_size: unknown key; did you mean "hidden_size"?',
    ),
    "misspelled key two levels down": (
        "model:\n  mamba:\n    num_head: 8\n",
        'mine.yaml:4: model.mamba.num_head: unknown key; did you mean "num_heads"?',
    ),
    "misspelled key in a list": (
        "data:\n  train:\n    - path: a.txt\n    - {path: b.txt, wieght: 2}\n",
        'mine.yaml:5: data.train.1.wieght: unknown key; did you mean "weight"?',
    ),
    "key at the top": (
        "lr: 1.0e-3\n",
        "mine.yaml:2: lr: unknown key here; it belongs to optim.lr",
    ),
    "key in the wrong section": (
        "train: {warmup_steps: 5}\n",
        "mine.yaml:2: train.warmup_steps: unknown key here; it belongs to schedule.warmup_steps",
    ),
    "section inside a section": (
        "train:\n  optim: {lr: 1.0}\n",
        "mine.yaml:3: train.optim: unknown key here; it belongs to optim",
    ),
    "misspelled key in the wrong section": (
        "train: {warmup_step: 5}\n",
        "mine.yaml:2: train.warmup_step: unknown key; did you mean schedule.warmup_steps?",
    ),
    "hyphen for underscore": (
        "train: {global-batch-size: 16}\n",
        'mine.yaml:2: train.global-batch-size: unknown key; write "global_batch_size"',
    ),
    "key that is like no other": (
        "optim: {quux: 1}\n",
        "mine.yaml:2: optim.quux: unknown key; known in optim: "
        "name, lr, betas, eps, weight_decay",
    ),
    "key twice": (
        "train:\n  steps: 50\n  micro_batch_size: 2\n  steps: 60\n",
        "mine.yaml:5: train.steps: written twice, first on line 3",
    ),
    "section twice": (
        "train: {steps: 50}\nrun: {seed: 1}\ntrain: {micro_batch_size: 2}\n",
        "mine.yaml:4: train: written twice, first on line 2",
    ),
    "list where a mapping is due": (
        "optim:\n  - lr: 1.0e-3\n",
        'mine.yaml:2: optim: a mapping (key: value) is due here, got [{"lr": 0.001}]; '
        "its keys: name, lr, betas, eps, weight_decay",
    ),
    "value where a mapping is due": (
        "parallel: 2\n",
        "mine.yaml:2: parallel: a mapping (key: value) is due here, got 2; its keys: "
        "tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, "
        "sequence_parallel, distributed_optimizer",
    ),
    "empty section": (
        "optim:\n",
        "mine.yaml:2: optim: a mapping (key: value) is due here, got null; "
        "its keys: name, lr, betas, eps, weight_decay",
    ),
    "mapping where a list is due": (
        "precision: {rules: {use: bf16}}\n",
        'mine.yaml:2: precision.rules: a list is due here, got {"use": "bf16"}',
    ),
    "value that is not allowed": (
        "train: {dtype: pb16}\n",
        'mine.yaml:2: train.dtype: "pb16" is not allowed; allowed: bf16, fp32; '
        'did you mean "bf16"?',
    ),
    "word for a number": (
        "optim: {lr: fast}\n",
        'mine.yaml:2: optim.lr: a number is due here, got "fast"',
    ),
    "number in quotes": (
        "train: {steps: '50'}\n",
        'mine.yaml:2: train.steps: a whole number is due here, got "50"; remove the quotes',
    ),
    "yes for a number": (
        "train: {steps: yes}\n",
        "mine.yaml:2: train.steps: a whole number is due here, got true",
    ),
    "one for true": (
        "run: {deterministic: 1}\n",
        "mine.yaml:2: run.deterministic: true or false is due here, got 1",
    ),
    "part of a step": (
        "train: {steps: 10.5}\n",
        "mine.yaml:2: train.steps: a whole number is due here, got 10.5",
    ),
    "number for a text": (
        "run: {name: 12}\n",
        "mine.yaml:2: run.name: a text is due here, got 12; put it in quotes",
    ),
    "out of range": (
        "schedule: {decay_fraction: 1.5}\n",
        "mine.yaml:2: schedule.decay_fraction: must be less than or equal to 1, got 1.5",
    ),
    "no number at all": (
        "optim: {lr: .nan}\n",
        "mine.yaml:2: optim.lr: a finite number is due here, got NaN",
    ),
    "half a pair": (
        "optim: {betas: [0.9]}\n",
        "mine.yaml:2: optim.betas.1: missing; write it here, or start from a recipe that has it "
        "with base:",
    ),
    "shape that cannot be": (
        "model:\n  num_query_groups: 3\n",
        "mine.yaml:3: model.num_query_groups: model.num_attention_heads is 4; "
        "it must be a multiple of model.num_query_groups (3)",
    ),
    "both lengths": (
        "train:\n  tokens: 1_000_000\n",
        "mine.yaml:3: train.tokens: train.steps is set too (120); one of them says how long the "
        "run is; set the other one to null",
    ),
    "no length": (
        "train:\n  steps: null\n",
        "mine.yaml:3: train.steps: neither train.steps nor train.tokens is set; "
        "set exactly one of them",
    ),
    "batch that does not divide": (
        "train: {micro_batch_size: 3}\n",
        "mine.yaml:2: train.micro_batch_size: train.global_batch_size 8 is no multiple of it (3)",
    ),
    "schedule that does not fit": (
        "train: {steps: 20}\nschedule: {warmup_steps: 17}\n",
        "mine.yaml:3: schedule.warmup_steps: 17 warm-up and 4 decay steps do not fit into "
        "20 steps; lower schedule.warmup_steps or schedule.decay_fraction",
    ),
    "learning rate upside down": (
        "schedule: {min_lr: 1}\n",
        "mine.yaml:2: schedule.min_lr: 1 is above optim.lr 0.003",
    ),
    "window longer than the run": (
        "parity: {window_tokens: 1e9}\n",
        "mine.yaml:2: parity.window_tokens: 1,000,000,000 tokens are more than the whole run has "
        "(245,760)",
    ),
    "parallel size that does not divide": (
        "parallel: {tensor_model_parallel_size: 3}\n",
        "mine.yaml:2: parallel.tensor_model_parallel_size: model.vocab_size is 2048; "
        "it must be a multiple of parallel.tensor_model_parallel_size (3)",
    ),
    "tokens that are no whole blocks": (
        "model: {seq_length: 100}\ntrain: {micro_batch_size: 1}\n",
        "mine.yaml:2: model.seq_length: train.micro_batch_size 1 x 100 / "
        "parallel.context_parallel_size 1 tokens are no multiple of 16, the block of nvfp4 "
        "in wgrad",
    ),
    "environment": (
        "run: {dir: '${oc.env:HOME}/runs'}\n",
        "mine.yaml:2: run.dir: ${oc.env:HOME}/runs: only ${section.key} is understood; "
        "a recipe reads no environment variables and calls no functions",
    ),
    "interpolation of nothing": (
        "run: {dir: 'runs/${run.nam}'}\n",
        "mine.yaml:2: run.dir: cannot resolve runs/${run.nam}: "
        "Interpolation key 'run.nam' not found",
    ),
    "interpolation in a circle": (
        "run: {name: '${run.dir}', dir: '${run.name}'}\n",
        None,
    ),
    "tag": (
        "run: !!python/object/apply:os.system [exit 1]\n",
        "mine.yaml:2: run: the tag tag:yaml.org,2002:python/object/apply:os.system is not allowed: "
        "recipes are plain data",
    ),
    "anchor": (
        "train: &t {steps: 50}\noptim: *t\n",
        "mine.yaml:2: optim: anchors and aliases are not read; use base: or ${section.key}",
    ),
    "key that is no word": (
        "train: {1: 2}\n",
        "mine.yaml:2: train.1: a key must be a plain word",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_file(name):
    text, answer = WRONG_FILES[name]
    lines = mistakes(TINY + text)
    if answer is None:
        assert len(lines) == 2 and all(line.startswith("mine.yaml:2: run.") for line in lines)
    else:
        assert lines == [answer]


# What precision/policy.py refuses is told with the place in the file; the words are its own.
WRONG_PRECISION = {
    "unknown policy": ("default: nvfp5", "mine.yaml:3: precision.default: ", "did you mean nvfp4"),
    "rule that matches nothing": (
        "rules:\n    - {use: bf16, kind: 'attention.*'}\n    - {use: bf16, match: '*.lm_head'}",
        "mine.yaml:5: precision.rules.1: ",
        "'*.lm_head' fits no linear",
    ),
    "rule that decides nothing": (
        "rules: [{use: bf16, blocks: 0}]",
        "mine.yaml:3: precision.rules.0",
        "decides nothing",
    ),
    "rule without use": (
        "rules: [{match: '*'}]",
        "mine.yaml:3: precision.rules.0.use: ",
        "missing",
    ),
    "more blocks than there are": (
        "num_layers_at_start_in_bf16: 12",
        "mine.yaml:3: precision.num_layers_at_start_in_bf16: ",
        "12 first and 1 last blocks",
    ),
}


@pytest.mark.parametrize("name", WRONG_PRECISION)
def test_wrong_precision(name):
    text, place, words = WRONG_PRECISION[name]
    (line,) = mistakes(f"{TINY}precision:\n  {text}\n")
    assert line.startswith(place) and words in line


def test_dimension_without_whole_blocks_names_module_and_remedy():
    (line,) = mistakes(TINY + "model: {ffn_hidden_size: 520}\n")
    assert "decoder.layers.1.mlp.linear_fc1: out_features is 520" in line
    rule = re.search(r"precision\.rules=\[\{.*?\}\]", line)
    assert rule
    remedy = "precision.rules=[{use: bf16, kind: 'mlp.*'}]"
    load(TINY + "model: {ffn_hidden_size: 520}\n", remedy)


WRONG_OVERRIDES = {
    "modle.hidden_size=1": 'modle: unknown key; did you mean "model"?',
    "model.hidden-size=1": 'model.hidden-size: unknown key; write "hidden_size"',
    "optim.warmup_steps=1": "optim.warmup_steps: unknown key here; it belongs to "
    "schedule.warmup_steps",
    "train.steps.value=1": "train.steps.value: unknown key; train.steps has no keys of its own",
    "data.train.path=x": "data.train.path: unknown key; data.train has no keys of its own; "
    "its entries have numbers, such as .0",
    "data.train.1.path=x": "data.train.1.path: data.train has 1 entries, counted from 0",
    "data.train.0.weigth=2": 'data.train.0.weigth: unknown key; did you mean "weight"?',
    "precision.rules.0.use=bf16": "precision.rules.0.use: precision.rules has 0 entries, "
    "counted from 0",
    "--train.steps=5": "--train.steps=5: write train.steps=5",
    "train.steps": "train.steps: write train.steps=VALUE, without spaces",
    "50": "50: write section.key=VALUE, without spaces",
    "train..steps=5": "train..steps=5: 'train..steps' is no key; write section.key=value",
    "=5": "=5: '' is no key; write section.key=value",
    "model.pattern=*M": "model.pattern: *M is not a YAML value; quote it: model.pattern='\"...\"'",
    "train.steps=many": 'train.steps: a whole number is due here, got "many"',
    "train.steps=0": "train.steps: must be greater than or equal to 1, got 0",
    "optim.betas=[0.9, 0.95, 0.99]": "optim.betas: 2 values are due here, got [0.9, 0.95, 0.99]",
    # the key that is upset stands in the file, what upsets it here
    "train.global_batch_size=7": "train.micro_batch_size: train.global_batch_size 7 is no multiple "
    "of it (4)",
    "train={steps: 1, stepz: 2}": 'train.stepz: unknown key; did you mean "steps"?',
    "run.dir=${oc.env:HOME}": "run.dir: ${oc.env:HOME}: only ${section.key} is understood; "
    "a recipe reads no environment variables and calls no functions",
    "base=tiny_bf16": "base: unknown key; known at the top level: run, model, data, train, optim, "
    "schedule, parallel, precision, checkpoint, metrics, parity",
}


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_wrong_override(override):
    assert mistakes(TINY, override)[0] == f"command line: {WRONG_OVERRIDES[override]}"


def test_pattern_of_mlp_blocks_on_the_command_line():
    assert load("base: base\n", "model.pattern=---").model.pattern == "---"


def test_several_mistakes_are_told_together_each_with_its_place():
    text = TINY + "model: {hiden_size: 64}\ntrain:\n  dtype: fp8\n  micro_batch_size: [1]\n"
    assert mistakes(text, "run.seed=-1") == [
        "command line: run.seed: must be greater than or equal to 0, got -1",
        'mine.yaml:2: model.hiden_size: unknown key; did you mean "hidden_size"?',
        "mine.yaml:5: train.micro_batch_size: a whole number is due here, got [1]",
        "mine.yaml:4: train.dtype: \"fp8\" is not allowed; allowed: bf16, fp32",
    ]  # fmt: skip
    assert len(mistakes(TINY, "trian.steps=1", "optim.lr=2", "optim.lrr=3")) == 2


def test_contradictions_are_told_together():
    text = TINY + "train: {micro_batch_size: 3}\nschedule: {min_lr: 1}\nprecision: {default: x}\n"
    keys = [line.split(": ")[1] for line in mistakes(text)]
    assert keys == ["train.micro_batch_size", "schedule.min_lr", "precision.default"]


BROKEN_YAML = {
    "train: {steps: 5\nrun: 3\n": r"mine.yaml:\d+: column \d+: not valid YAML: ",
    "model:\n  pattern: *M-\n": r"mine.yaml:2: column 12: not valid YAML: .*needs quotes",
    "train:\n\tsteps: 5\n": r"mine.yaml:2: column 1: not valid YAML: .*not with tabs",
    "- a\n- b\n": r"mine.yaml:1: a recipe is a mapping",
    "# nothing\n": r"mine.yaml: the file is empty",
    "a: \x00\n": r"mine.yaml: ",
}


@pytest.mark.parametrize("text", BROKEN_YAML)
def test_broken_yaml_gives_line_and_column(text):
    (line,) = mistakes(text)
    assert re.match(BROKEN_YAML[text], line)


def test_file_that_is_no_text():
    Path("mine.yaml").write_bytes(b"run: \xff\xfe\n")
    with pytest.raises(RecipeError, match="^mine.yaml: not a text file"):
        load_recipe("mine.yaml")


def test_recipe_not_found():
    with pytest.raises(RecipeError, match='did you mean "tiny_nvfp4"') as error:
        load_recipe("tiny_nvpf4")
    assert all(name in str(error.value) for name in shipped())
    with pytest.raises(RecipeError, match="'runs/old.yaml' not found"):
        load_recipe("runs/old.yaml")
    Path("folder").mkdir()
    with pytest.raises(RecipeError, match="without recipe.yaml"):
        load_recipe("folder")


def test_base_missing_circular_or_no_name():
    assert re.match("mine.yaml:1: base: recipe 'tiny_nvpf4' not found; did", mistakes(
        "base: tiny_nvpf4\n")[0])  # fmt: skip
    Path("other.yaml").write_text("run: {seed: 2}\nbase: mine.yaml\n")
    assert mistakes("base: other.yaml\n") == [
        "other.yaml:2: base: the recipes form a circle: mine.yaml -> other.yaml -> mine.yaml"
    ]
    assert "mine.yaml:1: base: must be one file" in mistakes("base: [tiny_bf16, tiny_fp8]\n")[0]


def test_mistakes_are_placed_in_the_file_of_the_chain_that_made_them():
    Path("below.yaml").write_text("base: tiny_nvfp4\n\ntrain:\n  dtype: fp8\n")
    assert mistakes("base: below\n")[0].startswith("below.yaml:4: train.dtype")
    assert mistakes("base: below\ntrain: {dtype: fp9}\n")[0].startswith("mine.yaml:2: train.dtype")
    Path("below.yaml").write_text("base: tiny_nvfp4\ndata: {train: [{path: a}, {pth: b}]}\n")
    assert mistakes("base: below.yaml\n")[0].startswith("below.yaml:2: data.train.1.p")
    # a list replaces a list, so nothing of the lower one may be blamed
    assert mistakes("base: below.yaml\ndata: {train: [{}]}\n")[0].startswith("mine.yaml:2: data")


def test_layers_merge_mappings_and_replace_everything_else():
    Path("below.yaml").write_text(
        "base: tiny_nvfp4\ntrain: {steps: 70}\ndata: {train: [{path: a, weight: 2}, {path: b}]}\n"
    )
    text = "base: below.yaml\nmodel: {mamba: {state_dim: 64}}\ndata: {train: [{path: c}]}\n"
    recipe = load(text, "train.steps=80", "optim.betas.1=0.99", "data.train.0.weight=3")
    assert (
        recipe.model.mamba
        and recipe.model.mamba.state_dim == 64
        and recipe.model.mamba.num_heads == 16
    )
    assert [(s.path, s.weight) for s in recipe.data.train] == [("c", 3.0)]
    assert recipe.train.steps == 80 and recipe.optim.betas == (0.9, 0.99)
    assert recipe.precision.default == "nvfp4" and recipe.train.micro_batch_size == 4


def test_values_are_read_as_numbers():
    recipe = load(TINY + "optim: {lr: 3e-4}\n", "train.steps=null", "train.tokens=2e6",
                  "parity.window_tokens=1_000")  # fmt: skip
    assert (recipe.optim.lr, recipe.train.tokens, recipe.train.steps) == (3e-4, 2_000_000, None)
    assert recipe.parity.window_tokens == 1000


def test_name_and_folder_follow_the_file_and_interpolation():
    recipe = load(TINY)
    assert (recipe.run.name, recipe.run.dir) == ("mine", "runs/mine")
    recipe = load(TINY, "run.name=other")
    assert (recipe.run.name, recipe.run.dir) == ("other", "runs/other")
    text = TINY + "run: {dir: 'x/${run.name}-${optim.lr}-${train.global_batch_size}'}\n"
    assert load(text, "optim.lr=0.5").run.dir == "x/mine-0.5-8"
    number = load(TINY + "schedule: {warmup_steps: '${train.micro_batch_size}'}\n")
    assert number.schedule.warmup_steps == 4
    assert load("model: {}\n".replace("model: {}", "train: {steps: 30}")).run.dir == "runs/mine"


@pytest.mark.parametrize("how", ["command line", "file", "include"])
@pytest.mark.parametrize("steps", [20, 1500])
def test_derived_lengths_follow_the_last_override(how, steps):
    Path("short.yaml").write_text(f"base: tiny_nvfp4\ntrain: {{steps: {steps}}}\n")
    recipe = {
        "command line": lambda: load(TINY, f"train.steps={steps}"),
        "file": lambda: load(f"{TINY}train: {{steps: {steps}}}\n"),
        "include": lambda: load("base: short.yaml\n"),
    }[how]()
    assert (recipe.steps, recipe.decay_steps) == (steps, steps // 5)
    batch = load(TINY, "train.steps=null", f"train.tokens={steps * 2048}",
                 "train.global_batch_size=16", "schedule.warmup_steps=3")  # fmt: skip
    assert (batch.tokens_per_step, batch.steps) == (4096, steps // 2)


def test_tokens_that_are_no_whole_steps_are_rounded_up():
    recipe = load(TINY, "train.steps=null", "train.tokens=204801")
    assert recipe.steps == 101
    assert recipe.decay_steps == 20


def test_resolved_recipe_is_a_recipe_with_the_same_meaning():
    text = TINY + (
        "run: {name: 'null', dir: '1e5'}\n"
        "data: {train: [{path: 'a b: #c', weight: 0.1}, {path: '*.txt'}], text_column: 'yes'}\n"
        "optim: {lr: 1.2345678901234567e-5, eps: 1e-30}\nschedule: {min_lr: 1e-6}\n"
        "precision:\n  rules: [{use: mine, kind: 'attention.*'}, {use: bf16, blocks: '-2..'}]\n"
        "  policies: {mine: {base: nvfp4, dgrad: null}}\n"
    )
    recipe = load(text)
    Path("resolved.yaml").write_text(recipe.to_yaml())
    again = load_recipe("resolved.yaml")
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert again.plan == recipe.plan
    assert recipe.optim.lr == 1.2345678901234567e-5 and recipe.run.dir == "1e5"


def test_run_folder_is_a_recipe():
    recipe = load(TINY, "train.steps=77")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe("runs/x") == load_recipe("runs/x/recipe.yaml") == recipe


def test_recipe_is_frozen_and_can_be_sent_to_another_process():
    recipe = load(TINY)
    with pytest.raises(ValueError, match="frozen"):
        setattr(recipe, "train", recipe.train)  # noqa: B010
    assert recipe.plan is recipe.plan
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_recipe_built_in_python_is_checked_too():
    with pytest.raises(ValueError, match="no multiple of it"):
        Recipe(train=Train(steps=50, micro_batch_size=3))
    assert Recipe(run=Run(name="a")).run.dir == "runs/a"


def test_accumulation_is_checked_against_the_processes():
    recipe = load(TINY)
    assert [recipe.accumulation(n) for n in (1, 2)] == [2, 1]
    with pytest.raises(ValueError, match=r"8 is no multiple of train.micro_batch_size 4 x 3 data"):
        recipe.accumulation(3)
    split = load(TINY, "parallel.tensor_model_parallel_size=2", "precision.default=bf16")
    assert split.accumulation(2) == 2
    with pytest.raises(ValueError, match="3 processes are no multiple"):
        split.accumulation(3)


@pytest.mark.parametrize(
    ("written", "paths"),
    [
        ("data.train=my.txt", ["my.txt"]),
        ("data.train=[a.txt, b.jsonl]", ["a.txt", "b.jsonl"]),
        ("data.train=[a.txt, {path: b.jsonl, weight: 2}]", ["a.txt", "b.jsonl"]),
    ],
)
def test_a_source_may_be_its_path_alone(written, paths):
    recipe = load_recipe("tiny_bf16", [written])
    assert [source.path for source in recipe.data.train] == paths
    assert load_recipe("tiny_bf16", ["data.valid=v.txt"]).data.valid[0].path == "v.txt"
