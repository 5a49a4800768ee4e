"""PATCHES and MISTAKES: mistakes as edits of a real kernel's source, to be compiled and run.

Write `patch.source()` to a file and hand it to `compile_stage` as a `Job`'s `source`. Launched into
guarded buffers (`check.Guarded`) on `patch.problem`, the reason for rejecting it must match `patch.reason` from its
start. Reads and writes outside stay within a row of the buffer, inside the guard.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlab.core.problem import DType, Mask, Problem
from flashlab.kernels import registry
from wrong.catalogue import BLIND, CAUSAL, OUTPUT, SQUARE


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One mistake: `old`, which occurs exactly once in the stage's source, becomes `new`."""

    name: str
    stage: str = "00_naive"
    problem: Problem
    reason: str
    """A regular expression that the reason matches from its start."""
    old: str
    new: str
    amplitude: float = 1.0
    """Q and K are multiplied by it."""

    def source(self) -> str:
        """The stage's source with the mistake in it.

        Raises:
            ValueError: as `edited`.
        """
        return edited(self.stage, self.name, self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake as in `Patch`, which `flashlab check` must find as it runs by default, among cases of that kind."""

    name: str
    stage: str
    old: str
    new: str
    dtype: DType = "float16"
    mask: Mask = "full"
    header: str = ""
    """The file of kernels/common/ that `old` stands in; the stage's own source where empty."""
    early: bool = False
    """Whether what is read is merely there too late: a GPU may be lucky, and the emulator is not."""

    @property
    def label(self) -> str:
        return f"{self.stage}-{self.name}"

    def source(self) -> str:
        """The stage's source with the mistake in it.

        Raises:
            ValueError: as `edited`.
        """
        return edited(self.stage, self.name, self.old, self.new, self.header)


def edited(stage: str, name: str, old: str, new: str, header: str = "") -> str:
    """A stage's source with `new` for `old`; of a header that it includes, with that header's text in its place.

    Raises:
        ValueError: the text to replace is not there exactly once; the kernel has changed and this list must follow.
    """
    text = registry.get(stage).source.read_text(encoding="utf-8")
    if header:
        included = (registry.get(stage).source.parent / "common" / header).read_text(encoding="utf-8")
        text = text.replace(f'#include "{header}"\n', included.replace("#pragma once\n", ""))
    if text.count(old) != 1:
        raise ValueError(f"{name}: wanted once in {stage}.cu, found {text.count(old)}: {old}")
    return text.replace(old, new)


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="zeros",
        problem=SQUARE,
        reason=OUTPUT,
        old="from_float<element>(O_reg[d] * inv_sum)",
        new="from_float<element>(0.0f)",
    ),
    Patch(
        name="nan",
        problem=SQUARE,
        reason=r"NaN in output: ",
        old="num_keys > 0 ? 1.0f / row_sum : 0.0f",
        new="__int_as_float(0x7fffffff)",
    ),
    Patch(
        name="last_row_unwritten",
        problem=SQUARE,
        reason=r"output unwritten: 512 of 66560 elements, row 129,",
        old="if (q_row >= p.q_len) return;",
        new="if (q_row >= p.q_len - 1) return;",
    ),
    Patch(
        name="row_past_the_end",
        problem=SQUARE,
        reason=r"(out|lse): write outside the array",
        old="if (q_row >= p.q_len) return;",
        new="if (q_row > p.q_len) return;",
    ),
    Patch(
        name="last_tile_skipped",
        problem=SQUARE,
        reason=OUTPUT,
        old="key < num_keys; ++key",
        new="key < num_keys / 64 * 64; ++key",
    ),
    Patch(
        name="key_read_past_the_end",
        problem=SQUARE,
        reason=r"NaN in output: ",
        old="const int num_keys = visible_keys(p, q_row);",
        new="const int num_keys = visible_keys(p, q_row) + 1;",
    ),
    Patch(
        name="causal_one_key_too_many",
        problem=CAUSAL,
        reason=OUTPUT,
        old="const int num_keys = visible_keys(p, q_row);",
        new="const int num_keys = min(p.kv_len, visible_keys(p, q_row) + 1);",
    ),
    Patch(
        name="causal_aligned_top_left",
        problem=CAUSAL,
        reason=OUTPUT,
        old="const int num_keys = visible_keys(p, q_row);",
        new="const int num_keys = min(p.kv_len, q_row + 1);",
    ),
    Patch(
        name="scale_one_percent_off",
        problem=SQUARE,
        reason=OUTPUT,
        old="score *= p.scale_log2;",
        new="score *= p.scale_log2 * 1.01f;",
    ),
    Patch(
        name="base_two_exponential_of_natural_scores",
        problem=SQUARE,
        reason=OUTPUT,
        old="score *= p.scale_log2;",
        new="score *= p.scale_log2 / LOG2_E;",
    ),
    Patch(
        name="accumulator_not_rescaled",
        problem=SQUARE,
        reason=OUTPUT,
        old="O_reg[d] = O_reg[d] * rescale + prob",
        new="O_reg[d] = O_reg[d] + prob",
    ),
    Patch(
        name="maximum_not_subtracted",
        problem=SQUARE,
        reason=r"(NaN|infinity) in output: ",
        old="fmaxf(row_max, score)",
        new="0.0f",
        amplitude=8.0,
    ),
    Patch(
        name="heads_interleaved",
        problem=SQUARE,
        reason=r"max abs error .* in 12 of 24 bands of rows, worst at batch \d, head [12],",
        old="head_of(p.K, batch, kv_head_of(p, head))",
        new="head_of(p.K, batch, head % p.kv_heads)",
    ),
    Patch(
        name="first_batch_everywhere",
        problem=SQUARE,
        reason=r"max abs error .* in 12 of 24 bands of rows, worst at batch 1,",
        old="head_of(p.V, batch, kv_head_of(p, head))",
        new="head_of(p.V, 0, kv_head_of(p, head))",
    ),
    Patch(
        name="queries_modified",
        problem=SQUARE,
        reason=r"q: input modified",
        old="    Q_reg[d] = Q_gmem[d];",
        new="    Q_reg[d] = Q_gmem[d];\n    const_cast<element*>(Q_gmem)[d] = from_float<element>(0.0f);",
    ),
    Patch(
        name="lse_in_log2",
        problem=SQUARE,
        reason=r"LSE error",
        old="row_max * LN_2 + logf(row_sum)",
        new="row_max + log2f(row_sum)",
    ),
    Patch(
        name="blind_rows_divided_by_zero",
        problem=BLIND,
        reason=r"NaN in output: .* rows 0\.\.89,",
        old="num_keys > 0 ? 1.0f / row_sum : 0.0f",
        new="1.0f / row_sum",
    ),
)

