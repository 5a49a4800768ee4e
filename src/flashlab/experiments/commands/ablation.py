"""`flashlab ablate` and `flashlab split`: ablations of a stage, and the time of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, answer_nothing, following, say
from flashlab.core.errors import CheckFailedError, ParameterError
from flashlab.core.inputs import NORMAL, drawn
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem

if TYPE_CHECKING:
    from flashlab.experiments.effects import Effect


def ablate(
    axes: Annotated[
        list[str] | None, typer.Argument(metavar="AXIS", help="Axes, or experiments with --levers; default: all.")
    ] = None,
    *,
    of_source: Annotated[
        bool, typer.Option("--levers", help="Measure source patches (kernels/levers/) in place of axes.")
    ] = False,
    shape: opt.Shapes = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    inputs: opt.Inputs = None,
    samples: opt.Samples = None,
    resume: opt.Resume = False,
    listed: Annotated[bool, typer.Option("--list", help="List them without measuring.")] = False,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Run ablations, one change to a stage at a time, on the GPU, and append every level to data/<gpu>/ablations/.

    An axis is measured without a mask, in float16, on normal inputs by default. A patch names its own problems;
    --shape, --dtype, --mask and --inputs override them.
    """
    from flashlab.experiments import ablation, levers
    from flashlab.experiments import effects as analysis
    from flashlab.measure.options import Options
    from flashlab.record import schema, store

    measure: Callable[..., Path | None]
    effects: Callable[..., list[Effect]]
    kinds = [drawn(kind) for kind in kinds_in(inputs or NORMAL)]
    if of_source:
        chosen = levers.choose(axes)
        instead: dict[str, Any] = {"shapes": shape, "dtype": dtype, "mask": mask, "inputs": kinds if inputs else None}
        if listed:
            rows = [{**asdict(of), "problems": [problem.label for problem in of.problems(**instead)]} for of in chosen]
            columns: dict[str, Any] = {key: key for key in ("name", "stage", "question")}
            answer(rows, columns | {"problems": lambda row: "; ".join(row["problems"])})
            return
        measure = partial(ablation.measure_levers, [lever.name for lever in chosen], instead=instead)
        effects, plan = analysis.lever_effects, ablation.LEVER_PLAN
    else:
        levels = ablation.choose(axes)
        if listed:
            rows = [
                {**asdict(axis), "levels": {level.name: dict(level.params) for level in axis.levels}} for axis in levels
            ]
            columns = {"axis": "name", "stage": "stage", "levels": lambda row: "; ".join(row["levels"])}
            answer(rows, columns | {"claims": "claims"})
            return
        if len(shape or ()) > 1 or len(kinds) > 1:
            raise ParameterError("axes: wanted one shape and one kind of inputs, got several; --levers takes several")
        named = shape[0] if shape else FIRST_SHAPE
        problem = Problem.parse(named, dtype=dtype or "float16", mask=mask or "full", inputs=kinds[0])
        measure = partial(ablation.measure, [axis.name for axis in levels], problem=problem)
        effects, plan = analysis.effects, ablation.PLAN
    plan = plan if samples is None else replace(plan, samples=samples)
    with following("measuring") as follow:
        options = Options(data=data, device=device, progress=follow, resume=resume)
        path = measure(plan=plan, options=options)
    outcomes = effects(store.read(path, schema.Ablation)[0]) if path else []
    _show(outcomes, path)
    failures = [effect for effect in outcomes if effect.median_us is None]
    if failures:
        raise CheckFailedError(
            f"{len(failures)} of {len(outcomes)} levels have no time: "
            + "; ".join(f"{effect.group}, {effect.name}: {effect.reason}" for effect in failures)
        )


def split(
    stage_ids: opt.StageIds = None,
    *,
    shape: opt.Shapes = None,
    dtype: opt.TheDType = "float16",
    mask: opt.TheMask = "full",
    samples: opt.Samples = None,
    resume: opt.Resume = False,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Time stages with one part removed at a time, on the GPU, and append the times to data/<gpu>/parts/.

    Parts are the QK GEMM, the softmax, the PV GEMM, and the K and V tile loads. Default: every stage that supports it.
    """
    from flashlab.experiments import ablation
    from flashlab.experiments.effects import shares
    from flashlab.measure.options import Options
    from flashlab.record import schema, store

    missing: list[str] = []
    with following("measuring") as follow:
        path = ablation.split(
            stage_ids,
            problems=[Problem.parse(sizes, dtype=dtype, mask=mask) for sizes in shape or ablation.SPLIT_SHAPES],
            plan=ablation.PLAN if samples is None else replace(ablation.PLAN, samples=samples),
            options=Options(data=data, device=device, progress=follow, note=missing.append, resume=resume),
        )
    _show(shares(store.read(path, schema.Part)[0]) if path and path.is_file() else [], path)
    if missing:
        raise CheckFailedError(f"{len(missing)} parts have no time: {'; '.join(missing)}")


def _show(effects: Sequence[Effect], path: Path | None) -> None:
    """Print levels or parts relative to the first of their group, or that nothing was measured if `path` is None."""
    if path is None:
        answer_nothing()
        say("All of it is on record; nothing was measured.")
        return
    columns = ("group", "name", "shape", "mask", "median_us", "ratio", "interval", "verdict", "samples")
    rows = [effect.flat() for effect in effects]
    answer(rows, (*columns, "registers", "spill_store_bytes", "blocks_per_sm", "reason"))
    say(f"Recorded in {path}")


COMMANDS = {"ablate": ablate, "split": split}
