"""Maps code addresses of an executable to lines of source, including inlined frames.

A place is an offset from the load address of the executable, as `addr2line` expects for position-independent
executables on Linux. It is a return address: the instruction in question ends one byte before it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from flashlab.build.sources import Frame as Frame
from flashlab.core.paths import KERNELS

EMULATION = KERNELS / "emulation"
"""The emulation, whose frames are hidden from users."""

_TIMEOUT_S = 60.0
_LOCATION = re.compile(r"(?P<file>.*):(?P<line>\d+|\?)(?: \(discriminator \d+\))?")
_TOOLS = {
    "addr2line": ("-a", "-i", "-e"),
    "llvm-symbolizer": ("--output-style=GNU", "--functions=none", "-a", "-i", "-e"),
}
"""Programs that read addresses from standard input, in order of preference, with the options before the path."""


def resolve(executable: Path, places: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """Map places of an executable to lines of source, the innermost inlined frame first.

    Never raises: unknown places, and all places if `missing` gives a reason, have no frames.
    """
    addresses = sorted(set(places))
    unknown: dict[int, tuple[Frame, ...]] = dict.fromkeys(addresses, ())
    tool = _tool()
    if tool is None or not addresses:
        return unknown
    try:
        done = subprocess.run(
            [tool, *_TOOLS[tool], str(executable)],
            input="".join(f"{address - 1:#x}\n" for address in addresses),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return unknown | dict(zip(addresses, _read(done.stdout), strict=False))


def missing() -> str | None:
    """Explain why places cannot be resolved on this machine, and what helps; None if they can."""
    if _tool() is not None:
        return None
    return (
        f"wanted {', '.join(_TOOLS)} on PATH to name source lines, got none: places are shown as numbers. "
        "Installing one works: apt install binutils, or dnf install binutils."
    )


def site(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame outside the emulation, or None."""
    own = (frame for frame in frames if not frame.file.is_relative_to(EMULATION))
    return next(own, frames[0] if frames else None)


@cache
def _tool() -> str | None:
    return next(filter(shutil.which, _TOOLS), None)


def _read(text: str) -> list[tuple[Frame, ...]]:
    """Parse the frames of each address, in order."""
    by_address: list[list[Frame]] = []
    for line in text.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            by_address.append([])
        elif by_address and (location := _LOCATION.fullmatch(line)) and location["file"] != "??":
            number = 0 if location["line"] == "?" else int(location["line"])
            by_address[-1].append(Frame(Path(os.path.normpath(location["file"])), number))
    return [tuple(frames) for frames in by_address]
