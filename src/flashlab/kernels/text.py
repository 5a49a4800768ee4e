"""Reads kernel sources: lines, integer constants, and layouts of shared memory and arguments.

Pages quote kernels and draw their tiles, and launches fill in their structures. All of it is read from the source, so
that it cannot diverge from what runs.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlab.core.arithmetic import calculated
from flashlab.core.errors import ParameterError
from flashlab.core.paths import KERNELS
from flashlab.kernels.registry import Excerpt, Stage

COMMON = KERNELS / "common"
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)
_CONSTANT = re.compile(
    r"^ *(?:static )?constexpr (?:int|bool|unsigned|long long|float) (\w+)(<__half>)? = ([^;]+);", re.MULTILINE
)
_MEMBER = re.compile(r"^ *(?:alignas\((\w+)\) )?(element|float|WorkTile|ptx::Mbarrier) ([^;]+);", re.MULTILINE)
_ARRIVALS = re.compile(r"mbarrier_init\(&smem\.(\w+)(?:\[\w+\])?, ([^;]+)\);")
_BYTES = {"element": 2, "float": 4, "WorkTile": 16, "ptx::Mbarrier": 8}
"""Sizes in bytes of types in shared memory; an element has 16 bits."""


def lines(stage: Stage, excerpt: Excerpt) -> list[str]:
    """Return the lines of an excerpt of a stage's source, dedented.

    Raises:
        ParameterError: `first` does not match exactly one line, or `last` matches none after it.
    """
    path = COMMON / excerpt.file if excerpt.file else stage.source
    text = path.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(text) if excerpt.first in line]
    if len(starts) != 1:
        raise ParameterError(f"{path.name}: wanted one line with {excerpt.first!r}, found {len(starts)}")
    end = next((number for number in range(starts[0], len(text)) if excerpt.last in text[number]), None)
    if end is None:
        raise ParameterError(f"{path.name}: wanted a line with {excerpt.last!r} from {excerpt.first!r} on, found none")
    kept = text[starts[0] : (end if excerpt.last else starts[0]) + 1]
    margin = min(len(line) - len(line.lstrip()) for line in kept if line.strip() and not line.startswith("#"))
    return [line.removeprefix(" " * margin) for line in kept]


def constants(stage: Stage, head_dim: int, **macros: int) -> dict[str, int]:
    """Evaluate the integer constants of a kernel and its headers, with default tunables for float16.

    Args:
        macros: further macros, such as CAUSAL.
    """
    known = {"HEAD_DIM": head_dim, "CAUSAL": 0, "ALIGNED": 1, "WARP": 32}
    known |= (
        stage.parameters(head_dim) | {name: ablation.default for name, ablation in stage.ablations.items()} | macros
    )
    for text in _texts(stage.source, set()):
        for name, for_half, expression in _CONSTANT.findall(text):
            if (for_half or name not in known) and (value := _value(expression, known)) is not None:
                known[name] = value
    return known


def _texts(source: Path, seen: set[Path]) -> Iterable[str]:
    """Texts of a kernel and the files it includes, in order of inclusion, the kernel last."""
    seen.add(source)
    text = source.read_text(encoding="utf-8")
    for name in _INCLUDE.findall(text):
        if COMMON / name not in seen and (COMMON / name).is_file():
            yield from _texts(COMMON / name, seen)
    yield text


@dataclass(frozen=True, kw_only=True)
class Member:
    """An array in a kernel's shared memory."""

    name: str
    offset: int
    """Offset in bytes."""
    size: int
    """Size in bytes."""
    count: int
    """Size of its first dimension: pipeline stages, consumers, or 1."""
    kind: str
    """Its element type."""


