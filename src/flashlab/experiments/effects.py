"""What a change did to a stage's time: levels of axes, levers, and parts that were left out; as tables and charts.

An effect is the ratio of a level's median time to the first level's, with its interval over starts of a machine that
ran the same code, and over the rounds of each: samples of one round are a pair, since they met the same clock and
temperature. A part's share of the time is one minus that ratio, of the stage without the part to the whole stage.
Shares need not add up to one: parts that overlap each look small, and parts that stall each other look large.

What is shown together is one family of comparisons: its verdicts err together as often as one interval would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from flashlab.core.arithmetic import several
from flashlab.core.errors import NoDataError, ParameterError
from flashlab.core.problem import Problem
from flashlab.experiments import levers
from flashlab.experiments.ablation import AXES, PARTS
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.query.statistics import (
    CONFIDENCE,
    Estimate,
    holm,
    interval,
    over_starts,
    p_value,
    ratio_of_medians,
)
from flashlab.record import schema, store
from flashlab.record.schema import Ablation, Part, Samples
from flashlab.show.charts import Chart, Interval, Look, intervals
from flashlab.show.pages import Output, data_links, stage_link
from flashlab.show.tables import Cell, Column, code, folded, markdown, prose, table

LEVER_NOT_MEASURED = "Not measured yet: `flashlab ablate --levers` on a Hopper GPU does it."
_PART_TITLES = {"qk": "Q·K", "softmax": "softmax", "pv": "P·V", "memory": "memory"}
_REASON_CHARS = 160
_OF_CUBIN = ("registers", "spill_store_bytes", "blocks_per_sm")
T = TypeVar("T", Ablation, Part)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A level beside the first of its axis, a lever beside its stage as it is, or a stage without a part beside it."""

    group: str
    """Axis, or stage id."""
    name: str
    """Level, lever, or the part that is left out."""
    record: Ablation | Part
    first: Ablation | Part | None
    """What it is compared with; None where that is not on record."""
    starts: tuple[tuple[Ablation | Part, Ablation | Part], ...] = ()
    """It and the baseline on each start of a machine that timed both with the same code, the newest last."""
    family: Sequence[Effect] = field(default=(), compare=False, repr=False)
    """All effects shown together, including this one, whose p-values are corrected together (Holm)."""

    @property
    def is_first(self) -> bool:
        """Whether it is the baseline of its group."""
        return self.record is self.first

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.record.problem

    @property
    def samples(self) -> Samples | None:
        """The burst samples; None if there is no time."""
        return _samples(self.record)

    @property
    def median_us(self) -> float | None:
        """Median burst time; None if there is none."""
        return self.samples.median_us if self.samples else None

    @property
    def reason(self) -> str:
        """Why there is no time."""
        return getattr(self.record, "reason", "")

    @property
    def ratio(self) -> float | None:
        """Ratio of medians to the baseline, over the rounds with both, over starts; None if either has no time."""
        return self.change.value if self.change else None

    @property
    def _times(self) -> list[tuple[Sequence[float], Sequence[float]]]:
        """Times of it and of the baseline on each start; only those of its own record if no start has both."""
        pairs = self.starts or (((self.record, self.first),) if self.first else ())
        samples = [(_samples(record), _samples(first)) for record, first in pairs]
        return [(ours.time_us, theirs.time_us) for ours, theirs in samples if ours and theirs]

    @cached_property
    def change(self) -> Estimate | None:
        """`ratio` with its 95 % interval; the baseline has none."""
        if not self._times:
            return None
        if self.is_first:
            return Estimate.exactly(1.0)
        return over_starts(ratio_of_medians, self._times, paired=True)

    @cached_property
    def p_value(self) -> float | None:
        """p-value of the ratio under no difference; None for the baseline, and without an interval."""
        if self.interval is None:
            return None
        return p_value(ratio_of_medians, self._times, 1.0, paired=True, comparisons=max(1, len(self.family)))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval; None for the baseline, and if either has one sample."""
        change = self.change
        return None if change is None or change.low == change.high else (change.low, change.high)

    @property
    def verdict(self) -> str:
        """`slower`, `faster` or `no difference shown`, at 95 % confidence for its family.

        Empty without an interval.
        """
        change = self.change
        if change is None or self.interval is None:
            return ""
        compared = [effect for effect in self.family or (self,) if effect.p_value is not None]
        raised = holm([effect.p_value or 0.0 for effect in compared])
        if next(value for effect, value in zip(compared, raised, strict=True) if effect is self) > 1 - CONFIDENCE:
            return "no difference shown"
        return "slower" if change.value > 1 else "faster"

    def flat(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "group": self.group,
            "name": self.name,
            **{name: getattr(self.problem, name) for name in ("shape", "dtype", "mask")},
            "median_us": self.median_us,
            "ratio": self.ratio,
            "interval": self.interval,
            "verdict": self.verdict or None,
            "starts": len(self._times) or None,
            "samples": len(self.samples.time_us) if self.samples else 0,
            **{name: getattr(self.record.cubin, name, None) for name in _OF_CUBIN},
            "reason": self.reason,
            "run": self.record.run,
        }


def _samples(record: Ablation | Part | None) -> Samples | None:
    return record.samples if isinstance(record, Part) else record.samples_of() if record else None


def effects(records: Iterable[Ablation], problem: Problem | None = None) -> list[Effect]:
    """Every level of every axis that the registry has, in its order.

    Args:
        problem: of it alone; of every problem on record where None.
    """
    every = [record for record in records if problem in (None, record.problem)]
    groups = {axis.name: [level.name for level in axis.levels] for axis in AXES.values()}
    return _beside_first(every, groups, lambda record: (record.axis, record.problem), lambda record: record.level)


def shares(records: Iterable[Part]) -> list[Effect]:
    """Every part of every stage: its time without the part over its whole time.

    A part's share of the time is one minus the ratio.
    """
    every = list(records)
    groups = {stage: list(PARTS) for stage in sorted({record.stage for record in every})}
    return _beside_first(every, groups, lambda record: (record.stage, record.problem), lambda record: record.left_out)


def lever_effects(records: Iterable[Ablation]) -> list[Effect]:
    """Every lever that there is beside its stage as it is with the same tunables."""
    every = [record for record in records if record.axis == levers.AXIS]
    groups = dict.fromkeys((record.stage for record in every), (levers.AS_IT_IS, *levers.names()))

    def place(record: Ablation) -> Place:
        return record.stage, record.problem, tuple(sorted(record.parameters.items()))

    return _beside_first(every, groups, place, lambda record: record.level)


Place = tuple[Any, ...]
"""What a record has in common with the first that it is compared with: group, problem, and whatever else."""


def _beside_first(
    records: Iterable[T], groups: Mapping[str, Sequence[str]], place: Callable[[T], Place], name: Callable[[T], str]
) -> list[Effect]:
    """The names of each group, as one family: each from the newest run that has it at a problem, compared with the
    group's first name in that run, and over the starts that timed both with the same code."""
    every = sorted(records, key=lambda record: record.run)
    known = {
        (measured.run, place(measured), name(measured)): measured
        for measured in every
        if name(measured) in groups.get(place(measured)[0], ())
    }
    newest = {(at[:2], label): run for run, at, label in known}
    places = dict.fromkeys((run, at) for run, at, label in known if newest[at[:2], label] == run)
    family: list[Effect] = []
    for group, run, at in ((group, run, at) for group in groups for run, at in places if at[0] == group):
        first = known.get((run, at, groups[group][0]))
        for label in groups[group]:
            record = known.get((run, at, label))
            if record is None or (record is not first and newest[at[:2], label] != run):
                continue
            starts: list[Any] = []
            if first is not None and record is not first and _samples(record):
                alike = [measured for measured in every if place(measured) == at and _samples(measured)]
                starts = select.by_start(alike, name, (label, groups[group][0]))
            pairs = tuple((ours, theirs) for ours, theirs in starts)
            family.append(Effect(group=group, name=label, record=record, first=first, starts=pairs, family=family))
    return family


