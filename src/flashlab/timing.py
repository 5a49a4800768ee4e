"""Time on the GPU: interleaved, idle-gapped samples between two CUDA events, hot and cold, burst and sustained.

Why not cuda-bench (nvbench)? It measures one benchmark after another, so that two implementations meet different
temperatures and clocks, and it owns the process. Here stages and libraries take turns in one process, sample by sample
in an order drawn anew each round: drift falls on all alike, and a ratio of two medians means something.

One sample:

    idle gap  →  [cold: overwrite twice the L2]  →  spin  →  event  →  n calls  →  event  →  short spin

- The gap, twice the sample before it, lets the average power fall, so that the clock stays at its maximum: regime
  `burst`.
- The spin keeps the GPU busy while the host enqueues everything behind it, so that no sample contains the host. Whether
  it was long enough is checked, and the sample repeated with a longer one where it was not.
- The short spin counts SM clocks against the chip's nanosecond timer, right after the calls: the clock they ran at.
- n is chosen so that a sample takes about a millisecond, two thousand times the events' resolution.
- Cold samples have one call; hot ones find in L2 what the call before left there.

The regime `sustained` calls back to back for seconds instead, and meets the power limit. Nothing here changes a clock
or a power setting: it reads them.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from types import TracebackType
from typing import Any, Literal, Protocol

from flashlab import gpu
from flashlab.errors import ParameterError
from flashlab.paths import KERNELS

Run = Callable[[], object]
"""Enqueues one call on the timer's stream and returns without waiting for it."""
Announce = Callable[[str], None]
"""Told the name of the implementation that is about to run."""

MICRO = KERNELS / "micro"
MAX_CALLS = 100
"""Between two events. Some libraries launch ten kernels a call and the driver queues about a thousand."""
MIN_GAP_S, MAX_GAP_S = 1e-3, 50e-3
_SAMPLE_US = 1000.0
_CLOCK_SPIN_NS = 20_000
_MAX_SPIN_US = 50_000.0
_STARVED_TRIES = 5
_CHUNK_S = 0.05
_MONITOR_PERIOD_S = 0.05


class MicroParams(ctypes.Structure):
    """kernels/common/micro.cuh, `MicroParams`, field by field."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("in_", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("repeats", ctypes.c_longlong),
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One sample."""

    time_us: float
    """Of one call."""
    sm_clock_mhz: float
    enqueue_us: float
    """Host time it took to enqueue the calls."""
    starved: bool
    """The GPU reached the calls before the host had enqueued them all."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Samples of one implementation in one regime and cache state, in the order they were taken."""

    regime: Literal["burst", "sustained"]
    cache: Literal["hot", "cold"]
    calls: int
    """Calls between the two events of a sample."""
    time_us: tuple[float, ...]
    """Of one call."""
    sm_clock_mhz: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median time of one call."""
        return median(self.time_us)


@dataclass(frozen=True, kw_only=True)
class State:
    """What NVML said at one moment; None where this GPU or machine does not say."""

    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What NVML said around an implementation's samples."""

    sm_clock_mhz_min: float | None
    sm_clock_mhz_max: float | None
    power_w_max: float | None
    temperature_c_max: float | None
    throttle_reasons: tuple[str, ...]

    @classmethod
    def of(cls, states: list[State]) -> Summary:
        """Extremes and every throttle reason of some states; None where none of them says."""
        clocks = [s.sm_clock_mhz for s in states if s.sm_clock_mhz is not None]
        powers = [s.power_w for s in states if s.power_w is not None]
        temperatures = [s.temperature_c for s in states if s.temperature_c is not None]
        return cls(
            sm_clock_mhz_min=min(clocks, default=None),
            sm_clock_mhz_max=max(clocks, default=None),
            power_w_max=max(powers, default=None),
            temperature_c_max=max(temperatures, default=None),
            throttle_reasons=tuple(sorted({reason for s in states for reason in s.throttle_reasons})),
        )


