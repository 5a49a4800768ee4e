"""The schema of every kind of record: all fields are declared here.

Every record begins with the same header, `Base`; lines of older versions load.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from statistics import fmean, median
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    WrapSerializer,
    model_validator,
)

from flashlab.core.problem import FEATURES, Cache, DType, Mask, Problem, Regime

SCHEMA_VERSION: Literal[2] = 2
"""Version of new records. Version 1, which is also read, lacks `call_clock_mhz`, `cycles_per_score`, `continuous_s` and
`power_w_mean`."""
STEADY_S = 1.5
"""Shortest sustained load that is shown, in seconds of uninterrupted work. In shorter ones the clock is still changing:
see the page about measuring."""
RUN = r"^[0-9]{8}T[0-9]{6}Z-(?P<commit>[0-9a-f]{7,})(?P<dirty>-dirty)?(-[0-9a-f]{6})?$"
"""Pattern of a run's id: see `run_id`."""

SLUG = r"^[a-z0-9][a-z0-9-]{0,63}$"
"""Pattern of a GPU's folder name."""

Status = Literal["ok", "wrong", "unsupported", "missing", "crashed", "timeout", "error"]
"""ok: checked and timed. wrong: rejected by the checker. unsupported: the problem is not supported. missing: not
installed. crashed, timeout: its worker process crashed or was stopped. error: raised. Only `ok` has samples."""


def _moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _dated(run: str) -> str:
    _moment(run[:16])
    return run


def _readable(text: str) -> str:
    """Without control characters, at most `PROSE_CHARS` long."""
    if text.isprintable():
        return text[:PROSE_CHARS]
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)[:PROSE_CHARS]


PROSE_CHARS = 4000
Label = Annotated[str, StringConstraints(pattern=r"^[\w .,:;'+/=@%^()·×-]*(\[[\w .,:=-]*\])?$", max_length=300)]
"""A name or a version, without characters special to HTML or Markdown links, so that pages show it unescaped."""
Prose = Annotated[str, AfterValidator(_readable)]
"""Arbitrary text: a program's message, a reason or a line of source. Pages escape it by `tables.prose` or `source`."""
Moment = Annotated[str, StringConstraints(pattern=r"^[0-9T:.Z+-]{10,40}$"), AfterValidator(_moment)]
"""ISO 8601."""
Commit = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{7,40}|unknown)$")]
RunId = Annotated[str, StringConstraints(pattern=RUN), AfterValidator(_dated)]
MOST_SAMPLES = 10_000
"""Maximum length of a series of samples; flashlab takes fewer."""
Times = Annotated[tuple[float, ...], Field(max_length=MOST_SAMPLES)]
TENSOR_FLOP_PER_CYCLE: Mapping[tuple[int, int], int] = {(9, 0): 4096}
"""Operations per cycle of one SM's tensor cores, 16-bit in and float32 sums, dense, by compute capability.

Hopper's follows from the data sheet: 989.4 TFLOP/s on 132 SMs at 1830 MHz."""


