"""Stages for decoding: right and free of races at any split of the keys, launched in clusters, no rungs."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shared import a_variant_elsewhere, ends_of, needs_compiler, one_type_a_head_dim, part_of, parts_of, tiers
from synthetic import measurement, write_synthetic

import flashlab
from flashlab.build import compiler, sass
from flashlab.build.compiler import LaunchShape
from flashlab.core.errors import UnsupportedError
from flashlab.core.paths import KERNELS, SITE
from flashlab.core.problem import AS_IN_A_MODEL, Cache, Problem, suite
from flashlab.kernels import registry
from flashlab.kernels.registry import DEAD_ENDS, DECODE, STAGES, Stage
from flashlab.query import contests, select
from flashlab.record import store
from flashlab.run import choice, gpu, paged
from flashlab.run.arguments import SPLITS, grid_for, splits_for
from flashlab.show import pages, tables
from flashlab.verify import on_cpu

SPLIT = "d0_split_kv"
LONG = Problem.parse("64x32x8x1x8192x128")
SHAPE = LaunchShape(threads=128, smem_bytes=0, tile_q=16, split_keys=64)
every_stage = pytest.mark.parametrize("stage", DECODE.values(), ids=DECODE)
TAKEN = [
    stage
    for stage in DECODE.values()
    if not stage.by_name_only or stage.id in (paged._SHORT, paged._FEWER, paged.STAGE)
]
"""What calls take by themselves, of keys in a row or in pages."""


# --- the registry -----------------------------------------------------------------------------------------------------


def test_no_stage_for_decoding_is_a_rung() -> None:
    assert DECODE
    assert not DECODE.keys() & {*STAGES, *DEAD_ENDS, *registry.RUNGS}
    for problem in (LONG, *suite("first")):
        assert registry.best(problem, "sm_90a").id in STAGES
    ranked = choice.rank(LONG, "nvidia-h200", "sm_90a")
    assert ranked.choices[0].stage.id in DECODE  # by its records
    assert choice.rank(suite("first")[0], "nvidia-h200", "sm_90a").choices[0].stage.id in STAGES
    assert registry.resolve("d0") == SPLIT


@every_stage
def test_a_stage_for_decoding_is_whole(stage: Stage) -> None:
    assert registry.faults(stage) == ()
    assert registry.get(stage.id) is stage
    for variant in stage.variants:
        assert all(value in stage.params[name].choices for name, value in variant.items())
    text = stage.page.read_text(encoding="utf-8")
    sections = ("title", "question", "built", "prediction", "result", "code")
    assert all(f'--8<-- "{stage.folder}{stage.id}.md:{section}"' in text for section in sections)
    assert f"({stage.id}.md)" in (SITE / "decode" / "index.md").read_text(encoding="utf-8")


def test_every_file_of_the_folder_belongs_to_a_stage() -> None:
    assert {path.name for path in (KERNELS / "decode").glob("*.cu")} == {stage.source.name for stage in DECODE.values()}
    assert {path.stem for path in (SITE / "decode").glob("*.md")} - {"index"} == set(DECODE)


def test_many_query_rows_are_refused_with_what_takes_them() -> None:
    stage = registry.get(SPLIT)
    assert stage.why_not(Problem.parse("1x8x2x16x4096x128"), "sm_90a") is None
    refused = stage.why_not(Problem.parse("1x8x2x17x4096x128"), "sm_90a")
    assert refused is not None
    assert refused.startswith(f"Stage {SPLIT} takes at most 64 query rows a K/V head ")
    assert "got 68. Runnable: 00_naive, " in refused
    q = np.zeros((1, 1, 65, 64), np.float16)
    with pytest.raises(UnsupportedError, match="takes at most 64 query rows"):
        flashlab.emulate(q, q, q, stage=SPLIT)


@parts_of(TAKEN, DECODE.values())
def test_it_compiles_everywhere_without_spills(stage: Stage, whole: bool) -> None:
    """For Hopper every head dim under both masks, the types by turns; elsewhere every head dim once.

    In part, what a call takes by itself, for Hopper: the smallest head dim and the largest, in the other type and under
    the other mask.
    """
    every = compiler.jobs([stage])
    on_hopper = one_type_a_head_dim(job for job in every if job.arch == "sm_90a")
    work = (*on_hopper, *(job for job in a_variant_elsewhere(every) if job.arch != "sm_90a"))
    assert {(job.head_dim, job.arch) for job in work} == {(job.head_dim, job.arch) for job in every}
    if not whole:
        work = ends_of(part_of(work))
    else:
        work += tuple(replace(ends_of(on_hopper)[0], overrides=variant) for variant in stage.variants)
    for job, result in zip(work, compiler.compile_many(work), strict=True):
        assert not isinstance(result, Exception), job.label
        if not stage.may_spill(job.head_dim, job.arch):
            assert result.resources.spill_store_bytes == result.resources.stack_bytes == 0, job.label
        assert result.launch_shape is not None
        assert result.launch_shape.split_keys > 0


HINTED = [stage for stage in DECODE.values() if "cp_async_cg_16_hint" in stage.source.read_text(encoding="utf-8")]


@parts_of([stage for stage in HINTED if stage in TAKEN], HINTED)
def test_every_copy_with_a_hint_reads_uniform_registers_that_are_set(stage: Stage, whole: bool) -> None:
    """ptxas 13.0 makes copies by registers that nothing sets: UR0 and UR1 in d11_short_ends at a head dim of 256,
    causal, and off Hopper in d10_evict_first. A GPU stops at them: CUDA_ERROR_ILLEGAL_INSTRUCTION."""
    work = compiler.jobs([stage]) if whole else part_of(compiler.jobs([stage]))[-1:]
    for job, result in zip(work, compiler.compile_many(work), strict=True):
        assert not isinstance(result, Exception), job.label
        code = sass.disassemble(result.code)
        copies = [one.operands for one in code if one.opcode.startswith("LDGSTS")]
        assert copies, job.label
        read = {int(number) for operands in copies for number in re.findall(r"UR(\d+)", operands)}
        targets = [re.match(r"(?:!?U?P[T\d],)*UR(\d+)", one.operands) for one in code if one.operands not in copies]
        # An instruction on 64 bits sets the next register too.
        set_somewhere = {int(match[1]) + more for match in targets if match for more in (0, 1)}
        assert read <= set_somewhere, f"{job.label}: {sorted(read - set_somewhere)}"


# --- how many splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "sms", "most", "splits"),
    [
        ("1x32x8x1x8192x128", 132, 16, 16),
        ("1x32x8x1x8192x128", 132, 8, 8),
        ("4x32x8x1x8192x128", 132, 16, 4),
        ("16x32x8x1x8192x128", 132, 16, 1),
        ("64x32x8x1x8192x128", 132, 16, 1),
        ("256x32x8x1x8192x128", 132, 16, 1),
        ("1x32x8x1x300x128", 132, 16, 4),
        ("1x32x8x1x63x128", 132, 16, 1),
        ("1x32x8x1x8192x128", 132, 0, 1),
    ],
)
def test_the_fewest_splits_that_fill_the_gpu(shape: str, sms: int, most: int, splits: int) -> None:
    assert splits_for(Problem.parse(shape), SHAPE, sms, most) == splits


def test_a_grid_has_the_packed_rows_of_a_kv_head_in_whole_clusters() -> None:
    def grid(shape: str, splits: int) -> tuple[int, int, int]:
        return grid_for(Problem.parse(shape), LaunchShape(128, 0, 16, cluster=splits, split_keys=64))

    assert grid("64x32x8x1x8192x128", 1) == (1, 8, 64)
    assert grid("1x32x8x1x8192x128", 16) == (16, 8, 1)
    assert grid("2x32x8x5x100x128", 4) == (8, 8, 2)
    assert all(grid("1x8x8x64x8192x128", splits)[0] == 4 * splits for splits in SPLITS)


def test_a_launch_in_clusters_asks_the_driver_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    asked: list[Any] = []
    for name in ("cuLaunchKernel", "cuLaunchKernelEx"):

        def launch(*args: Any, name: str = name) -> tuple[Any]:
            asked.append((name, args))
            return (driver.CUresult.CUDA_SUCCESS,)

        monkeypatch.setattr(driver, name, launch)
    monkeypatch.setattr(gpu, "context", lambda _: nullcontext())
    allowed: list[Any] = []
    monkeypatch.setattr(gpu, "call", lambda *args: allowed.append(args[0]))
    function: Any = SimpleNamespace(device=0, handle=driver.CUfunction(0), cubin=SimpleNamespace(name=SPLIT))
    for cluster in (0, 8, 16):
        how: dict[str, Any] = {"grid": (32, 8, 2), "block": (128, 1, 1), "smem_bytes": 5, "params": (), "stream": 7}
        gpu.Launch(function, **how, cluster=cluster)()
    capturing = False
    monkeypatch.setattr(gpu, "is_capturing", lambda stream: stream == how["stream"] and capturing)
    launch_early = gpu.Launch(function, **how, cluster=8, early=True)
    launch_early()
    capturing = True  # others stand before and after it in a graph
    launch_early()
    gpu.Launch(function, **how, early=True)()
    (plain, _), (portable, _), (name, (config, *_)), (_, (early, *_)), (_, (captured, *_)), (alone, _) = asked
    assert ([one.numAttrs for one in (config, early, captured)], alone) == ([1, 2, 1], "cuLaunchKernel")
    assert (plain, portable, name) == ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernelEx")
    assert allowed == ["cuFuncSetAttribute"]  # of the clusters that not every GPU takes
    size = config.attrs[0].value.clusterDim
    assert (config.numAttrs, size.x, size.y, size.z) == (1, 16, 1, 1)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (32, 8, 2, 128)
    assert (config.sharedMemBytes, int(config.hStream)) == (5, 7)
    assert early.numAttrs == 2
    assert early.attrs[1].value.programmaticStreamSerializationAllowed == 1


# --- on the CPU -------------------------------------------------------------------------------------------------------


def _expected(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64; rows without keys are 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = scale * np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k)
    q_len, kv_len = scores.shape[2:]
    if causal:
        scores = np.where(np.arange(kv_len) - np.arange(q_len)[:, None] <= kv_len - q_len, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total[..., None] > 0, np.einsum("bhqk,bhkd->bhqd", weights, v) / total[..., None], 0.0)
        return out, np.where(total > 0, np.log(total) + top[..., 0], -np.inf)


@needs_compiler
@tiers
@pytest.mark.parametrize(
    "splits",
    [pytest.param(one, marks=() if one in (SPLITS[0], SPLITS[-1]) else pytest.mark.exhaustive) for one in SPLITS],
)
def test_it_is_right_and_without_races_at_any_split(splits: int, whole: bool) -> None:
    """In part, at the smallest head dim and the largest."""
    dims = registry.get(SPLIT).head_dims
    dims = dims if whole else (dims[0], dims[-1])
    checked = on_cpu.check_on_cpu(
        [f"{SPLIT}[SPLITS={splits}]"],
        lengths=[(1, 1), (1, 130), (2, 17), (1, 1000)],  # far fewer keys than blocks, and a tail
        layouts=("contiguous",),
        masks=("causal",),
        dtypes=("bfloat16",),
        head_dims=dims,
        races=True,
        timeout_s=600,
    )
    assert [f"{row.problem.label}: {row.reason}" for row in checked.failures] == []
    assert len(checked.rows) == 4 * len(dims)


@needs_compiler
@tiers
@pytest.mark.parametrize("schedule", ["descending", "seeded:3"])
def test_it_is_right_in_any_layout_and_order(schedule: str, whole: bool) -> None:
    """In part, at one head dim for each order."""
    dims = registry.get(SPLIT).head_dims
    checked = on_cpu.check_on_cpu(
        [SPLIT],
        lengths=[(3, 203), (5, 70)],
        head_dims=dims if whole else dims[:1] if schedule == "descending" else dims[1:2],
        dtypes=registry.get(SPLIT).dtypes[: None if whole else 1],
        schedules=(schedule,),
        races=True,
        timeout_s=600,
    )
    assert [f"{row.problem.label}, {row.layout}: {row.reason}" for row in checked.failures] == []


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len"),
    [
        (8, 1, 1, 300),  # half of a tile's rows
        (32, 2, 1, 77),  # all of them
        (3, 1, 11, 200),  # 33 rows: three tiles, of which one has a row
        (1, 1, 64, 40),  # rows that see no key
        (12, 4, 7, 3),
    ],
)
@pytest.mark.parametrize("params", [{}, {"WARPS": 8, "MIN_BLOCKS": 1, "SPLITS": 4}, {"STEP_KEYS": 64, "WARPS": 2}])
def test_groups_of_any_size_are_packed(
    heads: int, kv_heads: int, q_len: int, kv_len: int, params: dict[str, int]
) -> None:
    rng = np.random.default_rng(heads + q_len)
    q, k, v = (
        rng.standard_normal((2, h, n, 64)).astype(np.float16)
        for h, n in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    for causal in (False, True):
        ran = flashlab.emulate(q, k, v, causal=causal, stage=SPLIT, params=params, races=True)
        assert ran.report.findings == ()
        out, lse = _expected(q, k, v, scale=64**-0.5, causal=causal)
        assert np.abs(ran.out - out).max() < 3e-3
        assert np.array_equal(np.isneginf(ran.lse), np.isneginf(lse))
        seen = np.isfinite(lse)
        assert np.abs(ran.lse[seen] - lse[seen]).max() < 1e-3
        assert (ran.out[~seen] == 0).all()


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-4, 4.0])
@pytest.mark.parametrize("splits", [1, 8])
def test_any_scale_and_magnitude(scale: float, splits: int) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, h, n, 128)).astype(np.float16) for h, n in ((4, 1), (1, 333), (1, 333)))
    q, k = q * np.float16(8), k * np.float16(8)  # scores up to some thousands: one key takes nearly all
    ran = flashlab.emulate(q, k, v, scale=scale, stage=SPLIT, params={"SPLITS": splits})
    out, lse = _expected(q, k, v, scale=scale, causal=False)
    assert np.abs(ran.out - out).max() < 4e-3
    assert np.allclose(ran.lse, lse, rtol=1e-5, atol=1e-3)
    assert all(math.isfinite(x) for x in ran.lse.ravel())


@needs_compiler
def test_magnitudes_up_to_the_limit_of_fp16() -> None:
    q = np.full((1, 2, 1, 64), 60000.0, np.float16)
    k = np.full((1, 1, 150, 64), -60000.0, np.float16)
    k[0, 0, 149] = 60000.0  # the very last key, in a split of its own, outweighs all
    v = np.broadcast_to(np.arange(150, dtype=np.float16)[:, None], (1, 1, 150, 64)).copy()
    ran = flashlab.emulate(q, k, v, stage=SPLIT, params={"SPLITS": 4})
    assert (ran.out == 149).all()
    assert np.isfinite(ran.lse).all()


def _awaited(source: Path | None) -> Any:
    """The report on a kernel, in the order of warps that shows what is missing."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, h, n, 64)).astype(np.float16) for h, n in ((4, 1), (1, 1203), (1, 1203)))
    how: Any = {"params": {"SPLITS": 2}, "source": source, "races": True, "schedule": "seeded:1"}
    return flashlab.emulate(q, k, v, stage=SPLIT, **how).report


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  ptx::cluster_arrive();\n", "  ptx::cluster_arrive_relaxed();\n"),  # what was sent is not released
        ("    __syncwarp();  ", "    //"),  # the ring is filled while other lanes read it
        ("  __syncthreads();                 // all warps are done", "  //"),  # parts overwrite a ring in use
        ("  __syncthreads();       // all warps' partial results", "  //"),
        (
            "    ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this",
            "    ptx::cp_async_wait_group<PIPELINE_STAGES - 1>();   // this",
        ),
        ("exists ? sizeof(Chunk) : 0);", "sizeof(Chunk));"),  # keys past the last are read
    ],
)
def test_what_it_waits_for_is_needed(tmp_path: Path, old: str, new: str) -> None:
    text = registry.get(SPLIT).source.read_text(encoding="utf-8")
    assert text.count(old) == 1
    edited = tmp_path / "edited.cu"
    edited.write_text(text.replace(old, new), encoding="utf-8")
    assert _awaited(edited).findings


