"""Comparison of two sets of records: runs, commits, drivers or GPUs.

The sides were measured in different machine starts, between which times of the same code differ. A time has changed if
the interval of its ratio lies outside that noise, on the GPUs of either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from flashlab.core.errors import NoDataError, ParameterError
from flashlab.core.paths import DATA, slug
from flashlab.core.problem import Problem, matching
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.query.statistics import median, over_starts
from flashlab.record import store
from flashlab.record.schema import Measurement

NOISE_PERCENTILE = 95.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Times of a stage or library at a problem on both sides, in bursts with a hot L2."""

    problem: Problem
    name: str
    before_us: float
    after_us: float
    ratio: float
    """Speed-up of the second side over the first."""
    low: float
    high: float
    """`low` and `high` bound its 95 % interval."""
    starts: tuple[int, int]
    """Number of machine starts on each side."""
    verdict: str
    """faster, slower, same (within noise), or unknown, if no two starts are on record to estimate the noise."""
    rows: tuple[Measurement, Measurement]
    """Newest record of each side."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two sides."""

    sides: tuple[str, str]
    differs: dict[str, tuple[str, str]]
    """Other differences by name: GPU, commit, driver, software versions; comma-separated values."""
    noise_percent: float | None
    """95th percentile of the difference between medians of the same code in two starts; None if unknown."""
    changes: tuple[Change, ...]
    """In display order."""


def compare(before: str, after: str, data: Path = DATA, **wanted: object) -> Comparison:
    """Compare everything that both sides timed.

    Args:
        before, after: GPU folder or product name, driver version, or prefix of a commit or run id; joined by `+` if all
            must apply: `nvidia-h200+0123abc`.
        wanted: fields of the problems to compare, as in `matching`; only their intervals are computed.

    Raises:
        NoDataError: a side has no times, or they have no matching problem in common.
        ParameterError: a side, or a part of it, is empty.
    """
    every = _timed(data)
    sides = [_side(text, every, data) for text in (before, after)]
    rows_before, rows_after = map(_grouped, sides)
    gpus = {row.gpu.slug for side in sides for row in side}
    noise = _noise(row for row in every if row.gpu.slug in gpus)
    common = set(matching({problem for problem, _ in rows_before.keys() & rows_after.keys()}, **wanted))
    changes = [
        _change(key, rows_before[key], rows_after[key], noise)
        for key in rows_before
        if key in rows_after and key[0] in common
    ]
    if not changes:
        of = "".join(f" of {name} {value}" for name, value in wanted.items() if value)
        raise NoDataError(
            f"wanted a stage or library that {before} and {after} both timed at one problem{of}, found none"
        )
    return Comparison(
        sides=(before, after),
        differs=_differences(*sides),
        noise_percent=None if noise is None else 100 * (noise - 1),
        changes=tuple(sorted(changes, key=lambda change: change.problem)),
    )


def _timed(data: Path) -> list[Measurement]:
    """Rows with a time, from all GPUs."""
    gpus = store.gpus(data)
    if not gpus:
        raise NoDataError(f"wanted records under {data}, found none")
    return [row for gpu in gpus for row in store.measurements(gpu, data) if row.samples_of()]


def _side(text: str, rows: list[Measurement], data: Path) -> list[Measurement]:
    for part in text.split("+"):
        if not part:
            raise ParameterError(f"wanted a GPU's folder, a driver or the beginning of a commit or run, got {text!r}")
        rows = [
            row
            for row in rows
            if row.gpu.slug in (part, slug(part))
            or part == row.gpu.driver
            or row.run.startswith(part)
            or (len(part) >= 7 and row.source.commit.startswith(part))
        ]
    if not rows:
        raise NoDataError(
            f"wanted times of {text!r}: a GPU's folder, a driver, or the beginning of a commit or run, joined by +, "
            f"found none. GPUs with data: {', '.join(store.gpus(data))}"
        )
    return rows


Key = tuple[Problem, str]


def _grouped(rows: Iterable[Measurement]) -> dict[Key, list[Measurement]]:
    """Rows by problem and name, one per machine start, the newest last, all with the code of the newest."""
    by_key = grouped(rows, lambda row: (row.problem, row.name))
    return {
        key: [start[0] for start in select.by_start(some, lambda row: row.name, [key[1]])]
        for key, some in by_key.items()
    }


def _change(key: Key, before: Sequence[Measurement], after: Sequence[Measurement], noise: float | None) -> Change:
    of_starts = ([(samples.time_us,) for row in rows if (samples := row.samples_of())] for rows in (before, after))
    ours, theirs = (over_starts(median, starts) for starts in of_starts)
    ratio = ours.value / theirs.value
    # The sides are of starts of their own: the ends of both intervals, so that the ratio's is rather too wide.
    low, high = ours.low / theirs.high, ours.high / theirs.low
    known = "same" if noise is not None else "unknown"
    verdict = "faster" if low > (noise or np.inf) else "slower" if high < 1 / (noise or np.inf) else known
    return Change(
        problem=key[0],
        name=key[1],
        before_us=ours.value,
        after_us=theirs.value,
        ratio=ratio,
        low=low,
        high=high,
        starts=(len(before), len(after)),
        verdict=verdict,
        rows=(before[-1], after[-1]),
    )


def _noise(rows: Iterable[Measurement]) -> float | None:
    """95th percentile of the ratio between medians of the same code and driver in two starts."""
    ratios = []
    for some in grouped(rows, lambda row: (row.gpu.slug, row.gpu.driver)).values():
        for starts in _grouped(some).values():
            times_us = filter(None, map(select.median_us, starts))
            ratios += [max(pair) / min(pair) for pair in combinations(times_us, 2)]
    return float(np.percentile(ratios, NOISE_PERCENTILE)) if ratios else None


def _differences(before: Iterable[Measurement], after: Iterable[Measurement]) -> dict[str, tuple[str, str]]:
    def said(rows: Iterable[Measurement]) -> dict[str, str]:
        values: dict[str, dict[str, None]] = {}
        for run, row in sorted({row.run: row for row in rows}.items()):
            facts = {"GPU": row.gpu.name, "driver": row.gpu.driver, "commit": select.commit_label(run)}
            for name, value in (facts | row.software).items():
                values.setdefault(name, {})[value] = None
        return {name: ", ".join(some) for name, some in values.items()}

    ours, theirs = said(before), said(after)
    return {
        name: (ours.get(name, "none"), theirs.get(name, "none"))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    }
