"""The schema: what one line of each kind of record holds. Every field is declared here, and nowhere else.

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
"""What is written. Version 1, which is read as well, lacks `call_clock_mhz`, `cycles_per_score`, `continuous_s` and
`power_w_mean`."""
RUN = r"^[0-9]{8}T[0-9]{6}Z-(?P<commit>[0-9a-f]{7,})(?P<dirty>-dirty)?(-[0-9a-f]{6})?$"
"""A run's name: see `run_id`."""

SLUG = r"^[a-z0-9][a-z0-9-]{0,63}$"
"""The name of a GPU's folder."""

Status = Literal["ok", "wrong", "unsupported", "missing", "crashed", "timeout", "error"]
"""ok: checked and timed. wrong: the oracle rejected it. unsupported: cannot do this problem. missing: not installed.
crashed, timeout: took its worker process down or had to be stopped. error: raised an error. Only `ok` has samples."""


def _moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


def _dated(run: str) -> str:
    _moment(run[:16])
    return run


def _readable(text: str) -> str:
    """Without control characters, and not longer than a page wants it."""
    if text.isprintable():
        return text[:PROSE_CHARS]
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)[:PROSE_CHARS]


PROSE_CHARS = 4000
Label = Annotated[str, StringConstraints(pattern=r"^[\w .,:;'+/=@%^()·×-]*(\[[\w .,:=-]*\])?$", max_length=300)]
"""A name or a version: no character of it is HTML's or starts a link in Markdown, so that pages show it as it is."""
Prose = Annotated[str, AfterValidator(_readable)]
"""What a program said, a reason or a line of source: anything. A page shows it through `tables.prose` or `source`."""
Moment = Annotated[str, StringConstraints(pattern=r"^[0-9T:.Z+-]{10,40}$"), AfterValidator(_moment)]
"""ISO 8601."""
Commit = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{7,40}|unknown)$")]
RunId = Annotated[str, StringConstraints(pattern=RUN), AfterValidator(_dated)]
MOST_SAMPLES = 10_000
"""Of a series of samples; one that has more was not taken by flashlab."""
Times = Annotated[tuple[float, ...], Field(max_length=MOST_SAMPLES)]
TENSOR_FLOP_PER_CYCLE: Mapping[tuple[int, int], int] = {(9, 0): 4096}
"""Operations per cycle of one SM's tensor cores, 16-bit in and float32 sums, dense, by compute capability.

Hopper's follows from the data sheet: 989.4 TFLOP/s on 132 SMs at 1830 MHz."""


