"""What a call costs the host: the time to enqueue it, on torch tensors of a layout that earlier calls had, or first.

    flashlab enqueue         prepared calls, the functions, the operators and SDPA

A sample is the mean of many calls in a row, fewer than the driver queues without making the host wait. The GPU is idle
when they begin, and what it still has to do when they end does not count. A claim is about single calls of a library,
each with the wait for its end. First calls are each of a process of their own.
"""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from flashlab.core.errors import LaunchError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import peers
from flashlab.measure.cells import GpuWorker, record_rows
from flashlab.measure.harness import REASON_CHARS, Message, serve
from flashlab.measure.options import Options
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.record import store
from flashlab.record.schema import Call
from flashlab.run.attention import attention, prepare
from flashlab.run.paged import paged_attention
from flashlab.show.tables import Column, code, number, table

OPTIONS = Options(worker=(sys.executable, "-m", "flashlab.experiments.enqueue"))
PROBLEMS = (Problem.parse("1x8x512x64"), Problem.parse("4x32x8x1x8192x128"))
"""A short prefill and a decoding step; the latter also over pages."""
LAUNCH = "flashlab.prepare(q, k, v)()"
"""The launch alone: the other calls of flashlab are shown with what they take beyond it."""
FIRST = "first flashlab.attention"
"""The first call of a process, of a kernel compiled before: it plans the call, and reads and loads the machine code."""
FIRST_CALLS = 3
SAMPLES, CALLS = 41, 200
"""Samples of each, and calls in one."""
SINGLE_CALLS = 300
_PAGE_SIZE = 16
_TIMEOUT_S = 120.0


def measure(
    problems: Sequence[Problem] = PROBLEMS, options: Options = OPTIONS, *, library: str = ""
) -> tuple[Path, tuple[str, ...]]:
    """Time calls, interleaved, and append a `schema.Call` each to data/<gpu>/calls; the file, and what has no time.

    Args:
        library: time single calls of this library instead, each with the wait for its end.

    Raises:
        ParameterError: no such library.
        NoGpuError, MissingPackageError, LaunchError, OutputError: as they say.
    """
    samples, calls = (SINGLE_CALLS, 1) if library else (SAMPLES, CALLS)
    job: Message = {"problems": [asdict(problem) for problem in problems], "samples": samples, "calls": calls}
    job |= {"library": library and peers.get(library).name}
    options = replace(options, worker=OPTIONS.worker)
    return record_rows(Call, job, options, step_s=_TIMEOUT_S, total_s=2 * _TIMEOUT_S)


class _Worker(GpuWorker):
    """Times the calls of a job."""

    def work(self) -> None:
        """All of the job."""
        self.hold()
        with self.torch.no_grad():
            for fields in self.job["problems"]:
                problem = Problem(**fields)
                q, k, v = self.inputs(problem)
                functions: Mapping[str, Callable[[], Any]]
                if library := self.job["library"]:
                    peer = peers.get(library)
                    peer.require(problem, compute_capability=self.info.compute_capability)
                    functions = {library: partial(peer.build(problem), *peers.in_layout(peer.layout, q, k, v))}
                else:
                    launch = {LAUNCH: prepare(q, k, v, **problem.options)}
                    functions = {**launch, **calls(self.torch, problem, q, k, v)}
                self.time(problem, functions, self.torch.cuda.synchronize)
                if not library:
                    self.send({"type": "step", "what": f"{FIRST} at {problem.label}"})
                    with self.attempt(f"{FIRST} at {problem.label}"):
                        times_us = [first_call_us(problem, f"cuda:{self.device}") for _ in range(FIRST_CALLS)]
                        row = {"name": FIRST, "problem": asdict(problem), "time_us": times_us, "waits": False}
                        self.send({"type": "row", "row": row})

    def time(self, problem: Problem, functions: Mapping[str, Callable[[], Any]], wait: Callable[[], None]) -> None:
        """Send a row per function; `wait` returns when the GPU is idle. Each call of a job's library is waited for."""
        waits = bool(self.job["library"])
        times_us: dict[str, list[float]] = {}
        for name, call in functions.items():
            self.send({"type": "step", "what": f"{name} at {problem.label}"})
            with self.attempt(f"{name} at {problem.label}"):
                call()
                call()
                times_us[name] = []
        order, drawn = list(times_us), random.Random(self.job["seed"])
        for _ in range(self.job["samples"]):
            drawn.shuffle(order)
            for name in order:
                call = functions[name]
                wait()
                began = time.perf_counter()
                for _ in range(self.job["calls"]):
                    call()
                if waits:
                    wait()
                times_us[name].append((time.perf_counter() - began) / self.job["calls"] * 1e6)
        wait()
        for name, of in times_us.items():
            row = {"name": name, "problem": asdict(problem), "time_us": of, "waits": waits}
            self.send({"type": "row", "row": row})


