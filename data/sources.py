"""From the path in a recipe to files: what kind of source it is, and what is wrong with it."""

from __future__ import annotations

import difflib
import glob
import json
import os
import sysconfig
from codecs import getincrementaldecoder
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nvfp4.data.cache import remember
from nvfp4.data.config import STDLIB
from nvfp4.data.indexed import bare_prefix
from nvfp4.errors import MachineError, UserError

SUFFIXES = (".txt", ".jsonl", ".parquet")
# Tests are odd text (and partly not UTF-8), site-packages are not the standard library, and the
# generated build configuration differs from machine to machine.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_STDLIB_SKIPPED_FILES = {"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"}


@dataclass(frozen=True)
class TextFiles:
    """Text in a fixed order. name: as the user wrote it; column: of .jsonl and .parquet files."""

    name: str
    files: tuple[Path, ...]
    column: str

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class PrefixPair:
    """An existing .bin/.idx pair."""

    name: str
    prefix: str


def resolve(path: str, column: str) -> TextFiles | PrefixPair:
    """What `path` of a Source stands for (see nvfp4.data.config.Source)."""
    if path == STDLIB:
        return TextFiles(STDLIB, stdlib_files(Path(sysconfig.get_path("stdlib"))), column)
    full = Path(path).expanduser().absolute()
    if full.suffix in (".bin", ".idx"):
        return PrefixPair(path, bare_prefix(full))
    if full.is_dir():
        files = tuple(sorted(p for p in full.rglob("*") if p.suffix in SUFFIXES and p.is_file()))
        if not files:
            raise UserError(f"{path}: no {', '.join(SUFFIXES)} file in this folder")
        return TextFiles(path, files, column)
    if full.is_file():
        return TextFiles(path, (_supported(full),), column)
    if os.path.exists(f"{full}.bin") or os.path.exists(f"{full}.idx"):
        return PrefixPair(path, str(full))
    if glob.has_magic(path):
        found = sorted(map(Path, glob.glob(str(full), recursive=True)))
        files = tuple(_supported(p) for p in found if p.is_file())
        if not files:
            raise UserError(f"{path}: no file matches")
        return TextFiles(path, files, column)
    raise UserError(f"{path}: no such file, folder or .bin/.idx prefix{_did_you_mean(full)}")


def _supported(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{path}: text is read from {', '.join(SUFFIXES)} files, not from this kind of file"
        )
    return path


def _did_you_mean(path: Path) -> str:
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    if path.name == STDLIB or difflib.get_close_matches(path.name, [STDLIB]):
        close = [STDLIB]
    return f"; did you mean {close[0]}?" if close else ""


def stdlib_files(folder: Path) -> tuple[Path, ...]:
    """The .py files of a standard library in the order of their relative paths.

    Left out: tests, installed packages, files that the build generated, empty files.
    """
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [
            d for d in folders if d not in _STDLIB_SKIPPED and not d.startswith("config-")
        ]
        for name in names:
            path = Path(here, name)
            generated = name.startswith("_sysconfigdata") or name in _STDLIB_SKIPPED_FILES
            if name.endswith(".py") and not generated and path.is_file() and path.stat().st_size:
                found.append(path)
    if len(found) < 100:
        raise MachineError(
            f"{folder}: this Python has no standard-library sources ({len(found)} .py files); "
            "set data.train to text of your own"
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


def fingerprint(source: TextFiles, root: Path, tick: Any = lambda _: None) -> list[list[str]]:
    """[suffix, content hash] of every file in order, after checking that each can be read.

    UserError, naming the file: empty, not UTF-8 (with the byte offset), column missing.
    """
    result = []
    for path in source.files:
        try:
            facts = remember(
                root, ["file", source.column], [path], lambda p=path: _check(p, source.column)
            )
        except OSError as error:
            raise UserError(f"{path}: cannot read ({error.strerror})") from None
        result.append([path.suffix, facts])
        tick(path.stat().st_size)
    return result


def _check(path: Path, column: str) -> str:
    """Content hash of one file; see `fingerprint` for the errors."""
    size = path.stat().st_size
    if not size:
        raise UserError(f"{path}: empty file")
    digest = blake2b(digest_size=16)
    text = path.suffix != ".parquet"
    decoder = getincrementaldecoder("utf-8")("strict")
    with open(path, "rb") as file:
        offset = 0
        while block := file.read(1 << 20):
            digest.update(block)
            if text:
                kept = len(decoder.getstate()[0])
                try:
                    decoder.decode(block, final=offset + len(block) >= size)
                except UnicodeDecodeError as error:
                    at = offset - kept + error.start
                    raise UserError(
                        f"{path}: not UTF-8 at byte {at} ({error.reason}); convert it first"
                    ) from None
            offset += len(block)
    if path.suffix == ".parquet":
        _check_columns(path, column, parquet_columns(path))
    elif path.suffix == ".jsonl":
        with open(path, "rb") as file:
            first = next((line for line in file if line.strip()), b"")
        if not first:
            raise UserError(f"{path}: empty file")
        row = json_row(path, 1, first)
        _check_columns(path, column, list(row))
    return digest.hexdigest()


def parquet_columns(path: Path) -> list[str]:
    """Column names of a parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_schema(path).names
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None


def _check_columns(path: Path, column: str, columns: list[str]) -> None:
    if column not in columns:
        shown = ", ".join(columns) or "none"
        raise UserError(f"{path}: no column {column!r} (columns: {shown}); set data.text_column")


def json_row(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    """One line of a .jsonl file, numbered from 1."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}: line {number} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}: line {number} is not a JSON object")
    return row
