"""Implementations on problems, in worker processes until there is a row of each: the protocol of `bench` and `check`.

A cell is a problem, in a layout where that matters, and the implementations that are still to come on it; or the GPU's
own ceilings. A worker that dies costs the implementation in hand: it is recorded as crashed or timed out, and another
worker goes on without it. Every row is on disk before the next is asked for.

In a worker, `GpuWorker` holds the GPU and says which cell and implementation come next, should it die of them.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from flashlab.core.errors import FlashlabError, LaunchError, MissingError, MissingPackageError, UnsupportedError
from flashlab.core.problem import Problem
from flashlab.kernels.registry import Implementation
from flashlab.measure.harness import (
    REASON_CHARS,
    Book,
    Message,
    Send,
    Worker,
    WorkerDiedError,
    greeting,
    words,
)
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.schema import Base, Status
from flashlab.run import gpu
from flashlab.verify.oracle import make_torch_inputs

# --- The parent's side ------------------------------------------------------------------------------------------------


@dataclass
class Cell:
    """A problem (or a checked layout of one) and the implementations still to come."""

    problem: Problem | None
    """None for the GPU's own ceilings, whose names stand for implementations."""
    pending: list[str]
    layout: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return " ".join(filter(None, (self.problem.label if self.problem else "ceilings", self.layout)))


def supervise(
    cells: Sequence[Cell],
    book: Book,
    options: Options,
    job: Message,
    implementations: Mapping[str, Implementation],
    row: Callable[[Cell, str, Message], None],
    closed: Callable[[Cell], None] = lambda _: None,
    skip: Callable[[str, Problem | None], str] = lambda *_: "",
) -> None:
    """Run a job until there is a row of every implementation of every cell, however many workers that takes.

    Args:
        row: takes what a worker says of an implementation, its `status` and `reason` alone where that is lost;
            ValidationError, KeyError or TypeError where it makes no sense.
        closed: called when nothing more will come of a cell.
        skip: why an implementation is not waited for again, after another cell's timeout; empty where it is.

    Raises:
        MissingError, UnsupportedError: the worker says that it cannot work here.
        LaunchError: it dies before it has begun.
    """
    left = {index: cell for index, cell in enumerate(cells) if cell.pending}
    total = sum(len(cell.pending) for cell in cells)
    job = {**job, "device": options.device, "seed": options.seed}
    job |= {"implementations": to_jsonable_python(implementations)}

    def take(index: int, name: str, said: Message) -> None:
        cell = left[index]
        row(cell, name, said)
        cell.pending.remove(name)
        if not cell.pending:
            closed(left.pop(index))

    def give_up(index: int, status: Status, reason: str) -> None:
        for name in list(left[index].pending):
            take(index, name, {"status": status, "reason": reason})

    def act(message: Message) -> None:
        """KeyError, TypeError or ValueError where the message makes no sense."""
        kind = message["type"]
        if kind == "hello":
            book.hello(message)
            return
        if kind not in ("step", "row"):
            raise KeyError(kind)
        cell, name = left[message["cell"]], message["name"]
        if name not in cell.pending and (name or kind == "row"):
            raise KeyError(f"{kind} of {name!r}, which is not pending")
        if kind == "row":
            take(message["cell"], name, message["row"])
            return
        done = total - sum(len(unfinished.pending) for unfinished in left.values())
        options.progress(done, total, " · ".join(filter(None, (cell.label, name, message["what"]))))

    while left:
        job["cells"] = [{"index": index, **asdict(cell)} for index, cell in left.items()]
        try:
            with Worker(options.worker, job) as worker:
                worker.run(act, startup_s=options.startup_s, step_s=options.timeout_s)
            for index in list(left):
                give_up(index, "error", "the worker gave no result")
        except WorkerDiedError as death:  # what was in hand is charged, so that the next worker leaves it out
            if death.step is None:
                raise LaunchError(f"wanted a worker process that starts, got: {death}") from death
            index, name = death.step["cell"], death.step["name"]
            reason = f"{death.step['what']}: {death}"[:REASON_CHARS]
            cell = left.get(index)
            if cell is not None and name in cell.pending:
                take(index, name, {"status": death.status, "reason": reason})
            elif cell is not None and not name:
                give_up(index, death.status, reason)
            others = [(at, name, skip(name, cell.problem)) for at, cell in left.items() for name in cell.pending]
            for at, name, why in filter(lambda other: other[2], others):
                take(at, name, {"status": "timeout", "reason": why})


