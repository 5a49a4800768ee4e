"""Source files as the compilers see them: their text, the headers they include, and how messages name their lines."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.core.errors import ParameterError
from flashlab.core.paths import ROOT, digest, signature


def shown(path: Path) -> str:
    """A path for messages and keys: relative to the checkout where it lies in there."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def readable(log: str) -> str:
    """A compiler's log without the zero bytes that end NVRTC's texts, and with paths relative to the checkout."""
    return log.replace("\0", "").replace(f"{ROOT}/", "").strip() + "\n"


def read(source: Path, language: str) -> str:
    """The text of a source file.

    Raises:
        ParameterError: it cannot be read; the message names the file and the language.
    """
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"source: wanted a {language} file, got {source}: {error}") from error


class Frame(NamedTuple):
    """A line of source that a place in a program comes from, or that it was inlined at."""

    file: Path
    line: int
    """From 1; 0 where unknown."""

    @property
    def shown(self) -> str:
        """Path and line, relative to the checkout where it lies in there: `kernels/05_wmma.cu:120`."""
        return f"{shown(self.file)}:{self.line}" if self.line else shown(self.file)

    @property
    def text(self) -> str:
        """The line of source as it is in the file now, without its indentation; empty where it cannot be read."""
        linecache.checkcache(str(self.file))
        return linecache.getline(str(self.file), self.line).strip()


def quote(file: str | Path, line: int) -> str:
    """`file:line: text` of a line, counted from 1."""
    frame = Frame(ROOT / file, line)
    return f"{frame.shown}: {frame.text}"


def included(source: Path, text: str, folders: Sequence[Path]) -> set[Path]:
    """The headers that a file includes, directly or not, from its own folder, the includer's, or one of `folders`."""
    headers: set[Path] = set()
    pending = [(source.parent, text)]
    while pending:
        includer, content = pending.pop()
        for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', content, re.MULTILINE):
            for folder in (includer, source.parent, *folders):
                path = (folder / name).resolve()
                if path not in headers and path.is_file():
                    headers.add(path)
                    pending.append((path.parent, path.read_text(encoding="utf-8", errors="replace")))
    return headers


def contents(source: Path, text: str, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """For a cache key: every file below `folders` and every other header that a file includes, with its digest."""
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cuh", ".cpp")}
    return sorted(_named_digest(*stamp) for stamp in stamps(files | included(source, text, ())))


@lru_cache(maxsize=4096)
def _named_digest(path: str, *_: int) -> tuple[str, str]:
    """A file's name and digest, computed once a process while its stamp stays."""
    return shown(Path(path)), digest(Path(path).read_bytes())


Stamps = tuple[tuple[Any, ...], ...]


def stamps(paths: Iterable[str | Path]) -> Stamps:
    """Each path with its `signature`: cheap to compare, so that every call may."""
    return tuple((os.fspath(path), *signature(path)) for path in paths)
