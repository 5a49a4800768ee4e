"""Commands about the kernels themselves: none needs a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flashlab.cli.options import (
    KIND_NAMES,
    Arch,
    Data,
    DeadEnds,
    Device,
    Gpu,
    Json,
    OneDType,
    OneMask,
    Source,
    Stage,
    StageIds,
    TheDType,
    TheMask,
    sources,
)
from flashlab.cli.output import Row, answer, complain, following, say, write_json
from flashlab.core.errors import CheckFailedError, CompileError, NoDataError, ParameterError
from flashlab.core.inputs import ALL, NORMAL, TRAINED
from flashlab.core.inputs import parse as kinds_in
from flashlab.core.paths import DATA
from flashlab.core.problem import DTYPES, MASKS, Problem


def _chosen(ids: Sequence[str] | None, dead_ends: bool = False) -> list[str]:
    """The named stages, and the dead ends where they are asked for; the ladder where that is nothing."""
    from flashlab.kernels import registry

    return list(dict.fromkeys([*(ids or ()), *(registry.DEAD_ENDS if dead_ends else ())]) or registry.STAGES)


def _archs(archs: Sequence[str] | None) -> tuple[str, ...]:
    from flashlab.kernels import registry

    for arch in archs or ():
        if arch not in registry.ARCHS:
            raise ParameterError(f"arch: wanted one of {', '.join(registry.ARCHS)}, got {arch!r}")
    return tuple(archs or registry.ARCHS)


def stages(*, dead_ends: DeadEnds = False, as_json: Json = False) -> None:
    """List the stages: what each changes, where it runs, what can be tuned."""
    from flashlab.kernels import registry

    same = ("id", "title", "parent", "question", "change", "prediction", "archs", "dtypes", "head_dims", "needs")
    rows: list[Row] = [
        {name: getattr(stage, name) for name in same}
        | {
            "params": {
                name: {"default": param.default, "choices": param.choices, "by_head_dim": dict(param.by_head_dim)}
                for name, param in stage.params.items()
            }
        }
        for stage in map(registry.get, _chosen(None, dead_ends))
    ]
    columns = {
        **{"stage": "id", "title": "title", "parent": "parent", "architectures": "needs"},
        **{"dtypes": "dtypes", "head dims": "head_dims"},
        "tunables": lambda row: {name: param["default"] for name, param in row["params"].items()},
    }
    answer(rows, columns, as_json=as_json)


def compile_(
    stage_ids: StageIds = None,
    *,
    dead_ends: DeadEnds = False,
    arch: Annotated[list[str] | None, typer.Option(help="Architecture, such as sm_90a; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Compile stages for architectures, no GPU needed, and show what ptxas says of each."""
    from flashlab.build import compiler
    from flashlab.kernels import registry

    chosen = [registry.get(one) for one in _chosen(stage_ids, dead_ends)] if stage_ids or dead_ends else None
    jobs = compiler.jobs(chosen, _archs(arch))
    if not jobs:
        able = "; ".join(f"{stage.id} for {', '.join(stage.archs)}" for stage in chosen or ())
        raise ParameterError(
            f"arch: wanted one that a named stage is compiled for, got {', '.join(arch or ())}. Compiled are {able}"
        )
    done = Counter[str]()
    with following("compiling", lines=False) as follow:

        def step(job: compiler.Job, _: object) -> None:
            done["jobs"] += 1
            follow(done["jobs"], len(jobs), job.label)

        results = compiler.compile_many(jobs, progress=step)
    rows: list[Row] = []
    for job, result in zip(jobs, results, strict=True):
        row = {"stage": job.stage.id, "arch": job.arch, "head_dim": job.head_dim, "dtype": job.dtype}
        row["mask"] = "causal" if job.causal else "full"
        if isinstance(result, CompileError):
            rows.append({**row, "error": str(result)})
            continue
        launch = result.launch_shape
        rows.append(
            {
                **row,
                **asdict(result.resources),
                "dynamic_smem_bytes": launch.smem_bytes if launch else None,
                "threads": launch.threads if launch else None,
                "seconds": round(result.compile_seconds, 3),
                "cached": result.cached,
                "sha256": result.sha256,
            }
        )
    columns = {
        **{"stage": "stage", "arch": "arch", "D": "head_dim", "dtype": "dtype", "mask": "mask"},
        **{"registers": "registers", "spilled B": "spill_store_bytes", "stack B": "stack_bytes"},
        **{"static B": "static_smem_bytes", "dynamic B": "dynamic_smem_bytes", "threads": "threads"},
        **{"seconds": "seconds", "cached": "cached"},
    }
    answer(rows, columns, as_json=as_json)
    failures = [result for result in results if isinstance(result, CompileError)]
    for failure in failures:
        complain(failure)
    if failures:
        say(f"{len(failures)} of {len(jobs)} failed")
        raise typer.Exit(1)