class Backend(Protocol):
    """What a `Timer` needs of a GPU; tests give a fake one."""

    def sample(self, run: Run, *, calls: int, spin_us: float, cold: bool) -> Reading:
        """Take one sample; returns when the GPU is idle again."""

    def chunk(self, run: Run, calls: int) -> Callable[[], tuple[float, float]]:
        """Enqueue calls between two events and return a wait for (time of one call in µs, SM clock in MHz)."""

    def warm_up(self, run: Run, calls: int) -> None:
        """Run and wait."""

    def state(self) -> State:
        """Read NVML."""

    def energy_j(self) -> float | None:
        """The GPU's energy counter, None where there is none."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def sleep(self, seconds: float) -> None:
        """Leave the GPU idle."""


@dataclass
class _Progress:
    """An implementation on its way."""

    run: Run
    calls: int
    spin_us: float
    time_us: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    last_state_s: float | None = None

    def wants_more(self, samples: int, min_samples: int, cap_s: float) -> bool:
        taken = len(self.time_us)
        return taken < min_samples or (taken < samples and self.spent_s < cap_s)


@dataclass(frozen=True)
class Sustained:
    """Seconds of continuous calls."""

    series: Series
    summary: Summary
    energy_j_per_call: float | None


class Timer:
    """Takes samples of several implementations in turn."""

    def __init__(self, backend: Backend, *, seed: int = 0) -> None:
        self._backend = backend
        self._random = random.Random(seed)
        self._busy_s = 0.0
        self._states: dict[str, list[State]] = {}

    def _sample(self, progress: _Progress, cold: bool) -> Reading:
        backend = self._backend
        for _ in range(_STARVED_TRIES):
            backend.sleep(min(max(2 * self._busy_s, MIN_GAP_S), MAX_GAP_S))
            reading = backend.sample(progress.run, calls=progress.calls, spin_us=progress.spin_us, cold=cold)
            self._busy_s = reading.time_us * progress.calls / 1e6
            if not reading.starved:
                break
            # A library that waits for the GPU inside its call starves every time; its own time then includes that wait.
            progress.spin_us = min(2 * max(progress.spin_us, reading.enqueue_us), _MAX_SPIN_US)
        return reading

    def _start(self, run: Run, cold: bool) -> _Progress:
        self._backend.warm_up(run, 1)
        progress = _Progress(run=run, calls=1, spin_us=200.0)
        if not cold:
            first = self._sample(progress, cold=False)
            progress.calls = max(1, min(MAX_CALLS, round(_SAMPLE_US / first.time_us)))
            progress.spin_us = min(2 * first.enqueue_us * progress.calls + 50, _MAX_SPIN_US)
        return progress

    def _watch(self, name: str, progress: _Progress) -> None:
        now = self._backend.now()
        if progress.last_state_s is None or now - progress.last_state_s > 0.25:
            progress.last_state_s = now
            self._states.setdefault(name, []).append(self._backend.state())

    def burst(
        self,
        implementations: Mapping[str, Run],
        *,
        cold: bool = False,
        samples: int = 40,
        min_samples: int = 7,
        cap_s: float = 3.0,
        announce: Announce = lambda name: None,
    ) -> dict[str, Series]:
        """Samples of every implementation, taken in turn in an order drawn anew each round.

        Args:
            implementations: by name.
            cold: overwrite L2 before every sample, which is then one call.
            samples: how many of each to aim for.
            min_samples: how many to take of one that is slow, even past `cap_s`.
            cap_s: host time after which an implementation takes no more than `min_samples`.
            announce: called before each sample.

        Raises:
            ParameterError: counts that make no sense.
        """
        if not 1 <= min_samples <= samples or cap_s < 0:
            raise ParameterError(
                "wanted 1 ≤ min_samples ≤ samples and cap_s ≥ 0, "
                f"got min_samples {min_samples}, samples {samples}, cap_s {cap_s}"
            )
        going: dict[str, _Progress] = {}
        self._states.clear()
        for name, run in implementations.items():
            announce(name)
            going[name] = self._start(run, cold)
        names = list(going)
        while names:
            self._random.shuffle(names)
            for name in names:
                announce(name)
                progress = going[name]
                start = self._backend.now()
                reading = self._sample(progress, cold)
                progress.time_us.append(reading.time_us)
                progress.clocks.append(reading.sm_clock_mhz)
                self._watch(name, progress)
                progress.spent_s += self._backend.now() - start
            names = [name for name in going if going[name].wants_more(samples, min_samples, cap_s)]
        return {
            name: Series(
                regime="burst",
                cache="cold" if cold else "hot",
                calls=progress.calls,
                time_us=tuple(progress.time_us),
                sm_clock_mhz=tuple(progress.clocks),
            )
            for name, progress in going.items()
        }

    def summary(self, name: str) -> Summary:
        """What NVML said around an implementation's samples of the last burst."""
        return Summary.of(self._states.get(name, []))

    def sustained(self, run: Run, *, seconds: float = 5.0, call_us: float | None = None) -> Sustained:
        """Call back to back for at least `seconds`, in chunks of about 50 ms; the samples are the chunks.

        The first tenth warms the chip to its steady state and is not counted. `call_us` is a known time of one call,
        measured where None.
        """
        if not seconds > 0:
            raise ParameterError(f"seconds: wanted a positive number, got {seconds!r}")
        backend = self._backend
        if call_us is None:
            call_us = self._sample(self._start(run, cold=False), cold=False).time_us
        calls = max(1, round(_CHUNK_S * 1e6 / call_us))
        readings: list[tuple[float, float]] = []
        with _Watcher(backend) as watcher:
            counting = False
            start = backend.now()
            began_j: float | None = None
            counted = 0
            pending = backend.chunk(run, calls)
            while True:
                upcoming = backend.chunk(run, calls)  # queued before the wait, so that the GPU never stands idle
                reading = pending()
                pending = upcoming
                passed = backend.now() - start
                if counting:
                    readings.append(reading)
                    counted += calls
                    if passed >= seconds:
                        break
                elif passed >= seconds / 10:
                    counting = True
                    start = backend.now()
                    watcher.states.clear()
                    began_j = backend.energy_j()
            ended_j = backend.energy_j()
            pending()
        energy = (ended_j - began_j) / counted if began_j is not None and ended_j is not None and counted else None
        return Sustained(
            Series(
                regime="sustained",
                cache="hot",
                calls=calls,
                time_us=tuple(time_us for time_us, _ in readings),
                sm_clock_mhz=tuple(clock for _, clock in readings),
            ),
            Summary.of(watcher.states),
            energy if energy and energy > 0 else None,
        )


