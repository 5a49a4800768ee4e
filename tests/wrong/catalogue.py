"""WRONG: every mistake, a problem that shows it, and the reason for which the checker must reject it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flashlab.core.problem import Problem
from flashlab.record.schema import Verdict
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import Guarded, check, strides_of
from wrong.simulation import Fault, Style, run

SQUARE = Problem.parse("2x4x2x130x200x64")
CAUSAL = Problem.parse("1x2x2x130x200x64", mask="causal")
LONG = Problem.parse("1x1x1x64x2039x64")
BLIND = Problem.parse("1x2x2x203x113x64", mask="causal")
"""More queries than keys: the first 90 rows see no key."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an implementation, every buffer guarded."""

    problem: Problem
    q: Guarded
    k: Guarded
    v: Guarded
    out: Guarded
    lse: Guarded

    @classmethod
    def of(cls, problem: Problem, *, seed: int = 0, amplitude: float = 1.0) -> Call:
        """Seeded inputs, Q and K multiplied by `amplitude`; the output's rows are padded."""
        q, k, v = make_inputs(problem, seed)
        q, k = ((x.astype(np.float32) * np.float32(amplitude)).astype(x.dtype) for x in (q, k))
        return cls(
            problem=problem,
            q=Guarded.holding(q),
            k=Guarded.holding(k),
            v=Guarded.holding(v),
            out=Guarded(q.shape, problem.dtype, strides=strides_of(q.shape, row_padding=8)),
            lse=Guarded(q.shape[:3], "float32"),
        )

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        return self.q.array, self.k.array, self.v.array

    def simulate(self, fault: Fault | None = None, style: Style | None = None) -> None:
        run(
            *self.inputs,
            self.out.array,
            self.lse.array,
            causal=self.problem.causal,
            dtype=self.problem.dtype,
            fault=fault,
            style=style,
        )

    def judge(self, out: Any = None, lse: Any = None) -> Verdict:
        """The verdict on the buffers, or on arrays returned in their place."""
        for name in ("q", "k", "v", "out", "lse"):
            damage = getattr(self, name).why_damaged()
            if damage:
                return Verdict(passed=False, reason=f"{name}: {damage}")
        return check(
            self.out.array if out is None else out,
            self.lse.array if lse is None else lse,
            *self.inputs,
            causal=self.problem.causal,
            dtype=self.problem.dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Something that must be rejected."""

    name: str
    problem: Problem
    reason: str
    """A regular expression that the verdict's reason matches from its start."""
    implementation: Callable[[Call], Verdict]
    amplitude: float = 1.0

    def verdict(self) -> Verdict:
        return self.implementation(Call.of(self.problem, amplitude=self.amplitude))


def _faulty(fault: Fault, call: Call) -> Verdict:
    call.simulate(fault)
    return call.judge()


def _stale(call: Call) -> Verdict:
    """The buffer still holds the previous call's output, and the kernel wrote nothing."""
    Call.simulate(previous := Call.of(call.problem, seed=1))
    call.out.array[...] = previous.out.array
    call.lse.array[...] = previous.lse.array
    return call.judge()


def _float32_output(call: Call) -> Verdict:
    call.simulate()
    return call.judge(out=call.out.array.astype(np.float32))


def _other_half_type(call: Call) -> Verdict:
    call.simulate()
    return call.judge(out=call.out.array.astype(np.float32).view(np.uint16)[..., 1::2].copy())


def _heads_last(call: Call) -> Verdict:
    call.simulate()
    return call.judge(out=call.out.array.transpose(0, 2, 1, 3))


def _layout_mixed_up(call: Call) -> Verdict:
    """Stored (batch, q_len, q_heads, head_dim) in memory that is read as (batch, q_heads, q_len, head_dim)."""
    call.simulate()
    shape = call.out.array.shape
    call.out.array[...] = call.out.array.transpose(0, 2, 1, 3).reshape(shape)
    return call.judge()


def _float64_lse(call: Call) -> Verdict:
    call.simulate()
    return call.judge(lse=call.lse.array.astype(np.float64))


def _one_element_nudged(call: Call) -> Verdict:
    """One element of the last head's last row is 2 % of the largest output off."""
    call.simulate()
    out = call.out.array
    out[-1, -1, -1, 17] += np.float16(0.02) * np.abs(out).max()
    return call.judge()


OUTPUT = r"max abs error \S+ over its limit"

_FAULTS: tuple[tuple[Fault, Problem, str, float], ...] = (
    ("zeros", SQUARE, OUTPUT, 1),
    (
        "tile_of_nan",
        SQUARE,
        r"NaN in output: 8192 of 66560 elements, rows 64\.\.127, first at batch 0, head 3, row 64, d 0",
        1,
    ),
    (
        "one_infinity",
        SQUARE,
        r"infinity in output: 2 of 66560 elements, row 3, first at batch 0, head 0, row 3, d 5",
        1,
    ),
    ("nothing_written", SQUARE, r"output unwritten: 66560 of 66560 elements, rows 0\.\.129", 1),
    (
        "last_row_unwritten",
        SQUARE,
        r"output unwritten: 512 of 66560 elements, row 129, first at batch 0, head 0, row 129, d 0",
        1,
    ),
    ("last_tile_skipped", SQUARE, OUTPUT, 1),
    ("tile_counted_twice", SQUARE, OUTPUT, 1),
    ("tail_unmasked", SQUARE, OUTPUT, 1),
    ("key_read_past_the_end", SQUARE, r"NaN in output: .* first at batch 1, head 2, row 0", 1),
    ("causal_one_key_too_many", CAUSAL, OUTPUT, 1),
    ("causal_one_key_too_few", CAUSAL, OUTPUT, 1),
    ("causal_aligned_top_left", CAUSAL, OUTPUT, 1),
    ("scale_one_percent_off", SQUARE, OUTPUT, 1),
    ("scale_without_root", SQUARE, OUTPUT, 1),
    ("accumulator_not_rescaled", SQUARE, OUTPUT, 1),
    ("sum_not_rescaled", SQUARE, OUTPUT, 1),
    ("maximum_not_subtracted", SQUARE, r"(NaN|infinity) in output", 4),
    ("sum_in_float16", LONG, r"LSE error", 1),
    ("not_normalised", SQUARE, OUTPUT, 1),
    ("heads_interleaved", SQUARE, r"max abs error .* in 12 of 24 bands of rows, worst at batch \d, head [12],", 1),
    ("first_head_everywhere", SQUARE, r"max abs error .* in 18 of 24 bands of rows, worst at batch \d, head [123],", 1),
    ("first_batch_everywhere", SQUARE, r"max abs error .* in 12 of 24 bands of rows, worst at batch 1,", 1),
    ("v_rows_swapped", SQUARE, OUTPUT, 1),
    ("v_transposed", SQUARE, OUTPUT, 1),
    (
        "blind_rows_averaged",
        BLIND,
        r"output of rows that see no key not 0: 11520 of 25984 elements, rows 0\.\.89",
        1,
    ),
    ("lse_in_log2", SQUARE, r"LSE error", 1),
    ("lse_without_maximum", SQUARE, r"LSE error", 1),
    ("lse_unwritten", SQUARE, r"LSE unwritten: 1040 of 1040 elements, rows 0\.\.129", 1),
    (
        "blind_rows_lse_zero",
        BLIND,
        r"LSE of rows that see no key not -inf: 180 of 406 elements, rows 0\.\.89",
        1,
    ),
    ("row_past_the_end", SQUARE, r"out: write outside the array: .* after the end", 1),
    ("row_padding_overwritten", SQUARE, r"out: write outside the array: 2 bytes, in the padding between rows", 1),
    ("queries_scaled_in_place", SQUARE, r"q: input modified: \d+ of 66560 elements", 1),
)

_NUDGED = r"max abs error .* in 1 of 24 bands of rows, worst at batch 1, head 3, rows 128\.\.129"

_OTHERS: tuple[tuple[str, Problem, str, Callable[[Call], Verdict]], ...] = (
    ("stale_output", SQUARE, OUTPUT, _stale),
    ("float32_output", SQUARE, r"output dtype: wanted float16, got float32", _float32_output),
    ("bfloat16_output_for_float16", SQUARE, r"output dtype: wanted float16, got uint16", _other_half_type),
    ("heads_last", SQUARE, r"output shape: wanted \(2, 4, 130, 64\), got \(2, 130, 4, 64\)", _heads_last),
    ("layout_mixed_up", SQUARE, OUTPUT, _layout_mixed_up),
    ("float64_lse", SQUARE, r"LSE dtype: wanted float32, got float64", _float64_lse),
    ("one_element_nudged", SQUARE, _NUDGED, _one_element_nudged),
)

WRONG: tuple[Wrong, ...] = (
    *(
        Wrong(name=fault, problem=problem, reason=reason, amplitude=amplitude, implementation=partial(_faulty, fault))
        for fault, problem, reason, amplitude in _FAULTS
    ),
    *(
        Wrong(name=name, problem=problem, reason=reason, implementation=implementation)
        for name, problem, reason, implementation in _OTHERS
    ),
)
