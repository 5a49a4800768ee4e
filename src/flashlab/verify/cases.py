"""The comparison of stages with the oracle, over what breaks kernels: which cases there are, and running them on a CPU.

bench.py runs the same cases on a GPU. Every buffer lies between guards of NaN, outputs are poisoned, inputs compared
afterwards; grouped-query heads and the log-sum-exp are always on. Beside normal inputs of hostile lengths there are
hostile inputs, whose scores reach what a kernel does seldom, and rows that lie far apart.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashlab.core.errors import (
    CompileError,
    EmulationError,
    FlashlabError,
    ParameterError,
    UnsupportedError,
)
from flashlab.core.inputs import HOSTILE as HOSTILE_INPUTS
from flashlab.core.inputs import NORMAL, SCALE8, drawn
from flashlab.core.problem import BYTES_PER_ELEMENT, DTYPES, MASKS, Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.record.checks import CheckRow, EmulatorVerdict
from flashlab.record.store import Verdict
from flashlab.run import emulator
from flashlab.run.attention import Emulation, emulate
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import (
    FLASH_ATTENTION_LENGTHS,
    HOSTILE,
    Guarded,
    Oracle,
    check,
    check_as_flash_attention,
    strides_of,
)
from flashlab.verify.verdict import Verdict as CheckVerdict

LAYOUTS: dict[str, str] = {
    "contiguous": "batch, heads, length, head_dim without gaps",
    "bshd": "heads side by side in a token, as a projection writes them",
    "padded": "a gap of 8 elements after every row",
    "misaligned": "rows of odd length that start at any element: nothing is 16-byte aligned",
}
FAR_LAYOUTS: dict[str, str] = {
    "far": "rows 2^23 + 8 elements apart: from the 257th on, offsets take more than 32 bits",
    "far_misaligned": "rows 2^23 + 9 elements apart",
}
FAR_LENGTHS = ((260, 260),)
"""Few rows past the 256th: memory between rows is never touched, and what is touched goes by the page."""
_FAR_ROW, _FAR_MASK = (1 << 23) + 8, "causal"
TENSORS = ("q", "k", "v", "out")
_PLACE = re.compile(r"(?P<order>[bhs]{3}d)(\+(?P<gap>\d+))?(@(?P<offset>\d+))?(?P<shared>=)?")
"""How one of `TENSORS` lies in a random layout, which has one such part for each, joined by slashes: `bshd+8@3=` is
heads side by side in a token, a gap of 8 elements after each row, moved by 3 elements, one head that all share."""
HEADS = (2, 4, 2)
"""Batch, query heads and key heads of a case: the least in which no head or batch can be taken for another."""
TWO_HEADS, LONE_HEAD = (1, 2, 1), (1, 1, 1)
"""On a CPU, whose time goes by heads: of a problem that is there for its edges, and of a long one."""
MANY_SCORES = 1 << 16
"""A head with so many scores makes a problem long, where a warpgroup's 64 rows count as one tile at least."""
HOSTILE_LENGTHS = ((70, 400), (400, 400))
"""Lengths for hostile inputs: several tiles of keys, whose scores grow from either end. A CPU takes the first."""
SCHEDULES = ("ascending", "seeded:1")
"""The orders of warps that a CPU goes through: a copy or a warp that is early in one is late in the other."""
MANY_SCORES_IN_ALL = 1 << 17
"""Of a problem with more, a CPU runs beside a GPU the first group of query heads alone."""


@dataclass(frozen=True)
class CheckRun:
    """Every verdict, and the file that holds them."""

    path: Path | None
    rows: tuple[CheckRow, ...]

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        """What is wrong; a stage that cannot do a problem is not."""
        return tuple(row for row in self.rows if row.status not in ("ok", "unsupported"))


@dataclass(frozen=True)
class Case:
    """A problem in one layout, and the implementations that take it."""

    problem: Problem
    layout: str
    names: tuple[str, ...]


