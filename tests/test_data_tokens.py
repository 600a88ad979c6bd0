"""Tokenizers and `nvfp4 tokenize`: exact round trips, honest ids, the same files by any workers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nvfp4.data import tokenize as tokenize_module
from nvfp4.data.indexed import describe_prefix, open_prefix
from nvfp4.data.tokenize import encode, tokenize
from nvfp4.data.tokenizer import EOD, load_tokenizer, train_bpe
from nvfp4.errors import UserError

TEXTS = [
    f"def function_{i}(x):\n    return x * {i}  # π ≈ 3.14{i}\r\n\n" * (i % 7 + 1)
    for i in range(60)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 300, folder, "TEXTS")
    return folder


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def tokens_of(prefix) -> list[list[int]]:
    pair = open_prefix(prefix)
    tokens = np.fromfile(pair.path + ".bin", pair.dtype)
    return [part.tolist() for part in np.split(tokens, np.cumsum(pair.lengths)[:-1])]


def test_bpe_is_exact_and_complete(folder):
    loaded = load_tokenizer(folder)
    assert (loaded.size, loaded.eod) == (300, 0)
    assert sorted(loaded.tokenizer.get_vocab().values()) == list(range(300))
    odd = "".join(map(chr, [*range(1, 300), 0x2028, 0x1F600])) + "\r\n \t\0"
    for text in [*TEXTS, odd]:
        ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
        assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == text and 0 not in ids


def test_bpe_depends_on_the_texts_alone(folder, tmp_path):
    train_bpe(reversed(TEXTS), 300, tmp_path, "TEXTS")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_bpe_opens_in_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == 0 and theirs.pad_token is None
    assert theirs(TEXTS[5])["input_ids"] == load_tokenizer(folder).tokenizer.encode(TEXTS[5]).ids


def test_bpe_sizes_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="model.vocab_size is 256; .* at least 257"):
        train_bpe(TEXTS, 256, tmp_path, "TEXTS")
    with pytest.raises(UserError, match="mine.txt: too little text for a vocabulary of 5000"):
        train_bpe(TEXTS, 5000, tmp_path, "mine.txt")
    assert not list(tmp_path.iterdir())


def test_eod_is_added_and_never_read_from_text(folder):
    loaded = load_tokenizer(folder)
    texts = [f"a{EOD}b", "c"]
    first, second = encode(texts, loaded, workers=0)
    assert first[-1] == second[-1] == 0 and 0 not in first[:-1] and len(second) == 2
    assert loaded.tokenizer.decode(first[:-1].tolist(), skip_special_tokens=False) == texts[0]


def test_truncation_and_padding_settings_are_dropped(copied):
    file = copied / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    settings["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": EOD,
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    lengths = [len(tokens) for tokens in encode([TEXTS[0], "a"], load_tokenizer(copied), 0)]
    assert lengths[0] > 20 and lengths[1] == 2


def test_tokenizer_folders(copied, tmp_path):
    config = copied / "tokenizer_config.json"
    whole = load_tokenizer(copied)
    assert load_tokenizer(copied / "tokenizer.json").hash == whole.hash
    config.write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert load_tokenizer(copied).eod == whole.tokenizer.token_to_id("a")
    assert load_tokenizer(copied).hash != whole.hash
    config.unlink()
    assert load_tokenizer(copied).eod == 0  # the only special token
    with pytest.raises(UserError, match="300 entries, model.vocab_size is 299; set model.vocab"):
        whole.check_fits(299)
    whole.check_fits(300)


def test_bad_tokenizer_folders(copied, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such tokenizer folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: no tokenizer.json") as caught:
        load_tokenizer(tmp_path / "empty")
    assert "\n" not in str(caught.value)
    (copied / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(UserError, match="config.json: eos_token '<end>' is not in the vocabulary"):
        load_tokenizer(copied)
    (copied / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json: not readable"):
        load_tokenizer(copied)
    (copied / "tokenizer_config.json").unlink()
    settings = json.loads((copied / "tokenizer.json").read_text())
    settings["added_tokens"][0]["special"] = False
    (copied / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="copied: no end-of-document token; set eos_token"):
        load_tokenizer(copied)
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json: not a tokenizer file"):
        load_tokenizer(copied)


# ------------------------------------------------------------------------------------ tokenize


def test_same_files_for_every_number_of_workers(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_module, "BATCH_CHARS", 900)  # many batches
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(rows)
    said = []
    for workers in (0, 2):
        made = tokenize(
            [str(tmp_path / "a.jsonl")], str(tmp_path / f"w{workers}"), tokenizer=str(folder),
            workers=workers, cache_dir=str(tmp_path / "cache"), echo=said.append,
        )  # fmt: skip
        for end in (".bin", ".idx", ".json"):
            made_now = (tmp_path / f"w{workers}{end}").read_bytes()
            assert made_now == (tmp_path / f"w0{end}").read_bytes()
    assert made["documents"] == 60 and made["text_bytes"] == len("".join(TEXTS).encode())
    assert said[-1].startswith(f"{tmp_path / 'w2'}.bin, .idx: {made['tokens']:,} tokens in 60 doc")
    loaded = load_tokenizer(folder)
    expected = [loaded.tokenizer.encode(text).ids + [0] for text in TEXTS]
    assert tokens_of(tmp_path / "w2") == expected
    about = describe_prefix(tmp_path / "w0")
    assert (about["eod"], about["vocab_size"], about["tokenizer"]) == (0, 300, loaded.hash)


def test_long_documents_are_encoded_in_parts(folder, monkeypatch):
    monkeypatch.setattr(tokenize_module, "PART_CHARS", 100)
    loaded = load_tokenizer(folder)
    texts = ["".join(TEXTS), "x" * 250, "x" * 100]
    made = list(encode(texts, loaded, 0))
    assert [loaded.tokenizer.decode(tokens[:-1].tolist()) for tokens in made] == texts
    assert [tokens.tolist().count(0) for tokens in made] == [1, 1, 1]


def test_tokenizer_of_its_own(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:02}.txt").write_text(text)
    arguments = {"vocab_size": 280, "cache_dir": str(tmp_path / "cache"), "echo": None}
    made = tokenize([str(tmp_path / "*.txt")], f"{tmp_path}/new/p.bin", **arguments)
    assert made["prefix"] == f"{tmp_path}/new/p" and load_tokenizer(made["tokenizer"]).size == 280
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["p.bin", "p.idx", "p.json", "p_tokenizer"]
    with pytest.raises(UserError, match="p.idx: exists already"):
        tokenize([str(tmp_path / "*.txt")], f"{tmp_path}/new/p", **arguments)
    tokenize([str(tmp_path / "0*.txt")], f"{tmp_path}/new/p", overwrite=True, **arguments)
    assert describe_prefix(tmp_path / "new" / "p")["documents"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a tokenizer folder or a vocabulary size"),
        ({"tokenizer": "t", "vocab_size": 300}, "either a tokenizer folder or a vocabulary size"),
        ({"vocab_size": 300, "workers": -1}, "--workers -1"),
        ({"vocab_size": 300, "inputs": []}, "no input"),
        ({"vocab_size": 300, "inputs": ["p.idx"]}, "p.idx: already tokens"),
        ({"vocab_size": 300, "output": "/proc/x/p"}, "/proc/x: cannot make this folder"),
        ({"tokenizer": "nowhere"}, "nowhere: no such tokenizer folder"),
    ],
)
def test_wrong_requests(tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text("text")
    defaults = {"inputs": [str(tmp_path / "a.txt")], "output": str(tmp_path / "p")}
    with pytest.raises(UserError, match=message):
        tokenize(**{**defaults, "cache_dir": str(tmp_path / "c"), "echo": None, **arguments})
    assert not (tmp_path / "p.idx").exists()