class _Watcher:
    """Reads NVML in a thread while the main one keeps the GPU fed."""

    def __init__(self, backend: Backend) -> None:
        self.states: list[State] = []
        self._backend = backend
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(_MONITOR_PERIOD_S):
            self.states.append(self._backend.state())

    def __enter__(self) -> _Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


_REASON_NAMES = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's nvmlClocksEventReasons (nvml.h), in snake case."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names in NVML's bit mask; an unknown bit by its value. Idleness limits nothing and is left out."""
    names = []
    for bit in range(64):
        value = 1 << bit
        if mask & value and value != 0x1:
            names.append(_REASON_NAMES.get(value, f"unknown_{value:#x}"))
    return tuple(names)


@cache
def micro(name: str, device: int, defines: tuple[tuple[str, int | str], ...] = ()) -> gpu.Function:
    """A micro-benchmark of kernels/micro, compiled and loaded on a device."""
    from flashlab.compiler import compile_file

    cubin = compile_file(MICRO / f"{name}.cu", entry=f"micro_{name}", arch=gpu.info(device).arch, defines=dict(defines))
    return gpu.load(cubin, device)


@dataclass(frozen=True)
class Buffer:
    """Device memory of one's own, freed when collected."""

    pointer: int
    size_bytes: int

    @classmethod
    def new(cls, size_bytes: int, *, zero: bool = True) -> Buffer:
        """Allocate on the current context; zeroed unless told otherwise."""
        pointer = int(gpu.call("cuMemAlloc", size_bytes))
        if zero:
            gpu.call("cuMemsetD8", pointer, 0, size_bytes)
        return cls(pointer, size_bytes)

    def __del__(self) -> None:
        # At exit, or after a kernel broke the context, the driver frees it; there is nobody to tell.
        try:
            gpu.call("cuMemFree", self.pointer)
        except Exception:
            return