@needs_compiler
def test_nothing_is_found_where_it_waits_for_all_of_that() -> None:
    assert _awaited(None).findings == ()


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_run_of_it_is_no_run_of_the_ladder(tmp_path: Path) -> None:
    write_synthetic(tmp_path, problems=suite("first"))
    shown = select.load("nvidia-h200", tmp_path)
    path = store.files(tmp_path / "nvidia-h200" / "runs")[-1]
    run = path.stem.replace(path.stem[:8], "20991231")
    rows = [measurement(name, LONG, run=run) for name in ("08_swizzle", "sdpa")]
    ours = measurement("08_swizzle", LONG, run=run).model_copy(update={"name": SPLIT})
    for row in (*rows, ours):
        store.append(path.with_name(f"{run}.jsonl"), row)
    again = select.load("nvidia-h200", tmp_path)
    assert again.problems == shown.problems
    assert all(one.problem != LONG for one in contests.against_peers("nvidia-h200", tmp_path))
    assert select.off_ladder("nvidia-h200", tmp_path) == {}
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE)
    assert [row.name for row in found[LONG]] == ["08_swizzle", SPLIT, "sdpa"]
    pages.off_ladder_page(pages.Output(root=tmp_path), replace(DECODE[SPLIT], variants=()), found)
    page = (tmp_path / "snippets" / "decode" / f"{SPLIT}.md").read_text(encoding="utf-8")
    assert "TB/s of Q, K, V and O" in page
    assert f"**{SPLIT}**" in page.replace("`", "")


