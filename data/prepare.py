"""From the `data:` section to checked .bin/.idx pairs, their hash and their unigram entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nvfp4.data.cache import Echo, cache_root, key_of, remember
from nvfp4.data.config import DataConfig
from nvfp4.data.indexed import Prefix, open_prefix, scan
from nvfp4.data.progress import Progress
from nvfp4.data.ranks import check_ranks_agree, rank_zero_first
from nvfp4.data.sources import PrefixPair, TextFiles, resolve
from nvfp4.data.text_tokens import TextSource, text_source, token_folder, trained_tokenizer
from nvfp4.data.tokenizer import TextTokenizer, load_tokenizer
from nvfp4.errors import UserError


class Part(NamedTuple):
    """The sequences [begin, end) of the pair `prefix`, drawn with `weight` (weights add up to 1).

    tokens: their number; hash: of their content; source: what the user calls it.
    """

    prefix: str
    weight: float
    begin: int
    end: int
    tokens: int
    hash: str
    source: str


@dataclass(frozen=True)
class PreparedData:
    """Everything that is known about the data before training.

    hash             of the tokens, the sequence lengths, the blend and the tokenizer of both sides;
                     not of file names. Runs with different hashes cannot be compared.
    vocab_used       entries of the tokenizer; for prefixes without one, the largest id + 1.
    unigram_entropy  of the validation tokens, in nats per token: the loss of a model that knows
                     the frequency of every token and nothing else.
    bytes_per_token  UTF-8 bytes of text per validation token; None if unknown (foreign prefixes).
    eod              the end-of-document id; None for prefixes that nothing is known about.
    """

    train: tuple[Part, ...]
    valid: tuple[Part, ...]
    tokenizer_path: str | None
    hash: str
    vocab_used: int
    unigram_entropy: float
    bytes_per_token: float | None
    eod: int | None
    cache_dir: str


@dataclass(frozen=True)
class _Measured:
    """A part, and what the summary needs to know of it."""

    part: Part
    facts: dict[str, Any]  # nvfp4.data.indexed.scan
    about: dict[str, Any]  # prefix.json
    whole: bool


def prepare(config: DataConfig, *, vocab_size: int, echo: Echo | None = print) -> PreparedData:
    """Tokenizes what is not in the cache yet, and checks everything against `vocab_size`.

    Needs no torch. Under torch.distributed rank 0 works first, and all ranks must see the same
    data.
    UserError: see nvfp4.data.sources, .indexed and .tokenizer; text and prefixes blended without a
    tokenizer, or prefixes made by different ones.
    """
    prepared = rank_zero_first(lambda first: _prepare(config, vocab_size, echo if first else None))
    check_ranks_agree(prepared.hash, "data hash")
    return prepared


def _prepare(config: DataConfig, vocab_size: int, echo: Echo | None) -> PreparedData:
    root = cache_root(config.cache_dir)
    fraction = None if config.valid else config.valid_fraction
    train = [_open(s.path, config.text_column, fraction, root, echo) for s in config.train]
    valid = [_open(s.path, config.text_column, None, root, echo) for s in config.valid]
    if echo and {s.path for s in config.train} & {s.path for s in config.valid}:
        echo(
            "data: warning: data.train and data.valid share a source; the validation loss is biased"
        )
    tokenizer = _tokenizer(config, vocab_size, train, valid, root, echo)

    sides: dict[str, list[_Measured]] = {"train": [], "valid": []}
    for name, settings, found in (("train", config.train, train), ("valid", config.valid, valid)):
        for source, opened in zip(settings, found, strict=True):
            ranges = _ranges(
                opened, fraction if name == "train" else None, tokenizer, vocab_size, config
            )
            for side, (prefix, begin, end) in zip((name, "valid"), ranges, strict=False):
                part = Part(prefix.path, source.weight, begin, end, 0, "", source.path)
                sides[side].append(_measure(prefix, part, vocab_size, root, echo))
    return _summary(_normalized(sides["train"]), _normalized(sides["valid"]), tokenizer, root, echo)


def _open(
    path: str, column: str, fraction: float | None, root: Path, echo: Echo | None
) -> TextSource | PrefixPair:
    found = resolve(path, column)
    return text_source(found, fraction, root, echo) if isinstance(found, TextFiles) else found


def _tokenizer(
    config: DataConfig,
    vocab_size: int,
    train: Sequence[TextSource | PrefixPair],
    valid: Sequence[TextSource | PrefixPair],
    root: Path,
    echo: Echo | None,
) -> TextTokenizer | None:
    """The tokenizer of the configuration, or one trained on the training text, or none needed."""
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        tokenizer.check_fits(vocab_size)
        return tokenizer
    texts = [s for s in (*train, *valid) if isinstance(s, TextSource)]
    prefixes = [s for s in (*train, *valid) if isinstance(s, PrefixPair)]
    if texts and prefixes:
        raise UserError(
            f"data: {texts[0].files.name} is text and {prefixes[0].name} is a .bin/.idx prefix; "
            "set data.tokenizer to the tokenizer that made the prefix"
        )
    training = [s for s in train if isinstance(s, TextSource)]
    return trained_tokenizer(training, vocab_size, root, echo) if training else None


def _ranges(
    source: TextSource | PrefixPair,
    fraction: float | None,
    tokenizer: TextTokenizer | None,
    vocab_size: int,
    config: DataConfig,
) -> list[tuple[Prefix, int, int]]:
    """(pair, begin, end) of the source's own side, and of what it sets aside for validation."""
    if isinstance(source, TextSource):
        assert tokenizer is not None
        folder = token_folder(source, tokenizer, vocab_size, config.num_workers)
        pairs = [open_prefix(folder / side) for side in source.sides]
        return [(pair, 0, len(pair.lengths)) for pair in pairs]
    pair = open_prefix(source.prefix)
    made_with = pair.about().get("tokenizer")
    if tokenizer and made_with and made_with != tokenizer.hash:
        raise UserError(f"{pair.path}: was made with another tokenizer than {tokenizer.path}")
    if fraction is None:
        return [(pair, 0, len(pair.lengths))]
    cut = last_documents(pair, fraction)
    return [(pair, 0, cut), (pair, cut, len(pair.lengths))]


