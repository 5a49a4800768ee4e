"""Bootstrap: a statistic of samples with its 95 % interval, for all tables, charts, claims and texts.

Starts of a machine differ by more than samples within a start. Data from several starts is therefore resampled on two
levels, first starts and then samples within each drawn start. An interval from one start covers repetitions on that
start, not on other starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashlab.core.errors import ParameterError

CONFIDENCE = 0.95
RESAMPLES = 4999
_BELOW = 4
"""Factor of the smallest p-value of a family below the limit, so that a few resamples change no verdict."""
SEED = 0
"""Fixed, so that intervals are reproducible to the last bit."""

Statistic = Callable[..., Any]
"""Takes one array per sample and `axis`, along which it reduces; other axes are resamples."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval, which always contains it."""

    value: float
    low: float
    """Lower end; equal to the value if that is exact."""
    high: float
    starts: int | None = None
    """Number of starts that it was measured on; None if it was counted, computed or compiled."""

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        """A number without an interval: counted, computed or compiled."""
        return cls(value=value, low=value, high=value)

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit; `factor` is positive."""
        return replace(self, value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def percent_gain(self) -> Estimate:
        """A ratio as a gain in percent: 1.2 is 20."""
        return replace(self, value=100 * (self.value - 1), low=100 * (self.low - 1), high=100 * (self.high - 1))

    def inverse_of(self, amount: float) -> Estimate:
        """`amount` divided by the estimate, with the ends swapped: a rate from a time."""
        return replace(self, value=amount / self.value, low=amount / self.high, high=amount / self.low)


def median(values: Any, axis: int = -1) -> Any:
    """`np.median`, bit for bit, by sorting, which is much faster for resamples, i.e. many short rows."""
    count = np.shape(values)[axis]
    return np.take(np.sort(values, axis=axis), ((count - 1) // 2, count // 2), axis=axis).mean(axis=axis)


def ratio_of_medians(above: Any, below: Any, axis: int = -1) -> Any:
    """median(above) / median(below) along `axis`: a speed-up if `above` are the times of the slower."""
    return median(above, axis=axis) / median(below, axis=axis)


def interval(statistic: Statistic, *samples: Sequence[float], paired: bool = False) -> Estimate:
    """A statistic of samples from one start, with its 95 % interval: `over_starts` of a single start."""
    return over_starts(statistic, (samples,), paired=paired)


def over_starts(statistic: Statistic, starts: Sequence[Sequence[Sequence[float]]], *, paired: bool = False) -> Estimate:
    """The median over starts of a statistic and its 95 % interval, by percentile bootstrap from a fixed seed.

    Args:
        starts: for each start of a machine, the samples of each measured quantity. Starts are resampled, then samples
            within each drawn start. With one start and a single sample there is no interval: both ends are the value.
        paired: entries i of all samples are from the same round of interleaved timing, so that rounds are resampled;
            else samples are resampled independently. Excess entries, from rounds without the others, are ignored.

    Raises:
        ParameterError: no start, or an empty sample.
    """
    value = float(np.median([statistic(*arrays, axis=-1) for arrays in _arrays(starts, paired)]))
    drawn = _resampled(statistic, starts, paired=paired)
    low, high = (float(end) for end in np.percentile(drawn, (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))))
    return Estimate(value=value, low=min(low, value), high=max(high, value), starts=len(starts))


def p_value(
    statistic: Statistic,
    starts: Sequence[Sequence[Sequence[float]]],
    against: float,
    *,
    paired: bool = False,
    comparisons: int = 1,
) -> float:
    """Two-sided bootstrap p-value against `against`, limited by the number of resamples.

    Args:
        comparisons: size of the family for `holm`. Resamples are enough for a small p-value after that correction.

    Arguments and errors otherwise as `over_starts`.
    """
    enough = math.ceil(_BELOW * 2 * comparisons / (1 - CONFIDENCE))
    drawn = _resampled(statistic, starts, paired=paired, resamples=max(RESAMPLES, enough))
    beyond = min(int((drawn <= against).sum()), int((drawn >= against).sum()))
    return min(1.0, 2 * (beyond + 1) / (drawn.size + 1)) if drawn.size > 1 else 1.0


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """P-values of a family of comparisons, corrected for multiplicity (Holm, 1979)."""
    raised, least = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        raised[index] = least
    return tuple(raised)


def _arrays(starts: Sequence[Sequence[Sequence[float]]], paired: bool) -> list[tuple[Any, ...]]:
    if not starts or not all(samples and all(map(len, samples)) for samples in starts):
        counts = [[len(values) for values in samples] for samples in starts]
        raise ParameterError(f"samples: wanted at least one of each on every start, got {counts}")
    return [
        tuple(
            np.asarray(values[: min(map(len, samples))] if paired else values, dtype=np.float64) for values in samples
        )
        for samples in starts
    ]


def _resampled(
    statistic: Statistic, starts: Sequence[Sequence[Sequence[float]]], *, paired: bool, resamples: int = RESAMPLES
) -> Any:
    """The statistic of each resample; a single value if nothing can be resampled."""
    within = []
    for arrays in _arrays(starts, paired):
        if min(map(len, arrays)) < 2:
            within.append(np.asarray([statistic(*arrays, axis=-1)], dtype=np.float64))
            continue
        entries = _draws(tuple(len(values) for values in arrays), resamples)
        within.append(statistic(*(of[entries[0 if paired else i]] for i, of in enumerate(arrays)), axis=-1))
    if len(within) == 1:
        return within[0]
    rng = np.random.default_rng(SEED)
    chosen = rng.integers(len(within), size=(resamples, len(within)))
    of_start = np.stack([distribution[rng.integers(distribution.size, size=chosen.shape)] for distribution in within])
    return median(np.take_along_axis(of_start, chosen[None], axis=0)[0])


@lru_cache(maxsize=4)
def _draws(lengths: tuple[int, ...], resamples: int) -> tuple[Any, ...]:
    """Indices that each resample draws from samples of these lengths, deterministic."""
    rng = np.random.default_rng(SEED)
    return tuple(rng.integers(length, size=(resamples, length)) for length in lengths)
