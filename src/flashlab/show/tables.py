"""Markdown tables: a table is a list of columns, and a column computes a cell from a row.

`table(COLUMNS, rows)` renders any of them. A row is a record, or a dict of its values (`timed`).
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from flashlab.core.arithmetic import several
from flashlab.core.errors import NoDataError
from flashlab.core.inputs import KINDS, NORMAL, TRAINED
from flashlab.core.paths import DATA
from flashlab.core.paths import table as facts_in
from flashlab.core.problem import AS_IN_A_MODEL, FIRST_SHAPE, Problem, Regime
from flashlab.kernels import peers, registry
from flashlab.query import contests, roofline, select
from flashlab.query.predictions import Scored
from flashlab.query.rows import grouped, headline
from flashlab.query.select import Results
from flashlab.record import store
from flashlab.record.checks import Compared
from flashlab.record.schema import (
    Ceiling,
    CubinFields,
    Gpu,
    Measurement,
    Samples,
    Sanitized,
    StageProfile,
    Start,
    Status,
)

Cell = str | int | float | None
Row = Any
"""A record, or a dict of its values, from which a column computes a cell."""

_STATUS_WORDS: Mapping[Status, str] = {
    "ok": "ok",
    "wrong": "wrong result",
    "unsupported": "not for this problem",
    "missing": "not installed",
    "crashed": "crashed",
    "timeout": "timed out",
    "error": "error",
}
_HELD_BACK: Mapping[str, str] = {
    "sw_power_cap": "power limit",
    "hw_power_brake_slowdown": "power brake",
    "sw_thermal_slowdown": "temperature",
    "hw_thermal_slowdown": "temperature",
    "hw_slowdown": "hardware slowdown",
}
"""Display names of NVML's throttle reasons; others keep NVML's name."""
_LONG = 48
"""Minimum characters of a prose cell, which keeps a readable width on a phone."""


# --- A cell -----------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
    """A number to display: `digits` significant digits, no exponent, thousands separators; a dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    rounded = float(f"{value:.{digits - 1}e}")  # 99.97 has three significant digits as 100
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{min(decimals, 6)}f}"


def tiny(value: float | None) -> str:
    """An error to display, with an exponent; a dash for None."""
    return "–" if value is None else f"{value:.2e}"


def times(value: float) -> str:
    """A ratio: `×1.30`, or ∞."""
    return "∞" if math.isinf(value) else f"×{number(value)}"


def percent(value: float) -> str:
    """A percentage: `61.2 %`."""
    return f"{number(value)} %"


def mhz(value: float) -> str:
    """A clock or a time to four digits."""
    return number(value, 4)


def code(text: str) -> str:
    """A name in code type: `05_wmma`."""
    return f"`{text}`"


def source(text: str) -> str:
    """Source code for a table cell: a code span with all Markdown escaped."""
    return f"<code>{_inert(text)}</code>"


def prose(text: str) -> str:
    """A program's message for a page: one line, with Markdown and HTML escaped outside code spans."""
    spans = " ".join(text.split()).split("`")
    if len(spans) % 2 == 0:  # a tick that opens a span and none that closes it
        return _inert("`".join(spans))
    return "".join(source(span) if i % 2 and span else _inert(span) for i, span in enumerate(spans))


def _inert(text: str) -> str:
    # An underscore inside a word is no emphasis, and stays for whoever searches the Markdown for a name.
    return re.sub(r"[^\w .,:;=+/()-]|(?<![^\W_])_|_(?![^\W_])", lambda match: f"&#{ord(match[0])};", text)


def place(file: str, line: int) -> str:
    """File and line, short enough to keep in view: `05_wmma.cu:120`."""
    return f'<code class="place">{html.escape(file)}:{line}</code>'


def held_back(reasons: Iterable[str]) -> str:
    """Display names of NVML's throttle reasons; `nothing` if there are none."""
    return ", ".join(dict.fromkeys(_HELD_BACK.get(why, why) for why in reasons)) or "nothing"


def title_of(name: str) -> str:
    """A library's display name; any other name, such as a stage's, unchanged."""
    peer = peers.PEERS.get(name)
    return peer.title if peer else name


def short_title(name: str) -> str:
    """A library's display name without its parentheses."""
    return title_of(name).split(" (")[0]


def title(row: Measurement) -> str:
    """A row's display name."""
    return code(row.name) if row.kind == "stage" else title_of(row.name)


def beside_title(row: Measurement) -> str:
    """The name of a library that is shown in another element type than the rows around it."""
    return f"{title_of(row.name)} ({row.problem.dtype})"


# --- A table ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    header: str
    get: str | Callable[[Row], Any]
    """A key, attribute or index of the row, `1.burst.tflops` for nested ones, or a function of the row. None and NaN
    are shown as a dash."""
    form: Callable[[Any], str | None] | None = None
    """Formats a value: `percent`, `times`, …; None for the format of `markdown`."""
    left: bool = False
    """Whether it is left-aligned, like text; the first column always is."""

    def cell(self, row: Row) -> Cell:
        """The cell of a row; None if it has no value."""
        value: Any = self.get(row) if callable(self.get) else _inside(row, self.get)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        return self.form(value) if self.form else value


def _inside(row: Row, path: str) -> Any:
    for name in path.split("."):
        key = int(name) if name.isdigit() else name
        if row is None:
            break
        row = row.get(key) if isinstance(row, Mapping) else row[key] if isinstance(key, int) else getattr(row, key)
    return row


def stage(get: str | Callable[[Row], str] = "stage") -> Column:
    """The column that names a stage."""
    return Column("", get, code)


