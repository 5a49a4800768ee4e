"""The checker passes what is honest, rejects everything in tests/wrong for the right reason, and its guards notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong.catalogue import WRONG, Call, Wrong
from wrong.cuda import PATCHES, Patch
from wrong.simulation import FAULTS, Style

from flashlab.build.compiler import Job, compile_stage
from flashlab.core.errors import InputError, ShapeError
from flashlab.core.problem import DTYPES, MASKS, DType, Mask, Problem
from flashlab.kernels import registry
from flashlab.record.schema import Verdict
from flashlab.verify.cases import HOSTILE
from flashlab.verify.oracle import attention, make_inputs, pack, plain
from flashlab.verify.verdict import BAND_ROWS, Guarded, Sample, check, strides_of

HONEST = {
    "float32 sums": Style(),
    "rounded row sum": Style(sum_rounded=True),
    "other tiles": Style(tile_q=16, tile_kv=128),
}
PACKED = {"8 packed terms": Style(half_terms=8), "16 packed terms": Style(half_terms=16)}


def honest(problem: Problem, style: Style | None = None, *, seed: int = 0, amplitude: float = 1.0) -> Verdict:
    call = Call.of(problem, seed=seed, amplitude=amplitude)
    call.simulate(style=style)
    return call.judge()


def right(problem: Problem) -> tuple[Any, Any, Any, Any, Any]:
    """Output, log-sum-exp and inputs of an honest call."""
    call = Call.of(problem)
    call.simulate()
    return (call.out.array.copy(), call.lse.array.copy(), *call.inputs)


# --- What must pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", HONEST)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", HOSTILE, ids=lambda n: f"{n[0]}x{n[1]}")
def test_honest_kernels_pass(lengths: tuple[int, int], dtype: DType, mask: Mask, style: str) -> None:
    heads = (1, 1) if lengths[0] > 1000 else (4, 2)
    problem = Problem(
        batch=1, q_heads=heads[0], kv_heads=heads[1], q_len=lengths[0], kv_len=lengths[1], head_dim=64,
        dtype=dtype, mask=mask,
    )  # fmt: skip
    verdict = honest(problem, HONEST[style])
    assert verdict.passed, verdict.reason
    assert verdict.reason == ""


@pytest.mark.parametrize("style", PACKED)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [n for n in HOSTILE if n[0] * n[1] < 20_000], ids=lambda n: f"{n[0]}x{n[1]}")
def test_packed_fp16_sums_pass(lengths: tuple[int, int], mask: Mask, style: str) -> None:
    for seed in range(3):
        problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=lengths[0], kv_len=lengths[1], head_dim=64, mask=mask)
        verdict = honest(problem, PACKED[style], seed=seed)
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize("amplitude", [0.1, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_kernels_pass_whatever_the_size_of_the_scores(dtype: DType, amplitude: float) -> None:
    verdict = honest(Problem.parse("1x2x130x64", dtype=dtype, mask="causal"), amplitude=amplitude)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_passes(dtype: DType) -> None:
    q, k, v = make_inputs(Problem.parse("1x2x200x64", dtype=dtype))
    out = plain(q, k, v, causal=True, dtype=dtype)
    assert check(out, None, q, k, v, causal=True, dtype=dtype).passed


small = st.integers(1, 70)


@given(
    q_len=small, kv_len=small, heads=st.sampled_from([(1, 1), (4, 2)]), mask=st.sampled_from(MASKS),
    dtype=st.sampled_from(DTYPES), style=st.sampled_from(sorted(HONEST)), seed=st.integers(0, 10**6),
    head_dim=st.sampled_from([16, 64]),
)  # fmt: skip
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_small_honest_kernel_passes(
    q_len: int, kv_len: int, heads: tuple[int, int], mask: Mask, dtype: DType, style: str, seed: int, head_dim: int
) -> None:
    problem = Problem(
        batch=1, q_heads=heads[0], kv_heads=heads[1], q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        dtype=dtype, mask=mask,
    )  # fmt: skip
    verdict = honest(problem, HONEST[style], seed=seed)
    assert verdict.passed, verdict.reason


# --- What must not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_kernels_are_rejected_for_the_right_reason(wrong: Wrong) -> None:
    verdict = wrong.verdict()
    assert not verdict.passed
    assert re.match(wrong.reason, verdict.reason), verdict.reason


def test_every_fault_is_in_the_catalogue_and_every_right_twin_passes() -> None:
    assert set(FAULTS) <= {wrong.name for wrong in WRONG}
    assert len(WRONG) >= 14
    for problem, amplitude in {(wrong.problem, wrong.amplitude) for wrong in WRONG}:
        verdict = honest(problem, amplitude=amplitude)
        assert verdict.passed, verdict.reason


@given(
    where=st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 129), st.integers(0, 63)),
    times=st.floats(1.5, 100), sign=st.sampled_from([-1, 1]), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_one_element_off_by_more_than_the_limit_fails(
    where: tuple[int, int, int, int], times: float, sign: int, dtype: DType
) -> None:
    batch, head, row, _ = where
    out, lse, q, k, v = right(Problem.parse("2x2x130x64", dtype=dtype, mask="causal"))
    first = row // BAND_ROWS * BAND_ROWS
    band = Sample(((batch, head),), tuple(range(first, min(first + BAND_ROWS, 130))))
    limit = check(out, lse, q, k, v, causal=True, dtype=dtype, sample=band).max_abs_limit
    assert limit is not None
    exact = attention(q, k, v, causal=True)[0][where]
    out[where] = pack(np.array([exact + sign * times * limit], np.float32), dtype)[0]
    reason = check(out, lse, q, k, v, causal=True, dtype=dtype).reason
    assert reason.startswith("max abs error")
    assert f"in 1 of 12 bands of rows, worst at batch {batch}, head {head}, rows {first}.." in reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_late_causal_rows_do_not_hide_behind_large_early_ones(dtype: DType) -> None:
    problem = Problem.parse("1x1x1024x64", dtype=dtype, mask="causal")
    out, lse, q, k, v = right(problem)
    early = np.abs(out[:, :, :64].astype(np.float32)).max()
    wrong = (out[:, :, 960:].astype(np.float32) * 0.95).astype(out.dtype)
    assert np.abs(wrong.astype(np.float32) - out[:, :, 960:].astype(np.float32)).max() < 0.01 * early
    out[:, :, 960:] = wrong
    verdict = check(out, lse, q, k, v, causal=True, dtype=dtype)
    assert verdict.reason.startswith("max abs error")
    assert verdict.reason.endswith("in 1 of 16 bands of rows, worst at batch 0, head 0, rows 960..1023")


def test_what_is_wrong_everywhere_by_a_little_fails_by_its_root_mean_square() -> None:
    problem = Problem.parse("1x2x128x64")
    out, lse, q, k, v = right(problem)
    verdict = check(out * np.float16(1.003), lse, q, k, v, causal=False, dtype="float16")
    assert verdict.reason.startswith("rms error")
    assert verdict.max_abs_error is not None
    assert verdict.max_abs_limit is not None
    assert verdict.max_abs_error <= verdict.max_abs_limit


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_bad_log_sum_exp_fails(poison: float) -> None:
    out, lse, q, k, v = right(Problem.parse("1x2x70x64"))
    lse[0, 1, 66] = poison
    what = "NaN" if np.isnan(poison) else "infinity"
    reason = check(out, lse, q, k, v, causal=False, dtype="float16").reason
    assert reason == f"{what} in LSE: 1 of 140 elements, row 66, first at batch 0, head 1, row 66"


def test_a_key_too_many_among_thousands_shows_in_the_log_sum_exp() -> None:
    problem = Problem.parse("1x1x1x64x4096x64")
    out, lse, q, k, v = right(problem)
    verdict = check(out, lse + np.float32(np.log1p(1 / 4096)), q, k, v, causal=False, dtype="float16")
    assert verdict.reason.startswith("LSE error")


def test_unjudgeable_outputs_have_no_errors() -> None:
    out, lse, q, k, v = right(Problem.parse("1x1x16x64"))
    out[0, 0, 3] = np.nan
    verdict = check(out, lse, q, k, v, causal=False, dtype="float16")
    assert verdict == Verdict(
        passed=False, reason="NaN in output: 64 of 1024 elements, row 3, first at batch 0, head 0, row 3, d 0"
    )


# --- The verdict and its inputs ---------------------------------------------------------------------------------------


def test_a_judged_output_has_every_number() -> None:
    verdict = honest(Problem.parse("1x1x16x64"))
    assert all(value is not None for value in verdict.model_dump().values())
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


def test_overall_errors_are_over_all_rows_of_the_sample_and_no_others() -> None:
    problem = Problem.parse("1x3x320x64", mask="causal")
    out, _, q, k, v = right(problem)
    exact = attention(q, k, v, causal=True)[0]
    error = np.abs(out.astype(np.float64) - exact)
    whole = check(out, None, q, k, v, causal=True, dtype="float16")
    assert whole.overall_max_error == pytest.approx(error.max())
    assert whole.overall_rms_error == pytest.approx(np.sqrt((error**2).mean()))
    # The errors beside the limits are those of one band of rows.
    assert whole.max_abs_error is not None
    assert whole.max_abs_error <= error.max()
    rows = (*range(64, 128), *range(256, 320))
    part = check(out, None, q, k, v, causal=True, dtype="float16", sample=Sample(pairs=((0, 0), (0, 2)), rows=rows))
    sampled = error[:, [0, 2]][:, :, rows]
    assert part.overall_max_error == pytest.approx(sampled.max())
    assert part.overall_rms_error == pytest.approx(np.sqrt((sampled**2).mean()))


def test_without_log_sum_exp_there_is_no_error_of_it() -> None:
    out, _, q, k, v = right(Problem.parse("1x1x16x64"))
    verdict = check(out, None, q, k, v, causal=False, dtype="float16")
    assert verdict.passed
    assert verdict.lse_error is None
    assert verdict.lse_limit is None


def test_bfloat16_output_is_taken_in_every_guise() -> None:
    out, lse, q, k, v = right(Problem.parse("1x2x40x64", dtype="bfloat16"))
    verdicts = {check(guise, lse, q, k, v, causal=False, dtype="bfloat16") for guise in (out, out.view(np.uint16))}
    assert len(verdicts) == 1
    assert verdicts.pop().passed
    assert check(out.astype(np.float32), lse, q, k, v, causal=False, dtype="bfloat16").reason.startswith(
        "output dtype: wanted bfloat16"
    )


@pytest.mark.parametrize("guise", [np.uint16, ml_dtypes.bfloat16])
def test_unwritten_bfloat16_is_told_from_nan(guise: Any) -> None:
    call = Call.of(Problem.parse("1x1x8x64", dtype="bfloat16"))
    call.simulate("last_row_unwritten")
    assert call.judge(out=call.out.array.view(guise)).reason.startswith("output unwritten: 64 of 512 elements, row 7")


def test_inputs_that_judge_nothing_are_refused() -> None:
    out, lse, q, k, v = right(Problem.parse("1x1x16x64"))
    spoilt = k.copy()
    spoilt[0, 0, 0, 0] = np.nan
    with pytest.raises(InputError, match="k: wanted finite values"):
        check(out, lse, q, spoilt, v, causal=False, dtype="float16")
    with pytest.raises(ShapeError):
        check(out, lse, q, k, v[:, :, :4], causal=False, dtype="float16")


# --- Samples ----------------------------------------------------------------------------------------------------------


def test_a_sample_is_whole_bands_within_the_budget_with_both_ends() -> None:
    problem = Problem(batch=4, q_heads=16, kv_heads=16, q_len=8190, kv_len=8192, head_dim=64)
    sample = Sample.of(problem, max_scores=1 << 24)
    assert sample is not None
    assert len(sample.pairs) * len(sample.rows) * problem.kv_len <= 1 << 24
    assert {(0, 0), (3, 15)} <= set(sample.pairs)
    assert (sample.rows[0], sample.rows[-1]) == (0, 8189)
    assert {row // BAND_ROWS for row in sample.rows if row < 8128} == {
        row // BAND_ROWS for row in sample.rows if row % BAND_ROWS == 63
    }
    assert sample == Sample.of(problem, max_scores=1 << 24)
    assert sample != Sample.of(problem, max_scores=1 << 24, seed=1)


def test_a_small_problem_needs_no_sample() -> None:
    assert Sample.of(Problem.parse("1x2x64x64")) is None


def test_a_sample_sees_what_is_in_it_and_finds_nan_everywhere() -> None:
    out, lse, q, k, v = right(Problem.parse("1x3x200x64", mask="causal"))
    sample = Sample(pairs=((0, 0), (0, 2)), rows=(*range(64), *range(192, 200)))
    out[0, 1] = 0
    assert check(out, lse, q, k, v, causal=True, dtype="float16", sample=sample).passed
    out[0, 2, 195] = 0
    reason = check(out, lse, q, k, v, causal=True, dtype="float16", sample=sample).reason
    assert reason.endswith("in 1 of 4 bands of rows, worst at batch 0, head 2, rows 192..199")
    out[0, 1, 100] = np.nan
    reason = check(out, lse, q, k, v, causal=True, dtype="float16", sample=sample).reason
    assert reason.startswith("NaN in output: 64 of")


# --- Guards -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": strides_of((2, 3, 5, 8)),
    "padded": strides_of((2, 3, 5, 8), row_padding=4),
    "bshd": strides_of((2, 3, 5, 8), order="bshd"),
    "sbhd padded": strides_of((2, 3, 5, 8), row_padding=1, order="sbhd"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_guarded_output_starts_poisoned_and_may_be_written_whole(dtype: str, layout: str) -> None:
    out = Guarded((2, 3, 5, 8), dtype, strides=LAYOUTS[layout])
    assert str(out.array.dtype) == dtype
    assert np.isnan(out.array.astype(np.float32)).all()
    assert [s // out.array.itemsize for s in out.array.strides] == list(LAYOUTS[layout])
    out.array[...] = 1
    assert out.why_damaged() is None
    assert (out.array == 1).all()


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (0, "8192 bytes before the start"),
        (4095, "2 bytes before the start"),
        (4096 + 8, "in the padding between rows"),
        (-4096, "up to 2 bytes after the end"),
        (-1, "up to 8192 bytes after the end"),
    ],
)
def test_a_write_outside_is_found_and_placed(index: int, place: str) -> None:
    out = Guarded((2, 3, 5, 8), "float16", strides=LAYOUTS["padded"])
    out.buffer[index] ^= 1
    assert out.why_damaged() == f"write outside the array: 2 bytes, {place}"


def test_a_guarded_input_holds_its_values_and_notices_a_change() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float16)
    held = Guarded.holding(values, strides=LAYOUTS["padded"])
    np.testing.assert_array_equal(held.array, values)
    assert held.why_damaged() is None
    held.array[1, 2, 3, 4] = -held.array[1, 2, 3, 4]
    assert held.why_damaged() == "input modified: 1 of 240 elements"


def test_a_changed_sign_of_zero_is_a_change() -> None:
    held = Guarded.holding(np.zeros((1, 1, 1, 4), np.float16))
    held.array[0, 0, 0, 0] = -0.0
    assert held.why_damaged() == "input modified: 1 of 4 elements"


@pytest.mark.parametrize("offset", [0, 1])
def test_a_guarded_array_is_aligned_unless_told_otherwise(offset: int) -> None:
    out = Guarded((1, 1, 4, 8), "float16", offset_words=offset)
    assert (out.array.ctypes.data - out.buffer.ctypes.data) % 256 == 2 * offset


class CupyLike:
    """NumPy under another identity, with the functions that CuPy has too and no others."""

    names = (
        "abs arange asarray ascontiguousarray empty exp flatnonzero float16 float32 float64 full inf isfinite isinf "
        "isnan lib log random sqrt uint8 uint16 uint32 where zeros zeros_like"
    )

    def __getattr__(self, name: str) -> Any:
        if name not in self.names.split():
            raise AttributeError(f"CuPy stand-in has no {name}")
        return getattr(np, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_runs_on_another_array_library(dtype: DType) -> None:
    xp = CupyLike()
    problem = Problem.parse("1x2x1x70x100x64", dtype=dtype, mask="causal")
    q, k, v = (Guarded.holding(x, xp=xp) for x in make_inputs(problem, xp=xp))
    out = Guarded(q.array.shape, dtype, strides=strides_of(q.array.shape, row_padding=8), xp=xp)
    assert str(out.array.dtype) == {"float16": "float16", "bfloat16": "uint16"}[dtype]
    out.array[...] = plain(q.array, k.array, v.array, causal=True, dtype=dtype, xp=xp)
    assert all(x.why_damaged() is None for x in (q, k, v, out))
    verdict = check(out.array, None, q.array, k.array, v.array, causal=True, dtype=dtype, xp=xp)
    assert verdict.passed, verdict.reason
    on_numpy = check(out.array, None, q.array, k.array, v.array, causal=True, dtype=dtype)
    assert on_numpy == verdict


# --- Lengths and patches that other tests use -------------------------------------------------------------------------


def test_hostile_lengths_hold_what_breaks_kernels() -> None:
    assert {(1, 1), (113, 203), (239, 1), (1023, 1024)} <= set(HOSTILE)
    assert {1, 2, 15, 17, 63, 65} <= {n for lengths in HOSTILE for n in lengths}
    assert any(q_len > kv_len for q_len, kv_len in HOSTILE)
    assert len(set(HOSTILE)) == len(HOSTILE)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_patched_kernels_differ_and_compile(patch: Patch, tmp_path: Path) -> None:
    stage = registry.get(patch.stage)
    source = tmp_path / f"{patch.stage}.cu"
    source.write_text(patch.source(), encoding="utf-8")
    cubins = {
        compile_stage(Job.of(stage, patch.problem, arch="sm_90a", source=path)).sha256
        for path in (source, stage.source)
    }  # fmt: skip
    assert len(cubins) == 2
