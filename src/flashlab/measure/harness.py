"""Worker processes for measurements, with a deadline for every message and recovery from crashes.

The parent never uses CUDA. It starts a `Worker` on a job, stored in a file, and handles its messages, JSON lines sent
through a named pipe. A crash (an illegal address poisons the CUDA context of the process), a kill or a hang loses only
the current step; earlier records stay. The module of a worker calls `serve`.

Messages have a `type`. The harness interprets these:

    hello     the worker has acquired its GPU; the limit is `startup_s` before it, and `step_s` afterwards
    step      the next step, with `extra_s` if it may take longer
    refused   the worker cannot run here: `error`, a class of core/errors.py, and `message`
    fatal     the worker cannot continue, with a `reason`
    done      the worker has finished

A `Book` holds the header and the file of the records of a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, Self

from flashlab.build.parallel import cores
from flashlab.core import errors
from flashlab.core.errors import FlashlabError, LaunchError
from flashlab.core.paths import alone, cache_dir, writable_dir
from flashlab.record import provenance, schema, store
from flashlab.record.schema import Gpu, Machine
from flashlab.run.gpu import GpuInfo

Message = dict[str, Any]
Send = Callable[[Message], None]
"""Sends a message to the parent; raises ValueError if it contains NaN or infinity."""

_JOB = "job.json"
REASON_CHARS = 2000
_LOG_CHARS = 1500
_POLL_S = 0.1
"""Polling interval, in seconds, for silent workers."""
_REFUSALS = {
    name: getattr(errors, name)
    for name in (
        "NoGpuError", "MissingPackageError", "MissingError", "UnsupportedError", "ParameterError", "OutputError",
    )
}  # fmt: skip


def words(error: BaseException) -> str:
    """Format an error in one line: class and message."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARS]


# --- The parent's side ------------------------------------------------------------------------------------------------


class WorkerDiedError(Exception):
    """The worker crashed, hung or sent an invalid message.

    Attributes:
        status: crashed or timeout.
        step: the last `step` message, or None.
    """

    def __init__(self, status: Literal["crashed", "timeout"], reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.step: Message | None = None


class Worker:
    """A worker process on a job; leaving the context ends it and all its child processes.

    Args:
        command: command line, possibly of a profiler; `--connect PATH`, the pipe to write to, is appended.
        job: the job as JSON, passed in a file next to the pipe.
        environment: default: that of this process.
    """

    def __init__(
        self, command: Sequence[str], job: Message | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashlab-")))
            self._log = stack.enter_context((folder / "log").open("w+b"))
            (folder / _JOB).write_text(json.dumps(job), encoding="utf-8")
            os.mkfifo(folder / "pipe")
            # For writing too, so that it has another end before the worker opens it and after that has died.
            self._pipe = os.open(folder / "pipe", os.O_RDWR)
            stack.callback(os.close, self._pipe)
            self._process = subprocess.Popen(
                [*command, "--connect", str(folder / "pipe")],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            stack.callback(self._end)
            self._stack = stack.pop_all()
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A driver takes its time to tear down a context with a kernel still running in it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)

    def _line(self, limit_s: float) -> bytes:
        """Read the next line; raises `WorkerDiedError` if none arrives in time, or the worker ended."""
        ends, late = time.monotonic() + limit_s, False
        while b"\n" not in self._buffer:
            ended = self._process.poll() is not None  # asked first: what it said before is still in the pipe
            left_s = ends - time.monotonic()
            if not late and select.select([self._pipe], (), (), max(0.0, min(left_s, _POLL_S)))[0]:
                self._buffer += os.read(self._pipe, 1 << 16)
                late = left_s <= 0  # what stood in the pipe by then is the last that is read
            elif ended:
                raise WorkerDiedError("crashed", self._how_it_ended())
            elif left_s <= 0:
                raise WorkerDiedError("timeout", f"no answer within {limit_s:g} s; stopped")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def run(
        self,
        act: Callable[[Message], None],
        *,
        startup_s: float,
        step_s: float,
        total_s: float = math.inf,
    ) -> None:
        """Handle messages until the worker is done.

        Args:
            act: handles every message but the last; raises KeyError, TypeError, ValueError or AttributeError if it is
                invalid.
            startup_s: time limit until `hello`.
            step_s: time limit of each later message.
            total_s: total time limit.

        Raises:
            MissingError, UnsupportedError, ParameterError, OutputError: the worker cannot run here.
            LaunchError: the worker died before its `hello`.
            WorkerDiedError: the worker died later.
        """
        greeted = False
        step: Message | None = None
        ends = time.monotonic() + total_s
        try:
            while True:
                limit_s = step_s + (step or {}).get("extra_s", 0.0) if greeted else startup_s
                line = self._line(max(0.0, min(limit_s, ends - time.monotonic())))
                try:
                    message = json.loads(line)
                    kind = message["type"]
                    if kind not in ("done", "refused", "fatal"):
                        act(message)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    # ValueError covers pydantic's ValidationError: a record that is none.
                    reason = f"the worker said something that is no message, {line[:80]!r}: {error}"[:REASON_CHARS]
                    raise WorkerDiedError("crashed", reason) from error
                if kind == "done":
                    return
                if kind == "refused":
                    raise _REFUSALS.get(message.get("error"), LaunchError)(str(message.get("message")))
                if kind == "fatal":
                    raise WorkerDiedError("crashed", str(message.get("reason")))
                greeted = greeted or kind == "hello"
                step = message if kind == "step" else step
        except WorkerDiedError as death:
            if not greeted:
                raise LaunchError(f"wanted a worker process that starts, got: {death}") from death
            death.step = step
            raise

    def wait(self, limit_s: float) -> int:
        """Wait for the worker to exit and return its exit status.

        Raises:
            WorkerDiedError: the worker did not exit in time.
        """
        try:
            return self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise WorkerDiedError("timeout", f"no end within {limit_s:g} s; stopped") from None

    def output(self) -> str:
        """The output so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        how = f"exit status {code}"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name if -code in list(signal.Signals) else f'signal {-code}'}"
        tail = " | ".join(self.output()[-_LOG_CHARS:].split("\n")).strip(" |")
        return f"the worker ended: {how}" + (f"; its last words: {tail}" if tail else "")


# --- The worker's side ------------------------------------------------------------------------------------------------


def serve(work: Callable[[Message, Send], None]) -> int:
    """Main function of a worker: reads the job from its parent, runs it and reports the outcome.

    A flashlab error before `hello` is sent as `refused`; any other exception ends the worker as `fatal`.
    """
    parser = argparse.ArgumentParser(description="Internal: a worker of flashlab, which its parent starts.")
    parser.add_argument("--connect", required=True, help="the pipe of the parent, beside its job", type=Path)
    path = parser.parse_args().connect
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # raises if the parent is gone, instead of waiting for ever
    os.set_blocking(handle, True)
    with os.fdopen(handle, "w", encoding="utf-8") as pipe:
        return _serve(work, json.loads(path.with_name(_JOB).read_text(encoding="utf-8")), pipe)


def _end_with(parent: int) -> None:
    """End this process when its parent exits, to free the GPU for the next worker."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(4)


def _serve(work: Callable[[Message, Send], None], job: Message, pipe: IO[str]) -> int:
    greeted = False

    def send(message: Message) -> None:
        nonlocal greeted
        greeted = greeted or message["type"] == "hello"
        pipe.write(json.dumps(message, allow_nan=False) + "\n")
        pipe.flush()

    try:
        work(job, send)
    except Exception as error:
        if isinstance(error, FlashlabError) and not greeted:
            send({"type": "refused", "error": type(error).__name__, "message": str(error)})
            return 1
        send({"type": "fatal", "reason": words(error)})
        raise
    send({"type": "done"})
    return 0


def greeting(info: GpuInfo) -> Message:
    """Build the `hello` message of a worker for `Book.hello`."""
    return {"type": "hello", "gpu": info.record.model_dump(mode="json"), "software": provenance.software()}


# --- The header of what is measured -----------------------------------------------------------------------------------


def host() -> dict[str, str]:
    """Describe the host, without its name."""
    model = None
    with contextlib.suppress(OSError):
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": str(cores()),
        "system": platform.system(),
        "memory_gib": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f}",
    }