def cases(
    able: Mapping[str, Stage],
    *,
    lengths: Sequence[tuple[int, int]] = HOSTILE,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    layouts: Sequence[str] = tuple(LAYOUTS),
    inputs: Sequence[str] = (NORMAL,),
    head_dims: Sequence[int] | None = None,
    heads: tuple[int, int, int] = HEADS,
) -> list[Case]:
    """Every combination that at least one implementation takes. `able` is the stage of each name.

    Raises:
        ParameterError: an unknown layout, mask or type, inputs that are not drawn, or nothing is left.
    """
    kinds = [drawn(name) for name in inputs]
    for wanted, known, what in (
        (layouts, {**LAYOUTS, **FAR_LAYOUTS}, "layout"),
        (masks, MASKS, "mask"),
        (dtypes, DTYPES, "dtype"),
    ):
        for value in wanted:
            if value not in known:
                raise ParameterError(f"{what}: wanted one of {', '.join(known)}, got {value!r}")
    dims = sorted({dim for stage in able.values() for dim in stage.head_dims}) if head_dims is None else head_dims
    batch, q_heads, kv_heads = heads
    found: list[Case] = []
    for head_dim in dims:
        for dtype in dtypes:
            for mask in masks:
                for q_len, kv_len in lengths:
                    problem = Problem(
                        batch=batch,
                        q_heads=q_heads,
                        kv_heads=kv_heads,
                        q_len=q_len,
                        kv_len=kv_len,
                        head_dim=head_dim,
                        dtype=dtype,  # type: ignore[arg-type]
                        mask=mask,  # type: ignore[arg-type]
                    )
                    names = tuple(name for name, stage in able.items() if stage.why_not(problem) is None)
                    found.extend(
                        Case(replace(problem, inputs=kind), layout, names)
                        for kind in kinds
                        for layout in layouts
                        if names
                    )
    if not found:
        raise ParameterError("wanted at least one stage that takes one of those types and head dims, got none")
    return found


def default_cases(
    able: Mapping[str, Stage],
    *,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    head_dims: Sequence[int] | None = None,
) -> list[Case]:
    """What a GPU goes through: hostile lengths in every layout, hostile inputs, rows that lie far apart."""
    what: dict[str, Any] = {"dtypes": dtypes, "masks": masks, "head_dims": head_dims}
    hostile: dict[str, Any] = {**what, "lengths": HOSTILE_LENGTHS, "inputs": tuple(HOSTILE_INPUTS)}
    return [
        *cases(able, lengths=HOSTILE, layouts=tuple(LAYOUTS), **what),
        *cases(able, layouts=("contiguous", "misaligned"), **hostile),
        *_far_cases(able, **what),
    ]


def default_cases_on_cpu(able: Mapping[str, Stage], **what: Any) -> list[tuple[Case, str]]:
    """What a CPU goes through, and under which schedule; arguments as `default_cases` takes them.

    A hostile length goes through the first layout under the first schedule, and through another of them, by turns,
    under the second; a long one goes through the first alone. So does a hostile kind of inputs, for which the masks
    share layouts and schedules, and head dims take turns.
    """
    first, *others = LAYOUTS
    ascending, seeded = SCHEDULES

    def turn(problem: Problem) -> int:
        return DTYPES.index(problem.dtype) + MASKS.index(problem.mask)

    def elsewhere(case: Case) -> tuple[Case, str]:
        problem = case.problem
        which = turn(problem) + problem.head_dim // 64 + problem.q_len + problem.kv_len
        return replace(case, layout=others[which % len(others)]), seeded

    wanted: list[tuple[Case, str]] = []
    for pair in HOSTILE:
        for case in cases(able, lengths=[pair], layouts=(first,), heads=_heads_on_cpu(*pair), **what):
            wanted += [(case, ascending)] if is_long(*pair) else [(case, ascending), elsewhere(case)]
    dims = sorted({dim for stage in able.values() for dim in stage.head_dims})
    for number, kind in enumerate(HOSTILE_INPUTS):
        for case in cases(able, lengths=HOSTILE_LENGTHS[:1], layouts=(first,), inputs=(kind,), **what):
            if case.problem.head_dim == dims[(number + turn(case.problem)) % len(dims)]:
                wanted.append(elsewhere(case) if case.problem.causal else (case, ascending))
    return wanted + [(case, ascending) for case in _far_cases(able, **what)]


