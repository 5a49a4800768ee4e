"""Emulator: launches kernels that build/cpu.py compiled for the CPU.

Each launch starts the executable as a separate worker process, so that a kernel that crashes, hangs or corrupts memory
cannot affect the caller; kernels/emulation/README.md describes the protocol. A kernel built with hooks also reports
races, uninitialised reads, out-of-bounds accesses, bank conflicts and sectors, and is many times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
from pydantic import TypeAdapter

from flashlab.build import symbols
from flashlab.build.cpu import Emulated as Emulated
from flashlab.build.cpu import build_file as build_file
from flashlab.build.cpu import build_stage as build_stage
from flashlab.build.cpu import cxx as cxx
from flashlab.build.cpu import install_command as install_command
from flashlab.build.parallel import cores as cores
from flashlab.core.errors import EmulationError, LayoutError, OutputError, ParameterError, UnsupportedError

DEFAULT_TIMEOUT_S = 60.0
MAX_SMEM_BYTES = 227 * 1024
"""Maximum dynamic shared memory per CTA, that of sm_90 (kernels/emulation/runtime/block.h)."""

Access = Literal["r", "w", "rw"]
Status = Literal["ok", "deadlock", "misuse", "crash", "timeout"]
_GRACE_S = 5.0
"""Time in seconds that a stopped worker has to report where its threads are."""
_KEPT_OUTPUT_BYTES = 1 << 20
"""Maximum size of the printed output that is kept; the rest is counted and dropped."""
_GAP_BYTES = 4096
"""Gap between arrays in the emulated memory, so that an overrun does not reach the next array."""
_ALIGNMENT = 256
"""Arrays keep their address modulo this, the alignment of CUDA's allocators."""


# --- launching: arguments ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointer:
    """A pointer to an array's first element, as an argument or in a structure."""

    array: Any
    """NumPy, any strides."""
    access: Access = "rw"
    """r: copied to the kernel; w: uninitialised, copied back; rw: both."""
    name: str = ""
    """Name in findings."""
    surroundings: Any = None
    """The contiguous array of which `array` is a view; it is copied to the kernel and back as a whole."""
    displacement: int = 0
    """Offset of the pointer from the array's first element, in bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """A structure passed by value, with fields that are, or begin with, pointers to arrays."""

    value: ctypes.Structure
    pointers: Mapping[str, Pointer] = field(default_factory=dict)
    """By field; names that are not fields are ignored, so that structures can share a mapping."""


class Memory:
    """Layout of the emulated global memory, a file mapped here and in the worker."""

    def __init__(self) -> None:
        self._end = _GAP_BYTES
        self._places: dict[tuple[int, tuple[int, ...], tuple[int, ...], str], int] = {}
        self._copies: list[tuple[Pointer, int]] = []
        self.regions: list[str] = []

    def place(self, pointer: Pointer, fallback_name: str) -> int:
        """Allocate an array, if it is new, and return the offset of its first element in bytes."""
        array = pointer.array
        key = (array.ctypes.data, array.shape, array.strides, str(array.dtype))
        if key in self._places:
            return self._places[key]
        low, high = np.lib.array_utils.byte_bounds(array if pointer.surroundings is None else pointer.surroundings)
        address = int(array.ctypes.data)
        if pointer.surroundings is not None and not (low <= address < high or array.size == 0):
            name = pointer.name or fallback_name
            raise LayoutError(f"{name}: wanted surroundings that the array lies in, got another array")
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT + low % _ALIGNMENT
        offset = start + address - low
        self._end = start + (high - low) + _GAP_BYTES
        self._places[key] = offset
        self._copies.append((pointer, offset))
        name = re.sub(r"\s", "_", pointer.name or fallback_name)
        numbers = (*array.shape, *array.strides)
        if array.size:
            self.regions.append(
                f"region {name} {offset} {array.itemsize} {pointer.access} {array.ndim} {' '.join(map(str, numbers))}"
            )
        return offset

    @property
    def bytes(self) -> int:
        """Size in bytes, a multiple of the page size."""
        return -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE

    def _views(self, memory: mmap.mmap) -> Iterator[tuple[Pointer, Any, Any]]:
        for pointer, offset in self._copies:
            array, whole = pointer.array, pointer.surroundings
            if whole is not None:
                start = offset - (array.ctypes.data - whole.ctypes.data)
                yield pointer, whole, np.ndarray(whole.shape, whole.dtype, memory, start, whole.strides)
            else:
                yield pointer, array, np.ndarray(array.shape, array.dtype, memory, offset, array.strides)

    def copy(self, memory: mmap.mmap, access: Literal["r", "w"]) -> None:
        """Copy arrays in (`r`) or out (`w`), including their surroundings."""
        for pointer, ours, theirs in self._views(memory):
            if access in pointer.access or pointer.surroundings is not None:
                source, target = (ours, theirs) if access == "r" else (theirs, ours)
                target[...] = source


def _argument_bytes(value: Any, size: int, index: int) -> bytes:
    """Encode a scalar as a kernel parameter of `size` bytes."""
    what = f"argument {index}"
    try:
        if isinstance(value, int):
            raw = value.to_bytes(size, sys.byteorder, signed=value < 0)
        elif isinstance(value, float):
            raw = np.dtype(f"f{size}").type(value).tobytes()
        elif isinstance(value, np.generic):
            raw = value.tobytes()
        else:  # ctypes or bytes; a null pointer where None
            raw = bytes(memoryview(ctypes.c_void_p() if value is None else value))
    except (OverflowError, TypeError) as error:
        raise ParameterError(
            f"{what}: wanted a NumPy array or scalar, a number, a ctypes structure or value, emulator.Pointer, "
            f"emulator.Structure or bytes, of {size} bytes, got {value!r} ({type(value).__name__}): {error}"
        ) from error
    if len(raw) != size:
        raise ParameterError(f"{what}: the kernel takes {size} bytes, got {len(raw)} ({type(value).__name__})")
    return raw


# --- launching: the report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A place in the code, as lines of source."""

    frames: tuple[symbols.Frame, ...]
    """The innermost inlined frame first."""

    @property
    def frame(self) -> symbols.Frame | None:
        """The innermost line outside the emulation."""
        return symbols.site(self.frames)

    @property
    def caller(self) -> symbols.Frame | None:
        """The innermost line in the kernel's own file, if `frame` is in a header."""
        own = next((frame for frame in self.frames if frame.file.suffix == ".cu"), None)
        return None if own == self.frame else own

    def __str__(self) -> str:
        frame, caller = self.frame, self.caller
        if frame is None:
            return "an unknown line"
        return f"{frame.shown} (called at {caller.shown})" if caller else frame.shown


