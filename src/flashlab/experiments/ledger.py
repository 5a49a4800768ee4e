"""The ledger: claims of the source documents, the rule for each, and the verdicts from the records.

    data/claims.csv               the claims, each in its document's words, with what we add to them, and its rule
    data/<gpu>/verdicts.json      the verdicts, `flashlab claims --write`

A claim names a number, or several joined by a slash, or none where it only says that one thing beats another. An
evaluator finds our numbers for it, with the interval in which they lie; a rule, which knows neither the claim nor
whom it flatters, compares the two. Of several numbers the least favourable verdict counts.

What hangs on a kernel, shape or baseline that no document states is not comparable, whatever our number is.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, ValidationInfo, field_validator

from flashlab.core.errors import DamagedRecordError, NoDataError, ParameterError
from flashlab.core.facts import Facts
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem, suite
from flashlab.experiments import ablation, enqueue, rules_log, sources
from flashlab.experiments.evidence import (
    QUANTITIES,
    Entry,
    Finding,
    PendingError,
    Records,
    entries,
    facts,
    find,
)
from flashlab.kernels import peers, registry
from flashlab.measure import bench, ceilings
from flashlab.measure.options import OPTIONS, Options
from flashlab.query.kinship import KINSHIPS, MODELS, kinship
from flashlab.query.rows import grouped
from flashlab.query.select import Results
from flashlab.query.statistics import Estimate
from flashlab.record import store
from flashlab.record.schema import Call
from flashlab.show import tables
from flashlab.show.notebook import NOTHING_YET
from flashlab.show.pages import Output, dictionary, stage_link

CLAIMS = DATA / "claims.csv"
VERDICTS = "verdicts.json"

Kind = Literal["confirmed", "undecided", "inaccurate", "refuted", "not_comparable", "needs_hardware", "pending"]
KINDS: Mapping[Kind, str] = facts()["verdicts"]
"""Verdicts with their meanings, the least favourable last, for claims of several numbers."""
FEW_STARTS = 3
"""Numbers from fewer starts of a machine are marked."""


# --- What is claimed --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Range:
    """A claimed number; `low` and `high` are equal unless the claim gives a range."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}–{self.high:g}"

    @classmethod
    def parse(cls, text: str) -> Range:
        """Parse a number, or two joined by a hyphen; raises ValueError otherwise."""
        match = re.fullmatch(rf"({_NUMBER})(?:-({_NUMBER}))?", text)
        if match is None:
            raise ValueError(f"wanted a number, or two joined by a hyphen, got {text!r}")
        return cls(low=float(match[1]), high=float(match[2] or match[1]))


_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


Condition = Literal["gpu", "shape", "dtype", "mask", "kernel", "measure", "number"]
CONDITIONS: Mapping[Condition, str] = facts()["conditions"]
"""Conditions of claims, with display names. A `number` that we add is not in the document."""
_ELLIPSIS = " … "


class Stated(Facts):
    """A condition stated by the document."""

    text: str
    lines: tuple[int, ...]
    """Of the document, where it says so."""


