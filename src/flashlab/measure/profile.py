"""What Nsight Compute sees of a launch: how busy the units were, what moved, what warps waited for and at which line.

`ncu` runs a process of this module that launches each stage once, after a launch to warm up that is not profiled, with
the tunables that the stage is measured with. The kernel is replayed as often as its counters need, at whatever clock
there is, each time with cold caches. Reading counters takes a permission that a rented GPU may refuse.

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
"""What is asked of Nsight Compute; which of it there is depends on the GPU and on its version."""
SAMPLES = ("--section", "SourceCounters")
"""Asked beside them: each warp's state at regular times, with the instruction that it was at."""

NCU = ("--clock-control", "none")
OPTIONS = Options(timeout_s=300.0, worker=(sys.executable, "-m", "flashlab.measure.profile"))
LINES = 20
"""Source lines that a record keeps of each stage."""
_TRIES = 8
"""Runs of ncu in which it may refuse metrics: it names one at a time."""
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
    """ncu: on PATH, else in a toolkit's usual place.

    Raises:
        MissingError: there is none; the message says how to get it.
    """
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    return tool("ncu", _GET, *(str(path.parent) for path in installed))


def tool(name: str, missing: str, *places: str) -> str:
    """A program of the CUDA toolkit: on PATH, else in the toolkit's usual place or one of some others.

    Raises:
        MissingError: it is in none of them; the message is `missing`.
    """
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", *places])
    path = shutil.which(name, path=search)
    if path is None:
        raise MissingError(missing)
    return path


def version() -> str:
    """ncu's version; `unknown` where it does not say.

    Raises:
        MissingError: there is no ncu.
    """
    match = re.search(r"[Vv]ersion (\S+)", _said([program(), "--version"]))
    return match[1] if match else "unknown"


def available() -> set[str]:
    """The metrics that ncu knows for this GPU, without their suffixes; empty where it does not say.

    Raises:
        MissingError: there is no ncu.
    """
    query = [program(), "--query-metrics"]
    said = [_said(query), _said([*query, "--query-metrics-collection", "launch"])]
    return {line.split()[0] for line in "\n".join(said).splitlines() if re.match(r"[a-z0-9]+__\w+\s", line)}


def _said(command: Sequence[str]) -> str:
    """What a command writes; empty where it does not end or start."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (subprocess.TimeoutExpired, OSError):
        return ""


def parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """Kernel name and metrics of each profiled launch, in order, from what `ncu --page raw --csv` wrote."""
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
    """What a report says of one profiled launch."""

    kernel: str
    """Its name."""
    metrics: Mapping[str, float]
    listing: list[str] = field(default_factory=list)
    """The kernel's instructions as ncu writes them, in order; empty where no samples were taken."""
    samples: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """By position in the listing: samples by warp state, where there are any."""


_STATE_COLUMN = re.compile(r"stall_(\w+)")
_STATES: Mapping[str, str] = _ASKED["states"]
"""Warp states whose names the source page shortens, and what the counters call them."""


def parse_source(text: str) -> list[Launch]:
    """The samples of each profiled launch, in order, from what `ncu --page source --print-source sass --csv` wrote.

    For each launch that is a row with the kernel's name, and a table with a row an instruction. Version 2025.3 has no
    column for waits of a wgmma; they are what an instruction's samples have beyond its columns.
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
    """Run a command under ncu; metrics that it refuses are dropped, and it is run again.

    Args:
        command: what to run; `--connect` and a pipe are appended.
        kernels: a regular expression of the kernels to profile.
        extra: more for ncu.
        options: `timeout_s` is for one run; `note` gets what went wrong.
        job: of a command that is a worker.
        act: what to do with what that worker says.

    Returns:
        What was profiled, in order; empty where nothing was.

    Raises:
        MissingError: there is no ncu, or it may not read the counters.
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
    """Until it is done or has died: what ncu has to say of that is in its output."""
    try:
        worker.run(act, startup_s=timeout_s, step_s=timeout_s, total_s=timeout_s)
    except WorkerDiedError:
        return
    except LaunchError as error:
        if not isinstance(error.__cause__, WorkerDiedError):
            raise


def read(report: Path, metrics: Iterable[str]) -> list[Launch]:
    """The launches of a report that ncu exported, in order, with those of `metrics` that it has.

    Raises:
        MissingError: there is no ncu.
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
    """Why a launch's samples cannot be traced to source lines; None where they can."""
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
    """The source lines at which a launch's warps were sampled, the most samples first.

    A line stands for all that is inlined there: of the line that an instruction is of and those that it was inlined
    at, it is the first in the stage's own file, else the first of all.
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
    """Profile one launch of each stage that takes `problem` on this GPU, and append to data/<gpu>/profiles/<run>.jsonl.

    All in one process; those that are missing afterwards, since one broke it, each in one of its own.

    Args:
        options: `timeout_s` is for one run of ncu. Where they say `resume`, a stage is left out that is on record with
            the same machine code.

    Returns:
        The file, the profiles in it, and the stages that gave none; no file where all of it is on record.

    Raises:
        UnknownStageError, ParameterError: a stage that is not there, or none that takes the problem.
        NoGpuError, MissingError: no GPU, no ncu, or one that may not read the GPU's counters.
        LaunchError: nothing could be profiled, or another process measures on the GPU.
        OutputError: `data` cannot be written.
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
            """Launch stages in one process under ncu, and record what came of each."""
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
            say(f"profiling {stage_id} in a process of its own")
            run([stage_id])
        missed = tuple(name for name in able if name not in profiles)
        for stage_id in missed:
            say(f"{stage_id}: not profiled")
        if not profiles:
            raise LaunchError(f"wanted a profile of {', '.join(able)} at {problem.label}, got none from ncu")
        return book.path, tuple(profiles.values()), missed


def _left(chosen: Sequence[Stage], problem: Problem, options: Options) -> dict[str, Stage]:
    """The stages that take the problem here, without those on record where the options say `resume`."""
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
    """Launch stages in one process under ncu: by stage, what the process says of it, and what ncu saw."""
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
    """The lines of a launch with the most samples, or why there are none."""
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
    """The kernels of stages as `prepare` takes them; those that do not compile are left out, `prepare` says why."""
    here, named = gpu.info(options.device), registry.implementations(stage_ids)
    code = bench.compile_for(named, [(problem, list(named))], arch=here.arch, slug=here.slug, line_info=line_info)
    return {name: cubin for (_, name), cubin in code.items() if isinstance(cubin, Cubin)}


def work(job: Message, send: Send) -> None:
    """Under ncu: launch every stage once to warm up, then once to be profiled."""
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
