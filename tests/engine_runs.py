"""Small runs for the tests of the engine: one text, one model, recipes that differ in some keys."""

import atexit
import json
import shutil
import sysconfig
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from nvfp4.config import Recipe, load_recipe
from nvfp4.engine import parallel

SMALL = [
    "model.pattern=M*-M", "model.hidden_size=64", "model.ffn_hidden_size=128",
    "model.num_attention_heads=4", "model.num_query_groups=2", "model.kv_channels=16",
    "model.mamba.num_heads=16", "model.mamba.head_dim=8", "model.mamba.state_dim=16",
    "model.mamba.num_groups=2", "model.vocab_size=320", "model.seq_length=64",
    "train.global_batch_size=4", "train.micro_batch_size=2", "train.steps=6",
    "schedule.warmup_steps=2", "checkpoint.every=100", "metrics.every=1", "metrics.valid_every=4",
    "metrics.valid_batches=1", "metrics.tensorboard=false",
]  # fmt: skip


@cache
def text_folder() -> Path:
    """Some real text, made once per test process; the data cache comes beside it."""
    folder = Path(mkdtemp(prefix="engine_runs_")) / "text"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "ast.py", "datetime.py", "inspect.py", "tarfile.py", "typing.py"):
        (folder / f"{name}.txt").write_text((library / name).read_text())
    return folder


def overrides(folder: Path, *changes: str) -> list[str]:
    """Command-line overrides of a small run in `folder`."""
    text = text_folder()
    places = [
        f"run.dir={folder}",
        f"data.train.0.path={text}",
        f"data.cache_dir={text.parent / 'cache'}",
    ]
    return [*SMALL, "data.valid_fraction=0.2", *places, *changes]


def small(folder: Path, *changes: str) -> Recipe:
    return load_recipe("base", overrides(folder, *changes))


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def started(recipe: Recipe):
    """A process group of one and Megatron's groups, with one thread, as the engine sets them up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    world = parallel.start(recipe.parallel, seed=recipe.run.seed, deterministic=False)
    try:
        yield world
    finally:
        parallel.stop(world)
        torch.set_num_threads(threads)
