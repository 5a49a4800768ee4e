"""Disassembly and instruction mix (SASS) of cubins.

Counts are static: an instruction in a loop counts once. Uses nvdisasm from its wheel or a CUDA toolkit.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from flashlab.build.cache import entry
from flashlab.build.sources import Frame as Frame
from flashlab.core.errors import MissingPackageError, ParameterError
from flashlab.core.paths import digest, table

_TABLES = table(__file__)
CLASSES: Mapping[str, str] = _TABLES["holds"]
"""Instruction classes, with descriptions."""
_CLASS_OF = re.compile("|".join(f"(?P<{name}>{pattern})(?=\\.|$)" for name, pattern in _TABLES["patterns"].items()))
_ZEROING_HFMA2 = re.compile(r"U?R\d+,-RZ,RZ,")
_CONDITION = re.compile(r"!?U?P\d\b|~?U?R")
BYTES_PER_INSTRUCTION = 16
_INSTALL = "Install it: pip install nvidia-cuda-nvdisasm"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One machine instruction."""

    address: int
    """Offset in bytes from the start of its section, as in branch targets."""
    opcode: str
    """Opcode with modifiers: `LDG.E.128`."""
    operands: str
    """Comma-separated, without spaces; may be empty."""
    predicate: str | None
    """`@P0`, `@!UP1`; None if unconditional."""

    @property
    def text(self) -> str:
        """Disassembly text: `@!P0 BRA 0x170`."""
        return " ".join(part for part in (self.predicate, self.opcode, self.operands.replace(",", ", ")) if part)


def disassemble(code: bytes, entry: str | None = None) -> tuple[Instruction, ...]:
    """Disassemble all kernels of a cubin, or only `entry`, including padding.

    Raises:
        MissingPackageError: nvdisasm is missing or too old.
        ParameterError: `code` is not a cubin, or has no kernel `entry`.
    """
    functions = _functions(code)
    if entry is not None:
        if entry not in functions:
            raise ParameterError(
                f"entry: wanted a kernel of this machine code, {', '.join(functions) or 'none'}, got {entry!r}"
            )
        return functions[entry]
    return tuple(instruction for function in functions.values() for instruction in function)


def lines(code: bytes, entry: str) -> dict[int, tuple[Frame, ...]]:
    """Lines of source of a kernel's instructions, by address: the line itself, then each line at which it was inlined.

    Empty for machine code without line information (`Job.line_info`).

    Raises:
        MissingPackageError: nvdisasm is missing.
        ParameterError: `code` is not a cubin.
    """
    text = _disassembled(code, "--print-line-info-inline")
    section = text.partition(f".section\t.text.{entry},")[2].partition("\t.section\t")[0]
    by_address: dict[int, tuple[Frame, ...]] = {}
    frames: tuple[Frame, ...] = ()
    chain: list[Frame] = []
    for match in _LINE_OR_ADDRESS.finditer(section):
        if match["file"]:  # a chain of calls takes a line each, before the instruction that it is of
            chain.append(Frame(Path(match["file"]), int(match["line"])))
            continue
        if chain:
            frames, chain = tuple(chain), []
        if frames:
            by_address[int(match["address"], 16)] = frames
    return by_address


_LINE_OR_ADDRESS = re.compile(
    r'^\s*//## File "(?P<file>[^"]+)", line (?P<line>\d+)|^\s+/\*(?P<address>[0-9a-f]{4,})\*/', re.MULTILINE
)


@lru_cache(maxsize=256)
def mix(code: bytes, entry: str | None = None) -> Mapping[str, int]:
    """Count the instructions of each of `CLASSES` in all kernels of a cubin, or only in `entry`.

    Raises:
        MissingPackageError, ParameterError: as `disassemble` does.
    """
    counts = dict.fromkeys(CLASSES, 0)
    for instruction in without_padding(disassemble(code, entry)):
        counts[classify(instruction)] += 1
    counts["total"] = sum(counts.values())
    return counts


