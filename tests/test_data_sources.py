"""From paths to documents: every kind of file is read exactly, every bad one named in one line."""

import json
import sysconfig
from pathlib import Path

import pytest

from nvfp4.data.config import DataConfig, Source
from nvfp4.data.corpus import document_hash, documents, plan_split
from nvfp4.data.sources import PrefixPair, TextFiles, fingerprint, resolve, stdlib_files
from nvfp4.errors import MachineError, UserError


def read(path, tmp_path, column="text"):
    source = resolve(str(path), column)
    assert isinstance(source, TextFiles)
    fingerprint(source, tmp_path)
    return list(documents(source, tmp_path))


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, columns) -> Path:
    from pyarrow import parquet, table

    parquet.write_table(table(columns), path)
    return path


def test_text_files_are_read_exactly(tmp_path):
    text = "one\r\ntwo\rthree\n\n é \N{GRINNING FACE}\u2028no newline at the end"
    (tmp_path / "a[1].txt").write_bytes(text.encode())
    assert read(tmp_path / "a[1].txt", tmp_path) == [text]


def test_jsonl_is_read_as_text_whatever_else_it_holds(tmp_path):
    """Dates stay text, other columns may change their type, line and column order is free."""
    rows = [
        {"text": "2020-01-01", "n": 1, "type": "a", "message": {}},
        {"n": "x", "text": "second\nline", "extra": [1]},
        {"text": "", "n": None},
        {"text": "third \u2028 é"},
    ]
    path = write_jsonl(tmp_path / "{x}*.jsonl", rows)
    assert read(path, tmp_path) == ["2020-01-01", "second\nline", "third \u2028 é"]


def test_parquet_and_another_column(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"n": [1, 2], "body": ["x", "y"]})
    assert read(path, tmp_path, "body") == ["x", "y"]


def test_folders_and_globs_are_read_in_order(tmp_path):
    folder = tmp_path / "f"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "c.txt").write_text("c")
    (folder / "ignored.md").write_text("m")
    write_jsonl(folder / "aa.jsonl", [{"text": "j"}])
    assert read(folder, tmp_path) == ["a", "j", "b", "c"]
    assert read(folder / "**" / "*.txt", tmp_path) == ["a", "b", "c"]


def test_prefixes_are_told_from_text(tmp_path):
    (tmp_path / "p.v1.idx").touch()
    for name in ("p.v1", "p.v1.bin", "p.v1.idx"):
        assert resolve(str(tmp_path / name), "text") == PrefixPair(
            str(tmp_path / name), str(tmp_path / "p.v1")
        )


BAD = {
    "absent.txt": (None, "no such file, folder or .bin/.idx prefix; did you mean absent.text?"),
    "empty.txt": (b"", "empty file"),
    "blank.txt": (b" \n\n", "holds no text"),
    "latin.txt": ("caf\xe9 ".encode("latin-1"), "not UTF-8 at byte 3 (invalid continuation byte)"),
    "cut.txt": ("abc\xe9".encode()[:-1], "not UTF-8 at byte 3 (unexpected end of data)"),
    "far.txt": (b"x" * (1 << 20) + b"ab\xff", f"not UTF-8 at byte {(1 << 20) + 2} (invalid start"),
    "edge.txt": (b"x" * ((1 << 20) - 1) + b"\xe2\x28", f"not UTF-8 at byte {(1 << 20) - 1} ("),
    "notes.md": (b"text", "text is read from .txt, .jsonl, .parquet files, not from this kind"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "not UTF-8 at byte 10 ("),
    "empty.jsonl": (b"", "empty file"),
    "blank.jsonl": (b"\n \n", "empty file"),
    "column.jsonl": (b'{"body": "x", "id": 1}\n', "no column 'text' (columns: body, id); set data"),
    "later.jsonl": (b'{"text": "x"}\n\n{"body": 1}\n', "line 3 has no field 'text'"),
    "broken.jsonl": (b'{"text": "x"}\n{"text": \n', "line 2 is not JSON (Expecting value"),
    "list.jsonl": (b"[1]\n", "line 1 is not a JSON object"),
    "number.jsonl": (b'{"text": "x"}\n{"text": 7}\n', "line 2 holds int, not text; clean it"),
    "null.jsonl": (b'{"text": null}\n', "line 1 holds NoneType, not text"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', "line 1 is not valid Unicode (surrogates not"),
    "none.jsonl": (b'{"text": ""}\n', "holds no text"),
    "no.parquet": (b"PAR0", "not a parquet file ("),
    "empty.parquet": (b"", "empty file"),
    "*.none": (None, "no file matches"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_in_one_line(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / "absent.text").touch()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name}: {message}")
    assert "\n" not in str(caught.value)


def test_bad_parquet_files_are_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"n": [1], "body": ["x"]})
    with pytest.raises(UserError, match=r"a.parquet: no column 'text' \(columns: n, body\)"):
        read(path, tmp_path)
    with pytest.raises(UserError, match=r"a.parquet: row 1 holds int, not text"):
        read(path, tmp_path, "n")
    path = write_parquet(tmp_path / "b.parquet", {"text": ["x", None]})
    with pytest.raises(UserError, match=r"b.parquet: row 2 holds NoneType"):
        read(path, tmp_path)


