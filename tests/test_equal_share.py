"""Equal shares, d3 to d5: right and free of races, the same bits each time, counters back at 0."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shared import needs_compiler, tiers

import flashlab
from flashlab.build.compiler import LaunchShape, launch_shape_fault
from flashlab.core.errors import EmulationError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.run import arguments, emulator, gpu, recipes
from flashlab.run import attention as attention_module  # type: ignore[attr-defined]
from flashlab.run.arguments import MAX_SHARES, grid_for, resident_blocks, workspace
from flashlab.run.lru import LruCache
from flashlab.verify import on_cpu
from flashlab.verify.verdict import check

STAGE = "d3_equal_share"
READY = "d5_ready_parts"
WITH_COMBINERS = [
    "d18_combiner_blocks",
    "d19_batched_polls",
    "d20_paged_combiners",
    "d21_parallel_lookup",
    "d22_gap_prefetch",
    "d23_paged_gap_prefetch",
]
SHAPE = LaunchShape(128, 0, 16, persistent=True, cluster=1, split_keys=64, sm_blocks=2, tile_blocks=16, part_words=2080)
H200 = 132


# --- the launch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "resident", "blocks"),
    [
        ("1x32x8x1x8192x128", 264, 128),  # 16 for each of 8 tiles
        ("4x32x8x1x8192x128", 264, 264),
        ("64x32x8x1x8192x128", 264, 264),
        ("1x32x8x1x8192x128", 100, 100),
        ("1x4x1x1x63x128", 264, 1),  # no block without keys
        ("1x4x1x1x300x128", 264, 4),
        ("2x32x8x5x300x128", 264, 128),  # two tiles of rows for each of 16 K/V heads
        ("64x32x8x1x8192x128", 10 * MAX_SHARES, MAX_SHARES),
    ],
)
def test_as_many_blocks_as_are_resident_and_have_keys(shape: str, resident: int, blocks: int) -> None:
    assert grid_for(Problem.parse(shape), SHAPE, resident) == (blocks, 1, 1)


@pytest.mark.parametrize(
    ("shape", "resident", "blocks"),
    [
        ("4x32x8x1x8192x128", 264, 256),  # 8 for each of 32 tiles
        ("16x32x8x1x8192x128", 264, 256),  # 2 for each of 128
        ("64x32x8x1x8192x128", 264, 256),  # each has 2 of 512
        ("1x32x8x1x8192x128", 264, 128),
        ("6x32x8x1x8192x128", 264, 264),  # 5 for each of 48 would leave a tenth of the places empty
        ("37x32x8x1x8192x128", 264, 264),  # 296 tiles: two for each would leave half of them
        ("1x4x1x1x63x128", 264, 1),
    ],
)
def test_whole_tiles_are_rather_shared_than_parts_of_them(shape: str, resident: int, blocks: int) -> None:
    whole = dataclasses.replace(SHAPE, whole_tiles=1)
    assert grid_for(Problem.parse(shape), whole, resident) == (blocks, 1, 1)


def test_an_sm_gets_as_many_blocks_as_the_kernel_says_and_has_room_for() -> None:
    assert [resident_blocks(SHAPE, H200, room) for room in (1, 2, 5)] == [132, 264, 264]
    assert resident_blocks(LaunchShape(128, 0, 16, persistent=True), H200, 3) == 396
    assert workspace(SHAPE, (264, 1, 1)) == (MAX_SHARES + 2 * 264 * 2080, MAX_SHARES)
    assert workspace(LaunchShape(128, 0, 16, persistent=True), (264, 1, 1)) == (2, 2)
    size = MAX_SHARES + 2 * 264 * 2080
    assert workspace(dataclasses.replace(SHAPE, zero_parts=1), (264, 1, 1)) == (size, size)


def test_the_header_has_the_same_limit_and_the_kernel_a_sound_launch_shape() -> None:
    header = (registry.get(STAGE).source.parents[1] / "common" / "shares.cuh").read_text(encoding="utf-8")
    assert f"constexpr int MAX_SHARES = {MAX_SHARES};" in header
    stage = registry.get(STAGE)
    assert launch_shape_fault(stage, SHAPE) is None
    odd = LaunchShape(128, 0, 16, cluster=1, split_keys=64, sm_blocks=2, tile_blocks=16, part_words=2080)
    assert "of a persistent kernel that splits keys" in (launch_shape_fault(stage, odd) or "")


_CAPTURED = 100
"""From here on streams that are being captured into a graph."""


def test_a_streams_memory_grows_and_its_counters_alone_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    of_graphs: list[int] = []

    def work_memory(like: Any, device: int, stream: int, words: tuple[int, int]) -> tuple[Any, int]:
        made.append(words)
        return SimpleNamespace(), len(made)

    monkeypatch.setattr(recipes, "_works", LruCache(8))
    monkeypatch.setattr(recipes, "work_memory", work_memory)
    monkeypatch.setattr(gpu, "stream_id", lambda stream: stream if stream < _CAPTURED else None)
    monkeypatch.setattr(gpu, "graph_id", lambda stream: (3, stream))
    monkeypatch.setattr(gpu, "zeroed_of_graph", lambda device, size, stream: of_graphs.append(size) or -len(of_graphs))
    small, large = workspace(SHAPE, (4, 1, 1)), workspace(SHAPE, (264, 1, 1))
    asked = [(7, (2, 2)), (7, large), (7, small), (7, (2, 2)), (8, small), (7, large)]
    got = [recipes.streams_work(None, 0, stream, words)[1] for stream, words in asked]
    assert got == [1, 2, 2, 1, 3, 2]  # what is all 0 is never what anything is left in
    captured = [(_CAPTURED, small), (_CAPTURED, small), (_CAPTURED, (2, 2)), (_CAPTURED + 1, small), (_CAPTURED, large)]
    assert [recipes.streams_work(None, 0, stream, words)[1] for stream, words in captured] == [-1, -1, -2, -3, -4]
    assert made == [(2, 2), large, small]
    assert of_graphs == [4 * small[0], 8, 4 * small[0], 4 * large[0]]


def test_a_streams_memory_lives_until_it_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has found it, and another, which needs more on the same stream, gives it up before the first
    launches."""
    monkeypatch.setattr(recipes, "_works", LruCache(8))
    monkeypatch.setattr(recipes, "work_memory", lambda *_: (threading.Event(), 1))
    monkeypatch.setattr(gpu, "stream_id", lambda stream: stream)
    held, _ = recipes.streams_work(None, 0, 7, workspace(SHAPE, (4, 1, 1)))
    alive = weakref.ref(held)
    recipes.streams_work(None, 0, 7, workspace(SHAPE, (264, 1, 1)))
    assert alive() is not None
    del held
    assert alive() is None


