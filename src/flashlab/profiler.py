"""What Nsight Compute sees of a launch: which units were busy, how full the issue slots were, what warps waited for.

`ncu` runs a process of this module that launches each stage once, and writes what it measured as CSV; the kernel is
replayed as often as its counters need. Reading counters takes a permission that a rented GPU may refuse.

    PYTHONPATH=src python3 scripts/profile_ncu.py     appends to data/<gpu>/profiles/
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from flashlab import gpu, provenance, records, stages
from flashlab.attention import prepare
from flashlab.errors import LaunchError, MissingError, ParameterError
from flashlab.paths import DATA, writable_dir
from flashlab.problem import Problem
from flashlab.records import ProblemFields, Source, StageProfile

_PIPES = ("alu", "fma", "fmaheavy", "fp16", "xu", "lsu", "uniform", "tensor_op_hmma", "tensor_op_gmma")
_WARP_STATES = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg",
    "smsp__inst_executed.sum",
    # wgmma runs on the same pipe as mma.sync; ncu counts the cycles of both here.
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    *(f"sm__inst_executed_pipe_{pipe}.avg.pct_of_peak_sustained_active" for pipe in _PIPES),
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    *(f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio" for state in _WARP_STATES),
)
"""What is asked of Nsight Compute; which of it there is depends on the GPU and on its version."""

NCU = ("--clock-control", "none", "--csv", "--print-units", "base")
TIMEOUT_S = 300.0
_TRIES = 8
"""Runs of ncu in which it may refuse metrics: it names one at a time."""
Say = Callable[[str], None]


def available() -> set[str]:
    """The metrics that ncu knows for this GPU, without their suffixes; empty where it does not say."""
    try:
        done = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True, timeout=60, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return set()
    return {line.split()[0] for line in done.stdout.splitlines() if re.match(r"[a-z0-9]+__\w+\s", line)}


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


def under_ncu(
    metrics: Iterable[str],
    command: Sequence[str],
    *,
    kernels: str,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
) -> list[tuple[str, dict[str, float]]]:
    """Run a command under ncu; metrics that it refuses are dropped, and it is run again.

    Args:
        metrics: by ncu's names.
        command: what to run.
        kernels: a regular expression of the kernels to profile.
        timeout_s: for one run; what was profiled by then is kept.
        say: told what went wrong, a line at a time.

    Returns:
        What `parse` makes of each launch; empty where nothing was profiled.

    Raises:
        MissingError: there is no ncu.
    """
    if shutil.which("ncu") is None:
        raise MissingError(
            "wanted Nsight Compute's `ncu` on PATH, found none; the CUDA toolkit or its own package has it"
        )
    wanted = list(metrics)
    for _ in range(_TRIES):
        if not wanted:
            return []
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "ncu.csv"
            asked = ["ncu", *NCU, "--kernel-name", f"regex:{kernels}", "--metrics", ",".join(wanted)]
            try:
                done = subprocess.run(
                    [*asked, "--log-file", str(log), *command],
                    capture_output=True,
                    text=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                say(f"ncu: no end within {timeout_s:g} s with {len(wanted)} metrics")
                return parse(log.read_text(encoding="utf-8")) if log.exists() else []
            text = log.read_text(encoding="utf-8") if log.exists() else ""
        said = text + done.stdout + done.stderr
        refused = {
            name for name in wanted if re.search(rf"Failed to find metric.*{re.escape(name.split('.')[0])}\b", said)
        }
        launches = parse(text)
        if launches or not refused:
            if not launches or done.returncode:
                say(f"ncu: exit status {done.returncode}\n{said[-3000:]}")
            return launches
        say(f"ncu has no {', '.join(sorted(refused))}")
        wanted = [name for name in wanted if name not in refused]
    return []


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
        NoGpuError, MissingError: no GPU, or no ncu.
        LaunchError: nothing could be profiled.
        OutputError: `data` cannot be written.
    """
    found = gpu.info(device)
    chosen = [stages.get(stage_id) for stage_id in (stages.STAGES if stage_ids is None else stage_ids)]
    able = [stage.id for stage in chosen if stage.why_not(problem, found.arch) is None]
    if not able:
        raise ParameterError(f"wanted a stage that takes {problem.label} on {found.arch}, got none")
    folder = writable_dir(data / found.slug / "profiles", "records")
    commit, dirty = provenance.source()
    path = folder / f"{records.run_id(Source(commit=commit, dirty=dirty), datetime.now(UTC))}.jsonl"
    known = available()
    # Some versions do not list the averages among them that they know all the same.
    averages = any(name.startswith("smsp__average_warps_issue_stalled") for name in known)
    there = [
        name
        for name in METRICS
        if not known or name.split(".")[0] in known or (name.endswith(".ratio") and not averages)
    ]
    if len(there) < len(METRICS):
        say(f"unknown here: {', '.join(sorted(set(METRICS) - set(there)))}")

    def launch(ids: Sequence[str]) -> dict[str, dict[str, float]]:
        job = json.dumps({"stages": list(ids), "problem": asdict(problem), "device": device})
        command = [sys.executable, "-m", "flashlab.profiler", "--launch", job]
        return dict(under_ncu(there, command, kernels="^attention_", timeout_s=timeout_s, say=say))

    launches = launch(able)
    for stage_id in able:
        if stages.get(stage_id).entry not in launches and len(able) > 1:
            launches |= launch([stage_id])
    profiles = []
    for stage_id in able:
        metrics = launches.get(stages.get(stage_id).entry)
        if not metrics:
            say(f"{stage_id}: not profiled")
            continue
        record = StageProfile(
            gpu=found.name,
            commit=commit,
            dirty=dirty,
            metrics=metrics,
            stage=stage_id,
            problem=ProblemFields.of(problem),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        records.append(path, record)
        profiles.append(record)
    if not profiles:
        raise LaunchError(f"wanted a profile of {', '.join(able)} at {problem.label}, got none from ncu")
    records.write_checksums(found.slug, data)
    return path, tuple(profiles)


def _launch(job: dict[str, object]) -> None:
    """Under ncu: every stage once."""
    torch = importlib.import_module("torch")
    problem = Problem(**job["problem"])  # type: ignore[arg-type]
    torch.cuda.set_device(job["device"])
    generator = torch.Generator(device="cuda").manual_seed(0)
    q_shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, problem.dtype))
        for shape in (q_shape, kv_shape, kv_shape)
    )
    for stage_id in job["stages"]:  # type: ignore[attr-defined]
        prepare(q, k, v, causal=problem.causal, stage=stage_id)()
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> int:
    """What ncu runs."""
    parser = argparse.ArgumentParser(prog="python -m flashlab.profiler", description="Internal: launches, under ncu.")
    parser.add_argument("--launch", required=True, help="stages and problem as JSON")
    _launch(json.loads(parser.parse_args(arguments).launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