class Book:
    """Header and file of a measurement's records, and the lock of the GPU.

    Leaving the context, even through an exception, brings machine.json and CHECKSUMS up to date.

    Args:
        folder: folder of the records below data/<gpu>.

    Raises:
        OutputError: `data` is not writable; raised before any GPU work.
    """

    def __init__(self, data: Path, folder: str) -> None:
        self._data = writable_dir(data, "records")
        self._folder = folder
        self.source = provenance.source()
        self.run = schema.run_id(self.source, datetime.now(UTC))
        self.gpu: Gpu | None = None
        self.software: dict[str, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if self.gpu is not None and self.path.exists():
                self._stack.callback(store.write_checksums, self.gpu.slug, self._data, written=self.path)
                store.write_machine(Machine(gpu=self.gpu, host=host()), self._data)

    def hello(self, message: Message) -> None:
        """Take GPU and software from a worker's greeting, and lock the GPU, which must be the same for all workers.

        Raises:
            LaunchError: the GPU differs from the first worker's, or another flashlab process measures on it.
            OutputError: the folder, or that of the lock, is not writable.
        """
        gpu = Gpu.model_validate(message["gpu"])
        if self.gpu is not None and gpu.fingerprint != self.gpu.fingerprint:
            raise LaunchError(f"wanted the GPU this run began on ({self.gpu.fingerprint}), got {gpu.fingerprint}")
        if self.gpu is None:
            self._stack.enter_context(gpu_lock(gpu.fingerprint))
            writable_dir(self._data / gpu.slug / self._folder, "records")
        self.gpu = gpu
        self.software = {str(name): str(version) for name, version in message["software"].items()}

    @property
    def path(self) -> Path:
        """File of this run; requires `hello`."""
        assert self.gpu is not None
        return self._data / self.gpu.slug / self._folder / f"{self.run}.jsonl"

    def header(self) -> dict[str, Any]:
        """Fields common to all records; requires `hello`."""
        assert self.gpu is not None
        return {
            "run": self.run,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "gpu": self.gpu,
            "source": self.source,
            "software": self.software,
            "start": provenance.start(),
        }


@contextlib.contextmanager
def gpu_lock(fingerprint: str) -> Iterator[None]:
    """Lock a GPU, by its fingerprint, against other flashlab processes that measure.

    Raises:
        LaunchError: another process holds the lock.
        OutputError: the cache cannot be written.
    """
    folder = writable_dir(cache_dir(), "the compile cache (the environment variable FLASHLAB_CACHE names another)")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(alone(folder / f"gpu-{fingerprint}.lock"))
        except BlockingIOError as error:
            raise LaunchError(
                f"wanted the GPU {fingerprint} for this measurement alone, got another's: {error}. "
                "Try again once that has ended."
            ) from None
        yield