def _without_what_is_not_asked_for(problem: Problem, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
    fields: dict[str, Any] = dump(problem)
    return {name: value for name, value in fields.items() if name not in FEATURES or name in problem.features}


RecordedProblem = Annotated[Problem, WrapSerializer(_without_what_is_not_asked_for)]
"""A problem that names a feature only where it asks for it, as records did before there were any."""


class _Model(BaseModel):
    # JSON has no NaN or infinity; pydantic would write null and the line would not read back. Models are built when
    # they are first used: a first call of `attention` imports all of them and reads one table.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )


class Conditions(_Model):
    """The GPU's state around some samples, from NVML; None where it does not say."""

    sm_clock_mhz_min: float | None
    """Lowest SM clock seen, MHz."""
    sm_clock_mhz_max: float | None
    """Highest SM clock seen, MHz."""
    power_w_max: float | None
    """Highest power seen, W. NVML averages over tens of milliseconds, so bursts read low."""
    power_w_mean: float | None = None
    """Mean of the powers seen, W."""
    temperature_c_max: float | None
    """Highest temperature seen, °C."""
    throttle_reasons: tuple[Label, ...]
    """NVML's names of every reason seen for holding the clock back, for example `sw_power_cap`."""
    energy_j_per_call: float | None
    """Joules a call from NVML's energy counter; None for bursts, which are mostly gaps."""


class Samples(_Model):
    """Times of one regime and cache state, in the order they were taken."""

    regime: Regime
    cache: Cache
    calls: int = Field(ge=1)
    """Calls between the two timing events of one sample."""
    time_us: Times = Field(min_length=1)
    """Time of one call, microseconds, one entry a sample."""
    sm_clock_mhz: Times
    """SM clock right after each sample, without its load, from on-chip counters; empty where it was not measured."""
    call_clock_mhz: Times = ()
    """Mean SM clock over each sample's calls, from on-chip counters; empty where it was not measured."""
    conditions: Conditions | None = None
    """The GPU's state while they were taken; None where it was not read."""
    cycles_per_score: float | None = None
    """SM cycles per score: see `cycles_per_score`; None where the clock was not measured."""
    continuous_s: float | None = None
    """Sustained alone: seconds of uninterrupted work, of which the samples are the later part."""
    layer: int | None = Field(default=None, ge=0)
    """Of `trained` inputs, the layer of the model whose Q, K and V they are on; None of every other kind."""

    @model_validator(mode="after")
    def _sound(self) -> Samples:
        if min(self.time_us) <= 0:
            raise ValueError("time_us: wanted positive times")
        for name in ("sm_clock_mhz", "call_clock_mhz"):
            if len(getattr(self, name)) not in (0, len(self.time_us)):
                raise ValueError(f"{name}: wanted one entry a sample, or none")
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
    """What the checker says; verify/verdict.py has the rule.

    Each error stands beside the limit of the same band of rows: the one where it came closest to its limit, or passed
    it by most. They are None where the output could not be compared: wrong shape or type, unwritten or not finite.
    """

    passed: bool
    reason: Prose
    """Empty when passed, else the first thing wrong."""
    max_abs_error: float | None = None
    max_abs_limit: float | None = None
    rms_error: float | None = None
    rms_limit: float | None = None
    lse_error: float | None = None
    """Largest error of the log-sum-exp; None where the implementation gives none."""
    lse_limit: float | None = None
    overall_max_error: float | None = None
    """Largest error of the output over all rows that were compared, the same of all that a run checks at a problem; the
    errors above are those of the band of rows that came closest to its limit. None in older records."""
    overall_rms_error: float | None = None
    """Root-mean-square error over the same rows."""


class CubinFields(_Model):
    """The machine code that was launched."""

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
    """Query rows a block."""
    blocks_per_sm: int | None
    """Blocks resident on an SM, from the driver's occupancy calculation."""
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
    """First 12 hex digits of the sha256 of its UUID: tells two GPUs apart without publishing the UUID."""

    def tensor_tflops(self, clock_mhz: float | None) -> float | None:
        """What its tensor cores can do at an SM clock, 16-bit in and float32 sums; None where either is not known."""
        per_cycle = TENSOR_FLOP_PER_CYCLE.get(self.compute_capability)
        return per_cycle * self.sm_count * clock_mhz / 1e6 if per_cycle and clock_mhz else None

    def tensor_percent(self, tflops: float, clock_mhz: float | None) -> float | None:
        """A rate, percent of `tensor_tflops`."""
        peak = self.tensor_tflops(clock_mhz)
        return 100 * tflops / peak if peak else None


class Source(_Model):
    """Which code made a record."""

    commit: Commit
    """Full hash, or `unknown`."""
    dirty: bool
    """True when kernels, package or notebooks differed from the commit, or could not be compared with it."""


class Start(_Model):
    """One start of a machine: tells runs on separate starts apart without naming the machine."""

    boot: str = Field(pattern=r"^[0-9a-f]{8}$")
    """First 8 hex digits of the sha256 of the kernel's boot id."""
    at: Moment
    """When the kernel started, UTC, ISO 8601. A machine resumed from an image keeps its boot id, but not this."""
    instance: Label | None = None
    """What a cloud calls a machine of this kind, `p5.48xlarge`; None where nobody said."""
    usd_per_gpu_hour: float | None = Field(default=None, gt=0)
    """Price of one of its GPUs, US dollars an hour; None where nobody said."""

    def same_as(self, other: Start) -> bool:
        """Whether both are the same start: one boot id, and times that differ by no more than clocks are set by."""
        apart = datetime.fromisoformat(self.at) - datetime.fromisoformat(other.at)
        return self.boot == other.boot and abs(apart.total_seconds()) <= _CLOCK_SET_S


_CLOCK_SET_S = 60.0
"""A kernel reckons its start from the clock of the day, which is set now and then."""


class Base(_Model):
    """The header of every kind of record: when, on which GPU and start of a machine, by which code and software."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    run: RunId
    """UTC start time, commit and a random part that older ones lack: see `run_id`."""
    time: Moment
    """UTC time of this record, ISO 8601."""
    gpu: Gpu
    source: Source
    software: dict[Label, Label]
    start: Start | None = None
    """The start of the machine it was made on; None in older records, and where the system does not say."""


def cycles_per_score(samples: Samples, problem: Problem, sm_count: int) -> float | None:
    """SM cycles per score, from the median sample: SM clock over the calls · SMs · time of a call ÷ scores.

    Scores are what the softmax sees, batch · q_heads · q_len · kv_len, and under a causal mask those below the
    diagonal, by area (`Problem.visible_scores`). It does not depend on the clock, so it says the same in a burst and
    under sustained load. None where the clock was not measured.
    """
    if not samples.call_clock_mhz:
        return None
    clocks = median(mhz * time_us for mhz, time_us in zip(samples.call_clock_mhz, samples.time_us, strict=True))
    return clocks * sm_count / (problem.batch * problem.q_heads * problem.visible_scores)


class Timed(Base):
    """What was run on one problem, and what came of it."""

    problem: RecordedProblem
    status: Status
    reason: Prose
    """Empty when ok, else why there is no time."""
    verdict: Verdict | None
    samples: tuple[Samples, ...]
    cubin: CubinFields | None
    fallbacks: tuple[int, int] | None = None
    """How often the kernel left its fast path in a call, in tiles of a warp: whose reference was moved, and whose
    scores were computed again. Of `trained` inputs, in a call of every layer. None where nobody counted."""
    trained: dict[Label, JsonValue] | None = None
    """Of `trained` inputs, the model that made them: digest of its weights, loss, statistics of each layer's scores."""

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

    def samples_of(self, regime: Regime = "burst", cache: Cache = "hot") -> Samples | None:
        """The samples of that regime and cache state; None where none were taken.

        Of `trained` inputs, the median sample of each layer, in the order of layers: the median time is the median over
        layers, and the largest is that of the worst.
        """
        of_state = [s for s in self.samples if s.regime == regime and s.cache == cache]
        return _over_layers(of_state) if of_state and of_state[0].layer is not None else next(iter(of_state), None)


def _over_layers(of_layers: Sequence[Samples]) -> Samples:
    """Samples of the layers of a model as one, a sample a layer: the median of that layer's."""
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
    """What a peer chose that tunes itself, in its own words."""
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Order in memory of the dimensions of Q, K and V that were timed: batch, heads, sequence, head dim, or sequence
    before heads. Older records are all of the first: FlashAttention-3 and -4 had transposed views."""
    lse: bool | None = None
    """Whether what was timed wrote a log-sum-exp. A stage has a second row for that; a library writes what it writes.
    None where it is not known, in older records, and where nothing was timed of a library."""

    @property
    def with_lse(self) -> bool:
        """Whether it is a stage's second row, with the log-sum-exp on."""
        return self.kind == "stage" and self.lse is True


class Tuning(Timed):
    """One stage with one choice of its tunables on one problem; status `error` where it does not compile."""

    kind: Literal["tuning"] = "tuning"
    stage: Label
    """A stage id, or the name of a peer that was timed beside the variants."""
    parameters: dict[Label, int]
    """Every tunable of the stage and its value; none of a peer."""


class Ablation(Timed):
    """One level of an ablation: a stage with one tunable set, all others as they are; the axes are in axes.toml.

    Or a lever: the stage's source with a patch, or the same without it; see levers.py.
    """

    kind: Literal["ablation"] = "ablation"
    axis: Label
    """Name of the axis; `levers` where the source was changed."""
    level: Label
    """Name of the level on it, or of the lever; `as it is` for the source beside which a lever was measured."""
    stage: Label
    """A stage id; an axis may cross from a stage to its child."""
    parameters: dict[Label, int]
    """Every tunable of the stage and its value."""


class Part(Base):
    """The time of a stage with a part of its work left out; its output is wrong by construction, and not judged."""

    kind: Literal["part"] = "part"
    stage: Label
    """A stage id."""
    left_out: Label
    """`nothing`, `qk`, `softmax`, `pv` or `memory`."""
    parameters: dict[Label, int]
    """Every tunable of the stage and its value."""
    problem: RecordedProblem
    samples: Samples
    cubin: CubinFields


class Reading(Base):
    """One implementation on one problem by one timer, on one kind of input: it judges the method."""

    kind: Literal["reading"] = "reading"
    name: Label
    """A stage id, or a peer's name."""
    problem: RecordedProblem
    timer: Literal["events", "torch-profiler", "cuda-bench"]
    """`events`: CUDA events, flashlab's own. `torch-profiler`: durations of kernels by CUPTI, through torch.profiler.
    `cuda-bench`: NVBench, through its Python package."""
    inputs: Literal["normal", "zeros"]
    """What Q, K and V hold: random normal numbers, or zeros."""
    samples: Samples
    """By `cuda-bench`, those of a hot cache are means of a batch each, and the clock is its own reading."""
    enqueue_us: float | None = None
    """Host time to enqueue one call, microseconds; None where it was not measured."""


class ModelRun(Base):
    """A whole language model with random weights, run in transformers with one attention: see experiments/llama.py."""

    kind: Literal["model"] = "model"
    attention: Label
    """`flashlab`, `sdpa`, a library of `flashlab.kernels.peers`, or `nothing`, which returns Q."""
    phase: Literal["prefill", "decode", "decode_graph"]
    """The last: one decoding step, captured and replayed as a CUDA graph."""
    batch: int = Field(ge=1)
    """Sequences at once."""
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=0)
    """Decoded after the prompt, one a step; 0 of a prefill."""
    time_s: Times = Field(min_length=1)
    """Seconds of each repeat by the host's clock, from a synchronised GPU to a synchronised one; of all steps."""
    logit_error: float | None
    """Largest difference of the last token's logits from SDPA's over their standard deviation; None of SDPA itself."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    """Weights of the model."""
    dtype: DType
    transformers: Label
    """Its version."""


class PackedRun(Base):
    """Sequences of different lengths, packed or in pages, by one implementation: see experiments/packed.py."""

    kind: Literal["packed"] = "packed"
    name: Label
    """A stage id, a library of `flashlab.kernels.peers`, or `padded`: every sequence as long as the longest."""
    distribution: Label
    """Of the lengths."""
    lengths: tuple[int, ...] = Field(min_length=1)
    """Queries of each sequence, and as many keys; in decoding its keys."""
    heads: int = Field(ge=1)
    kv_heads: int | None = None
    """In decoding, one query row a sequence over a cache in pages; None of packed sequences."""
    head_dim: int = Field(ge=1)
    dtype: DType
    mask: Mask
    samples: Samples
    verdict: Verdict | None
    """On the longest sequence; None of `padded` without a mask, whose sequences see keys that are none."""

    def tflops(self, time_us: float) -> float:
        """Rate in TFLOP/s of the scores that the sequences need, in a call that takes `time_us` microseconds."""
        if self.kv_heads is not None:
            return 4 * self.heads * sum(self.lengths) * self.head_dim / time_us / 1e6
        shapes = (f"1x{self.heads}x{length}x{self.head_dim}" for length in self.lengths)
        return sum(Problem.parse(shape, mask=self.mask).tflops(time_us) for shape in shapes)

    def gb_per_s(self, time_us: float) -> float:
        """Keys and values read in GB/s, in a decoding call that takes `time_us` microseconds."""
        assert self.kv_heads is not None
        return 2 * 2 * sum(self.lengths) * self.kv_heads * self.head_dim / time_us / 1e3


class ChipReading(Base):
    """One micro-benchmark of an SM's units, on one GPU; the cases are in experiments/chip.toml."""

    kind: Literal["chip"] = "chip"
    name: Label
    """Of the case."""
    group: Literal["unit", "latency", "wgmma", "issue", "softmax", "overlap", "loop"]
    unit: Literal["ops/clk/SM", "FLOP/clk/SM", "clk", "clk/score"]
    value: float
    """The median of `one_sm`."""
    one_sm: Times = Field(min_length=1)
    """A value a launch, one block on one SM."""
    all_sms: Times = Field(min_length=1)
    """A value a launch with a block on every SM: the median of the blocks."""
    beside: Times = ()
    """What the block's other warps did per cycle meanwhile, a value a launch on one SM; empty where there are none."""
    stamps: Times = ()
    """Cycles since the start, at the moments that the kernel's file names; of the last launch on one SM."""
    how: Label
    kernel: Label
    """File of kernels/chip, without its suffix."""
    defines: dict[Label, int]
    repeats: int
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the machine code."""
    registers: int
    opcodes: dict[Label, int]
    """Those of the case, as counted in the machine code."""


class Call(Base):
    """Wall time of single calls, each from the host's call to the end of its kernel: launch and wait included."""

    kind: Literal["call"] = "call"
    name: Label
    """A peer's name."""
    problem: RecordedProblem
    time_us: Times = Field(min_length=1)
    """Host time of one call, microseconds, one entry a call."""


