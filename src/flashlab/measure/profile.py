"""Profiles with Nsight Compute: utilisation, memory traffic, and warp stalls by source line.

`ncu` runs a process of this module that launches each stage once, after a warm-up launch that is not profiled, with the
tunables used in measurements. The kernel is replayed for each group of counters, without clock control and with cold
caches. Reading counters needs a permission that a rented GPU may not grant.

    flashlab profile     appends to data/<gpu>/profiles/
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flashlab.build import compiler, sass
from flashlab.build.compiler import Cubin
from flashlab.build.sources import Frame
from flashlab.core.arithmetic import several
from flashlab.core.errors import CompileError, FlashlabError, LaunchError, MissingError
from flashlab.core.paths import table
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.measure import bench
from flashlab.measure.cells import GpuWorker
from flashlab.measure.harness import Book, Message, Send, Worker, WorkerDiedError, serve
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.schema import LineStalls, StageProfile
from flashlab.run import gpu
from flashlab.run.attention import prepare

_ASKED = table(__file__)
METRICS: Sequence[str] = _ASKED["metrics"]
"""Metrics to collect; which are available depends on the GPU and the version of Nsight Compute."""
SAMPLES = ("--section", "SourceCounters")
"""Options for warp-state sampling by instruction."""

NCU = ("--clock-control", "none")
OPTIONS = Options(timeout_s=300.0, worker=(sys.executable, "-m", "flashlab.measure.profile"))
LINES = 20
"""Number of source lines recorded per stage."""
_TRIES = 8
"""Maximum runs of ncu, which rejects unknown metrics one at a time."""
_GET = (
    "wanted Nsight Compute's `ncu` on PATH, found none. The CUDA toolkit has it, and so have the packages "
    "`cuda-nsight-compute-13-0` of NVIDIA's apt and dnf repositories and `nsight-compute` of the conda channel nvidia; "
    "https://developer.nvidia.com/nsight-compute"
)
_PERMIT = (
    "wanted to read the GPU's counters, ncu may not (ERR_NVGPUCTRPERM). Run it as root; start a container with "
    "`--cap-add=SYS_ADMIN`; or let every user: put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` into "
    "/etc/modprobe.d/nvidia-profiling.conf on the host and load the driver anew. Where the host is not yours, whoever "
    "rents it out must do that. https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


def program() -> str:
    """Locate ncu on PATH or in a CUDA toolkit.

    Raises:
        MissingError: it is not installed; the message says how to install it.
    """
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    return tool("ncu", _GET, *(str(path.parent) for path in installed))


def tool(name: str, missing: str, *places: str) -> str:
    """Locate a program of the CUDA toolkit on PATH, in the toolkit's usual folder or in `places`.

    Raises:
        MissingError: it is not found; the message is `missing`.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", *places])
    path = shutil.which(name, path=search)
    if path is None:
        raise MissingError(missing)
    return path


def version() -> str:
    """Return the version of ncu, or `unknown`.

    Raises:
        MissingError: ncu is not installed.
    """
    match = re.search(r"[Vv]ersion (\S+)", _said([program(), "--version"]))
    return match[1] if match else "unknown"


def available() -> set[str]:
    """Return the metrics that ncu supports on this GPU, without suffixes; empty if it reports none.

    Raises:
        MissingError: ncu is not installed.
    """
    query = [program(), "--query-metrics"]
    said = [_said(query), _said([*query, "--query-metrics-collection", "launch"])]
    return {line.split()[0] for line in "\n".join(said).splitlines() if re.match(r"[a-z0-9]+__\w+\s", line)}


def _said(command: Sequence[str]) -> str:
    """Return the output of a command; empty if it fails to start or finish."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (subprocess.TimeoutExpired, OSError):
        return ""


def parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """Parse the output of `ncu --page raw --csv`: kernel name and metrics of each launch, in order."""
    table = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    launches = []
    for row in sorted((row for row in table if row["ID"].isdigit()), key=lambda row: int(row["ID"])):  # one is of units
        numbers = {name: _number(value) for name, value in row.items() if "__" in name}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        launches.append((row["Kernel Name"].split("(")[0], metrics))
    return launches


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    if value != value or value in (float("inf"), float("-inf")):
        return None  # what ncu writes for a metric that this launch has none of
    return int(value) if value == int(value) else value


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A profiled launch of a report."""

    kernel: str
    """Name of the kernel."""
    metrics: Mapping[str, float]
    listing: list[str] = field(default_factory=list)
    """Instructions of the kernel as printed by ncu, in order; empty without samples."""
    samples: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """Samples by warp state, by position in the listing."""


_STATE_COLUMN = re.compile(r"stall_(\w+)")
_STATES: Mapping[str, str] = _ASKED["states"]
"""Warp states abbreviated on the source page, and their names in counters."""


