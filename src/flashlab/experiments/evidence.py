"""What the records of a GPU say about each claim: our numbers, their intervals, and where they come from.

An evaluator knows which stage, library or machine code is the comparable one, and nothing of what is claimed: that, and
the rules that hold one against the other, is claims.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import ValidationError

from flashlab.build import compiler, sass
from flashlab.core.errors import CompileError, MissingPackageError, NoDataError, UnknownStageError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA, KERNELS
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import levers
from flashlab.kernels import peers, registry
from flashlab.query import roofline as ceilings
from flashlab.query import select
from flashlab.query.kinship import MODELS, kinship
from flashlab.record import store
from flashlab.record.store import Ablation, Call, Ceiling, Measurement, Part, Samples, StageProfile, Tuning
from flashlab.show import tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Our number for one claimed number."""

    value: float
    low: float
    """Lower end of its 95 % interval; the value itself where it is exact."""
    high: float


# --- Two GPUs ---------------------------------------------------------------------------------------------------------

About = Literal["time", "ratio", "code", "arithmetic", "numbers"]
"""What a claim is about. time: a time, or a rate. ratio: of two times, or of two limits. code: the machine code, or
what it takes of an SM. arithmetic: what follows from the document's own numbers. numbers: what a kernel computes."""

_BANDWIDTH_SHARE = 0.5
"""Of another GPU's device memory: a kernel that needs less of it is not held up by it."""


def concludes(claimed: str, measured: str, about: About, demand_tb_s: float | None = None) -> tuple[bool, str]:
    """Whether a finding on one GPU can judge a claim about another, and what may be concluded, in a sentence.

    Args:
        claimed: the model that the claim is about.
        measured: folder under data/ of the GPU that was measured.
        about: what the claim is about.
        demand_tb_s: bytes that must cross device memory over the time it took, TB/s, where known.
    """
    if about in ("arithmetic", "code", "numbers") or (claimed in MODELS and MODELS[claimed].folder == measured):
        return True, ""
    kin = kinship(claimed, measured)
    carries = kin is not None and kin.time
    if about == "ratio":
        return True, "" if carries else f"The ratio is that of {measured}; an {claimed} has other limits."
    if not carries:
        return False, f"What {measured} reaches does not carry over to an {claimed}."
    sheet = ceilings.DATASHEETS.get(MODELS[claimed].folder)
    same = f"An {claimed} is the same chip but for its memory"
    if demand_tb_s is None or sheet is None:
        return True, f"{same}."
    share = demand_tb_s / sheet.memory_tb_s
    so = "so the time carries over" if share < _BANDWIDTH_SHARE else "so it may be slower there"
    return True, f"{same}, of whose bandwidth this needs {_n(100 * share, 2)} %, {so}."


def shown_without(claimed: str, stage_ids: Sequence[str], gpu: str, data: Path = DATA) -> str:
    """What can be said of stages without the GPU that a claim is about: their machine code for it, and runs on a CPU.

    One sentence, about the last of them that is CUDA C++; empty where there is none.
    """
    arch = MODELS[claimed].arch if claimed in MODELS else None
    known = [stage for stage in map(_known, stage_ids) if stage and stage.language == "cuda" and arch in stage.archs]
    if not known or arch is None:
        return ""
    stage = known[-1]
    try:
        cubin = compiler.compile_stage(stage, head_dim=64, dtype="float16", causal=False, arch=arch)
    except CompileError:
        return ""
    shape, resources = cubin.launch_shape, cubin.resources
    assert shape is not None
    spilled = f"{resources.spill_store_bytes} bytes spilled" if resources.spill_store_bytes else "no spill"
    told = (
        f"Without an {claimed}: `{stage.id}` compiles for {arch} with {resources.registers} registers, "
        f"{_n((shape.smem_bytes + resources.static_smem_bytes) / _KIB)} KB of shared memory and {spilled}"
    )
    try:
        lines = [line for line in select.emulated_checks(gpu, data) if line["stage"] == stage.id and line["emulator"]]
    except NoDataError:
        lines = []
    runs = [line["emulator"] for line in lines if line["emulator"]["status"] != "unsupported"]
    if runs:
        told += f"; run on a CPU, it was right at {sum(one['status'] == 'ok' for one in runs)} of {len(runs)} problems"
    return f"{told}."


def _known(stage_id: str) -> registry.Stage | None:
    try:
        return registry.get(stage_id)
    except UnknownStageError:
        return None


# --- What is on record ------------------------------------------------------------------------------------------------

FIRST = Problem.parse(FIRST_SHAPE)
SINGLE = Problem.parse("1x8x512x64")
PAIR = Problem.parse("2x8x512x64")
BATCH = Problem.parse("32x8x128x64")
LONE = Problem.parse("1x8x128x64")
"""One sequence of `BATCH` by itself."""
LLAMA = Problem.parse("1x32x2048x128")
LLAMA_LAYERS = 32
EXPERT: Mapping[str, int] = {"PADDING": 16}
"""What phase 4.X has otherwise than `06_cp_async`, whose tiles are 64×64 for 8 warps and two buffers too."""
_KIB = 1024


class PendingError(Exception):
    """What would tell is not on record; the message is the command that makes it."""


