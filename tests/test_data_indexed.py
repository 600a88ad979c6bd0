"""The .bin/.idx format: byte-equal to Megatron's, 64-bit, and every damage is told apart."""

import shutil
import struct

import numpy as np
import pytest

from nvfp4.data import indexed
from nvfp4.data.indexed import (
    PrefixWriter,
    describe_prefix,
    index_bytes,
    open_prefix,
    scan,
    token_dtype,
)
from nvfp4.errors import UserError

DOCUMENTS = [np.array(d, np.int32) for d in ([5, 6, 0], [7, 0], [499] * 40 + [0], [0])]


def write(prefix, documents=DOCUMENTS, dtype="<u2", about=None):
    with PrefixWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
        writer.finish(about or {})
    return prefix


@pytest.mark.parametrize("vocab_size", [500, 65_499, 65_500, 131_072])
def test_same_bytes_as_megatron(tmp_path, vocab_size):
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    dtype = np.dtype(token_dtype(vocab_size))
    assert dtype == np.dtype(DType.optimal_dtype(vocab_size))
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    for document in DOCUMENTS:
        theirs.add_item(torch.from_numpy(document))
        theirs.end_document()
    theirs.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", dtype=dtype.str)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()
    read = IndexedDataset(str(tmp_path / "ours"))
    assert [list(read[i]) for i in range(len(read))] == [list(d) for d in DOCUMENTS]


def test_offsets_beyond_32_bits(tmp_path):
    """5 documents of 2^30 uint16 tokens: byte offsets pass 2^31, 2^32 and 2^33 (sparse file)."""
    lengths = np.full(5, 2**30, np.int64)
    (tmp_path / "big.idx").write_bytes(index_bytes(lengths, np.dtype("<u2")))
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(10 * 2**30)
        file.seek(10 * 2**30 - 2)
        file.write(struct.pack("<H", 77))
    big = open_prefix(tmp_path / "big")
    assert list(big.offsets) == [i * 2**31 for i in range(5)]
    assert big.tokens == 5 * 2**30
    assert big.token_range(4, 5) == (4 * 2**30, 5 * 2**30)
    with open(tmp_path / "big.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(UserError, match="10737418242 bytes, but big.idx announces 5368709120 tok"):
        open_prefix(tmp_path / "big")


def damage(path, at, new):
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(bytes(data))


DAMAGES = {
    "x.idx: missing; x.bin is there": lambda d: (d / "x.idx").unlink(),
    "x.bin: missing; x.idx is there": lambda d: (d / "x.bin").unlink(),
    "x.bin: 96 bytes, but x.idx announces 47": lambda d: (d / "x.bin").write_bytes(b"\0" * 96),
    "x.bin: 91 bytes, but x.idx announces": lambda d: (d / "x.bin").write_bytes(b"\0" * 91),
    "x.bin: holds no tokens": lambda d: (d / "x.bin").write_bytes(b""),
    "x.idx: not a Megatron index": lambda d: damage(d / "x.idx", 0, b"PK"),
    "x.idx: dtype code 7 is no token type": lambda d: damage(d / "x.idx", 17, b"\x07"),
    "x.idx: 20 bytes is too short": lambda d: (d / "x.idx").write_bytes(b"\0" * 20),
    "x.idx: 121 bytes, but its header announces 122": lambda d: (d / "x.idx").write_bytes(
        (d / "x.idx").read_bytes()[:-1]
    ),
    "x.idx: offsets or document marks are": lambda d: damage(d / "x.idx", 34 + 16 + 8, b"\xff"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_pairs_are_refused(tmp_path, message):
    write(tmp_path / "x")
    DAMAGES[message](tmp_path)
    with pytest.raises(UserError) as caught:
        open_prefix(tmp_path / "x")
    assert str(caught.value).startswith(str(tmp_path / message))
    assert "\n" not in str(caught.value)


def test_scan_covers_tokens_lengths_and_type(tmp_path):
    pair = open_prefix(write(tmp_path / "a"))
    facts = scan(pair, 0, 4, vocab_size=500)
    tokens = np.concatenate(DOCUMENTS)
    assert facts["counts"] == np.bincount(tokens, minlength=500).tolist()
    assert (facts["min"], facts["max"], facts["tokens"]) == (0, 499, 47)
    assert scan(pair, 1, 2)["tokens"] == 2
    others = {
        "token": [np.array([5, 6, 1], np.int32), *DOCUMENTS[1:]],
        "boundary": [tokens[:2], tokens[2:5], *DOCUMENTS[2:]],
    }
    hashes = {scan(open_prefix(write(tmp_path / k, d)), 0, 4)["hash"] for k, d in others.items()}
    hashes |= {facts["hash"], scan(open_prefix(write(tmp_path / "i", dtype="<i4")), 0, 4)["hash"]}
    assert len(hashes) == 4
    shutil.copy(tmp_path / "a.bin", tmp_path / "copy.bin")
    shutil.copy(tmp_path / "a.idx", tmp_path / "copy.idx")
    assert scan(open_prefix(tmp_path / "copy"), 0, 4)["hash"] == facts["hash"]


def test_scan_names_the_sequence_of_a_foreign_token(tmp_path):
    pair = open_prefix(write(tmp_path / "a"))
    with pytest.raises(UserError, match="a.bin: token id 499 in sequence 2 is outside .* 499 "):
        scan(pair, 0, 4, vocab_size=499)
    negative = write(tmp_path / "n", [DOCUMENTS[0], np.array([3, -1], np.int32)], "<i4")
    with pytest.raises(UserError, match="n.bin: token id -1 in sequence 1"):
        describe_prefix(negative)


def test_scan_of_huge_sets_is_sampled_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "_BLOCK", 16)
    monkeypatch.setattr(indexed, "_SAMPLED_BLOCKS", 3)
    pair = open_prefix(write(tmp_path / "a"))
    assert not scan(pair, 0, 4)["hash"].startswith("sampled-")
    monkeypatch.setattr(indexed, "FULL_SCAN_BYTES", 20)
    assert scan(pair, 0, 4)["hash"].startswith("sampled-")


def test_a_failed_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), PrefixWriter(tmp_path / "x", "<u2") as writer:
        writer.add(DOCUMENTS[0])
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_describe_prefix(tmp_path):
    write(tmp_path / "a", about={"eod": 0})
    for path in (tmp_path / "a", tmp_path / "a.bin", str(tmp_path / "a.idx")):
        found = describe_prefix(path)
        assert len(found.pop("hash")) == 32
        assert found == {
            "documents": 4, "sequences": 4, "tokens": 47, "dtype": "uint16",
            "min_token": 0, "max_token": 499, "eod": 0,
        }  # fmt: skip
