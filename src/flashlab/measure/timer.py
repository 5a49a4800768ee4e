"""GPU timing: interleaved samples with idle gaps between two CUDA events, hot and cold, burst and sustained.

Why not cuda-bench (nvbench)? It measures one benchmark after another, so that implementations run at different
temperatures and clocks, and it owns the process. Here, samples of stages and libraries are interleaved in one process,
in a new random order each round: drift affects all alike, so that ratios of medians are meaningful.

One sample:

    idle gap  →  [cold: overwrite twice the L2]  →  spin  →  event  →  n calls  →  event  →  short spin

- The gap, twice the previous sample, lowers the average power, so that the clock between calls stays at its maximum:
  regime `burst`. If the clock still drops, the implementation gets longer gaps, and then shorter samples, first in
  trials and, if necessary, during the counted samples.
- The spin keeps the GPU busy while the host enqueues everything behind it, so that samples exclude host time. If it was
  too short, the sample is repeated with a longer one.
- Both spins read the SM's clock counter and the global nanosecond timer. The interval from the end of the first to the
  start of the second, on the same SM, gives the clock during the calls; the second spin alone gives the clock without
  their load. These differ: a kernel that uses the tensor cores runs at a slightly lower clock, within microseconds and
  for any operands, and one that loads the chip heavily at a lower one still.
- n is chosen so that a sample takes about a millisecond, two thousand times the resolution of events, or less if the
  power limit would reduce the clock within it.
- Cold samples have one call; hot ones find the data of the previous call in L2.

The regime `sustained` calls back to back for seconds and runs into the power limit. The first second, or half of a
shorter measurement, is not counted: it brings the chip to the steady state of the implementation. Nothing here changes
clocks or power settings.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from flashlab.build.compiler import compile_file
from flashlab.core.paths import KERNELS
from flashlab.kernels.text import fields
from flashlab.record.schema import Conditions, Samples
from flashlab.run import gpu

Run = Callable[[], object]
"""Enqueues one call on the timer's stream without waiting for it."""
Announce = Callable[[str], None]
"""Called with the name of an implementation before it runs."""

MICRO = KERNELS / "micro"
MAX_CALLS = 100
"""Maximum calls per sample. Some libraries launch ten kernels per call, and the driver queues about a thousand."""
MIN_GAP_S, MAX_GAP_S = 1e-3, 50e-3
_SAMPLE_US = 1000.0
_CLOCK_SPIN_NS = 20_000
_MAX_SPIN_US = 50_000.0
_STARVED_TRIES = 5
CHUNK_S = 0.05
"""Approximate duration of a sample under sustained load."""
_STATE_PERIOD_S, _MONITOR_PERIOD_S = 0.25, 0.05
"""NVML polling intervals: per implementation in bursts, and under sustained load."""
FULL_CLOCK = 0.99
"""A sample was throttled if its clock is below this share of the highest clock seen."""
_GAP_FACTORS = (1, 4, 16)
"""Multiples of the gap to try, in order, if the clock is throttled."""
_WARM_UP_S = 1.0
"""Initial seconds of a sustained measurement that are not counted, or half of a shorter one."""


class MicroParams(ctypes.Structure):
    """`MicroParams` of kernels/common/micro.cuh."""

    _fields_ = fields("common/micro.cuh", "MicroParams")