@dataclass(frozen=True, kw_only=True)
class Found(Generic[T]):
    """A record, and where it lies."""

    record: T
    path: str
    """Relative to data/."""
    line: int

    @property
    def place(self) -> str:
        """`nvidia-h200/runs/….jsonl:12`."""
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the records say about one claim."""

    estimates: tuple[Estimate, ...]
    """One for each claimed number."""
    about: About
    said: str
    """What was measured or computed, for people."""
    beside: str = ""
    """What else is worth saying; empty for nothing."""
    places: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    """Stages and dead ends that it is about."""
    demand_tb_s: float | None = None
    """Bytes that must cross device memory over the time it took, TB/s, of a time."""
    problems: tuple[str, ...] = ()
    """The two problems that the claim compares, where they differ."""


class Evidence:
    """All that is on record of one GPU, on normal inputs, read once, with the line that each record is in."""

    def __init__(self, gpu: str, data: Path = DATA) -> None:
        self.gpu = gpu
        self.data = data

    def _read(self, folder: str, parse: Callable[[str], T]) -> tuple[Found[T], ...]:
        found = []
        for path in sorted((self.data / self.gpu / folder).glob("*.jsonl")):
            name = path.relative_to(self.data).as_posix()
            for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
                try:
                    record = parse(raw.decode("utf-8"))
                except (ValidationError, UnicodeDecodeError):
                    continue  # an empty or damaged line: `flashlab results --verify` names it
                problem = getattr(record, "problem", None)
                if problem is None or problem.inputs == NORMAL:
                    found.append(Found(record=record, path=name, line=number))
        return tuple(found)

    @cached_property
    def _runs(self) -> tuple[Found[Measurement | Ceiling], ...]:
        return self._read("runs", store.parse_line)

    @cached_property
    def measurements(self) -> tuple[Found[Measurement], ...]:
        """Stages, dead ends and libraries, oldest first; no row `with_lse`."""
        return tuple(
            Found(record=one.record, path=one.path, line=one.line)
            for one in self._runs
            if isinstance(one.record, Measurement) and not one.record.with_lse
        )

    @cached_property
    def variants(self) -> tuple[Found[Ablation | Tuning], ...]:
        """Stages with other values of their tunables, oldest first."""
        ablations: tuple[Found[Any], ...] = tuple(
            one for one in self._read("ablations", Ablation.model_validate_json) if one.record.axis != levers.AXIS
        )  # a lever's source is not the stage's
        return (*self._read("tuning", Tuning.model_validate_json), *ablations)

    @cached_property
    def parts(self) -> tuple[Found[Part], ...]:
        """Stages with a part of their work left out, oldest first."""
        return self._read("parts", Part.model_validate_json)

    @cached_property
    def calls(self) -> tuple[Found[Call], ...]:
        """Wall times of single calls, oldest first."""
        return self._read("calls", Call.model_validate_json)

    @cached_property
    def profiles(self) -> tuple[Found[StageProfile], ...]:
        """What Nsight Compute saw, oldest first."""
        return self._read("profiles", StageProfile.model_validate_json)

    def ladder(self, problem: Problem) -> Mapping[str, Found[Measurement]]:
        """The stages of the run that timed most of them at a problem, then the newest, by name.

        Raises:
            PendingError: no run timed any.
        """
        by_run: dict[str, dict[str, Found[Measurement]]] = {}
        for one in self.measurements:
            if _timed(one.record, problem) and one.record.name in registry.RUNGS:
                by_run.setdefault(one.record.run, {})[one.record.name] = one
        if not by_run:
            raise PendingError(f"flashlab bench --shape {problem.shape}")
        return by_run[max(by_run, key=lambda run: (len(by_run[run]), run))]

    def timed(self, problem: Problem, *names: str) -> tuple[Found[Measurement], ...]:
        """Rows of the newest run that timed all of those stages or libraries at a problem: their ratio has a meaning.

        Raises:
            PendingError: no run did.
        """
        by_run: dict[str, dict[str, Found[Measurement]]] = {}
        for one in self.measurements:
            if _timed(one.record, problem) and one.record.name in names:
                by_run.setdefault(one.record.run, {})[one.record.name] = one
        whole = [run for run, rows in by_run.items() if len(rows) == len(set(names))]
        if not whole:
            kinds = {name: name not in peers.PEERS for name in names}
            ids = ",".join(name for name, is_stage in kinds.items() if is_stage) or "none"
            libraries = ",".join(name for name, is_stage in kinds.items() if not is_stage) or "none"
            dtype = "" if problem.dtype == "float16" else f" --dtype {problem.dtype}"
            raise PendingError(f"flashlab bench --shape {problem.shape}{dtype} --stages {ids} --peers {libraries}")
        return tuple(by_run[max(whole)][name] for name in names)

    def ceiling(self, name: str) -> Found[Ceiling]:
        """The newest reading of a limit.

        Raises:
            PendingError: there is none.
        """
        for one in reversed(self._runs):
            if isinstance(one.record, Ceiling) and one.record.name == name:
                return Found(record=one.record, path=one.path, line=one.line)
        raise PendingError("flashlab bench --suite smoke")

    def varied(
        self, stage: str, problem: Problem, *choices: Mapping[str, int], axis: str
    ) -> tuple[Found[Ablation | Tuning], ...]:
        """Rows of a stage with each of those choices, all else its defaults, from the newest run that timed them all.

        Raises:
            PendingError: no run did.
        """
        wanted = [_with(stage, problem, choice) for choice in choices]
        by_run: dict[tuple[str, str], dict[int, Found[Ablation | Tuning]]] = {}
        for one in self.variants:
            if one.record.stage == stage and one.record.status == "ok" and one.record.problem.problem() == problem:
                for index, parameters in enumerate(wanted):
                    if _same(one.record.parameters, parameters):
                        # Levels of one axis took turns; those of two axes did not.
                        turns = one.record.axis if isinstance(one.record, Ablation) else ""
                        by_run.setdefault((one.record.run, turns), {})[index] = one
        whole = [run for run, rows in by_run.items() if len(rows) == len(wanted)]
        if not whole:
            raise PendingError(f"flashlab ablate {axis}")
        return tuple(by_run[max(whole)][index] for index in range(len(wanted)))


def _timed(row: Measurement, problem: Problem) -> bool:
    return row.status == "ok" and row.samples_of() is not None and row.problem.problem() == problem


def _with(stage: str, problem: Problem, choice: Mapping[str, int]) -> dict[str, int]:
    """A stage's defaults with other values; macros that only ablations set need not be tunables."""
    return {**registry.get(stage).parameters(problem.head_dim), **choice}


