"""The autotuner: try a stage's tunables on a GPU, keep a record of every one tried, and make the table of winners.

A tuning of one stage, head dim, mask and element type goes like this:

1. Every variant is compiled, several at once. Those that a static_assert refuses, that spill or lose performance
   otherwise, cost no GPU time; their record says why. Those whose machine code another variant has too are left out.
2. The others are checked against the oracle and timed in turn, in one process, in short bursts; then the faster third
   again with more samples, and so on. The stage's defaults and the table's present choice take part in every round,
   so that every round has something to be compared with.
3. Every variant of every round is a record in data/<gpu>/tuning, losers and refused ones too.

`choices` makes the table (tuned.py) from these records and nothing else: for each key, the fastest of the newest round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from flashlab import bench, compiler, gpu, records, tables, tuned
from flashlab import stages as registry
from flashlab.errors import CompileError, NoDataError, ParameterError
from flashlab.paths import DATA, writable_dir
from flashlab.problem import FIRST_SHAPE, MASKS, DType, Mask, Problem
from flashlab.records import Tuning
from flashlab.stages import Stage

Variant = dict[str, int]
"""Every tunable of a stage and its value."""

LIMIT = 256
"""Variants of one tuning, unless more are asked for."""
_KEPT = 3
"""One in so many goes on to the next round."""
_FINALISTS = 8
"""With so many left the last round is run."""
_SAMPLES = (3, 7, 25)
"""Burst samples a round; the last number is the last round's."""
_REASON_CHARS = 600
_TASKS_AT_ONCE = 4
"""Tasks of a plan that are compiled at once, so that the last variant of one leaves no core idle."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came of one tuning."""

    key: tuned.Key
    refused: int
    """Variants that did not compile as they must."""
    twins: int
    """Variants left out since another has the same machine code."""
    rounds: tuple[Path, ...]
    """A file of records each."""


