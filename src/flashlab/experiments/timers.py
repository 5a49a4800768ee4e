"""How good the times are: other timers, inputs and cache states beside ours, and separate starts of the machine.

    flashlab method          CUDA events, CUPTI and NVBench on the same kernels; zeros; a cold L2; sustained load
    flashlab bench           on three separate starts: what a start changes

Three timers read the same calls on the same tensors:

- `events`: ours (timing.py). A number of calls between two CUDA events.
- `torch-profiler`: CUPTI's start and end of each kernel, through torch.profiler. A call is the sum of its kernels; what
  lies between them, and between calls, is not seen.
- `cuda-bench`: NVBench through its Python package. Cold, one call between two events behind a kernel that blocks the
  stream; hot, a batch of which two calls are queued before the stream is let go.

NVBench owns its process and may end it, so it runs in a second worker. There our events are read once more, after it:
drift between the two workers then shows as spread of the events. Implementations and inputs take turns under every
timer. Each implementation is checked against the float64 oracle before its first time is taken; what fails has none.

The second half of this module makes tables and figures of what is on record.
"""

from __future__ import annotations

import importlib
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import ValidationError

from flashlab.core.errors import (
    CheckFailedError,
    FlashlabError,
    LaunchError,
    MissingPackageError,
    NoDataError,
    ParameterError,
    UnsupportedError,
)
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import peers, registry
from flashlab.measure import timer as timing
from flashlab.measure.harness import REASON_CHARS, Book, Message, Send, Worker, WorkerDiedError, serve
from flashlab.query import select
from flashlab.query.statistics import Estimate, interval, ratio_of_medians
from flashlab.record import provenance, store
from flashlab.record.store import Cache, Gpu, Measurement, ProblemFields, Reading, Regime, Samples
from flashlab.run import gpu
from flashlab.run.attention import prepare
from flashlab.show import charts, tables
from flashlab.show.charts import Chart
from flashlab.verify.verdict import POISON_WORD, Sample, check

if TYPE_CHECKING:
    from flashlab.query.select import Results
    from flashlab.show.pages import Output

Timer = Literal["events", "torch-profiler", "cuda-bench"]
Inputs = Literal["normal", "zeros"]
TIMERS: Mapping[Timer, str] = {
    "events": "CUDA events",
    "torch-profiler": "CUPTI",
    "cuda-bench": "NVBench",
}
"""By name, as tables call them."""
INSTALLS: Mapping[Timer, str] = {"torch-profiler": "torch", "cuda-bench": "cuda-bench"}
"""What to `pip install` for those that are not ours."""
INPUTS: tuple[Inputs, ...] = ("normal", "zeros")
SHAPES = (FIRST_SHAPE, "1x8x512x64")
"""The sources' shape, and one so small that launching matters."""
LAST_RUNG = list(registry.CUDA_STAGES)[-1]
STAGES = ("05_wmma", "08_swizzle", LAST_RUNG, "t0_triton")
PEERS = ("sdpa_cudnn",)
SUSTAINED = (LAST_RUNG, "sdpa_cudnn")
"""Of them, what is called for seconds at the first shape."""
_WORKERS: tuple[tuple[str, ...], ...] = (("events", "torch-profiler", "sustained"), ("cuda-bench", "events"))
"""What each of the two workers reads with, in order."""
WORKER: tuple[str, ...] = (sys.executable, "-m", "flashlab.experiments.timers")
AGREE = 0.02
"""Two timers agree where the ratio of their medians is within this of one."""
ENOUGH_SAMPLES = 20_000
"""What a GPU's data is to hold, in raw samples of stages and libraries."""
STARTS = 3
"""On so many separate starts the first shape's ladder is to be measured."""
Say = Callable[[str], None]

_PROFILED_CALLS = 20
"""Between two events while CUPTI records: each kernel has a time of its own there, and more would be of no use."""
_LONG_SPIN_US = 100.0
"""The spin ahead of a sample is longer than this, the one after it shorter."""
_SPIN = "micro_spin"
_COOL_S = 0.03
"""Idle before each of NVBench's measurements, so that it meets the clock of a burst."""
_SLOW_US = 5000.0
_MIN_SAMPLES, _SLOW_SAMPLES = 5, 2
"""NVBench's samples of a measurement; the second number for calls that take longer than `_SLOW_US`. Few, and its
batches short, so that they meet the clock that our samples of about a millisecond meet."""
_BATCH_S = 0.001
"""Of calls that NVBench measures in a batch, at least."""
_STATE_TIMEOUT_S = 5.0
_HEAT_S = 1.0
LIMIT_S = 90.0
"""What all of it may take: what does not fit is left out."""
_FIRST_SHARE = 0.6
"""Of it for the first worker, which compiles and checks."""
_NVBENCH_SHARE = 0.75
"""Of the second worker's time; the rest is for our events after it."""
_STOPPING_S = 3.0
"""A worker begins nothing in its last seconds."""
_CHECKED_SCORES = 1 << 27


# --- The parent -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of `measure`."""

    path: Path
    """The file of readings."""
    missing: tuple[str, ...]
    """What gave no reading, and why, a sentence each."""


