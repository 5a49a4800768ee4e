"""The oracle against the definition, and what plain rounds."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlab.core.errors import DTypeError, ShapeError
from flashlab.core.problem import DTYPES, DType, Problem
from flashlab.verify import oracle
from flashlab.verify.oracle import attention, make_inputs, pack, plain, round_to, to_float


def by_definition(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """Row by row, key by key, in Python floats."""
    batches, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(batches):
        for h in range(q_heads):
            group = h // (q_heads // kv_heads)
            for i in range(q_len):
                seen = [j for j in range(kv_len) if not causal or j - i <= kv_len - q_len]
                if not seen:
                    continue
                scores = [
                    scale * sum(float(q[b, h, i, d]) * float(k[b, group, j, d]) for d in range(head_dim)) for j in seen
                ]
                weights = [math.exp(s) for s in scores]
                lse[b, h, i] = math.log(sum(weights))
                for d in range(head_dim):
                    dot = sum(w * float(v[b, group, j, d]) for w, j in zip(weights, seen, strict=True))
                    out[b, h, i, d] = dot / sum(weights)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 9), (9, 5), (7, 1), (6, 6)])
def test_attention_is_the_definition(lengths: tuple[int, int], causal: bool) -> None:
    problem = Problem(batch=2, q_heads=4, kv_heads=2, q_len=lengths[0], kv_len=lengths[1], head_dim=3)
    q, k, v = make_inputs(problem)
    out, lse = attention(q, k, v, causal=causal, scale=0.7)
    expected, expected_lse = by_definition(q, k, v, causal, 0.7)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-15)
    assert out.dtype == lse.dtype == np.float64


def test_causal_rows_without_keys_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = make_inputs(Problem.parse("1x2x2x10x4x8"))
    out, lse = attention(q, k, v, causal=True)
    assert (out[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == -np.inf).all()
    assert np.isfinite(lse[:, :, 6:]).all()
    np.testing.assert_allclose(out[:, :, 6], to_float(v[:, :, 0]))  # The first row that sees a key sees one.


def test_default_scale_is_one_over_root_head_dim() -> None:
    q, k, v = make_inputs(Problem.parse("1x1x4x64"))
    np.testing.assert_array_equal(attention(q, k, v, causal=False)[0], attention(q, k, v, causal=False, scale=0.125)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_tiling_changes_nothing(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    q, k, v = make_inputs(Problem.parse("1x2x1x37x53x16"))
    whole, whole_lse = attention(q, k, v, causal=causal)
    monkeypatch.setattr(oracle, "_SCORES_PER_TILE", 53 * 5)
    out, lse = attention(q, k, v, causal=causal)
    np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)


@pytest.mark.slow
def test_memory_is_bounded_by_the_tile_not_by_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_SCORES_PER_TILE", 1 << 16)
    q, k, v = make_inputs(Problem.parse("1x1x4096x16"))
    tracemalloc.start()
    try:
        attention(q, k, v, causal=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4096 * 4096 * 8 / 16  # All scores would be 128 MiB.


def test_large_scores_do_not_overflow() -> None:
    q, k, v = make_inputs(Problem.parse("1x1x8x16"))
    out, lse = attention(q, k, v, causal=False, scale=1e4)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_any_strides_are_read() -> None:
    q, k, v = make_inputs(Problem.parse("2x3x5x8"))
    across = tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v))
    np.testing.assert_array_equal(attention(*across, causal=True)[0], attention(q, k, v, causal=True)[0])


def test_bfloat16_reads_the_same_in_every_guise() -> None:
    q, k, v = make_inputs(Problem.parse("1x2x9x8", dtype="bfloat16"))
    assert q.dtype == ml_dtypes.bfloat16
    out, _ = attention(q, k, v, causal=True)
    for guise in ([x.view(np.uint16) for x in (q, k, v)], [x.astype(np.float32) for x in (q, k, v)]):
        np.testing.assert_array_equal(attention(*guise, causal=True)[0], out)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), dtype=st.sampled_from(DTYPES))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_round_to_is_the_types_own_rounding(bits: list[int], dtype: DType) -> None:
    x = np.array(bits, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(round_to(x, dtype), expected)
        np.testing.assert_array_equal(to_float(pack(x[~np.isnan(x)], dtype)), expected[~np.isnan(x)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_is_off_by_roundings_of_its_type_and_no_more(dtype: DType) -> None:
    q, k, v = make_inputs(Problem.parse("1x2x128x64", dtype=dtype))
    out, _ = attention(q, k, v, causal=False)
    got = plain(q, k, v, causal=False, dtype=dtype)
    assert str(got.dtype) == dtype
    relative = np.sqrt(((to_float(got) - out) ** 2).mean() / (out**2).mean())
    unit = oracle.UNIT_ROUNDOFF[dtype]
    assert unit / 4 < relative < 2 * unit


def test_plain_rounds_scores_probabilities_and_output() -> None:
    one = np.float16(1)
    q = np.full((1, 1, 1, 1), 1.001, np.float16)
    k = np.array([[[[0.3], [0.7], [0.9]]]], np.float16)
    v = np.array([[[[1.0], [2.0], [3.0]]]], np.float16)
    scores = (q[0, 0].astype(np.float32) @ k[0, 0].T.astype(np.float32)).astype(np.float16).astype(np.float32)
    weights = np.exp(scores - scores.max())
    probabilities = (weights / weights.sum()).astype(np.float16).astype(np.float32)
    expected = (probabilities @ v[0, 0].astype(np.float32)).astype(np.float16)
    assert plain(q, k, v, causal=False, scale=float(one), dtype="float16")[0, 0, 0, 0] == expected[0, 0]


def test_plain_of_rows_without_keys_is_zero() -> None:
    q, k, v = make_inputs(Problem.parse("1x1x1x9x4x8"))
    assert (plain(q, k, v, causal=True, dtype="float16")[:, :, :5] == 0).all()


def test_inputs_are_seeded_normal_and_of_the_problem() -> None:
    problem = Problem.parse("2x8x4x100x50x64", dtype="bfloat16")
    q, k, v = make_inputs(problem, seed=3)
    assert (q.shape, k.shape, v.shape) == ((2, 8, 100, 64), (2, 4, 50, 64), (2, 4, 50, 64))
    assert abs(float(to_float(q).std()) - 1) < 0.02
    assert abs(float(to_float(q).mean())) < 0.02
    np.testing.assert_array_equal(q, make_inputs(problem, seed=3)[0])
    assert (q != make_inputs(problem, seed=4)[0]).any()
    assert (k != v).any()


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 8), (2, 4, 8), (2, 4, 8)),
        ((1, 2, 8, 16), (1, 2, 8, 32), (1, 2, 8, 32)),
        ((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 9, 16)),
        ((1, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)),
        ((1, 3, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)),
        ((1, 2, 8, 16), (1, 2, 0, 16), (1, 2, 0, 16)),
    ],
)
def test_shapes_that_are_no_problem_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (np.zeros(shape, np.float16) for shape in shapes)
    with pytest.raises(ShapeError, match=r"wanted .*, got "):
        attention(q, k, v, causal=False)


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_other_types_are_refused(dtype: Any) -> None:
    x = np.ones((1, 1, 2, 4), dtype)
    with pytest.raises(DTypeError, match="wanted float16, or bfloat16"):
        attention(x, x, x, causal=False)


def test_a_problem_and_its_arrays_have_one_shape() -> None:
    problem = Problem.parse("2x8x4x96x160x64")
    arrays = make_inputs(problem, seed=0)
    assert oracle.problem_of(*arrays, causal=False) == problem
