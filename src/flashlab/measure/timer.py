"""Time on the GPU: interleaved, idle-gapped samples between two CUDA events, hot and cold, burst and sustained.

Why not cuda-bench (nvbench)? It measures one benchmark after another, so that two implementations meet different
temperatures and clocks, and it owns the process. Here the samples of stages and libraries are interleaved in one
process, in an order drawn anew each round: drift falls on all alike, and a ratio of two medians means something.

One sample:

    idle gap  →  [cold: overwrite twice the L2]  →  spin  →  event  →  n calls  →  event  →  short spin

- The gap, twice the sample before it, lets the average power fall, so that the clock between calls stays at its
  maximum: regime `burst`. Where it falls all the same, the implementation gets longer gaps, and where those do not help
  shorter samples, until it stays up: tried out before the counted samples, and widened further among them.
- The spin keeps the GPU busy while the host enqueues everything behind it, so that no sample contains the host. Whether
  it was long enough is checked, and the sample repeated with a longer one where it was not.
- Both spins read the SM's clock counter and the chip's nanosecond timer. From the end of the first to the start of the
  second, on the same SM, they give the clock that the calls ran at; the second spin by itself gives the clock of the
  chip without their load. The two differ: a kernel that uses the tensor cores runs at a clock a step lower, within
  microseconds and whatever its operands are, and one that loads the chip hard at one lower still.
- n is chosen so that a sample takes about a millisecond, two thousand times the events' resolution, or less where the
  power limit would hold the clock back within it.
- Cold samples have one call; hot ones find in L2 what the call before left there.

The regime `sustained` calls back to back for seconds instead, and meets the power limit. The first fifth is not
counted: whatever ran before, it brings the chip to the state that this implementation keeps it in. Nothing here changes
a clock or a power setting: it reads them.
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
CHUNK_S = 0.05
"""How long the samples of a sustained measurement are about."""
_STATE_PERIOD_S, _MONITOR_PERIOD_S = 0.25, 0.05
"""How often NVML is asked: of an implementation among bursts, and under sustained load."""
FULL_CLOCK = 0.99
"""A sample whose clock reads less than this share of the highest one seen was held back."""
_GAP_FACTORS = (1, 4, 16)
"""Tried one after another where the clock is held back: multiples of the plain gap."""
WARM_UP_SHARE = 0.2
"""Of the seconds of a sustained measurement, the part that comes first and is not counted."""


class MicroParams(ctypes.Structure):
    """kernels/common/micro.cuh, `MicroParams`."""

    _fields_ = fields("common/micro.cuh", "MicroParams")


class _Mark(ctypes.Structure):
    """What kernels/micro/spin.cu writes: an SM's clock counter and the chip's timer when it began and when it ended."""

    _fields_ = (
        ("start_clock", ctypes.c_longlong),
        ("start_ns", ctypes.c_longlong),
        ("end_clock", ctypes.c_longlong),
        ("end_ns", ctypes.c_longlong),
        ("sm", ctypes.c_longlong),
    )

    @property
    def clock_mhz(self) -> float:
        """The SM clock during the spin."""
        return float(1e3 * (self.end_clock - self.start_clock) / (self.end_ns - self.start_ns))

    def clock_mhz_since(self, earlier: _Mark) -> float | None:
        """The mean SM clock since an earlier spin ended; None where that was on another SM, which counts for itself."""
        passed_ns = self.start_ns - earlier.end_ns
        if self.sm != earlier.sm or passed_ns <= 0:
            return None
        return float(1e3 * (self.start_clock - earlier.end_clock) / passed_ns)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One sample."""

    time_us: float
    """Of one call."""
    sm_clock_mhz: float
    """Right after the calls, without their load."""
    call_clock_mhz: float | None
    """Mean over the calls; None where it could not be read."""
    enqueue_us: float
    """Host time it took to enqueue the calls."""
    starved: bool
    """The GPU reached the calls before the host had enqueued them all."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What NVML said at one moment; None where this GPU or machine does not say."""

    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_reasons: tuple[str, ...]


def conditions(states: Sequence[State], energy_j_per_call: float | None = None) -> Conditions:
    """Extremes, mean power and every throttle reason of some states; None where none of them says."""
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
    """An implementation on its way."""

    run: Run
    calls: int
    spin_us: float
    gap_factor: int = 1
    """How many plain gaps come before its samples."""
    probe_mhz: float | None = None
    """The clock of a first sample that was like those to come; None where there was none."""
    readings: list[Reading] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    spent_s: float = 0.0
    last_state_s: float = -math.inf


def _samples(readings: Sequence[Reading], **fields: Any) -> Samples:
    """Readings as they are recorded; no clock of the calls where it could not be read of one."""
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
        """Find gaps, and failing that a number of calls, with which the clock stays at its top."""
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
        """Samples of every implementation, interleaved in an order drawn anew each round.

        Args:
            cold: overwrite L2 before every sample, which is then one call.
            samples: how many of each to aim for.
            min_samples: how many to take of one that is slow, even past `cap_s`.
            cap_s: host time after which an implementation takes no more than `min_samples`.
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
        """Call back to back for at least `seconds`, in chunks of about 50 ms; the samples are the chunks.

        The first fifth brings the chip to its steady state and is not counted. `call_us` is about the time of one call.
        """
        backend = self._backend
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
                elif passed >= WARM_UP_SHARE * seconds:
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
    """What NVML says from time to time, read in a thread while the main one keeps the GPU fed."""
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
"""NVML's nvmlClocksEventReasons (nvml.h), in snake case, but for 0x1: idleness limits nothing."""


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names in NVML's bit mask; an unknown bit by its value."""
    bits = (1 << bit for bit in range(1, 64))
    return tuple(_REASON_NAMES.get(bit, f"unknown_{bit:#x}") for bit in bits if mask & bit)


@cache
def micro(name: str, device: int, defines: tuple[tuple[str, int | str], ...] = ()) -> gpu.Function:
    """A micro-benchmark of kernels/micro, compiled and loaded on a device."""
    cubin = compile_file(MICRO / f"{name}.cu", entry=f"micro_{name}", arch=gpu.info(device).arch, defines=dict(defines))
    return gpu.load(cubin, device)


class CudaBackend:
    """A GPU; its primary context is made current in this thread, which must be the one that enqueues.

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
        self._flush_buffer = gpu.Zeroed(device, self._flush_bytes, stream)
        self._slots = [gpu.Zeroed(device, ctypes.sizeof(_Mark), stream) for _ in range(4)]
        """Where spins write: the last is for the one before a sample."""
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
        """Enqueue calls between two events; the host time that takes, in µs."""
        gpu.call("cuEventRecord", start, self._stream)
        before = time.perf_counter()
        for _ in range(calls):
            run()
        enqueue_us = (time.perf_counter() - before) * 1e6
        gpu.call("cuEventRecord", end, self._stream)
        return enqueue_us

    def sample(self, run: Run, *, calls: int, spin_us: float, cold: bool) -> Reading:
        """Take one sample; returns when the GPU is idle again."""
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
        """Enqueue calls between two events and return a wait for what they took, to be called in the same order.

        At most three chunks may be waiting; the first of all knows no clock of its calls.
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
        """Run and wait."""
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
        """The GPU's energy counter, None where there is none."""
        millijoules = gpu.nvml_read("nvmlDeviceGetTotalEnergyConsumption", self._nvml_handle)
        return None if millijoules is None else millijoules / 1e3

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Leave the GPU idle."""
        time.sleep(seconds)
