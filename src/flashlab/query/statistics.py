"""The one bootstrap: a statistic of samples with its 95 % interval, for every table, chart, claim and sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlab.core.errors import ParameterError

CONFIDENCE = 0.95
RESAMPLES = 4999
SEED = 0
"""Fixed, so that the same samples give the same interval, to the last bit."""

Statistic = Callable[..., Any]
"""Takes one array a sample and `axis`, along which it reduces; any other axes are resamples."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval, which always contains it."""

    value: float
    low: float
    """Lower end; the value itself where it is exact."""
    high: float

    @classmethod
    def exactly(cls, value: float) -> Estimate:
        """A number that has no interval: counted, computed or compiled."""
        return cls(value=value, low=value, high=value)

    def scaled(self, factor: float) -> Estimate:
        """The same in another unit; `factor` is positive."""
        return Estimate(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    def percent_gain(self) -> Estimate:
        """A factor as a gain in percent: 1.2 is 20."""
        return Estimate(value=100 * (self.value - 1), low=100 * (self.low - 1), high=100 * (self.high - 1))

    def inverse_of(self, amount: float) -> Estimate:
        """`amount` over it, so that the ends change places: a rate from a time."""
        return Estimate(value=amount / self.value, low=amount / self.high, high=amount / self.low)


def median(times: Any, axis: int = -1) -> Any:
    """The median along `axis`."""
    return np.median(times, axis=axis)


def ratio_of_medians(above: Any, below: Any, axis: int = -1) -> Any:
    """median(above) / median(below) along `axis`: a speed-up where `above` is the slower one's times."""
    return np.median(above, axis=axis) / np.median(below, axis=axis)


def interval(statistic: Statistic, *samples: Sequence[float], paired: bool = False) -> Estimate:
    """A statistic of samples and its 95 % interval, by percentile bootstrap from a fixed seed.

    Args:
        statistic: as `Statistic`.
        samples: of each thing that was measured. Where one has a single sample there is no interval, and both ends are
            the value.
        paired: entry i of all samples is of the same round of interleaved timing, so that a resample draws rounds; else
            each sample is resampled on its own. Where one has more entries its last ones are of rounds that the others
            sat out, and are left out.

    Raises:
        ParameterError: a sample is empty.
    """
    if not samples or not all(map(len, samples)):
        raise ParameterError(f"samples: wanted at least one of each, got {[len(one) for one in samples]}")
    count = min(map(len, samples))
    arrays = tuple(np.asarray(one[:count] if paired else one, dtype=np.float64) for one in samples)
    value = float(statistic(*arrays, axis=-1))
    if count < 2:
        return Estimate.exactly(value)
    from scipy.stats import bootstrap  # Half a second to import: the command line starts without it.

    ends = bootstrap(
        arrays,
        statistic,
        paired=paired,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(value=value, low=min(float(ends.low), value), high=max(float(ends.high), value))
