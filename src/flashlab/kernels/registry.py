"""Registry of kernels: questions, requirements and tunables. Tests, CLI, notebooks and figures iterate `STAGES`.

A stage is three files that share its id, and nothing else lists stages:

    kernels/16_ones_column.cu         its source (`.py` for Triton)
    kernels/16_ones_column.toml       its entry: the fields of `Stage`, except those given by the file's path
    site/stages/16_ones_column.md     its page

Three kinds of stages are off the ladder, in folders below kernels/ and site/: `decode/` for decoding, `fp8/` for FP8
inputs, and `dead_ends/` for what did not work.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsIndex, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from flashlab.core.errors import DataError, ParameterError, UnknownStageError, UnsupportedError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import INSTALLED, KERNELS, ROOT, SITE
from flashlab.core.problem import FIRST_SHAPE, Cache, DType, Feature, Mask, Precision, Problem

Language = Literal["cuda", "triton"]
Place = Literal["ladder", "decode", "fp8", "dead_ends"]
"""`ladder`: a rung, which replaces the one before. `decode`: for few query rows and many keys; compared with rungs, but
replaces none. `fp8`: for FP8 inputs, which no rung supports. `dead_ends`: did not work, kept for what it shows."""
Arch = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
"""Maximum cluster sizes: portable, and non-portable, which some GPUs support if a kernel allows it."""
_RUNG_ID = r"(\d\d|t\d)(_[a-z0-9]+)+"
_IDS: Mapping[Place, tuple[str, str]] = {
    "ladder": (_RUNG_ID, "17_words or t1_words"),
    "decode": (r"d\d+(_[a-z0-9]+)+", "d1_words"),
    "fp8": (r"f\d(_[a-z0-9]+)+", "f0_words"),
    "dead_ends": (rf"[a-z][a-z0-9]*(_[a-z0-9]+)*|{_RUNG_ID}", "words in lower case"),
}
"""Patterns of ids, with descriptions. A dead end that was a rung keeps its id."""
ARCHS: tuple[Arch, ...] = get_args(Arch)
"""Supported architectures, the oldest first."""


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: `sm_90a` is (9, 0)."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def arch_for(compute_capability: tuple[int, int]) -> str:
    """Return the newest of `ARCHS` whose machine code runs on a compute capability.

    Machine code runs on the same major version and an equal or higher minor one; `a` targets only on their own.

    Raises:
        UnsupportedError: there is none.
    """
    fitting = [
        arch
        for arch in ARCHS
        if capability(arch)[0] == compute_capability[0]
        and (
            capability(arch)[1] == compute_capability[1]
            if arch.endswith("a")
            else capability(arch)[1] <= compute_capability[1]
        )
    ]
    if not fitting:
        raise UnsupportedError(
            f"wanted a GPU that runs code for one of {', '.join(ARCHS)}; "
            f"this one has compute capability {compute_capability[0]}.{compute_capability[1]}"
        )
    return fitting[-1]


_ENTRY = ConfigDict(extra="forbid")
_Text = Annotated[str, Field(min_length=1)]
_Value = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Param:
    """A tunable that reaches the kernel as a `-D` macro of the same name."""

    default: _Value
    choices: tuple[_Value, ...]
    """Values that compile for some head dim, ascending; for others, they may fail a static_assert that says why."""
    meaning: _Text
    by_head_dim: Mapping[int, _Value] = field(default_factory=dict)
    """Defaults of head dims that differ from `default`."""

    @model_validator(mode="after")
    def _check(self) -> Param:
        if list(self.choices) != sorted(set(self.choices)):
            raise ValueError(f"choices: wanted ascending values, each once, got {list(self.choices)}")
        if unknown := {self.default, *self.by_head_dim.values()} - set(self.choices):
            raise ValueError(f"default, by_head_dim: wanted values of {list(self.choices)}, got {sorted(unknown)}")
        return self

    def default_for(self, head_dim: int) -> int:
        """The default at `head_dim`."""
        return self.by_head_dim.get(head_dim, self.default)


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Expected:
    """A number of a stage's prediction as a range at a problem, for scoring."""

    words: _Text
    """The part of the prediction with the number. "About" a number is read as ±10 %."""
    low: Annotated[float, Field(gt=0)]
    high: Annotated[float, Field(gt=0)]
    of: Literal["tflops", "time_us", "ratio"] = "tflops"
    """The unit of `words`. `tflops`: TFLOP/s. `time_us`: µs per call. `ratio`: rate relative to that of `over`."""
    over: str | None = None
    """Stage id; default: the parent."""
    over_inputs: str | None = None
    """Kind of inputs of `over`; default: the same."""
    shape: str = FIRST_SHAPE
    mask: Mask = "full"
    dtype: DType = "float16"
    inputs: str = NORMAL
    cache: Cache = "hot"
    """How it is called, in bursts: of a ratio both sides."""

    @model_validator(mode="after")
    def _check(self) -> Expected:
        if self.low > self.high:
            raise ValueError(f"low: wanted at most high, {self.high}, got {self.low}")
        _ = self.problem
        return self

    @property
    def problem(self) -> Problem:
        """The problem of the prediction."""
        return replace(Problem.parse(self.shape, dtype=self.dtype, mask=self.mask), inputs=self.inputs)


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Excerpt:
    """Key lines of a kernel's change, identified by their contents (`text.lines`)."""

    first: _Text
    """Text of the first line, unique in the file."""
    last: str = ""
    """Text of the last line, the first match after `first`; empty: only one line."""
    file: str = ""
    """A header of kernels/common/; empty: the kernel itself."""


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Stage:
    """A kernel, on the ladder or off it. All fields but the first two are those of its entry."""

    id: str
    """Stem of its files."""
    place: Place = "ladder"
    """Given by the folder of its files."""
    title: _Text
    parent: str | None = None
    """None for the ladder's first stage."""
    order: float = float("inf")
    """Position in lists; default: the number in its id."""
    question: _Text
    change: _Text
    """The one idea that separates it from its parent."""
    prediction: _Text
    """Prediction, written before the first run."""
    expected: tuple[Expected, ...] = ()
    """The numbers in the prediction."""
    key_lines: tuple[Excerpt, ...] = ()
    """Lines quoted by the journey page, which omits stages without any."""
    language: Language = "cuda"
    """`cuda`: C++, compiled by NVRTC, and by a C++ compiler for the CPU. `triton`: Python, compiled by Triton, which
    also interprets it on a CPU."""
    min_arch: Arch = "sm_75"
    max_arch: Arch | None = None
    """Last architecture with its instructions; None if newer ones have them too."""
    dtypes: Annotated[tuple[DType, ...], Field(min_length=1)] = ("float16",)
    head_dims: Annotated[tuple[int, ...], Field(min_length=1)] = (64, 128)
    features: tuple[Feature, ...] = ()
    """Supported optional features; each defines a macro of its name as 1 when used."""
    max_rows: Annotated[int, Field(gt=0)] | None = None
    """Maximum query rows per K/V head, i.e. q_len times query heads per K/V head; None: no limit."""
    params: Mapping[str, Param] = field(default_factory=dict)
    ablations: Mapping[str, Param] = field(default_factory=dict)
    """Macros of ablations, which are not tuned. The kernel defines their defaults, and they are passed only if
    named."""
    spills: Mapping[int, tuple[Arch, ...]] = field(default_factory=dict)
    """Architectures on which registers may spill, by head dim; elsewhere, a spill fails the build."""
    tensor_maps: bool = False
    """Whether the kernel has a second argument with tensor maps (kernels/common/hopper.cuh)."""
    wmma_strides: bool = False
    """Whether its fast path passes row strides to WMMA loads, which take unsigned 32-bit values."""
    early_launch: bool = False
    """Whether it may be launched while the kernel before it on its stream still runs (programmatic dependent launch):
    it waits for that itself before it touches global memory."""
    by_name_only: str = ""
    """Why `flashlab.attention` never selects it by default; empty if it may."""
    kernel: str | None = None
    """The stage whose source it uses with other tunables; default: its own."""
    runner: str | None = None
    """Module that launches it, or runs it on a CPU, in place of the core; see `attention._runner`."""
    precision: Precision = "input"
    """Precision of its computation, at which it is judged."""
    defect: str = ""
    """Why its output is wrong, for a dead end kept for that; empty if it is correct."""
    variants: tuple[Mapping[str, int], ...] = ()
    """Tunables of a stage off the ladder to measure besides its defaults, because they show why it is a dead end, or
    what its choices contribute."""

    @model_validator(mode="after")
    def _check(self) -> Stage:
        if self.max_arch is not None and ARCHS.index(self.max_arch) < ARCHS.index(self.min_arch):
            raise ValueError(f"max_arch: wanted {self.min_arch} or newer, as min_arch says, got {self.max_arch}")
        by_head_dim = {"spills": set(self.spills)}
        by_head_dim |= {f"params.{name}.by_head_dim": set(param.by_head_dim) for name, param in self.params.items()}
        for name, keys in by_head_dim.items():
            if not keys <= set(self.head_dims):
                raise ValueError(f"{name}: wanted head dims of {list(self.head_dims)}, got {sorted(keys)}")
        if stray := {arch for archs in self.spills.values() for arch in archs} - set(self.archs):
            raise ValueError(f"spills: wanted architectures of {', '.join(self.archs)}, got {', '.join(sorted(stray))}")
        for variant in self.variants:
            self.parameters(self.head_dims[0], variant)
        for expected in self.expected:
            if expected.words not in " ".join(self.prediction.split()):
                raise ValueError(f"expected.words: wanted a part of the prediction, got {expected.words!r}")
        return self

    @property
    def dead_end(self) -> bool:
        """Whether it is a dead end."""
        return self.place == "dead_ends"

    @property
    def retired(self) -> bool:
        """Whether a dead end was once on the ladder, as its numbered id shows. Runs that measured it then count as runs
        of the ladder."""
        return self.dead_end and re.fullmatch(_RUNG_ID, self.id) is not None

    @property
    def folder(self) -> str:
        """Folder of its source and entry below kernels/."""
        return _FOLDERS[self.place]

    @property
    def source(self) -> Path:
        """Its CUDA C++ or Python file."""
        return KERNELS / f"{self.folder}{self.kernel or self.id}.{'cu' if self.language == 'cuda' else 'py'}"

    @property
    def page(self) -> Path:
        """Its page of the site."""
        return SITE / f"{self.folder or 'stages/'}{self.id}.md"

    @property
    def entry(self) -> str:
        """The kernel's name in the machine code."""
        return f"attention_{self.kernel or self.id}"

    @property
    def variant_names(self) -> tuple[str, ...]:
        """Names of `variants` in measurements."""
        return tuple(variant_name(self.id, variant) for variant in self.variants)

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures it compiles for."""
        last = ARCHS[-1] if self.max_arch is None else self.max_arch
        return ARCHS[ARCHS.index(self.min_arch) : ARCHS.index(last) + 1]

    @property
    def needs(self) -> str:
        """Its architectures, for display: `sm_80 or newer`, `sm_90a`."""
        if self.max_arch is None:
            return f"{self.min_arch} or newer"
        return self.min_arch if self.max_arch == self.min_arch else f"{self.min_arch} to {self.max_arch}"

    def may_spill(self, head_dim: int, arch: str) -> bool:
        """Whether registers may spill to local memory; always for Triton, which allocates them itself."""
        return self.language == "triton" or arch in self.spills.get(head_dim, ())

    def parameters(self, head_dim: int, overrides: Mapping[str, SupportsIndex] | None = None) -> dict[str, int]:
        """Values of all tunables: the defaults for `head_dim`, replaced by `overrides`, which may include `ablations`.

        Raises:
            ParameterError: an override is not a tunable of this stage, not an integer, or 0 where that is not a choice.
        """
        known = {**self.params, **self.ablations}
        values = {name: param.default_for(head_dim) for name, param in self.params.items()}
        for name, value in (overrides or {}).items():
            if name not in known:
                raise ParameterError(f"Stage {self.id} has no parameter {name!r}; it has {', '.join(values) or 'none'}")
            low = int(0 not in known[name].choices)  # a loop that advances by 0 would not end
            if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) < 2**31:
                limits = f"{low} to 2^31 - 1"
                raise ParameterError(f"Stage {self.id}, {name}: wanted an integer from {limits}, got {value!r}")
            values[name] = int(value)
        return {name: values[name] for name in (*self.params, *self.ablations) if name in values}

    def why_not(self, problem: Problem, arch: str | None = None) -> str | None:
        """Explain why this stage does not support `problem`, on `arch` if given; None if it does."""
        if problem.dtype not in self.dtypes:
            works = _runnable(dtype=problem.dtype)
            return f"Stage {self.id} takes {' or '.join(self.dtypes)}, got {problem.dtype}. {works}"
        if problem.head_dim not in self.head_dims:
            return f"Stage {self.id} takes head dim {' or '.join(map(str, self.head_dims))}, got {problem.head_dim}."
        rows = problem.q_heads // problem.kv_heads * problem.q_len
        if self.max_rows is not None and rows > self.max_rows:
            return (
                f"Stage {self.id} takes at most {self.max_rows} query rows a K/V head (query heads that share it times "
                f"q_len), got {rows}. {_runnable(dtype=problem.dtype)}"
            )
        for feature in problem.features:
            if feature not in self.features:
                return f"Stage {self.id} takes no {feature}. {_runnable(arch=arch, feature=feature)}"
        if arch is not None and arch not in self.archs:
            return f"Stage {self.id} needs {self.needs}, got {arch}. {_runnable(arch=arch)}"
        return None

    def require(self, problem: Problem, arch: str | None = None) -> None:
        """Raise `UnsupportedError`, with the reason, if this stage does not support `problem` on `arch`."""
        reason = self.why_not(problem, arch)
        if reason:
            raise UnsupportedError(reason)


def _runnable(*, dtype: DType | None = None, arch: str | None = None, feature: Feature | None = None) -> str:
    ids = [
        stage.id
        for stage in STAGES.values()
        if (dtype is None or dtype in stage.dtypes)
        and (arch is None or arch in stage.archs)
        and (feature is None or feature in stage.features)
    ]
    on_arch = f" on {arch}" if arch else ""
    return f"Runnable{on_arch}: {', '.join(ids)}." if ids else f"No stage is runnable{on_arch}."


def get(stage_id: str) -> Stage:
    """Look up a stage by id, on the ladder or off it.

    Raises:
        UnknownStageError: there is none.
    """
    if not isinstance(stage_id, str):
        raise UnknownStageError(f"stage: wanted a stage's id as text, such as {[*STAGES][-1]!r}, got {stage_id!r}")
    stage = STAGES.get(stage_id) or OFF_LADDER.get(stage_id)
    if stage is None:
        raise _unknown(stage_id)
    return stage


def resolve(name: str) -> str:
    """Expand a unique prefix of an id: `16` to `16_ones_column`. Tunables in brackets are kept.

    Raises:
        UnknownStageError: the prefix matches no id, or several.
    """
    prefix, bracket, tunables = name.partition("[")
    ids = (*STAGES, *OFF_LADDER)
    matches = [prefix] if prefix in ids else [stage_id for stage_id in ids if prefix and stage_id.startswith(prefix)]
    if not matches:
        raise _unknown(prefix)
    if len(matches) > 1:
        raise UnknownStageError(f"stage: wanted a unique prefix, got {prefix!r}, which begins {', '.join(matches)}")
    return matches[0] + bracket + tunables


def _unknown(name: str) -> UnknownStageError:
    """Build the error for an unknown id, with a suggestion."""
    if name.partition("[")[0] in {*STAGES, *OFF_LADDER}:
        return UnknownStageError(
            f"stage: wanted an id alone, got {name!r}. Values of tunables in brackets are for `flashlab check`, `sass` "
            "and `bench`; in Python, `params` takes them"
        )
    for folder, suffix in product(_FOLDERS.values(), (".cu", ".py")):
        if name and (KERNELS / f"{folder}{name}{suffix}").is_file():
            return UnknownStageError(f"stage: wanted an entry kernels/{folder}{name}.toml beside its source, got none")
    # Without its number too, which is what people misremember.
    titles = {stage_id.partition("_")[2]: stage_id for stage_id in STAGES}
    ids = (*STAGES, *OFF_LADDER)
    begun = [stage_id for stage_id in ids if name and stage_id.startswith(name)]
    near = [*begun, *difflib.get_close_matches(name, [*ids, *titles], n=3)]
    meant = dict.fromkeys(titles.get(match, match) for match in near)
    return UnknownStageError(
        f"stage: wanted one of {', '.join(STAGES)}, got {name!r}."
        + (f" Did you mean {' or '.join(meant)}?" if meant else f" Off the ladder: {', '.join(OFF_LADDER)}")
    )


def variant_name(stage_id: str, variant: Mapping[str, int]) -> str:
    """Name of a stage with tunables in measurements: `09_wgmma[STAGES=3]`."""
    return f"{stage_id}[{','.join(f'{name}={value}' for name, value in sorted(variant.items()))}]"


_VARIANT = re.compile(r"\[(?P<values>[^\[\]]*)\]$")


def variant_in(name: str) -> dict[str, int]:
    """Parse the tunables in a name of `variant_name`; may be empty.

    Raises:
        ParameterError: the brackets contain anything else.
    """
    match = _VARIANT.search(name)
    tunables: dict[str, int] = {}
    for part in match["values"].split(",") if match else ():
        tunable, _, value = part.partition("=")
        if not value.isdecimal():
            raise ParameterError(f"stage: wanted ID or ID[NAME=VALUE,…] with whole numbers, got {name!r}")
        tunables[tunable.strip()] = int(value)
    return tunables


def parse(name: str) -> tuple[Stage, dict[str, int]]:
    """Parse a name of `variant_name`, or an id, into stage and tunables.

    Raises:
        UnknownStageError, ParameterError: no such stage, or it has no such tunable.
    """
    variant = variant_in(name)
    stage = get(_VARIANT.sub("", name))
    stage.parameters(stage.head_dims[0], variant)
    return stage, variant


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A stage with tunables, or a library, as checked or timed under a name."""

    kind: Literal["stage", "peer"] = "stage"
    id: str
    """Stage id, or name of a library."""
    params: Mapping[str, int] = field(default_factory=dict)
    """Tunables by name, including `Stage.ablations`; the others are chosen by the runner."""
    source: Path | None = None
    """Edited copy of the stage's source, used instead of it."""
    lse_of: str | None = None
    """Name of the implementation of which this is the second row, timed with the log-sum-exp."""
    may_spill: bool = False
    judged: bool = True
    """Whether its output is checked; False if it is wrong by construction."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its records."""

    @property
    def stage(self) -> Stage:
        """The stage, unless it is a library."""
        return get(self.id)


