"""Ablations: one thing changed in a stage, everything else as it is; and the split of a stage's time into parts.

An axis is a question, a tunable or macro, its levels, and what was expected before it was measured. Levels run in turn
in one process and are checked against the oracle like any stage. An effect is the ratio of a level's median time to the
first level's, with a bootstrapped interval over the rounds: samples of one round are a pair, since they met the same
clock and temperature. An axis stands on its stage's defaults, not on what won on a GPU, so that it means the same
everywhere.

The split leaves out one part of a stage's work (`LEAVE_OUT`, kernels/common/parts.cuh). The output is then wrong, so
its times are never a `Measurement`. A part's share is the time that goes with it. Shares need not add up to one: parts
that overlap each look small, and parts that are in each other's way look large.

A lever is a change that no macro holds: a patch of a stage's source (levers.py). It is measured like a level, beside
the source as it is, with the tunables that won on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from flashlab.build import compiler
from flashlab.core.errors import CompileError, MissingPackageError, ParameterError
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import levers
from flashlab.kernels import registry
from flashlab.measure import bench
from flashlab.measure.options import Implementation, Options, Plan
from flashlab.query import select
from flashlab.record import store
from flashlab.record.store import Ablation, CubinFields, Part, Samples
from flashlab.run import choice, gpu
from flashlab.show import tables
from flashlab.show.charts import Chart, Interval, intervals
from flashlab.show.pages import Output, data_links, indent, stage_link

CONFIDENCE = 0.95
_RESAMPLES = 4999
_SEED = 0
PLAN = Plan(samples=40, min_samples=9, cold_samples=0, cap_s=0.6, sustained_seconds=0.0, checked_scores=1 << 26)
"""How much is measured of each level and part: hot bursts."""
LEVER_PLAN = replace(PLAN, samples=60, cap_s=1.5)
"""How much of each lever: more, as many of them do little."""
PARTS: Mapping[str, int] = {"nothing": 0, "qk": 1, "softmax": 2, "pv": 3, "memory": 4}
"""Values of LEAVE_OUT."""
_PART_TITLES: Mapping[str, str] = {"qk": "Q·K", "softmax": "softmax", "pv": "P·V", "memory": "memory"}
SPLIT_SHAPES = (FIRST_SHAPE, "1x8x512x64")
"""Where stages are split: the sources' large shape, and the small one that claim E05 is about."""
SPLIT_STAGES = tuple(stage.id for stage in registry.STAGES.values() if "LEAVE_OUT" in stage.ablations)
"""Stages that know LEAVE_OUT."""
_REASON_CHARS = 160


@dataclass(frozen=True)
class Level:
    """One value on an axis."""

    name: str
    params: Mapping[str, int]
    """Tunables and macros of the axis's stage that differ from its defaults."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One question asked of one stage."""

    name: str
    stage: str
    question: str
    prediction: str
    """Written before the measurement."""
    levels: tuple[Level, ...]
    """The first is what the others are compared with."""
    claims: tuple[str, ...] = ()
    """Ids in data/claims.csv that it answers, wholly or in part."""


def _numbered(name: str, values: Iterable[int], text: str = "{}") -> tuple[Level, ...]:
    return tuple(Level(text.format(value), {name: value}) for value in values)


_BUFFERS = _numbered("PIPELINE_STAGES", (1, 2, 3, 4), "buffers: {}")
_PADDINGS = (Level("padding 8", {"PADDING": 8}), Level("padding 16", {"PADDING": 16}), Level("none", {"PADDING": 0}))

AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(
            name="tile",
            stage="06_cp_async",
            question="What does a larger tile buy, of queries and keys together?",
            prediction=(
                "A warp multiplies 16 rows at a time whatever the tile is, so shared-memory reads a score stay the "
                "same; what a tile of 64 × 64 saves are half of the barriers, rescales and global reads. 64 × 64 takes "
                "10 to 25 % less time than 32 × 32. 128 × 128 leaves one block an SM, with nobody to work while it "
                "waits at a barrier: slower than 64 × 64."
            ),
            levels=(
                Level("32 × 32, 4 warps", {"TILE_Q": 32, "TILE_KV": 32, "WARPS": 4}),
                Level("64 × 64, 4 warps", {"TILE_Q": 64, "TILE_KV": 64, "WARPS": 4}),
                Level("64 × 64, 8 warps", {"TILE_Q": 64, "TILE_KV": 64, "WARPS": 8}),
                Level("128 × 64, 8 warps", {"TILE_Q": 128, "TILE_KV": 64, "WARPS": 8}),
                Level("128 × 128, 8 warps", {"TILE_Q": 128, "TILE_KV": 128, "WARPS": 8}),
            ),
            claims=("B07",),
        ),
        Axis(
            name="tile-sync",
            stage="05_wmma",
            question="The same where loads are waited for, and every warp has 16 rows of its own.",
            prediction=(
                "Two warps a block and 32 keys leave long waits for memory that only other blocks can fill; there are "
                "many of them, as each is small. 64 × 64 takes 10 to 20 % less time than 32 × 32, 128 × 128 as long as "
                "64 × 64 or longer."
            ),
            levels=(
                Level("32 × 32, 2 warps", {"WARPS": 2, "TILE_KV": 32}),
                Level("64 × 64, 4 warps", {"WARPS": 4, "TILE_KV": 64}),
                Level("128 × 128, 8 warps", {"WARPS": 8, "TILE_KV": 128}),
            ),
            claims=("B07",),
        ),
        Axis(
            name="keys",
            stage="08_swizzle",
            question="What does a tile of more keys buy where scores stay in registers?",
            prediction=(
                "32 keys double the barriers, maxima and their shuffles, for 5 to 10 % more time. 128 keys need more "
                "registers than a thread has; spilling costs more than the barriers it saves."
            ),
            levels=_numbered("TILE_KV", (64, 32, 128), "{} keys"),
        ),
        Axis(
            name="warps",
            stage="06_cp_async",
            question="Do 8 warps beat 4 on the same tile?",
            prediction=(
                "With 8 warps two share 16 rows: the same products, half of the registers a thread, and barriers of "
                "the block where one warp's would do. More warps fill more waits: 8 warps take 0 to 10 % less time."
            ),
            levels=_numbered("WARPS", (4, 8), "{} warps"),
            claims=("B09",),
        ),
        Axis(
            name="padding-wmma",
            stage="06_cp_async",
            question="How far must rows of shared memory be apart? WMMA loads 8 rows of 16 bytes at a time.",
            prediction=(
                "Without padding a row is 128 bytes and all 8 rows are in the same banks: 8 turns instead of one, and "
                "1.5 to 2.5 times as long. With 8 halves rows are 4 banks apart, without conflict. With 16 they are 8 "
                "apart, so that rows 0 and 4 meet: 2 turns, and 10 to 25 % more time than with 8."
            ),
            levels=_PADDINGS,
            claims=("B06", "B10"),
        ),
        Axis(
            name="padding-mma",
            stage="07_mma_registers",
            question="The same for ldmatrix, where scores no longer pass through shared memory.",
            prediction=(
                "The same conflicts, on fewer loads: 32 rows share each fragment of K and V. 16 costs 5 to 15 % over "
                "8, no padding 1.5 to 2 times the time."
            ),
            levels=_PADDINGS,
            claims=("B10",),
        ),
        Axis(
            name="swizzle",
            stage="08_swizzle",
            question="Does an XOR swizzle gain anything over padding, in the same kernel?",
            prediction=(
                "Nothing against padding 8: both are free of conflicts, and the smaller rows change no block's "
                "place on the SM. Padding 16 costs 5 to 15 %, neither of them 1.5 to 2.5 times the time."
            ),
            levels=(
                Level("XOR swizzle", {}),
                Level("padding 8", {"SWIZZLE": 0, "PADDING": 8}),
                Level("padding 16", {"SWIZZLE": 0, "PADDING": 16}),
                Level("neither", {"SWIZZLE": 0, "PADDING": 0}),
            ),
            claims=("B10",),
        ),
        Axis(
            name="reduction",
            stage="06_cp_async",
            question="What do shuffles buy over shared memory where a row's maximum is found?",
            prediction=(
                "8 lanes share a row, so it is 3 shuffles for 8 scores of each lane. Through shared memory with "
                "barriers of a warp the reads are as many and wait longer: 2 to 5 % more time. In pairs with barriers "
                "of the block, 12 more barriers a tile: 15 to 40 % more."
            ),
            levels=(
                Level("shuffles", {"REDUCTION": 0}),
                Level("shared memory, warp barriers", {"REDUCTION": 1}),
                Level("shared memory, block barriers", {"REDUCTION": 2}),
            ),
            claims=("B08",),
        ),
        Axis(
            name="buffers-wmma",
            stage="06_cp_async",
            question="What does fetching ahead buy, and how far ahead?",
            prediction=(
                "With one buffer each tile is waited for, but three blocks an SM cover for one another: two buffers "
                "take 5 to 15 % less time. A third and a fourth only cost shared memory and with it blocks: 5 to 15 % "
                "more time than two."
            ),
            levels=_BUFFERS,
            claims=("B12",),
        ),
        Axis(
            name="buffers-mma",
            stage="07_mma_registers",
            question="The same where registers, not shared memory, bound the blocks of an SM.",
            prediction=(
                "Two blocks of 4 warps cover less of a wait: two buffers take 5 to 15 % less time than one. Three and "
                "four cost nothing here and gain nothing."
            ),
            levels=_BUFFERS,
            claims=("B12",),
        ),
        Axis(
            name="buffers-swizzle",
            stage="08_swizzle",
            question="And where scores are computed a tile ahead?",
            prediction="K and V come out of the L2 cache well within a tile's time: no difference beyond 1 %.",
            levels=_BUFFERS[1:],
            claims=("B12",),
        ),
        Axis(
            name="registers",
            stage="00_naive",
            question="Do registers hold the baseline back? The same source with fewer of them.",
            prediction=(
                "A thread keeps 64 outputs and its query in registers. Down to 128 it loses what the compiler loaded "
                "ahead, and gains blocks: within 10 %. Below 96 outputs spill, and every key reads and writes them "
                "through the same unit that is the bound: at 64 and less 1.5 to 4 times the time, not two thirds of it."
            ),
            levels=(
                Level("as many as it wants", {"MAX_REGISTERS": 0}),
                *_numbered("MAX_REGISTERS", (128, 96, 64, 48), "at most {}"),
            ),
            claims=("A05",),
        ),
        Axis(
            name="registers-mma",
            stage="07_mma_registers",
            question="More blocks of an SM for fewer registers a thread, in a tensor-core kernel.",
            prediction=(
                "Two blocks fit as it is. Asking for three caps a thread at 168 registers and spills a little: 5 to "
                "15 % more time. Four caps it at 128: 1.3 to 2 times the time."
            ),
            levels=_numbered("MIN_BLOCKS", (2, 1, 3, 4), "blocks wanted: {}"),
        ),
        Axis(
            name="exp",
            stage="07_mma_registers",
            question="What does it cost to exponentiate with e instead of 2?",
            prediction=(
                "The chip has 2^x only. __expf multiplies by log2(e) first and guards tiny results: 3 more operations "
                "a score, 10 to 20 % more time. expf adds a range reduction: 20 to 40 %."
            ),
            levels=(
                Level("2^x", {"EXPONENTIAL": 0}),
                Level("__expf", {"EXPONENTIAL": 1}),
                Level("expf", {"EXPONENTIAL": 2}),
            ),
        ),
        Axis(
            name="feed",
            stage="09_wgmma",
            question="What do tensor copies gain over cp.async in front of the same wgmma?",
            prediction=(
                "All 128 threads compute addresses and issue 32 copies each a tile, between a barrier and the next "
                "product: a tenth of the instructions. Tensor copies take 5 to 15 % less time."
            ),
            levels=(Level("cp.async", {"FEED": 1}), Level("tensor copies", {"FEED": 0})),
            claims=("B15",),
        ),
        Axis(
            name="order-wmma",
            stage="06_cp_async",
            question="Does it matter in which order K and V are walked?",
            prediction="The work is the same and all of a head's K and V are in the L2 cache: within 1 %.",
            levels=(Level("first keys first", {"DESCENDING": 0}), Level("last keys first", {"DESCENDING": 1})),
        ),
        Axis(
            name="order-wgmma",
            stage="09_wgmma",
            question="And where tensor copies fetch them?",
            prediction="Within 1 %; under a causal mask too, where the masked tile comes first instead of last.",
            levels=(Level("first keys first", {"DESCENDING": 0}), Level("last keys first", {"DESCENDING": 1})),
        ),
        Axis(
            name="turns",
            stage="11_pingpong",
            question="FlashAttention-3's two orders, one at a time.",
            prediction=(
                "At D=64 the turns bring 5 to 10 %, P·V under the softmax 2 to 5 %, and both together little more than "
                "the turns alone; at D=128 the other way round."
            ),
            levels=(
                Level("neither", {"PINGPONG": 0, "OVERLAP": 0}),
                Level("turns", {"PINGPONG": 1, "OVERLAP": 0}),
                Level("P·V under the softmax", {"PINGPONG": 0, "OVERLAP": 1}),
                Level("both", {"PINGPONG": 1, "OVERLAP": 1}),
            ),
        ),
    )
}
"""Every axis by name."""


