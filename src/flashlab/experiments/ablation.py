"""Ablations: one thing changed in a stage, everything else as it is; and stages with a part of their work left out.

An axis (axes.toml) is a question, a tunable or macro, its levels, and what was expected before it was measured. Its
levels are timed interleaved in one process and are checked against the oracle like any stage. An axis stands on its
stage's defaults, not on what won on a GPU, so that it means the same everywhere.

The split leaves out one part of a stage's work (`LEAVE_OUT`, kernels/common/parts.cuh). The output is then wrong, so
its times are never a `Measurement`.

A lever is a change that no macro holds: a patch of a stage's source (levers.py). It is measured like a level, beside
the source as it is, with the tunables that won on the GPU.

What the records of all three say is in effects.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from flashlab.core.errors import refuse_unknown
from flashlab.core.paths import table
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import levers
from flashlab.kernels import registry
from flashlab.kernels.registry import Implementation
from flashlab.measure import bench
from flashlab.measure.options import OPTIONS, Options, Plan
from flashlab.record.schema import Ablation, Part
from flashlab.run import choice, gpu

PLAN = Plan(samples=40, min_samples=9, cold_samples=0, cap_s=0.6, sustained_seconds=0.0, checked_scores=1 << 26)
"""How much is measured of each level and part: hot bursts."""
LEVER_PLAN = replace(PLAN, samples=60, cap_s=1.5)
"""How much of each lever: more, as many of them do little."""
PARTS: Mapping[str, int] = {"nothing": 0, "qk": 1, "softmax": 2, "pv": 3, "memory": 4}
"""Values of LEAVE_OUT."""
SPLIT_SHAPES = (FIRST_SHAPE, "1x8x512x64")
"""Where stages are split: the sources' large shape, and the small one that claim E05 is about."""
SPLIT_STAGES = tuple(stage.id for stage in registry.STAGES.values() if "LEAVE_OUT" in stage.ablations)
"""Stages that know LEAVE_OUT."""


@dataclass(frozen=True)
class Level:
    """One value on an axis."""

    name: str
    params: Mapping[str, int]
    """Tunables and macros of the axis's stage that differ from its defaults."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One question asked of one stage: an entry of axes.toml."""

    name: str
    stage: str
    question: str
    prediction: str
    """Written before the measurement."""
    levels: tuple[Level, ...]
    """The first is what the others are compared with."""
    claims: tuple[str, ...] = ()
    """Ids in data/claims.csv that it answers, wholly or in part."""


AXES: Mapping[str, Axis] = {name: Axis(name=name, **entry) for name, entry in table(__file__, "axes").items()}
"""Every axis by name."""