def table(columns: Sequence[Column], rows: Iterable[Row], *, drop_empty: bool = False) -> str:
    """A Markdown table; `drop_empty` omits columns, except the first, in which no row has a value."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    kept = [
        index
        for index in range(len(columns))
        if not drop_empty or not index or any(line[index] is not None for line in cells)
    ]
    left = next((place for place, index in enumerate(kept) if place and not columns[index].left), len(kept))
    return markdown([columns[index].header for index in kept], [[line[i] for i in kept] for line in cells], left=left)


def folded(title: str, text: str, *, kind: str = "") -> str:
    """Collapsed Markdown, on the site and in a notebook; the theme styles it as an admonition of that kind."""
    look = f' class="{kind}"' if kind else ""
    return f"<details{look} markdown>\n<summary>{title}</summary>\n\n{text.strip()}\n\n</details>"


def unsearched(text: str) -> str:
    """Markdown excluded from search: source code and thousands of rows would be most of the index."""
    return f"<div data-search-exclude markdown>\n\n{text}\n\n</div>"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: int = 1) -> str:
    """A Markdown table of cells; the first `left` columns are left-aligned, the others right."""
    lines = [
        "| " + " | ".join(title.replace("|", "\\|") for title in header) + " |",
        "|" + "|".join(":--" if i < left else "--:" for i in range(len(header))) + "|",
    ]
    for row in rows:
        cells = [number(c) if isinstance(c, float) else "–" if c is None else str(c) for c in row]
        lines.append("| " + " | ".join(map(_escaped, cells)) + " |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    text = text.replace("|", "\\|").replace("\n", " ")
    shown = html.unescape(re.sub(r"<[^>]+>", "", text))
    return f'<span class="prose">{text}</span>' if len(shown) >= _LONG and not text.startswith("[") else text


# --- Rates, costs and ratios ------------------------------------------------------------------------------------------


def line(
    row: Measurement,
    rows: Sequence[Measurement],
    *,
    beside: Sequence[Measurement] = (),
    libraries: Collection[str] = (),
    regime: Regime = "burst",
) -> dict[str, Any]:
    """A record's values with a hot L2 as a flat dict, with `over_parent` and `percent_of_best` relative to `rows`.

    Args:
        beside: rows of another element type from `Results.beside`; they have no `percent_of_best`.
        libraries: those that must have been tried for a `percent_of_best`, from `Results.libraries`.
    """
    peer = None if row in beside else select.fastest_of(libraries, rows, regime)
    of_best = select.speedup(row, peer, regime)
    return headline(row, regime) | {
        "title": beside_title(row) if row in beside else title(row),
        "over_parent": select.speedup(row, select.parent_of(row, rows), regime),
        "percent_of_best": None if of_best is None else 100 * of_best,
        "largest_error": row.verdict.overall_max_error if row.verdict else None,
    }


def timed(
    rows: Sequence[Measurement], *, beside: Sequence[Measurement] = (), libraries: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Burst values of one problem's records as flat dicts; rows of `beside` replace those of the same libraries."""
    return [
        line(row, rows, beside=beside, libraries=libraries)
        for row in (select.with_beside(rows, beside) if beside else rows)
    ]


def _rate_or_why(row: Row) -> Cell:
    if row["tflops"] is not None:
        return float(row["tflops"])
    return _STATUS_WORDS[row["status"]] if row["status"] != "ok" else "not taken"


OVER_PARENT = Column("× parent", "over_parent", number)
RATES = (
    Column("", "title"),
    Column("TFLOP/s", _rate_or_why),
    OVER_PARENT,
    Column("of the fastest library", "percent_of_best", percent),
    Column("median, µs", "median_us"),
    Column("std dev, %", "cv_percent"),
    Column("samples", lambda row: row["samples"] or None),
)


def rates(
    rows: Sequence[Measurement],
    *,
    beside: Sequence[Measurement] = (),
    libraries: Collection[str] = (),
    records: Sequence[Measurement] = (),
) -> str:
    """Every row of one problem: rate, time, spread, speed-up over its parent, share of the fastest library; or status.

    Args:
        beside: from `Results.beside`; they have no share.
        libraries: as for `line`.
        records: as for `select.fastest_stage`.
    """
    notes = (beside_note(rows, beside), elsewhere_note(rows), fastest_note(rows, records))
    return table(RATES, timed(rows, beside=beside, libraries=libraries)) + "".join(
        f"\n*{note}*\n" for note in notes if note
    )


def beside_note(rows: Sequence[Measurement], beside: Iterable[Measurement]) -> str:
    """The note on rows of `Results.beside` in a table of `rows`; empty if there are none."""
    late = {row.name for row in select.elsewhere(rows)}
    best = max((select.rate(row) or 0.0 for row in rows if row.kind == "peer" and row.name not in late), default=0.0)
    dtype = rows[0].problem.dtype if rows else ""
    return " ".join(
        f"{title_of(row.name)} is listed in {row.problem.dtype}, at the same shape in the same session: "
        f"{lacks(row.name, dtype)}. Its {number(rate)} TFLOP/s are "
        f"{'more than any' if rate > best else 'no more than the best'} library's in {dtype} there. "
        "Percentages compare only rows of the same element type."
        for row in beside
        if (rate := select.rate(row))
    )


def set_of(libraries: Iterable[str]) -> str:
    """Display names of the libraries whose fastest is the base of percentages."""
    names = sorted(map(short_title, libraries))
    return f"{len(names)} ({'; '.join(names)})" if names else "none"


def lacks(name: str, dtype: str) -> str:
    """Why a library has no time in an element type."""
    peer = peers.PEERS.get(name)
    return f"the wheel ({peer.wheel}) lacks {dtype}" if peer and peer.wheel else f"it does not take {dtype}"


def elsewhere_note(rows: Sequence[Measurement]) -> str:
    """The note on rows from other sessions among `rows`; empty if there are none."""
    late = select.elsewhere(rows)
    same = [row for row in rows if row.samples_of() and row not in late]
    if len(late) <= len(same):
        names = ", ".join(map(title, late))
        return f"In another session than the last stage, perhaps on another GPU: {names}." if late else ""
    return f"In other sessions than the last stage, perhaps on another GPU: all but {', '.join(map(title, same))}."


def fastest_note(rows: Sequence[Measurement], records: Sequence[Measurement]) -> str:
    """The note if the fastest stage does not have the highest rate among `rows`; else empty."""
    highest, fastest = select.fastest_stage(rows), select.fastest_stage(rows, records=records)
    if highest is None or fastest is None or highest is fastest:
        return ""
    return (
        f"The fastest stage is {title(fastest)}: the higher rate of {title(highest)} is from another run, and such "
        "rates are compared in the newest run that timed both."
    )


def off_ladder(rows: Sequence[Measurement], shown: Iterable[str]) -> str:
    """Rows of one problem, those named `shown` in bold: time, rate, speed-up over the parent, error; or status.

    `rows` are from `select.off_ladder`. Decoding stages, which memory limits, also have their rate in bytes.
    """
    names = set(shown)
    rate_of = {row.name: select.rate(row) for row in rows}

    def over_parent(row: Row) -> float | None:
        stage = registry.OFF_LADDER.get(row["name"].partition("[")[0])
        base = rate_of.get(stage.parent or "") if stage else None
        return row["tflops"] / base if row["tflops"] and base else None

    decodes = any(name.partition("[")[0] in registry.DECODE for name in names)
    tera = rows[0].problem.compulsory_bytes / 1e6
    modelled_us = {(row.name, cache): select.median_us(row, cache=cache) for row in rows for cache in AS_IN_A_MODEL}
    columns = (
        Column("", lambda row: f"**{row['title']}**" if row["name"] in names else row["title"]),
        Column("median, µs", lambda row: row["median_us"] if row["tflops"] else _rate_or_why(row)),
        Column("on rotating K and V, µs", lambda row: modelled_us.get((row["name"], "rotating"))),
        Column("in a step, µs", lambda row: modelled_us.get((row["name"], "step"))),
        Column("TFLOP/s", "tflops"),
        Column("TB/s of Q, K, V and O", lambda row: tera / row["median_us"] if row["tflops"] and decodes else None),
        Column("× parent", over_parent, number),
        Column("largest error", "largest_error", tiny),
    )
    return table(columns, timed(rows), drop_empty=True)


