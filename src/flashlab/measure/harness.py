"""A worker process for whatever measures: each word from it has a deadline, and its death is survived.

The parent never touches CUDA. It starts a `Worker` on a job, which lies in a file, and acts on what it says, one JSON
line at a time through a named pipe. A crash (an illegal address poisons the whole process's CUDA context), a kill or a
hang then costs the step in hand: what was recorded before stays recorded. A worker's module calls `serve`.

Messages have a `type`. Of these the harness knows the meaning:

    hello     it has taken hold of its GPU; until then `startup_s` counts, afterwards `step_s`
    step      what it does next, with `extra_s` where that may take longer
    refused   it cannot work here: `error`, a class of core/errors.py, and `message`
    fatal     it cannot go on, for a `reason`
    done      it has nothing more to say

A `Book` is the header of the records that a measurement writes, and the file that they go to.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
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
from flashlab.core.paths import cache_dir, writable_dir
from flashlab.record import provenance, schema, store
from flashlab.record.schema import Gpu, Machine
from flashlab.run.gpu import GpuInfo

Message = dict[str, Any]
Send = Callable[[Message], None]
"""Says a message to the parent; ValueError where it holds a number that is none."""

_JOB = "job.json"
REASON_CHARS = 2000
_LOG_CHARS = 1500
_POLL_S = 0.1
"""How often a worker that says nothing is looked after."""
_REFUSALS = {
    name: getattr(errors, name)
    for name in (
        "NoGpuError", "MissingPackageError", "MissingError", "UnsupportedError", "ParameterError", "OutputError",
    )
}  # fmt: skip


def words(error: BaseException) -> str:
    """An error in one line: its class and what it says."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARS]


# --- The parent's side ------------------------------------------------------------------------------------------------


class WorkerDiedError(Exception):
    """The worker ended, hung or spoke nonsense: how, with its last words.

    Attributes:
        status: crashed or timeout.
        step: the last `step` that it said, None where it said none.
    """

    def __init__(self, status: Literal["crashed", "timeout"], reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.step: Message | None = None


class Worker:
    """A worker process on a job; leaving the context ends it and everything that it started.

    Args:
        command: starts it; `--connect PATH`, the pipe that it writes to, is appended. It may be wrapped in a profiler.
        job: what it is to do: JSON, in a file beside the pipe.
        environment: in place of this process's own.
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
        """What it says next; WorkerDiedError where that did not come in time, or it ended."""
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
        """Act on what it says until it is done.

        Args:
            act: gets every message but the last; KeyError, TypeError, ValueError or AttributeError where it is none.
            startup_s: until its `hello`.
            step_s: for each message after that.
            total_s: for all of it.

        Raises:
            MissingError, UnsupportedError, ParameterError, OutputError: it says that it cannot work here.
            LaunchError: it died before its `hello`.
            WorkerDiedError: it died after it.
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
        """Its exit status, once it has ended.

        Raises:
            WorkerDiedError: it had not ended in time.
        """
        try:
            return self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise WorkerDiedError("timeout", f"no end within {limit_s:g} s; stopped") from None

    def output(self) -> str:
        """What it has printed so far."""
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
    """What a worker's module does when it is run: reads the job of its parent, works on it and says how that ended.

    An error of ours before its `hello` is a refusal; any other ends the worker and is its last word.
    """
    parser = argparse.ArgumentParser(description="Internal: a worker of flashlab, which its parent starts.")
    parser.add_argument("--connect", required=True, help="the pipe of the parent, beside its job", type=Path)
    path = parser.parse_args().connect
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with path.open("w", encoding="utf-8") as pipe:
        return _serve(work, json.loads(path.with_name(_JOB).read_text(encoding="utf-8")), pipe)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: nobody hears what it says, and the next worker wants the GPU."""
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
    """What a worker says once it holds that GPU, `Book.hello` takes it."""
    return {"type": "hello", "gpu": info.record.model_dump(mode="json"), "software": provenance.software()}


# --- The header of what is measured -----------------------------------------------------------------------------------


def host() -> dict[str, str]:
    """What the host is; no host name."""
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
    """The header of a measurement's records, the file that they go to, and the GPU's lock while they are made.

    Leaving the context brings machine.json and CHECKSUMS up to date, also where it is left by an error half-way.

    Args:
        folder: the records' folder below data/<gpu>.

    Raises:
        OutputError: `data` cannot be written. Before any GPU work: an hour of measuring must not end there.
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
                store.write_machine(Machine(gpu=self.gpu, host=host()), self._data)
                store.write_checksums(self.gpu.slug, self._data, written=self.path)

    def hello(self, message: Message) -> None:
        """Learn the GPU and the software from a worker's greeting, and lock that GPU; every worker has the same.

        Raises:
            LaunchError: another GPU than the first worker's, or one that another process of flashlab measures on.
            OutputError: the folder, or that of the lock, cannot be written.
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
        """The file of this run; a GPU must be known."""
        assert self.gpu is not None
        return self._data / self.gpu.slug / self._folder / f"{self.run}.jsonl"

    def header(self) -> dict[str, Any]:
        """The fields that every record has; a GPU must be known."""
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
    """Hold a GPU, by its fingerprint, for this process alone among those of flashlab that measure.

    Raises:
        LaunchError: another one holds it.
        OutputError: the cache cannot be written.
    """
    folder = writable_dir(cache_dir(), "the compile cache (the environment variable FLASHLAB_CACHE names another)")
    with (folder / f"gpu-{fingerprint}.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise LaunchError(
                f"wanted the GPU {fingerprint} for this measurement alone, got one that process "
                f"{file.read().strip() or 'unknown'} of flashlab measures on. Try again once that has ended."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