def choose(names: Sequence[str] | None = None) -> tuple[Axis, ...]:
    """The axes of those names; all where None or empty.

    Raises:
        ParameterError: there is none of a name.
    """
    refuse_unknown("axis", AXES, *(names or ()))
    return tuple(AXES[name] for name in dict.fromkeys(names)) if names else tuple(AXES.values())


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(
    names: Sequence[str] | None = None,
    *,
    problem: Problem | None = None,
    plan: Plan = PLAN,
    options: Options = OPTIONS,
) -> Path | None:
    """Measure axes on one problem, and append a record a level to data/<gpu>/ablations/<run>.jsonl.

    None where the options say `resume` and all of it is on record.

    Args:
        problem: what is computed; the sources' shape, full, float16 where None.

    Raises:
        ParameterError: no such axis.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    problem = problem or Problem.parse(FIRST_SHAPE)
    registry.able((registry.get(axis.stage) for axis in choose(names)), [problem])
    groups = []
    for axis in choose(names):
        stage = registry.get(axis.stage)
        of_axis = {
            f"{axis.name}: {level.name}": _stage(
                {"axis": axis.name, "level": level.name, "stage": stage.id},
                stage.parameters(problem.head_dim, level.params),
            )
            for level in axis.levels
        }
        groups.append((problem, of_axis))
    return _compared(Ablation, groups, plan=plan, options=options, slug=None)


def _stage(record: Mapping[str, str], params: Mapping[str, int], **others: Any) -> Implementation:
    """The stage that its records name."""
    return Implementation(id=record["stage"], params=params, may_spill=True, record=record, **others)


def _compared(
    kind: type[Ablation] | type[Part],
    groups: Iterable[tuple[Problem, Mapping[str, Implementation]]],
    *,
    plan: Plan,
    options: Options,
    slug: str | None,
) -> Path | None:
    """Measure what a group has at its problem, interleaved; None where the options say `resume` and nothing is left.

    Args:
        slug: the GPU whose table completes tunables; None for the stages' defaults.
    """
    groups = list(groups)
    named = {name: implementation for _, group in groups for name, implementation in group.items()}
    cells = [(problem, list(group)) for problem, group in groups]
    arch = gpu.info(options.device).arch
    code = bench.compile_for(named, cells, arch=arch, slug=slug, progress=options.progress)
    left = bench.not_recorded(kind, cells, named, code, options)
    return bench.measure(kind, named, left, plan=plan, options=options) if left else None


def split(
    stage_ids: Sequence[str] | None = None,
    *,
    problems: Sequence[Problem] | None = None,
    plan: Plan = PLAN,
    options: Options = OPTIONS,
) -> Path | None:
    """Time stages with each part of their work left out, interleaved; the records go to data/<gpu>/parts/<run>.jsonl.

    A stage has the tunables that won on this GPU, as on the ladder. None as `measure`.

    Args:
        stage_ids: ids; those of `SPLIT_STAGES` where None or empty.
        problems: what is computed; `SPLIT_SHAPES` where None.

    Raises:
        ParameterError: a stage whose parts cannot be left out.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    chosen = tuple(dict.fromkeys(stage_ids or SPLIT_STAGES))
    refuse_unknown("stage", SPLIT_STAGES, *chosen)
    problems = problems or [Problem.parse(shape) for shape in SPLIT_SHAPES]
    registry.able(map(registry.get, chosen), problems)
    parts = {
        stage_id: {
            f"{stage_id} without {part}": _stage(
                {"stage": stage_id, "left_out": part},
                {} if part == "nothing" else {"LEAVE_OUT": value},
                judged=part == "nothing",
            )
            for part, value in PARTS.items()
        }
        for stage_id in chosen
    }
    groups = [(problem, of_stage) for problem in problems for of_stage in parts.values()]
    return _compared(Part, groups, plan=plan, options=options, slug=gpu.info(options.device).slug)


def measure_levers(
    names: Sequence[str] | None = None,
    *,
    instead: Mapping[str, Any] | None = None,
    plan: Plan = LEVER_PLAN,
    options: Options = OPTIONS,
) -> Path | None:
    """Measure levers beside their stages as they are; the records go to data/<gpu>/ablations/<run>.jsonl.

    Levers that share a stage, a problem and its tunables are interleaved with one copy of the stage. None as `measure`.

    Args:
        names: levers; all where None or empty.
        instead: what `Lever.problems` takes in place of the problems that each names.

    Raises:
        ParameterError: no such lever, or one that does not fit its stage's source.
        NoGpuError, LaunchError, MissingPackageError, OutputError: as they say.
    """
    chosen = levers.choose(names)
    problems = [problem for lever in chosen for problem in lever.problems(**(instead or {}))]
    registry.able([registry.get(lever.stage) for lever in chosen], problems)
    files = {lever.name: lever.write() for lever in chosen}
    here = gpu.info(options.device)
    groups: dict[tuple[str, Problem, tuple[tuple[str, int], ...]], dict[str, Implementation]] = {}
    for lever in chosen:
        stage = registry.get(lever.stage)
        for problem in lever.problems(**(instead or {})):
            values = choice.parameters(stage, here.slug, problem, arch=here.arch)
            params = stage.parameters(problem.head_dim, values)
            title = " ".join([stage.id, problem.label, *(f"{name}={value}" for name, value in params.items())])
            group = groups.setdefault((stage.id, problem, tuple(params.items())), {})
            for level, source in ((levers.AS_IT_IS, None), (lever.name, files[lever.name])):
                record = {"axis": levers.AXIS, "level": level, "stage": stage.id}
                group[f"{title}: {level}"] = _stage(record, params, source=source and source.resolve())
    of_problems = ((problem, group) for (_, problem, _), group in groups.items())
    return _compared(Ablation, of_problems, plan=plan, options=options, slug=here.slug)
