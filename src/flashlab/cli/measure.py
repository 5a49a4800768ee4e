"""Commands that measure on the GPU and append their records to data/<gpu>/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashlab.cli import options as opt
from flashlab.cli.kernels import kept_wrong
from flashlab.cli.output import answer, answer_nothing, as_json, following, say
from flashlab.cli.records import RUN_COLUMNS
from flashlab.core.arithmetic import several
from flashlab.core.errors import CheckFailedError, NoDataError, ParameterError
from flashlab.core.inputs import ALL, NORMAL, drawn
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import DTYPES, FIRST_SHAPE, MASKS, SUITES, DType, Problem, matching
from flashlab.core.problem import suite as suite_of

if TYPE_CHECKING:
    from flashlab.measure.tune import Task

_AT_MOST = ", less what --resume skips, which only a compiler and the GPU can tell"
"""What a dry run says of `--resume`."""


def bench(
    *,
    suite: Annotated[str | None, typer.Option(help=f"Problem set: {', '.join(SUITES)}; default: first.")] = None,
    shape: opt.Shapes = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    window: opt.TheWindow = None,
    softcap: opt.TheSoftcap = 0.0,
    head_dim: opt.HeadDims = None,
    length: Annotated[list[int] | None, typer.Option(help="Only problems of this query length; repeatable.")] = None,
    inputs: opt.Inputs = None,
    stages: opt.Stages = None,
    dead_ends: opt.DeadEnds = False,
    peers: opt.Peers = None,
    source: opt.Source = None,
    ceilings: Annotated[bool, typer.Option(help="Also measure the GPU's attainable throughput and bandwidth.")] = True,
    samples: opt.Samples = None,
    cold: Annotated[int | None, typer.Option(help="Samples with a cold L2.", min=0)] = None,
    step: Annotated[int | None, typer.Option(help="Samples in a CUDA graph, behind another kernel.", min=0)] = None,
    sustained: Annotated[float | None, typer.Option(help="Seconds of continuous calls per problem.", min=0)] = None,
    sustained_on: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]...", help="Sustained timing of these names only.")
    ] = None,
    lse: Annotated[bool | None, typer.Option("--lse/--no-lse", help="Also time with the log-sum-exp output.")] = None,
    resume: opt.Resume = False,
    dry_run: opt.DryRun = False,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Check and time stages and libraries on the GPU, interleaved, and append a run to data/<gpu>/runs/.

    Defaults depend on the suite: `peers` and `inputs` also time the log-sum-exp; `inputs` covers every input kind;
    `smoke`, `first` and `standard` time sustained load at the first shape only; `decode` and `fp8` measure their own
    stages and the parents of these instead of the ladder. Problems with a window or soft cap run on the stages that
    support them. --shape replaces the suite.
    """
    from flashlab.measure import bench as module

    if shape and suite:
        raise ParameterError(f"--shape: wanted no --suite, which it replaces, got --suite {suite}")
    suite = "" if shape else suite or "first"
    at = [Problem.parse(text, dtype=of, mask=under) for text in shape or () for of in DTYPES for under in MASKS]
    suited = matching(at or suite_of(suite), dtype=dtype, mask=mask)
    asked = opt.features(window, softcap) if window or softcap else {}
    kinds = kinds_in(inputs or (ALL if suite == "inputs" else NORMAL))
    chosen = matching(suited, head_dim=head_dim, q_len=length)
    problems = list(dict.fromkeys(replace(problem, inputs=kind, **asked) for problem in chosen for kind in kinds))
    if not problems:
        dims, lengths = ({getattr(problem, name) for problem in suited} for name in ("head_dim", "q_len"))
        raise ParameterError(
            f"wanted matching problems in {' '.join(shape) if shape else f'suite {suite}'}, found none. It has "
            f"head dims {', '.join(map(str, sorted(dims)))} and lengths {', '.join(map(str, sorted(lengths)))}"
        )
    named = _stages(opt.stages_in(stages), suite, problems, dead_ends)
    plan = {
        "samples": samples,
        "cold_samples": cold,
        "step_samples": step,
        "sustained_seconds": sustained,
        "sustained_names": None if sustained_on is None else tuple(opt.stages_or_libraries_in(sustained_on) or ()),
        "lse": lse,
    }
    changes: dict[str, Any] = {name: value for name, value in plan.items() if value is not None}
    if sustained is not None:
        opt.settling(sustained)
        changes["sustained_shapes"] = None
    what: dict[str, Any] = {"stages": named, "peers": opt.names_in(peers), "sources": opt.sources(source)}
    planned = replace(module.plan_of(suite), **changes)
    what |= {"plan": planned, "ceilings": ceilings}
    names = planned.sustained_names or ()
    if names and not any(planned.sustains(problem, name) for problem in problems for name in names):
        raise ParameterError("--sustained-on: wanted --sustained SECONDS too: none of these problems is sustained")
    if dry_run:
        estimates, total_s = module.estimate(problems, **what)
        columns = {"problem": "problem.label", **{name: name for name in ("implementations", "sustained", "seconds")}}
        answer(estimates, columns, document={"seconds": total_s, "problems": estimates})
        say(f"about {total_s / 60:.1f} minutes including start-up{_AT_MOST * resume}; nothing was measured")
        return
    with following("measuring") as follow:
        options = module.Options(data=data, device=device, progress=follow, note=say, resume=resume)
        path = module.run(problems, **what, options=options)
    if path is None:
        answer_nothing()
    else:
        _show_run(path)