def test_the_session_with_the_last_stage_is_shown_and_a_stages_page_has_its_variants(tmp_path: Path) -> None:
    problem = Problem.parse("4x32x8x1x8192x128")
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    *_, chosen = (name for name, stage in DECODE.items() if not stage.by_name_only)
    sessions = {
        "20260102T030405Z-0123abc": (SPLIT, f"{SPLIT}[SPLITS=4]", "sdpa"),
        "20260103T030405Z-4567def": (*set(DECODE) - {chosen}, "sdpa"),
        "20260104T030405Z-89abcde": (chosen, "sdpa"),
        "20260105T030405Z-0246ace": (SPLIT, "sdpa"),
    }
    for run, timed in sessions.items():
        for name in timed:
            row = measurement("08_swizzle" if name[0] == "d" else name, problem, run=run)
            source = row.source.model_copy(update={"commit": run[-7:] + row.source.commit[7:]})
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name, "source": source}))
    store.write_checksums("nvidia-h200", tmp_path)
    old, _, last, _ = sessions
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)
    assert {row.run for row in found[problem]} == {last}
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.of_stage(DECODE[SPLIT]))
    assert {row.run for row in found[problem]} == {old}


def test_a_stages_page_takes_a_run_with_its_tunables_of_today(tmp_path: Path) -> None:
    problem, stage = Problem.parse("4x32x8x1x8192x128"), DECODE[SPLIT]
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    today, other = stage.parameters(128), stage.parameters(128, {"SPLITS": 4})
    runs = {
        "20260102T030405Z-0123abc": {SPLIT: today},
        # A default and a variant, when the default was another.
        "20260103T030405Z-4567def": {SPLIT: other, stage.variant_names[0]: other},
    }
    for run, timed in runs.items():
        for name, parameters in timed.items():
            row = measurement("08_swizzle", problem, run=run)
            assert row.cubin is not None
            cubin = row.cubin.model_copy(update={"parameters": parameters})
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name, "cubin": cubin}))
    # The latter also has a variant that crashed, whose record does not say with which tunables.
    crashed = {"name": stage.variant_names[1], "cubin": None, "status": "crashed", "reason": "made up", "samples": ()}
    store.append(folder / f"{run}.jsonl", measurement("08_swizzle", problem, run=run).model_copy(update=crashed))
    store.write_checksums("nvidia-h200", tmp_path)
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.of_stage(stage))
    assert {row.run for row in found[problem]} == {next(iter(runs))}