def off_ladder_gains(stage: registry.Stage, measured: Mapping[Problem, Sequence[Measurement]]) -> str:
    """A stage's speed-up over its parent and its time where it predicted a number and both have a time; else empty."""
    said = {}
    for expected in stage.expected:
        row = {row.name: row for row in measured.get(expected.problem, ())}
        if gain := select.speedup(row.get(stage.id), row.get(stage.parent or ""), cache=expected.cache):
            time_us = number(select.median_us(row[stage.id], cache=expected.cache))
            said[_where(expected)] = f"**{times(gain)}** at {_where(expected) or expected.problem.label} ({time_us} µs)"
    return f"Over {code(stage.parent or '')}: {'; '.join(said.values())}." if said else ""


STATES = (
    Column("", title),
    *(
        Column(f"{name}, TFLOP/s", partial(select.rate, regime=regime, cache=cache))
        for (regime, cache), name in select.STATES.items()
    ),
    Column(
        "sustained: clock limited by",
        lambda row: row.samples_of("sustained") and row.samples_of("sustained").conditions,
        lambda conditions: held_back(conditions.throttle_reasons),
    ),
)


def states(rows: Iterable[Measurement]) -> str:
    """Rates in each regime and cache state that any row was measured in, and what limited the clock."""
    return table(STATES, [row for row in rows if row.status == "ok"], drop_empty=True)


def _millijoules(energy_j: float) -> str:
    return number(1e3 * energy_j)


COSTS = (
    Column("", "title"),
    Column("cycles per score, burst", "burst.cycles_per_score"),
    Column("cycles per score, sustained", "sustained.cycles_per_score"),
    Column("MHz in the calls, burst", "burst.call_clock_mhz", mhz),
    Column("MHz in the calls, sustained", "sustained.call_clock_mhz", mhz),
    Column("MHz after them, burst", "burst.sm_clock_mhz", mhz),
    Column("sustained: power, W", "sustained.power_w"),
    ENERGY := Column("mJ/call", "sustained.energy_j_per_call", _millijoules),
)


def costs(rows: Sequence[Measurement], *, titled: bool = False) -> str:
    """Costs of a call at any clock: cycles per score, power and energy, burst and sustained; and clocks.

    `titled` puts the problem above the table, for pages with several.
    """
    heading = f"**{rows[0].problem.label}**\n\n" if titled and rows else ""
    lines = [
        {"title": title(row), "burst": headline(row), "sustained": headline(row, "sustained")}
        for row in rows
        if row.status == "ok"
    ]
    return heading + table(COSTS, lines)


def _with_worst(contest: contests.Contest | None) -> str | None:
    """A contest's ratio, and that of the worst layer if the inputs have layers."""
    if contest is None or contest.worst_ratio is None:
        return times(contest.ratio) if contest else None
    return f"{times(contest.ratio)}, {times(contest.worst_ratio)} on layer {contest.worst_layer}"


def _titles(names: Iterable[str]) -> str:
    """Display names of libraries."""
    return _listed([short_title(name) for name in names])


def _without(names: Sequence[str]) -> str:
    """The suffix that names libraries which a ratio leaves out."""
    return f", without {_titles(names)}" if names else ""


def _sustained(held: contests.AgainstPeers) -> str | None:
    contest = held.sustained
    return f"{_with_worst(contest)}{_without(contest.left_out)}" if contest else None


def _side(which: str) -> tuple[Column, Column]:
    """Columns of one side of a burst contest: name and rate, and percent of the tensor cores' peak."""

    def said(held: contests.AgainstPeers) -> str | None:
        if held.burst is None:
            return held.reason if which == "stage" else None
        row = getattr(held.burst, which)
        if which == "stage":
            return f"{code(row.name)} {number(select.rate(row))}"
        return f"{short_title(row.name)} {number(select.rate(row))}{_without(held.burst.left_out)}"

    return Column(f"{'library' if which == 'peer' else which}, TFLOP/s", said), Column(
        "of peak", lambda held: held.burst and contests.percent_of_peak(getattr(held.burst, which)), percent
    )


_NAMED = f"over {' and '.join('FA3' if name == 'fa3' else short_title(name) for name in contests.NAMED_PEERS)}"
AGAINST = (
    Column("problem", "problem.label"),
    Column("burst, over the best library", "burst", _with_worst),
    *_side("stage"),
    *_side("peer"),
    Column("log-sum-exp alike", "burst.adjusted_ratio", times),
    Column(_NAMED, "named.ratio", times),
    Column("sustained, over the best library", _sustained),
    Column("log-sum-exp alike", "sustained.adjusted_ratio", times),
    Column(_NAMED, "named_sustained.ratio", times),
)
"""Our best stage against the best library of the same element type, by problem."""


def against(against_peers: Sequence[contests.AgainstPeers]) -> str:
    """At how many problems the stage is faster, and the range of ratios: one sentence per regime."""
    said, partly = [], []
    regimes: tuple[tuple[Regime, str], ...] = (("burst", "in bursts"), ("sustained", "under sustained load"))
    for regime, when in regimes:
        contested: list[tuple[contests.AgainstPeers, contests.Contest]] = [
            (held, contest) for held in against_peers if (contest := getattr(held, regime))
        ]
        if contested:
            ratios = [(c.ratio, f" ({held.problem.label}, over {short_title(c.peer.name)})") for held, c in contested]
            said.append(f"{when.capitalize()} the best stage is faster than the best library at {standing(ratios)}")
        if count := sum(bool(contest.left_out) for _, contest in contested):
            partly.append(f"at {several(count, 'problem')} {when}")
    if partly:
        said.append(
            f"{' and '.join(partly).capitalize()} the run left out one of {_titles(contests.FASTEST)} that takes such "
            "problems; the table names it, and the ratio may be too high."
        )
    return "\n".join(said)


def standing(ratios: Sequence[tuple[float, str]], what: str = "problems") -> str:
    """How many ratios are above one, and the lowest and highest, each followed by its text."""
    (low, of_lowest), (high, of_highest) = min(ratios), max(ratios)
    won = sum(ratio > 1 for ratio, _ in ratios)
    return f"{won} of {len(ratios)} {what}: ratios lie between {times(low)}{of_lowest} and {times(high)}{of_highest}."


