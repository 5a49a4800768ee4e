"""The command line: tables and JSON to stdout, messages and progress to stderr, a non-zero exit on failure."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashlab import __version__
from flashlab.core.errors import (
    CheckFailedError,
    CompileError,
    DamagedRecordError,
    FlashlabError,
    MissingPackageError,
    NoDataError,
    ParameterError,
)
from flashlab.core.inputs import ALL, KINDS, NORMAL, TRAINED, drawn
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import BUILD, DATA
from flashlab.core.problem import DTYPES, FIRST_SHAPE, MASKS, SUITES, DType, Mask, Problem
from flashlab.core.problem import suite as suite_of
from flashlab.kernels import registry
from flashlab.record import store
from flashlab.record.store import Ablation, Cache, Regime

if TYPE_CHECKING:
    from flashlab.experiments.ablation import Effect
    from flashlab.experiments.ledger import Verdict
    from flashlab.measure.bench import Plan
    from flashlab.measure.bench import Progress as BenchProgress
    from flashlab.measure.tune import Tuned
    from flashlab.run.choice import Choice

app = typer.Typer(
    name="flashlab",
    help="How an attention kernel gets fast on a GPU, and what each step really buys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
StageIds = Annotated[list[str] | None, typer.Argument(metavar="[STAGE]...", help="Stage ids; all where none is given.")]
Archs = Annotated[list[str] | None, typer.Option("--arch", help="Architecture, such as sm_90a; may be repeated.")]
Gpu = Annotated[str | None, typer.Option(help="Folder under data/, such as nvidia-h200; the first if not given.")]
OneDType = Annotated[DType | None, typer.Option(help="Element type; all if not given.")]
OneMask = Annotated[Mask | None, typer.Option(help="Mask; both if not given.")]
Shape = Annotated[str | None, typer.Option(help="BxHxSxD or BxHxHkvxSqxSkxD, such as 16x16x2048x64.")]
_KINDS = ", ".join(KINDS)
Inputs = Annotated[
    str, typer.Option("--inputs", metavar="KIND[,KIND]...", help=f"What Q, K and V hold: {_KINDS}; or {ALL}.")
]
HeadDim = Annotated[int | None, typer.Option(help="The stage's first if not given.")]
Device = Annotated[int, typer.Option(help="CUDA device index.", min=0)]
Source = Annotated[list[str] | None, typer.Option(help="STAGE=FILE: an edited copy of a stage's kernel, beside it.")]
Where = Literal["gpu", "cpu", "both"]
Data = Annotated[Path, typer.Option(help="Folder of recorded data.", show_default=False)]

PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nothing says how wide it may be."""


def _out() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _err() -> Console:
    return Console(stderr=True)


def _emit_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _emit_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[_cell(value) for value in row] for row in rows]
    for index, name in enumerate(header):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(escape(cell) for cell in row))
    _out().print(table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _is_number(text: str) -> bool:
    return text == "–" or text.replace(".", "", 1).replace("e-", "", 1).isdigit()


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=_err(), transient=True, disable=not sys.stderr.isatty())


def _choose_stages(ids: Sequence[str] | None, dead_ends: bool = False) -> tuple[registry.Stage, ...]:
    named = dict.fromkeys([*(ids or ()), *(registry.DEAD_ENDS if dead_ends else ())])
    return tuple(registry.get(stage_id) for stage_id in named or registry.STAGES)


def _choose_archs(archs: Sequence[str] | None) -> tuple[str, ...]:
    for arch in archs or ():
        if arch not in registry.ARCHS:
            raise ParameterError(f"arch: wanted one of {', '.join(registry.ARCHS)}, got {arch!r}")
    return tuple(archs) if archs else registry.ARCHS


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashlab {__version__}")
        raise typer.Exit


DeadEnds = Annotated[
    bool,
    typer.Option("--dead-ends", help="The dead ends too; without named stages, in place of the ladder."),
]
Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def _root(version: Version = False) -> None:
    pass


@app.command()
def doctor(*, data: Data = DATA, as_json: Json = False) -> None:
    """Say what this machine has of what flashlab uses, and the command that puts right what is missing."""
    from flashlab.cli import doctor as module

    findings = module.examine(data)
    if as_json:
        _emit_json([asdict(finding) for finding in findings])
    else:
        _emit_table(("", "state", "found"), [(f.name, f.state, f.detail) for f in findings])
        for finding in findings:
            if finding.fix:
                _say(f"{finding.name}: {finding.fix}")
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def stages(
    *,
    dead_ends: Annotated[bool, typer.Option("--dead-ends", help="List the dead ends in place of the ladder.")] = False,
    as_json: Json = False,
) -> None:
    """List the stages: what each changes, where it runs, what can be tuned."""
    listed = _choose_stages(None, dead_ends)
    rows = [
        {
            "id": stage.id,
            "title": stage.title,
            "parent": stage.parent,
            "question": stage.question,
            "change": stage.change,
            "prediction": stage.prediction,
            "archs": stage.archs,
            "dtypes": stage.dtypes,
            "head_dims": stage.head_dims,
            "params": {
                name: {"default": param.default, "choices": param.choices, "by_head_dim": dict(param.by_head_dim)}
                for name, param in stage.params.items()
            },
        }
        for stage in listed
    ]
    if as_json:
        _emit_json(rows)
        return
    _emit_table(
        ("stage", "title", "parent", "architectures", "dtypes", "head dims", "tunables"),
        [
            (
                stage.id,
                stage.title,
                stage.parent,
                stage.needs,
                " ".join(stage.dtypes),
                " ".join(map(str, stage.head_dims)),
                " ".join(f"{name}={param.default}" for name, param in stage.params.items()) or None,
            )
            for stage in listed
        ],
    )


@app.command(name="compile")
def compile_(
    stage_ids: StageIds = None, *, dead_ends: DeadEnds = False, arch: Archs = None, as_json: Json = False
) -> None:
    """Compile stages for architectures, no GPU needed, and show what ptxas says of each."""
    from flashlab.build import compiler

    chosen = _choose_stages(stage_ids, dead_ends) if stage_ids or dead_ends else None
    work = compiler.jobs(chosen, _choose_archs(arch))
    if not work:
        able = "; ".join(f"{stage.id} for {', '.join(stage.archs)}" for stage in chosen or ())
        raise ParameterError(
            f"arch: wanted one that a named stage is compiled for, got {', '.join(arch or ())}. Compiled are {able}"
        )
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(work))

        def step(job: compiler.Job, _: object) -> None:
            progress.update(task, advance=1, description=job.label)

        results = compiler.compile_many(work, progress=step)
    rows: list[dict[str, Any]] = []
    failures: list[CompileError] = []
    for job, result in zip(work, results, strict=True):
        row: dict[str, Any] = {
            "stage": job.stage.id,
            "arch": job.arch,
            "head_dim": job.head_dim,
            "dtype": job.dtype,
            "mask": "causal" if job.causal else "full",
        }
        if isinstance(result, CompileError):
            failures.append(result)
            row["error"] = str(result)
        else:
            row |= asdict(result.resources)
            row["dynamic_smem_bytes"] = result.launch_shape.smem_bytes if result.launch_shape else None
            row["threads"] = result.launch_shape.threads if result.launch_shape else None
            row["seconds"] = round(result.compile_seconds, 3)
            row["cached"] = result.cached
            row["sha256"] = result.sha256
        rows.append(row)
    if as_json:
        _emit_json(rows)
    else:
        columns = {
            "stage": "stage",
            "arch": "arch",
            "head_dim": "D",
            "dtype": "dtype",
            "mask": "mask",
            "registers": "registers",
            "spill_store_bytes": "spilled B",
            "stack_bytes": "stack B",
            "static_smem_bytes": "static B",
            "dynamic_smem_bytes": "dynamic B",
            "threads": "threads",
            "seconds": "seconds",
            "cached": "cached",
        }
        _emit_table(tuple(columns.values()), [[row.get(name) for name in columns] for row in rows])
    for failure in failures:
        _report(failure)
    if failures:
        _say(f"{len(failures)} of {len(work)} failed")
        raise typer.Exit(1)