def first_call_us(problem: Problem, device: str) -> float:
    """Microseconds of a new process's first call on torch's device of that name, without imports and torch's start.

    Raises:
        LaunchError: the process failed.
    """
    command = (sys.executable, "-m", __spec__.name, "first", json.dumps(asdict(problem)), device)
    run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if run.returncode:
        raise LaunchError(f"the first call of a process: {run.stderr.strip()[-REASON_CHARS:]}")
    return float(run.stdout)


def _first_call(fields: str, device: str) -> None:
    """Print the microseconds of this process's first call, on standard normal inputs."""
    torch = importlib.import_module("torch")
    problem = Problem(**json.loads(fields))
    q, k, v = (
        torch.randn(problem.batch, heads, length, problem.head_dim, dtype=getattr(torch, problem.dtype), device=device)
        for heads, length in ((problem.q_heads, problem.q_len), *[(problem.kv_heads, problem.kv_len)] * 2)
    )
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    began = time.perf_counter()
    attention(q, k, v, **problem.options)
    print((time.perf_counter() - began) * 1e6)


def calls(torch: Any, problem: Problem, q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """The public calls on a problem's tensors, by name; for one query row also those over pages of other keys."""
    module = importlib.import_module("flashlab.torch")
    operators, causal = torch.ops.flashlab, problem.causal
    functions: dict[str, Callable[[], Any]] = {
        "flashlab.attention": lambda: attention(q, k, v, causal=causal),
        "flashlab.torch.attention": lambda: module.attention(q, k, v, causal=causal),
        "torch.ops.flashlab.attention": lambda: operators.attention.default(q, k, v, causal),
    }
    if problem.q_len == 1:
        pages = -(-problem.kv_len // _PAGE_SIZE)
        place: Any = {"dtype": torch.int32, "device": q.device}
        page_table = torch.randperm(problem.batch * pages, **place).view(problem.batch, pages)
        cache = q.new_empty(page_table.numel(), problem.kv_heads, _PAGE_SIZE, problem.head_dim).normal_()
        paged = (q, cache, cache.flip(0), page_table, torch.full((problem.batch,), problem.kv_len, **place))
        functions["flashlab.paged_attention"] = lambda: paged_attention(*paged)
        functions["torch.ops.flashlab.paged_attention"] = lambda: operators.paged_attention.default(*paged)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped_heads = problem.kv_heads != problem.q_heads
    functions["sdpa"] = lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=grouped_heads)
    return functions


# --- The page ---------------------------------------------------------------------------------------------------------


def shown(records: Sequence[Call]) -> list[dict[str, Any]]:
    """The newest run's rows: problem, name, `time_us`, and `beyond_us`, the time beyond the launch; None for SDPA
    and for first calls."""
    mine = [record for record in records if not record.waits]
    newest = max((record.run for record in mine), default="")
    rows = []
    for problem, of in grouped((record for record in mine if record.run == newest), lambda row: row.problem).items():
        times = {record.name: median(record.time_us) for record in of}
        for record in of:
            beyond = times[record.name] - times.get(LAUNCH, times[record.name])
            other = record.name in (LAUNCH, FIRST, "sdpa")
            fields = {"problem": problem.label, "name": record.name, "time_us": times[record.name]}
            rows.append({**fields, "beyond_us": None if other else beyond, "record": record})
    return rows


COLUMNS = (
    Column("problem", "problem"),
    Column("call", "name", code, left=True),
    Column("µs", "time_us"),
    Column("range, µs", lambda row: "–".join(number(f(row["record"].time_us)) for f in (min, max))),
    Column("beyond the launch, µs", "beyond_us"),
)


def page(out: Any, results: Any, data: Path = DATA) -> None:
    """Write the table of each GPU's newest run, or a note that there is none."""
    tables = []
    for rows in (shown(store.records(gpu, Call, data)) for gpu in store.gpus(data, "calls")):
        if rows:
            record = rows[0]["record"]
            facts = (
                record.gpu.name,
                f"{CALLS} calls per sample, median of {len(record.time_us)} samples, interleaved, one start",
                f"torch {record.software.get('torch', 'unknown')}",
            )
            tables.append(f"{table(COLUMNS, rows)}\n\n<small>{select.sourced(*facts, runs=[record.run])}</small>")
    none = "*No such run is on record yet: `flashlab enqueue` on a machine with a GPU makes one.*"
    out.snippet("enqueue.md", "\n\n".join(tables) or none)


PAGES = {"enqueue": page}


if __name__ == "__main__":
    if sys.argv[1:2] == ["first"]:
        _first_call(*sys.argv[2:])
    else:
        sys.exit(serve(lambda job, send: _Worker(job, send).work()))