class CudaBackend:
    """A GPU. Makes its primary context current in this thread, which must be the one that enqueues.

    `stream` is a CUstream as an integer, on which every `Run` must enqueue.
    """

    def __init__(self, device: int, stream: int = 0) -> None:
        gpu.require()
        with gpu.context(device):
            primary = gpu.call("cuCtxGetCurrent")
        gpu.call("cuCtxSetCurrent", primary)
        self._info = gpu.info(device)
        self._stream_value = stream
        driver = importlib.import_module("cuda.bindings.driver")
        self._driver = driver
        self._stream = driver.CUstream(stream)
        self._spin_function = micro("spin", device)
        self._flush_bytes = 2 * self._info.l2_bytes
        self._flush_buffer = Buffer.new(self._flush_bytes)
        self._clock_slots = [Buffer.new(16) for _ in range(3)]
        self._events = (self._event(), self._event())
        self._chunk_events = [(self._event(), self._event(), self._event()) for _ in self._clock_slots]
        self._copy_stream = gpu.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._next = 0
        self._nvml_handle = gpu.nvml_handle(device)
        self._host = (ctypes.c_longlong * 2)()
        # The first launch of a kernel loads it; that must not happen inside a sample.
        self._spin(1000, 0)
        gpu.call("cuStreamSynchronize", self._stream)

    @staticmethod
    def _event() -> Any:
        return gpu.call("cuEventCreate", 0)

    def _spin(self, nanoseconds: float, slot: int) -> None:
        params = MicroParams(self._clock_slots[slot].pointer, None, int(nanoseconds), 1)
        gpu.Launch(
            self._spin_function, grid=(1, 1, 1), block=(1, 1, 1), smem_bytes=0, params=params, stream=self._stream_value
        )()

    def _clock_mhz(self, slot: int) -> float:
        # On a stream of its own: the caller knows that the spin is done, and other work may be queued by now.
        host, stream = self._host, self._copy_stream
        gpu.call(
            "cuMemcpyDtoHAsync", ctypes.addressof(host), self._clock_slots[slot].pointer, ctypes.sizeof(host), stream
        )
        gpu.call("cuStreamSynchronize", stream)
        clocks, nanoseconds = host
        return 1e3 * clocks / nanoseconds

    def sample(self, run: Run, *, calls: int, spin_us: float, cold: bool) -> Reading:
        """See `Backend`."""
        start, end = self._events
        stream = self._stream
        if cold:
            gpu.call("cuMemsetD8Async", self._flush_buffer.pointer, 0, self._flush_bytes, stream)
        self._spin(spin_us * 1e3, 0)
        gpu.call("cuEventRecord", start, stream)
        before = time.perf_counter()
        for _ in range(calls):
            run()
        enqueue_us = (time.perf_counter() - before) * 1e6
        gpu.call("cuEventRecord", end, stream)
        (status,) = self._driver.cuEventQuery(start)
        self._spin(_CLOCK_SPIN_NS, 0)
        gpu.call("cuStreamSynchronize", stream)
        return Reading(
            time_us=float(gpu.call("cuEventElapsedTime", start, end)) * 1e3 / calls,
            sm_clock_mhz=self._clock_mhz(0),
            enqueue_us=enqueue_us,
            starved=status == self._driver.CUresult.CUDA_SUCCESS,
        )

    def chunk(self, run: Run, calls: int) -> Callable[[], tuple[float, float]]:
        """See `Backend`. At most three chunks may be waiting."""
        slot = self._next
        self._next = (slot + 1) % len(self._chunk_events)
        start, end, clock_read = self._chunk_events[slot]
        gpu.call("cuEventRecord", start, self._stream)
        for _ in range(calls):
            run()
        gpu.call("cuEventRecord", end, self._stream)
        self._spin(_CLOCK_SPIN_NS, slot)
        gpu.call("cuEventRecord", clock_read, self._stream)

        def wait() -> tuple[float, float]:
            gpu.call("cuEventSynchronize", clock_read)
            time_us = float(gpu.call("cuEventElapsedTime", start, end)) * 1e3 / calls
            return time_us, self._clock_mhz(slot)

        return wait

    def warm_up(self, run: Run, calls: int) -> None:
        """See `Backend`."""
        for _ in range(calls):
            run()
        gpu.call("cuStreamSynchronize", self._stream)

    def state(self) -> State:
        """See `Backend`."""
        handle = self._nvml_handle
        if handle is None:
            return State(sm_clock_mhz=None, power_w=None, temperature_c=None, throttle_reasons=())
        nvml = importlib.import_module("pynvml")
        clock = gpu.nvml_read("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        power_mw = gpu.nvml_read("nvmlDeviceGetPowerUsage", handle)
        temperature = gpu.nvml_read("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        mask = gpu.nvml_read("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return State(
            sm_clock_mhz=None if clock is None else float(clock),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=None if temperature is None else float(temperature),
            throttle_reasons=() if mask is None else throttle_reasons(mask),
        )

    def energy_j(self) -> float | None:
        """See `Backend`."""
        if self._nvml_handle is None:
            return None
        millijoules = gpu.nvml_read("nvmlDeviceGetTotalEnergyConsumption", self._nvml_handle)
        return None if millijoules is None else millijoules / 1e3

    def now(self) -> float:
        """See `Backend`."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """See `Backend`."""
        time.sleep(seconds)
