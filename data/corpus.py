"""Documents: read from text files, and divided into a training and a validation part.

A .txt (or standard-library .py) file is one document; a row of a .jsonl or .parquet file is one.
.txt files are decoded directly, so that not a byte changes; the other two are streamed through
`datasets` without a copy of their content in its cache.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nvfp4.data.sources import TextFiles, json_row
from nvfp4.errors import UserError

Side = Literal["train", "valid"]
MAX_DOCUMENT_CHARS = 64 << 20
Tick = Callable[[int], None]


def documents(source: TextFiles, cache: Path, tick: Tick = lambda _: None) -> Iterator[str]:
    """All documents that hold text, in order. tick(bytes of the file) is called after each file.

    UserError, naming file and row: a value that is not text, a broken line, a file without text.
    """
    for path in source.files:
        if path.suffix == ".jsonl":
            rows: Iterable[str] = _jsonl(path, source.column, cache)
        elif path.suffix == ".parquet":
            rows = _parquet(path, source.column, cache)
        else:
            rows = _plain(path)
        held = 0
        for text in rows:
            if text:
                held += 1
                yield text
        if not held:
            raise UserError(f"{path}: holds no text")
        tick(path.stat().st_size)


def _plain(path: Path) -> Iterator[str]:
    """The file as one document; a file beyond 64 Mi characters as several, cut at line ends."""
    with open(path, encoding="utf-8", newline="") as file:
        while text := file.read(MAX_DOCUMENT_CHARS):
            if len(text) == MAX_DOCUMENT_CHARS:
                text += file.readline()
            if text.strip():
                yield text


def _jsonl(path: Path, column: str, cache: Path) -> Iterator[str]:
    # Read as lines, not with the "json" builder: that one infers types over all columns (dates
    # become timestamps, unrelated columns that change type stop it), and cannot name a bad line.
    for number, row in enumerate(_stream("text", path, cache, sample_by="line"), start=1):
        if row["text"].strip():
            fields = json_row(path, number, row["text"])
            if column not in fields:
                raise UserError(f"{path}: line {number} has no field {column!r}")
            yield _text(path, f"line {number}", fields[column])


def _parquet(path: Path, column: str, cache: Path) -> Iterator[str]:
    for number, row in enumerate(_stream("parquet", path, cache, columns=[column]), start=1):
        yield _text(path, f"row {number}", row[column])


def _text(path: Path, where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{path}: {where} holds {type(value).__name__}, not text; clean it first")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: {where} is not valid Unicode ({error.reason})") from None
    return value


def _stream(builder: str, path: Path, cache: Path, **options: Any) -> Iterator[dict[str, Any]]:
    """Rows of a local file through `datasets`; nothing is downloaded, copied or printed."""
    import datasets

    datasets.disable_progress_bars()
    try:
        yield from datasets.load_dataset(
            builder, data_files=[glob.escape(str(path))], split="train", streaming=True,
            cache_dir=str(cache / "datasets"), **options,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: cannot read ({str(error).splitlines()[0]})") from error


@dataclass(frozen=True)
class Split:
    """Which part of each document belongs to which side.

    threshold   a document is for validation if its hash is below this and it is at most `longest`
                bytes long; None: every document is cut, the last `fraction` of it is validation.
    """

    fraction: float
    threshold: int | None
    longest: int

    def parts(self, text: str) -> Iterator[tuple[Side, str]]:
        """The document, or its two parts, each with the side it belongs to."""
        if self.threshold is not None:
            short = len(text.encode()) <= self.longest
            yield "valid" if short and document_hash(text) < self.threshold else "train", text
            return
        cut = _line_end(text, round(len(text) * (1.0 - self.fraction)))
        if cut:
            yield "train", text[:cut]
        if text[cut:]:
            yield "valid", text[cut:]


def document_hash(text: str) -> int:
    """64 bits of BLAKE2b of the UTF-8 bytes: uniform in [0, 2^64)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _line_end(text: str, cut: int) -> int:
    """The position after the last line end before `cut`; `cut` itself if there is none."""
    return text.rfind("\n", 0, cut) + 1 or cut


def plan_split(texts: Iterable[str], fraction: float) -> Split:
    """The split of a corpus: the documents of smallest hash that hold `fraction` of its bytes.

    A document longer than the whole validation part stays in training, so the part is between 1 and
    2 times `fraction`. If no document is short enough (fewer than 1/fraction documents of like
    length), every document is cut instead, at a line end.
    """
    sizes = [(document_hash(text), len(text.encode())) for text in texts]
    hashes = np.array([h for h, _ in sizes], np.uint64)
    lengths = np.array([n for _, n in sizes], np.int64)
    longest = int(fraction * lengths.sum())
    order = np.argsort(hashes)
    order = order[lengths[order] <= longest]
    enough = np.flatnonzero(np.cumsum(lengths[order]) >= longest)
    if len(enough):
        last = hashes[order[enough[0]]]
        taken = lengths[order][hashes[order] <= last].sum()  # twins of the last one come along
        if taken <= 2 * longest:
            return Split(fraction, int(last) + 1, longest)
    return Split(fraction, None, longest)
