"""Text to tokens, in parallel and in order, and `nvfp4 tokenize`: files to a .bin/.idx pair."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4.data.cache import Echo, cache_root
from nvfp4.data.corpus import documents
from nvfp4.data.indexed import PrefixWriter, bare_prefix, token_dtype
from nvfp4.data.progress import Progress
from nvfp4.data.sources import TextFiles, fingerprint, resolve
from nvfp4.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    sample_for_bpe,
    threads,
    train_bpe,
)
from nvfp4.errors import MachineError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARS = 4 << 20
PART_CHARS = 256 << 10


def encode(texts: Iterable[str], tokenizer: TextTokenizer, workers: int) -> Iterator[np.ndarray]:
    """Token ids of every text, in order, each with its end-of-document id: (tokens,) int32.

    workers = 0: the threads of this process; otherwise that many processes. A text longer than
    256 Ki characters is encoded in parts cut at line ends, always at the same places, so the result
    does not depend on `workers`.
    """
    if workers == 0:
        with threads():
            for batch in _batches(texts):
                yield from _encode(tokenizer.tokenizer, tokenizer.eod, batch)
        return
    window: deque[Any] = deque()
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    arguments = (tokenizer.tokenizer.to_str(), tokenizer.eod)
    with ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
        try:
            for batch in _batches(texts):
                window.append(pool.submit(_encode_in_worker, batch))
                if len(window) > 2 * workers:
                    yield from window.popleft().result()
            while window:
                yield from window.popleft().result()
        except BrokenProcessPool:
            raise MachineError(
                "a tokenizing process died (out of memory?); use fewer workers"
            ) from None
        finally:
            for future in window:
                future.cancel()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of consecutive texts, each list of about 4 Mi characters."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(text: str) -> Iterator[str]:
    """The text in parts of at most 256 Ki characters that end at line ends where there are any."""
    start = 0
    while len(text) - start > PART_CHARS:
        end = text.rfind("\n", start, start + PART_CHARS) + 1
        end = end if end > start else start + PART_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _encode(tokenizer: Tokenizer, eod: int, texts: list[str]) -> list[np.ndarray]:
    parts = [list(_parts(text)) for text in texts]
    encoded = iter(
        tokenizer.encode_batch_fast([p for ps in parts for p in ps], add_special_tokens=False)
    )
    return [
        np.concatenate(
            [np.array(next(encoded).ids, np.int32) for _ in ps] + [np.array([eod], np.int32)]
        )
        for ps in parts
    ]


_in_worker: tuple[Tokenizer, int] | None = None


def _start_worker(tokenizer_json: str, eod: int) -> None:
    global _in_worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True  # not part of the JSON
    _in_worker = tokenizer, eod


def _encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    assert _in_worker is not None
    return _encode(*_in_worker, texts)


def tokenize(
    inputs: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    text_column: str = "text",
    workers: int = 0,
    overwrite: bool = False,
    cache_dir: str | None = None,
    echo: Echo | None = print,
) -> dict[str, Any]:
    """Writes `output`.bin, .idx and .json from text files, folders, globs or `stdlib`.

    Exactly one of `tokenizer` (a Hugging Face tokenizer folder) and `vocab_size` (a byte-level BPE
    is trained on the inputs and saved as the folder `output`_tokenizer). Every document ends with
    the end-of-document id. The files are the same for every number of workers, and appear under
    their names only when complete. Returns what was written: prefix, documents, tokens, dtype,
    text_bytes, tokenizer (its folder). UserError: see nvfp4.data.sources; an output that exists.
    """
    prefix = Path(bare_prefix(output)).expanduser()
    if (tokenizer is None) == (vocab_size is None):
        raise UserError("give either a tokenizer folder or a vocabulary size for a new one")
    if workers < 0:
        raise UserError(f"--workers {workers}: give 0 (threads) or more")
    if not overwrite and os.path.exists(f"{prefix}.idx"):
        raise UserError(f"{prefix}.idx: exists already; remove it or ask to overwrite")
    root = cache_root(cache_dir)
    sources = [_text_only(path, text_column) for path in inputs]
    if not sources:
        raise UserError("no input; name text files, folders or stdlib")
    total = sum(source.size for source in sources)
    with Progress("checking", total, echo) as progress:
        for source in sources:
            fingerprint(source, root, progress.advance)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{prefix.parent}: cannot make this folder ({error.strerror})") from None
    if vocab_size is not None:
        tokenizer = _own_tokenizer(sources, vocab_size, prefix, root, total, echo)
    assert tokenizer is not None
    loaded = load_tokenizer(tokenizer)
    dtype, text_bytes = token_dtype(loaded.size), 0

    def texts() -> Iterator[str]:
        nonlocal text_bytes
        for source in sources:
            for text in documents(source, root, progress.advance):
                text_bytes += len(text.encode())
                yield text

    with Progress("tokenizing", total, echo) as progress, PrefixWriter(prefix, dtype) as writer:
        for tokens in encode(texts(), loaded, workers):
            writer.add(tokens)
        about = {"tokenizer": loaded.hash, "eod": loaded.eod, "vocab_size": loaded.size}
        writer.finish({**about, "text_bytes": text_bytes})
    made = {
        "prefix": str(prefix), "documents": len(writer.lengths), "tokens": sum(writer.lengths),
        "dtype": writer.dtype.name, "text_bytes": text_bytes, "tokenizer": str(tokenizer),
    }  # fmt: skip
    if echo:
        echo(
            f"{prefix}.bin, .idx: {made['tokens']:,} tokens in {made['documents']:,} documents, "
            f"{text_bytes / made['tokens']:.2f} bytes per token, tokenizer {tokenizer}"
        )
    return made


def _text_only(path: str, column: str) -> TextFiles:
    source = resolve(path, column)
    if not isinstance(source, TextFiles):
        raise UserError(f"{path}: already tokens; tokenize takes text")
    return source


def _own_tokenizer(
    sources: list[TextFiles],
    vocab_size: int,
    prefix: Path,
    root: Path,
    total: int,
    echo: Echo | None,
) -> Path:
    """Trains a BPE on all of the inputs, into the folder `prefix`_tokenizer."""
    folder = Path(f"{prefix}_tokenizer")
    building = Path(f"{folder}.part-{os.getpid()}")
    name = ", ".join(source.name for source in sources)
    building.mkdir(exist_ok=True)
    try:
        with Progress(f"training a tokenizer of {vocab_size}", total, echo) as progress:
            texts = (text for source in sources for text in documents(source, root))
            train_bpe(sample_for_bpe(texts, total, progress.advance), vocab_size, building, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
