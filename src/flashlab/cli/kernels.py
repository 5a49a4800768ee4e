"""Commands that compile, inspect and check kernels; none requires a GPU."""

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
    """The named stages, plus the dead ends if requested; the ladder if that is empty."""
    from flashlab.kernels import registry

    return list(dict.fromkeys([*(ids or ()), *(registry.DEAD_ENDS if dead_ends else ())]) or registry.STAGES)


def stages(*, dead_ends: opt.DeadEnds = False) -> None:
    """List the stages: parent, requirements, data types, head dims and tunables."""
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
    """Compile stages and show registers, spills and shared memory as ptxas reports them; needs no GPU."""
    from flashlab.build import compiler
    from flashlab.kernels import registry

    chosen = [registry.get(stage_id) for stage_id in _chosen(stage_ids, dead_ends)] if stage_ids or dead_ends else None
    jobs = compiler.jobs(chosen, arch or registry.ARCHS)
    if not jobs:
        able = "; ".join(f"{stage.id} for {', '.join(stage.archs)}" for stage in chosen or ())
        raise ParameterError(
            f"arch: wanted one that a named stage supports, got {', '.join(arch or ())}. Supported: {able}"
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
    # An error in the source fails every head dim, dtype and mask, each with its own command and log.
    for failure in {failure.summary: failure for failure in reversed(failures)}.values():
        complain(failure)
    if failures:
        say(f"{len(failures)} of {len(jobs)} failed")
        raise typer.Exit(1)


def sass(
    stage_id: Annotated[str, opt.STAGE],
    *,
    arch: opt.Arch = "sm_90a",
    head_dim: Annotated[int | None, typer.Option(help="Head dim; default: the stage's first.")] = None,
    dtype: opt.TheDType = "float16",
    mask: opt.TheMask = "full",
    listing: Annotated[bool, typer.Option("--listing", help="Print the disassembly.")] = False,
) -> None:
    """Show the instruction mix (SASS) of a stage, or its disassembly; needs no GPU."""
    from flashlab.build import compiler
    from flashlab.build import sass as module
    from flashlab.kernels import registry

    stage, variant = registry.parse(stage_id)
    # Parsing a problem checks the head dim as every other command does.
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
    length: Annotated[
        list[str] | None, typer.Option(help="SQxSK, e.g. 113x203; default: edge cases; repeatable.")
    ] = None,
    dtype: opt.OneDType = None,
    mask: opt.OneMask = None,
    window: opt.TheWindow = None,
    softcap: opt.TheSoftcap = 0.0,
    inputs: opt.Inputs = None,
    source: opt.Source = None,
    on: Annotated[
        Literal["gpu", "cpu", "both"] | None,
        typer.Option(help="both compares the two; default: gpu, or cpu without one."),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="CPU only: warp order, ascending, descending or seeded:N; repeatable.")
    ] = None,
    races: Annotated[bool, typer.Option("--races", help="CPU only: detect races and invalid accesses; slow.")] = False,
    random: Annotated[int, typer.Option(min=0, help="Check this many random problems and layouts instead.")] = 0,
    suite: Annotated[
        str | None, typer.Option(help="flash-attention: use the forward cases and tolerance of its tests instead.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs and of --random.")] = 0,
    insist: Annotated[bool, typer.Option("--insist", help="CPU only: no time limit.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the verdicts to data/<gpu>/.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --record: continue a run that the same code began here.")
    ] = False,
    device: opt.Device = 0,
    data: opt.Tables = DATA,
) -> None:
    """Check stages against the float64 oracle over lengths, layouts, data types, masks and adversarial inputs.

    Runs on the GPU, or emulated on the CPU, where every stage runs. Inputs default to normal; without --length,
    hostile inputs are checked too. With --source and no STAGE, only the edited copies are checked.
    """
    from flashlab.kernels import registry
    from flashlab.measure import check as module
    from flashlab.run import gpu
    from flashlab.run.emulator import DEFAULT_TIMEOUT_S
    from flashlab.verify import on_cpu

    kinds = None if inputs is None else kinds_in(inputs)
    if kinds and TRAINED in kinds and len(kinds) > 1:
        kinds = tuple(kind for kind in kinds if kind != TRAINED)
        say(f"{TRAINED} inputs are skipped: their shape is fixed, and `flashlab bench` checks them when it times them")
    if on is None:
        on = "cpu" if gpu.available() and not record else "gpu"
        if on == "cpu":
            say(f"no GPU ({gpu.absence()}): checking on the CPU")
    if on != "cpu" and (schedule or races or insist):
        raise ParameterError(f"--schedule, --races and --insist: wanted --on cpu, got --on {on}")
    if on == "cpu" and device:
        raise ParameterError(f"--device: wanted --on gpu or both, got --on cpu, which does not use GPU {device}")
    if suite and (random or length or inputs or schedule):
        raise ParameterError("--suite: wanted no --random, --length, --inputs or --schedule, which the suite sets")
    if random and (length or dtype or mask):
        raise ParameterError("--random: wanted no --length, --dtype or --mask, which it draws")
    if (random or suite) and (window or softcap):
        raise ParameterError(
            "--window, --softcap: wanted no --random, which draws them, and no --suite, whose problems have neither"
        )
    if resume and not record:
        raise ParameterError("--resume: wanted --record, whose file it continues, got none")
    if on == "cpu" and record:
        raise ParameterError("--record: wanted --on gpu or both, because data/ holds GPU results only, got --on cpu")
    if record and data == DATA:
        require_checkout("its folder of records, or --data with another one")
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
            say(f"{name}: not checked: it supports none of these problems")
    _show_checks(results)


MOST_REASONS = 8
"""Reasons for unsupported problems that are printed."""


def _show_checks(results: CheckRun) -> None:
    """Print the counts per stage and each failure; raise if a check failed unexpectedly or all are unsupported."""
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
        # The reason says that the output is wrong; a finding says why.
        first, *more = failed.findings or ("",)
        also = "" if first in failed.reason else f"; {first}{f', and {len(more)} more' if more else ''}"
        say(f"{failed.stage}, {failed.problem.label}, {how}: {failed.status}: {failed.reason}{also}")
    reasons = Counter((row.stage, row.reason) for row in results.rows if row.status == "unsupported")
    for (stage, reason), times in reasons.most_common(MOST_REASONS):
        say(f"{stage}: {times} unsupported: {reason}")
    if len(reasons) > MOST_REASONS:
        say(f"further reasons, listed by --json: {len(reasons) - MOST_REASONS}")
    if rows and reasons.total() == len(rows):
        raise UnsupportedError(f"nothing was checked: all {len(rows)} checks are unsupported")
    failures = [failed for failed in results.failures if not kept_wrong(failed.stage, failed.status)]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(rows)} checks failed")


def kept_wrong(name: str, status: str) -> bool:
    """Whether a stage is a dead end kept because its output is wrong; a variant with other tunables must be correct."""
    from flashlab.kernels import registry

    dead_end = registry.DEAD_ENDS.get(name)
    return status == "wrong" and dead_end is not None and bool(dead_end.defect)


def _length(text: str) -> tuple[int, int]:
    """Parse `SQxSK` into query and key length."""
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
    """Show which stage and tunables `flashlab.attention` selects for a problem, why, and the predicted time.

    For this machine's GPU or one under data/; --arch is needed for a --gpu that has no table and is not this machine's.
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
