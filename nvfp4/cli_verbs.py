"""The verbs of the command line, in the order of `nvfp4 --help`.

A verb is a function that declares its arguments and returns what runs them: one function call of
the toolkit. Its docstring is its --help: the question it answers, then examples. Only the verbs
that need torch import it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nvfp4.errors import UserError

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse that answers a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        message = message.replace(", a.b=c", "")  # argparse lists it as required; it is not
        raise UserError(f"{message}; see nvfp4 {self.prog.split()[-1]} --help")


def add_recipe(parser: Parser) -> None:
    what = "a YAML file, a run folder, or the name of a shipped recipe"
    parser.add_argument("recipe", metavar="RECIPE", help=what)
    parser.add_argument(
        "override", metavar="a.b=c", nargs="*", help="changes one key, such as train.steps=50"
    )


def recipes(parser: Parser) -> Run:
    """Which recipes are shipped, and what each is for.

    nvfp4 recipes
    """

    def run(args: argparse.Namespace) -> int:
        from nvfp4.config_check import recipes

        return recipes()

    return run


def check(parser: Parser) -> Run:
    """Is a recipe valid, and what does it come to? No GPU, no torch, under a second.

    nvfp4 check tiny_nvfp4                      batch, schedule, precision of every linear
    nvfp4 check tiny_nvfp4 train.steps=50       the same with one key changed
    nvfp4 check my.yaml --resolved > full.yaml  every key, bases and overrides merged
    nvfp4 check tiny_nvfp4 --diff tiny_bf16     what the two differ in
    """
    add_recipe(parser)
    parser.add_argument("--resolved", action="store_true", help="print every key, as a recipe")
    parser.add_argument("--diff", metavar="OTHER", help="print the keys that differ from OTHER")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.config_check import check

        return check(args.recipe, args.override, resolved=args.resolved, against=args.diff)

    return run


def doctor(parser: Parser) -> Run:
    """What runs on this machine, and why the rest does not. Exit code 3 if training cannot.

    nvfp4 doctor
    """

    def run(args: argparse.Namespace) -> int:
        from nvfp4.doctor import doctor

        return doctor()

    return run


def tokenize(parser: Parser) -> Run:
    """Text files to a Megatron .bin/.idx prefix, which data.train takes.

    nvfp4 tokenize books/ --tokenizer my_tokenizer --output data/books --workers 8
    nvfp4 tokenize a.jsonl 'more/*.parquet' --vocab-size 2048 --output data/mine
    nvfp4 train tiny_nvfp4 data.train=data/mine data.tokenizer=data/mine_tokenizer
    """
    parser.add_argument(
        "inputs", metavar="TEXT", nargs="+", help="files, folders, globs, or stdlib"
    )
    parser.add_argument("--output", metavar="PREFIX", required=True, help="for PREFIX.bin and .idx")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--tokenizer", metavar="DIR", help="a Hugging Face tokenizer folder")
    how.add_argument("--vocab-size", type=int, help="train a byte-level BPE of this size instead")
    parser.add_argument("--text-column", default="text", help="field of .jsonl and .parquet files")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: threads of this one")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing PREFIX")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.data.tokenize import tokenize

        tokenize(**vars(args))
        return 0

    return run


def train(parser: Parser) -> Run:
    """Trains a recipe, or goes on with the run in its folder.

    nvfp4 train tiny_nvfp4                      a few minutes on one CPU core
    nvfp4 train tiny_nvfp4 train.steps=50 run.name=short
    nvfp4 train tiny_nvfp4 data.train=my.txt run.name=mine
    torchrun --standalone --nproc-per-node 2 -m nvfp4 train tiny_nvfp4
    """
    add_recipe(parser)

    def run(args: argparse.Namespace) -> int:
        from nvfp4.config import load_recipe

        recipe = load_recipe(args.recipe, args.override)
        recipe.accumulation(int(os.environ.get("WORLD_SIZE", "1")))  # before seconds of imports

        from nvfp4.engine.train import train

        return recorded(train)(recipe) or 0

    return run


def recorded(function: Callable[..., int]) -> Callable[..., int | None]:
    """Under torchrun: leaves the traceback where torchrun's summary finds it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return function
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(function)


