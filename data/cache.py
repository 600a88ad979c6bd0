"""The cache folder: things that are expensive to make, kept under a key that names their content.

Layout of the root (`cache_root`):

    tokenizer/KEY/   a trained tokenizer          tokens/KEY/   .bin/.idx pairs made from text
    index/KEY/       Megatron's sample indices    memo/KEY.json facts about one file (its hash, ...)

A folder appears under its final name only when it is complete (`build_once`), so a killed process
leaves nothing that is later trusted, and several processes may prepare the same thing at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nvfp4.errors import MachineError, UserError

Echo = Callable[[str], None]
MEMO_FROM_BYTES = 8 << 20
SETTLED_SECONDS = 2.0


def cache_root(cache_dir: str | None) -> Path:
    """The writable cache folder: `cache_dir`, or nvfp4/ in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(cache_dir or os.path.join(base, "nvfp4")).expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{root}: cannot make the cache folder ({_why(error)}); set data.cache_dir"
        ) from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"{root}: the cache folder is not writable; set data.cache_dir") from None
    return root


def key_of(*parts: Any) -> str:
    """Name of anything that depends on `parts` (JSON values) only: 32 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def build_once(final: Path, build: Callable[[Path], None], echo: Echo | None = None) -> Path:
    """Returns `final`, a folder that `build(folder)` filled completely, now or in an earlier run.

    MachineError: the disk is full, or the file system has no locks.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(final.name + ".lock"), echo):
        if final.is_dir():  # another process was faster
            return final
        building = final.with_name(final.name + ".building")
        shutil.rmtree(building, ignore_errors=True)  # left by a killed process; we hold its lock
        building.mkdir()
        try:
            build(building)
            for path in building.iterdir():
                sync(path)
            os.rename(building, final)
        except OSError as error:
            raise MachineError(f"{final}: cannot be made ({error})") from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return final


@contextlib.contextmanager
def _locked(path: Path, echo: Echo | None) -> Iterator[None]:
    """Holds an exclusive lock; the kernel drops it when the process dies, however it dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if echo:
                echo("data: another process prepares the same data, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise MachineError(
                f"{path}: no file locks here ({_why(error)}); set data.cache_dir"
            ) from None
        yield


def sync(path: Path) -> None:
    """Forces a file to the disk, so that a rename is never there before the content."""
    if path.is_file():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that is either absent or complete."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_text(json.dumps(value))
    os.replace(part, path)


def remember(root: Path, what: list[Any], files: list[Path], compute: Callable[[], Any]) -> Any:
    """compute(), a fact (JSON value) about `files`, or what it was when the files were the same.

    Unchanged means: same path, size, modification time, change time (which no program can set back)
    and inode. Small files, and files that changed a moment ago, are always looked at again.
    """
    stats = [os.stat(path) for path in files]
    if sum(s.st_size for s in stats) < MEMO_FROM_BYTES:
        return compute()
    seen = [
        [str(path.absolute()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino]
        for path, s in zip(files, stats, strict=True)
    ]
    memo = root / "memo" / f"{key_of(what, seen)}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(memo.read_text())
    value = compute()
    if time.time() - max(max(s.st_mtime, s.st_ctime) for s in stats) > SETTLED_SECONDS:
        memo.parent.mkdir(exist_ok=True)
        write_json(memo, value)
    return value


def _why(error: OSError) -> str:
    return error.strerror or str(error)