# --- on the CPU -------------------------------------------------------------------------------------------------------


def _random(heads: int, kv_heads: int, q_len: int, kv_len: int, batch: int = 1, head_dim: int = 64) -> tuple[Any, ...]:
    rng = np.random.default_rng(heads + kv_len)
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return tuple(rng.standard_normal((batch, h, n, head_dim)).astype(np.float16) for h, n in shapes)


def _blocks(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Launch that many, where there are keys for them."""
    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", blocks)


@needs_compiler
@tiers
@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        (STAGE, "ascending"),
        pytest.param(STAGE, "seeded:3", marks=pytest.mark.exhaustive),
        pytest.param("d4_prefetch", "seeded:4", marks=pytest.mark.exhaustive),
        ("d5_ready_parts", "seeded:5"),
    ],
)
def test_it_is_right_and_without_races_by_default(stage: str, schedule: str, whole: bool) -> None:
    """In part, at the smallest head dim and the largest."""
    dims = registry.get(stage).head_dims
    dims = dims if whole else (dims[0], dims[-1])
    checked = on_cpu.check_on_cpu(
        [stage],
        lengths=[(1, 1), (1, 130), (3, 203), (1, 1000)],
        layouts=("contiguous",) if schedule == "ascending" else ("misaligned",),
        dtypes=("bfloat16",),
        head_dims=dims,
        schedules=(schedule,),
        races=True,
        timeout_s=600,
    )
    assert [f"{row.problem.label}: {row.reason}" for row in checked.failures] == []
    assert len(checked.rows) == 2 * 4 * len(dims)


TILES = (
    (8, 2, 1, 300),  # shares cross tiles
    (32, 2, 1, 77),  # all rows of a tile, and more blocks than steps
    (3, 1, 11, 200),  # 33 rows: three tiles, of which one has a row
    (1, 1, 64, 40),  # rows that see no key
    (4, 4, 1, 1),  # a step a tile
    (4, 1, 1, 1203),  # one tile of many blocks
)
"""Query heads, K/V heads, query rows and keys."""
BLOCKS = (1, 2, 5, 13, 40)


@needs_compiler
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_shares_fall_anywhere_on_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], blocks: int
) -> None:
    """The first stage without a mask and one that prefetches, or with one and that whose parts signal: half each."""
    _blocks(monkeypatch, blocks)
    q, k, v = _random(*shape, batch=3)
    pairs = (((False, STAGE), (True, "d4_prefetch")), ((True, STAGE), (True, READY)))
    for causal, stage in pairs[(TILES.index(shape) + BLOCKS.index(blocks)) % 2]:
        ran = flashlab.emulate(
            q, k, v, causal=causal, stage=stage, params={"MIN_BLOCKS": 1}, races=True, return_lse=True
        )
        assert ran.report.findings == ()
        assert check(ran.out, ran.lse, q, k, v, causal=causal, dtype="float16").passed


@needs_compiler
@pytest.mark.parametrize("schedule", ["ascending", "descending", "seeded:7"])
@pytest.mark.parametrize(("blocks", "batch"), [(17, 1), (32, 1), (33, 1), (40, 1), (97, 3), (100, 3)])
def test_parts_are_added_up_in_groups(monkeypatch: pytest.MonkeyPatch, blocks: int, batch: int, schedule: str) -> None:
    """Of more blocks than a group has: the last group full or not, within a tile's own blocks and across tiles."""
    _blocks(monkeypatch, blocks)
    grids, launch = [], emulator.launch
    monkeypatch.setattr(emulator, "launch", lambda *args, **how: grids.append(how["grid"]) or launch(*args, **how))
    q, k, v = _random(4, 1, 1, 2600, batch=batch)
    params = {"WARPS": 2, "WHOLE_TILES": blocks % 2, "GROUP": 4 if schedule == "seeded:7" else 16}
    ran = flashlab.emulate(
        q, k, v, stage="d16_part_groups", params=params, races=True, return_lse=True, schedule=schedule
    )
    assert ran.report.findings == ()
    assert grids == [(blocks - params["WHOLE_TILES"] * (blocks % batch), 1, 1)]
    assert check(ran.out, ran.lse, q, k, v, causal=False, dtype="float16").passed


@needs_compiler
@pytest.mark.parametrize("schedule", ["ascending", "descending", "seeded:7"])
@pytest.mark.parametrize(
    ("blocks", "combiners", "shape"),
    [
        (17, 4, (8, 1, 1)),
        (33, 8, (4, 2, 1)),
        (64, 16, (16, 1, 1)),
        (40, 2, (3, 1, 7)),
        (33, 8, (32, 8, 1)),
        (64, 16, (3, 1, 7)),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", ["d18_combiner_blocks", "d19_batched_polls"])
def test_combiners_sum_slices_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, stage: str, blocks: int, combiners: int, shape: tuple[int, int, int], schedule: str
) -> None:
    """Slices of less and more than a warp's columns; with evenly split tiles and without; the workspace is 0 again."""
    _blocks(monkeypatch, blocks)
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    q_heads, kv_heads, q_len = shape
    q, k, v = _random(q_heads, kv_heads, q_len, 1300)
    for whole in (0, 1):
        params = {"WARPS": 2, "WHOLE_TILES": whole, "COMBINERS": combiners, "LEAST_PARTS": 2}
        ran = flashlab.emulate(q, k, v, stage=stage, params=params, races=True, return_lse=True, schedule=schedule)
        assert ran.report.findings == ()
        assert check(ran.out, ran.lse, q, k, v, causal=False, dtype="float16").passed
        assert not work.any()


@needs_compiler
@pytest.mark.parametrize("stage", WITH_COMBINERS)
def test_more_combiners_than_a_row_has_columns_for(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """A row of head dim 64 has 16 slices of four columns: half of the 32 combiners have none."""
    _blocks(monkeypatch, 40)
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    q, k, v = _random(1, 1, 1, 2600)
    params = {"WARPS": 2, "COMBINERS": 32, "LEAST_PARTS": 2}
    ran = flashlab.emulate(q, k, v, stage=stage, params=params, races=True, return_lse=True)
    assert ran.report.findings == ()
    assert check(ran.out, ran.lse, q, k, v, causal=False, dtype="float16").passed
    assert not work.any()


@needs_compiler
@pytest.mark.parametrize("by_token", [False, True], ids=["by_head", "by_token"])
def test_keys_are_prefetched_after_the_first_copies(by_token: bool) -> None:
    """At least eight steps per warp. The emulator refuses a prefetch outside K and V."""
    q, k, v = _random(8, 2, 1, 1310)
    if by_token:  # the rows of a head are then not contiguous
        k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    params = {"WARPS": 2, "STEP_KEYS": 16, "PIPELINE_STAGES": 2, "PREFETCH_SHARE": 4}
    ran = flashlab.emulate(q, k, v, stage="d22_gap_prefetch", params=params, races=True, return_lse=True)
    assert ran.report.findings == ()
    assert check(ran.out, ran.lse, q, k, v, causal=False, dtype="float16").passed


@needs_compiler
def test_the_workspace_serves_one_launch_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of blocks and rows, in memory that earlier launches left as it is."""
    memory = np.full(1 << 19, 0x7FFFFFFF, np.uint32)
    memory[:MAX_SHARES] = 0
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: memory)
    shapes = ((4, 1, 1, 1203), (8, 2, 1, 300), (16, 1, 1, 700), (4, 1, 1, 1203))
    outs = []
    for blocks, shape in zip((16, 5, 9, 16), shapes, strict=True):
        _blocks(monkeypatch, blocks)
        q, k, v = _random(*shape)
        ran = flashlab.emulate(q, k, v, stage=STAGE, params={"MIN_BLOCKS": 1}, return_lse=True)
        assert check(ran.out, ran.lse, q, k, v, causal=False, dtype="float16").passed
        assert not memory[:MAX_SHARES].any()
        outs.append(ran.out)
    assert (outs[0] == outs[-1]).all()


@needs_compiler
def test_the_last_block_may_be_any_and_the_bits_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run in the order of their numbers here: numbered from the last, the first comes last."""
    _blocks(monkeypatch, 7)
    text = registry.get(STAGE).source.read_text(encoding="utf-8")
    assert text.count("blockIdx.x") == 2
    edited = tmp_path / "edited.cu"
    edited.write_text(text.replace("blockIdx.x", "(gridDim.x - 1 - blockIdx.x)"), encoding="utf-8")
    q, k, v = _random(8, 2, 1, 1100)
    ran = [
        flashlab.emulate(
            q, k, v, stage=STAGE, source=source, threads=threads, params={"MIN_BLOCKS": 1}, return_lse=True
        )
        for source, threads in ((None, 1), (edited, 1), (None, 2), (None, 2))
    ]
    assert all((one.out == ran[0].out).all() and (one.lse == ran[0].lse).all() for one in ran)


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, -0.3, 4.0])
def test_any_scale_and_magnitude(scale: float) -> None:
    q, k, v = _random(4, 1, 1, 333, head_dim=128)
    q, k = q * np.float16(8), k * np.float16(8)  # one key takes nearly all
    ran = flashlab.emulate(q, k, v, scale=scale, stage=STAGE, return_lse=True)
    plain = flashlab.emulate(q, k, v, scale=scale, stage="d0_split_kv", return_lse=True)
    assert np.abs(ran.out.astype(np.float32) - plain.out).max() < 4e-3
    assert np.allclose(ran.lse, plain.lse, rtol=1e-5, atol=1e-3)


def _awaited(source: Path | None) -> Any:
    """The report on a kernel whose shares cross tiles, in the order of warps that shows what is missing."""
    how: Any = {"params": {"MIN_BLOCKS": 1}, "source": source, "races": True, "schedule": "seeded:1"}
    return flashlab.emulate(*_random(8, 2, 1, 1203), stage=STAGE, **how).report


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    __syncthreads();   // all warps' partial results are in", "    //"),
        ("    __syncthreads();   // the buffers may be refilled; and", "    //"),
        ("    __syncwarp();   // all lanes are done with the keys in it", "    //"),
        ("      __syncwarp();                                      // the whole warp's have", "      //"),
        ("      __threadfence();   // release: a block that", "      //"),
        ("      __threadfence();   // acquire: the partial results", "      //"),
        ("  __syncthreads();   // passes on what the two threads", "  //"),
        (  # whoever is last in the order, instead of who comes last
            "atomicAdd(&p.work[first_block], 1u) == last_block - first_block",
            "static_cast<int>(blockIdx.x) == last_block",
        ),
        (
            "ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this",
            "ptx::cp_async_wait_group<PIPELINE_STAGES - 1>();   // this",
        ),
    ],
)
def test_what_it_waits_for_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str) -> None:
    _blocks(monkeypatch, 3)
    text = registry.get(STAGE).source.read_text(encoding="utf-8")
    assert text.count(old) == 1
    edited = tmp_path / "edited.cu"
    edited.write_text(text.replace(old, new), encoding="utf-8")
    try:
        report: Any = _awaited(edited)
    except EmulationError as error:
        report = error.report
    assert report.findings


