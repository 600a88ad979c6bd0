"""Fingerprints of random bits: whether rounding drew fresh ones every time it should have.

Rounding with bits that another tensor has had too is no longer unbiased on average, and no loss
curve shows it. A row of bits is reduced to 64 bits, by which rows of one step can be compared
without keeping them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 8  # bytes: shorter rows repeat by chance, so such a tensor counts as one row


@dataclass(frozen=True, slots=True)
class BitsRecord:
    """Random bits drawn for one operand of one execution of a GEMM: a fingerprint of each row."""

    name: str
    gemm: str
    role: str
    rows: Tensor

    @property
    def key(self) -> tuple[str, str, str]:
        """Whose bits they are."""
        return self.name, self.gemm, self.role


def fingerprint(bits: Tensor) -> Tensor:
    """int64 (rows,) on the CPU: sum_k w_k m(word_k) mod 2^64 over the 8-byte words of a row.

    bits: uint8 (rows, columns), zero-padded to whole words; m(x) = x xor (x >> 29), w_k odd and
    fixed, so equal rows have equal fingerprints and others differ but for a chance of about 2^-63.
    Rows of less than SHORT bytes are taken together.
    """
    bits = bits.detach().contiguous()
    if bits.shape[1] < SHORT:
        bits = bits.reshape(1, -1)
    if rest := -bits.shape[1] % 8:
        bits = torch.nn.functional.pad(bits, (0, rest))
    words = bits.contiguous().view(torch.int64)
    numbers = torch.arange(1, words.shape[1] + 1, device=words.device)
    weights = (numbers * -7046029254386353131) ^ (numbers * 0x2545F4914F6CDD1D)
    return ((words ^ (words >> 29)) * (weights | 1)).sum(1).cpu()


def repeated(records: Sequence[BitsRecord], *, recomputed: bool = False) -> Iterator[str]:
    """One line for each pair of operands that share rows of random bits, with their number.

    A weight is the same in all micro-batches of a step and so is its rounding: its bits may come
    again for the same weight in the same GEMM. With `recomputed`, those of fprop too.
    """
    seen: set[tuple[tuple[str, str, str], int]] = set()
    kept = []
    for record in records:
        if record.role == "weight" or (recomputed and record.gemm == "fprop"):
            mark = record.key, hash(record.rows.numpy().tobytes())
            if mark in seen:
                continue
            seen.add(mark)
        kept.append(record)
    if not kept:
        return
    rows = torch.cat([record.rows for record in kept])
    owner = torch.repeat_interleave(
        torch.arange(len(kept)), torch.tensor([len(record.rows) for record in kept])
    )
    rows, order = rows.sort(stable=True)
    owner = owner[order]
    equal = (rows[1:] == rows[:-1]).nonzero()[:, 0]
    pairs, counts = torch.stack([owner[equal], owner[equal + 1]], 1).unique(
        dim=0, return_counts=True
    )
    totals: dict[tuple, int] = {}
    for (first, second), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        key = kept[first].key, kept[second].key
        totals[key] = totals.get(key, 0) + count
    for ((name, gemm, role), other), count in totals.items():
        where = "itself" if other == (name, gemm, role) else " ".join(other)
        yield f"{name} {gemm}: {count} rows of random bits of {role} were used again by {where}"