class Sanitized(Base):
    """What one of compute-sanitizer's tools found in one stage."""

    tool: Label
    """memcheck, racecheck, initcheck or synccheck."""
    version: Label
    """The tool's, as it says it."""
    stage: Label
    """Its id."""
    launches: int = Field(ge=0)
    """How often it was launched under the tool."""
    errors: int = Field(ge=0)
    """Reports that name its kernel, and calls that failed."""
    elsewhere: int = Field(ge=0)
    """Errors in the tool's own count that name no stage's kernel; the same for every stage of the process."""
    finished: bool
    """Whether the process and the tool came to their end."""
    findings: tuple[Prose, ...]
    """The first line of some reports."""

    @property
    def clean(self) -> bool:
        """Launched, watched to the end, and nothing found."""
        return self.finished and self.launches > 0 and self.errors == 0 and self.elsewhere == 0


class Ceiling(Base):
    """One measured limit of the GPU."""

    kind: Literal["ceiling"]
    name: Label
    """`copy`, `tensor_float16`, `fp32_fma`, `exp2`, …; see measure/ceilings.py."""
    unit: Label
    """Unit of `value`: `TB/s`, `TFLOP/s`, `Tex2/s`."""
    value: float
    """From the median time."""
    samples: Samples
    how: Label
    """What was run."""