@dataclass(frozen=True, kw_only=True)
class Actor:
    """One access of a finding."""

    thread: int
    """Linear thread index in its CTA."""
    block: int
    """Rank of the CTA in its cluster."""
    access: str
    """`read`, `write`, `atomic`, `async read`, `async write`."""
    place: Place


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An error found by the detector, one per kind and pair of source lines; `str` formats it."""

    kind: str
    """`race`, `uninitialised`, `out of bounds`, `misaligned`, `input modified`, `missing fence`, `in flight`,
    `divergent barrier`, `before griddepcontrol.wait`."""
    space: str
    """`shared` or `global`."""
    array: str
    """Name of the array; empty if unknown."""
    offset: int
    """Offset in bytes from the start of the array, or of the CTA's shared memory."""
    bytes: int
    count: int
    """Number of occurrences."""
    block: tuple[int, int, int]
    first: Actor | None
    """The earlier access."""
    second: Actor | None

    def __str__(self) -> str:
        last = self.offset + self.bytes - 1
        span = f"byte {self.offset}" if self.bytes <= 1 else f"bytes {self.offset}..{last}"
        where = f"in {self.space} memory ({', '.join(filter(None, (self.array, span)))})"
        first, second = self.first, self.second
        if self.kind == "race" and first and second:
            verbs = [_PAST.get(actor.access, actor.access) for actor in (first, second)]
            text = (
                f"race {where}: {_who(first, second)} {verbs[0]} at {first.place}, {_who(second, first)} {verbs[1]} at "
                f"{second.place}, with no barrier between"
            )
        else:
            accesses = "; ".join(
                f"thread {actor.thread} {_PAST.get(actor.access, actor.access)} at {actor.place}"
                for actor in (first, second)
                if actor
            )
            title = {
                "uninitialised": "read of what was never written",
                "out of bounds": "access out of bounds",
                "misaligned": "access off the alignment of its type",
            }
            text = f"{title.get(self.kind, self.kind)} {where}: {accesses or 'somewhere'}"
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{text} (block {self.block[0]}, {self.block[1]}, {self.block[2]}{times})"


_PAST = {
    "read": "read",
    "write": "wrote",
    "atomic": "updated",
    "async read": "had it read asynchronously",
    "async write": "had it written asynchronously",
}


