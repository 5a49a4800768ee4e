"""The autotuner: try a stage's tunables on a GPU, and keep a record of every one tried.

A tuning of one stage on one problem, or on several, goes like this:

1. Every variant is compiled, several at once. Those that a static_assert refuses, that spill or lose performance
   otherwise, cost no GPU time; their record says why. Those whose machine code another variant has too are left out.
2. The others are checked against the oracle and timed interleaved, in one process, in short bursts; then the faster
   third again with more samples, and so on. The stage's defaults and the table's present choice take part in every
   round, so that every round has something to be compared with.
3. Every variant of every round is a record in data/<gpu>/tuning, losers and refused ones too.

A plan does this for many stages and problems in one worker and a single round; all that is tried on one problem is
interleaved, whatever its stage, and with it the libraries that the plan names.

measure/tuned.py makes the table of choices from the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from flashlab.build.parallel import Follow, ignore
from flashlab.core.arithmetic import several
from flashlab.core.errors import CompileError, ParameterError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, MASKS, DType, Mask, Problem
from flashlab.kernels import peers, registry
from flashlab.kernels.registry import Implementation, Stage
from flashlab.measure import bench
from flashlab.measure.options import BURSTS, OPTIONS, Options, Plan
from flashlab.record import schema, store
from flashlab.record.schema import Tuning
from flashlab.run import choice, gpu

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
_PLAN = replace(BURSTS, samples=_SAMPLES[-1], step_samples=_SAMPLES[-1], checked_scores=_CHECKED_SCORES)
"""In a step where a problem has few query rows, by which `flashlab tuned` goes."""
_START_S, _EACH_S, _CHECK_S = 25.0, 0.2, 0.25
"""Assumptions of `estimate_s`: start and compilers, a variant without its check, a check of as many scores as are."""


class Key(NamedTuple):
    """What a variant is tried for."""

    stage: str
    problem: Problem


def parse_grid(stage: Stage, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=a,b,c` as values to try of a tunable; those of a name that comes again are added.

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
            grid[name] = tuple(dict.fromkeys([*grid.get(name, ()), *map(int, values.split(","))]))
        except ValueError:
            raise ParameterError(f"--param {name}: wanted integers joined by commas, got {values!r}") from None
    return grid


class Task(NamedTuple):
    """An entry of a plan: what to tune, what to try, and what to time beside it."""

    key: Key
    variants: tuple[Variant, ...]
    peers: tuple[str, ...] = ()
    """Libraries, by name."""
    refused: tuple[tuple[Variant, str], ...] = ()
    """Once it is compiled: variants that did not compile, each with the reason, which are none of `variants` then."""
    twins: tuple[Variant, ...] = ()
    """Likewise: the same machine code as one of the others."""
    rounds: tuple[Path, ...] = ()
    """Once it is timed: a file of records each."""


class _Entry(BaseModel):
    """An entry of a plan's file."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    head_dim: int
    variants: list[Variant]
    """Tunable to value; defaults where one says nothing."""
    shapes: list[str] | None = None
    masks: list[Mask] = list(MASKS)
    dtype: DType | list[DType] = "float16"
    peers: tuple[str, ...] = ()


_PLAN_FILE = TypeAdapter(list[_Entry])