@app.command()
def sass(
    stage_id: Annotated[
        str, typer.Argument(metavar="STAGE", help="A stage's id, or ID[NAME=VALUE] with values of its tunables.")
    ],
    *,
    arch: Annotated[str, typer.Option(help="Architecture.")] = "sm_90a",
    head_dim: HeadDim = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float16",
    mask: Annotated[str, typer.Option(help=f"One of {', '.join(MASKS)}.")] = "full",
    listing: Annotated[bool, typer.Option("--listing", help="Print every instruction.")] = False,
    as_json: Json = False,
) -> None:
    """Count a stage's machine instructions by class, or list them; no GPU needed."""
    from flashlab.build import compiler
    from flashlab.build import sass as module

    stage, variant = registry.parse(stage_id)
    _choose_archs([arch])
    # A problem of one query checks head dim, element type and mask the way every other command does.
    problem = Problem.parse(f"1x1x1x{stage.head_dims[0] if head_dim is None else head_dim}", dtype=dtype, mask=mask)
    cubin = compiler.compile_stage(
        stage, head_dim=problem.head_dim, dtype=problem.dtype, causal=problem.causal, arch=arch, overrides=variant
    )
    instructions = module.disassemble(cubin.code, cubin.entry)
    if listing:
        if as_json:
            _emit_json([asdict(instruction) | {"class": module.classify(instruction)} for instruction in instructions])
        else:
            for instruction in instructions:
                sys.stdout.write(f"{instruction.address:6x}  {instruction.text}\n")
        return
    counts = module.mix(cubin.code, cubin.entry)
    branches = module.branches(instructions)
    if as_json:
        told = {"counts": counts, "branches": asdict(branches), "shared_memory": module.shared_memory(instructions)}
        _emit_json({"stage": stage.id, "arch": arch, "sha256": cubin.sha256, **told})
        return
    total = counts["total"] or 1
    _emit_table(
        ("class", "count", "%", "what it holds"),
        [(name, count, f"{100 * count / total:.1f}", module.CLASSES[name]) for name, count in counts.items()],
        title=f"{stage_id} D{problem.head_dim} {problem.mask} {problem.dtype} on {arch}",
    )
    _say(
        f"branches under a condition: {branches.predicated}, and {branches.predicated_exits} exits; in subroutines "
        f"{branches.in_subroutines}. Instructions on shared memory: {module.shared_memory(instructions)}"
    )


