"""Kinds of inputs: the scores that each makes of the values an implementation is given, and what the checker makes of
them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from wrong.catalogue import Call
from wrong.simulation import Fault

from flashlab.core import inputs
from flashlab.core.errors import ParameterError
from flashlab.core.problem import DTYPES, MASKS, Problem
from flashlab.verify.oracle import default_scale, make_inputs, pack, to_float

DRAWN = [name for name in inputs.KINDS if name != inputs.TRAINED]
PROBLEMS = [
    Problem.parse(f"{shape}x{head_dim}", dtype=dtype)
    for shape, head_dim, dtype in (
        ("1x2x2x200x300", 64, "float16"),
        ("1x2x2x200x300", 128, "bfloat16"),
        ("2x4x1x100x133", 64, "bfloat16"),
        ("2x4x1x100x133", 128, "float16"),
    )
]
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.label)


def scores(problem: Problem) -> Any:
    """Every score in nats, (batch, q_heads, q_len, kv_len) float64, from Q and K as they are stored."""
    q, k, _ = (to_float(x, dtype=np.float64) for x in make_inputs(problem))
    keys = np.repeat(k, problem.q_heads // problem.kv_heads, axis=1)
    return default_scale(problem.head_dim) * q @ keys.transpose(0, 1, 3, 2)


def of_key(problem: Problem) -> Any:
    """The mean score of each key."""
    return scores(problem).mean(axis=(0, 1, 2))


def spread(problem: Problem) -> float:
    """How far the mean score of a key may be from what the kind says, in nats: five standard errors."""
    return 5 / np.sqrt(problem.batch * problem.q_heads * problem.q_len)


def test_every_kind_says_what_it_is() -> None:
    assert next(iter(inputs.KINDS)) == inputs.NORMAL
    for name, kind in inputs.KINDS.items():
        assert kind.name == name
        assert "\n" not in kind.title
        assert "nat" in kind.title or name == inputs.TRAINED


@each_problem
def test_normal_inputs_are_what_they_always_were(problem: Problem) -> None:
    rng = np.random.default_rng(3)
    q_shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    kv_shape = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    for made, shape in zip(make_inputs(problem, 3), (q_shape, kv_shape, kv_shape), strict=True):
        before = pack(rng.standard_normal(shape, dtype=np.float32), problem.dtype)
        np.testing.assert_array_equal(made.view(np.uint16), before.view(np.uint16))


@each_problem
@pytest.mark.parametrize("name", DRAWN)
def test_every_kind_has_the_same_v_and_its_type_holds_it(name: str, problem: Problem) -> None:
    q, k, v = make_inputs(replace(problem, inputs=name))
    np.testing.assert_array_equal(v, make_inputs(problem)[2])
    for x, normal in zip((q, k), make_inputs(problem), strict=False):
        assert (x.shape, x.dtype) == (normal.shape, normal.dtype)
        assert np.isfinite(to_float(x)).all()
        if name not in ("zeros", "one_hot"):  # noise is left in most columns
            assert (to_float(x).std(axis=(0, 1, 2)) > 0.8).sum() >= 0.75 * problem.head_dim


@each_problem
@pytest.mark.parametrize(("name", "nats"), [("normal", 1), ("scale2", 2), ("scale4", 4), ("scale10", 10)])
def test_scaled_scores_spread_by_that_many_nats(name: str, nats: float, problem: Problem) -> None:
    assert scores(replace(problem, inputs=name)).std() == pytest.approx(nats, rel=0.05)


@each_problem
@pytest.mark.parametrize(("name", "key"), [("sink_first", 0), ("sink_last", -1)])
def test_a_sink_is_15_nats_higher_for_every_query(name: str, key: int, problem: Problem) -> None:
    found = of_key(replace(problem, inputs=name))
    assert found[key] == pytest.approx(15, abs=spread(problem))
    assert np.abs(np.delete(found, key)).max() < spread(problem)
    assert (scores(replace(problem, inputs=name)).argmax(axis=3) == key % problem.kv_len).mean() > 0.999


@each_problem
@pytest.mark.parametrize(("name", "first", "last"), [("rising", 0, 60), ("falling", 60, 0)])
def test_scores_rise_or_fall_by_60_nats(name: str, first: float, last: float, problem: Problem) -> None:
    wanted = np.linspace(first, last, problem.kv_len)
    assert np.abs(of_key(replace(problem, inputs=name)) - wanted).max() < spread(problem)


@each_problem
def test_scores_step_up_from_the_last_tile_to_the_first(problem: Problem) -> None:
    found = of_key(replace(problem, inputs="steps", kv_len=1000))
    for tile in range(8):
        assert np.abs(found[128 * tile : 128 * (tile + 1)] + 12 * tile).max() < spread(problem)


def test_a_bias_is_exact_in_either_type_also_where_nats_are_many() -> None:
    problem = Problem.parse("1x1x1x2x16384x128", dtype="bfloat16", inputs="steps")
    columns = [column for half in inputs.bias_columns(128) for column in half]
    q, k, _ = (to_float(x, dtype=np.float64)[0, 0][:, columns] for x in make_inputs(problem))
    assert (q == 11.3125).all()  # the root of 128, as bfloat16 has it
    wanted = -12.0 * (np.arange(16384) // 128)
    np.testing.assert_allclose((q @ k.T)[0] / np.sqrt(128), wanted, atol=0.02, rtol=1e-5)


@each_problem
def test_zeros_have_no_score_but_values(problem: Problem) -> None:
    assert not scores(replace(problem, inputs="zeros")).any()
    assert make_inputs(replace(problem, inputs="zeros"))[2].any()


@pytest.mark.parametrize("mask", MASKS)
@each_problem
def test_one_hot_rows_put_their_weight_on_a_key_of_their_own_that_they_see(problem: Problem, mask: Any) -> None:
    problem = replace(problem, inputs="one_hot", mask=mask)
    q_shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    chosen = inputs.chosen_keys(q_shape, problem.kv_len, causal=problem.causal, xp=np)
    sees = np.arange(problem.q_len) + 1 + problem.kv_len - problem.q_len if problem.causal else problem.kv_len
    assert (chosen >= 0).all()
    assert (chosen < sees).all()
    assert len(np.unique(chosen)) > 0.5 * problem.kv_len
    assert abs((chosen / sees).mean() - 0.5) < 0.05  # anywhere
    found = scores(problem)
    if problem.causal:
        found[..., np.arange(problem.kv_len) >= sees[:, None]] = -np.inf
    np.testing.assert_array_equal(found.argmax(axis=3), chosen)
    top = found.max(axis=3, keepdims=True)
    assert np.abs(top - 30).max() < 0.2
    weights = np.exp(found - top)
    assert (1 / weights.sum(axis=3) > 0.99).all()


def test_rows_that_see_no_key_have_one_hot_inputs_too() -> None:
    problem = Problem.parse("1x2x2x60x7x64", mask="causal", inputs="one_hot")
    assert np.isfinite(to_float(make_inputs(problem)[0])).all()


@each_problem
def test_neighbouring_rows_differ_in_scale(problem: Problem) -> None:
    found = scores(replace(problem, inputs="row_scales"))
    for row, factor in enumerate((0.25, 1, 4, 16)):
        assert found[:, :, row::4].std() == pytest.approx(factor, rel=0.1)


def test_one_query_and_one_key_have_inputs_of_every_kind() -> None:
    for name in DRAWN:
        for x in make_inputs(Problem.parse("1x1x1x64", inputs=name)):
            assert np.isfinite(to_float(x)).all()


def test_an_unknown_kind_gets_the_list_and_the_nearest_name() -> None:
    listed = "wanted one of normal, scale2, .*, trained, got 'sink_frist'; the nearest is sink_first"
    with pytest.raises(ParameterError, match=listed):
        inputs.require("sink_frist")
    with pytest.raises(ParameterError, match="the nearest is scale4"):
        inputs.parse("normal,scale_4")
    with pytest.raises(ParameterError, match=r"wanted some of normal, .*, comma-separated, or all, got ' , '"):
        inputs.parse(" , ")
    assert inputs.parse("all") == tuple(inputs.KINDS)
    assert inputs.parse("scale4, normal,scale4") == ("scale4", "normal")


def test_trained_inputs_are_not_drawn_from_a_seed() -> None:
    with pytest.raises(ParameterError, match="got trained, from a model on a GPU: `flashlab bench`"):
        make_inputs(Problem.parse("1x16x64x64", inputs="trained"))


REFUSED: dict[str, tuple[Fault, ...]] = {
    "sink_last": ("last_tile_skipped",),
    "rising": ("last_tile_skipped",),
    "zeros": ("last_tile_skipped", "tile_counted_twice", "first_head_everywhere"),
    "one_hot": ("last_tile_skipped", "v_rows_swapped", "scale_without_root"),
    "row_scales": ("scale_without_root", "first_head_everywhere"),
}
"""What a kind shows beside the mistakes that all of them show."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAWN)
def test_the_checker_passes_what_is_right_and_refuses_what_is_wrong(name: str, dtype: Any) -> None:
    problem = Problem.parse("2x4x2x66x330x64", dtype=dtype, inputs=name)
    call = Call.of(problem)
    call.simulate()
    verdict = call.judge()
    assert verdict.passed, verdict.reason
    size = float(np.abs(to_float(call.out.array)).max())
    assert verdict.max_abs_limit is not None
    assert 0 < verdict.max_abs_limit < size
    for limit in (verdict.rms_limit, verdict.lse_limit):
        assert limit is not None
        assert 0 < limit < 1
    for fault in ("zeros", "first_batch_everywhere", *REFUSED.get(name, ())):
        wrong = Call.of(problem)
        wrong.simulate(fault)
        assert not wrong.judge().passed, fault


