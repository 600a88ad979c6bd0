"""The commands. `nvfp4 VERB` == `python -m nvfp4 VERB` == `torchrun ... -m nvfp4 VERB`.

A verb is a function that declares its arguments and returns what runs them: one function call of
the toolkit. Its docstring is its --help: the question it answers, then examples. Only the verbs
that need torch import it. Exit codes: 0 done, 1 unexpected (with traceback), 2 recipe or usage,
3 this machine cannot, 4 parity failed.
"""

from __future__ import annotations

import argparse
import difflib
import inspect as python_inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from nvfp4 import __version__
from nvfp4.errors import UserError

Run = Callable[[argparse.Namespace], int]
SECONDS_FOR_RANK_0 = 5.0


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


# ----------------------------------------------------------------------------------- the verbs


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


def verify(parser: Parser) -> Run:
    """Does the arithmetic agree bit by bit with golden vectors? Exit code 1 if it does not.

    nvfp4 verify --golden tests/golden
    """
    parser.add_argument(
        "--golden", metavar="DIR", type=Path, required=True, help="holds .npz files"
    )

    def run(args: argparse.Namespace) -> int:
        from nvfp4.numerics.golden import verify

        return verify(args.golden)

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
    for verb in (recipes, check, doctor, tokenize, train, parity, verify, inspect)
}


# ------------------------------------------------------------------------------------ dispatch


def overview() -> str:
    """`nvfp4 --help`."""
    lines = [
        "usage: nvfp4 VERB ...\n",
        "Pretrain hybrid Mamba-2/attention language models in NVFP4.\n",
        *(f"  {name:<10}{help_of(verb)[0]}" for name, verb in VERBS.items()),
        "",
        "nvfp4 VERB --help explains a verb, with examples. nvfp4 --version prints the version.",
        "A first run: nvfp4 doctor, then nvfp4 train tiny_nvfp4.",
        "Exit codes: 0 done, 1 unexpected, 2 recipe or usage, 3 this machine cannot, 4 no parity.",
    ]
    return "\n".join(lines)


def help_of(verb: Callable[[Parser], Run]) -> tuple[str, str]:
    """(question, examples) from the docstring of a verb."""
    question, _, examples = (python_inspect.getdoc(verb) or "").partition("\n\n")
    return question, examples


def parse(name: str, words: Sequence[str]) -> tuple[Run, argparse.Namespace]:
    """What to run, with its arguments. UserError says what to write instead."""
    question, examples = help_of(VERBS[name])
    parser = Parser(
        prog=f"nvfp4 {name}",
        description=question,
        epilog="examples:\n  " + examples.replace("\n", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = VERBS[name](parser)
    args, unknown = parser.parse_known_intermixed_args(words)
    for word in unknown:
        option = word.partition("=")[0]
        if hasattr(args, "override") and "." in option:
            raise UserError(f"{word}: write {word.lstrip('-')}; keys of a recipe take no dashes")
        options = [text for action in parser._actions[1:] for text in action.option_strings]
        close = difflib.get_close_matches(option, options, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see nvfp4 {name} --help"
        raise UserError(
            f"{word}: unknown {'option' if word.startswith('-') else 'argument'}; {hint}"
        )
    return run, args


def complain(name: str, error: UserError) -> None:
    """One line per mistake on stderr; under torchrun from rank 0 only: all ranks find the same.

    The others wait, for torchrun ends every process as soon as one has failed.
    """
    if int(os.environ.get("RANK", "0")):
        time.sleep(SECONDS_FOR_RANK_0)
        return
    for line in str(error).splitlines():
        print(f"nvfp4 {name}: {line}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; what is unexpected is raised."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help", "--version"):
        print(f"nvfp4 {__version__}" if name == "--version" else overview())
        return 0
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        print(f"nvfp4: {name!r} is no verb; {hint}verbs: {', '.join(VERBS)}", file=sys.stderr)
        return 2
    try:
        run, args = parse(name, words[1:])
        code = run(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        complain(name, error)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\nnvfp4 {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nvfp4 check ... | head`: nobody reads what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
