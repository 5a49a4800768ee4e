"""The autotuner: try a stage's tunables on a GPU, keep a record of every one tried, and make the table of choices.

A tuning of one stage on one problem, or on several, goes like this:

1. Every variant is compiled, several at once. Those that a static_assert refuses, that spill or lose performance
   otherwise, cost no GPU time; their record says why. Those whose machine code another variant has too are left out.
2. The others are checked against the oracle and timed in turn, in one process, in short bursts; then the faster third
   again with more samples, and so on. The stage's defaults and the table's present choice take part in every round,
   so that every round has something to be compared with.
3. Every variant of every round is a record in data/<gpu>/tuning, losers and refused ones too.

A plan does this for many stages and problems in one worker and a single round; all that is tried on one problem takes
turns, whatever its stage, and with it the libraries that the plan names.

`rows` makes the table (tuned.py) from records and nothing else. Of every stage and problem it has the fastest variant
of the newest round, and what the newest run of `flashlab bench` measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from flashlab.build import compiler
from flashlab.core.errors import CompileError, NoDataError, ParameterError
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.problem import FIRST_SHAPE, MASKS, DType, Mask, Problem
from flashlab.kernels import peers, registry
from flashlab.kernels.registry import Stage, arch_for
from flashlab.measure import bench
from flashlab.record import store
from flashlab.record.store import Measurement, Samples, Tuning
from flashlab.run import choice as tuned
from flashlab.run import gpu
from flashlab.show import tables

Variant = dict[str, int]
"""Every tunable of a stage and its value."""
Items = tuple[tuple[str, int], ...]
"""A variant's names and values, sorted."""

LIMIT = 256
"""Variants of one tuning, unless more are asked for."""
_KEPT = 3
"""One in so many goes on to the next round."""
_FINALISTS = 8
"""With so many left the last round is run."""
_SAMPLES = (3, 7, 25)
"""Burst samples a round; the last number is the last round's."""
_REASON_CHARS = 600
_PLAN_CAP_S = 0.5
"""Of a plan: host time after which a variant takes no more samples than it must."""
_CHECKED_SCORES = 1 << 26
"""Scores of a problem that are compared with the oracle."""
_START_S, _EACH_S, _CHECK_S = 25.0, 0.2, 0.25
"""Assumptions of `estimate_s`: start and compilers, a variant without its check, a check of as many scores as are."""
_TASKS_AT_ONCE = 4
"""Tasks of a plan that are compiled at once, so that the last variant of one leaves no core idle."""


BESIDE = "sdpa"
"""The library that a choice is held against: torch's SDPA, with its own choice of kernels."""