@dataclass
class Rows:
    """Rows of one kind that workers send, each appended with the header as it comes: a death costs what was to follow.

    A worker sends `row`s, `step`s whose `what` says what comes next, and `missing`: a `what` that has no row, and the
    `reason`.
    """

    kind: type[Base]
    book: Book
    options: Options
    total: int = 0
    """How many are expected, for the progress."""
    count: int = 0
    missing: list[Message] = field(default_factory=list)
    broken: bool = False
    """Whether a worker ended early, or sent a row that makes no sense."""

    def run(self, job: Message, what: str, **limits_s: float) -> None:
        """Run a job in one worker; where that ends early, `what` is missing. `limits_s` is what `Worker.run` takes.

        Raises:
            MissingError, UnsupportedError, LaunchError: it cannot work here, and there is no row of another yet.
        """
        job = {"device": self.options.device, "seed": self.options.seed, **job}
        try:
            with Worker(self.options.worker, job) as worker:
                worker.run(self._act, **{"startup_s": self.options.startup_s, **limits_s})
        except (WorkerDiedError, FlashlabError) as error:
            if isinstance(error, FlashlabError) and not self.count:
                raise
            self.broken = True
            self.missing.append({"what": what, "reason": str(error)})

    def _act(self, message: Message) -> None:
        if message["type"] == "hello":
            self.book.hello(message)
        elif message["type"] == "missing":
            self.missing.append(message)
        elif message["type"] == "step":
            self.options.progress(self.count, self.total, message["what"])
        else:
            row = message["row"]
            try:
                store.append(self.book.path, self.kind.model_validate({**self.book.header(), **row}))
                self.count += 1
            except ValidationError as error:
                self.broken = True
                reason = f"wanted a sound row, got: {error.errors()[0]['msg']}"
                self.missing.append({"what": row.get("name", "a row"), "reason": reason})

    def ended(self) -> tuple[Path, tuple[str, ...]]:
        """The file, and what has no row, with the reason.

        Raises:
            LaunchError: there is no row.
        """
        missing = tuple(dict.fromkeys(f"{package['what']}: {package['reason']}" for package in self.missing))
        if not self.count:
            raise LaunchError("wanted at least one row, got none: " + "; ".join(missing))
        return self.book.path, missing


def record_rows(
    kind: type[Base], job: Message, options: Options, *, total: int = 0, **limits_s: float
) -> tuple[Path, tuple[str, ...]]:
    """Run a job in one worker, and append its `Rows`; the file, and what has no row, with the reason.

    Raises:
        MissingError, UnsupportedError: the worker says that it cannot work here.
        LaunchError: it does not start or ends early, a row makes no sense, or there is none; those before are kept.
        OutputError: the folder cannot be written.
    """
    with Book(options.data, store.FOLDERS[kind]) as book:
        rows = Rows(kind, book, options, total)
        rows.run(job, "the rest", **limits_s)
        path, missing = rows.ended()
        if rows.broken:
            raise LaunchError(f"wanted every row, got {rows.count}, kept in {path}; missing: {'; '.join(missing)}")
        return path, missing


# --- The worker's side ------------------------------------------------------------------------------------------------


