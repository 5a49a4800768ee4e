"""Random problems in random places: what is drawn, and every stage over some of it on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shared import needs_compiler, tiers

from flashlab.cli import kernels
from flashlab.core.errors import ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import UNLIMITED, Problem
from flashlab.kernels.registry import CUDA_STAGES, DECODE, STAGES, Stage
from flashlab.query import select
from flashlab.record import checks, store
from flashlab.show import tables
from flashlab.verify import on_cpu
from flashlab.verify.cases import CPU_SCORES, GPU_SCORES, TENSORS, Case, laid_out, placement, random_cases
from flashlab.verify.oracle import attention, make_inputs
from flashlab.verify.verdict import Guarded, Oracle, check

MANY = random_cases(STAGES, 1000, seed=0)


def test_the_same_seed_draws_the_same() -> None:
    assert random_cases(STAGES, 30, seed=3) == random_cases(STAGES, 30, seed=3) != random_cases(STAGES, 30, seed=4)
    assert [case.problem for case in MANY[:30]] == [case.problem for case in random_cases(STAGES, 30, seed=0)]


def test_what_is_drawn_is_spread_over_all_that_breaks_kernels() -> None:
    problems = [case.problem for case in MANY]
    assert len({(case.problem, case.layout) for case in MANY}) == len(MANY)
    assert {(p.head_dim, p.dtype, p.mask) for p in problems} == {
        (d, t, m) for d in (64, 96, 128, 256) for t in ("float16", "bfloat16") for m in ("full", "causal")
    }
    assert max(p.q_len for p in problems) > 1024 < max(p.kv_len for p in problems)
    assert min(p.q_len for p in problems) == 1 == min(p.kv_len for p in problems)
    assert all(p.batch * p.q_heads * p.q_len * p.kv_len <= GPU_SCORES for p in problems)
    for what in (
        [p for p in problems if p.mask == "causal" and p.q_len > p.kv_len],  # rows that see no key
        [p for p in problems if p.q_heads > p.kv_heads],
        [p for p in problems if p.batch > 1],
        [case for case in MANY if "=" in case.layout],
        [case for case in MANY if not any(mark in case.layout for mark in "+@=")],
        [case for case in MANY if "@1" in case.layout],
    ):
        assert len(what) > 20
    for stage in STAGES.values():
        names = [case for case in MANY if stage.id in case.names]
        assert len(names) >= 100
        assert all(stage.why_not(case.problem) is None for case in names)


TAKING = {name: stage for name, stage in STAGES.items() if stage.features}
"""The rungs that take a window and a soft cap."""
FEATURED: dict[str, Stage] = TAKING | dict(DECODE)


def test_features_are_drawn_for_the_stages_that_take_them() -> None:
    drawn = random_cases(FEATURED, 2000, seed=0)
    problems = [case.problem for case in drawn]
    for dim in (64, 96, 128, 256):
        for features in ((), ("window",), ("softcap",), ("window", "softcap")):
            same = [p for p in problems if (p.head_dim, p.features) == (dim, features)]
            assert {p.dtype for p in same} == {"float16", "bfloat16"}
            assert {p.mask for p in same} == {"full", "causal"}
    windows = [p for p in problems if "window" in p.features]
    for what in (
        [p for p in windows if p.window[1] == UNLIMITED],
        [p for p in windows if p.window[0] == UNLIMITED],
        [p for p in windows if UNLIMITED not in p.window],
        [p for p in windows if 0 in p.window],
        [p for p in windows if p.window[0] > p.kv_len],
        [p for p in problems if p.q_heads > p.kv_heads == 1],
        [p for p in problems if p.q_len == 1 and p.kv_len > 2000],
    ):
        assert len(what) > 20
    for stage in FEATURED.values():
        assert sum(stage.id in case.names for case in drawn) >= 500
    # A compiler has seconds for each.
    codes = {(c.launched.head_dim, c.launched.dtype, c.launched.mask, c.launched.features, c.aligned) for c in drawn}
    assert len(codes) <= 100
    emulated = [case.problem for case in random_cases(FEATURED, 200, seed=0, max_scores=CPU_SCORES)]
    assert all(p.kv_len <= 2048 for p in emulated if p.q_heads // p.kv_heads * p.q_len <= 64)


def test_a_record_says_what_was_drawn() -> None:
    for case in random_cases(FEATURED, 50, seed=0):
        (line,) = checks._compared(checks.case_line([_failed(case)]))
        assert line["problem"] == case.problem
    with pytest.raises(ParameterError, match="--random, which draws them,"):
        kernels.check(["08_swizzle"], random=3, window="3:3", on="cpu")


def _failed(case: Case) -> checks.CheckRow:
    return checks.CheckRow(stage=case.names[0], problem=case.problem, layout=case.layout, status="error")


@needs_compiler
@pytest.mark.parametrize("stage", [list(TAKING)[-1], "d5_ready_parts"])
def test_features_pass_random_cases_on_the_cpu(stage: str) -> None:
    found = on_cpu.check_on_cpu([stage], random=5, seed=2, races=True)
    assert [f"{row.problem.label} {row.layout}: {row.reason}" for row in found.failures] == []
    assert {feature for row in found.rows for feature in row.problem.features} == {"window", "softcap"}


def test_a_place_is_what_it_says() -> None:
    layout = "bhsd/bshd+8@3/sbhd@1=/hbsd+1"
    shape = (2, 3, 5, 64)
    assert [placement(shape, layout, tensor) for tensor in TENSORS] == [
        {"strides": (960, 320, 64, 1), "offset_words": 0, "sparse": False},
        {"strides": (1080, 72, 216, 1), "offset_words": 3, "sparse": False},
        {"strides": (64, 0, 128, 1), "offset_words": 1, "sparse": False},
        {"strides": (325, 650, 65, 1), "offset_words": 0, "sparse": False},
    ]


@pytest.mark.parametrize("layout", ["dense", "bhsd", "bhsd/bhsd/bhsd", "bhsd/bhsd/bhsd/bhds", "bhsd/bhsd/bhsd/bhsd+"])
def test_a_place_that_is_none_is_refused(layout: str) -> None:
    with pytest.raises(ParameterError, match=r"layout: wanted one of contiguous, .*, or 4 places"):
        placement((1, 1, 1, 64), layout)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ParameterError, match="wanted at least one random case and one stage"):
        random_cases({}, 3, seed=0)


def test_shared_heads_share_their_memory_and_their_values() -> None:
    values = make_inputs(Problem.parse("1x4x4x33x33x64"), seed=0)
    layout = "bhsd/bshd=/bhsd+3/bhsd"
    q, k, v = laid_out(values, layout)
    assert (k == values[1][:, :1]).all()
    assert (q is values[0], v is values[2]) == (True, True)
    held = Guarded.holding(k, **placement(k.shape, layout, "k"))
    assert held.array.strides[1] == 0
    assert (held.array == k).all()
    assert held.why_damaged() is None
    assert laid_out(values, "padded") == values


def test_an_oracle_is_asked_once_and_judges_every_output() -> None:
    problem = Problem.parse("2x2x70x64", mask="causal")
    q, k, v = make_inputs(problem, seed=0)
    out, lse = attention(q, k, v, causal=True)
    good, lse = out.astype(np.float16), lse.astype(np.float32)
    bad = (good * np.float16(1.02)).astype(np.float16)
    oracle = Oracle()
    for candidate in (good, bad, good):
        alone = check(candidate, lse, q, k, v, causal=True, dtype="float16")
        assert check(candidate, lse, q, k, v, causal=True, dtype="float16", oracle=oracle) == alone
    # That it does not look at q, k and v again is the point.
    assert check(good, lse, 0 * q, 0 * k, 0 * v, causal=True, dtype="float16", oracle=oracle).passed


@needs_compiler
@tiers
def test_stages_pass_random_cases_on_the_cpu(whole: bool) -> None:
    count = 20 if whole else 2
    drawn = random_cases(CUDA_STAGES, count, seed=1, max_scores=CPU_SCORES)
    found = on_cpu.check_on_cpu(list(CUDA_STAGES), random=count, seed=1)
    assert [f"{row.stage} {row.problem.label} {row.layout}: {row.reason}" for row in found.failures] == []
    assert len(found.rows) == sum(len(case.names) for case in drawn)


def _on_record(slug: str, path: Path = DATA) -> tuple[checks.Compared, ...]:
    found = select.checks(slug, path, "random")
    return next(iter(found.values())) if found else pytest.skip(f"no random comparisons of {slug} are on record")


@pytest.mark.parametrize("slug", store.gpus() or ["none"])
def test_what_is_on_record_passed_but_for_one_stages_log_sum_exp(slug: str) -> None:
    """Which site/stages/08_swizzle.md tells of: over very many keys."""
    lines = _on_record(slug)
    failed = [line for line in lines if line.status not in ("ok", "unsupported")]
    assert {(line.stage, line.reason.split()[0], line.problem.kv_len > 1 << 15) for line in failed} <= {
        ("08_swizzle", "LSE", True)
    }
    assert len({(line.problem, line.layout) for line in lines}) >= 1000
    assert " at random | " in tables.table(tables.CHECK_RECORDS, [("", lines)])
