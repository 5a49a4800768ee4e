"""Autotuner: times variants of stages' tunables on a GPU and records all of them.

1. Compile all variants in parallel. Those that fail a static_assert, spill or otherwise lose performance need no GPU
   time; their record has the reason. Variants with the same machine code as another are skipped.
2. Check the others against the oracle and time them in one process. Everything timed on one problem, of any stage and
   including the libraries that a plan names, is interleaved. The stage's defaults and the current choice of the table
   always take part, for comparison.
3. Record every variant in data/<gpu>/tuning, including slower and rejected ones.

measure/tuned.py builds the table of choices from the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from flashlab.build.parallel import Follow, ignore
from flashlab.core.errors import CompileError, ParameterError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA
from flashlab.core.problem import AS_IN_A_MODEL, FIRST_SHAPE, MASKS, Cache, DType, Mask, Problem
from flashlab.kernels import peers, registry
from flashlab.kernels.registry import Implementation, Stage
from flashlab.measure import bench
from flashlab.measure.options import BURSTS, OPTIONS, Options, Plan
from flashlab.record import schema, store
from flashlab.record.schema import Measurement, Samples, Tuning
from flashlab.run import choice, gpu

Variant = dict[str, int]
"""Values of all tunables of a stage."""
Items = tuple[tuple[str, int], ...]
"""Sorted names and values of a variant."""

LIMIT = 256
"""Default maximum number of variants of a tuning."""
_REASON_CHARS = 600
_CHECKED_SCORES = 1 << 26
"""Scores per problem that are compared with the oracle."""
_PLAN = replace(BURSTS, samples=25, step_samples=25, cap_s=0.5, checked_scores=_CHECKED_SCORES)
"""Includes step samples, which `flashlab tuned` uses for problems with few query rows."""
_START_S, _EACH_S, _CHECK_S = 25.0, 0.2, 0.25
"""Assumptions of `estimate_s`: start and compilation, a variant without its check, and a full check."""


class Key(NamedTuple):
    """The stage and problem for which a variant is timed."""

    stage: str
    problem: Problem


def parse_grid(stage: Stage, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse `NAME=a,b,c` options into values by tunable; repeated names add values.

    Raises:
        ParameterError: no such tunable, or values that are not integers.
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
            raise ParameterError(f"--param {name}: wanted comma-separated integers, got {values!r}") from None
    return grid


class Task(NamedTuple):
    """Stage and problem, variants, and libraries to time with them."""

    key: Key
    variants: tuple[Variant, ...]
    peers: tuple[str, ...] = ()
    """Libraries, by name."""
    refused: tuple[tuple[Variant, str], ...] = ()
    """After compilation: variants that did not compile, with reasons, removed from `variants`."""
    twins: tuple[Variant, ...] = ()
    """After compilation: variants with the same machine code as another, removed from `variants`."""
    path: Path | None = None
    """After timing: the file of records."""


class _Entry(BaseModel):
    """An entry of a plan file."""

    model_config = ConfigDict(extra="forbid")
    stage: str
    head_dim: int
    variants: list[Variant]
    """Values by tunable; missing ones are the defaults."""
    shapes: list[str] | None = None
    masks: list[Mask] = list(MASKS)
    dtype: DType | list[DType] = "float16"
    peers: tuple[str, ...] = ()


_PLAN_FILE = TypeAdapter(list[_Entry])


def read_plan(path: Path) -> list[Task]:
    """Read the tasks of a plan file: a JSON list of objects with `stage`, `head_dim` and `variants`, a list of
    objects from tunable to value, and optionally `shapes` (default: the first of the suites with that head dim),
    `masks` (both), `dtype`, one or a list (float16), and `peers` (none).

    Raises:
        ParameterError: the file cannot be read, or has an unknown name.
        UnknownStageError, UnsupportedError: a stage does not exist or support its problem.
    """
    try:
        entries = _PLAN_FILE.validate_python(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        fault = registry.reason(error.errors()[0]) if isinstance(error, ValidationError) else error
        fault = (error.strerror or error) if isinstance(error, OSError) else fault
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
    """List the variants of a stage to time, the starting point first.

    Args:
        grid: values by tunable; others stay as in `base`. Default: all values of all tunables.
        each: vary one tunable at a time instead of all combinations.
        base: the starting point; default: the stage's defaults.
        limit: maximum number of combinations.

    Raises:
        ParameterError: a stage without tunables, an invalid name or value, or more than `limit` combinations.
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
    """Convert a variant to a hashable key."""
    return tuple(sorted(variant.items()))


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    return list({items(variant): variant for variant in variants}.values())


