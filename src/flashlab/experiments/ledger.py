"""The ledger: what the source documents claim, by which rule each claim is judged, and what the records say.

    data/claims.csv               the claims, each with its rule
    data/<gpu>/verdicts.json      the verdicts, `flashlab claims --write`

A claim names a number, or several joined by a slash, or none where it only says that one thing beats another. An
evaluator finds our numbers for it, with the interval in which they lie; a rule, which knows neither the claim nor
whom it flatters, compares the two. Of several numbers the least favourable verdict counts.

Some records are older than the rules, and were known when those were written: a verdict says where it rests on one.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flashlab.core.errors import DamagedRecordError, NoDataError, ParameterError, UnsupportedError
from flashlab.core.paths import DATA, writable_dir
from flashlab.core.problem import FIRST_SHAPE, Problem, suite
from flashlab.experiments import ablation
from flashlab.experiments.evidence import (
    EVALUATORS,
    FIRST,
    PAIR,
    SINGLE,
    Estimate,
    Evidence,
    PendingError,
    concludes,
    shown_without,
)
from flashlab.kernels import peers, registry
from flashlab.measure import bench
from flashlab.query.kinship import KINSHIPS, kinship
from flashlab.record import provenance
from flashlab.record import store as records
from flashlab.record.store import Call
from flashlab.run import gpu as gpus
from flashlab.show import tables

CLAIMS = DATA / "claims.csv"
VERDICTS = "verdicts.json"
RULES_WRITTEN = "20261121T172456Z"
"""When the rules were committed, UTC, as the name of a run begins. What was measured later could not shape them."""

Kind = Literal["confirmed", "off", "refuted", "not_comparable", "needs_hardware", "pending"]
KINDS: Mapping[Kind, str] = {
    "confirmed": "our number agrees, by the claim's rule",
    "off": "the claim points the right way, its size is wrong: by how much is said",
    "refuted": "the opposite was measured, or the arithmetic is wrong",
    "not_comparable": "the claim compares what cannot be compared",
    "needs_hardware": "only a GPU that has no records here can tell",
    "pending": "what would tell is not on record yet; the command that makes it is named",
}
"""Verdicts, and what each means; the least favourable to a claim of several numbers comes last."""


# --- What is claimed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Range:
    """A claimed number; `low` and `high` are the same unless the claim gives a range."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of data/claims.csv."""

    id: str
    """A letter for the document and a number."""
    source: str
    """Title of the document, and the section that makes the claim."""
    claim: str
    value: str
    """As the document has it; empty where it gives no number."""
    unit: str
    """Of each number, joined by a slash where they differ."""
    gpu: str
    """The model that the document measured on."""
    shape: str
    how_to_test: str
    rule: str
    """Name of one of `RULES`."""

    @property
    def document(self) -> str:
        """Title of the document."""
        return self.source.partition(" § ")[0]

    @property
    def numbers(self) -> tuple[Range | None, ...]:
        """The claimed numbers; a single None where there is none."""
        return tuple(_range(part) for part in self.value.split("/")) if self.value else (None,)

    @property
    def units(self) -> tuple[str, ...]:
        """The unit of each of `numbers`."""
        count, units = len(self.numbers), self.unit.split("/")
        return tuple(units) if len(units) == count > 1 else (self.unit,) * count

    @property
    def claimed(self) -> str:
        """The numbers and their unit, for people; empty where there is none."""
        unit = "/".join(dict.fromkeys(self.unit.split("/"))) if len(self.numbers) > 1 else self.unit
        return f"{self.value} {unit}".replace("-", "–").replace("e–", "e-") if self.value else ""


_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


def _range(text: str) -> Range:
    match = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", text)
    if match is None:
        raise ParameterError(f"value of a claim: wanted a number, or two joined by a hyphen, got {text!r}")
    low = float(match[1])
    return Range(low=low, high=float(match[2] or low))