def parse_grid(stage: Stage, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=a,b,c` as values to try of a tunable.

    Raises:
        ParameterError: no such tunable, or no integers.
    """
    grid: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in stage.params:
            raise ParameterError(
                f"--param: wanted one of {', '.join(stage.params) or 'none'} of stage {stage.id}, got {name!r}"
            )
        try:
            grid[name] = tuple(dict.fromkeys(int(value) for value in values.split(",")))
        except ValueError:
            raise ParameterError(f"--param {name}: wanted integers joined by commas, got {values!r}") from None
    return grid


def read_variants(path: Path, stage: Stage, head_dim: int) -> list[Variant]:
    """Variants from a file: a JSON list of objects, tunable to value; defaults where one says nothing.

    Raises:
        ParameterError: it cannot be read, or names what the stage lacks.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError(f"--list: wanted a JSON file of variants, got {path}: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ParameterError(f'--list: wanted a list of objects such as {{"TILE_KV": 64}}, got {path}')
    return _unique(stage.parameters(head_dim, item) for item in listed)


class Task(NamedTuple):
    """An entry of a plan: what to tune, and what to try."""

    key: tuned.Key
    variants: tuple[Variant, ...]


def read_plan(path: Path) -> list[Task]:
    """Tasks from a file: a JSON list of objects with `stage`, `head_dim`, `variants` as in `read_variants`, and
    `masks` and `dtype`, both masks and float16 where it names none.

    Raises:
        ParameterError: it cannot be read, or names what there is not.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        listed = [
            (entry["stage"], int(entry["head_dim"]), entry["variants"], entry.get("masks", MASKS), entry.get("dtype"))
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f'--plan: wanted a JSON list of objects such as {{"stage": "09_wgmma", "head_dim": 64, "variants": '
            f'[{{"TILE_KV": 64}}]}}, got {path}: {error!r}'
        ) from error
    tasks = []
    for stage_id, head_dim, variants, masks, dtype in listed:
        stage = registry.get(stage_id)
        chosen = tuple(_unique(stage.parameters(head_dim, variant) for variant in variants))
        for mask in masks:
            (problem,) = problems_of(head_dim=head_dim, mask=mask, dtype=dtype or "float16")
            stage.require(problem)
            tasks.append(Task(tuned.Key(stage_id, head_dim, problem.mask, problem.dtype), chosen))
    return tasks


def variants_of(
    stage: Stage,
    head_dim: int,
    grid: Mapping[str, Sequence[int]] | None = None,
    *,
    each: bool = False,
    base: Mapping[str, int] | None = None,
    limit: int = LIMIT,
) -> list[Variant]:
    """Variants of a stage to try, the starting point first.

    Args:
        stage, head_dim: what is tuned.
        grid: values of some tunables; the others stay as `base` has them. All choices of all tunables where None.
        each: vary one tunable at a time, instead of all combinations.
        base: where to start from; the stage's defaults where None.
        limit: how many combinations are too many.

    Raises:
        ParameterError: a stage without tunables, a name or value that it cannot have, or more than `limit`.
    """
    if not stage.params:
        raise ParameterError(f"stage {stage.id} has no tunables")
    start = stage.parameters(head_dim, base)
    values = {name: tuple(param.choices) for name, param in stage.params.items()} if grid is None else dict(grid)
    if each:
        found = [start, *({**start, name: value} for name, several in values.items() for value in several)]
    else:
        total = math.prod(len(several) for several in values.values())
        if total > limit:
            raise ParameterError(
                f"wanted at most {limit} combinations of {', '.join(values)}, got {total}. --param NAME=a,b narrows "
                "them down, --each varies one tunable at a time, --limit allows more."
            )
        found = [start, *({**start, **dict(zip(values, one, strict=True))} for one in product(*values.values()))]
    return _unique(stage.parameters(head_dim, variant) for variant in found)


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    return list({tuple(sorted(variant.items())): variant for variant in variants}.values())


class Compiled(NamedTuple):
    """The variants that can be timed, and those that cannot."""

    good: tuple[Variant, ...]
    refused: tuple[tuple[Variant, str], ...]
    """With the reason."""
    twins: tuple[Variant, ...]
    """Same machine code as one of the good."""


def compile_variants(
    stage: Stage,
    variants: Sequence[Variant],
    *,
    head_dim: int,
    causal: bool,
    dtype: DType,
    arch: str,
    progress: Callable[[str], None] = lambda text: None,
) -> Compiled:
    """Compile them all, several at once, so that the timing finds them in the cache.

    Raises:
        As `compiler.compile_many`: UnsupportedError, ParameterError, MissingPackageError, OutputError.
    """
    jobs = [
        compiler.Job(stage=stage, head_dim=head_dim, dtype=dtype, causal=causal, arch=arch, overrides=variant)
        for variant in variants
    ]
    outcomes = compiler.compile_many(jobs, progress=lambda job, _: progress(job.label))
    good: dict[str, Variant] = {}
    refused: list[tuple[Variant, str]] = []
    twins: list[Variant] = []
    for variant, outcome in zip(variants, outcomes, strict=True):
        if isinstance(outcome, CompileError):
            refused.append((variant, _why(outcome)))
        elif outcome.sha256 in good:
            twins.append(variant)
        else:
            good[outcome.sha256] = variant
    return Compiled(tuple(good.values()), tuple(refused), tuple(twins))


def _why(error: CompileError) -> str:
    """What the compiler said, without command and log."""
    text = str(error).partition("\nEquivalent command:")[0]
    return " ".join(text.split())[:_REASON_CHARS]


def problems_of(*, head_dim: int, mask: Mask, dtype: DType, shapes: Sequence[str] | None = None) -> tuple[Problem, ...]:
    """The problems of one tuning: the shapes, or the first one of the suites, with that head dim.

    Raises:
        ParameterError: a shape of another head dim.
    """
    if shapes is None:
        first = Problem.parse(FIRST_SHAPE)
        shapes = (f"{first.batch}x{first.q_heads}x{first.q_len}x{head_dim}",)
    problems = tuple(Problem.parse(shape, dtype=dtype, mask=mask) for shape in shapes)
    for problem in problems:
        if problem.head_dim != head_dim:
            raise ParameterError(f"--shape: wanted head dim {head_dim}, got {problem.shape}")
    return problems


Timing = Callable[..., Path]
"""As `bench.time_variants`."""


def tune(
    stage_id: str,
    *,
    head_dim: int,
    mask: Mask,
    dtype: DType = "float16",
    variants: Sequence[Variant] | None = None,
    grid: Mapping[str, Sequence[int]] | None = None,
    each: bool = False,
    limit: int = LIMIT,
    shapes: Sequence[str] | None = None,
    data: Path = DATA,
    device: int = 0,
    arch: str | None = None,
    slug: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
    progress: bench.Report | None = None,
    timing: Timing = bench.time_variants,
) -> Tuned:
    """Tune a stage for one head dim, mask and element type, and record every variant.

    Args:
        stage_id: the stage.
        head_dim, mask, dtype: what for.
        variants: what to try; from `grid`, `each` and `limit` (see `variants_of`) where None.
        shapes: on which problems; the suites' first where None. With several, the geometric mean of the times decides.
        data, device: where records go, and the GPU's index.
        arch, slug: the GPU's architecture and folder; asked of the GPU where None.
        announce: told of each variant that is compiled, and of each round.
        progress: as `bench.time_variants` takes it.
        timing: in place of `bench.time_variants`.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError: what was asked for does not exist.
        CompileError: no variant compiles.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    stage = registry.get(stage_id)
    problems = problems_of(head_dim=head_dim, mask=mask, dtype=dtype, shapes=shapes)
    arch, slug = gpu.arch_and_slug(device, arch, slug)
    for problem in problems:
        stage.require(problem, arch)
    causal = mask == "causal"
    key = tuned.Key(stage_id, head_dim, mask, dtype)
    stay = _staying(key, slug, data)
    if variants is None:
        variants = variants_of(stage, head_dim, grid, each=each, base=stay[-1], limit=limit)
    compiled = compile_variants(
        stage,
        _unique([*stay, *variants]),
        head_dim=head_dim,
        causal=causal,
        dtype=dtype,
        arch=arch,
        progress=announce,
    )
    if not compiled.good:
        raise CompileError(
            f"{stage_id}: no variant of {len(variants)} compiles, the first because of {compiled.refused[0][1]}",
            command="",
            log="",
        )
    left = list(compiled.good)
    rounds: list[Path] = []
    while True:
        last = len(left) <= _FINALISTS + len(stay)
        samples = _SAMPLES[-1] if last else _SAMPLES[min(len(rounds), len(_SAMPLES) - 2)]
        announce(f"round {len(rounds) + 1}: {len(left)} variants, {samples} samples each")
        path = timing(
            stage_id,
            left,
            problems,
            data=data,
            device=device,
            plan=_plan(samples),
            progress=progress,
        )
        found, _ = records.read_tunings(path)
        if not rounds:
            _record_refused(path, found, compiled.refused, problems)
            records.write_checksums(slug, data)
        rounds.append(path)
        ranked = rank(found, problems)
        if last or not ranked:
            break
        kept = max(_FINALISTS, len(left) // _KEPT)
        left = _unique([*ranked[:kept], *(variant for variant in ranked if variant in stay)])
    return Tuned(
        key=key,
        refused=len(compiled.refused),
        twins=len(compiled.twins),
        rounds=tuple(rounds),
    )


def _plan(samples: int) -> bench.Plan:
    return bench.Plan(
        samples=samples,
        min_samples=min(3, samples),
        cold_samples=0,
        cap_s=1.0,
        sustained_seconds=0.0,
        checked_scores=1 << 26,
    )


def _staying(key: tuned.Key, slug: str, data: Path) -> list[Variant]:
    """What takes part in every round: the defaults and the table's present choice, which comes last."""
    stage = registry.get(key.stage)
    # Records may go elsewhere than the table comes from.
    tables_in = data if tuned.path_of(slug, data).exists() else DATA
    present = tuned.parameters(
        stage, slug, head_dim=key.head_dim, causal=key.mask == "causal", dtype=key.dtype, data=tables_in
    )
    return _unique([stage.parameters(key.head_dim), stage.parameters(key.head_dim, present)])


def tune_all(
    tasks: Sequence[Task],
    *,
    data: Path = DATA,
    device: int = 0,
    arch: str | None = None,
    slug: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
    progress: bench.Report | None = None,
    timing: Callable[..., Path] = bench.time_tasks,
) -> list[Tuned]:
    """`tune` for several short lists: everything is compiled first, then one worker times all, a single round each.

    Args:
        tasks: what to tune, each key once.
        data, device, arch, slug, announce, progress: as `tune` takes them.
        timing: in place of `bench.time_tasks`.

    Raises:
        As `tune`; a task whose stage this GPU does not run, or of which nothing compiles, is announced and left out.
    """
    arch, slug = gpu.arch_and_slug(device, arch, slug)
    jobs = []
    for key, variants in tasks:
        stage = registry.get(key.stage)
        problems = problems_of(head_dim=key.head_dim, mask=key.mask, dtype=key.dtype)
        stage.require(problems[0])
        if arch not in stage.archs:
            announce(f"{_title(key)}: left out, {stage.id} needs {stage.needs} and this GPU is {arch}")
            continue
        how: dict[str, Any] = {"head_dim": key.head_dim, "causal": key.mask == "causal", "dtype": key.dtype}
        tried = _unique([*_staying(key, slug, data), *variants])
        jobs.append((key, problems, partial(compile_variants, stage, tried, **how, arch=arch)))
    if not jobs:
        raise ParameterError(f"wanted a stage to tune that runs on {arch}, got none")
    found: list[tuple[tuned.Key, Compiled, tuple[Problem, ...]]] = []
    with ThreadPoolExecutor(_TASKS_AT_ONCE) as pool:
        for (key, problems, _), compiled in zip(jobs, pool.map(lambda job: job[2](), jobs), strict=True):
            announce(f"{_title(key)}: {len(compiled.good)} variants, {len(compiled.refused)} refused")
            if compiled.good:
                found.append((key, compiled, problems))
    if not found:
        raise ParameterError("wanted at least one variant that compiles, got none")
    path = timing(
        [bench.Task(key.stage, compiled.good, problems) for key, compiled, problems in found],
        data=data,
        device=device,
        plan=_plan(_SAMPLES[-1]),
        progress=progress,
    )
    read, _ = records.read_tunings(path)
    done = []
    for key, compiled, problems in found:
        own = [one for one in read if (one.stage, one.problem.problem()) == (key.stage, problems[0])]
        _record_refused(path, own, compiled.refused, problems)
        done.append(Tuned(key=key, refused=len(compiled.refused), twins=len(compiled.twins), rounds=(path,)))
    records.write_checksums(slug, data)
    return done


def _record_refused(
    path: Path, found: Sequence[Tuning], refused: Sequence[tuple[Variant, str]], problems: Sequence[Problem]
) -> None:
    """Add the variants that did not compile to a round's records."""
    if not found:
        return
    for variant, reason in refused:
        for problem in problems:
            line = found[0].model_dump() | {
                "problem": records.ProblemFields.of(problem).model_dump(),
                "parameters": variant,
                "status": "error",
                "reason": reason,
                "verdict": None,
                "samples": (),
                "cubin": None,
            }
            records.append(path, Tuning.model_validate(line))


def times_us(found: Iterable[Tuning], problems: Sequence[Problem]) -> dict[tuple[tuple[str, int], ...], float]:
    """Geometric mean over the problems of the median times, by variant (its sorted items) that is right on all."""
    medians: dict[tuple[tuple[str, int], ...], dict[Problem, float]] = {}
    for record in found:
        samples = record.samples_of()
        if record.status == "ok" and samples is not None:
            key = tuple(sorted(record.parameters.items()))
            medians.setdefault(key, {})[record.problem.problem()] = samples.median_us
    return {
        key: math.exp(math.fsum(math.log(times[problem]) for problem in problems) / len(problems))
        for key, times in medians.items()
        if all(problem in times for problem in problems)
    }


def rank(found: Iterable[Tuning], problems: Sequence[Problem]) -> list[Variant]:
    """The variants that are right, fastest first."""
    times = times_us(found, problems)
    return [dict(key) for key in sorted(times, key=lambda key: times[key])]


# --- The table --------------------------------------------------------------------------------------------------------


def choices(gpu_slug: str, data: Path = DATA) -> dict[tuned.Key, tuned.Choice]:
    """The winner of each key's newest round, from the records alone.

    Raises:
        NoDataError: no tuning of that GPU is on record.
    """
    found = records.tunings(gpu_slug, data)
    if not found:
        raise NoDataError(
            f"wanted tuning records of GPU {gpu_slug!r} under {data / gpu_slug / 'tuning'}, found none. "
            "`flashlab tune` on such a GPU makes some."
        )
    rounds: dict[tuned.Key, dict[str, list[Tuning]]] = {}
    for record in found:
        key = tuned.Key(record.stage, record.problem.head_dim, record.problem.mask, record.problem.dtype)
        rounds.setdefault(key, {}).setdefault(record.run, []).append(record)
    chosen: dict[tuned.Key, tuned.Choice] = {}
    for key in sorted(rounds):
        for run in sorted(rounds[key], reverse=True):
            of_run = rounds[key][run]
            problems = tuple(dict.fromkeys(record.problem.problem() for record in of_run))
            ranked = rank(of_run, problems)
            if ranked:
                chosen[key] = tuned.Choice(ranked[0], run, tuple(problem.shape for problem in problems))
                break
    return chosen


def table_text(chosen: Mapping[tuned.Key, tuned.Choice]) -> str:
    """The text of a GPU's tuned.json."""
    entries = [{**key._asdict(), **choice._asdict()} for key, choice in sorted(chosen.items())]
    return json.dumps(entries, indent=2) + "\n"


def write_table(gpu_slug: str, data: Path = DATA) -> Path:
    """Write data/<gpu>/tuned.json from the records.

    Raises:
        NoDataError: there are none.
        OutputError: it cannot be written.
    """
    text = table_text(choices(gpu_slug, data))
    path = tuned.path_of(gpu_slug, data)
    writable_dir(path.parent, "records")
    path.write_text(text, encoding="utf-8")
    records.write_checksums(gpu_slug, data)
    return path


# --- What each lever did ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant on one key: how it did beside the stage's defaults in the same round."""

    key: tuned.Key
    parameters: Mapping[str, int]
    status: records.Status
    reason: str
    median_us: float | None
    speedup: float | None
    """Time of the defaults over its own, in the round that gave it most samples; None without either."""
    samples: int
    run: str
    commit: str
    dirty: bool


def trials(found: Iterable[Tuning]) -> list[Trial]:
    """Every variant on record, once a problem: where it got most samples, and of those the newest."""
    by_run: dict[tuple[tuned.Key, str, Problem], list[Tuning]] = {}
    for record in found:
        key = tuned.Key(record.stage, record.problem.head_dim, record.problem.mask, record.problem.dtype)
        by_run.setdefault((key, record.run, record.problem.problem()), []).append(record)
    best: dict[tuple[tuned.Key, Problem, tuple[tuple[str, int], ...]], Trial] = {}
    for (key, run, problem), of_run in sorted(by_run.items(), key=lambda item: item[0][1]):
        stage = registry.RUNGS.get(key.stage)
        defaults = None if stage is None else stage.parameters(key.head_dim)
        start = next((r.samples_of() for r in of_run if r.parameters == defaults and r.status == "ok"), None)
        for record in of_run:
            samples = record.samples_of()
            trial = Trial(
                key=key,
                parameters=record.parameters,
                status=record.status,
                reason=record.reason,
                median_us=samples.median_us if samples else None,
                speedup=start.median_us / samples.median_us if start and samples else None,
                samples=len(samples.time_us) if samples else 0,
                run=run,
                commit=record.source.commit,
                dirty=record.source.dirty,
            )
            place = (key, problem, tuple(sorted(record.parameters.items())))
            before = best.get(place)
            if before is None or trial.samples >= before.samples:
                best[place] = trial
    return list(best.values())


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One value of one tunable: how far it gets with the best of everything else tried."""

    key: tuned.Key
    name: str
    value: int
    best: float | None
    """Speed of the fastest variant that has it, over the defaults; None where none of them ran."""
    tried: int
    """Variants that have it, refused ones among them."""


def levers(found: Iterable[Trial]) -> list[Lever]:
    """What each value of each tunable got, by key, for those of which more than one value was tried."""
    grouped: dict[tuned.Key, list[Trial]] = {}
    for trial in found:
        grouped.setdefault(trial.key, []).append(trial)
    result: list[Lever] = []
    for key, of_key in grouped.items():
        names = dict.fromkeys(name for trial in of_key for name in trial.parameters)
        for name in names:
            values = sorted({trial.parameters[name] for trial in of_key if name in trial.parameters})
            if len(values) < 2:
                continue
            for value in values:
                having = [trial for trial in of_key if trial.parameters.get(name) == value]
                speeds = [trial.speedup for trial in having if trial.speedup is not None]
                result.append(Lever(key=key, name=name, value=value, best=max(speeds, default=None), tried=len(having)))
    return result


# --- Pages ------------------------------------------------------------------------------------------------------------

NOTHING_YET = (
    "**Nothing has been measured yet.** No tuning is on record for this GPU; `flashlab tune STAGE` on it makes one."
)


def _found(gpu_slug: str | None, data: Path) -> list[Trial]:
    return trials(records.tunings(gpu_slug or "", data))


def _title(key: tuned.Key) -> str:
    return f"{key.stage}, D={key.head_dim}, {key.mask}, {key.dtype}"


def _text(parameters: Mapping[str, int], beside: Mapping[str, int] | None = None) -> str:
    """Tunables as text, those alone that differ where there is something to differ from."""
    shown = {name: value for name, value in parameters.items() if beside is None or beside.get(name) != value}
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "the defaults"


def winners_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """The choice for every key, what it gains over the defaults and the run that says so, as a Markdown table."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    rows: list[list[tables.Cell]] = []
    for key, choice in choices(gpu_slug or "", data).items():
        own = [trial for trial in found if trial.key == key and trial.parameters == choice.parameters]
        gain = next((trial.speedup for trial in own if trial.speedup is not None), None)
        stage = registry.RUNGS.get(key.stage)
        defaults = stage.parameters(key.head_dim) if stage else None
        rows.append(
            [
                key.stage,
                f"D={key.head_dim}",
                key.mask,
                key.dtype,
                _text(choice.parameters, defaults),
                None if gain is None else f"{gain:.3f}",
                str(sum(trial.key == key for trial in found)),
                choice.run,
            ]
        )
    header = ("stage", "head dim", "mask", "type", "differs from the defaults", "times faster", "tried", "run")
    return tables.markdown(header, rows, left=5)


def levers_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """How far each value of each tunable gets with the best of the others, as a Markdown table for each key."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    text: list[str] = []
    every = levers(found)
    for key in sorted({lever.key for lever in every}):
        rows: list[list[tables.Cell]] = []
        for name in dict.fromkeys(lever.name for lever in every if lever.key == key):
            of_name = [lever for lever in every if (lever.key, lever.name) == (key, name)]
            said = ", ".join(
                f"{lever.value}: {'does not run' if lever.best is None else f'{lever.best:.3f}'}" for lever in of_name
            )
            reached = [lever.best for lever in of_name if lever.best is not None]
            spread = f"{100 * (max(reached) / min(reached) - 1):.1f} %" if reached else None
            rows.append([name, said, spread])
        header = ("tunable", "value: best speed with it, the defaults being 1", "worth")
        text.append(f"### {_title(key)}\n\n{tables.markdown(header, rows, left=2)}")
    return "\n".join(text)


def trials_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """Every variant on record, the fastest first and the refused last, folded away, as Markdown for each key."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    text: list[str] = []
    for key in sorted({trial.key for trial in found}):
        of_key = [trial for trial in found if trial.key == key]
        of_key.sort(key=lambda trial: (-(trial.speedup or 0.0), trial.median_us or math.inf))
        rows: list[list[tables.Cell]] = [
            [
                _text(trial.parameters),
                None if trial.median_us is None else f"{trial.median_us:.1f}",
                None if trial.speedup is None else f"{trial.speedup:.3f}",
                str(trial.samples),
                trial.status if trial.status == "ok" else f"{trial.status}: {trial.reason[:160]}",
                trial.run,
            ]
            for trial in of_key
        ]
        header = ("variant", "µs", "times faster than the defaults", "samples", "outcome", "run")
        body = tables.markdown(header, rows).replace("\n", "\n    ").rstrip()
        text.append(f'??? note "{_title(key)}: {len(of_key)} variants"\n\n    {body}\n')
    return "\n".join(text)