# --- hostile kinds, which checks alone use ---

LONG = [replace(problem, q_len=20, kv_len=600) for problem in PROBLEMS]
each_long = pytest.mark.parametrize("problem", LONG, ids=lambda problem: problem.label)


def test_hostile_kinds_are_not_among_all() -> None:
    assert not inputs.HOSTILE.keys() & set(inputs.parse("all"))
    assert all("\n" not in kind.title for kind in inputs.HOSTILE.values())
    assert [inputs.parse(name) for name in inputs.HOSTILE] == [(name,) for name in inputs.HOSTILE]


@each_long
def test_a_hostile_sink_stands_out_of_scores_that_spread_by_8_nats(problem: Problem) -> None:
    found = scores(replace(problem, inputs="hostile_sink"))
    assert found[..., 1:].std() == pytest.approx(8, rel=0.2)  # the bias has some of the columns
    assert found[..., 0].mean() == pytest.approx(40, abs=8 * spread(problem))
    assert scores(replace(problem, inputs="scale8")).std() == pytest.approx(8, rel=0.05)


@each_long
@pytest.mark.parametrize(("name", "last"), [("hostile_rising", 0), ("hostile_falling", 599)])
def test_hostile_scores_grow_by_11_nats_a_tile(name: str, last: int, problem: Problem) -> None:
    wanted = -11 / 128 * np.abs(np.arange(600) - (599 - last))
    assert np.abs(of_key(replace(problem, inputs=name)) - wanted).max() < spread(problem)


@each_long
def test_waves_rise_and_fall_by_more_than_an_exponential_holds_within_a_tile(problem: Problem) -> None:
    found = of_key(replace(problem, inputs="hostile_waves"))
    tiles = [found[at : at + 128] for at in range(0, 512, 128)]
    assert all(tile.max() - tile.min() > np.log(np.finfo(np.float32).max) for tile in tiles)
    assert np.abs(found[100::200]).max() < spread(problem)
    assert found[::200].max() < -149


@each_long
def test_low_scores_are_0_as_exponentials(problem: Problem) -> None:
    found = scores(replace(problem, inputs="hostile_low"))
    assert np.exp(found.max(), dtype=np.float32) < np.finfo(np.float32).tiny
    assert found.std() < 1.2