def parse_source(text: str) -> list[Launch]:
    """Parse the output of `ncu --page source --print-source sass --csv`: the samples of each launch, in order.

    Each launch has a row with the kernel's name, and a table with one row per instruction. Version 2025.3 lacks a
    column for wgmma waits, which are the samples of an instruction not in its columns.
    """
    launches: list[Launch] = []
    header: list[str] = []
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == "Kernel Name":
            launches.append(Launch(kernel=row[1].split("(")[0], metrics={}))
            header = []
        elif row[0] == "Address":
            header = row
        elif header:
            cells = dict(zip(header, row, strict=True))
            states = {
                _STATES.get(match[1], match[1]): int(count)
                for column, value in cells.items()
                if (match := _STATE_COLUMN.fullmatch(column)) and (count := _number(value))
            }
            others = int(_number(cells.get("# Samples")) or 0) - sum(states.values())
            if others > 0:
                states["gmma" if "GMMA" in cells["Source"] else "other"] = others
            if states:
                launches[-1].samples[len(launches[-1].listing)] = states
            launches[-1].listing.append(cells["Source"].strip())
    return [launch for launch in launches if launch.listing]


def under_ncu(
    metrics: Iterable[str],
    command: Sequence[str],
    *,
    kernels: str,
    extra: Sequence[str] = (),
    options: Options = OPTIONS,
    job: Message | None = None,
    act: Callable[[Message], None] = lambda _: None,
) -> list[Launch]:
    """Run a command under ncu, repeating without the metrics that it rejects.

    Args:
        command: command line of a worker; `--connect` and a pipe are appended.
        kernels: regular expression of the kernels to profile.
        extra: further options of ncu.
        options: `timeout_s` limits one run; `note` receives errors.
        job: job of the worker.
        act: handles messages of the worker.

    Returns:
        The profiled launches, in order; may be empty.

    Raises:
        MissingError: ncu is not installed, or has no permission to read counters.
    """
    ncu, timeout_s, say = program(), options.timeout_s, options.note
    wanted = list(metrics)
    for _ in range(_TRIES):
        if not wanted:
            return []
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "launches.ncu-rep"
            watch = [ncu, "--export", str(report), "--kernel-name", f"regex:{kernels}", "--metrics", ",".join(wanted)]
            ends = time.monotonic() + timeout_s
            with Worker([*watch, *NCU, *extra, *command], job) as worker:
                try:
                    if job is not None:
                        _run(worker, act, timeout_s)
                    status = worker.wait(max(0.0, ends - time.monotonic()))
                except WorkerDiedError:
                    say(f"ncu: no end within {timeout_s:g} s with {len(wanted)} metrics")
                    return []
                said = worker.output()
            launches = read(report, wanted) if report.exists() else []
        if "ERR_NVGPUCTRPERM" in said:
            raise MissingError(_PERMIT)
        refused = {
            name for name in wanted if re.search(rf"Failed to find metric.*{re.escape(name.split('.')[0])}\b", said)
        }
        if launches or not refused:
            if not launches or status:
                say(f"ncu: exit status {status}\n{said[-3000:]}")
            return launches
        say(f"ncu has no {', '.join(sorted(refused))}")
        wanted = [name for name in wanted if name not in refused]
    return []


def _run(worker: Worker, act: Callable[[Message], None], timeout_s: float) -> None:
    """Run a worker until it is done or has died, which the output of ncu explains."""
    try:
        worker.run(act, startup_s=timeout_s, step_s=timeout_s, total_s=timeout_s)
    except WorkerDiedError:
        return
    except LaunchError as error:
        if not isinstance(error.__cause__, WorkerDiedError):
            raise


def read(report: Path, metrics: Iterable[str]) -> list[Launch]:
    """Read the launches of a report exported by ncu, in order, with the available `metrics`.

    Raises:
        MissingError: ncu is not installed.
    """
    page = [program(), "--import", str(report), "--csv", "--print-units", "base", "--page"]
    counted = parse(_said([*page, "raw"]))
    sampled = parse_source(_said([*page, "source", "--print-source", "sass"]))
    if [launch.kernel for launch in sampled] != [kernel for kernel, _ in counted]:  # no samples were taken
        sampled = [Launch(kernel=kernel, metrics={}) for kernel, _ in counted]
    wanted = set(metrics)
    return [
        replace(launch, metrics={name: value for name, value in values.items() if name in wanted})
        for launch, (_, values) in zip(sampled, counted, strict=True)
    ]