def _stages(named: list[str] | None, suite: str, problems: Sequence[Problem], dead_ends: bool) -> list[str] | None:
    """The stages of a run: those named, else those of the suite or for the problems; None for the ladder."""
    from flashlab.kernels import registry

    places = {"decode": registry.DECODE, "fp8": registry.FP8}
    if named is None and suite in places:
        named = [name for stage in places[suite].values() for name in (stage.parent, stage.id) if name]
    if named is None and any(problem.features for problem in problems):
        named = [name for name, stage in registry.STAGES.items() if stage.features]
    if dead_ends:
        variants = (name for stage in registry.DEAD_ENDS.values() for name in (stage.id, *stage.variant_names))
        named = [*(named or ()), *variants]
    return named


def _show_run(path: Path) -> None:
    """Print the rows of a run; raise if one failed that should have a time."""
    from flashlab.query.rows import headline
    from flashlab.record import schema, store

    rows = sorted(store.read(path, schema.Measurement)[0], key=lambda row: row.with_lse)
    answer([headline(row) for row in rows], RUN_COLUMNS, title=f"{path.stem}, burst, hot L2")
    say(f"recorded in {path}")
    failures = [
        f"{row.name} at {row.problem.label}: {row.status}: {row.reason}"
        for row in rows
        if row.status not in ("ok", "missing", "unsupported") and not kept_wrong(row.name, row.status)
    ]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(rows)} rows have no time: {'; '.join(failures)}")


