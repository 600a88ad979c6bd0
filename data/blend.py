"""Prepared tokens to samples: Megatron's GPTDataset and blending, in an order that never changes.

Sample i of the training set depends on the data, the seed and i alone: not on the number of samples
that a run asks for, on the ranks, or on where a run was interrupted. (Megatron by itself shuffles
all epochs of a run together, so a longer run would see other samples from the first step on.)
Each source is indexed by GPTDataset for exactly one epoch: its documents in random order,
concatenated, cut into samples, shuffled. Later epochs visit the same samples in a new order each;
within an epoch no sample comes twice, and only the end of the concatenation that does not fill a
sample is left out.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4.data.cache import build_once, cache_root, key_of
from nvfp4.data.indexed import describe_prefix
from nvfp4.data.prepare import Part, PreparedData, prepare
from nvfp4.data.ranks import rank_zero_first
from nvfp4.errors import MachineError, UserError

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from torch import Tensor

__all__ = ["Part", "PreparedData", "Samples", "build_datasets", "describe_prefix", "prepare"]

VERSION = 1
VALIDATION_SEED = 0  # the same validation samples in every run, whatever its seed


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """What GPTDataset asks of a tokenizer. pad = -1 is no token, so nothing real is ever masked."""

    vocab_size: int
    eod: int | None
    pad: int = -1

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict(vocab_size=self.vocab_size, eod=self.eod)


class Samples:
    """Samples 0 to len - 1 of a blend; a map-style dataset (torch.utils.data.Dataset by shape).

    An item holds tokens, labels (the next tokens), position_ids: (seq_length,) int64, and
    loss_mask: (seq_length,) float32, all ones. The tensors must not be changed in place.
    """

    def __init__(
        self,
        parts: Sequence[GPTDataset],
        blend: tuple[np.ndarray, np.ndarray] | None,
        length: int,
        seed: int,
    ) -> None:
        self.parts, self.blend, self.length, self.seed = parts, blend, length, seed
        self._order: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part, sample = self.locate(index)
        return self.parts[part][sample]

    def locate(self, index: int) -> tuple[int, int]:
        """(source, sample of that source's epoch) of the global sample `index`."""
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        part, drawn = (0, index) if self.blend is None else (int(b[index]) for b in self.blend)
        epoch, sample = divmod(drawn, len(self.parts[part]))
        return part, sample if epoch == 0 else int(self._permutation(part, epoch)[sample])

    def _permutation(self, part: int, epoch: int) -> np.ndarray:
        """Order of the samples of `part` in a later epoch; RandomState's streams never change."""
        if self._order.get(part, (0, None))[0] != epoch:
            random = np.random.RandomState([self.seed, part, epoch])
            self._order[part] = epoch, random.permutation(len(self.parts[part]))
        return self._order[part][1]


def build_datasets(
    prepared: PreparedData,
    *,
    seq_length: int,
    train_samples: int,
    valid_samples: int,
    seed: int,
    cache_dir: str | None = None,
) -> tuple[Samples, Samples]:
    """The training samples [0, train_samples) and the validation samples [0, valid_samples).

    Validation samples are the same for every seed; if more are asked for than there are, they
    repeat. Works with and without torch.distributed; rank 0 builds the indices, into cache_dir
    (that of `prepared` by default), which all ranks must see. UserError: a source is too small for
    one sample.
    """
    for part in (*prepared.train, *prepared.valid):
        if part.tokens < seq_length + 1:
            side = "validation" if part in prepared.valid else "training"
            raise UserError(
                f"{part.source}: {part.tokens} {side} tokens, too few for one sample of "
                f"model.seq_length={seq_length}; use more text, raise data.valid_fraction or "
                "shorten the sequence"
            )
    root = cache_root(cache_dir or prepared.cache_dir)
    tokenizer = TokenIds(prepared.vocab_used, prepared.eod)
    return rank_zero_first(
        lambda first: (
            _side(
                "train",
                prepared.train,
                seq_length,
                train_samples,
                seed & 0xFFFFFFFF,
                tokenizer,
                root,
                first,
            ),
            _side(
                "valid",
                prepared.valid,
                seq_length,
                valid_samples,
                VALIDATION_SEED,
                tokenizer,
                root,
                first,
            ),
        )
    )


def _side(
    name: str,
    parts: Sequence[Part],
    seq_length: int,
    length: int,
    seed: int,
    tokenizer: TokenIds,
    root: Path,
    first: bool,
) -> Samples:
    made = [_one_epoch(name, part, seq_length, seed, tokenizer, root, first) for part in parts]
    weights = [part.weight for part in parts]
    blend = _blend(weights, length, root, first) if len(parts) > 1 else None
    return Samples(made, blend, length, seed)


def _one_epoch(
    name: str, part: Part, seq_length: int, seed: int, tokenizer: TokenIds, root: Path, first: bool
) -> GPTDataset:
    """One epoch of a part. Rank 0 writes the indices to a folder that appears complete: Megatron
    writes them in place, and would trust what a killed process leaves."""
    from megatron.core import __version__ as megatron
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    split = Split[name]
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, tokenizer=tokenizer,  # type: ignore[arg-type]
        blend_per_split=[([part.prefix], None) if s is split else None for s in Split],
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    sequences = np.arange(part.begin, part.end, dtype=np.int32)

    def dataset(folder: Path) -> GPTDataset:
        here = dataclasses.replace(config, path_to_cache=str(folder))
        tokens = IndexedDataset(part.prefix)
        return GPTDataset(tokens, part.prefix, sequences, None, split, here)

    key = key_of(
        "index", VERSION, megatron, name, part.prefix, part.hash, part.begin, part.end, seq_length,
        seed, tokenizer.unique_identifiers,
    )  # fmt: skip
    return dataset(_shared(root / "index" / key, dataset, first))


def _blend(
    weights: Sequence[float], length: int, root: Path, first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(source, sample within the source) of each of `length` samples: Megatron's greedy blending,
    which always draws from the source that is furthest behind its weight."""
    from megatron.core.datasets import helpers

    def build(folder: Path) -> None:
        source, sample = np.zeros(length, np.int16), np.zeros(length, np.int64)
        helpers.build_blending_indices(  # type: ignore[attr-defined]
            source, sample, list(weights), len(weights), length, False
        )
        np.save(folder / "source.npy", source)
        np.save(folder / "sample.npy", sample)

    folder = _shared(root / "index" / key_of("blend", VERSION, list(weights), length), build, first)
    source, sample = (np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("source", "sample"))
    return source, sample


def _shared(folder: Path, build: Any, first: bool) -> Path:
    """`folder`, built by rank 0; the other ranks only look."""
    if first:
        return build_once(folder, build)
    if not folder.is_dir():
        raise MachineError(
            f"{folder}: not on this node; data.cache_dir must be shared by all nodes"
        )
    return folder
