"""Benchmarks: checks and times stages and libraries on a GPU, in a worker process, and records the results.

`measure` is shared by everything that compares implementations on problems: `run`, the autotuner (tune.py), ablations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from flashlab.build import compiler, triton_code
from flashlab.build.parallel import Follow, ignore
from flashlab.core.arithmetic import several
from flashlab.core.errors import CompileError, MissingPackageError, ParameterError, refuse_unknown
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.paths import writable_dir
from flashlab.core.problem import Cache, Problem
from flashlab.kernels import peers as libraries
from flashlab.kernels import registry
from flashlab.kernels.registry import Implementation
from flashlab.measure import ceilings as limits
from flashlab.measure import timer as timing
from flashlab.measure.cells import Cell, supervise
from flashlab.measure.harness import Book, Message
from flashlab.measure.options import OPTIONS, PLAN, STEP_CALLS
from flashlab.measure.options import Options as Options
from flashlab.measure.options import Plan as Plan
from flashlab.measure.options import plan_of as plan_of
from flashlab.query.rows import grouped
from flashlab.record import provenance, schema, store
from flashlab.record.schema import Ablation, Ceiling, Measurement, Part, Tuning
from flashlab.run import choice, gpu

T = TypeVar("T", bound=schema.Base)
Schema = type[Measurement] | type[Tuning] | type[Ablation] | type[Part]
_WITH_LSE = "+lse"
"""Suffix of the name of a stage's second row, which is timed with the log-sum-exp."""


def measure(
    kind: Schema,
    implementations: Mapping[str, Implementation],
    cells: Sequence[tuple[Problem, Sequence[str]]],
    *,
    plan: Plan,
    options: Options,
    ceilings: Sequence[str] = (),
) -> Path:
    """Check and time implementations in worker processes, and append a record of the given kind for each.

    Args:
        cells: problems, and the names of the implementations compared on each: checked, then timed interleaved.
        ceilings: limits of the GPU, measured first.

    Returns:
        The file of records. machine.json and CHECKSUMS are brought up to date even if this raises.

    Raises:
        OutputError: the folder is not writable; raised before any GPU work.
        ParameterError: there is nothing to measure, or a stage lacks a tunable.
        NoGpuError, MissingPackageError, UnsupportedError: the worker cannot run here.
        LaunchError: the worker does not start, or another process measures on the GPU.
    """
    for implementation in implementations.values():
        if implementation.kind == "stage":
            implementation.stage.parameters(implementation.stage.head_dims[0], implementation.params)
    if not ceilings and not any(names for _, names in cells):
        raise ParameterError(
            f"wanted at least one implementation and problem, got {len(implementations)} and {len(cells)}"
        )
    with Book(options.data, store.FOLDERS[kind]) as book:

        def append(cell: Cell, name: str, row: Message) -> None:
            record: schema.Base | None = None
            if cell.problem is not None:
                record = _record(kind, book.header(), implementations[name], cell.problem, row)
            elif row["status"] == "ok":
                fields = {key: row[key] for key in ("name", "unit", "value", "how", "samples")}
                record = Ceiling.model_validate({**book.header(), "kind": "ceiling", **fields})
            if record is None:
                options.note(f"{cell.label}: {name} not measured: {row['status']}: {row['reason']}")
            else:
                store.append(book.path, record)

        wanted = [Cell(None, list(ceilings)), *(Cell(problem, list(names)) for problem, names in cells)]
        supervise(wanted, book, options, {"plan": asdict(plan)}, implementations, append)
        return book.path


def _record(
    schema: Schema, header: Message, implementation: Implementation, problem: Problem, row: Message
) -> Measurement | Tuning | Ablation | Part | None:
    """Convert a worker's row to a record; None if it has none."""
    fields: Message = {"verdict": None, "samples": (), "cubin": None, **row}
    if schema is Part:
        if row["status"] != "ok":
            return None
        (fields["samples"],), fields["parameters"] = row["samples"], row["cubin"]["parameters"]
    elif schema is not Measurement:
        fields["parameters"] = (
            implementation.stage.parameters(problem.head_dim, implementation.params)
            if implementation.kind == "stage"
            else {}
        )
    fields |= {**header, **implementation.record, "problem": problem}
    return schema.model_validate({name: value for name, value in fields.items() if name in schema.model_fields})


# --- A run ------------------------------------------------------------------------------------------------------------


