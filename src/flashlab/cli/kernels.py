"""Commands about the kernels themselves: none needs a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, complain, following, say
from flashlab.core.errors import CheckFailedError, CompileError, ParameterError, UnsupportedError
from flashlab.core.inputs import TRAINED
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA, require_checkout
from flashlab.core.problem import DTYPES, MASKS, Problem

if TYPE_CHECKING:
    from flashlab.verify.on_cpu import CheckRun


def _chosen(ids: Sequence[str] | None, dead_ends: bool = False) -> list[str]:
    """The named stages, and the dead ends where they are asked for; the ladder where that is nothing."""
    from flashlab.kernels import registry

    return list(dict.fromkeys([*(ids or ()), *(registry.DEAD_ENDS if dead_ends else ())]) or registry.STAGES)


def stages(*, dead_ends: opt.DeadEnds = False) -> None:
    """List the stages: what each changes, where it runs, what can be tuned."""
    from flashlab.kernels import registry

    rows = [registry.get(stage_id) for stage_id in _chosen(None, dead_ends)]
    shown = ("id", "title", "parent", "needs", "dtypes", "head_dims")
    fields = (*shown, "question", "change", "prediction", "archs", "params")
    columns = {name: name for name in shown}
    tunables = {"tunables": lambda stage: {name: param.default for name, param in stage.params.items()}}
    document = [{name: getattr(stage, name) for name in fields} for stage in rows]
    answer(rows, columns | tunables, document=document)


def compile_(
    stage_ids: opt.StageIds = None,
    *,
    dead_ends: opt.DeadEnds = False,
    arch: opt.Archs = None,
) -> None:
    """Compile stages for architectures, no GPU needed, and show what ptxas says of each."""
    from flashlab.build import compiler
    from flashlab.kernels import registry

    chosen = [registry.get(stage_id) for stage_id in _chosen(stage_ids, dead_ends)] if stage_ids or dead_ends else None
    jobs = compiler.jobs(chosen, arch or registry.ARCHS)
    if not jobs:
        able = "; ".join(f"{stage.id} for {', '.join(stage.archs)}" for stage in chosen or ())
        raise ParameterError(
            f"arch: wanted one that a named stage is compiled for, got {', '.join(arch or ())}. Compiled are {able}"
        )
    with following("compiling", lines=False) as follow:
        results = compiler.compile_many(jobs, follow=follow)
    rows: list[dict[str, Any]] = []
    for job, result in zip(jobs, results, strict=True):
        rows.append({"stage": job.stage.id, "arch": job.arch, "head_dim": job.head_dim, "dtype": job.dtype})
        rows[-1]["mask"] = "causal" if job.causal else "full"
        if isinstance(result, CompileError):
            rows[-1]["error"] = str(result)
            continue
        launch = result.launch_shape
        rows[-1] |= asdict(result.resources)
        rows[-1] |= {
            "dynamic_smem_bytes": launch.smem_bytes if launch else None,
            "threads": launch.threads if launch else None,
            "seconds": round(result.compile_seconds, 3),
            "cached": result.cached,
            "sha256": result.sha256,
        }
    columns = ("stage", "arch", "head_dim", "dtype", "mask", "registers", "spill_store_bytes", "stack_bytes")
    sizes = ("static_smem_bytes", "dynamic_smem_bytes", "threads", "seconds", "cached")
    answer(rows, (*columns, *sizes))
    failures = [result for result in results if isinstance(result, CompileError)]
    # A mistake in the source fails at every head dim, type and mask, each with its own command and log.
    for failure in {failure.summary: failure for failure in reversed(failures)}.values():
        complain(failure)
    if failures:
        say(f"{len(failures)} of {len(jobs)} failed")
        raise typer.Exit(1)


def sass(
    stage_id: Annotated[str, opt.STAGE],
    *,
    arch: opt.Arch = "sm_90a",
    head_dim: Annotated[int | None, typer.Option(help="The stage's first if not given.")] = None,
    dtype: opt.TheDType = "float16",
    mask: opt.TheMask = "full",
    listing: Annotated[bool, typer.Option("--listing", help="Print every instruction.")] = False,
) -> None:
    """Count a stage's machine instructions by class, or list them; no GPU needed."""
    from flashlab.build import compiler
    from flashlab.build import sass as module
    from flashlab.kernels import registry

    stage, variant = registry.parse(stage_id)
    # A problem of one query checks the head dim the way every other command does.
    problem = Problem.parse(f"1x1x1x{stage.head_dims[0] if head_dim is None else head_dim}", dtype=dtype, mask=mask)
    assert arch is not None
    cubin = compiler.compile_stage(compiler.Job.of(stage, problem, arch=arch, overrides=variant))
    instructions = module.disassemble(cubin.code, cubin.entry)
    if listing:
        if as_json():
            classes = map(module.classify, instructions)
            answer([asdict(line) | {"class": kind} for line, kind in zip(instructions, classes, strict=True)])
        else:
            sys.stdout.writelines(f"{line.address:6x}  {line.text}\n" for line in instructions)
        return
    counts = module.mix(cubin.code, cubin.entry)
    branches, shared = module.branches(instructions), module.shared_memory(instructions)
    percent = 100 / (counts["total"] or 1)
    answer(
        list(counts),
        {
            "class": str,
            "count": counts.get,
            "%": lambda name: f"{percent * counts[name]:.1f}",
            "what it holds": module.CLASSES.get,
        },
        title=f"{stage_id} D{problem.head_dim} {mask} {dtype} on {arch}",
        document={"stage": stage.id, "arch": arch, "sha256": cubin.sha256}
        | {"counts": counts, "branches": branches, "shared_memory": shared},
    )
    if not as_json():
        say(
            f"branches under a condition: {branches.predicated}, and {branches.predicated_exits} exits; in subroutines "
            f"{branches.in_subroutines}. Instructions on shared memory: {shared}"
        )