def test_a_page_shows_the_gpu_that_measured_its_stage_where_the_main_one_did_not(tmp_path: Path) -> None:
    problem, last = Problem.parse("4x32x8x1x8192x128"), replace(DECODE["d14_early_pages"], variants=())
    run = "20260102T030405Z-0123abc"
    for slug, name in (("nvidia-h200", SPLIT), ("nvidia-h100", last.id)):
        path = tmp_path / slug / "runs" / f"{run}.jsonl"
        path.parent.mkdir(parents=True)
        store.append(path, measurement("08_swizzle", Problem.parse("16x16x2048x64"), run=run))
        store.append(path, measurement("08_swizzle", problem, run=run).model_copy(update={"name": name}))
        store.write_checksums(slug, tmp_path)
    main, other = (select.load(slug, tmp_path) for slug in ("nvidia-h200", "nvidia-h100"))
    for others, said in (
        ([(other.gpu, "NVIDIA H100")], "numbers are for the NVIDIA H100"),
        ([], "Nothing has been measured"),
    ):
        out = pages.Output(root=tmp_path / str(len(others)))
        pages._off_ladder(out, last, others, main, tmp_path)
        page = (out.root / "snippets" / "decode" / f"{last.id}.md").read_text(encoding="utf-8")
        assert said in page
        assert (f"**{last.id}**" in page.replace("`", "")) == bool(others)


