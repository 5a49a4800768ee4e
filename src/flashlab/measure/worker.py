"""Worker of benchmarks, tuning and ablations: checks implementations on a GPU and times the correct ones.

For each problem: create inputs, check every implementation against the float64 oracle on a poisoned output, and time
those that passed, interleaved.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from flashlab.build import sass
from flashlab.core.inputs import NORMAL, TRAINED
from flashlab.core.problem import Cache, Precision, Problem
from flashlab.kernels import peers
from flashlab.kernels.registry import Implementation
from flashlab.measure import ceilings, harness
from flashlab.measure.cells import GpuWorker, RefusedError
from flashlab.measure.harness import Message, Send
from flashlab.measure.options import STEP_CALLS, Plan
from flashlab.measure.timer import CudaBackend, Run, Timer
from flashlab.record.checks import Fallbacks
from flashlab.record.schema import CubinFields, Samples, Verdict, cycles_per_score
from flashlab.run import gpu
from flashlab.run.attention import Prepared, prepare
from flashlab.verify.verdict import POISON_WORD, Oracle, Sample, check

_HEAT_SECONDS = 2.0
"""Load before the first sustained measurement of a problem, so that all of them start on a warm chip, and before each
implementation's first layer, whose share is too short for the clock to settle; at most the duration of one such
measurement, all layers together."""
_NEAR = 1.1
"""Rows with the log-sum-exp are timed under sustained load if their burst time is within this factor of the fastest
such row."""
_L2_SIZES, _COPIES, _MEMORY_SHARE = 3, (12, 64), 8
"""Copies of Q, K and V for rotating calls: multiple of the L2 size beyond the copy in use, minimum and maximum number,
and maximum share of the memory as 1/n. A few copies never suffice: a kernel that prefetches for the next call and
evicts what it has read would keep the prefetched part of each."""
_ALONE = ""
"""Name of the CUDA graph without calls."""
_MODEL_S = 300.0
"""Extra time allowed for a step that makes `trained` inputs."""
T = TypeVar("T")


def copies_beyond_l2(size_bytes: int, info: gpu.GpuInfo) -> int:
    """Number of copies of K and V, `size_bytes` together, with which L2 has evicted each before it is used again."""
    least, most = _COPIES
    copies = min(most, max(least, 1 + -(-_L2_SIZES * info.l2_bytes // size_bytes)))
    return max(2, min(copies, info.memory_bytes // (_MEMORY_SHARE * size_bytes)))


@dataclass
class Candidate:
    """An implementation ready for timing, which passed its check or is not judged."""

    run: Run
    verdict: Verdict | None
    """None if not judged."""
    judge: Callable[[], Verdict | None]
    """Checks it again on the current inputs; raises `RefusedError` if it is wrong."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its row."""
    fallbacks: Callable[[], Fallbacks | None] = lambda: None
    """Fallbacks in all checks so far."""
    on: Callable[..., Run] | None = None
    """Builds the same call on other Q, K and V; None if that is not timed."""


