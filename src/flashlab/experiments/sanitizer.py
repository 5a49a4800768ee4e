"""compute-sanitizer over every stage: out-of-bounds accesses, races, uninitialised reads, barriers that do not match.

Each tool runs a worker of this module that launches every stage over head dims, masks, element types, lengths and
aligned and odd rows; memory is allocated for each call anew, so that an access past an array is past an allocation.
A record says how often a stage was launched under a tool, and what the tool found in it.

    PYTHONPATH=src python3 scripts/sanitize.py     appends to data/<gpu>/sanitizer/
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlab.build import compiler
from flashlab.core.environment import environment
from flashlab.core.errors import FlashlabError, LaunchError, ParameterError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.measure import profile
from flashlab.measure.harness import Book, Message, Send, Worker, WorkerDiedError, greeting, serve
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.schema import Sanitized
from flashlab.run import gpu
from flashlab.run.attention import prepare
from flashlab.verify.cases import cases
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import strides_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LENGTHS: tuple[tuple[int, int], ...] = ((1, 1), (65, 130), (203, 113), (130, 257))
"""Query and key lengths of the launches: one key, ends of tiles, more queries than keys, several tiles."""
_FLAGS = ("--report-api-errors", "no", "--print-limit", "1000")
"""No API errors: asking the driver for a function that it lacks is one, and no error of a kernel."""
OPTIONS = Options(timeout_s=540.0, worker=(sys.executable, "-m", "flashlab.experiments.sanitizer"))
_SIGN = "========="
_SUMMARY = re.compile(r"^.*(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard).*$", re.MULTILINE)
_ENTRY = re.compile(r"\battention_(\w+?)(?=\+0x|\(|\s|$)")
_KEPT = 5


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a tool's log says."""

    total: int | None
    """Errors by its own count; None where it did not come to its summary."""
    of_stage: Mapping[str, int]
    """Reports that name a stage's kernel."""
    words: Mapping[str, tuple[str, ...]]
    """Their first lines, the first few of each stage; those that name no stage under an empty name."""