def against_inputs(
    against_peers: Iterable[contests.AgainstPeers],
    regime: Regime = "burst",
    problems: Sequence[Problem] = contests.MAIN,
) -> str:
    """The ratios at `problems`, one row per kind of inputs: the worst first, `trained` next to `normal`.

    Ratios below one, where the library is faster, are bold; the worst layer's ratio follows for `trained`.

    Raises:
        NoDataError: none was measured on inputs that are not normal.
    """
    by_kind: dict[str, dict[str, contests.Contest]] = {}
    for held in against_peers:
        problem, contest = replace(held.problem, inputs=NORMAL), getattr(held, regime)
        if contest and problem in problems:
            by_kind.setdefault(held.problem.inputs, {})[problem.label] = contest
    if not by_kind.keys() - {NORMAL}:
        raise NoDataError(
            f"No {regime} ratios on inputs that are not normal are on record for this GPU yet: "
            f"`{select.bench('inputs', regime)}` makes them."
        )

    worst = {kind: min(contest.lowest for contest in of_kind.values()) for kind, of_kind in by_kind.items()}
    # Normal and trained inputs are adjacent, at the place of the worse one.
    pair = worst.keys() & {NORMAL, TRAINED}
    together = min((worst[kind] for kind in pair), default=0.0)
    order = sorted(worst, key=lambda kind: (together if kind in pair else worst[kind], kind in pair, worst[kind]))

    def column(label: str) -> Column:
        def said(kind: str) -> str | None:
            contest = by_kind[kind].get(label)
            text = (_with_worst(contest) or "").replace(", ", ",<br>").replace(" on ", " on<br>")
            text = f"**{text}**" if contest and contest.lowest < 1 else text
            return f"{text} †" if contest and contest.left_out else text or None

        return Column(" ".join(word for word in label.split() if word not in common), said)

    labels = [problem.label for problem in problems]
    first, *others = map(str.split, labels)
    common = [word for word in first if all(word in label for label in others)]
    rows = table((Column(f"{' '.join(common)}, {regime}", code), *map(column, labels)), order)
    said = f"{rows}\n{_stages_of(by_kind, order)}\n"
    if left_out := {name for of_kind in by_kind.values() for contest in of_kind.values() for name in contest.left_out}:
        names = _titles(sorted(left_out))
        said += f"\n† The run left out {names}, which may be faster, so the ratio may be too high.\n"
    return said


def _stages_of(by_kind: Mapping[str, Mapping[str, contests.Contest]], order: Iterable[str]) -> str:
    """The stages behind the ratios, since two kinds may differ because their stages do."""
    of_stage = grouped(
        ((contest.stage.name, kind) for kind in order for contest in by_kind[kind].values()), lambda pair: pair[0]
    )
    most, *others = sorted(of_stage, key=lambda name: len(of_stage[name]), reverse=True)
    if not others:
        return f"Every ratio is for {code(most)}."

    def said(name: str) -> str:
        count, kinds = len(of_stage[name]), list(dict.fromkeys(code(kind) for _, kind in of_stage[name]))
        return f"{count} {'is' if count == 1 else 'are'} for {code(name)}, on {_listed(kinds)}"

    counted = f"{len(of_stage[most])} ratios are for {code(most)}, and {', and '.join(map(said, others))}"
    return f"{counted}: two kinds may differ because their stages do."


FEATURED = (
    Column("problem", "stage.problem.label"),
    Column("stage", "stage.name", code, left=True),
    Column("µs", lambda featured: select.median_us(featured.stage), mhz),
    Column("TFLOP/s, visible scores", lambda featured: select.rate(featured.stage), mhz),
    Column("× without it", lambda featured: select.speedup(featured.stage, featured.without), times),
    Column("fastest library", lambda featured: short_title(featured.peer.name) if featured.peer else None, left=True),
    Column("µs", lambda featured: select.median_us(featured.peer), mhz),
    Column("× library", lambda featured: select.speedup(featured.stage, featured.peer), times),
)
"""A stage with a window or a soft cap, compared with itself without and with the library that supports them."""


def accuracy(accuracies: Iterable[contests.Accuracy]) -> str:
    """Errors by implementation and kind of inputs, over FlashAttention-3's, or -4's where the wheel lacks the type.

    First the kinds on which the newest stage misses its target; then, per element type, the error over the reference's
    at the worst head dim and mask, kinds with the worst stage first; then every error, by problem.

    Raises:
        NoDataError: there are none on inputs that are not normal.
    """
    errors = list(accuracies)
    by_dtype = {
        dtype: grouped(of_dtype, lambda checked: checked.problem.inputs)
        for dtype, of_dtype in grouped(errors, lambda checked: checked.problem.dtype).items()
    }
    parts = [_accuracy_of(dtype, kinds) for dtype, kinds in by_dtype.items() if kinds.keys() != {NORMAL}]
    if not parts:
        raise NoDataError(
            "No errors by kind of inputs are on record for this GPU yet: `flashlab bench --suite inputs` makes them."
        )
    return "\n".join([f"{_aim(errors)}\n", *parts])