Record = Annotated[Measurement | Ceiling, Field(discriminator="kind")]


class Machine(_Model):
    """data/<gpu>/machine.json: what the runs were made on."""

    gpu: Gpu
    host: dict[Label, Label]
    """Processor, cores, memory, operating system; no host name."""


class Aside(_Model):
    """A line that was cut short, set aside from its file by `flashlab repair`."""

    file: Label
    """`runs/<run>.jsonl`."""
    line: int = Field(ge=1)
    """Its number there, from 1."""
    text: Prose
    """What there was of it."""


class _Counted(_Model):
    """A launch under Nsight Compute."""

    gpu: Label
    """Product name of the GPU."""
    commit: Commit
    """Full hash of the code that was launched, or `unknown`."""
    dirty: bool
    """True when that code differed from the commit."""
    metrics: dict[Label, float]
    """Nsight Compute's metrics by their names; which there are depends on the GPU and on its version."""


class StageCounters(_Counted):
    """What Nsight Compute counted in one launch of a stage: non-causal, float16, no log-sum-exp asked for."""

    stage: Label
    """Its id."""
    shape: Label
    """BxHxSxD."""


class PatternCounters(_Counted):
    """What Nsight Compute counted in a single access to shared memory by one warp."""

    pattern: Label
    """Name of how the lanes' addresses lie."""
    kernel: Label
    """Name of the access: its instruction and width."""
    offsets: tuple[int, ...] = Field(min_length=32, max_length=32)
    """Byte offset of each lane's address; negative where the lane takes no part."""