@pytest.mark.parametrize("cache", AS_IN_A_MODEL)
def test_the_page_for_decoding_shows_times_as_in_a_model_first(tmp_path: Path, cache: Cache) -> None:
    problem = Problem.parse("4x32x8x1x8192x128")
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    run = "20260102T030405Z-0123abc"
    # On the same keys the first is the fastest, as a model has them the second.
    for name, factor in (("d0_split_kv", 9.0), ("d2_early_launch", 2.0), ("sdpa", 3.0)):
        row = measurement("08_swizzle" if name[0] == "d" else name, problem, run=run)
        hot, turned = (
            row.samples[0].model_copy(update={"cache": state, "time_us": (time_us,) * len(row.samples[0].time_us)})
            for state, time_us in (("hot", 40.0 - factor), (cache, 40.0 + factor))
        )
        store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name, "samples": (hot, turned)}))
    store.write_checksums("nvidia-h200", tmp_path)
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)
    pages.decode_page(pages.Output(root=tmp_path), found)
    text = (tmp_path / "snippets" / "decode.md").read_text(encoding="utf-8")
    pages.decode_page(other := pages.Output(root=tmp_path / "of a GPU without"), {})
    nothing = (other.root / "snippets" / "decode.md").read_text(encoding="utf-8")
    assert "for this GPU yet: `flashlab bench --suite decode` measures it" in nothing, "not that data/ holds none"
    ratio = tables.number(43 / 42)
    assert f"faster than the fastest library at 1 of 1 problems: ratios lie between ×{ratio} " in text
    assert f" | ×{ratio} | 42.0 | 43.0 | `d2_early_launch` | `sdpa` |" in text, "on a phone names scroll, not times"
    assert "| calls |" not in text, "the caption says it of all rows"
    assert select.STATES["burst", cache] in text
    assert re.search(rf"\| ×{tables.number(37 / 38)} \|$", text, re.MULTILINE)


