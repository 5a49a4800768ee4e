"""What must hold to the bit, or without exception, whatever the rounding: for every stage that multiplies by wgmma."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shared import needs_compiler

from flashlab.core.paths import ROOT, SITE
from flashlab.core.problem import DTYPES, DType, Mask, Problem
from flashlab.kernels.registry import DEAD_ENDS, STAGES
from flashlab.run.attention import emulate
from flashlab.verify.oracle import default_scale, make_inputs, round_to, to_float
from flashlab.verify.verdict import check

HOPPER = tuple(stage.id for stage in (*STAGES.values(), *DEAD_ENDS.values()) if stage.tensor_maps)

pytestmark = needs_compiler


def _each(known: dict[tuple[str, DType], str]) -> Any:
    """Every stage in every type that it takes; those `known` fail, for that reason, and must."""
    return pytest.mark.parametrize(
        ("stage", "dtype"),
        [
            pytest.param(
                stage,
                dtype,
                id=f"{stage}-{dtype}",
                marks=[pytest.mark.xfail(strict=True, reason=known[stage, dtype], raises=AssertionError)]
                if (stage, dtype) in known
                else [],
            )
            for stage in HOPPER
            for dtype in DTYPES
        ],
    )


@_each({("13_overlap", "bfloat16"): "it subtracts no maximum, so that the only weight is rounded and need not be 1"})
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_one_key_gives_its_value(stage: str, dtype: DType, head_dim: int) -> None:
    for q_len, mask in ((1, "full"), (70, "full"), (70, "causal")):
        problem = Problem(
            batch=2,
            q_heads=4,
            kv_heads=2,
            q_len=q_len,
            kv_len=1,
            head_dim=head_dim,
            dtype=dtype,
            mask=mask,  # type: ignore[arg-type]
        )
        q, k, v = make_inputs(problem)
        ran = emulate(q, k, v, causal=problem.causal, stage=stage)
        wanted = np.broadcast_to(np.repeat(v, 2, axis=1), q.shape).copy()
        if problem.causal:
            wanted[:, :, :-1] = 0  # these rows see no key
        np.testing.assert_array_equal(ran.out.view(np.uint16), wanted.view(np.uint16))


_TOGETHER = "one row's large score makes its warp's 16 rows find a new maximum, which rounds all of them anew"


@_each({(stage, dtype): _TOGETHER for stage in ("13_overlap", "14_stale_max") for dtype in DTYPES})
def test_a_rows_bits_do_not_depend_on_other_rows(stage: str, dtype: DType) -> None:
    loud = 21
    masks: tuple[Mask, ...] = ("full", "causal")
    for mask in masks:
        problem = Problem.parse("1x1x1x40x300x64", dtype=dtype, mask=mask)
        q, k, v = make_inputs(problem)
        quiet = emulate(q, k, v, causal=problem.causal, stage=stage)
        louder = q.copy()
        louder[0, 0, loud] *= louder.dtype.type(30)
        ran = emulate(louder, k, v, causal=problem.causal, stage=stage)
        others = np.arange(problem.q_len) != loud
        assert (ran.out[0, 0, loud] != quiet.out[0, 0, loud]).any()
        np.testing.assert_array_equal(ran.out[0, 0, others].view(np.uint16), quiet.out[0, 0, others].view(np.uint16))
        np.testing.assert_array_equal(ran.lse[0, 0, others], quiet.lse[0, 0, others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("stage", "most_ulps"), [("15_renormalize", 0), ("16_ones_column", 0), ("17_around_the_loop", 4)]
)
def test_a_query_in_another_chunk_keeps_its_bits_or_nearly(stage: str, most_ulps: int, dtype: DType) -> None:
    """With a causal mask the last rung's tile order depends on how many queries follow in the same work tile."""
    problem = Problem.parse("1x4x4x192x1280x64", dtype=dtype, mask="causal")
    q, k, v = (array.copy() for array in make_inputs(problem))
    q[..., 0], k[..., 0] = 8, np.random.default_rng(3).permutation(10)[np.arange(1280) // 128] * 12
    together = emulate(q, k, v, causal=True, stage=stage)
    apart = 0
    for row in range(0, 64, 9):
        seen = row + 1 + problem.kv_len - problem.q_len
        alone = emulate(q[:, :, [row]], k[:, :, :seen], v[:, :, :seen], causal=True, stage=stage)
        (a, b) = (np.abs(out.view(np.int16).astype(int)) for out in (together.out[:, :, row], alone.out[:, :, 0]))
        apart = max(apart, int(np.abs(a - b).max()))
    assert apart <= most_ulps
    assert (apart > 0) == (most_ulps > 0), "else the page is too modest"


_FAR_ABOVE = "exponentials of up to 2^30 above an old maximum, times V, are beyond FP32"


@_each({("13_overlap", "bfloat16"): _FAR_ABOVE, ("14_stale_max", "bfloat16"): _FAR_ABOVE})
def test_large_values_overflow_nowhere(stage: str, dtype: DType) -> None:
    """V is as large as may be where probabilities are 1 at most: sums of all keys' fit in FP32, or in the type."""
    for kind in ("normal", "hostile_falling", "hostile_sink", "sink_first"):
        problem = Problem.parse("1x1x1x40x300x64", dtype=dtype, inputs=kind)
        q, k, v = make_inputs(problem)
        largest = float(ml_dtypes.finfo(dtype).max) / (problem.kv_len if dtype == "bfloat16" else 1)
        values = v.astype(np.float32)
        v = round_to(values * np.float32(largest * 0.99 / np.abs(values).max()), dtype).astype(v.dtype)
        assert np.abs(v.astype(np.float32)).max() > 0.9 * largest
        ran = emulate(q, k, v, causal=False, stage=stage)
        assert np.isfinite(ran.out.astype(np.float32)).all(), kind
        if dtype == "float16":  # beyond, the checker's own sums of squares overflow
            assert check(ran.out, ran.lse, q, k, v, causal=False, dtype=dtype).passed, kind


def _ignores_minus_infinity(stage: str, dtype: DType, kv_len: int, hidden: slice, score: float) -> None:
    """Whether rows are as if they had not the `hidden` keys, whose scores are -inf; the others' are about `score`."""
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=3, kv_len=kv_len, head_dim=64, dtype=dtype)
    q, k, v = make_inputs(problem)
    q[..., 0], k[..., 0] = 8, score
    k[:, :, hidden, 0] = -np.inf
    shown = np.delete(np.arange(kv_len), hidden)
    found = emulate(q, k, v, stage=stage, return_lse=True)
    alone = emulate(q, k[:, :, shown], v[:, :, shown], stage=stage, return_lse=True)
    assert np.allclose(found.lse, alone.lse, atol=1e-3)
    assert np.allclose(np.asarray(found.out, float), np.asarray(alone.out, float), atol=0.02)


