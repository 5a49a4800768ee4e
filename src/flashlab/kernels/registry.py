"""The registry: every kernel, what it asks, and what it takes. Tests, CLI, notebooks and figures iterate `STAGES`.

A stage is three files that share its id, and nothing else lists stages:

    kernels/16_ones_column.cu         its source (`.py` for Triton)
    kernels/16_ones_column.toml       its entry: the fields of `Stage`, but for those that the file's place says
    site/stages/16_ones_column.md     its page

Three kinds of stages are off the ladder, in folders of their own below kernels/ and site/: `decode/` has kernels for
problems that no rung is made for, `fp8/` those for inputs in FP8, `dead_ends/` what was tried and led nowhere.
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
"""`ladder`: a rung, each of which replaces the one before. `decode`: for few query rows against many keys, which no
rung is made for; it is compared with rungs and replaces none. `fp8`: for inputs stored in FP8, which no rung takes.
`dead_ends`: tried, and kept for what it shows."""
Arch = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"]
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
"""Blocks a cluster: what every GPU with clusters takes, and what some do where a kernel allows it."""
_RUNG_ID = r"(\d\d|t\d)(_[a-z0-9]+)+"
_IDS: Mapping[Place, tuple[str, str]] = {
    "ladder": (_RUNG_ID, "17_words or t1_words"),
    "decode": (r"d\d+(_[a-z0-9]+)+", "d1_words"),
    "fp8": (r"f\d(_[a-z0-9]+)+", "f0_words"),
    "dead_ends": (rf"[a-z][a-z0-9]*(_[a-z0-9]+)*|{_RUNG_ID}", "words in lower case"),
}
"""What ids look like, and that for people. A dead end that was a rung keeps the id that it had."""
ARCHS: tuple[Arch, ...] = get_args(Arch)
"""The architectures flashlab compiles for, oldest first."""


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: `sm_90a` is (9, 0)."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def arch_for(compute_capability: tuple[int, int]) -> str:
    """The newest of `ARCHS` whose machine code a GPU of that compute capability runs.

    Machine code runs on the same major version and an equal or higher minor one; `a` targets on exactly theirs.

    Raises:
        UnsupportedError: none does.
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
    """Values known to compile for some head dim, ascending; others may fail a static_assert, which names the reason."""
    meaning: _Text
    by_head_dim: Mapping[int, _Value] = field(default_factory=dict)
    """Defaults for a head dim, where `default` does not suit."""

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
    """A number of a stage's prediction, so that it can be scored: a range, at one problem."""

    words: _Text
    """The part of the prediction that says it. "About" a number is taken for 10 % below to 10 % above it."""
    low: Annotated[float, Field(gt=0)]
    high: Annotated[float, Field(gt=0)]
    of: Literal["tflops", "ratio"] = "tflops"
    """`tflops`: a rate, TFLOP/s. `ratio`: the rate over that of `over`."""
    over: str | None = None
    """A stage's id; None: the parent's."""
    over_inputs: str | None = None
    """The kind of inputs that `over` is taken on; None: the same."""
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
        """Where it is expected."""
        return replace(Problem.parse(self.shape, dtype=self.dtype, mask=self.mask), inputs=self.inputs)


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Excerpt:
    """Lines of a kernel that its change comes down to, found by what stands in them (`text.lines`)."""

    first: _Text
    """What the first line contains; no other line of the file does."""
    last: str = ""
    """What the last line contains, the first such line from `first` on; empty: one line alone."""
    file: str = ""
    """A header of kernels/common/; empty: the kernel itself."""


