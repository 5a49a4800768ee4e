"""compute-sanitizer over every stage: out-of-bounds accesses, races, uninitialised reads, mismatched barriers.

Each tool runs a worker of this module that launches every stage over head dims, masks, element types, lengths and
aligned and odd rows, and with a window and a soft cap where it takes them; memory is allocated for each call anew, so
that an access past an array is past an allocation. What copies into pages, or quantises, for a stage runs with it.
A record says how often a stage was launched under a tool, and what the tool found in it.

    PYTHONPATH=src python3 scripts/sanitize.py     appends to data/<gpu>/sanitizer/
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashlab.core.arithmetic import several
from flashlab.core.environment import environment
from flashlab.core.errors import FlashlabError, LaunchError, ParameterError
from flashlab.kernels import registry
from flashlab.measure import bench, profile
from flashlab.measure.harness import Book, Message, Send, Worker, WorkerDiedError, greeting, serve
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.schema import Sanitized
from flashlab.run import gpu
from flashlab.run.attention import prepare
from flashlab.verify.cases import Case, cases
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import strides_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LENGTHS: tuple[tuple[int, int], ...] = ((1, 1), (65, 130), (203, 113), (130, 257), (3, 700))
"""Query and key lengths of the launches: one key, ends of tiles, more queries than keys, several tiles, few rows."""
LAUNCHES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("contiguous", {}), ("misaligned", {})),
    ("misaligned", {"window": (40, 30), "softcap": 20.0}),
)
"""Layouts, windows and soft caps of the launches, each compiled separately."""
_EVERY = {**registry.STAGES, **registry.DECODE, **registry.FP8}
_FLAGS = ("--report-api-errors", "no", "--print-limit", "1000")
"""No API errors: asking the driver for a function that it lacks is one, and no error of a kernel."""
OPTIONS = Options(timeout_s=540.0, worker=(sys.executable, "-m", "flashlab.experiments.sanitizer"))
_SIGN = "========="
_SUMMARY = re.compile(r"^.*(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard).*$", re.MULTILINE)
_ENTRY = re.compile(r"\battention_(\w+?)(?=\+0x|\(|\s|$)")
_KEPT = 5


@dataclass
class Watched:
    """Output of a tool and of the process that it watched."""

    launches: int = 0
    """Of the stage of its job."""
    failed: list[str] = field(default_factory=list)
    """Reasons of other failures."""
    death: str = ""
    """How the process ended early; empty if it completed."""
    errors: int | None = None
    """Errors by the tool's own count; None without its summary."""
    reports: dict[str, list[str]] = field(default_factory=dict)
    """The first line of each report, by the stage whose kernel it names, or by an empty name."""

    def act(self, message: Message) -> None:
        """Count a launch; KeyError if the message is not one."""
        if message["type"] == "launched":
            self.launches += 1
        elif message["type"] == "failed":
            self.failed.append(message["reason"])
        elif message["type"] != "hello":
            raise KeyError(message["type"])

    def read(self, log: str) -> None:
        """Parse a tool's log: each report is a paragraph, attributed to the first kernel that it names."""
        lines = (line.removeprefix(_SIGN).strip() for line in log.splitlines() if line.startswith(_SIGN))
        said = "\n".join(line for line in lines if not line.startswith("COMPUTE-SANITIZER"))
        totals = [int(match[1] or match[2]) for match in _SUMMARY.finditer(said)]
        self.errors = sum(totals) if totals else None
        for report in filter(None, map(str.strip, _SUMMARY.sub("", said).split("\n\n"))):
            named = _ENTRY.search(report)
            self.reports.setdefault(named[1] if named else "", []).append(report.partition("\n")[0])

    def of(self, stage_id: str) -> dict[str, Any]:
        """The fields of the stage's record."""
        own = self.reports.get(stage_id, [])
        named = sum(len(lines) for name, lines in self.reports.items() if name)
        elsewhere = max(0, (self.errors or 0) - named)
        finished = self.errors is not None and not self.death
        findings = [*own[:_KEPT], *self.failed]
        if elsewhere:
            findings += self.reports.get("", [])[:_KEPT]
        if not finished:
            findings.append(self.death or "the tool wrote no summary")
        return {
            "launches": self.launches,
            "errors": len(own) + len(self.failed),
            "elsewhere": elsewhere,
            "finished": finished,
            "findings": tuple(findings),
        }


_GET = "wanted `compute-sanitizer` on PATH, found none; the CUDA toolkit has it"