def implementations(
    stage_ids: Iterable[str] | None, sources: Mapping[str, Path] | None = None
) -> dict[str, Implementation]:
    """Stages by the names of their rows, without duplicates.

    Args:
        stage_ids: default: the ladder. Tunables as in `wmma_no_smem[COLUMN_LANES=32]`.
        sources: edited copies of sources, by stage id or by row name, `id@file`.

    Raises:
        UnknownStageError, ParameterError: an unknown stage or tunable, or a missing file.
    """
    named: dict[str, Implementation] = {}
    for name in STAGES if stage_ids is None else stage_ids:
        stage, params = parse(name)
        named[variant_name(stage.id, params) if params else stage.id] = Implementation(id=stage.id, params=params)
    for name, source in (sources or {}).items():
        stage_id = get(name.partition("@")[0]).id
        if not source.is_file():
            raise ParameterError(f"source of {stage_id}: wanted a CUDA C++ file, got {source}")
        named[f"{stage_id}@{source.stem}"] = Implementation(id=stage_id, source=source.resolve())
    return named


def best(problem: Problem, arch: str | None) -> Stage:
    """Return the last rung of the ladder that supports `problem` on `arch`; None is a CPU, which runs every stage.

    Stages in languages other than C++ run only if named.

    Raises:
        UnsupportedError: there is none; the message has the supported head dims, or each stage's reason.
    """
    ladder = [stage for stage in STAGES.values() if stage.language == "cuda"]
    for stage in reversed(ladder):
        if stage.why_not(problem, arch) is None:
            return stage
    dims = {dim for stage in ladder for dim in stage.head_dims}
    able = sorted(dim for dim in dims if any(s.why_not(replace(problem, head_dim=dim), arch) is None for s in ladder))
    if able:
        got, wider = problem.head_dim, [dim for dim in able if dim > problem.head_dim]
        works = f" Zeros appended to q, k and v up to {wider[0]} work, with scale={got}**-0.5." if wider else ""
        where = f"{problem.dtype} on {arch or 'a CPU'}"
        raise UnsupportedError(f"head dim: wanted one of {', '.join(map(str, able))} in {where}, got {got}.{works}")
    reasons = " ".join(stage.why_not(problem, arch) or "" for stage in ladder)
    raise UnsupportedError(f"no stage runs {problem.label} on {arch or 'a CPU'}. {reasons}")


