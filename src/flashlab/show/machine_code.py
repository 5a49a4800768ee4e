"""Markdown on machine code: registers, instruction mix, branches, and excerpts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashlab.build import sass
from flashlab.build.compiler import Cubin
from flashlab.build.sass import Instruction
from flashlab.core.errors import CompileError
from flashlab.show.tables import Column, code, markdown, stage, table

NONE = "*None of the chosen stages has machine code here: they are in Triton or do not compile.*"
"""Shown if there is no machine code."""


def compiled(cubins: Sequence[Cubin | CompileError], labels: Sequence[tuple[str, str]]) -> str:
    """Registers per thread of each kernel on each architecture, and spilled bytes.

    Args:
        labels: (stage id, architecture) of each of `cubins`.
    """
    cells: dict[str, dict[str, str]] = {}
    for (name, arch), cubin in zip(labels, cubins, strict=True):
        text = "refused"
        if isinstance(cubin, Cubin):
            spilled = cubin.resources.spill_store_bytes + cubin.resources.spill_load_bytes
            text = f"{cubin.resources.registers}{f' + {spilled} B spilled' if spilled else ''}"
        cells.setdefault(name, {})[arch] = text
    archs = list(dict.fromkeys(arch for _, arch in labels))
    lines = [(code(name), *(of_arch.get(arch) for arch in archs)) for name, of_arch in cells.items()]
    return markdown(("registers per thread", *archs), lines)


def mixes(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Instructions of each class in each kernel, without empty classes."""
    kinds = [kind for kind in sass.CLASSES if any(mix.get(kind) for mix in counts.values())]
    lines = [(kind.replace("_", " "), *(mix.get(kind) for mix in counts.values())) for kind in kinds]
    return markdown(("class", *map(code, counts)), lines)


def classes(groups: Mapping[str, Sequence[str]]) -> str:
    """The instruction classes and their groups in charts."""
    group_of = {kind: group for group, kinds in groups.items() for kind in kinds}
    lines = [(kind.replace("_", " "), group_of.get(kind), meaning) for kind, meaning in sass.CLASSES.items()]
    return markdown(("class", "in charts", "instructions"), lines, left=3)


def branches(kernels: Mapping[str, Sequence[Instruction]]) -> str:
    """Branches and accesses to shared and local memory in machine code, by kernel."""
    columns = (
        stage("0"),
        Column("predicated branches", lambda item: sass.branches(item[1]).predicated),
        Column("predicated exits", lambda item: sass.branches(item[1]).predicated_exits),
        Column("in subroutines", lambda item: sass.branches(item[1]).in_subroutines),
        Column("shared-memory accesses", lambda item: sass.shared_memory(item[1])),
        Column(
            "local-memory accesses", lambda item: sum(sass.classify(instruction) == "local" for instruction in item[1])
        ),
    )
    return table(columns, kernels.items())


_EXCERPT = 16
"""Lines of an excerpt."""


def excerpt(instructions: Sequence[Instruction], opcode: str) -> str:
    """Machine code from the densest stretch of instructions whose opcode starts with `opcode`, as a code block."""
    starts = range(max(1, len(instructions) - _EXCERPT + 1))
    best = max(
        starts,
        key=lambda i: sum(instruction.opcode.startswith(opcode) for instruction in instructions[i : i + _EXCERPT]),
    )
    text = "\n".join(
        f"{instruction.address:06x}  {instruction.text}" for instruction in instructions[best : best + _EXCERPT]
    )
    return f"```text\n{text}\n```\n"