def implementations_of(
    problems: Sequence[Problem],
    stages: Sequence[str] | None,
    peers: Sequence[str] | None,
    sources: Mapping[str, Path] | None = None,
    plan: Plan = PLAN,
) -> dict[str, Implementation]:
    """Stages, as in `registry.implementations`, and libraries, by the names of their records.

    Args:
        peers: default: those for the problems.

    Raises:
        UnknownStageError, ParameterError: an unknown name or missing file, nothing to measure, or a plan that names
            other implementations.
    """
    named = {
        name: replace(of_stage, record={"name": name, "kind": "stage", "lse": False})
        for name, of_stage in registry.implementations(stages, sources).items()
    }
    for name in libraries.default_names(problems) if peers is None else peers:
        named[name] = Implementation(kind="peer", id=libraries.get(name).name, record={"name": name, "kind": "peer"})
    if not named and problems:
        raise ParameterError("wanted at least one stage or peer to measure, got none")
    if unknown := [name for name in plan.sustained_names or () if name not in named]:
        raise ParameterError(f"sustained: wanted names among {', '.join(named)}, got {', '.join(unknown)}")
    return named


def run(
    problems: Sequence[Problem],
    *,
    stages: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    sources: Mapping[str, Path] | None = None,
    only: Callable[[Problem, str], bool] | None = None,
    plan: Plan = PLAN,
    ceilings: bool | Sequence[str] = True,
    options: Options = OPTIONS,
) -> Path | None:
    """Check and time stages and libraries on each problem, and append the records to data/<gpu>/runs/<run>.jsonl.

    Compiles first, on all cores. With `resume` in the options, measurements on record are skipped (`_left`,
    `ceilings_left`).

    Args:
        problems: see `problem.suite`.
        stages, peers, sources: as in `implementations_of`; none if empty.
        only: predicate on (problem, name); default: every implementation on every problem.
        ceilings: True for all, False for none, or names.

    Returns:
        The file of records; None if everything is on record.

    Raises:
        FlashlabError: as `measure` does; UnknownStageError, ParameterError: invalid names, before any GPU work.
    """
    named = implementations_of(problems, stages, peers, sources, plan)
    wanted = list(limits.CEILINGS if ceilings is True else ceilings or ())
    refuse_unknown("ceiling", limits.CEILINGS, *wanted)
    if not problems and not wanted:
        raise ParameterError("wanted at least one problem or ceiling to measure, got none")
    if problems and {of.kind for of in named.values()} == {"stage"}:
        registry.able([of.stage for of in named.values()], problems)
    names = {at: [name for name in named if only is None or only(at, name)] for at in problems}
    if options.resume:
        names, wanted = _left(names, named, plan, options), ceilings_left(wanted, options)
        every = dict.fromkeys(name for some in names.values() for name in some)
        where = several(len(names), "problem")
        said = f"no record of this code and software has {', '.join(every)} at {where}: measured now"
        options.note(said if names else "all of it is on record; nothing was measured")
        if not names and not wanted:
            return None
    second = {
        f"{name}{_WITH_LSE}": replace(implementation, lse_of=name, record={**implementation.record, "lse": True})
        for name, implementation in named.items()
        if plan.lse and implementation.kind == "stage"
    }
    cells = [
        (problem, [*some, *(twin for twin, implementation in second.items() if implementation.lse_of in some)])
        for problem, some in names.items()
    ]
    writable_dir(options.data, "records")  # known before minutes of compiling
    compile_ahead(named, cells, options.device)
    return measure(Measurement, named | second, cells, plan=plan, options=options, ceilings=wanted)


def compile_ahead(
    named: Mapping[str, Implementation],
    cells: Sequence[tuple[Problem, Sequence[str]]],
    device: int,
    *,
    aligned: Sequence[bool] = (True,),
) -> None:
    """Compile everything that stages need at their problems into the cache, on all cores; workers compile sequentially.

    Compile errors are ignored: the worker records them.
    """
    if gpu.available():
        return  # the worker says better why
    here = gpu.info(device)
    with contextlib.suppress(MissingPackageError):  # no compiler: the worker says so of every stage
        compile_for(named, cells, arch=here.arch, slug=here.slug, aligned=aligned)


def compile_for(
    named: Mapping[str, Implementation],
    cells: Sequence[tuple[Problem, Sequence[str]]],
    *,
    arch: str,
    slug: str | None,
    aligned: Sequence[bool] = (True,),
    line_info: bool = False,
    progress: Follow = ignore,
) -> dict[tuple[Problem, str], compiler.Cubin | CompileError]:
    """Compile as `compile_ahead` does, for any GPU, whose table `slug` completes the tunables; None for no table.

    Returns:
        Machine code by problem and name, for supported problems, with the first value of `aligned`.

    Raises:
        MissingPackageError: there is no compiler.
    """
    jobs: dict[str, compiler.Job] = {}
    labels: dict[tuple[Problem, str], str] = {}
    for problem, names in cells:
        for name, implementation in (
            (name, named[name]) for name in names if name in named and named[name].kind == "stage"
        ):
            stage = implementation.stage
            if (stage.language == "triton" and triton_code.missing()) or stage.why_not(problem, arch):
                continue
            how = {
                "overrides": choice.parameters(stage, slug, problem, arch=arch, overrides=implementation.params),
                "source": implementation.source,
                "may_spill": implementation.may_spill,
                "line_info": line_info,
            }
            for rows in aligned:
                job = compiler.Job.of(stage, problem, arch=arch, aligned=rows, **how)
                jobs.setdefault(job.label, job)
                labels.setdefault((problem, name), job.label)

    made = dict(zip(jobs, compiler.compile_many(list(jobs.values()), follow=progress), strict=True))
    return {what: made[label] for what, label in labels.items()}