@dataclass(frozen=True, kw_only=True, config=_ENTRY)
class Stage:
    """One kernel, on the ladder or off it. Each field but the first two is one of its entry."""

    id: str
    """Its file's name, without the suffix."""
    place: Place = "ladder"
    """By the folder that its file is in."""
    title: _Text
    parent: str | None = None
    """None for the ladder's first stage."""
    order: float = float("inf")
    """Where it stands in lists; the number in its id where the entry has none."""
    question: _Text
    change: _Text
    """The one idea that separates it from its parent."""
    prediction: _Text
    """What was expected of it before it ran."""
    expected: tuple[Expected, ...] = ()
    """The numbers in the prediction."""
    key_lines: tuple[Excerpt, ...] = ()
    """The lines that the journey quotes; a stage without any is not on it."""
    language: Language = "cuda"
    """`cuda`: C++, compiled by NVRTC, and by a C++ compiler for the CPU. `triton`: Python, compiled by Triton, which
    also interprets it on a CPU."""
    min_arch: Arch = "sm_75"
    max_arch: Arch | None = None
    """The last architecture that has its instructions; None where newer ones keep them."""
    dtypes: Annotated[tuple[DType, ...], Field(min_length=1)] = ("float16",)
    head_dims: Annotated[tuple[int, ...], Field(min_length=1)] = (64, 128)
    features: tuple[Feature, ...] = ()
    """What else a call may ask for; each reaches the kernel as a macro of its name, 1, where it is asked for."""
    max_rows: Annotated[int, Field(gt=0)] | None = None
    """The most query rows a K/V head that it takes: query heads that share it times q_len; None: any number."""
    params: Mapping[str, Param] = field(default_factory=dict)
    ablations: Mapping[str, Param] = field(default_factory=dict)
    """Macros that ablations set and nobody tunes. The kernel has their defaults itself, so that they reach it only
    where they are named."""
    spills: Mapping[int, tuple[Arch, ...]] = field(default_factory=dict)
    """Head dim to the architectures on which some registers may spill to local memory; anywhere else a spill fails the
    build."""
    tensor_maps: bool = False
    """Whether the kernel takes tensor maps (kernels/common/hopper.cuh) beside its parameters."""
    wmma_strides: bool = False
    """Whether its fast path hands row strides to WMMA loads, which take 32 bits without a sign."""
    early_launch: bool = False
    """Whether it may be launched while the kernel before it on its stream still runs (programmatic dependent launch):
    it waits for that itself before it touches global memory."""
    by_name_only: str = ""
    """Why `flashlab.attention` runs it only where it is named; empty where it may be chosen."""
    kernel: str | None = None
    """The stage whose source it runs with other tunables; None: its own."""
    runner: str | None = None
    """The module that launches it, or that runs it on a CPU, where the core cannot; imported at the launch. What it
    offers is in `attention._runner`."""
    precision: Precision = "input"
    """What its numbers are rounded to; it is judged against the same computation at that precision."""
    defect: str = ""
    """Why its output is wrong, where it is kept for being wrong; empty where it is right."""
    variants: tuple[Mapping[str, int], ...] = ()
    """Values of tunables that are measured beside the defaults of a stage off the ladder, because they show why it is a
    dead end, or what its choices are worth."""

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
        """Whether a dead end once stood on the ladder, as its numbered id says. Runs that measured it then are runs of
        the ladder as it was."""
        return self.dead_end and re.fullmatch(_RUNG_ID, self.id) is not None

    @property
    def folder(self) -> str:
        """Where its source and entry are, under kernels/."""
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
        """`variants` as they are named while they are measured."""
        return tuple(variant_name(self.id, variant) for variant in self.variants)

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures it compiles for."""
        last = ARCHS[-1] if self.max_arch is None else self.max_arch
        return ARCHS[ARCHS.index(self.min_arch) : ARCHS.index(last) + 1]

    @property
    def needs(self) -> str:
        """Its architectures for people: `sm_80 or newer`, `sm_90a`."""
        if self.max_arch is None:
            return f"{self.min_arch} or newer"
        return self.min_arch if self.max_arch == self.min_arch else f"{self.min_arch} to {self.max_arch}"

    def may_spill(self, head_dim: int, arch: str) -> bool:
        """Whether registers may spill to local memory there. What Triton does with them is its own affair."""
        return self.language == "triton" or arch in self.spills.get(head_dim, ())

    def parameters(self, head_dim: int, overrides: Mapping[str, SupportsIndex] | None = None) -> dict[str, int]:
        """Every tunable's value: the default for `head_dim`, replaced by `overrides`; and of `ablations` those named.

        Raises:
            ParameterError: an override that is no tunable of this stage, or no integer.
        """
        values = {name: param.default_for(head_dim) for name, param in self.params.items()}
        for name, value in (overrides or {}).items():
            if name not in values and name not in self.ablations:
                raise ParameterError(f"Stage {self.id} has no parameter {name!r}; it has {', '.join(values) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) >> 31:
                raise ParameterError(f"Stage {self.id}, {name}: wanted an integer from 0 to 2^31 - 1, got {value!r}")
            values[name] = int(value)
        return {name: values[name] for name in (*self.params, *self.ablations) if name in values}

    def why_not(self, problem: Problem, arch: str | None = None) -> str | None:
        """Why this stage cannot run `problem` (on `arch`, where given); None when it can."""
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
        """Raises `UnsupportedError` with the reason where this stage cannot run `problem` on `arch`."""
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
    """The stage of that id, on the ladder or off it.

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
    """The full id for an id or a unique prefix of one: `16` is `16_ones_column`. What stands in brackets is kept.

    Raises:
        UnknownStageError: no id begins so, or several do.
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
    """That no stage has that id, with what was probably meant."""
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
    """How a stage with those tunables is named while it is measured: `09_wgmma[STAGES=3]`."""
    return f"{stage_id}[{','.join(f'{name}={value}' for name, value in sorted(variant.items()))}]"


_VARIANT = re.compile(r"\[(?P<values>[^\[\]]*)\]$")


def variant_in(name: str) -> dict[str, int]:
    """The tunables in a name that `variant_name` wrote; empty where it has none.

    Raises:
        ParameterError: something else stands in the brackets.
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
    """The stage and the tunables in a name that `variant_name` wrote, or in an id alone.

    Raises:
        UnknownStageError, ParameterError: no such stage, or no such tunable of it.
    """
    variant = variant_in(name)
    stage = get(_VARIANT.sub("", name))
    stage.parameters(stage.head_dims[0], variant)
    return stage, variant


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What is checked or timed under a name: a stage, with values of its tunables, or a library."""

    kind: Literal["stage", "peer"] = "stage"
    id: str
    """A stage's id, or a peer's name."""
    params: Mapping[str, int] = field(default_factory=dict)
    """Values of tunables by name, those of `Stage.ablations` too; what is not named is what whoever runs it takes."""
    source: Path | None = None
    """An edited copy of the stage's file, in place of it."""
    lse_of: str | None = None
    """Timed with the log-sum-exp on, as the second row of the implementation of that name."""
    may_spill: bool = False
    judged: bool = True
    """Whether the oracle sees its output; False where that is wrong by construction."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What its records say of it beyond what was measured."""

    @property
    def stage(self) -> Stage:
        """The stage, where it is one."""
        return get(self.id)


