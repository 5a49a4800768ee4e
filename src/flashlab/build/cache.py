"""The compile cache: one folder an entry, named by the digest of everything that decides what is in it.

An entry is put in place by one rename. Who wants one that another thread or process is making waits for it, so that
nothing is compiled twice; a damaged one is made anew. As in Go's build cache, one that nobody has used for days is
deleted, which is looked for once a day, when an entry is made.
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
_TRIMMED = "trimmed"
"""A file whose time of change is that of the last look for entries to delete."""
_DAY_S = 24 * 3600.0
_UNUSED_S = 5 * _DAY_S
"""How long an entry is kept that nobody uses."""
_NOTED_S = 3600.0
"""How old the note of an entry's last use may be."""


@dataclass(frozen=True)
class Entry:
    """What was made once."""

    folder: Path
    """It holds the entry's files."""
    facts: Mapping[str, Any]
    """What its maker said of it."""
    cached: bool
    """Whether it was there before."""


def entry(kind: str, key: object, files: Sequence[str], make: Callable[[Path], Mapping[str, Any]]) -> Entry:
    """The entry of a key; where there is none, `make` fills a folder with `files` and returns the entry's facts.

    Args:
        key: everything that decides the content; JSON, as the facts are.

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
        made = Entry(folder, facts or _make(folder, files, make), cached=facts is not None)
    _trim()
    return made


def _read(folder: Path, files: Sequence[str]) -> dict[str, Any] | None:
    """An entry's facts; None where there is no entry, or one that is damaged."""
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
    """Seconds since a file was changed, or an entry used, whose facts it holds; infinite where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _note_use(facts: Path) -> None:
    if _age_s(facts) > _NOTED_S:
        with contextlib.suppress(OSError):  # a cache that others fill, and this user only reads
            os.utime(facts)


def _trim() -> None:
    """Delete what nobody has used for long; nothing where that was looked for within a day."""
    stamp = cache_dir() / _TRIMMED
    if _age_s(stamp) < _DAY_S:
        return
    with contextlib.suppress(OSError):
        stamp.touch()
        for facts in cache_dir().glob(f"*/*/{_FACTS}"):
            if _UNUSED_S < _age_s(facts) < math.inf:
                shutil.rmtree(facts.parent, ignore_errors=True)


def _make(folder: Path, files: Sequence[str], make: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Fill a folder and put it in the entry's place; where anything fails, nothing is left behind."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
        work = Path(temporary) / "entry"
        work.mkdir()
        facts = dict(make(work))
        content = {"facts": facts, "digests": {name: digest((work / name).read_bytes()) for name in files}}
        body = json.dumps(content).encode()
        try:
            (work / _FACTS).write_bytes(digest(body).encode() + b"\n" + body)
            if folder.exists():  # damaged; a program that still runs from it keeps its file
                folder.rename(Path(temporary) / "damaged")
            work.rename(folder)
        except OSError as error:
            raise OutputError(f"wanted to write {folder} into the compile cache: {error.strerror or error}") from error
    return facts


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one thread of one process at a time."""
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