class LineStalls(_Model):
    """Where warps were when they were sampled: a line of a stage's source, with all that is inlined there."""

    file: Label
    """The file's name, without its folder."""
    line: int
    """From 1."""
    text: Prose
    """The line as it was, without its indent."""
    samples: dict[Label, int]
    """Samples by warp state: the reason a warp waited, or `selected` where it did not."""

    @property
    def total(self) -> int:
        """Samples of any state."""
        return sum(self.samples.values())


_SECTOR_BYTES = 32
_OF_ACTIVE = ".avg.pct_of_peak_sustained_active"


def _metric(name: str) -> property:
    """One of Nsight Compute's metrics as it stands; None where it was not counted."""
    return property(lambda profile: profile.metrics.get(name))


class StageProfile(_Counted):
    """What Nsight Compute saw in one launch of a stage, from cold caches; see measure/profile.py for what is asked."""

    run: RunId
    """Id of the run, the name of its file."""
    stage: Label
    """Its id."""
    problem: RecordedProblem
    parameters: dict[Label, int]
    """Every tunable and its value."""
    cubin_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Digest of the machine code that was launched: that of a measurement of the same kernel."""
    tile_q: int
    """Query rows a block."""
    ncu: Label
    """Version of Nsight Compute."""
    samples: dict[Label, int]
    """Samples of the kernel's warps by warp state; empty where none were taken."""
    lines: tuple[LineStalls, ...]
    """The lines with the most samples, most first; empty where samples could not be traced to lines."""
    time: Moment
    """UTC time of the record, ISO 8601."""
    device: Gpu | None = None
    """The GPU, as other records have it; None in older ones."""
    software: dict[Label, Label] = Field(default_factory=dict)
    """Versions; none in older records."""
    start: Start | None = None
    """The start of the machine it was made on; None in older records."""

    tensor_percent = _metric(f"sm__pipe_tensor_cycles_active{_OF_ACTIVE}")
    """Cycles in which the tensor pipe was busy, percent of those in which the SM was."""
    exp_percent = _metric(f"sm__inst_executed_pipe_xu{_OF_ACTIVE}")
    """Instructions of the unit that exponentiates and converts, percent of what it could issue."""
    fma_percent = _metric(f"sm__inst_executed_pipe_fma{_OF_ACTIVE}")
    """Instructions of the pipes that multiply and add FP32, percent of what they could issue."""
    alu_percent = _metric(f"sm__inst_executed_pipe_alu{_OF_ACTIVE}")
    """Instructions of the pipe for integers, comparisons and maxima, percent of what it could issue."""
    issue_percent = _metric(f"smsp__issue_active{_OF_ACTIVE}")
    """Issue slots that were used, percent."""
    warps_percent = _metric(f"sm__warps_active{_OF_ACTIVE}")
    """Occupancy achieved: warps that were resident, percent of what an SM holds."""
    shared_wavefronts = _metric("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")
    """Cycles of shared memory's pipe, summed over SMs: for loads, stores, copies, and operands of wgmma."""

    def _per(self, name: str, other: str) -> float | None:
        """None where one of them is missing, or nothing was counted to divide by."""
        below = self.metrics.get(other)
        return self.metrics[name] / below if below and name in self.metrics else None

    @property
    def time_us(self) -> float | None:
        """The launch's own time. The kernel ran alone, from cold caches: no measurement of its speed."""
        time_ns = self.metrics.get("gpu__time_duration.sum")
        return None if time_ns is None else time_ns / 1e3

    @property
    def warps_percent_limit(self) -> float | None:
        """Theoretical occupancy: warps that registers, shared memory and block size let reside, percent."""
        blocks = [value for name, value in self.metrics.items() if name.startswith("launch__occupancy_limit_")]
        threads, warps = self.metrics.get("launch__block_size"), self.metrics.get("sm__warps_active.avg.peak_sustained")
        return 100 * min(blocks) * math.ceil(threads / 32) / warps if blocks and threads and warps else None

    @property
    def dram_bytes(self) -> float | None:
        """Bytes read from and written to device memory; not those that are still in L2 when the kernel ends."""
        read, written = (self.metrics.get(f"dram__bytes_{what}.sum") for what in ("read", "write"))
        return None if read is None or written is None else read + written

    @property
    def l2_bytes(self) -> float | None:
        """Bytes that the SMs read from and wrote to L2."""
        sectors = self.metrics.get("lts__t_sectors_srcunit_tex.sum")
        return None if sectors is None else sectors * _SECTOR_BYTES

    @property
    def conflict_percent(self) -> float | None:
        """Bank conflicts, percent of wavefronts; None where there are none of either."""
        share = self._per(
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
        )
        return None if share is None else 100 * share

    @property
    def load_sectors(self) -> float | None:
        """32-byte sectors per request of a warp to load from global memory; None where threads loaded nothing."""
        return self._per(*(f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("sectors", "requests")))

    @property
    def states(self) -> dict[str, float]:
        """Where warps spent their time, in percent, the longest first: the reason a warp waited, or `selected`."""
        total = sum(self.samples.values())
        return {name: 100 * count / total for name, count in sorted(self.samples.items(), key=lambda item: -item[1])}