# --- Charts -----------------------------------------------------------------------------------------------------------


def _caption(shown: Sequence[Effect]) -> str:
    """GPU, problem, regime, date and commit."""
    problems = select.problems_of(effect.record for effect in shown)
    runs = (record.run for effect in shown for record in _records(effect))
    return select.sourced(shown[0].record.gpu.name, problems, "burst, hot L2", runs=runs)


def _records(effect: Effect) -> list[Ablation | Part]:
    """Its records on all starts."""
    return [effect.record, *(record for record, _ in effect.starts)]


def chart(shown: Sequence[Effect]) -> Chart:
    """Time of every level of every axis over that of the axis's first level, with 95 % intervals.

    Raises:
        NoDataError: none has a time.
    """
    return _chart(
        shown,
        lambda effect: (f"{effect.group} ({AXES[effect.group].stage[:2]})", effect.name),
        name="ablations",
        xlabel="time relative to the first level; less is better",
        caption=f"Effect of one change on a stage's time: each level relative to the first of its axis (stage in "
        f"brackets), {_OVER_STARTS}",
    )


def lever_chart(shown: Sequence[Effect]) -> Chart:
    """Time of every experiment relative to the unchanged stage, one row per problem; raises as `chart`."""
    changed = (effect for effect in shown if not effect.is_first)
    return _chart(
        sorted(changed, key=lambda effect: (effect.name, effect.problem.head_dim, effect.problem.mask != "full")),
        lambda effect: (effect.name, effect.problem.label),
        name="levers",
        xlabel="time relative to the unchanged stage; less is better",
        caption=f"Effect of a change of the source on a stage's time, relative to the unchanged stage, {_OVER_STARTS}",
    )