class BenchWorker(GpuWorker):
    """Measures ceilings, and checks and times implementations."""

    def __init__(self, job: Message, send: Send) -> None:
        super().__init__(job, send)
        self._plan = Plan(**job["plan"])
        self._oracle = Oracle()
        """Reference values of the current problem and layer."""
        self._checked_scores = 0
        """Number of its scores that are compared with the oracle."""
        self._model: Message | None = None
        """Description of the model of the current inputs; None unless they are `trained`."""
        self._peers: tuple[Problem | None, dict[str, peers.Attention]] = None, {}
        """Libraries built for a problem, independent of its inputs."""
        self._copies: dict[peers.Layout, tuple[Any, ...]] = {}
        """Copies of the current Q, K and V, by layout."""
        self._second = {
            name: implementation.lse_of
            for name, implementation in self.implementations.items()
            if implementation.lse_of
        }
        """Of what is timed with the log-sum-exp on, as what else."""

    def work(self) -> None:
        """Run the job."""
        self.hold()
        cuda = self.torch.cuda
        with cuda.stream(cuda.Stream(self.device)):  # not the default stream, which no CUDA graph can be captured from
            stream = int(cuda.current_stream(self.device).cuda_stream)
            self._backend = CudaBackend(self.device, stream)
            for index, problem, names, _ in self.cells():
                if problem is None:
                    self._ceilings(index, names, stream)
                else:
                    self.bench(index, problem, names)

    def row(self, cell: int, name: str, row: Mapping[str, Any]) -> None:
        """Send the row of an implementation, with the model of its inputs."""
        super().row(cell, name, {**row, "trained": self._model} if self._model else row)

    def _each(self, cell: int, names: Sequence[str], what: str, act: Callable[[str], T]) -> dict[str, T]:
        """Apply `act` to each implementation; for those that fail, send the row."""
        made: dict[str, T] = {}
        for name in names:
            self.step(cell, name, what)
            with self.surviving(cell, name):
                made[name] = act(name)
        return made

    def _ceilings(self, cell: int, names: Sequence[str], stream: int) -> None:
        def measure(name: str) -> None:
            timer = Timer(self._backend, seed=self.job["seed"])
            self.row(cell, name, ceilings.measure(name, timer, self.device, stream))
            self.free()

        self._each(cell, names, "measure", measure)

    # -- inputs

    def bench(self, cell: int, problem: Problem, names: Sequence[str]) -> None:
        """Check and time implementations on a problem, and send a row for each."""
        trained = problem.inputs == TRAINED
        self.step(cell, "", "make inputs", extra_s=_MODEL_S if trained else 0.0)
        self._oracle, self._copies, self._model = Oracle(), {}, None  # of the problem before: its memory goes with it
        self.free()
        plan = self._plan
        if trained:
            # Loaded where it is wanted: it wants torch.
            model = importlib.import_module("flashlab.measure.trained")
            if why_not := model.why_not(problem):
                for name in names:
                    self.row(cell, name, {"status": "unsupported", "reason": f"{TRAINED} inputs: {why_not}"})
                return
            layers = model.activations(problem)
            self._model = model.describe(problem.head_dim)
            plan = plan.shared(len(layers))
            # Kernels are made ready once, for these addresses, and every layer goes through them.
            tensors = tuple(self.torch.empty_like(x, memory_format=self.torch.contiguous_format) for x in layers[0])
        else:
            tensors = self.inputs(problem)
            layers = [tensors]
        self._checked_scores = plan.checks(problem)
        self._load(tensors, layers[0])
        ready = self._each(cell, names, "build and check", lambda name: self.candidate(name, problem, *tensors))
        self.time(cell, problem, ready, plan, tensors, layers)

    def _load(self, tensors: Sequence[Any], layer: Sequence[Any]) -> None:
        """Replace the values of Q, K and V."""
        self._oracle = Oracle()  # of the values before: its memory goes with it
        for tensor, values in zip(tensors, layer, strict=True):
            if tensor is not values:
                tensor.copy_(values)
        for layout, copies in self._copies.items():
            for copy, tensor in zip(copies, tensors, strict=True):
                if copy is not tensor:
                    peers.bhsd_view(layout, copy).copy_(tensor)

    # -- candidates

    def candidate(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> Candidate:
        """Prepare and check an implementation.

        Raises:
            UnsupportedError, MissingPackageError: it does not support the problem here.
            RefusedError: its output is wrong.
        """
        implementation = self.implementations[name]
        return (
            self._peer(implementation.id, problem, q, k, v)
            if implementation.kind == "peer"
            else self._stage(implementation, problem, q, k, v)
        )

    def _judge(
        self, out: Any, lse: Any, problem: Problem, q: Any, k: Any, v: Any, precision: Precision = "input"
    ) -> Verdict:
        verdict = check(
            self.for_oracle(out),
            None if lse is None else self.for_oracle(lse),
            *(self.for_oracle(x) for x in (q, k, v)),
            **problem.options,
            dtype=problem.dtype,
            precision=precision,
            sample=Sample.of(problem, max_scores=self._checked_scores, seed=self.job["seed"]),
            oracle=self._oracle,
            xp=self.cupy,
        )
        self.cupy.get_default_memory_pool().free_all_blocks()
        if not verdict.passed:
            raise RefusedError("wrong", verdict.reason, verdict=verdict)
        return verdict

    def _stage(self, implementation: Implementation, problem: Problem, q: Any, k: Any, v: Any) -> Candidate:
        stage = implementation.stage
        stage.require(problem, self.info.arch)
        out = self.torch.empty_like(q)
        on = partial(
            prepare,
            **problem.options,
            stage=implementation.id,
            out=out,
            source=implementation.source,
            params=implementation.params,
            may_spill=implementation.may_spill,
        )
        prepared = partial(on, q, k, v)
        if not implementation.judged:
            timed = prepared()
            timed()
            gpu.synchronize(self.device)
            return Candidate(timed, None, lambda: None, {"cubin": _cubin_fields(timed)})
        lse = self.torch.empty(q.shape[:3], dtype=self.torch.float32, device=q.device)
        apart = implementation.lse_of is None
        with_lse = prepared(lse=lse, count_fallbacks=apart)
        timed = prepared() if apart else with_lse

        def judge() -> Verdict:
            out.view(self.torch.int16).fill_(POISON_WORD)
            lse.view(self.torch.int32).fill_(POISON_WORD << 16 | POISON_WORD)
            with_lse()
            gpu.synchronize(self.device)
            verdict = self._judge(out, lse, problem, q, k, v, stage.precision)
            if timed is with_lse:
                return verdict
            # What is timed writes no log-sum-exp, so it is run too: the same bits, into an output poisoned anew.
            first = out.clone()
            out.view(self.torch.int16).fill_(POISON_WORD)
            timed()
            gpu.synchronize(self.device)
            if not self.torch.equal(first.view(self.torch.int16), out.view(self.torch.int16)):
                self._judge(out, None, problem, q, k, v, stage.precision)
            return verdict

        return Candidate(timed, judge(), judge, {"cubin": _cubin_fields(timed)}, with_lse.fallbacks, on)

    def _peer(self, name: str, problem: Problem, q: Any, k: Any, v: Any) -> Candidate:
        peer = peers.get(name)
        memory = self.torch.cuda
        peer.require(
            problem,
            compute_capability=self.info.compute_capability,
            free_bytes=gpu.memory_free_bytes(self.device) + memory.memory_reserved() - memory.memory_allocated(),
        )
        # Some compile for seconds, and none of them asks what the inputs hold.
        shape = replace(problem, inputs=NORMAL)
        if self._peers[0] != shape:
            self._peers = shape, {}
        built = self._peers[1]
        if peer.layout not in self._copies:  # one copy for all of that layout
            self._copies[peer.layout] = peers.in_layout(peer.layout, q, k, v)
        given = self._copies[peer.layout]
        with self.torch.no_grad():
            attend = built[name] = built.get(name) or peer.build(problem)

        def judge() -> Verdict:
            with self.torch.no_grad():
                out = peers.bhsd_view(peer.layout, attend(*given))
                gpu.synchronize(self.device)
                return self._judge(out, None, problem, q, k, v, peer.precision)

        def run() -> None:
            attend(*given)

        verdict = judge()  # Only then has one that tunes itself chosen.
        choice = getattr(attend, "choice", "")
        fields = {"choice": choice, "layout": peer.layout, "lse": peer.wrote_lse(choice)}

        def on(*tensors: Any) -> Run:
            return partial(attend, *peers.in_layout(peer.layout, *tensors))

        return Candidate(run, verdict, judge, fields, on=on)

    # -- times

    def time(
        self,
        cell: int,
        problem: Problem,
        ready: Mapping[str, Candidate],
        plan: Plan,
        tensors: Sequence[Any],
        layers: Sequence[Sequence[Any]],
    ) -> None:
        """Time all ready implementations, interleaved, and send their rows; layers of inputs one after the other."""
        timer = Timer(self._backend, seed=self.job["seed"])
        taken: dict[str, list[Samples]] = {name: [] for name in ready}
        hot: list[Mapping[str, Samples]] = []

        def keep(name: str, samples: Samples, number: int) -> None:
            cycles = cycles_per_score(samples, problem, self.info.sm_count)
            layer = None if self._model is None else number
            taken[name].append(samples.model_copy(update={"cycles_per_score": cycles, "layer": layer}))

        for number, layer in enumerate(layers):
            if number:
                self._load(tensors, layer)
                ready = self._checked_again(cell, number, ready)
            if not ready:
                return
            runs = {name: candidate.run for name, candidate in ready.items()}
            once = {name: run for name, run in runs.items() if name not in self._second}
            with self.torch.no_grad():
                hot.append(self._burst(timer, runs, cell, "hot", plan.samples, plan.min_samples, plan.cap_s))
                bursts = [hot[-1]]
                if plan.cold_samples:
                    bursts.append(self._burst(timer, once, cell, "cold", plan.cold_samples, 3, plan.cap_s / 2))
                calls = {name: [run] for name, run in once.items()}
                if plan.rotates(problem):
                    calls = self._on_copies({name: ready[name] for name in once}, tensors)
                    turned = {name: _in_turn(runs) for name, runs in calls.items()}
                    bursts.append(
                        self._burst(timer, turned, cell, "rotating", plan.samples, plan.min_samples, plan.cap_s)
                    )
                if plan.step_samples and calls:
                    bursts.append(self._steps(timer, cell, calls, tensors[0], plan))
            for burst in bursts:
                for name, samples in burst.items():
                    keep(name, samples, number)
        long = self._sustained_names(problem, ready, plan, hot[0])
        heat_s = min(_HEAT_SECONDS, plan.sustained_seconds * len(layers))
        for name in long:
            for number, layer in enumerate(layers):
                self.step(cell, name, "time, sustained", extra_s=2 * plan.sustained_seconds + heat_s)
                self._load(tensors, layer)
                sustained = partial(timer.sustained, ready[name].run, call_us=hot[number][name].median_us)
                with self.torch.no_grad():
                    if not number and (name == long[0] or len(layers) > 1):
                        sustained(seconds=heat_s)
                    keep(name, sustained(seconds=plan.sustained_seconds), number)
        for name, call in ready.items():
            counted = call.fallbacks()
            fallbacks = {"fallbacks": counted} if counted else {}
            self.row(cell, name, {"verdict": call.verdict, "samples": taken[name], **call.fields, **fallbacks})

    def _on_copies(self, ready: Mapping[str, Candidate], tensors: Sequence[Any]) -> dict[str, list[Run]]:
        """Build calls on several copies of the tensors, each of which L2 has evicted before it is used again."""
        copies = copies_beyond_l2(sum(x.numel() * x.element_size() for x in tensors[1:]), self.info)
        others = [tuple(x.clone() for x in tensors) for _ in range(copies - 1)]
        return {
            name: [candidate.run, *(candidate.on(*other) for other in others)]
            for name, candidate in ready.items()
            if candidate.on is not None
        }

    def _steps(
        self, timer: Timer, cell: int, calls: Mapping[str, Sequence[Run]], q: Any, plan: Plan
    ) -> dict[str, Samples]:
        """Time one call in a CUDA graph, after a kernel that writes q, as the difference to the graph without calls."""
        cuda = self.torch.cuda
        copies = min(map(len, calls.values()))
        count = -(-STEP_CALLS // copies) * copies
        graphs: dict[str, Run] = {}
        for name, runs in {_ALONE: [lambda: None], **calls}.items():
            self.step(cell, name, "capture a CUDA graph")
            with self.attempt(f"{name or 'a step'} in a CUDA graph", survive=True):
                graph = cuda.CUDAGraph()
                with cuda.graph(graph, stream=cuda.current_stream(self.device)):
                    for run in itertools.islice(itertools.cycle(runs), count):
                        q.mul_(1)
                        run()
                graphs[name] = graph.replay
        if _ALONE not in graphs:
            return {}
        taken = self._burst(timer, graphs, cell, "step", plan.step_samples, plan.min_samples, plan.cap_s)
        alone_us = taken.pop(_ALONE).median_us
        return {
            name: samples.model_copy(
                update={"calls": samples.calls * count, "time_us": [(us - alone_us) / count for us in samples.time_us]}
            )
            for name, samples in taken.items()
        }

    def _burst(
        self, timer: Timer, runs: Mapping[str, Run], cell: int, cache: Cache, samples: int, least: int, cap_s: float
    ) -> dict[str, Samples]:
        taken = timer.burst(
            runs,
            cold=cache == "cold",
            samples=samples,
            min_samples=min(least, samples),
            cap_s=cap_s,
            announce=lambda name: self.step(cell, name, f"time, {cache}"),
        )
        return {name: samples.model_copy(update={"cache": cache}) for name, samples in taken.items()}

    def _sustained_names(
        self, problem: Problem, ready: Mapping[str, Candidate], plan: Plan, hot: Mapping[str, Samples]
    ) -> list[str]:
        """Names to time under sustained load, from the slowest to the fastest, without pauses.

        The closest competitors thus run one after the other, on a chip kept warm by the previous one.
        """
        second = self._second
        near_us = _NEAR * min((hot[name].median_us for name in ready if name in second), default=0.0)
        long = [
            name
            for name in ready
            if plan.sustains(problem, second.get(name, name)) and (name not in second or hot[name].median_us <= near_us)
        ]
        return sorted(long, key=lambda name: -hot[name].median_us)

    def _checked_again(self, cell: int, number: int, ready: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """Check again on another layer; keeps the correct ones, each with the verdict closest to its limit.

        Overall errors are over all layers so far, for the same rows of all implementations.
        """

        def judged(name: str) -> Candidate:
            candidate = ready[name]
            try:
                verdict = candidate.judge()
            except RefusedError as refused:
                raise RefusedError(**refused.row | {"reason": f"layer {number}: {refused}"}) from None
            candidate.verdict = _over_layers(candidate.verdict, verdict, number)
            return candidate

        return self._each(cell, list(ready), f"check on layer {number}", judged)


def _in_turn(runs: Sequence[Run]) -> Run:
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _closeness(verdict: Verdict) -> float:
    """Maximum ratio of an error to its limit; 0 without errors."""
    return (verdict.max_abs_error or 0.0) / verdict.max_abs_limit if verdict.max_abs_limit else 0.0


def _over_layers(before: Verdict | None, verdict: Verdict | None, layers: int) -> Verdict | None:
    """The verdict closer to its limit, with overall errors over `layers` earlier layers and this one."""
    if before is None or verdict is None:
        return verdict
    chosen = verdict if _closeness(verdict) > _closeness(before) else before
    errors = [(judged.overall_max_error or 0.0, judged.overall_rms_error or 0.0) for judged in (before, verdict)]
    (largest_before, rms_before), (largest, rms) = errors
    return chosen.model_copy(
        update={
            "overall_max_error": max(largest_before, largest),
            "overall_rms_error": math.sqrt((layers * rms_before**2 + rms**2) / (layers + 1)),
        }
    )


def _cubin_fields(prepared: Prepared) -> CubinFields:
    cubin, shape = prepared.cubin, prepared.launch_shape
    return CubinFields(
        sha256=cubin.sha256,
        arch=cubin.arch,
        compiler=cubin.compiler,
        parameters=cubin.parameters,
        options=cubin.options,
        **asdict(cubin.resources),
        dynamic_smem_bytes=shape.smem_bytes,
        threads=shape.threads,
        tile_q=shape.tile_q,
        blocks_per_sm=prepared.blocks_per_sm(),
        sass=dict(sass.mix(cubin.code, cubin.entry)),
    )


if __name__ == "__main__":
    sys.exit(harness.serve(lambda job, send: BenchWorker(job, send).work()))