class Claim(Facts):
    """One line of data/claims.csv: a document's claim, separate from what we add to make it testable.

    A condition may be both stated and added to: a document names a model, and the number of its layers is ours.
    """

    id: str
    """A letter for the document and a number."""
    source: str
    """Title of the document, and the section of the claim."""
    lines: Annotated[tuple[int, ...], BeforeValidator(str.split)]
    """Of the document, one for each part of the quote."""
    quote: Annotated[tuple[str, ...], BeforeValidator(lambda text: [*filter(None, text.split(_ELLIPSIS))])]
    """The document's words, in the file joined by an ellipsis; without its markup, and with single spaces."""
    claim: str
    """The claim in our words."""
    value: str
    """As the document has it, or as `adds` says of it; empty where there is no number."""
    unit: str
    """Units of the numbers, joined by a slash if they differ."""
    states: Mapping[Condition, Stated]
    """Conditions that the document states: in the file `gpu: H100 @4; shape: …`, with the lines that say so."""
    adds: Mapping[Condition, str]
    """Conditions of ours that the document does not state: in the file `shape: …; kernel: …`."""
    why: str
    """Why we add them, and where what is judged is not what the document has; empty where nothing is added."""
    how_to_test: str
    not_comparable: str
    """Why it cannot be judged here, in a sentence or two; empty if it can."""
    rule: str
    """Name of one of `RULES`."""

    @field_validator("states", "adds", mode="before")
    @classmethod
    def _conditions(cls, text: str, info: ValidationInfo) -> dict[str, object]:
        conditions = dict(part.split(": ", 1) for part in filter(None, text.split("; ")))
        if info.field_name == "adds":
            return {**conditions}
        stated = ((name, said.rpartition(" @")) for name, said in conditions.items())
        return {name: {"text": words, "lines": lines.split(",")} for name, (words, _, lines) in stated}

    @property
    def gpu(self) -> str:
        """The GPU model of the claim: as stated by the document, else as added by us."""
        return self.states["gpu"].text if "gpu" in self.states else self.adds["gpu"]

    @property
    def attribution(self) -> dict[str, object]:
        """The claim and our additions, as printed by `flashlab claims --json`."""
        whose = self.model_dump(mode="json", include={"lines", "states", "why"})
        return {"quote": _ELLIPSIS.join(self.quote), "assumptions": dict(self.adds), **whose}

    @cached_property
    def numbers(self) -> tuple[Range | None, ...]:
        """The claimed numbers; a single None if there are none."""
        return tuple(map(Range.parse, self.value.split("/"))) if self.value else (None,)

    @property
    def units(self) -> tuple[str, ...]:
        """The unit of each of `numbers`."""
        count, units = len(self.numbers), self.unit.split("/")
        return tuple(units) if len(units) == count > 1 else (self.unit,) * count

    @property
    def claimed(self) -> str:
        """The numbers with their units to display; empty if there are none."""
        unit = "/".join(dict.fromkeys(self.unit.split("/"))) if len(self.numbers) > 1 else self.unit
        value = self.value.replace("-", "–").replace("e–", "e-")
        return f"×{value}" if value and unit == "x" else f"{value} {unit}".removesuffix(" abs") if value else ""


def read(path: Path = CLAIMS) -> tuple[Claim, ...]:
    """The claims of a file, in order; raises ValueError for an invalid line."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(Claim.model_validate, csv.DictReader(file)))


# --- The rules --------------------------------------------------------------------------------------------------------


class Rule(Facts):
    """How a claimed number and ours are compared; ledger.toml explains the fields."""

    meaning: str
    otherwise: Kind
    relative: float = 0
    excess: float = 0
    least: float = 0
    open: Literal["above", "below", "wholly above one", ""] = ""
    no_gain: float = -math.inf

    @property
    def words(self) -> str:
        """Its meaning, with its numbers."""
        return self.meaning.format(percent=100 * (self.relative or self.excess), least=self.least)

    def band(self, claimed: Range) -> tuple[float, float]:
        """The range of numbers that confirm a claimed one."""
        below, above = (
            max(self.relative * end + self.excess * (end - 1), self.least) for end in (claimed.low, claimed.high)
        )
        low = -math.inf if self.open == "below" else claimed.low - below
        return low, math.inf if self.open == "above" else claimed.high + above


RULES: Mapping[str, Rule] = {name: Rule.model_validate(rule) for name, rule in facts()["rules"].items()}
"""The rules that data/claims.csv names."""


def judge(rule: str, ours: Estimate, claimed: Range | None) -> Kind:
    """The verdict on one claimed number.

    Raises:
        ParameterError: a rule that needs a claimed number gets none.
    """
    by = RULES[rule]
    if by.open == "wholly above one":
        return "confirmed" if ours.low > 1 else by.otherwise if ours.high <= 1 else "undecided"
    if claimed is None:
        raise ParameterError(f"rule {rule}: wanted a claimed number, got none; `beats` needs none")
    low, high = by.band(claimed)
    if low <= ours.low and ours.high <= high:
        return "confirmed"
    if ours.low <= high and ours.high >= low:
        return "undecided"
    return "refuted" if ours.high <= by.no_gain else by.otherwise


# --- Verdicts ---------------------------------------------------------------------------------------------------------


class Number(Facts):
    """A claimed number compared with ours."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    claimed: str
    """The claimed number; empty if the claim has none."""
    value: float
    low: float
    """Lower end of the 95 % interval over starts of a median or a ratio of medians; the value if it is exact."""
    high: float
    starts: int | None
    """Number of starts that it was measured on; None if it was counted, computed or compiled."""
    unit: str
    verdict: Kind
    """Verdict by the rule, for any GPU; `not_comparable` if the claim is."""