def _who(actor: Actor, other: Actor) -> str:
    return f"thread {actor.thread}" + (f" of block {actor.block} of the cluster" if actor.block != other.block else "")


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Memory accesses of one line of source in the whole launch."""

    place: Place
    space: str
    access: str
    kind: str
    """`plain`, `matrix` (ldmatrix, stmatrix) or `async copy`."""
    bytes: int
    """Bytes per lane and request."""
    requests: int
    """Warp-level accesses."""
    wavefronts: int
    """Shared-memory wavefronts."""
    ideal_wavefronts: int
    """Wavefronts without bank conflicts."""
    sectors: int
    """32-byte sectors of global memory accessed."""
    ideal_sectors: int
    """Sectors if the lanes' bytes were contiguous."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Threads of a CTA that wait for the same event at the same line."""

    block: tuple[int, int, int]
    first: int
    last: int
    count: int
    what: str
    place: Place

    def __str__(self) -> str:
        who = f"thread {self.first}" if self.count == 1 else f"{self.count} threads ({self.first}..{self.last})"
        at = f" at {self.place}" if self.place.frame else ""
        return f"block {self.block[0]}, {self.block[1]}, {self.block[2]}: {who}: {self.what}{at}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a launch."""

    status: Status
    message: str
    """Empty if the status is ok."""
    seconds: float
    """Run time of the kernel in the worker."""
    where: Place | None = None
    """The line that failed, crashed or was running."""
    findings: tuple[Finding, ...] = ()
    counters: tuple[Counter, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    """Waiting threads, after a deadlock or timeout."""
    printed: str = ""
    """Output of the kernel's printf."""


_REPORT = TypeAdapter(Report)


def _located(text: str, executable: Path) -> dict[str, Any]:
    """Parse a worker's result, replacing code addresses by `Place`s.

    Raises:
        ValueError: the text is not JSON.
    """
    frames = symbols.resolve(executable, map(int, re.findall(r'"place": ([1-9]\d*)', text)))

    def place(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "place": Place(frames.get(item["place"], ()))} if "place" in item else item

    result: dict[str, Any] = json.loads(text, object_hook=place)
    return result


def _trouble(where: Mapping[str, Any] | None, report: Report, name: str, timeout_s: float | None) -> EmulationError:
    opening = {"crash": "crashed", "timeout": _late(timeout_s)}.get(report.status, report.status)
    lines = [f"{name} on the CPU: {opening}: {report.message}"]
    if where:
        block, thread, frame = where["block"], where["thread"], where["place"].frame
        lines.append(
            f"  {f'at {report.where}' if frame else 'somewhere'}{': ' + frame.text if frame and frame.text else ''} "
            f"(block {block[0]}, {block[1]}, {block[2]}, thread {thread[0]}, {thread[1]}, {thread[2]})"
        )
    lines += [f"  {waiting}" for waiting in report.waiting[:_SHOWN_WAITING]]
    if len(report.waiting) > _SHOWN_WAITING:
        lines.append(f"  … and {len(report.waiting) - _SHOWN_WAITING} more groups of threads")
    lines += [f"  before that: {finding}" for finding in report.findings[:3]]
    return EmulationError("\n".join(lines), report=report)


def _late(timeout_s: float | None) -> str:
    return f"not done after {timeout_s or 0:g} seconds: an endless loop, or too much work for a CPU"


_SHOWN_WAITING = 12


# --- launching: the worker --------------------------------------------------------------------------------------------


def launch(
    emulated: Emulated,
    arguments: Sequence[Any],
    *,
    grid: Sequence[int],
    block: Sequence[int] | None = None,
    cluster: Sequence[int] = (1, 1, 1),
    smem_bytes: int | None = None,
    schedule: str = "ascending",
    threads: int | None = None,
    early: bool = False,
    timeout_s: float | None = DEFAULT_TIMEOUT_S,
    cancel: threading.Event | None = None,
) -> Report:
    """Run a kernel in a worker process and copy its outputs back.

    Args:
        arguments: one per kernel parameter: a NumPy array (copied in and out), a `Pointer`, a `Structure`, a NumPy or
            ctypes value, a number, None for a null pointer, or bytes.
        grid: number of CTAs, one to three dimensions.
        block: threads per CTA, one to three dimensions; default: those of the launch shape.
        smem_bytes: dynamic shared memory per CTA; default: that of the launch shape.
        schedule: order in which warps run: `ascending`, `descending` or `seeded:N`.
        threads: operating-system threads, which run one CTA each at a time; default: one per core.
        early: emulate programmatic dependent launch, in which the preceding kernel may still run. With hooks, global
            accesses of a thread before its griddepcontrol.wait are findings, except ld.relaxed of an input, which reads
            the value or, depending on `schedule`, anything else.
        timeout_s: time limit in seconds; None: no limit.
        cancel: event that stops the run, like Ctrl-C, when set from another thread.

    Raises:
        ParameterError: an argument, size or schedule is invalid.
        UnsupportedError: the kernel needs more shared memory than a CTA can have.
        EmulationError: the kernel deadlocked, crashed, executed an invalid operation or timed out. Arrays are
            unchanged.
        KeyboardInterrupt: Ctrl-C or `cancel`; the worker has ended.
    """
    check_limits(timeout_s, threads)
    if block is None and emulated.launch_shape is None:
        raise ParameterError(f"block: wanted the number of threads: {emulated.name} defines no launch_shape")
    wanted = emulated.launch_shape.smem_bytes if smem_bytes is None and emulated.launch_shape else smem_bytes or 0
    if wanted > MAX_SMEM_BYTES:
        raise UnsupportedError(
            f"{emulated.name}: wanted {wanted} bytes of shared memory a block, got at most {MAX_SMEM_BYTES}. Smaller "
            "tiles or fewer pipeline stages fit."
        )
    numbers = {"smem": smem_bytes, "threads": threads}
    lines = [
        f"grid {_dim3(grid, 'grid')}",
        f"cluster {_dim3(cluster, 'cluster')}",
        f"schedule {schedule_item(schedule)}",
        *([] if block is None else [f"block {_dim3(block, 'block')}"]),
        *(f"{name} {number}" for name, number in numbers.items() if number is not None),
        *(["early"] if early else []),
        "detect 1",
    ]
    memory = Memory()
    lines += _argument_lines(emulated, arguments, memory)
    with tempfile.TemporaryDirectory(prefix="flashlab-") as folder, mapped(memory.bytes) as (path, mapping):
        memory.copy(mapping, "r")
        result_path = Path(folder) / "result.json"
        request = [f"result {result_path}", f"memory {path} {memory.bytes}", *lines, *memory.regions, "run"]
        begun = time.monotonic()
        code, printed, errors = run_worker([str(emulated.executable)], "\n".join(request) + "\n", timeout_s, cancel)
        try:
            result = _located(result_path.read_text(encoding="utf-8"), emulated.executable)
        except (OSError, ValueError):
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            if timeout_s is not None and time.monotonic() - begun >= timeout_s:
                raise EmulationError(f"{emulated.name} on the CPU: {_late(timeout_s)}; the worker {how}") from None
            raise EmulationError(
                f"{emulated.name} on the CPU: the worker {how} and left no result"
                + (f": {errors.strip()}" if errors.strip() else ""),
            ) from None
        where = result.get("where")
        report = _REPORT.validate_python({**result, "where": where and where["place"], "printed": printed})
        if report.status != "ok":
            raise _trouble(where, report, emulated.name, timeout_s)
        memory.copy(mapping, "w")
        return report


def _argument_lines(emulated: Emulated, arguments: Sequence[Any], memory: Memory) -> list[str]:
    """Encode the kernel arguments for the worker, allocating arrays in the memory."""
    sizes = emulated.argument_sizes
    if len(arguments) != len(sizes):
        raise ParameterError(f"arguments: {emulated.entry} takes {len(sizes)}, got {len(arguments)}")
    values: list[str] = []
    pointers: list[str] = []
    for index, (value, size) in enumerate(zip(arguments, sizes, strict=True)):
        if hasattr(value, "ctypes") and hasattr(value, "strides"):  # a NumPy array
            value = Pointer(array=value)
        within: dict[int, Pointer] = {}
        if isinstance(value, Pointer):
            within, value = {0: value}, ctypes.c_void_p()
        elif isinstance(value, Structure):
            of = type(value.value)
            within = {getattr(of, name).offset: inner for name, inner in value.pointers.items() if hasattr(of, name)}
            value = value.value
        for byte, pointer in within.items():
            place = memory.place(pointer, f"argument_{index}") + pointer.displacement
            pointers.append(f"pointer {index} {byte} {place % 2**64}")
        values.append(f"argument {_argument_bytes(value, size, index).hex()}")
    return values + pointers


def check_limits(timeout_s: Any, threads: Any) -> None:
    """Raise `ParameterError` if the time limit or number of threads is invalid."""
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0
    ):
        raise ParameterError(f"timeout_s: wanted a positive number of seconds, or None for no limit, got {timeout_s!r}")
    if threads is not None and (
        isinstance(threads, bool) or not isinstance(threads, SupportsIndex) or int(threads) < 1
    ):
        raise ParameterError(f"threads: wanted a positive integer, or None for one per core, got {threads!r}")