def compile_tasks(tasks: Sequence[Task], *, arch: str, progress: Follow = ignore) -> list[Task]:
    """Compile all variants of all tasks into the cache, on all cores.

    Returns:
        The tasks, with variants that cannot be timed moved to `refused` and `twins`.

    Raises:
        FlashlabError: as `bench.compile_for` does.
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
    """The distinct problems of a tuning.

    Raises:
        ParameterError: a shape has another head dim.
    """
    named = (Problem.parse(shape, dtype=dtype, mask=mask, inputs=inputs) for shape in shapes)
    problems = tuple(dict.fromkeys(named))
    for problem in problems:
        if problem.head_dim != head_dim:
            raise ParameterError(f"--shape: wanted head dim {head_dim}, got {problem.shape}")
    return problems


def tasks_of(
    stage: Stage,
    problems: Iterable[Problem],
    grid: Mapping[str, Sequence[int]] | None = None,
    *,
    each: bool = False,
    limit: int = LIMIT,
    options: Options | None = None,
) -> list[Task]:
    """The tasks of tuning one stage at some problems.

    Args:
        grid, each, limit: the variants, as in `variants_of`.
        options: name the GPU and the records whose current choice is the starting point; None: the defaults are.

    Raises:
        ParameterError, UnsupportedError: an invalid or unsupported option.
        NoGpuError: there is no GPU.
    """
    tasks = []
    for problem in problems:
        key, base = Key(stage.id, problem), None
        if options:
            here = gpu.info(options.device)
            base = _staying(key, here.arch, here.slug, options.data)[-1]
        stage.require(problem)
        variants = variants_of(stage, problem.head_dim, grid, each=each, base=base, limit=limit)
        tasks.append(Task(key, tuple(variants)))
    return tasks


def time(tasks: Sequence[Task], *, plan: Plan, options: Options) -> Path:
    """Check and time the variants of tasks, interleaved per problem; records go to data/<gpu>/tuning/.

    Returns:
        The file of `schema.Tuning`. A variant that does not compile or run affects only its own rows.

    Raises:
        FlashlabError: as `bench.measure` does; ParameterError for an unknown tunable or library.
    """
    implementations, cells = _interleaved(tasks)
    return bench.measure(Tuning, implementations, cells, plan=plan, options=options)


def _interleaved(tasks: Sequence[Task]) -> tuple[dict[str, Implementation], list[tuple[Problem, list[str]]]]:
    """The implementations by name, and the names of each problem."""
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
    """Variants that always take part: the defaults, then the current choice of the table."""
    stage, head_dim = registry.get(key.stage), key.problem.head_dim
    # Records may go elsewhere than the table comes from.
    tables_in = data if choice.path_of(slug, data).exists() else DATA
    present = choice.parameters(stage, slug, key.problem, arch=arch, data=tables_in)
    return _unique([stage.parameters(head_dim), stage.parameters(head_dim, present)])


def tune(tasks: Sequence[Task], *, options: Options = OPTIONS) -> list[Task]:
    """Tune several tasks: compile everything first, then time all in one worker, and record every variant.

    Everything timed on a problem, including the libraries of its tasks, is interleaved. With `resume` in the options,
    problems whose variants are all on record with the same machine code are skipped. A task that this GPU does not
    support is skipped with a note, one without a variant that compiles silently.

    Raises:
        ParameterError: no stage runs on this GPU.
        CompileError: no variant compiles.
        NoGpuError, LaunchError, MissingPackageError, OutputError: see there.
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
                f"{stage.id}, {problem.label}: skipped, {stage.id} needs {stage.needs} and this GPU is {here.arch}"
            )
    if not able:
        raise ParameterError(f"wanted a stage to tune that runs on {here.arch}, got none")
    built = compile_tasks(able, arch=here.arch, progress=options.progress)
    compiled = [task for task in built if task.variants]
    if not compiled:
        raise CompileError(
            f"{built[0].key.stage}: no variant compiles, the first because of {built[0].refused[0][1]}",
            command="",
            log="",
        )
    if options.resume:
        named, cells = _interleaved([task._replace(peers=()) for task in compiled])
        code = bench.compile_for(named, cells, arch=here.arch, slug=None)
        left = {problem for problem, _ in bench.not_recorded(Tuning, cells, named, code, options)}
        compiled = [task for task in compiled if task.key.problem in left]
        if not compiled:
            options.note("all of it is on record; nothing was measured")
            return []
    rotates = any(_PLAN.rotates(task.key.problem) for task in compiled)
    path = time(compiled, plan=_PLAN if rotates else replace(_PLAN, step_samples=0), options=options)
    timed, _ = store.read(path, schema.Tuning)
    for task in compiled:
        like = next((row for row in timed if (row.stage, row.problem) == task.key), None)
        if like is None:
            continue
        for variant, reason in task.refused:
            nothing = {"verdict": None, "samples": (), "cubin": None, "status": "error", "reason": reason}
            line = like.model_dump() | nothing | {"problem": asdict(like.problem), "parameters": variant}
            store.append(path, Tuning.model_validate(line))
    store.write_checksums(path.parents[1].name, options.data)
    return [task._replace(path=path) for task in compiled]


def estimate_s(tasks: Sequence[Task]) -> float:
    """Estimate the time of a plan in seconds: start and compilation, then a check and samples per variant."""
    libraries = {(task.key.problem, name) for task in tasks for name in task.peers}
    timed = [task.key.problem for task in tasks for _ in range(len(task.variants) + 1)]  # the defaults, too
    timed += [problem for problem, _ in libraries]
    scores = (min(_CHECKED_SCORES, problem.batch * problem.q_heads * problem.visible_scores) for problem in timed)
    return _START_S + sum(_EACH_S + _CHECK_S * checked / _CHECKED_SCORES for checked in scores)


def cache_of(record: schema.Timed) -> Cache:
    """The cache state whose time is used: for few query rows, the one most like calls in a model."""
    few = record.problem.q_len < peers.FEW_ROWS
    return next((cache for cache in AS_IN_A_MODEL if few and record.samples_of("burst", cache)), "hot")


def counted(record: Tuning | Measurement) -> Samples:
    """The samples in the state of `cache_of`, of a record that is ok."""
    samples = record.samples_of("burst", cache_of(record))
    assert samples is not None, "a record that is ok has burst samples"
    return samples