class _Mark(ctypes.Structure):
    """Output of kernels/micro/spin.cu: SM clock counter and global timer at start and end."""

    _fields_ = (
        ("start_clock", ctypes.c_longlong),
        ("start_ns", ctypes.c_longlong),
        ("end_clock", ctypes.c_longlong),
        ("end_ns", ctypes.c_longlong),
        ("sm", ctypes.c_longlong),
    )

    @property
    def clock_mhz(self) -> float:
        """SM clock during the spin."""
        return float(1e3 * (self.end_clock - self.start_clock) / (self.end_ns - self.start_ns))

    def clock_mhz_since(self, earlier: _Mark) -> float | None:
        """Mean SM clock since the end of an earlier spin; None if that ran on another SM, whose counter is separate."""
        passed_ns = self.start_ns - earlier.end_ns
        if self.sm != earlier.sm or passed_ns <= 0:
            return None
        return float(1e3 * (self.start_clock - earlier.end_clock) / passed_ns)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One sample."""

    time_us: float
    """Time per call."""
    sm_clock_mhz: float
    """SM clock right after the calls, without their load."""
    call_clock_mhz: float | None
    """Mean SM clock during the calls; None if unknown."""
    enqueue_us: float
    """Host time to enqueue the calls."""
    starved: bool
    """Whether the GPU reached the calls before the host had enqueued them all."""


@dataclass(frozen=True, kw_only=True)
class State:
    """An NVML reading; None where unavailable."""

    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]


def conditions(states: Sequence[State], energy_j_per_call: float | None = None) -> Conditions:
    """Summarise states: extremes, mean power, and all throttle reasons; None where unavailable."""
    clocks = [s.sm_clock_mhz for s in states if s.sm_clock_mhz is not None]
    powers = [s.power_w for s in states if s.power_w is not None]
    temperatures = [s.temperature_c for s in states if s.temperature_c is not None]
    return Conditions(
        sm_clock_mhz_min=min(clocks, default=None),
        sm_clock_mhz_max=max(clocks, default=None),
        power_w_max=max(powers, default=None),
        power_w_mean=fmean(powers) if powers else None,
        temperature_c_max=max(temperatures, default=None),
        throttle_reasons=tuple(sorted({reason for s in states for reason in s.throttle_reasons})),
        energy_j_per_call=energy_j_per_call,
    )


@dataclass
class _Progress:
    """Sampling state of an implementation."""

    run: Run
    calls: int
    spin_us: float
    gap_factor: int = 1
    """Multiple of the gap before its samples."""
    probe_mhz: float | None = None
    """Clock of a representative trial sample; None without one."""
    readings: list[Reading] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    spent_s: float = 0.0
    last_state_s: float = -math.inf


def _samples(readings: Sequence[Reading], **fields: Any) -> Samples:
    """Convert readings to their record, without the clock during the calls if any reading lacks it."""
    call_clocks = [reading.call_clock_mhz for reading in readings]
    return Samples(
        time_us=tuple(reading.time_us for reading in readings),
        sm_clock_mhz=tuple(reading.sm_clock_mhz for reading in readings),
        call_clock_mhz=() if None in call_clocks else tuple(mhz for mhz in call_clocks if mhz is not None),
        **fields,
    )


class Timer:
    """Takes interleaved samples of several implementations."""

    def __init__(self, backend: CudaBackend, *, seed: int = 0) -> None:
        self._backend = backend
        self._random = random.Random(seed)
        self._busy_s = 0.0
        self._top_mhz = 0.0

    def _sample(self, progress: _Progress, cold: bool) -> Reading:
        backend = self._backend
        for _ in range(_STARVED_TRIES):
            plain = min(max(2 * self._busy_s, MIN_GAP_S), MAX_GAP_S)
            backend.sleep(min(progress.gap_factor * plain, MAX_GAP_S))
            reading = backend.sample(progress.run, calls=progress.calls, spin_us=progress.spin_us, cold=cold)
            self._busy_s = reading.time_us * progress.calls / 1e6
            self._top_mhz = max(self._top_mhz, reading.sm_clock_mhz)
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
            progress.probe_mhz = first.sm_clock_mhz if progress.calls == 1 else None
        return progress

    def _held_back(self, sm_clock_mhz: float) -> bool:
        return sm_clock_mhz < FULL_CLOCK * self._top_mhz

    def _settle(self, progress: _Progress, cold: bool) -> None:
        """Find a gap, or else a number of calls, at which the clock stays at its maximum."""
        if progress.probe_mhz is not None and not self._held_back(progress.probe_mhz):
            return  # A slow one: every sample counts.
        while True:
            for factor in _GAP_FACTORS:
                progress.gap_factor = factor
                if not self._held_back(self._sample(progress, cold).sm_clock_mhz):
                    return
            if progress.calls == 1:
                return
            progress.calls //= 2

    def burst(
        self,
        implementations: Mapping[str, Run],
        *,
        cold: bool = False,
        samples: int = 40,
        min_samples: int = 7,
        cap_s: float = 3.0,
        announce: Announce = lambda name: None,
    ) -> dict[str, Samples]:
        """Sample all implementations, interleaved in a new random order each round.

        Args:
            cold: overwrite L2 before every sample, which then is one call.
            samples: target number of samples per implementation.
            min_samples: minimum number for slow implementations, even beyond `cap_s`.
            cap_s: host time in seconds after which an implementation gets only `min_samples`.
            announce: called before each sample.
        """
        going: dict[str, _Progress] = {}
        for name, run in implementations.items():
            announce(name)
            going[name] = self._start(run, cold)
        # After all of them have run once: only then is there a highest clock to hold one against.
        for name, progress in going.items():
            announce(name)
            self._settle(progress, cold)
        names = list(going)
        while names:
            self._random.shuffle(names)
            for name in names:
                announce(name)
                progress = going[name]
                start = self._backend.now()
                reading = self._sample(progress, cold)
                progress.readings.append(reading)
                if self._held_back(reading.sm_clock_mhz):
                    progress.gap_factor = min(2 * progress.gap_factor, _GAP_FACTORS[-1])
                now = self._backend.now()
                if now - progress.last_state_s > _STATE_PERIOD_S:
                    progress.last_state_s = now
                    progress.states.append(self._backend.state())
                progress.spent_s += self._backend.now() - start
            names = [
                name
                for name, progress in going.items()
                if len(progress.readings) < (max(samples, min_samples) if progress.spent_s < cap_s else min_samples)
            ]
        return {
            name: _samples(
                progress.readings,
                regime="burst",
                cache="cold" if cold else "hot",
                calls=progress.calls,
                conditions=conditions(progress.states),
            )
            for name, progress in going.items()
        }

    def sustained(self, run: Run, *, seconds: float, call_us: float) -> Samples:
        """Call back to back for at least `seconds`, in chunks of about 50 ms, which are the samples.

        The first second, or half of a shorter measurement, brings the chip to its steady state and is not counted.
        `call_us` is the approximate call time.
        """
        backend, warm_up_s = self._backend, min(_WARM_UP_S, seconds / 2)
        calls = max(1, round(CHUNK_S * 1e6 / call_us))
        readings: list[Reading] = []
        with _watching(backend) as states:
            counting = False
            start = backend.now()
            passed = 0.0
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
                elif passed >= warm_up_s:
                    counting = True
                    states.clear()
                    began_j = backend.energy_j()
            ended_j = backend.energy_j()
            pending()
        energy = (ended_j - began_j) / counted if began_j is not None and ended_j is not None and counted else None
        return _samples(
            readings,
            regime="sustained",
            cache="hot",
            calls=calls,
            conditions=conditions(states, energy if energy and energy > 0 else None),
            continuous_s=passed,
        )


@contextmanager
def _watching(backend: CudaBackend) -> Iterator[list[State]]:
    """Poll NVML in a thread while the main thread keeps the GPU busy."""
    states: list[State] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_MONITOR_PERIOD_S):
            states.append(backend.state())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield states
    finally:
        stop.set()
        thread.join()


_REASON_NAMES = {
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
"""nvmlClocksEventReasons (nvml.h), in snake case, without 0x1 (idle), which is not a limit."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Decode NVML's bit mask to names; unknown bits become their value."""
    bits = (1 << bit for bit in range(1, 64))
    return tuple(_REASON_NAMES.get(bit, f"unknown_{bit:#x}") for bit in bits if mask & bit)


