"""`nvfp4 VERB` == `python -m nvfp4 VERB` == `torchrun ... -m nvfp4 VERB`: finds and runs it.

The verbs are in cli_verbs.py. Exit codes: 0 done, 1 unexpected (with traceback), 2 recipe or usage,
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

from nvfp4 import __version__
from nvfp4.cli_verbs import VERBS, Parser, Run
from nvfp4.errors import UserError

SECONDS_FOR_RANK_0 = 5.0


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