def test_rows_for_decoding_say_which_calls_they_are_of(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    run = "20260102T030405Z-0123abc"
    for batch, caches in ((1, ("hot", "rotating", "step")), (4, ("hot", "rotating")), (16, ("hot",))):
        for name in ("d0_split_kv", "sdpa"):
            row = measurement(
                "08_swizzle" if name[0] == "d" else name, Problem.parse(f"{batch}x32x8x1x8192x128"), run=run
            )
            samples = tuple(row.samples[0].model_copy(update={"cache": cache}) for cache in caches)
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name, "samples": samples}))
    store.write_checksums("nvidia-h200", tmp_path)
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)
    pages.decode_page(pages.Output(root=tmp_path), found)
    text = (tmp_path / "snippets" / "decode.md").read_text(encoding="utf-8")
    for batch, calls in ((1, "in a step"), (4, "other K, V"), (16, "same K, V")):
        assert f"| B{batch} H32/8 Sk8192 D128 fp16 | {calls} |" in text
    assert "burst, in a step" not in text, "the caption is of every row"


def test_the_table_of_steps_is_of_each_batchs_newest_run_beside_libraries_on_the_first_gpu_that_has_some(
    tmp_path: Path,
) -> None:
    assert "`flashlab bench --suite decode` on a machine with" in pages.steps_table((), tmp_path)
    for slug, caches in (("nvidia-h200", ("rotating",)), ("nvidia-h100", ("rotating", "step"))):
        folder = tmp_path / slug / "runs"
        folder.mkdir(parents=True)
        for hour, factor, timed in (
            (3, 2.0, ((1, "d0_split_kv"), (1, "sdpa"), (4, "d0_split_kv"))),
            (4, 1.0, ((1, "d0_split_kv"), (1, "sdpa"))),
            (5, 7.0, ((1, "d0_split_kv"),)),  # without a library beside it
        ):
            run = f"20260102T0{hour}0405Z-0123abc"
            for batch, name in timed:
                row = measurement("sdpa", Problem.parse(f"{batch}x32x8x1x8192x128"), run=run, slug=slug)
                times = (factor * batch * (10.0 if cache == "step" else 30.0) for cache in caches)
                samples = [
                    row.samples[0].model_copy(update={"cache": cache, "time_us": (us,) * len(row.samples[0].time_us)})
                    for cache, us in zip(caches, times, strict=True)
                ]
                named = {"name": name, "kind": "stage" if name[0] == "d" else "peer", "samples": tuple(samples)}
                store.append(folder / f"{run}.jsonl", row.model_copy(update=named))
        store.write_checksums(slug, tmp_path)
    everything = tuple(SimpleNamespace(gpu=slug) for slug in ("nvidia-h200", "nvidia-h100"))
    text = pages.steps_table(everything, tmp_path)  # type: ignore[arg-type]
    assert "B1 back to back, µs | B1 in a step, µs | B4 back to back, µs | B4 in a step, µs |" in text
    assert "| `d0_split_kv` | 30.0 | 10.0 | 240 | 80.0 |" in text
    assert "| `sdpa` | 30.0 | 10.0 | – | – |" in text