@_each({})
def test_a_row_may_begin_with_scores_of_minus_infinity(stage: str, dtype: DType) -> None:
    _ignores_minus_infinity(stage, dtype, 40, slice(0, 9), 0.0)


@_each({})
def test_a_whole_tile_may_have_scores_of_minus_infinity(stage: str, dtype: DType) -> None:
    _ignores_minus_infinity(stage, dtype, 512, slice(384, 512), -40.0)


@pytest.mark.parametrize(("which", "count"), [(0, 10), (1, 10)], ids=["rms", "largest"])
def test_the_lines_that_show_the_price_of_an_old_reference_print_what_the_page_says(which: int, count: int) -> None:
    """No kernel: what the Correctness page claims of rounding alone."""
    page = (SITE / "correctness.md").read_text(encoding="utf-8")
    code, said = re.findall(r"```python\n(import numpy.*?)```\n+```\n(.*?)```", page, re.DOTALL)[which]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    number = re.compile(r"\d+\.\d+")
    assert number.sub("", printed) == number.sub("", said)
    numbers, shown = ([float(found) for found in number.findall(text)] for text in (printed, said))
    assert len(shown) == count
    np.testing.assert_allclose(numbers, shown, atol=0.011)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 128), (128, 64)])
@pytest.mark.parametrize("kind", ["scale2", "steps", "rising", "hostile_rising"])
def test_what_scripts_rounding_rounds_is_what_the_last_rung_rounds(
    kind: str, head_dim: int, keys: int, dtype: DType
) -> None:
    """The order of additions apart, which turns the last bit of one output in ten at most."""
    script = runpy.run_path(str(ROOT / "scripts" / "rounding.py"))
    q, k, v = make_inputs(Problem.of(1, 1, 1, 192, 512, head_dim, dtype=dtype, mask="full", inputs=kind))
    out = to_float(emulate(q, k, v, stage="17_around_the_loop").out)[0, 0]
    q_head, k_head, v_head = (to_float(x)[0, 0] for x in (q, k, v))
    scores = q_head @ k_head.T * np.float32(default_scale(head_dim) * np.log2(np.e))
    same, as_flash_attention = (
        np.mean(round_to(ours, dtype) == out)
        for ours in (script["settled"](scores, v_head, dtype, keys), script["running"](scores, v_head, dtype))
    )
    assert same > 0.9 > 0.75 > as_flash_attention
