"""Which cases break kernels, and what the CPU says of them beside a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashlab import bench, checks, emulator, stages
from flashlab.check import check
from flashlab.errors import MissingPackageError, ParameterError
from flashlab.problem import Problem
from flashlab.reference import attention, make_inputs, pack

STAGE = stages.get("05_wmma")
PROBLEM = Problem(batch=2, q_heads=4, kv_heads=2, q_len=65, kv_len=66, head_dim=64, mask="causal")

try:
    emulator.cxx()
    NO_COMPILER = ""
except MissingPackageError as missing:
    NO_COMPILER = str(missing)
needs_compiler = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)


def test_cases_are_what_stages_take() -> None:
    found = checks.cases({"x": STAGE}, lengths=[(1, 1)], layouts=("bshd",), masks=("full",))
    assert [(case.problem.head_dim, case.problem.dtype, case.names) for case in found] == [
        (64, "float16", ("x",)),
        (128, "float16", ("x",)),
    ]
    with pytest.raises(ParameterError, match="layout: wanted one of contiguous"):
        checks.cases({"x": STAGE}, layouts=("diagonal",))
    with pytest.raises(ParameterError, match="at least one stage"):
        checks.cases({"x": STAGE}, dtypes=("bfloat16",))
    with pytest.raises(ParameterError, match="at least one length"):
        checks.check_on_cpu(["05_wmma"], lengths=[])


@needs_compiler
@pytest.mark.parametrize("q_len", [65, 520])
def test_what_a_gpu_gave_is_compared_with_the_emulator(q_len: int) -> None:
    problem = Problem(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=130, head_dim=64, mask="causal")
    values = make_inputs(problem)
    exact, lse = attention(*values, causal=True)
    chip = pack(exact.astype("float32"), "float16")
    found = checks.emulate_beside(STAGE.id, problem, values, chip, lse.astype("float32"), layout="misaligned")
    assert (found.status, found.reason) == ("ok", "")
    assert found.verdict is not None
    assert found.agreement is not None
    assert found.agreement.max_abs_error <= found.agreement.max_abs_limit
    assert found.shape == ("1x2x1x520x130x64" if q_len == 520 else problem.shape)
    chip[0, 1, q_len - 20] *= 1.25
    found = checks.emulate_beside(STAGE.id, problem, values, chip, lse.astype("float32"), layout="contiguous")
    assert found.status == "wrong"
    assert found.reason.startswith("chip and emulator: max abs error")
    message = json.loads(json.dumps(bench._emulator_message(found)))
    assert bench._emulator_verdict(message) == found
    assert bench._emulator_verdict(None) is None


@needs_compiler
def test_a_row_is_kept_for_whatever_happens_on_the_cpu(tmp_path: Path) -> None:
    text = STAGE.source.read_text(encoding="utf-8")
    edited = tmp_path / "endless.cu"
    first = "  const int warp = threadIdx.x / WARP;\n"
    assert first in text
    edited.write_text(text.replace(first, f"  while (p.q_len) {{ }}\n{first}"), encoding="utf-8")
    found = checks.check_on_cpu(
        ["05_wmma"],
        lengths=[(3, 5)],
        masks=("full",),
        layouts=("contiguous",),
        head_dims=[64],
        sources={"05_wmma": edited},
        timeout_s=1,
    )
    assert {row.stage: row.status for row in found.rows} == {"05_wmma": "ok", "05_wmma@endless": "timeout"}
    (failure,) = found.failures
    assert "endless.cu:" in failure.reason


def test_an_output_can_be_judged_against_another() -> None:
    values = make_inputs(PROBLEM)
    exact, lse = attention(*values, causal=True)
    out, lse = pack(exact.astype("float32"), "float16"), lse.astype("float32")
    options = {"causal": True, "dtype": "float16"}
    same = check(out, lse, *values, **options, against=(out, lse))  # type: ignore[arg-type]
    assert same.passed
    assert same.max_abs_error == same.lse_error == 0
    other = out.copy()
    other[1, 3, 64] += 0.5
    verdict = check(out, lse, *values, **options, against=(other, lse))  # type: ignore[arg-type]
    assert "max abs error" in verdict.reason
    assert "batch 1, head 3, rows 64..64" in verdict.reason
    assert not check(out, lse, *values, **options, against=(out, lse + 1)).passed  # type: ignore[arg-type]
