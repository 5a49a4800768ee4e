"""Sliding windows and soft caps: what a call asks for, which stages compute it, and that they do, on the CPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from shared import in_turn, needs_compiler, tiers
from synthetic import measurement

import flashlab
from flashlab.build import compiler
from flashlab.build.compiler import LaunchShape, Variant
from flashlab.core import errors
from flashlab.core.inputs import HOSTILE as HOSTILE_INPUTS
from flashlab.core.problem import NO_WINDOW, Problem, suite
from flashlab.kernels import peers, registry
from flashlab.query import select
from flashlab.record.schema import RecordedProblem
from flashlab.run import arrays, paged
from flashlab.run.arguments import splits_for
from flashlab.run.attention import emulate
from flashlab.run.plan import plan, window_of
from flashlab.verify import cases, on_cpu, oracle
from flashlab.verify.verdict import Guarded

STAGES = [stage for stage in registry.STAGES.values() if stage.features]
DECODING = [stage.id for stage in registry.DECODE.values() if stage.features]
BY_ITSELF = [name for name in DECODING if name in (paged.STAGE, paged._FEWER) or not registry.get(name).by_name_only]
"""Those that a call may take without being asked for them."""
WINDOWED = Problem.parse("1x4x2x130x203x64", mask="causal", window=(40, -1))


def sees(problem: Problem) -> Any:
    """(q_len, kv_len): which query sees which key, by the definition."""
    apart = np.arange(problem.kv_len) - np.arange(problem.q_len)[:, None] - (problem.kv_len - problem.q_len)
    left, right = problem.window
    seen = np.ones(apart.shape, bool) if not problem.causal else apart <= 0
    return seen & ((apart >= -left) | (left == -1)) & ((apart <= right) | (right == -1))


def problems(most: int) -> st.SearchStrategy[Problem]:
    """Small ones with a window, a soft cap or both."""
    side = st.integers(-1, most)
    made = st.builds(
        Problem,
        batch=st.just(1),
        q_heads=st.just(2),
        kv_heads=st.just(1),
        q_len=st.integers(1, most),
        kv_len=st.integers(1, most),
        head_dim=st.just(64),
        mask=st.sampled_from(["full", "causal"]),
        window=st.tuples(side, side),
        softcap=st.sampled_from([0.0, 1.0, 30.0]),
        inputs=st.sampled_from(["normal", *HOSTILE_INPUTS]),
    )
    return made.filter(lambda problem: bool(problem.features))


# --- problems, records, the oracle ---


@given(problems(40))
def test_visible_scores_are_the_cells_of_the_window(problem: Problem) -> None:
    if "window" in problem.features:
        assert problem.visible_scores == sees(problem).sum()
    assert problem.label.count("window") + problem.label.count("softcap") == len(problem.features)


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), (-2, 0), (1.5, 2), (True, 3)])
def test_a_problems_window_is_two_numbers(window: Any) -> None:
    with pytest.raises(errors.ParameterError, match="window: wanted"):
        Problem.parse("1x1x8x64", window=window)


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan"), True, "30"])
def test_a_soft_cap_is_a_positive_number(softcap: Any) -> None:
    with pytest.raises(errors.ParameterError, match="softcap: wanted"):
        Problem.parse("1x1x8x64", softcap=softcap)


def test_a_record_names_a_feature_only_where_it_is_asked_for() -> None:
    kind: TypeAdapter[Problem] = TypeAdapter(RecordedProblem)
    plain = kind.dump_python(Problem.parse("1x1x8x64"))
    assert plain.keys() == {"batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "dtype", "mask", "inputs"}
    for problem in (*suite("windows"), WINDOWED):
        assert kind.dump_python(problem).keys() - plain.keys() == set(problem.features)
        assert kind.validate_json(kind.dump_json(problem)) == problem


def test_pages_do_not_take_a_windows_time_for_that_of_all_keys() -> None:
    rows = [measurement(name, Problem.parse("16x16x2048x64")) for name in registry.STAGES]
    problem = Problem.parse("16x16x2048x64", window=(63, -1))
    other = [row.model_copy(update={"problem": problem}) for row in rows]
    together = dict.fromkeys((row.run for row in rows), "one session")
    assert len(select.select(rows, together)) > 0 == len(select.select(other, together))


@settings(max_examples=60, deadline=None)
@given(problems(30))
def test_the_oracle_is_the_definition(problem: Problem) -> None:
    q, k, v = oracle.make_inputs(problem)
    out, lse = oracle.attention(q, k, v, causal=problem.causal, window=problem.window, softcap=problem.softcap)
    scores = q[0].astype(float) @ k[0].astype(float).swapaxes(1, 2) / 8
    if problem.softcap:
        scores = problem.softcap * np.tanh(scores / problem.softcap)
    seen = sees(problem)
    for row in range(problem.q_len):
        some = scores[:, row, seen[row]]
        if not some.size:
            assert not out[0, :, row].any()
            assert np.isneginf(lse[0, :, row]).all()
            continue
        top = some.max(1, keepdims=True)
        weights = np.exp(some - top)
        np.testing.assert_allclose(lse[0, :, row], np.log(weights.sum(1)) + top[:, 0], rtol=1e-9)
        wanted = weights @ v[0, 0, seen[row]].astype(float) / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(out[0, :, row], wanted, rtol=1e-9, atol=1e-12)


# --- what a call may ask for, and what takes it ---


@pytest.mark.parametrize(
    ("given_", "sides"),
    [(None, (-1, -1)), (7, (7, 7)), ((7, None), (7, -1)), ([0, -1], (0, -1)), (np.int64(3), (3, 3))],
)
def test_a_window_may_be_given_in_several_ways(given_: Any, sides: tuple[int, int]) -> None:
    assert window_of(given_) == sides


@pytest.mark.parametrize("given_", [-2, (1,), (1, 2, 3), 2.0, "ab", (True, 1), (1, -5), True, {3, 5}, {3: 5, 7: 9}])
def test_what_is_no_window_is_refused(given_: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r"window: wanted None, the number of keys.* \(left, right\)"):
        window_of(given_)


def planned(q_len: int = 40, kv_len: int = 60, **options: Any) -> Any:
    shapes = ((1, 2, q_len, 64), (1, 1, kv_len, 64), (1, 1, kv_len, 64))
    inputs = [arrays.on_host(np.zeros(shape, np.float16), name) for shape, name in zip(shapes, "qkv", strict=True)]
    return plan(*inputs, arch="sm_90a", **options)


def test_a_window_that_hides_no_key_is_none() -> None:
    assert planned(causal=True, window=(59, None)).problem.window == NO_WINDOW
    assert planned(causal=True, window=(58, None)).problem.window == (58, -1)
    assert planned(window=(60, 39)).problem.features == ()
    assert planned(window=(None, 38)).problem.window == (-1, 38)
    assert planned(causal=True, window=(5, 5)).problem == planned(window=(5, 0)).problem
    assert planned(q_len=1, causal=True, window=60).stage == planned(q_len=1, causal=True).stage


def test_a_stage_that_takes_none_says_which_do() -> None:
    able = [stage.id for stage in STAGES]
    assert able[:2] == ["08_swizzle", "16_ones_column"]
    for options, words in (({"window": 5}, "window"), ({"softcap": 30.0}, "softcap")):
        with pytest.raises(errors.UnsupportedError, match=rf"12_persistent takes no {words}.* {', '.join(able)}\."):
            planned(stage="12_persistent", **options)
        assert planned(**options).stage.id == able[-1]
    with pytest.raises(errors.UnsupportedError, match=r"no stage runs .* window 5:5"):
        registry.best(Problem.parse("1x1x64x64", window=(5, 5)), "sm_75")


def test_only_a_call_that_asks_gets_other_code() -> None:
    of = partial(Variant.of, STAGES[-1])
    plain = Problem.parse("1x1x64x64")
    assert not {"WINDOW", "SOFTCAP"} & of(plain).macros.keys()
    assert of(Problem.parse("1x1x64x64", window=(3, 3))).macros.items() >= {**of(plain).macros, "WINDOW": 1}.items()
    assert of(Problem.parse("1x1x64x64", softcap=2.0)).label.endswith("float16 softcap")


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 96), ("sm_90a", 256), ("sm_120", 64)])
def test_a_call_is_not_refused_for_the_registers_that_a_feature_takes(arch: str, head_dim: int) -> None:
    problem = Problem.parse(f"1x8x2x100x200x{head_dim}", window=(100, -1), softcap=30.0)
    for one in (problem, replace(problem, window=NO_WINDOW)):
        code = compiler.compile_stage(compiler.Job.of(registry.get("08_swizzle"), one, arch=arch))
        assert code.resources.spill_store_bytes <= 64


@pytest.mark.parametrize(("name", "takes"), [("fa3", True), ("fa4", True), ("flex", True), ("sdpa", False)])
def test_a_library_is_called_with_what_it_takes(name: str, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_installed", lambda module: True)
    with contextlib.nullcontext() if takes else pytest.raises(errors.UnsupportedError, match="without a softcap"):
        peers.get(name).require(Problem.parse("1x2x64x64", dtype="bfloat16", softcap=30.0))


@pytest.mark.parametrize(("name", "sides"), [("fa3", (40, 0)), ("fa4", (40, 0))])
def test_flash_attention_gets_a_window_of_its_own_form(name: str, sides: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    module = type("module", (), {"flash_attn_func": staticmethod(lambda q, k, v, **options: asked.update(options))})
    monkeypatch.setattr(peers.importlib, "import_module", lambda _: module)
    peers.get(name).build(WINDOWED)(None, None, None)
    assert asked == {"causal": True, "window_size": sides}
    peers.get(name).build(Problem.parse("1x2x64x64", window=(-1, 7), softcap=3.0))(None, None, None)
    open_side = {"fa3": -1, "fa4": None}[name]
    assert asked == {"causal": False, "window_size": (open_side, 7), "softcap": 3.0}


# --- the kernels ---


@needs_compiler
@tiers
@pytest.mark.parametrize("stage", [stage.id for stage in STAGES])
def test_a_stage_is_right_over_all_windows_and_caps(stage: str, whole: bool) -> None:
    """In part, of each head dim in one type, under one mask."""
    chosen = cases.featured_cases({stage: registry.get(stage)}, on_cpu=True)
    if not whole:
        variants = in_turn(registry.get(stage))
        chosen = [one for one in chosen if (one.problem.head_dim, one.problem.dtype, one.problem.causal) in variants]
    assert {case.problem.features for case in chosen} == {("window",), ("softcap",), ("window", "softcap")}
    assert {case.layout for case in chosen} == {"contiguous", "misaligned"}
    for case in chosen:
        values = on_cpu.laid_out(oracle.make_inputs(case.problem), case.layout)
        verdict, _ = on_cpu.emulated_verdict(stage, case.problem, values, layout=case.layout, threads=1)
        assert verdict.passed, f"{case.problem.label} {case.layout}: {verdict.reason}"


@needs_compiler
@pytest.mark.parametrize("stage", [stage.id for stage in STAGES])
@settings(max_examples=25, deadline=None)
@given(problems(300))
def test_a_stage_is_right_in_any_window(stage: str, problem: Problem) -> None:
    verdict, _ = on_cpu.emulated_verdict(stage, problem, oracle.make_inputs(problem), threads=1)
    assert verdict.passed, f"{problem}: {verdict.reason}"


@needs_compiler
@pytest.mark.parametrize("stage", [stage.id for stage in STAGES])
@pytest.mark.parametrize("schedule", cases.SCHEDULES)
def test_a_stage_has_no_races_where_rows_need_tiles_of_their_own(stage: str, schedule: str) -> None:
    for window, head_dim, softcap in (((30, -1), 64, 0.0), ((70, -1), 128, 0.0), ((3, 40), 128, 20.0)):
        problem = Problem.parse(f"1x2x1x390x450x{head_dim}", mask="full" if window[1] > 0 else "causal")
        problem = Problem(**{**vars(problem), "window": window, "softcap": softcap})
        verdict, ran = on_cpu.emulated_verdict(
            stage, problem, oracle.make_inputs(problem), races=True, schedule=schedule, timeout_s=600
        )
        assert verdict.passed, f"{problem.label}: {verdict.reason}"
        assert not ran.report.findings


@needs_compiler
@pytest.mark.parametrize("pingpong", [0, 1])
@pytest.mark.parametrize("tile_kv", [48, 64])
def test_wide_rows_in_a_window_wait_for_no_turn_that_waits_for_them(tile_kv: int, pingpong: int) -> None:
    """With one buffer of Q the next work tile comes when all consumers are done with the last: none that waits for it
    may owe the others more than one turn, as by tiles of 48 keys those of rows 64 further on would."""
    params = {"TILE_KV": tile_kv, "PINGPONG": pingpong}
    for left in (68, 84, 100):
        problem = Problem.parse("1x8x8x256x512x256", mask="causal", window=(left, -1))
        values = oracle.make_inputs(problem)
        if pingpong and tile_kv == 48:
            with pytest.raises(errors.CompileError, match="deadlock: a consumer would wait"):
                on_cpu.emulated_verdict("16_ones_column", problem, values, params=params)
        else:
            verdict, _ = on_cpu.emulated_verdict("16_ones_column", problem, values, params=params, timeout_s=120)
            assert verdict.passed, f"{problem.label}: {verdict.reason}"


@needs_compiler
@pytest.mark.parametrize("stage", [stage.id for stage in STAGES])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_outside_the_window_are_not_read(stage: str, head_dim: int) -> None:
    """A NaN in V makes every output NaN that its tile adds to, for 0 · NaN is NaN."""
    problem = Problem.parse(f"1x2x1x64x1000x{head_dim}", window=(100, 20))
    q, k, v = oracle.make_inputs(problem)
    wanted, _ = oracle.attention(q, k, v, causal=False, window=problem.window)
    read = [row - 64 + 1000 for row in (0, 63)]
    first, end = (read[0] - 100) // 128 * 128, min(1000, -(-(read[1] + 21) // 128) * 128)
    hidden = np.ones(1000, bool)
    hidden[first:end] = False
    assert hidden.sum() > 700
    for x in (k, v):
        x[:, :, hidden] = np.nan
    found = emulate(q, k, v, window=problem.window, stage=stage).out
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-3)


FEW_ROWS = st.builds(
    Problem,
    batch=st.just(1),
    q_heads=st.just(4),
    kv_heads=st.just(2),
    q_len=st.integers(1, 9),
    kv_len=st.integers(1, 300),
    head_dim=st.just(64),
    mask=st.sampled_from(["full", "causal"]),
    window=st.tuples(st.integers(-1, 310), st.integers(-1, 9)),
    softcap=st.sampled_from([0.0, 1.0, 30.0]),
    inputs=st.sampled_from(["normal", *HOSTILE_INPUTS]),
).filter(lambda problem: bool(problem.features))
"""What stages for decoding take."""


@needs_compiler
@pytest.mark.parametrize(
    ("stage", "whole"),
    [
        *(pytest.param(stage, False, id=f"{stage}-part") for stage in BY_ITSELF),
        *(pytest.param(stage, True, id=f"{stage}-whole", marks=pytest.mark.exhaustive) for stage in DECODING),
    ],
)
def test_decoding_is_right_in_any_window(stage: str, whole: bool) -> None:
    """Masks and features make six kernels of a stage; in part, few problems, of some of them."""

    @settings(max_examples=25 if whole else 2, deadline=None)
    @given(FEW_ROWS)
    def is_right(problem: Problem) -> None:
        verdict, _ = on_cpu.emulated_verdict(stage, problem, oracle.make_inputs(problem), threads=1)
        assert verdict.passed, f"{problem}: {verdict.reason}"

    is_right()


@needs_compiler
@pytest.mark.parametrize(
    ("stage", "head_dim"),
    [
        pytest.param(
            *(stage, head_dim),
            id=f"{head_dim}-{stage}",
            marks=() if head_dim == 64 and stage in BY_ITSELF else pytest.mark.exhaustive,
        )
        for stage in DECODING
        for head_dim in (64, 256)
    ],
)
def test_decoding_in_a_window_has_no_races(stage: str, head_dim: int) -> None:
    problem = Problem.parse(f"2x4x2x3x333x{head_dim}", mask="causal", window=(150, -1), softcap=20.0, dtype="bfloat16")
    verdict, ran = on_cpu.emulated_verdict(stage, problem, oracle.make_inputs(problem), races=True, timeout_s=600)
    assert verdict.passed, verdict.reason
    assert not ran.report.findings


@needs_compiler
@pytest.mark.parametrize("stage", DECODING)
@pytest.mark.parametrize("left", [0, 15, 16, 100])
def test_keys_before_every_querys_window_may_hold_anything(stage: str, left: int) -> None:
    problem = Problem.parse("1x4x2x2x203x64", mask="causal", window=(left, -1))
    q, k, v = oracle.make_inputs(problem)
    wanted, _ = oracle.attention(q, k, v, causal=True, window=problem.window)
    for x in (k, v):
        x[:, :, : 203 - 2 - left] = np.nan
    found = emulate(q, k, v, causal=True, window=problem.window, stage=stage).out
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-3)


def test_a_window_leaves_fewer_keys_to_split() -> None:
    shape = LaunchShape(threads=128, smem_bytes=0, tile_q=16, split_keys=64)
    problem = Problem.parse("1x32x8x1x8192x128", mask="causal")
    assert [
        splits_for(replace(problem, window=(left, -1)), shape, sms=132, most=16) for left in (-1, 8191, 255, 64, 3)
    ] == [16, 16, 4, 1, 1]


@needs_compiler
def test_hugging_faces_window_counts_the_querys_own_key() -> None:
    q, k, v = oracle.make_inputs(Problem.parse("1x1x100x64", mask="causal"))
    k[:, :, 50] = v[:, :, 50] = 0
    width = 8
    outs = [
        flashlab.attention(q, k, v_, causal=True, window=(width - 1, None))
        for v_ in (v, v + (np.arange(100) == 50)[:, None].astype(np.float16))
    ]
    changed = np.flatnonzero((outs[0] != outs[1]).any(axis=(0, 1, 3)))
    assert changed.tolist() == list(range(50, 50 + width))


@needs_compiler
def test_an_output_and_a_log_sum_exp_of_the_callers_are_written_within_their_bounds() -> None:
    q, k, v = oracle.make_inputs(WINDOWED)
    out, lse = Guarded(q.shape, "float16"), Guarded(q.shape[:3], "float32")
    emulate(q, k, v, **WINDOWED.options, out=out.array, lse=lse.array)
    assert out.why_damaged() is None is lse.why_damaged()
    wanted, wanted_lse = oracle.attention(q, k, v, causal=True, window=WINDOWED.window)
    np.testing.assert_allclose(out.array.astype(float), wanted, atol=2e-3)
    np.testing.assert_allclose(lse.array, wanted_lse, atol=1e-3)


# --- commands ---


@needs_compiler
def test_the_commands_take_windows_and_caps(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashlab.cli.app import app

    run = CliRunner().invoke
    explained = run(app, ["explain", "4x16x8192x128", "--mask", "causal", "--window", "511", "--gpu", "nvidia-h200"])
    assert explained.exit_code == 0
    assert "16_ones_column" in explained.output
    checked = run(
        app,
        [
            *("check", "08", "--on", "cpu", "--dtype", "float16", "--mask", "full"),
            *("--length", "40x50", "--window", "7,3", "--softcap", "20", "--json"),
        ],
    )
    assert checked.exit_code == 0
    assert '"window": [\n' in checked.output
    planned = run(app, ["bench", "--suite", "windows", "--dry-run", "--data", str(tmp_path)])
    assert planned.exit_code == 0
    assert "window 511:-1" in planned.output
    wrong = run(app, ["explain", "4x16x8192x128", "--window", "x"])
    assert "window: wanted LEFT or LEFT,RIGHT" in str(wrong.exception or wrong.output)
