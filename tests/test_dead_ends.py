"""Dead ends: registered beside the ladder and never on it, wrong where they are kept for that, and right otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shared import cubin, in_turn, needs_compiler, one_type_a_head_dim, part_of, tiers
from synthetic import measurement, write_synthetic
from typer.testing import CliRunner

from flashlab.build import compiler, sass
from flashlab.build.compiler import COMMON, Cubin
from flashlab.build.sources import included
from flashlab.cli import app
from flashlab.core.errors import ParameterError, UnknownStageError
from flashlab.core.paths import KERNELS, SITE
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import cublaslt
from flashlab.kernels import registry
from flashlab.kernels.registry import ARCHS, DEAD_ENDS, STAGES, Stage, variant_name
from flashlab.measure import bench
from flashlab.query import contests, select
from flashlab.record import schema, store
from flashlab.record.schema import Measurement, Verdict
from flashlab.run.arrays import DeviceArray, contiguous_strides
from flashlab.show import pages
from flashlab.verify import on_cpu, oracle
from flashlab.verify import verdict as check

every_dead_end = pytest.mark.parametrize("stage", DEAD_ENDS.values(), ids=DEAD_ENDS)
SECTIONS = ("Hypothesis", "What was built", "Prediction", "What happened", "Why", "Instead")
SMALL = Problem.parse("1x2x65x64")
FIRST = Problem.parse(FIRST_SHAPE)
FOLDER = KERNELS / "dead_ends"


# --- the registry -----------------------------------------------------------------------------------------------------


@every_dead_end
def test_a_dead_end_is_whole(stage: Stage) -> None:
    assert stage.dead_end
    assert stage.kernel is None or not DEAD_ENDS[stage.kernel].kernel
    for variant in stage.variants:
        assert variant.items() != stage.parameters(stage.head_dims[0]).items()
        assert all(value in stage.params[name].choices for name, value in variant.items())


def test_no_dead_end_is_on_the_ladder() -> None:
    assert not DEAD_ENDS.keys() & STAGES.keys()
    assert not any(stage.dead_end or stage.defect or stage.precision != "input" for stage in STAGES.values())
    assert registry.best(FIRST, "sm_90a").id in STAGES


def test_every_file_of_the_folder_belongs_to_a_dead_end() -> None:
    own = {stage.source.name for stage in DEAD_ENDS.values()}
    assert {path.name for path in FOLDER.glob("*.cu")} == own
    included = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.cu"))
    assert all(f'"{path.name}"' in included for path in FOLDER.glob("*.cuh"))


@every_dead_end
def test_a_source_or_its_host_code_reads_every_tunable(stage: Stage) -> None:
    text = stage.source.read_text(encoding="utf-8")
    header = text.split("#include")[0]
    host = Path(cublaslt.__file__).read_text(encoding="utf-8") if stage.runner else ""
    headers = "".join(path.read_text(encoding="utf-8") for path in included(stage.source, text, [COMMON]))
    for name in stage.params:
        assert re.search(rf"\b{name}\b", text.replace(header, "") + headers) or f'"{name}"' in host, name


def test_a_name_may_carry_values_of_tunables() -> None:
    stage, variant = registry.parse("wmma_no_smem[COLUMN_LANES=32,WARP_A_HEAD=1]")
    assert (stage.id, variant) == ("wmma_no_smem", {"COLUMN_LANES": 32, "WARP_A_HEAD": 1})
    assert variant_name(stage.id, variant) == "wmma_no_smem[COLUMN_LANES=32,WARP_A_HEAD=1]"
    assert registry.parse("05_wmma") == (STAGES["05_wmma"], {})
    with pytest.raises(UnknownStageError, match=r"got 'wmma'\. Did you mean wmma_no_smem or 05_wmma"):
        registry.parse("wmma[COLUMN_LANES=32]")
    with pytest.raises(UnknownStageError, match=r"got 'nothing near'.* Off the ladder: d0_split_kv, .*branch_free, "):
        registry.parse("nothing near[COLUMN_LANES=32]")
    with pytest.raises(ParameterError, match="has no parameter 'LANES'"):
        registry.parse("wmma_no_smem[LANES=32]")
    with pytest.raises(ParameterError, match=r"wanted ID or ID\[NAME=VALUE,…\]"):
        registry.parse("wmma_no_smem[COLUMN_LANES]")


def test_a_run_takes_names_with_tunables_and_measures_each_once() -> None:
    named = bench.implementations_of([], ["tile48[TILE_Q=32]", "tile48", "tile48[TILE_Q=32]"], [])
    assert {name: (one.kind, one.id, one.params) for name, one in named.items()} == {
        "tile48[TILE_Q=32]": ("stage", "tile48", {"TILE_Q": 32}),
        "tile48": ("stage", "tile48", {}),
    }
    (answer,), _ = bench.estimate([FIRST], stages=["tile48[TILE_Q=32]"], peers=[], ceilings=False)
    assert answer.implementations == 1


# --- machine code -----------------------------------------------------------------------------------------------------


def _cubin(name: str) -> Cubin:
    stage, variant = registry.parse(name)
    return cubin(stage, stage.head_dims[0], overrides=variant)


def _instructions(name: str) -> tuple[sass.Instruction, ...]:
    built = _cubin(name)
    return sass.disassemble(built.code, built.entry)


@tiers
@every_dead_end
def test_a_dead_end_compiles_for_its_oldest_and_newest_architecture(stage: Stage, whole: bool) -> None:
    """In part, for Hopper."""
    ends = [arch for arch in ARCHS if arch in (stage.archs[0], "sm_90a", stage.archs[-1])]
    work = one_type_a_head_dim(compiler.jobs([stage], ends)) if whole else part_of(compiler.jobs([stage]))[:2]
    work += tuple(replace(job, overrides=v) for job in work if job.arch == "sm_90a" for v in stage.variants)
    found = compiler.compile_many(work)
    assert [f"{j.label}: {c}" for j, c in zip(work, found, strict=True) if not isinstance(c, Cubin)] == []


def test_branches_are_told_from_exits_and_from_slow_paths() -> None:
    naive, free = (sass.branches(_instructions(name)) for name in ("00_naive", "branch_free"))
    assert free.predicated < naive.predicated
    assert free.predicated_exits < naive.predicated_exits
    assert free.predicated > 0, "a loop needs a branch"
    assert naive.in_subroutines == free.in_subroutines > 0
    for name in ("00_naive", "branch_free", "tile48"):
        instructions = sass.without_padding(_instructions(name))
        answer = sass.branches(instructions)
        counted = [sass.classify(one) for one in instructions]
        assert answer.predicated + answer.predicated_exits + answer.in_subroutines == counted.count("branch_predicated")
        assert answer.always == counted.count("branch")


def test_wmma_without_shared_memory_has_none_and_keeps_its_output_in_local_memory() -> None:
    assert sass.shared_memory(_instructions("04_wmma_qk")) > 0
    for name in ("wmma_no_smem", *DEAD_ENDS["wmma_no_smem"].variant_names):
        counts = sass.mix(_cubin(name).code)
        assert sass.shared_memory(_instructions(name)) == 0
        assert counts["tensor"] > 0
        assert counts["local"] > 0
    one_lane, all_lanes = (
        _cubin(name).resources.stack_bytes for name in ("wmma_no_smem", "wmma_no_smem[COLUMN_LANES=32]")
    )
    assert one_lane > 4 * 16 * 64, "the output of 16 rows, FP32"
    assert all_lanes == 4 * 16 * 16, "a tile of scores, FP32"


_MMA = """extern "C" __global__ void products(float* d, const unsigned* a) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[threadIdx.x]), "r"(a[threadIdx.x + 32]));
}
"""


@pytest.mark.parametrize(("arch", "opcode"), [("sm_89", "QMMA"), ("sm_90a", "HMMA")])
def test_hopper_turns_mma_on_fp8_into_fp16(tmp_path: Path, arch: str, opcode: str) -> None:
    source = tmp_path / "products.cu"
    source.write_text(_MMA, encoding="utf-8")
    code = compiler.compile_file(source, entry="products", arch=arch, defines={}).code
    products = {i.opcode.split(".")[0] for i in sass.disassemble(code) if sass.classify(i) == "tensor"}
    assert products == {opcode}


def test_fp8_on_hopper_multiplies_fp8() -> None:
    opcodes = {one.opcode.split(".")[0] for one in _instructions("fp8") if sass.classify(one) == "tensor"}
    assert opcodes == {"QGMMA"}


# --- what they compute ------------------------------------------------------------------------------------------------


def _on_a_cpu() -> list[str]:
    """Dead ends that ought to be right, and variants: each that is another program on a CPU, where NumPy multiplies."""
    found = {}
    for stage in DEAD_ENDS.values():
        for name, variant in ((stage.id, {}), *zip(stage.variant_names, stage.variants, strict=True)):
            values = stage.parameters(stage.head_dims[0], variant)
            kernel = {n: v for n, v in values.items() if not stage.runner or n in ("ROW_LANES", "SCORES_FP32")}
            if not stage.defect or variant:
                found.setdefault((stage.source, *kernel.items()), name)
    return list(found.values())


@needs_compiler
@tiers
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.exhaustive if "[" in one else ()) for one in _on_a_cpu()]
)
def test_a_dead_end_is_right_on_the_cpu(name: str, whole: bool) -> None:
    """In part, the smallest head dim and the largest, in another type and under another mask."""
    variants = in_turn(registry.parse(name)[0])
    part = [
        {"head_dims": (head_dim,), "dtypes": (dtype,), "masks": ("causal" if causal else "full",)}
        for head_dim, dtype, causal in (variants[0], variants[-1])
    ]
    for kind in [{}] if whole else part:
        found = on_cpu.check_on_cpu([name], lengths=[(65, 65), (113, 70)], layouts=("contiguous",), **kind)
        assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in found.failures] == []
        assert any(row.status == "ok" for row in found.rows)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_48_rows_on_six_warps_are_wrong_by_the_split_alone(causal: bool) -> None:
    problem = replace(Problem.parse("1x1x96x64"), mask="causal" if causal else "full")
    values = oracle.make_inputs(problem)
    wrong, _ = on_cpu.emulated_verdict("tile48", problem, values)
    assert not wrong.passed
    assert "rows" in wrong.reason
    for variant in ({"SPLIT_FROM_TILE": 1}, {"TILE_Q": 32}):
        right, ran = on_cpu.emulated_verdict("tile48", problem, values, params=variant, races=True)
        assert right.passed, f"{variant}: {right.reason}"
        assert ran.report.findings == ()


@needs_compiler
def test_the_detector_names_what_is_wrong_with_48_rows() -> None:
    problem = Problem.parse("1x1x48x64")
    _, ran = on_cpu.emulated_verdict("tile48", problem, oracle.make_inputs(problem), races=True)
    found = " ".join(str(finding) for finding in ran.report.findings)
    assert "read of what was never written in shared memory" in found
    assert "race in shared memory" in found


def test_e4m3_rounds_as_its_type_does() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = every[np.isfinite(every)]
    more = np.random.default_rng(0).standard_normal(10_000).astype(np.float32) * 3
    for values in (every, more):
        limited = np.clip(values, -448, 448)
        wanted = limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(oracle.round_to_e4m3(values), wanted)


@needs_compiler
@pytest.mark.parametrize("name", ["fp8_simulated", "fp8"])
def test_fp8_is_judged_against_fp8_and_fails_against_fp16(name: str) -> None:
    values = oracle.make_inputs(SMALL)
    verdict, ran = on_cpu.emulated_verdict(name, SMALL, values)
    assert verdict.passed, verdict.reason
    strict = check.check(ran.out, ran.lse, *values, causal=False, dtype="float16")
    assert not strict.passed
    assert "rms error" in strict.reason or "max abs error" in strict.reason


@needs_compiler
def test_the_checker_rejects_a_wrong_scale_at_fp8_too() -> None:
    values = oracle.make_inputs(SMALL)
    _, ran = on_cpu.emulated_verdict("fp8", SMALL, values)
    off = (ran.out.astype(np.float32) * 1.1).astype(np.float16)
    assert not check.check(off, ran.lse, *values, causal=False, dtype="float16", precision="e4m3").passed


@needs_compiler
def test_the_sources_fp8_error_is_that_against_rounded_inputs() -> None:
    problem = Problem.parse("1x1x512x64")
    values = oracle.make_inputs(problem)
    _, ran = on_cpu.emulated_verdict("fp8_simulated", problem, values)
    rounded = tuple(oracle.round_to_e4m3(x.astype(np.float32)).astype(np.float16) for x in values)
    own, _ = oracle.attention(*rounded, causal=False)
    exact, _ = oracle.attention(*values, causal=False)
    against_rounded, against_exact = (float(np.abs(ran.out - wanted).max()) for wanted in (own, exact))
    assert against_rounded < 1e-3 < 10 * against_rounded < against_exact


# --- three passes -----------------------------------------------------------------------------------------------------


def _array(shape: tuple[int, ...], pointer: int, strides: tuple[int, ...] | None = None) -> DeviceArray:
    return DeviceArray(
        pointer=pointer,
        shape=shape,
        strides=strides or contiguous_strides(shape),
        dtype="float16",
        device=0,
        owner=None,
        library="other",
    )


def _arrays(problem: Problem, **strides: tuple[int, ...]) -> Mapping[str, DeviceArray]:
    q = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    kv = (problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    shapes = {"Q": q, "K": kv, "V": kv, "O": q}
    return {
        name: _array(shape, (index + 1) << 32, strides.get(name)) for index, (name, shape) in enumerate(shapes.items())
    }


def test_contiguous_heads_go_in_one_call_and_others_in_as_few_as_their_addresses_allow() -> None:
    problem = Problem.parse("3x4x128x64")
    (one,) = cublaslt.groups(problem, _arrays(problem), 0)
    assert (one.count, one.strides["Q"], one.strides["K"]) == (12, 128 * 64, 128 * 64)
    shared = Problem.parse("2x4x2x128x128x64")
    grouped = cublaslt.groups(shared, _arrays(shared), 0)
    assert [(g.first, g.count, g.strides["K"]) for g in grouped] == [(0, 2, 0), (2, 2, 0), (4, 2, 0), (6, 2, 0)]
    side_by_side = (128 * 4 * 64, 64, 4 * 64, 1)  # heads in a token
    by_batch = cublaslt.groups(problem, _arrays(problem, Q=side_by_side), 0)
    assert [g.count for g in by_batch] == [4, 4, 4]
    assert [g.count for g in cublaslt.groups(problem, _arrays(problem), 5)] == [5, 5, 2]
    assert [g.first for g in cublaslt.groups(problem, _arrays(problem), 1)] == list(range(12))


@pytest.mark.parametrize("name", ["cublaslt_unfused", "cublaslt_batched"])
def test_products_describe_the_tensors_as_they_lie(name: str) -> None:
    problem = Problem.parse("1x2x2x48x65x64")
    parameters = DEAD_ENDS[name].parameters(64)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 64)).astype(np.float32) for n in (48, 65, 65))
    arrays = _arrays(problem)
    heads = cublaslt.groups(problem, arrays, 0)[0]
    qk, pv = cublaslt.gemms(problem, arrays, heads, scale_log2=0.5, parameters=parameters)
    assert qk.d.dtype == ("float32" if parameters["SCORES_FP32"] else "float16")
    assert qk.d.pitch % cublaslt.PITCH == 0

    def multiply(gemm: cublaslt.Gemm, a: Any, b: Any, index: int) -> Any:
        def matrix(m: cublaslt.Matrix, flat: Any) -> Any:  # column-major
            start = index * m.stride
            strides = (flat.itemsize, m.pitch * flat.itemsize)
            return np.lib.stride_tricks.as_strided(flat[start:], (m.rows, m.columns), strides)

        left = matrix(gemm.a, a.ravel())
        return gemm.alpha * (left.T if gemm.transpose_a else left) @ matrix(gemm.b, b.ravel())

    for head in range(2):
        scores = multiply(qk, k, q, head)
        np.testing.assert_allclose(scores.T, 0.5 * q[head] @ k[head].T, rtol=1e-4, atol=1e-4)
        probs = np.zeros((2, 48, qk.d.pitch), dtype=np.float32)
        probs[head, :, :65] = scores.T
        np.testing.assert_allclose(multiply(pv, v, probs, head).T, scores.T @ v[head], rtol=1e-3, atol=1e-3)


def test_split_k_splits_the_second_product_alone() -> None:
    parameters = DEAD_ENDS["split_k"].parameters(64)
    arrays = _arrays(FIRST)
    qk, pv = cublaslt.gemms(FIRST, arrays, cublaslt.groups(FIRST, arrays, 1)[0], scale_log2=1.0, parameters=parameters)
    assert (qk.split_k, pv.split_k) == (1, parameters["SPLIT_K"])
    assert parameters["SPLIT_K"] > 1


# --- records and pages ------------------------------------------------------------------------------------------------

LATER = "20260202T030405Z-89abcde"


def _rows() -> list[Measurement]:
    """A later run of dead ends beside two rungs and a library; one is wrong."""
    rungs = [measurement(name, FIRST, run=LATER, seed=99) for name in ("00_naive", "05_wmma", "sdpa")]
    like = rungs[1]
    names = [name for stage in DEAD_ENDS.values() for name in (stage.id, *stage.variant_names) if name != "tile48"]
    dead = [
        measurement("05_wmma", FIRST, run=LATER, seed=seed).model_copy(update={"name": name})
        for seed, name in enumerate(names, start=1)
    ]
    assert like.verdict is not None
    refused = Verdict.model_validate(like.verdict.model_dump() | {"passed": False, "reason": "made up: NaN"})
    wrong = {"name": "tile48", "status": "wrong", "reason": "made up: NaN", "samples": (), "verdict": refused}
    return [*rungs, *dead, like.model_copy(update=wrong)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dead_ends") / "data"
    write_synthetic(folder, problems=[FIRST])
    lines = [schema.to_line(row) for row in _rows()]
    (folder / "nvidia-h200" / "runs" / f"{LATER}.jsonl").write_text("".join(lines), encoding="utf-8")
    store.write_checksums("nvidia-h200", folder)
    return folder


def test_a_run_of_dead_ends_leaves_the_ladder_alone(data: Path) -> None:
    shown = select.load("nvidia-h200", data)
    assert not store.verify("nvidia-h200", data)
    assert [row.name for row in shown.rows() if row.kind == "stage"] == list(STAGES)
    assert {row.run for row in shown.rows()} == {measurement("sdpa", FIRST).run}
    (against,) = contests.against_peers("nvidia-h200", data)
    assert against.run != LATER
    assert against.burst is not None
    assert against.burst.stage.name in STAGES


def test_a_run_of_the_ladder_may_hold_a_rung_that_was_retired(tmp_path: Path) -> None:
    """Its row stands beside the others, is never the best, and does not make the run one of dead ends."""
    (retired,) = (stage.id for stage in DEAD_ENDS.values() if stage.retired)
    row = measurement(retired, FIRST)
    (like,) = (one for one in row.samples if (one.regime, one.cache) == ("burst", "hot"))
    fastest = like.model_copy(update={"time_us": tuple(0.1 * time_us for time_us in like.time_us)})
    path = write_synthetic(tmp_path, problems=[FIRST])
    store.append(path, row.model_copy(update={"samples": (fastest,)}))
    shown = select.load("nvidia-h200", tmp_path)
    assert [one.name for one in shown.rows() if one.kind == "stage"] == [*STAGES, retired]
    best = select.fastest_stage(shown.rows())
    assert best is not None
    assert best.name in STAGES
    (against,) = contests.against_peers("nvidia-h200", tmp_path)
    assert against.burst is not None
    assert against.burst.stage.name == best.name
    assert select.off_ladder("nvidia-h200", tmp_path) == {}
    assert registry.best(FIRST, "sm_90a").id != retired
    out = pages.Output(root=tmp_path / "generated")
    pages.off_ladder_page(out, DEAD_ENDS[retired], {FIRST: shown.rows()})
    page = (out.root / "snippets" / "dead_ends" / f"{retired}.md").read_text(encoding="utf-8")
    assert f"**{retired}**" in page or f"**`{retired}`**" in page
    assert "| `12_persistent`" in page or "| 12_persistent" in page


def test_dead_ends_are_shown_with_what_was_measured_in_turn(data: Path) -> None:
    answer = select.off_ladder("nvidia-h200", data)
    assert list(answer) == [FIRST]
    names = [row.name for row in answer[FIRST]]
    assert names[:2] == ["00_naive", "05_wmma"]
    assert names[-1] == "sdpa"
    ids = [name for name in names if name in DEAD_ENDS]
    assert ids == list(DEAD_ENDS)
    assert names.index("wmma_no_smem[COLUMN_LANES=32]") == names.index("wmma_no_smem") + 1


@pytest.mark.parametrize("folder", ["checks", "random"])
def test_a_comparison_of_few_stages_does_not_stand_in_for_that_of_many(tmp_path: Path, folder: str) -> None:
    """Nor does one of dead ends alone."""
    path = tmp_path / "nvidia-h200" / folder
    path.mkdir(parents=True)
    row = measurement("00_naive", FIRST).model_dump(mode="json")
    header = {"format": 3} | {name: row[name] for name in ("run", "time", "gpu", "source", "software")}
    case = {"shape": "1x1x1x64", "dtype": "float16", "mask": "full", "layout": "contiguous"}
    runs = [f"2026010{day}T030405Z-0123abc" for day in (1, 2, 3)]
    of_runs = (("00_naive", "03_warp_rows"), ("03_warp_rows",), ("tile48[TILE_Q=32]",))
    for run, ids in zip(runs, of_runs, strict=True):
        line = case | {"ok": {stage: [0.0] * 6 for stage in ids}}  # errors, then limits
        text = "".join(json.dumps(one) + "\n" for one in (header, line))
        (path / f"{run}.jsonl").write_text(text, encoding="utf-8")
    assert next(iter(select.checks("nvidia-h200", tmp_path, folder))).stem == runs[0]  # type: ignore[arg-type]


@every_dead_end
def test_every_dead_end_has_a_page_with_every_section(stage: Stage) -> None:
    text = (SITE / "dead_ends" / f"{stage.id}.md").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == SECTIONS
    for section in ("title", "question", "built", "prediction", "result", "code"):
        assert f'--8<-- "dead_ends/{stage.id}.md:{section}"' in text


@pytest.mark.parametrize("stage", registry.OFF_LADDER.values(), ids=registry.OFF_LADDER)
def test_a_page_without_numbers_names_a_command_that_measures_its_stage(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = re.search(r"`flashlab (bench .+?)`", pages.measured_by(stage))
    assert command

    def estimate(problems: list[Problem], *, stages: list[str], **_: object) -> tuple[list[object], float]:
        assert stage.id in stages
        assert any(not stage.why_not(problem) for problem in problems)
        return [], 0.0

    monkeypatch.setattr(bench, "estimate", estimate)
    assert _answer(*command[1].split(), "--dry-run") == {"seconds": 0.0, "problems": []}


def test_no_page_is_without_a_dead_end() -> None:
    assert {path.stem for path in (SITE / "dead_ends").glob("*.md")} - {"index"} == set(DEAD_ENDS)


def test_every_dead_end_has_its_lesson_on_the_page_of_all() -> None:
    text = (SITE / "dead_ends" / "index.md").read_text(encoding="utf-8")
    lessons = re.findall(r"^\[(\w+)\]\(\1\.md\)\n:   .+ \*Instead:\* ", text, re.MULTILINE)
    assert sorted(lessons) == sorted(DEAD_ENDS)


@pytest.mark.parametrize("measured", [False, True])
def test_pages_say_what_is_on_record_and_what_is_not(data: Path, tmp_path: Path, measured: bool) -> None:
    answer = select.off_ladder("nvidia-h200", data) if measured else {}
    out = pages.Output(root=tmp_path)
    for stage in DEAD_ENDS.values():
        pages.off_ladder_page(out, stage, answer)
        text = (tmp_path / "snippets" / "dead_ends" / f"{stage.id}.md").read_text(encoding="utf-8")
        for section in ("title", "question", "built", "prediction", "result", "code"):
            assert text.count(f"[start:{section}]") == text.count(f"[end:{section}]") == 1
        assert stage.prediction in text
        nothing_yet = pages.measured_by(stage)
        assert "make report" not in nothing_yet
        assert (nothing_yet in text) == (not measured)
        assert (
            (f"### {FIRST.label}" in text) == (f"generated/data/nvidia-h200/runs/{LATER}.jsonl.gz" in text) == measured
        )
        assert all(f"`{name}`" in text for name in (stage.id, *stage.variant_names)), "branches in the machine code"
        assert ("**tile48: wrong.** made up: NaN" in text) == (measured and stage.id == "tile48")
    pages.dead_end_list(out, answer, {})
    listed = (tmp_path / "snippets" / "dead_ends.md").read_text(encoding="utf-8")
    assert all(f"({stage_id}.md)" in listed for stage_id in DEAD_ENDS)
    assert ("no time: wrong" in listed) == measured


# --- the command line -------------------------------------------------------------------------------------------------


def _answer(*arguments: str) -> Any:
    return json.loads(CliRunner().invoke(app.app, [*arguments, "--json"], catch_exceptions=False).stdout)


def test_dead_ends_are_listed_where_asked_for() -> None:
    assert [row["id"] for row in _answer("stages", "--dead-ends")] == list(DEAD_ENDS)
    assert not set(DEAD_ENDS) & {row["id"] for row in _answer("stages")}


def test_the_machine_code_of_a_dead_end_and_of_a_variant_is_told() -> None:
    answer = _answer("sass", "wmma_no_smem[COLUMN_LANES=32]")
    assert answer["shared_memory"] == 0
    assert answer["branches"]["predicated"] > 0
    assert answer["counts"]["local"] > 0
    assert {row["stage"] for row in _answer("compile", "branch_free", "--arch", "sm_90a")} == {"branch_free"}


def test_a_suite_of_dead_ends_can_be_foretold() -> None:
    options = ("--stages", "00_naive,tile48[SPLIT_FROM_TILE=1,TILE_Q=48]", "--peers", "none", "--no-ceilings")
    shape = ("--shape", FIRST_SHAPE, "--dtype", "float16", "--mask", "full", "--dry-run")
    (answer,) = _answer("bench", "--dead-ends", *options, *shape)["problems"]
    variants = sum(1 + len(stage.variants) for stage in DEAD_ENDS.values())
    assert answer["implementations"] == 2 + variants


@needs_compiler
def test_a_check_is_content_where_only_what_is_kept_wrong_is_wrong() -> None:
    arguments = ["--on", "cpu", "--length", "65x65", "--mask", "full", "--dtype", "float16"]
    ran = CliRunner().invoke(app.app, ["check", "tile48", "branch_free", *arguments])
    assert ran.exit_code == 0, ran.output
    assert "tile48, B2 H4/2 S65" in ran.output
    assert "wrong: NaN in output" in ran.output