def measure(
    stage_ids: Sequence[str] | None = None,
    peer_names: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    *,
    samples: int = 20,
    rounds: int = 4,
    sustained_s: float = 1.5,
    data: Path = DATA,
    device: int = 0,
    seed: int = 0,
    timeout_s: float = LIMIT_S,
    say: Say = lambda _: None,
    worker: Sequence[str] = WORKER,
) -> Measured:
    """Read implementations with every timer that is installed and append the readings to data/<gpu>/readings.

    A reading is on disk as soon as it is made: what ends this process early costs what was still to come.

    Args:
        stage_ids: `STAGES` where None.
        peer_names: `PEERS` where None.
        shapes: BxHxSxD, non-causal, float16; `SHAPES` where None. The first is called for seconds, too.
        samples: of each implementation and cache state, by events; half as many by CUPTI.
        rounds: how often NVBench measures each.
        sustained_s: seconds of continuous calls, on normal inputs and on zeros; none where 0.
        data: folder of the records.
        device: CUDA device index.
        seed: of inputs and order.
        timeout_s: seconds, for all of it; what does not fit is left out, and is in `Measured.missing`.
        say: gets what begins, a line at a time.
        worker: the command that starts a worker.

    Raises:
        OutputError, ParameterError, UnknownStageError, ShapeError: before any GPU work.
        NoGpuError, MissingPackageError: the worker cannot work here.
        LaunchError: no timer gave a reading.
    """
    names = [registry.get(name).id for name in (STAGES if stage_ids is None else stage_ids)]
    names += [peers.get(name).name for name in (PEERS if peer_names is None else peer_names)]
    problems = [Problem.parse(shape) for shape in (SHAPES if shapes is None else shapes)]
    if not names or not problems:
        raise ParameterError(f"wanted at least one implementation and shape, got {len(names)} and {len(problems)}")
    if samples < 4 or rounds < 1 or sustained_s < 0 or timeout_s <= 0:
        raise ParameterError(
            "wanted samples ≥ 4, rounds ≥ 1, sustained ≥ 0 and a positive limit, "
            f"got {samples}, {rounds}, {sustained_s} and {timeout_s}"
        )
    ends = time.monotonic() + timeout_s
    job: Message = {
        "device": device,
        "seed": seed,
        "names": names,
        "problems": [asdict(problem) for problem in problems],
        "samples": samples,
        "rounds": rounds,
        "sustained_s": sustained_s,
    }
    missing: list[str] = []
    readings = 0
    with Book(data, "readings") as book:

        def act(message: Message) -> None:
            nonlocal readings
            if message["type"] == "hello":
                book.hello(message)
            elif message["type"] == "missing":
                missing.append(f"{message['what']}: {message['reason']}")
                job["names"] = [name for name in job["names"] if name != message.get("name")]
            else:
                fields = message["reading"]
                try:
                    reading = Reading.model_validate({**book.header(), **fields})
                except ValidationError as error:
                    what = f"{fields.get('name')} by {fields.get('timer')}"
                    missing.append(f"{what}: no sound reading: {error.errors()[0]['msg']}")
                    return
                store.append(book.path, reading)
                readings += 1

        for timers in _WORKERS:
            say(f"{', '.join(timers)}: {len(names)} implementations, {len(problems)} shapes")
            limit_s = max(0.0, ends - time.monotonic()) * (_FIRST_SHARE if timers is _WORKERS[0] else 1)
            # The second worker's implementations are those of the first: the same code on the same inputs.
            task = {**job, "timers": timers, "check": not readings, "seconds": max(0.0, limit_s - _STOPPING_S)}
            try:
                with Worker(worker) as process:
                    process.run(task, act, startup_s=limit_s, step_s=limit_s, total_s=limit_s)
            except (WorkerDiedError, FlashlabError) as error:
                if isinstance(error, FlashlabError) and not readings:
                    raise
                missing.append(f"{', '.join(timers)}: {error}")
        if not readings:
            raise LaunchError("wanted at least one reading, got none: " + "; ".join(missing))
        return Measured(path=book.path, missing=tuple(dict.fromkeys(missing)))


