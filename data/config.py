"""The `data:` section of a recipe, as plain dataclasses; no torch, so that recipes check fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from nvfp4.errors import UserError

STDLIB = "stdlib"


@dataclass(frozen=True)
class Source:
    """One place that training or validation text comes from.

    path    `stdlib`: the sources of the Python standard library of the running interpreter;
            a .txt, .jsonl or .parquet file, a folder of such files (searched recursively), a glob;
            or the prefix of an existing Megatron .bin/.idx pair (with or without the suffix).
            Relative paths are relative to the working directory.
    weight  share of the samples drawn from this source, relative to the other sources' weights;
            the size of a source does not matter.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError(f"data source: path is empty; give a file, a folder or {STDLIB!r}")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise UserError(
                f"data source {self.path}: weight is {self.weight}; it must be a number above 0"
            )


@dataclass(frozen=True)
class DataConfig:
    """What the model reads.

    train           sources of the training samples, blended by weight.
    valid           sources of the validation samples; empty: a part of every `train` source is set
                    aside. From text, whole documents chosen by a hash of their content (identical
                    documents are always on the same side); from text with too few documents for
                    that, the end of each document; from a .bin/.idx prefix, its last documents.
    valid_fraction  the part set aside, of the text (bytes) or of a prefix (documents).
    tokenizer       folder of a Hugging Face tokenizer (tokenizer.json inside), or that file; null:
                    a byte-level BPE with `model.vocab_size` entries, trained on the training text.
    text_column     the field of .jsonl and .parquet files that holds the text.
    cache_dir       tokens, trained tokenizers and sample indices are kept here; null: nvfp4/ in
                    $XDG_CACHE_HOME or in ~/.cache. All nodes of a run must see the same folder.
    num_workers     processes that turn text into tokens; 0: threads of this process.

    Documents are concatenated, each followed by one end-of-document token, and cut into samples of
    `model.seq_length` tokens. Attention and Mamba state run across document ends inside a sample
    (plain concatenated pretraining), every token counts in the loss, and there is no padding.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    train: tuple[Source, ...] = (Source(STDLIB),)
    valid: tuple[Source, ...] = ()
    valid_fraction: float = 0.05
    tokenizer: str | None = None
    text_column: str = "text"
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError(f"data.train is empty; name at least one source, for example {STDLIB}")
        if not 0 < self.valid_fraction <= 0.5:
            raise UserError(
                f"data.valid_fraction is {self.valid_fraction}; it must be above 0 and at most 0.5"
            )
        if self.num_workers < 0:
            raise UserError(f"data.num_workers is {self.num_workers}; it must be 0 or more")
