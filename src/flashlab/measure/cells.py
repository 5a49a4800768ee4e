"""Protocol of `bench` and `check`: runs implementations on problems in worker processes until each has a row.

A cell is a problem, possibly in a layout, with its pending implementations, or the ceilings of the GPU. If a worker
dies, the current implementation is recorded as crashed or timed out, and another worker continues without it. Every row
is on disk before the next one is started.

In a worker, `GpuWorker` holds the GPU and announces each cell and implementation before starting it.
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
    """A problem, or a checked layout of one, and its pending implementations."""

    problem: Problem | None
    """None for the ceilings of the GPU, whose names replace those of implementations."""
    pending: list[str]
    layout: str = ""

    @property
    def label(self) -> str:
        """Display name."""
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
    """Run a job until every implementation of every cell has a row, restarting workers as needed.

    Args:
        row: receives the row of an implementation, with only `status` and `reason` if the worker died; raises
            ValidationError, KeyError or TypeError if it is invalid.
        closed: called when a cell is complete.
        skip: the reason not to wait for an implementation again after a timeout of another cell, or "".

    Raises:
        MissingError, UnsupportedError: the worker cannot run here.
        LaunchError: the worker died before it started.
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
        """Handle a message; raises KeyError, TypeError or ValueError if it is invalid."""
        kind = message["type"]
        if kind == "hello":
            book.hello(message)
            return
        if kind == "missing":  # a state of a row, which the row then lacks
            options.note(f"{message['what']} not measured: {message['reason']}")
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
    """Rows of one kind, each appended with the header as soon as a worker sends it.

    A worker sends `row`s, `step`s whose `what` announces the next row, and `missing`, with the `what` that has no row
    and the `reason`.
    """

    kind: type[Base]
    book: Book
    options: Options
    total: int = 0
    """Expected number of rows, for the progress."""
    count: int = 0
    missing: list[Message] = field(default_factory=list)
    broken: bool = False
    """Whether a worker ended early or sent an invalid row."""

    def run(self, job: Message, what: str, **limits_s: float) -> None:
        """Run a job in one worker, with the time limits of `Worker.run`; if it ends early, `what` is missing.

        Raises:
            MissingError, UnsupportedError, LaunchError: the worker cannot run here, and no other has sent a row.
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
        """Return the file, and what has no row, with reasons.

        Raises:
            LaunchError: there are no rows.
        """
        missing = tuple(dict.fromkeys(f"{package['what']}: {package['reason']}" for package in self.missing))
        if not self.count:
            raise LaunchError("wanted at least one row, got none: " + "; ".join(missing))
        return self.book.path, missing


def record_rows(
    kind: type[Base], job: Message, options: Options, *, total: int = 0, **limits_s: float
) -> tuple[Path, tuple[str, ...]]:
    """Run a job in one worker and append its `Rows`; returns the file, and what has no row, with reasons.

    Raises:
        MissingError, UnsupportedError: the worker cannot run here.
        LaunchError: the worker did not start or ended early, or a row is invalid, or there are none; earlier rows stay.
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
    """Import a Python package needed for measuring; raises `MissingPackageError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package {module} to measure on a GPU, got: {error}. "
            "`pip install 'flashlab[gpu]'` installs it."
        ) from error


class RefusedError(Exception):
    """An implementation cannot be timed; `row` has the status, reason and further fields."""

    def __init__(self, status: Status, reason: str, **fields: Any) -> None:
        super().__init__(reason)
        self.row = {"status": status, "reason": reason, **fields}


def refusal(error: Exception) -> Message:
    """Build the row of an implementation for an error that the worker survived."""
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
    """Base class of GPU workers; sends messages with `send`."""

    def __init__(self, job: Message, send: Send) -> None:
        self.job = job
        self.send = send
        self.device = int(job["device"])
        self.implementations = {
            name: Implementation(**fields) for name, fields in job.get("implementations", {}).items()
        }

    def hold(self) -> None:
        """Acquire the GPU and send the greeting.

        Raises:
            MissingError, UnsupportedError: the worker cannot run here.
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
        """Announce the next step, so that the parent knows what was running if this process dies."""
        self.send({"type": "step", "cell": cell, "name": name, "what": what, "extra_s": extra_s})

    def row(self, cell: int, name: str, row: Mapping[str, Any]) -> None:
        """Send the row of an implementation; its status is `ok` by default."""
        said = {"status": "ok", **row, "reason": row.get("reason", "")[:REASON_CHARS]}
        self.send({"type": "row", "cell": cell, "name": name, "row": to_jsonable_python(said)})

    @contextmanager
    def surviving(self, cell: int, name: str) -> Iterator[None]:
        """Turn an error into a row if the CUDA context survived; otherwise end the process, which cannot recover."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RefusedError):
                self.survive(error)
            self.row(cell, name, refusal(error))

    @contextmanager
    def attempt(self, what: str, *, survive: bool = False, **more: Any) -> Iterator[None]:
        """Turn any exception into a `missing` message, since errors of libraries have no common class.

        Args:
            survive: whether to end the process if the CUDA context did not survive the error.
            more: further fields of the message.
        """
        try:
            yield
        except Exception as error:
            if survive:
                self.survive(error)
            reason = str(error) if isinstance(error, FlashlabError | RefusedError) else words(error)
            self.send({"type": "missing", "what": what, "reason": reason[:REASON_CHARS], **more})

    def survive(self, error: Exception) -> None:
        """Return if the CUDA context survived an error; otherwise send `fatal` and end the process."""
        try:
            gpu.synchronize(self.device)
        except LaunchError as broken:
            self.send({"type": "fatal", "reason": f"{words(error)} (then {broken})"[:REASON_CHARS]})
            # No clean-up: every destructor would meet the broken context.
            os._exit(3)

    def free(self) -> None:
        """Release cached GPU memory."""
        gc.collect()
        self.torch.cuda.empty_cache()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def inputs(self, problem: Problem) -> tuple[Any, Any, Any]:
        """Draw Q, K and V, as torch tensors."""
        return make_torch_inputs(problem, self.job["seed"])

    def for_oracle(self, tensor: Any) -> Any:
        """View a torch tensor as a CuPy array; bfloat16 as its bits, since CuPy may not support the type."""
        if str(tensor.dtype) == "torch.bfloat16":
            return self.cupy.from_dlpack(tensor.view(self.torch.int16)).view(self.cupy.uint16)
        return self.cupy.from_dlpack(tensor)