def read(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """The claims of a file, in its order.

    Raises:
        ParameterError: a value that is no number, a rule that does not exist, an id that occurs twice.
    """
    with path.open(encoding="utf-8", newline="") as file:
        found = tuple(Claim(**row) for row in csv.DictReader(file))
    for claim in found:
        _ = claim.numbers
        if claim.rule not in RULES:
            raise ParameterError(f"rule of claim {claim.id}: wanted one of {', '.join(RULES)}, got {claim.rule!r}")
    ids = [claim.id for claim in found]
    if len(set(ids)) < len(ids):
        raise ParameterError(f"claims: wanted every id once, got {', '.join(i for i in ids if ids.count(i) > 1)} again")
    return found


# --- The rules --------------------------------------------------------------------------------------------------------

TOLERANCE = 0.2
"""Of a number, a gain or a limit: two GPUs of one model, or two drivers, hardly differ by more."""
SMALLEST_TOLERANCE = 0.02
"""Of a gain: that is how far two measurements of the same thing may lie apart."""
ARITHMETIC = 0.01
"""What rounding explains where a number follows from others."""
SHARE_POINTS = 5.0
"""Percentage points: the shares that the documents give are multiples of ten."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a claimed number and ours are compared."""

    name: str
    meaning: str
    judge: Callable[[Estimate, Range], Kind]
    """Takes our number and the claimed one; for a rule without claimed numbers that is NaN."""


def _overlaps(ours: Estimate, low: float, high: float) -> bool:
    return ours.low <= high and ours.high >= low


def _near(ours: Estimate, claimed: Range) -> Kind:
    within = _overlaps(ours, (1 - TOLERANCE) * claimed.low, (1 + TOLERANCE) * claimed.high)
    return "confirmed" if within else "off"


def gain_band(claimed: Range) -> tuple[float, float]:
    """The factors that confirm a claimed gain: its excess over one, give or take the tolerance."""
    below, above = (max(TOLERANCE * (factor - 1), SMALLEST_TOLERANCE) for factor in (claimed.low, claimed.high))
    return claimed.low - below, claimed.high + above


def _gain(ours: Estimate, claimed: Range) -> Kind:
    if _overlaps(ours, *gain_band(claimed)):
        return "confirmed"
    return "refuted" if ours.high <= 1 else "off"


def _beats(ours: Estimate, _: Range) -> Kind:
    return "confirmed" if ours.low > 1 else "refuted"


def _at_least(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if ours.high >= claimed.low else "refuted"


def _at_most(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if ours.low <= claimed.high else "refuted"


def _recomputes(ours: Estimate, claimed: Range) -> Kind:
    within = _overlaps(ours, (1 - ARITHMETIC) * claimed.low, (1 + ARITHMETIC) * claimed.high)
    return "confirmed" if within else "refuted"


def _share(ours: Estimate, claimed: Range) -> Kind:
    return "confirmed" if _overlaps(ours, claimed.low - SHARE_POINTS, claimed.high + SHARE_POINTS) else "off"


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="near",
            meaning=(
                f"A rate, time or count: confirmed where our 95 % interval meets the claimed number, or range, widened "
                f"by {100 * TOLERANCE:.0f} %; else off, by the factor that is said."
            ),
            judge=_near,
        ),
        Rule(
            name="gain",
            meaning=(
                f"A speed-up: confirmed where our interval meets the claimed factor, its excess over one widened by "
                f"{100 * TOLERANCE:.0f} %, at least by {SMALLEST_TOLERANCE:g}; refuted where our whole interval says "
                "that there is no gain; else off."
            ),
            judge=_gain,
        ),
        Rule(
            name="beats",
            meaning="A comparison without a number: confirmed where our whole interval lies above one, else refuted.",
            judge=_beats,
        ),
        Rule(
            name="at_least",
            meaning="A target: confirmed where our interval reaches the low end of the claim, else refuted.",
            judge=_at_least,
        ),
        Rule(
            name="at_most",
            meaning="A limit: refuted where our whole interval lies above the claim's high end, else confirmed.",
            judge=_at_most,
        ),
        Rule(
            name="recomputes",
            meaning=(
                f"Arithmetic on numbers that the document gives itself: confirmed where it comes out within "
                f"{100 * ARITHMETIC:.0f} %, which rounding explains, else refuted."
            ),
            judge=_recomputes,
        ),
        Rule(
            name="share",
            meaning=(
                f"Shares of a whole: confirmed where every one lies within {SHARE_POINTS:.0f} percentage points, "
                "else off."
            ),
            judge=_share,
        ),
        Rule(
            name="same_problem",
            meaning=(
                "A ratio of two times: not comparable where they are of two problems, and then the ratio for one and "
                "the same problem is said; else as a gain."
            ),
            judge=_gain,
        ),
    )
}
"""The rules that data/claims.csv names. They know numbers alone, not what a claim is about."""


