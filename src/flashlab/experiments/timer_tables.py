"""What other timers, inputs, a cold cache and another start of the machine do to a time: the readings as tables.

A pool is what one timer read of an implementation in one state. Its median is held against that of CUDA events in the
same state, zeros against normal inputs, a cold L2 against a hot one, and starts of the machine against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlab.core.errors import NoDataError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Mask, Problem
from flashlab.experiments.timers import INSTALLS, TIMERS
from flashlab.kernels import peers, registry
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.query.statistics import Estimate, interval, ratio_of_medians
from flashlab.record import schema, store
from flashlab.record.schema import Measurement, Reading, Samples
from flashlab.show import charts, tables
from flashlab.show.charts import Chart
from flashlab.show.notebook import NOTHING_YET
from flashlab.show.tables import Column, mhz, number, table

if TYPE_CHECKING:
    from flashlab.query.select import Results
    from flashlab.show.pages import Output

AGREE = 0.02
"""Two timers agree where the ratio of their medians is within this of one."""
LAUNCH_GAP_US = 4.0
"""Differences up to this are attributed to events and launches around a kernel, microseconds."""
ENOUGH_SAMPLES = 20_000
"""Raw samples of stages and libraries that a GPU's data should have."""
STARTS = 3
"""Number of separate starts on which the ladder should be measured at the first shape."""


# --- Readings ---------------------------------------------------------------------------------------------------------