class Verdict(Facts):
    """The verdict on one claim: an entry of data/<gpu>/verdicts.json."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    id: str
    source: str
    claim: str
    claimed: str
    gpu: str
    """The model that the claim is about."""
    rule: str
    verdict: Kind
    numbers: tuple[Number, ...] = ()
    """One comparison per claimed number; none if nothing is on record."""
    measured_on: str
    """Folder under data/ of the GPU of `records`; empty if there are none."""
    records: tuple[str, ...] = ()
    """File and line of each record under data/; none if the number was computed or compiled."""
    stages: tuple[str, ...] = ()
    """Stages and dead ends of the claim."""
    reason: str
    """The reason, in one sentence."""
    conclusion: str = ""
    """What follows for the GPU model of the claim; may be empty."""
    command: str = ""
    """The command that makes missing records, on the GPU model of the claim; empty if none is missing."""

    @property
    def decisive(self) -> Number | None:
        """The deciding number: the least favourable of several."""
        return max(self.numbers, key=lambda number: list(KINDS).index(number.verdict), default=None)

    @property
    def starts(self) -> int | None:
        """The minimum number of starts over its numbers; None if none was measured."""
        return min((number.starts for number in self.numbers if number.starts is not None), default=None)

    def flat(self) -> dict[str, object]:
        """As `flashlab claims --json` prints it."""
        number = self.decisive
        return {
            "id": self.id,
            "verdict": self.verdict,
            "value": number and number.value,
            "unit": number and number.unit,
            "interval": number and [number.low, number.high],
            "starts": self.starts,
            "record": self.records[0] if self.records else None,
            "reason": self.reason,
            **self.model_dump(mode="json", exclude={"id", "verdict", "reason"}),
        }


def words(kind: str) -> str:
    """A verdict to display."""
    return kind.replace("_", " ")


def shown(number: Number) -> str:
    """Our number to display, with interval, unit and, if few, starts."""
    value = tables.tiny(number.value) if 0 < abs(number.value) < 1e-3 else tables.number(number.value)
    if number.low == number.high and number.value == int(number.value):
        value = f"{number.value:,.0f}"  # a count
    unit = "" if number.unit in ("x", "abs") else f" {number.unit}"
    sign = "×" if number.unit == "x" else ""
    of_starts = ""
    if number.starts is not None and number.starts < FEW_STARTS:
        of_starts = f" ({'one start' if number.starts == 1 else f'{number.starts} starts'})"
    ends = ""
    if number.low != number.high:
        ends = f" [{tables.number(number.low, 4)}, {tables.number(number.high, 4)}]"
    return f"{sign}{value}{ends}{unit}{of_starts}"


def _against(number: Number, claimed: Range | None) -> str:
    """Our number and the claimed one, to display."""
    if claimed is None:
        return shown(number)
    sentence = f"{shown(number)} against {claimed}"
    if number.verdict == "inaccurate" and number.unit != "%" and claimed.low > 0 and number.value > 0:
        above = number.value > claimed.high
        factor = number.value / claimed.high if above else claimed.low / number.value
        sentence += f", a factor of {tables.number(factor)} {'above' if above else 'below'}"
    return sentence


def _numbers(claim: Claim, unit: str, finding: Finding) -> tuple[Number, ...]:
    """Judge our numbers one by one by the claim's rule, if it is comparable."""
    measured = finding.numbers[: len(claim.numbers)]
    units = claim.units
    if claim.not_comparable and (unit or len(units) != len(measured)):
        units = (unit or claim.unit,) * len(measured)
    numbers = []
    for ours, claimed, of in zip(measured, claim.numbers, units, strict=not claim.not_comparable):
        if claim.not_comparable:
            numbers.append(Number(claimed="", unit=of, verdict="not_comparable", **vars(ours)))
            continue
        factor = claimed
        if claim.rule == "gain" and of == "%":  # A gain in percent is judged as the factor that it is.
            factor = claimed and Range(low=1 + claimed.low / 100, high=1 + claimed.high / 100)
        shown_ours = ours if factor == claimed else ours.percent_gain()
        kind = judge(claim.rule, ours, factor)
        numbers.append(Number(claimed=str(claimed or ""), unit=of, verdict=kind, **vars(shown_ours)))
    return tuple(numbers)