def _aim(accuracies: Sequence[contests.Accuracy]) -> str:
    """The kinds of inputs on which the newest stage's errors exceed their target."""
    kinds = {
        name: {checked.problem.inputs for checked in accuracies if name in checked.errors} for name in registry.STAGES
    }
    # What was checked on one kind alone is not to be compared over kinds.
    newest = max(kinds, key=lambda name: (min(2, len(kinds[name])), [*kinds].index(name)))
    missed: dict[str, list[str]] = {}
    for (dtype, kind), same in grouped(
        accuracies, lambda checked: (checked.problem.dtype, checked.problem.inputs)
    ).items():
        rms, largest = _worst(same, newest) or (0.0, 0.0)
        over = ["RMS"] * (rms > contests.RMS_AIM) + ["largest"] * (largest > contests.LARGEST_AIM)
        if over:
            missed.setdefault(dtype, []).append(f"{code(kind)} ({' and '.join(over)})")
    where = ", and in ".join(f"{dtype} on {_listed(words)}" for dtype, words in missed.items())
    return (
        f"The target of {code(newest)} is at most {contests.RMS_AIM} times the reference's RMS error and "
        f"{contests.LARGEST_AIM} times its largest, on each kind of inputs; {len(kinds[newest])} of {len(KINDS)} kinds "
        f"are on record. {f'Missed in {where}.' if where else 'It is met on these.'}"
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _worst(accuracies: Iterable[contests.Accuracy], name: str) -> tuple[float, ...]:
    """Both errors over the reference's at the worst problem; empty if it was not checked."""
    return tuple(
        map(max, zip(*(checked.over_reference(name) for checked in accuracies if name in checked.errors), strict=True))
    )


def _implementation(name: str) -> str:
    return code(name) if name in registry.STAGES else short_title(name)


EVERY_ERROR = (
    Column("inputs", "0.problem.inputs", code),
    Column("problem", lambda item: f"D{item[0].problem.head_dim} {item[0].problem.mask}", left=True),
    Column("", "1", _implementation, left=True),
    Column("RMS error", lambda item: item[0].errors[item[1]][0], tiny),
    Column("over its", lambda item: item[0].over_reference(item[1])[0], times),
    Column("largest error", lambda item: item[0].errors[item[1]][1], tiny),
    Column("over its", lambda item: item[0].over_reference(item[1])[1], times),
)


def _accuracy_of(dtype: str, kinds: Mapping[str, Sequence[contests.Accuracy]]) -> str:
    """The table of one element type, followed by every error."""
    # What was checked on one kind alone is not to be compared over kinds.
    counts = Tally(
        name for same in kinds.values() for name in dict.fromkeys(n for checked in same for n in checked.errors)
    )
    names = [name for name, count in counts.items() if count > 1 or len(kinds) == 1]

    def of_stages(kind: str) -> float:
        stages = (name for name in names if name in registry.STAGES)
        return max((over for name in stages for over in _worst(kinds[kind], name)), default=0.0)

    def column(name: str) -> Column:
        return Column(_implementation(name), lambda kind: " · ".join(map(times, _worst(kinds[kind], name))) or None)

    order = sorted(kinds, key=of_stages, reverse=True)
    references = dict.fromkeys(short_title(checked.reference) for same in kinds.values() for checked in same)
    over = Column(f"{dtype}: error over that of {' or '.join(references)}, RMS · largest", code)
    every = [(checked, name) for kind in order for checked in kinds[kind] for name in names if name in checked.errors]
    whole = folded(f"{dtype}: every error", table(EVERY_ERROR, every), kind="abstract")
    return f"{table((over, *map(column, names)), order)}\n{whole}\n"


# --- Predictions ------------------------------------------------------------------------------------------------------


_UNITS = {"tflops": ("", " TFLOP/s"), "time_us": ("", " µs"), "ratio": ("×", "")}
"""What precedes and follows a number of each kind of prediction."""


def _range(prediction: Scored) -> str:
    sign, unit = _UNITS[prediction.expected.of]
    return f"{sign}{prediction.expected.low:g} to {sign}{prediction.expected.high:g}{unit}"


def _where(expected: registry.Expected) -> str:
    """How its problem differs from the first: `D128`, `causal`, `rotating K and V`; in decoding its whole shape."""
    usual = Problem.parse(FIRST_SHAPE).label.split()[-2 if expected.problem.q_len == 1 else 0 :]
    state = "" if expected.cache == "hot" else select.STATES["burst", expected.cache].removeprefix("burst, ")
    return " ".join(filter(None, (*(word for word in expected.problem.label.split() if word not in usual), state)))


def _measured(prediction: Scored) -> str | None:
    return number(prediction.measured).join(_UNITS[prediction.expected.of]) if prediction.measured else None


def outcome(prediction: Scored) -> str:
    """A measurement against its predicted range: `inside`, `5.7 % above`, `8.1 % below`, `not on record`."""
    if prediction.off is None:
        return "not on record"
    return (
        f"{number(100 * abs(prediction.off), 2)} % {'above' if prediction.off > 0 else 'below'}"
        if prediction.off
        else "inside"
    )


def scored(numbers: Sequence[Scored]) -> str:
    """A prediction's numbers in its own words, each with its problem if not the first, and the measurement; empty if it
    has none."""

    def said(prediction: Scored) -> str:
        where = f" ({_where(prediction.expected)})" if _where(prediction.expected) else ""
        return f"“{prediction.expected.words}”{where} → {_measured(prediction) or '–'}, {outcome(prediction)}"

    return "; ".join(map(said, numbers))


PREDICTIONS = (
    Column("stage", "stage.id", code),
    Column("prediction", "expected.words", left=True),
    Column("where", "expected", _where, left=True),
    Column("predicted", _range),
    Column("measured", _measured),
    Column("outcome", outcome),
)


_FAMILIES: Mapping[str, str] = {"ladder": "ladder", "dead_ends": "did not work", "decode": "decoding", "fp8": "FP8"}


def predictions(scored: Sequence[Scored]) -> str:
    """How many predicted ranges hold, by family and of all, and a table of all, the furthest off first."""
    known = [prediction for prediction in scored if prediction.off is not None]
    families = grouped(known, lambda prediction: _FAMILIES[prediction.stage.place])
    sides = {name: Tally(prediction.side for prediction in of) for name, of in [*families.items(), ("all", known)]}
    header = ("kernels", "measured", "inside the range", "faster", "slower")
    counts = [(name, of.total(), of["inside"], of["faster"], of["slower"]) for name, of in sides.items()]
    lines = sorted(scored, key=lambda prediction: -abs(prediction.off) if prediction.off is not None else 1)
    return f"{markdown(header, counts)}\n{table(PREDICTIONS, lines)}"


# --- Profiles ---------------------------------------------------------------------------------------------------------

_ACRONYMS = {"Gmma": "GMMA", "Imc": "IMC", "Lg": "LG", "Mio": "MIO"}


def warp_state(metric: str) -> str:
    """A warp state as Nsight Compute names it: `long_scoreboard` is Long Scoreboard.

    On Hopper a warp that waits at an mbarrier counts under Long Scoreboard, and one that waits for its wgmma to be done
    under Barrier, as the samples of lines that do nothing else show.
    """
    return " ".join(_ACRONYMS.get(word, word) for word in metric.replace("_", " ").title().split())


def _states(shares: Mapping[str, float]) -> str | None:
    """The three most frequent warp states."""
    most = list(shares.items())[:3]
    return ", ".join(f"{warp_state(state)} {number(share, 2)} %" for state, share in most) or None


PROFILES = (
    stage(),
    Column("warp states", "states", _states, left=True),
    Column("tensor pipe", "tensor_percent", percent),
    Column("exponential unit", "exp_percent", percent),
    Column("FP32", "fma_percent", percent),
    Column("integer, max", "alu_percent", percent),
    Column("issue slots", "issue_percent", percent),
)
"""Utilisation of units and issue slots in one launch of each stage, and its warp states."""


_OCCUPANCY_LIMITS: Mapping[str, str] = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "threads",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}


def _occupancy_limit(profile: StageProfile) -> str | None:
    """What limits occupancy.

    Shared memory is named only if nothing else limits it as much: the driver takes from the L1 cache what the blocks
    need that fit otherwise, so that its limit equals the lowest other one in nearly every launch.
    """
    blocks = {words: profile.metrics[name] for name, words in _OCCUPANCY_LIMITS.items() if name in profile.metrics}
    lowest = [words for words, value in blocks.items() if value == min(blocks.values())]
    return ", ".join([words for words in lowest if words != "shared memory"] or lowest) or None


OCCUPANCY = (
    stage(),
    Column("limited by", _occupancy_limit, left=True),
    Column("registers per thread", lambda profile: profile.metrics.get("launch__registers_per_thread")),
    Column("occupancy, theoretical", "warps_percent_limit", percent),
    Column("achieved", "warps_percent", percent),
    Column("wavefronts of shared memory, 10⁶", "shared_wavefronts", lambda count: number(count / 1e6)),
    Column("bank conflicts", "conflict_percent", percent),
    Column("sectors per load", "load_sectors"),
)
"""Theoretical and achieved occupancy and memory access patterns in one launch of each stage."""