def shared_memory(stage: Stage, head_dim: int, **macros: int) -> list[Member]:
    """Read the members of `SharedStorage`, in order, with offsets and sizes in bytes.

    Raises:
        ParameterError: the kernel has no such struct, or a size cannot be evaluated.
    """
    known = constants(stage, head_dim, **macros)
    body = re.search(r"^struct SharedStorage \{\n(.*?)^\};", stage.source.read_text(encoding="utf-8"), re.M | re.S)
    if body is None:
        raise ParameterError(f"{stage.source.name}: wanted a struct SharedStorage, found none")
    members, end = [], 0
    for align, kind, names in _MEMBER.findall(body[1]):
        for name, dimensions in re.findall(r"(\w+)((?:\[[^\]]+\])*)(?:, |$)", names):
            counts = [_value(expression, known) for expression in re.findall(r"\[([^\]]+)\]", dimensions)]
            if None in counts:
                raise ParameterError(f"{stage.source.name}: wanted sizes of {name} in integers, got {dimensions}")
            size = _BYTES[kind]
            for count in counts:
                size *= count or 0
            boundary = (_value(align, known) or 1) if align else min(_BYTES[kind], 8)
            start = -(-end // boundary) * boundary
            many = len(counts) > 1 or (kind == "ptx::Mbarrier" and counts)
            count = (counts[0] or 1) if many else 1
            members.append(Member(name=name, offset=start, size=size, count=count, kind=kind))
            end = start + size
    return members


def arrivals(stage: Stage, head_dim: int) -> dict[str, int]:
    """Arrival counts of the mbarriers of a kernel."""
    known = constants(stage, head_dim)
    known |= {f"FILL_ARRIVALS<{name}>": 1 for name in ("THREADS", "WARPGROUP", "Q_THREADS", "KV_THREADS")}
    counts = {}
    for text in _texts(stage.source, set()):
        for name, expression in _ARRIVALS.findall(text):
            value = _value(expression, known | {"KV_WARPS": 1})
            if value is not None:
                counts[name] = value
    return counts


# --- Structures that a kernel takes -----------------------------------------------------------------------------------

_FIELD = re.compile(r" *(?:const )?(\w+(?: \w+)*?)(\*?) (\w+);")
_C_TYPES: Mapping[str, Any] = {"int": ctypes.c_int, "float": ctypes.c_float, "long long": ctypes.c_longlong}


def fields(file: str, structure: str, *macros: str, **structures: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Read the fields of a structure, for ctypes.

    Args:
        file: file that declares it, below kernels/.
        macros: macros that are 1 in #if conditions around fields.
        structures: structures used as types of fields, by name.
    """
    body = (KERNELS / file).read_text(encoding="utf-8").partition(f"\nstruct {structure} {{\n")[2].partition("\n};")[0]
    declared: list[tuple[str, Any]] = []
    asked = True
    for line in body.splitlines():
        if line.startswith("#"):
            asked = line == "#endif" or not set(macros).isdisjoint(line.split())
        elif asked and (field := _FIELD.match(line)):
            kind, pointer, name = field.groups()
            declared.append((name, ctypes.c_void_p if pointer else {**_C_TYPES, **structures}[kind]))
    return declared


# --- Integer expressions of C++ ---------------------------------------------------------------------------------------


def _value(expression: str, known: Mapping[str, int]) -> int | None:
    """Evaluate an integer expression of constants; None if it has anything else."""
    text = expression.partition("//")[0].strip()
    if text in known:
        return known[text]
    text = re.sub(r"static_cast<[\w ]+>|\bsizeof\(element\)", lambda cast: "2" if "sizeof" in cast[0] else "", text)
    text = re.sub(r"\b(\d+)(?:u?ll|\.0f)", r"\1", text).replace("<element>", "")
    text = text.replace("&&", " and ").replace("||", " or ")
    condition, question, branches = text.partition("?")
    if question:
        yes, _, no = branches.partition(":")
        chosen = _value(condition, known)
        return None if chosen is None else _value(yes if chosen else no, known)
    try:
        value = calculated(text.replace("/", "//"), known)  # division is that of C++ on numbers that are not negative
    except ValueError:
        return None
    return value if isinstance(value, int) else None