def tune(
    stage: Annotated[str | None, opt.BARE_STAGE] = None,
    *,
    plan: Annotated[
        Path | None, typer.Option(help="JSON file of stages and variants, e.g. scripts/tuning.json, in place of STAGE.")
    ] = None,
    head_dim: opt.HeadDims = None,
    mask: opt.OneMask = None,
    dtype: Annotated[DType | None, typer.Option(help="Data type of Q, K and V; default: float16.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="NAME=a,b,c: values to try; default: all tunables.")] = None,
    each: Annotated[bool, typer.Option("--each", help="Vary one tunable at a time, not all combinations.")] = False,
    limit: Annotated[int | None, typer.Option(help="Maximum number of combinations; default: 256.", min=1)] = None,
    shape: opt.Shapes = None,
    inputs: opt.TheInputs = NORMAL,
    resume: opt.Resume = False,
    dry_run: opt.DryRun = False,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Time variants of a stage's tunables on the GPU and append all of them to data/<gpu>/tuning/."""
    from flashlab.kernels import registry
    from flashlab.measure import tune as module
    from flashlab.measure.options import Options
    from flashlab.query.rows import grouped

    if (stage is None) == (plan is None):
        raise ParameterError("wanted a STAGE or --plan, got " + ("neither" if stage is None else "both"))
    if each and limit:
        raise ParameterError("--limit: wanted no --each, which varies one tunable at a time")
    here = {"--dtype": dtype, "--param": param, "--each": each, "--shape": shape, "--limit": limit}
    here |= {"--inputs": inputs != NORMAL}
    if plan is not None and (given := [name for name, value in here.items() if value]):
        raise ParameterError(f"--plan: wanted no {', '.join(given)}, which the entries of the file set")
    options = Options(data=data, device=device, note=say, resume=resume)
    if plan is not None:
        known = module.read_plan(plan)
        tasks = [task for task in known if matching([task.key.problem], head_dim=head_dim, mask=mask)]
        if not tasks:
            dims = ", ".join(map(str, sorted({task.key.problem.head_dim for task in known}))) or "none"
            raise ParameterError(
                f"--plan: wanted entries with that head dim and mask, found none. {plan} has head dims {dims}"
            )
    else:
        assert stage is not None
        entry, of_type, kind = registry.get(stage), dtype or "float16", drawn(inputs)
        by_dim = grouped(shape or (), lambda text: Problem.parse(text).head_dim)
        problems: list[Problem] = []
        for dim in dict.fromkeys(head_dim or sorted(by_dim) or entry.head_dims):
            shapes = module.shapes_for(entry, dim, shape if head_dim else by_dim.get(dim))
            for of in (mask,) if mask else MASKS:
                problems += module.problems_of(head_dim=dim, mask=of, dtype=of_type, shapes=shapes, inputs=kind)
        grid = module.parse_grid(entry, param) if param else None
        how: dict[str, Any] = {"each": each, "limit": limit or module.LIMIT}
        tasks = module.tasks_of(entry, problems, grid, **how, options=None if dry_run else options)
    if dry_run:
        columns = ("stage", "problem", "variants", "beside")
        cells = ((task.key.stage, task.key.problem.label, len(task.variants), task.peers) for task in tasks)
        answer([dict(zip(columns, row, strict=True)) for row in cells], columns)
        most = _AT_MOST * options.resume
        say(f"about {module.estimate_s(tasks):.0f} s including start-up{most}; nothing was measured")
        return
    with following("tuning") as follow:
        _show_tuned(module.tune(tasks, options=replace(options, progress=follow)))


def _show_tuned(tasks: Sequence[Task]) -> None:
    """Print the variants of a tuning, the fastest first at each problem."""
    from flashlab.record import schema, store
    from flashlab.show import tuning as module

    path = tasks[0].path if tasks else None
    trials = module.trials(store.read(path, schema.Tuning)[0]) if path else []
    trials.sort(key=lambda trial: (trial["key"], trial["median_us"] or float("inf")))
    columns = {"stage": "key.stage", "problem": "key.problem.label", "variant": "parameters", "median_us": "median_us"}
    answer(
        trials,
        {**columns, "speedup": "speedup", "reason": lambda trial: trial["reason"][:80]},
        document=[{**trial, "path": path} for trial in trials],
    )
    for task in () if as_json() else tasks:
        say(
            f"{task.key.stage} {task.key.problem.label}: {several(len(task.refused), 'variant')} refused, "
            f"{len(task.twins)} with another's machine code, in {task.path}"
        )


def tuned(*, gpu: opt.Gpu = None, data: opt.Data = DATA) -> None:
    """Write data/<gpu>/tuned.json, the table from which `flashlab.attention` selects stage and tunables.

    Shows the selection for every problem on which torch's SDPA was timed, and where it is slower than SDPA. For this
    machine's GPU, else the only one with tuning records.
    """
    from flashlab.measure import tuned as module
    from flashlab.record import store
    from flashlab.run import explain
    from flashlab.run import gpu as devices

    known = store.gpus(data, "tuning")
    gpu = gpu or (devices.info().slug if devices.available() is None else known[0] if len(known) == 1 else None)
    if gpu not in known:
        raise NoDataError(
            f"gpu: wanted one with tuning records under {data}, got {gpu or 'none named'}. GPUs with some: "
            f"{', '.join(known) or 'none yet'}. `flashlab tune` on a machine with an NVIDIA GPU makes some."
        )
    path = module.write_table(gpu, data)
    held_against = module.held_against(gpu, data=data)
    rows = [
        {
            **held.problem.flat(),
            **explain.flat(held.problem, held.choice),
            "run": held.run or None,
            "measured_us": held.time_us,
            "sdpa_us": held.peer_us,
            "ratio": held.ratio,
            "small_grids": held.small_grids,
            "lender": held.lender or None,
        }
        for held in held_against
    ]
    answer(rows, ("problem", "stage", "parameters", "measured_us", "sdpa_us", "ratio", "run"))
    slower = [row["problem"] for row in rows if row["ratio"] is not None and row["ratio"] < 1]
    say(f"{module.tally(held_against)}{' Slower: ' if slower else ''}{', '.join(slower)}")
    say(f"Written to {path}")


def profile(
    stage_ids: opt.StageIds = None,
    *,
    shape: opt.Shape = None,
    dtype: opt.TheDType = "float16",
    mask: opt.TheMask = "full",
    inputs: opt.TheInputs = NORMAL,
    lines: Annotated[int, typer.Option(help="Hottest source lines to print per stage; 0 for none.", min=0)] = 3,
    resume: opt.Resume = False,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Profile stages with Nsight Compute and append utilisation and warp stalls to data/<gpu>/profiles/."""
    from flashlab.measure import profile as module

    problem = Problem.parse(shape or FIRST_SHAPE, dtype=dtype, mask=mask, inputs=drawn(inputs))
    options = replace(module.OPTIONS, data=data, device=device, note=say, resume=resume)
    path, profiles, missed = module.profile(stage_ids or None, problem, options)
    if path is None:
        answer_nothing()
        return
    counters = ("tensor_percent", "issue_percent", "warps_percent", "dram_bytes", "l2_bytes", "conflict_percent")
    answer(
        profiles,
        {name: name for name in ("stage", *counters)}
        | {"warps": lambda row: ", ".join(f"{state} {share:.0f} %" for state, share in [*row.states.items()][:3])},
        title=f"{problem.label} on {profiles[0].gpu}",
    )
    hot = [
        {
            "stage": kernel.stage,
            "line": f"{line.file}:{line.line}",
            "samples %": 100 * line.total / sum(kernel.samples.values()),
            "most": next(iter(line.samples)),
            "source": line.text,
        }
        for kernel in profiles
        for line in kernel.lines[:lines]
    ]
    if hot and not as_json():
        answer(hot, tuple(hot[0]))
    say(f"Recorded in {path}")
    if missed:
        raise typer.Exit(1)


def train(
    *,
    head_dim: opt.HeadDims = None,
    steps: Annotated[int | None, typer.Option(help="Training steps; default: the model's own number.", min=1)] = None,
    device: opt.Device = 0,
) -> None:
    """Train the language models that provide the `trained` inputs, on the GPU, and store them in the cache.

    Takes about a minute per model on an H200. Replaces models already in the cache.
    """
    from flashlab.measure import trained as module

    if unknown := [str(dim) for dim in head_dim or () if dim not in module.CONFIGS]:
        raise ParameterError(f"head dim: wanted one of {', '.join(map(str, module.CONFIGS))}, got {', '.join(unknown)}")
    configs = [config for config in module.CONFIGS.values() if not head_dim or config.head_dim in head_dim]
    with following("training") as follow:
        models = [
            module.train(replace(config, steps=steps or config.steps), device=f"cuda:{device}", follow=follow)
            for config in configs
        ]
    columns = ("head_dim", "digest", "loss", "held_out_loss", "steps", "seconds")
    answer(models, columns, title="losses in nats per byte")
    if not as_json():
        layers = [
            {"head_dim": model["head_dim"], "layer": index, **layer}
            for model in models
            for index, layer in enumerate(model["layers"])
        ]
        answer(layers, tuple(layers[0]), title="statistics of causal scores")


COMMANDS = {"bench": bench, "tune": tune, "tuned": tuned, "profile": profile, "train": train}
