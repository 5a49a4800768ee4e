"""The registry: every kernel, what it asks, and what it takes. Tests, CLI, notebooks and figures iterate `STAGES`.

Adding a stage is one file in `kernels/`, one entry here and one page in `site/stages/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashlab.errors import ParameterError, UnknownStageError, UnsupportedError
from flashlab.paths import KERNELS
from flashlab.problem import DType, Problem

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
    min_arch: str = "sm_75"
    dtypes: tuple[DType, ...] = ("float16",)
    head_dims: tuple[int, ...] = (64, 128)
    params: Mapping[str, Param] = field(default_factory=dict)
    spills: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Head dim to the architectures on which some registers may spill to local memory; anywhere else a spill fails the
    build."""

    @property
    def source(self) -> Path:
        """Its CUDA C++ file."""
        return KERNELS / f"{self.id}.cu"

    @property
    def entry(self) -> str:
        """The kernel's name in the machine code."""
        return f"attention_{self.id}"

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures it compiles for."""
        return ARCHS[ARCHS.index(self.min_arch) :]

    def may_spill(self, head_dim: int, arch: str) -> bool:
        """Whether registers may spill to local memory there."""
        return arch in self.spills.get(head_dim, ())

    def parameters(self, head_dim: int, overrides: Mapping[str, int] | None = None) -> dict[str, int]:
        """Every tunable's value: the default for `head_dim`, replaced by `overrides`.

        Raises:
            ParameterError: an override that is no tunable of this stage, or no integer.
        """
        values = {name: param.default_for(head_dim) for name, param in self.params.items()}
        for name, value in (overrides or {}).items():
            if name not in values:
                raise ParameterError(f"Stage {self.id} has no parameter {name!r}; it has {', '.join(values) or 'none'}")
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ParameterError(f"Stage {self.id}, {name}: wanted a non-negative integer, got {value!r}")
            values[name] = value
        return values

    def why_not(self, problem: Problem, arch: str | None = None) -> str | None:
        """Why this stage cannot run `problem` (on `arch`, where given); None when it can."""
        if problem.dtype not in self.dtypes:
            works = _runnable(dtype=problem.dtype)
            return f"Stage {self.id} takes {' or '.join(self.dtypes)}, got {problem.dtype}. {works}"
        if problem.head_dim not in self.head_dims:
            return f"Stage {self.id} takes head dim {' or '.join(map(str, self.head_dims))}, got {problem.head_dim}."
        if arch is not None and capability(arch) < capability(self.min_arch):
            return f"Stage {self.id} needs {self.min_arch} or newer; this GPU is {arch}. {_runnable(arch=arch)}"
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
        if (dtype is None or dtype in stage.dtypes) and (arch is None or capability(arch) >= capability(stage.min_arch))
    ]
    return f"Runnable: {', '.join(ids)}." if ids else "No stage is runnable."


def get(stage_id: str) -> Stage:
    """The stage of that id.

    Raises:
        UnknownStageError: there is none.
    """
    try:
        return STAGES[stage_id]
    except KeyError:
        raise UnknownStageError(f"stage: wanted one of {', '.join(STAGES)}, got {stage_id!r}") from None


def best(problem: Problem, arch: str | None) -> Stage:
    """The last rung of the ladder that runs `problem` on `arch`; None is a CPU, which runs every stage.

    Raises:
        UnsupportedError: none does; the message has each stage's reason.
    """
    for stage in reversed(tuple(STAGES.values())):
        if stage.why_not(problem, arch) is None:
            return stage
    reasons = " ".join(stage.why_not(problem, arch) or "" for stage in STAGES.values())
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
_PADDING = Param(
    default=8, choices=(0, 8, 16), meaning="elements added to each shared-memory row, against bank conflicts"
)
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
            spills={64: ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"), 128: ("sm_100a",)},
        ),
    )
}
