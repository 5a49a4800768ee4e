"""Commands that measure on the GPU, and append what they measured to data/<gpu>/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flashlab.cli.kernels import choice_fields, kept_wrong, problem_fields
from flashlab.cli.options import (
    KIND_NAMES,
    Data,
    DeadEnds,
    Device,
    DryRun,
    Gpu,
    HeadDims,
    Inputs,
    Json,
    OneDType,
    OneMask,
    Peers,
    Samples,
    Shape,
    Shapes,
    Source,
    Stage,
    StageIds,
    Stages,
    TheDType,
    TheMask,
    names_in,
    problems,
    sources,
    stages_in,
)
from flashlab.cli.output import Row, answer, following, say
from flashlab.cli.records import RUN_COLUMNS
from flashlab.core.errors import CheckFailedError, NoDataError, ParameterError
from flashlab.core.inputs import ALL, NORMAL, drawn
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, MASKS, SUITES, Problem
from flashlab.core.problem import suite as suite_of


def bench(
    *,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "first",
    shape: Shapes = None,
    dtype: OneDType = None,
    mask: OneMask = None,
    head_dim: HeadDims = None,
    length: Annotated[list[int] | None, typer.Option(help="Of the suite, only these sequence lengths.")] = None,
    inputs: Inputs = None,
    stages: Stages = None,
    dead_ends: DeadEnds = False,
    peers: Peers = None,
    source: Source = None,
    ceilings: Annotated[bool, typer.Option(help="Measure the GPU's own limits too.")] = True,
    samples: Samples = None,
    min_samples: Annotated[int | None, typer.Option(help="Samples of a slow one at least.")] = None,
    cold: Annotated[int | None, typer.Option(help="Samples with a cold L2.")] = None,
    sustained: Annotated[
        float | None, typer.Option(help="Seconds of continuous calls at every problem, 0 for none.")
    ] = None,
    sustained_on: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]...", help="Call these alone for seconds.")
    ] = None,
    lse: Annotated[
        bool | None, typer.Option("--lse/--no-lse", help="Time every stage with the log-sum-exp on, too.")
    ] = None,
    dry_run: DryRun = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Check and time stages and libraries on the GPU, in turn, and append a run to data/<gpu>/runs/.

    How much is measured of each problem is the suite's to say, and every option that is not given: `peers` and `inputs`
    time the log-sum-exp too, `inputs` has all kinds, and `smoke`, `first` and `standard` are sustained at the first
    shape alone. --shape takes the place of a suite.
    """
    from flashlab.kernels import registry
    from flashlab.measure import bench as module
    from flashlab.record import store

    base = problems(shape, dtype, mask) if shape else suite_of(suite)
    base = [one for one in base if dtype in (None, one.dtype) and mask in (None, one.mask)]
    kinds = kinds_in(inputs or (ALL if suite == "inputs" and not shape else NORMAL))
    chosen = [
        replace(one, inputs=kind)
        for one in base
        for kind in kinds
        if (not head_dim or one.head_dim in head_dim) and (not length or one.q_len in length)
    ]
    if not chosen:
        raise ParameterError(
            f"wanted problems of that kind in {' '.join(shape) if shape else f'suite {suite}'}, found none. It has "
            f"head dims {', '.join(map(str, sorted({one.head_dim for one in base})))} and lengths "
            f"{', '.join(map(str, sorted({one.q_len for one in base})))}"
        )
    named = stages_in(stages)
    if dead_ends:
        variants = (name for stage in registry.DEAD_ENDS.values() for name in (stage.id, *stage.variant_names))
        named = [*(named or ()), *variants]
    given = {
        "samples": samples,
        "min_samples": min_samples,
        "cold_samples": cold,
        "sustained_seconds": sustained,
        "sustained_names": None if sustained_on is None else tuple(names_in(sustained_on) or ()),
        "lse": lse,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if sustained is not None:
        changes["sustained_shapes"] = None
    what: dict[str, Any] = {
        "stages": named,
        "peers": names_in(peers),
        "sources": sources(source),
        "plan": replace(module.Plan() if shape else module.plan_of(suite), **changes),
        "ceilings": ceilings,
    }
    if dry_run:
        known = [row for name in store.gpus() for run in store.runs(name) for row in run.measurements]
        estimates, total_s = module.estimate(chosen, **what, known=known)
        answer(
            estimates,
            {
                "problem": "problem.label",
                "implementations": "implementations",
                "sustained": "sustained",
                "seconds": "seconds",
            },
            as_json=as_json,
            document={"seconds": total_s, "problems": [asdict(one) for one in estimates]},
        )
        say(f"about {total_s / 60:.1f} minutes with the start; nothing was measured")
        return
    with following("measuring") as follow:
        path = module.run(chosen, **what, data=data, device=device, progress=follow, note=say)
    run = store.read_run(path)
    rows = (*run.measurements, *run.with_lse)
    answer([store.flat(row) for row in rows], RUN_COLUMNS, as_json=as_json, title=f"{path.stem}, burst, hot L2")
    say(f"recorded in {path}")
    failures = [
        f"{row.name} at {row.problem.problem().label}: {row.status}: {row.reason}"
        for row in rows
        if row.status not in ("ok", "missing", "unsupported") and not kept_wrong(row.name, row.status)
    ]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(rows)} rows have no time: {'; '.join(failures)}")