def test_a_sessions_rows_come_from_the_run_that_tried_most_of_what_is_shown(tmp_path: Path) -> None:
    problem = Problem.parse("4x32x8x1x8192x128")
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    runs = ("20260102T030405Z-0123abc", "20260102T040405Z-0123abc")
    for run, timed in zip(
        runs,
        (("d0_split_kv", "d2_early_launch", "sdpa"), ("d2_early_launch", "d2_early_launch[SPLITS=4]")),
        strict=True,
    ):
        for name in timed:
            row = measurement("08_swizzle" if name[0] == "d" else name, problem, run=run)
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name}))
    store.write_checksums("nvidia-h200", tmp_path)
    found = {row.name: row.run for row in select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)[problem]}
    assert found["d2_early_launch"] == runs[0], "the ratio to the library is of one run"
    assert found["d2_early_launch[SPLITS=4]"] == runs[1]


def test_a_session_of_a_stage_that_runs_only_where_named_hides_none_of_the_last_that_is_chosen(tmp_path: Path) -> None:
    problem = Problem.parse("2x32x8x1x8192x128")
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    runs = ("20260102T030405Z-0123abc", "20260103T040405Z-0456def")
    assert DECODE["d22_gap_prefetch"].by_name_only
    for run, timed in zip(runs, (("d19_batched_polls", "sdpa"), ("d22_gap_prefetch", "flashinfer")), strict=True):
        for name in timed:
            row = measurement("08_swizzle" if name[0] == "d" else name, problem, run=run)
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name}))
    store.write_checksums("nvidia-h200", tmp_path)
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)
    assert [row.name for row in found[problem]] == ["d19_batched_polls", "sdpa"]