def check(
    stage_ids: opt.StageIds = None,
    *,
    dead_ends: opt.DeadEnds = False,
    length: Annotated[list[str] | None, typer.Option(help="SQxSK, such as 113x203; hostile ones if not given.")] = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    window: opt.TheWindow = None,
    softcap: opt.TheSoftcap = 0.0,
    inputs: opt.Inputs = None,
    source: opt.Source = None,
    on: Annotated[
        Literal["gpu", "cpu", "both"] | None, typer.Option(help="both compares them; gpu where there is one, else cpu.")
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="CPU: order of warps, ascending, descending or seeded:N; may be repeated.")
    ] = None,
    races: Annotated[bool, typer.Option("--races", help="CPU: look for races and bad accesses too; slower.")] = False,
    random: Annotated[int, typer.Option(min=0, help="So many random problems, features and layouts, instead.")] = 0,
    suite: Annotated[
        str | None, typer.Option(help="flash-attention: the forward cases of its own tests, by its rule, instead.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs, and of what --random draws.")] = 0,
    insist: Annotated[bool, typer.Option("--insist", help="CPU: however long it takes.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the verdicts to data/<gpu>/.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --record: go on in what this very code began here.")
    ] = False,
    device: opt.Device = 0,
    data: opt.Tables = DATA,
) -> None:
    """Compare stages with the float64 oracle, over lengths, layouts, types, masks and inputs that break kernels.

    Runs on the GPU, or on the CPU, where every stage runs on any machine. Inputs are normal if not given, and without
    --length hostile ones too. With --source and no STAGE the edited copies alone are checked.
    """
    from flashlab.kernels import registry
    from flashlab.measure import check as module
    from flashlab.run import gpu
    from flashlab.run.emulator import DEFAULT_TIMEOUT_S
    from flashlab.verify import on_cpu

    kinds = None if inputs is None else kinds_in(inputs)
    if kinds and TRAINED in kinds and len(kinds) > 1:
        kinds = tuple(kind for kind in kinds if kind != TRAINED)
        say(f"{TRAINED} inputs are left out: they have one shape, and `flashlab bench` checks them where it times them")
    if on is None:
        on = "cpu" if gpu.available() and not record else "gpu"
        if on == "cpu":
            say(f"no GPU ({gpu.absence()}), so on the CPU")
    if on != "cpu" and (schedule or races or insist):
        raise ParameterError(f"--schedule, --races and --insist: wanted --on cpu, which they are for, got --on {on}")
    if on == "cpu" and device:
        raise ParameterError(f"--device: wanted --on gpu or both, got --on cpu, where GPU {device} takes no part")
    if suite and (random or length or inputs or schedule):
        raise ParameterError("--suite: wanted no --random, --length, --inputs or --schedule, which it has itself")
    if random and (length or dtype or mask):
        raise ParameterError("--random: wanted no --length, --dtype or --mask beside it, since it draws them itself")
    if (random or suite) and (window or softcap):
        raise ParameterError(
            "--window, --softcap: wanted no --random, which draws them itself, or --suite, whose problems have neither"
        )
    if resume and not record:
        raise ParameterError("--resume: wanted --record, whose file it goes on in, got none")
    if on == "cpu" and record:
        raise ParameterError("--record: wanted --on gpu or both: data/ holds what GPUs did, got --on cpu")
    if record and data == DATA:
        require_checkout("its folder of records, or another one after --data")
    chosen = [] if source and not (stage_ids or dead_ends) else _chosen(stage_ids, dead_ends)
    if chosen and random and not (stage_ids or dead_ends):
        chosen += registry.DECODE
    for name in chosen if stage_ids else ():
        for fault in registry.faults(registry.parse(name)[0]):
            say(f"{name}: {fault}")
    common: dict[str, Any] = {
        "lengths": list(dict.fromkeys(map(_length, length))) if length else None,
        "dtypes": (dtype,) if dtype else DTYPES,
        "masks": (mask,) if mask else MASKS,
        "inputs": kinds,
        "features": opt.features(window, softcap) if window or softcap else None,
        "sources": opt.sources(source),
        **{"random": random, "suite": suite},
    }
    with following("checking") as follow:
        if on == "cpu":
            timeout_s = None if insist else DEFAULT_TIMEOUT_S
            how: dict[str, Any] = {"schedules": schedule, "races": races, "timeout_s": timeout_s, "follow": follow}
            results = on_cpu.check_on_cpu(chosen, **common, seed=seed, **how)
        else:
            options = replace(
                module.OPTIONS, data=data, device=device, seed=seed, progress=follow, note=say, resume=resume
            )
            results = module.check_stages(chosen, **common, record=record, emulate=on == "both", options=options)
    if results.rows and not resume:
        for name in sorted(set(stage_ids or ()) - {row.stage for row in results.rows}):
            say(f"{name}: not checked: none of these problems is for it")
    _show_checks(results)


