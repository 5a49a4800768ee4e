"""What Nsight Compute sees of a launch: how busy the units were, what moved, what warps waited for and at which line.

`ncu` runs a process of this module that launches each stage once, after a launch to warm up that is not profiled, with
the tunables that the stage is measured with. The kernel is replayed as often as its counters need, at whatever clock
there is, each time with cold caches. Reading counters takes a permission that a rented GPU may refuse.

    flashlab profile     appends to data/<gpu>/profiles/
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashlab.build import compiler, sass
from flashlab.build.compiler import Cubin, Job
from flashlab.core.errors import CompileError, FlashlabError, LaunchError, MissingError, ParameterError
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.record import provenance, store
from flashlab.record.store import LineStalls, ProblemFields, Source, StageProfile
from flashlab.run import choice, gpu
from flashlab.run.attention import prepare
from flashlab.verify.oracle import make_torch_inputs

METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg",
    "smsp__inst_executed.sum",
    # wgmma runs on the same pipe as mma.sync; ncu counts the cycles of both here.
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    *(f"sm__inst_executed_pipe_{pipe}.avg.pct_of_peak_sustained_active" for pipe in ("alu", "fma", "xu", "lsu")),
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.peak_sustained",
    *(f"launch__occupancy_limit_{what}" for what in ("barriers", "blocks", "registers", "shared_mem", "warps")),
    "launch__block_size",
    "launch__registers_per_thread",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_gmma.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    *(f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum" for what in ("requests", "sectors") for op in ("ld", "st")),
    "lts__t_sectors_srcunit_tex.sum",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
"""What is asked of Nsight Compute; which of it there is depends on the GPU and on its version."""
SAMPLES = ("--section", "SourceCounters")
"""Asked beside them: each warp's state at regular times, with the instruction that it was at."""

NCU = ("--clock-control", "none")
TIMEOUT_S = 300.0
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
Say = Callable[[str], None]


def program() -> str:
    """ncu: on PATH, else in a toolkit's usual place.

    Raises:
        MissingError: there is none; the message says how to get it.
    """
    installed = sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    places = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", *(str(path.parent) for path in installed)]
    found = shutil.which("ncu", path=os.pathsep.join(places))
    if found is None:
        raise MissingError(_GET)
    return found


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
    """Kernel name and metrics of each profiled launch, in order, from what `ncu --csv` wrote, whichever its page."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        return []
    launches: dict[int, tuple[str, dict[str, float]]] = {}
    for row in csv.DictReader(lines):
        if not row["ID"].isdigit():
            continue  # the row of units of a wide table
        metrics = launches.setdefault(int(row["ID"]), (row["Kernel Name"].split("(")[0], {}))[1]
        pairs = [(row["Metric Name"], row["Metric Value"])] if "Metric Name" in row else row.items()
        for name, value in pairs:
            number = _number(value)
            if name is not None and "__" in name and number is not None:
                metrics[name] = number
    return [launches[number] for number in sorted(launches)]


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
    listing: tuple[str, ...] = ()
    """The kernel's instructions as ncu writes them, in order; empty where no samples were taken."""
    samples: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """By position in the listing: samples by warp state, where there are any."""


_STATE_COLUMN = re.compile(r"stall_(\w+)")
_STATES = {
    "branch_resolve": "branch_resolving",
    "dispatch": "dispatch_stall",
    "imc": "imc_miss",
    "lg": "lg_throttle",
    "long_sb": "long_scoreboard",
    "math": "math_pipe_throttle",
    "mio": "mio_throttle",
    "no_inst": "no_instruction",
    "short_sb": "short_scoreboard",
    "sleep": "sleeping",
    "tex": "tex_throttle",
}
"""Warp states whose names the source page shortens, and what the counters call them."""