def judge(rule: str, ours: Estimate, claimed: Range | None) -> Kind:
    """The verdict on one claimed number.

    Raises:
        ParameterError: no such rule, or a rule that needs a claimed number gets none.
    """
    if rule not in RULES:
        raise ParameterError(f"rule: wanted one of {', '.join(RULES)}, got {rule!r}")
    if claimed is None and rule != "beats":
        raise ParameterError(f"rule {rule}: wanted a claimed number, got none; `beats` needs none")
    return RULES[rule].judge(ours, claimed or Range(low=math.nan, high=math.nan))


def least_favourable(kinds: list[Kind]) -> Kind:
    """Of the verdicts on a claim's numbers, the one that counts."""
    return max(kinds, key=list(KINDS).index)


# --- Verdicts ---------------------------------------------------------------------------------------------------------


class Number(BaseModel):
    """One claimed number beside ours."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    claimed: str
    """Empty where the claim gives none."""
    value: float
    low: float
    """Lower end of the 95 % interval of a median, or of a ratio of two; the value where it is exact."""
    high: float
    unit: str
    verdict: Kind


class Verdict(BaseModel):
    """What the records say about one claim: an entry of data/<gpu>/verdicts.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    id: str
    source: str
    claim: str
    claimed: str
    gpu: str
    """The model that the claim is about."""
    rule: str
    verdict: Kind
    numbers: tuple[Number, ...]
    """One for each claimed number; none where nothing is on record."""
    measured_on: str
    """Folder under data/ of the GPU whose records were asked."""
    records: tuple[str, ...]
    """File and line of each record under data/; none where the number was computed or compiled."""
    stages: tuple[str, ...]
    """Stages and dead ends that it is about."""
    older: bool
    """Whether a record that it rests on is older than the rules, so that its outcome could be known to their author."""
    reason: str
    """One sentence."""
    conclusion: str
    """What may be concluded for the model that the claim is about; empty where there is nothing to add."""

    @property
    def decisive(self) -> Number | None:
        """The number that the verdict hangs on: of several the least favourable."""
        return max(self.numbers, key=lambda one: list(KINDS).index(one.verdict), default=None)

    def flat(self) -> dict[str, object]:
        """As `flashlab claims --json` prints it."""
        one = self.decisive
        return {
            "id": self.id,
            "verdict": self.verdict,
            "value": one.value if one else None,
            "unit": one.unit if one else None,
            "interval": [one.low, one.high] if one else None,
            "record": self.records[0] if self.records else None,
            "reason": self.reason,
            **self.model_dump(mode="json", exclude={"id", "verdict", "reason"}),
        }


def _as_factors(rule: str, unit: str, ours: Estimate, claimed: Range | None) -> tuple[Estimate, Range | None]:
    """Gains in percent as the factors that the rule takes."""
    if rule != "gain" or unit != "%" or claimed is None:
        return ours, claimed
    return (
        Estimate(value=1 + ours.value / 100, low=1 + ours.low / 100, high=1 + ours.high / 100),
        Range(low=1 + claimed.low / 100, high=1 + claimed.high / 100),
    )