def implementations(
    stage_ids: Iterable[str] | None, sources: Mapping[str, Path] | None = None
) -> dict[str, Implementation]:
    """Stages by the names that their rows have, each once.

    Args:
        stage_ids: the ladder where None. With values of tunables as `wmma_no_smem[COLUMN_LANES=32]`.
        sources: edited copies of a stage's file, by its id or by `id@file`, which is what each is named.

    Raises:
        UnknownStageError, ParameterError: a stage, tunable or file that is not there.
    """
    named: dict[str, Implementation] = {}
    for name in STAGES if stage_ids is None else stage_ids:
        stage, params = parse(name)
        named[variant_name(stage.id, params) if params else stage.id] = Implementation(id=stage.id, params=params)
    for name, source in (sources or {}).items():
        stage_id = get(name.partition("@")[0]).id
        if not source.is_file():
            raise ParameterError(f"source of {stage_id}: wanted a CUDA C++ file, got {source}, which is none")
        named[f"{stage_id}@{source.stem}"] = Implementation(id=stage_id, source=source.resolve())
    return named


def best(problem: Problem, arch: str | None) -> Stage:
    """The last rung of the ladder that runs `problem` on `arch`; None is a CPU, which runs every stage.

    Stages in another language than C++ stand beside the ladder, and run where they are named.

    Raises:
        UnsupportedError: none does; the message has the head dims that work there, or each stage's reason.
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
    """A stage from the text of its entry.

    Raises:
        DataError: it is no TOML, lacks a field, has one that there is not, or a value that does not fit.
    """
    entry = f"kernels/{_FOLDERS[place]}{stage_id}.toml"
    number = re.match(r"\d+", stage_id)
    said: dict[str, Any] = {"id": stage_id, "place": place}
    try:
        fields = tomllib.loads(text)
        if own := fields.keys() & said.keys():
            raise DataError(f"{entry}: wanted no {', '.join(own)}, which the file's place says")
        return _STAGE.validate_python({"order": number[0]} | fields | said if number else fields | said)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{entry}: wanted TOML, got: {error}") from None
    except ValidationError as error:
        raise DataError("\n".join(f"{entry}: {reason(detail)}" for detail in error.errors())) from None


_STAGE = TypeAdapter(Stage)


def reason(error: Any) -> str:
    """One of `ValidationError.errors()`, for people: the field, what was wanted, what came."""
    name = ".".join(str(part) for part in error["loc"])
    message = re.sub(r"^\w+ should (be|have) ", "wanted ", error["msg"].removeprefix("Value error, "))
    match error["type"]:
        case "unexpected_keyword_argument":
            return f"{name}: wanted a field that there is"
        case "missing_argument" | "missing":
            return f"{name}: wanted this field, got none"
        case "value_error":
            return f"{name}.{message}" if name else message
    return f"{name}{': ' if name else ''}{message}, got {error['input']!r:.80}"  # which may be a whole file


def load(folder: Path = KERNELS) -> dict[str, Stage]:
    """Every stage with an entry in `folder`, by id, as lists show them: the ladder, those for decoding, the dead ends.

    Raises:
        DataError: there is no such folder; an entry is none, see `parse_entry`; or its parent or kernel is no stage
            that comes before it.
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
            raise DataError(f"kernels/{stage.folder}{stage.id}.toml: wanted an id of its own, got a rung's")
        stages[stage.id] = stage
    return stages