# --- What is left to do -----------------------------------------------------------------------------------------------


def _left(
    names: Mapping[Problem, Sequence[str]], named: Mapping[str, Implementation], plan: Plan, options: Options
) -> dict[Problem, list[str]]:
    """Names of a run that are not on record for this GPU, by problem.

    A measurement is on record if a clean commit made it with the same machine code or library, driver and software, in
    every state that the plan requires. Because ratios need a common run, a stage is measured with its parent and the
    libraries, and anything with the last rung.

    Raises:
        NoGpuError: there is no GPU.
        MissingPackageError: there is no compiler.
    """
    gpu.require()
    here, cells = gpu.info(options.device), list(names.items())
    code = compile_for(named, cells, arch=here.arch, slug=here.slug)
    todo = not_on_record(cells, named, on_record(Measurement, options), code, plan)
    return {at: [name for name in some if name in todo[at]] for at, some in cells if at in todo}


def stands_for(record: schema.Base, here: gpu.GpuInfo, *, same_commit: bool = False) -> bool:
    """Whether a record was made by committed code with the current driver and software.

    Args:
        same_commit: also require the current commit and GPU, for records without machine code.
    """
    software = {name: version for name, version in record.software.items() if name != provenance.UNUSED}
    if record.source.dirty or record.gpu.driver != here.record.driver or software != provenance.software():
        return False
    return not same_commit or (record.source == provenance.source() and record.gpu.fingerprint == here.fingerprint)


def on_record(kind: type[T], options: Options, *, same_commit: bool = False) -> tuple[T, ...]:
    """The records of this GPU that are still valid (`stands_for`)."""
    here = gpu.info(options.device)
    known = store.records(here.slug, kind, options.data)
    return tuple(record for record in known if stands_for(record, here, same_commit=same_commit))


def not_recorded(
    kind: type[Ablation] | type[Part] | type[Tuning],
    cells: Sequence[tuple[Problem, Sequence[str]]],
    named: Mapping[str, Implementation],
    code: Mapping[tuple[Problem, str], compiler.Cubin | CompileError],
    options: Options,
) -> list[tuple[Problem, Sequence[str]]]:
    """The cells with an implementation that is not on record with the same machine code, or all without `resume`.

    These are measured completely, because ratios need a common run.
    """
    if not options.resume:
        return list(cells)
    known = grouped(on_record(kind, options), lambda record: record.cubin and record.cubin.sha256)

    def stands(problem: Problem, name: str) -> bool:
        cubin = code.get((problem, name))
        if not isinstance(cubin, compiler.Cubin):
            return isinstance(cubin, CompileError)  # it would not compile again
        wanted = {"problem": problem, **named[name].record}
        alike = known.get(cubin.sha256, ())
        return any(all(getattr(record, key) == value for key, value in wanted.items()) for record in alike)

    return [(problem, names) for problem, names in cells if not all(stands(problem, name) for name in names)]


def ceilings_left(names: Sequence[str], options: Options) -> list[str]:
    """The ceilings among `names` that the current commit has not measured on this GPU."""
    done = {ceiling.name for ceiling in on_record(Ceiling, options, same_commit=True)}
    return [name for name in names if name not in done]