def _far_cases(
    able: Mapping[str, Stage], *, dtypes: Sequence[str], masks: Sequence[str], head_dims: Sequence[int] | None
) -> list[Case]:
    """Of one head, one head dim and one mask: what an offset is computed from does not depend on them."""
    dim = min(dim for stage in able.values() for dim in stage.head_dims)
    if _FAR_MASK not in masks or (head_dims is not None and dim not in head_dims):
        return []
    return cases(
        able,
        lengths=FAR_LENGTHS,
        dtypes=dtypes,
        masks=(_FAR_MASK,),
        layouts=tuple(FAR_LAYOUTS),
        head_dims=(dim,),
        heads=LONE_HEAD,
        inputs=("hostile_waves",),
    )


def is_long(q_len: int, kv_len: int) -> bool:
    """Whether a head of those lengths takes a CPU long."""
    return max(q_len, _WARPGROUP_ROWS) * kv_len >= MANY_SCORES


def _heads_on_cpu(q_len: int, kv_len: int) -> tuple[int, int, int]:
    """Batch and heads of a problem on a CPU: all of `HEADS` between the tiny ones and the larger ones."""
    few = max(q_len, kv_len) <= 17 or q_len * kv_len > 1 << 14
    return LONE_HEAD if is_long(q_len, kv_len) else TWO_HEADS if few else HEADS


_WARPGROUP_ROWS = 64
FLASH_ATTENTION: Literal["flash-attention"] = "flash-attention"
FLASH_ATTENTION_INPUTS = (NORMAL, SCALE8.name, "sink_first")
SUITES: Mapping[str, Callable[..., CheckVerdict]] = {FLASH_ATTENTION: check_as_flash_attention}
"""Cases of other people's tests, and the rule by which they judge."""
_FLASH_ATTENTION_HEADS = ((6, 6), (6, 2), (6, 1))
"""Query heads and key heads: one each, some shared, one for all."""


def flash_attention_cases(
    able: Mapping[str, Stage],
    *,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    head_dims: Sequence[int] | None = None,
    on_cpu: bool = False,
) -> list[Case]:
    """The forward cases of flash-attention's own tests, on normal inputs, on scaled ones and with a sink.

    Batches and heads are theirs, and so is the layout. A CPU has one batch, and takes short lengths alone.
    """
    return [
        case
        for q_heads, kv_heads in _FLASH_ATTENTION_HEADS
        for q_len, kv_len in FLASH_ATTENTION_LENGTHS
        if not on_cpu or q_len * kv_len <= MANY_SCORES
        for case in cases(
            able,
            lengths=[(q_len, kv_len)],
            dtypes=dtypes,
            masks=masks,
            layouts=("bshd",),
            head_dims=head_dims,
            heads=(1 if on_cpu else 9 if kv_len <= 2048 else 2, q_heads, kv_heads),
            inputs=FLASH_ATTENTION_INPUTS,
        )
    ]


def suite_cases(suite: str, able: Mapping[str, Stage], **what: Any) -> list[Case]:
    """The cases of one of `SUITES`; arguments as `flash_attention_cases` takes them.

    Raises:
        ParameterError: no suite of that name.
    """
    if suite not in SUITES:
        raise ParameterError(f"suite: wanted one of {', '.join(SUITES)}, got {suite!r}")
    return flash_attention_cases(able, **what)


_LONGEST = 1500
_EDGES = (1, 2, 3, 7, 8, 9, *(n + d for n in (16, 32, 64, 128, 192, 256, 384, 512, 1024) for d in (-1, 0, 1)))
"""Lengths at which tiles begin and end."""
GPU_SCORES, CPU_SCORES = 1 << 22, 1 << 15
"""Scores of a random problem at most: what a GPU checks in milliseconds, and a CPU emulates in a second."""