def choose(names: Sequence[str] | None = None) -> tuple[Axis, ...]:
    """The axes of those names; all where None or empty.

    Raises:
        ParameterError: there is none of a name.
    """
    for name in names or ():
        if name not in AXES:
            raise ParameterError(f"axis: wanted one of {', '.join(AXES)}, got {name!r}")
    return tuple(AXES[name] for name in dict.fromkeys(names)) if names else tuple(AXES.values())


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(
    names: Sequence[str] | None = None,
    *,
    problem: Problem | None = None,
    plan: Plan = PLAN,
    arch: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
    options: Options | None = None,
) -> Path:
    """Measure axes on one problem, and append a record a level to data/<gpu>/ablations/<run>.jsonl.

    Args:
        names: axes; all where None.
        problem: what is computed; the sources' shape, full, float16 where None.
        plan: how much is measured.
        arch: the GPU's architecture; asked of the GPU where None.
        announce: told of every level that is compiled.
        options: how it runs; `Options()` where None.

    Raises:
        ParameterError: no such axis.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    options = options or Options()
    problem = problem or Problem.parse(FIRST_SHAPE)
    levels: dict[str, Implementation] = {}
    cells = []
    for axis in choose(names):
        stage = registry.get(axis.stage)
        of_axis = {
            f"{axis.name}: {level.name}": Implementation(
                kind="stage",
                id=stage.id,
                params=stage.parameters(problem.head_dim, level.params),
                may_spill=True,
                record={"axis": axis.name, "level": level.name, "stage": stage.id},
            )
            for level in axis.levels
        }
        levels |= of_axis
        cells.append((problem, list(of_axis)))
    _compile_ahead([(problem, one) for one in levels.values()], arch or gpu.info(options.device).arch, announce)
    return bench.measure("ablations", levels, cells, plan=plan, options=options)


def split(
    stage_ids: Sequence[str] | None = None,
    *,
    problems: Sequence[Problem] | None = None,
    plan: Plan = PLAN,
    arch: str | None = None,
    slug: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
    options: Options | None = None,
) -> Path:
    """Time stages with each part of their work left out, interleaved; the records go to data/<gpu>/parts/<run>.jsonl.

    A stage has the tunables that won on this GPU, as on the ladder.

    Args:
        stage_ids: ids; those of `SPLIT_STAGES` where None or empty.
        problems: what is computed; `SPLIT_SHAPES` where None.
        plan, arch, announce, options: as `measure` takes them.
        slug: the GPU's folder; asked of the GPU where None.

    Raises:
        ParameterError: a stage whose parts cannot be left out.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    options = options or Options()
    chosen = tuple(dict.fromkeys(stage_ids or SPLIT_STAGES))
    for stage_id in chosen:
        if stage_id not in SPLIT_STAGES:
            raise ParameterError(f"stage: wanted one of {', '.join(SPLIT_STAGES)}, got {stage_id!r}")
    problems = problems or [Problem.parse(shape) for shape in SPLIT_SHAPES]
    arch, slug = gpu.arch_and_slug(options.device, arch, slug)
    parts = {
        f"{stage_id} without {part}": Implementation(
            kind="stage",
            id=stage_id,
            params={} if part == "nothing" else {"LEAVE_OUT": value},
            may_spill=True,
            judged=part == "nothing",
            record={"stage": stage_id, "left_out": part},
        )
        for stage_id in chosen
        for part, value in PARTS.items()
    }
    complete = []
    for problem in problems:
        for one in parts.values():
            stage = registry.get(one.id)
            values = choice.parameters(stage, slug, problem, arch=arch, overrides=one.params)
            complete.append((problem, replace(one, params=stage.parameters(problem.head_dim, values))))
    _compile_ahead(complete, arch, announce)
    cells = [
        (problem, [name for name, one in parts.items() if one.id == stage_id])
        for problem in problems
        for stage_id in chosen
    ]
    return bench.measure("parts", parts, cells, plan=plan, options=options)


