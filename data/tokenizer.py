"""Tokenizers: a byte-level BPE trained on the spot, or a Hugging Face tokenizer folder.

There is no padding id anywhere: samples are cut from full documents, so nothing is ever padded, and
the end-of-document id is an ordinary token that counts in the loss.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4.errors import MachineError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end of document
# Merges are chosen by counts; a sample of this size settles the counts of all but the rarest pairs.
BPE_BYTES = 64 << 20


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer ready for use. eod: its end-of-document id; size: highest id + 1; hash: of the
    vocabulary (token -> id) and eod, the same for every version of the `tokenizers` package."""

    tokenizer: Tokenizer
    path: str
    eod: int
    size: int
    hash: str

    def check_fits(self, vocab_size: int) -> None:
        """UserError if an id of this tokenizer has no row in the model's embedding."""
        if self.size > vocab_size:
            raise UserError(
                f"{self.path}: the tokenizer has {self.size} entries, model.vocab_size is "
                f"{vocab_size}; set model.vocab_size={self.size} or more, or use another tokenizer"
            )


@contextlib.contextmanager
def threads() -> Iterator[None]:
    """Lets `tokenizers` use its threads here, and keeps it quiet in processes forked later.

    Once its threads have run, every later fork (a checkpoint writer, for example) prints a warning
    unless TOKENIZERS_PARALLELISM is set; the children use no tokenizer, so "false" costs nothing.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, name: str) -> None:
    """Trains a byte-level BPE with exactly `vocab_size` entries and saves it as a tokenizer folder.

    Id 0 is the end of document, ids 1 to 256 are the bytes, the rest are merges. The result depends
    on the texts alone, not on the number of threads. `name` is what errors call the texts.
    UserError: vocab_size below 257, or more than the text has distinct pieces for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"model.vocab_size is {vocab_size}; a byte-level vocabulary needs at least "
            f"{SMALLEST_VOCABULARY} (256 bytes and the end of document)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOD], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    with threads():
        tokenizer.train_from_iterator(texts, trainer)
    made = tokenizer.get_vocab_size()
    if made != vocab_size:
        raise UserError(
            f"{name}: too little text for a vocabulary of {vocab_size} (it gives {made} entries); "
            f"use more text, set model.vocab_size={made} or less, or set data.tokenizer"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "bos_token": EOD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Reads a tokenizer folder (or its tokenizer.json).

    Truncation and padding settings are dropped, and text that spells a special token stays text:
    otherwise a document could be cut short, or end where its author wrote `<|endoftext|>`.
    UserError: no tokenizer there, not readable, no end-of-document token.
    """
    folder = Path(path).expanduser()
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not folder.exists():
        raise UserError(f"{path}: no such tokenizer folder (data.tokenizer)")
    tokenizer = _from_json(file) if file.is_file() else _through_transformers(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    eod = _eod_id(tokenizer, vocabulary, file.parent, path)
    listed = json.dumps([sorted(vocabulary.items(), key=lambda item: item[1]), eod])
    return TextTokenizer(
        tokenizer, str(path), eod, max(vocabulary.values()) + 1,
        blake2b(listed.encode(), digest_size=16).hexdigest(),
    )  # fmt: skip


def _from_json(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise UserError(f"{file}: not a tokenizer file ({str(error).splitlines()[0]})") from None


def _through_transformers(folder: Path) -> Tokenizer:
    """A folder in an older layout (vocab.json, tokenizer.model), converted by transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MachineError(
            f"{folder}: has no tokenizer.json; to convert other layouts, pip install transformers"
        ) from None
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # every layout fails in its own way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{folder}: no tokenizer.json, and no other tokenizer ({reason})") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{folder}: only a slow Python tokenizer; save it with its tokenizer.json")
    return backend


def _eod_id(
    tokenizer: Tokenizer, vocabulary: dict[str, int], folder: Path, path: str | Path
) -> int:
    """The id of eos_token in the folder's configuration; else of the only special token."""
    for file in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_text()).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: not readable ({error})") from None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if token not in vocabulary:
                raise UserError(f"{file}: eos_token {token!r} is not in the vocabulary")
            return vocabulary[token]
    special = [i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    if len(special) == 1:
        return special[0]
    raise UserError(f"{path}: no end-of-document token; set eos_token in its tokenizer_config.json")


def sample_for_bpe(
    texts: Iterable[str], total_bytes: int, tick: Callable[[int], None]
) -> Iterator[str]:
    """The leading part of every text, the same share of each: 64 MiB of `total_bytes` in all."""
    share = min(1.0, BPE_BYTES / max(total_bytes, 1))
    for text in texts:
        tick(len(text))
        yield text if share == 1.0 else text[: max(1, int(len(text) * share))]
