"""From places in a program to lines of source, through everything that was inlined there.

A place is how far an instruction lies from where its executable was loaded: what `addr2line` takes for a
position-independent executable on Linux. It is a return address: the instruction that is meant ends one byte before.
"""

from __future__ import annotations

import linecache
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashlab.build.sources import shown
from flashlab.core.paths import KERNELS

EMULATION = KERNELS / "emulation"
"""Its own code is left out of what a user is shown."""

_MACOS = platform.system() == "Darwin"
_MACHO_BASE = 0x1_0000_0000
"""Where an executable of macOS says it wants to be loaded: what its symbol tables count from."""
_TIMEOUT_S = 60.0
_LOCATION = re.compile(r"(?P<file>.*):(?P<line>\d+|\?)(?: \(discriminator \d+\))?")
_ATOS = re.compile(r"(?P<function>.*?) \(in [^)]*\)(?: \((?P<file>.*):(?P<line>\d+)\)| \+ \d+)?")
_ATOS_INLINED = "\x1f"
"""Between the frames of one place in what `atos` writes: a character that no path or name has."""


@dataclass(frozen=True)
class Frame:
    """A line of source, in a function that was called or inlined there."""

    function: str
    """Demangled; its parameters are left out."""
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

    @property
    def emulated(self) -> bool:
        """Whether this is the emulation's own code."""
        return self.file.is_relative_to(EMULATION)


def resolve(executable: Path, places: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """The lines of source at each place of an executable, the innermost of what was inlined first.

    Never raises: a place of which nothing is known, and every place where `missing` gives a reason, has no frames.
    """
    addresses = sorted(set(places))
    unknown: dict[int, tuple[Frame, ...]] = dict.fromkeys(addresses, ())
    tool = _tool()
    if tool is None or not addresses:
        return unknown
    base = _MACHO_BASE if _MACOS else 0
    try:
        done = subprocess.run(
            tool.command(executable),
            input="".join(f"{base + address - 1:#x}\n" for address in addresses),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return unknown | dict(zip(addresses, tool.read(done.stdout), strict=False))


def missing() -> str | None:
    """Why places stay numbers on this machine, and what helps; None where they do not."""
    if _tool() is not None:
        return None
    names = ", ".join(_tools())
    works = "xcode-select --install" if _MACOS else "apt install binutils, or dnf install binutils"
    return (
        f"wanted {names} on PATH to name source lines, got none: places are shown as numbers. "
        f"Installing one works: {works}."
    )


def site(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame that a user cares about: the innermost one outside the emulation, where there is one."""
    return next((frame for frame in frames if not frame.emulated), frames[0] if frames else None)


@dataclass(frozen=True)
class _Tool:
    command: Callable[[Path], list[str]]
    """Takes addresses on its standard input, one a line."""
    read: Callable[[str], list[tuple[Frame, ...]]]
    """The frames of each address, in order, from what it wrote."""


@cache
def _tool() -> _Tool | None:
    return next((tool for name, tool in _tools().items() if shutil.which(name)), None)


def _tools() -> Mapping[str, _Tool]:
    """By name, the preferred one first."""
    gnu = {
        "addr2line": _Tool(lambda path: ["addr2line", "-a", "-i", "-f", "-C", "-e", str(path)], _read_gnu),
        "llvm-symbolizer": _Tool(
            lambda path: ["llvm-symbolizer", "--output-style=GNU", "-a", "-i", "-f", "-C", f"--obj={path}"], _read_gnu
        ),
    }
    if not _MACOS:
        return gnu
    base = f"{_MACHO_BASE:#x}"
    command = ["atos", "-i", "-d", _ATOS_INLINED, "-fullPath", "-l", base]
    return {
        "atos": _Tool(lambda path: [*command, "-o", str(path)], _read_atos),
        "llvm-symbolizer": gnu["llvm-symbolizer"],
    }


def _read_gnu(text: str) -> list[tuple[Frame, ...]]:
    """An address, then functions, each followed by its location."""
    by_address: list[list[Frame]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if re.fullmatch(r"0x[0-9a-f]+", line):
            by_address.append([])
            continue
        location = _LOCATION.fullmatch(next(lines, ""))
        if by_address and location and location["file"] != "??":
            number = 0 if location["line"] == "?" else int(location["line"])
            by_address[-1].append(_frame(line, location["file"], number))
    return [tuple(frames) for frames in by_address]


def _read_atos(text: str) -> list[tuple[Frame, ...]]:
    """A line for each address: `function (in program) (/path/file.cpp:12)`, as often as it was inlined."""
    by_address = []
    for line in text.splitlines():
        parts = (_ATOS.fullmatch(part.strip()) for part in line.split(_ATOS_INLINED))
        by_address.append(
            tuple(_frame(part["function"], part["file"], int(part["line"])) for part in parts if part and part["file"])
        )
    return by_address


def _frame(function: str, file: str, line: int) -> Frame:
    return Frame(_short(function), Path(os.path.normpath(file)), line)


def _short(function: str) -> str:
    """`load_tile<64>` of `void load_tile<64>(char*, int)`: as far as its parameters, without its return type."""
    depth = 0
    name = function.replace("(anonymous namespace)::", "").removeprefix("void ")
    for i, character in enumerate(name):
        depth += (character in "<{") - (character in ">}")
        if character == "(" and depth == 0 and i > 0 and not name[:i].endswith("operator"):
            return name[:i]
    return name