def why_no_lines(launch: Launch, sha256: str, launched: Cubin | None, lined: Cubin | None) -> str | None:
    """Explain why the samples of a launch cannot be mapped to source lines; None if they can."""
    if not launch.samples:
        return "ncu took no samples"
    if launched is None or lined is None or launched.sha256 != sha256:
        return "wanted to compile what was launched once more, got other machine code"
    if compiler.instructions(launched.code) != compiler.instructions(lined.code):
        return "wanted the same instructions with line information as without, got others"
    opcodes = [instruction.opcode for instruction in sass.disassemble(launched.code, launched.entry)]
    listed = [_GUARD.sub("", text).partition(" ")[0] for text in launch.listing]
    if opcodes[: len(listed)] != listed:
        return "wanted ncu's listing of the machine code that was launched, got another"
    return None


_GUARD = re.compile(r"^@!?U?P\w+\s+")


def trace(launch: Launch, stage: Stage, lined: Cubin) -> tuple[LineStalls, ...]:
    """Aggregate the warp samples of a launch by source line, the most samples first.

    A line includes everything inlined there: an instruction belongs to the innermost line in the stage's own file among
    those at which it was inlined, else to its own line.
    """
    places = sass.lines(lined.code, lined.entry)
    states_by_frame: dict[Frame, Counter[str]] = {}
    for position, states in launch.samples.items():
        frames = places.get(position * sass.BYTES_PER_INSTRUCTION, ())
        own = [frame for frame in frames if frame.file.name == stage.source.name]
        for frame in (own or frames)[:1]:
            states_by_frame.setdefault(frame, Counter()).update(states)
    ranked = sorted(states_by_frame.items(), key=lambda item: (-item[1].total(), item[0]))
    folders = {stage.source.name: stage.source.parent}  # all others are headers
    here = [
        (Frame(folders.get(file.name, compiler.COMMON) / file.name, line), counts) for (file, line), counts in ranked
    ]
    return tuple(
        LineStalls(file=frame.file.name, line=frame.line, text=frame.text, samples=dict(counts.most_common()))
        for frame, counts in here
    )


def profile(
    stage_ids: Sequence[str] | None,
    problem: Problem,
    options: Options = OPTIONS,
) -> tuple[Path | None, tuple[StageProfile, ...], tuple[str, ...]]:
    """Profile a launch of each stage that supports `problem` here, and append to data/<gpu>/profiles/<run>.jsonl.

    All stages run in one process; those missing afterwards, because one of them broke it, run in separate processes.

    Args:
        options: `timeout_s` limits one run of ncu. With `resume`, stages on record with the same machine code are
            skipped.

    Returns:
        The file, its profiles, and the stages without one; the file is None if everything is on record.

    Raises:
        UnknownStageError, ParameterError: an unknown stage, or none that supports the problem.
        NoGpuError, MissingError: no GPU, no ncu, or no permission to read counters.
        LaunchError: nothing could be profiled, or another process measures on the GPU.
        OutputError: `data` is not writable.
    """
    chosen = [registry.get(stage_id) for stage_id in (registry.STAGES if stage_ids is None else stage_ids)]
    registry.able(chosen, [problem])
    ncu, say = version(), options.note
    able = _left(chosen, problem, options)
    if not able:
        say("all of it is on record; nothing was profiled")
        return None, (), ()
    with Book(options.data, "profiles") as book:
        say(f"compiling {several(len(able), 'stage')}")
        plain, lined = _compiled(able, problem, options), _compiled(able, problem, options, line_info=True)
        known = available()
        metrics = [name for name in METRICS if not known or name.split(".")[0] in known]
        if len(metrics) < len(METRICS):
            say(f"unknown here: {', '.join(sorted(set(METRICS) - set(metrics)))}")
        profiles: dict[str, StageProfile] = {}

        def run(stage_ids: Sequence[str]) -> None:
            """Launch stages in one process under ncu, and record each profile."""
            launched, seen = _launched([able[name] for name in stage_ids], problem, metrics, book, options)

            def lines(name: str) -> tuple[LineStalls, ...] | str:
                return _lines(seen[name], able[name], launched[name]["sha256"], plain.get(name), lined.get(name))

            with ThreadPoolExecutor() as pool:  # most of it is waiting for disassemblers
                lines_of = dict(zip(seen, pool.map(lines, seen), strict=True))
            for name, traced in lines_of.items():
                if isinstance(traced, str):
                    say(f"{name}: no lines: {traced}")
                    traced = ()
                profiles[name] = _record(book, problem, ncu, launched[name], seen[name], traced)
                store.append(book.path, profiles[name])

        say(f"profiling {', '.join(able)}")
        run(list(able))
        for stage_id in [name for name in able if name not in profiles] if len(able) > 1 else ():
            say(f"profiling {stage_id} in a separate process")
            run([stage_id])
        missed = tuple(name for name in able if name not in profiles)
        for stage_id in missed:
            say(f"{stage_id}: not profiled")
        if not profiles:
            raise LaunchError(f"wanted a profile of {', '.join(able)} at {problem.label}, got none from ncu")
        return book.path, tuple(profiles.values()), missed