def pools(readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """The readings of each problem's newest run, with the samples of each state pooled.

    A pool's `call_clock_mhz` is empty unless it was read with every sample; its `enqueue_us` is the median.
    """
    every = list(readings)
    newest = {reading.problem: reading.run for reading in sorted(every, key=lambda reading: reading.run)}
    current = (measured for measured in every if measured.run == newest[measured.problem])
    merged = []
    for same in grouped(
        current, lambda measured: (measured.name, measured.problem, measured.timer, measured.inputs, state(measured))
    ).values():
        times = tuple(value for measured in same for value in measured.samples.time_us)
        clocks = tuple(clock for measured in same for clock in measured.samples.call_clock_mhz)
        enqueues = [measured.enqueue_us for measured in same if measured.enqueue_us is not None]
        whole = {"time_us": times, "call_clock_mhz": clocks if len(clocks) == len(times) else ()}
        pooled: dict[str, Any] = {"samples": same[-1].samples.model_copy(update=whole)}
        pooled["enqueue_us"] = median(enqueues) if enqueues else None
        merged.append(same[-1].model_copy(update=pooled))
    return tuple(merged)


def state(pool: Reading) -> str:
    """`burst, hot L2`, `burst, cold L2` or `sustained`."""
    return select.STATES[pool.samples.regime, pool.samples.cache]


def clock_mhz(pool: Reading) -> float | None:
    """Median SM clock in the calls; None where it was not read with every sample."""
    return median(pool.samples.call_clock_mhz) if pool.samples.call_clock_mhz else None


def with_interval(estimate: Estimate) -> str:
    """A ratio to display: `1.003 (0.998–1.007)`."""
    return f"{estimate.value:.3f} ({estimate.low:.3f}–{estimate.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two pools of one implementation and problem that differ in timer, inputs or cache."""

    ours: Reading
    """The baseline: by CUDA events, on normal inputs, or with a hot L2."""
    other: Reading

    @cached_property
    def ratio(self) -> Estimate:
        """Ratio of the other's median to ours, resampled independently."""
        return interval(ratio_of_medians, self.other.samples.time_us, self.ours.samples.time_us)

    @property
    def agrees(self) -> bool:
        """Whether the medians are within `AGREE` of each other."""
        return abs(self.ratio.value - 1) <= AGREE

    @property
    def gap_us(self) -> float:
        """Our median minus the other's, microseconds."""
        return self.ours.samples.median_us - self.other.samples.median_us

    @property
    def clock_ratio(self) -> float | None:
        """The ratio in SM cycles instead of time; None if either clock was not read."""
        ours, other = clock_mhz(self.ours), clock_mhz(self.other)
        return None if ours is None or other is None else self.ratio.value * other / ours

    @property
    def why(self) -> str:
        """The explanation of a difference; empty if the two agree.

        The first that applies: the host could not enqueue calls as fast as they ran; the clocks differ and cycles per
        call do not; a few microseconds per call, for any call; none of these.
        """
        if self.agrees:
            return ""
        other, ours = self.other, self.ours
        enqueue = other.enqueue_us
        hot_batch = other.timer == "cuda-bench" and other.samples.cache == "hot"
        if hot_batch and enqueue is not None and ours.samples.median_us < enqueue and self.gap_us < 0:
            return f"the host: {number(enqueue)} µs to enqueue a call"
        if self.clock_ratio is not None and abs(self.clock_ratio - 1) <= AGREE:
            beside = f"{number(clock_mhz(other), 4)} MHz against {number(clock_mhz(ours), 4)}"
            return f"the clock: {beside}; in SM cycles {self.clock_ratio:.3f}"
        if abs(self.gap_us) <= LAUNCH_GAP_US:
            more = "events include" if self.gap_us > 0 else f"{TIMERS[other.timer]} includes"
            return f"launch overhead: {more} {number(abs(self.gap_us))} µs more per call"
        return "not explained by host, clock or launch"


def _against(
    pools: Iterable[Reading], same: Callable[[Reading], object], base: Callable[[Reading], bool]
) -> tuple[Comparison, ...]:
    """Pools beside those they are held against: `same` gives both the same key, and `base` holds for `ours` alone."""
    every = list(pools)
    bases = {same(pool): pool for pool in every if base(pool)}
    others = (pool for pool in every if not base(pool) and same(pool) in bases)
    return tuple(Comparison(ours=bases[same(pool)], other=pool) for pool in others)


def comparisons(pools: Iterable[Reading]) -> tuple[Comparison, ...]:
    """Every other timer's pools beside those of CUDA events in the same state."""
    return _against(
        pools,
        lambda pool: (pool.name, pool.problem, pool.inputs, state(pool), pool.samples.cache),
        lambda pool: pool.timer == "events",
    )


# --- Starts of the machine --------------------------------------------------------------------------------------------


Spread = tuple[Measurement, ...]
"""One stage or library at one problem, a row for each start of a machine, in time's order: the newest of each."""


def samples(rows: Spread) -> list[Samples]:
    """The burst samples with a hot L2 of each start."""
    return [burst for row in rows if (burst := row.samples_of())]


def between_percent(of_starts: Sequence[float | None]) -> float | None:
    """The largest of a number of each start over the smallest, less one; None where one is not known."""
    known = [value for value in of_starts if value is not None]
    return 100 * (max(known) / min(known) - 1) if len(known) == len(of_starts) else None


def spreads(gpu_slug: str, data: Path = DATA) -> tuple[Spread, ...]:
    """What was measured on at least two separate starts on normal inputs, by problem, in the ladder's order.

    A row counts when it names its start and has burst samples with a hot L2; of each start, those of
    `select.by_start`.
    """
    rows = (row for row in store.measurements(gpu_slug, data) if row.kind == "peer" or row.name in registry.RUNGS)
    timed = (row for row in rows if row.problem.inputs == NORMAL and row.start and row.samples_of())
    repeated: list[Spread] = []
    for (_, name), same in grouped(timed, lambda row: (row.problem, row.name)).items():
        starts = select.by_start(same, lambda row: row.name, [name])
        if len(starts) > 1:
            repeated.append(tuple(row for (row,) in starts))
    ladder = {name: at for at, name in enumerate([*registry.RUNGS, *peers.PEERS])}
    return tuple(sorted(repeated, key=lambda spread: (spread[0].problem, ladder.get(spread[0].name, len(ladder)))))


# --- Pages ------------------------------------------------------------------------------------------------------------


def _bursts(merged: Iterable[Reading]) -> list[Reading]:
    return [pool for pool in merged if pool.inputs == NORMAL and state(pool) != "sustained"]


def _title(name: str) -> str:
    return tables.code(name) if name in registry.RUNGS else tables.title_of(name)


def _page(
    merged: Sequence[Reading],
    columns: Sequence[Column],
    pairs: Iterable[Comparison],
    order: Callable[[Comparison], Any],
    above: Callable[[Sequence[Comparison]], str] = lambda pairs: "",
) -> str:
    """A table for each problem of the pools, the largest first, and which runs they are of.

    Args:
        order: what pairs are sorted by in a table.
        above: what stands above a table of pairs.
    """
    parts, by_problem = [], grouped(sorted(pairs, key=order), lambda pair: pair.ours.problem)
    for problem in sorted(dict.fromkeys(pool.problem for pool in merged), key=lambda problem: -problem.flops):
        mine = by_problem.get(problem, [])
        parts.append(f"### {problem.label}\n\n{above(mine)}{table(columns, mine)}")
    source = f"*{select.sourced(merged[0].gpu.name, runs=(pool.run for pool in merged))}*\n" if merged else ""
    return "\n".join([*parts, source])


def missing_timers(pools: Iterable[Reading]) -> str:
    """A sentence on the timers without readings and how to install them; empty if all or none have readings."""
    timers = {pool.timer for pool in pools}
    lacking = [f"{TIMERS[timer]} (`pip install {name}`)" for timer, name in INSTALLS.items() if timer not in timers]
    return f"**No reading on record:** {', '.join(lacking)}.\n" if timers and lacking else ""


def timers_table(pools: Sequence[Reading]) -> str:
    """Other timers against CUDA events on random inputs: one table per problem, with explanations of differences."""
    bursts = _bursts(pools)

    def above(rows: Sequence[Comparison]) -> str:
        agreeing = sum(comparison.agrees for comparison in rows)
        return f"{agreeing} of {len(rows)} medians are within {100 * AGREE:.0f} % of CUDA events.\n\n"

    columns = [
        Column("", "ours.name", _title),
        Column("other timer", "other.timer", TIMERS.get, left=True),
        Column("L2", "ours.samples.cache", left=True),
        Column("difference", lambda comparison: comparison.why or "agrees", left=True),
        Column("events, µs", "ours.samples.median_us", mhz),
        Column("other, µs", "other.samples.median_us", mhz),
        Column("other / events (95 %)", "ratio", with_interval),
    ]
    return _page(
        bursts, columns, comparisons(bursts), lambda pair: (pair.other.timer, pair.other.samples.cache == "cold"), above
    )


def timers_chart(pools: Sequence[Reading]) -> Chart:
    """The ratios of `timers_table` as a figure.

    Raises:
        NoDataError: there is none.
    """
    bursts = _bursts(pools)
    compared = comparisons(bursts)
    if not compared:
        raise NoDataError.of("readings by other timers and CUDA events", "flashlab method")
    series: dict[str, dict[str, tuple[float, float, float]]] = {}
    for comparison in sorted(compared, key=lambda comparison: (-comparison.ours.problem.flops, comparison.other.timer)):
        gain = comparison.ratio.percent_gain()
        row = series.setdefault(f"{tables.title_of(comparison.ours.name)}, {comparison.ours.problem.shape}", {})
        row[f"{TIMERS[comparison.other.timer]}, {comparison.ours.samples.cache} L2"] = (gain.low, gain.value, gain.high)
    return charts.differences(
        series,
        name="timers",
        axis="percent over CUDA events",
        within=100 * AGREE,
        caption=f"Other timers' medians relative to CUDA events, with 95 % intervals. The band is ±{AGREE:.0%}.",
        provenance=select.sourced(bursts[0].gpu.name, "burst", runs=(pool.run for pool in bursts)),
        data_files=select.run_files(bursts),
    )


def zeros_table(pools: Sequence[Reading]) -> str:
    """Zeros against random normal inputs, by CUDA events: time, clock and power."""
    by_events = [pool for pool in pools if pool.timer == "events"]
    pairs = _against(
        by_events, lambda pool: (pool.name, pool.problem, state(pool)), lambda pool: pool.inputs == "normal"
    )
    columns = [
        Column("", "ours.name", _title),
        Column("state", "other", state, left=True),
        Column("normal, µs", "ours.samples.median_us", mhz),
        Column("zeros, µs", "other.samples.median_us", mhz),
        Column("zeros / normal (95 %)", "ratio", with_interval),
        Column("MHz in the calls, normal", lambda pair: clock_mhz(pair.ours), mhz),
        Column("zeros", lambda pair: clock_mhz(pair.other), mhz),
        Column("W, normal", lambda pair: schema.power_w(pair.ours.samples), number),
        Column("zeros", lambda pair: schema.power_w(pair.other.samples), number),
    ]
    states = ("burst, hot L2", "burst, cold L2", "sustained")
    return _page(by_events, columns, pairs, lambda pair: states.index(state(pair.other)))


def cache_table(pools: Sequence[Reading]) -> str:
    """A cold L2 against a hot one, on random inputs, by every timer with readings."""
    bursts = _bursts(pools)
    pairs = _against(
        bursts, lambda pool: (pool.name, pool.problem, pool.timer), lambda pool: pool.samples.cache == "hot"
    )
    columns = [
        Column("", "ours.name", _title),
        Column("timer", "other.timer", TIMERS.get, left=True),
        Column("hot, µs", "ours.samples.median_us", mhz),
        Column("cold, µs", "other.samples.median_us", mhz),
        Column("cold / hot (95 %)", "ratio", with_interval),
    ]
    return _page(bursts, columns, pairs, lambda pair: list(TIMERS).index(pair.other.timer))


def clock_table(shown: Results) -> str:
    """The SM clock in bursts and under sustained load, power, and what limited the clock, from the measured rows.

    Raises:
        NoDataError: no row has the clock during its calls in both.
    """
    columns = [
        Column("", lambda row: tables.title(row[0])),
        Column("MHz after a burst", lambda row: median(row[1].sm_clock_mhz) if row[1].sm_clock_mhz else None, mhz),
        Column("in a burst's calls", lambda row: median(row[1].call_clock_mhz), mhz),
        Column("in sustained calls", lambda row: median(row[2].call_clock_mhz), mhz),
        Column("sustained / burst time", lambda row: row[2].median_us / row[1].median_us, "{:.3f}".format),
        Column("W, sustained", lambda row: number(schema.power_w(row[2]))),
        Column("maximum °C", lambda row: row[2].conditions and row[2].conditions.temperature_c_max),
        Column(
            "clock limited by",
            lambda row: row[2].conditions and tables.held_back(row[2].conditions.throttle_reasons),
        ),
    ]
    text = []
    for problem, measured in shown.problems.items():
        states = [(row, row.samples_of("burst", "hot"), row.samples_of("sustained", "hot")) for row in measured]
        rows = [(r, b, s) for r, b, s in states if b and s and b.call_clock_mhz and s.call_clock_mhz]
        if rows:
            text.append(f"### {problem.label}\n\n{table(columns, rows)}")
    if not text:
        raise NoDataError.of("clocks in calls, burst and sustained", select.bench("peers", "sustained"))
    return "\n".join(text)


def spread_table(spreads: Iterable[Spread]) -> str:
    """Every stage and library on separate starts: medians, spread within and between starts; one table per problem."""

    def start(index: int) -> Callable[[Spread], float | None]:
        return lambda rows: samples(rows)[index].median_us if index < len(rows) else None

    text, form = [], "{:.2f}".format
    for problem, mine in grouped(spreads, lambda rows: rows[0].problem).items():
        starts = max(map(len, mine))
        columns = [
            Column("", "0.name", _title),
            *(Column(f"start {index + 1}, µs", start(index), mhz) for index in range(starts)),
            Column("within a start, std dev, %", lambda rows: fmean(burst.cv_percent for burst in samples(rows)), form),
            Column(
                "between starts, %", lambda rows: between_percent([burst.median_us for burst in samples(rows)]), form
            ),
            Column(
                "between starts in SM cycles, %",
                lambda rows: between_percent([burst.cycles_per_score for burst in samples(rows)]),
                form,
            ),
        ]
        text.append(f"### {problem.label}\n\n{table(columns, mine)}\n{_starts_line(mine, starts)}")
    return "\n".join(text)


def _starts_line(timed: Sequence[Spread], columns: int) -> str:
    every = {row.run: row for rows in timed for row in rows}
    begun = [f"{row.start.at[:16].replace('T', ' ')} UTC" for row in every.values() if row.start]
    chips = len({row.gpu.fingerprint for row in every.values()})
    short = f" {STARTS} starts are needed." if columns < STARTS else ""
    return (
        f"*The machine was started at {', '.join(sorted(dict.fromkeys(begun)))}; the runs were on "
        f"{chips} {'GPU' if chips == 1 else 'different GPUs'} ({timed[0][0].gpu.name}).{short} "
        "Between starts: the slowest start's median over the fastest's, minus one.*\n"
    )


def spread_chart(starts: Iterable[Spread], *, mask: Mask = "full") -> Chart:
    """Each start's median and 5th to 95th percentile at the first shape, relative to the mean of the starts.

    Raises:
        NoDataError: nothing was measured there on two starts.
    """
    problem = Problem.parse(FIRST_SHAPE, mask=mask)
    timed = [rows for rows in starts if rows[0].problem == problem]
    if not timed:
        raise NoDataError.of(f"{problem.label} on separate starts of a machine", "flashlab bench --suite first")
    series: dict[str, dict[str, tuple[float, float, float]]] = {}
    for spread in timed:
        middle = fmean(burst.median_us for burst in samples(spread))
        for start, burst in enumerate(samples(spread), start=1):
            low, mid, high = (100 * (float(t) / middle - 1) for t in np.percentile(burst.time_us, (5, 50, 95)))
            series.setdefault(tables.title_of(spread[0].name), {})[f"start {start}"] = (low, mid, high)
    every = [row for rows in timed for row in rows]
    return charts.differences(
        series,
        name=f"starts-{mask}",
        axis="percent over the mean of the starts",
        within=None,
        caption="The same code on separate starts of the machine: median, and 5th to 95th percentile of the samples.",
        provenance=select.provenance(every),
        data_files=select.run_files(every),
    )


def samples_page(out: Output, shown: Results, data: Path) -> None:
    """Write the number of raw samples on record, one line per GPU."""
    lines = [f"- {samples_line(slug, data)}" for slug in store.gpus(data)]
    out.snippet("samples.md", "\n".join(lines) or NOTHING_YET)


PAGES = {"timers": samples_page}


def samples_line(gpu_slug: str, data: Path = DATA) -> str:
    """A sentence on the number of raw samples on record for a GPU, and how to make more if they are too few."""
    counts = store.count_samples(gpu_slug, data)
    total = sum(counts.values())
    parts = ", ".join(f"{count:,} in `{folder}/`" for folder, count in counts.items() if count)
    text = f"Raw samples of stages and libraries on record for `{gpu_slug}`: **{total:,}** ({parts or 'none'})."
    if total < ENOUGH_SAMPLES:
        text += (
            f" {ENOUGH_SAMPLES:,} are needed: `flashlab bench --suite first --samples 200` makes more, and with "
            "`--dry-run` estimates the time."
        )
    return text


def summary(pools: Iterable[Reading], starts: Iterable[Spread]) -> dict[str, Any]:
    """The notebook's results as numbers: agreement of timers, spread between starts."""
    compared = comparisons(pool for pool in pools if pool.inputs == NORMAL)
    return {
        "compared": len(compared),
        "agreeing": sum(comparison.agrees for comparison in compared),
        "between_starts_percent": {
            f"{rows[0].name} {rows[0].problem.label}": between_percent([burst.median_us for burst in samples(rows)])
            for rows in starts
        },
    }