def _reason(claim: Claim, finding: Finding, numbers: Sequence[Number]) -> str:
    """A sentence on our numbers and the claimed ones; empty if there are none."""
    if not numbers:
        return ""
    against = [None] * len(numbers) if claim.not_comparable else claim.numbers
    compared = "; ".join(_against(number, claimed) for number, claimed in zip(numbers, against, strict=True))
    beside = f"; {finding.beside}" if finding.beside else ""
    return f"{finding.text[:1].upper()}{finding.text[1:]}: {compared}{beside}."


def evaluate(claim: Claim, records: Records) -> Verdict:
    """The verdict on one claim. Never raises for what is not on record: it `needs_hardware` or is `pending` then.

    A time, or a ratio of times, is judged by records of the model that the claim is about, and by no others. Where that
    model has none here, what `records` say stands beside. The rest is the same on every GPU.
    """
    entry = entries()[claim.id]
    home = records.of_gpu(MODELS[claim.gpu].folder) if claim.gpu in MODELS else records
    of_its_gpu, *_ = QUANTITIES[entry.quantity]
    finding, used, command = None, home, ""
    try:
        finding = find(home, entry)
    except PendingError as missing:
        command = str(missing)
        with suppress(PendingError):
            finding, used = find(records, entry), records
    numbers = _numbers(claim, entry.unit, finding) if finding else ()
    kind: Kind = max((number.verdict for number in numbers), key=list(KINDS).index, default="pending")
    reason = _reason(claim, finding, numbers) if finding else ""
    conclusion = ""
    if claim.not_comparable:
        kind, reason, command = "not_comparable", f"{claim.not_comparable} {reason}".strip(), ""
    elif finding and not of_its_gpu:
        command = ""
    elif command:
        would, kind = kind, "pending" if home.gpu == records.gpu else "needs_hardware"
        conclusion = _without(claim, finding, would, command, records)
    return Verdict(
        **claim.model_dump(include={"id", "source", "claim", "rule"}),
        gpu=claim.gpu,
        claimed=claim.claimed,
        verdict=kind,
        numbers=numbers,
        measured_on=used.gpu if finding and finding.rows else "",
        records=tuple(map(used.place, finding.rows)) if finding else (),
        stages=finding.stages if finding else (),
        reason=reason or "What would tell is not on record.",
        conclusion=conclusion,
        command=command,
    )


def _without(claim: Claim, finding: Finding | None, would: Kind, command: str, records: Records) -> str:
    """The verdict on a claim about a GPU without such a record, and the command that makes one."""
    sentences = [f"On an {claim.gpu}, `{command}` makes the record that decides."]
    kin = kinship(claim.gpu, records.gpu)
    if finding and kin and kin.time:
        sentences.append(f"On {records.gpu}, {kin.same.partition(':')[0]} but for its memory, it is {words(would)}.")
    elif finding:
        sentences.append(f"What {records.gpu} reaches does not carry over.")
    return " ".join(sentences)


def verdicts(
    gpu: str,
    data: Path = DATA,
    follow: Callable[[Collection[str]], Iterable[str]] = iter,
) -> tuple[Verdict, ...]:
    """The verdict on every claim from a GPU's records, in order; `follow` is called with each id."""
    on_record = Records(gpu, data)
    by_id = {claim.id: claim for claim in read()}
    return tuple(evaluate(by_id[claim_id], on_record) for claim_id in follow(by_id))


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Contents of data/<gpu>/verdicts.json."""
    return json.dumps([verdict.model_dump(mode="json") for verdict in verdicts], indent=1, ensure_ascii=False) + "\n"


def write(verdicts: Sequence[Verdict], gpu: str, data: Path = DATA) -> Path:
    """Write data/<gpu>/verdicts.json, and its line in CHECKSUMS; raises as `store.rewrite`."""
    return store.rewrite(gpu, VERDICTS, as_json(verdicts), data)


def as_rows(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """Verdicts with their claims and rules' histories, as printed by `flashlab claims --json`."""
    claims, histories = {claim.id: claim for claim in read()}, rules_log.read().claims
    return [
        {
            **verdict.flat(),
            **claims[verdict.id].attribution,
            "rule_says": RULES[verdict.rule].words,
            "history": histories[verdict.id].flat() if verdict.id in histories else None,
        }
        for verdict in verdicts
    ]


