"""Measure and check in a worker process, and record what it says.

The parent never touches CUDA. It starts a worker, which says what it is about to do before it does it, one JSON line at
a time over a pipe of its own. A crash (an illegal address poisons the whole process's CUDA context), a kill or a hang
then costs the implementation in hand: the parent records it as crashed or timed out, starts another worker without it,
and goes on with what is left. What was recorded stays recorded: every row is on disk before the next is asked for.

In the worker, for each problem: make inputs, check every implementation against the float64 oracle with its output
poisoned beforehand, and time those that passed, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import multiprocessing
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import ml_dtypes

from flashlab.build import compiler, sass, triton_code
from flashlab.core import errors
from flashlab.core.errors import (
    FlashlabError,
    LaunchError,
    MissingError,
    MissingPackageError,
    NoGpuError,
    OutputError,
    ParameterError,
    UnsupportedError,
)
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.problem import DTYPES, FIRST_SHAPE, MASKS, Precision, Problem
from flashlab.kernels import peers
from flashlab.kernels import registry as stages
from flashlab.kernels.registry import variant_in
from flashlab.measure import ceilings as roofline
from flashlab.measure import timer as timing
from flashlab.record import provenance, store
from flashlab.record.checks import CheckRow as CheckRow
from flashlab.record.checks import EmulatorVerdict, case_line, header_line
from flashlab.record.store import (
    Ablation,
    Ceiling,
    CubinFields,
    Gpu,
    Machine,
    Measurement,
    Part,
    ProblemFields,
    Samples,
    Tuning,
    Verdict,
)
from flashlab.run import choice as tuned
from flashlab.run import emulator, gpu
from flashlab.run.attention import Fallbacks, Prepared, prepare
from flashlab.verify.cases import FAR_LAYOUTS, FLASH_ATTENTION, SUITES, TENSORS, chosen_cases, laid_out, placement
from flashlab.verify.cases import LAYOUTS as LAYOUTS
from flashlab.verify.on_cpu import CheckRun as CheckRun
from flashlab.verify.on_cpu import build_all, emulate_beside, emulates, implementations
from flashlab.verify.oracle import make_torch_inputs
from flashlab.verify.verdict import POISON_WORD, FlashAttentionOracle, Guarded, Oracle, Sample, check, damage

WORKER: tuple[str, ...] = (sys.executable, "-m", "flashlab.measure.bench", "--worker")
_HEAT_SECONDS = 2.0
"""Of work before the first sustained measurement of a problem, so that all of them find a warm chip; no more than one
such measurement takes."""
_WITH_LSE = "+lse"
"""Ends the name, among a run's implementations, of a stage's second row: the one with the log-sum-exp on."""
_NEAR = 1.1
"""Of those second rows the ones that are kept busy: slower by no more than this factor than the fastest in bursts."""
_CHECKED_SCORES = 1 << 27
"""Scores that a check of a measurement compares with the oracle where there are many measurements."""
_LAYER_SAMPLES = 5
_LAYER_SUSTAINED_S = 0.2
"""Of each layer of `trained` inputs, where a plan has so many."""
_MODEL_S = 300.0
"""What making `trained` inputs may take longer than a step of anything else."""
_REASON_CHARS = 2000
_LOG_CHARS = 1500
_WAITING_EMULATIONS = 256
"""Runs of the emulator that may wait for a core, so that their arrays do not fill the memory."""
Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured of each problem."""

    samples: int = 40
    """Hot burst samples of each implementation to aim for."""
    min_samples: int = 7
    """What a slow one takes at least."""
    cold_samples: int = 15
    """Cold ones; none where 0."""
    cap_s: float = 3.0
    """Host time, in seconds, after which an implementation takes no more than the least number of samples."""
    sustained_seconds: float = 5.0
    """Of continuous calls for each implementation; none where 0."""
    sustained_shapes: tuple[str, ...] | None = (FIRST_SHAPE,)
    """Where they are taken; None: at every problem."""
    sustained_names: tuple[str, ...] | None = None
    """Of which implementations; None: of all."""
    checked_scores: int = 1 << 30
    """Scores of a problem that are compared with the oracle; of a larger one, whole bands of rows (`check.Sample`).

    No more than `_CHECKED_SCORES` on other inputs than normal: a row of many kinds would be mostly oracle.
    """

    lse: bool = False
    """Stages are timed a second time with the log-sum-exp on, in turn with the rest: some libraries always write one.
    Hot bursts, and the fastest of them sustained."""

    def checks(self, problem: Problem) -> int:
        """Scores of that problem to compare with the oracle."""
        return self.checked_scores if problem.inputs == NORMAL else min(self.checked_scores, _CHECKED_SCORES)

    def shared(self, layers: int) -> Plan:
        """For each of so many layers, which together cost about what one kind of inputs costs."""
        return replace(
            self,
            samples=min(self.samples, max(_LAYER_SAMPLES, self.samples // layers)),
            min_samples=min(self.min_samples, _LAYER_SAMPLES),
            cold_samples=min(self.cold_samples, max(_LAYER_SAMPLES, self.cold_samples // layers)),
            cap_s=self.cap_s / layers,
            sustained_seconds=min(self.sustained_seconds, max(_LAYER_SUSTAINED_S, self.sustained_seconds / layers)),
            checked_scores=max(1, min(self.checked_scores, _CHECKED_SCORES) // layers),
        )

    def sustains(self, problem: Problem, name: str) -> bool:
        """Whether that implementation is called for seconds at that problem."""
        return (
            self.sustained_seconds > 0
            and (self.sustained_shapes is None or problem.shape in self.sustained_shapes)
            and (self.sustained_names is None or name in self.sustained_names)
        )

    def require(self) -> None:
        """Raises `ParameterError` where a number makes no sense."""
        _positive(samples=self.samples, min_samples=self.min_samples, checked_scores=self.checked_scores)
        _not_negative(cold_samples=self.cold_samples, cap_s=self.cap_s, sustained_seconds=self.sustained_seconds)


_BRIEF = Plan(
    samples=15,
    min_samples=5,
    cold_samples=0,
    cap_s=0.5,
    sustained_seconds=1.0,
    sustained_shapes=None,
    checked_scores=_CHECKED_SCORES,
)
PLANS: Mapping[str, Plan] = {
    "peers": Plan(sustained_shapes=None, checked_scores=1 << 28, lse=True),
    "lengths": Plan(
        samples=15, min_samples=3, cold_samples=0, cap_s=1.0, sustained_seconds=0.0, checked_scores=_CHECKED_SCORES
    ),
    "claims": Plan(samples=30, cold_samples=0, cap_s=0.4, sustained_seconds=0.0, checked_scores=_CHECKED_SCORES),
    "inputs": replace(_BRIEF, lse=True),
    "offsets": _BRIEF,
    "gqa": _BRIEF,
}
"""Of the suites that want their own; `Plan()` of the others."""


def plan_of(suite: str) -> Plan:
    """How a suite is measured."""
    return PLANS.get(suite, Plan())


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    """Rows and ceilings of the whole run."""
    text: str
    """What happens now."""


Report = Callable[[Progress], None]
Folder = Literal["runs", "tuning", "ablations", "parts", "readings", "checks", "random", "flash-attention"]
"""Below data/<gpu>/."""


@dataclass
class _Cell:
    """A problem (or a checked layout of one) and the implementations still to come."""

    problem: Problem
    pending: list[str]
    layout: str = ""

    def to_job(self, index: int) -> Message:
        return {"index": index, "problem": asdict(self.problem), "names": list(self.pending), "layout": self.layout}


# --- The parent: a worker, its messages, its deaths -------------------------------------------------------------------


class _WorkerDiedError(Exception):
    """The worker ended, hung or spoke nonsense; the message says how."""

    def __init__(self, status: Literal["crashed", "timeout"], reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class _Process:
    """A worker process, and the JSON lines that come out of it."""

    def __init__(self, command: Sequence[str], job: Message) -> None:
        reader, writer = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*command, "--fd", str(writer)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        self._reader = reader
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # It is dead already, and `read` will say so.

    def read(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            _WorkerDiedError: none came in time, the worker ended, or what came is no message.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _WorkerDiedError("timeout", f"no answer within {timeout_s:g} s; stopped")
            ended = self._process.poll() is not None
            if not self._selector.select(min(left, 1.0)):
                if ended:  # A process that it started may still hold the pipe open.
                    raise _WorkerDiedError("crashed", self._how_it_ended())
                continue
            data = os.read(self._reader, 1 << 16)
            if not data:
                raise _WorkerDiedError("crashed", self._how_it_ended())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise _WorkerDiedError("crashed", f"the worker said something that is no message: {line[:80]!r}")
        return message

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        if code < 0:
            how = (
                f"killed by {signal.Signals(-code).name}"
                if -code in list(signal.Signals)
                else f"killed by signal {-code}"
            )
        else:
            how = f"exit status {code}"
        tail = self.log_tail()
        return f"the worker ended: {how}" + (f"; its last words: {tail}" if tail else "")

    def log_tail(self) -> str:
        """The end of what it printed, on one line."""
        self._log.flush()
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_CHARS))
        return " | ".join(self._log.read().decode(errors="replace").split("\n")).strip(" |")

    def stop(self) -> None:
        """End it and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A driver takes its time to tear down a context with a kernel still running in it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        self._selector.close()
        os.close(self._reader)
        self._log.close()


@dataclass
class _Handlers:
    """What to do with what a worker says."""

    hello: Callable[[Message], None]
    row: Callable[[_Cell, Message], str]
    """Takes a row and returns its name; ValidationError, KeyError or TypeError where it is none."""
    lost: Callable[[_Cell, str, Literal["crashed", "timeout", "error"], str], None]
    """An implementation that will give no row of its own."""
    ceiling: Callable[[Message], str]
    note: Callable[[str], None]


class _Supervisor:
    """Runs a job to its end, however many workers that takes."""

    def __init__(
        self,
        job: Message,
        cells: Sequence[_Cell],
        ceilings: Sequence[str],
        handlers: _Handlers,
        *,
        command: Sequence[str],
        timeout_s: float,
        startup_s: float,
        report: Report,
    ) -> None:
        self._job = job
        self._cells = list(cells)
        self._left = {index: cell for index, cell in enumerate(self._cells) if cell.pending}
        self._ceilings = list(ceilings)
        self._handlers = handlers
        self._command = command
        self._timeout_s = timeout_s
        self._startup_s = startup_s
        self._report = report
        self._total = sum(len(cell.pending) for cell in self._cells) + len(ceilings)
        self._step: Message | None = None
        self._greeted = False

    @property
    def _done(self) -> int:
        return self._total - sum(len(cell.pending) for cell in self._left.values()) - len(self._ceilings)

    def run(self) -> None:
        """Until every row is there.

        Raises:
            MissingError, UnsupportedError: the worker says that it cannot work here.
            LaunchError: it dies before it has begun.
        """
        while self._left or self._ceilings:
            job = {
                **self._job,
                "ceilings": self._ceilings,
                "cells": [cell.to_job(index) for index, cell in self._left.items()],
            }
            self._step = None
            self._greeted = False
            process = _Process(self._command, job)
            try:
                while self._left or self._ceilings:
                    limit = self._startup_s if not self._greeted else self._limit_s()
                    if not self._take(process.read(limit)):
                        break
            except _WorkerDiedError as death:
                self._bury(death)
            finally:
                process.stop()

    def _limit_s(self) -> float:
        extra = self._step.get("extra_s", 0) if self._step else 0
        return self._timeout_s + (float(extra) if isinstance(extra, int | float) else 0)

    def _take(self, message: Message) -> bool:
        """Act on a message; False when the worker has nothing more to say."""
        kind = message["type"]
        if kind == "refused":
            raise _refusal(message)
        try:
            if kind == "hello":
                self._handlers.hello(message)
                self._greeted = True
            elif kind == "fatal":
                raise _WorkerDiedError("crashed", str(message["reason"]))
            elif kind == "note":
                self._handlers.note(str(message["text"]))
            elif kind == "step":
                self._take_step(message)
            elif kind == "row":
                cell = self._left[message["cell"]]
                cell.pending.remove(self._handlers.row(cell, message["row"]))
            elif kind == "ceiling":
                self._ceilings.remove(self._handlers.ceiling(message["ceiling"]))
            elif kind == "no_ceiling":
                self._ceilings.remove(message["name"])
                self._handlers.note(f"ceiling {message['name']} not measured: {message['reason']}")
            elif kind == "cell_done":
                self._close_cell(message["cell"], "error", "the worker gave no result")
            elif kind == "done":
                for index in list(self._left):
                    self._close_cell(index, "error", "the worker gave no result")
                self._ceilings.clear()
                return False
            else:
                raise KeyError(kind)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # ValueError covers pydantic's ValidationError: a row that is none.
            raise _WorkerDiedError(
                "crashed", f"the worker said something that is no message: {error}"[:_REASON_CHARS]
            ) from error
        return True

    def _take_step(self, message: Message) -> None:
        index, name, what = message["cell"], message["name"], message["what"]
        if index is not None and name and name not in self._left[index].pending:
            raise KeyError(f"step of {name!r}, which is not pending")
        self._step = message
        where = (
            "ceilings"
            if index is None
            else " ".join(filter(None, (self._left[index].problem.label, self._left[index].layout)))
        )
        self._report(Progress(self._done, self._total, " · ".join(filter(None, (where, name, what)))))

    def _close_cell(self, index: int, status: Literal["crashed", "timeout", "error"], reason: str) -> None:
        cell = self._left.pop(index)
        for name in cell.pending:
            self._handlers.lost(cell, name, status, reason)

    def _bury(self, death: _WorkerDiedError) -> None:
        """Charge a death to what was in hand, so that the next worker leaves it out."""
        step = self._step
        if not self._greeted or step is None:
            raise LaunchError(f"wanted a worker process that starts, got: {death.reason}") from death
        index, name = step["cell"], step["name"]
        reason = f"{step['what']}: {death.reason}"[:_REASON_CHARS]
        if index is None:
            if name in self._ceilings:
                self._ceilings.remove(name)
                self._handlers.note(f"ceiling {name} not measured: {reason}")
            return
        cell = self._left.get(index)
        if cell is None:
            return  # It died between two problems, and there is nobody to charge.
        if not name:
            self._close_cell(index, death.status, reason)
        elif name in cell.pending:
            cell.pending.remove(name)
            self._handlers.lost(cell, name, death.status, reason)
            if not cell.pending:
                del self._left[index]


def _refusal(message: Message) -> FlashlabError:
    """The error that a worker could not go past, as it was raised there."""
    kind = getattr(errors, str(message["error"]), None)
    simple = (NoGpuError, MissingPackageError, MissingError, UnsupportedError, ParameterError, OutputError)
    return (kind if kind in simple else LaunchError)(str(message["message"]))


# --- The parent: a run ------------------------------------------------------------------------------------------------


def host() -> dict[str, str]:
    """What the host is; no host name."""

    def first(path: str, key: str) -> str | None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)

    facts = {
        "processor": first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.system(),
    }
    memory_kib = first("/proc/meminfo", "MemTotal")
    if memory_kib:
        facts["memory_gib"] = f"{int(memory_kib.split()[0]) / 2**20:.0f}"
    return facts


@dataclass
class _Book:
    """A run's identity, and where its records go."""

    data: Path
    folder: Folder
    source: store.Source
    started: datetime
    gpu: Gpu | None = None
    software: dict[str, str] = field(default_factory=dict)
    path: Path | None = None

    def hello(self, message: Message) -> None:
        """Learn the GPU from a worker; every worker must have the same."""
        found = Gpu.model_validate(message["gpu"])
        if self.gpu is not None and found.fingerprint != self.gpu.fingerprint:
            raise LaunchError(f"wanted the GPU this run began on ({self.gpu.fingerprint}), got {found.fingerprint}")
        self.gpu = found
        self.software = {str(k): str(v) for k, v in message["software"].items()}
        if self.path is None:
            folder = writable_dir(self.data / found.slug / self.folder, "records")
            self.path = folder / f"{store.run_id(self.source, self.started)}.jsonl"

    def base(self) -> dict[str, Any]:
        """The fields every record has."""
        assert self.gpu is not None
        return {
            "run": store.run_id(self.source, self.started),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu": self.gpu,
            "source": self.source,
            "software": self.software,
            "start": provenance.start(),
        }

    def close(self) -> Path:
        """Write machine.json and CHECKSUMS; the file of this run."""
        assert self.gpu is not None
        assert self.path is not None
        store.write_machine(Machine(gpu=self.gpu, host=host()), self.data)
        store.write_checksums(self.gpu.slug, self.data)
        return self.path


def _open_book(data: Path, folder: Folder) -> _Book:
    # Before any GPU work: an hour of measuring must not end at a folder that cannot be written.
    writable_dir(data, "records")
    commit, dirty = provenance.source()
    return _Book(data, folder, store.Source(commit=commit, dirty=dirty), datetime.now(UTC))


def implementation_name(stage_id: str, source: Path | None) -> str:
    """How a stage's record is named: its id, and with another source file `id@file`."""
    return stage_id if source is None else f"{stage_id}@{source.stem}"


def run(
    problems: Sequence[Problem],
    *,
    stages: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    sources: Mapping[str, Path] | None = None,
    only: Callable[[Problem, str], bool] | None = None,
    data: Path = DATA,
    device: int = 0,
    plan: Plan | None = None,
    ceilings: bool | Sequence[str] = True,
    seed: int = 0,
    timeout_s: float = 180.0,
    startup_s: float = 300.0,
    progress: Report | None = None,
    note: Callable[[str], None] | None = None,
    worker: Sequence[str] = WORKER,
) -> Path:
    """Check and time stages and peers on each problem, and append the records to data/<gpu>/runs/<run>.jsonl.

    What machine code that needs is made first, on all cores.

    Args:
        problems: what to compute; see `problem.suite`.
        stages: ids, or ids with tunables as `stages.parse` takes them; the ladder where None, none where empty.
        peers: names; all where None, none where empty.
        sources: an edited copy of a stage's file, by stage id: measured beside it, under the name `id@file`.
        only: whether a problem wants what has that name; all at every problem where None.
        data: the folder that holds data/<gpu>.
        device: CUDA device index.
        plan: how much to measure; `Plan()` where None, see `plan_of`.
        ceilings: measure them all, none, or those named.
        seed: of the inputs and of the order of samples.
        timeout_s: for one step (a compilation and check, a sample); `startup_s` for a worker to start.
        progress: told of every step.
        note: told of what is worth a line in a log, such as a ceiling that could not be measured.
        worker: the command that starts a worker.

    Returns:
        The run's file. machine.json and CHECKSUMS beside it are up to date, even when this raises half-way.

    Raises:
        OutputError: `data` cannot be written; before any GPU work.
        UnknownStageError, ParameterError: names or numbers that make no sense; before any GPU work.
        NoGpuError, MissingPackageError, UnsupportedError: the worker cannot work here.
        LaunchError: the worker does not start.
    """
    names = _names(stages, peers, sources or {})
    plan = plan or Plan()
    wanted = list(roofline.CEILINGS) if ceilings is True else list(ceilings or ())
    for name in wanted:
        if name not in roofline.CEILINGS:
            raise ParameterError(f"ceiling: wanted one of {', '.join(roofline.CEILINGS)}, got {name!r}")
    if not problems and not wanted:
        raise ParameterError("wanted at least one problem or ceiling to measure, got none")
    if not names and problems:
        raise ParameterError("wanted at least one stage or peer to measure, got none")
    kinds = {name: kind for name, kind, _, _ in names}
    unknown = [name for name in plan.sustained_names or () if name not in kinds]
    if unknown:
        raise ParameterError(f"sustained: wanted names among {', '.join(kinds)}, got {', '.join(unknown)}")
    cells = [_Cell(problem, [name for name in kinds if only is None or only(problem, name)]) for problem in problems]
    implementations: dict[str, Message] = {
        name: {
            "kind": kind,
            "id": identity,
            "source": None if source is None else str(source),
            "params": variant_in(name),
        }
        for name, kind, identity, source in names
    }
    second = {f"{name}{_WITH_LSE}": name for name, kind in kinds.items() if plan.lse and kind == "stage"}
    implementations |= {twin: {**implementations[name], "lse_of": name} for twin, name in second.items()}
    for cell in cells:
        cell.pending += [twin for twin, name in second.items() if name in cell.pending]

    def record(base: Message, problem: Problem, row: Message) -> Measurement:
        timed = str(row["name"])
        name = second.get(timed, timed)
        written = {"lse": timed in second} if kinds[name] == "stage" else {}
        return Measurement.model_validate(
            {**base, **written, **row, "name": name, "kind": kinds[name], "problem": ProblemFields.of(problem)}
        )

    return _measure(
        "runs",
        problems,
        implementations,
        record,
        cells=cells,
        before=lambda: _compile_ahead(names, [(cell.problem, cell.pending) for cell in cells], device),
        plan=plan,
        ceilings=wanted,
        data=data,
        device=device,
        seed=seed,
        timeout_s=timeout_s,
        startup_s=startup_s,
        progress=progress,
        note=note,
        worker=worker,
    )


def time_variants(
    stage_id: str,
    variants: Sequence[Mapping[str, int]],
    problems: Sequence[Problem],
    *,
    source: Path | None = None,
    data: Path = DATA,
    device: int = 0,
    plan: Plan | None = None,
    seed: int = 0,
    timeout_s: float = 180.0,
    startup_s: float = 300.0,
    progress: Report | None = None,
    worker: Sequence[str] = WORKER,
) -> Path:
    """Check and time a stage with several choices of its tunables, in turn; the records go to data/<gpu>/tuning/.

    Args:
        stage_id: the stage.
        variants: values of tunables, as `attention.prepare` takes them; the defaults where one says nothing.
        problems: what to compute; a record is one variant on one problem.
        source: an edited copy of the stage's file, in place of it.
        data, device, seed, timeout_s, startup_s, progress, worker: as `run` takes them.
        plan: how much to measure; hot bursts alone where None.

    Returns:
        The file of `records.Tuning`. A variant that does not compile or run costs its own rows only.

    Raises:
        As `run`; ParameterError for a tunable that the stage lacks and where there is nothing to time.
    """
    return time_tasks(
        [Task(stage_id, tuple(variants), tuple(problems))],
        sources={} if source is None else {stage_id: source},
        data=data,
        device=device,
        plan=plan,
        seed=seed,
        timeout_s=timeout_s,
        startup_s=startup_s,
        progress=progress,
        worker=worker,
    )


@dataclass(frozen=True)
class Task:
    """Variants of a stage, to be compared on some problems."""

    stage: str
    variants: tuple[Mapping[str, int], ...]
    problems: tuple[Problem, ...]
    peers: tuple[str, ...] = ()
    """Libraries to time beside them, by name."""


def time_tasks(
    tasks: Sequence[Task],
    *,
    sources: Mapping[str, Path] | None = None,
    data: Path = DATA,
    device: int = 0,
    plan: Plan | None = None,
    seed: int = 0,
    timeout_s: float = 180.0,
    startup_s: float = 300.0,
    progress: Report | None = None,
    worker: Sequence[str] = WORKER,
) -> Path:
    """`time_variants` for several tasks in one worker; the file holds the records of all.

    Args:
        tasks: what to compare; all that is timed on one problem takes turns, of whatever task.
        sources: an edited copy of a stage's file, by stage id, in place of it.
        data, device, plan, seed, timeout_s, startup_s, progress, worker: as `time_variants` takes them.

    Raises:
        As `time_variants`.
    """
    named: dict[str, tuple[str, dict[str, int]]] = {}
    wanted: dict[Problem, dict[str, None]] = {}
    libraries = {name: (peers.get(name).name, dict[str, int]()) for task in tasks for name in task.peers}
    for task in tasks:
        if not task.variants or not task.problems:
            raise ParameterError(
                f"wanted at least one variant and problem, got {len(task.variants)} and {len(task.problems)}"
            )
        stage = stages.get(task.stage)
        of_task = {stages.variant_name(task.stage, variant): (task.stage, dict(variant)) for variant in task.variants}
        for _, variant in of_task.values():
            stage.parameters(stage.head_dims[0], variant)
        named |= of_task
        for problem in task.problems:
            wanted.setdefault(problem, {}).update(dict.fromkeys([*of_task, *task.peers]))
    named |= libraries
    sources = sources or {}
    for stage_id, source in sources.items():
        if not source.is_file():
            raise ParameterError(f"source of {stage_id}: wanted a CUDA C++ file, got {source}, which is none")

    def record(base: Message, problem: Problem, row: Message) -> Tuning:
        fields = {key: value for key, value in row.items() if key not in ("name", "choice")}
        stage_id, variant = named[row["name"]]
        parameters = {} if row["name"] in libraries else stages.get(stage_id).parameters(problem.head_dim, variant)
        return Tuning.model_validate(
            {**base, **fields, "stage": stage_id, "parameters": parameters, "problem": ProblemFields.of(problem)}
        )

    return _measure(
        "tuning",
        (),
        {
            name: {
                "kind": "peer" if name in libraries else "stage",
                "id": stage_id,
                "source": str(sources[stage_id].resolve()) if stage_id in sources else None,
                "params": variant,
            }
            for name, (stage_id, variant) in named.items()
        },
        record,
        cells=[_Cell(problem, list(names)) for problem, names in wanted.items()],
        plan=plan
        or Plan(samples=15, min_samples=3, cold_samples=0, cap_s=1.0, sustained_seconds=0.0, checked_scores=1 << 27),
        ceilings=(),
        data=data,
        device=device,
        seed=seed,
        timeout_s=timeout_s,
        startup_s=startup_s,
        progress=progress,
        note=None,
        worker=worker,
    )


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A stage with values of its tunables, as `time_groups` takes it."""

    stage: str
    """Its id."""
    params: Mapping[str, int]
    """By name, those of `Stage.ablations` too. What is not named is what `attention.prepare` takes."""
    judged: bool = True
    """Whether the oracle sees its output; False where that is wrong by construction."""
    source: Path | None = None
    """An edited copy of the stage's file, in place of it."""
    on: Problem | None = None
    """The only problem that it is measured on; None: on every one."""


def time_groups(
    folder: Literal["ablations", "parts"],
    groups: Sequence[Mapping[str, Variation]],
    problems: Sequence[Problem],
    record: Callable[[Message, Problem, Message], Ablation | Part | None],
    *,
    plan: Plan,
    data: Path = DATA,
    device: int = 0,
    seed: int = 0,
    timeout_s: float = 180.0,
    startup_s: float = 300.0,
    progress: Report | None = None,
    note: Callable[[str], None] | None = None,
    worker: Sequence[str] = WORKER,
) -> Path:
    """Check and time variations of stages, those of a group in turn; the records go to data/<gpu>/<folder>/<run>.jsonl.

    Args:
        folder: where to.
        groups: variations by name; a name is in one group only.
        problems: what to compute; a record is one variation on one problem.
        record: makes a record of the fields that every one has, the problem, and the row: name, status, reason,
            verdict, samples, cubin. None: there is none, which is noted with the row's reason.
        plan: how much to measure.
        data, device, seed, timeout_s, startup_s, progress, note, worker: as `run` takes them.

    Raises:
        As `run`; ParameterError for a tunable that a stage lacks.
    """
    every = {name: variation for group in groups for name, variation in group.items()}
    if len(every) != sum(len(group) for group in groups):
        raise ParameterError("groups: wanted every name once, got one twice")
    if not every or not problems:
        raise ParameterError(f"wanted at least one variation and problem, got {len(every)} and {len(problems)}")
    for variation in every.values():
        stage = stages.get(variation.stage)
        stage.parameters(stage.head_dims[0], variation.params)
    implementations = {
        name: {
            "kind": "stage",
            "id": variation.stage,
            "source": None if variation.source is None else str(variation.source.resolve()),
            "params": dict(variation.params),
            "may_spill": True,
            "judged": variation.judged,
        }
        for name, variation in every.items()
    }
    cells = [
        _Cell(problem, those)
        for problem in problems
        for group in groups
        if (those := [name for name, variation in group.items() if variation.on in (None, problem)])
    ]
    return _measure(
        folder,
        problems,
        implementations,
        record,
        cells=cells,
        plan=plan,
        ceilings=(),
        data=data,
        device=device,
        seed=seed,
        timeout_s=timeout_s,
        startup_s=startup_s,
        progress=progress,
        note=note,
        worker=worker,
    )


def _measure(
    folder: Folder,
    problems: Sequence[Problem],
    implementations: Mapping[str, Message],
    record: Callable[[Message, Problem, Message], Measurement | Tuning | Ablation | Part | None],
    *,
    plan: Plan,
    ceilings: Sequence[str],
    data: Path,
    device: int,
    seed: int,
    timeout_s: float,
    startup_s: float,
    progress: Report | None,
    note: Callable[[str], None] | None,
    worker: Sequence[str],
    cells: Sequence[_Cell] | None = None,
    before: Callable[[], None] | None = None,
) -> Path:
    """Measure implementations in worker processes and append what `record` makes of each row; the file.

    All of them take turns on each problem; or what `cells` says. `before` is called once it is known that the numbers
    make sense and the folder can be written.
    """
    plan.require()
    _positive(timeout_s=timeout_s, startup_s=startup_s)
    _not_negative(device=device)
    book = _open_book(data, folder)
    if before:
        before()

    def row(cell: _Cell, message: Message) -> str:
        name = message["name"]
        samples = [_with_cycles(one, cell.problem, book.gpu) for one in message.get("samples", ())]
        nothing: Message = {"verdict": None, "cubin": None}
        found = record(book.base(), cell.problem, {**nothing, **message, "samples": samples})
        assert book.path is not None
        if found is None:
            (note or _ignore)(f"{name} at {cell.problem.label}: {message['status']}: {message['reason']}")
        else:
            store.append(book.path, found)
        return str(name)

    def lost(cell: _Cell, name: str, status: Literal["crashed", "timeout", "error"], reason: str) -> None:
        row(cell, {"name": name, "status": status, "reason": reason})

    def ceiling(message: Message) -> str:
        found = Ceiling.model_validate({**book.base(), "kind": "ceiling", **message})
        assert book.path is not None
        store.append(book.path, found)
        return found.name

    supervisor = _Supervisor(
        {
            "kind": "bench",
            "device": device,
            "seed": seed,
            "implementations": dict(implementations),
            "plan": asdict(plan),
        },
        [_Cell(problem, list(implementations)) for problem in problems] if cells is None else cells,
        ceilings,
        _Handlers(hello=book.hello, row=row, lost=lost, ceiling=ceiling, note=note or _ignore),
        command=worker,
        timeout_s=timeout_s,
        startup_s=startup_s,
        report=progress or _ignore,
    )
    try:
        supervisor.run()
    finally:
        if book.path is not None and book.path.exists():
            book.close()
    assert book.path is not None
    return book.path


def _with_cycles(samples: Message, problem: Problem, found: Gpu | None) -> Message:
    """A worker's samples with what follows from them, the problem and the GPU."""
    assert found is not None
    read = Samples.model_validate(samples)
    return {**samples, "cycles_per_score": store.cycles_per_score(read, problem, found.sm_count)}


def _ignore(_: object) -> None:
    return


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ParameterError(f"{name}: wanted a positive number, got {value!r}")


def _not_negative(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ParameterError(f"{name}: wanted 0 or more, got {value!r}")


def _names(
    stage_ids: Sequence[str] | None, peer_names: Sequence[str] | None, sources: Mapping[str, Path]
) -> list[tuple[str, Literal["stage", "peer"], str, Path | None]]:
    """(record name, kind, stage id or peer name, source file) of everything to measure, each once.

    A stage may be named with values of its tunables: `wmma_no_smem[COLUMN_LANES=32]`.
    """
    found: list[tuple[str, Literal["stage", "peer"], str, Path | None]] = []
    for text in stages.STAGES if stage_ids is None else stage_ids:
        stage, variant = stages.parse(text)
        name = stages.variant_name(stage.id, variant) if variant else stage.id
        if name not in {one for one, *_ in found}:
            found.append((name, "stage", stage.id, None))
    for stage_id, source in sources.items():
        stages.get(stage_id)
        if not source.is_file():
            raise ParameterError(f"source of {stage_id}: wanted a CUDA C++ file, got {source}, which is none")
        found.append((implementation_name(stage_id, source), "stage", stage_id, source.resolve()))
    for name in dict.fromkeys(peers.PEERS if peer_names is None else peer_names):
        found.append((peers.get(name).name, "peer", name, None))
    return found


# --- The parent: how long it will take --------------------------------------------------------------------------------

_STARTUP_S, _CEILING_S = 20.0, 2.0
_BUILD_S, _CHECK_S_PER_SCORE = 0.4, 0.6 / (1 << 30)
_COMPILING_PEERS: Mapping[str, float] = {"flex": 5.0, "triton_fa2": 5.0, "fa4": 5.0}
_UNKNOWN_TFLOPS = 300.0
"""Assumptions of `estimate`: what a worker's start, a ceiling, a build and a check take, and an unmeasured rate."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a problem may take."""

    problem: Problem
    implementations: int
    """Those that take it."""
    sustained: int
    """Those of them that are called for seconds."""
    seconds: float


def estimate(
    problems: Sequence[Problem],
    *,
    stages: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    sources: Mapping[str, Path] | None = None,
    plan: Plan | None = None,
    ceilings: bool | Sequence[str] = True,
    known: Sequence[Measurement] = (),
) -> tuple[tuple[Estimate, ...], float]:
    """How long each problem of a run may take, and the whole run, in seconds; nothing is run.

    From what is recorded: the time of an implementation is taken from its row at the same head dim and mask that is
    nearest in operations, on the same inputs where there is one, and scaled by them. A stage without one is taken to be
    as fast as its parent. Of `trained` inputs all layers together are taken to cost what another kind costs.

    Args:
        problems, stages, peers, sources, plan, ceilings: as `run` takes them.
        known: rows on record, the newest last.
    """
    names = _names(stages, peers, sources or {})
    plan = plan or Plan()
    plan.require()
    found = []
    built: set[tuple[str, Problem]] = set()
    for problem in problems:
        able = [(name, kind, identity) for name, kind, identity, _ in names if _takes(kind, identity, problem)]
        shape = replace(problem, inputs=NORMAL)
        scores = min(plan.checks(problem), int(problem.batch * problem.q_heads * problem.visible_scores))
        seconds, long = 0.0, 0
        for name, kind, identity in able:
            call_s = _guess_us(kind, identity, problem, known) / 1e6
            rows = 2 if plan.lse and kind == "stage" else 1
            if (name, shape) not in built:
                seconds += _COMPILING_PEERS.get(identity, 0.0)
                built.add((name, shape))
            seconds += rows * (_BUILD_S + _CHECK_S_PER_SCORE * scores + 2 * call_s)
            seconds += rows * (_burst_s(call_s, plan.samples, plan.min_samples, plan.cap_s) + 2 * call_s)
            if plan.cold_samples:
                seconds += _burst_s(call_s, plan.cold_samples, 3, plan.cap_s / 2) + 2 * call_s
            if plan.sustains(problem, name):
                seconds += plan.sustained_seconds + max(timing.CHUNK_S, call_s) * 2
                long += 1
        if plan.lse and long:  # the fastest stage with the log-sum-exp on
            seconds += plan.sustained_seconds
        seconds += min(_HEAT_SECONDS, plan.sustained_seconds) if long else 0.0
        found.append(Estimate(problem=problem, implementations=len(able), sustained=long, seconds=seconds))
    num_ceilings = len(roofline.CEILINGS) if ceilings is True else len(ceilings or ())
    return tuple(found), _STARTUP_S + num_ceilings * _CEILING_S + sum(one.seconds for one in found)


def _takes(kind: str, identity: str, problem: Problem) -> bool:
    if kind == "stage":
        return stages.get(identity).why_not(problem) is None
    return peers.get(identity).limits(problem) is None


def _burst_s(call_s: float, samples: int, min_samples: int, cap_s: float) -> float:
    sample_s = max(call_s, 1e-3)
    each_s = sample_s + min(max(2 * sample_s, timing.MIN_GAP_S), timing.MAX_GAP_S) + 5e-4
    return max(min(samples * each_s, cap_s), min_samples * each_s)


def _guess_us(kind: str, identity: str, problem: Problem, known: Sequence[Measurement]) -> float:
    name: str | None = identity
    while name is not None:
        alike = [
            (row, samples)
            for row in reversed(known)
            if row.name == name
            and (row.problem.head_dim, row.problem.mask) == (problem.head_dim, problem.mask)
            and (samples := row.samples_of())
        ]
        if alike:
            row, samples = min(
                alike,
                key=lambda pair: (
                    pair[0].problem.inputs != problem.inputs,
                    abs(math.log(pair[0].problem.problem().flops / problem.flops)),
                ),
            )
            return samples.median_us * problem.flops / row.problem.problem().flops
        name = stages.get(name).parent if kind == "stage" else None
    return problem.flops / _UNKNOWN_TFLOPS / 1e6


# --- The parent: checks -----------------------------------------------------------------------------------------------


def check_stages(
    stage_ids: Sequence[str] | None = None,
    *,
    lengths: Sequence[tuple[int, int]] | None = None,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    layouts: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    sources: Mapping[str, Path] | None = None,
    data: Path | None = DATA,
    emulate: bool = False,
    random: int = 0,
    suite: str | None = None,
    device: int = 0,
    seed: int = 0,
    timeout_s: float = 120.0,
    startup_s: float = 300.0,
    progress: Report | None = None,
    worker: Sequence[str] = WORKER,
) -> CheckRun:
    """Compare stages with the oracle on the GPU, over lengths, masks, types, layouts and inputs that break kernels.

    Every buffer lies between guards of NaN, outputs are poisoned, inputs compared afterwards, grouped-query heads and
    the log-sum-exp are always on. Rows go to data/<gpu>/checks/<run>.jsonl, or nowhere where `data` is None.

    Where lengths, layouts and inputs are left open, these are `cases.default_cases`. Where one of them is given, every
    combination runs: by default of all hostile lengths, every layout and normal inputs. `inputs` are kinds that are
    drawn from a seed: all but `trained`.

    `emulate` also runs each case on the CPU, on the same numbers, checks that and compares the two. `random` replaces
    lengths, masks, types, layouts and head dims by so many `cases.random_cases`; their rows go to data/<gpu>/random/.
    `suite` replaces them by the cases of one of `cases.SUITES`, judged by its rule, and the folder is its name.

    Raises:
        As `run`.
    """
    names = _names(stage_ids, (), sources or {})
    _positive(timeout_s=timeout_s, startup_s=startup_s)
    able = {name: stages.get(identity) for name, _, identity, _ in names}
    wanted = chosen_cases(
        able,
        lengths=lengths,
        dtypes=dtypes,
        masks=masks,
        layouts=layouts,
        inputs=inputs,
        head_dims=head_dims,
        random=random,
        suite=suite,
        seed=seed,
        on_cpu=False,
    )
    with ThreadPoolExecutor(1) as aside:
        built = aside.submit(build_all, implementations(stage_ids, sources), wanted) if emulate else None
        _compile_ahead(names, [(case.problem, case.names) for case in wanted], device, aligned=(True, False))
        if built:
            built.result()
    cells = [_Cell(case.problem, list(case.names), case.layout) for case in wanted]
    with tempfile.TemporaryDirectory() as nowhere:
        book = _open_book(
            Path(nowhere) if data is None else data, "random" if random else FLASH_ATTENTION if suite else "checks"
        )
        rows: list[CheckRow] = []
        of_cases: dict[int, list[CheckRow]] = {}
        due = {id(cell): len(cell.pending) for cell in cells}

        def row(cell: _Cell, message: Message) -> str:
            verdict = message.get("verdict")
            found = CheckRow(
                stage=str(message["name"]),
                problem=cell.problem,
                layout=cell.layout,
                status=str(message["status"]),
                reason=str(message["reason"]),
                verdict=None if verdict is None else Verdict.model_validate(verdict),
                emulator=_emulator_verdict(message.get("emulator")),
                fallbacks=Fallbacks(*message["fallbacks"]) if message.get("fallbacks") else None,
            )
            rows.append(found)
            of_case = of_cases.setdefault(id(cell), [])
            of_case.append(found)
            if len(of_case) == due[id(cell)]:
                _append_case(book, of_cases.pop(id(cell)))
            return found.stage

        def lost(cell: _Cell, name: str, status: Literal["crashed", "timeout", "error"], reason: str) -> None:
            row(cell, {"name": name, "status": status, "reason": reason})

        supervisor = _Supervisor(
            {
                "kind": "check",
                "device": device,
                "seed": seed,
                "emulate": emulate,
                "suite": suite,
                "implementations": {
                    name: {
                        "kind": kind,
                        "id": identity,
                        "source": None if source is None else str(source),
                        "params": variant_in(name),
                    }
                    for name, kind, identity, source in names
                },
            },
            cells,
            (),
            _Handlers(hello=book.hello, row=row, lost=lost, ceiling=lambda _: "", note=_ignore),
            command=worker,
            timeout_s=timeout_s,
            startup_s=startup_s,
            report=progress or _ignore,
        )
        try:
            supervisor.run()
        finally:
            for of_case in of_cases.values():  # broken off
                _append_case(book, of_case)
            if data is not None and book.path is not None and book.path.exists():
                book.close()
    return CheckRun(None if data is None else book.path, tuple(rows))


def _compile_ahead(
    names: Sequence[tuple[str, str, str, Path | None]],
    wanted: Sequence[tuple[Problem, Sequence[str]]],
    device: int,
    *,
    aligned: Sequence[bool] = (True,),
) -> None:
    """Fill the cache with all that the stages may need at their problems, on all cores; the worker compiles in turn.

    What does not compile is the worker's to record.
    """
    if gpu.available():
        return  # the worker says better why
    found = gpu.info(device)
    kinds = {name: stages.get(identity) for name, kind, identity, source in names if kind == "stage" and source is None}
    jobs: dict[str, compiler.Job] = {}
    for problem, of_problem in wanted:
        for name in of_problem:
            stage = kinds.get(name)
            if stage is None or (stage.language == "triton" and triton_code.missing()):
                continue
            what = {"head_dim": problem.head_dim, "causal": problem.causal, "dtype": problem.dtype}
            overrides = tuned.parameters(stage, found.slug, problem, arch=found.arch, overrides=variant_in(name))
            for job in compiler.jobs([stage], [found.arch], aligned=aligned):
                if what == {"head_dim": job.head_dim, "causal": job.causal, "dtype": job.dtype}:
                    jobs.setdefault(replace(job, overrides=overrides).label, replace(job, overrides=overrides))
    with contextlib.suppress(MissingPackageError):  # no compiler: the worker says so of every stage
        compiler.compile_many(list(jobs.values()))


def _emulator_verdict(message: Message | None) -> EmulatorVerdict | None:
    if message is None:
        return None
    verdicts = {
        key: None if message[key] is None else Verdict.model_validate(message[key]) for key in ("verdict", "agreement")
    }
    return EmulatorVerdict(status=message["status"], reason=message["reason"], shape=message["shape"], **verdicts)


def _emulator_message(found: EmulatorVerdict) -> Message:
    return {
        "status": found.status,
        "reason": found.reason,
        "shape": found.shape,
        "verdict": None if found.verdict is None else found.verdict.model_dump(mode="json"),
        "agreement": None if found.agreement is None else found.agreement.model_dump(mode="json"),
    }


def _append_case(book: _Book, rows: Sequence[CheckRow]) -> None:
    """Append a case's comparisons to the run's file, which begins with what holds for all."""
    assert book.path is not None
    assert book.gpu is not None
    lines = [case_line(rows)]
    if not book.path.exists():
        base = book.base()
        sources = {name: base[name].model_dump(mode="json") for name in ("gpu", "source")}
        lines.insert(0, header_line(run=base["run"], time=base["time"], software=book.software, **sources))
    with book.path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


# --- The worker -------------------------------------------------------------------------------------------------------


@dataclass
class _Candidate:
    """An implementation that is ready to be timed: it passed its check, or is not judged."""

    run: timing.Run
    verdict: Message | None
    """None where it is not judged."""
    cubin: Message | None
    judge: Callable[[], Message | None]
    """Checks it again, on what its inputs hold by then; `_RefusedError` where it is wrong."""
    fields: Message = field(default_factory=dict)
    """What else its row says."""
    fallbacks: Callable[[], Fallbacks | None] = lambda: None
    """Of all checks so far."""


class _RefusedError(Exception):
    """An implementation that gives no time: its row's status and reason."""

    def __init__(self, status: str, reason: str, verdict: Message | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.verdict = verdict


class _Worker:
    """What a worker process does. Talks through `send`."""

    def __init__(self, job: Message, send: Callable[[Message], None]) -> None:
        self._job = job
        self._send = send
        self._device = int(job["device"])
        self._implementations = job["implementations"]
        # Processes, since most of what a run of the emulator costs is Python's; and new ones, since CUDA is not forked.
        self._pool = (
            ProcessPoolExecutor(emulator.cores(), mp_context=multiprocessing.get_context("spawn"))
            if job.get("emulate")
            else None
        )
        self._emulating: dict[Future[EmulatorVerdict], tuple[int, str, Message, Fallbacks | None]] = {}
        """Runs of the emulator under way: the cell, the name, and the GPU's verdict and fallbacks of each."""
        self._unfinished: dict[int, int] = {}
        """Of each cell, how many of them are its own."""
        self._oracle = Oracle()
        """Of the problem in hand, and the layer."""
        self._checked_scores = 0
        """How many of its scores are compared with the oracle."""
        self._model: Message | None = None
        """What there is to say of the model that made the inputs in hand; None where none did."""
        self._peers: tuple[Problem | None, dict[str, peers.Attention]] = None, {}
        """Libraries as built for a problem, whatever its inputs."""
        self._copies: dict[peers.Layout, tuple[Any, ...]] = {}
        """Of Q, K and V in hand, by layout."""

    def start(self) -> None:
        """Take hold of the GPU and greet.

        Raises:
            MissingError, UnsupportedError: it cannot work here.
        """
        gpu.require()
        found = gpu.info(self._device)
        self.torch, self.cupy = _need("torch"), _need("cupy")
        self.torch.cuda.set_device(self._device)
        self.cupy.cuda.Device(self._device).use()
        self.torch.zeros(1, device="cuda")
        self._info = found
        fields = {name: getattr(found, name) for name in Gpu.model_fields}
        self._send({"type": "hello", "gpu": fields, "software": provenance.software()})

    def step(self, cell: int | None, name: str, what: str, extra_s: float = 0.0) -> None:
        """Say what comes next: should this process die of it, the parent knows."""
        self._send({"type": "step", "cell": cell, "name": name, "what": what, "extra_s": extra_s})

    def work(self) -> None:
        """Do the job."""
        if self._job["kind"] == "bench":
            stream = int(self.torch.cuda.current_stream(self._device).cuda_stream)
            self._backend = timing.CudaBackend(self._device, stream)
            self._ceilings(stream)
            for cell in self._job["cells"]:
                self._bench_cell(cell)
        else:
            try:
                for cell in self._job["cells"]:
                    self._check_cell(cell)
                    if cell["layout"] in FAR_LAYOUTS:
                        self._free()  # gigabytes
                self._collect(most=0)
            finally:
                if self._pool:
                    self._pool.shutdown(wait=False, cancel_futures=True)
        self._send({"type": "done"})

    # -- bench

    def _ceilings(self, stream: int) -> None:
        for name in self._job["ceilings"]:
            self.step(None, name, "measure")
            try:
                timer = timing.Timer(self._backend, seed=self._job["seed"])
                reading = next(iter(roofline.measure(timer, self._device, stream, [name])))
            except Exception as error:
                self._survive(error)
                self._send({"type": "no_ceiling", "name": name, "reason": _words(error)})
                continue
            self._send(
                {
                    "type": "ceiling",
                    "ceiling": {
                        "name": reading.name,
                        "unit": reading.unit,
                        "value": reading.value,
                        "how": reading.how,
                        "samples": asdict(reading.series),
                    },
                }
            )
            self._free()

    def _free(self) -> None:
        gc.collect()
        self.torch.cuda.empty_cache()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def _bench_cell(self, cell: Message) -> None:
        index, problem = cell["index"], Problem(**cell["problem"])
        self.step(index, "", "make inputs", extra_s=_MODEL_S if problem.inputs == TRAINED else 0.0)
        self._oracle, self._copies = Oracle(), {}  # of the problem before: its memory goes with it
        self._free()
        plan, self._model = Plan(**self._job["plan"]), None
        if problem.inputs == TRAINED:
            trained = _trained()
            why_not = trained.why_not(problem)
            if why_not:
                for name in cell["names"]:
                    self._row(index, name, "unsupported", f"{TRAINED} inputs: {why_not}")
                self._send({"type": "cell_done", "cell": index})
                return
            layers = [trained.activations(problem, layer) for layer in range(trained.layers(problem))]
            self._model = trained.describe(problem.head_dim)
            plan = plan.shared(len(layers))
            # Kernels are made ready once, for these addresses, and every layer goes through them.
            tensors = tuple(self.torch.empty_like(x, memory_format=self.torch.contiguous_format) for x in layers[0])
        else:
            tensors = self._inputs(problem)
            layers = [tensors]
        self._checked_scores = plan.checks(problem)
        self._load(tensors, layers[0])
        ready = self._each(
            index, cell["names"], "build and check", lambda name: self._candidate(name, problem, *tensors)
        )
        self._time(index, problem, ready, plan, tensors, layers)
        self._send({"type": "cell_done", "cell": index})

    def _load(self, tensors: Sequence[Any], layer: Sequence[Any]) -> None:
        """Put other values into Q, K and V."""
        self._oracle = Oracle()  # of the values before: its memory goes with it
        for tensor, values in zip(tensors, layer, strict=True):
            if tensor is not values:
                tensor.copy_(values)
        for layout, copies in self._copies.items():
            for copy, tensor in zip(copies, tensors, strict=True):
                if copy is not tensor:
                    peers.bhsd_view(layout, copy).copy_(tensor)

    def _each(self, index: int, names: Sequence[str], what: str, act: Callable[[str], T]) -> dict[str, T]:
        """What comes of each implementation; the row of one that gives none is sent."""
        found: dict[str, T] = {}
        for name in names:
            self.step(index, name, what)
            try:
                found[name] = act(name)
            except _RefusedError as refused:
                self._row(index, name, refused.status, refused.reason, verdict=refused.verdict)
            except Exception as error:
                self._survive(error)
                self._row(index, name, *_classify(error))
        return found

    def _inputs(self, problem: Problem) -> tuple[Any, Any, Any]:
        return make_torch_inputs(problem, self._job["seed"])

    def _for_oracle(self, tensor: Any) -> Any:
        """A CuPy view of a torch tensor; bfloat16 as its bits, since CuPy need not know the type."""
        if str(tensor.dtype) == "torch.bfloat16":
            return self.cupy.from_dlpack(tensor.view(self.torch.int16)).view(self.cupy.uint16)
        return self.cupy.from_dlpack(tensor)

    def _poisoned(self, like: Any) -> Any:
        out = self.torch.empty_like(like)
        out.view(self.torch.int16).fill_(POISON_WORD)
        return out

    def _candidate(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> _Candidate:
        which = self._implementations[name]
        if which["kind"] == "peer":
            return self._peer(which["id"], problem, q, k, v)
        return self._stage(which, problem, q, k, v)

    def _judge(
        self, out: Any, lse: Any, problem: Problem, q: Any, k: Any, v: Any, precision: Precision = "input"
    ) -> Message:
        verdict = check(
            self._for_oracle(out),
            None if lse is None else self._for_oracle(lse),
            *(self._for_oracle(x) for x in (q, k, v)),
            causal=problem.causal,
            dtype=problem.dtype,
            precision=precision,
            sample=Sample.of(problem, max_scores=self._checked_scores, seed=self._job["seed"]),
            oracle=self._oracle,
            xp=self.cupy,
        )
        self.cupy.get_default_memory_pool().free_all_blocks()
        said = verdict.model_dump()
        if not verdict.passed:
            raise _RefusedError("wrong", verdict.reason, said)
        return said

    def _stage(self, which: Message, problem: Problem, q: Any, k: Any, v: Any) -> _Candidate:
        stage_id: str = which["id"]
        stage = stages.get(stage_id)
        reason = stage.why_not(problem, self._info.arch)
        if reason:
            raise _RefusedError("unsupported", reason)
        what: dict[str, Any] = {
            "causal": problem.causal,
            "stage": stage_id,
            "source": None if which["source"] is None else Path(which["source"]),
            "params": which.get("params"),
            "may_spill": which.get("may_spill", False),
        }
        out = self._poisoned(q)
        if not which.get("judged", True):
            timed = prepare(q, k, v, out=out, **what)
            timed()
            gpu.synchronize(self._device)
            return _Candidate(timed, None, _cubin_fields(timed), lambda: None)
        lse = self.torch.empty(q.shape[:3], dtype=self.torch.float32, device=q.device)
        apart = not which.get("lse_of")
        with_lse = prepare(q, k, v, out=out, lse=lse, count_fallbacks=apart, **what)
        timed = prepare(q, k, v, out=out, **what) if apart else with_lse

        def judge() -> Message:
            out.view(self.torch.int16).fill_(POISON_WORD)
            lse.view(self.torch.int32).fill_(POISON_WORD << 16 | POISON_WORD)
            with_lse()
            gpu.synchronize(self._device)
            verdict = self._judge(out, lse, problem, q, k, v, stage.precision)
            if timed is with_lse:
                return verdict
            # What is timed writes no log-sum-exp, so it is run too: the same bits, into an output poisoned anew.
            first = out.clone()
            out.view(self.torch.int16).fill_(POISON_WORD)
            timed()
            gpu.synchronize(self._device)
            if not self.torch.equal(first.view(self.torch.int16), out.view(self.torch.int16)):
                self._judge(out, None, problem, q, k, v, stage.precision)
            return verdict

        return _Candidate(timed, judge(), _cubin_fields(timed), judge, fallbacks=with_lse.fallbacks)

    def _peer(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> _Candidate:
        peer = peers.get(name)
        why_not = peer.why_not(
            problem,
            compute_capability=self._info.compute_capability,
            free_bytes=gpu.memory_free_bytes(self._device)
            + self.torch.cuda.memory_reserved()
            - self.torch.cuda.memory_allocated(),
        )
        if why_not:
            raise _RefusedError(why_not.kind, why_not.reason)
        # Some compile for seconds, and none of them asks what the inputs hold.
        shape = replace(problem, inputs=NORMAL)
        if self._peers[0] != shape:
            self._peers = shape, {}
        built = self._peers[1]
        given = self._in_layout(peer.layout, q, k, v)
        with self.torch.no_grad():
            attend = built[name] = built.get(name) or peer.build(problem)

        def judge() -> Message:
            with self.torch.no_grad():
                out = peers.bhsd_view(peer.layout, attend(*given))
                gpu.synchronize(self._device)
                return self._judge(out, None, problem, q, k, v)

        def run() -> None:
            attend(*given)

        verdict = judge()  # Only then has one that tunes itself chosen.
        choice = getattr(attend, "choice", "")
        fields = {"choice": choice, "layout": peer.layout, "lse": peer.wrote_lse(choice)}
        return _Candidate(run, verdict, None, judge, fields)

    def _in_layout(self, layout: peers.Layout, *tensors: Any) -> tuple[Any, ...]:
        """Q, K and V in hand as a library takes them: one copy for all of that layout."""
        if layout not in self._copies:
            self._copies[layout] = peers.in_layout(layout, *tensors)
        return self._copies[layout]

    def _time(
        self,
        index: int,
        problem: Problem,
        ready: Mapping[str, _Candidate],
        plan: Plan,
        tensors: Sequence[Any],
        layers: Sequence[Sequence[Any]],
    ) -> None:
        """Samples of all that is ready, in turn; where the inputs have layers, on one after the other."""
        second = {name: of for name in ready if (of := self._implementations.get(name, {}).get("lse_of"))}
        timer = timing.Timer(self._backend, seed=self._job["seed"])
        series: dict[str, list[Message]] = {name: [] for name in ready}
        hot: list[Mapping[str, timing.Series]] = []

        def keep(burst: Mapping[str, timing.Series], of_layer: Message) -> None:
            for name, found in burst.items():
                series[name].append({**_samples(found, timer.summary(name)), **of_layer})

        for number, layer in enumerate(layers):
            of_layer = {} if self._model is None else {"layer": number}
            if number:
                self._load(tensors, layer)
                ready = self._checked_again(index, number, ready)
            if not ready:
                return
            runs = {name: candidate.run for name, candidate in ready.items()}
            with self.torch.no_grad():
                hot.append(
                    timer.burst(
                        runs,
                        samples=plan.samples,
                        min_samples=min(plan.min_samples, plan.samples),
                        cap_s=plan.cap_s,
                        announce=lambda name: self.step(index, name, "time, hot"),
                    )
                )
                keep(hot[-1], of_layer)
                if plan.cold_samples:
                    cold = timer.burst(
                        {name: run for name, run in runs.items() if name not in second},
                        cold=True,
                        samples=plan.cold_samples,
                        min_samples=min(3, plan.cold_samples),
                        cap_s=plan.cap_s / 2,
                        announce=lambda name: self.step(index, name, "time, cold"),
                    )
                    keep(cold, of_layer)
        # From the slowest to the fastest, without a pause between them: what is compared most closely runs one
        # after the other, on a chip that the one before kept warm.
        near_us = _NEAR * min((hot[0][name].median_us for name in ready if name in second), default=0.0)
        long = sorted(
            (
                name
                for name in ready
                if plan.sustains(problem, second.get(name, name))
                and (name not in second or hot[0][name].median_us <= near_us)
            ),
            key=lambda name: -hot[0][name].median_us,
        )
        heat_s = min(_HEAT_SECONDS, plan.sustained_seconds * len(layers))
        for position, name in enumerate(long):
            run = ready[name].run
            for number, layer in enumerate(layers):
                self.step(index, name, "time, sustained", extra_s=2 * plan.sustained_seconds + heat_s)
                self._load(tensors, layer)
                call_us = hot[number][name].median_us
                with self.torch.no_grad():
                    if not position and not number:
                        timer.sustained(run, seconds=heat_s, call_us=call_us)
                    found = timer.sustained(run, seconds=plan.sustained_seconds, call_us=call_us)
                series[name].append(
                    {
                        **_samples(found.series, found.summary, found.energy_j_per_call),
                        "continuous_s": found.continuous_s,
                        **({} if self._model is None else {"layer": number}),
                    }
                )
        for name, candidate in ready.items():
            self._row(
                index,
                name,
                "ok",
                "",
                verdict=candidate.verdict,
                samples=series[name],
                cubin=candidate.cubin,
                fields=candidate.fields,
                fallbacks=candidate.fallbacks(),
            )

    def _checked_again(self, index: int, number: int, ready: Mapping[str, _Candidate]) -> dict[str, _Candidate]:
        """Those that are right on another layer too; each keeps the verdict that came closest to its limit.

        But for the overall errors, which are over the layers so far: the same rows of all implementations.
        """

        def judged(name: str) -> _Candidate:
            candidate = ready[name]
            try:
                verdict = candidate.judge()
            except _RefusedError as refused:
                raise _RefusedError(refused.status, f"layer {number}: {refused.reason}", refused.verdict) from None
            candidate.verdict = _over_layers(candidate.verdict, verdict, number)
            return candidate

        return self._each(index, list(ready), f"check on layer {number}", judged)

    def _row(
        self,
        index: int,
        name: str,
        status: str,
        reason: str,
        *,
        verdict: Message | None = None,
        samples: Sequence[Message] = (),
        cubin: Message | None = None,
        fields: Message | None = None,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        row = {
            "name": name,
            "status": status,
            "reason": reason[:_REASON_CHARS],
            "verdict": verdict,
            "samples": list(samples),
            "cubin": cubin,
            **(fields or {}),
            **({"fallbacks": fallbacks} if fallbacks else {}),
            **({"trained": self._model} if self._model else {}),
        }
        self._send({"type": "row", "cell": index, "row": row})

    def _survive(self, error: Exception) -> None:
        """Return when the CUDA context outlived an error, end the process when it did not: it never recovers."""
        try:
            gpu.synchronize(self._device)
        except LaunchError as broken:
            self._send({"type": "fatal", "reason": f"{_words(error)} (then {broken})"[:_REASON_CHARS]})
            # No clean-up: every destructor would meet the broken context.
            os._exit(3)

    # -- check

    def _check_cell(self, cell: Message) -> None:
        index, problem, layout = cell["index"], Problem(**cell["problem"]), cell["layout"]
        self.step(index, "", "make inputs")
        made = tuple(self._for_oracle(x) for x in self._inputs(problem))
        values = laid_out(made, layout, self.cupy)
        try:
            inputs = _guarded_inputs(values, layout)
        except Exception as error:  # rows far apart take gigabytes
            self._survive(error)
            for name in cell["names"]:
                self._send_check(index, name, *_classify(error), None)
            self._unfinished[index] = 0
            self._send({"type": "cell_done", "cell": index})
            return
        rule = self._job.get("suite")
        judge = partial(SUITES[rule], oracle=FlashAttentionOracle()) if rule else partial(check, oracle=Oracle())
        host: tuple[Any, ...] | None = None
        for name in cell["names"]:
            self.step(index, name, "check")
            which = self._implementations[name]
            source = None if which["source"] is None else Path(which["source"])
            try:
                stages.get(which["id"]).require(problem, self._info.arch)
                verdict, out, lse, fallbacks = _guarded_run(
                    which["id"],
                    problem,
                    values,
                    inputs,
                    layout=layout,
                    source=source,
                    params=which["params"],
                    judge=judge,
                )
                said = verdict.model_dump()
            except Exception as error:
                self._survive(error)
                self._send_check(index, name, *_classify(error), None)
                continue
            if not verdict.passed:
                inputs = _guarded_inputs(values, layout)  # it may have written to them
            elif self._pool and which["id"] in stages.CUDA_STAGES and emulates(problem, layout):
                host = host or tuple(self._on_host(x) for x in values)
                future = self._pool.submit(
                    emulate_beside,
                    which["id"],
                    problem,
                    host,
                    self._on_host(out),
                    self._on_host(lse),
                    layout=layout,
                    source=source,
                    params=which["params"],
                    threads=1,
                )
                self._emulating[future] = (index, name, said, fallbacks)
                continue
            status = "ok" if verdict.passed else "wrong"
            self._send_check(index, name, status, verdict.reason, said, fallbacks=fallbacks)
        self._unfinished[index] = sum(of_cell == index for of_cell, *_ in self._emulating.values())
        if not self._unfinished[index]:
            self._send({"type": "cell_done", "cell": index})
        self._collect(most=_WAITING_EMULATIONS)

    def _collect(self, most: int) -> None:
        """Send what the emulator has said, and wait until no more than `most` of its runs are left."""
        while self._emulating:
            late = len(self._emulating) > most
            if late:
                self.step(*next(iter(self._emulating.values()))[:2], "emulate")
            done, _ = wait(self._emulating, timeout=None if late else 0, return_when=FIRST_COMPLETED)
            for future in done:
                index, name, verdict, fallbacks = self._emulating.pop(future)
                try:
                    beside = future.result()
                    status, reason = beside.status, beside.reason and f"emulator: {beside.reason}"
                    self._send_check(index, name, status, reason, verdict, _emulator_message(beside), fallbacks)
                except Exception as error:
                    self._send_check(index, name, *_classify(error), verdict)
                self._unfinished[index] -= 1
                if not self._unfinished[index]:
                    self._send({"type": "cell_done", "cell": index})
            if not late:
                return

    def _send_check(
        self,
        index: int,
        name: str,
        status: str,
        reason: str,
        verdict: Message | None,
        beside: Message | None = None,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        row: Message = {"name": name, "status": status, "reason": reason[:_REASON_CHARS], "verdict": verdict}
        if beside is not None:
            row["emulator"] = beside
        if fallbacks is not None:
            row["fallbacks"] = fallbacks
        self._send({"type": "row", "cell": index, "row": row})

    def _on_host(self, array: Any) -> Any:
        host = array.get()
        return host.view(ml_dtypes.bfloat16) if str(host.dtype) == "uint16" else host


def guarded_verdict(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    *,
    layout: str = "contiguous",
    source: Path | None = None,
) -> Verdict:
    """Run a stage once on the current GPU between guards and say what is wrong with it.

    `values` are q, k, v as `reference.make_inputs(problem, xp=cupy)` gives them, `layout` is one of `LAYOUTS`.

    Raises:
        What `attention.prepare` raises; LaunchError where the kernel breaks off.
    """
    inputs = _guarded_inputs(values, layout)
    return _guarded_run(stage_id, problem, values, inputs, layout=layout, source=source)[0]


def _guarded_inputs(values: tuple[Any, Any, Any], layout: str) -> list[Guarded]:
    cupy = _need("cupy")
    return [Guarded.holding(x, xp=cupy, **placement(x.shape, layout, t)) for x, t in zip(values, TENSORS, strict=False)]


def _guarded_run(
    stage_id: str,
    problem: Problem,
    values: tuple[Any, Any, Any],
    inputs: Sequence[Guarded],
    *,
    layout: str,
    source: Path | None,
    params: Mapping[str, int] | None = None,
    judge: Callable[..., Verdict] = check,
) -> tuple[Verdict, Any, Any, Fallbacks | None]:
    """The verdict, the output and log-sum-exp it is on, and fallbacks; `inputs` are `_guarded_inputs` of the values."""
    cupy = _need("cupy")
    out_shape = values[0].shape
    out = Guarded.output(out_shape, problem.dtype, xp=cupy, **placement(out_shape, layout))
    lse = Guarded.output(out_shape[:3], "float32", xp=cupy)
    views = [_for_kernel(buffer.array, problem) for buffer in (*inputs, out)]
    prepared = prepare(
        *views[:3],
        causal=problem.causal,
        stage=stage_id,
        out=views[3],
        lse=lse.array,
        source=source,
        params=params,
        stream=cupy.cuda.get_current_stream(),
        count_fallbacks=True,
    )
    prepared()
    gpu.synchronize(prepared.plan.device)
    verdict = damage(out, lse, inputs) or judge(
        out.array,
        lse.array,
        *values,
        causal=problem.causal,
        dtype=problem.dtype,
        precision=stages.get(stage_id).precision,
        xp=cupy,
    )
    return verdict, out.array, lse.array, prepared.fallbacks()


def _for_kernel(array: Any, problem: Problem) -> Any:
    """A CuPy array as `attention` takes it: bfloat16, which arrives as bits, as a torch view."""
    if problem.dtype == "float16":
        return array
    torch = _need("torch")
    return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package {module} to measure on a GPU, got: {error}. "
            "`pip install 'flashlab[gpu]'` installs it."
        ) from error


def _trained() -> Any:
    """The module of `trained` inputs, loaded where they are wanted: it wants torch."""
    return importlib.import_module("flashlab.measure.trained")


def _closeness(verdict: Message | None) -> float:
    """An error over its limit; 0 where there is none."""
    return float(verdict["max_abs_error"] / verdict["max_abs_limit"]) if verdict and verdict["max_abs_limit"] else 0.0


def _over_layers(before: Message | None, verdict: Message | None, layers: int) -> Message | None:
    """The verdict closer to its limit, with overall errors over `layers` layers before and one more."""
    if before is None or verdict is None:
        return verdict
    chosen = verdict if _closeness(verdict) > _closeness(before) else before
    squares = (layers * before["overall_rms_error"] ** 2 + verdict["overall_rms_error"] ** 2) / (layers + 1)
    largest = max(before["overall_max_error"], verdict["overall_max_error"])
    return {**chosen, "overall_max_error": largest, "overall_rms_error": math.sqrt(squares)}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_REASON_CHARS]


def _classify(error: Exception) -> tuple[str, str]:
    """A row's status and reason for an error that the worker survived."""
    text = str(error)
    if isinstance(error, UnsupportedError):
        return "unsupported", text or "unsupported"
    if isinstance(error, MissingError):
        return "missing", text or "missing"
    # torch's words for a pinned SDPA backend that does not take the problem, and for too little memory.
    if "No available kernel" in text or type(error).__name__ == "OutOfMemoryError":
        return "unsupported", _words(error)
    return "error", _words(error)


@lru_cache(maxsize=256)
def _sass_mix(sha256: str, entry: str, code: bytes) -> dict[str, int]:
    return sass.mix(code, entry)


def _cubin_fields(prepared: Prepared) -> Message:
    cubin, shape = prepared.cubin, prepared.launch_shape
    fields = CubinFields(
        sha256=cubin.sha256,
        arch=cubin.arch,
        compiler=cubin.compiler,
        parameters=cubin.parameters,
        options=cubin.options,
        registers=cubin.resources.registers,
        spill_store_bytes=cubin.resources.spill_store_bytes,
        spill_load_bytes=cubin.resources.spill_load_bytes,
        stack_bytes=cubin.resources.stack_bytes,
        static_smem_bytes=cubin.resources.static_smem_bytes,
        dynamic_smem_bytes=shape.smem_bytes,
        threads=shape.threads,
        tile_q=shape.tile_q,
        blocks_per_sm=prepared.blocks_per_sm(),
        sass=_sass_mix(cubin.sha256, cubin.entry, cubin.code),
    )
    return fields.model_dump(mode="json")


def _samples(series: timing.Series, summary: timing.Summary, energy_j_per_call: float | None = None) -> Message:
    """`records.Samples` as data."""
    return {**asdict(series), "conditions": {**asdict(summary), "energy_j_per_call": energy_j_per_call}}


def _worker_main(fd: int) -> int:
    # What the worker starts, such as a compiler's own processes, must not keep the pipe open when it dies.
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w", encoding="utf-8", buffering=1) as pipe:

        def send(message: Message) -> None:
            pipe.write(json.dumps(message, allow_nan=False) + "\n")
            pipe.flush()

        worker = _Worker(json.load(sys.stdin), send)
        try:
            worker.start()
        except FlashlabError as error:
            send({"type": "refused", "error": type(error).__name__, "message": str(error)})
            return 1
        try:
            worker.work()
        except Exception as error:
            send({"type": "fatal", "reason": _words(error)})
            raise
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The worker's entry point; `flashlab bench` is the one for people."""
    parser = argparse.ArgumentParser(
        prog="python -m flashlab.bench", description="Internal: the worker of `flashlab bench`."
    )
    parser.add_argument("--worker", action="store_true", required=True)
    parser.add_argument("--fd", type=int, required=True, help="where to write messages")
    return _worker_main(parser.parse_args(arguments).fd)


if __name__ == "__main__":
    sys.exit(main())