MOST_REASONS = 8
"""Why something is unsupported is said at most so many times."""


def _show_checks(results: CheckRun) -> None:
    """How many comparisons of each stage passed, and which failed; an error where any did that should not, or all are
    unsupported."""
    fields = ("stage", "layout", "status", "reason", "verdict", "findings", "emulator")
    rows = [
        {name: getattr(row, name) for name in fields}
        | {**row.problem.flat(), "schedule": row.schedule or None}
        | {"fallbacks": row.fallbacks and row.fallbacks._asdict()}
        for row in results.rows
    ]
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        count = counts.setdefault(row["stage"], Counter())
        count[{"ok": "passed", "unsupported": "unsupported"}.get(row["status"], "failed")] += 1
        count.update(row["fallbacks"] or {})
    columns = ("passed", "failed", "unsupported", "renormalized", "recomputed")
    totals = [{"stage": name, **{key: count[key] for key in columns}} for name, count in counts.items()]
    answer(totals, ("stage", *columns), document=rows)
    if results.path:
        say(f"recorded in {results.path}")
    for failed in results.failures:
        how = " ".join(filter(None, (failed.layout, failed.schedule)))
        # A wrong output is the reason beside a finding, which says why it is wrong.
        first, *more = failed.findings or ("",)
        also = "" if first in failed.reason else f"; {first}{f', and {len(more)} more' if more else ''}"
        say(f"{failed.stage}, {failed.problem.label}, {how}: {failed.status}: {failed.reason}{also}")
    reasons = Counter((row.stage, row.reason) for row in results.rows if row.status == "unsupported")
    for (stage, reason), times in reasons.most_common(MOST_REASONS):
        say(f"{stage}: {times} unsupported: {reason}")
    if len(reasons) > MOST_REASONS:
        say(f"and for {len(reasons) - MOST_REASONS} other reasons, which --json has")
    if rows and reasons.total() == len(rows):
        raise UnsupportedError(f"nothing was compared: all {len(rows)} checks are unsupported")
    failures = [failed for failed in results.failures if not kept_wrong(failed.stage, failed.status)]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(rows)} checks failed")


def kept_wrong(name: str, status: str) -> bool:
    """Whether a wrong answer is what that stage is kept for; with other tunables it has to be right."""
    from flashlab.kernels import registry

    dead_end = registry.DEAD_ENDS.get(name)
    return status == "wrong" and dead_end is not None and bool(dead_end.defect)


def _length(text: str) -> tuple[int, int]:
    """Query and key length from `SQxSK`."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ParameterError(f"length: wanted SQxSK, two positive integers such as 113x203, got {text!r}")
    return int(parts[0]), int(parts[1])


def explain(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help=f"{opt.SHAPE_HELP}.")],
    *,
    mask: opt.TheMask = "full",
    window: opt.TheWindow = None,
    softcap: opt.TheSoftcap = 0.0,
    dtype: opt.TheDType = "float16",
    gpu: opt.Gpu = None,
    arch: opt.Arch = None,
    data: opt.Tables = DATA,
) -> None:
    """Say which stage and tunables `flashlab.attention` takes for a problem, why, and how long it may take.

    For this machine's GPU, or one under data/; --arch is that of a --gpu that has no table and is not here.
    """
    from flashlab.run import explain as module

    problem = Problem.parse(shape, dtype=dtype, mask=mask, **opt.features(window, softcap))
    chosen = module.explain(problem, gpu=gpu, arch=arch, data=data)
    rows = [
        {"": place, **row}
        for place, row in zip(("taken", "second", "third"), [chosen, *chosen["runners_up"]], strict=False)
    ]
    columns = ("", "stage", "parameters", "predicted_us", "time_from", "run", "tuned_on")
    answer(rows, columns, title=f"{problem.label} on {chosen['gpu']}", document=chosen)
    if not as_json():
        typer.echo(" ".join(filter(None, (chosen["reason"], chosen["lent"]))))


COMMANDS = {"stages": stages, "compile": compile_, "sass": sass, "check": check, "explain": explain}