def read_verdicts(path: Path) -> tuple[Verdict, ...]:
    """Read the verdicts written by `write`.

    Raises:
        NoDataError: there is no such file.
        DamagedRecordError: it cannot be read, or holds something else.
    """
    try:
        return tuple(map(Verdict.model_validate, json.loads(path.read_bytes())))
    except FileNotFoundError:
        raise NoDataError(f"wanted verdicts in {path}, found none; `flashlab claims --write` makes them") from None
    except (OSError, ValueError, TypeError) as error:
        message = f"wanted verdicts in {path}, got {error}; `flashlab claims --write` makes them"
        raise DamagedRecordError(message) from error


def differences(
    here: Sequence[Verdict], there: Sequence[Verdict]
) -> Mapping[str, tuple[Verdict | None, Verdict | None]]:
    """The claims with different verdicts in two sets, apart from their numbers; None if a set lacks the claim."""
    ours, theirs = ({verdict.id: verdict for verdict in verdicts} for verdicts in (here, there))
    both = {name: (ours.get(name), theirs.get(name)) for name in (*ours, *theirs)}
    return {name: (a, b) for name, (a, b) in both.items() if (a and a.verdict) != (b and b.verdict)}


# --- Measuring --------------------------------------------------------------------------------------------------------

Plan = Mapping[Problem, Mapping[str, None]]
"""Names of stages and libraries, by the problem at which a run times them."""


def _entries() -> list[Entry]:
    return [entry for claim in entries().values() for entry in (claim, *claim.beside)]


def plans(stages: Sequence[str] | None = None) -> tuple[Plan, Plan]:
    """What claims need: the ladder and the libraries that they name, and dead ends with what they are held against.

    They are two runs, since a run with a dead end tells of dead ends alone (`results`).
    """
    problems = [*suite("first"), *(problem for problem in suite("claims") if not problem.causal)]
    rungs = [name for name in registry.STAGES if stages is None or name in stages]
    ladder = {problem: dict.fromkeys(rungs) for problem in problems}
    dead_ends: dict[Problem, dict[str, None]] = {}
    for entry in _entries():
        if registry.DEAD_ENDS.keys() & set(entry.names) and not entry.counts:
            dead_ends.setdefault(entry.problem, {}).update(dict.fromkeys([*entry.names, "sdpa"]))
        libraries = dict.fromkeys(name for name in entry.names if name in peers.PEERS)
        for problem in problems if entry.problem in problems else [entry.problem] if libraries else []:
            ladder.setdefault(problem, {}).update(libraries)
    return ladder, dead_ends


def measure(
    *,
    stages: Sequence[str] | None = None,
    options: Options = OPTIONS,
) -> tuple[Path, ...]:
    """Measure what judges the claims, in a few minutes: `plans`, limits, ablations, parts and single calls.

    Where the options say `resume`, what is on record of the same code is not measured again. Profiles are not taken:
    Nsight Compute needs a permission that a rented GPU may refuse; nor is the comparison over hostile lengths, which
    `flashlab check` records.

    Returns:
        The files of the records.

    Raises:
        As `bench.run`.
    """
    limits = [name for entry in _entries() for name in entry.names if name in ceilings.CEILINGS]
    paths: list[Path | None] = []
    for plan, of_gpu in zip(plans(stages), (limits, ()), strict=True):
        names = {name for of_problem in plan.values() for name in of_problem}
        run = bench.run(
            list(plan),
            stages=[name for name in (*registry.STAGES, *registry.DEAD_ENDS) if name in names],
            peers=[name for name in peers.PEERS if name in names],
            only=partial(lambda of, problem, name: name in of[problem], plan),
            plan=bench.plan_of("claims"),
            ceilings=of_gpu,
            options=options,
        )
        paths.append(run)
    whole = [name for entry in _entries() for name in entry.names if entry.quantity == "time_shares"]
    axes = list(dict.fromkeys(entry.axis for entry in _entries() if entry.axis))
    paths += [ablation.measure(axes, options=options), ablation.split(whole, options=options)]
    calls = [(name, entry.problem) for entry in _entries() for name in entry.names if entry.quantity == "call_time"]
    if options.resume:
        timed = {(record.name, record.problem) for record in bench.on_record(Call, options, same_commit=True)}
        calls = [call for call in calls if call not in timed]
    paths += [enqueue.measure([problem], options, library=name)[0] for name, problem in calls]
    return tuple(path for path in paths if path)


