"""The one bootstrap: over starts of a machine and samples within, and families of comparisons."""

from __future__ import annotations

import numpy as np
import pytest

from flashlab.core.errors import ParameterError
from flashlab.query import statistics
from flashlab.query.statistics import holm, interval, median, over_starts, p_value, ratio_of_medians


def _times(centre: float, seed: int, count: int = 40) -> list[float]:
    return [float(one) for one in np.random.default_rng(seed).normal(centre, 0.1, count)]


def test_one_start_is_an_interval_of_its_samples() -> None:
    times = _times(100, 1)
    one = interval(np.median, times)
    assert one == over_starts(np.median, [[times]])
    assert one.starts == 1
    assert one.low < one.value == float(np.median(times)) < one.high


@pytest.mark.parametrize("count", [1, 2, 15, 40])
def test_a_median_is_numpys_to_the_last_bit(count: int) -> None:
    values = np.random.default_rng(count).normal(100, 0.1, (7, count, 5))
    for axis in range(3):
        assert np.array_equal(median(values, axis=axis), np.median(values, axis=axis))
    assert np.array_equal(median(values), np.median(values, axis=-1))


def test_paired_samples_are_drawn_together_and_others_one_by_one() -> None:
    """The seed's own draws, by hand: rounds once where samples are paired, else entries of each in turn."""
    above, below = np.asarray(_times(100, 1, 30)), np.asarray(_times(99, 2, 30))
    rng = np.random.default_rng(statistics.SEED)
    first, second = (rng.integers(30, size=(statistics.RESAMPLES, 30)) for _ in range(2))
    for paired, entries in ((True, first), (False, second)):
        ratios = np.median(above[first], axis=-1) / np.median(below[entries], axis=-1)
        told = interval(ratio_of_medians, list(above), list(below), paired=paired)
        assert (told.low, told.high) == tuple(np.percentile(ratios, (2.5, 97.5)))


def test_starts_that_differ_widen_the_interval() -> None:
    """Samples of a start agree within a tenth of a percent, starts differ by one: the interval must span the starts."""
    starts = [[_times(centre, seed)] for seed, centre in enumerate((100.0, 101.0, 102.0))]
    over = over_starts(np.median, starts)
    within = interval(np.median, starts[1][0])
    assert over.value == pytest.approx(101, abs=0.1)
    assert over.low < 100.2 < 101.8 < over.high
    assert over.high - over.low > 10 * (within.high - within.low)
    assert (over.starts, within.starts) == (3, 1)


def test_a_ratio_is_taken_within_a_start() -> None:
    """A start that slows both leaves the ratio as it is."""
    starts = [[_times(2 * centre, seed), _times(centre, seed + 9)] for seed, centre in enumerate((50.0, 100.0, 75.0))]
    ratio = over_starts(ratio_of_medians, starts)
    assert ratio.value == pytest.approx(2, abs=0.01)
    assert ratio.high - ratio.low < 0.02


def test_a_single_sample_has_no_interval() -> None:
    one = interval(np.median, [3.0])
    assert (one.low, one.value, one.high, one.starts) == (3.0, 3.0, 3.0, 1)


@pytest.mark.parametrize("starts", [[], [[[]]], [[[1.0]], [[]]]])
def test_what_is_empty_is_refused(starts: list[list[list[float]]]) -> None:
    with pytest.raises(ParameterError, match="wanted at least one of each on every start"):
        over_starts(np.median, starts)


def test_p_values_say_how_sure_a_difference_is() -> None:
    same, other = _times(100, 1), _times(100.5, 2)
    assert p_value(ratio_of_medians, [[other, same]], 1.0) < 0.001
    assert p_value(ratio_of_medians, [[_times(100, 3), same]], 1.0) > 0.05


def test_holm_raises_p_values_of_a_family() -> None:
    assert holm((0.01, 0.04, 0.03)) == pytest.approx((0.03, 0.06, 0.06))
    assert holm((0.5, 0.9)) == pytest.approx((1.0, 1.0))
    assert holm(()) == ()