def measure_levers(
    problems: Mapping[str, Sequence[Problem]] | None = None,
    *,
    plan: Plan = LEVER_PLAN,
    arch: str | None = None,
    slug: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
    options: Options | None = None,
) -> Path:
    """Measure levers beside their stages as they are; the records go to data/<gpu>/ablations/<run>.jsonl.

    Levers that share a stage, a problem and its tunables are interleaved with one copy of the stage.

    Args:
        problems: levers, and what is computed with each; all, and what they name, where None.
        plan, arch, announce, options: as `measure` takes them.
        slug: the GPU's folder; asked of the GPU where None.

    Raises:
        ParameterError: no such lever, or one that does not fit its stage's source.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    options = options or Options()
    chosen = levers.choose(None if problems is None else tuple(problems))
    files = {lever.name: lever.write() for lever in chosen}
    arch, slug = gpu.arch_and_slug(options.device, arch, slug)
    groups: dict[tuple[str, Problem, tuple[tuple[str, int], ...]], dict[str, Implementation]] = {}
    for lever in chosen:
        stage = registry.get(lever.stage)
        for problem in lever.problems if problems is None else problems[lever.name]:
            values = choice.parameters(stage, slug, problem, arch=arch, overrides=lever.parameters(problem))
            params = stage.parameters(problem.head_dim, values)
            title = " ".join([stage.id, problem.label, *(f"{name}={value}" for name, value in params.items())])
            group = groups.setdefault((stage.id, problem, tuple(params.items())), {})
            for level, source in ((levers.AS_IT_IS, None), (lever.name, files[lever.name])):
                group[f"{title}: {level}"] = Implementation(
                    kind="stage",
                    id=stage.id,
                    params=params,
                    source=None if source is None else str(source.resolve()),
                    may_spill=True,
                    record={"axis": levers.AXIS, "level": level, "stage": stage.id},
                )
    every = {name: one for group in groups.values() for name, one in group.items()}
    cells = [(problem, list(group)) for (_, problem, _), group in groups.items()]
    _compile_ahead([(problem, every[name]) for problem, names in cells for name in names], arch, announce)
    return bench.measure("ablations", every, cells, plan=plan, options=options)


def _compile_ahead(
    wanted: Iterable[tuple[Problem, Implementation]], arch: str, announce: Callable[[str], None]
) -> None:
    """Fill the cache on all cores; what does not compile is the worker's to record."""
    work = [
        compiler.Job(
            stage=registry.get(one.id),
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            causal=problem.causal,
            arch=arch,
            overrides=one.params,
            source=None if one.source is None else Path(one.source),
            may_spill=True,
        )
        for problem, one in wanted
        if registry.get(one.id).why_not(problem, arch) is None
    ]

    def told(job: compiler.Job, outcome: compiler.Cubin | CompileError) -> None:
        announce(f"{'refused' if isinstance(outcome, CompileError) else 'compiled'}: {job.label}")

    compiler.compile_many(work, progress=told)


