"""From places in a program to lines of source, through everything that was inlined there.

A place is how far an instruction lies from where its executable was loaded: what `addr2line` takes for a
position-independent executable on Linux. It is a return address: the instruction that is meant ends one byte before.
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
"""Its own code is left out of what a user is shown."""

_TIMEOUT_S = 60.0
_LOCATION = re.compile(r"(?P<file>.*):(?P<line>\d+|\?)(?: \(discriminator \d+\))?")
_TOOLS = {
    "addr2line": ("-a", "-i", "-e"),
    "llvm-symbolizer": ("--output-style=GNU", "--functions=none", "-a", "-i", "-e"),
}
"""Programs that take addresses on their standard input, the preferred one first, and the options before the path."""


def resolve(executable: Path, places: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """The lines of source at each place of an executable, the innermost of what was inlined first.

    Never raises: a place of which nothing is known, and every place where `missing` gives a reason, has no frames.
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
    """Why places stay numbers on this machine, and what helps; None where they do not."""
    if _tool() is not None:
        return None
    return (
        f"wanted {', '.join(_TOOLS)} on PATH to name source lines, got none: places are shown as numbers. "
        "Installing one works: apt install binutils, or dnf install binutils."
    )


def site(frames: tuple[Frame, ...]) -> Frame | None:
    """The frame that a user cares about: the innermost one outside the emulation, where there is one."""
    own = (frame for frame in frames if not frame.file.is_relative_to(EMULATION))
    return next(own, frames[0] if frames else None)


@cache
def _tool() -> str | None:
    return next(filter(shutil.which, _TOOLS), None)


def _read(text: str) -> list[tuple[Frame, ...]]:
    """The frames of each address, in order: an address, then the locations of what was inlined there."""
    by_address: list[list[Frame]] = []
    for line in text.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", line):
            by_address.append([])
        elif by_address and (location := _LOCATION.fullmatch(line)) and location["file"] != "??":
            number = 0 if location["line"] == "?" else int(location["line"])
            by_address[-1].append(Frame(Path(os.path.normpath(location["file"])), number))
    return [tuple(frames) for frames in by_address]