def schedule_item(schedule: str) -> str:
    """Encode a schedule for the worker.

    Raises:
        ParameterError: the schedule is invalid.
    """
    if schedule in ("ascending", "descending"):
        return schedule
    seeded = re.fullmatch(r"seeded:(\d+)", schedule) if isinstance(schedule, str) else None
    if seeded is None or int(seeded[1]) >= 1 << 64:
        raise ParameterError(f"schedule: wanted ascending, descending or seeded:N, such as seeded:7, got {schedule!r}")
    return f"seeded {seeded[1]}"


def _dim3(sizes: Sequence[int], name: str) -> str:
    numbers = tuple(sizes) if not isinstance(sizes, int) else (sizes,)
    if not 1 <= len(numbers) <= 3 or any(not isinstance(n, SupportsIndex) or n.__index__() < 1 for n in numbers):
        raise ParameterError(f"{name}: wanted one to three positive integers, got {sizes!r}")
    return " ".join(str(int(n)) for n in (*numbers, 1, 1)[:3])


@contextlib.contextmanager
def mapped(size: int) -> Iterator[tuple[Path, mmap.mmap]]:
    """Create and map a file of `size` zero bytes, in memory if there is room."""
    shm = Path("/dev/shm")
    roomy = False
    with contextlib.suppress(OSError):
        room = os.statvfs(shm)
        roomy = os.access(shm, os.W_OK) and 4 * size < room.f_bavail * room.f_frsize
    folder = shm if roomy else Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="flashlab-", dir=folder))
            file.truncate(size)
            mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise OutputError(f"wanted {size} bytes for the kernel's memory in {folder}: {error.strerror}") from error
        yield Path(file.name), mapping


