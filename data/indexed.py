"""Megatron's .bin/.idx pairs: written, checked and described without importing Megatron or torch.

`prefix.bin` holds the tokens of all sequences back to back, little-endian. `prefix.idx` holds

    9 bytes magic, u64 version = 1, u8 dtype code, u64 sequences, u64 documents + 1,
    int32 length[sequences]    in tokens
    int64 offset[sequences]    in bytes, into the .bin file
    int64 document[documents + 1]   first sequence of each document, and the number of sequences

(format of megatron.core.datasets.indexed_dataset, to which the writer is byte-equal.) Beside a pair
that we wrote stands `prefix.json`: its tokenizer's hash, end-of-document id and bytes of text.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from nvfp4.data.cache import sync
from nvfp4.errors import MachineError, UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FULL_SCAN_BYTES = 16 << 30
_BLOCK = 8 << 20
_SAMPLED_BLOCKS = 2048


def token_dtype(vocab_size: int) -> str:
    """Megatron's choice: uint16 below 65,500 entries, int32 from there on."""
    return "<u2" if vocab_size < 65_500 else "<i4"


class PrefixWriter:
    """Writes one pair, one sequence per document, under temporary names until `finish`.

    The .idx file, without which a pair is not a pair, gets its name last.
    """

    def __init__(self, prefix: str | Path, dtype: str) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        self.lengths = array("q")
        self._part = {
            end: f"{self.prefix}{end}.part-{os.getpid()}" for end in (".bin", ".idx", ".json")
        }
        try:
            self._bin = open(self._part[".bin"], "wb")
        except OSError as error:
            raise UserError(f"{self.prefix}.bin: cannot write ({error.strerror})") from None

    def __enter__(self) -> PrefixWriter:
        return self

    def add(self, tokens: np.ndarray) -> None:
        """Appends one document: (tokens,) integers that fit the dtype."""
        if len(tokens) > np.iinfo(np.int32).max:
            raise UserError(
                f"{self.prefix}: a document of {len(tokens)} tokens; at most 2^31 - 1 fit"
            )
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self.lengths.append(len(tokens))

    def finish(self, about: dict[str, Any]) -> None:
        """Writes the index and `about` (prefix.json) and gives all files their names."""
        self._bin.close()
        lengths = np.frombuffer(self.lengths, np.int64) if self.lengths else np.zeros(0, np.int64)
        with open(self._part[".idx"], "wb") as file:
            file.write(index_bytes(lengths, self.dtype))
        Path(self._part[".json"]).write_text(json.dumps(about, indent=1) + "\n")
        Path(self.prefix + ".idx").unlink(missing_ok=True)  # an old pair ends here
        for end in (".bin", ".json", ".idx"):
            sync(Path(self._part[end]))
            os.replace(self._part[end], self.prefix + end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bin.close()
        for part in self._part.values():
            Path(part).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise MachineError(f"{self.prefix}: cannot write ({error.strerror})") from error


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The .idx file of documents with `lengths` tokens (int64): one sequence each.

    offset[i] = itemsize * sum(length[:i]), in 64 bits from the first addition on.
    """
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    offsets = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents))
    return b"".join(
        (
            header,
            lengths.astype("<i4").tobytes(),
            offsets.astype("<i8").tobytes(),
            documents.tobytes(),
        )
    )


@dataclass(frozen=True)
class Prefix:
    """A checked pair. lengths: (sequences,) int32, offsets: (sequences,) int64 bytes, documents:
    (documents + 1,) int64, all mapped from the .idx file; tokens: how many the .bin file holds."""

    path: str
    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    tokens: int

    @property
    def files(self) -> list[Path]:
        return [Path(self.path + ".bin"), Path(self.path + ".idx")]

    def token_range(self, begin: int, end: int) -> tuple[int, int]:
        """First and last (exclusive) token of the sequences [begin, end)."""
        first = (
            self.tokens if begin == len(self.lengths) else int(self.offsets[begin]) // self.itemsize
        )
        last = self.tokens if end == len(self.lengths) else int(self.offsets[end]) // self.itemsize
        return first, last

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def about(self) -> dict[str, Any]:
        """What prefix.json says; empty for a pair that another program wrote."""
        try:
            return json.loads(Path(self.path + ".json").read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}.json: not readable ({error}); tokenize again") from None


def bare_prefix(path: str | Path) -> str:
    """The prefix, whether given bare, as .bin or as .idx."""
    path = str(path)
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def open_prefix(path: str | Path) -> Prefix:
    """Opens a pair and checks everything that can be checked without reading the tokens.

    UserError: a file of the pair is missing, empty, not an index, cut short, of a type that is no
    token type, or the two disagree about the number of tokens.
    """
    prefix = bare_prefix(path)
    bin_file, idx_file = Path(prefix + ".bin"), Path(prefix + ".idx")
    for file, other in ((bin_file, idx_file), (idx_file, bin_file)):
        if not file.is_file():
            beside = f"{other.name} is there, " if other.is_file() else ""
            raise UserError(f"{file}: missing; {beside}a prefix needs both .bin and .idx")
    size = idx_file.stat().st_size
    if size < HEADER.size:
        raise UserError(f"{idx_file}: {size} bytes is too short for a Megatron index")
    with open(idx_file, "rb") as stream:
        magic, version, code, sequences, marks = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC or version != 1:
        raise UserError(f"{idx_file}: not a Megatron index (wrong magic bytes or version)")
    if code not in DTYPES:
        raise UserError(f"{idx_file}: dtype code {code} is no token type; allowed {sorted(DTYPES)}")
    body = HEADER.size + 12 * sequences + 8 * marks
    if size not in (body, body + sequences):  # + int8 modes of multimodal sets
        raise UserError(f"{idx_file}: {size} bytes, but its header announces {body}; it is damaged")
    dtype = np.dtype(DTYPES[code])
    tokens, rest = divmod(bin_file.stat().st_size, dtype.itemsize)
    if not sequences or not tokens:
        raise UserError(f"{bin_file}: holds no tokens")
    raw = np.memmap(idx_file, mode="r")
    at = HEADER.size
    lengths = np.frombuffer(raw, "<i4", sequences, at)
    offsets = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", marks, at + 12 * sequences)
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens or rest:
        raise UserError(
            f"{bin_file}: {bin_file.stat().st_size} bytes, but {idx_file.name} "
            f"announces {total} tokens of {dtype.itemsize} bytes; the pair does not belong together"
        )
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    contiguous = lengths.min() >= 0 and offsets[0] == 0 and np.array_equal(offsets[1:], ends[:-1])
    whole = marks > 1 and documents[0] == 0 and documents[-1] == sequences
    if not (contiguous and whole and (np.diff(documents) >= 0).all()):
        raise UserError(f"{idx_file}: offsets or document marks are inconsistent; it is damaged")
    return Prefix(prefix, dtype, lengths, offsets, documents, tokens)


def scan(
    prefix: Prefix,
    begin: int,
    end: int,
    vocab_size: int | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Reads the tokens of the sequences [begin, end): content hash, extreme ids, counts of all ids.

    The hash covers dtype, sequence lengths and token bytes. Up to 16 GiB every byte is read;
    beyond, 2048 blocks of 8 MiB spread evenly over the range, and the hash says so (`sampled-`).
    UserError: an id outside [0, vocab_size), naming the sequence.
    """
    first, last = prefix.token_range(begin, end)
    step = _BLOCK // prefix.itemsize
    blocks = -(-(last - first) // step)
    full = (last - first) * prefix.itemsize <= FULL_SCAN_BYTES
    chosen = range(blocks) if full else np.linspace(0, blocks - 1, _SAMPLED_BLOCKS).astype(int)
    digest = blake2b(prefix.dtype.str.encode(), digest_size=16)
    digest.update(prefix.lengths[begin:end].data)
    counts = np.zeros(vocab_size or 0, np.int64)
    low, high = np.iinfo(np.int64).max, 0
    with open(prefix.path + ".bin", "rb") as file:
        for block in chosen:
            start = first + int(block) * step
            file.seek(start * prefix.itemsize)
            tokens = np.fromfile(file, prefix.dtype, min(step, last - start))
            smallest, largest = int(tokens.min()), int(tokens.max())
            low, high = min(low, smallest), max(high, largest)
            if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
                wrong = smallest if smallest < 0 else largest
                at = start + int((tokens == wrong).argmax())
                sequence = int(np.searchsorted(prefix.offsets, at * prefix.itemsize, "right")) - 1
                limit = "" if vocab_size is None else f" of {vocab_size} (model.vocab_size)"
                raise UserError(
                    f"{prefix.path}.bin: token id {wrong} in sequence {sequence} "
                    f"is outside the vocabulary{limit}"
                )
            if vocab_size is not None:
                counts += np.bincount(tokens, minlength=vocab_size)
            digest.update(tokens.data)
            tick(tokens.nbytes)
    name = digest.hexdigest() if full else f"sampled-{digest.hexdigest()}"
    return {
        "hash": name, "min": low, "max": high, "tokens": last - first, "counts": counts.tolist(),
    }  # fmt: skip


def describe_prefix(path: str | Path) -> dict[str, Any]:
    """Documents, tokens, dtype, extreme ids and hash of a .bin/.idx pair; what prefix.json says."""
    prefix = open_prefix(path)
    facts = scan(prefix, 0, len(prefix.lengths))
    return {
        "documents": len(prefix.documents) - 1,
        "sequences": len(prefix.lengths),
        "tokens": prefix.tokens,
        "dtype": prefix.dtype.name,
        "min_token": facts["min"],
        "max_token": facts["max"],
        "hash": facts["hash"],
        **prefix.about(),
    }