def test_a_page_shows_libraries_and_variants_of_one_session(tmp_path: Path) -> None:
    problem = Problem.parse("4x32x8x1x8192x128")
    folder = tmp_path / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    runs = ("20260102T030405Z-0123abc", "20260102T040405Z-0123abc")
    for run, timed in zip(
        runs, (("08_swizzle", "d0_split_kv", "sdpa"), ("d0_split_kv", "d0_split_kv[SPLITS=4]")), strict=True
    ):
        for name in timed:
            row = measurement("08_swizzle" if name[0] == "d" else name, problem, run=run)
            store.append(folder / f"{run}.jsonl", row.model_copy(update={"name": name}))
    store.write_checksums("nvidia-h200", tmp_path)
    found = select.off_ladder("nvidia-h200", tmp_path, DECODE, select.DECODING)
    assert [(row.name, row.run) for row in found[problem]] == [
        *(("08_swizzle", runs[0]), ("d0_split_kv", runs[0]), ("d0_split_kv[SPLITS=4]", runs[1]), ("sdpa", runs[0])),
    ]
    pages.decode_page(pages.Output(root=tmp_path), found)
    text = (tmp_path / "snippets" / "decode.md").read_text(encoding="utf-8")
    (ours, library) = (row.samples_of() for row in found[problem] if row.name in ("d0_split_kv", "sdpa"))
    assert ours is not None
    assert library is not None
    ratio = tables.number(library.median_us / ours.median_us)
    assert re.search(rf"\| B4 H32/8 Sk8192 D128 fp16 \| ×{ratio} \| \S+ \| \S+ \| `d0_split_kv` \|", text)
    pages.decode_page(pages.Output(root=tmp_path), {problem: [row for row in found[problem] if row.name != "sdpa"]})
    assert "Not on record" in (tmp_path / "snippets" / "decode.md").read_text(encoding="utf-8")


def test_a_page_begins_with_the_gain_over_the_parent_where_a_number_was_predicted() -> None:
    """In the state of the prediction, as on the pages of rungs."""
    stage, problem = DECODE["d16_part_groups"], Problem.parse("16x32x8x1x8192x128")
    expected = replace(stage.expected[0], shape="16x32x8x1x8192x128", cache="step")
    stage = replace(stage, expected=(expected, replace(expected, shape="4x32x8x1x8192x128")))
    rows = []
    for name, hot_us, step_us in ((stage.id, 50.0, 20.0), (stage.parent or "", 40.0, 30.0)):
        row = measurement("08_swizzle", problem)
        taken = [row.samples[0].model_copy(update={"time_us": (hot_us,)})]
        taken.append(row.samples[0].model_copy(update={"cache": "step", "time_us": (step_us,)}))
        rows.append(row.model_copy(update={"name": name, "samples": tuple(taken)}))
    said = f"Over `{stage.parent}`: **×1.50** at B16 H32/8 Sq1 Sk8192 D128 in a step (20.0 µs)."
    assert tables.off_ladder_gains(stage, {problem: rows}) == said
    assert tables.off_ladder_gains(stage, {problem: rows[:1]}) == "", "nothing to compare with"


@needs_compiler
def test_a_page_begins_with_predicted_problems_then_those_of_the_suite(tmp_path: Path) -> None:
    """Whatever other head dims were measured; all but the first four are folded, and no headings."""
    shapes = ("1x32x8x1x8192x64", "1x32x8x1x8192x96", "2x32x8x1x8192x96", "4x32x8x1x8192x128", "1x32x8x1x8192x128")
    row = measurement("08_swizzle", Problem.parse(shapes[0])).model_copy(update={"name": "d0_split_kv"})
    measured = {Problem.parse(shape): (row, row.model_copy(update={"name": "08_swizzle"})) for shape in shapes}
    expected = replace(DECODE["d11_short_ends"].expected[0], shape=shapes[3], words="faster")
    stage = replace(DECODE["d0_split_kv"], variants=(), prediction="faster", expected=(expected,))
    pages.off_ladder_page(pages.Output(root=tmp_path), stage, measured)
    text = (tmp_path / "snippets" / "decode" / "d0_split_kv.md").read_text(encoding="utf-8")
    shown, _, folded = text.partition("<summary>1 more problem</summary>")
    titles = re.findall(r"^### (B\d+) .* (D\d+) full float16$", shown, re.MULTILINE)
    assert titles == [("B4", "D128"), ("B1", "D128"), ("B1", "D64"), ("B1", "D96")]
    assert "**B2 H32/8 Sq1 Sk8192 D96 full float16**" in folded
    assert "### B" not in folded
    assert text.index("Over `08_swizzle`: **×") < text.index("### B4")
