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
drift between the two workers then shows as spread of the events. Implementations and inputs are interleaved under
every timer. Each implementation is checked against the float64 oracle before its first time is taken, as in a
benchmark; what fails has none.

What the readings say is in timer_tables.py.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from flashlab.core.errors import LaunchError, MissingPackageError, ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.measure import timer as timing
from flashlab.measure.bench import implementations_of, on_record
from flashlab.measure.cells import Rows
from flashlab.measure.harness import Book, Message, Send, serve
from flashlab.measure.options import Options, Plan
from flashlab.measure.worker import BenchWorker
from flashlab.record.schema import Reading
from flashlab.verify.verdict import Oracle

TIMERS: Mapping[str, str] = {
    "events": "CUDA events",
    "torch-profiler": "CUPTI",
    "cuda-bench": "NVBench",
}
"""By name as `Reading` has it, as tables call them."""
INSTALLS: Mapping[str, str] = {"torch-profiler": "torch", "cuda-bench": "cuda-bench"}
"""What to `pip install` for those that are not ours."""
INPUTS = ("normal", "zeros")
SHAPES = (FIRST_SHAPE, "1x8x512x64")
"""The sources' shape, and one so small that launching matters."""
LAST_RUNG = list(registry.CUDA_STAGES)[-1]
STAGES = ("05_wmma", "08_swizzle", LAST_RUNG, "t0_triton")
PEERS = ("sdpa_cudnn",)
SUSTAINED = (LAST_RUNG, "sdpa_cudnn")
"""Of them, what is called for seconds at the first shape."""
_WORKERS: tuple[tuple[str, ...], ...] = (("events", "torch-profiler", "sustained"), ("cuda-bench", "events"))
"""What each of the two workers reads with, in order."""
OPTIONS = Options(worker=(sys.executable, "-m", "flashlab.experiments.timers"))

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
_PLAN = Plan(checked_scores=1 << 27)


# --- The parent -------------------------------------------------------------------------------------------------------


def measure(
    stage_ids: Sequence[str] | None = None,
    peer_names: Sequence[str] | None = None,
    shapes: Sequence[str] | None = None,
    *,
    samples: int = 20,
    rounds: int = 4,
    sustained_s: float = 1.5,
    limit_s: float = LIMIT_S,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[str, ...]]:
    """Read implementations with every timer that is installed and append the readings to data/<gpu>/readings.

    A reading is on disk as soon as it is made: what ends this process early costs what was still to come. Progress is
    in seconds of `limit_s`.

    Args:
        stage_ids: `STAGES` where None.
        peer_names: `PEERS` where None.
        shapes: BxHxSxD, non-causal, float16; `SHAPES` where None. The first is called for seconds, too.
        samples: of each implementation and cache state, by events; half as many by CUPTI.
        rounds: how often NVBench measures each.
        sustained_s: seconds of continuous calls, on normal inputs and on zeros; none where 0.
        limit_s: for all of it; what does not fit is left out.

    Returns:
        The file of readings, and what gave none, and why, a sentence each.

    Raises:
        OutputError, ParameterError, UnknownStageError, ShapeError: before any GPU work.
        NoGpuError, MissingPackageError: the worker cannot work here.
        LaunchError: no timer gave a reading.
    """
    problems = [Problem.parse(shape) for shape in (SHAPES if shapes is None else shapes)]
    stages, libraries = (STAGES if stage_ids is None else stage_ids, PEERS if peer_names is None else peer_names)
    named = implementations_of((), stages, libraries)
    names = list(named)
    if not names or not problems:
        raise ParameterError(f"wanted at least one implementation and shape, got {len(names)} and {len(problems)}")
    job: Message = {
        "problems": [asdict(problem) for problem in problems],
        "implementations": to_jsonable_python(named),
        "plan": asdict(_PLAN),
        "samples": samples,
        "rounds": rounds,
        "sustained_s": sustained_s,
    }
    ends = time.monotonic() + limit_s

    def follow(readings: int, *_: object) -> None:
        done_s = round(limit_s - max(0.0, ends - time.monotonic()))
        options.progress(done_s, round(limit_s), f"{readings} readings, or sooner")

    with Book(options.data, "readings") as book:
        rows = Rows(Reading, book, replace(options, progress=follow))
        for timers in _WORKERS:
            options.note(f"{', '.join(timers)}: {len(names)} implementations, {len(problems)} shapes")
            left_s = max(0.0, ends - time.monotonic()) * (_FIRST_SHARE if timers is _WORKERS[0] else 1)
            job |= {"names": names, "timers": timers, "seconds": max(0.0, left_s - _STOPPING_S)}
            rows.run(job, ", ".join(timers), startup_s=left_s, step_s=left_s, total_s=left_s)
            lost = {failure.get("name") for failure in rows.missing}
            names = [name for name in names if name not in lost]
        return rows.ended()