@app.command()
def check(
    stage_ids: StageIds = None,
    *,
    dead_ends: DeadEnds = False,
    length: Annotated[list[str] | None, typer.Option(help="SQxSK, such as 113x203; hostile ones if not given.")] = None,
    dtype: OneDType = None,
    mask: OneMask = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND]...",
            help=f"What Q, K and V hold: {_KINDS}; or {ALL}. {NORMAL} if not given, and without --length hostile ones.",
        ),
    ] = None,
    source: Source = None,
    on: Annotated[
        Where | None, typer.Option(help="gpu, cpu, or both and compare them; gpu where there is one if not given.")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="On the CPU, the order of warps: ascending, descending or seeded:N; may be repeated."),
    ] = None,
    races: Annotated[
        bool, typer.Option("--races", help="On the CPU, look for races and bad accesses too; slower.")
    ] = False,
    random: Annotated[
        int, typer.Option(min=0, help="So many random problems and layouts in place of lengths, types, masks, layouts.")
    ] = 0,
    suite: Annotated[
        str | None,
        typer.Option(help="Other people's cases, by their rule: flash-attention, the forward cases of its own tests."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs, and of what --random draws.")] = 0,
    insist: Annotated[bool, typer.Option("--insist", help="On the CPU, however long it takes.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the verdicts to data/<gpu>/checks/, or random/.")
    ] = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Compare stages with the float64 oracle, over lengths, layouts, types, masks and inputs that break kernels.

    Runs on the GPU, or on the CPU, where every stage runs on any machine.
    """
    from flashlab.measure import bench as module
    from flashlab.run import gpu
    from flashlab.run.emulator import DEFAULT_TIMEOUT_S
    from flashlab.verify import cases as checks

    chosen = [*(stage_ids or ()), *(registry.DEAD_ENDS if dead_ends else ())] or list(registry.STAGES)
    lengths = [_length(text) for text in length] if length else None
    dtypes, masks = (dtype,) if dtype else DTYPES, (mask,) if mask else MASKS
    kinds = None if inputs is None else kinds_in(inputs)
    if kinds and TRAINED in kinds and len(kinds) > 1:
        kinds = tuple(kind for kind in kinds if kind != TRAINED)
        _say(
            f"{TRAINED} inputs are left out: they have one shape, and `flashlab bench` checks them where it times them"
        )
    sources = _sources(source)
    if on is None:
        on = "cpu" if gpu.available() and not record else "gpu"
        if on == "cpu":
            _say(f"no GPU ({gpu.absence()}), so on the CPU")
    if on != "cpu" and (schedule or races or insist):
        raise ParameterError("--schedule, --races and --insist: wanted --on cpu, which they are for, got --on " + on)
    if suite and (random or length or inputs or schedule):
        raise ParameterError("--suite: wanted no --random, --length, --inputs or --schedule, which it has itself")
    if random and (length or dtype or mask):
        raise ParameterError("--random: wanted no --length, --dtype or --mask beside it, since it draws them itself")
    if on == "cpu" and record:
        raise ParameterError("--record: wanted --on gpu or both: data/ holds what GPUs did, got --on cpu")
    with _progress() as progress:
        follow = _follow(progress, "checking")
        if on == "cpu":
            found = checks.check_on_cpu(
                chosen,
                lengths=lengths,
                dtypes=dtypes,
                masks=masks,
                inputs=kinds,
                sources=sources,
                schedules=schedule,
                races=races,
                random=random,
                suite=suite,
                seed=seed,
                timeout_s=None if insist else DEFAULT_TIMEOUT_S,
                follow=lambda *step: follow(module.Progress(*step)),
            )
        else:
            found = module.check_stages(
                chosen,
                lengths=lengths,
                dtypes=dtypes,
                masks=masks,
                inputs=kinds,
                sources=sources,
                data=data if record else None,
                emulate=on == "both",
                random=random,
                suite=suite,
                seed=seed,
                device=device,
                progress=follow,
            )
    if as_json:
        _emit_json(
            [
                {
                    "stage": row.stage,
                    "shape": row.problem.shape,
                    "dtype": row.problem.dtype,
                    "mask": row.problem.mask,
                    "inputs": row.problem.inputs,
                    "layout": row.layout,
                    "status": row.status,
                    "reason": row.reason,
                    "verdict": row.verdict.model_dump() if row.verdict else None,
                    "schedule": row.schedule or None,
                    "findings": row.findings,
                    "fallbacks": row.fallbacks._asdict() if row.fallbacks else None,
                    "emulator": asdict(row.emulator) if row.emulator else None,
                }
                for row in found.rows
            ]
        )
    else:
        counts: dict[str, Counter[str]] = {}
        fallbacks: Counter[tuple[str, str]] = Counter()
        for row in found.rows:
            counts.setdefault(row.stage, Counter())[row.status] += 1
            for what, count in (row.fallbacks._asdict() if row.fallbacks else {}).items():
                fallbacks[row.stage, what] += count
        _emit_table(
            ("stage", "passed", "failed", "unsupported", "renormalized", "recomputed"),
            [
                (
                    *(name, count["ok"], count.total() - count["ok"] - count["unsupported"], count["unsupported"]),
                    *(fallbacks[name, what] for what in ("renormalized", "recomputed")),
                )
                for name, count in counts.items()
            ],
        )
    if found.path:
        _say(f"recorded in {found.path}")
    for failure in found.failures:
        how = " ".join(filter(None, (failure.layout, failure.schedule)))
        _say(f"{failure.stage}, {failure.problem.label}, {how}: {failure.status}: {failure.reason}")
    failures = [failure for failure in found.failures if not _is_kept_wrong(failure.stage, failure.status)]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(found.rows)} checks failed")


@app.command()
def bench(
    *,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "first",
    shape: Annotated[list[str] | None, typer.Option(help="BxHxSxD or BxHxHkvxSqxSkxD, in place of a suite.")] = None,
    dtype: OneDType = None,
    mask: OneMask = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Of the suite, only these head dims.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Of the suite, only these sequence lengths.")] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND]...",
            help=f"What Q, K and V hold: {_KINDS}; or {ALL}. If not given {ALL} of the suite inputs, else {NORMAL}.",
        ),
    ] = None,
    stage_ids: Annotated[
        str | None,
        typer.Option("--stages", help="Ids, or ID[NAME=VALUE], joined by commas, or none; the ladder if not given."),
    ] = None,
    dead_ends: Annotated[
        bool,
        typer.Option(
            "--dead-ends",
            help="Every dead end and the variants that show why; beside --stages, in place of the ladder.",
        ),
    ] = False,
    peers: Annotated[str | None, typer.Option(help="Names joined by commas, or none; all if not given.")] = None,
    source: Source = None,
    ceilings: Annotated[bool, typer.Option(help="Measure the GPU's own limits too.")] = True,
    samples: Annotated[int | None, typer.Option(help="Hot burst samples to aim for; the suite's if not given.")] = None,
    min_samples: Annotated[
        int | None, typer.Option(help="Hot burst samples of a slow one at least; the suite's if not given.")
    ] = None,
    cold: Annotated[int | None, typer.Option(help="Cold burst samples; the suite's if not given.")] = None,
    sustained: Annotated[
        float | None,
        typer.Option(
            help="Seconds of continuous calls at every problem, 0 for none; if not given the suite's, "
            "which is at the first shape alone for smoke, first and standard."
        ),
    ] = None,
    sustained_on: Annotated[
        str | None, typer.Option(help="Stages and libraries to call for seconds, joined by commas; all if not given.")
    ] = None,
    lse: Annotated[
        bool | None,
        typer.Option(
            "--lse/--no-lse",
            help="Time every stage a second time with the log-sum-exp on; if not given as the suite has it: on "
            "for peers and inputs.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it may take, and measure nothing.")] = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Check and time stages and libraries on the GPU, in turn, and append a run to data/<gpu>/runs/."""
    from flashlab.measure import bench as module

    problems = (
        [
            Problem.parse(text, dtype=one_dtype, mask=one_mask)
            for text in shape
            for one_dtype in ((dtype,) if dtype else DTYPES)
            for one_mask in ((mask,) if mask else MASKS)
        ]
        if shape
        else [problem for problem in suite_of(suite) if dtype in (None, problem.dtype) and mask in (None, problem.mask)]
    )
    default = ALL if suite == "inputs" and not shape else NORMAL
    kinds = kinds_in(default if inputs is None else inputs)
    chosen = [
        replace(problem, inputs=kind)
        for problem in problems
        for kind in kinds
        if (not head_dim or problem.head_dim in head_dim) and (not length or problem.q_len in length)
    ]
    if not chosen:
        raise ParameterError(
            f"wanted problems of that kind in {' '.join(shape) if shape else f'suite {suite}'}, found none. It has "
            f"head dims {', '.join(map(str, sorted({p.head_dim for p in problems})))} and lengths "
            f"{', '.join(map(str, sorted({p.q_len for p in problems})))}"
        )
    plan = module.Plan(sustained_shapes=(FIRST_SHAPE,)) if shape else module.plan_of(suite)
    if samples is not None:
        plan = replace(plan, samples=samples)
    if min_samples is not None:
        plan = replace(plan, min_samples=min_samples)
    if cold is not None:
        plan = replace(plan, cold_samples=cold)
    if sustained is not None:
        plan = replace(plan, sustained_seconds=sustained, sustained_shapes=None)
    if sustained_on is not None:
        plan = replace(plan, sustained_names=tuple(_names(sustained_on) or ()))
    if lse is not None:
        plan = replace(plan, lse=lse)
    named = _names(stage_ids)
    if dead_ends:
        variants = [name for stage in registry.DEAD_ENDS.values() for name in (stage.id, *stage.variant_names)]
        named = [*(named or ()), *variants]
    what: dict[str, Any] = {
        "stages": named,
        "peers": _names(peers),
        "sources": _sources(source),
        "plan": plan,
        "ceilings": ceilings,
    }
    if dry_run:
        _foretell(chosen, what, as_json)
        return
    with _progress() as progress:
        path = module.run(
            chosen,
            **what,
            data=data,
            device=device,
            progress=_follow(progress, "measuring"),
            note=_say,
        )
    run = store.read_run(path)
    rows = (*run.measurements, *run.with_lse)
    flat = [store.flat(row) for row in rows]
    if as_json:
        _emit_json(flat)
    else:
        _emit_rows(flat, title=f"{path.stem}, burst, hot L2")
    _say(f"recorded in {path}")
    failures = [
        row
        for row in rows
        if row.status not in ("ok", "missing", "unsupported") and not _is_kept_wrong(row.name, row.status)
    ]
    if failures:
        raise CheckFailedError(
            f"{len(failures)} of {len(rows)} rows have no time: "
            + "; ".join(f"{row.name} at {row.problem.problem().label}: {row.status}: {row.reason}" for row in failures)
        )


def _foretell(problems: Sequence[Problem], what: Mapping[str, Any], as_json: bool) -> None:
    """How long a run may take, from what is recorded in the checkout."""
    from flashlab.measure import bench as module

    known = [row for name in store.gpus() for run in store.runs(name) for row in run.measurements]
    found, total_s = module.estimate(problems, **what, known=known)
    if as_json:
        _emit_json({"seconds": total_s, "problems": [asdict(one) for one in found]})
        return
    _emit_table(
        ("problem", "implementations", "sustained", "seconds"),
        [(one.problem.label, one.implementations, one.sustained, f"{one.seconds:.0f}") for one in found],
    )
    _say(f"about {total_s / 60:.1f} minutes with the start; nothing was measured")


@app.command()
def tune(
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="A stage's id; none with --plan.")] = None,
    *,
    plan: Annotated[
        Path | None,
        typer.Option(help="A JSON list of stages, head dims and variants, such as scripts/tuning.json: all in one go."),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head dim; all of the stage's if not given.")] = None,
    mask: OneMask = None,
    dtype: Annotated[DType, typer.Option(help="Element type.")] = "float16",
    param: Annotated[
        list[str] | None, typer.Option(help="NAME=a,b,c: values of a tunable; if none is given, all choices of all.")
    ] = None,
    listed: Annotated[Path | None, typer.Option("--list", help="A JSON list of variants, in place of a grid.")] = None,
    each: Annotated[bool, typer.Option("--each", help="Vary one tunable at a time, not all combinations.")] = False,
    limit: Annotated[int, typer.Option(help="Refuse more combinations than these.", min=1)] = 256,
    shape: Annotated[list[str] | None, typer.Option(help="BxHxSxD to tune on; the first shape if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be tried, and try nothing.")] = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Try a stage's tunables on the GPU, and append every variant, losers too, to data/<gpu>/tuning/."""
    from flashlab.measure import tune as module

    if (stage is None) == (plan is None):
        raise ParameterError("wanted a STAGE or --plan, got " + ("neither" if stage is None else "both"))
    if plan is not None:
        tasks = [
            task
            for task in module.read_plan(plan)
            if (not head_dim or task.key.problem.head_dim in head_dim) and mask in (None, task.key.problem.mask)
        ]
        for task in tasks if dry_run else ():
            beside = f", beside {', '.join(task.peers)}" if task.peers else ""
            _say(f"{task.key.stage} {task.key.problem.label}: {len(task.variants)} variants{beside}")
        if dry_run:
            _say(f"about {module.estimate_s(tasks):.0f} s with the start; nothing was measured")
        if not dry_run:
            with _progress() as progress:
                done = module.tune_all(
                    tasks, data=data, device=device, announce=_say, progress=_follow(progress, "tuning")
                )
            _tell_tuned(done, as_json)
        return
    assert stage is not None
    found = registry.get(stage)
    grid = module.parse_grid(found, param) if param else None
    done = []
    for one_head_dim in head_dim or found.head_dims:
        for one_mask in (mask,) if mask else MASKS:
            variants = module.read_variants(listed, found, one_head_dim) if listed else None
            if dry_run:
                tried = variants or module.variants_of(found, one_head_dim, grid, each=each, limit=limit)
                _say(f"{stage} D{one_head_dim} {one_mask} {dtype}: {len(tried)} variants")
                continue
            done.append(
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
                    announce=_say,
                )
            )
    if not dry_run:
        _tell_tuned(done, as_json)


def _tell_tuned(done: Sequence[Tuned], as_json: bool) -> None:
    """What the last round of each tuning gave."""
    from flashlab.measure import tune as module

    lines = []
    for one in done:
        trials, _ = store.read_tunings(one.rounds[-1])
        for trial in module.trials(trials):
            if trial.key.stage == one.stage and trial.key.problem in one.problems:
                lines.append((trial.key, trial, one.rounds[-1]))
    lines.sort(key=lambda line: (line[0], line[1].median_us or float("inf")))
    if as_json:
        _emit_json([{**asdict(trial), "path": str(path)} for _, trial, path in lines])
        return
    _emit_table(
        ("stage", "problem", "variant", "us", "defaults / it", "why not"),
        [
            (
                key.stage,
                key.problem.label,
                " ".join(f"{name}={value}" for name, value in trial.parameters.items()),
                "" if trial.median_us is None else f"{trial.median_us:.1f}",
                "" if trial.speedup is None else f"{trial.speedup:.3f}",
                trial.reason[:80],
            )
            for key, trial, _ in lines
        ],
    )
    for one in done:
        _say(
            f"{one.stage} {', '.join(problem.label for problem in one.problems)}: {one.refused} variants refused, "
            f"{one.twins} left out as twins, {len(one.rounds)} rounds, the last in {one.rounds[-1]}"
        )


@app.command()
def tuned(
    *,
    gpu: Annotated[
        str | None, typer.Option(help="Folder under data/, such as nvidia-h200; this machine's GPU if not given.")
    ] = None,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Write data/<gpu>/tuned.json, from which `flashlab.attention` chooses stage and tunables, from the records.

    Shows what is chosen for every problem that torch's SDPA was timed on, and where that is slower.
    """
    from flashlab.measure import tune as module

    name = _tuned_gpu(gpu, data)
    path = module.write_table(name, data)
    held = module.held_against(name, data=data)
    if as_json:
        _emit_json(
            [
                {
                    **_problem_fields(one.problem),
                    **_choice_fields(one.choice),
                    "run": one.run or None,
                    "measured_us": one.time_us,
                    "sdpa_us": one.peer_us,
                    "ratio": one.ratio,
                    "small_grids": one.small_grids,
                }
                for one in held
            ]
        )
        return
    _emit_table(
        ("problem", "stage", "tunables", "µs", "SDPA, µs", "times faster", "run"),
        [
            (
                one.problem.label,
                one.choice.stage.id,
                _tunables(one.choice.parameters),
                one.time_us,
                one.peer_us,
                None if one.ratio is None else f"{one.ratio:.3f}",
                one.run or "not in one process",
            )
            for one in held
        ],
    )
    slower = [one.problem.label for one in held if one.ratio is not None and one.ratio < 1]
    _say(f"{len(slower)} of {len(held)} slower than SDPA{': ' if slower else ''}{', '.join(slower)}")
    _say(f"Written to {path}")


@app.command()
def explain(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="BxHxSxD or BxHxHkvxSqxSkxD, such as 1x8x512x64.")],
    *,
    mask: Annotated[Mask, typer.Option(help="Mask.")] = "full",
    dtype: Annotated[DType, typer.Option(help="Element type.")] = "float16",
    gpu: Annotated[
        str | None, typer.Option(help="Folder under data/, such as nvidia-h200; this machine's GPU if not given.")
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Architecture, such as sm_90a, of a --gpu that has no records and is not here.")
    ] = None,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Say which stage and tunables `flashlab.attention` takes for a problem, why, and how long it may take."""
    from flashlab.query.kinship import times_carry_over
    from flashlab.run import choice as module

    problem = Problem.parse(shape, dtype=dtype, mask=mask)
    name, arch, sm_count = _explained_gpu(gpu, arch, data)
    found = module.rank(problem, name, arch, sm_count, data)
    kin = found.table.gpu if found.table is not None and found.table.gpu != name else None
    carries, differs = times_carry_over(name, kin) if kin else (True, "")
    lent = f"{name} has no records of its own, so its nearest kin, {kin}, chooses. {differs}" if kin else ""
    chosen: dict[str, object] = {"gpu": name, "arch": arch, **_problem_fields(problem)}
    if not found.choices:
        # What `attention` falls back to; it raises where nothing runs the problem.
        last = registry.best(problem, arch)
        reason = f"Nothing of head dim {problem.head_dim} is on record: the last rung that runs it."
        chosen |= {"stage": last.id, "parameters": last.parameters(problem.head_dim), "predicted_us": None}
        chosen |= {"on_record": False, "reason": reason, "kin": kin, "lent": lent, "runners_up": []}
    else:
        fields = [_choice_fields(choice, carries=carries) for choice in found.choices]
        reason = module.reason(problem, found)
        chosen |= {**fields[0], "reason": reason, "kin": kin, "lent": lent, "runners_up": fields[1:3]}
    if as_json:
        _emit_json(chosen)
        return
    _emit_table(
        ("", "stage", "tunables", "predicted µs", "time from", "run", "tunables from"),
        [
            (
                place,
                one["stage"],
                _tunables(one["parameters"]),
                one["predicted_us"],
                one.get("time_from"),
                one.get("run"),
                one.get("tuned_on"),
            )
            for place, one in zip(
                ("taken", "second", "third"), [chosen, *cast(list[dict[str, Any]], chosen["runners_up"])], strict=False
            )
        ],
        title=f"{problem.label} on {name}",
    )
    typer.echo(" ".join(filter(None, (reason, lent))))


def _explained_gpu(gpu: str | None, arch: str | None, data: Path) -> tuple[str, str, int | None]:
    """Folder, architecture and SMs of the GPU to explain a choice for; None where its SMs are not known."""
    from flashlab.query.kinship import MODELS, model_in
    from flashlab.run import choice as tables
    from flashlab.run import gpu as module

    here = module.info() if module.available() is None else None
    known = sorted(path.parent.name for path in data.glob(f"*/{tables.FILE}"))
    name = gpu or (here.slug if here else known[0] if known else None)
    if name is None:
        raise NoDataError(
            f"wanted a GPU, or a table of choices under {data}, found neither. `flashlab tune` and `flashlab tuned` on "
            "a machine with an NVIDIA GPU make one."
        )
    _choose_archs([arch] if arch else None)
    if here is not None and name == here.slug:
        return name, here.arch, here.sm_count
    own = tables.table(name, data)
    model = model_in(name)
    found = own.arch if own is not None else arch or (MODELS[model].arch if model else None)
    if found is None:
        raise ParameterError(
            f"gpu: wanted one with a table under {data} ({', '.join(known) or 'none yet'}), or --arch beside it, got "
            f"{name!r}. Architectures: {', '.join(registry.ARCHS)}."
        )
    return name, found, own.sm_count if own is not None else None


def _problem_fields(problem: Problem) -> dict[str, object]:
    return {"problem": problem.label, "shape": problem.shape, "mask": problem.mask, "dtype": problem.dtype}


def _choice_fields(choice: Choice, *, carries: bool = True) -> dict[str, Any]:
    """A choice as data; without its time where that does not carry over."""
    return {
        "stage": choice.stage.id,
        "parameters": dict(choice.parameters),
        "predicted_us": choice.time_us if carries else None,
        "on_record": choice.distance == 0,
        "time_from": choice.row.problem.label,
        "run": choice.row.run,
        "tuned_on": choice.tuned_on.problem.label if choice.tuned_on else None,
    }


def _tunables(parameters: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in parameters.items())


@app.command()
def chip(
    cases: Annotated[
        list[str] | None, typer.Argument(metavar="[CASE]...", help="Cases or groups; all where none is given.")
    ] = None,
    *,
    launches: Annotated[int, typer.Option(help="Of each case, on one SM and again on all.", min=1)] = 5,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Read what one Hopper SM does in a clock, and append the readings to data/<gpu>/chip/."""
    from flashlab.experiments import chip as module

    chosen = module.choose(cases or None)
    with _progress() as progress:
        task = progress.add_task("compiling", total=len(chosen))

        def announce(name: str) -> None:
            progress.update(task, description=name, advance=1)

        path = module.measure(cases or None, data=data, device=device, launches=launches, announce=announce)
    readings, _ = module.read(path)
    if as_json:
        _emit_json([reading.model_dump(mode="json") for reading in readings])
        return
    _emit_table(
        ("case", "unit", "one SM", "all SMs", "beside"),
        [
            (
                reading.name,
                reading.unit,
                f"{reading.value:.4g}",
                f"{median(reading.all_sms):.4g}",
                f"{median(reading.beside):.4g}" if reading.beside else "",
            )
            for reading in readings
        ],
    )
    _say(f"Recorded in {path}")


@app.command()
def method(
    *,
    stage_ids: Annotated[str | None, typer.Option("--stages", help="Ids joined by commas, or none.")] = None,
    peers: Annotated[str | None, typer.Option(help="Names joined by commas, or none.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="BxHxSxD; the first one is called for seconds too.")] = None,
    samples: Annotated[int, typer.Option(help="Of each, by CUDA events.", min=4)] = 20,
    rounds: Annotated[int, typer.Option(help="Of NVBench's measurements.", min=1)] = 4,
    sustained: Annotated[float, typer.Option(help="Seconds of continuous calls, 0 for none.", min=0)] = 1.5,
    seconds: Annotated[float, typer.Option(help="For all of it; what does not fit is left out.", min=1)] = 90,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Read the same kernels with CUDA events, CUPTI and NVBench, hot and cold, on random numbers and zeros.

    The readings go to data/<gpu>/readings/. A timer that is not installed is named with what installs it.
    """
    from flashlab.experiments import timers as module

    measured = module.measure(
        _names(stage_ids),
        _names(peers),
        shape,
        samples=samples,
        rounds=rounds,
        sustained_s=sustained,
        timeout_s=seconds,
        data=data,
        device=device,
        say=_say,
    )
    found = module.comparisons(module.pools(store.read_readings(measured.path)))
    if as_json:
        _emit_json(
            {
                "path": str(measured.path),
                "missing": measured.missing,
                "comparisons": [
                    {
                        "name": one.ours.name,
                        "shape": one.ours.problem.shape,
                        "inputs": one.ours.inputs,
                        "cache": one.ours.cache,
                        "timer": one.other.timer,
                        "events_us": one.ours.median_us,
                        "other_us": one.other.median_us,
                        "ratio": asdict(one.ratio),
                        "agrees": one.agrees,
                        "why": one.why,
                    }
                    for one in found
                ],
            }
        )
    else:
        _emit_table(
            ("name", "shape", "inputs", "L2", "timer", "events µs", "other µs", "other / events", "difference"),
            [
                (
                    one.ours.name,
                    one.ours.problem.shape,
                    one.ours.inputs,
                    one.ours.cache,
                    one.other.timer,
                    one.ours.median_us,
                    one.other.median_us,
                    str(one.ratio),
                    one.why or "agrees",
                )
                for one in found
            ],
        )
    for line in measured.missing:
        _say(f"no reading: {line}")
    _say(f"Recorded in {measured.path}")


@app.command()
def profile(
    stage_ids: StageIds = None,
    *,
    shape: Shape = None,
    dtype: Annotated[DType, typer.Option(help="Element type.")] = "float16",
    mask: Annotated[Mask, typer.Option(help="Mask.")] = "full",
    inputs: Annotated[str, typer.Option(metavar="KIND", help=f"What Q, K and V hold: {_KINDS}.")] = NORMAL,
    lines: Annotated[int, typer.Option(help="Source lines to print of each stage; 0 for none.", min=0)] = 3,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Profile stages with Nsight Compute, and append what units and warps did to data/<gpu>/profiles/."""
    from flashlab.measure import profile as module

    problem = Problem.parse(shape or FIRST_SHAPE, dtype=dtype, mask=mask, inputs=drawn(inputs))
    missed: list[str] = []

    def say(line: str) -> None:
        _say(line)
        if line.endswith("not profiled"):
            missed.append(line)

    path, found = module.profile(stage_ids or None, problem, data=data, device=device, say=say)
    if as_json:
        _emit_json([one.model_dump(mode="json") for one in found])
    else:
        _emit_table(
            ("stage", "tensor %", "issue %", "warps %", "DRAM MB", "L2 MB", "conflicts %", "warps"),
            [
                (
                    one.stage,
                    one.tensor_percent,
                    one.issue_percent,
                    one.warps_percent,
                    None if one.dram_bytes is None else one.dram_bytes / 1e6,
                    None if one.l2_bytes is None else one.l2_bytes / 1e6,
                    one.conflict_percent,
                    ", ".join(f"{state} {share:.0f} %" for state, share in list(one.states.items())[:3]),
                )
                for one in found
            ],
            title=f"{problem.label} on {found[0].gpu}",
        )
        hot = [(one, line) for one in found for line in one.lines[:lines]]
        if hot:
            _emit_table(
                ("stage", "line", "samples %", "most", "source"),
                [
                    (
                        one.stage,
                        f"{line.file}:{line.line}",
                        100 * line.total / sum(one.samples.values()),
                        next(iter(line.samples)),
                        line.text,
                    )
                    for one, line in hot
                ],
            )
        _say(f"Recorded in {path}")
    if missed:
        raise typer.Exit(1)


@app.command()
def ablate(
    axes: Annotated[
        list[str] | None, typer.Argument(metavar="[AXIS]...", help="Axes, or levers; all where none is given.")
    ] = None,
    *,
    of_source: Annotated[
        bool, typer.Option("--levers", help="Patches of a stage's source (kernels/levers/) in place of axes.")
    ] = False,
    shape: Shape = None,
    dtype: Annotated[DType | None, typer.Option(help="Element type; of axes float16 if not given.")] = None,
    mask: Annotated[Mask | None, typer.Option(help="Mask; of axes full if not given.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each level to aim for.", min=2)] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say which there are, and measure nothing.")] = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Change one thing in a stage at a time, on the GPU, and append every level to data/<gpu>/ablations/.

    A lever names the problems that it is measured on; --shape, --dtype and --mask put others in their place.
    """
    from flashlab.experiments import ablation as module

    plan = module.LEVER_PLAN if of_source else module.PLAN
    plan = plan if samples is None else replace(plan, samples=samples)
    if of_source:
        _ablate_levers(axes, shape, dtype, mask, plan, listed=listed, device=device, data=data, as_json=as_json)
        return
    chosen = module.choose(axes)
    if listed:
        rows = [
            {**asdict(axis), "levels": {level.name: dict(level.params) for level in axis.levels}} for axis in chosen
        ]
        if as_json:
            _emit_json(rows)
        else:
            _emit_table(
                ("axis", "stage", "levels", "claims"),
                [(a.name, a.stage, "; ".join(one.name for one in a.levels), " ".join(a.claims)) for a in chosen],
            )
        return
    problem = Problem.parse(shape or FIRST_SHAPE, dtype=dtype or "float16", mask=mask or "full")
    measure = partial(module.measure, [axis.name for axis in chosen], problem=problem)
    _measure_levels(measure, module.effects, plan=plan, device=device, data=data, as_json=as_json)


def _ablate_levers(
    chosen: Sequence[str] | None,
    shape: str | None,
    dtype: DType | None,
    mask: Mask | None,
    plan: Plan,
    *,
    listed: bool,
    device: int,
    data: Path,
    as_json: bool,
) -> None:
    from flashlab.experiments import ablation as module
    from flashlab.experiments import levers

    found = levers.choose(chosen)

    def instead(of: Problem) -> Problem:
        return replace(Problem.parse(shape) if shape else of, dtype=dtype or of.dtype, mask=mask or of.mask)

    problems = {lever.name: list(dict.fromkeys(map(instead, lever.problems))) for lever in found}
    if listed:
        rows = [
            {
                **{key: getattr(lever, key) for key in ("name", "stage", "question", "prediction", "why")},
                "problems": [of.label for of in problems[lever.name]],
                "diff": lever.diff,
            }
            for lever in found
        ]
        if as_json:
            _emit_json(rows)
        else:
            shown = ("name", "stage", "question")
            _emit_table((*shown, "problems"), [(*(row[k] for k in shown), "; ".join(row["problems"])) for row in rows])
        return
    measure = partial(module.measure_levers, problems)
    _measure_levels(measure, module.lever_effects, plan=plan, device=device, data=data, as_json=as_json)


def _measure_levels(
    measure: Callable[..., Path],
    effects: Callable[[Iterable[Ablation]], list[Effect]],
    *,
    plan: Plan,
    device: int,
    data: Path,
    as_json: bool,
) -> None:
    """Levels of axes, or levers, beside the first of their group; an error where one has no time."""
    with _progress() as progress:
        path = measure(plan=plan, data=data, device=device, announce=_say, progress=_follow(progress, "measuring"))
    found = effects(store.read_ablations(path)[0])
    _emit_effects(found, path, as_json)
    failures = [one for one in found if one.median_us is None]
    if failures:
        raise CheckFailedError(
            f"{len(failures)} of {len(found)} levels have no time: "
            + "; ".join(f"{one.group}, {one.name}: {one.reason}" for one in failures)
        )


@app.command()
def split(
    stage_ids: StageIds = None,
    *,
    shape: Annotated[list[str] | None, typer.Option(help="BxHxSxD; may be repeated.")] = None,
    dtype: Annotated[DType, typer.Option(help="Element type.")] = "float16",
    mask: Annotated[Mask, typer.Option(help="Mask.")] = "full",
    samples: Annotated[int | None, typer.Option(help="Samples of each part to aim for.", min=2)] = None,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Leave out one part of a stage's work at a time, on the GPU, and append its times to data/<gpu>/parts/.

    Q·K, the softmax, P·V, and the tiles of K and V. Without stages, all whose parts can be left out.
    """
    from flashlab.experiments import ablation as module

    plan = module.PLAN if samples is None else replace(module.PLAN, samples=samples)
    missing: list[str] = []
    with _progress() as progress:
        path = module.split(
            stage_ids,
            problems=[Problem.parse(one, dtype=dtype, mask=mask) for one in shape or module.SPLIT_SHAPES],
            plan=plan,
            data=data,
            device=device,
            announce=_say,
            progress=_follow(progress, "measuring"),
            note=missing.append,
        )
    _emit_effects(module.shares(store.read_parts(path)[0]) if path.is_file() else [], path, as_json)
    if missing:
        raise CheckFailedError(f"{len(missing)} parts have no time: {'; '.join(missing)}")


def _emit_effects(found: Sequence[Effect], path: Path, as_json: bool) -> None:
    """Levels or parts beside the first of their group."""
    try:
        rows = [one.flat() for one in found]
    except MissingPackageError as error:  # The records are written: what is missing here can be drawn elsewhere.
        _say(f"without intervals: {error}")
        rows = [one.flat(intervals=False) for one in found]
    if as_json:
        _emit_json(rows)
    else:
        columns = ("group", "name", "shape", "mask", "median_us", "ratio", "interval", "verdict", "samples")
        shown = (*columns, "registers", "spill_store_bytes", "blocks_per_sm", "reason")
        _emit_table(shown, [[_effect_cell(row[key]) for key in shown] for row in rows])
    _say(f"Recorded in {path}")


def _effect_cell(value: object) -> object:
    return " to ".join(f"{end:.4f}" for end in value) if isinstance(value, tuple) else value


@app.command()
def claims(
    *,
    gpu: Gpu = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure, on this GPU, what claims need and no other command does.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the verdicts to data/<gpu>/verdicts.json.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="A verdicts.json: list the claims whose verdict differs, and fail if any does.")
    ] = None,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Judge the claims of data/claims.csv by a GPU's records: verdict, our number, its interval, record and reason."""
    from flashlab.experiments import ledger as module

    if measure:
        with _progress() as progress:
            for path in module.measure(data=data, device=device, progress=_follow(progress, "measuring"), note=_say):
                _say(f"recorded in {path}")
    name = _gpu_with_data(gpu, data)
    found = module.verdicts(name, data)
    if write:
        _say(f"written to {module.write(found, name, data)}")
    if compare is not None:
        _compare_verdicts(found, module.read_verdicts(compare), compare, as_json)
        return
    if as_json:
        _emit_json([one.flat() for one in found])
        return
    _emit_table(
        ("claim", "verdict", "ours", "claimed", "record", "reason"),
        [
            (
                one.id,
                module.words(one.verdict),
                module.shown(one.decisive) if one.decisive else None,
                one.claimed or None,
                one.records[0] if one.records else None,
                one.reason,
            )
            for one in found
        ],
        title=f"{len(found)} claims, judged by the records of {name}",
    )
    counts = Counter(one.verdict for one in found)
    _say(", ".join(f"{counts[kind]} {module.words(kind)}" for kind in module.KINDS if counts[kind]))


def _compare_verdicts(here: Sequence[Verdict], there: Sequence[Verdict], path: Path, as_json: bool) -> None:
    """List the claims whose verdicts differ; an error where there are any."""
    from flashlab.experiments import ledger as module

    found = module.differences(here, there)
    if as_json:
        _emit_json(
            [
                {
                    "id": one.id,
                    "here": one.here.flat() if one.here else None,
                    "there": one.there.flat() if one.there else None,
                }
                for one in found
            ]
        )
    elif found:
        _emit_table(
            ("claim", "here", "there", "reason here", "reason there"),
            [
                (
                    one.id,
                    *(module.words(side.verdict) if side else None for side in (one.here, one.there)),
                    *(side.reason if side else None for side in (one.here, one.there)),
                )
                for one in found
            ],
        )
    if found:
        raise CheckFailedError(f"{len(found)} of {len(here)} verdicts differ from those in {path}")
    _say(f"All {len(here)} verdicts are those in {path}")


@app.command()
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
    from flashlab.measure.bench import Progress as Step

    found = []
    with _progress() as progress:
        follow = _follow(progress, "training")
        for config in module.CONFIGS.values():
            if head_dim in (str(config.head_dim), "both"):
                config = replace(config, steps=steps or config.steps)
                found.append(module.train(config, device=f"cuda:{device}", follow=lambda *step: follow(Step(*step))))
    if as_json:
        _emit_json(found)
        return
    columns = ("head_dim", "digest", "loss", "held_out_loss", "steps", "seconds")
    _emit_table(columns, [[one[key] for key in columns] for one in found], title="losses in nats a byte")
    _emit_table(
        ("head_dim", "layer", *found[0]["layers"][0]),
        [(one["head_dim"], index, *layer.values()) for one in found for index, layer in enumerate(one["layers"])],
        title="scores as causal attention sees them",
    )


@app.command()
def results(
    *,
    gpu: Gpu = None,
    shape: Shape = None,
    dtype: OneDType = None,
    mask: OneMask = None,
    inputs: Inputs = NORMAL,
    regime: Annotated[
        Regime | None,
        typer.Option(help="burst: short samples with gaps (if not given); sustained: power-limited."),
    ] = None,
    cache: Annotated[
        Cache | None,
        typer.Option(help="hot: calls back to back (if not given); cold: L2 overwritten before each."),
    ] = None,
    against_peers: Annotated[
        bool,
        typer.Option(
            "--against-peers",
            help="Our best stage against the best library at every problem, both of one run, instead.",
        ),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check checksums and every line instead.")] = False,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Show the newest recorded run, or what is left of it after the filters."""
    name = _gpu_with_data(gpu, data)
    if verify:
        _verify(name, data, as_json)
        return
    wanted = Problem.parse(shape).shape if shape else None
    kinds = kinds_in(inputs)
    if against_peers and (regime or cache):
        given = " ".join(f"--{key} {value}" for key, value in (("regime", regime), ("cache", cache)) if value)
        raise ParameterError(
            f"--against-peers: wanted no --regime or --cache beside it, got {given}. It shows bursts and sustained "
            "load side by side, with a hot L2; --shape, --dtype, --mask and --inputs go with it"
        )

    def suits(problem: Problem) -> bool:
        return (
            (wanted is None or problem.shape == wanted)
            and (dtype is None or problem.dtype == dtype)
            and (mask is None or problem.mask == mask)
            and problem.inputs in kinds
        )

    def fits(row: store.Measurement) -> bool:
        return suits(row.problem.problem())

    if against_peers:
        _against_peers(name, data, suits, kinds, as_json)
        return

    runs = store.runs(name, data)
    fitting = [rows for run in reversed(runs) if (rows := [row for row in run.measurements if fits(row)])]
    for run in runs:
        for damage in run.damage:
            _say(f"damaged, left out: {damage}")
    if not fitting:
        known = sorted({row.problem.problem().label for run in runs for row in run.measurements})
        what = " ".join(filter(None, (wanted, dtype, mask, inputs)))
        raise NoDataError(f"wanted rows of {what} on {name}, found none. Recorded: {'; '.join(known)}")
    regime, cache = regime or "burst", cache or "hot"
    chosen = _timed_so(fitting, regime, cache) if (regime, cache) != ("burst", "hot") else fitting[0]
    flat = [store.flat(row, regime, cache) for row in chosen]
    if as_json:
        _emit_json(flat)
        return
    _emit_rows(flat, title=f"{name}, run {flat[0]['run']}, {regime}, {cache} L2")


def _timed_so(
    fitting: Sequence[Sequence[store.Measurement]], regime: Regime, cache: Cache
) -> Sequence[store.Measurement]:
    """Of the runs' rows, newest first, the first that has a time in that state."""
    for rows in fitting:
        if any(row.samples_of(regime, cache) for row in rows):
            return rows
    known = {(one.regime, one.cache) for rows in fitting for row in rows for one in row.samples}
    works = "; ".join(f"--regime {one} --cache {other}" for one, other in sorted(known))
    raise NoDataError(
        f"wanted times with --regime {regime} --cache {cache}, found none in these rows. Recorded: {works or 'none'}"
    )


def _against_peers(gpu: str, data: Path, suits: Callable[[Problem], bool], kinds: Sequence[str], as_json: bool) -> None:
    """Our best stage against the best library, a row a problem."""
    from flashlab.query import select as module

    found = [one for one in module.against_peers(gpu, data, kinds) if suits(one.problem)]
    if not found:
        raise NoDataError(f"wanted such problems on {', '.join(kinds)} inputs among the records of {gpu}, found none")
    if as_json:
        _emit_json([one.flat() for one in found])
        return
    _emit_table(
        (
            *("problem", "stage", "µs", "% of peak", "library", "µs", "% of peak", "ratio", "log-sum-exp alike"),
            *("of fa3 or cuDNN", "sustained ratio", "log-sum-exp alike", "of fa3 or cuDNN", "worst layer"),
        ),
        [
            (
                one.problem.label,
                one.burst.stage if one.burst else one.reason,
                one.burst.stage_us if one.burst else None,
                one.burst.stage_percent_of_peak if one.burst else None,
                one.burst.peer if one.burst else None,
                one.burst.peer_us if one.burst else None,
                one.burst.peer_percent_of_peak if one.burst else None,
                *(f"{ratio:.3f}" if ratio else None for ratio in one.ratios),
                f"{one.burst.worst_ratio:.3f}" if one.burst and one.burst.worst_ratio else None,
            )
            for one in found
        ],
        title=f"{gpu}, newest run {max(one.run for one in found)}: the library's median time over the stage's, "
        "on normally distributed inputs of unit scale where a problem names no others",
    )


@app.command()
def report(
    *,
    source: Annotated[str, typer.Option(help="auto, measure or replay; auto measures where there is a GPU.")] = "auto",
    gpu: Annotated[str, typer.Option(help="Folder under data/ to show; the one at hand if not given.")] = "",
    stage_ids: Annotated[str, typer.Option("--stages", help="Stage ids joined by commas; all if not given.")] = "",
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for notebooks and site.", show_default=False)] = BUILD,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Run every notebook and build the report site; with an NVIDIA GPU, measure it first."""
    from flashlab.show import site as module

    index = module.run(
        source=source,
        gpu=gpu,
        stages=stage_ids,
        suite=suite,
        data=data.resolve(),
        out=out.resolve(),
        progress=_say,
    )
    if as_json:
        _emit_json({"index": str(index)})
    else:
        typer.echo(
            f"The report is in {index.parent}: open {index}. Its search works only when it is served: `make serve`."
        )


def _is_kept_wrong(name: str, status: str) -> bool:
    """Whether a wrong answer is what that stage is kept for; with other tunables it has to be right."""
    dead_end = registry.DEAD_ENDS.get(name)
    return status == "wrong" and dead_end is not None and bool(dead_end.defect)


def _emit_rows(flat: Sequence[Mapping[str, object]], *, title: str) -> None:
    columns = {
        "name": "name",
        "kind": "kind",
        "shape": "shape",
        "dtype": "dtype",
        "mask": "mask",
        "inputs": "inputs",
        "median_us": "median µs",
        "tflops": "TFLOP/s",
        "cv_percent": "CV %",
        "samples": "samples",
        "call_clock_mhz": "MHz",
        "cycles_per_score": "clocks/score",
        "energy_j_per_call": "J/call",
    }
    _emit_table(
        (*columns.values(), "status"),
        [
            [
                f"{row['name']}, log-sum-exp on" if row["kind"] == "stage" and row["lse"] else row["name"],
                *(row[key] for key in columns if key != "name"),
                row["status"] if row["status"] == "ok" else f"{row['status']}: {row['reason']}",
            ]
            for row in flat
        ],
        title=title,
    )


def _names(text: str | None) -> list[str] | None:
    """Names joined by commas, those in brackets left alone; None for all, empty for `none`."""
    if text is None:
        return None
    return [] if text.strip() == "none" else [name.strip() for name in _COMMA.split(text) if name.strip()]


_COMMA = re.compile(r",(?![^\[]*\])")


def _sources(texts: Sequence[str] | None) -> dict[str, Path]:
    """Edited copies of stages, by stage id."""
    found = {}
    for text in texts or ():
        stage_id, equals, file = text.partition("=")
        if not equals or not Path(file).is_file():
            raise ParameterError(f"source: wanted STAGE=FILE with a file that exists, got {text!r}")
        found[registry.get(stage_id).id] = Path(file).resolve()
    return found


def _length(text: str) -> tuple[int, int]:
    """Query and key length from `SQxSK`."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ParameterError(f"length: wanted SQxSK, two positive integers such as 113x203, got {text!r}")
    return int(parts[0]), int(parts[1])


def _follow(progress: Progress, what: str) -> Callable[[BenchProgress], None]:
    """Shows a run's steps: on a bar at a terminal, else a line each."""
    task = progress.add_task(what, total=None)

    def step(now: BenchProgress) -> None:
        progress.update(task, completed=now.done, total=now.total, description=now.text)
        if progress.disable:
            _say(f"[{now.done}/{now.total}] {now.text}")

    return step


def _tuned_gpu(gpu: str | None, data: Path) -> str:
    """The GPU to make a table for: the one named, else the one at hand, else the only one with tuning records."""
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


def _gpu_with_data(gpu: str | None, data: Path) -> str:
    known = store.gpus(data)
    if gpu is None and not known:
        raise NoDataError(
            f"wanted recorded runs under {data}, found none. "
            "`flashlab bench` on a machine with an NVIDIA GPU makes some."
        )
    if gpu is None:
        return known[0]
    if gpu not in known:
        raise NoDataError(
            f"gpu: wanted one with recorded runs under {data}, got {gpu!r}. "
            f"GPUs with data: {', '.join(known) or 'none yet'}."
        )
    return gpu


def _verify(gpu: str, data: Path, as_json: bool) -> None:
    damage = store.verify(gpu, data)
    if as_json:
        _emit_json([{"path": str(d.path), "line": d.line, "reason": d.reason} for d in damage])
        if damage:
            raise typer.Exit(1)
        return
    if damage:
        raise DamagedRecordError(f"data/{gpu}: wanted sound records, found:\n" + "\n".join(f"  {d}" for d in damage))
    runs = store.runs(gpu, data)
    _out().print(f"data/{gpu} is sound: {sum(len(run.records) for run in runs)} records in {len(runs)} runs")


def _say(line: str) -> None:
    """A message for people, on stderr."""
    _err().print(line, markup=False, highlight=False, soft_wrap=True)


def _report(error: FlashlabError) -> None:
    """One clear message on stderr."""
    text = str(error)
    if isinstance(error, CompileError):
        text += f"\n{error.source_line or ''}\ncommand: {error.command}\n{error.log}".rstrip()
    _err().print(
        f"flashlab: {text}", markup=False, highlight=False, soft_wrap=True, style="red" if sys.stderr.isatty() else ""
    )


def main() -> None:
    """Entry point of the `flashlab` program."""
    try:
        app(prog_name="flashlab")
    except FlashlabError as error:
        _report(error)
        sys.exit(1)
    except BrokenPipeError:
        # The reader (`head`, a pager) left early; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _say(f"flashlab: {error}")
        sys.exit(1)
