"""Source files: their text, the headers they include, and how messages refer to them."""

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
    """Format a path for messages and keys, relative to the checkout if inside it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def readable(log: str) -> str:
    """Clean a compiler log: strip the zero bytes of NVRTC, and make paths relative to the checkout."""
    return log.replace("\0", "").replace(f"{ROOT}/", "").strip() + "\n"


def read(source: Path, language: str) -> str:
    """Read a source file.

    Raises:
        ParameterError: the file cannot be read; the message names it and the language.
    """
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"source: wanted a {language} file, got {source}: {getattr(error, 'strerror', error)}"
        ) from error


class Frame(NamedTuple):
    """A line of source from which an instruction comes, or at which it was inlined."""

    file: Path
    line: int
    """From 1; 0 if unknown."""

    @property
    def shown(self) -> str:
        """Path and line, relative to the checkout if inside it: `kernels/05_wmma.cu:120`."""
        return f"{shown(self.file)}:{self.line}" if self.line else shown(self.file)

    @property
    def text(self) -> str:
        """The current text of the line, without indentation; empty if it cannot be read."""
        linecache.checkcache(str(self.file))
        return linecache.getline(str(self.file), self.line).strip()


def quote(file: str | Path, line: int) -> str:
    """Format a line, counted from 1, as `file:line: text`."""
    frame = Frame(ROOT / file, line)
    return f"{frame.shown}: {frame.text}"


def included(source: Path, text: str, folders: Sequence[Path]) -> set[Path]:
    """Headers included by a file, directly or indirectly, from its folder, the includer's, or one of `folders`."""
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
    """Names and digests of all files below `folders` and of all headers included by a file, for a cache key."""
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cuh", ".cpp")}
    return sorted(_named_digest(*stamp) for stamp in stamps(files | included(source, text, ())))


@lru_cache(maxsize=4096)
def _named_digest(path: str, *_: int) -> tuple[str, str]:
    """A file's name and digest, cached while its stamp is unchanged."""
    return shown(Path(path)), digest(Path(path).read_bytes())


Stamps = tuple[tuple[Any, ...], ...]


def stamps(paths: Iterable[str | Path]) -> Stamps:
    """Each path with its `signature`, cheap enough to compare on every call."""
    return tuple((os.fspath(path), *signature(path)) for path in paths)