def _without_what_is_not_asked_for(problem: Problem, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
    fields: dict[str, Any] = dump(problem)
    return {name: value for name, value in fields.items() if name not in FEATURES or name in problem.features}


RecordedProblem = Annotated[Problem, WrapSerializer(_without_what_is_not_asked_for)]
"""A problem that is written without the features that it does not use, as in records that predate them."""


class _Model(BaseModel):
    # JSON has no NaN or infinity; pydantic would write null and the line would not read back. Models are built when
    # they are first used: a first call of `attention` imports all of them and reads one table.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )


class Conditions(_Model):
    """The GPU's state around some samples, from NVML; None for what NVML does not report."""

    sm_clock_mhz_min: float | None
    """Lowest SM clock read, MHz."""
    sm_clock_mhz_max: float | None
    """Highest SM clock read, MHz."""
    power_w_max: float | None
    """Highest power read, W. NVML averages over tens of milliseconds, so bursts read low."""
    power_w_mean: float | None = None
    """Mean power read, W."""
    temperature_c_max: float | None
    """Highest temperature read, °C."""
    throttle_reasons: tuple[Label, ...]
    """All throttle reasons read, by NVML's names, for example `sw_power_cap`."""
    energy_j_per_call: float | None
    """Joules per call, from NVML's energy counter; None for bursts, which are mostly idle gaps."""


class Samples(_Model):
    """Times in one regime and cache state, in the order taken."""

    regime: Regime
    cache: Cache
    calls: int = Field(ge=1)
    """Calls between the two timing events of one sample."""
    time_us: Times = Field(min_length=1)
    """Time of one call, microseconds, one entry per sample."""
    sm_clock_mhz: Times
    """SM clock right after each sample, without its load, from on-chip counters; empty if not measured."""
    call_clock_mhz: Times = ()
    """Mean SM clock over each sample's calls, from on-chip counters; empty if not measured."""
    conditions: Conditions | None = None
    """The GPU's state meanwhile; None if not read."""
    cycles_per_score: float | None = None
    """SM cycles per score: see `cycles_per_score`; None if the clock was not measured."""
    continuous_s: float | None = None
    """Sustained load only: seconds of uninterrupted work, the last part of which was sampled."""
    layer: int | None = Field(default=None, ge=0)
    """With `trained` inputs, the model's layer that Q, K and V come from; None for other inputs."""

    @model_validator(mode="after")
    def _sound(self) -> Samples:
        if min(self.time_us) <= 0:
            raise ValueError("time_us: wanted positive times")
        for name in ("sm_clock_mhz", "call_clock_mhz"):
            if len(getattr(self, name)) not in (0, len(self.time_us)):
                raise ValueError(f"{name}: wanted one entry per sample, or none")
        return self

    @property
    def median_us(self) -> float:
        """Median time of one call, microseconds."""
        return median(self.time_us)

    @property
    def cv_percent(self) -> float:
        """Standard deviation over mean, percent."""
        if len(self.time_us) < 2:
            return 0.0
        mean = fmean(self.time_us)  # statistics.stdev adds fractions, slowly
        return (
            100
            * math.sqrt(math.fsum((time_us - mean) ** 2 for time_us in self.time_us) / (len(self.time_us) - 1))
            / mean
        )


class Verdict(_Model):
    """The checker's verdict; verify/verdict.py has the rule.

    Each error and its limit are those of the band of rows where their ratio is largest. They are None if the output
    could not be compared: wrong shape or type, unwritten or not finite.
    """

    passed: bool
    reason: Prose
    """Empty if passed, else the first failure."""
    max_abs_error: float | None = None
    max_abs_limit: float | None = None
    rms_error: float | None = None
    rms_limit: float | None = None
    lse_error: float | None = None
    """Largest error of the log-sum-exp; None if the implementation returns none."""
    lse_limit: float | None = None
    overall_max_error: float | None = None
    """Largest error of the output over all compared rows, which are the same for everything that a run checks at a
    problem. None in older records."""
    overall_rms_error: float | None = None
    """Root-mean-square error over the same rows."""


class CubinFields(_Model):
    """The launched machine code."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    arch: Label
    compiler: Label
    parameters: dict[Label, int]
    options: tuple[Label, ...]
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    threads: int
    tile_q: int
    """Query rows per block."""
    blocks_per_sm: int | None
    """Resident blocks per SM, from the driver's occupancy calculation."""
    sass: dict[Label, int]
    """Static instruction counts by class; see sass.py."""


class Gpu(_Model):
    """Identity of a GPU."""

    slug: str = Field(pattern=SLUG)
    """Folder name under data/: `nvidia-h200`."""
    name: Label
    compute_capability: tuple[int, int]
    sm_count: int
    max_sm_clock_mhz: float | None
    memory_bytes: int
    l2_bytes: int
    power_limit_w: float | None
    driver: Label
    fingerprint: Label
    """First 12 hex digits of the sha256 of its UUID, which identifies a GPU without publishing the UUID."""

    def tensor_tflops(self, clock_mhz: float | None) -> float | None:
        """Peak of its tensor cores at an SM clock, 16-bit inputs and float32 sums; None if either is unknown."""
        per_cycle = TENSOR_FLOP_PER_CYCLE.get(self.compute_capability)
        return per_cycle * self.sm_count * clock_mhz / 1e6 if per_cycle and clock_mhz else None

    def tensor_percent(self, tflops: float, clock_mhz: float | None) -> float | None:
        """A rate as a percentage of `tensor_tflops`."""
        peak = self.tensor_tflops(clock_mhz)
        return 100 * tflops / peak if peak else None


class Source(_Model):
    """The code that made a record."""

    commit: Commit
    """Full hash, or `unknown`."""
    dirty: bool
    """True if kernels, package or notebooks differed from the commit, or could not be compared with it."""


class Start(_Model):
    """One boot of a machine, which distinguishes runs on separate boots without naming the machine."""

    boot: str = Field(pattern=r"^[0-9a-f]{8}$")
    """First 8 hex digits of the sha256 of the kernel's boot id."""
    at: Moment
    """Boot time of the kernel, UTC, ISO 8601. A machine resumed from an image keeps its boot id, but not this."""
    instance: Label | None = None
    """A cloud's name for the machine type, `p5.48xlarge`; None if not given."""
    usd_per_gpu_hour: float | None = Field(default=None, gt=0)
    """Price of one of its GPUs, US dollars per hour; None if not given."""

    def same_as(self, other: Start) -> bool:
        """Whether both are the same boot: equal boot ids, and times within `_CLOCK_SET_S`."""
        apart = datetime.fromisoformat(self.at) - datetime.fromisoformat(other.at)
        return self.boot == other.boot and abs(apart.total_seconds()) <= _CLOCK_SET_S


_CLOCK_SET_S = 60.0
"""Tolerance of a boot time, in seconds: it is computed from the wall clock, which is adjusted now and then."""


class Base(_Model):
    """The header of every kind of record: time, GPU, boot of the machine, code and software."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    run: RunId
    """Id of the run: UTC start time, commit and, in newer records, a random suffix; see `run_id`."""
    time: Moment
    """UTC time of this record, ISO 8601."""
    gpu: Gpu
    source: Source
    software: dict[Label, Label]
    start: Start | None = None
    """The boot of its machine; None in older records, and if the system does not report it."""


def cycles_per_score(samples: Samples, problem: Problem, sm_count: int) -> float | None:
    """SM cycles per score, from the median sample: SM clock over the calls · SMs · time of a call ÷ scores.

    Scores are those that the softmax sees, batch · q_heads · q_len · kv_len, and under a causal mask those below the
    diagonal, by area (`Problem.visible_scores`). The value does not depend on the clock, so bursts and sustained load
    agree. None if the clock was not measured.
    """
    if not samples.call_clock_mhz:
        return None
    clocks = median(mhz * time_us for mhz, time_us in zip(samples.call_clock_mhz, samples.time_us, strict=True))
    return clocks * sm_count / (problem.batch * problem.q_heads * problem.visible_scores)


class Timed(Base):
    """A run on one problem and its result."""

    problem: RecordedProblem
    status: Status
    reason: Prose
    """Empty if ok, else why there is no time."""
    verdict: Verdict | None
    samples: tuple[Samples, ...]
    cubin: CubinFields | None
    fallbacks: tuple[int, int] | None = None
    """Warp tiles in which a call left the fast path: those whose reference was moved, and those whose scores were
    recomputed. With `trained` inputs, the sum over one call of every layer. None if not counted."""
    trained: dict[Label, JsonValue] | None = None
    """With `trained` inputs, their model: digest of its weights, loss, statistics of each layer's scores."""

    @model_validator(mode="after")
    def _timed_only_when_right(self) -> Self:
        if self.samples and self.status != "ok":
            raise ValueError(f"status {self.status} must have no samples")
        if self.status == "ok" and (self.verdict is None or not self.verdict.passed or not self.samples):
            raise ValueError("status ok needs a passed verdict and samples")
        if (self.status == "ok") == bool(self.reason):
            raise ValueError("reason: wanted one exactly when the status is not ok")
        for samples in self.samples:
            if samples.cycles_per_score is not None:
                wanted = cycles_per_score(samples, self.problem, self.gpu.sm_count)
                if wanted is None or not math.isclose(samples.cycles_per_score, wanted, rel_tol=1e-6):
                    raise ValueError(
                        f"cycles_per_score: wanted {wanted} from clock and times, got {samples.cycles_per_score}"
                    )
        return self

    @property
    def settled(self) -> tuple[Samples, ...]:
        """All samples but those under sustained load for less than `STEADY_S`, all layers together."""
        # Version 1 did not record the duration, which was five seconds.
        long = [STEADY_S if s.continuous_s is None else s.continuous_s for s in self.samples if s.regime == "sustained"]
        if not long or sum(long) >= STEADY_S:
            return self.samples
        return tuple(s for s in self.samples if s.regime != "sustained")

    def samples_of(self, regime: Regime = "burst", cache: Cache = "hot") -> Samples | None:
        """The settled samples in that regime and cache state; None if there are none.

        With `trained` inputs, the median sample of each layer, in the order of layers, so that the median time is the
        median over layers and the largest is that of the worst.
        """
        of_state = [s for s in self.settled if s.regime == regime and s.cache == cache]
        return _over_layers(of_state) if of_state and of_state[0].layer is not None else next(iter(of_state), None)


def _over_layers(of_layers: Sequence[Samples]) -> Samples:
    """Merge the samples of a model's layers: one sample per layer, the layer's median."""
    layers = sorted(of_layers, key=lambda samples: samples.layer or 0)

    def each(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(median(of_layer) for of_layer in values) if all(values) else ()

    return Samples(
        regime=layers[0].regime,
        cache=layers[0].cache,
        calls=layers[0].calls,
        time_us=each([layer.time_us for layer in layers]),
        sm_clock_mhz=each([layer.sm_clock_mhz for layer in layers]),
        call_clock_mhz=each([layer.call_clock_mhz for layer in layers]),
    )


class Measurement(Timed):
    """One stage or peer on one problem."""

    kind: Literal["stage", "peer"]
    name: Label
    """A stage id, or a peer's name."""
    choice: Label = ""
    """The configuration that a self-tuning peer chose, as it names it."""
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Memory order of the dimensions of the timed Q, K and V: batch, heads, sequence, head dim, or sequence before
    heads. Older records all use the first: FlashAttention-3 and -4 got transposed views."""
    lse: bool | None = None
    """Whether the timed call wrote a log-sum-exp. A stage has a second row for it; for a library it is fixed. None if
    unknown, in older records, and for a library without a time."""

    @property
    def with_lse(self) -> bool:
        """Whether it is a stage's second row, which writes the log-sum-exp."""
        return self.kind == "stage" and self.lse is True


class Tuning(Timed):
    """One stage with one choice of its tunables on one problem; status `error` if it does not compile."""

    kind: Literal["tuning"] = "tuning"
    stage: Label
    """A stage id, or the name of a peer timed with the variants."""
    parameters: dict[Label, int]
    """All tunables of the stage and their values; empty for a peer."""


class Ablation(Timed):
    """One level of an ablation: a stage with one tunable changed, the others at their defaults; see axes.toml.

    Or a microarchitectural experiment: the stage's source with or without a patch; see levers.py.
    """

    kind: Literal["ablation"] = "ablation"
    axis: Label
    """Name of the axis; `levers` if the source was changed."""
    level: Label
    """Name of the level or of the patch; `as it is` for the source without the patch."""
    stage: Label
    """A stage id; an axis may include a stage's child."""
    parameters: dict[Label, int]
    """All tunables of the stage and their values."""


class Part(Base):
    """The time of a stage with part of its work left out; its output is wrong by construction and is not checked."""

    kind: Literal["part"] = "part"
    stage: Label
    """A stage id."""
    left_out: Label
    """`nothing`, `qk`, `softmax`, `pv` or `memory`."""
    parameters: dict[Label, int]
    """All tunables of the stage and their values."""
    problem: RecordedProblem
    samples: Samples
    cubin: CubinFields


class Reading(Base):
    """One implementation on one problem by one timer on one kind of input, to validate the method."""

    kind: Literal["reading"] = "reading"
    name: Label
    """A stage id, or a peer's name."""
    problem: RecordedProblem
    timer: Literal["events", "torch-profiler", "cuda-bench"]
    """`events`: CUDA events, flashlab's own. `torch-profiler`: durations of kernels by CUPTI, through torch.profiler.
    `cuda-bench`: NVBench, through its Python package."""
    inputs: Literal["normal", "zeros"]
    """Contents of Q, K and V: random normal numbers, or zeros."""
    samples: Samples
    """With `cuda-bench`, hot-cache samples are means over a batch, and the clock is its own reading."""
    enqueue_us: float | None = None
    """Host time to enqueue one call, microseconds; None if not measured."""


class ModelRun(Base):
    """A language model with random weights, run in transformers with one attention; see experiments/llama.py."""

    kind: Literal["model"] = "model"
    attention: Label
    """`flashlab`, `sdpa`, a library of `flashlab.kernels.peers`, or `nothing`, which returns Q."""
    phase: Literal["prefill", "decode", "decode_graph"]
    """`decode_graph`: a decoding step is captured and replayed as a CUDA graph."""
    batch: int = Field(ge=1)
    """Number of sequences."""
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=0)
    """Tokens decoded after the prompt, one per step; 0 for prefill."""
    time_s: Times = Field(min_length=1)
    """Seconds of each repeat, over all steps, by the host's clock, with the GPU synchronised before and after."""
    logit_error: float | None
    """Largest difference of the last token's logits from SDPA's, over their standard deviation; None for SDPA."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    """Number of weights."""
    dtype: DType
    transformers: Label
    """Version of transformers."""


class PackedRun(Base):
    """Sequences of different lengths, packed or paged, by one implementation; see experiments/packed.py."""

    kind: Literal["packed"] = "packed"
    name: Label
    """A stage id, a library of `flashlab.kernels.peers`, or `padded`: all sequences padded to the longest."""
    distribution: Label
    """Name of the distribution of lengths."""
    lengths: tuple[int, ...] = Field(min_length=1)
    """Number of queries and of keys of each sequence; in decoding, of keys."""
    heads: int = Field(ge=1)
    kv_heads: int | None = None
    """K/V heads in decoding, which has one query row per sequence and a paged cache; None for packed sequences."""
    head_dim: int = Field(ge=1)
    dtype: DType
    mask: Mask
    samples: Samples
    verdict: Verdict | None
    """On the longest sequence; None for `padded` without a mask, whose queries see padding keys."""

    def tflops(self, time_us: float) -> float:
        """TFLOP/s, counting only the scores of the sequences, of a call that takes `time_us` microseconds."""
        if self.kv_heads is not None:
            return 4 * self.heads * sum(self.lengths) * self.head_dim / time_us / 1e6
        shapes = (f"1x{self.heads}x{length}x{self.head_dim}" for length in self.lengths)
        return sum(Problem.parse(shape, mask=self.mask).tflops(time_us) for shape in shapes)

    def gb_per_s(self, time_us: float) -> float:
        """GB/s of keys and values read by a decoding call that takes `time_us` microseconds."""
        assert self.kv_heads is not None
        return 2 * 2 * sum(self.lengths) * self.kv_heads * self.head_dim / time_us / 1e3


class ChipReading(Base):
    """One micro-benchmark of an SM's units on one GPU; the cases are in experiments/chip.toml."""

    kind: Literal["chip"] = "chip"
    name: Label
    """Name of the case."""
    group: Literal["unit", "latency", "wgmma", "issue", "softmax", "overlap", "loop"]
    unit: Literal["ops/clk/SM", "FLOP/clk/SM", "clk", "clk/score"]
    value: float
    """The median of `one_sm`."""
    one_sm: Times = Field(min_length=1)
    """One value per launch of one block on one SM."""
    all_sms: Times = Field(min_length=1)
    """One value per launch of one block on every SM: the median over blocks."""
    beside: Times = ()
    """Throughput per cycle of the block's other warps, one value per launch on one SM; empty if there are none."""
    stamps: Times = ()
    """Cycles since the start at the points that the kernel's file defines; from the last launch on one SM."""
    how: Label
    kernel: Label
    """File in kernels/chip, without its suffix."""
    defines: dict[Label, int]
    repeats: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the machine code."""
    registers: int
    opcodes: dict[Label, int]
    """The case's opcodes and their counts in the machine code."""


class Call(Base):
    """Host time of calls, including launch; see experiments/enqueue.py."""

    kind: Literal["call"] = "call"
    name: Label
    """A peer's name, or the name of a function or operator of flashlab."""
    problem: RecordedProblem
    time_us: Times = Field(min_length=1)
    """Microseconds of one call: one entry per call, or per run of calls if `waits` is False."""
    waits: bool = True
    """Whether the host waits for the end of each call's kernel; else it only enqueues calls, one after the other."""


class Sanitized(Base):
    """Findings of one tool of compute-sanitizer in one stage."""

    tool: Label
    """memcheck, racecheck, initcheck or synccheck."""
    version: Label
    """The tool's version, as it reports it."""
    stage: Label
    """A stage id."""
    launches: int = Field(ge=0)
    """Launches under the tool."""
    errors: int = Field(ge=0)
    """Reports that name its kernel, and failed calls."""
    elsewhere: int = Field(ge=0)
    """Errors in the tool's total that name no stage's kernel; equal for all stages of the process."""
    finished: bool
    """Whether the process and the tool ran to completion."""
    findings: tuple[Prose, ...]
    """First lines of some reports."""

    @property
    def clean(self) -> bool:
        """Whether it was launched, the tool finished, and nothing was found."""
        return self.finished and self.launches > 0 and self.errors == 0 and self.elsewhere == 0


class Ceiling(Base):
    """One measured limit of the GPU."""

    kind: Literal["ceiling"]
    name: Label
    """`copy`, `tensor_float16`, `fp32_fma`, `exp2`, …; see measure/ceilings.py."""
    unit: Label
    """Unit of `value`: `TB/s`, `TFLOP/s`, `Tex2/s`."""
    value: float
    """The value at the median time."""
    samples: Samples
    how: Label
    """The workload."""


Record = Annotated[Measurement | Ceiling, Field(discriminator="kind")]


class Machine(_Model):
    """data/<gpu>/machine.json: the machine of the runs."""

    gpu: Gpu
    host: dict[Label, Label]
    """Processor, cores, memory, operating system; no host name."""


class Aside(_Model):
    """A truncated line, moved out of its file by `flashlab repair`."""

    file: Label
    """`runs/<run>.jsonl`."""
    line: int = Field(ge=1)
    """Line number in that file, from 1."""
    text: Prose
    """Contents of the line."""


class _Counted(_Model):
    """A launch under Nsight Compute."""

    gpu: Label
    """Product name of the GPU."""
    commit: Commit
    """Full commit hash of the launched code, or `unknown`."""
    dirty: bool
    """True if that code differed from the commit."""
    metrics: dict[Label, float]
    """Nsight Compute's metrics by name; the set depends on the GPU and on its version."""


class StageCounters(_Counted):
    """Nsight Compute's counters of one launch of a stage: non-causal, float16, without log-sum-exp."""

    stage: Label
    """A stage id."""
    shape: Label
    """BxHxSxD."""


class PatternCounters(_Counted):
    """Nsight Compute's counters of a single access to shared memory by one warp."""

    pattern: Label
    """Name of the pattern of the lanes' addresses."""
    kernel: Label
    """Name of the access: its instruction and width."""
    offsets: tuple[int, ...] = Field(min_length=32, max_length=32)
    """Byte offset of each lane's address; negative for an inactive lane."""


class LineStalls(_Model):
    """Warp-stall samples of one line of a stage's source, including everything inlined there."""

    file: Label
    """File name without its folder."""
    line: int
    """Line number, from 1."""
    text: Prose
    """The line's text, without its indent."""
    samples: dict[Label, int]
    """Samples by warp state: the stall reason, or `selected`."""

    @property
    def total(self) -> int:
        """Total samples."""
        return sum(self.samples.values())


_SECTOR_BYTES = 32
_OF_ACTIVE = ".avg.pct_of_peak_sustained_active"


def _metric(name: str) -> property:
    """An unconverted metric of Nsight Compute; None if it was not counted."""
    return property(lambda profile: profile.metrics.get(name))


class StageProfile(_Counted):
    """Nsight Compute's profile of one launch of a stage, with cold caches; measure/profile.py lists the metrics."""

    run: RunId
    """Id of the run, which names its file."""
    stage: Label
    """A stage id."""
    problem: RecordedProblem
    parameters: dict[Label, int]
    """All tunables and their values."""
    cubin_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the launched machine code, equal to that of a measurement of the same kernel."""
    tile_q: int
    """Query rows per block."""
    ncu: Label
    """Version of Nsight Compute."""
    samples: dict[Label, int]
    """Samples of the kernel's warps by warp state; empty if none were taken."""
    lines: tuple[LineStalls, ...]
    """The lines with the most samples, in descending order; empty if samples could not be traced to lines."""
    time: Moment
    """UTC time of the record, ISO 8601."""
    device: Gpu | None = None
    """The GPU, as in other records; None in older records."""
    software: dict[Label, Label] = Field(default_factory=dict)
    """Software versions; empty in older records."""
    start: Start | None = None
    """The boot of its machine; None in older records."""

    tensor_percent = _metric(f"sm__pipe_tensor_cycles_active{_OF_ACTIVE}")
    """Cycles in which the tensor pipe was active, percent of the SM's active cycles."""
    exp_percent = _metric(f"sm__inst_executed_pipe_xu{_OF_ACTIVE}")
    """Instructions of the unit for exponentials and conversions, percent of its peak."""
    fma_percent = _metric(f"sm__inst_executed_pipe_fma{_OF_ACTIVE}")
    """Instructions of the FP32 multiply-add pipes, percent of their peak."""
    alu_percent = _metric(f"sm__inst_executed_pipe_alu{_OF_ACTIVE}")
    """Instructions of the pipe for integers, comparisons and maxima, percent of its peak."""
    issue_percent = _metric(f"smsp__issue_active{_OF_ACTIVE}")
    """Issue slots used, percent."""
    warps_percent = _metric(f"sm__warps_active{_OF_ACTIVE}")
    """Achieved occupancy: resident warps, percent of an SM's maximum."""
    shared_wavefronts = _metric("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")
    """Shared-memory wavefronts, summed over SMs: loads, stores, copies and operands of wgmma."""

    def _per(self, name: str, other: str) -> float | None:
        """Quotient of two metrics; None if one is missing or the divisor is 0."""
        below = self.metrics.get(other)
        return self.metrics[name] / below if below and name in self.metrics else None

    @property
    def time_us(self) -> float | None:
        """Duration of the profiled launch, with cold caches; not a measurement of the kernel's speed."""
        time_ns = self.metrics.get("gpu__time_duration.sum")
        return None if time_ns is None else time_ns / 1e3

    @property
    def warps_percent_limit(self) -> float | None:
        """Theoretical occupancy, as limited by registers, shared memory and block size, percent."""
        blocks = [value for name, value in self.metrics.items() if name.startswith("launch__occupancy_limit_")]
        threads, warps = self.metrics.get("launch__block_size"), self.metrics.get("sm__warps_active.avg.peak_sustained")
        return 100 * min(blocks) * math.ceil(threads / 32) / warps if blocks and threads and warps else None

    @property
    def dram_bytes(self) -> float | None:
        """Bytes read from and written to device memory, without those still in L2 when the kernel ends."""
        read, written = (self.metrics.get(f"dram__bytes_{what}.sum") for what in ("read", "write"))
        return None if read is None or written is None else read + written

    @property
    def l2_bytes(self) -> float | None:
        """Bytes that the SMs read from and write to L2."""
        sectors = self.metrics.get("lts__t_sectors_srcunit_tex.sum")
        return None if sectors is None else sectors * _SECTOR_BYTES

    @property
    def conflict_percent(self) -> float | None:
        """Bank conflicts, percent of wavefronts; None if not counted or there are no wavefronts."""
        share = self._per(
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
        )
        return None if share is None else 100 * share

    @property
    def load_sectors(self) -> float | None:
        """32-byte sectors per global load request of a warp; None if threads loaded nothing."""
        return self._per(*(f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("sectors", "requests")))

    @property
    def states(self) -> dict[str, float]:
        """Percent of the warps' time by state, in descending order: the stall reason, or `selected`."""
        total = sum(self.samples.values())
        return {name: 100 * count / total for name, count in sorted(self.samples.items(), key=lambda item: -item[1])}


@lru_cache(maxsize=1024)
def _parsed(shape: str, dtype: DType, mask: Mask) -> Problem:
    """Cached, since a table has many rows per problem and the first call of `attention` reads it."""
    return Problem.parse(shape, dtype=dtype, mask=mask)


class ChoiceRow(_Model):
    """One choice of a stage and its tunables for one problem."""

    stage: Label
    shape: Label
    mask: Mask
    dtype: DType
    parameters: dict[Label, int]
    """All tunables of the stage and their values."""
    time_us: float
    """Median burst time."""
    timed: Cache = "hot"
    """Cache state of that time: the one on record that is closest to a model's calls."""
    tile_q: int
    """Query rows per block."""
    variants: int
    """Number of variants tuned there, interleaved, of which this is the fastest; 0 if the stage was not tuned."""
    run: RunId
    """Its run in data/<gpu>/tuning, or in data/<gpu>/runs if it was not tuned."""

    @cached_property
    def problem(self) -> Problem:
        """The problem, on normal inputs."""
        return _parsed(self.shape, self.dtype, self.mask)

    @model_validator(mode="after")
    def _of_a_problem(self) -> Self:
        assert self.problem
        return self


class Choices(_Model):
    """data/<gpu>/tuned.json: the stage and tunables for each problem; run/choice.py reads it."""

    arch: Label
    sm_count: int
    rows: tuple[ChoiceRow, ...]


class Judged(_Model):
    """An entry of data/<gpu>/verdicts.json: the verdict on a claim. Other fields are for the ledger only."""

    model_config = ConfigDict(extra="allow")

    id: Label
    verdict: Label
    records: tuple[Label, ...]
    reason: Prose


class Withdrawn(_Model):
    """An entry of data/<gpu>/withdrawn.json: timings that did not measure what they state. The records remain, but no
    chart, table or choice uses them."""

    inputs: Annotated[tuple[Label, ...], Field(min_length=1)]
    """Kinds of inputs whose timings are withdrawn."""
    runs: Annotated[tuple[RunId, ...], Field(min_length=1)]
    """Runs whose timings are withdrawn."""
    head_dim: int | None = None
    """The affected head dim; None for all."""
    mask: Mask | None = None
    """The affected mask; None for both."""
    reason: Prose
    """What is wrong, as shown on the site."""

    def takes_back(self, record: object) -> bool:
        """Whether a record is withdrawn."""
        if not isinstance(record, Timed) or record.run not in self.runs:
            return False
        problem = record.problem
        return (
            problem.inputs in self.inputs
            and self.head_dim in (None, problem.head_dim)
            and self.mask in (None, problem.mask)
        )


def run_id(source: Source, start: datetime) -> str:
    """A unique id for a run that starts at `start` (UTC): `20261121T054500Z-0123abc-4f2a91`.

    The suffix is random, since two GPUs may start runs in the same second. Older ids lack it.
    """
    commit = source.commit[:7] if source.commit != "unknown" else "0000000"
    return f"{start:%Y%m%dT%H%M%SZ}-{commit}{'-dirty' if source.dirty else ''}-{secrets.token_hex(3)}"


def to_line(record: BaseModel) -> str:
    """One line of JSON, newline included, `without_home`."""
    return without_home(record.model_dump_json()) + "\n"


def without_home(text: str) -> str:
    """Text with `~` for the home folder, which messages of libraries may name."""
    home = os.path.expanduser("~").rstrip("/")  # noqa: PTH111 - Path.home() may raise
    return text.replace(f"{home}/", "~/") if home.startswith("/") else text


def power_w(samples: Samples | None) -> float | None:
    """Power under sustained load, W: from the energy counter, else NVML's mean; None for bursts.

    A burst is mostly idle gaps, which NVML's averages include.
    """
    conditions = samples.conditions if samples and samples.regime == "sustained" else None
    if samples is None or conditions is None:
        return None
    if conditions.energy_j_per_call is not None:
        return 1e6 * conditions.energy_j_per_call / fmean(samples.time_us)
    return conditions.power_w_mean
