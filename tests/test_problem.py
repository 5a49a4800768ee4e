"""Problems: what is accepted, how they read and print, what they cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlab.core.errors import DTypeError, ParameterError, ShapeError
from flashlab.core.problem import DTYPES, FIRST_SHAPE, MASKS, STANDARD_SHAPES, SUITES, DType, Mask, Problem, suite

GOOD: dict[str, Any] = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 8, "kv_len": 9, "head_dim": 64}
sizes = st.integers(1, 300)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 4))
    return Problem(
        batch=draw(sizes),
        q_heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        q_len=draw(sizes),
        kv_len=draw(sizes),
        head_dim=draw(sizes),
        dtype=draw(st.sampled_from(DTYPES)),
        mask=draw(st.sampled_from(MASKS)),
    )


@given(problem=problems())
def test_a_shape_reads_back_as_printed(problem: Problem) -> None:
    assert Problem.parse(problem.shape, dtype=problem.dtype, mask=problem.mask) == problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16x16x2048x64", (16, 16, 16, 2048, 2048, 64)),
        ("2x32x8x1024x8192x128", (2, 32, 8, 1024, 8192, 128)),
        ("1X2X3X4", (1, 2, 2, 3, 3, 4)),
    ],
)
def test_four_numbers_share_a_length_and_six_do_not(text: str, expected: tuple[int, ...]) -> None:
    problem = Problem.parse(text)
    assert dataclasses.astuple(problem)[:6] == expected
    assert (problem.dtype, problem.mask) == ("float16", "full")


@pytest.mark.parametrize(
    "text", ["", "16", "16x16x2048", "1x2x3x4x5", "1x2x3x4x5x6x7", "axbxcxd", "1x2x3.5x4", "1x2xx4"]
)
def test_a_shape_that_is_none_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(ShapeError, match=r"wanted BxHxSxD or BxHxHkvxSqxSkxD, for example 16x16x2048x64"):
        Problem.parse(text)


@pytest.mark.parametrize("name", ["batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_sizes_are_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(ShapeError, match=f"{name}: wanted a positive integer, got "):
        Problem(**{**GOOD, name: value})


def test_heads_must_share_evenly() -> None:
    with pytest.raises(ShapeError, match="got 4 query heads for 3 key heads"):
        Problem(**{**GOOD, "kv_heads": 3})


def test_other_types_and_masks_are_refused_by_name() -> None:
    with pytest.raises(DTypeError, match="wanted one of float16, bfloat16, got 'float32'"):
        Problem.parse(FIRST_SHAPE, dtype="float32")
    with pytest.raises(ParameterError, match="wanted one of full, causal, got 'window'"):
        Problem.parse(FIRST_SHAPE, mask="window")


def test_an_unknown_kind_of_inputs_is_refused_with_the_list_and_the_nearest_name() -> None:
    with pytest.raises(ParameterError, match=r"inputs: wanted one of normal, .*, got 'fallin'; the nearest is falling"):
        Problem.parse(FIRST_SHAPE, inputs="fallin")


def test_inputs_are_normal_unless_said_and_keep_problems_apart() -> None:
    problem = Problem.parse(FIRST_SHAPE)
    assert problem.inputs == "normal"
    assert problem != Problem.parse(FIRST_SHAPE, inputs="zeros")
    assert problem.flops == Problem.parse(FIRST_SHAPE, inputs="zeros").flops


def test_a_label_names_what_differs() -> None:
    assert Problem.parse("1x2x3x64", inputs="sink_first").label == "B1 H2 S3 D64 full float16 sink_first"
    assert Problem.parse("1x2x3x64", inputs="sink_first").sizes == "B1 H2 S3 D64"
    assert Problem.parse("16x16x2048x64", mask="causal").label == "B16 H16 S2048 D64 causal float16"
    assert Problem.parse("2x32x8x1x8192x128", dtype="bfloat16").label == "B2 H32/8 Sq1 Sk8192 D128 full bfloat16"


@given(problem=problems())
def test_visible_scores_are_the_visible_cells_up_to_half_the_diagonal(problem: Problem) -> None:
    rows, keys = np.arange(problem.q_len)[:, None], np.arange(problem.kv_len)[None, :]
    cells = (
        int((keys - rows <= problem.kv_len - problem.q_len).sum()) if problem.causal else problem.q_len * problem.kv_len
    )
    diagonal = min(problem.q_len, problem.kv_len) if problem.causal else 0
    assert problem.visible_scores == cells - diagonal / 2


def test_a_square_causal_problem_is_half_of_the_full_one() -> None:
    full, causal = suite("first")
    assert causal.flops == full.flops / 2


def test_cost_of_the_first_shape() -> None:
    problem = Problem.parse(FIRST_SHAPE)
    assert problem.flops == 4 * 16 * 16 * 2048 * 2048 * 64
    assert problem.compulsory_bytes == 4 * 16 * 16 * 2048 * 64 * 2
    assert problem.tflops(1e6) == pytest.approx(problem.flops / 1e12)


def test_grouped_heads_load_fewer_keys() -> None:
    grouped, own = Problem.parse("1x8x2x64x128x64"), Problem.parse("1x8x8x64x128x64")
    assert own.compulsory_bytes - grouped.compulsory_bytes == 2 * 2 * 6 * 128 * 64
    assert own.flops == grouped.flops


@pytest.mark.parametrize("name", SUITES)
def test_suites_hold_each_problem_once_full_and_causal(name: str) -> None:
    problems = suite(name)
    assert len(set(problems)) == len(problems)
    assert {p.inputs for p in problems} == {"normal"}
    masks = {"offsets": ("causal",), "windows": ("causal",), "decode": ("full",)}.get(name, MASKS)
    for mask in masks:
        assert len([p for p in problems if p.mask == mask]) * len(masks) == len(problems)


def test_the_suites_of_inputs_offsets_and_shared_heads() -> None:
    found = {name: suite(name) for name in ("inputs", "offsets", "gqa")}
    for name, problems in found.items():
        assert len(problems) == (20 if name == "gqa" else 16)
        assert {p.head_dim for p in problems} == {64, 128}
        assert {p.dtype for p in problems} == set(DTYPES)
    assert {(p.batch, p.q_heads, p.q_len) for p in found["inputs"]} == {(16, 16, 2048), (4, 16, 8192)}
    assert {(p.q_len, p.kv_len) for p in found["offsets"]} == {(2048, 2049), (512, 4609), (2048, 6144), (100, 1000)}
    assert {(p.batch, p.q_heads, p.kv_heads, p.kv_len) for p in found["gqa"]} == {
        (4, 32, 8, 4096),
        (4, 32, 1, 4096),
        (2, 32, 8, 8192),
    }


def test_the_standard_suite_covers_the_standard_shapes_and_both_types_at_the_first() -> None:
    problems = suite("standard")
    assert {p.shape for p in problems} == set(STANDARD_SHAPES)
    assert {p.dtype for p in problems if p.shape == FIRST_SHAPE} == set(DTYPES)
    assert any(p.q_len % 2 for p in problems)


def test_the_lengths_hold_one_number_of_tokens() -> None:
    problems = suite("lengths")
    assert {problem.batch * problem.q_len for problem in problems} == {32768}
    assert {problem.q_len for problem in problems} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {problem.head_dim for problem in problems} == {64, 128}
    assert set(suite("peers")) < set(problems)


def test_an_unknown_suite_is_refused_by_name() -> None:
    known = ", ".join(SUITES)
    assert known.startswith("smoke, first, quick, standard")
    with pytest.raises(ParameterError, match=f"wanted one of {known}, got 'all'"):
        suite("all")


def test_problems_are_values() -> None:
    first: tuple[DType, Mask] = ("float16", "full")
    a, b = (Problem.parse(FIRST_SHAPE, dtype=first[0], mask=first[1]) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.batch = 2  # type: ignore[misc]