_OVER_STARTS = "with the 95 % interval of the ratio over starts, which is often narrower than the mark."


def split_chart(shown: Sequence[Effect]) -> Chart:
    """Time saved by leaving out each part of a stage, in percent of its time, with 95 % intervals.

    Raises as `chart`.
    """
    return _chart(
        shown,
        lambda effect: (f"{effect.group}, {effect.problem.sizes}", _PART_TITLES[effect.name]),
        name="time-split",
        xlabel="percent of the stage's time saved without the part",
        caption="Time that a stage saves when one part of its work is left out, with 95 % intervals. The shares need "
        "not add up to 100 %: parts that overlap save nothing alone, and parts that delay each other count twice.",
    )


def _chart(shown: Iterable[Effect], place: Callable[[Effect], tuple[str, str]], *, name: str, **text: str) -> Chart:
    """Intervals of effects with a time: ratios or, for parts, shares; `place` gives an effect's group and title."""
    ratio = name != "time-split"
    looks: Mapping[str, Look] = {"slower": "worse", "faster": "better"} if ratio else {}
    timed = [(effect, value) for effect in shown if (value := effect.change if ratio else _share(effect))]
    if not timed:
        raise NoDataError.of(f"times to draw {name} of", "flashlab ablate" if ratio else "flashlab split")
    groups: dict[str, list[Interval]] = {}
    for effect, value in timed:
        group, title = place(effect)
        look = "first" if effect.is_first else looks.get(effect.verdict, "plain")
        groups.setdefault(group, []).append((title, value, look))
    files = select.run_files(record for effect, _ in timed for record in _records(effect))
    whence = _caption([effect for effect, _ in timed])
    return intervals(groups, name=name, ratio=ratio, data_files=files, provenance=whence, **text)


def _share(effect: Effect) -> Estimate | None:
    """Percent of the whole stage's time saved without a part; None for the whole stage, and without times."""
    if effect.change is None or effect.is_first:
        return None
    value, low, high = (100 * (1 - ratio) for ratio in (effect.change.value, effect.change.high, effect.change.low))
    return Estimate(value=value, low=low, high=high)


# --- Tables -----------------------------------------------------------------------------------------------------------