def read_plan(path: Path) -> list[Task]:
    """Tasks from a file: a JSON list of objects with `stage`, `head_dim`, `variants`, which are objects of tunable to
    value, and what they need not name: `shapes` (the suites' first with that head dim), `masks` (both), `dtype`, which
    is one or a list (float16), and `peers` (none).

    Raises:
        ParameterError: it cannot be read, or names what there is not.
        UnknownStageError, UnsupportedError: so does a stage.
    """
    try:
        entries = _PLAN_FILE.validate_python(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        fault = registry.reason(error.errors()[0]) if isinstance(error, ValidationError) else error
        raise ParameterError(
            f'--plan: wanted a JSON list of objects such as {{"stage": "09_wgmma", "head_dim": 64, "variants": '
            f'[{{"TILE_KV": 64}}]}}, got {path}: {fault}'
        ) from error
    tasks = []
    for entry in entries:
        stage = registry.get(entry.stage)
        chosen = tuple(_unique(stage.parameters(entry.head_dim, variant) for variant in entry.variants))
        shapes = shapes_for(stage, entry.head_dim, entry.shapes)
        for name in entry.peers:
            peers.get(name)
        for dtype in [entry.dtype] if isinstance(entry.dtype, str) else entry.dtype:
            for mask in entry.masks:
                for problem in problems_of(head_dim=entry.head_dim, mask=mask, dtype=dtype, shapes=shapes):
                    stage.require(problem)
                    tasks.append(Task(Key(stage.id, problem), chosen, entry.peers))
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
        variants = [start, *({**start, name: value} for name, several in values.items() for value in several)]
    else:
        total = math.prod(len(several) for several in values.values())
        if total > limit:
            raise ParameterError(
                f"wanted at most {limit} combinations of {', '.join(values)}, got {total}. --param NAME=a,b narrows "
                "them down, --each varies one tunable at a time, --limit allows more."
            )
        variants = [
            start,
            *({**start, **dict(zip(values, combination, strict=True))} for combination in product(*values.values())),
        ]
    return _unique(stage.parameters(head_dim, variant) for variant in variants)


def items(variant: Mapping[str, int]) -> Items:
    """A variant as a key."""
    return tuple(sorted(variant.items()))


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    return list({items(variant): variant for variant in variants}.values())


def compile_tasks(tasks: Sequence[Task], *, arch: str, progress: Follow = ignore) -> list[Task]:
    """Compile every variant of every task on all cores, so that the timing finds them in the cache.

    Returns:
        The tasks with the variants that can be timed, and those that cannot beside them.

    Raises:
        As `bench.compile_for`.
    """
    code = bench.compile_for(*_interleaved(tasks), arch=arch, slug=None, progress=progress)
    compiled = []
    for task in tasks:
        good: dict[str, Variant] = {}
        refused: list[tuple[Variant, str]] = []
        twins: list[Variant] = []
        for variant in task.variants:
            name = registry.variant_name(task.key.stage, variant)
            outcome = code.get((task.key.problem, name))
            digest = name if outcome is None or isinstance(outcome, CompileError) else outcome.sha256
            if isinstance(outcome, CompileError):
                said = str(outcome).partition("\nEquivalent command:")[0]  # without command and log
                refused.append((variant, " ".join(said.split())[:_REASON_CHARS]))
            elif digest in good:
                twins.append(variant)
            else:  # also what cannot be compiled here: the worker says why
                good[digest] = variant
        compiled.append(task._replace(variants=tuple(good.values()), refused=tuple(refused), twins=tuple(twins)))
    return compiled


def shapes_for(stage: Stage, head_dim: int, shapes: Sequence[str] | None) -> Sequence[str]:
    """Those given, or the first one of the suites; ParameterError where the stage takes too few query rows for that."""
    if not shapes and stage.max_rows is not None and head_dim in stage.head_dims:
        wanted = f"--shape: wanted one, such as 16x32x8x1x8192x{head_dim}, for {stage.id}, which takes at most "
        raise ParameterError(f"{wanted}{stage.max_rows} query rows a K/V head, got none")
    return shapes or (f"{FIRST_SHAPE.rpartition('x')[0]}x{head_dim}",)


def problems_of(
    *, head_dim: int, mask: Mask, dtype: DType, shapes: Sequence[str], inputs: str = NORMAL
) -> tuple[Problem, ...]:
    """The problems of one tuning, each once.

    Raises:
        ParameterError: a shape of another head dim.
    """
    named = (Problem.parse(shape, dtype=dtype, mask=mask, inputs=inputs) for shape in shapes)
    problems = tuple(dict.fromkeys(named))
    for problem in problems:
        if problem.head_dim != head_dim:
            raise ParameterError(f"--shape: wanted head dim {head_dim}, got {problem.shape}")
    return problems


def tune(
    stage_id: str,
    *,
    head_dim: int,
    mask: Mask,
    dtype: DType = "float16",
    grid: Mapping[str, Sequence[int]] | None = None,
    each: bool = False,
    limit: int = LIMIT,
    shapes: Sequence[str] | None = None,
    inputs: str = NORMAL,
    options: Options = OPTIONS,
) -> list[Task]:
    """Tune a stage for one head dim, mask and element type, and record every variant; a task a problem comes back.

    Args:
        grid, each, limit: what to try, as `variants_of` takes them.
        shapes: on which problems; the suites' first where None. With several, the geometric mean of the times decides.
        inputs: what Q, K and V hold. The table is made of normal ones alone.

    Raises:
        UnknownStageError, ParameterError, UnsupportedError: what was asked for does not exist.
        CompileError: no variant compiles.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    stage = registry.get(stage_id)
    shapes = shapes_for(stage, head_dim, shapes)
    problems = problems_of(head_dim=head_dim, mask=mask, dtype=dtype, shapes=shapes, inputs=inputs)
    here = gpu.info(options.device)
    arch, slug = here.arch, here.slug
    for problem in problems:
        stage.require(problem, arch)
    stay = _staying(Key(stage_id, problems[0]), arch, slug, options.data)
    variants = variants_of(stage, head_dim, grid, each=each, base=stay[-1], limit=limit)
    tried = tuple(_unique([*stay, *variants]))
    compiled = compile_tasks(
        [Task(Key(stage_id, problem), tried) for problem in problems], arch=arch, progress=options.progress
    )
    # The same of every problem: a kernel knows no lengths.
    left, refused = compiled[0].variants, compiled[0].refused
    if not left:
        raise CompileError(
            f"{stage_id}: no variant of {len(variants)} compiles, the first because of {refused[0][1]}",
            command="",
            log="",
        )
    rounds: list[Path] = []
    while True:
        last = len(left) <= _FINALISTS + len(stay)
        samples = _SAMPLES[-1] if last else _SAMPLES[min(len(rounds), len(_SAMPLES) - 2)]
        options.note(f"round {len(rounds) + 1}: {several(len(left), 'variant')}, {samples} samples each")
        plan = replace(_PLAN, samples=samples, min_samples=min(3, samples))
        of_round = [task._replace(variants=left, refused=() if rounds else refused) for task in compiled]
        path, timed = _round(of_round, plan, options)
        rounds.append(path)
        ranked = rank(timed, problems)
        if last or not ranked:
            break
        kept = max(_FINALISTS, len(left) // _KEPT)
        left = tuple(_unique([*ranked[:kept], *(variant for variant in ranked if variant in stay)]))
    return [task._replace(rounds=tuple(rounds)) for task in compiled]


def time(tasks: Sequence[Task], *, plan: Plan, options: Options) -> Path:
    """Check and time the variants of tasks, those on one problem interleaved; the records go to data/<gpu>/tuning/.

    Returns:
        The file of `schema.Tuning`. A variant that does not compile or run costs its own rows only.

    Raises:
        As `bench.measure`; ParameterError for a tunable that a stage lacks, or no such library.
    """
    implementations, cells = _interleaved(tasks)
    return bench.measure(Tuning, implementations, cells, plan=plan, options=options)


def _interleaved(tasks: Sequence[Task]) -> tuple[dict[str, Implementation], list[tuple[Problem, list[str]]]]:
    """What stands behind each name, and the names of each problem."""
    implementations: dict[str, Implementation] = {}
    wanted: dict[Problem, dict[str, None]] = {}
    for task in tasks:
        of_task = {
            registry.variant_name(task.key.stage, variant): Implementation(
                id=task.key.stage, params=variant, record={"stage": task.key.stage}
            )
            for variant in task.variants
        }
        for name in task.peers:
            of_task[name] = Implementation(kind="peer", id=peers.get(name).name, record={"stage": name})
        implementations |= of_task
        wanted.setdefault(task.key.problem, {}).update(dict.fromkeys(of_task))
    return implementations, [(problem, list(names)) for problem, names in wanted.items()]


def _staying(key: Key, arch: str, slug: str, data: Path) -> list[Variant]:
    """What takes part in every round: the defaults and the table's present choice, which comes last."""
    stage, head_dim = registry.get(key.stage), key.problem.head_dim
    # Records may go elsewhere than the table comes from.
    tables_in = data if choice.path_of(slug, data).exists() else DATA
    present = choice.parameters(stage, slug, key.problem, arch=arch, data=tables_in)
    return _unique([stage.parameters(head_dim), stage.parameters(head_dim, present)])


def tune_all(
    tasks: Sequence[Task],
    *,
    options: Options = OPTIONS,
) -> list[Task]:
    """`tune` for several short lists: everything is compiled first, then one worker times all, a single round each.

    What is tried on one problem is interleaved, whatever its stage, with the libraries that a task names. Where the
    options say `resume`, a problem is left out of which each variant is on record with the same machine code.

    Raises:
        As `tune`; a task whose stage this GPU does not run, or of which nothing compiles, is announced and left out.
    """
    here = gpu.info(options.device)
    able = []
    for task in tasks:
        stage, problem = registry.get(task.key.stage), task.key.problem
        stage.require(problem)
        if here.arch in stage.archs:
            staying = _staying(task.key, here.arch, here.slug, options.data)
            able.append(task._replace(variants=tuple(_unique([*staying, *task.variants]))))
        else:
            options.note(
                f"{stage.id}, {problem.label}: left out, {stage.id} needs {stage.needs} and this GPU is {here.arch}"
            )
    if not able:
        raise ParameterError(f"wanted a stage to tune that runs on {here.arch}, got none")
    compiled = [built for built in compile_tasks(able, arch=here.arch, progress=options.progress) if built.variants]
    if not compiled:
        raise ParameterError("wanted at least one variant that compiles, got none")
    if options.resume:
        named, cells = _interleaved([built._replace(peers=()) for built in compiled])
        code = bench.compile_for(named, cells, arch=here.arch, slug=None)
        left = {problem for problem, _ in bench.not_recorded(Tuning, cells, named, code, options)}
        compiled = [built for built in compiled if built.key.problem in left]
        if not compiled:
            options.note("all of it is on record; nothing was measured")
            return []
    path, _ = _round(compiled, replace(_PLAN, cap_s=_PLAN_CAP_S), options)
    return [built._replace(rounds=(path,)) for built in compiled]


def _round(tasks: Sequence[Task], plan: Plan, options: Options) -> tuple[Path, tuple[Tuning, ...]]:
    """Time the variants of tasks, and add to the file what of each did not compile; the file, and what was timed."""
    if not any(plan.rotates(task.key.problem) for task in tasks):
        plan = replace(plan, step_samples=0)
    path = time(tasks, plan=plan, options=options)
    timed, _ = store.read(path, schema.Tuning)
    for task in tasks:
        like = next((row for row in timed if (row.stage, row.problem) == task.key), None)
        if like is None:
            continue
        for variant, reason in task.refused:
            nothing = {"verdict": None, "samples": (), "cubin": None, "status": "error", "reason": reason}
            line = like.model_dump() | nothing | {"problem": asdict(like.problem), "parameters": variant}
            store.append(path, Tuning.model_validate(line))
    store.write_checksums(path.parents[1].name, options.data)
    return path, timed


def estimate_s(tasks: Sequence[Task]) -> float:
    """How long a plan may take, seconds: start and compilers, then for each variant a check and its samples."""
    libraries = {(task.key.problem, name) for task in tasks for name in task.peers}
    timed = [task.key.problem for task in tasks for _ in range(len(task.variants) + 1)]  # the defaults, too
    timed += [problem for problem, _ in libraries]
    scores = (min(_CHECKED_SCORES, problem.batch * problem.q_heads * problem.visible_scores) for problem in timed)
    return _START_S + sum(_EACH_S + _CHECK_S * checked / _CHECKED_SCORES for checked in scores)


def rank(tunings: Iterable[Tuning], problems: Sequence[Problem]) -> list[Variant]:
    """The variants that are right on all problems, by the geometric mean of their median times, fastest first."""
    medians: dict[Items, dict[Problem, float]] = {}
    for record in tunings:
        samples = record.samples_of()
        if record.status == "ok" and samples is not None:
            medians.setdefault(items(record.parameters), {})[record.problem] = samples.median_us
    times = {key: geometric_mean(of.values()) for key, of in medians.items() if of.keys() >= set(problems)}
    return [dict(key) for key in sorted(times, key=lambda key: times[key])]
