"""Which cases break kernels, and what the CPU says of them beside a GPU."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from pydantic import TypeAdapter
from shared import needs_compiler
from synthetic import RUN

from flashlab.build.parallel import cores
from flashlab.core.errors import DamagedRecordError, ParameterError
from flashlab.core.inputs import HOSTILE as HOSTILE_INPUTS
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.query import select
from flashlab.record import checks, schema
from flashlab.record.schema import Verdict
from flashlab.run.attention import Fallbacks
from flashlab.verify import cases, on_cpu
from flashlab.verify.cases import FLASH_ATTENTION_LENGTHS, HOSTILE
from flashlab.verify.oracle import attention, make_inputs, pack, plain
from flashlab.verify.verdict import Guarded, Oracle, check, check_as_flash_attention, flash_attention_limit

STAGE = registry.get("05_wmma")
PROBLEM = Problem(batch=2, q_heads=4, kv_heads=2, q_len=65, kv_len=66, head_dim=64, mask="causal")


def test_cases_are_what_stages_take() -> None:
    found = cases.cases({"x": STAGE}, lengths=[(1, 1)], layouts=("bshd",), masks=("full",))
    assert [(case.problem.head_dim, case.problem.dtype, case.names) for case in found] == [
        (64, "float16", ("x",)),
        (128, "float16", ("x",)),
    ]
    with pytest.raises(ParameterError, match="layout: wanted one of contiguous"):
        cases.cases({"x": STAGE}, layouts=("diagonal",))
    with pytest.raises(ParameterError, match="at least one stage"):
        cases.only(cases.default_cases({"x": STAGE}), dtypes=("bfloat16",))
    for options, words in (
        ({"lengths": []}, "at least one length"),
        ({"inputs": []}, "at least one kind of inputs"),
        ({"suite": "llama"}, "suite: wanted one of flash-attention, got 'llama'"),
    ):
        with pytest.raises(ParameterError, match=words):
            on_cpu.check_on_cpu(["05_wmma"], **options)  # type: ignore[arg-type]


LAST = {"x": registry.get("13_overlap")}


def test_a_cpu_goes_through_all_that_breaks_kernels_by_default() -> None:
    found = cases.default_cases_on_cpu(LAST)
    problems = [(case.problem, case.layout, case.schedule) for case in found]
    assert len(set(problems)) == len(problems)
    variants = {(p.head_dim, p.dtype, p.mask) for p, _, _ in problems}
    assert len(variants) == 8
    normal = [(p, layout, schedule) for p, layout, schedule in problems if p.inputs == "normal"]
    assert {(p.q_len, p.kv_len) for p, _, _ in normal} == set(HOSTILE)
    for lengths in HOSTILE:
        ways = [(p, layout, schedule) for p, layout, schedule in normal if (p.q_len, p.kv_len) == lengths]
        assert {(p.head_dim, p.dtype, p.mask) for p, _, _ in ways} == variants
        if not cases.is_long(*lengths):
            assert {layout for _, layout, _ in ways} == set(cases.LAYOUTS)
            assert {schedule for _, _, schedule in ways} == set(cases.SCHEDULES)
            assert {layout for _, layout, schedule in ways if schedule == cases.SCHEDULES[1]} == {*cases.LAYOUTS} - {
                "contiguous"
            }
    for what in variants:
        mine = [p for p, _, _ in problems if (p.head_dim, p.dtype, p.mask) == what]
        assert any((p.batch, p.q_heads, p.kv_heads) == (2, 4, 2) and p.inputs == "normal" for p in mine)
    for kind in HOSTILE_INPUTS:
        mine = [(p, schedule) for p, layout, schedule in problems if p.inputs == kind and layout in cases.LAYOUTS]
        assert {(p.batch, p.q_heads, p.kv_heads) for p, _ in mine} == {(2, 4, 2)}
        assert {(p.dtype, p.mask) for p, _ in mine} == {(t, m) for t in cases.DTYPES for m in cases.MASKS}
        assert {p.head_dim for p, _ in mine} == {64, 128}
        assert {schedule for _, schedule in mine} == set(cases.SCHEDULES)
    far = [(p, layout) for p, layout, _ in problems if layout not in cases.LAYOUTS]
    assert {(p.dtype, layout) for p, layout in far} == {(t, x) for t in cases.DTYPES for x in cases.FAR_LAYOUTS}


def test_a_gpu_goes_through_every_layout_and_hostile_inputs_by_default() -> None:
    found = cases.default_cases(LAST)
    problems = [(case.problem, case.layout) for case in found]
    assert len(set(problems)) == len(problems)
    assert {(p.batch, p.q_heads, p.kv_heads) for p, layout in problems if layout in cases.LAYOUTS} == {(2, 4, 2)}
    assert sum(p.inputs == "normal" for p, _ in problems) == 8 * len(HOSTILE) * len(cases.LAYOUTS)
    assert {p.inputs for p, _ in problems} == {"normal", *HOSTILE_INPUTS, "hostile_end"}
    assert {layout for _, layout in problems} == {*cases.LAYOUTS, *cases.FAR_LAYOUTS}


def test_rows_far_apart_have_offsets_of_more_than_32_bits_and_take_little_memory() -> None:
    (q_len, kv_len), heads = cases.FAR_LENGTHS[0], cases.LONE_HEAD
    for layout in cases.FAR_LAYOUTS:
        for length in (q_len, kv_len):
            placed = cases.placement((*heads[:2], length, 64), layout)
            assert (length - 4) * placed["strides"][2] >= 1 << 31
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        values = np.arange(q_len * 64, dtype=np.float16).reshape(1, 1, q_len, 64)
        held = Guarded.holding(values, **cases.placement(values.shape, layout))
        assert (held.array == values).all()
        assert held.why_damaged() is None
        held.array[0, 0, 257, 5] = 0
        assert held.why_damaged() == f"input modified: 1 of {values.size} elements"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB; macOS counts bytes
        assert Guarded(values.shape, "float16", **cases.placement(values.shape, layout)).why_damaged() is None


@needs_compiler
def test_hostile_inputs_reach_the_fallback_and_normal_ones_do_not() -> None:
    def fallbacks(dtype: str, kind: str) -> tuple[int, int]:
        found = on_cpu.check_on_cpu(
            ["13_overlap"],
            lengths=[(70, 256)] if kind == "normal" else cases.HOSTILE_LENGTHS[:1],
            inputs=[kind],
            dtypes=[dtype],
            masks=["full"],
            layouts=["contiguous"],
            head_dims=[64],
        )
        (row,) = found.rows
        assert row.status == "ok"
        assert row.fallbacks is not None
        return row.fallbacks

    assert [fallbacks(dtype, "normal") for dtype in cases.DTYPES] == [(0, 0), (0, 0)]
    for kind in ("hostile_sink", "hostile_falling", "hostile_waves"):
        for dtype in cases.DTYPES:
            assert fallbacks(dtype, kind)[1] > 0, f"{kind} {dtype}"
    assert fallbacks("bfloat16", "hostile_low")[1] > 0


# --- flash-attention's own cases ---


def test_flash_attentions_cases() -> None:
    assert len(FLASH_ATTENTION_LENGTHS) == len(set(FLASH_ATTENTION_LENGTHS)) == 21
    found = cases.flash_attention_cases(LAST)
    assert len(found) == 21 * 3 * 2 * 2 * 2 * 3
    problems = [case.problem for case in found]
    assert {(p.q_heads, p.kv_heads) for p in problems} == {(6, 6), (6, 2), (6, 1)}
    assert {p.inputs for p in problems} == {"normal", "scale8", "sink_first"}
    on_cpu = [case.problem for case in cases.flash_attention_cases(LAST, on_cpu=True)]
    assert {p.batch for p in on_cpu} == {1}
    assert len({(p.q_len, p.kv_len) for p in on_cpu}) == 11


def test_flash_attentions_rule_lets_pass_what_is_rounded_once_and_no_more_than_twice_plain() -> None:
    for dtype in cases.DTYPES:
        problem = Problem.parse("1x6x2x113x203x128", dtype=dtype, mask="causal")
        values = make_inputs(problem)
        exact, lse = attention(*values, causal=True)
        options: Any = {"causal": True, "dtype": dtype}
        good = pack(exact.astype("float32"), dtype)
        verdict = check_as_flash_attention(good, lse.astype("float32"), *values, **options)
        assert verdict.passed, verdict.reason
        assert verdict.max_abs_error == 0
        out = plain(*values, **options)
        assert check_as_flash_attention(out, None, *values, **options).passed
        oracle = Oracle()
        bad = good.copy()
        bad[0, 5, 112, 7] += bad.dtype.type(2 * verdict.max_abs_limit)
        found = check_as_flash_attention(bad, None, *values, oracle=oracle, **options)
        assert "over flash-attention's limit" in found.reason
        assert found.max_abs_limit == verdict.max_abs_limit
        bad[...] = float("nan")
        assert "NaN in output" in check_as_flash_attention(bad, None, *values, oracle=oracle, **options).reason


def test_flash_attentions_limit_for_one_key_is_what_adding_and_taking_away_does() -> None:
    problem = Problem.parse("1x6x6x64x1x64", dtype="bfloat16")
    values = make_inputs(problem)
    _, limit = flash_attention_limit(*values, causal=False, dtype="bfloat16")
    v = values[2].astype(np.float32)
    rounded = ((v + np.float32(0.3)).astype(values[2].dtype).astype(np.float32) - np.float32(0.3)).astype(
        values[2].dtype
    )
    assert limit == pytest.approx(2 * np.abs(rounded.astype(np.float32) - v).max())


@needs_compiler
def test_a_suite_is_judged_by_its_own_rule() -> None:
    found = on_cpu.check_on_cpu(
        ["05_wmma"], suite="flash-attention", head_dims=[64], masks=["causal"], dtypes=["float16"]
    )
    assert found.failures == ()
    assert len(found.rows) == 11 * 3 * 3
    assert all(row.verdict is not None and row.verdict.rms_error is None for row in found.rows)


@needs_compiler
@pytest.mark.parametrize("q_len", [65, 520])
def test_what_a_gpu_gave_is_compared_with_the_emulator(q_len: int) -> None:
    problem = Problem(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=130, head_dim=64, mask="causal")
    values = make_inputs(problem)
    exact, lse = attention(*values, causal=True)
    chip = pack(exact.astype("float32"), "float16")
    found = on_cpu.emulate_beside(STAGE.id, problem, values, chip, lse.astype("float32"), layout="misaligned")
    assert (found.status, found.reason) == ("ok", "")
    assert found.verdict is not None
    assert found.agreement is not None
    assert found.agreement.max_abs_error <= found.agreement.max_abs_limit
    assert found.shape == ("1x2x1x520x130x64" if q_len == 520 else problem.shape)
    chip[0, 1, q_len - 20] *= 1.25
    found = on_cpu.emulate_beside(STAGE.id, problem, values, chip, lse.astype("float32"), layout="contiguous")
    assert found.status == "wrong"
    assert found.reason.startswith("chip and emulator: max abs error")
    adapter = TypeAdapter(type(found))
    assert adapter.validate_json(adapter.dump_json(found)) == found, "as a worker sends it"


@needs_compiler
def test_a_row_is_kept_for_whatever_happens_on_the_cpu(tmp_path: Path) -> None:
    text = STAGE.source.read_text(encoding="utf-8")
    edited = tmp_path / "endless.cu"
    first = "  const int warp = threadIdx.x / WARP;\n"
    assert first in text
    edited.write_text(text.replace(first, f"  while (p.q_len) {{ }}\n{first}"), encoding="utf-8")
    found = on_cpu.check_on_cpu(
        ["05_wmma"],
        lengths=[(3, 5)],
        masks=("full",),
        layouts=("contiguous", "bshd"),
        head_dims=[64],
        sources={"05_wmma": edited},
        schedules=["ascending", "descending", "seeded:1", "seeded:2"],
        timeout_s=1,
    )
    assert {row.stage: row.status for row in found.rows} == {"05_wmma": "ok", "05_wmma@endless": "timeout"}
    waited = [failure.reason for failure in found.failures if "endless.cu:" in failure.reason]
    assert 0 < len(waited) <= cores(), "those that ran at once"
    others = [failure.reason for failure in found.failures if failure.reason not in waited]
    assert others
    assert all(reason.startswith("not run: no end at ") for reason in others)


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


# --- On record --------------------------------------------------------------------------------------------------------

PASSED = Verdict(
    passed=True, reason="", max_abs_error=1.23456e-3, max_abs_limit=2e-3, rms_error=1e-5, rms_limit=2e-5,
    lse_error=None, lse_limit=None,
)  # fmt: skip
OTHER = PASSED.model_copy(update={"lse_error": 1e-6, "lse_limit": 3e-4})
FAILED = PASSED.model_copy(update={"passed": False, "reason": "max |error|", "max_abs_error": None})
ROWS = (
    checks.CheckRow(stage="05_wmma", problem=PROBLEM, layout="padded", status="ok", reason="", verdict=PASSED),
    checks.CheckRow(
        stage="06_cp_async",
        problem=PROBLEM,
        layout="padded",
        status="ok",
        reason="",
        verdict=PASSED,
        fallbacks=Fallbacks(renormalized=3, recomputed=70000),
    ),
    checks.CheckRow(stage="05_wmma", problem=PROBLEM, layout="padded", status="wrong", reason="bad", verdict=FAILED),
    checks.CheckRow(stage="05_wmma", problem=PROBLEM, layout="bshd", status="crashed", reason="gone", verdict=None),
    checks.CheckRow(
        stage="05_wmma",
        problem=PROBLEM,
        layout="bshd",
        status="wrong",
        reason="emulator: apart",
        verdict=PASSED,
        emulator=checks.EmulatorVerdict(
            status="wrong", reason="apart", shape=PROBLEM.shape, verdict=PASSED, agreement=FAILED
        ),
    ),
    checks.CheckRow(
        stage="05_wmma",
        problem=PROBLEM,
        layout="bshd",
        status="timeout",
        reason="emulator: late",
        verdict=PASSED,
        emulator=checks.EmulatorVerdict(
            status="timeout", reason="late", shape="1x1x1x64", verdict=None, agreement=None
        ),
    ),
    checks.CheckRow(
        stage="05_wmma",
        problem=PROBLEM,
        layout="contiguous",
        status="ok",
        reason="",
        verdict=PASSED,
        emulator=checks.EmulatorVerdict(status="ok", reason="", shape="1x1x1x64", verdict=OTHER, agreement=PASSED),
    ),
)


def _lines(rows: Sequence[checks.CheckRow]) -> list[object]:
    """A line for each problem in a layout, in their order."""
    of_cases: dict[object, list[checks.CheckRow]] = {}
    for row in rows:
        of_cases.setdefault((row.problem, row.layout), []).append(row)
    return [checks.case_line(of_case) for of_case in of_cases.values()]


def _written(path: Path) -> Path:
    header = synthetic.checks_header().line()
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *_lines(ROWS))), encoding="utf-8")
    return path


def test_cases_take_kinds_of_inputs_and_name_them_on_record(tmp_path: Path) -> None:
    able = {"00_naive": registry.get("00_naive")}
    options: dict[str, Any] = {"lengths": [(1, 1)], "dtypes": ["float16"], "masks": ["full"], "head_dims": [64]}
    found = cases.cases(able, inputs=("normal", "falling"), **options)
    assert [case.problem.inputs for case in found] == ["normal"] * 4 + ["falling"] * 4
    with pytest.raises(ParameterError, match="the nearest is falling"):
        cases.cases(able, inputs=("fallin",), **options)
    with pytest.raises(ParameterError, match="wanted a kind that is drawn"):
        cases.cases(able, inputs=("trained",), **options)
    drawn = cases.random_cases(able, 3, seed=1, inputs=("zeros", "steps"))
    assert [case.problem.inputs for case in drawn] == ["zeros", "steps", "zeros"]
    assert [replace(case.problem, inputs="normal") for case in drawn] == [
        case.problem for case in cases.random_cases(able, 3, seed=1)
    ]
    row = replace(ROWS[0], problem=replace(PROBLEM, inputs="falling"))
    path = tmp_path / "nvidia-h200" / "checks" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    _written(path)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in _lines([row]))
    assert checks.read_lines(path)[-1].problem == row.problem
    # What is shown unasked is on normal inputs.
    assert len(select.checks("nvidia-h200", tmp_path)[path]) == len(ROWS)
    assert len(select.checks("nvidia-h200", tmp_path, inputs=("falling",))[path]) == 1


def test_comparisons_on_record_read_back(tmp_path: Path) -> None:
    lines = checks.read_lines(_written(tmp_path / "checks.jsonl"))
    assert {line.header.run for line in lines} == {RUN}
    for line, row in zip(lines, ROWS, strict=True):
        assert (line.problem, line.status, line.reason) == (PROBLEM, row.status, row.reason)
        assert (line.verdict is None) == (row.verdict is None)
        if line.verdict is not None and row.verdict is not None:
            assert (line.verdict.passed, line.verdict.reason) == (row.verdict.passed, row.verdict.reason)
            for name in ("max_abs_error", "max_abs_limit", "rms_error", "rms_limit", "lse_error"):
                wanted = getattr(row.verdict, name)
                assert getattr(line.verdict, name) == (wanted if wanted is None else pytest.approx(wanted, rel=5e-3))
    assert [line.fallbacks for line in lines[:4]] == [row.fallbacks for row in ROWS[:4]]
    few_digits = {"max_abs_error": 1.23e-3}
    asked = [line.emulator for line in lines]
    assert asked[:4] == [None] * 4
    assert asked[4:6] == [row.emulator for row in ROWS[4:6]]
    assert asked[6] is not None
    assert (asked[6].shape, asked[6].verdict) == ("1x1x1x64", OTHER.model_copy(update=few_digits))


def test_failures_of_format_3_read_back(tmp_path: Path) -> None:
    limit = [2e-3, 2e-5, None]
    passed, failed = {"error": [1.23e-3, 1e-5, None]}, {"failed": "max |error|", "error": [None, 1e-5, None]}
    emulator = {"shape": None, "status": "wrong", "verdict": passed | {"limit": limit}}
    row = {"stage": "05_wmma", "status": "wrong", "verdict": failed | {"limit": limit}, "emulator": emulator}
    case = {"shape": PROBLEM.shape, "dtype": PROBLEM.dtype, "mask": PROBLEM.mask, "layout": "", "ok": {}}
    path = tmp_path / "checks.jsonl"
    lines = (synthetic.checks_header().line() | {"format": 3}, case | {"other": [row]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (line,) = checks.read_lines(path)
    assert line.verdict == FAILED
    read = PASSED.model_copy(update={"max_abs_error": 1.23e-3})
    assert line.emulator == checks.EmulatorVerdict(status="wrong", verdict=read)


def test_a_file_says_on_which_start_of_a_machine_it_was_made(tmp_path: Path) -> None:
    start = schema.Start(boot="0123abcd", at="2026-01-02T00:00:00+00:00")
    header = checks.Header(**{**synthetic.checks_header().model_dump(), "start": start})
    path = tmp_path / "checks.jsonl"
    lines = (header.line(), *_lines(ROWS[:1]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert checks.read_lines(path)[0].header.start == start


def test_a_file_of_the_first_format_reads_alike_and_is_ten_times_as_long(tmp_path: Path) -> None:
    old = next(path for path in sorted(DATA.glob("*/checks/*.jsonl")) if '"format"' not in path.read_text()[:40])
    lines = checks.read_lines(old)
    new = tmp_path / "new.jsonl"
    text = (json.dumps(line) + "\n" for line in (lines[0].header.line(), *_lines(lines)))
    new.write_text("".join(text), encoding="utf-8")

    def known(found: Iterable[checks.Compared]) -> Counter[object]:
        return Counter((line.stage, line.problem, line.layout, line.status, line.reason) for line in found)

    assert known(checks.read_lines(new)) == known(lines)
    assert new.stat().st_size < old.stat().st_size / 10


def test_a_damaged_comparison_is_named(tmp_path: Path) -> None:
    path = _written(tmp_path / "checks.jsonl")
    text = path.read_text(encoding="utf-8").splitlines()
    for bad in ("{", "[]", '{"stage": "05_wmma"}', text[1].replace("x64", "x")):
        path.write_text("\n".join([*text[:2], bad]), encoding="utf-8")
        with pytest.raises(DamagedRecordError, match=r"checks\.jsonl:3"):
            checks.read_lines(path)