# --- Tables -----------------------------------------------------------------------------------------------------------


def summary(verdicts: Sequence[Verdict]) -> str:
    """Number of claims by document and verdict, as a Markdown table."""
    by_document = grouped(verdicts, lambda verdict: verdict.source.partition(" § ")[0])
    counts = {
        title: Counter(verdict.verdict for verdict in of) for title, of in (*by_document.items(), ("all", verdicts))
    }
    kinds = [kind for kind in KINDS if counts["all"][kind]]
    rows: list[list[tables.Cell]] = [[title, *(of[kind] for kind in kinds), of.total()] for title, of in counts.items()]
    return tables.markdown(("document", *map(words, kinds), "claims"), rows)


def standing(verdicts: Sequence[Verdict]) -> str:
    """A paragraph on rules changed after a result, and on numbers from few starts."""
    histories = rules_log.read().claims
    late = [
        verdict.id for verdict in verdicts if verdict.id in histories and histories[verdict.id].changed_after_its_result
    ]
    turned = [name for name in late if histories[name].turned_its_verdict]
    few = [verdict.id for verdict in verdicts if verdict.starts is not None and verdict.starts < FEW_STARTS]
    return (
        f"The rules of {len(late)} of the {len(verdicts)} claims, or their words, were changed after a result was "
        f"known, and {len(turned)} verdicts with them; the table says when, and from what to what. "
        f"{len(few)} show a number that was measured on "
        f"fewer than {FEW_STARTS} starts of a machine, and say so."
    )


def contradictions(verdicts: Sequence[Verdict]) -> str:
    """Contradictions of the claims with one another or the hardware, and our findings, as a Markdown table."""
    by_id = {verdict.id: verdict for verdict in verdicts}
    rows: list[list[tables.Cell]] = []
    for what, ids in ((contradiction["what"], contradiction["ids"]) for contradiction in facts()["contradictions"]):
        these = [by_id[name] for name in ids if name in by_id]
        claimed = (f"{each.id}: {each.claimed or each.claim}" for each in these)
        ours = (f"{each.id}: {shown(each.decisive)}" for each in these if each.decisive)
        judged = (f"{each.id} {words(each.verdict)}" for each in these)
        rows.append([", ".join(ids), what, "; ".join(claimed), "; ".join(ours) or None, ", ".join(judged)])
    return tables.markdown(("claims", "contradiction", "claimed", "ours", "verdicts"), rows, left=5)


def _literal(text: str) -> str:
    """Text escaped for Markdown and HTML."""
    return re.sub(r"[!-+:<->@\[-`{-~-]", lambda match: f"&#{ord(match[0])};", text)


def _whose(claim: Claim) -> str:
    """A claim's quote, its conditions and ours, as collapsed HTML."""

    def on(lines: Sequence[int]) -> str:
        return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"

    stated = [
        f"{CONDITIONS[name]}: {_literal(statement.text)} ({on(statement.lines)})"
        for name, statement in claim.states.items()
    ]
    added = [f"{CONDITIONS[name]}: {_literal(text)}" for name, text in claim.adds.items()]
    history = rules_log.read().claims.get(claim.id)
    late = history is not None and history.changed_after_its_result
    turned = ", and its verdict with it" if history and history.turned_its_verdict else ""
    parts = (
        ("The document", f"“{_literal(_ELLIPSIS.join(claim.quote))}” ({on(claim.lines)})"),
        ("It states", "; ".join(stated) or "nothing more"),
        ("We add", "; ".join(added) or "nothing"),
        ("Why", _literal(claim.why)),
        ("Its rule", _literal(_of_rule(history)) if history else ""),
    )
    listed = "<br>".join(f"<b>{title}:</b> {text}" for title, text in parts if text)
    mark = f"<br><small>Its rule was changed after a result was known{turned}.</small>" if late else ""
    return f'{mark}<details class="whose"><summary>Its words, what we add, its rule</summary>{listed}</details>'