def version(command: str) -> str:
    """The tool's version, in one line."""
    said = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in lines if line.lower().startswith("version")), lines[-1] if lines else "unknown")


def sanitize(
    stage_ids: Sequence[str] | None = None,
    *,
    tools: Sequence[str] = TOOLS,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[Sanitized, ...]]:
    """Run every tool over the stages that this GPU runs, as many processes at once as there are processors, and append
    to data/<gpu>/sanitizer/.

    Args:
        options: `timeout_s` is for each tool and stage.

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
    stages = [registry.get(stage_id) for stage_id in (_EVERY if stage_ids is None else stage_ids)]
    able = [stage for stage in stages if device_info.arch in stage.archs]
    if not able:
        raise ParameterError(f"wanted a stage that runs on {device_info.arch}, got none")
    command = profile.tool("compute-sanitizer", _GET)
    tool_version = version(command)
    records: list[Sanitized] = []
    with Book(options.data, "sanitizer") as book:
        book.hello(greeting(device_info))
        options.note("compiling")
        every = {stage.id: launches(stage.id) for stage in able}
        for aligned in (True, False):
            cells = [
                (case.launched, case.names) for cases in every.values() for case in cases if case.aligned == aligned
            ]
            bench.compile_ahead(registry.implementations(tuple(every)), cells, options.device, aligned=(aligned,))
        work = [*itertools.product(tools, every)]

        def watched(of: tuple[str, str]) -> Watched:
            return watch(command, of[0], {"stage": of[1], "device": options.device}, options)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (tool, stage_id), observed in zip(work, pool.map(watched, work), strict=True):
                fields = {"tool": tool, "version": tool_version, "stage": stage_id, **observed.of(stage_id)}
                records.append(Sanitized(**book.header(), **fields))
                store.append(book.path, records[-1])
    return book.path, tuple(records)


def watch(command: str, tool: str, job: Message, options: Options) -> Watched:
    """Launch the job's stage in a process watched by a tool."""
    watched, timeout_s = Watched(), options.timeout_s
    ends = time.monotonic() + timeout_s
    options.note(f"{tool} of {job['stage']}: started")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        under_tool = [command, "--tool", tool, *_FLAGS, "--log-file", str(log), *options.worker]
        variables = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each array an allocation of its own
        with Worker(under_tool, job, variables) as worker:
            try:
                worker.run(watched.act, startup_s=timeout_s, step_s=timeout_s, total_s=timeout_s)
                worker.wait(max(0.0, ends - time.monotonic()))  # until the tool has written its summary
            except (WorkerDiedError, FlashlabError) as error:
                watched.death = str(error)
        if log.exists():
            watched.read(log.read_text(encoding="utf-8", errors="replace"))
    outcome = "no summary" if watched.errors is None else several(watched.errors, "error")
    options.note(f"{tool} of {job['stage']}: {outcome}")
    return watched


# --- Under the tool ---------------------------------------------------------------------------------------------------


def launches(stage_id: str) -> list[Case]:
    """What a stage is launched on: grouped heads, every head dim, type, mask, feature and pair of lengths it takes."""
    able = {stage_id: registry.get(stage_id)}
    how: dict[str, Any] = {"lengths": LENGTHS, "heads": (1, 2, 1)}
    return [case for layout, features in LAUNCHES for case in cases(able, **how, layouts=(layout,), features=features)]


def _launch(job: Message, send: Send) -> None:
    """Launch the stage, and report for each launch whether it ran."""
    torch, stage_id = importlib.import_module("torch"), job["stage"]
    torch.cuda.set_device(job["device"])
    send({"type": "hello"})
    for case in launches(stage_id):
        try:
            _launch_once(torch, stage_id, case)
            send({"type": "launched"})
        except (FlashlabError, RuntimeError) as error:
            send({"type": "failed", "reason": f"{case.problem.label}: {error}"})
            if isinstance(error, LaunchError) or not isinstance(error, FlashlabError):
                raise  # what runs afterwards in this process says nothing


def _launch_once(torch: Any, stage_id: str, case: Case) -> None:
    """One launch. Arrays come from the host, so that no kernel but the stage's runs; of what is misaligned, an element
    parts the rows."""
    problem = case.problem

    def on_gpu(shape: Sequence[int], values: Any | None) -> Any:
        strides = strides_of(shape, row_padding=0 if case.aligned else 1)
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
    prepare(q, k, v, **problem.options, stage=stage_id, out=out, lse=lse)()
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(serve(_launch))