def parse_source(text: str) -> list[Launch]:
    """The samples of each profiled launch, in order, from what `ncu --page source --print-source sass --csv` wrote.

    For each launch that is a row with the kernel's name, and a table with a row an instruction. Version 2025.3 has no
    column for waits of a wgmma; they are what an instruction's samples have beyond its columns.
    """
    found: list[Launch] = []
    header: list[str] = []
    kernel, listing, samples = "", list[str](), dict[int, dict[str, int]]()

    def finish() -> None:
        if listing:
            found.append(Launch(kernel=kernel, metrics={}, listing=tuple(listing), samples=dict(samples)))

    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == "Kernel Name":
            finish()
            kernel, header, listing, samples = row[1].split("(")[0], [], [], {}
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
                samples[len(listing)] = states
            listing.append(cells["Source"].strip())
    finish()
    return found


def under_ncu(
    metrics: Iterable[str],
    command: Sequence[str],
    *,
    kernels: str,
    options: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
) -> list[Launch]:
    """Run a command under ncu; metrics that it refuses are dropped, and it is run again.

    Args:
        metrics: by ncu's names.
        command: what to run.
        kernels: a regular expression of the kernels to profile.
        options: more for ncu.
        timeout_s: for one run.
        say: told what went wrong, a line at a time.

    Returns:
        What was profiled, in order; empty where nothing was.

    Raises:
        MissingError: there is no ncu, or it may not read the counters.
    """
    ncu = program()
    wanted = list(metrics)
    for _ in range(_TRIES):
        if not wanted:
            return []
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "launches.ncu-rep"
            asked = [ncu, "--export", str(report), "--kernel-name", f"regex:{kernels}", "--metrics", ",".join(wanted)]
            try:
                done = subprocess.run(
                    [*asked, *NCU, *options, *command], capture_output=True, text=True, timeout=timeout_s, check=False
                )
            except subprocess.TimeoutExpired:
                say(f"ncu: no end within {timeout_s:g} s with {len(wanted)} metrics")
                return []
            launches = read(report, wanted) if report.exists() else []
        said = done.stdout + done.stderr
        if "ERR_NVGPUCTRPERM" in said:
            raise MissingError(_PERMIT)
        refused = {
            name for name in wanted if re.search(rf"Failed to find metric.*{re.escape(name.split('.')[0])}\b", said)
        }
        if launches or not refused:
            if not launches or done.returncode:
                say(f"ncu: exit status {done.returncode}\n{said[-3000:]}")
            return launches
        say(f"ncu has no {', '.join(sorted(refused))}")
        wanted = [name for name in wanted if name not in refused]
    return []


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
    """Why a launch's samples cannot be traced to source lines; None where they can.

    Args:
        launch: what ncu says.
        sha256: digest of the machine code that ran.
        launched: the same, compiled anew; None where it could not be.
        lined: the same with line information.
    """
    if not launch.samples:
        return "ncu took no samples"
    if launched is None or lined is None or launched.sha256 != sha256:
        return "wanted to compile what was launched once more, got other machine code"
    if compiler.instructions(launched.code) != compiler.instructions(lined.code):
        return "wanted the same instructions with line information as without, got others"
    opcodes = [one.opcode for one in sass.disassemble(launched.code, launched.entry)]
    listed = [_GUARD.sub("", text).partition(" ")[0] for text in launch.listing]
    if opcodes[: len(listed)] != listed:
        return "wanted ncu's listing of the machine code that was launched, got another"
    return None


_GUARD = re.compile(r"^@!?U?P\w+\s+")


def trace(launch: Launch, stage: Stage, lined: Cubin) -> tuple[LineStalls, ...]:
    """The source lines at which a launch's warps were sampled, the most samples first.

    A line stands for all that is inlined there: of the line that an instruction is of and those that it was inlined
    at, it is the first in the stage's own file, else the first of all.

    Args:
        launch: what ncu says.
        stage: whose launch it was.
        lined: its machine code, with line information.
    """
    places = sass.lines(lined.code, lined.entry)
    found: dict[sass.Frame, Counter[str]] = {}
    for position, states in launch.samples.items():
        frames = places.get(position * sass.BYTES_PER_INSTRUCTION, ())
        own = [frame for frame in frames if frame.file.name == stage.source.name]
        for frame in (own or frames)[:1]:
            found.setdefault(frame, Counter()).update(states)
    ranked = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    return tuple(
        LineStalls(file=frame.file.name, line=frame.line, text=_text(frame, stage), samples=dict(counts.most_common()))
        for frame, counts in ranked
    )