def able(stages: Iterable[Stage], problems: Sequence[Problem], arch: str | None = None) -> list[Stage]:
    """Those of the stages that run one of the problems, on `arch` where given; ParameterError with why where none."""
    tried = [(stage, [stage.why_not(problem, arch) for problem in problems]) for stage in stages]
    if taking := [stage for stage, reasons in tried if None in reasons]:
        return taking
    at = "; ".join(problem.label for problem in problems) + (f" on {arch}" if arch else "")
    why = " ".join(dict.fromkeys(str(reason) for _, reasons in tried for reason in reasons))
    raise ParameterError(f"wanted a stage that takes {at}, got none. {why}")


def parse_entry(text: str, stage_id: str, *, place: Place = "ladder") -> Stage:
    """Parse the entry of a stage.

    Raises:
        DataError: the text is not TOML, or has a missing, unknown or invalid field.
    """
    entry = f"kernels/{_FOLDERS[place]}{stage_id}.toml"
    number = re.match(r"\d+", stage_id)
    said: dict[str, Any] = {"id": stage_id, "place": place}
    try:
        fields = tomllib.loads(text)
        if own := fields.keys() & said.keys():
            raise DataError(f"{entry}: wanted no {', '.join(own)}, which the file's path gives")
        return _STAGE.validate_python({"order": number[0]} | fields | said if number else fields | said)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{entry}: wanted TOML, got: {error}") from None
    except ValidationError as error:
        raise DataError("\n".join(f"{entry}: {reason(detail)}" for detail in error.errors())) from None