def tune(
    stage: Annotated[str | None, Stage] = None,
    *,
    plan: Annotated[
        Path | None,
        typer.Option(help="A JSON list of stages, head dims and variants, such as scripts/tuning.json, for no STAGE."),
    ] = None,
    head_dim: HeadDims = None,
    mask: OneMask = None,
    dtype: TheDType = "float16",
    param: Annotated[
        list[str] | None, typer.Option(help="NAME=a,b,c: values of a tunable; if none is given, all choices of all.")
    ] = None,
    listed: Annotated[
        Path | None, typer.Option("--variants", help="A JSON list of variants, in place of a grid.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Vary one tunable at a time, not all combinations.")] = False,
    limit: Annotated[int, typer.Option(help="Refuse more combinations than these.", min=1)] = 256,
    shape: Shapes = None,
    dry_run: DryRun = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Try a stage's tunables on the GPU, and append every variant, losers too, to data/<gpu>/tuning/."""
    from flashlab.kernels import registry
    from flashlab.measure import tune as module

    if (stage is None) == (plan is None):
        raise ParameterError("wanted a STAGE or --plan, got " + ("neither" if stage is None else "both"))
    rounds: Sequence[Any] = []
    if plan is not None:
        tasks = [
            task
            for task in module.read_plan(plan)
            if (not head_dim or task.key.problem.head_dim in head_dim) and mask in (None, task.key.problem.mask)
        ]
        if dry_run:
            for task in tasks:
                beside = f", beside {', '.join(task.peers)}" if task.peers else ""
                say(f"{task.key.stage} {task.key.problem.label}: {len(task.variants)} variants{beside}")
            say(f"about {module.estimate_s(tasks):.0f} s with the start; nothing was measured")
            return
        with following("tuning") as follow:
            rounds = module.tune_all(tasks, data=data, device=device, announce=say, progress=follow)
    else:
        assert stage is not None
        entry = registry.get(stage)
        grid = module.parse_grid(entry, param) if param else None
        rounds = []
        for one_head_dim, one_mask in [
            (one_head_dim, one_mask) for one_head_dim in head_dim or entry.head_dims for one_mask in MASKS
        ]:
            if mask not in (None, one_mask):
                continue
            variants = module.read_variants(listed, entry, one_head_dim) if listed else None
            if dry_run:
                tried = variants or module.variants_of(entry, one_head_dim, grid, each=each, limit=limit)
                say(f"{stage} D{one_head_dim} {one_mask} {dtype}: {len(tried)} variants")
                continue
            rounds.append(
                module.tune(
                    stage,
                    head_dim=one_head_dim,
                    mask=one_mask,
                    dtype=dtype,
                    variants=variants,
                    grid=grid,
                    each=each,
                    limit=limit,
                    shapes=shape,
                    data=data,
                    device=device,
                    announce=say,
                )
            )
        if dry_run:
            return
    _show_tuned(rounds, as_json)


def _show_tuned(done: Sequence[Any], as_json: bool) -> None:
    """What the last round of each tuning gave."""
    from flashlab.measure import tune as module
    from flashlab.record import store

    lines = [
        (trial.key, trial, one.rounds[-1])
        for one in done
        for trial in module.trials(store.read_tunings(one.rounds[-1])[0])
        if trial.key.stage == one.stage and trial.key.problem in one.problems
    ]
    lines.sort(key=lambda line: (line[0], line[1].median_us or float("inf")))
    answer(
        [trial for _, trial, _ in lines],
        {
            **{"stage": "key.stage", "problem": "key.problem.label", "variant": "parameters", "µs": "median_us"},
            **{"defaults / it": "speedup", "why not": lambda trial: trial.reason[:80]},
        },
        as_json=as_json,
        document=[{**asdict(trial), "path": str(path)} for _, trial, path in lines],
    )
    for one in () if as_json else done:
        say(
            f"{one.stage} {', '.join(problem.label for problem in one.problems)}: {one.refused} variants refused, "
            f"{one.twins} left out as twins, {len(one.rounds)} rounds, the last in {one.rounds[-1]}"
        )


def tuned(*, gpu: Gpu = None, data: Data = DATA, as_json: Json = False) -> None:
    """Write data/<gpu>/tuned.json, from which `flashlab.attention` chooses stage and tunables, from the records.

    Shows what is chosen for every problem that torch's SDPA was timed on, and where that is slower. For the GPU at
    hand, else the only one with tuning records.
    """
    from flashlab.measure import tune as module

    name = _tuned_gpu(gpu, data)
    path = module.write_table(name, data)
    held = module.held_against(name, data=data)
    rows: list[Row] = [
        {
            **problem_fields(one.problem),
            **choice_fields(one.choice),
            "run": one.run or None,
            "measured_us": one.time_us,
            "sdpa_us": one.peer_us,
            "ratio": one.ratio,
            "small_grids": one.small_grids,
        }
        for one in held
    ]
    columns = {
        **{"problem": "problem", "stage": "stage", "tunables": "parameters", "µs": "measured_us"},
        **{"SDPA, µs": "sdpa_us", "times faster": "ratio", "run": lambda row: row["run"] or "not in one process"},
    }
    answer(rows, columns, as_json=as_json)
    if not as_json:
        slower = [one.problem.label for one in held if one.ratio is not None and one.ratio < 1]
        say(f"{len(slower)} of {len(held)} slower than SDPA{': ' if slower else ''}{', '.join(slower)}")
        say(f"Written to {path}")


def _tuned_gpu(gpu: str | None, data: Path) -> str:
    """The GPU to make a table for: the one named, else the one at hand, else the only one with tuning records."""
    from flashlab.record import store
    from flashlab.run import gpu as module

    known = store.gpus(data, "tuning")
    if gpu is None and module.available() is None:
        gpu = module.info().slug
    if gpu is None and len(known) == 1:
        return known[0]
    if gpu not in known:
        raise NoDataError(
            f"gpu: wanted one with tuning records under {data}, got {gpu or 'none named'}. GPUs with some: "
            f"{', '.join(known) or 'none yet'}. `flashlab tune` on a machine with an NVIDIA GPU makes some."
        )
    return gpu


def profile(
    stage_ids: StageIds = None,
    *,
    shape: Shape = None,
    dtype: TheDType = "float16",
    mask: TheMask = "full",
    inputs: Annotated[str, typer.Option(metavar="KIND", help=f"What Q, K and V hold: {KIND_NAMES}.")] = NORMAL,
    lines: Annotated[int, typer.Option(help="Source lines to print of each stage; 0 for none.", min=0)] = 3,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Profile stages with Nsight Compute, and append what units and warps did to data/<gpu>/profiles/."""
    from flashlab.measure import profile as module

    problem = Problem.parse(shape or FIRST_SHAPE, dtype=dtype, mask=mask, inputs=drawn(inputs))
    missed: list[str] = []

    def note(line: str) -> None:
        say(line)
        if line.endswith("not profiled"):
            missed.append(line)

    path, profiles = module.profile(stage_ids or None, problem, data=data, device=device, say=note)

    answer(
        profiles,
        {
            **{"stage": "stage", "tensor %": "tensor_percent", "issue %": "issue_percent", "warps %": "warps_percent"},
            "DRAM MB": lambda one: None if one.dram_bytes is None else one.dram_bytes / 1e6,
            "L2 MB": lambda one: None if one.l2_bytes is None else one.l2_bytes / 1e6,
            "conflicts %": "conflict_percent",
            "warps": lambda one: ", ".join(f"{state} {share:.0f} %" for state, share in [*one.states.items()][:3]),
        },
        as_json=as_json,
        title=f"{problem.label} on {profiles[0].gpu}",
        document=[one.model_dump(mode="json") for one in profiles],
    )
    hot: list[Row] = [
        {
            "stage": one.stage,
            "line": f"{line.file}:{line.line}",
            "samples %": 100 * line.total / sum(one.samples.values()),
            "most": next(iter(line.samples)),
            "source": line.text,
        }
        for one in profiles
        for line in one.lines[:lines]
    ]
    if not as_json:
        if hot:
            answer(hot, tuple(hot[0]))
        say(f"Recorded in {path}")
    if missed:
        raise typer.Exit(1)


def train(
    *,
    head_dim: Annotated[Literal["64", "128", "both"], typer.Option(help="Of which model.")] = "both",
    steps: Annotated[int | None, typer.Option(help="In place of the model's own number of them.", min=1)] = None,
    device: Device = 0,
    as_json: Json = False,
) -> None:
    """Train the language models whose Q, K and V are the inputs `trained`, on the GPU, and keep them in the cache.

    About a minute each on an H200. Each takes the place of the one that was there.
    """
    from flashlab.measure import trained as module

    with following("training") as follow:
        models = [
            module.train(replace(config, steps=steps or config.steps), device=f"cuda:{device}", follow=follow)
            for config in module.CONFIGS.values()
            if head_dim in (str(config.head_dim), "both")
        ]
    columns = ("head_dim", "digest", "loss", "held_out_loss", "steps", "seconds")
    answer(models, columns, as_json=as_json, title="losses in nats a byte")
    if not as_json:
        layers = [
            {"head_dim": one["head_dim"], "layer": index, **layer}
            for one in models
            for index, layer in enumerate(one["layers"])
        ]
        answer(layers, tuple(layers[0]), title="scores as causal attention sees them")


COMMANDS = {"bench": bench, "tune": tune, "tuned": tuned, "profile": profile, "train": train}