def random_cases(
    able: Mapping[str, Stage],
    count: int,
    *,
    seed: int,
    max_scores: int = GPU_SCORES,
    inputs: Sequence[str] = (NORMAL,),
) -> list[Case]:
    """`count` problems drawn with `seed`, each in a layout of its own, of `max_scores` scores at most.

    Lengths are 1 to 1500, many of them at the edges of tiles, those of queries and keys independent of one another; so
    are the places of the four tensors: order of the dimensions, gaps, addresses, heads that share their memory. Kinds
    of inputs follow one another.

    Raises:
        ParameterError: no stage, or no case asked for, or inputs that are not drawn.
    """
    kinds = [drawn(name) for name in inputs]
    if count < 1 or not able:
        raise ParameterError(f"wanted at least one random case and one stage, got {count} and {len(able)}")
    rng = np.random.default_rng(seed)
    dtypes = sorted({dtype for stage in able.values() for dtype in stage.dtypes})
    dims = sorted({dim for stage in able.values() for dim in stage.head_dims})
    found: list[Case] = []
    while len(found) < count:
        q_len, kv_len = (_random_length(rng) for _ in range(2))
        heads = [(b, g * h, h) for b in (1, 2, 3) for g in (1, 2, 3, 4) for h in (1, 2, 3)]
        fitting = [one for one in heads if one[0] * one[1] * q_len * kv_len <= max_scores]
        if not fitting:
            continue
        batch, q_heads, kv_heads = fitting[int(rng.integers(len(fitting)))]
        problem = Problem(
            batch=batch,
            q_heads=q_heads,
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            head_dim=int(rng.choice(dims)),
            dtype=rng.choice(dtypes).item(),
            mask=rng.choice(MASKS).item(),
            inputs=kinds[len(found) % len(kinds)],
        )
        names = tuple(name for name, stage in able.items() if stage.why_not(problem) is None)
        if names:
            found.append(Case(problem, _random_layout(rng), names))
    return found


def _random_length(rng: np.random.Generator) -> int:
    if rng.random() < 0.5:
        return int(rng.choice(_EDGES))
    return int(math.exp(rng.uniform(0, math.log(_LONGEST + 1))))


def _random_layout(rng: np.random.Generator) -> str:
    steps = ((0,), (0, 8, 16), (0, 1, 2, 3, 5, 8))[int(rng.integers(3))]  # no gaps, whole chunks, anything
    places = []
    for tensor in TENSORS:
        order = "".join(rng.permutation(list("bhs"))) + "d"
        gap, offset = (int(n) for n in rng.choice(steps, 2))
        shared = "=" if tensor != "out" and rng.random() < 0.15 else ""
        places.append(f"{order}{f'+{gap}' if gap else ''}{f'@{offset}' if offset else ''}{shared}")
    return "/".join(places)


# --- What a call touched ----------------------------------------------------------------------------------------------


def _place(layout: str, tensor: str) -> re.Match[str] | None:
    """One tensor's part of a random layout; None where the layout is one of `LAYOUTS`."""
    if layout in LAYOUTS or layout in FAR_LAYOUTS:
        return None
    parts = [_PLACE.fullmatch(part) for part in layout.split("/")]
    if len(parts) != len(TENSORS) or None in parts:
        raise ParameterError(
            f"layout: wanted one of {', '.join(LAYOUTS)}, or {len(TENSORS)} places such as bshd+8@3=, got {layout!r}"
        )
    return parts[TENSORS.index(tensor)]


def laid_out(values: tuple[Any, Any, Any], layout: str, xp: Any = np) -> tuple[Any, Any, Any]:
    """q, k and v, (batch, heads, length, head_dim) each, with one head for all where the layout has them share it."""

    def shared(x: Any, tensor: str) -> Any:
        place = _place(layout, tensor)
        return x if place is None or not place["shared"] else xp.broadcast_to(x[:, :1], x.shape)

    q, k, v = (shared(x, tensor) for x, tensor in zip(values, TENSORS, strict=False))
    return q, k, v