_STAGE = TypeAdapter(Stage)


def reason(error: Any) -> str:
    """Format one of `ValidationError.errors()`: the field, what was wanted, what was got."""
    name = ".".join(str(part) for part in error["loc"])
    message = re.sub(r"^\w+ should (be|have) ", "wanted ", error["msg"].removeprefix("Value error, "))
    match error["type"]:
        case "unexpected_keyword_argument":
            return f"{name}: wanted a field that there is"
        case "missing_argument" | "missing":
            return f"{name}: wanted this field, got none"
        case "value_error":
            nested = re.match(r"[\w., ]+: wanted ", message) is not None  # a field of the model at `name`
            return f"{name}{'.' if nested else ': '}{message}" if name else message
        case "union_tag_not_found":
            return f"{error['ctx']['discriminator'][1:-1]}: wanted this field, got none"
        case "union_tag_invalid":
            of = error["ctx"]
            return f"{of['discriminator'][1:-1]}: wanted one of {of['expected_tags']}, got {of['tag']!r}"
    return f"{name}{': ' if name else ''}{message}, got {error['input']!r:.80}"  # which may be a whole file


def load(folder: Path = KERNELS) -> dict[str, Stage]:
    """Load all stages with an entry in `folder`, by id, in the order of lists.

    Raises:
        DataError: the folder does not exist, an entry is invalid (see `parse_entry`), or its parent or kernel is not an
            earlier stage.
    """
    if not folder.is_dir():
        raise DataError(
            f"wanted entries of stages in {folder}, got no such folder. flashlab runs from its checkout: `make`"
        )
    read = [
        parse_entry(path.read_text(encoding="utf-8"), path.stem, place=place)
        for place, below in _FOLDERS.items()
        for path in (folder / below).glob("*.toml")
    ]
    stages: dict[str, Stage] = {}
    places = list(_FOLDERS)
    for stage in sorted(read, key=lambda stage: (places.index(stage.place), stage.order, stage.id)):
        for name in ("parent", "kernel"):
            other = getattr(stage, name)
            if other is not None and other not in stages:
                raise DataError(
                    f"kernels/{stage.folder}{stage.id}.toml: {name}: wanted a stage before it, of "
                    f"{', '.join(stages) or 'none'}, got {other!r}"
                )
        if stage.id in stages:
            raise DataError(f"kernels/{stage.folder}{stage.id}.toml: wanted a unique id, got that of a rung")
        stages[stage.id] = stage
    return stages