def _of_rule(history: rules_log.History) -> str:
    """The history of a rule, to display."""

    def sentence(change: rules_log.Change) -> str:
        what = ", ".join(
            f"{name} from “{old or 'none'}” to “{new or 'none'}”" for name, (old, new) in change.what.items()
        )
        verdicts = f"{words(change.before)} before, {words(change.after or 'pending')} after" if change.before else ""
        about = ". ".join(filter(None, (change.reason.rstrip("."), what, verdicts)))
        return f"changed on {change.date[:10]} (commit “{change.subject}”): {about}"

    return "; ".join([f"written on {history.written[:10]}", *map(sentence, history.changes)])


def table(
    verdicts: Sequence[Verdict],
    *,
    record: Callable[[str], str] = "`{}`".format,
    stage: Callable[[str], str] = "`{}`".format,
) -> str:
    """Every claim with its verdict, our number, its source and the reason, as a Markdown table.

    Args:
        record: makes a link of a record's place, `nvidia-h200/runs/….jsonl:12`.
        stage: makes a link of the id of a stage or dead end.
    """

    def why(verdict: Verdict) -> str:
        links = ", ".join([*map(record, verdict.records), *map(stage, verdict.stages)])
        origin = f"From {links}." if links else ""
        return " ".join(filter(None, (verdict.reason, verdict.conclusion, origin)))

    known = {claim.id: claim for claim in read()}

    def what(verdict: Verdict) -> str:
        return f"{verdict.claim}<br><small>{verdict.source}</small>{_whose(known[verdict.id])}"

    def number(verdict: Verdict) -> str | None:
        ours = known[verdict.id].adds.get("number")
        return f"{verdict.claimed}<br><small>Ours: {_literal(ours)}</small>" if ours else verdict.claimed or None

    def where(verdict: Verdict) -> str:
        return "; ".join(filter(None, (verdict.gpu, verdict.measured_on, f"`{verdict.rule}`")))

    columns = (
        tables.Column("id", "id", left=True),
        tables.Column("claim", what, left=True),
        tables.Column("claimed", number, left=True),
        tables.Column("verdict", "verdict", words, left=True),
        tables.Column("ours", "decisive", shown, left=True),
        tables.Column("why", why, left=True),
        tables.Column("claimed on; ours on; rule", where, left=True),
    )
    return tables.table(columns, verdicts)


def page(out: Output, results: Results, data: Path) -> None:
    """The claims with their verdicts, each with links to its records and to the pages of its stages."""
    rules = [(f"`{name}`", rule.words) for name, rule in RULES.items()]
    out.snippet("ledger-rules.md", tables.markdown(("rule", "what it says"), rules, left=2))
    kinds = [(words(kind), meaning) for kind, meaning in KINDS.items()]
    out.snippet("ledger-verdicts.md", tables.markdown(("verdict", "meaning"), kinds, left=2))
    gpus_header = ("claimed on", "measured on", "the same", "what differs", "what carries over")
    carries = {
        True: "machine code and what a kernel computes; times and ratios stand beside, and judge nothing",
        False: "machine code and what a kernel computes; no time",
    }
    pairs = [(pair.claimed, f"`{pair.measured}`", pair.same, pair.differs, carries[pair.time]) for pair in KINSHIPS]
    out.snippet("ledger-gpus.md", tables.markdown(gpus_header, pairs, left=5))
    out.snippet("dictionary-verdicts.md", f"{dictionary(Verdict)}\n\n{dictionary(Number)}")
    out.text("data/claims.csv", CLAIMS.read_text(encoding="utf-8"))
    out.snippet("ledger-sources.md", sources.tables_of(sources.read()))
    out.text("data/sources.csv", sources.SOURCES.read_text(encoding="utf-8"))
    out.text("data/rules_log.json", rules_log.LOG.read_text(encoding="utf-8"))
    if not results:
        out.snippet("ledger.md", NOTHING_YET)
        return
    judged = verdicts(results.gpu, data)

    def record(place: str) -> str:
        file, _, line = place.rpartition(":")
        folder = Path(file).parent.name
        return (
            f"[{folder}, line {line}](explorer.md?record={place}){' ([page](ablations.md))' * (folder == 'ablations')}"
        )

    claims = table(judged, record=record, stage=stage_link)
    out.snippet("ledger.md", f'<div class="ledger" markdown>\n\n{claims}\n</div>\n')


PAGES = {"ledger": page}
