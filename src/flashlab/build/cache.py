"""The compile cache: one folder per entry, named by the digest of everything that determines its contents.

Entries are created atomically by a rename. A thread or process that needs an entry which another is creating waits for
it, so that nothing is compiled twice; damaged entries are recreated. As in Go's build cache, entries unused for days
are deleted, at most once a day, when an entry is created.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.core.errors import OutputError
from flashlab.core.paths import cache_dir, digest, writable_dir

_FORMAT = 3
_FACTS = "facts.json"
_NEW = ".new-"  # begins the names of folders in which entries are made
_TRIMMED = "trimmed"
"""A file whose modification time is that of the last deletion of unused entries."""
_DAY_S = 24 * 3600.0
_UNUSED_S = 5 * _DAY_S
"""Time in seconds after which an unused entry is deleted."""
_NOTED_S = 3600.0
"""Resolution in seconds of an entry's last use."""


@dataclass(frozen=True)
class Entry:
    """An entry of the cache."""

    folder: Path
    """Folder of the entry's files."""
    facts: Mapping[str, Any]
    """Facts returned by `make`."""
    cached: bool
    """Whether it existed before."""


def entry(kind: str, key: object, files: Sequence[str], make: Callable[[Path], Mapping[str, Any]]) -> Entry:
    """Return the entry of a key; if there is none, `make` fills a folder with `files` and returns the facts.

    Args:
        key: everything that determines the contents; JSON, like the facts.

    Raises:
        OutputError: the cache cannot be written.
    """
    folder = cache_dir() / kind / digest(json.dumps((_FORMAT, key)).encode())
    facts = _read(folder, files)
    if facts is not None:
        return Entry(folder, facts, cached=True)
    writable_dir(folder.parent, "the compile cache (the environment variable FLASHLAB_CACHE names another)")
    with _locked(folder.with_name(f"{folder.name}.lock")):
        facts = _read(folder, files)
        made = Entry(folder, _make(folder, files, make) if facts is None else facts, cached=facts is not None)
    _trim()
    return made


def _read(folder: Path, files: Sequence[str]) -> dict[str, Any] | None:
    """Read an entry's facts; None if the entry is missing or damaged."""
    try:
        checksum, _, body = (folder / _FACTS).read_bytes().partition(b"\n")
        if checksum.decode() != digest(body):
            return None
        content = json.loads(body)
        facts: dict[str, Any] = content["facts"]
        sound = all(content["digests"][name] == digest((folder / name).read_bytes()) for name in files)
        if sound:
            _note_use(folder / _FACTS)
        return facts if sound else None
    except (OSError, ValueError, KeyError):
        return None


def _age_s(path: Path) -> float:
    """Seconds since a file was modified, which for facts is the entry's last use; infinite if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _note_use(facts: Path) -> None:
    if _age_s(facts) > _NOTED_S:
        with contextlib.suppress(OSError):  # a cache that others fill, and this user only reads
            os.utime(facts)


def _trim() -> None:
    """Delete unused entries, and what killed processes left of new ones, unless that was done within a day."""
    stamp = cache_dir() / _TRIMMED
    if _age_s(stamp) < _DAY_S:
        return
    with contextlib.suppress(OSError):
        stamp.touch()
        for path in (*cache_dir().glob(f"*/*/{_FACTS}"), *cache_dir().glob(f"*/{_NEW}*")):
            if _UNUSED_S < _age_s(path) < math.inf:
                shutil.rmtree(path if path.name.startswith(_NEW) else path.parent, ignore_errors=True)


def _make(folder: Path, files: Sequence[str], make: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Fill a folder and rename it to the entry; on failure, nothing is left behind."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_NEW) as temporary:
            work = Path(temporary) / "entry"
            work.mkdir()
            facts = dict(make(work))
            content = {"facts": facts, "digests": {name: digest((work / name).read_bytes()) for name in files}}
            body = json.dumps(content).encode()
            (work / _FACTS).write_bytes(digest(body).encode() + b"\n" + body)
            if folder.exists():  # damaged; a program that still runs from it keeps its file
                folder.rename(Path(temporary) / "damaged")
            work.rename(folder)
    except OSError as error:
        raise OutputError(
            f"wanted to write {folder} into the compile cache, got: {error.strerror or error}. "
            "The environment variable FLASHLAB_CACHE names another"
        ) from error
    return facts


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among threads and processes."""
    while True:
        with path.open("a", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without locks: two may then make the same entry
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                stands = os.fstat(file.fileno()).st_ino == path.stat().st_ino
            except FileNotFoundError:
                stands = False
            if stands:  # else whoever held it has removed it, and another may hold a new one
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