def run_worker(
    command: Sequence[str],
    request: str,
    timeout_s: float | None,
    cancel: threading.Event | None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Run a worker until it exits.

    Args:
        request: its standard input.
        timeout_s: time limit in seconds, after which it is terminated, and later killed.
        cancel: event that stops the worker when set from another thread.
        environment: default: that of this process.

    Returns:
        Exit status, standard output and standard error.

    Raises:
        KeyboardInterrupt: Ctrl-C or `cancel`; the worker has ended.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        process_group=0,  # Ctrl-C at a terminal reaches only this process, which then ends the worker
    )
    assert process.stdin is not None
    with process, ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(_kept, pipe) for pipe in (process.stdout, process.stderr)]
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it ended early, and reports why
                process.stdin.write(request.encode())
            # First terminate, so that it can report where its threads are.
            for limit_s, stop in ((timeout_s, process.terminate), (_GRACE_S, process.kill), (None, process.kill)):
                if _ended(readers, limit_s, cancel):
                    break
                stop()
        except BaseException:
            process.kill()
            process.wait()
            raise
    (printed, dropped), (errors, more) = (reader.result() for reader in readers)
    dropped += more
    return process.returncode, printed + (f"\n… and {dropped} bytes more\n" if dropped else ""), errors


def _kept(pipe: Any) -> tuple[str, int]:
    """Read a pipe to its end; returns the text, up to a limit, and the number of bytes dropped."""
    kept, dropped = bytearray(), 0
    while data := os.read(pipe.fileno(), 1 << 16):
        room = _KEPT_OUTPUT_BYTES - len(kept)
        kept += data[:room]
        dropped += max(0, len(data) - room)
    return kept.decode(errors="replace"), dropped


def _ended(readers: Sequence[Future[Any]], limit_s: float | None, cancel: threading.Event | None) -> bool:
    """Wait until a worker has closed its pipes; False on timeout, KeyboardInterrupt if cancelled."""
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    while not (cancel is not None and cancel.is_set()):
        left = deadline - time.monotonic()
        if not wait(readers, max(0.0, min(left, 3600 if cancel is None else 0.1))).not_done:
            return True
        if left <= 0:
            return False
    raise KeyboardInterrupt


def machine() -> str:
    """Describe the cores and processor that run emulated kernels."""
    return f"{cores()} cores, {platform.machine()}"
