"""Every PTX wrapper has two bodies: assembly for a GPU, C++ for a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from flashlab.core.paths import KERNELS

INNER = {"ss", "rs"}
"""Parts of a wrapper of wgmma, no wrappers themselves."""


def names(files: Iterable[str]) -> set[str]:
    text = "\n".join((KERNELS / name).read_text(encoding="utf-8") for name in files)
    return set(re.findall(r"__forceinline__ [\w:<>\s*]*?\b(\w+)\(", text)) - INNER


@pytest.mark.parametrize("files", [("ptx.cuh",), ("ptx_sm90.cuh", "wgmma.cuh")], ids=["ptx", "sm90"])
def test_what_a_gpu_has_the_emulation_has(files: tuple[str, ...]) -> None:
    chip = names(f"common/{name}" for name in files)
    assert len(chip) > 10
    assert chip <= names([f"emulation/{files[0]}"])