def last_documents(pair: Prefix, fraction: float) -> int:
    """First sequence of the last documents, `fraction` of all and at least one: as Megatron splits,
    but never inside a document."""
    count = len(pair.documents) - 1
    cut = int(pair.documents[count - max(1, round(fraction * count))])
    tokens = pair.token_range(0, cut)[1]
    if not 0 < tokens < pair.tokens:
        raise UserError(
            f"{pair.path}: {count} document(s), too few to set validation aside; name data.valid"
        )
    return cut


def _measure(
    prefix: Prefix, part: Part, vocab_size: int, root: Path, echo: Echo | None
) -> _Measured:
    """Reads the tokens of a part, or remembers what was found when they were last read."""
    first, last = prefix.token_range(part.begin, part.end)
    with Progress(f"reading {part.source}", (last - first) * prefix.itemsize, echo) as progress:
        facts = remember(
            root, ["scan", part.begin, part.end, vocab_size], prefix.files,
            lambda: scan(prefix, part.begin, part.end, vocab_size, progress.advance),
        )  # fmt: skip
    whole = (part.begin, part.end) == (0, len(prefix.lengths))
    part = part._replace(tokens=facts["tokens"], hash=facts["hash"])
    return _Measured(part, facts, prefix.about(), whole)


def _normalized(side: list[_Measured]) -> list[_Measured]:
    total = sum(m.part.weight for m in side)
    parts = [m.part._replace(weight=m.part.weight / total) for m in side]
    return [_Measured(p, m.facts, m.about, m.whole) for p, m in zip(parts, side, strict=True)]


def unigram_entropy(counts: Sequence[Sequence[int]], weights: Sequence[float]) -> float:
    """-sum_t p_t ln p_t in nats, with p the blend of the sources' frequencies, sum_i w_i c_i/|c_i|.

    counts: how often each token occurs in each source; weights: w, adding up to 1.
    """
    frequencies = [
        w * np.asarray(c, float) / np.sum(c) for c, w in zip(counts, weights, strict=True)
    ]
    p = np.sum(frequencies, axis=0)
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def _summary(
    train: list[_Measured],
    valid: list[_Measured],
    tokenizer: TextTokenizer | None,
    root: Path,
    echo: Echo | None,
) -> PreparedData:
    made_with = {
        m.about["tokenizer"]: m.part.source for m in train + valid if "tokenizer" in m.about
    }
    if len(made_with) > 1:
        raise UserError(
            f"data: {' and '.join(made_with.values())} were made with different tokenizers"
        )
    ends = {m.about["eod"] for m in train + valid if "eod" in m.about}
    hashed = [[[m.part.hash, m.part.weight] for m in side] for side in (train, valid)]
    vocab_used = tokenizer.size if tokenizer else 1 + max(m.facts["max"] for m in train + valid)
    entropy = unigram_entropy([m.facts["counts"] for m in valid], [m.part.weight for m in valid])
    bytes_per_token = None
    if all(m.whole and "text_bytes" in m.about for m in valid):
        bytes_per_token = sum(m.part.weight * m.about["text_bytes"] / m.part.tokens for m in valid)
    data_hash = key_of("data", hashed, tokenizer.hash if tokenizer else next(iter(made_with), None))
    if echo:
        tokens = [f"{sum(m.part.tokens for m in side):,}" for side in (train, valid)]
        echo(
            f"data: {tokens[0]} training and {tokens[1]} validation tokens, vocabulary "
            f"{vocab_used}, unigram entropy {entropy:.4f} nats per token, hash {data_hash}"
        )
    return PreparedData(
        train=tuple(m.part for m in train), valid=tuple(m.part for m in valid),
        tokenizer_path=tokenizer.path if tokenizer else None, hash=data_hash, vocab_used=vocab_used,
        unigram_entropy=entropy, bytes_per_token=bytes_per_token,
        eod=tokenizer.eod if tokenizer else next(iter(ends), None), cache_dir=str(root),
    )  # fmt: skip