_V_SOURCE = "const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, "
_NARROW = "static_cast<int>(p.K.row_stride)"

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        name="row_stride_of_32_bits",
        stage="08_swizzle",
        old="TileCopy(const element* head_gmem, long long row_stride, int first_row)",
        new="TileCopy(const element* head_gmem, int row_stride, int first_row)",
        mask="causal",
    ),
    Mistake(
        name="v_of_batch_0", stage="09_wgmma", old=f"{_V_SOURCE}batch}};", new=f"{_V_SOURCE}0}};", dtype="bfloat16"
    ),
    Mistake(
        name="v_one_phase_early",
        stage="11_pingpong",
        old="V_ready = V_arrived(tile);",
        new="V_ready = V_arrived(tile - 1);",
        early=True,
    ),
    Mistake(
        name="v_one_phase_early",
        stage="12_persistent",
        old="V_ready = V_arrived(tile);",
        new="V_ready = V_arrived(tile - 1);",
        mask="causal",
        early=True,
    ),
    Mistake(
        name="kv_heads_interleaved",
        stage="12_persistent",
        old="const int kv_head = kv_head_of(p, work.head);",
        new="const int kv_head = work.head % p.kv_heads;",
    ),
    Mistake(
        name="v_one_phase_early",
        stage="13_overlap",
        old="V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);",
        new="V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity ^ 1);",
        early=True,
    ),
    Mistake(
        name="v_taken_for_there_when_k_is",
        stage="13_overlap",
        old="ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity);",
        new="ptx::mbarrier_wait_parity(&smem.K_full[at.stage], at.parity);",
        mask="causal",
        early=True,
    ),
    Mistake(
        name="kv_heads_interleaved",
        stage="13_overlap",
        old="const int kv_head = kv_head_of(p, work.head);",
        new="const int kv_head = work.head % p.kv_heads;",
        mask="causal",
    ),
    Mistake(
        name="v_of_batch_0",
        stage="13_overlap",
        old=f"{_V_SOURCE}work.batch}};",
        new=f"{_V_SOURCE}0}};",
        dtype="bfloat16",
    ),
    Mistake(
        name="redo_by_the_first_key_head",
        stage="13_overlap",
        old="head_of(p.K, work.batch, kv_head_of(p, work.head)) + tile",
        new="head_of(p.K, work.batch, 0) + tile",
    ),
    Mistake(
        name="redo_leaves_sums_unscaled",
        stage="13_overlap",
        old="    rows.sum[h] *= rescale[h];\n  }\n  scale_O(O_reg, rescale);",
        new="  }\n  scale_O(O_reg, rescale);",
    ),
    Mistake(
        name="float16_limit_of_2_to_the_18",
        stage="13_overlap",
        old="LARGEST_SUM<__half> = 32768.0f;",
        new="LARGEST_SUM<__half> = 262144.0f;",
    ),
    Mistake(
        name="lower_limit_dropped",
        stage="13_overlap",
        old="good = good && SMALLEST_SUM < row_sum && row_sum < SUM_LIMIT;",
        new="good = good && row_sum < SUM_LIMIT;",
        dtype="bfloat16",
        mask="causal",
    ),
    Mistake(
        name="redo_by_a_row_stride_of_32_bits",
        stage="13_overlap",
        old="+ tile * TILE_KV * p.K.row_stride;",
        new=f"+ tile * TILE_KV * {_NARROW};",
        dtype="bfloat16",
        mask="causal",
    ),
    Mistake(
        name="scores_again_by_a_row_stride_of_32_bits",
        stage="17_around_the_loop",
        old="+ tile * TILE_KV * p.K.row_stride;",
        new=f"+ tile * TILE_KV * {_NARROW};",
        mask="causal",
    ),
    Mistake(
        name="v_one_phase_early",
        stage="17_around_the_loop",
        old="V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);",
        new="V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity ^ 1);",
        early=True,
    ),
    Mistake(
        name="v_taken_for_there_when_k_is",
        stage="17_around_the_loop",
        old="ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity);",
        new="ptx::mbarrier_wait_parity(&smem.K_full[at.stage], at.parity);",
        mask="causal",
        early=True,
    ),
    Mistake(
        name="kv_heads_interleaved",
        stage="17_around_the_loop",
        header="late_fetch.cuh",
        old="const int kv_head = kv_head_of(p, work.head);",
        new="const int kv_head = work.head % p.kv_heads;",
    ),
    Mistake(
        name="v_of_batch_0",
        stage="17_around_the_loop",
        header="late_fetch.cuh",
        old="V_source = {&maps.V, &own.V, own.kv_len, kv_head, place.batch, place.row};",
        new="V_source = {&maps.V, &own.V, own.kv_len, kv_head, 0, place.row};",
        dtype="bfloat16",
    ),
    Mistake(
        name="scores_again_by_the_first_key_head",
        stage="17_around_the_loop",
        old="head_of(p.K, work.batch, kv_head_of(p, work.head)) + tile",
        new="head_of(p.K, work.batch, 0) + tile",
        dtype="bfloat16",
    ),
    Mistake(
        name="move_leaves_sums_unscaled",
        stage="17_around_the_loop",
        old="  rows.sum[h] *= factor;\n  sum *= factor;\n",
        new="  sum *= factor;\n",
    ),
    Mistake(
        name="float16_limit_of_2_to_the_18",
        stage="17_around_the_loop",
        old="SUM_LIMIT_OF<__half> = 65504.0f;",
        new="SUM_LIMIT_OF<__half> = 262144.0f;",
    ),
    Mistake(
        name="moved_rows_not_rounded_again",
        stage="17_around_the_loop",
        old="        if (early) round_rows<TILE_KV>(P_reg, S_reg, h);\n",
        new="",
    ),
    Mistake(
        name="whole_columns_by_the_last_row",
        stage="17_around_the_loop",
        old="visible.warp_whole = visible_keys(own(), warp_row()) - tile * TILE_KV;",
        new="visible.warp_whole = visible_keys(own(), warp_row() + WARP_ROWS - 1) - tile * TILE_KV;",
        mask="causal",
    ),
    Mistake(
        name="next_work_tile_taken_before_this_ones_place_is_read",
        stage="17_around_the_loop",
        old="    if constexpr (!WIDE) done = release_Q();\n    more = next_work_tile();",
        new="    more = next_work_tile();\n    if constexpr (!WIDE) done = release_Q();",
    ),
)
"""What once went through: each is found by `flashlab check --on cpu STAGE`."""