_FOLDERS: Mapping[Place, str] = {"ladder": "", "decode": "decode/", "fp8": "fp8/", "dead_ends": "dead_ends/"}
"""Folder of each place, below kernels/ and, except for the ladder, below site/; in the order of lists."""
_ALL = load()
STAGES: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "ladder"}
"""The ladder."""
CUDA_STAGES: Mapping[str, Stage] = {name: stage for name, stage in STAGES.items() if stage.language == "cuda"}
"""Stages of the ladder in CUDA C++, which NVRTC and the emulator compile."""
DECODE: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "decode"}
"""Stages for few query rows against many keys."""
FP8: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "fp8"}
"""Stages whose inputs are stored in FP8."""
DEAD_ENDS: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.dead_end}
"""Stages that did not work, and retired rungs; runnable like any stage."""
OFF_LADDER: Mapping[str, Stage] = {**DECODE, **FP8, **DEAD_ENDS}
"""Stages off the ladder, checked, measured and tested like rungs, but never listed among them."""
RUNGS: Mapping[str, Stage] = {**STAGES, **{name: stage for name, stage in DEAD_ENDS.items() if stage.retired}}
"""Stages that records of the ladder may have: current ones, then retired ones."""


def peak_factor(name: str) -> int:
    """The tensor cores' peak for a stage, library or ceiling, over that of 16 bits: 2 if it multiplies FP8, else 1."""
    stage = OFF_LADDER.get(name.partition("[")[0])
    return 2 if (stage.precision in ("e4m3", "e4m3_scaled") if stage else "fp8" in name) else 1