def _bytes(level: str, counted: Callable[[StageProfile], float]) -> tuple[Column, ...]:
    """Counted and measured bytes at a memory level, in MB, and their ratio."""
    measured = f"{level.lower()}_bytes"
    return (
        Column(f"{level} counted, MB", lambda profile: counted(profile) / 1e6),
        Column("measured", measured, lambda size: number(size / 1e6)),
        Column(
            "ratio",
            lambda profile: (
                times(size / counted(profile)) if (size := getattr(profile, measured)) is not None else None
            ),
        ),
    )


TRAFFIC = (
    stage(),
    *_bytes("DRAM", lambda profile: float(profile.problem.compulsory_bytes)),
    *_bytes("L2", lambda profile: roofline.l2_bytes(profile.problem, profile.tile_q)),
)
"""Bytes transferred from device memory and L2 in one launch of each stage, measured and counted from its tiles."""


def hot_lines(profiles: Iterable[StageProfile], *, lines: int = 5, pages: str | None = None) -> str:
    """The source lines with the most warp samples of each stage, and the sampled states.

    Args:
        profiles: one launch of each stage.
        lines: number of lines per stage.
        pages: folder of the stage pages to link to; None for no links.

    Raises:
        NoDataError: no samples were traced to lines.
    """

    def name(item: Row) -> str:
        profile, position = item[0], item[1]
        return (
            ""
            if position
            else code(profile.stage)
            if pages is None
            else f"[{code(profile.stage)}]({pages}{profile.stage}.md)"
        )

    columns = (
        Column("", name),
        Column(
            "line",
            lambda item: f"{place(item[2].file, item[2].line)}<br>{source(item[2].text)}",
            left=True,
        ),
        Column(
            "warp states",
            lambda item: _states({state: 100 * count / item[2].total for state, count in item[2].samples.items()}),
            left=True,
        ),
        Column("of all samples", lambda item: f"{number(100 * item[2].total / sum(item[0].samples.values()), 2)} %"),
    )
    rows = [(profile, position, line) for profile in profiles for position, line in enumerate(profile.lines[:lines])]
    if not rows:
        raise NoDataError("wanted profiles whose samples were traced to source lines, found none")
    return table(columns, rows)


# --- What ran, and where ----------------------------------------------------------------------------------------------


def untimed(rows: Iterable[Measurement]) -> str:
    """Rows without a time, with status and reason; empty if every row has one."""
    counts = Tally((title(row), _STATUS_WORDS[row.status], prose(row.reason)) for row in rows if row.status != "ok")
    lines = [(*what, count) for what, count in counts.items()]
    return markdown(("", "status", "reason", "problems"), lines, left=3) if lines else ""


RESOURCES = (
    stage("0"),
    Column("registers per thread", "1.registers"),
    Column("spilled bytes, stored / loaded", lambda item: f"{item[1].spill_store_bytes} / {item[1].spill_load_bytes}"),
    Column("threads per block", "1.threads"),
    Column(
        "shared memory per block, B", lambda item: item[1].dynamic_smem_bytes + item[1].static_smem_bytes, "{:,}".format
    ),
    Column("blocks per SM", "1.blocks_per_sm"),
)


def resources(cubins: Mapping[str, CubinFields | None]) -> str:
    """Resource usage of each kernel, from the launched machine code."""
    return table(RESOURCES, [item for item in cubins.items() if item[1]])


def launched(rows: Iterable[Measurement]) -> str:
    """Resource usage of the kernels behind the recorded times."""
    return resources({row.name: row.cubin for row in rows if row.kind == "stage"})


def _verdict(row: Measurement) -> str:
    if row.verdict is None:
        return _STATUS_WORDS[row.status]
    return "passed" if row.verdict.passed else f"rejected: {prose(row.verdict.reason)}"


VERDICTS = (
    Column("", title),
    Column("verdict", _verdict, left=True),
    Column("largest error", "verdict.overall_max_error", tiny),
    Column("error nearest its limit", "verdict.max_abs_error", tiny),
    Column("limit", "verdict.max_abs_limit", tiny),
    Column("RMS error nearest its limit", "verdict.rms_error", tiny),
    Column("limit", "verdict.rms_limit", tiny),
    Column("log-sum-exp error", "verdict.lse_error", tiny),
)
"""The checker's verdict on each row."""


def inputs() -> str:
    """The kinds of inputs and their effect on scores."""
    return table((Column("kind", "name", code), Column("Q, K and V", "title", left=True)), KINDS.values())


_GPU_FACTS: Mapping[str, Callable[[Gpu], str]] = {
    "SMs": lambda gpu: str(gpu.sm_count),
    "maximum SM clock (NVML)": lambda gpu: f"{number(gpu.max_sm_clock_mhz, 4)} MHz",
    "memory": lambda gpu: f"{number(gpu.memory_bytes / 2**30)} GiB",
    "L2 cache": lambda gpu: f"{number(gpu.l2_bytes / 2**20)} MiB",
    "power limit": lambda gpu: f"{number(gpu.power_limit_w)} W",
}


def machine(shown: Results) -> str:
    """The GPU that was measured, and its host.

    Raises:
        NoDataError: machine.json is missing or damaged.
    """
    if shown.machine is None:
        raise NoDataError(f"wanted data/{shown.gpu}/machine.json, found none that can be read")
    gpu = shown.machine.gpu
    said: Mapping[str, object] = {name[0].upper() + name[1:]: of(gpu) for name, of in _GPU_FACTS.items()}
    facts: dict[str, object] = {
        "GPU": gpu.name,
        "Compute capability": ".".join(map(str, gpu.compute_capability)),
        **said,
        "Driver": gpu.driver,
        "Fingerprint": code(gpu.fingerprint),
    } | {
        f"Host {name.removesuffix('_gib').replace('_', ' ')}": f"{value} GiB" if name.endswith("_gib") else value
        for name, value in shown.machine.host.items()
    }
    return markdown(("measured on", ""), [(name, str(value)) for name, value in facts.items()], left=2)