_WORDS: Mapping[Kind, str] = {
    "confirmed": "confirmed",
    "off": "off",
    "refuted": "refuted",
    "not_comparable": "not comparable",
    "needs_hardware": "needs hardware",
    "pending": "pending",
}


def words(kind: Kind) -> str:
    """A verdict for people."""
    return _WORDS[kind]


def shown(number: Number) -> str:
    """Our number with its interval and unit, for people."""
    value = tables.tiny(number.value) if 0 < abs(number.value) < 1e-3 else tables.number(number.value)
    if number.low == number.high and number.value == int(number.value):
        value = f"{number.value:,.0f}"  # a count
    unit = "" if number.unit in ("x", "abs") else f" {number.unit}"
    sign = "×" if number.unit == "x" else ""
    if number.low == number.high:
        return f"{sign}{value}{unit}"
    return f"{sign}{value} [{tables.number(number.low, 4)}, {tables.number(number.high, 4)}]{unit}"


def _against(number: Number, claimed: Range | None) -> str:
    """Our number beside the claimed one, for people."""
    if claimed is None:
        return shown(number)
    told = f"{shown(number)} against {claimed}"
    if number.verdict == "off" and number.unit != "%" and claimed.low > 0 and number.value > 0:
        above = number.value > claimed.high
        factor = number.value / claimed.high if above else claimed.low / number.value
        told += f", a factor of {tables.number(factor)} {'above' if above else 'below'}"
    return told


def evaluate(claim: Claim, evidence: Evidence) -> Verdict:
    """The verdict on one claim from a GPU's records. Never raises for what is not on record: it is `pending` then."""
    common: dict[str, Any] = {
        "id": claim.id,
        "source": claim.source,
        "claim": claim.claim,
        "claimed": claim.claimed,
        "gpu": claim.gpu,
        "rule": claim.rule,
        "measured_on": evidence.gpu,
    }
    try:
        finding = EVALUATORS[claim.id](evidence)
    except PendingError as missing:
        carries, why = concludes(claim.gpu, evidence.gpu, "time")
        absolute = not carries and claim.rule == "near"
        return Verdict(
            **common,
            verdict="needs_hardware" if absolute else "pending",
            numbers=(),
            records=(),
            stages=(),
            older=False,
            reason=f"What would tell is not on record: `{missing}` makes it.",
            conclusion=why if absolute else "",
        )
    carries, conclusion = concludes(claim.gpu, evidence.gpu, finding.about, finding.demand_tb_s)
    numbers, told = [], []
    for ours, claimed, unit in zip(finding.estimates, claim.numbers, claim.units, strict=True):
        kind: Kind = judge(claim.rule, *_as_factors(claim.rule, unit, ours, claimed))
        if claim.rule == "same_problem" and len(set(finding.problems)) > 1:
            kind = "not_comparable"
        if not carries:
            kind = "needs_hardware"
        number = Number(
            claimed="" if claimed is None else str(claimed),
            value=ours.value,
            low=ours.low,
            high=ours.high,
            unit=unit,
            verdict=kind,
        )
        numbers.append(number)
        told.append(_against(number, claimed))
    if conclusion and not _carries_time(claim.gpu, evidence.gpu):
        more = shown_without(claim.gpu, finding.stages, evidence.gpu, evidence.data)
        conclusion = " ".join(filter(None, (conclusion, more)))
    compared = f" (compared: {' with '.join(finding.problems)})" if finding.problems else ""
    beside = f"; {finding.beside}" if finding.beside else ""
    return Verdict(
        **common,
        verdict=least_favourable([number.verdict for number in numbers]),
        numbers=tuple(numbers),
        records=finding.places,
        stages=tuple(name for name in finding.stages if name not in peers.PEERS),
        older=any(_older(place) for place in finding.places),
        reason=f"{_capital(finding.said)}: {'; '.join(told)}{compared}{beside}.",
        conclusion=conclusion,
    )