@dataclass
class _Watched:
    """What came of the process that a tool watched."""

    launches: Counter[str] = field(default_factory=Counter)
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Why launches of a stage failed."""
    death: str = ""
    """How it ended early; empty where it came to its end."""

    def act(self, message: Message) -> None:
        """Count a launch; KeyError where the message is none."""
        if message["type"] == "launched":
            self.launches[message["stage"]] += 1
        elif message["type"] == "failed":
            self.failed.setdefault(message["stage"], []).append(message["reason"])
        elif message["type"] != "hello":
            raise KeyError(message["type"])


def parse(text: str) -> Found:
    """What a tool's log says.

    Each report is a paragraph, ended by a line of its own sign; the first kernel that it names is its.
    """
    lines = (line.removeprefix(_SIGN).strip() for line in text.splitlines() if line.startswith(_SIGN))
    said = "\n".join(line for line in lines if not line.startswith("COMPUTE-SANITIZER"))
    totals = [int(one[1] or one[2]) for one in _SUMMARY.finditer(said)]
    counts: Counter[str] = Counter()
    words: dict[str, list[str]] = {}
    for report in filter(None, map(str.strip, _SUMMARY.sub("", said).split("\n\n"))):
        named = _ENTRY.search(report)
        if named:
            counts[named[1]] += 1
        words.setdefault(named[1] if named else "", []).append(report.partition("\n")[0])
    kept = {name: tuple(lines[:_KEPT]) for name, lines in words.items()}
    return Found(total=sum(totals) if totals else None, of_stage=counts, words=kept)


_GET = "wanted `compute-sanitizer` on PATH, found none; the CUDA toolkit has it"


def version(command: str) -> str:
    """What it says of its version, in one line."""
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.lower().startswith("version")), lines[-1] if lines else "unknown")


def sanitize(
    stage_ids: Sequence[str] | None = None,
    *,
    tools: Sequence[str] = TOOLS,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[Sanitized, ...]]:
    """Run every tool over the stages that this GPU runs, all tools at once, and append to data/<gpu>/sanitizer/.

    Args:
        options: `timeout_s` is for each tool.

    Returns:
        The file, and its records, one a tool and stage.

    Raises:
        UnknownStageError, ParameterError: a stage or tool that is not there, or no stage that runs here.
        NoGpuError, MissingError: no GPU, or no compute-sanitizer.
        OutputError: the folder of the records cannot be written.
    """
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown or not tools:
        raise ParameterError(f"tools: wanted some of {', '.join(TOOLS)}, got {', '.join(unknown) or 'none'}")
    device_info = gpu.info(options.device)
    stages = [registry.get(stage_id) for stage_id in (registry.STAGES if stage_ids is None else stage_ids)]
    able = [stage for stage in stages if device_info.arch in stage.archs]
    if not able:
        raise ParameterError(f"wanted a stage that runs on {device_info.arch}, got none")
    command = profile.tool("compute-sanitizer", _GET)
    tool_version = version(command)
    records: list[Sanitized] = []
    with Book(options.data, "sanitizer") as book:
        book.hello(greeting(device_info))
        options.note("compiling")
        cuda = [stage for stage in able if stage.language == "cuda"]
        compiler.compile_many(compiler.jobs(cuda, [device_info.arch], aligned=(True, False)))
        job = {"stages": [stage.id for stage in able], "device": options.device}

        def under(tool: str) -> tuple[Found, _Watched]:
            options.note(f"{tool}: started")
            found, watched = _run(command, tool, job, options)
            options.note(f"{tool}: {'no summary' if found.total is None else f'{found.total} errors'}")
            return found, watched

        with ThreadPoolExecutor(len(tools)) as pool:
            results = dict(zip(tools, pool.map(under, tools), strict=True))
        for tool, (found, watched) in results.items():
            for stage in able:
                fields: dict[str, Any] = {"tool": tool, "version": tool_version, "stage": stage.id}
                records.append(Sanitized(**book.header(), **fields, **_result(stage.id, found, watched)))
                store.append(book.path, records[-1])
    return book.path, tuple(records)


def _result(stage_id: str, found: Found, watched: _Watched) -> dict[str, Any]:
    """What a tool says of a stage: fields of its record."""
    elsewhere = max(0, (found.total or 0) - sum(found.of_stage.values()))
    finished = found.total is not None and not watched.death
    failed = watched.failed.get(stage_id, [])
    return {
        "launches": watched.launches[stage_id],
        "errors": found.of_stage.get(stage_id, 0) + len(failed),
        "elsewhere": elsewhere,
        "finished": finished,
        "findings": (
            *found.words.get(stage_id, ()),
            *failed,
            *(found.words.get("", ()) if elsewhere else ()),
            *(() if finished else (watched.death or "the tool wrote no summary",)),
        ),
    }


def _run(command: str, tool: str, job: Message, options: Options) -> tuple[Found, _Watched]:
    """What a tool found, and what came of the process that it watched."""
    watched, timeout_s = _Watched(), options.timeout_s
    ends = time.monotonic() + timeout_s

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        watch = [command, "--tool", tool, *_FLAGS, "--log-file", str(log)]
        variables = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each array an allocation of its own
        with Worker([*watch, *options.worker], variables) as worker:
            try:
                worker.run(job, watched.act, startup_s=timeout_s, step_s=timeout_s, total_s=timeout_s)
                worker.wait(max(0.0, ends - time.monotonic()))  # until the tool has written its summary
            except (WorkerDiedError, FlashlabError) as error:
                watched.death = str(error)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return parse(text), watched


# --- Under the tool ---------------------------------------------------------------------------------------------------


def problems(stage_id: str) -> list[Problem]:
    """What a stage is launched on: grouped heads, every head dim, type, mask and pair of lengths it takes."""
    able = {stage_id: registry.get(stage_id)}
    return [case.problem for case in cases(able, lengths=LENGTHS, heads=(1, 2, 1), layouts=("contiguous",))]


def _launch(job: Message, send: Send) -> None:
    """Launch every stage, and say of each launch whether it ran."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(job["device"])
    send({"type": "hello"})
    for stage_id in job["stages"]:
        for problem in problems(stage_id):
            for odd in (0, 1):
                try:
                    _launch_once(torch, stage_id, problem, odd)
                    send({"type": "launched", "stage": stage_id})
                except (FlashlabError, RuntimeError) as error:
                    send({"type": "failed", "stage": stage_id, "reason": f"{problem.label}: {error}"})
                    if isinstance(error, LaunchError) or not isinstance(error, FlashlabError):
                        raise  # what runs afterwards in this process says nothing


def _launch_once(torch: Any, stage_id: str, problem: Problem, odd: int) -> None:
    """One launch. Arrays come from the host, so that no kernel but the stage's runs; `odd` elements part the rows."""

    def on_gpu(shape: Sequence[int], values: Any | None) -> Any:
        strides = strides_of(shape, row_padding=odd)
        size = shape[0] * strides[0]
        if values is None:
            flat = torch.empty(size, dtype=getattr(torch, problem.dtype), device="cuda")
        else:
            host = torch.zeros(size, dtype=torch.int16)
            host.as_strided(tuple(shape), strides)[...] = torch.from_numpy(values.view("int16"))
            flat = host.cuda().view(getattr(torch, problem.dtype))
        return flat.as_strided(tuple(shape), strides)

    q, k, v = (on_gpu(x.shape, x) for x in make_inputs(problem))
    out = on_gpu(q.shape, None)
    lse = torch.empty(tuple(q.shape[:3]), dtype=torch.float32, device="cuda")
    prepare(q, k, v, causal=problem.causal, stage=stage_id, out=out, lse=lse)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(serve(_launch))