def _text(frame: sass.Frame, stage: Stage) -> str:
    """A line of the stage's source, or of a header; empty where the file is not there."""
    own = frame.file.name == stage.source.name
    path = stage.source if own else compiler.COMMON / frame.file.name
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def profile(
    stage_ids: Sequence[str] | None,
    problem: Problem,
    *,
    data: Path = DATA,
    device: int = 0,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
) -> tuple[Path, tuple[StageProfile, ...]]:
    """Profile one launch of each stage that takes `problem` on this GPU, and append to data/<gpu>/profiles/<run>.jsonl.

    All in one process; those that are missing afterwards, since one broke it, each in one of its own.

    Args:
        stage_ids: all where None.
        problem: what is computed.
        data: the folder that holds data/<gpu>.
        device: CUDA device index.
        timeout_s: for one run of ncu.
        say: told what went wrong, a line at a time.

    Returns:
        The file, and the profiles in it.

    Raises:
        UnknownStageError, ParameterError: a stage that is not there, or none that takes the problem.
        NoGpuError, MissingError: no GPU, no ncu, or one that may not read the GPU's counters.
        LaunchError: nothing could be profiled.
        OutputError: `data` cannot be written.
    """
    tool = version()
    found = gpu.info(device)
    chosen = [registry.get(stage_id) for stage_id in (registry.STAGES if stage_ids is None else stage_ids)]
    able = {stage.id: stage for stage in chosen if stage.why_not(problem, found.arch) is None}
    if not able or found.arch is None:
        raise ParameterError(f"wanted a stage that takes {problem.label} on {found.arch}, got none")
    folder = writable_dir(data / found.slug / "profiles", "records")
    commit, dirty = provenance.source()
    run = store.run_id(Source(commit=commit, dirty=dirty), datetime.now(UTC))
    path = folder / f"{run}.jsonl"
    say(f"compiling {len(able)} stages")
    plain, lined = (_compiled(able.values(), problem, found.arch, found.slug, line_info) for line_info in (False, True))
    known = available()
    there = [name for name in METRICS if not known or name.split(".")[0] in known]
    if len(there) < len(METRICS):
        say(f"unknown here: {', '.join(sorted(set(METRICS) - set(there)))}")

    def traced(stage_id: str, launch: Launch, sha256: str) -> tuple[LineStalls, ...] | str:
        with_lines = lined.get(stage_id)
        try:
            reason = why_no_lines(launch, sha256, plain.get(stage_id), with_lines)
            return trace(launch, able[stage_id], with_lines)[:LINES] if with_lines and not reason else reason or ""
        except FlashlabError as error:  # no disassembler, say: what ncu counted is worth a record without it
            return str(error)

    profiles: list[StageProfile] = []

    def keep(launches: Mapping[str, tuple[Launch, dict[str, Any]]]) -> None:
        """Record them; what ends this process later does not take them along."""
        with ThreadPoolExecutor() as pool:  # most of it is waiting for disassemblers
            tracing = {name: pool.submit(traced, name, one, told["sha256"]) for name, (one, told) in launches.items()}
        for stage_id, (launch, told) in launches.items():
            lines = tracing[stage_id].result()
            if isinstance(lines, str):
                say(f"{stage_id}: no lines: {lines}")
                lines = ()
            totals: Counter[str] = Counter()
            for states in launch.samples.values():
                totals.update(states)
            record = StageProfile(
                gpu=found.name,
                commit=commit,
                dirty=dirty,
                metrics=dict(launch.metrics),
                run=run,
                stage=stage_id,
                problem=ProblemFields.of(problem),
                parameters=told["parameters"],
                cubin_sha256=told["sha256"],
                tile_q=told["tile_q"],
                ncu=tool,
                samples=dict(totals.most_common()),
                lines=lines,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            store.append(path, record)
            profiles.append(record)

    try:
        say(f"profiling {', '.join(able)}")
        keep(_profiled(list(able), problem, device, there, timeout_s, say))
        lost = [stage_id for stage_id in able if stage_id not in {one.stage for one in profiles}]
        for stage_id in lost:
            launches: Mapping[str, tuple[Launch, dict[str, Any]]] = {}
            if len(able) > 1:
                say(f"profiling {stage_id} in a process of its own")
                launches = _profiled([stage_id], problem, device, there, timeout_s, say)
            keep(launches)
            if not launches:
                say(f"{stage_id}: not profiled")
    finally:
        if profiles:
            store.write_checksums(found.slug, data)
    if not profiles:
        raise LaunchError(f"wanted a profile of {', '.join(able)} at {problem.label}, got none from ncu")
    return path, tuple(profiles)


def _compiled(chosen: Iterable[Stage], problem: Problem, arch: str, slug: str, line_info: bool) -> dict[str, Cubin]:
    """The kernels of stages as `prepare` takes them; those that do not compile are left out, `prepare` says why."""
    work = [
        Job(
            stage=stage,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
            causal=problem.causal,
            arch=arch,
            overrides=choice.parameters(stage, slug, problem, arch=arch),
            line_info=line_info,
        )
        for stage in chosen
    ]
    made = compiler.compile_many(work)
    return {job.stage.id: cubin for job, cubin in zip(work, made, strict=True) if isinstance(cubin, Cubin)}


def _profiled(
    stage_ids: Sequence[str], problem: Problem, device: int, metrics: Sequence[str], timeout_s: float, say: Say
) -> dict[str, tuple[Launch, dict[str, Any]]]:
    """Of each stage what ncu says, and what the process that launched it says it was."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        job = {"stages": list(stage_ids), "problem": asdict(problem), "device": device, "told": str(told)}
        launches = under_ncu(
            metrics,
            [sys.executable, "-m", "flashlab.measure.profile", "--launch", json.dumps(job)],
            kernels="^attention_",
            options=(*SAMPLES, "--profile-from-start", "off"),
            timeout_s=timeout_s,
            say=say,
        )
        said = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    by_kernel = {launch.kernel: launch for launch in launches}
    return {
        stage_id: (by_kernel[registry.get(stage_id).entry], said[stage_id])
        for stage_id in stage_ids
        if registry.get(stage_id).entry in by_kernel and stage_id in said
    }


def _launch(job: dict[str, Any]) -> None:
    """Under ncu: every stage once to warm up, then once to be profiled."""
    torch = importlib.import_module("torch")
    problem = Problem(**job["problem"])
    torch.cuda.set_device(job["device"])
    q, k, v = make_torch_inputs(problem)
    ready = {}
    for stage_id in job["stages"]:
        try:
            ready[stage_id] = prepare(q, k, v, causal=problem.causal, stage=stage_id)
            ready[stage_id]()
            torch.cuda.synchronize()
        except CompileError as error:
            ready.pop(stage_id, None)
            print(f"{stage_id}: {error}", file=sys.stderr)
    told = {
        stage_id: {
            "sha256": call.cubin.sha256,
            "parameters": call.cubin.parameters,
            "tile_q": call.launch_shape.tile_q,
        }
        for stage_id, call in ready.items()
    }
    Path(job["told"]).write_text(json.dumps(told), encoding="utf-8")
    gpu.call("cuProfilerStart")
    for call in ready.values():
        call()
        torch.cuda.synchronize()
    gpu.call("cuProfilerStop")


def main(arguments: Sequence[str] | None = None) -> int:
    """What ncu runs."""
    parser = argparse.ArgumentParser(prog="python -m flashlab.profiler", description="Internal: launches, under ncu.")
    parser.add_argument("--launch", required=True, help="stages and problem as JSON")
    _launch(json.loads(parser.parse_args(arguments).launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