def recorded(data: Path = DATA) -> bool:
    """Whether this very commit has readings of every stage and library of `measure` on this GPU, by our own timer."""
    known = on_record(Reading, Options(data=data), same_commit=True)
    return {reading.name for reading in known if reading.timer == "events"} >= {*STAGES, *PEERS}


# --- The worker -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """An implementation on one problem and one kind of inputs, ready to be called."""

    name: str
    problem: Problem
    inputs: str
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


class _Worker(BenchWorker):
    """Reads implementations, built and checked as in a benchmark, with some timers."""

    def __init__(self, job: Message, send: Send) -> None:
        super().__init__(job, send)
        self._random = random.Random(job["seed"])
        self._problems = [Problem(**fields) for fields in job["problems"]]
        self._cases: dict[str, _Case] = {}
        self._calls: dict[str, int] = {}
        self._began = time.monotonic()

    def _left_s(self, share: float = 1.0) -> float:
        """Seconds until that share of its time is over."""
        return float(self._began + share * self.job["seconds"] - time.monotonic())

    def work(self) -> None:
        """All of the job."""
        self.hold()
        torch = self.torch
        # Not the default stream: NVBench blocks the one it is given, and other streams would wait for the default one.
        stream = torch.cuda.Stream(device=self.device)
        self._stream = int(stream.cuda_stream)
        with torch.no_grad(), torch.cuda.stream(stream):
            self._backend = timing.CudaBackend(self.device, self._stream)
            for problem in self._problems:
                self._build(problem)
            self._read()

    def _read(self) -> None:
        for what, step in [step for timer in self.job["timers"] for step in self._steps_of(timer)]:
            self.send({"type": "step", "what": what})
            with self.attempt(what):  # whatever it raises, the others still have their turn
                if self._left_s() <= 0:
                    raise LaunchError(f"the {self.job['seconds']:.3g} s for this were over")
                step()

    def _steps_of(self, timer: str) -> list[tuple[str, Callable[[], None]]]:
        """What a timer reads, one after the other, each by itself: what one of them loses is not the next one's."""
        if timer == "sustained":
            return [(timer, self._sustained)]
        if timer == "cuda-bench":
            return [(timer, self._cuda_bench)]
        read = self._events if timer == "events" else self._profiler
        return [(f"{timer} at {problem.label}", partial(read, problem)) for problem in self._problems]

    # -- implementations

    def _build(self, problem: Problem) -> None:
        self._oracle, self._copies, self._checked_scores = Oracle(), {}, self._plan.checks(problem)
        normal = self.inputs(problem)
        zeros = tuple(map(self.torch.zeros_like, normal))
        for name in self.job["names"]:
            with self.attempt(f"{name} at {problem.label}", name=name):
                candidate = self.candidate(name, problem, *normal)
                assert candidate.on is not None, "all of them are judged"
                for inputs, run in zip(INPUTS, (candidate.run, candidate.on(*zeros)), strict=True):
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

    def _of(self, problem: Problem) -> dict[str, _Case]:
        return {label: case for label, case in self._cases.items() if case.problem == problem}

    def _keep(self, case: _Case, timer: str, samples: Message) -> None:
        reading = {"name": case.name, "problem": asdict(case.problem), "timer": timer, "inputs": case.inputs}
        self.send({"type": "row", "row": {**reading, "samples": samples, "enqueue_us": case.enqueue_us}})

    # -- timers

    def _events(self, problem: Problem) -> None:
        """Our own timer, in bursts."""
        cases = self._of(problem)
        timer = timing.Timer(self._backend, seed=self.job["seed"])
        for cold in (False, True):
            bursts = timer.burst(
                {label: case.run for label, case in cases.items()},
                cold=cold,
                samples=self.job["samples"],
                min_samples=4,
                cap_s=0.6,
            )
            for label, burst in bursts.items():
                if not cold:
                    self._calls[label] = burst.calls
                self._keep(cases[label], "events", burst.model_dump(mode="json"))

    def _sustained(self) -> None:
        """Our own timer, without a pause, on normal inputs and zeros one after the other."""
        seconds = self.job["sustained_s"]
        timer = timing.Timer(self._backend, seed=self.job["seed"])
        chosen = [c for c in self._of(self._problems[0]).values() if c.name in SUSTAINED]
        if not seconds or not chosen:
            return
        timer.sustained(chosen[0].run, seconds=_HEAT_S, call_us=chosen[0].call_us)
        for case in chosen:
            if self._left_s() < 2 * seconds:
                raise LaunchError(f"no time was left for {case.label} and what comes after it")
            samples = timer.sustained(case.run, seconds=seconds, call_us=case.call_us)
            self._keep(case, "events", samples.model_dump(mode="json"))

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
        for _ in range(max(4, self.job["samples"] // 2)):
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
        for case in cases.values():
            for cold in (False, True):
                mine = [at for at, (other, other_cold) in enumerate(order) if other is case and other_cold is cold]
                read = [clocks[at] for at in mine]
                samples: Message = {"regime": "burst", "cache": "cold" if cold else "hot", "calls": calls[mine[0]]}
                samples |= {"time_us": [times[at] for at in mine], "sm_clock_mhz": []}
                self._keep(case, "torch-profiler", {**samples, "call_clock_mhz": [] if None in read else read})

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
        for _ in range(self.job["rounds"]):
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
            bench.run_all_benchmarks(["flashlab", "--devices", str(self.device), "--quiet", "--jsonbin", str(file)])
            measured = nvbench_samples(file)
        if not measured:
            raise LaunchError("its time was over before its first measurement")
        for step, samples in measured:
            self._keep(steps[step], "cuda-bench", samples)


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
    last_groups = groups[len(groups) - len(calls) :]
    for kernels, count in zip(last_groups, calls, strict=True):
        if not kernels or len(kernels) % count:
            raise LaunchError(f"wanted the kernels of {count} calls between two spins, found {len(kernels)}")
    return [sum(kernels) / count for kernels, count in zip(last_groups, calls, strict=True)]


def nvbench_samples(file: Path) -> list[tuple[int, Message]]:
    """(step, samples as `records.Samples` takes them) of what NVBench wrote with `--jsonbin`, cold and hot.

    Raises:
        LaunchError: a measurement without samples.
    """
    whole = json.loads(file.read_text(encoding="utf-8"))
    samples: list[tuple[int, Message]] = []
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
        common: Message = {"regime": "burst", "cache": "cold", "calls": 1, "sm_clock_mhz": []}
        clocks = [value / 1e6 for value in hertz] if len(hertz) == len(seconds) else []
        samples.append((step, {**common, "time_us": [1e6 * value for value in seconds], "call_clock_mhz": clocks}))
        batch = summaries.get("nv/batch/time/gpu/mean")
        if batch:
            calls = int(summaries["nv/batch/sample_size"]["value"])
            time_us = 1e6 * float(batch["value"])
            samples.append(
                (step, {**common, "cache": "hot", "calls": calls, "time_us": [time_us], "call_clock_mhz": []})
            )
    return samples


def _floats(summary: Mapping[str, Any] | None, beside: Path) -> list[float]:
    """The numbers of a file that NVBench wrote beside its JSON; none where it wrote none."""
    if summary is None:
        return []
    name = Path(str(summary["filename"]))
    file = next((path for path in (name, beside.parent / name, beside.parent.parent / name) if path.is_file()), None)
    if file is None:
        return []
    return list(map(float, np.fromfile(file, "<f4")))


if __name__ == "__main__":
    sys.exit(serve(lambda job, send: _Worker(job, send).work()))