def _result(effect: Effect) -> str:
    """The verdict on its time, or why there is none."""
    if effect.median_us is None:
        return prose(effect.reason[:_REASON_CHARS])
    return "baseline" if effect.is_first else effect.verdict


def _with_interval(change: Estimate | None, form: str = "{:.3f}") -> str | None:
    if change is None:
        return None
    ends = "" if change.low == change.high else f" ({form} to {form})".format(change.low, change.high)
    return form.format(change.value) + ends


def _starts(effect: Effect) -> str | None:
    """Number of starts behind its ratio; None for the baseline."""
    count = len(effect.starts)
    return None if effect.change is None or effect.is_first else "one start" if count < 2 else str(count)


def _instructions(sass: Mapping[str, int]) -> str:
    return str(sum(sass.values()))


_MICROSECONDS = "{:.1f}".format
_RESOURCES = (
    Column("registers", "record.cubin.registers"),
    Column("spilled B", "record.cubin.spill_store_bytes"),
    Column("blocks/SM", "record.cubin.blocks_per_sm"),
)
_LEVELS = (
    Column("level", "name"),
    Column("", _result, left=True),
    Column("µs", "median_us", _MICROSECONDS),
    Column("relative time (95 %)", "change", _with_interval),
    Column("starts", _starts),
    *_RESOURCES,
)
_LEVERS = (
    Column("problem", "1.record.problem.label"),
    Column("", "1", _result, left=True),
    Column("unchanged, µs", "0.median_us", _MICROSECONDS),
    Column("changed, µs", "1.median_us", _MICROSECONDS),
    Column("relative time (95 %)", "1.change", _with_interval),
    Column("starts", "1", _starts),
    Column("instructions, unchanged", "0.record.cubin.sass", _instructions),
    Column("changed", "1.record.cubin.sass", _instructions),
    Column("spilled B", "1.record.cubin.spill_store_bytes"),
)
_PARTS = (
    Column("stage", "group", code),
    Column("problem", "record.problem.sizes", left=True),
    Column("left out", lambda effect: _PART_TITLES.get(effect.name, effect.name), left=True),
    Column("µs", "median_us", _MICROSECONDS),
    Column("share, % (95 %)", lambda effect: _with_interval(_share(effect), "{:.1f}")),
    Column("starts", _starts),
    *_RESOURCES,
)


def levels_table(shown: Sequence[Effect]) -> str:
    """Every axis with its question, prediction and levels, as Markdown."""
    text: list[str] = []
    for (name, problem), levels in grouped(shown, lambda effect: (effect.group, effect.problem)).items():
        axis = AXES[name]
        claims = f" Claims: {', '.join(axis.claims)}." if axis.claims else ""
        text.append(
            f"### {name}: `{axis.stage}`, {problem.label}\n\n"
            f"{axis.question}{claims}\n\n*Expected:* {axis.prediction}\n\n{table(_LEVELS, levels)}"
        )
    return "\n".join(text)


def lever_table(shown: Sequence[Effect], name: str) -> str:
    """The effect of one experiment on each problem, as a Markdown table with its provenance."""
    measured = [effect for effect in shown if effect.name == name]
    if not measured:
        return LEVER_NOT_MEASURED
    plain = {id(effect.record): effect for effect in shown if effect.is_first}
    pairs = [(plain.get(id(effect.first)), effect) for effect in measured]
    return f"{table(_LEVERS, pairs)}\n<small>{_caption(measured)}</small>"


def split_table(shown: Sequence[Effect]) -> str:
    """Every stage's time without each part, and the share saved, as a Markdown table."""
    rows: list[list[Cell]] = []
    for parts in grouped(shown, lambda effect: (effect.group, effect.problem)).values():
        rows += [[column.cell(effect) for column in _PARTS] for effect in parts]
        if any(effect.name == list(PARTS)[-1] for effect in parts):
            total = sum(share.value for share in map(_share, parts) if share)
            sums: dict[str, Cell] = {"left out": "sum of the shares", "share, % (95 %)": f"{total:.1f}"}
            rows.append([*rows[-1][:2], *(sums.get(column.header) for column in _PARTS[2:])])
    return markdown([column.header for column in _PARTS], rows, left=3)