_FOLDERS: Mapping[Place, str] = {"ladder": "", "decode": "decode/", "fp8": "fp8/", "dead_ends": "dead_ends/"}
"""Of each place, below kernels/ and, but for the ladder's pages, below site/; in the order of lists."""
_ALL = load()
STAGES: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "ladder"}
"""The ladder."""
CUDA_STAGES: Mapping[str, Stage] = {name: stage for name, stage in STAGES.items() if stage.language == "cuda"}
"""The ladder itself: what NVRTC and the CPU emulation compile."""
DECODE: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "decode"}
"""Stages for few query rows against many keys."""
FP8: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.place == "fp8"}
"""Stages whose inputs are stored in FP8."""
DEAD_ENDS: Mapping[str, Stage] = {name: stage for name, stage in _ALL.items() if stage.dead_end}
"""What the sources tried and gave up, or should have, and rungs that were retired: runnable like any stage."""
OFF_LADDER: Mapping[str, Stage] = {**DECODE, **FP8, **DEAD_ENDS}
"""Checked, measured and tested like rungs, and never listed among them."""
RUNGS: Mapping[str, Stage] = {**STAGES, **{name: stage for name, stage in DEAD_ENDS.items() if stage.retired}}
"""What records of the ladder may hold: its stages, then those that have left it."""


def faults(stage: Stage) -> tuple[str, ...]:
    """What its three files still lack, each with what was wanted and what came; empty where it is whole.

    An entry that does not load is an error at import; this is what loads and is not done yet.
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