def parity(parser: Parser) -> Run:
    """Does the loss of a run match a reference run? Exit code 4 if it does not.

    nvfp4 parity runs/tiny_bf16 runs/tiny_fp8 runs/tiny_nvfp4
    nvfp4 parity runs/tiny_nvfp4                against the run that its recipe names
    nvfp4 parity runs/a runs/b --tolerance 0.01 --out report
    """
    parser.add_argument("paths", metavar="RUN", nargs="+", help="run folders; the reference first")
    parser.add_argument("--tolerance", type=float, help="largest relative gap, 0.015 is 1.5 %%")
    parser.add_argument("--window-tokens", type=float, help="the last part, which is judged")
    parser.add_argument("--window-fraction", type=float, help="the same, relative to the run")
    parser.add_argument("--confidence", type=float, help="of the interval, such as 0.95")
    parser.add_argument("--out", metavar="DIR", help="for the report; default: the last run")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.lab.parity import parity

        return parity(**vars(args))

    return run


def ablate(parser: Parser) -> Run:
    """What does each precision policy cost? Trains all of them over some seeds, and compares.

    nvfp4 ablate tiny_nvfp4 --policies nvfp4,fp8_block --seeds 3
    nvfp4 ablate tiny_bf16 --policies nvfp4,my.yaml train.steps=80 --out runs/mine
    nvfp4 ablate tiny_nvfp4 --variant end_2:nvfp4,precision.num_layers_at_end_in_bf16=2 --jobs 1
    nvfp4 ablate tiny_nvfp4 --policies fp8_block,nvfp4 --reference fp8_block --seeds 3
    """
    add_recipe(parser)
    parser.add_argument(
        "--policies", metavar="A,B", default="",
        help="names of policies, or recipes whose precision section is taken",
    )  # fmt: skip
    parser.add_argument(
        "--variant", metavar="NAME:[POLICY,]a.b=c,...", dest="variants", action="append",
        default=[], help="one more row: a policy or recipe (default: RECIPE), and changed keys",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, help="how many: run.seed and the next ones")
    parser.add_argument(
        "--reference", default="bf16", help="what gaps are relative to: a policy or a variant"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", metavar="DIR", help="default: runs/ablate_RECIPE")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.lab.ablate import ablate

        return ablate(**vars(args))

    return run


def verify(parser: Parser) -> Run:
    """Does the arithmetic agree bit by bit with golden vectors? Exit code 1 if it does not.

    nvfp4 verify --golden tests/golden
    nvfp4 verify --golden tests/golden --backend cpu
    """
    parser.add_argument(
        "--golden", metavar="DIR", type=Path, required=True, help="holds .npz files"
    )
    parser.add_argument(
        "--backend", default="reference", help="whose arithmetic (default: %(default)s)"
    )

    def run(args: argparse.Namespace) -> int:
        from nvfp4 import backends
        from nvfp4.numerics.golden import verify

        return verify(args.golden, arithmetic=backends.choose(args.backend))

    return run


def bench(parser: Parser) -> Run:
    """How fast is it here? Quantising, linears, training steps, other libraries; 3 minutes.

    nvfp4 bench
    nvfp4 bench --only quantise,linear --json bench.json --plot bench.png
    nvfp4 bench --gpu                           equality and speed on a CUDA GPU, 4 minutes
    """
    parser.add_argument(
        "--only", metavar="A,B", default="", help="of machine, quantise, linear, step, peers"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a look, no figures")
    parser.add_argument("--gpu", action="store_true", help="the Triton kernels on this GPU instead")
    parser.add_argument("--json", metavar="FILE", dest="json_file", type=Path, help="all numbers")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="a figure, PNG or PDF")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.lab.bench import bench

        return bench(**vars(args))

    return run


def inspect(parser: Parser) -> Run:
    """What is in a run folder, a checkpoint, a .bin/.idx prefix, a .safetensors or .npz file?

    nvfp4 inspect runs/tiny_nvfp4
    nvfp4 inspect runs/tiny_nvfp4/checkpoints/step_000120
    """
    parser.add_argument("path", metavar="PATH", help="the file, folder or prefix")

    def run(args: argparse.Namespace) -> int:
        from nvfp4.inspect import inspect

        return inspect(args.path)

    return run


VERBS: dict[str, Callable[[Parser], Run]] = {
    verb.__name__: verb
    for verb in (recipes, check, doctor, tokenize, train, parity, ablate, verify, bench, inspect)
}