def faults(stage: Stage) -> tuple[str, ...]:
    """Describe what is missing in the three files of a stage; empty if it is complete.

    An invalid entry is an error at import; this finds valid but unfinished ones.
    """
    lacking = []
    pattern, rule = _IDS[stage.place]
    if not re.fullmatch(pattern, stage.id):
        lacking.append(f"id: wanted {rule}, joined by _, got {stage.id!r}")
    twins = [name for name, other in STAGES.items() if other.order == stage.order and name != stage.id]
    if twins and stage.place == "ladder":
        lacking.append(f"id: wanted a number, or `order`, of its own, got that of {', '.join(twins)}")
    files = {"source": stage.source} | ({} if INSTALLED else {"page": stage.page})  # a wheel has no pages
    for what, path in files.items():
        if not path.is_file():
            lacking.append(f"{what}: wanted {path.relative_to(ROOT)}, got no such file")
    if not stage.source.is_file() or stage.kernel:
        return tuple(lacking)
    text = stage.source.read_text(encoding="utf-8")
    mark, code = ('"""', "import triton") if stage.language == "triton" else ("// ", "\n#")
    header = text.split(code)[0].strip()
    if not header.startswith(f"{mark}{stage.id}: ") or header.count("\n") > 7:
        lacking.append(f"source: wanted a header of at most 8 lines that begins `{mark}{stage.id}: `")
    if stage.parent and f"Parent: {stage.parent}" not in header:
        lacking.append(f"source: wanted `Parent: {stage.parent}` in its header")
    if not re.search(rf"\s{stage.entry}\(", text):
        lacking.append(f"source: wanted a kernel {stage.entry}, got none")
    # Tunables may be read in a header of ours that it includes; Triton reads some itself.
    common = (KERNELS / "common" / name for name in re.findall(r'#include "(\w+\.cuh)"', text))
    text += "".join(path.read_text(encoding="utf-8") for path in common if path.is_file())
    read_by_triton = {"WARPS", "PIPELINE_STAGES", "MAX_REGISTERS"} if stage.language == "triton" else set()
    lacking += [
        f"source: wanted the tunable {name} read, got no mention of it"
        for name in stage.params.keys() - read_by_triton
        if not re.search(rf"\b{name}\b", text)
    ]
    return tuple(lacking)