def placement(shape: Sequence[int], layout: str, tensor: str = "out") -> dict[str, Any]:
    """How `Guarded` lays out one of `TENSORS`, of that shape."""
    place = _place(layout, tensor)
    if place is not None:
        batch, heads, length, head_dim = shape
        sizes = (batch, 1 if place["shared"] else heads, length, head_dim)
        strides = list(strides_of(sizes, row_padding=int(place["gap"] or 0), order=place["order"]))
        strides[1] = 0 if place["shared"] else strides[1]
        return {"strides": tuple(strides), "offset_words": int(place["offset"] or 0)}
    if layout in FAR_LAYOUTS:
        _, heads, _, head_dim = shape
        odd = int(layout == "far_misaligned")
        far = (heads * head_dim, head_dim, _FAR_ROW + odd, 1)
        return {"strides": far, "offset_words": odd, "sparse": True}
    if layout == "bshd":
        return {"strides": strides_of(shape, order="bshd")}
    if layout == "padded":
        return {"strides": strides_of(shape, row_padding=16 // BYTES_PER_ELEMENT)}
    if layout == "misaligned":
        return {"strides": strides_of(shape, row_padding=1), "offset_words": 1}
    return {}


def finite(verdict: CheckVerdict) -> dict[str, Any]:
    """A verdict as JSON has it: a number that is not finite is none."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(verdict).items()
    }


def damage(out: Guarded, lse: Guarded, inputs: Sequence[Guarded]) -> CheckVerdict | None:
    """The verdict on a call that wrote where it must not; None where it did not."""
    for what, buffer in (("out", out), ("lse", lse), *zip("qkv", inputs, strict=True)):
        why = buffer.why_damaged()
        if why:
            return CheckVerdict(passed=False, reason=f"{what}: {why}")
    return None


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def emulated_verdict(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    *,
    layout: str = "contiguous",
    source: Path | None = None,
    params: Mapping[str, int] | None = None,
    schedule: str = "ascending",
    races: bool = False,
    threads: int | None = None,
    timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
    cancel: threading.Event | None = None,
    judge: Callable[..., CheckVerdict] = check,
) -> tuple[CheckVerdict, Emulation]:
    """Run a stage once on the CPU between guards and say what is wrong with it.

    `values` are q, k, v as `reference.make_inputs(problem)` gives them, `layout` is one of `LAYOUTS` or a random one,
    for which `laid_out` has been asked. A finding of the detector fails the verdict where the output passes. `judge`
    stands in for `check.check`.

    Raises:
        What `attention.emulate` raises.
    """
    inputs = [Guarded.holding(x, **placement(x.shape, layout, t)) for x, t in zip(values, TENSORS, strict=False)]
    out_shape = values[0].shape
    out = Guarded.output(out_shape, problem.dtype, **placement(out_shape, layout))
    lse = Guarded.output(out_shape[:3], "float32")
    buffers = dict(zip(("q", "k", "v", "out", "lse"), (*inputs, out, lse), strict=True))
    ran = emulate(
        *(buffer.array for buffer in inputs),
        causal=problem.causal,
        stage=stage_id,
        out=out.array,
        lse=lse.array,
        source=source,
        params=params,
        schedule=schedule,
        races=races,
        threads=threads,
        timeout_s=timeout_s,
        cancel=cancel,
        surroundings={name: buffer.buffer for name, buffer in buffers.items() if not buffer.sparse},
        count_fallbacks=True,
    )
    verdict = damage(out, lse, inputs) or judge(
        out.array,
        lse.array,
        *values,
        causal=problem.causal,
        dtype=problem.dtype,
        precision=registry.get(stage_id).precision,
    )
    if verdict.passed and ran.report.findings:
        more = len(ran.report.findings) - 1
        verdict = CheckVerdict(
            **asdict(verdict)
            | {"passed": False, "reason": f"{ran.report.findings[0]}{f', and {more} more' if more else ''}"}
        )
    return verdict, ran


@dataclass(frozen=True)
class _Build:
    """What decides an executable."""

    stage: str
    source: Path | None
    variant: tuple[tuple[str, int], ...]
    head_dim: int
    dtype: str
    causal: bool
    aligned: bool
    hooks: bool

    @classmethod
    def of(cls, name: str, which: tuple[str, Path | None], case: Case, *, hooks: bool) -> _Build:
        stage_id, source = which
        problem = case.problem
        odd = re.findall(r"[+@](\d+)", case.layout)  # of a random layout
        aligned = "misaligned" not in case.layout and all(int(n) * BYTES_PER_ELEMENT % 16 == 0 for n in odd)
        variant = tuple(registry.variant_in(name).items())
        return cls(
            stage_id, source, variant, problem.head_dim, problem.dtype, problem.causal, aligned, hooks and _hooked(case)
        )

    def __call__(self) -> None:
        emulator.build_stage(
            registry.get(self.stage),
            head_dim=self.head_dim,
            dtype=self.dtype,  # type: ignore[arg-type]
            causal=self.causal,
            aligned=self.aligned,
            source=self.source,
            overrides=dict(self.variant),
            hooks=self.hooks,
        )


def _hooked(case: Case) -> bool:
    """Whether the detector can follow it: what it keeps for each byte of memory has no room for rows far apart."""
    return case.layout not in FAR_LAYOUTS


Implementations = Mapping[str, tuple[str, Path | None]]
"""By the name in a row: a stage's id, and the file that stands in for its own."""
Follow = Callable[[int, int, str], None]
"""Told of every step: how many are done, of how many, and what it was."""


def implementations(stage_ids: Sequence[str] | None, sources: Mapping[str, Path] | None) -> Implementations:
    """Stages by the names their rows have: an edited copy is `id@file`, and tunables may follow an id (`stages.parse`).

    Raises:
        UnknownStageError, ParameterError: a stage or file that is not there.
    """
    found: dict[str, tuple[str, Path | None]] = {
        name: (registry.parse(name)[0].id, None)
        for name in dict.fromkeys(registry.STAGES if stage_ids is None else stage_ids)
    }
    for stage_id, source in (sources or {}).items():
        if not source.is_file():
            raise ParameterError(f"source of {stage_id}: wanted a CUDA C++ file, got {source}, which is none")
        found[f"{registry.get(stage_id).id}@{source.stem}"] = (stage_id, source.resolve())
    return found


def build_all(
    which: Implementations, wanted: Sequence[Case], *, hooks: bool = False, follow: Follow | None = None
) -> dict[_Build, CompileError]:
    """Compile what those cases run, several at once; those that the compiler refuses come back with its error.

    Raises:
        MissingPackageError, OutputError: no compiler, or nowhere to keep what it makes.
    """
    emulator.cxx()
    builds = list(
        dict.fromkeys(
            _Build.of(name, which[name], case, hooks=hooks)
            for case in wanted
            for name in case.names
            if registry.get(which[name][0]).language == "cuda"
        )
    )
    refused: dict[_Build, CompileError] = {}
    with ThreadPoolExecutor(emulator.cores()) as pool:
        futures = {pool.submit(build): build for build in builds}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                build = futures[future]
                try:
                    future.result()
                except CompileError as error:
                    refused[build] = error
                if follow:
                    follow(done, len(builds), f"compile {build.stage} D{build.head_dim} {build.dtype} for the CPU")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return refused


def check_on_cpu(
    stage_ids: Sequence[str] | None = None,
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    layouts: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    sources: Mapping[str, Path] | None = None,
    schedules: Sequence[str] | None = None,
    races: bool = False,
    random: int = 0,
    suite: str | None = None,
    seed: int = 0,
    timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
    follow: Follow | None = None,
) -> CheckRun:
    """Compare stages with the oracle on the CPU, over lengths, masks, types, layouts and schedules that break kernels.

    Where lengths, layouts, inputs and schedules are left open, `default_cases_on_cpu` says which go together. Where one
    of them is given, every combination runs: by default of all hostile lengths, every layout (for long problems the
    first alone), normal inputs, and the first schedule. `races` also looks for races, uninitialised reads and accesses
    out of bounds; a finding is a failure. `random` replaces lengths, masks, types, layouts and head dims by so many
    `random_cases`, `suite` by the cases of one of `SUITES`, which are judged by its rule.

    Raises:
        InputError: what was asked for does not exist.
        MissingPackageError: no C++ compiler.
        OutputError: the cache cannot be written.
        KeyboardInterrupt: every worker is gone.
    """
    for schedule in schedules or ():
        emulator.schedule_item(schedule)
    which = implementations(stage_ids, sources)
    able = {name: registry.get(stage_id) for name, (stage_id, _) in which.items()}
    for values, what in ((lengths, "length"), (layouts, "layout"), (inputs, "kind of inputs"), (schedules, "schedule")):
        if values is not None and not values:
            raise ParameterError(f"wanted at least one {what}, got none")
    options: dict[str, Any] = {"dtypes": dtypes, "masks": masks, "head_dims": head_dims}
    if not (random or suite or lengths or layouts or inputs or schedules):
        wanted = default_cases_on_cpu(able, **options)
    else:
        if random:
            chosen = random_cases(able, random, seed=seed, max_scores=CPU_SCORES, inputs=inputs or (NORMAL,))
        elif suite:
            chosen = suite_cases(suite, able, on_cpu=True, **options)
        else:
            chosen = []
            through = layouts or tuple(LAYOUTS)
            for pair in lengths or HOSTILE:
                more: dict[str, Any] = {"heads": _heads_on_cpu(*pair), "inputs": inputs or (NORMAL,), **options}
                chosen += cases(able, lengths=[pair], layouts=through[:1] if is_long(*pair) else through, **more)
        wanted = [(case, schedule) for case in chosen for schedule in schedules or SCHEDULES[:1]]
    refused = build_all(which, [case for case, _ in wanted], hooks=races, follow=follow)
    cancel = threading.Event()
    made = lru_cache(maxsize=8)(lambda problem: make_inputs(problem, seed=seed))
    verdicts: dict[tuple[Problem, str, str, bytes, bytes], CheckVerdict] = {}
    rule = SUITES[suite] if suite else check

    def judge(case: Case, out: Any, lse: Any, *values: Any, **options: Any) -> CheckVerdict:
        """`check`, once for the same bits: another schedule or layout rarely changes any."""
        numbers = case.layout if "=" in case.layout else ""  # shared heads are other numbers
        key = (
            case.problem,
            numbers,
            options["precision"],
            sha256(out.tobytes()).digest(),
            sha256(lse.tobytes()).digest(),
        )
        if key not in verdicts:
            verdicts[key] = rule(out, lse, *values, **options)
        return verdicts[key]

    def run(name: str, case: Case, schedule: str) -> CheckRow:
        stage_id, source = which[name]
        error: FlashlabError | None = refused.get(_Build.of(name, which[name], case, hooks=races))
        verdict = None
        findings: tuple[str, ...] = ()
        fallbacks = None
        if error is None:
            try:
                verdict, ran = emulated_verdict(
                    stage_id,
                    case.problem,
                    laid_out(made(case.problem), case.layout),
                    layout=case.layout,
                    source=source,
                    params=registry.variant_in(name),
                    schedule=schedule,
                    races=races and _hooked(case),
                    threads=1,
                    timeout_s=timeout_s,
                    cancel=cancel,
                    judge=partial(judge, case),
                )
                fallbacks = ran.fallbacks
                findings = tuple(str(finding) for finding in ran.report.findings)
            except FlashlabError as caught:
                error = caught
        status, reason = ("ok" if verdict.passed else "wrong", verdict.reason) if verdict else status_of(error)
        return CheckRow(
            stage=name,
            problem=case.problem,
            layout=case.layout,
            status=status,
            reason=reason,
            verdict=None if verdict is None else Verdict.model_validate(finite(verdict)),
            schedule=schedule,
            findings=findings,
            fallbacks=fallbacks,
        )

    todo = [(name, case, schedule) for case, schedule in wanted for name in case.names]
    # The long ones first, so that none is left alone at the end.
    order = sorted(range(len(todo)), key=lambda index: -todo[index][1].problem.flops)
    futures: dict[Future[CheckRow], int] = {}
    rows: list[CheckRow | None] = [None] * len(todo)
    with ThreadPoolExecutor(emulator.cores()) as pool:
        try:
            futures = {pool.submit(run, *todo[index]): index for index in order}
            for done, future in enumerate(as_completed(futures), 1):
                row = rows[futures[future]] = future.result()
                if follow:
                    follow(done, len(todo), f"{row.stage} {row.problem.label} {row.layout} {row.schedule}")
        except BaseException:
            cancel.set()
            pool.shutdown(cancel_futures=True)
            raise
    return CheckRun(None, tuple(row for row in rows if row is not None))


def status_of(error: FlashlabError | None) -> tuple[str, str]:
    """A row's status and reason for an error on the CPU."""
    if isinstance(error, UnsupportedError):
        return "unsupported", str(error)
    if isinstance(error, EmulationError):
        late = error.report is not None and error.report.status == "timeout"
        return "timeout" if late else "crashed", str(error)
    if isinstance(error, CompileError):
        return "error", str(error).partition("\nCommand:")[0]
    return "error", str(error)


def emulates(problem: Problem, layout: str) -> bool:
    """Whether a case of a GPU is run on the CPU too: long problems contiguous alone, or in a random layout."""
    return problem.q_len * problem.kv_len <= MANY_SCORES or layout not in tuple(LAYOUTS)[1:]


def emulate_beside(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    out: Any,
    lse: Any,
    *,
    layout: str,
    source: Path | None = None,
    params: Mapping[str, int] | None = None,
    threads: int | None = None,
) -> EmulatorVerdict:
    """Run on the CPU what a GPU ran, and compare the two within the checker's limits.

    Of a large problem the first group of query heads is run, on the very same numbers.

    Args:
        values: q, k, v on the host, as `reference.make_inputs` gives them.
        out, lse: what the GPU made of them, on the host.
        threads: as `attention.emulate` takes it.
    """
    if problem.batch * problem.q_heads * problem.q_len * problem.kv_len > MANY_SCORES_IN_ALL:
        group = problem.q_heads // problem.kv_heads
        values = (values[0][:1, :group], values[1][:1, :1], values[2][:1, :1])
        out, lse = out[:1, :group], lse[:1, :group]
        sizes = asdict(problem) | {"batch": 1, "q_heads": group, "kv_heads": 1}
        problem = Problem(**sizes)
    judge = partial(check, oracle=Oracle())
    try:
        verdict, ran = emulated_verdict(
            stage_id,
            problem,
            values,
            layout=layout,
            source=source,
            params=params,
            threads=threads,
            judge=judge,
        )
    except FlashlabError as error:
        status, reason = status_of(error)
        return EmulatorVerdict(status=status, reason=reason, shape=problem.shape, verdict=None, agreement=None)
    agreement = judge(
        out,
        lse,
        *values,
        causal=problem.causal,
        dtype=problem.dtype,
        precision=registry.get(stage_id).precision,
        against=(ran.out, ran.lse),
    )
    reason = verdict.reason or (agreement.reason and f"chip and emulator: {agreement.reason}")
    return EmulatorVerdict(
        status="wrong" if reason else "ok",
        reason=reason,
        shape=problem.shape,
        verdict=Verdict.model_validate(finite(verdict)),
        agreement=Verdict.model_validate(finite(agreement)),
    )
