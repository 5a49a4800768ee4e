"""The registry: every kernel, what it asks, and what it takes. Tests, CLI, notebooks and figures iterate `STAGES`.

Adding a stage is one file in `kernels/`, one entry here and one page in `site/stages/`. What was tried and led nowhere
is a stage too, off the ladder: `DEAD_ENDS`, `kernels/dead_ends/` and `site/dead_ends/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from flashlab.core.errors import ParameterError, UnknownStageError, UnsupportedError
from flashlab.core.paths import KERNELS
from flashlab.core.problem import DType, Precision, Problem

Language = Literal["cuda", "triton"]

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
"""The architectures flashlab compiles for, oldest first."""


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: `sm_90a` is (9, 0)."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def arch_for(compute_capability: tuple[int, int]) -> str:
    """The newest of `ARCHS` whose machine code a GPU of that compute capability runs.

    Machine code runs on the same major version and an equal or higher minor one; `a` targets on exactly theirs.

    Raises:
        UnsupportedError: none does.
    """
    fitting = [
        arch
        for arch in ARCHS
        if capability(arch)[0] == compute_capability[0]
        and (
            capability(arch)[1] == compute_capability[1]
            if arch.endswith("a")
            else capability(arch)[1] <= compute_capability[1]
        )
    ]
    if not fitting:
        raise UnsupportedError(
            f"wanted a GPU that runs code for one of {', '.join(ARCHS)}; "
            f"this one has compute capability {compute_capability[0]}.{compute_capability[1]}"
        )
    return fitting[-1]


@dataclass(frozen=True, kw_only=True)
class Param:
    """A tunable that reaches the kernel as a `-D` macro of the same name."""

    default: int
    choices: tuple[int, ...]
    """Values known to compile for some head dim; others may fail a static_assert, which names the reason."""
    meaning: str
    by_head_dim: Mapping[int, int] = field(default_factory=dict)
    """Defaults for a head dim, where `default` does not suit."""

    def default_for(self, head_dim: int) -> int:
        """The default at `head_dim`."""
        return self.by_head_dim.get(head_dim, self.default)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One kernel of the ladder."""

    id: str
    title: str
    parent: str | None
    question: str
    change: str
    """The one idea that separates it from its parent."""
    prediction: str
    """What was expected of it before it ran."""
    language: Language = "cuda"
    """`cuda`: C++, compiled by NVRTC, and by a C++ compiler for the CPU. `triton`: Python, compiled by Triton, which
    also interprets it on a CPU."""
    min_arch: str = "sm_75"
    max_arch: str | None = None
    """The last architecture that has its instructions; None where newer ones keep them."""
    dtypes: tuple[DType, ...] = ("float16",)
    head_dims: tuple[int, ...] = (64, 128)
    params: Mapping[str, Param] = field(default_factory=dict)
    ablations: Mapping[str, Param] = field(default_factory=dict)
    """Macros that ablations set and nobody tunes (`ablate.py`). The kernel has their defaults itself, so that they
    reach it only where they are named."""
    spills: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Head dim to the architectures on which some registers may spill to local memory; anywhere else a spill fails the
    build."""
    tensor_maps: bool = False
    """Whether the kernel takes tensor maps (kernels/common/hopper.cuh) beside its parameters."""
    dead_end: bool = False
    """Whether it is off the ladder: tried, and kept for what it shows."""
    retired: bool = False
    """Whether a dead end once stood on the ladder. Runs that measured it then tell of the ladder as it was."""
    by_name_only: str = ""
    """Why `flashlab.attention` runs it only where it is named; empty where it may be chosen."""
    kernel: str | None = None
    """The stage whose file it runs with other tunables; None: its own."""
    runner: str | None = None
    """The module that launches it, or that runs it on a CPU, where the core cannot; imported at the launch. What it
    offers is in `attention._runner`."""
    precision: Precision = "input"
    """What its numbers are rounded to; it is judged against the same computation at that precision."""
    defect: str = ""
    """Why its output is wrong, where it is kept for being wrong; empty where it is right."""
    variants: tuple[Mapping[str, int], ...] = ()
    """Values of tunables that are measured beside the defaults, because they show why it is a dead end."""

    @property
    def source(self) -> Path:
        """Its CUDA C++ or Python file."""
        folder = KERNELS / "dead_ends" if self.dead_end else KERNELS
        return folder / f"{self.kernel or self.id}.{'cu' if self.language == 'cuda' else 'py'}"

    @property
    def entry(self) -> str:
        """The kernel's name in the machine code."""
        return f"attention_{self.kernel or self.id}"

    @property
    def variant_names(self) -> tuple[str, ...]:
        """`variants` as they are named while they are measured."""
        return tuple(variant_name(self.id, variant) for variant in self.variants)

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures it compiles for."""
        last = ARCHS[-1] if self.max_arch is None else self.max_arch
        return ARCHS[ARCHS.index(self.min_arch) : ARCHS.index(last) + 1]

    @property
    def needs(self) -> str:
        """Its architectures for people: `sm_80 or newer`, `sm_90a`."""
        if self.max_arch is None:
            return f"{self.min_arch} or newer"
        return self.min_arch if self.max_arch == self.min_arch else f"{self.min_arch} to {self.max_arch}"

    def may_spill(self, head_dim: int, arch: str) -> bool:
        """Whether registers may spill to local memory there. What Triton does with them is its own affair."""
        return self.language == "triton" or arch in self.spills.get(head_dim, ())

    def parameters(self, head_dim: int, overrides: Mapping[str, int] | None = None) -> dict[str, int]:
        """Every tunable's value: the default for `head_dim`, replaced by `overrides`; and of `ablations` those named.

        Raises:
            ParameterError: an override that is no tunable of this stage, or no integer.
        """
        values = {name: param.default_for(head_dim) for name, param in self.params.items()}
        for name, value in (overrides or {}).items():
            if name not in values and name not in self.ablations:
                raise ParameterError(f"Stage {self.id} has no parameter {name!r}; it has {', '.join(values) or 'none'}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ParameterError(f"Stage {self.id}, {name}: wanted a non-negative integer, got {value!r}")
            values[name] = value
        return {name: values[name] for name in (*self.params, *self.ablations) if name in values}

    def why_not(self, problem: Problem, arch: str | None = None) -> str | None:
        """Why this stage cannot run `problem` (on `arch`, where given); None when it can."""
        if problem.dtype not in self.dtypes:
            works = _runnable(dtype=problem.dtype)
            return f"Stage {self.id} takes {' or '.join(self.dtypes)}, got {problem.dtype}. {works}"
        if problem.head_dim not in self.head_dims:
            return f"Stage {self.id} takes head dim {' or '.join(map(str, self.head_dims))}, got {problem.head_dim}."
        if arch is not None and arch not in self.archs:
            return f"Stage {self.id} needs {self.needs}, got {arch}. {_runnable(arch=arch)}"
        return None

    def require(self, problem: Problem, arch: str | None = None) -> None:
        """Raises `UnsupportedError` with the reason where this stage cannot run `problem` on `arch`."""
        reason = self.why_not(problem, arch)
        if reason:
            raise UnsupportedError(reason)


def _runnable(*, dtype: DType | None = None, arch: str | None = None) -> str:
    ids = [
        stage.id
        for stage in STAGES.values()
        if (dtype is None or dtype in stage.dtypes) and (arch is None or arch in stage.archs)
    ]
    there = f" on {arch}" if arch else ""
    return f"Runnable{there}: {', '.join(ids)}." if ids else f"No stage is runnable{there}."


def get(stage_id: str) -> Stage:
    """The stage of that id, on the ladder or off it.

    Raises:
        UnknownStageError: there is none.
    """
    found = STAGES.get(stage_id) or DEAD_ENDS.get(stage_id)
    if found is None:
        raise UnknownStageError(
            f"stage: wanted one of {', '.join(STAGES)}, got {stage_id!r}. Off the ladder: {', '.join(DEAD_ENDS)}"
        )
    return found


def variant_name(stage_id: str, variant: Mapping[str, int]) -> str:
    """How a stage with those tunables is named while it is measured: `09_wgmma[STAGES=3]`."""
    return f"{stage_id}[{','.join(f'{name}={value}' for name, value in sorted(variant.items()))}]"


_VARIANT = re.compile(r"\[(?P<values>[^\[\]]*)\]$")


def variant_in(name: str) -> dict[str, int]:
    """The tunables in a name that `variant_name` wrote; empty where it has none.

    Raises:
        ParameterError: something else stands in the brackets.
    """
    match = _VARIANT.search(name)
    found: dict[str, int] = {}
    for part in match["values"].split(",") if match else ():
        tunable, _, value = part.partition("=")
        if not value.isdecimal():
            raise ParameterError(f"stage: wanted ID or ID[NAME=VALUE,…] with whole numbers, got {name!r}")
        found[tunable.strip()] = int(value)
    return found


def parse(name: str) -> tuple[Stage, dict[str, int]]:
    """The stage and the tunables in a name that `variant_name` wrote, or in an id alone.

    Raises:
        UnknownStageError, ParameterError: no such stage, or no such tunable of it.
    """
    variant = variant_in(name)
    stage = get(_VARIANT.sub("", name))
    stage.parameters(stage.head_dims[0], variant)
    return stage, variant


def best(problem: Problem, arch: str | None) -> Stage:
    """The last rung of the ladder that runs `problem` on `arch`; None is a CPU, which runs every stage.

    Stages in another language than C++ stand beside the ladder, and run where they are named.

    Raises:
        UnsupportedError: none does; the message has each stage's reason.
    """
    ladder = [stage for stage in STAGES.values() if stage.language == "cuda"]
    for stage in reversed(ladder):
        if stage.why_not(problem, arch) is None:
            return stage
    reasons = " ".join(stage.why_not(problem, arch) or "" for stage in ladder)
    raise UnsupportedError(f"no stage runs {problem.label} on {arch or 'a CPU'}. {reasons}")


_THREADS = Param(default=128, choices=(64, 128, 256), meaning="threads a block; each owns one query row")
_TILE_KV = Param(default=64, choices=(32, 64, 128), meaning="keys a shared-memory tile")
_TILE_KV_WMMA = Param(default=64, choices=(32, 64, 128), by_head_dim={128: 32}, meaning="keys a shared-memory tile")
_KEYS = Param(
    default=8, choices=(4, 8, 16), by_head_dim={128: 4}, meaning="keys between two rescales, scored in registers"
)


def _in_flight(default: int) -> Param:
    return Param(
        default=default, choices=(1, 2, 4), meaning="16-byte loads a thread has under way while a tile is filled"
    )


_WARPS = Param(default=4, choices=(2, 4, 8), meaning="warps a block")
_LEAVE_OUT = Param(
    default=0,
    choices=(0, 1, 2, 3, 4),
    meaning=(
        "part of the work that is not done, and makes the output wrong; 1: Q·K, 2: the softmax, 3: P·V, 4: tiles of K "
        "and V after the first"
    ),
)
_DESCENDING = Param(default=0, choices=(0, 1), meaning="1: tiles of K and V are walked from the last to the first")
_PADDING = Param(
    default=8, choices=(0, 8, 16), meaning="elements added to each shared-memory row, against bank conflicts"
)
_NUM_CONSUMERS = Param(
    default=3,
    choices=(1, 2, 3),
    by_head_dim={128: 2},
    meaning="warpgroups a block that multiply, of 64 query rows each",
)
_TILE_KV_HOPPER = Param(default=128, choices=(64, 96, 112, 128, 176), meaning="keys a tile")
_STAGES_HOPPER = Param(
    default=3, choices=(2, 3, 4), by_head_dim={128: 2}, meaning="buffers in the ring of K and of V tiles"
)
_Q_IN_REGISTERS = Param(
    default=0, choices=(0, 1), meaning="1: Q waits in registers for its products, 0: in shared memory"
)
_PINGPONG = Param(default=1, choices=(0, 1), meaning="1: consumers issue their products in turns")
_OVERLAP = Param(default=1, choices=(0, 1), meaning="1: P·V is under way during the next tile's softmax")
_LATE_FETCH = {
    "NUM_CONSUMERS": replace(_NUM_CONSUMERS, by_head_dim={}),
    "TILE_KV": Param(default=128, choices=(64, 96, 128), by_head_dim={128: 64}, meaning="keys a tile"),
    "PIPELINE_STAGES": Param(
        default=3, choices=(2, 3, 4), by_head_dim={128: 2}, meaning="buffers in the ring of K and V tiles"
    ),
    "PINGPONG": replace(_PINGPONG, by_head_dim={128: 0}),
    "L2_SHARE_MB": Param(
        default=16,
        choices=(4, 8, 16, 32),
        by_head_dim={128: 8},
        meaning="L2 cache that heads worked on at the same time may fill",
    ),
    "Q_IN_REGISTERS": Param(default=0, choices=(0, 1), meaning="1: Q is A of the QK GEMM from registers"),
}
STAGES: Mapping[str, Stage] = {
    stage.id: stage
    for stage in (
        Stage(
            id="00_naive",
            title="A thread per query row",
            parent=None,
            question="What does the textbook loop reach: one thread per query row, scalar FP32, online softmax?",
            change="The starting point.",
            prediction=(
                "Every multiply-add needs its own broadcast load and conversion, so the load unit, one warp load a "
                "clock and SM, bounds it at 64 FLOP a clock and SM: under 17 TFLOP/s on an H200, and a few in "
                "practice."
            ),
            params={"THREADS": _THREADS},
            ablations={
                "MAX_REGISTERS": Param(
                    default=0,
                    choices=(0, 32, 48, 64, 96, 128),
                    meaning="registers a thread may have, 0: as many as the compiler wants",
                )
            },
            spills={128: ARCHS},
        ),
        Stage(
            id="01_coalesced",
            title="Shared-memory tiles, 128-bit loads",
            parent="00_naive",
            question="Is it the loads? Let the block fetch each key and value once, coalesced and 16 bytes a thread.",
            change=(
                "Keys and values are staged in shared memory by whole-block 128-bit loads and read back 8 elements "
                "at a time."
            ),
            prediction=(
                "One 128-bit shared load now feeds eight multiply-adds instead of one, so the load unit stops being "
                "the bound and FP32 arithmetic with its conversions takes over: 2 to 4 times the parent."
            ),
            params={"THREADS": _THREADS, "TILE_KV": _TILE_KV, "KEYS": _KEYS, "LOADS_IN_FLIGHT": _in_flight(4)},
            spills={128: ARCHS},
        ),
        Stage(
            id="02_half2",
            title="Packed fp16 arithmetic",
            parent="01_coalesced",
            question="Is it the arithmetic? Multiply two fp16 pairs per instruction and drop the conversions.",
            change="Both products use half2 multiply-adds, flushed to FP32 every few terms to keep the error bounded.",
            prediction=(
                "HFMA2 does twice the multiply-adds of FFMA and needs no conversion of its operands: 1.5 to 2.5 "
                "times the parent, less what the flushes to FP32 cost."
            ),
            params={"THREADS": _THREADS, "TILE_KV": _TILE_KV, "KEYS": _KEYS, "LOADS_IN_FLIGHT": _in_flight(1)},
        ),
        Stage(
            id="03_warp_rows",
            title="A warp shares its rows",
            parent="02_half2",
            question="Is it one thread's long row of registers, and the few threads that makes?",
            change=(
                "A warp owns its rows together: lanes split the keys, then the output columns; maxima travel by "
                "shuffle."
            ),
            prediction=(
                "Little at the sources' shape, which has threads enough: per multiply-add the shared-memory traffic "
                "and the arithmetic stay about balanced. Two to three times the parent where one thread a row "
                "leaves most of the GPU idle, a single sequence of 512 for example, and a gain at D=128, whose rows "
                "no longer fill a thread's registers."
            ),
            params={
                "WARPS": _WARPS,
                "ROWS_PER_WARP": Param(
                    default=16, choices=(8, 16), by_head_dim={128: 8}, meaning="query rows that a warp owns together"
                ),
                "TILE_KV": _TILE_KV,
                "PADDING": _PADDING,
                "LOADS_IN_FLIGHT": _in_flight(2),
            },
        ),
        Stage(
            id="04_wmma_qk",
            title="Tensor cores for Q·K",
            parent="03_warp_rows",
            question="What do tensor cores buy when they get half of the arithmetic?",
            change="Q·K by WMMA, its scores handed to the softmax through shared memory.",
            prediction=(
                "Half of the multiply-adds become nearly free, the other half and the softmax stay: at most twice "
                "the parent (Amdahl), less a round trip of the scores through shared memory: 1.3 to 1.8 times."
            ),
            params={
                "WARPS": _WARPS,
                "TILE_KV": _TILE_KV_WMMA,
                "PADDING": _PADDING,
                "LOADS_IN_FLIGHT": _in_flight(2),
            },
            ablations={"LEAVE_OUT": _LEAVE_OUT},
        ),
        Stage(
            id="05_wmma",
            title="Tensor cores for both products",
            parent="04_wmma_qk",
            question="And when they get all of it?",
            change="P·V by WMMA too; the output stays in accumulator fragments and is rescaled there.",
            prediction=(
                "No scalar multiply-adds are left, only the softmax and shared-memory traffic: about twice the "
                "parent. Then shared memory, through which scores, probabilities and every fragment pass, is what "
                "is left to bound it."
            ),
            params={
                "WARPS": _WARPS,
                "TILE_KV": _TILE_KV_WMMA,
                "PADDING": _PADDING,
                "LOADS_IN_FLIGHT": _in_flight(4),
            },
        ),
        Stage(
            id="06_cp_async",
            title="Tiles arrive behind the arithmetic",
            parent="05_wmma",
            question="How much of the time was waiting for memory?",
            change=(
                "K and V pass through a ring of buffers filled by cp.async, the next tile arriving while this one "
                "is used; several warps may share 16 rows."
            ),
            prediction=(
                "Shared-memory wavefronts, counted, allow about 1,100 FLOP a clock and SM at D=64: under 300 "
                "TFLOP/s on an H200, and, with barriers and the softmax between the products, 120 to 150. A second "
                "buffer costs shared memory: it pays only while as many blocks stay resident."
            ),
            min_arch="sm_80",
            dtypes=("float16", "bfloat16"),
            params={
                "TILE_Q": Param(default=64, choices=(32, 64, 128), meaning="query rows a block"),
                "TILE_KV": _TILE_KV_WMMA,
                "WARPS": Param(default=8, choices=(4, 8), meaning="warps a block"),
                "PADDING": _PADDING,
                "PIPELINE_STAGES": Param(
                    default=2, choices=(1, 2, 3, 4), meaning="buffers in the ring of K and V tiles"
                ),
            },
            ablations={
                "REDUCTION": Param(
                    default=0,
                    choices=(0, 1, 2),
                    meaning=(
                        "how a row's maximum is found; 0: by shuffles, 1: through shared memory with barriers of the "
                        "warp, 2: with barriers of the block"
                    ),
                ),
                "DESCENDING": _DESCENDING,
                "LEAVE_OUT": _LEAVE_OUT,
            },
            spills={64: ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"), 128: ("sm_100a",)},
        ),
        Stage(
            id="07_mma_registers",
            title="Scores stay in registers",
            parent="06_cp_async",
            question="What did the scores' way through shared memory cost?",
            change=(
                "mma.sync, whose layout is documented, in place of WMMA: a warp owns whole rows, and scores, "
                "probabilities and output never leave its registers."
            ),
            prediction=(
                "Per score, the parent writes and reads 4 bytes of score and 2 of probability in shared memory and "
                "loads every fragment for 16 rows alone. What is left are fragments of K and V, which 32 rows share, "
                "about seven instructions a score for each lane, and the exponential unit's sixteenth of a clock. "
                "Tensor cores, exponentials and loads now each allow over 500 TFLOP/s at D=64 on an H200, but a warp "
                "still does one after the other, and two or three warps on a scheduler cover for it in part: 280 to "
                "350, about torch's FlashAttention-2, which is built alike."
            ),
            min_arch="sm_80",
            dtypes=("float16", "bfloat16"),
            params={
                "TILE_Q": Param(default=128, choices=(64, 128, 256), meaning="query rows a block"),
                "TILE_KV": _TILE_KV_WMMA,
                "WARPS": Param(default=4, choices=(4, 8), meaning="warps a block"),
                "PADDING": _PADDING,
                "Q_IN_REGISTERS": Param(
                    default=1,
                    choices=(0, 1),
                    by_head_dim={128: 0},
                    meaning="1: a warp's rows of Q stay in registers; 0: they are read again for every tile",
                ),
                "PIPELINE_STAGES": Param(
                    default=2, choices=(1, 2, 3, 4), meaning="buffers in the ring of K and V tiles"
                ),
                "MIN_BLOCKS": Param(
                    default=2,
                    choices=(1, 2, 3, 4, 5),
                    meaning="blocks that must fit on an SM at once, which bounds the registers",
                ),
            },
            ablations={
                "EXPONENTIAL": Param(
                    default=0, choices=(0, 1, 2), meaning="0: 2^x by the chip's instruction, 1: __expf, 2: expf"
                )
            },
        ),
        Stage(
            id="08_swizzle",
            title="Swizzled tiles, scores a tile ahead",
            parent="07_mma_registers",
            question=("How far does mma.sync go when a warp's tensor cores and exponentials work at the same time?"),
            change=(
                "XOR-swizzled shared memory in place of padding, a deeper ring, and the next tile's scores computed "
                "into the registers that exponentials have just left; two options save instructions beside the "
                "products."
            ),
            prediction=(
                "The swizzle itself gains next to nothing: padded rows had no conflicts either, and it only frees an "
                "eighth of the shared memory. What gains is the order. In the parent, Q·K runs alone and half of the "
                "products beside no exponential; here all of a tile's products stand beside all of its exponentials, "
                "and only the maxima and their shuffles run alone: 1.15 to 1.3 times the parent at D=64, less at "
                "D=128, where a score has twice the products and the exponentials mattered half as much."
            ),
            min_arch="sm_80",
            dtypes=("float16", "bfloat16"),
            params={
                "TILE_Q": Param(default=128, choices=(64, 128, 256), meaning="query rows a block"),
                "TILE_KV": Param(default=64, choices=(32, 64, 128), meaning="keys a shared-memory tile"),
                "STEP_KEYS": Param(
                    default=16, choices=(16, 32, 64), meaning="keys between two exchanges of exponentials and products"
                ),
                "WARPS": Param(default=4, choices=(4, 8), by_head_dim={128: 8}, meaning="warps a block"),
                "Q_IN_REGISTERS": Param(
                    default=1,
                    choices=(0, 1),
                    meaning="1: a warp's rows of Q stay in registers; 0: they are read again for every tile",
                ),
                "PIPELINE_STAGES": Param(
                    default=3, choices=(2, 3, 4), by_head_dim={128: 2}, meaning="buffers in the rings of K and V tiles"
                ),
                "MIN_BLOCKS": Param(
                    default=2,
                    choices=(1, 2, 3, 4),
                    by_head_dim={128: 1},
                    meaning="blocks that must fit on an SM at once, which bounds the registers",
                ),
                "LAZY_RESCALE": Param(
                    default=8,
                    choices=(0, 1, 4, 8),
                    meaning=(
                        "powers of two by which a maximum must grow before the output is rescaled; 0: rescale at "
                        "every tile, without asking"
                    ),
                ),
                "SUM_BY_MMA": Param(
                    default=1,
                    choices=(0, 1),
                    meaning="1: the tensor cores sum the probabilities, by a column of ones beside V",
                ),
            },
            ablations={
                "SWIZZLE": Param(default=1, choices=(0, 1), meaning="0: chunks of shared memory lie unswapped"),
                "PADDING": Param(
                    default=0, choices=(0, 8, 16), meaning="elements added to each unswizzled shared-memory row"
                ),
                "LEAVE_OUT": _LEAVE_OUT,
            },
        ),
        Stage(
            id="t0_triton",
            title="The same algorithm, in Triton",
            parent="07_mma_registers",
            question="How far does a compiler for tiles get on its own?",
            change=(
                "A tile is a value and a loop runs over tiles: layouts, copies, swizzles and barriers are Triton's to "
                "choose, and so are the instructions. Block sizes, warps and pipeline depth are all that is left here."
            ),
            prediction=(
                "On Hopper it takes wgmma and cp.async by itself, which none of the rungs up to 08 have, so it passes "
                "all of them without a line about the machine: about 400 TFLOP/s at D=64 on an H200. It does not let "
                "warps take different parts, so the softmax and the tensor cores take turns, and it stays behind the "
                "libraries that overlap the two."
            ),
            language="triton",
            runner="flashlab.experiments.triton_interpreter",
            min_arch="sm_80",
            dtypes=("float16", "bfloat16"),
            params={
                "TILE_Q": Param(default=64, choices=(64, 128), meaning="query rows a program"),
                "TILE_KV": Param(default=128, choices=(32, 64, 128), by_head_dim={128: 64}, meaning="keys a tile"),
                "WARPS": Param(default=4, choices=(4, 8), meaning="warps a program (num_warps)"),
                "PIPELINE_STAGES": Param(
                    default=3, choices=(1, 2, 3, 4), meaning="buffers in the ring of K and V tiles (num_stages)"
                ),
                "MAX_REGISTERS": Param(
                    default=0,
                    choices=(0, 96, 128, 168),
                    meaning="registers a thread may have (maxnreg), so that more programs fit on an SM; 0: any number",
                ),
            },
        ),
        Stage(
            id="09_wgmma",
            title="A warpgroup multiplies, a copy engine fetches",
            parent="08_swizzle",
            question="What do Hopper's own matrix instruction and tensor copies bring, in a loop otherwise the same?",
            change=(
                "wgmma multiplies 64 rows at once, its operands in shared memory but for the probabilities; one thread "
                "starts a tensor copy per tile, and an mbarrier announces it."
            ),
            prediction=(
                "The tensor cores now work at their full rate, twice that of mma.sync, and nothing is left of "
                "fragments, addresses and copies but one instruction each: of about seven instructions a score five "
                "stay. Inside a warpgroup the two products and the softmax still take turns: 64 × 128 scores need 512 "
                "clocks of the tensor cores, as many of the exponential unit, and a few hundred of waiting. Three "
                "blocks on an SM fill one another's gaps by chance: 350 to 400 TFLOP/s at D=64 on an H200."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params={
                "NUM_WARPGROUPS": Param(
                    default=1,
                    choices=(1, 2),
                    by_head_dim={128: 2},
                    meaning="warpgroups a block, of 64 query rows each",
                ),
                "TILE_KV": Param(default=128, choices=(64, 96, 128), by_head_dim={128: 64}, meaning="keys a tile"),
                "PIPELINE_STAGES": Param(default=2, choices=(2, 3, 4), meaning="buffers in the ring of K and V tiles"),
                "MIN_BLOCKS": Param(
                    default=3,
                    choices=(1, 2, 3),
                    by_head_dim={128: 2},
                    meaning="blocks that must fit on an SM at once, which bounds the registers",
                ),
            },
            ablations={
                "FEED": Param(default=0, choices=(0, 1), meaning="tiles come by 0: tensor copies, 1: cp.async"),
                "DESCENDING": _DESCENDING,
            },
        ),
        Stage(
            id="10_warp_specialized",
            title="A warpgroup fetches, the others multiply",
            parent="09_wgmma",
            question="What did it cost that a block's warps met at every tile, and that those who multiply fetch too?",
            change=(
                "A producer warpgroup keeps the ring of tiles full and hands its registers to the consumers; mbarriers "
                "in both directions replace the block's barrier."
            ),
            prediction=(
                "Fetching was one thread's work already, so what goes is the meeting at every tile: consumers of a "
                "block drift apart, as the parent's small blocks could, but they share each tile of K and V, a third "
                "of the traffic, and have 160 or 240 registers each. A product and a softmax of the same rows still "
                "never overlap: 400 to 450 TFLOP/s at D=64 on an H200, and the larger gain at D=128, where fewer "
                "blocks of the parent fit."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params={
                "NUM_CONSUMERS": Param(
                    default=2, choices=(1, 2), meaning="warpgroups a block that multiply, of 64 query rows each"
                ),
                "TILE_KV": Param(default=64, choices=(64, 96, 128, 176), by_head_dim={128: 128}, meaning="keys a tile"),
                "PIPELINE_STAGES": _STAGES_HOPPER,
                "MIN_BLOCKS": Param(
                    default=2,
                    choices=(1, 2),
                    by_head_dim={128: 1},
                    meaning="blocks that must fit on an SM at once, which bounds the registers",
                ),
            },
        ),
        Stage(
            id="11_pingpong",
            title="Products while others exponentiate",
            parent="10_warp_specialized",
            question=(
                "How much of the tensor cores' time went by while warpgroups were in their softmax, and the other way "
                "round?"
            ),
            change=(
                "FlashAttention-3's two orders: consumers issue their products in turns, and P·V of a tile is issued "
                "behind Q·K of the next one, to be under way during its softmax."
            ),
            prediction=(
                "At D=64 a tile needs the tensor cores and the exponential unit for equally long, so two or three "
                "consumers in step could keep both busy; they meet at the turn's barrier and at the end of each "
                "product, and the rest of the softmax is a third as long again: 480 to 520 TFLOP/s on an H200, "
                "FlashAttention-3's level, which is built so. The turns bring most of it at D=64, P·V under the "
                "softmax at D=128."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params={
                "NUM_CONSUMERS": _NUM_CONSUMERS,
                "TILE_KV": _TILE_KV_HOPPER,
                "PIPELINE_STAGES": _STAGES_HOPPER,
                "PINGPONG": _PINGPONG,
                "OVERLAP": _OVERLAP,
                "Q_IN_REGISTERS": _Q_IN_REGISTERS,
                "MIN_BLOCKS": Param(
                    default=1,
                    choices=(1,),
                    meaning="blocks that must fit on an SM at once: one ends while another works, with fewer registers",
                ),
                "EARLY_TURN": Param(
                    default=0, choices=(0, 1), meaning="1: a turn ends when Q·K is issued, 0: when P·V is issued too"
                ),
                "PREFETCH_MAPS": Param(
                    default=0, choices=(0, 1), meaning="1: a block fetches its tensor maps before all else"
                ),
            },
        ),
        Stage(
            id="12_persistent",
            title="Blocks that stay",
            parent="11_pingpong",
            question=(
                "What do a block's start and end cost, the last wave of blocks, and scores that the mask throws away?"
            ),
            change=(
                "As many blocks as fit take tiles of Q from a counter, the longest first, and fetch the next one's "
                "while this one ends; each consumer stops at its own diagonal."
            ),
            prediction=(
                "At S=2048 a block has 16 tiles of K, and starts with an empty ring and ends with a lonely product: "
                "about an eighth of its time, of which half can be covered. Causal gains more: a tile of 192 rows "
                "computes a sixth more scores than the mask keeps, one of 64 rows a twentieth, and the longest first "
                "leave no long last wave. 500 to 530 TFLOP/s full and 430 to 460 causal at D=64 on an H200."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params={
                "NUM_CONSUMERS": _NUM_CONSUMERS,
                "TILE_KV": Param(default=128, choices=(64, 96, 112, 128), meaning="keys a tile"),
                "PIPELINE_STAGES": _STAGES_HOPPER,
                "PINGPONG": _PINGPONG,
                "OVERLAP": _OVERLAP,
                "Q_IN_REGISTERS": _Q_IN_REGISTERS,
                "Q_STAGES": Param(default=2, choices=(1, 2), meaning="buffers for tiles of Q"),
            },
            ablations={"LEAVE_OUT": _LEAVE_OUT},
        ),
        Stage(
            id="13_tma_store",
            title="Work tiles fetched late, output by TMA store",
            parent="12_persistent",
            question="What do the end of one work tile and the beginning of the next cost, and how much can be hidden?",
            change=(
                "The producer is split: one warp fetches work tiles and their Q, as late as Q can still arrive in "
                "time, the others fetch K and V. The next work tile is waited for under the last PV GEMM, output "
                "leaves by a TMA store, Q has two pipeline stages, K/V tiles come last to first, and the tile "
                "scheduler works on groups of heads whose K and V fit a share of the L2 cache, causal or not."
            ),
            prediction=(
                "The ends and beginnings of work tiles are 5 % of a causal call's time at S=2048 and 2 to 4 % of a "
                "non-causal one's. 0 to 5 % faster than 12_persistent, on inputs of any kind: the softmax is the "
                "same."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params=_LATE_FETCH,
        ),
        Stage(
            id="14_stale_max",
            title="Exponentials against an old maximum",
            parent="13_tma_store",
            question="Does a softmax need its tile's maximum before the first exponential?",
            change=(
                "Exponentials start at once, against the maximum of the tiles before. If a sum leaves the range of 16 "
                "bits, the tile's scores are computed again by mma.sync from global memory, with their maximum. Only "
                "the first tile of a work tile is exact."
            ),
            prediction=(
                "The maximum and its shuffles leave the critical path: 6 to 10 % faster than 13_tma_store on normal "
                "inputs at D=64, 5 to 10 % at D=128. On trained activations slower than its parent, by up to two "
                "times, because computing a tile again costs as much as several tiles."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            by_name_only="its time depends on the data: scores that grow have tiles computed again",
            params=_LATE_FETCH,
        ),
        Stage(
            id="15_renormalize",
            title="Move the reference, do not recompute",
            parent="14_stale_max",
            question="When scores outgrow the reference, must anything be computed again?",
            change=(
                "The reference is the row's first few scores plus a headroom, in powers of two. When a sum leaves its "
                "range, probabilities, sums and O are multiplied by a power of two in place, which is exact. "
                "Recomputation is left for FP32 overflow, jumps of more than about 90 to 120 nats. One softmax body "
                "serves every tile, and a row's bits depend on its own data only."
            ),
            prediction=(
                "On normal inputs within 2 % of 14_stale_max. On trained activations, attention sinks and scaled "
                "scores within 5 % of its own rate on normal inputs."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            by_name_only="a row with one dominating weight has up to twice FlashAttention's error",
            params=_LATE_FETCH,
        ),
        Stage(
            id="16_ones_column",
            title="Row sums of the rounded probabilities",
            parent="15_renormalize",
            question="Can a row be divided by the sum of the very probabilities that the tensor cores multiply?",
            change=(
                "V gets a panel of ones, so that the PV GEMM sums the probabilities as it multiplies them, rounded to "
                "16 bits: a row with one dominating weight gives exactly its V. The position of the wgmma wait among "
                "the exponentials is pinned by a data dependence on the address of an mbarrier test."
            ),
            prediction=(
                "The PV GEMM becomes an eighth longer at D=64 and a sixteenth at D=128: 1 to 3 % slower than "
                "15_renormalize. Errors as FlashAttention-3's, where its parent's are up to twice those."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params=_LATE_FETCH,
        ),
    )
}
CUDA_STAGES: Mapping[str, Stage] = {name: stage for name, stage in STAGES.items() if stage.language == "cuda"}
"""The ladder itself: what NVRTC and the CPU emulation compile."""

_HEADS_A_CALL = "heads whose scores are in memory at once, multiplied by one call a product; 0: all"
_SETUP_EACH_CALL = "1: every product makes its own handle, descriptions, workspace and choice of algorithm; 0: once"
_SCORES_FP32 = "1: scores are stored in FP32; 0: in the inputs' type, and the probabilities take their place"
_ROW_LANES = "threads that share a row of the softmax: 1, or a warp"
_SPLIT_K = "parts that the sum over keys of P·V is split into; 1: not split"
_ROW_LANES_CHOICES = (1, 32)
_SPLITS = (1, 2, 4, 8, 16)


def _unfused_params(*, heads: int, setup: int, fp32: int, lanes: int, split: int) -> dict[str, Param]:
    return {
        "HEADS_A_CALL": Param(default=heads, choices=(0, 1, 4, 16), meaning=_HEADS_A_CALL),
        "SETUP_EACH_CALL": Param(default=setup, choices=(0, 1), meaning=_SETUP_EACH_CALL),
        "SCORES_FP32": Param(default=fp32, choices=(0, 1), meaning=_SCORES_FP32),
        "ROW_LANES": Param(default=lanes, choices=_ROW_LANES_CHOICES, meaning=_ROW_LANES),
        "SPLIT_K": Param(default=split, choices=_SPLITS, meaning=_SPLIT_K),
    }


DEAD_ENDS: Mapping[str, Stage] = {
    stage.id: stage
    for stage in (
        Stage(
            id="branch_free",
            title="Branches written as predicates",
            parent="00_naive",
            question="Do the textbook loop's few branches cost it anything, and does inline PTX remove them?",
            change=(
                "What depends on the row becomes a predicate: selects in PTX mask the scores, predicated stores "
                "replace the early return, and the loop runs to the block's last visible key for every thread."
            ),
            prediction=(
                "The parent branches once a key, around hundreds of instructions, and its warps hardly ever disagree. "
                "So taking branches away gains nothing: between 0.95 and 1.05 times the parent under a full mask, and "
                "less than the parent under a causal one, where rows that are done keep working. The loop's own branch "
                "stays: no predicate removes a loop."
            ),
            params={"THREADS": _THREADS},
            spills={128: ARCHS},
            dead_end=True,
        ),
        Stage(
            id="wmma_no_smem",
            title="WMMA without shared memory",
            parent="04_wmma_qk",
            question="What makes an attention kernel on tensor cores take tens of milliseconds at one sequence of 512?",
            change=(
                "Fragments are read from global memory, and nothing is shared between threads: so each thread needs "
                "all of its warp's scores, which arrive by shuffle in an array of its own, and each thread then does "
                "the whole softmax and all of P·V. An output of 16 rows does not fit in one thread's registers, so it "
                "lives in local memory, which is DRAM behind caches."
            ),
            prediction=(
                "P·V of a 16 × 16 tile is 16,384 multiply-adds, and here each of 32 threads does all of them, each "
                "with a load and a store of local memory: 524,288 steps a warp at S=512, at 60 to 200 clocks each. "
                "That is 15 to 55 ms on an H200, where the sources report 40.5. With the columns split over the lanes "
                "and the output in registers (COLUMN_LANES 32) it takes 0.5 to 1.5 ms; when besides one warp does a "
                "whole head (WARP_A_HEAD 1), 15 to 40 ms again, which is the other way to get there."
            ),
            head_dims=(64,),
            params={
                "COLUMN_LANES": Param(
                    default=1,
                    choices=(1, 32),
                    meaning="lanes that share the work after Q·K; 1: every lane does all of it",
                ),
                "WARP_A_HEAD": Param(
                    default=0, choices=(0, 1), meaning="1: one warp does all rows of a head; 0: a warp does 16 rows"
                ),
            },
            spills={64: ARCHS},
            dead_end=True,
            variants=({"COLUMN_LANES": 32}, {"COLUMN_LANES": 32, "WARP_A_HEAD": 1}),
        ),
        Stage(
            id="cublaslt_unfused",
            title="cuBLASLt, a head at a time",
            parent="00_naive",
            question="What do three passes through the best matrix library give, put together without much thought?",
            change=(
                "Q·K by cuBLASLt into FP32 scores in global memory, a softmax kernel with a thread a row, P·V by "
                "cuBLASLt: one head after the other, and every product makes its handle, workspace and choice of "
                "algorithm anew."
            ),
            prediction=(
                "At the first shape 512 products cost the host 0.2 to 0.8 ms each before a tensor core moves, and a "
                "thread that walks a row of 2048 scores reads 32 bytes for each 4 it uses: 150 to 450 ms, 0.3 to 0.9 "
                "TFLOP/s on an H200, the sources' 0.45 inside. Making things once gains about 2 times (SETUP_EACH_CALL "
                "0), a warp a row after that about 10 times (ROW_LANES 32): none of it is the library's doing."
            ),
            params=_unfused_params(heads=1, setup=1, fp32=1, lanes=1, split=1),
            dtypes=("float16", "bfloat16"),
            dead_end=True,
            runner="flashlab.experiments.cublaslt",
            variants=({"SETUP_EACH_CALL": 0}, {"ROW_LANES": 32, "SETUP_EACH_CALL": 0}),
        ),
        Stage(
            id="cublaslt_batched",
            title="cuBLASLt, done well",
            parent="cublaslt_unfused",
            question="And how far does the unfused way go when it is done well?",
            change=(
                "One strided-batched product for all heads, handle and algorithm made once, scores in the inputs' "
                "type, and a softmax with a warp a row and 16 bytes an access, in place."
            ),
            prediction=(
                "At the first shape the scores, 2.1 GB, cross device memory four times: about 2 ms, in which the "
                "products themselves hide. 50 to 75 TFLOP/s on an H200, a hundred times the sources' number, level "
                "with torch's own unfused path, and still a sixth of what the fused libraries do: a dead end for "
                "memory's sake, not for the library's. With 4 heads at a time the scores stay in L2, for 1.2 to 2 "
                "times that."
            ),
            params=_unfused_params(heads=0, setup=0, fp32=0, lanes=32, split=1),
            dtypes=("float16", "bfloat16"),
            dead_end=True,
            kernel="cublaslt_unfused",
            runner="flashlab.experiments.cublaslt",
            variants=({"HEADS_A_CALL": 4}, {"SCORES_FP32": 1}),
        ),
        Stage(
            id="split_k",
            title="cuBLASLt with split-K",
            parent="cublaslt_unfused",
            question="Does splitting the sum over keys between blocks help a product whose output is small?",
            change="P·V is told to split its sum over keys in 8 parts, which a second step adds up.",
            prediction=(
                "One head's P·V has 16 to 32 tiles of output for 132 SMs, so splitting it makes that product up to 3 "
                "times faster; it is a tenth of the time or less, so the whole gains 0 to 10 %. The sources' 1.8 times "
                "must have come from something else that changed. Where all heads go in one call there are tiles "
                "enough, and splitting only adds traffic."
            ),
            params=_unfused_params(heads=1, setup=1, fp32=1, lanes=1, split=8),
            dtypes=("float16", "bfloat16"),
            dead_end=True,
            kernel="cublaslt_unfused",
            runner="flashlab.experiments.cublaslt",
            variants=({"ROW_LANES": 32, "SETUP_EACH_CALL": 0},),
        ),
        Stage(
            id="tile48",
            title="48 rows on six warps",
            parent="05_wmma",
            question="Why did a tile of 48 rows give wrong answers, where 32 rows gave right ones?",
            change=(
                "The sources' V2: 32 keys a tile, both products by WMMA, scores and output in shared memory; each warp "
                "takes a 16 × 16 block of scores. Which block was worked out for four warps and 2 × 2 blocks (warp % "
                "2, warp / 2), and stayed so for six warps and 3 × 2."
            ),
            prediction=(
                "Warps 4 and 5 work on a third block of keys that does not exist, and nobody on the third block of "
                "rows: rows 32 to 47 of every tile come out of what shared memory happened to hold. The checker "
                "rejects it at any length above 32, and the CPU's detector names the uninitialised read. With the "
                "split taken from the tile (SPLIT_FROM_TILE 1) it is right, and within 20 % of the 32-row tile's "
                "speed."
            ),
            head_dims=(64,),
            params={
                "TILE_Q": Param(default=48, choices=(32, 48), meaning="query rows a block; a warp for every 8"),
                "SPLIT_FROM_TILE": Param(
                    default=0,
                    choices=(0, 1),
                    meaning="1: a warp's block follows from the tile's size; 0: as written for four warps",
                ),
            },
            spills={64: ("sm_75",)},
            dead_end=True,
            defect="six warps share 48 rows by a rule written for four: nobody computes the last 16",
            variants=({"SPLIT_FROM_TILE": 1}, {"TILE_Q": 32}),
        ),
        Stage(
            id="fp8_simulated",
            title="FP8 values, fp16 arithmetic",
            parent="04_wmma_qk",
            question="What does FP8 bring when only the values are FP8?",
            change=(
                "Q, K and V are rounded to e4m3 on their way into shared memory, and back to fp16, in which all else "
                "happens."
            ),
            prediction=(
                "The same products, the same bytes, and two conversions a number more: 0.75 to 0.95 times the parent. "
                "The error against exact attention is FP8's, ten times and more above the sources' 0.000294, which can "
                "only have come from a reference that was handed the rounded values."
            ),
            min_arch="sm_89",
            params={
                "WARPS": _WARPS,
                "TILE_KV": _TILE_KV_WMMA,
                "PADDING": _PADDING,
                "LOADS_IN_FLIGHT": _in_flight(2),
            },
            dead_end=True,
            precision="e4m3_inputs",
        ),
        Stage(
            id="fp8",
            title="FP8 on the tensor cores",
            parent="fp8_simulated",
            question="And when the tensor cores take FP8?",
            change=(
                "wgmma on e4m3, for both products, probabilities too. K is rounded and V besides transposed on the way "
                "into shared memory, because FP8 operands must be contiguous along the sum; V's keys are permuted "
                "there so that the scores' registers are the second product's operand as they are."
            ),
            prediction=(
                "The products take half the clocks of fp16, but at D=64 the exponentials already took as long as "
                "those, and they stay. Every block rounds and transposes K and V again, a few instructions a number "
                "for each tile of queries: 150 to 250 TFLOP/s on an H200, fewer than fp16 reaches on the ladder, at a "
                "hundred times its error. FP8 pays where the inputs are stored so and D is 128 or more."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            params={
                "NUM_WARPGROUPS": Param(
                    default=2, choices=(1, 2), meaning="warpgroups a block, of 64 query rows each, that share K and V"
                ),
                "TILE_KV": Param(default=64, choices=(64, 128), meaning="keys a tile"),
            },
            dead_end=True,
            precision="e4m3",
        ),
        Stage(
            id="13_overlap",
            title="A softmax that waits for nothing",
            parent="12_persistent",
            question=(
                "What keeps the tensor cores and the exponential unit from working at the same time, and how far can "
                "that be undone?"
            ),
            change=(
                "Exponentials start at once, against the maximum of earlier tiles, in bfloat16 first against none, and "
                "a sum that is too large tells when one must be redone; the wait for P·V stands among them; a work is "
                "taken late, and waited for under the last product of the one before; its output leaves by a tensor "
                "copy; Q may stay in registers."
            ),
            prediction=(
                "Without its maximum a softmax beside three busy warpgroups needs a tenth fewer clocks a score, and "
                "the begin and end of a work, a twentieth of its time at S=2048 and a tenth causal, can be covered. "
                "At D=128 the exponentials fit under the products, and Q in registers takes a third of Q·K's "
                "shared-memory reads away: about FA3's rate. 560 to 590 TFLOP/s full at D=64 on an H200; the clock, "
                "which falls as the tensor cores fill, takes part of every gain."
            ),
            min_arch="sm_90a",
            max_arch="sm_90a",
            tensor_maps=True,
            dtypes=("float16", "bfloat16"),
            params={
                "NUM_CONSUMERS": _NUM_CONSUMERS,
                "TILE_KV": Param(default=128, choices=(48, 64, 80, 96, 128), meaning="keys a tile"),
                "PIPELINE_STAGES": Param(
                    default=3, choices=(2, 3, 4), by_head_dim={128: 2}, meaning="buffers in the ring of K and V tiles"
                ),
                "PINGPONG": _PINGPONG,
                "L2_SHARE_MB": Param(
                    default=16,
                    choices=(4, 8, 16, 32),
                    by_head_dim={128: 8},
                    meaning="L2 cache that heads worked on at the same time may fill",
                ),
                "Q_IN_REGISTERS": Param(
                    default=0, choices=(0, 1), by_head_dim={128: 1}, meaning="1: Q is A of Q·K from registers"
                ),
            },
            dead_end=True,
            retired=True,
        ),
    )
}
"""What the sources tried and gave up, or should have, and rungs that were retired: runnable like any stage."""
RUNGS: Mapping[str, Stage] = {**STAGES, **{name: stage for name, stage in DEAD_ENDS.items() if stage.retired}}
"""What records of the ladder may hold: its stages, then those that have left it."""