@lru_cache(maxsize=1024)
def _parsed(shape: str, dtype: DType, mask: Mask) -> Problem:
    """A table has many rows of a problem, and a first call of `attention` reads it."""
    return Problem.parse(shape, dtype=dtype, mask=mask)


class ChoiceRow(_Model):
    """One choice of a stage's tunables on one problem."""

    stage: Label
    shape: Label
    mask: Mask
    dtype: DType
    parameters: dict[Label, int]
    """Every tunable of the stage and its value."""
    time_us: float
    """Median, in a burst."""
    timed: Cache = "hot"
    """What of it: a table counts what is nearest to a model's calls."""
    tile_q: int
    """Query rows a block."""
    variants: int
    """So many were tuned there, interleaved, and this one won; 0 where the stage was timed and not tuned."""
    run: RunId
    """The run that it is from, of data/<gpu>/tuning, or of data/<gpu>/runs where it was not tuned."""

    @cached_property
    def problem(self) -> Problem:
        """What was computed, on normal inputs."""
        return _parsed(self.shape, self.dtype, self.mask)

    @model_validator(mode="after")
    def _of_a_problem(self) -> Self:
        assert self.problem
        return self


class Choices(_Model):
    """data/<gpu>/tuned.json: which stage and tunables a problem gets; run/choice.py reads it."""

    arch: Label
    sm_count: int
    rows: tuple[ChoiceRow, ...]