# --- Measured again ---------------------------------------------------------------------------------------------------


def agreement(gpu: str, data: Path) -> str:
    """Whether effects measured on several starts with the same code agree as often as their intervals imply."""
    ablations = store.records(gpu, Ablation, data)
    kinds = {
        "levels of axes": effects(ablations),
        "levers": lever_effects(ablations),
        "parts left out": shares(store.records(gpu, Part, data)),
    }
    rows = [
        _agreed(title, [effect for effect in measured if len(effect.starts) > 1]) for title, measured in kinds.items()
    ]
    if not any(row[1] for row in rows):
        return "*No effect has been measured with the same code on several starts of a machine yet.*"
    # Of two independent estimates with the same normal error: 1.96 and 2 · 1.96 standard errors of one, over √2.
    said = ("expected of 95 % intervals if starts were equal", "", "", "83 %", "0.6 %", "at most 95 %")
    header = (
        *("", "effects on several starts", "pairs of starts"),
        *("a start's interval contains the other's ratio", "intervals of two starts are disjoint"),
        "interval over all earlier starts contains the newest's ratio",
    )
    return markdown(header, [*rows, said])


def _agreed(title: str, repeated: Sequence[Effect]) -> list[str | int]:
    holds, disjoint, later = [], [], []
    for effect in repeated:
        of_starts = [interval(ratio_of_medians, *times, paired=True) for times in effect._times]
        for a, b in permutations(of_starts, 2):
            holds.append(a.low <= b.value <= a.high)
            disjoint.append(a.high < b.low or b.high < a.low)
        if len(of_starts) > 2:
            before = over_starts(ratio_of_medians, effect._times[:-1], paired=True)
            later.append(before.low <= of_starts[-1].value <= before.high)

    def share(of: Sequence[bool], times: int = 1) -> str:
        return f"{sum(of) // times} of {len(of) // times} ({100 * sum(of) / len(of):.0f} %)" if of else "–"

    return [title, len(repeated), len(holds) // 2, share(holds), share(disjoint, 2), share(later)]


# --- The pages --------------------------------------------------------------------------------------------------------


def levers_page(out: Output, shown: select.Results, data: Path) -> None:
    """Every experiment: question, diff, prediction and the result on each GPU that measured it."""
    page = "levers.md"
    of_gpus = [lever_effects(store.records(gpu, schema.Ablation, data)) for gpu in store.gpus(data, "ablations")]
    out.snippet("levers-chart.md", out.drawn(page, lever_chart, next(iter(of_gpus), ())) or LEVER_NOT_MEASURED)
    parts = []
    for lever in levers.choose():
        tables = []
        for effects in of_gpus:
            mine = [effect.record for effect in effects if effect.name == lever.name]
            if files := dict.fromkeys(f"{record.gpu.slug}/ablations/{record.run}.jsonl" for record in mine):
                links = ", ".join(data_links(files, page))
                tables.append(f"{lever_table(effects, lever.name)} <small>· {links}</small>")
        added, removed = lever.changed_lines()
        heading = f"{lever.stage}, changed: {several(added, 'line')} added, {removed} removed"
        try:
            diff = lever.shown_diff()
        except ParameterError as error:
            diff = lever.diff.rstrip()
            heading = f"The change, which no longer applies to the stage: {error}"
        parts += [
            f"### {lever.name.replace('_', ' ')}",
            f"{lever.question} (`{lever.name}`, {stage_link(lever.stage)})",
            folded(heading, f"``` {{ .diff }}\n{diff}\n```", kind="abstract"),
            f"*Expected:* {lever.prediction}",
            *(tables or [LEVER_NOT_MEASURED]),
            lever.why,
        ]
    out.snippet("levers.md", "\n\n".join(part for part in parts if part))


PAGES = {
    "levers": levers_page,
    "method": lambda out, shown, data: out.snippet("agreement.md", agreement(shown.gpu, data)),
}