class Key(NamedTuple):
    """What a variant is tried for."""

    stage: str
    problem: Problem


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What came of one tuning."""

    stage: str
    problems: tuple[Problem, ...]
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
    """An entry of a plan: what to tune, what to try, and what to time beside it."""

    key: Key
    variants: tuple[Variant, ...]
    peers: tuple[str, ...] = ()
    """Libraries, by name."""


def read_plan(path: Path) -> list[Task]:
    """Tasks from a file: a JSON list of objects with `stage`, `head_dim`, `variants` as in `read_variants`, and what
    they need not name: `shapes` (the suites' first with that head dim), `masks` (both), `dtype`, which is one or a
    list (float16), and `peers` (none).

    Raises:
        ParameterError: it cannot be read, or names what there is not.
        UnknownStageError, UnsupportedError: so does a stage.
    """
    try:
        entries = [
            (
                str(entry["stage"]),
                int(entry["head_dim"]),
                entry["variants"],
                entry.get("shapes"),
                entry.get("masks", MASKS),
                [dtype] if isinstance(dtype := entry.get("dtype", "float16"), str) else list(dtype),
                tuple(entry.get("peers", ())),
            )
            for entry in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(
            f'--plan: wanted a JSON list of objects such as {{"stage": "09_wgmma", "head_dim": 64, "variants": '
            f'[{{"TILE_KV": 64}}]}}, got {path}: {error!r}'
        ) from error
    tasks = []
    for stage_id, head_dim, variants, shapes, masks, dtypes, libraries in entries:
        stage = registry.get(stage_id)
        chosen = tuple(_unique(stage.parameters(head_dim, variant) for variant in variants))
        for name in libraries:
            peers.get(name)
        for dtype, mask in product(dtypes, masks):
            for problem in problems_of(head_dim=head_dim, mask=mask, dtype=dtype, shapes=shapes):
                stage.require(problem)
                tasks.append(Task(Key(stage.id, problem), chosen, libraries))
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


def _items(variant: Mapping[str, int]) -> Items:
    return tuple(sorted(variant.items()))


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    return list({_items(variant): variant for variant in variants}.values())


class Compiled(NamedTuple):
    """The variants that can be timed, and those that cannot."""

    good: tuple[Variant, ...]
    refused: tuple[tuple[Variant, str], ...]
    """With the reason."""
    twins: tuple[Variant, ...]
    """Same machine code as one of the good."""

    def of(self, variants: Sequence[Variant]) -> Compiled:
        """Those that are among `variants`."""
        return Compiled(
            tuple(variant for variant in self.good if variant in variants),
            tuple(one for one in self.refused if one[0] in variants),
            tuple(variant for variant in self.twins if variant in variants),
        )


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
    stay = _staying(Key(stage_id, problems[0]), arch, slug, data)
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
        found, _ = store.read_tunings(path)
        if not rounds:
            _record_refused(path, found, compiled.refused, problems)
            store.write_checksums(slug, data)
        rounds.append(path)
        ranked = rank(found, problems)
        if last or not ranked:
            break
        kept = max(_FINALISTS, len(left) // _KEPT)
        left = _unique([*ranked[:kept], *(variant for variant in ranked if variant in stay)])
    return Tuned(
        stage=stage_id,
        problems=problems,
        refused=len(compiled.refused),
        twins=len(compiled.twins),
        rounds=tuple(rounds),
    )


def _plan(samples: int, cap_s: float = 1.0) -> bench.Plan:
    return bench.Plan(
        samples=samples,
        min_samples=min(3, samples),
        cold_samples=0,
        cap_s=cap_s,
        sustained_seconds=0.0,
        checked_scores=_CHECKED_SCORES,
    )


def _staying(key: Key, arch: str, slug: str, data: Path) -> list[Variant]:
    """What takes part in every round: the defaults and the table's present choice, which comes last."""
    stage, head_dim = registry.get(key.stage), key.problem.head_dim
    # Records may go elsewhere than the table comes from.
    tables_in = data if tuned.path_of(slug, data).exists() else DATA
    present = tuned.parameters(stage, slug, key.problem, arch=arch, data=tables_in)
    return _unique([stage.parameters(head_dim), stage.parameters(head_dim, present)])


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

    What is tried on one problem takes turns, whatever its stage, together with the libraries that a task names.

    Args:
        tasks: what to tune, each key once.
        data, device, arch, slug, announce, progress: as `tune` takes them.
        timing: in place of `bench.time_tasks`.

    Raises:
        As `tune`; a task whose stage this GPU does not run, or of which nothing compiles, is announced and left out.
    """
    arch, slug = gpu.arch_and_slug(device, arch, slug)
    kinds: dict[tuple[str, int, Mask, DType], list[Task]] = {}
    for task in tasks:
        stage, problem = registry.get(task.key.stage), task.key.problem
        stage.require(problem)
        if arch not in stage.archs:
            announce(f"{_title(task.key)}: left out, {stage.id} needs {stage.needs} and this GPU is {arch}")
            continue
        kinds.setdefault((stage.id, problem.head_dim, problem.mask, problem.dtype), []).append(task)
    if not kinds:
        raise ParameterError(f"wanted a stage to tune that runs on {arch}, got none")
    tried = {
        task.key: _unique([*_staying(task.key, arch, slug, data), *task.variants])
        for of_kind in kinds.values()
        for task in of_kind
    }

    def build(kind: tuple[str, int, Mask, DType]) -> Compiled:
        stage_id, head_dim, mask, dtype = kind
        every = _unique(variant for task in kinds[kind] for variant in tried[task.key])
        how: dict[str, Any] = {"head_dim": head_dim, "causal": mask == "causal", "dtype": dtype}
        return compile_variants(registry.get(stage_id), every, **how, arch=arch)

    found: list[tuple[Task, Compiled]] = []
    with ThreadPoolExecutor(_TASKS_AT_ONCE) as pool:
        for (stage_id, head_dim, mask, dtype), compiled in zip(kinds, pool.map(build, kinds), strict=True):
            name = f"{stage_id}, D={head_dim}, {mask}, {dtype}"
            announce(f"{name}: {len(compiled.good)} variants, {len(compiled.refused)} refused")
            for task in kinds[stage_id, head_dim, mask, dtype]:
                own = compiled.of(tried[task.key])
                if own.good:
                    found.append((task, own))
    if not found:
        raise ParameterError("wanted at least one variant that compiles, got none")
    path = timing(
        [bench.Task(task.key.stage, compiled.good, (task.key.problem,), task.peers) for task, compiled in found],
        data=data,
        device=device,
        plan=_plan(_SAMPLES[-1], _PLAN_CAP_S),
        progress=progress,
    )
    read, _ = store.read_tunings(path)
    done = []
    for task, compiled in found:
        stage_id, problem = task.key
        own_rows = [one for one in read if (one.stage, one.problem.problem()) == task.key]
        _record_refused(path, own_rows, compiled.refused, (problem,))
        refused, twins = len(compiled.refused), len(compiled.twins)
        done.append(Tuned(stage=stage_id, problems=(problem,), refused=refused, twins=twins, rounds=(path,)))
    store.write_checksums(slug, data)
    return done


def estimate_s(tasks: Sequence[Task]) -> float:
    """How long a plan may take, seconds: start and compilers, then for each variant a check and its samples."""
    libraries = {(task.key.problem, name) for task in tasks for name in task.peers}
    timed = [task.key.problem for task in tasks for _ in range(len(task.variants) + 1)]  # the defaults, too
    timed += [problem for problem, _ in libraries]
    scores = (min(_CHECKED_SCORES, problem.batch * problem.q_heads * problem.visible_scores) for problem in timed)
    return _START_S + sum(_EACH_S + _CHECK_S * one / _CHECKED_SCORES for one in scores)


def _record_refused(
    path: Path, found: Sequence[Tuning], refused: Sequence[tuple[Variant, str]], problems: Sequence[Problem]
) -> None:
    """Add the variants that did not compile to a round's records."""
    if not found:
        return
    for variant, reason in refused:
        for problem in problems:
            line = found[0].model_dump() | {
                "problem": store.ProblemFields.of(problem).model_dump(),
                "parameters": variant,
                "status": "error",
                "reason": reason,
                "verdict": None,
                "samples": (),
                "cubin": None,
            }
            store.append(path, Tuning.model_validate(line))


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


def rows(gpu_slug: str, data: Path = DATA) -> list[tuned.Row]:
    """The rows of a GPU's table, from the records alone; by stage, then problem.

    Of each stage and problem the winner of the newest round that tuned it, and the newest run's measurement of it. What
    a shape, a mask and an element type do not tell apart (records on other inputs) is left out, and so is what names
    other tunables than the stage has.

    Raises:
        NoDataError: no tuning of that GPU is on record.
    """
    found = store.tunings(gpu_slug, data)
    if not found:
        raise NoDataError(
            f"wanted tuning records of GPU {gpu_slug!r} under {data / gpu_slug / 'tuning'}, found none. "
            "`flashlab tune` on such a GPU makes some."
        )
    rounds: dict[Key, dict[str, list[Tuning]]] = {}
    for record in found:
        if _fits(record.stage, record.parameters):
            rounds.setdefault(Key(record.stage, record.problem.problem()), {}).setdefault(record.run, []).append(record)
    made = []
    for key, by_run in rounds.items():
        for run in sorted(by_run, reverse=True):
            timed = [one for one in by_run[run] if one.status == "ok" and one.cubin is not None]
            if timed:
                best = min(timed, key=lambda one: _taken(one).median_us)
                made.append(_row(key, best.parameters, best, variants=len(timed)))
                break
    newest: dict[Key, tuned.Row] = {}
    for measured in _measurements(gpu_slug, data):
        cubin = measured.cubin
        if measured.status == "ok" and cubin is not None and _fits(measured.name, cubin.parameters):
            key = Key(measured.name, measured.problem.problem())
            newest[key] = _row(key, cubin.parameters, measured, variants=0)
    made += newest.values()
    return sorted((row for row in made if _plain(row.problem)), key=lambda row: (row.stage, row.problem, row.variants))


def _measurements(gpu_slug: str, data: Path) -> list[Measurement]:
    """Of all runs, the oldest first."""
    runs = store.runs(gpu_slug, data) if gpu_slug in store.gpus(data) else ()
    return [row for run in runs for row in run.measurements]


def _fits(name: str, parameters: Mapping[str, int]) -> bool:
    """Whether a record is a stage's, as it stands now."""
    stage = registry.STAGES.get(name) or registry.DEAD_ENDS.get(name)
    return stage is not None and parameters.keys() == stage.params.keys()


def _plain(problem: Problem) -> bool:
    return problem == Problem.parse(problem.shape, dtype=problem.dtype, mask=problem.mask)


def _taken(record: Tuning | Measurement) -> Samples:
    samples = record.samples_of()
    assert samples is not None, "a record that is ok has burst samples"
    return samples


def _row(key: Key, parameters: Mapping[str, int], record: Tuning | Measurement, *, variants: int) -> tuned.Row:
    assert record.cubin is not None
    time_us, tile_q = round(_taken(record).median_us, 3), record.cubin.tile_q
    return tuned.Row(key.stage, key.problem, parameters, time_us, tile_q, variants, record.run)


def table_text(arch: str, sm_count: int, made: Iterable[tuned.Row]) -> str:
    """The text of a GPU's tuned.json: a line a row, so that a change of the table can be read."""
    lines = []
    for row in made:
        entry = {"stage": row.stage, "shape": row.problem.shape, "mask": row.problem.mask, "dtype": row.problem.dtype}
        rest = {name: value for name, value in row._asdict().items() if name not in ("stage", "problem")}
        lines.append(json.dumps({**entry, **rest, "parameters": dict(row.parameters)}))
    joined = ",\n  ".join(lines)
    return f'{{\n"arch": "{arch}",\n"sm_count": {sm_count},\n"rows": [\n  {joined}\n]\n}}\n'


def table_of(gpu_slug: str, data: Path = DATA) -> str:
    """What a GPU's tuned.json has to say, by its records.

    Raises:
        NoDataError: there are none.
    """
    made = rows(gpu_slug, data)
    seen = store.tunings(gpu_slug, data)[-1].gpu
    return table_text(arch_for(seen.compute_capability), seen.sm_count, made)


def write_table(gpu_slug: str, data: Path = DATA) -> Path:
    """Write data/<gpu>/tuned.json from the records.

    Raises:
        NoDataError: there are none.
        OutputError: it cannot be written.
    """
    text = table_of(gpu_slug, data)
    path = tuned.path_of(gpu_slug, data)
    writable_dir(path.parent, "records")
    path.write_text(text, encoding="utf-8")
    store.write_checksums(gpu_slug, data)
    return path


# --- The choices, held against a library ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is chosen for a problem on record, beside the library in one process."""

    problem: Problem
    choice: tuned.Choice
    run: str
    """The newest run that timed both; empty where none did."""
    small_grids: bool
    """Whether that was a tuning, whose variants suit the problem, and not a run of `flashlab bench`."""
    time_us: float | None
    peer_us: float | None

    @property
    def ratio(self) -> float | None:
        """How many times faster than the library."""
        return self.peer_us / self.time_us if self.peer_us and self.time_us else None


def held_against(gpu_slug: str, peer: str = BESIDE, data: Path = DATA) -> list[Held]:
    """What `flashlab.attention` chooses on a GPU for every problem that a library was timed on, the worst ratio first.

    Raises:
        DamagedRecordError: the table cannot be read.
    """
    table = tuned.table(gpu_slug, data)
    if table is None:
        return []
    times: dict[Problem, dict[str, dict[tuple[str, Items], float]]] = {}
    tuning_runs = set()
    for record in store.tunings(gpu_slug, data):
        if record.status == "ok":
            tuning_runs.add(record.run)
            of_run = times.setdefault(record.problem.problem(), {}).setdefault(record.run, {})
            of_run[record.stage, _items(record.parameters)] = _taken(record).median_us
    for row in _measurements(gpu_slug, data):
        if row.status == "ok" and row.samples_of() is not None:
            of_run = times.setdefault(row.problem.problem(), {}).setdefault(row.run, {})
            of_run[row.name, _items(row.cubin.parameters if row.cubin else {})] = _taken(row).median_us
    found = []
    for problem, by_run in times.items():
        library = (peer, _items({}))
        choices = tuned.rank(problem, gpu_slug, table.arch, data=data).choices
        if not (_plain(problem) and choices and any(library in of_run for of_run in by_run.values())):
            continue
        mine = (choices[0].stage.id, _items(choices[0].parameters))
        both = [run for run, of_run in by_run.items() if mine in of_run and library in of_run]
        run = max(both, default="")
        found.append(
            Held(
                problem=problem,
                choice=choices[0],
                run=run,
                small_grids=run in tuning_runs,
                time_us=by_run[run][mine] if run else None,
                peer_us=by_run[run][library] if run else None,
            )
        )
    return sorted(found, key=lambda one: (one.ratio is None, one.ratio or 0.0, one.problem))


# --- What each lever did ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One variant on one key: how it did beside the stage's defaults in the same round."""

    key: Key
    parameters: Mapping[str, int]
    status: store.Status
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
    by_run: dict[tuple[Key, str], list[Tuning]] = {}
    for record in found:
        if record.stage not in peers.PEERS:
            by_run.setdefault((Key(record.stage, record.problem.problem()), record.run), []).append(record)
    best: dict[tuple[Key, tuple[tuple[str, int], ...]], Trial] = {}
    for (key, run), of_run in sorted(by_run.items(), key=lambda item: item[0][1]):
        stage = registry.RUNGS.get(key.stage)
        defaults = None if stage is None else stage.parameters(key.problem.head_dim)
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
            place = (key, tuple(sorted(record.parameters.items())))
            before = best.get(place)
            if before is None or trial.samples >= before.samples:
                best[place] = trial
    return list(best.values())


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One value of one tunable: how far it gets with the best of everything else tried."""

    key: Key
    name: str
    value: int
    best: float | None
    """Speed of the fastest variant that has it, over the defaults; None where none of them ran."""
    tried: int
    """Variants that have it, refused ones among them."""


def levers(found: Iterable[Trial]) -> list[Lever]:
    """What each value of each tunable got, by key, for those of which more than one value was tried."""
    grouped: dict[Key, list[Trial]] = {}
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
    return trials(store.tunings(gpu_slug or "", data))


def _title(key: Key) -> str:
    return f"{key.stage}, {key.problem.label}"


def _text(parameters: Mapping[str, int], beside: Mapping[str, int] | None = None) -> str:
    """Tunables as text, those alone that differ where there is something to differ from."""
    shown = {name: value for name, value in parameters.items() if beside is None or beside.get(name) != value}
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "the defaults"


def winners_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """What won on every problem that a stage was tuned on, and what it gains over the defaults, as a Markdown table."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    lines: list[list[tables.Cell]] = []
    for row in rows(gpu_slug or "", data):
        of_key = [trial for trial in found if trial.key == (row.stage, row.problem)]
        if not row.variants:
            continue
        own = [trial for trial in of_key if trial.parameters == row.parameters]
        gain = next((trial.speedup for trial in own if trial.speedup is not None), None)
        stage = registry.RUNGS.get(row.stage)
        defaults = stage.parameters(row.problem.head_dim) if stage else None
        lines.append(
            [
                row.stage,
                row.problem.label,
                _text(row.parameters, defaults),
                None if gain is None else f"{gain:.3f}",
                str(len(of_key)),
                row.run,
            ]
        )
    header = ("stage", "problem", "differs from the defaults", "times faster", "tried", "run")
    return tables.markdown(header, lines, left=3)


def choices_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """What is chosen for every problem that torch's SDPA was timed on, the worst first, as a Markdown table."""
    held = held_against(gpu_slug or "", data=data)
    if not held:
        return NOTHING_YET
    lines: list[list[tables.Cell]] = [
        [
            one.problem.label,
            one.choice.stage.id,
            _text(one.choice.parameters, one.choice.stage.parameters(one.problem.head_dim)),
            f"{one.choice.time_us if one.time_us is None else one.time_us:.1f}",
            None if one.peer_us is None else f"{one.peer_us:.1f}",
            None if one.ratio is None else f"{one.ratio:.2f}",
            one.run or "not in one process",
        ]
        for one in held
    ]
    header = ("problem", "stage", "differs from the defaults", "µs", "SDPA, µs", "times faster", "run")
    return tables.markdown(header, lines, left=3)


def levers_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """How far each value of each tunable gets with the best of the others, folded away, as Markdown for each key."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    text: list[str] = []
    every = levers(found)
    for key in sorted({lever.key for lever in every}):
        lines: list[list[tables.Cell]] = []
        for name in dict.fromkeys(lever.name for lever in every if lever.key == key):
            of_name = [lever for lever in every if (lever.key, lever.name) == (key, name)]
            said = ", ".join(
                f"{lever.value}: {'does not run' if lever.best is None else f'{lever.best:.3f}'}" for lever in of_name
            )
            reached = [lever.best for lever in of_name if lever.best is not None]
            spread = f"{100 * (max(reached) / min(reached) - 1):.1f} %" if reached else None
            lines.append([name, said, spread])
        header = ("tunable", "value: best speed with it, the defaults being 1", "worth")
        text.append(_folded(_title(key), tables.markdown(header, lines, left=2)))
    return "\n".join(text)


def _folded(title: str, table: str) -> str:
    body = table.replace("\n", "\n    ").rstrip()
    return f'??? note "{title}"\n\n    {body}\n'


def trials_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """Every variant on record, the fastest first and the refused last, folded away, as Markdown for each key."""
    found = _found(gpu_slug, data)
    if not found:
        return NOTHING_YET
    text: list[str] = []
    for key in sorted({trial.key for trial in found}):
        of_key = [trial for trial in found if trial.key == key]
        of_key.sort(key=lambda trial: (-(trial.speedup or 0.0), trial.median_us or math.inf))
        lines: list[list[tables.Cell]] = [
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
        text.append(_folded(f"{_title(key)}: {len(of_key)} variants", tables.markdown(header, lines)))
    return "\n".join(text)