def classify(instruction: Instruction) -> str:
    """Return the class of an instruction, one of `CLASSES`."""
    match = _CLASS_OF.match(instruction.opcode)
    if match is None or match.lastgroup is None:
        return "other"
    kind = match.lastgroup
    if kind == "half" and _ZEROING_HFMA2.match(instruction.operands):
        return "move"
    # A branch is conditional by its guard, or by a predicate or lane mask that it names first: BRA.U UP0, BRA.DIV UR4.
    if kind == "branch":
        by_operand = instruction.opcode.split(".")[0] == "BRA" and _CONDITION.match(instruction.operands)
        return "branch_predicated" if instruction.predicate or by_operand else "branch"
    return kind


@dataclass(frozen=True, kw_only=True)
class Branches:
    """Number of branch instructions of a kernel, by kind."""

    predicated: int
    """Predicated, in the kernel's own code: branches in the sense of the source."""
    predicated_exits: int
    """Predicated EXIT: threads that finish early."""
    in_subroutines: int
    """Predicated, in subroutines: slow paths of divisions and square roots."""
    always: int
    """Unconditional branches, calls and returns."""


def branches(instructions: Iterable[Instruction]) -> Branches:
    """Count the branches among a kernel's instructions (`disassemble` of one entry)."""
    kept = without_padding(instructions)
    # Subroutines lie behind the kernel's last EXIT, so that the code from there on is theirs.
    last_exit = max((i.address for i in kept if i.opcode == "EXIT" and i.predicate is None), default=0)
    calls = any(i.opcode.split(".")[0] == "CALL" for i in kept)
    conditional = [i for i in kept if classify(i) == "branch_predicated"]
    exits = sum(i.opcode == "EXIT" for i in conditional)
    called = sum(calls and i.address > last_exit and i.opcode != "EXIT" for i in conditional)
    return Branches(
        predicated=len(conditional) - exits - called,
        predicated_exits=exits,
        in_subroutines=called,
        always=sum(classify(i) == "branch" for i in kept),
    )


def shared_memory(instructions: Iterable[Instruction]) -> int:
    """Count the instructions that access shared memory: loads, stores, atomics, and copies into it."""
    kinds = ("shared_load", "shared_store", "async_copy")
    return sum(classify(i) in kinds for i in without_padding(instructions))


def without_padding(instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Remove the padding of functions: NOPs, and the branch to itself."""
    return tuple(i for i in instructions if i.opcode != "NOP" and (i.opcode, i.operands) != ("BRA", hex(i.address)))


@lru_cache(maxsize=16)
def _functions(code: bytes) -> dict[str, tuple[Instruction, ...]]:
    _, functions = json.loads(_disassembled(code, "--emit-json"))
    return {
        function["function-name"]: tuple(
            Instruction(
                address=function["start"] + index * BYTES_PER_INSTRUCTION,
                opcode=item["opcode"],
                operands=item.get("operands", ""),
                predicate=item.get("predicate"),
            )
            for index, item in enumerate(function["sass-instructions"])
        )
        for function in functions
    }


_TEXT = "text.gz"


def _disassembled(code: bytes, option: str) -> str:
    """Output of nvdisasm, cached because a large kernel takes half a second."""
    program = _nvdisasm()
    key = (digest(code), option, program, Path(program).stat().st_size)
    made = entry("sass", key, [_TEXT], lambda folder: _disassemble(code, option, program, folder / _TEXT))
    return gzip.decompress((made.folder / _TEXT).read_bytes()).decode()


def _disassemble(code: bytes, option: str, program: str, target: Path) -> dict[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        run = subprocess.run([program, "--print-code", option, file.name], capture_output=True, text=True, check=False)
    if run.returncode and option.removeprefix("--") in run.stderr:
        raise MissingPackageError(f"wanted an nvdisasm that supports {option}, {program} is too old. {_INSTALL}")
    if run.returncode:
        raise ParameterError(f"code: wanted a cubin, nvdisasm refused it: {(run.stderr or run.stdout).strip()}")
    target.write_bytes(gzip.compress(run.stdout.encode(), 1, mtime=0))
    return {}


@cache
def _nvdisasm() -> str:
    """Path of nvdisasm: from a wheel, PATH, or the usual location of a toolkit."""
    wheels = [str(Path(folder) / "nvidia" / "cu13" / "bin") for folder in sys.path]
    search = os.pathsep.join([*wheels, os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    program = shutil.which("nvdisasm", path=search)
    if program is None:
        raise MissingPackageError(f"wanted nvdisasm to read machine code, found none. {_INSTALL}")
    return program
