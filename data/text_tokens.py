"""Text sources become cached .bin/.idx pairs, with a tokenizer trained on them if need be."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nvfp4.data.cache import Echo, build_once, key_of, remember, write_json
from nvfp4.data.corpus import Split, documents, plan_split
from nvfp4.data.indexed import PrefixWriter, open_prefix, scan, token_dtype
from nvfp4.data.progress import Progress
from nvfp4.data.sources import TextFiles, fingerprint
from nvfp4.data.tokenize import encode
from nvfp4.data.tokenizer import TextTokenizer, load_tokenizer, sample_for_bpe, train_bpe
from nvfp4.errors import UserError

# Part of every cache key: to be raised when the same input would give other tokens.
VERSION = 1


@dataclass
class TextSource:
    """Text files on their way to tokens.

    fraction: of the text to be set aside for validation; None: nothing is. content: hash of each
    file, in order (nvfp4.data.sources.fingerprint).
    """

    files: TextFiles
    fraction: float | None
    content: list[list[str]]
    root: Path
    echo: Echo | None

    @property
    def key(self) -> list[Any]:
        """All that the documents of both sides depend on."""
        return [self.content, self.files.column, self.fraction]

    @property
    def sides(self) -> tuple[str, ...]:
        return ("all",) if self.fraction is None else ("train", "valid")

    @cached_property
    def split(self) -> Split | None:
        """How documents are divided; reads all of them once."""
        if self.fraction is None:
            return None
        with Progress(f"reading {self.files.name}", self.files.size, self.echo) as progress:
            return plan_split(documents(self.files, self.root, progress.advance), self.fraction)

    def parts(self, tick: Any = lambda _: None) -> Iterator[tuple[str, str]]:
        """(side, text) of every document, in order; tick(bytes read)."""
        split = self.split
        for text in documents(self.files, self.root, tick):
            yield from split.parts(text) if split else [("all", text)]


def text_source(
    files: TextFiles, fraction: float | None, root: Path, echo: Echo | None
) -> TextSource:
    """Checks and hashes the files; see nvfp4.data.sources.fingerprint for the errors."""
    with Progress(f"checking {files.name}", files.size, echo) as progress:
        content = fingerprint(files, root, progress.advance)
    return TextSource(files, fraction, content, root, echo)


def trained_tokenizer(
    texts: Sequence[TextSource], vocab_size: int, root: Path, echo: Echo | None
) -> TextTokenizer:
    """The byte-level BPE of the training side of `texts`, from the cache or trained now."""
    import tokenizers

    name = ", ".join(text.files.name for text in texts)
    total = sum(text.files.size for text in texts)

    def train(folder: Path) -> None:
        with Progress(f"training a tokenizer of {vocab_size}", total, echo) as progress:
            if echo:
                echo(f"data: training a tokenizer of {vocab_size} entries on {total / 1e6:.1f} MB")
            training = (t for text in texts for side, t in text.parts() if side != "valid")
            train_bpe(sample_for_bpe(training, total, progress.advance), vocab_size, folder, name)

    key = key_of("bpe", VERSION, tokenizers.__version__, vocab_size, [text.key for text in texts])
    return load_tokenizer(build_once(root / "tokenizer" / key, train, echo))


def token_folder(text: TextSource, tokenizer: TextTokenizer, vocab_size: int, workers: int) -> Path:
    """The folder with a pair for every side of `text` (train, valid or all), cached.

    A folder whose tokens are not those that were written (a damaged disk, a curious hand) is made
    again.
    """
    dtype = token_dtype(vocab_size)
    key = key_of("tokens", VERSION, text.key, tokenizer.hash, tokenizer.eod, dtype)
    folder = text.root / "tokens" / key

    def build(folder: Path) -> None:
        _write_sides(folder, text, tokenizer, dtype, workers)
        write_json(folder / "hashes.json", _hashes(folder, text))

    build_once(folder, build, text.echo)
    if not _intact(folder, text):
        if text.echo:
            text.echo(f"data: {folder} is damaged, making it again")
        shutil.rmtree(folder)
        build_once(folder, build, text.echo)
    return folder


def _intact(folder: Path, text: TextSource) -> bool:
    try:
        return json.loads((folder / "hashes.json").read_text()) == _hashes(folder, text)
    except (UserError, OSError, ValueError):
        return False


def _hashes(folder: Path, text: TextSource) -> dict[str, str]:
    found = {}
    for side in text.sides:
        pair = open_prefix(folder / side)
        whole = (0, len(pair.lengths))
        found[side] = remember(
            text.root, ["hash"], pair.files, lambda p=pair, w=whole: scan(p, *w)["hash"]
        )
    return found


def _write_sides(
    folder: Path, text: TextSource, tokenizer: TextTokenizer, dtype: str, workers: int
) -> None:
    """Encodes the documents once, in order, and writes each to the pair of its side."""
    ahead: deque[str] = deque()  # sides of the texts that the encoder has taken and not returned
    text_bytes = dict.fromkeys(text.sides, 0)
    if text.echo:
        text.echo(f"data: tokenizing {text.files.name} ({text.files.size / 1e6:.1f} MB)")
    text.split  # noqa: B018  (reads everything; before the progress of the encoding starts)
    with ExitStack() as stack:
        progress = stack.enter_context(
            Progress(f"tokenizing {text.files.name}", text.files.size, text.echo)
        )
        writers = {s: stack.enter_context(PrefixWriter(folder / s, dtype)) for s in text.sides}

        def texts() -> Iterator[str]:
            for side, part in text.parts(progress.advance):
                ahead.append(side)
                text_bytes[side] += len(part.encode())
                yield part

        for tokens in encode(texts(), tokenizer, workers):
            writers[ahead.popleft()].add(tokens)
        for side, writer in writers.items():
            if not writer.lengths:
                raise UserError(f"{text.files.name}: too little text to set validation aside")
            about = {
                "tokenizer": tokenizer.hash,
                "eod": tokenizer.eod,
                "vocab_size": tokenizer.size,
            }
            writer.finish({**about, "text_bytes": text_bytes[side]})
