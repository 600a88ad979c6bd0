"""prepare(): the split, the hash, the cache under kills and rivals, and mixtures of sources."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nvfp4.data import cache
from nvfp4.data import sources as sources_module
from nvfp4.data.config import DataConfig, Source
from nvfp4.data.indexed import PrefixWriter, open_prefix
from nvfp4.data.prepare import prepare, unigram_entropy
from nvfp4.data.tokenize import tokenize
from nvfp4.data.tokenizer import load_tokenizer
from nvfp4.errors import UserError

ROOT = Path(__file__).parent.parent
VOCAB = 300


@pytest.fixture
def text(tmp_path) -> Path:
    """A folder of 60 small files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"document {i} says {i * 7919 % 1000}\n" * (i % 5 + 3))
    return folder


def config(tmp_path, *train, **keys) -> DataConfig:
    listed = tuple(s if isinstance(s, Source) else Source(str(s)) for s in train)
    return DataConfig(train=listed, cache_dir=str(tmp_path / "cache"), **keys)


def tokens_of(part) -> list[np.ndarray]:
    pair = open_prefix(part.prefix)
    tokens = np.split(np.fromfile(pair.path + ".bin", pair.dtype), np.cumsum(pair.lengths)[:-1])
    return tokens[part.begin : part.end]


def texts_of(part, tokenizer) -> list[str]:
    return [tokenizer.decode(d[:-1].tolist(), skip_special_tokens=False) for d in tokens_of(part)]


def prepared_again(tmp_path, *args, **keys) -> str:
    """The lines that prepare() prints, joined."""
    said: list[str] = []
    prepare(config(tmp_path, *args, **keys), vocab_size=VOCAB, echo=said.append)
    return "\n".join(said)


# ------------------------------------------------------------------------------------- content


def test_every_document_is_on_one_side_and_ends_with_eod(tmp_path, text):
    data = prepare(config(tmp_path, text, valid_fraction=0.1), vocab_size=VOCAB, echo=None)
    assert data.tokenizer_path and (data.vocab_used, data.eod) == (VOCAB, 0)
    tokenizer = load_tokenizer(data.tokenizer_path).tokenizer
    train, valid = texts_of(data.train[0], tokenizer), texts_of(data.valid[0], tokenizer)
    assert sorted(train + valid) == sorted(path.read_text() for path in text.iterdir())
    share = len("".join(valid)) / len("".join(train + valid))
    assert 0.1 <= share < 0.2
    documents = tokens_of(data.train[0]) + tokens_of(data.valid[0])
    assert all(d[-1] == 0 and 0 not in d[:-1] for d in documents)
    flat = np.concatenate(tokens_of(data.valid[0]))
    p = np.unique(flat, return_counts=True)[1] / len(flat)
    assert data.unigram_entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
    assert data.bytes_per_token == pytest.approx(len("".join(valid)) / len(flat), rel=1e-12)


def test_unigram_entropy_of_blends():
    assert unigram_entropy([[5, 5, 0, 0]], [1.0]) == pytest.approx(math.log(2))
    assert unigram_entropy([[9, 0], [0, 1]], [0.5, 0.5]) == pytest.approx(math.log(2))


def test_default_corpus(tmp_path, monkeypatch):
    whole = sources_module.stdlib_files
    monkeypatch.setattr(sources_module, "stdlib_files", lambda folder: whole(folder)[:30])
    data = prepare(DataConfig(cache_dir=str(tmp_path)), vocab_size=512, echo=None)
    assert data.train[0].source == "stdlib" and data.valid[0].tokens > 1000
    assert data.unigram_entropy < math.log(512)