class Judged(_Model):
    """One entry of data/<gpu>/verdicts.json: what the records say of a claim. Its other fields are the ledger's own."""

    model_config = ConfigDict(extra="allow")

    id: Label
    verdict: Label
    records: tuple[Label, ...]
    reason: Prose


class Withdrawn(_Model):
    """An entry of data/<gpu>/withdrawn.json: timings that are not of what they say. They stay where they lie, and no
    chart, table or choice is made of them."""

    inputs: Annotated[tuple[Label, ...], Field(min_length=1)]
    """All that was timed on these kinds of inputs."""
    runs: Annotated[tuple[RunId, ...], Field(min_length=1)]
    """In these runs."""
    head_dim: int | None = None
    """At this one; at every one where None."""
    mask: Mask | None = None
    """Under this one; under every one where None."""
    reason: Prose
    """What is wrong, for readers of the site."""

    def takes_back(self, record: object) -> bool:
        """Whether a record is one of them."""
        if not isinstance(record, Timed) or record.run not in self.runs:
            return False
        problem = record.problem
        return (
            problem.inputs in self.inputs
            and self.head_dim in (None, problem.head_dim)
            and self.mask in (None, problem.mask)
        )


def run_id(source: Source, start: datetime) -> str:
    """A name for a run that starts then (UTC), `20261121T054500Z-0123abc-4f2a91`: never the same twice.

    The last part is random, for two runs may start in one second on two GPUs. Older names lack it.
    """
    commit = source.commit[:7] if source.commit != "unknown" else "0000000"
    return f"{start:%Y%m%dT%H%M%SZ}-{commit}{'-dirty' if source.dirty else ''}-{secrets.token_hex(3)}"


def to_line(record: BaseModel) -> str:
    """One line of JSON, newline included; `~` stands for the home folder, which messages of libraries may name."""
    line, home = record.model_dump_json(), os.path.expanduser("~").rstrip("/")  # noqa: PTH111 - Path.home() may raise
    return (line.replace(f"{home}/", "~/") if home.startswith("/") else line) + "\n"


def power_w(samples: Samples | None) -> float | None:
    """Power under sustained load, W: from the energy counter, else NVML's mean; None for bursts.

    A burst is mostly gaps, and what NVML averages over them is not the power of the call.
    """
    conditions = samples.conditions if samples and samples.regime == "sustained" else None
    if samples is None or conditions is None:
        return None
    if conditions.energy_j_per_call is not None:
        return 1e6 * conditions.energy_j_per_call / fmean(samples.time_us)
    return conditions.power_w_mean