def not_on_record(
    cells: Sequence[tuple[Problem, Sequence[str]]],
    named: Mapping[str, Implementation],
    known: Sequence[Measurement],
    code: Mapping[tuple[Problem, str], compiler.Cubin | CompileError],
    plan: Plan,
) -> dict[Problem, frozenset[str]]:
    """Names of `cells` without a valid row in `known`, by problem; `code` is the current machine code of stages."""
    second = {(row.problem, row.cubin.sha256) for row in known if row.with_lse and row.cubin}

    def stands(row: Measurement, name: str) -> bool:
        implementation, problem = named[name], row.problem
        if row.status in ("unsupported", "missing"):
            return (problem, name) not in code
        states: dict[Cache, int] = {"cold": plan.cold_samples, "step": plan.step_samples}
        states["rotating"] = plan.rotates(problem)
        if row.status != "ok" or any(
            count and row.samples_of("burst", cache) is None for cache, count in states.items()
        ):
            return False
        if plan.sustains(problem, name) and row.samples_of("sustained") is None:
            return False
        cubin, sha256 = code.get((problem, name)), row.cubin and row.cubin.sha256
        same = isinstance(cubin, compiler.Cubin) and cubin.sha256 == sha256
        return implementation.kind == "peer" or (same and (not plan.lse or (problem, sha256) in second))

    first = (row for row in known if row.name in named and not row.with_lse)
    done = {(row.problem, row.name) for row in first if stands(row, row.name)}
    left = {}
    for problem, names in cells:
        lacking = {name for name in names if (problem, name) not in done}
        new = [named[name].id for name in lacking if named[name].kind == "stage"]
        parents = {registry.get(stage_id).parent for stage_id in new}
        beside = {name for name in names if new and (named[name].kind == "peer" or named[name].id in parents)}
        rungs = [name for stage_id in registry.STAGES for name in names if named[name].id == stage_id]
        beside.update([name for name in rungs if (problem, name) in code][-1:])
        if lacking:
            left[problem] = frozenset(lacking | beside)
    return left


# --- How long it will take --------------------------------------------------------------------------------------------

_STARTUP_S, _CEILING_S = 20.0, 2.0
_BUILD_S, _CHECK_S_PER_SCORE = 0.4, 0.6 / (1 << 30)
_TFLOPS = 300.0
"""Assumptions of `estimate`: time of a worker start, ceiling, build and check, and the rate of every implementation."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated time of a problem."""

    problem: Problem
    implementations: int
    """Number of implementations that support it."""
    sustained: int
    """Number of those timed under sustained load."""
    seconds: float


def estimate(
    problems: Sequence[Problem],
    *,
    stages: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    sources: Mapping[str, Path] | None = None,
    plan: Plan = PLAN,
    ceilings: bool | Sequence[str] = True,
) -> tuple[tuple[Estimate, ...], float]:
    """Estimate the time of each problem of a run, and of the whole run in seconds, without running anything.

    Every implementation is assumed to be fast: of a slow one, the time limits of a plan allow only a few samples. All
    layers of `trained` inputs together are assumed to cost as much as another kind.
    """
    named = implementations_of(problems, stages, peers, sources, plan)
    built: set[tuple[str, Problem]] = set()
    estimates = []
    for problem in problems:
        able = {name: implementation for name, implementation in named.items() if _takes(implementation, problem)}
        scores = min(plan.checks(problem), int(problem.batch * problem.q_heads * problem.visible_scores))
        call_s, long = problem.flops / _TFLOPS / 1e12, sum(plan.sustains(problem, name) for name in able)
        peers_here = {(of.id, replace(problem, inputs=NORMAL)) for of in able.values() if of.kind == "peer"}
        seconds = sum(libraries.get(name).compile_s for name, _ in peers_here - built)
        built |= peers_here
        rows = len(able) + plan.lse * (len(able) - len(peers_here))
        seconds += rows * (_BUILD_S + _CHECK_S_PER_SCORE * scores)
        seconds += rows * _burst_s(call_s, plan.samples, plan.min_samples, plan.cap_s)
        if plan.cold_samples:
            seconds += len(able) * _burst_s(call_s, plan.cold_samples, 3, plan.cap_s / 2)
        if plan.step_samples:
            seconds += len(able) * _burst_s(STEP_CALLS * call_s, plan.step_samples, plan.min_samples, plan.cap_s)
        seconds += long * (plan.sustained_seconds + 2 * timing.CHUNK_S)
        if long:  # to warm up, once or each on layers, and the fastest stage with the log-sum-exp on
            heats = long if problem.inputs == TRAINED else 1
            seconds += heats * min(2.0, plan.sustained_seconds) + (plan.sustained_seconds if plan.lse else 0.0)
        estimates.append(Estimate(problem=problem, implementations=len(able), sustained=long, seconds=seconds))
    num_ceilings = len(limits.CEILINGS) if ceilings is True else len(ceilings or ())
    return tuple(estimates), _STARTUP_S + num_ceilings * _CEILING_S + sum(estimate.seconds for estimate in estimates)


def _takes(implementation: Implementation, problem: Problem) -> bool:
    if implementation.kind == "stage":
        return implementation.stage.why_not(problem) is None
    return libraries.get(implementation.id).limits(problem) is None


def _burst_s(call_s: float, samples: int, min_samples: int, cap_s: float) -> float:
    sample_s = max(call_s, 1e-3)
    each_s = sample_s + min(max(2 * sample_s, timing.MIN_GAP_S), timing.MAX_GAP_S) + 5e-4
    return max(min(samples * each_s, cap_s), min_samples * each_s)