def test_a_single_file_is_enough(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {i} of {i % 7}\n" for i in range(500)))
    data = prepare(config(tmp_path, tmp_path / "one.txt"), vocab_size=VOCAB, echo=None)
    assert 0.04 < data.valid[0].tokens / data.train[0].tokens < 0.07


# ---------------------------------------------------------------------------------------- hash


def test_hash_follows_content_not_names(tmp_path, text):
    def data_hash(*train, **keys):
        return prepare(config(tmp_path, *train, **keys), vocab_size=VOCAB, echo=None).hash

    first = data_hash(text)
    moved = text.rename(tmp_path / "moved")
    assert data_hash(moved) == first
    assert data_hash(Source(str(moved), 3.0)) == first  # a single weight is no weight
    other = tmp_path / "other.txt"
    other.write_text("something else\n" * 40)
    blends = [[(moved, 1), (other, 1)], [(moved, 2), (other, 1)], [(other, 1), (moved, 1)]]
    hashes = {data_hash(*(Source(str(p), w) for p, w in blend)) for blend in blends}
    hashes |= {
        first,
        data_hash(moved, valid_fraction=0.2),
        data_hash(moved, valid=(Source(str(other)),)),
    }
    assert len(hashes) == 6
    (moved / "07.txt").write_text("changed\n")
    assert data_hash(moved) not in hashes


# --------------------------------------------------------------------------------------- cache


def test_second_time_nothing_is_made_again(tmp_path, text):
    assert "training a tokenizer" in prepared_again(tmp_path, text)
    (line,) = prepared_again(tmp_path, text).splitlines()
    assert line.startswith("data: ") and "nats per token" in line


@pytest.mark.parametrize("remembered", [False, True])
def test_changed_files_are_noticed(tmp_path, text, monkeypatch, remembered):
    """Also when size and modification time stay the same; the content of large files is remembered
    by their state, that of small ones is always read again."""
    if remembered:
        monkeypatch.setattr(cache, "MEMO_FROM_BYTES", 0)
        monkeypatch.setattr(cache, "SETTLED_SECONDS", -1.0)
    file = text / "07.txt"
    first = prepared_again(tmp_path, text).splitlines()[-1]
    memos = set((tmp_path / "cache").glob("memo/*"))
    assert bool(memos) == remembered
    assert prepared_again(tmp_path, text) == first
    assert set((tmp_path / "cache").glob("memo/*")) == memos
    before = os.stat(file)
    file.write_bytes(file.read_bytes().upper())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(file)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert prepared_again(tmp_path, text).splitlines()[-1] != first


def test_damaged_cache_is_made_again(tmp_path, text):
    first = prepare(config(tmp_path, text), vocab_size=VOCAB, echo=None)
    for damaged in (b"", b"\1" + Path(first.train[0].prefix + ".bin").read_bytes()[1:]):
        Path(first.train[0].prefix + ".bin").write_bytes(damaged)
        said: list[str] = []
        assert prepare(config(tmp_path, text), vocab_size=VOCAB, echo=said.append) == first
        assert "is damaged, making it again" in said[0]


SCRIPT = """
import sys
from nvfp4.data import indexed
from nvfp4.data.config import DataConfig, Source
from nvfp4.data.prepare import prepare

class Halting(indexed.PrefixWriter):
    def finish(self, about):
        super().finish(about)
        print("halfway", flush=True)
        sys.stdin.read()

if sys.argv[3:]:
    from nvfp4.data import text_tokens
    text_tokens.PrefixWriter = Halting
prepare(DataConfig(train=(Source(sys.argv[1]),), cache_dir=sys.argv[2]), vocab_size=300)
print("torch" in sys.modules)
"""


def start(text, cache, *more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(text), str(cache), *more], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_killed_halfway_leaves_nothing_that_is_trusted(tmp_path, text):
    clean = prepare(config(tmp_path / "clean", text), vocab_size=VOCAB, echo=None)
    process = start(text, tmp_path / "cache", "halt")
    assert process.stdout is not None
    assert any(line == "halfway\n" for line in process.stdout)
    (half,) = (tmp_path / "cache" / "tokens").glob("*.building")
    assert (half / "train.idx").exists() and not (half / "valid.idx").exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = prepare(config(tmp_path, text), vocab_size=VOCAB, echo=None)
    assert again.hash == clean.hash and not half.exists()


def test_rivals_prepare_once_and_without_torch(tmp_path, text):
    rivals = [start(text, tmp_path / "cache") for _ in range(3)]
    said = [process.communicate()[0] for process in rivals]
    assert [process.returncode for process in rivals] == [0, 0, 0]
    assert "".join(said).count("training a tokenizer") == 1
    assert len({lines.splitlines()[-2] for lines in said}) == 1
    assert all(lines.endswith("False\n") for lines in said)


# ------------------------------------------------------------------------- prefixes and blends


@pytest.fixture
def pair(tmp_path, text) -> Path:
    tokenize(
        [str(text)],
        tmp_path / "pair",
        vocab_size=VOCAB,
        cache_dir=str(tmp_path / "cache"),
        echo=None,
    )
    return tmp_path / "pair"


def test_last_documents_of_a_prefix_are_set_aside(tmp_path, pair):
    data = prepare(config(tmp_path, pair, valid_fraction=0.1), vocab_size=VOCAB, echo=None)
    train, valid = data.train[0], data.valid[0]
    assert (train.begin, train.end, valid.begin, valid.end) == (0, 54, 54, 60)
    assert train.tokens + valid.tokens == open_prefix(pair).tokens
    assert (data.tokenizer_path, data.bytes_per_token, data.eod) == (None, None, 0)
    assert data.vocab_used == 1 + max(int(d.max()) for d in tokens_of(train) + tokens_of(valid))
    whole = prepare(config(tmp_path, pair, valid=(Source(str(pair)),)), vocab_size=VOCAB, echo=None)
    assert whole.valid[0].tokens == whole.train[0].tokens == open_prefix(pair).tokens
    about = json.loads((tmp_path / "pair.json").read_text())
    assert whole.bytes_per_token == about["text_bytes"] / whole.valid[0].tokens


def test_text_and_prefix_blend(tmp_path, text, pair):
    both = (Source(str(text), 3.0), Source(f"{pair}.bin", 1.0))
    with pytest.raises(UserError, match="is text and .*pair.bin is a .* set data.tokenizer"):
        prepare(config(tmp_path, *both), vocab_size=VOCAB, echo=None)
    tokenizer = f"{pair}_tokenizer"
    data = prepare(config(tmp_path, *both, tokenizer=tokenizer), vocab_size=VOCAB, echo=None)
    assert [part.weight for part in data.train] == [0.75, 0.25]
    assert [part.weight for part in data.valid] == [0.75, 0.25]
    found = {d.tobytes() for d in tokens_of(data.train[0]) + tokens_of(data.valid[0])}
    assert found == {d.tobytes() for d in tokens_of(data.train[1]) + tokens_of(data.valid[1])}


def test_a_source_on_both_sides_is_mentioned(tmp_path, text):
    assert "share a source" in prepared_again(tmp_path, text, valid=(Source(str(text)),))


def test_wrong_combinations(tmp_path, text, pair):
    def message(*train, vocab_size=VOCAB, **keys) -> str:
        with pytest.raises(UserError) as caught:
            prepare(config(tmp_path, *train, **keys), vocab_size=vocab_size, echo=None)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "the tokenizer has 300 entries, model.vocab_size is 260" in message(
        text, tokenizer=f"{pair}_tokenizer", vocab_size=260
    )
    assert f"{pair}.bin: token id " in message(pair, vocab_size=200)
    assert "of 200 (model.vocab_size)" in message(pair, vocab_size=200)
    other = tmp_path / "other"
    tokenize([str(text)], other, vocab_size=280, cache_dir=str(tmp_path / "cache"), echo=None)
    assert "pair and " in message(pair, other) and "different tokenizers" in message(pair, other)
    assert "other: was made with another tokenizer than" in message(
        other, tokenizer=f"{pair}_tokenizer"
    )
    with PrefixWriter(tmp_path / "one", "<u2") as writer:
        writer.add(np.arange(500) % VOCAB)
        writer.finish({})
    assert "one: 1 document(s), too few to set validation aside; name data.valid" in message(
        tmp_path / "one"
    )
    assert "too little text for a vocabulary of 9000" in message(text, vocab_size=9000)
    assert "needs at least 257" in message(text, vocab_size=100)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/c: cannot make the cache folder .*; set data"):
        prepare(DataConfig(cache_dir=str(tmp_path / "file" / "c")), vocab_size=VOCAB)