def _left(chosen: Sequence[Stage], problem: Problem, options: Options) -> dict[str, Stage]:
    """The stages that support the problem here, with `resume` without those on record."""
    here = gpu.info(options.device)
    able = {stage.id: stage for stage in registry.able(chosen, [problem], here.arch)}
    if not options.resume:
        return able
    done = {
        (recorded.problem, recorded.cubin_sha256)
        for recorded in store.records(here.slug, StageProfile, options.data)
        if recorded.device is not None and recorded.device.driver == here.record.driver
    }
    made = _compiled(able, problem, options)
    return {name: of for name, of in able.items() if name not in made or (problem, made[name].sha256) not in done}


def _launched(
    stages: Sequence[Stage], problem: Problem, metrics: Sequence[str], book: Book, options: Options
) -> tuple[dict[str, Message], dict[str, Launch]]:
    """Launch stages in one process under ncu; returns the messages of the process and the launches, by stage."""
    launched: dict[str, Message] = {}

    def act(message: Message) -> None:
        if message["type"] == "hello":
            book.hello(message)
        else:
            launched[message["stage"]] = message

    job = {"stages": [stage.id for stage in stages], "problem": asdict(problem)}
    launches = under_ncu(
        metrics,
        options.worker,
        kernels="^attention_",
        extra=(*SAMPLES, "--profile-from-start", "off"),
        options=options,
        job={**job, "device": options.device, "seed": options.seed},
        act=act,
    )
    by_kernel = {launch.kernel: launch for launch in launches}
    entries = {stage.id: stage.entry for stage in stages if stage.id in launched}
    return launched, {name: by_kernel[entry] for name, entry in entries.items() if entry in by_kernel}


def _lines(
    launch: Launch, stage: Stage, sha256: str, launched: Cubin | None, lined: Cubin | None
) -> tuple[LineStalls, ...] | str:
    """The source lines of a launch with the most samples, or why there are none."""
    try:
        reason = why_no_lines(launch, sha256, launched, lined)
        return trace(launch, stage, lined)[:LINES] if lined and not reason else reason or ""
    except FlashlabError as error:  # no disassembler, say: what ncu counted is worth a record without it
        return str(error)


def _record(
    book: Book, problem: Problem, tool: str, launched: Message, launch: Launch, lines: tuple[LineStalls, ...]
) -> StageProfile:
    totals: Counter[str] = Counter()
    for states in launch.samples.values():
        totals.update(states)
    header = book.header()
    return StageProfile(
        gpu=header["gpu"].name,
        device=header["gpu"],
        commit=book.source.commit,
        dirty=book.source.dirty,
        **{name: header[name] for name in ("run", "time", "software", "start")},
        **{name: launched[name] for name in ("stage", "parameters", "tile_q")},
        cubin_sha256=launched["sha256"],
        problem=problem,
        ncu=tool,
        metrics=dict(launch.metrics),
        samples=dict(totals.most_common()),
        lines=lines,
    )


def _compiled(
    stage_ids: Iterable[str], problem: Problem, options: Options, *, line_info: bool = False
) -> dict[str, Cubin]:
    """Compile the kernels of stages as `prepare` does, omitting failures, which `prepare` reports."""
    here, named = gpu.info(options.device), registry.implementations(stage_ids)
    code = bench.compile_for(named, [(problem, list(named))], arch=here.arch, slug=here.slug, line_info=line_info)
    return {name: cubin for (_, name), cubin in code.items() if isinstance(cubin, Cubin)}


def work(job: Message, send: Send) -> None:
    """Launch every stage once as warm-up and once for ncu to profile."""
    worker = GpuWorker(job, send)
    worker.hold()
    problem = Problem(**job["problem"])
    q, k, v = worker.inputs(problem)
    ready = []
    for stage_id in job["stages"]:
        try:
            call = prepare(q, k, v, **problem.options, stage=stage_id)
            call()
            worker.torch.cuda.synchronize()
        except CompileError as error:
            print(f"{stage_id}: {error}", file=sys.stderr)
            continue
        ready.append(call)
        fields = {"sha256": call.cubin.sha256, "parameters": call.cubin.parameters}
        send({"type": "launched", "stage": stage_id, **fields, "tile_q": call.launch_shape.tile_q})
    gpu.call("cuProfilerStart")
    for call in ready:
        call()
        worker.torch.cuda.synchronize()
    gpu.call("cuProfilerStop")


if __name__ == "__main__":
    sys.exit(serve(work))