# --- The worker -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """An implementation on one problem and one kind of inputs, ready to be called."""

    name: str
    problem: Problem
    inputs: Inputs
    run: timing.Run
    call_us: float
    """About how long one call takes."""
    enqueue_us: float
    """Host time to enqueue one call."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.problem.shape} {self.inputs}"


class _Provider:
    """A stream, as cuda-bench takes one."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class _Worker:
    """Reads implementations with some timers."""

    def __init__(self, job: Message, send: Send) -> None:
        self._job = job
        self._send = send
        self._device = int(job["device"])
        self._random = random.Random(job["seed"])
        self._problems = [Problem(**fields) for fields in job["problems"]]
        self._cases: dict[str, _Case] = {}
        self._calls: dict[str, int] = {}
        self._began = time.monotonic()

    def _left_s(self, share: float = 1.0) -> float:
        """Seconds until that share of its time is over."""
        return float(self._began + share * self._job["seconds"] - time.monotonic())

    def work(self) -> None:
        """All of the job."""
        gpu.require()
        info = gpu.info(self._device)
        self._torch, self._cupy = _need("torch"), _need("cupy")
        torch = self._torch
        torch.cuda.set_device(self._device)
        self._cupy.cuda.Device(self._device).use()
        # Not the default stream: NVBench blocks the one it is given, and other streams would wait for the default one.
        stream = torch.cuda.Stream(device=self._device)
        self._stream = int(stream.cuda_stream)
        fields = {name: getattr(info, name) for name in Gpu.model_fields}
        self._send({"type": "hello", "gpu": fields, "software": provenance.software()})
        with torch.no_grad(), torch.cuda.stream(stream):
            self._backend = timing.CudaBackend(self._device, self._stream)
            for problem in self._problems:
                self._build(problem)
            self._read()

    def _read(self) -> None:
        for what, step in [step for timer in self._job["timers"] for step in self._steps(timer)]:
            try:
                if self._left_s() <= 0:
                    raise LaunchError(f"the {self._job['seconds']:.3g} s for this were over")
                step()
            except Exception as error:  # whatever it is, the others still have their turn
                self._missing(what, _words(error))

    def _steps(self, timer: str) -> list[tuple[str, Callable[[], None]]]:
        """What a timer reads, one after the other, each by itself: what one of them loses is not the next one's."""
        if timer == "sustained":
            return [(timer, self._sustained)]
        if timer == "cuda-bench":
            return [(timer, self._cuda_bench)]
        read = self._events if timer == "events" else self._profiler
        return [(f"{timer} at {problem.label}", partial(read, problem)) for problem in self._problems]

    def _missing(self, what: str, reason: str, name: str | None = None) -> None:
        self._send({"type": "missing", "what": what, "reason": reason[:REASON_CHARS], "name": name})

    # -- implementations

    def _build(self, problem: Problem) -> None:
        torch = self._torch
        shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
        generator = torch.Generator(device="cuda").manual_seed(self._job["seed"])
        tensors: dict[Inputs, list[Any]] = {
            "normal": [torch.randn(shape, generator=generator, device="cuda").half() for _ in range(3)],
            "zeros": [torch.zeros(shape, device="cuda", dtype=torch.float16) for _ in range(3)],
        }
        for name in self._job["names"]:
            try:
                if self._job["check"]:
                    self._check(name, problem, *tensors["normal"])
                for inputs in INPUTS:
                    run = self._run_of(name, problem, *tensors[inputs])
                    self._backend.warm_up(run, 2)
                    first = self._backend.sample(run, calls=5, spin_us=2000.0, cold=False)
                    case = _Case(
                        name=name,
                        problem=problem,
                        inputs=inputs,
                        run=run,
                        call_us=first.time_us,
                        enqueue_us=first.enqueue_us / 5,
                    )
                    self._cases[case.label] = case
            except Exception as error:  # a library's own errors have no common class
                self._missing(f"{name} at {problem.label}", _words(error), name)

    def _run_of(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> timing.Run:
        """What enqueues one call on the stream."""
        if name in registry.RUNGS:
            return prepare(q, k, v, stage=name, out=self._torch.empty_like(q), stream=self._stream)
        attend = self._peer(name, problem)
        given = peers.in_layout(peers.get(name).layout, q, k, v)

        def run() -> None:
            attend(*given)

        return run

    def _peer(self, name: str, problem: Problem) -> peers.Attention:
        peer = peers.get(name)
        capability = gpu.info(self._device).compute_capability
        why_not = peer.why_not(problem, compute_capability=capability)
        if why_not:
            raise UnsupportedError(why_not.reason)
        return peer.build(problem)

    def _check(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> None:
        """Raises `CheckFailedError` where the oracle rejects one call's output."""
        if name in registry.RUNGS:
            out = self._torch.empty_like(q)
            out.view(self._torch.int16).fill_(POISON_WORD)
            prepare(q, k, v, stage=name, out=out, stream=self._stream)()
        else:
            layout = peers.get(name).layout
            out = peers.bhsd_view(layout, self._peer(name, problem)(*peers.in_layout(layout, q, k, v)))
        gpu.synchronize(self._device)
        verdict = check(
            *(self._cupy.from_dlpack(out.contiguous()), None),
            *(self._cupy.from_dlpack(tensor) for tensor in (q, k, v)),
            causal=problem.causal,
            dtype=problem.dtype,
            sample=Sample.of(problem, max_scores=_CHECKED_SCORES, seed=self._job["seed"]),
            xp=self._cupy,
        )
        if not verdict.passed:
            raise CheckFailedError(verdict.reason)

    def _of(self, problem: Problem) -> dict[str, _Case]:
        return {label: case for label, case in self._cases.items() if case.problem == problem}

    def _keep(self, case: _Case, timer: Timer, samples: Message) -> None:
        reading = {
            "name": case.name,
            "problem": ProblemFields.of(case.problem).model_dump(),
            "timer": timer,
            "inputs": case.inputs,
            "samples": samples,
            "enqueue_us": case.enqueue_us,
        }
        self._send({"type": "reading", "reading": reading})

    # -- timers

    def _events(self, problem: Problem) -> None:
        """Our own timer, in bursts."""
        cases = self._of(problem)
        timer = timing.Timer(self._backend, seed=self._job["seed"])
        for cold in (False, True):
            found = timer.burst(
                {label: case.run for label, case in cases.items()},
                cold=cold,
                samples=self._job["samples"],
                min_samples=4,
                cap_s=0.6,
            )
            for label, taken in found.items():
                if not cold:
                    self._calls[label] = taken.calls
                self._keep(cases[label], "events", taken.model_dump(mode="json"))

    def _sustained(self) -> None:
        """Our own timer, without a pause, on normal inputs and zeros one after the other."""
        seconds = self._job["sustained_s"]
        timer = timing.Timer(self._backend, seed=self._job["seed"])
        chosen = [c for c in self._of(self._problems[0]).values() if c.name in SUSTAINED]
        if not seconds or not chosen:
            return
        timer.sustained(chosen[0].run, seconds=_HEAT_S, call_us=chosen[0].call_us)
        for case in chosen:
            if self._left_s() < 2 * seconds:
                raise LaunchError(f"no time was left for {case.label} and what comes after it")
            taken = timer.sustained(case.run, seconds=seconds, call_us=case.call_us)
            self._keep(case, "events", taken.model_dump(mode="json"))

    def _profiler(self, problem: Problem) -> None:
        """CUPTI's times of the kernels, in bursts."""
        profiler = importlib.import_module("torch.profiler")
        kinds = profiler.ProfilerActivity
        if kinds.CUDA not in profiler.supported_activities():
            raise MissingPackageError(
                "wanted torch with CUPTI, got one whose profiler sees no CUDA. `pip install torch` has it."
            )
        cases = self._of(problem)
        order: list[tuple[_Case, bool]] = []
        for _ in range(max(4, self._job["samples"] // 2)):
            labels = list(cases)
            self._random.shuffle(labels)
            order += [(cases[label], cold) for label in labels for cold in (False, True)]
        if not order:
            return
        calls = [1 if cold else min(self._calls.get(case.label, 1), _PROFILED_CALLS) for case, cold in order]
        clocks: list[float | None] = []
        with profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            self._profiled(order[0][0], 1, cold=False)  # what CUPTI sets up on the way belongs to no sample
            for (case, cold), count in zip(order, calls, strict=True):
                clocks.append(self._profiled(case, count, cold=cold).call_clock_mhz)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            times = kernel_times(json.loads(file.read_text(encoding="utf-8")), calls)
        for label, case in cases.items():
            for cold in (False, True):
                mine = [at for at, (other, other_cold) in enumerate(order) if other is case and other_cold is cold]
                read = [clocks[at] for at in mine]
                samples = {
                    "regime": "burst",
                    "cache": "cold" if cold else "hot",
                    "calls": calls[mine[0]],
                    "time_us": [times[at] for at in mine],
                    "sm_clock_mhz": [],
                    "call_clock_mhz": [] if None in read else read,
                }
                self._keep(cases[label], "torch-profiler", samples)

    def _profiled(self, case: _Case, calls: int, *, cold: bool) -> timing.Reading:
        gap_s = 2e-6 * case.call_us * calls
        self._backend.sleep(min(max(gap_s, timing.MIN_GAP_S), timing.MAX_GAP_S))
        # While it records, a call takes the host several times as long to enqueue.
        spin_us = 500.0 + 4 * case.enqueue_us * calls
        return self._backend.sample(case.run, calls=calls, spin_us=spin_us, cold=cold)

    def _cuda_bench(self) -> None:
        """NVBench: every measurement is a value of its axis, in an order drawn anew each round."""
        try:
            bench = importlib.import_module("cuda.bench")
            register = bench.register
        except ImportError as error:
            raise MissingPackageError(
                f"wanted the Python package cuda-bench, got: {error}. `pip install cuda-bench` installs it."
            ) from error
        steps: list[_Case] = []
        for _ in range(self._job["rounds"]):
            turn = list(self._cases.values())
            self._random.shuffle(turn)
            steps += turn
        provider = _Provider(self._stream)

        def flashlab_method(state: Any) -> None:
            if self._left_s(_NVBENCH_SHARE) <= 0:
                state.skip("its time was over")
                return
            case = steps[state.get_int64("step")]
            time.sleep(_COOL_S)
            state.set_stream(provider)
            state.set_min_samples(_SLOW_SAMPLES if case.call_us > _SLOW_US else _MIN_SAMPLES)
            state.set_batch_target_time(_BATCH_S)
            state.set_timeout(_STATE_TIMEOUT_S)
            state.set_blocking_kernel_timeout(_STATE_TIMEOUT_S)
            state.exec(lambda launch: case.run())

        benchmark = register(flashlab_method)
        benchmark.add_int64_axis("step", list(range(len(steps))))
        benchmark.set_stopping_criterion("sample-count")
        benchmark.set_criterion_param_int64("target-samples", 1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "nvbench.json"
            bench.run_all_benchmarks(["flashlab", "--devices", str(self._device), "--quiet", "--jsonbin", str(file)])
            measured = nvbench_samples(file)
        if not measured:
            raise LaunchError("its time was over before its first measurement")
        merged: dict[tuple[str, Cache, int], Message] = {}
        for step, samples in measured:
            case = steps[step]
            key = (case.label, samples["cache"], samples["calls"])
            if key not in merged:
                merged[key] = samples
                continue
            merged[key]["time_us"] += samples["time_us"]
            merged[key]["call_clock_mhz"] += samples["call_clock_mhz"]
        for (label, _, _), samples in merged.items():
            if len(samples["call_clock_mhz"]) != len(samples["time_us"]):
                samples["call_clock_mhz"] = []
            self._keep(self._cases[label], "cuda-bench", samples)


def _words(error: Exception) -> str:
    """An error for people: ours say what they are."""
    return str(error) if isinstance(error, FlashlabError) else f"{type(error).__name__}: {error}"


def kernel_times(trace: Mapping[str, Any], calls: Sequence[int]) -> list[float]:
    """Time of one call in each sample, from the kernels between its two spins, microseconds.

    Args:
        trace: what torch.profiler exports.
        calls: of each sample. The trace's last samples are those; it may hold others before them.

    Raises:
        LaunchError: fewer samples, or a sample whose kernels are not so many calls' worth.
    """
    device = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    groups: list[list[float]] = []
    inside: list[float] | None = None
    for event in sorted(device, key=lambda event: float(event["ts"])):
        took = float(event["dur"])
        if _SPIN in event["name"]:
            if took > _LONG_SPIN_US:
                inside = []
            elif inside is not None:
                groups.append(inside)
                inside = None
        elif inside is not None:
            inside.append(took)
    if len(groups) < len(calls):
        raise LaunchError(f"wanted {len(calls)} samples in the profiler's trace, found {len(groups)}")
    found = groups[len(groups) - len(calls) :]
    for kernels, count in zip(found, calls, strict=True):
        if not kernels or len(kernels) % count:
            raise LaunchError(f"wanted the kernels of {count} calls between two spins, found {len(kernels)}")
    return [sum(kernels) / count for kernels, count in zip(found, calls, strict=True)]


def nvbench_samples(file: Path) -> list[tuple[int, Message]]:
    """(step, samples as `records.Samples` takes them) of what NVBench wrote with `--jsonbin`, cold and hot.

    Raises:
        LaunchError: a measurement without samples.
    """
    whole = json.loads(file.read_text(encoding="utf-8"))
    found: list[tuple[int, Message]] = []
    for state in (state for bench in whole["benchmarks"] for state in bench["states"]):
        if state.get("is_skipped"):
            continue
        step = next(int(axis["value"]) for axis in state["axis_values"] if axis["name"] == "step")
        summaries = {
            summary["tag"]: {entry["name"]: entry.get("value") for entry in summary["data"]}
            for summary in state["summaries"] or ()
        }
        seconds = _floats(summaries.get("nv/json/bin:nv/cold/sample_times"), file)
        hertz = _floats(summaries.get("nv/json/freqs-bin:nv/cold/sample_freqs"), file)
        if not seconds:
            raise LaunchError(f"step {step}: wanted NVBench's samples, found none in {file.name}")
        one: Message = {"regime": "burst", "cache": "cold", "calls": 1, "sm_clock_mhz": []}
        clocks = [value / 1e6 for value in hertz] if len(hertz) == len(seconds) else []
        found.append((step, {**one, "time_us": [1e6 * value for value in seconds], "call_clock_mhz": clocks}))
        batch = summaries.get("nv/batch/time/gpu/mean")
        if batch:
            calls = int(summaries["nv/batch/sample_size"]["value"])
            time_us = 1e6 * float(batch["value"])
            found.append((step, {**one, "cache": "hot", "calls": calls, "time_us": [time_us], "call_clock_mhz": []}))
    return found


def _floats(summary: Mapping[str, Any] | None, beside: Path) -> list[float]:
    """The numbers of a file that NVBench wrote beside its JSON; none where it wrote none."""
    if summary is None:
        return []
    name = Path(str(summary["filename"]))
    file = next((path for path in (name, beside.parent / name, beside.parent.parent / name) if path.is_file()), None)
    if file is None:
        return []
    content = file.read_bytes()
    return list(struct.unpack(f"<{len(content) // 4}f", content))


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package {module} to measure on a GPU, got: {error}. "
            "`pip install 'flashlab[gpu]'` installs it."
        ) from error


def _work(job: Message, send: Send) -> None:
    """The worker of `measure`."""
    _Worker(job, send).work()


# --- What the readings say --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pool:
    """All samples of one implementation by one timer in one state, of one run."""

    name: str
    problem: Problem
    timer: Timer
    inputs: Inputs
    regime: Regime
    cache: Cache
    time_us: tuple[float, ...]
    clock_mhz: float | None
    """Median SM clock in the calls; None where it was not read with every sample."""
    enqueue_us: float | None
    """Host time to enqueue one call; None where it was not measured."""
    conditions: store.Conditions | None
    """The GPU's state meanwhile; None where it was not read."""
    run: str

    @property
    def median_us(self) -> float:
        """Median time of one call."""
        return median(self.time_us)


def pools(readings: Iterable[Reading]) -> tuple[Pool, ...]:
    """What the newest run of each problem read, the readings of one state together, in the order they came."""
    every = list(readings)
    newest = {reading.problem.problem(): reading.run for reading in sorted(every, key=lambda one: one.run)}
    grouped: dict[tuple[Any, ...], list[Reading]] = {}
    for one in every:
        if one.run == newest[one.problem.problem()]:
            state = (one.samples.regime, one.samples.cache)
            grouped.setdefault((one.name, one.problem.problem(), one.timer, one.inputs, *state), []).append(one)
    found = []
    for (name, problem, timer, inputs, regime, cache), same in grouped.items():
        clocks = [mhz for one in same for mhz in one.samples.call_clock_mhz]
        times = tuple(value for one in same for value in one.samples.time_us)
        enqueues = [one.enqueue_us for one in same if one.enqueue_us is not None]
        found.append(
            Pool(
                name=name,
                problem=problem,
                timer=timer,
                inputs=inputs,
                regime=regime,
                cache=cache,
                time_us=times,
                clock_mhz=median(clocks) if len(clocks) == len(times) else None,
                enqueue_us=median(enqueues) if enqueues else None,
                conditions=same[-1].samples.conditions,
                run=same[0].run,
            )
        )
    return tuple(found)


def _ratio(above: Pool, below: Pool) -> Estimate:
    """The ratio of the medians of two pools, which are resampled each on its own."""
    return interval(ratio_of_medians, above.time_us, below.time_us)


def with_interval(ratio: Estimate) -> str:
    """A ratio for people: `1.003 (0.998–1.007)`."""
    return f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another timer beside CUDA events, on the same implementation in the same state."""

    ours: Pool
    other: Pool
    ratio: Estimate
    """The other's median over ours."""

    @property
    def agrees(self) -> bool:
        """Whether the medians are within `AGREE` of each other."""
        return abs(self.ratio.value - 1) <= AGREE

    @property
    def gap_us(self) -> float:
        """How much longer ours says a call is."""
        return self.ours.median_us - self.other.median_us

    @property
    def clock_ratio(self) -> float | None:
        """The ratio in SM clocks instead of time; None where either clock was not read."""
        if self.ours.clock_mhz is None or self.other.clock_mhz is None:
            return None
        return self.ratio.value * self.other.clock_mhz / self.ours.clock_mhz

    @property
    def why(self) -> str:
        """What the data says of a difference; empty where the two agree.

        The first that holds: the host could not enqueue as fast as calls ran; the clocks differed and clocks a call do
        not; a few microseconds a call, whatever the call; none of these.
        """
        if self.agrees:
            return ""
        other, ours = self.other, self.ours
        enqueue = other.enqueue_us
        hot_batch = other.timer == "cuda-bench" and other.cache == "hot"
        if hot_batch and enqueue is not None and ours.median_us < enqueue and self.gap_us < 0:
            return f"the host: {tables.number(enqueue)} µs to enqueue a call"
        if self.clock_ratio is not None and abs(self.clock_ratio - 1) <= AGREE:
            beside = f"{tables.number(other.clock_mhz, 4)} MHz beside {tables.number(ours.clock_mhz, 4)}"
            return f"the clock: {beside}; in SM clocks {self.clock_ratio:.3f}"
        if abs(self.gap_us) <= LAUNCH_GAP_US:
            more = "events see" if self.gap_us > 0 else f"{TIMERS[other.timer]} sees"
            return f"a launch: {more} {tables.number(abs(self.gap_us))} µs more a call"
        return "not explained by host, clock or launch"


LAUNCH_GAP_US = 4.0
"""A difference up to this is taken for the cost of events and launches around a kernel, microseconds."""


def comparisons(found: Iterable[Pool]) -> tuple[Comparison, ...]:
    """Every other timer's pools beside those of CUDA events in the same state."""
    every = list(found)
    ours = {_state(pool): pool for pool in every if pool.timer == "events"}
    return tuple(
        Comparison(ours=ours[_state(pool)], other=pool, ratio=_ratio(pool, ours[_state(pool)]))
        for pool in every
        if pool.timer != "events" and _state(pool) in ours
    )


def _state(pool: Pool) -> tuple[Any, ...]:
    return (pool.name, pool.problem, pool.inputs, pool.regime, pool.cache)


# --- What separate starts say -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One stage or library at one problem on separate starts of a machine."""

    rows: tuple[Measurement, ...]
    """One a start, in time's order: the newest of each."""

    @property
    def name(self) -> str:
        """A stage id, or a peer's name."""
        return self.rows[0].name

    @property
    def problem(self) -> Problem:
        """What was computed."""
        return self.rows[0].problem.problem()

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The burst samples with a hot L2 of each start."""
        return tuple(samples for row in self.rows if (samples := row.samples_of()))

    @property
    def medians_us(self) -> tuple[float, ...]:
        """Median of each start."""
        return tuple(samples.median_us for samples in self.samples)

    @property
    def within_percent(self) -> float:
        """Mean over the starts of what a start's own samples spread: standard deviation over mean."""
        return fmean(samples.cv_percent for samples in self.samples)

    @property
    def between_percent(self) -> float:
        """The slowest start's median over the fastest's, less one."""
        return 100 * (max(self.medians_us) / min(self.medians_us) - 1)

    @property
    def between_clocks_percent(self) -> float | None:
        """The same in clocks a score, which do not depend on the clock; None where it was not read on every start."""
        clocks = [samples.cycles_per_score for samples in self.samples]
        known = [value for value in clocks if value is not None]
        return 100 * (max(known) / min(known) - 1) if len(known) == len(clocks) else None

    @property
    def chips(self) -> int:
        """How many GPUs the starts were on."""
        return len({row.gpu.fingerprint for row in self.rows})


def spreads(measurements: Iterable[Measurement]) -> tuple[Spread, ...]:
    """What was measured on at least two separate starts, by problem, in the ladder's order.

    A row counts when it names its start, has burst samples with a hot L2, and is of the same code as the newest such
    row: the same machine code of a stage, the same versions of all software of a library.
    """
    grouped: dict[tuple[Problem, str], list[Measurement]] = {}
    for row in sorted(measurements, key=lambda row: row.time):
        known = row.kind == "peer" or row.name in registry.RUNGS
        if known and row.start is not None and row.samples_of():
            grouped.setdefault((row.problem.problem(), row.name), []).append(row)
    found: list[Spread] = []
    for rows in grouped.values():
        newest: list[Measurement] = []
        for row in reversed(rows):
            if _code(row) == _code(rows[-1]) and not any(_same_start(row, other) for other in newest):
                newest.append(row)
        if len(newest) > 1:
            found.append(Spread(rows=tuple(reversed(newest))))
    ladder = {name: at for at, name in enumerate([*registry.RUNGS, *peers.PEERS])}
    return tuple(sorted(found, key=lambda one: (one.problem, ladder.get(one.name, len(ladder)))))


def _code(row: Measurement) -> object:
    return row.cubin.sha256 if row.cubin else row.software


def _same_start(row: Measurement, other: Measurement) -> bool:
    return row.start is not None and other.start is not None and row.start.same_as(other.start)


def recorded_spreads(gpu_slug: str | None, data: Path = DATA) -> tuple[Spread, ...]:
    """`spreads` of all that is on record for a GPU on normal inputs; may be empty."""
    try:
        runs = store.runs(gpu_slug or "", data)
    except NoDataError:
        return ()
    return spreads(row for run in runs for row in run.measurements if row.problem.inputs == NORMAL)


# --- Pages ------------------------------------------------------------------------------------------------------------

NOTHING_YET = (
    "**Nothing has been measured yet.** No reading by other timers is on record for this GPU; "
    "`flashlab method` on it makes some."
)
_NO_STARTS = (
    "**Nothing has been measured yet.** No stage is on record from two separate starts of a machine with this GPU. "
    f"`flashlab bench --suite first`, with the same code once on each of {STARTS} starts, gives what lies between them."
)
_NO_CLOCKS = (
    "**Nothing has been measured yet.** No row on record has the clock in its calls both in bursts and under sustained "
    "load. `flashlab bench --suite peers` makes such rows."
)


def _pools(gpu_slug: str | None, data: Path) -> tuple[Pool, ...]:
    return pools(store.readings(gpu_slug or "", data))


def _title(name: str) -> str:
    return f"`{name}`" if name in registry.RUNGS else tables.peer_title(name)


def _by_problem(found: Iterable[Pool]) -> dict[Problem, list[Pool]]:
    grouped: dict[Problem, list[Pool]] = {}
    for pool in sorted(found, key=lambda pool: -pool.problem.flops):
        grouped.setdefault(pool.problem, []).append(pool)
    return grouped


def _source(found: Iterable[Pool]) -> str:
    runs = sorted({pool.run for pool in found})
    return "*" + "; ".join(f"{select.date(run)}, commit {select.commit_label(run)}" for run in runs) + "*\n"


def missing_timers(gpu_slug: str | None, data: Path = DATA) -> str:
    """The timers that gave no reading on this GPU and what installs them, as a sentence; empty where all did."""
    there = {pool.timer for pool in _pools(gpu_slug, data)}
    lacking = [f"{TIMERS[timer]} (`pip install {name}`)" for timer, name in INSTALLS.items() if timer not in there]
    if not there or not lacking:
        return ""
    return f"**No reading on record:** {', '.join(lacking)}.\n"


def timers_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """Other timers beside CUDA events on random inputs, a table a problem, each difference with what explains it."""
    found = [pool for pool in _pools(gpu_slug, data) if pool.inputs == "normal" and pool.regime == "burst"]
    if not found:
        return NOTHING_YET
    text = []
    for problem, mine in _by_problem(found).items():
        rows: list[list[tables.Cell]] = []
        compared = comparisons(mine)
        for one in sorted(compared, key=lambda one: (one.other.timer, one.other.cache == "cold")):
            rows.append(
                [
                    _title(one.ours.name),
                    TIMERS[one.other.timer],
                    one.ours.cache,
                    one.why or "agrees",
                    tables.number(one.ours.median_us, 4),
                    tables.number(one.other.median_us, 4),
                    with_interval(one.ratio),
                ]
            )
        header = ("", "other timer", "L2", "difference", "events, µs", "other, µs", "other / events (95 %)")
        agreeing = sum(one.agrees for one in compared)
        said = f"{agreeing} of {len(compared)} medians are within {100 * AGREE:.0f} % of CUDA events.\n\n"
        text.append(f"### {problem.label}\n\n{said}{tables.markdown(header, rows, left=4)}")
    return "\n".join([*text, _source(found)])


def timers_chart(gpu_slug: str | None, data: Path = DATA) -> Chart | str:
    """The ratios of `timers_table` as a figure; a sentence where there is none."""
    found = [pool for pool in _pools(gpu_slug, data) if pool.inputs == "normal" and pool.regime == "burst"]
    compared = comparisons(found)
    if not compared:
        return NOTHING_YET
    series: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in sorted(compared, key=lambda one: (-one.ours.problem.flops, one.other.timer)):
        name = f"{TIMERS[one.other.timer]}, {one.ours.cache} L2"
        label = one.ours.name if one.ours.name in registry.RUNGS else tables.peer_title(one.ours.name)
        values = [100 * (value - 1) for value in (one.ratio.low, one.ratio.value, one.ratio.high)]
        series.setdefault(f"{label}, {one.ours.problem.shape}", {})[name] = (values[0], values[1], values[2])
    runs = sorted({pool.run for pool in found})
    return charts.differences(
        series,
        name="timers",
        axis="percent over CUDA events",
        within=100 * AGREE,
        caption=f"Other timers' medians beside those of CUDA events, with 95 % intervals. The band is ±{AGREE:.0%}.",
        provenance=f"{gpu_slug} · burst · {', '.join(map(select.date, runs))} · commit "
        + ", ".join(map(select.commit_label, runs)),
        data_files=tuple(f"{gpu_slug}/readings/{run}.jsonl" for run in runs),
    )


def _against(found: Sequence[Pool], *, swap: Callable[[Pool], tuple[Any, ...]], base: Callable[[Pool], bool]) -> Any:
    """(pool, the pool it is held against) where `swap` gives both the same key and `base` holds for the second."""
    bases = {swap(pool): pool for pool in found if base(pool)}
    return [(pool, bases[swap(pool)]) for pool in found if not base(pool) and swap(pool) in bases]


def zeros_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """Zeros beside random normal inputs, by CUDA events: time, clock and power."""
    found = [pool for pool in _pools(gpu_slug, data) if pool.timer == "events"]
    pairs = _against(
        found,
        swap=lambda pool: (pool.name, pool.problem, pool.regime, pool.cache),
        base=lambda pool: pool.inputs == "normal",
    )
    if not pairs:
        return NOTHING_YET
    text = []
    for problem in _by_problem(found):
        rows: list[list[tables.Cell]] = [
            [
                _title(zeros.name),
                zeros.regime if zeros.regime == "sustained" else f"burst, {zeros.cache} L2",
                tables.number(normal.median_us, 4),
                tables.number(zeros.median_us, 4),
                with_interval(_ratio(zeros, normal)),
                *(tables.number(pool.clock_mhz, 4) for pool in (normal, zeros)),
                *(_power(pool) for pool in (normal, zeros)),
            ]
            for zeros, normal in sorted(pairs, key=lambda pair: (pair[0].regime, pair[0].cache == "cold"))
            if zeros.problem == problem
        ]
        header = (
            *("", "state", "normal, µs", "zeros, µs", "zeros / normal (95 %)"),
            *("MHz in the calls, normal", "zeros", "W, normal", "zeros"),
        )
        text.append(f"### {problem.label}\n\n{tables.markdown(header, rows, left=2)}")
    return "\n".join([*text, _source(found)])


def _power(pool: Pool) -> tables.Cell:
    """Power under sustained load; a burst is mostly gaps."""
    conditions = pool.conditions
    if pool.regime != "sustained" or conditions is None:
        return None
    if conditions.energy_j_per_call is not None:
        return tables.number(1e6 * conditions.energy_j_per_call / fmean(pool.time_us))
    return tables.number(conditions.power_w_mean)


def cache_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """A cold L2 beside a hot one, random inputs, by every timer that was read."""
    found = [pool for pool in _pools(gpu_slug, data) if pool.inputs == "normal" and pool.regime == "burst"]
    pairs = _against(
        found, swap=lambda pool: (pool.name, pool.problem, pool.timer), base=lambda pool: pool.cache == "hot"
    )
    if not pairs:
        return NOTHING_YET
    text = []
    for problem in _by_problem(found):
        rows: list[list[tables.Cell]] = [
            [
                _title(cold.name),
                TIMERS[cold.timer],
                tables.number(hot.median_us, 4),
                tables.number(cold.median_us, 4),
                with_interval(_ratio(cold, hot)),
            ]
            for cold, hot in sorted(pairs, key=lambda pair: list(TIMERS).index(pair[0].timer))
            if cold.problem == problem
        ]
        header = ("", "timer", "hot, µs", "cold, µs", "cold / hot (95 %)")
        text.append(f"### {problem.label}\n\n{tables.markdown(header, rows, left=2)}")
    return "\n".join([*text, _source(found)])


def clock_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """The SM clock in bursts and under sustained load, power, and what held it back, from the measured rows."""
    try:
        shown = select.load(gpu_slug or "", data)
    except NoDataError:
        return _NO_CLOCKS
    text = []
    for problem, measured in shown.problems.items():
        rows: list[list[tables.Cell]] = []
        for row in measured:
            burst, sustained = row.samples_of("burst", "hot"), row.samples_of("sustained", "hot")
            if not burst or not sustained or not burst.call_clock_mhz or not sustained.call_clock_mhz:
                continue
            conditions = sustained.conditions
            rows.append(
                [
                    tables.title(row),
                    tables.number(median(burst.sm_clock_mhz), 4) if burst.sm_clock_mhz else None,
                    tables.number(median(burst.call_clock_mhz), 4),
                    tables.number(median(sustained.call_clock_mhz), 4),
                    f"{sustained.median_us / burst.median_us:.3f}",
                    tables.number(store.power_w(sustained)),
                    conditions.temperature_c_max if conditions else None,
                    tables.held_back(conditions.throttle_reasons) if conditions else None,
                ]
            )
        if rows:
            header = (
                *("", "MHz after a burst", "in a burst's calls", "in sustained calls", "sustained / burst time"),
                *("W, sustained", "°C at most", "clock held back by"),
            )
            text.append(f"### {problem.label}\n\n{tables.markdown(header, rows)}")
    return "\n".join(text) or _NO_CLOCKS


def spread_table(gpu_slug: str | None, data: Path = DATA) -> str:
    """Every stage and library on separate starts: median of each, spread within and between, a table a problem."""
    found = recorded_spreads(gpu_slug, data)
    if not found:
        return _NO_STARTS
    text = []
    for problem in dict.fromkeys(one.problem for one in found):
        mine = [one for one in found if one.problem == problem]
        columns = max(len(one.rows) for one in mine)
        rows: list[list[tables.Cell]] = [
            [
                _title(one.name),
                *(tables.number(value, 4) for value in one.medians_us),
                *([None] * (columns - len(one.rows))),
                *(
                    None if percent is None else f"{percent:.2f}"
                    for percent in (one.within_percent, one.between_percent, one.between_clocks_percent)
                ),
            ]
            for one in mine
        ]
        header = (
            "",
            *(f"start {number}, µs" for number in range(1, columns + 1)),
            *("within a start, std dev, %", "between starts, %", "between starts in SM clocks, %"),
        )
        text.append(f"### {problem.label}\n\n{tables.markdown(header, rows)}\n{_starts_line(mine, columns)}")
    return "\n".join(text)


def _starts_line(found: Sequence[Spread], columns: int) -> str:
    every = {row.run: row for one in found for row in one.rows}
    begun = [f"{row.start.at[:16].replace('T', ' ')} UTC" for row in every.values() if row.start]
    chips = len({row.gpu.fingerprint for row in every.values()})
    short = f" {STARTS} are wanted." if columns < STARTS else ""
    return (
        f"*The machine was started at {', '.join(sorted(dict.fromkeys(begun)))}; the runs were on "
        f"{chips} {'GPU' if chips == 1 else 'different GPUs'}.{short} Between: the slowest start's median over the "
        "fastest's, less one.*\n"
    )


def spread_chart(gpu_slug: str | None, data: Path = DATA, *, mask: str = "full") -> Chart | str:
    """Each start's median and 5th to 95th percentile beside the mean of the starts; a sentence where there is none."""
    found = [
        one
        for one in recorded_spreads(gpu_slug, data)
        if (one.problem.shape, one.problem.mask, one.problem.dtype) == (FIRST_SHAPE, mask, "float16")
    ]
    if not found:
        return _NO_STARTS
    series: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in found:
        middle = fmean(one.medians_us)
        label = one.name if one.name in registry.RUNGS else tables.peer_title(one.name)
        for number, samples in enumerate(one.samples, start=1):
            low, mid, high = (100 * (float(t) / middle - 1) for t in np.percentile(samples.time_us, (5, 50, 95)))
            series.setdefault(label, {})[f"start {number}"] = (low, mid, high)
    rows = [row for one in found for row in one.rows]
    return charts.differences(
        series,
        name=f"starts-{mask}",
        axis="percent over the mean of the starts",
        within=None,
        caption="The same code on separate starts of the machine: median, and 5th to 95th percentile of the samples.",
        provenance=select.provenance(rows),
        data_files=select.run_files(rows),
    )


def samples_page(out: Output, shown: Results | None, data: Path) -> None:
    """How many raw samples are on record, a line a GPU."""
    lines = [f"- {samples_line(slug, data)}" for slug in store.gpus(data)]
    out.snippet("samples.md", "\n".join(lines) if shown else NOTHING_YET)


PAGES = {"timers": samples_page}


def samples_line(gpu_slug: str, data: Path = DATA) -> str:
    """How many raw samples are on record for a GPU, as a sentence, and what makes more where they are too few."""
    counts = store.count_samples(gpu_slug, data)
    total = sum(counts.values())
    parts = ", ".join(f"{count:,} in `{folder}/`" for folder, count in counts.items() if count)
    text = f"Raw samples of stages and libraries on record for `{gpu_slug}`: **{total:,}** ({parts or 'none'})."
    if total < ENOUGH_SAMPLES:
        text += (
            f" {ENOUGH_SAMPLES:,} are wanted: `flashlab bench --suite first --samples 200` makes more, and with "
            "`--dry-run` says how long it takes."
        )
    return text


def summary(gpu_slug: str | None, data: Path = DATA) -> dict[str, Any]:
    """What the notebook found, in numbers: samples, agreement of timers, spread between starts."""
    compared = comparisons(pool for pool in _pools(gpu_slug, data) if pool.inputs == "normal")
    return {
        "samples": sum(store.count_samples(gpu_slug, data).values()) if gpu_slug else 0,
        "compared": len(compared),
        "agreeing": sum(one.agrees for one in compared),
        "between_starts_percent": {
            f"{one.name} {one.problem.label}": one.between_percent for one in recorded_spreads(gpu_slug, data)
        },
    }


if __name__ == "__main__":
    sys.exit(serve(_work))