@cache
def micro(name: str, device: int, defines: tuple[tuple[str, int | str], ...] = ()) -> gpu.Function:
    """Compile a micro-benchmark of kernels/micro and load it on a device."""
    cubin = compile_file(MICRO / f"{name}.cu", entry=f"micro_{name}", arch=gpu.info(device).arch, defines=dict(defines))
    return gpu.load(cubin, device)


class CudaBackend:
    """The CUDA device of a timer; makes its primary context current in this thread, which must enqueue all work.

    `stream` is the CUstream handle on which every `Run` must enqueue.
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
        self._flush_buffer = gpu.Zeroed(device, self._flush_bytes, stream)
        self._slots = [gpu.Zeroed(device, ctypes.sizeof(_Mark), stream) for _ in range(4)]
        """Outputs of spins; the last is for the spin before a sample."""
        self._mark: _Mark | None = None
        self._events = (self._event(), self._event())
        self._chunk_events = [(self._event(), self._event(), self._event()) for _ in self._slots[:-1]]
        self._copy_stream = gpu.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._next = 0
        self._nvml_handle = gpu.nvml_handle(device)
        # The first launch of a kernel loads it; that must not happen inside a sample.
        self._spin(1000, 0)
        gpu.call("cuStreamSynchronize", self._stream)

    @staticmethod
    def _event() -> Any:
        return gpu.call("cuEventCreate", 0)

    def _spin(self, nanoseconds: float, slot: int) -> None:
        params = [MicroParams(self._slots[slot].pointer, None, int(nanoseconds), 1)]
        gpu.Launch(
            self._spin_function, grid=(1, 1, 1), block=(1, 1, 1), smem_bytes=0, params=params, stream=self._stream_value
        )()

    def _read(self, slot: int) -> _Mark:
        # On a stream of its own: the caller knows that the spin is done, and other work may be queued by now.
        mark, stream = _Mark(), self._copy_stream
        gpu.call("cuMemcpyDtoHAsync", ctypes.addressof(mark), self._slots[slot].pointer, ctypes.sizeof(mark), stream)
        gpu.call("cuStreamSynchronize", stream)
        return mark

    def _enqueue(self, run: Run, calls: int, start: Any, end: Any) -> float:
        """Enqueue calls between two events; returns the host time in µs."""
        gpu.call("cuEventRecord", start, self._stream)
        before = time.perf_counter()
        for _ in range(calls):
            run()
        enqueue_us = (time.perf_counter() - before) * 1e6
        gpu.call("cuEventRecord", end, self._stream)
        return enqueue_us

    def sample(self, run: Run, *, calls: int, spin_us: float, cold: bool) -> Reading:
        """Take one sample and wait until the GPU is idle."""
        start, end = self._events
        stream = self._stream
        if cold:
            gpu.call("cuMemsetD8Async", self._flush_buffer.pointer, 0, self._flush_bytes, stream)
        self._spin(spin_us * 1e3, -1)
        enqueue_us = self._enqueue(run, calls, start, end)
        (status,) = self._driver.cuEventQuery(start)
        self._spin(_CLOCK_SPIN_NS, 0)
        gpu.call("cuStreamSynchronize", stream)
        ahead, after = self._read(-1), self._read(0)
        return Reading(
            time_us=float(gpu.call("cuEventElapsedTime", start, end)) * 1e3 / calls,
            sm_clock_mhz=after.clock_mhz,
            call_clock_mhz=after.clock_mhz_since(ahead),
            enqueue_us=enqueue_us,
            starved=status == self._driver.CUresult.CUDA_SUCCESS,
        )

    def chunk(self, run: Run, calls: int) -> Callable[[], Reading]:
        """Enqueue calls between two events; returns a function that waits for their reading.

        Call the functions in order, with at most three chunks pending. The first chunk has no clock of its calls.
        """
        slot = self._next
        self._next = (slot + 1) % len(self._chunk_events)
        start, end, clock_read = self._chunk_events[slot]
        enqueue_us = self._enqueue(run, calls, start, end)
        self._spin(_CLOCK_SPIN_NS, slot)
        gpu.call("cuEventRecord", clock_read, self._stream)

        def wait() -> Reading:
            gpu.call("cuEventSynchronize", clock_read)
            earlier, mark = self._mark, self._read(slot)
            self._mark = mark
            return Reading(
                time_us=float(gpu.call("cuEventElapsedTime", start, end)) * 1e3 / calls,
                sm_clock_mhz=mark.clock_mhz,
                call_clock_mhz=None if earlier is None else mark.clock_mhz_since(earlier),
                enqueue_us=enqueue_us,
                starved=False,
            )

        return wait

    def warm_up(self, run: Run, calls: int) -> None:
        """Run calls and wait."""
        for _ in range(calls):
            run()
        gpu.call("cuStreamSynchronize", self._stream)

    def state(self) -> State:
        """Read NVML."""
        handle = self._nvml_handle
        clock = gpu.nvml_read("nvmlDeviceGetClockInfo", handle, gpu.NVML_SM)
        power_mw = gpu.nvml_read("nvmlDeviceGetPowerUsage", handle)
        temperature = gpu.nvml_read("nvmlDeviceGetTemperature", handle, gpu.NVML_CORE)
        mask = gpu.nvml_read("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return State(
            sm_clock_mhz=None if clock is None else float(clock),
            power_w=None if power_mw is None else power_mw / 1e3,
            temperature_c=None if temperature is None else float(temperature),
            throttle_reasons=() if mask is None else throttle_reasons(mask),
        )

    def energy_j(self) -> float | None:
        """Read the GPU's energy counter; None if unavailable."""
        millijoules = gpu.nvml_read("nvmlDeviceGetTotalEnergyConsumption", self._nvml_handle)
        return None if millijoules is None else millijoules / 1e3

    def now(self) -> float:
        """Monotonic time in seconds."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Leave the GPU idle."""
        time.sleep(seconds)
