"""Hostile inputs, rows far apart, flash-attention's own cases and what must hold to the bit, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import guarded_verdict
from wrong.cuda import MISTAKES, Mistake

from flashlab.core.inputs import HOSTILE
from flashlab.core.problem import DTYPES, DType, Problem
from flashlab.kernels import registry
from flashlab.measure import check
from flashlab.run import gpu
from flashlab.run.attention import prepare
from flashlab.verify import cases
from flashlab.verify.on_cpu import CheckRun
from flashlab.verify.oracle import make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

HOPPER = tuple(s.id for s in (*registry.STAGES.values(), *registry.DEAD_ENDS.values()) if s.tensor_maps)
ONE_KEY = "it subtracts no maximum, so that the only weight is rounded and need not be 1"
TOGETHER = "one row's large score makes its warp's 16 rows find a new maximum, which rounds all of them anew"


def _own_cases(_: Path) -> CheckRun:
    return check.check_stages(HOPPER, suite=cases.FLASH_ATTENTION, record=False)


ASIDE: Mapping[str, Callable[[Path], Any]] = {
    "own_cases": _own_cases,
    "of_overlap": lambda _: check.check_stages(["13_overlap"], record=False),
}


@pytest.fixture(scope="module")
def own_cases(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("own_cases")


@pytest.fixture(scope="module")
def of_overlap(aside: Callable[[str], CheckRun]) -> CheckRun:
    return aside("of_overlap")


def _supported(stage: str) -> None:
    arch = gpu.info().arch
    if arch not in registry.get(stage).archs:
        pytest.skip(f"needs {registry.get(stage).needs}; this GPU is {arch}")


def _reasons(rows: Any) -> list[str]:
    return [f"{row.problem.label} {row.layout}: {row.status} {row.reason}" for row in rows]


def test_hostile_inputs_reach_the_fallback_on_a_gpu_too(of_overlap: CheckRun) -> None:
    _supported("13_overlap")
    assert _reasons(of_overlap.failures) == []
    assert {row.problem.inputs for row in of_overlap.rows} == {"normal", *HOSTILE}
    assert {row.layout for row in of_overlap.rows} == {*cases.LAYOUTS, *cases.FAR_LAYOUTS}
    mine = [row for row in of_overlap.rows if row.layout in cases.LAYOUTS]
    for kind in ("hostile_sink", "hostile_falling", "hostile_waves"):
        for dtype in DTYPES:
            counts = [row.fallbacks for row in mine if (row.problem.inputs, row.problem.dtype) == (kind, dtype)]
            assert counts
            assert all(count is not None and count.recomputed > 0 for count in counts), f"{kind} {dtype}"
    whole = [
        row for row in mine if row.problem.inputs == "normal" and row.problem.mask == "full" and row.problem.kv_len > 16
    ]
    assert [row.fallbacks for row in whole] == [(0, 0)] * len(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", HOPPER)
def test_flash_attentions_own_cases_pass_by_its_own_rule(
    request: pytest.FixtureRequest, stage: str, dtype: DType, own_cases: CheckRun
) -> None:
    _supported(stage)
    if (stage, dtype) == ("13_overlap", "bfloat16"):  # a unit in the last place, which the rule lets pass or not
        request.applymarker(pytest.mark.xfail(strict=False, reason=ONE_KEY))
    mine = [row for row in own_cases.rows if (row.stage, row.problem.dtype) == (stage, dtype)]
    assert len(mine) == 378 * len(registry.get(stage).head_dims)
    assert _reasons(row for row in mine if row.status != "ok") == []


def _run(torch: Any, stage: str, q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
    prepared = prepare(q, k, v, causal=causal, stage=stage, return_lse=True)
    prepared()
    torch.cuda.synchronize()
    return prepared.out.view(torch.int16), prepared.lse


def _tensors(torch: Any, problem: Problem) -> list[Any]:
    return [torch.from_numpy(x.view(np.int16)).view(getattr(torch, problem.dtype)).cuda() for x in make_inputs(problem)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", HOPPER)
def test_one_key_gives_its_value(request: pytest.FixtureRequest, stage: str, dtype: DType, torch: Any) -> None:
    _supported(stage)
    if (stage, dtype) == ("13_overlap", "bfloat16"):
        request.applymarker(pytest.mark.xfail(strict=True, reason=ONE_KEY))
    for head_dim in registry.get(stage).head_dims:
        problem = Problem.parse(f"2x4x2x300x1x{head_dim}", dtype=dtype)
        q, k, v = _tensors(torch, problem)
        out, _ = _run(torch, stage, q, k, v, causal=False)
        wanted = v.repeat_interleave(2, 1).expand(q.shape).contiguous().view(torch.int16)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", HOPPER)
def test_a_rows_bits_do_not_depend_on_other_rows(
    request: pytest.FixtureRequest, stage: str, dtype: DType, torch: Any
) -> None:
    _supported(stage)
    if stage in ("13_overlap", "14_stale_max"):
        request.applymarker(pytest.mark.xfail(strict=True, reason=TOGETHER))
    problem = Problem.parse("2x4x2x400x700x64", dtype=dtype)
    q, k, v = _tensors(torch, problem)
    louder = q.clone()
    louder[:, :, 7::64] *= 30
    others = torch.arange(problem.q_len) % 64 != 7
    for causal in (False, True):
        quiet, loud = (_run(torch, stage, x, k, v, causal=causal) for x in (q, louder))
        assert all(torch.equal(a[:, :, others], b[:, :, others]) for a, b in zip(quiet, loud, strict=True))


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if not m.early], ids=lambda mistake: mistake.label)
def test_the_check_finds_mistakes_on_a_gpu_too(mistake: Mistake, tmp_path: Path, cupy: Any) -> None:
    _supported(mistake.stage)
    source = tmp_path / "mistake.cu"
    source.write_text(mistake.source(), encoding="utf-8")
    stage = registry.get(mistake.stage)
    found = cases.only(
        cases.default_cases({stage.id: stage}),
        dtypes=(mistake.dtype,),
        masks=(mistake.mask,),
        head_dims=stage.head_dims[:1],
    )
    # Hostile inputs first: there it shows, where it does not everywhere.
    for case in sorted(found, key=lambda case: case.problem.inputs == "normal"):
        made = make_inputs(case.problem, xp=cupy)
        verdict = guarded_verdict(stage.id, case.problem, made, layout=case.layout, source=source)
        if not verdict.passed:
            return
    raise AssertionError(f"{len(found)} cases passed")


def test_the_stages_those_were_made_from_count_no_fallback_where_nobody_asks(torch: Any) -> None:
    _supported("13_overlap")
    problem = replace(Problem.parse("1x1x1x70x400x64"), inputs="hostile_falling")
    q, k, v = _tensors(torch, problem)
    silent = prepare(q, k, v, stage="13_overlap")
    counting = prepare(q, k, v, stage="13_overlap", count_fallbacks=True)
    for prepared in (silent, counting):
        prepared()
    assert silent.fallbacks() is None
    found = counting.fallbacks()
    assert found is not None
    assert found.recomputed > 0
    assert torch.equal(silent.out.view(torch.int16), counting.out.view(torch.int16))