def test_folder_without_text(tmp_path):
    with pytest.raises(UserError, match="no .txt, .jsonl, .parquet file in this folder"):
        resolve(str(tmp_path), "text")
    with pytest.raises(UserError, match="did you mean stdlib?"):
        resolve("stdlb", "text")


def test_stdlib_is_this_pythons_own_sources(tmp_path):
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    names = [path.relative_to(root).as_posix() for path in files]
    assert names == sorted(names) and {"ast.py", "json/decoder.py"} <= set(names)
    odd = [n for n in names if {"test", "tests", "site-packages"} & set(n.split("/"))]
    assert not odd and not [n for n in names if "_sysconfigdata" in n]
    assert 5e6 < sum(path.stat().st_size for path in files) < 30e6
    assert resolve("stdlib", "text") == TextFiles("stdlib", files, "text")
    fingerprint(TextFiles("stdlib", files, "text"), tmp_path)  # all of it is UTF-8
    with pytest.raises(MachineError, match="no standard-library sources .* set data.train"):
        stdlib_files(tmp_path)


# -------------------------------------------------------------------------------- the split


def sides(texts, fraction):
    split = plan_split(texts, fraction)
    parts = [part for text in texts for part in split.parts(text)]
    return split, *([t for side, t in parts if side == s] for s in ("train", "valid"))


def test_whole_documents_are_set_aside_by_hash():
    texts = [f"document {i} " * 20 for i in range(200)]
    split, train, valid = sides(texts, 0.1)
    assert split.threshold is not None and sorted(train + valid) == sorted(texts)
    assert 0.1 <= len("".join(valid)) / len("".join(texts)) < 0.11
    assert max(map(document_hash, valid)) < min(map(document_hash, train))
    assert sides(texts[::-1], 0.1)[0] == split  # the order of the documents does not matter


def test_long_documents_and_twins():
    texts = [f"document {i} " * 20 for i in range(100)]
    giant = min((f"{i}" * 200_000 for i in range(10)), key=document_hash)
    _, train, valid = sides([*texts, giant], 0.05)
    assert giant in train and valid
    _, train, valid = sides([t for t in texts for _ in range(2)], 0.05)
    assert valid and not set(train) & set(valid)
    split, train, valid = sides(["the same text\n" * 50] * 50, 0.05)
    assert split.threshold is None and train and valid


@pytest.mark.parametrize("count", [1, 3])
def test_few_documents_are_cut_at_a_line_end(count):
    texts = ["".join(f"{i} line {j}\n" for j in range(1000)) for i in range(count)]
    _, train, valid = sides(texts, 0.05)
    assert [a + b for a, b in zip(train, valid, strict=True)] == texts
    assert all(a.endswith("\n") for a in train)
    assert 0.04 < len("".join(valid)) / len("".join(texts)) < 0.06
    assert sides(["x" * 1000], 0.1)[1:] == (["x" * 900], ["x" * 100])


# ------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": ()}, "data.train is empty"),
        ({"valid_fraction": 0.0}, "data.valid_fraction is 0.0; it must be above 0"),
        ({"valid_fraction": 0.6}, "data.valid_fraction is 0.6"),
        ({"num_workers": -1}, "data.num_workers is -1"),
    ],
)
def test_configuration_errors(keys, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**keys)


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive(weight):
    with pytest.raises(UserError, match="data source a.txt: weight is"):
        Source("a.txt", weight)