# --- Effects ----------------------------------------------------------------------------------------------------------


def ratio_interval(of: Sequence[float], to: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of median(of) / median(to), bootstrapped over pairs: entry i of both is of the same round.

    Where one has more entries, its last ones belong to rounds that the other sat out, and are left out.

    Raises:
        MissingPackageError: SciPy is missing.
        ParameterError: fewer than two pairs.
    """
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingPackageError(
            f"wanted SciPy for confidence intervals, got: {error}. Install it: pip install 'scipy>=1.15'"
        ) from error
    import numpy as np

    pairs = min(len(of), len(to))
    if pairs < 2:
        raise ParameterError(f"wanted at least 2 samples of both, got {len(of)} and {len(to)}")

    def ratio(a: Any, b: Any, axis: int = -1) -> Any:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    found = bootstrap(
        (np.asarray(of[:pairs]), np.asarray(to[:pairs])),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A level beside the first level of its axis, or a stage without a part beside the whole stage."""

    group: str
    """Axis, or stage id."""
    name: str
    """Level, or the part that is left out."""
    problem: Problem
    median_us: float | None
    """None where there is no time."""
    ratio: float | None
    """Median time over the first level's; None where either has none."""
    times_us: tuple[float, ...]
    first_times_us: tuple[float, ...]
    reason: str
    """Why there is no time."""
    cubin: CubinFields | None
    run: str
    dirty: bool
    gpu: store.Gpu
    is_first: bool

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio; None for the first level, and where there is no ratio.

        Raises:
            MissingPackageError: SciPy is missing.
        """
        if self.is_first or self.ratio is None or min(len(self.times_us), len(self.first_times_us)) < 2:
            return None
        return ratio_interval(self.times_us, self.first_times_us)

    @property
    def verdict(self) -> str:
        """What can be said with 95 % confidence: `slower`, `faster`, or `no difference shown`; empty without one."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return "slower" if low > 1 else "faster" if high < 1 else "no difference shown"

    def flat(self, *, intervals: bool = True) -> dict[str, object]:
        """For `--json`; without interval and verdict where they are not wanted.

        Raises:
            MissingPackageError: SciPy, which `intervals` need, is missing.
        """
        return {
            "group": self.group,
            "name": self.name,
            "shape": self.problem.shape,
            "dtype": self.problem.dtype,
            "mask": self.problem.mask,
            "median_us": self.median_us,
            "ratio": self.ratio,
            "interval": self.interval if intervals else None,
            "verdict": (self.verdict or None) if intervals else None,
            "samples": len(self.times_us),
            "registers": self.cubin.registers if self.cubin else None,
            "spill_store_bytes": self.cubin.spill_store_bytes if self.cubin else None,
            "blocks_per_sm": self.cubin.blocks_per_sm if self.cubin else None,
            "reason": self.reason,
            "run": self.run,
        }


def _effect(group: str, name: str, record: Ablation | Part, first: Samples | None, *, is_first: bool) -> Effect:
    samples = record.samples if isinstance(record, Part) else record.samples_of()
    return Effect(
        group=group,
        name=name,
        problem=record.problem.problem(),
        median_us=samples.median_us if samples else None,
        ratio=_paired_ratio(samples, first) if samples and first else None,
        times_us=samples.time_us if samples else (),
        first_times_us=first.time_us if first else (),
        reason="" if isinstance(record, Part) else record.reason,
        cubin=record.cubin,
        run=record.run,
        dirty=record.source.dirty,
        gpu=record.gpu,
        is_first=is_first,
    )


def _paired_ratio(samples: Samples, first: Samples) -> float:
    pairs = min(len(samples.time_us), len(first.time_us))
    return median(samples.time_us[:pairs]) / median(first.time_us[:pairs])


def effects(found: Iterable[Ablation], problem: Problem | None = None) -> list[Effect]:
    """Every level of every axis, of the newest run that has the axis, in the registry's order.

    Axes and levels that the registry no longer has are left out.

    Args:
        found: records.
        problem: of it alone; of every problem on record where None.
    """
    newest: dict[tuple[str, Problem], list[Ablation]] = {}
    for record in sorted(found, key=lambda one: one.run):
        place = (record.axis, record.problem.problem())
        if place in newest and newest[place][0].run != record.run:
            del newest[place]
        newest.setdefault(place, []).append(record)
    result: list[Effect] = []
    for axis in AXES.values():
        for (name, at), of_axis in newest.items():
            if name != axis.name or problem not in (None, at):
                continue
            by_level = {record.level: record for record in of_axis}
            first = by_level.get(axis.levels[0].name)
            for level in axis.levels:
                if level.name in by_level:
                    samples = first.samples_of() if first else None
                    is_first = level is axis.levels[0]
                    result.append(_effect(axis.name, level.name, by_level[level.name], samples, is_first=is_first))
    return result


def lever_effects(found: Iterable[Ablation], name: str | None = None) -> list[Effect]:
    """Levers beside their stage as it is, each of the newest run that has it at a problem; and what they are beside.

    Levers that are no longer there are left out.

    Args:
        found: records.
        name: of that lever alone.
    """
    plain: dict[object, Ablation] = {}
    newest: dict[tuple[str, Problem], Ablation] = {}
    for record in sorted((one for one in found if one.axis == levers.AXIS), key=lambda one: one.run):
        if record.level == levers.AS_IT_IS:
            plain[_beside(record)] = record
        elif record.level in levers.names() and name in (None, record.level):
            newest[record.level, record.problem.problem()] = record
    result: list[Effect] = []
    for place in dict.fromkeys(_beside(record) for record in newest.values()):
        first = plain.get(place)
        samples = first.samples_of() if first else None
        if first:
            result.append(_effect(first.stage, levers.AS_IT_IS, first, samples, is_first=True))
        result += [
            _effect(record.stage, record.level, record, samples, is_first=False)
            for _, record in sorted(newest.items(), key=lambda item: item[0][0])
            if _beside(record) == place
        ]
    return result


def _beside(record: Ablation) -> tuple[object, ...]:
    """What a lever's record and that of its stage as it is have in common."""
    return record.run, record.stage, record.problem.problem(), tuple(sorted(record.parameters.items()))


def shares(found: Iterable[Part], problem: Problem | None = None) -> list[Effect]:
    """Every part of every stage, of the newest run that has the stage: its time without the part over its whole time.

    A part's share of the time is one minus the ratio.
    """
    newest: dict[tuple[str, Problem], list[Part]] = {}
    for record in sorted(found, key=lambda one: one.run):
        place = (record.stage, record.problem.problem())
        if place in newest and newest[place][0].run != record.run:
            del newest[place]
        newest.setdefault(place, []).append(record)
    result: list[Effect] = []
    for (stage_id, at), of_stage in sorted(newest.items(), key=lambda item: item[0][0]):
        if problem not in (None, at):
            continue
        by_part = {record.left_out: record for record in of_stage}
        whole = by_part["nothing"].samples if "nothing" in by_part else None
        for part in PARTS:
            if part in by_part:
                result.append(_effect(stage_id, part, by_part[part], whole, is_first=part == "nothing"))
    return result


# --- Pages ------------------------------------------------------------------------------------------------------------

NOTHING_YET = (
    "**Nothing has been measured yet.** No such record of this GPU; `flashlab ablate` and `flashlab split` on it make "
    "them."
)


def _came_from(found: Sequence[Effect]) -> str:
    """GPU, problem, regime, date and commit, for a caption."""
    labels = sorted({one.problem.label for one in found})
    runs = sorted({one.run for one in found})
    parts = [
        found[0].gpu.name,
        labels[0] if len(labels) == 1 else f"{len(labels)} problems",
        "burst, hot L2",
        ", ".join(dict.fromkeys(select.date(run) for run in runs)),
        f"commit {', '.join(sorted({select.commit_label(one.run, one.dirty) for one in found}))}",
    ]
    return " · ".join(parts)


def _files(found: Iterable[Effect], folder: str) -> tuple[str, ...]:
    return tuple(sorted({f"{one.gpu.slug}/{folder}/{one.run}.jsonl" for one in found}))


def chart(found: Sequence[Effect], *, name: str = "ablations") -> Chart | str:
    """Every level of every axis beside the first of its axis: time over its time, with 95 % intervals."""
    timed = [one for one in found if one.ratio is not None]
    if not timed:
        return NOTHING_YET
    told = "; ".join(f"{one.group}, {one.name}: {one.ratio:.3f}" for one in timed if not one.is_first)
    return _ratio_chart(
        [(f"{one.group} ({AXES[one.group].stage[:2]})", one.name, one) for one in timed],
        name=name,
        first="the first level",
        alt=f"Time of every level over that of the first level of its axis. {told}.",
        caption="What one change does to a stage's time: each level beside the first of its axis (in brackets the "
        "stage)",
    )


def _ratio_chart(rows: Sequence[tuple[str, str, Effect]], *, name: str, first: str, alt: str, caption: str) -> Chart:
    """Time over that of the first, by group: rows are group, title and effect, each of which has a ratio."""
    groups: dict[str, list[Interval]] = {}
    for group, title, one in rows:
        assert one.ratio is not None
        low, high = one.interval or (one.ratio, one.ratio)
        look = {"slower": "worse", "faster": "better"}.get(one.verdict, "first" if one.is_first else "plain")
        row = Interval(name=title, value=one.ratio, low=low, high=high, look=look)  # type: ignore[arg-type]
        groups.setdefault(group, []).append(row)
    shown = [one for _, _, one in rows]
    return intervals(
        groups,
        name=name,
        xlabel=f"time over that of {first}; less is better",
        reference=1.0,
        ratio=True,
        alt=alt,
        caption=f"{caption}, with the 95 % interval of the ratio, which is often narrower than the mark.",
        provenance=_came_from(shown),
        data_files=_files(shown, "ablations"),
    )


def split_chart(found: Sequence[Effect], *, name: str = "time-split") -> Chart | str:
    """By how much each part's absence shortens a stage, in percent of its time, with 95 % intervals."""
    timed = [one for one in found if one.ratio is not None and not one.is_first]
    if not timed:
        return NOTHING_YET
    groups: dict[str, list[Interval]] = {}
    for one in timed:
        assert one.ratio is not None
        low, high = one.interval or (one.ratio, one.ratio)
        row = Interval(
            name=_PART_TITLES[one.name], value=100 * (1 - one.ratio), low=100 * (1 - high), high=100 * (1 - low)
        )
        groups.setdefault(_split_title(one), []).append(row)
    told = "; ".join(
        f"{_split_title(one)} {_PART_TITLES[one.name]} {100 * (1 - one.ratio):.1f} %" for one in timed if one.ratio
    )
    return intervals(
        groups,
        name=name,
        xlabel="percent of the stage's time that goes with the part",
        reference=0.0,
        ratio=False,
        alt=f"Share of a stage's time that goes when a part of its work is left out. {told}.",
        caption="How much of a stage's time goes with each part of its work, with 95 % intervals. The shares need not "
        "add up to 100 %: what overlaps is counted in none, what stands in another's way in both.",
        provenance=_came_from(timed),
        data_files=_files(timed, "parts"),
    )


def _split_title(one: Effect) -> str:
    return f"{one.group}, {one.problem.sizes}"


def _cells(one: Effect) -> list[tables.Cell]:
    """Registers, spilled bytes and blocks an SM."""
    if one.cubin is None:
        return [None, None, None]
    blocks = one.cubin.blocks_per_sm
    return [str(one.cubin.registers), str(one.cubin.spill_store_bytes), None if blocks is None else str(blocks)]


def _problem_text(problem: Problem) -> str:
    return f"{problem.sizes} {problem.mask} {problem.dtype}"


def _time_text(one: Effect | None) -> str | None:
    return None if one is None or one.median_us is None else f"{one.median_us:.1f}"


def _said(one: Effect) -> str:
    """What can be said of its time, or why there is none."""
    if one.median_us is None:
        return one.reason[:_REASON_CHARS]
    return "compared with" if one.is_first else one.verdict


def _ratio_text(value: float | None, interval: tuple[float, float] | None, *, percent: bool = False) -> str | None:
    if value is None:
        return None
    form = "{:.1%}" if percent else "{:.3f}"
    inside = "" if interval is None else f" ({form} to {form})".format(*interval)
    return (form.format(value) + inside).replace("%", "")


def table(found: Sequence[Effect]) -> str:
    """Every axis with its question, what was expected, and its levels, as Markdown."""
    if not found:
        return NOTHING_YET
    text: list[str] = []
    for name, problem in dict.fromkeys((one.group, one.problem) for one in found):
        axis = AXES[name]
        claims = f" Claims: {', '.join(axis.claims)}." if axis.claims else ""
        rows: list[list[tables.Cell]] = []
        for one in found:
            if (one.group, one.problem) == (name, problem):
                rows.append([one.name, _said(one), _time_text(one), _ratio_text(one.ratio, one.interval), *_cells(one)])
        header = ("level", "", "µs", "time over the first's (95 %)", "registers", "spilled B", "blocks/SM")
        text.append(
            f"### {name}: `{axis.stage}`, {_problem_text(problem)}\n\n"
            f"{axis.question}{claims}\n\n*Expected:* {axis.prediction}\n\n{tables.markdown(header, rows, left=2)}"
        )
    return "\n".join(text)


LEVER_NOT_MEASURED = "Not measured yet: `flashlab ablate --levers` on a Hopper GPU does it."


def lever_chart(found: Sequence[Effect], *, name: str = "levers") -> Chart | str:
    """Every lever's time over that of its stage as it is, a row a problem, with 95 % intervals."""
    timed = [one for one in found if one.ratio is not None and not one.is_first]
    if not timed:
        return LEVER_NOT_MEASURED
    told = "; ".join(f"{one.name}, {_problem_text(one.problem)}: {one.ratio:.3f}" for one in timed)
    ordered = sorted(timed, key=lambda one: (one.name, one.problem.head_dim, one.problem.mask != "full"))
    return _ratio_chart(
        [(one.name, _problem_text(one.problem), one) for one in ordered],
        name=name,
        first="the stage as it is",
        alt=f"Time of every lever over that of its stage as it is. {told}.",
        caption="What a change of the source does to a stage's time, each beside the stage as it is",
    )


def lever_table(found: Sequence[Effect]) -> str:
    """What one lever did on each problem, as a Markdown table with where it comes from."""
    mine = [one for one in found if not one.is_first]
    if not mine:
        return LEVER_NOT_MEASURED
    plain = {(one.run, one.problem, one.times_us): one for one in found if one.is_first}
    rows: list[list[tables.Cell]] = []
    for one in mine:
        beside = plain.get((one.run, one.problem, one.first_times_us))
        rows.append(
            [
                _problem_text(one.problem),
                _said(one),
                _time_text(beside),
                _time_text(one),
                _ratio_text(one.ratio, one.interval),
                *(None if of is None or of.cubin is None else str(sum(of.cubin.sass.values())) for of in (beside, one)),
                None if one.cubin is None else str(one.cubin.spill_store_bytes),
            ]
        )
    header = (
        *("problem", "", "as it is, µs", "with it, µs", "time with it over as it is (95 %)"),
        *("instructions as it is", "with it", "spilled B"),
    )
    return f"{tables.markdown(header, rows, left=2)}\n<small>{_came_from(mine)}</small>"


def split_table(found: Sequence[Effect]) -> str:
    """Every stage's time without each part, and the share that goes with it, as a Markdown table."""
    if not found:
        return NOTHING_YET
    rows: list[list[tables.Cell]] = []
    for one in found:
        share = None if one.ratio is None or one.is_first else 1 - one.ratio
        interval = None if one.interval is None else (1 - one.interval[1], 1 - one.interval[0])
        rows.append(
            [
                f"`{one.group}`",
                one.problem.sizes,
                _PART_TITLES.get(one.name, one.name),
                _time_text(one),
                _ratio_text(share, interval, percent=True),
                *_cells(one),
            ]
        )
        whole_ends = one.name == list(PARTS)[-1]
        if whole_ends:
            of_stage = [x for x in found if (x.group, x.problem) == (one.group, one.problem) and not x.is_first]
            total = sum(1 - x.ratio for x in of_stage if x.ratio is not None)
            rows.append(
                [
                    f"`{one.group}`",
                    one.problem.sizes,
                    "sum of the shares",
                    None,
                    f"{100 * total:.1f}",
                    None,
                    None,
                    None,
                ]
            )
    header = ("stage", "problem", "left out", "µs", "share, % (95 %)", "registers", "spilled B", "blocks/SM")
    return tables.markdown(header, rows, left=3)


def levers_page(out: Output, shown: select.Results | None, data: Path) -> None:
    """Every lever: its question, its diff, what was expected and the result."""
    page = "levers.md"
    effects = lever_effects(store.ablations(shown.gpu, data)) if shown else []
    drawn = lever_chart(effects)
    out.snippet("levers-chart.md", drawn if isinstance(drawn, str) else out.chart(drawn, page))
    parts = []
    for lever in levers.choose():
        mine = [one for one in effects if one.is_first or one.name == lever.name]
        files = [f"{one.gpu.slug}/ablations/{one.run}.jsonl" for one in mine if not one.is_first]
        links = ", ".join(data_links(dict.fromkeys(files), page))
        added, removed = lever.changed_lines()
        heading = f"{lever.stage}, changed: {added} lines added, {removed} removed"
        try:
            diff = lever.shown_diff()
        except ParameterError as error:
            diff = lever.diff.rstrip()
            heading = f"The change, which no longer fits the stage: {error}".replace('"', "'")
        parts += [
            f"### {lever.name.replace('_', ' ')}",
            f"{lever.question} (`{lever.name}`, {stage_link(lever.stage)})",
            f'??? abstract "{heading}"\n\n' + indent(f"``` {{ .diff }}\n{diff}\n```"),
            f"*Expected:* {lever.prediction}",
            lever_table(mine) + (f" <small>· {links}</small>" if links else ""),
            lever.why,
        ]
    out.snippet("levers.md", "\n\n".join(part for part in parts if part))


PAGES = {"levers": levers_page}