def _older(place: str) -> bool:
    """Whether a record was made before the rules were."""
    return Path(place).name < RULES_WRITTEN


def _carries_time(claimed: str, measured: str) -> bool:
    kin = kinship(claimed, measured)
    return kin is not None and kin.time


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdicts(gpu: str, data: Path = DATA, claims: Path = CLAIMS) -> tuple[Verdict, ...]:
    """The verdict on every claim from a GPU's records, in the claims' order.

    Raises:
        NoDataError: the GPU has no run.
        ParameterError: as `read`.
    """
    records.runs(gpu, data)
    evidence = Evidence(gpu, data)
    return tuple(evaluate(claim, evidence) for claim in read(claims))


def write(found: Sequence[Verdict], gpu: str, data: Path = DATA) -> Path:
    """Write data/<gpu>/verdicts.json, and CHECKSUMS anew.

    Raises:
        OutputError: it cannot be written.
    """
    path = writable_dir(data / gpu, "verdicts") / VERDICTS
    text = json.dumps([one.model_dump(mode="json") for one in found], indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    records.write_checksums(gpu, data)
    return path


def read_verdicts(path: Path) -> tuple[Verdict, ...]:
    """Verdicts that `write` wrote.

    Raises:
        NoDataError: there is no such file.
        DamagedRecordError: it holds something else.
    """
    try:
        return tuple(Verdict.model_validate(entry) for entry in json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise NoDataError(f"wanted verdicts in {path}, found none; `flashlab claims --write` makes them") from None
    except (ValueError, TypeError) as error:
        raise DamagedRecordError(
            f"wanted verdicts in {path}, got {error}; `flashlab claims --write` makes them"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A claim on which two sets of verdicts differ; None where one of them lacks it."""

    id: str
    here: Verdict | None
    there: Verdict | None


def differences(here: Sequence[Verdict], there: Sequence[Verdict]) -> tuple[Difference, ...]:
    """The claims whose verdicts differ, whatever their numbers are."""
    ours, theirs = ({one.id: one for one in found} for found in (here, there))
    return tuple(
        Difference(id=name, here=ours.get(name), there=theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if _kind(ours.get(name)) != _kind(theirs.get(name))
    )


def _kind(one: Verdict | None) -> Kind | None:
    return one.verdict if one else None


# --- Measuring what nothing else measures -----------------------------------------------------------------------------

LIBRARIES = ("sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
"""Libraries that the claims of the suite `claims` are about."""
STAGES = (
    *("00_naive", "01_coalesced", "02_half2", "03_warp_rows", "04_wmma_qk", "05_wmma", "06_cp_async"),
    *("t0_triton", *(name for name, stage in registry.CUDA_STAGES.items() if "PINGPONG" in stage.params)),
)
"""Stages that claims of the suite `claims` are about."""
DEAD_ENDS: tuple[tuple[Problem, tuple[str, ...]], ...] = (
    (FIRST, ("00_naive", "branch_free", "cublaslt_unfused", "split_k")),
    (SINGLE, ("wmma_no_smem", "fp8_simulated")),
    (PAIR, ("tile48",)),
)
"""Dead ends that claims are about, where they are, with the stage that one of them is held against."""
AXES = ("tile", "warps", "padding-wmma", "reduction", "buffers-wmma", "registers", "feed", "order-wgmma")
"""Ablations that claims are about."""
SPLIT = ("04_wmma_qk",)
"""Stages whose time is split into parts for a claim."""
CEILINGS = ("launch", "copy", "mma_sync_float16", "tensor_float16")
"""Limits that claims are held against."""
SINGLE_CALLS = 300
_WARM_UP_CALLS = 20


def measure(
    *,
    data: Path = DATA,
    device: int = 0,
    stages: Sequence[str] | None = None,
    calls: int = SINGLE_CALLS,
    progress: Callable[[bench.Progress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[Path, ...]:
    """Measure what the claims need and no other command does: the suite `claims`, some limits, and single calls.

    Args:
        data: folder of the records.
        device: CUDA device index.
        stages: of `STAGES`, only these ids; all of them where None.
        calls: how many single calls are timed.
        progress, note: as `bench.run` takes them.

    Returns:
        The files of the records.

    Raises:
        As `bench.run`.
    """
    problems = [problem for problem in suite("claims") if not problem.causal]
    run = bench.run(
        problems,
        stages=[name for name in STAGES if stages is None or name in stages],
        peers=LIBRARIES,
        plan=bench.plan_of("claims"),
        ceilings=CEILINGS,
        data=data,
        device=device,
        progress=progress,
        note=note,
    )
    return run, time_calls("sdpa", SINGLE, data=data, device=device, calls=calls)


def reproduce(
    *,
    data: Path = DATA,
    device: int = 0,
    stages: Sequence[str] | None = None,
    progress: Callable[[bench.Progress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[Path, ...]:
    """Measure what judges the claims, in a few minutes: the first shape, dead ends, ablations, parts, and `measure`.

    One run holds stages and libraries, another one dead ends with what they are held against: a run with a dead end
    tells of dead ends alone (`results`). Axes and parts that this very code measured since this machine's start are not
    measured again. Profiles are not taken anew: Nsight Compute needs a permission that a rented GPU may refuse; nor is
    the comparison over hostile lengths, which `flashlab check` records.

    Args:
        data, device, stages, progress, note: as `measure` takes them.

    Returns:
        The files of the records.

    Raises:
        As `bench.run`.
    """
    where: dict[str, Any] = {"data": data, "device": device, "progress": progress}
    made = []
    for wanted, ceilings in zip(_wanted(stages), (CEILINGS, ()), strict=True):
        names = dict.fromkeys(name for of_problem in wanted.values() for name in of_problem)
        made.append(
            bench.run(
                list(wanted),
                stages=[name for name in names if name not in peers.PEERS],
                peers=[name for name in names if name in peers.PEERS],
                only=partial(_is_in, wanted),
                plan=bench.plan_of("claims"),
                ceilings=ceilings,
                note=note,
                **where,
            )
        )
    slug = gpus.info(device).slug
    just_made = _just_made()
    levels = {
        (one.axis, one.level)
        for one in records.ablations(slug, data)
        if one.problem.problem() == FIRST and just_made(one)
    }
    axes = [name for name in AXES if any((name, level.name) not in levels for level in ablation.AXES[name].levels)]
    if axes:
        made.append(ablation.measure(axes, **where))
    parts = {
        (one.stage, one.left_out)
        for one in records.parts(slug, data)
        if one.problem.problem() == SINGLE and just_made(one)
    }
    if any((stage, part) not in parts for stage in SPLIT for part in ablation.PARTS):
        made.append(ablation.split(SPLIT, note=note, **where))
    return (*made, time_calls("sdpa", SINGLE, data=data, device=device))


def _wanted(stages: Sequence[str] | None) -> tuple[Mapping[Problem, Sequence[str]], Mapping[Problem, Sequence[str]]]:
    """What `reproduce` times at each problem, of the ladder only `stages` where those are named; and the dead ends."""

    def chosen(ids: Iterable[str]) -> list[str]:
        return [name for name in ids if stages is None or name in stages]

    ladder = {problem: [*chosen(registry.STAGES), *LIBRARIES] for problem in suite("first")}
    ladder |= {problem: [*chosen(STAGES), *LIBRARIES] for problem in suite("claims") if not problem.causal}
    ladder[Problem.parse(FIRST_SHAPE, dtype="bfloat16")] = ["fa3"]
    return ladder, {problem: [*ids, "sdpa"] for problem, ids in DEAD_ENDS}


def _is_in(wanted: Mapping[Problem, Sequence[str]], problem: Problem, name: str) -> bool:
    return name in wanted[problem]


def _just_made() -> Callable[[records.Ablation | records.Part], bool]:
    """Says whether a record is of this code, unedited, and of this start of this machine."""
    commit, dirty = provenance.source()
    source = records.Source(commit=commit, dirty=dirty)
    at = provenance.start()
    start = records.Start.model_validate(at) if at and not dirty else None

    def just_made(one: records.Ablation | records.Part) -> bool:
        return start is not None and one.source == source and one.start is not None and one.start.same_as(start)

    return just_made


def time_calls(name: str, problem: Problem, *, data: Path = DATA, device: int = 0, calls: int = SINGLE_CALLS) -> Path:
    """Time single calls of a library by the host's clock, launch and wait included; the file of data/<gpu>/calls.

    Raises:
        ParameterError: no such library, or no calls.
        UnsupportedError: it cannot do the problem here.
        NoGpuError, MissingPackageError, OutputError: as they say.
    """
    if calls < 1:
        raise ParameterError(f"calls: wanted a positive number, got {calls}")
    info = gpus.info(device)
    peer = peers.get(name)
    why_not = peer.why_not(problem, compute_capability=info.compute_capability)
    if why_not:
        raise UnsupportedError(why_not.reason)
    writable_dir(data / info.slug / "calls", "records")
    torch = importlib.import_module("torch")
    torch.cuda.set_device(device)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    q, k, v = (
        torch.randn(one, generator=generator, device="cuda").to(getattr(torch, problem.dtype))
        for one in (shape, kv_shape, kv_shape)
    )
    times = []
    with torch.no_grad():
        attend = peer.build(problem)
        given = peers.in_layout(peer.layout, q, k, v)
        for index in range(_WARM_UP_CALLS + calls):
            torch.cuda.synchronize()
            began = perf_counter_ns()
            attend(*given)
            torch.cuda.synchronize()
            if index >= _WARM_UP_CALLS:
                times.append((perf_counter_ns() - began) / 1e3)
    commit, dirty = provenance.source()
    source = records.Source(commit=commit, dirty=dirty)
    now = datetime.now(UTC)
    run = records.run_id(source, now)
    path = data / info.slug / "calls" / f"{run}.jsonl"
    records.append(
        path,
        Call(
            run=run,
            time=now.isoformat(timespec="seconds"),
            gpu=records.Gpu.model_validate({field: getattr(info, field) for field in records.Gpu.model_fields}),
            source=source,
            software=provenance.software(),
            name=name,
            problem=records.ProblemFields.of(problem),
            time_us=tuple(times),
        ),
    )
    records.write_checksums(info.slug, data)
    return path


# --- Tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """Claims that cannot all hold."""

    what: str
    ids: tuple[str, ...]


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(what="One scalar baseline at one shape on one GPU has two rates.", ids=("A01", "B01")),
    Contradiction(
        what="The two rates lie a factor of hundreds apart, the latencies that are made of them one of thousands.",
        ids=("A01", "A03", "A15"),
    ),
    Contradiction(what="The factor is not the ratio of the two latencies beside it.", ids=("C04", "C06", "C05")),
    Contradiction(
        what="A rate is called ambitious for a chip on which a library is measured at many times that rate.",
        ids=("B17", "A03"),
    ),
    Contradiction(
        what="A share of a batch is set against a whole call of a larger problem.", ids=("C07", "C06", "C09")
    ),
    Contradiction(what="A limit of shared memory is what a block gets unasked, not what the chip has.", ids=("D04",)),
    Contradiction(
        what="What Amdahl's law is said to allow was exceeded, and the formula is not the law.", ids=("D07", "D08")
    ),
    Contradiction(
        what="A kernel is memory-bound in the text and far from the roof by its own shape and time.", ids=("D06", "B16")
    ),
)
"""Where the documents contradict one another, themselves, or the chip."""

NOTHING_YET = (
    "**Nothing has been measured yet.** No GPU has records that could judge the claims; `flashlab bench` makes some."
)


def summary(found: Sequence[Verdict]) -> str:
    """How many claims of each document got each verdict, as a Markdown table."""
    documents = list(dict.fromkeys(_document(one) for one in found))
    kinds = [kind for kind in KINDS if any(one.verdict == kind for one in found)]

    def line(title: str, of: Sequence[Verdict]) -> list[tables.Cell]:
        return [title, *(sum(one.verdict == kind for one in of) for kind in kinds), len(of)]

    rows = [line(document, [one for one in found if _document(one) == document]) for document in documents]
    return tables.markdown(("document", *map(words, kinds), "claims"), [*rows, line("all", found)])


def _document(one: Verdict) -> str:
    return one.source.partition(" § ")[0]


def table(
    found: Sequence[Verdict],
    *,
    record: Callable[[str], str] = "`{}`".format,
    stage: Callable[[str], str] = "`{}`".format,
) -> str:
    """Every claim with its verdict, our number, where it comes from and why, as a Markdown table.

    Args:
        found: the verdicts.
        record: makes a link of a record's place, `nvidia-h200/runs/….jsonl:12`.
        stage: makes a link of the id of a stage or dead end.
    """
    rows: list[list[tables.Cell]] = []
    for one in found:
        links = ", ".join([*map(record, one.records), *map(stage, one.stages)])
        origin = f"From {links}{', older than the rules' if one.older else ''}." if links else ""
        told = " ".join(filter(None, (one.reason, one.conclusion, origin)))
        rows.append(
            [
                one.id,
                f"{one.claim}<br><small>{one.source}</small>",
                one.claimed or None,
                words(one.verdict),
                shown(one.decisive) if one.decisive else None,
                told,
                f"{one.gpu}, `{one.rule}`",
            ]
        )
    header = ("id", "claim", "claimed", "verdict", "ours", "why", "on, rule")
    return tables.markdown(header, rows, left=len(header))


def standing(found: Sequence[Verdict]) -> str:
    """How many verdicts rest on records that are older than the rules, in a sentence."""
    judged = [one for one in found if one.verdict != "pending"]
    older = sum(one.older for one in judged)
    return (
        f"{older} of the {len(judged)} verdicts rest on records that are older than the rules: their outcome could be "
        "known when the rules were written, and the table says which they are. The others were measured, computed or "
        "compiled afterwards, or need no record."
    )


def rules_table() -> str:
    """The rules, as a Markdown table."""
    return tables.markdown(("rule", "what it says"), [(f"`{one.name}`", one.meaning) for one in RULES.values()], left=2)


def kinds_table() -> str:
    """The verdicts and what each means, as a Markdown table."""
    return tables.markdown(("verdict", "meaning"), [(words(kind), text) for kind, text in KINDS.items()], left=2)


def contradictions(found: Sequence[Verdict]) -> str:
    """Where the claims contradict one another or the chip, and what we found, as a Markdown table."""
    by_id = {one.id: one for one in found}
    rows: list[list[tables.Cell]] = []
    for one in CONTRADICTIONS:
        these = [by_id[name] for name in one.ids if name in by_id]
        rows.append(
            [
                ", ".join(each.id for each in these),
                one.what,
                "; ".join(f"{each.id}: {each.claimed or each.claim}" for each in these),
                "; ".join(f"{each.id}: {shown(each.decisive)}" for each in these if each.decisive) or None,
                ", ".join(f"{each.id} {words(each.verdict)}" for each in these),
            ]
        )
    return tables.markdown(("claims", "contradiction", "claimed", "ours", "verdicts"), rows, left=5)


def kinship_table() -> str:
    """What a measurement on one GPU says of another, as a Markdown table."""
    return tables.markdown(
        ("claimed on", "measured on", "the same", "what differs", "what carries over"),
        [
            (
                one.claimed,
                f"`{one.measured}`",
                one.same,
                one.differs,
                "ratios, and times that device memory does not bound" if one.time else "machine code; ratios as a hint",
            )
            for one in KINSHIPS
        ],
        left=5,
    )