def chips(shown: Results, data: Path = DATA) -> str:
    """Every GPU with runs: fingerprint, dates, rented machine, what pages show of it, runs, rows and cost.

    Raises:
        NoDataError: there are no runs.
    """
    records: Iterator[Measurement | Ceiling] = (line.record for line in store.lines(shown.gpu, "runs", data))
    by_chip = grouped(records, lambda row: row.gpu.fingerprint)
    problems = {problem: {row.gpu.fingerprint for row in rows} for problem, rows in shown.problems.items()}

    def on_pages(fingerprint: str) -> str | None:
        mine = [problem for problem, theirs in problems.items() if fingerprint in theirs]
        parts = [f"**the ladder**, {shown.first.label}"] if shown.first is not None and shown.first in mine else []
        if others := len(mine) - len(parts):
            parts.append(several(others, "other problem" if parts else "problem"))
        return " and ".join(parts) or None

    def runs(item: Row) -> set[str]:
        return {row.run for row in item[1]}

    columns = (
        Column("GPU", "0", code),
        Column("date", lambda item: select.days(runs(item)), left=True),
        Column("rented as", lambda item: _rented(item[1]), left=True),
        Column("shown on these pages", "0", on_pages, left=True),
        Column("runs", lambda item: len(runs(item))),
        Column("rows", lambda item: len(item[1])),
        Column("cost, US$", lambda item: cost_usd(item[1])),
    )
    return table(columns, sorted(by_chip.items(), key=lambda item: item[1][0].run), drop_empty=True)


def _rented(rows: Iterable[Measurement | Ceiling]) -> str | None:
    """Machine types and prices per GPU, as recorded; None if not recorded."""

    def named(start: Start) -> str:
        price = "" if start.usd_per_gpu_hour is None else f"{number(start.usd_per_gpu_hour)} US$/GPU-hour"
        return " at ".join(filter(None, (start.instance, price)))

    return "; ".join(filter(None, dict.fromkeys(named(row.start) for row in rows if row.start))) or None


def cost_usd(rows: Iterable[Measurement | Ceiling]) -> float | None:
    """GPU price from the start of each run to its last record, for runs with a price; None if there are none.

    Time before and after a run, such as compiling and installing, is not counted.
    """
    spent: dict[str, float] = {}
    for row in rows:
        if row.start is not None and row.start.usd_per_gpu_hour is not None:
            took = datetime.fromisoformat(row.time) - datetime.fromisoformat(row.run[:16])
            cost = row.start.usd_per_gpu_hour * took.total_seconds() / 3600
            spent[row.run] = max(spent.get(row.run, 0.0), cost)
    return sum(spent.values()) if spent else None


def software(shown: Results) -> str:
    """Software versions of the newest run shown."""
    rows = [row for rows in shown.problems.values() for row in rows] + list(shown.ceilings.values())
    newest = max(rows, key=lambda row: row.run)
    return markdown(("package", "version"), sorted(newest.software.items()), left=2)


CEILINGS = (
    Column("ceiling", "name", code),
    Column("how", "how", left=True),
    Column("value", "value"),
    Column("unit", "unit", lambda unit: unit.replace("us", "µs")),
    Column("std dev, %", "samples.cv_percent"),
)


def ceilings(shown: Results) -> str:
    """Measured limits of a GPU.

    Raises:
        NoDataError: none was measured.
    """
    if not shown.ceilings:
        raise NoDataError.of(f"measured ceilings of {shown.gpu}", "flashlab bench --ceilings")
    return table(CEILINGS, shown.ceilings.values())


def gpu_title(shown: Results) -> str:
    """A GPU's display name without its maker: `H200`."""
    return shown.name.removeprefix("NVIDIA ")


def machines(everything: Sequence[Results]) -> str:
    """The GPUs side by side: hardware, measured ceilings, and the extent of their records."""
    lines: list[list[Cell]] = [
        [what, *(said(shown.hardware) if shown.hardware else None for shown in everything)]
        for what, said in _GPU_FACTS.items()
    ]
    for name in dict.fromkeys(name for shown in everything for name in shown.ceilings):
        limits = [shown.ceilings.get(name) for shown in everything]
        lines.append(
            [
                code(name),
                *(f"{number(limit.value)} {limit.unit.replace('us', 'µs')}" if limit else None for limit in limits),
            ]
        )
    lines.append(["problems on record", *(str(len(shown.problems)) for shown in everything)])
    lines.append(["records", *("partial" if shown.lacking else "complete" for shown in everything)])
    return markdown(("", *map(gpu_title, everything)), lines)


def across(
    compared: Iterable[contests.Across],
    everything: Sequence[Results],
    regime: Regime = "burst",
    *,
    titled: bool = False,
) -> str:
    """The same stages and libraries at the same problems on each GPU; the first GPU is the base of ratios.

    `titled`: the heading above names the problem, which is the same in every row.
    """
    base, *others = everything
    lines: list[dict[str, Any]] = [
        {"of": implementation, **{gpu: headline(row, regime) for gpu, row in implementation.rows.items()}}
        for implementation in compared
        if any(implementation.ratio(shown.gpu, base.gpu, regime) for shown in others)
    ]
    if not lines:
        return f"*None of these stages and libraries has a {regime} time on two GPUs.*"

    def of(shown: Results) -> tuple[Column, ...]:
        name, gpu = gpu_title(shown), shown.gpu
        power = (Column("W", f"{gpu}.power_w"), Column("mJ/call", f"{gpu}.energy_j_per_call", _millijoules))
        burst = (Column("cycles per score", f"{gpu}.cycles_per_score"),)
        rates = (Column(f"{name}: TFLOP/s", f"{gpu}.tflops"), Column("MHz", f"{gpu}.call_clock_mhz", mhz))
        return (*rates, *(burst if regime == "burst" else power))

    def ratio(shown: Results) -> Column:
        header = f"{gpu_title(shown)} / {gpu_title(base)}"
        return Column(header, lambda line: line["of"].ratio(shown.gpu, base.gpu, regime), times)

    columns = (
        *(() if titled else (Column("problem", "of.problem.label"),)),
        Column("", lambda line: _implementation(line["of"].name), left=True),
        *map(ratio, others),
        *(column for shown in everything for column in of(shown)),
    )
    said = []
    for shown in others:
        if ratios := [(value, "") for line in lines if (value := line["of"].ratio(shown.gpu, base.gpu, regime))]:
            faster = f"The {gpu_title(shown)} is faster than the {gpu_title(base)} in"
            said.append(f"{faster} {standing(ratios, 'rows')}")
    return "\n".join([*said, "", table(columns, lines, drop_empty=True)])


def placement(shown: Results) -> str:
    """The fastest stage and library against their roof, at each non-causal problem of the last rung.

    The roof is the tensor cores' rate at the clock inside the row's calls or, if so marked, device memory. A problem
    that stays in L2 from call to call may exceed the latter, and is marked.

    Raises:
        NoDataError: no bandwidth was measured.
    """
    copy, first = shown.ceilings.get("copy"), shown.first
    if copy is None or first is None:
        known = ", ".join(shown.ceilings) or "none"
        raise NoDataError.of(f"the ceiling copy of {shown.gpu}", "flashlab bench --ceilings", known)
    lines = []
    for problem, rows in shown.with_last_rung().items():
        if problem.dtype != first.dtype or problem.mask != "full":
            continue
        line: list[Cell] = [problem.sizes, problem.flops / problem.compulsory_bytes]
        for row in (select.fastest_stage(rows, records=shown.records), select.fastest_peer(rows)):
            name, rate = best(row)
            line += [str(name).split(" (")[0] if name else None, rate, *_under_roof(row, rate, copy.value)]
        lines.append(line)
    ours = ("fastest stage", "TFLOP/s", "roof, TFLOP/s", "of roof")
    sides = (*ours, "fastest library", "its TFLOP/s", "its roof, TFLOP/s", "of its roof")
    return markdown((f"{first.dtype}, non-causal", "operations per byte", *sides), lines)