def sass(
    stage_id: Annotated[str, Stage],
    *,
    arch: Arch = "sm_90a",
    head_dim: Annotated[int | None, typer.Option(help="The stage's first if not given.")] = None,
    dtype: TheDType = "float16",
    mask: TheMask = "full",
    listing: Annotated[bool, typer.Option("--listing", help="Print every instruction.")] = False,
    as_json: Json = False,
) -> None:
    """Count a stage's machine instructions by class, or list them; no GPU needed."""
    from flashlab.build import compiler
    from flashlab.build import sass as module
    from flashlab.kernels import registry

    stage, variant = registry.parse(stage_id)
    assert arch is not None
    _archs([arch])
    # A problem of one query checks the head dim the way every other command does.
    problem = Problem.parse(f"1x1x1x{stage.head_dims[0] if head_dim is None else head_dim}", dtype=dtype, mask=mask)
    cubin = compiler.compile_stage(
        stage, head_dim=problem.head_dim, dtype=problem.dtype, causal=problem.causal, arch=arch, overrides=variant
    )
    instructions = module.disassemble(cubin.code, cubin.entry)
    if listing:
        if as_json:
            write_json([asdict(instruction) | {"class": module.classify(instruction)} for instruction in instructions])
        else:
            sys.stdout.writelines(f"{instruction.address:6x}  {instruction.text}\n" for instruction in instructions)
        return
    counts = module.mix(cubin.code, cubin.entry)
    branches, shared = module.branches(instructions), module.shared_memory(instructions)
    total = counts["total"] or 1
    answer(
        [
            {"class": name, "count": count, "%": f"{100 * count / total:.1f}", "what it holds": module.CLASSES[name]}
            for name, count in counts.items()
        ],
        ("class", "count", "%", "what it holds"),
        as_json=as_json,
        title=f"{stage_id} D{problem.head_dim} {problem.mask} {problem.dtype} on {arch}",
        document={"stage": stage.id, "arch": arch, "sha256": cubin.sha256, "counts": counts}
        | {"branches": asdict(branches), "shared_memory": shared},
    )
    if not as_json:
        say(
            f"branches under a condition: {branches.predicated}, and {branches.predicated_exits} exits; in subroutines "
            f"{branches.in_subroutines}. Instructions on shared memory: {shared}"
        )


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
            help=f"What Q, K and V hold: {KIND_NAMES}; or {ALL}. {NORMAL} if not given, hostile ones without --length.",
        ),
    ] = None,
    source: Source = None,
    on: Annotated[
        Literal["gpu", "cpu", "both"] | None, typer.Option(help="both compares them; gpu where there is one, else cpu.")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="On the CPU, the order of warps: ascending, descending or seeded:N; may be repeated."),
    ] = None,
    races: Annotated[bool, typer.Option("--races", help="On the CPU, look for races too; slower.")] = False,
    random: Annotated[
        int, typer.Option(min=0, help="So many random problems and layouts in place of lengths, types, masks, layouts.")
    ] = 0,
    suite: Annotated[
        str | None,
        typer.Option(help="Other people's cases, by their rule: flash-attention, the forward cases of its own tests."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs, and of what --random draws.")] = 0,
    insist: Annotated[bool, typer.Option("--insist", help="On the CPU, however long it takes.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Append the verdicts to data/<gpu>/.")] = False,
    device: Device = 0,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Compare stages with the float64 oracle, over lengths, layouts, types, masks and inputs that break kernels.

    Runs on the GPU, or on the CPU, where every stage runs on any machine.
    """
    from flashlab.measure import bench
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
    for refused, message in (
        (
            on != "cpu" and (schedule or races or insist),
            f"--schedule, --races and --insist: wanted --on cpu, which they are for, got --on {on}",
        ),
        (
            suite and (random or length or inputs or schedule),
            "--suite: wanted no --random, --length, --inputs or --schedule, which it has itself",
        ),
        (
            random and (length or dtype or mask),
            "--random: wanted no --length, --dtype or --mask beside it, since it draws them itself",
        ),
        (on == "cpu" and record, "--record: wanted --on gpu or both: data/ holds what GPUs did, got --on cpu"),
    ):
        if refused:
            raise ParameterError(message)
    chosen = _chosen(stage_ids, dead_ends)
    common: dict[str, Any] = {
        "lengths": [_length(text) for text in length] if length else None,
        "dtypes": (dtype,) if dtype else DTYPES,
        "masks": (mask,) if mask else MASKS,
        "inputs": kinds,
        "sources": sources(source),
        "random": random,
        "suite": suite,
        "seed": seed,
    }
    with following("checking") as follow:
        if on == "cpu":
            timeout_s = None if insist else DEFAULT_TIMEOUT_S
            results = on_cpu.check_on_cpu(
                chosen, **common, schedules=schedule, races=races, timeout_s=timeout_s, follow=follow
            )
        else:
            where = data if record else None
            results = bench.check_stages(
                chosen, **common, data=where, emulate=on == "both", device=device, progress=follow
            )
    if as_json:
        write_json([_case(row) for row in results.rows])
    else:
        _count(results.rows)
    if results.path:
        say(f"recorded in {results.path}")
    for failure in results.failures:
        how = " ".join(filter(None, (failure.layout, failure.schedule)))
        say(f"{failure.stage}, {failure.problem.label}, {how}: {failure.status}: {failure.reason}")
    failures = [failure for failure in results.failures if not kept_wrong(failure.stage, failure.status)]
    if failures:
        raise CheckFailedError(f"{len(failures)} of {len(results.rows)} checks failed")


def _case(row: Any) -> Row:
    problem = {name: getattr(row.problem, name) for name in ("shape", "dtype", "mask", "inputs")}
    return {
        "stage": row.stage,
        **problem,
        **{name: getattr(row, name) for name in ("layout", "status", "reason")},
        "verdict": row.verdict.model_dump() if row.verdict else None,
        "schedule": row.schedule or None,
        "findings": row.findings,
        "fallbacks": row.fallbacks._asdict() if row.fallbacks else None,
        "emulator": asdict(row.emulator) if row.emulator else None,
    }


def _count(cases: Sequence[Any]) -> None:
    """How many cases of each stage passed, and how often their rare branches ran."""
    counts: dict[str, Counter[str]] = {}
    for row in cases:
        count = counts.setdefault(row.stage, Counter())
        count[{"ok": "passed", "unsupported": "unsupported"}.get(row.status, "failed")] += 1
        count.update(row.fallbacks._asdict() if row.fallbacks else {})
    shown = ("passed", "failed", "unsupported", "renormalized", "recomputed")
    rows = [{"stage": name, **{key: count[key] for key in shown}} for name, count in counts.items()]
    answer(rows, ("stage", *shown))


def kept_wrong(name: str, status: str) -> bool:
    """Whether a wrong answer is what that stage is kept for; with other tunables it has to be right."""
    from flashlab.kernels import registry

    dead_end = registry.DEAD_ENDS.get(name)
    return status == "wrong" and dead_end is not None and bool(dead_end.defect)


def _length(text: str) -> tuple[int, int]:
    """Query and key length from `SQxSK`."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ParameterError(f"length: wanted SQxSK, two positive integers such as 113x203, got {text!r}")
    return int(parts[0]), int(parts[1])


def explain(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="BxHxSxD or BxHxHkvxSqxSkxD, such as 1x8x512x64.")],
    *,
    mask: TheMask = "full",
    dtype: TheDType = "float16",
    gpu: Gpu = None,
    arch: Arch = None,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Say which stage and tunables `flashlab.attention` takes for a problem, why, and how long it may take.

    For this machine's GPU, or one under data/; --arch is that of a --gpu that has no records and is not here.
    """
    from flashlab.kernels import registry
    from flashlab.query.kinship import times_carry_over
    from flashlab.run import choice

    problem = Problem.parse(shape, dtype=dtype, mask=mask)
    name, arch, sm_count = _explained_gpu(gpu, arch, data)
    ranking = choice.rank(problem, name, arch, sm_count, data)
    kin = ranking.table.gpu if ranking.table is not None and ranking.table.gpu != name else None
    carries, differs = times_carry_over(name, kin) if kin else (True, "")
    lent = f"{name} has no records of its own, so its nearest kin, {kin}, chooses. {differs}" if kin else ""
    if ranking.choices:
        first, *others = (choice_fields(one, carries=carries) for one in ranking.choices[:3])
        reason = choice.reason(problem, ranking)
    else:
        # What `attention` falls back to; it raises where nothing runs the problem.
        last = registry.best(problem, arch)
        reason = f"Nothing of head dim {problem.head_dim} is on record: the last rung that runs it."
        first = {"stage": last.id, "parameters": last.parameters(problem.head_dim), "predicted_us": None}
        first, others = {**first, "on_record": False}, []
    told = {"reason": reason, "kin": kin, "lent": lent, "runners_up": others}
    answer(
        [{"": place, **row} for place, row in zip(("taken", "second", "third"), [first, *others], strict=False)],
        {
            **{"": "", "stage": "stage", "tunables": "parameters", "predicted µs": "predicted_us"},
            **{"time from": "time_from", "run": "run", "tunables from": "tuned_on"},
        },
        as_json=as_json,
        title=f"{problem.label} on {name}",
        document={"gpu": name, "arch": arch, **problem_fields(problem), **first, **told},
    )
    if not as_json:
        typer.echo(" ".join(filter(None, (reason, lent))))


def _explained_gpu(gpu: str | None, arch: str | None, data: Path) -> tuple[str, str, int | None]:
    """Folder, architecture and SMs of the GPU to explain a choice for; None where its SMs are not known."""
    from flashlab.query.kinship import MODELS, model_in
    from flashlab.run import choice
    from flashlab.run import gpu as module

    here = module.info() if module.available() is None else None
    known = sorted(path.parent.name for path in data.glob(f"*/{choice.FILE}"))
    name = gpu or (here.slug if here else known[0] if known else None)
    if name is None:
        raise NoDataError(
            f"wanted a GPU, or a table of choices under {data}, found neither. `flashlab tune` and `flashlab tuned` on "
            "a machine with an NVIDIA GPU make one."
        )
    archs = _archs([arch] if arch else None)
    if here is not None and name == here.slug:
        return name, here.arch, here.sm_count
    table = choice.table(name, data)
    if table is not None:
        return name, table.arch, table.sm_count
    model = model_in(name)
    arch = arch or (MODELS[model].arch if model else None)
    if arch is None:
        raise ParameterError(
            f"gpu: wanted one with a table under {data} ({', '.join(known) or 'none yet'}), or --arch beside it, got "
            f"{name!r}. Architectures: {', '.join(archs)}."
        )
    return name, arch, None


def problem_fields(problem: Problem) -> dict[str, object]:
    """A problem as JSON has it, for people and as `--shape`, `--mask` and `--dtype` take it."""
    return {"problem": problem.label, "shape": problem.shape, "mask": problem.mask, "dtype": problem.dtype}


def choice_fields(choice: Any, *, carries: bool = True) -> dict[str, Any]:
    """A choice as JSON has it; without its time where that does not carry over."""
    return {
        "stage": choice.stage.id,
        "parameters": dict(choice.parameters),
        "predicted_us": choice.time_us if carries else None,
        "on_record": choice.distance == 0,
        "time_from": choice.row.problem.label,
        "run": choice.row.run,
        "tuned_on": choice.tuned_on.problem.label if choice.tuned_on else None,
    }


COMMANDS = {"stages": stages, "compile": compile_, "sass": sass, "check": check, "explain": explain}