def _same(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two choices are the same; what only ablations set is 0 where nobody names it."""
    return all(one.get(name, 0) == other.get(name, 0) for name in one.keys() | other.keys())


# --- Intervals --------------------------------------------------------------------------------------------------------

CONFIDENCE = 0.95
RESAMPLES = 4999
_SEED = 0


def interval(statistic: Callable[..., Any], *samples: Sequence[float]) -> Estimate:
    """A statistic of samples and its 95 % interval, by resampling each of them on its own (percentile bootstrap).

    Args:
        statistic: takes arrays and `axis`.
        samples: of each thing that was measured; with one sample alone there is no interval to tell.

    Raises:
        MissingPackageError: SciPy is missing.
    """
    try:
        from scipy.stats import bootstrap
    except ImportError as error:
        raise MissingPackageError(
            f"wanted SciPy for confidence intervals, got: {error}. Install it: pip install 'scipy>=1.15'"
        ) from error
    arrays = tuple(np.asarray(one, dtype=np.float64) for one in samples)
    value = float(statistic(*arrays, axis=-1))
    if any(len(one) < 2 for one in arrays):
        return Estimate(value=value, low=value, high=value)
    found = bootstrap(
        arrays,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return Estimate(value=value, low=min(float(found.low), value), high=max(float(found.high), value))


def _median(times: NDArray[Any], axis: int) -> Any:
    return np.median(times, axis=axis)


def _ratio(slow: NDArray[Any], fast: NDArray[Any], axis: int) -> Any:
    return np.median(slow, axis=axis) / np.median(fast, axis=axis)


def _difference(more: NDArray[Any], less: NDArray[Any], axis: int) -> Any:
    return np.median(more, axis=axis) - np.median(less, axis=axis)


def _share_left_out(whole: NDArray[Any], without: NDArray[Any], axis: int) -> Any:
    return 1 - np.median(without, axis=axis) / np.median(whole, axis=axis)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=factor * estimate.value, low=factor * estimate.low, high=factor * estimate.high)


def exactly(value: float) -> Estimate:
    """A number that has no interval: counted, computed or compiled."""
    return Estimate(value=value, low=value, high=value)


def _times(one: Found[Any]) -> Sequence[float]:
    samples: Samples | None = one.record.samples_of()
    assert samples is not None, "only rows with a time are chosen"
    return samples.time_us


def _rate(one: Found[Any]) -> Estimate:
    """TFLOP/s."""
    problem = one.record.problem.problem()
    time = interval(_median, _times(one))
    return Estimate(value=problem.tflops(time.value), low=problem.tflops(time.high), high=problem.tflops(time.low))


def _demand(one: Found[Any]) -> float:
    """Bytes that must cross device memory over the time of a call, TB/s."""
    samples = one.record.samples_of()
    return float(one.record.problem.problem().compulsory_bytes / samples.median_us / 1e6)


def _n(value: float, digits: int = 3) -> str:
    return tables.number(value, digits)


def _named(*names: str) -> str:
    return " and ".join(f"`{name}`" for name in names)


# --- Evaluators -------------------------------------------------------------------------------------------------------

Evaluator = Callable[[Evidence], Finding]


def _rate_of(
    name: str, problem: Problem = FIRST, *, beside: str = "", beside_dtype: str = "float16", fused: bool = True
) -> Evaluator:
    """The rate of a stage or library; `beside`: another one's, which is named too.

    `fused`: what is not moves its scores through memory, more bytes than the problem makes it move.
    """

    def evaluate(evidence: Evidence) -> Finding:
        (row,) = evidence.timed(problem, name)
        told = ""
        places: tuple[str, ...] = (row.place,)
        if beside:
            other_problem = Problem.parse(problem.shape, dtype=beside_dtype, mask=problem.mask)
            try:
                (other,) = evidence.timed(other_problem, beside)
                kind = "" if beside_dtype == problem.dtype else f" in {beside_dtype}"
                told = f"{_named(beside)}{kind}: {_n(_rate(other).value)} TFLOP/s"
                places = (*places, other.place)
            except PendingError:
                told = ""
        return Finding(
            estimates=(_rate(row),),
            about="time",
            said=f"{_named(name)} at {problem.label}",
            beside=told,
            places=places,
            stages=(name,),
            demand_tb_s=_demand(row) if fused else None,
        )

    return evaluate


def _time_of(name: str, problem: Problem, *, per: float, beside: str = "") -> Evaluator:
    """The time of a call over `per`: sequences of the batch, or a thousand for milliseconds; `beside`: another's."""

    def evaluate(evidence: Evidence) -> Finding:
        (row,) = evidence.timed(problem, name)
        told = ""
        places: tuple[str, ...] = (row.place,)
        if beside:
            one, other = evidence.timed(problem, name, beside)
            ratio = interval(_ratio, _times(other), _times(one))
            median = interval(_median, _times(other)).value / per
            told = f"{_named(beside)} at the same problem: {_n(median)}, that is ×{_n(ratio.value)} its time"
            row, places = one, (one.place, other.place)
        return Finding(
            estimates=(_scaled(interval(_median, _times(row)), 1 / per),),
            about="time",
            said=f"{_named(name)} at {problem.label}",
            beside=told,
            places=places,
            stages=(name,),
            demand_tb_s=_demand(row),
        )

    return evaluate


def _gain_of(slow: str, fast: str, problem: Problem = FIRST, *, beside: tuple[str, str] | None = None) -> Evaluator:
    """How many times faster one stage or library is than another; `beside`: the same of another pair."""

    def evaluate(evidence: Evidence) -> Finding:
        one, other = evidence.timed(problem, slow, fast)
        told = ""
        if beside:
            try:
                pair = evidence.timed(problem, *beside)
                told = f"{_named(beside[1])} over {_named(beside[0])}: ×{_n(_gain_between(*pair).value)}"
            except PendingError:
                told = ""
        return Finding(
            estimates=(_gain_between(one, other),),
            about="ratio",
            said=f"{_named(fast)} over {_named(slow)} at {problem.label}",
            beside=told,
            places=(one.place, other.place),
            stages=(slow, fast),
        )

    return evaluate


def _gain_between(slow: Found[Any], fast: Found[Any]) -> Estimate:
    return interval(_ratio, _times(slow), _times(fast))


def _percent(gain: Estimate) -> Estimate:
    """A factor as a gain in percent."""
    return Estimate(value=100 * (gain.value - 1), low=100 * (gain.low - 1), high=100 * (gain.high - 1))


def _choice(choice: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in choice.items()) or "its defaults"


def _variant_gain(stage: str, slow: Mapping[str, int], fast: Mapping[str, int], *, axis: str) -> Evaluator:
    """How many times faster a stage is with one choice of its tunables than with another."""

    def evaluate(evidence: Evidence) -> Finding:
        one, other = evidence.varied(stage, FIRST, slow, fast, axis=axis)
        return Finding(
            estimates=(_gain_between(one, other),),
            about="ratio",
            said=f"{_named(stage)} with {_choice(fast)} over {_choice(slow)} at {FIRST.label}",
            places=(one.place, other.place),
            stages=(stage,),
        )

    return evaluate


def _fewer_registers(evidence: Evidence) -> Finding:
    """The cap that the claim names, and the other caps beside it."""
    stage, others = "00_naive", (128, 96, 48)
    finding = _variant_gain(stage, {}, {"MAX_REGISTERS": 64}, axis="registers")(evidence)
    try:
        whole, *capped = evidence.varied(stage, FIRST, {}, *({"MAX_REGISTERS": n} for n in others), axis="registers")
    except PendingError:
        return finding
    gains = (f"×{_n(_gain_between(whole, one).value)} at {n}" for n, one in zip(others, capped, strict=True))
    places = (*finding.places, *(one.place for one in capped))
    return replace(finding, beside=f"with other caps: {', '.join(gains)}", places=places)


def _in_percent(evaluate: Evaluator) -> Evaluator:
    """The same, its factors as gains in percent."""

    def evaluated(evidence: Evidence) -> Finding:
        finding = evaluate(evidence)
        return replace(finding, estimates=tuple(_percent(one) for one in finding.estimates))

    return evaluated


def _all_at_once(evidence: Evidence) -> Finding:
    finding = _variant_gain("06_cp_async", {}, EXPERT, axis="padding-wmma")(evidence)
    return replace(
        finding,
        said=(
            f"the configuration that was made at once, `06_cp_async` with {_choice(EXPERT)}, over the one that was "
            f"climbed to, its defaults, at {FIRST.label}"
        ),
        beside="the weeks of work that the document compares cannot be measured, and one side of them is an estimate",
    )


def _variant_rate(stage: str, choice: Mapping[str, int], *, axis: str) -> Evaluator:
    def evaluate(evidence: Evidence) -> Finding:
        (row,) = evidence.varied(stage, FIRST, choice, axis=axis)
        return Finding(
            estimates=(_rate(row),),
            about="time",
            said=f"{_named(stage)} with {_choice(choice)} at {FIRST.label}",
            places=(row.place,),
            stages=(stage,),
            demand_tb_s=_demand(row),
        )

    return evaluate


def _fastest(evidence: Evidence, suits: Callable[[Measurement], bool]) -> Found[Measurement]:
    rows = [one for one in evidence.ladder(FIRST).values() if suits(one.record)]
    if not rows:
        raise PendingError(f"flashlab bench --shape {FIRST.shape}")
    return min(rows, key=lambda one: float(np.median(_times(one))))


def _any(_: Measurement) -> bool:
    return True


def _scalar(row: Measurement) -> bool:
    return row.cubin is not None and row.cubin.sass["tensor"] == 0


def _with_tensor_cores(row: Measurement) -> bool:
    return row.cubin is not None and row.cubin.sass["tensor"] > 0


def _before_hopper(row: Measurement) -> bool:
    stage = registry.RUNGS[row.name]
    return stage.language == "cuda" and stage.max_arch is None


def _best_rate(suits: Callable[[Measurement], bool], what: str) -> Evaluator:
    def evaluate(evidence: Evidence) -> Finding:
        row = _fastest(evidence, suits)
        return Finding(
            estimates=(_rate(row),),
            about="time",
            said=f"{_named(row.record.name)}, {what}, at {FIRST.label}",
            places=(row.place,),
            stages=(row.record.name,),
            demand_tb_s=_demand(row),
        )

    return evaluate


def _tensor_cores(evidence: Evidence) -> Finding:
    slow, fast = _fastest(evidence, _scalar), _fastest(evidence, _with_tensor_cores)
    return Finding(
        estimates=(_gain_between(slow, fast),),
        about="ratio",
        said=(
            f"{_named(fast.record.name)}, the fastest stage, over {_named(slow.record.name)}, the fastest without a "
            f"tensor-core instruction, at {FIRST.label}"
        ),
        places=(slow.place, fast.place),
        stages=(slow.record.name, fast.record.name),
    )


_SM_SMEM_KB = 228
_RESERVED_KB = 1
_SM_REGISTERS = 65536


def _residency(evidence: Evidence) -> Finding:
    size_kb, registers = 41, 102
    blocks = _SM_SMEM_KB // (size_kb + _RESERVED_KB)
    allotted = math.ceil(registers / 8) * 8
    by_registers = _SM_REGISTERS // (allotted * 128)
    return Finding(
        estimates=(exactly(blocks),),
        about="arithmetic",
        said=(
            f"{_SM_SMEM_KB} KB of an SM over {size_kb} KB and the {_RESERVED_KB} KB that the system takes of each block"
        ),
        beside=(
            f"the document's other number, {registers} registers a thread, allows {by_registers} blocks of 128 "
            "threads, so registers would bind first"
        ),
    )


def _llama_latency(evidence: Evidence) -> Finding:
    layer_ms = LLAMA.flops / 450e12 * 1e3
    told = ""
    places: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    try:
        row = min(evidence.ladder(LLAMA).values(), key=lambda one: float(np.median(_times(one))))
        told = f"; measured, `{row.record.name}` takes {_n(np.median(_times(row)) / 1e3)} ms a layer"
        places, names = (row.place,), (row.record.name,)
    except PendingError:
        pass
    return Finding(
        estimates=(exactly(LLAMA_LAYERS * layer_ms),),
        about="arithmetic",
        said=f"{LLAMA_LAYERS} layers of {LLAMA.flops / 1e9:.1f} GFLOP ({LLAMA.label}) at 450 TFLOP/s",
        beside=f"one layer alone takes {_n(layer_ms)} ms, so the claim is the time of about one layer{told}",
        places=places,
        stages=names,
    )


def _production_gap(evidence: Evidence) -> Finding:
    told = ""
    places: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    try:
        slow, fast = evidence.timed(LLAMA, "00_naive", "sdpa")
        told = f"measured at {LLAMA.label}, SDPA is ×{_n(_gain_between(slow, fast).value)} as fast as `00_naive`"
        places, names = (slow.place, fast.place), ("00_naive",)
    except PendingError:
        pass
    return Finding(
        estimates=(exactly(450 / 1.6),),
        about="arithmetic",
        said="450 TFLOP/s over 1.6 TFLOP/s, the rates that the two latencies are made of",
        beside=told or "the slow side was counted for a model and the fast one for a layer",
        places=places,
        stages=names,
    )


def _largest_error(evidence: Evidence) -> Finding:
    """Of every float16 result on record: what was timed, and the newest comparison over hostile lengths."""
    errors = [
        (one.record.verdict.max_abs_error, one.place, f"`{one.record.name}` at {one.record.problem.problem().label}")
        for one in evidence.measurements
        if one.record.name in registry.RUNGS
        and one.record.status == "ok"
        and one.record.problem.dtype == "float16"
        and one.record.verdict is not None
        and one.record.verdict.max_abs_error is not None
    ]
    try:
        path = select.checks_file(evidence.gpu, evidence.data).relative_to(evidence.data).as_posix()
        for number, line in enumerate(select.checks(evidence.gpu, evidence.data), start=1):
            problem = store.ProblemFields.model_validate(line["problem"]).problem()
            if line["status"] == "ok" and problem.dtype == "float16" and line["verdict"]:
                error = line["verdict"]["max_abs_error"]
                errors.append((error or 0.0, f"{path}:{number}", f"`{line['stage']}` at {problem.label}"))
    except NoDataError:
        pass
    if not errors:
        raise PendingError("flashlab bench --suite standard")
    worst, place, label = max(errors)
    within = sum(error <= 2e-3 for error, _, _ in errors)
    return Finding(
        estimates=(exactly(worst),),
        about="numbers",
        said=f"the largest error of {len(errors)} results in float16, {label}",
        beside=f"{within} of them stay within 2e-3, and all within what the checker allows",
        places=(place,),
    )


def _spread(evidence: Evidence) -> Finding:
    """What 19 of 20 rows stay below: the largest of all grows with their number, and a rerun has fewer."""
    found = [
        (samples.cv_percent, one.place, one.record)
        for one in evidence.measurements
        if one.record.name in registry.RUNGS and (samples := one.record.samples_of()) and len(samples.time_us) > 1
    ]
    if not found:
        raise PendingError("flashlab bench --suite standard")
    spreads = [spread for spread, _, _ in found]
    worst, place, row = max(found, key=lambda one: one[0])
    return Finding(
        estimates=(exactly(float(np.percentile(spreads, 95))),),
        about="ratio",
        said=f"what 19 of 20 of {len(found)} rows stay below",
        beside=(
            f"their median is {_n(float(np.median(spreads)))} %; the largest, `{row.name}` at "
            f"{row.problem.problem().label}, {_n(worst)} %"
        ),
        places=(place,),
    )


def _latency_hidden(evidence: Evidence) -> Finding:
    one, two = evidence.varied(
        "06_cp_async", FIRST, {"PIPELINE_STAGES": 1}, {"PIPELINE_STAGES": 2}, axis="buffers-wmma"
    )
    samples, cubin = two.record.samples_of(), two.record.cubin
    assert samples is not None
    assert cubin is not None
    clocks = samples.call_clock_mhz or samples.sm_clock_mhz
    if not clocks or not cubin.blocks_per_sm:
        raise PendingError("flashlab ablate buffers-wmma")
    blocks = FIRST.batch * FIRST.q_heads * math.ceil(FIRST.q_len / cubin.tile_q)
    resident = cubin.blocks_per_sm * two.record.gpu.sm_count
    tiles = blocks / resident * math.ceil(FIRST.kv_len / cubin.parameters["TILE_KV"])
    saved = interval(_difference, _times(one), _times(two))
    return Finding(
        estimates=(_scaled(saved, float(np.median(clocks)) / tiles),),
        about="ratio",
        said=(
            f"what a second buffer takes off `06_cp_async` at {FIRST.label}, over the {tiles:.0f} tiles that a block's "
            "place on an SM sees, one after the other"
        ),
        beside=f"{cubin.blocks_per_sm} blocks an SM hide latency behind one another too",
        places=(one.place, two.place),
        stages=("06_cp_async",),
    )


def _memory_bound(evidence: Evidence) -> Finding:
    copy, tensor = evidence.ceiling("copy"), evidence.ceiling("tensor_float16")
    memory_us = FIRST.compulsory_bytes / copy.record.value / 1e6
    tensor_us = FIRST.flops / tensor.record.value / 1e6
    return Finding(
        estimates=(exactly(memory_us / tensor_us),),
        about="ratio",
        said=(
            f"at {FIRST.label} device memory needs {_n(memory_us)} µs for the {FIRST.compulsory_bytes / 1e6:.0f} MB "
            f"that must cross it, and the tensor cores {_n(tensor_us)} µs"
        ),
        beside=(
            f"with the {ceilings.DATASHEETS[MODELS['H100'].folder].memory_tb_s} TB/s of an H100 that is "
            f"{_n(FIRST.compulsory_bytes / 3.35e6 / tensor_us)}, so the kernel is not memory-bound there either"
        ),
        places=(copy.place, tensor.place),
    )


def _causal_gain(evidence: Evidence) -> Finding:
    stage = "06_cp_async"
    causal = Problem.parse(FIRST_SHAPE, mask="causal")
    runs = {one.record.run for one in evidence.measurements if _timed(one.record, causal)}
    pairs: dict[str, dict[str, tuple[Found[Measurement], Found[Measurement]]]] = {}
    for run in runs:
        rows: dict[str, dict[str, Found[Measurement]]] = {}
        for one in evidence.measurements:
            if one.record.run == run and one.record.name in registry.RUNGS:
                for problem in (FIRST, causal):
                    if _timed(one.record, problem):
                        rows.setdefault(one.record.name, {})[problem.mask] = one
        pairs[run] = {name: (by["full"], by["causal"]) for name, by in rows.items() if len(by) == 2}
    whole = [run for run, found in pairs.items() if stage in found]
    if not whole:
        raise PendingError(f"flashlab bench --shape {FIRST_SHAPE} --stages {stage} --peers none")
    found = pairs[max(whole)]
    others = [_gain_between(*pair).value for pair in found.values()]
    return Finding(
        estimates=(_gain_between(*found[stage]),),
        about="ratio",
        said=f"`{stage}` at {FIRST.label} over the same under a causal mask",
        beside=f"over {len(others)} stages it is ×{_n(min(others))} to ×{_n(max(others))}",
        places=tuple(one.place for one in found[stage]),
        stages=(stage,),
    )


_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
_DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_DURATION_NS = "gpu__time_duration.sum"


def _profile_of(evidence: Evidence, stage: str, *metrics: str) -> Found[StageProfile] | None:
    """The newest profile of a stage at the first shape that has those metrics; None where there is none."""
    for one in reversed(evidence.profiles):
        whole = all(one.record.metrics.get(name) for name in metrics)
        if whole and one.record.stage == stage and one.record.problem.problem() == FIRST:
            return one
    return None


def _profiled(evidence: Evidence) -> Finding:
    fastest = _fastest(evidence, _any).record.name
    found = _profile_of(evidence, fastest, *_DRAM, _DURATION_NS)
    sheet = ceilings.DATASHEETS.get(evidence.gpu)
    tensor = found.record.tensor_percent if found else None
    if found is None or tensor is None or sheet is None:
        raise PendingError(f"flashlab profile {fastest}")
    metrics = found.record.metrics
    tb_s = sum(metrics[name] for name in _DRAM) / metrics[_DURATION_NS] / 1e3
    return Finding(
        estimates=(exactly(tensor), exactly(100 * tb_s / sheet.memory_tb_s)),
        about="ratio",
        said=f"Nsight Compute on `{fastest}` at {FIRST.label}, which moves {_n(tb_s)} TB/s",
        beside="a problem that the tensor cores bound cannot fill device memory as well",
        places=(found.place,),
        stages=(fastest,),
    )


def _coalesced(evidence: Evidence) -> Finding:
    """Time first, which is what waste costs; and the sectors a request, where they were counted."""
    slow, fast = "00_naive", "01_coalesced"
    finding = _gain_of(slow, fast)(evidence)
    before, after = (_profile_of(evidence, name, _SECTORS, _REQUESTS) for name in (slow, fast))
    if before is None or after is None:
        return finding
    sectors = [one.record.metrics[_SECTORS] / one.record.metrics[_REQUESTS] for one in (before, after)]
    return replace(
        finding,
        beside=(
            f"a request to load from global memory takes {_n(sectors[0])} sectors in `{slow}`, whose lanes read the "
            f"same K and V, and {_n(sectors[1])} in `{fast}`"
        ),
        places=(*finding.places, before.place, after.place),
    )


def _built(stage_id: str, arch: str = "sm_90a", overrides: Mapping[str, int] | None = None) -> compiler.Cubin:
    """Machine code at head dim 64, full mask, float16.

    Raises:
        PendingError: no such stage in this checkout, or its code cannot be made here.
    """
    try:
        stage = registry.get(stage_id)
        return compiler.compile_stage(stage, head_dim=64, dtype="float16", causal=False, arch=arch, overrides=overrides)
    except (UnknownStageError, CompileError) as error:
        raise PendingError(f"flashlab compile {stage_id} --arch {arch}") from error


def _source(cubin: compiler.Cubin, stage_id: str) -> str:
    return f"`{registry.get(stage_id).source.name}` for {cubin.arch}"


def _branches(stage_id: str, *, shared: bool = False, beside: str | None = None) -> Evaluator:
    """Branches under a condition in a stage's machine code, and with `shared` its instructions on shared memory."""

    def evaluate(evidence: Evidence) -> Finding:
        cubin = _built(stage_id)
        instructions = sass.disassemble(cubin.code, cubin.entry)
        found = sass.branches(instructions)
        counts = [found.predicated]
        if shared:
            counts.append(sass.shared_memory(instructions))
        every = found.predicated + found.predicated_exits + found.in_subroutines
        told = f"with exits under a condition and the slow paths of divisions and roots it has {every}"
        places: tuple[str, ...] = ()
        if beside:
            try:
                one, other = evidence.timed(FIRST, beside, stage_id)
                told += f"; it is ×{_n(_gain_between(one, other).value)} as fast as `{beside}` at {FIRST.label}"
                places = (one.place, other.place)
            except PendingError as missing:
                told += f"; its time is not on record yet (`{missing}`)"
        return Finding(
            estimates=tuple(exactly(count) for count in counts),
            about="code",
            said=f"{_source(cubin, stage_id)}, jumps under a condition in the kernel's own code",
            beside=told,
            places=places,
            stages=(stage_id,),
        )

    return evaluate


def _expert_resources(evidence: Evidence) -> Finding:
    cubin = _built("06_cp_async", overrides=EXPERT)
    assert cubin.launch_shape is not None
    resources = cubin.resources
    smem_kb = (cubin.launch_shape.smem_bytes + resources.static_smem_bytes) / _KIB
    return Finding(
        estimates=(exactly(resources.registers), exactly(smem_kb), exactly(resources.spill_store_bytes)),
        about="code",
        said=f"{_source(cubin, '06_cp_async')} with {_choice(EXPERT)}, 64×64 tiles and 8 warps",
        stages=("06_cp_async",),
    )


def _dead_end_gap(evidence: Evidence) -> Finding:
    told = ""
    places: tuple[str, ...] = ()
    try:
        slow, fast = evidence.timed(SINGLE, "wmma_no_smem", "sdpa")
        told = f"measured at {SINGLE.label}, SDPA is ×{_n(_gain_between(slow, fast).value)} as fast as that dead end"
        places = (slow.place, fast.place)
    except PendingError as missing:
        told = f"the dead end's time is not on record yet (`{missing}`)"
    return Finding(
        estimates=(exactly(40541 / 24.83),),
        about="arithmetic",
        said="40541 µs over 24.83 µs, the latencies that the document gives",
        beside=told,
        places=places,
        stages=("wmma_no_smem",),
    )


def _single_call(evidence: Evidence) -> Finding:
    calls = [one for one in evidence.calls if one.record.name == "sdpa" and one.record.problem.problem() == SINGLE]
    if not calls:
        raise PendingError("flashlab claims --measure")
    call = calls[-1]
    told = ""
    places: tuple[str, ...] = (call.place,)
    try:
        (row,) = evidence.timed(SINGLE, "sdpa")
        told = f"the kernel itself takes {_n(np.median(_times(row)))} µs, and the rest is the launch and the wait"
        places = (call.place, row.place)
    except PendingError:
        pass
    return Finding(
        estimates=(interval(_median, call.record.time_us),),
        about="time",
        said=f"wall time of a single call of SDPA at {SINGLE.label}",
        beside=told,
        places=places,
    )


def _batched_against_single(evidence: Evidence) -> Finding:
    ours, sdpa = evidence.timed(BATCH, "t0_triton", "sdpa")
    lone, _ = evidence.timed(LONE, "t0_triton", "sdpa")
    a_sequence = _scaled(interval(_median, _times(ours)), 1 / BATCH.batch)
    alone = interval(_median, _times(lone)).value
    same = _gain_between(sdpa, ours)
    return Finding(
        estimates=(
            Estimate(value=5 / a_sequence.value, low=5 / a_sequence.high, high=5 / a_sequence.low),
            same,
        ),
        about="ratio",
        said=f"5 µs over the time of a sequence in `t0_triton`, and the time of SDPA over its, both at {BATCH.label}",
        beside=(
            f"the 33 come from setting a share of a batch of {BATCH.batch} against a whole call, of another shape: in "
            f"`t0_triton` a sequence of {BATCH.q_len} takes {_n(a_sequence.value)} µs of the batch's time and "
            f"{_n(alone)} µs by itself, ×{_n(alone / a_sequence.value)}"
        ),
        places=(ours.place, sdpa.place, lone.place),
        stages=("t0_triton",),
        problems=(f"{BATCH.sizes}, a sequence", SINGLE.sizes),
    )


def _empty_launch(evidence: Evidence) -> Finding:
    launch = evidence.ceiling("launch")
    return Finding(
        estimates=(interval(_median, launch.record.samples.time_us),),
        about="time",
        said="an empty kernel, one behind the other",
        places=(launch.place,),
    )


SHARED_LIMIT_KB: Mapping[str, int] = {"sm_89": 99}
"""Shared memory that a block may have once it asks for it: CUDA C++ Programming Guide, technical specifications per
compute capability."""
_DEFAULT_LIMIT_KB = 48


def _rows_that_fit(evidence: Evidence) -> Finding:
    arch = "sm_89"
    cubin = _built("06_cp_async", arch)
    assert cubin.launch_shape is not None
    used = (cubin.launch_shape.smem_bytes + cubin.resources.static_smem_bytes) / _KIB
    more = "more" if used > _DEFAULT_LIMIT_KB else "no more"
    return Finding(
        estimates=(exactly(SHARED_LIMIT_KB[arch]),),
        about="code",
        said=f"the limit of {arch} for a block that asks for it; {_DEFAULT_LIMIT_KB} KB is what it gets unasked",
        beside=(
            f"{_source(cubin, '06_cp_async')} has tiles of {cubin.launch_shape.tile_q} rows and takes {_n(used)} KB, "
            f"{more} than {_DEFAULT_LIMIT_KB}"
        ),
        stages=("06_cp_async",),
    )


def _wrong_partition(evidence: Evidence) -> Finding:
    """What the defect reads differs from run to run: an error, or no number at all, and then how many of those."""
    name = "tile48"
    for one in reversed(evidence.measurements):
        verdict = one.record.verdict
        if one.record.name != name or verdict is None:
            continue
        none = re.match(r"NaN in output: (\d+) of (\d+) elements", verdict.reason)
        if verdict.max_abs_error is not None and verdict.max_abs_limit:
            value = verdict.max_abs_error / verdict.max_abs_limit
            said = f"largest error {verdict.max_abs_error:.3g} where the checker allows {verdict.max_abs_limit:.2g}"
        elif none:
            value = float(none[1])
            said = f"{none[1]} of {none[2]} elements are NaN, so that there is no largest error"
        else:
            continue
        return Finding(
            estimates=(exactly(value),),
            about="numbers",
            said=f"`{name}` at {one.record.problem.problem().label}: {said}",
            places=(one.place,),
            stages=(name,),
        )
    raise PendingError(f"flashlab bench --shape {PAIR.shape} --stages {name} --peers none")


def _neither_roof(evidence: Evidence) -> Finding:
    sheet = ceilings.DATASHEETS[MODELS["L4"].folder]
    time_us = 318.4
    memory = 100 * PAIR.compulsory_bytes / time_us / 1e6 / sheet.memory_tb_s
    compute = 100 * PAIR.tflops(time_us) / sheet.tensor_tflops
    told = ""
    places: tuple[str, ...] = ()
    try:
        (row,) = evidence.timed(PAIR, "05_wmma")
        here = ceilings.DATASHEETS.get(evidence.gpu)
        if here:
            told = (
                f"; `05_wmma` on {evidence.gpu}: {_n(100 * _demand(row) / here.memory_tb_s)} % and "
                f"{_n(100 * _rate(row).value / here.tensor_tflops)} %"
            )
            places = (row.place,)
    except PendingError:
        pass
    return Finding(
        estimates=(exactly(memory), exactly(compute)),
        about="arithmetic",
        said=(
            f"{PAIR.label} in {time_us:.1f} µs on an L4: {PAIR.compulsory_bytes / 1e6:.1f} MB must cross device "
            f"memory, and {PAIR.flops / 1e9:.2f} GFLOP are done"
        ),
        beside=f"they stay in an L4's 48 MB of L2, and the kernel is far from both roofs{told}",
        places=places,
        stages=("05_wmma",),
    )


def _amdahl(evidence: Evidence) -> Finding:
    share, factor = 0.2, 8.0
    return Finding(
        estimates=(exactly(1 / (1 - share + share / factor)),),
        about="arithmetic",
        said=f"1 / (1 − {share} + {share} / {factor:.0f})",
        beside=(
            f"the document's 1 + {share}·({factor:.0f} − 1) is {1 + share * (factor - 1):.1f}, not 1.4, and no form of "
            f"the law; to gain 1.58 the part must have been {100 * (1 - 1 / 1.58) / (1 - 1 / factor):.0f} % of the time"
        ),
    )


_PARTS = ("qk", "softmax", "pv", "memory")


def _time_split(evidence: Evidence) -> Finding:
    stage = "04_wmma_qk"
    by_run: dict[tuple[str, Problem], dict[str, Found[Part]]] = {}
    for one in evidence.parts:
        if one.record.stage == stage and one.record.problem.head_dim == SINGLE.head_dim:
            by_run.setdefault((one.record.run, one.record.problem.problem()), {})[one.record.left_out] = one
    whole = {key: rows for key, rows in by_run.items() if {"nothing", *_PARTS} <= rows.keys()}
    if not whole:
        raise PendingError(f"flashlab split {stage}")
    # The document's shape where it was measured.
    key = max(whole, key=lambda found: (found[1] == SINGLE, found[1] == FIRST, found[0]))
    rows = whole[key]
    shares = tuple(
        _scaled(
            interval(_share_left_out, rows["nothing"].record.samples.time_us, rows[part].record.samples.time_us), 100
        )
        for part in _PARTS
    )
    rest = 100 - sum(share.value for share in shares)
    return Finding(
        estimates=shares,
        about="ratio",
        said=f"`{stage}` at {key[1].label}, one part left out at a time ({', '.join(_PARTS)})",
        beside=f"{_n(rest)} % is in no part alone" if rest > 0 else f"the parts overlap by {_n(-rest)} %",
        places=tuple(rows[part].place for part in ("nothing", *_PARTS)),
        stages=(stage,),
    )


def _further_gains(evidence: Evidence) -> Finding:
    pairs = [
        evidence.timed(SINGLE, *pair)
        for pair in (("04_wmma_qk", "05_wmma"), ("05_wmma", "06_cp_async"), ("11_pingpong", "12_persistent"))
    ]
    pairs.append(
        evidence.varied("09_wgmma", FIRST, {}, {"DESCENDING": 1}, axis="order-wgmma")  # type: ignore[arg-type]
    )
    return Finding(
        estimates=tuple(_percent(_gain_between(*pair)) for pair in pairs),
        about="ratio",
        said=(
            f"at {SINGLE.label} `05_wmma` over `04_wmma_qk`, `06_cp_async` over `05_wmma`, `12_persistent` over "
            f"`11_pingpong`; and keys in the other order, for L2, in `09_wgmma` at {FIRST.label}"
        ),
        places=tuple(one.place for pair in pairs for one in pair),
        stages=("05_wmma", "06_cp_async", "12_persistent"),
    )


def _sdpa_and_efficient(evidence: Evidence) -> Finding:
    sdpa, efficient = evidence.timed(SINGLE, "sdpa", "sdpa_efficient")
    return Finding(
        estimates=(interval(_median, _times(sdpa)), interval(_median, _times(efficient))),
        about="time",
        said=f"SDPA, and its memory-efficient kernel, which came from xFormers, at {SINGLE.label}",
        places=(sdpa.place, efficient.place),
        demand_tb_s=_demand(sdpa),
    )


def _wmma_saturates(evidence: Evidence) -> Finding:
    reading = evidence.ceiling("mma_sync_float16")
    share = ceilings.percent_of_peak(evidence.gpu, reading.record.name, reading.record.value)
    if share is None:
        raise PendingError(f"a data sheet of {evidence.gpu} in query/datasheets.toml")
    cubin = compiler.compile_file(
        KERNELS / "micro" / "tensor.cu",
        entry="micro_tensor",
        arch="sm_89",
        defines={"CHAINS": 1, "UNROLL": 1, "ELEMENT": "__half"},
    )
    opcodes = {i.opcode for i in sass.disassemble(cubin.code, cubin.entry) if sass.classify(i) == "tensor"}
    return Finding(
        estimates=(exactly(share),),
        about="time",
        said=f"independent 16×16×16 products on {evidence.gpu}: {_n(reading.record.value)} TFLOP/s",
        beside=f"for sm_89 such a product is made of {', '.join(sorted(opcodes))}, the largest that an L4 has",
        places=(reading.place,),
    )


def _simulated_fp8(evidence: Evidence) -> Finding:
    name = "fp8_simulated"
    rows = [
        one
        for one in evidence.measurements
        if one.record.name == name and one.record.verdict and one.record.verdict.max_abs_error is not None
    ]
    if not rows:
        raise PendingError(f"flashlab bench --shape {SINGLE.shape} --stages {name} --peers none")
    row = max(rows, key=lambda one: (one.record.problem.problem() == SINGLE, one.record.run))
    problem, verdict = row.record.problem.problem(), row.record.verdict
    assert verdict is not None
    assert verdict.max_abs_error is not None
    told = f"the checker said: {row.record.reason}"
    places: tuple[str, ...] = (row.place,)
    if row.record.status == "ok":
        told = "the error against attention on the rounded inputs is not on record"
        parent = registry.get(name).parent
        try:
            (other,) = evidence.timed(problem, parent) if parent else ()
        except (PendingError, ValueError):
            other = None
        if other and other.record.verdict and other.record.verdict.max_abs_error is not None:
            told += f"; `{parent}`, which is the same without FP8, has {_n(other.record.verdict.max_abs_error)}"
            places = (*places, other.place)
    return Finding(
        estimates=(exactly(verdict.max_abs_error),),
        about="numbers",
        said=f"largest error of `{name}` at {problem.label} against attention in float64 on the inputs as they came",
        beside=told,
        places=places,
        stages=(name,),
    )


EVALUATORS: Mapping[str, Evaluator] = {
    "A01": _rate_of("00_naive"),
    "A02": _rate_of("t0_triton"),
    "A03": _rate_of("sdpa", beside="fa3", beside_dtype="bfloat16"),
    "A04": _tensor_cores,
    "A05": _fewer_registers,
    "A06": _residency,
    "A07": _coalesced,
    "A08": _gain_of("03_warp_rows", "05_wmma"),
    "A09": _gain_of("02_half2", "03_warp_rows", beside=("00_naive", "01_coalesced")),
    "A10": _gain_of("00_naive", "01_coalesced"),
    "A11": _best_rate(_before_hopper, "the fastest stage without a Hopper instruction"),
    "A12": _rate_of("09_wgmma"),
    "A13": _best_rate(_any, "the fastest stage"),
    "A14": _llama_latency,
    "A15": _production_gap,
    "A16": _largest_error,
    "A17": _spread,
    "A18": _gain_of("00_naive", "t0_triton"),
    "B01": _rate_of("00_naive"),
    "B02": _rate_of("04_wmma_qk"),
    "B03": _rate_of("cublaslt_unfused", beside="cublaslt_batched", fused=False),
    "B04": _rate_of("split_k", beside="cublaslt_unfused", fused=False),
    "B05": _rate_of("05_wmma", beside="00_naive"),
    "B06": _variant_rate("06_cp_async", EXPERT, axis="padding-wmma"),
    "B07": _in_percent(
        _variant_gain("06_cp_async", {"TILE_Q": 32, "TILE_KV": 32, "WARPS": 4}, {"WARPS": 4}, axis="tile")
    ),
    "B08": _in_percent(_variant_gain("06_cp_async", {"REDUCTION": 2}, {}, axis="reduction")),
    "B09": _in_percent(_variant_gain("06_cp_async", {"WARPS": 4}, {}, axis="warps")),
    "B10": _variant_gain("06_cp_async", {}, EXPERT, axis="padding-wmma"),
    "B11": _expert_resources,
    "B12": _latency_hidden,
    "B13": _all_at_once,
    "B14": _gain_of("06_cp_async", "09_wgmma", beside=("08_swizzle", "09_wgmma")),
    "B15": _variant_gain("09_wgmma", {"FEED": 1}, {}, axis="feed"),
    "B16": _memory_bound,
    "B17": _best_rate(_any, "the fastest stage"),
    "B18": _causal_gain,
    "B19": _rate_of("fa3", Problem.parse(FIRST_SHAPE, dtype="bfloat16")),
    "B20": _profiled,
    "C01": _branches("00_naive"),
    "C02": _branches("branch_free", beside="00_naive"),
    "C03": _branches("wmma_no_smem", shared=True),
    "C04": _time_of("wmma_no_smem", SINGLE, per=1),
    "C05": _dead_end_gap,
    "C06": _single_call,
    "C07": _time_of("t0_triton", BATCH, per=BATCH.batch, beside="sdpa"),
    "C08": _time_of("t0_triton", BATCH, per=BATCH.batch),
    "C09": _batched_against_single,
    "C10": _empty_launch,
    "D01": _time_of("02_half2", PAIR, per=1e3),
    "D02": _time_of("05_wmma", PAIR, per=1e3, beside="02_half2"),
    "D03": _time_of("sdpa", PAIR, per=1e3),
    "D04": _rows_that_fit,
    "D05": _wrong_partition,
    "D06": _neither_roof,
    "D07": _amdahl,
    "D08": _gain_of("03_warp_rows", "05_wmma", PAIR),
    "E01": _gain_of("00_naive", "04_wmma_qk", SINGLE),
    "E02": _gain_of("00_naive", "01_coalesced", SINGLE),
    "E03": _gain_of("01_coalesced", "02_half2", SINGLE),
    "E04": _gain_of("03_warp_rows", "04_wmma_qk", SINGLE),
    "E05": _time_split,
    "E06": _further_gains,
    "E07": _sdpa_and_efficient,
    "E08": _wmma_saturates,
    "E09": _simulated_fp8,
}
"""What speaks to each claim: which stage, library or machine code is the comparable one."""