def _under_roof(row: Measurement | None, rate: float | None, bandwidth_tb_s: float) -> tuple[Cell, Cell]:
    peak = row.gpu.tensor_tflops(select.call_clock(row)) if row else None
    if row is None or not rate or peak is None:
        return None, None
    slope = bandwidth_tb_s * row.problem.flops / row.problem.compulsory_bytes
    roof = min(peak, slope)
    share = 100 * rate / roof
    bound = "" if peak <= slope else " (memory)"
    return f"{number(roof)}{bound}", percent(share) if share <= 100 else "above: data in L2"


def best(row: Measurement | None) -> tuple[str | None, float | None]:
    """Name and rate of a row for two table cells; both None if there is no row."""
    return (title(row), select.rate(row)) if row else (None, None)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _checked(what: str, place: int) -> tuple[Column, ...]:
    """Columns of one kind of comparison, ending with the run; dashes where a stage has none."""

    def of(lines: select.Comparisons, *statuses: str) -> int | None:
        return sum(line.status in statuses for line in lines) if lines else None

    def failed(item: Row) -> str | None:
        failures = [line for line in item[place] if line.status not in ("ok", "unsupported")]
        first = {line.stage: line for line in reversed(failures)}
        said = "; ".join(f"{code(name)} at {first[name].problem.label}: {prose(first[name].reason)}" for name in first)
        return f"{len(failures)}{f', such as {said}' if said else ''}" if item[place] else None

    return (
        Column(what, lambda item: len(item[place]) or None, "{:,}".format),
        Column("passed", lambda item: of(item[place], "ok"), "{:,}".format),
        Column("not for this stage", lambda item: of(item[place], "unsupported"), "{:,}".format),
        Column("failed", failed),
        Column("run and commit", lambda item: item[place][0].header.run if item[place] else None, code),
    )


def _layouts(lines: Sequence[Compared]) -> str:
    layouts = sorted({line.layout for line in lines})
    return f"{len(layouts)} at random" if any("/" in layout for layout in layouts) else ", ".join(layouts)


CHECK_RECORDS = (
    Column("", "0"),
    Column("GPU", lambda item: item[1][0].header.gpu.name, left=True),
    Column("layouts", "1", _layouts, left=True),
    Column("stages", lambda item: len({line.stage for line in item[1]})),
    Column("problems", lambda item: len({line.problem for line in item[1]}), "{:,}".format),
    *_checked("comparisons", 1),
)
"""Contents of comparison files: for each a link and its lines."""
CHECKS = (stage("0"), *_checked("hostile lengths", 1), *_checked("random shapes and strides", 2))
"""Newest comparisons of stages with the oracle: each id with its lines of both kinds (`select.newest_checks`)."""


def sanitized(records: Sequence[Sanitized]) -> str:
    """Findings of compute-sanitizer's tools per stage: a sentence, and a table of errors in launches."""
    by_stage: dict[str, dict[str, Sanitized]] = {}
    for record in records:
        by_stage.setdefault(record.stage, {})[record.tool] = record

    def errors(record: Sanitized) -> str:
        if not record.finished:
            return "not finished"
        elsewhere = f", {record.elsewhere} elsewhere" if record.elsewhere else ""
        return f"{record.errors} in {record.launches}{elsewhere}"

    tools = dict.fromkeys(record.tool for record in records)
    columns = [Column("stage", "0", code)]
    columns += [Column(tool, f"1.{tool}", errors) for tool in tools]
    clean = "No errors were found." if all(record.clean for record in records) else "Errors were found."
    days = sorted({record.time[:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{records[0].gpu.name}, {when}, {', '.join(sorted({record.version for record in records}))}. {clean} "
        f"Errors and launches:\n\n{table(columns, by_stage.items())}"
    )


# --- Downloads -------------------------------------------------------------------------------------------------------

_DOWNLOADS = facts_in(__file__, "downloads")
MEASUREMENT_COLUMNS: Mapping[str, str] = _DOWNLOADS["measurements"]
"""Columns of measurements.csv, in order, with their meanings."""
SAMPLE_COLUMNS: Mapping[str, str] = _DOWNLOADS["samples"]
"""Columns of samples.csv, in order, with their meanings."""


def _in_each_state(row: Measurement) -> Iterator[tuple[dict[str, object], Samples | None]]:
    """The columns and samples of a row in each state with a time; once without samples if it has none."""
    fields = {name: value for part in (row.verdict, row.cubin) if part for name, value in vars(part).items()}
    every = {name: fields.get(name) for name in MEASUREMENT_COLUMNS}
    every |= {"time": row.time, "gpu": row.gpu.name, "gpu_fingerprint": row.gpu.fingerprint}
    every["cubin_sha256"] = row.cubin.sha256 if row.cubin else None
    for taken in row.samples:
        # On its own: headline numbers leave out layers of trained inputs, and too short sustained load.
        alone = row.model_copy(update={"samples": (taken.model_copy(update={"layer": None, "continuous_s": None}),)})
        more = {"layer": taken.layer, "calls": taken.calls, "continuous_s": taken.continuous_s}
        yield every | headline(alone, taken.regime, taken.cache) | more, taken
    if not row.samples:
        yield every | headline(row) | {"regime": None, "cache": None, "samples": None}, None


def measurement_lines(rows: Iterable[Measurement]) -> list[dict[str, object]]:
    """Lines of measurements.csv."""
    states = (columns for row in rows for columns, _ in _in_each_state(row))
    return [{name: columns[name] for name in MEASUREMENT_COLUMNS} for columns in states]


def sample_lines(rows: Iterable[Measurement]) -> list[dict[str, object]]:
    """Lines of samples.csv: times to seven digits, more than any timer here resolves, and clocks in whole megahertz.

    Further decimals would be half of the file.
    """
    lines = []
    for columns, taken in (state for row in rows for state in _in_each_state(row)):
        common = {name: columns.get(name) for name in SAMPLE_COLUMNS}
        sm, call = (taken.sm_clock_mhz, taken.call_clock_mhz) if taken else ((), ())
        for index, time_us in enumerate(taken.time_us if taken else ()):
            clock = {"sm_clock_mhz": round(sm[index]) if sm else None}
            clock["call_clock_mhz"] = round(call[index]) if call else None
            lines.append({**common, "index": index, "time_us": float(f"{time_us:.7g}"), **clock})
    return lines