@needs_compiler
def test_nothing_is_found_where_it_waits_for_all_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    _blocks(monkeypatch, 3)
    assert _awaited(None).findings == ()


@needs_compiler
def test_parts_that_are_their_own_signal_are_put_back_to_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _blocks(monkeypatch, 5)
    q, k, v = _random(4, 1, 1, 1100)
    text = registry.get(READY).source.read_text(encoding="utf-8")
    for zeros in ("make_uint4(0, 0, 0, 0)", "make_uint2(0, 0)"):
        assert text.count(zeros) == 1
        edited = tmp_path / "edited.cu"
        edited.write_text(text.replace(zeros, zeros.replace("0, 0)", "0, 1)")), encoding="utf-8")
        with pytest.raises(EmulationError, match=r"wanted its counters back at 0"):
            flashlab.emulate(q, k, v, stage=READY, source=edited)


@needs_compiler
@pytest.mark.parametrize("bits", [0xFFFF, 0x7FFF, 0x7E00, 0xFC00])
def test_a_nan_is_no_part_that_is_not_there(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """A block would wait for it for ever."""
    _blocks(monkeypatch, 5)
    q, k, v = _random(4, 1, 1, 600)
    for x in (k, v):
        x.view(np.uint16)[:, :, 7] = bits
    out = flashlab.emulate(q, k, v, stage=READY, timeout_s=60).out
    assert np.isnan(out).any()


@needs_compiler
def test_a_counter_that_is_left_behind_is_an_error(tmp_path: Path) -> None:
    text = registry.get(STAGE).source.read_text(encoding="utf-8")
    assert text.count("atomicExch(&p.work[first_block], 0u);") == 1
    edited = tmp_path / "edited.cu"
    edited.write_text(text.replace("atomicExch(&p.work[first_block], 0u);", ""), encoding="utf-8")
    q, k, v = _random(4, 1, 1, 700)
    with pytest.raises(EmulationError, match=r"wanted its counters back at 0 .*, got, by place, \{0: 5\}"):
        flashlab.emulate(q, k, v, stage=STAGE, source=edited)
    assert arguments.CPU_RESIDENT_BLOCKS == 3