def need(module: str) -> Any:
    """A Python package that measuring needs; MissingPackageError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package {module} to measure on a GPU, got: {error}. "
            "`pip install 'flashlab[gpu]'` installs it."
        ) from error


class RefusedError(Exception):
    """An implementation that gives no time, and its row: status, reason, and what else it says."""

    def __init__(self, status: Status, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.row = {"status": status, "reason": reason, **fields}


def refusal(error: Exception) -> Message:
    """The row of an implementation that raised an error which the worker survived."""
    text = str(error)
    if isinstance(error, RefusedError):
        return error.row
    if isinstance(error, UnsupportedError):
        return {"status": "unsupported", "reason": text or "unsupported"}
    if isinstance(error, MissingError):
        return {"status": "missing", "reason": text or "missing"}
    # torch's words for a pinned SDPA backend that does not take the problem, and for too little memory.
    unsupported = "No available kernel" in text or type(error).__name__ == "OutOfMemoryError"
    return {"status": "unsupported" if unsupported else "error", "reason": words(error)}


class GpuWorker:
    """What a worker process does with its GPU, whatever the job. Talks through `send`."""

    def __init__(self, job: Message, send: Send) -> None:
        self.job = job
        self.send = send
        self.device = int(job["device"])
        self.implementations = {
            name: Implementation(**fields) for name, fields in job.get("implementations", {}).items()
        }

    def hold(self) -> None:
        """Take hold of the GPU and greet.

        Raises:
            MissingError, UnsupportedError: it cannot work here.
        """
        gpu.require()
        self.info = gpu.info(self.device)
        self.torch, self.cupy = need("torch"), need("cupy")
        self.torch.cuda.set_device(self.device)
        self.cupy.cuda.Device(self.device).use()
        self.torch.zeros(1, device="cuda")
        self.send(greeting(self.info))

    def cells(self) -> Iterator[tuple[int, Problem | None, list[str], str]]:
        """The cells of the job: index, problem, names, layout."""
        for cell in self.job["cells"]:
            problem = None if cell["problem"] is None else Problem(**cell["problem"])
            yield cell["index"], problem, cell["pending"], cell["layout"]

    def step(self, cell: int, name: str, what: str, extra_s: float = 0.0) -> None:
        """Say what comes next: should this process die of it, the parent knows."""
        self.send({"type": "step", "cell": cell, "name": name, "what": what, "extra_s": extra_s})

    def row(self, cell: int, name: str, row: Mapping[str, Any]) -> None:
        """Say what came of an implementation; it is `ok` unless it says otherwise."""
        said = {"status": "ok", **row, "reason": row.get("reason", "")[:REASON_CHARS]}
        self.send({"type": "row", "cell": cell, "name": name, "row": to_jsonable_python(said)})

    @contextmanager
    def surviving(self, cell: int, name: str) -> Iterator[None]:
        """Turn an error into a row, where the CUDA context outlived it; else end the process: it never recovers."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RefusedError):
                self.survive(error)
            self.row(cell, name, refusal(error))

    @contextmanager
    def attempt(self, what: str, *, survive: bool = False, **more: Any) -> Iterator[None]:
        """Say that something is missing, and why, where it raises: a library's own errors have no common class.

        Args:
            survive: end the process where the CUDA context did not outlive the error.
            more: what else the message says.
        """
        try:
            yield
        except Exception as error:
            if survive:
                self.survive(error)
            reason = str(error) if isinstance(error, FlashlabError) else words(error)
            self.send({"type": "missing", "what": what, "reason": reason[:REASON_CHARS], **more})

    def survive(self, error: Exception) -> None:
        """Return when the CUDA context outlived an error."""
        try:
            gpu.synchronize(self.device)
        except LaunchError as broken:
            self.send({"type": "fatal", "reason": f"{words(error)} (then {broken})"[:REASON_CHARS]})
            # No clean-up: every destructor would meet the broken context.
            os._exit(3)

    def free(self) -> None:
        """Give memory back to the GPU."""
        gc.collect()
        self.torch.cuda.empty_cache()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def inputs(self, problem: Problem) -> tuple[Any, Any, Any]:
        """Q, K and V, torch tensors."""
        return make_torch_inputs(problem, self.job["seed"])

    def for_oracle(self, tensor: Any) -> Any:
        """A CuPy view of a torch tensor; bfloat16 as its bits, since CuPy need not know the type."""
        if str(tensor.dtype) == "torch.bfloat16":
            return self.cupy.from_dlpack(tensor.view(self.torch.int16)).view(self.cupy.uint16)
        return self.cupy.from_dlpack(tensor)
