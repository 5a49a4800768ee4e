"""Attention over a cache in pages: right for any page table and lengths, and what is off is refused by name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import random_calls
from shared import needs_compiler, tiers

import flashlab
from flashlab.build import compiler
from flashlab.core import errors
from flashlab.core.problem import DTYPES, MASKS, DType, Mask, Problem
from flashlab.kernels import registry
from flashlab.run import arguments, arrays, emulator, paged
from flashlab.run.arrays import TorchCopies
from flashlab.run.paged import STAGE, job_of
from flashlab.verify import on_cpu, oracle
from flashlab.verify.verdict import check

attention_module = sys.modules["flashlab.run.attention"]
READY = "d5_ready_parts"
STAGES = [stage.id for stage in registry.DECODE.values() if stage.runner == paged.__name__]
every_stage = pytest.mark.parametrize("stage", STAGES)
CLUSTERS = "d1_paged_kv"
GROUPS = "d17_paged_part_groups"
COMBINERS = "d21_parallel_lookup"
every_sharing_stage = pytest.mark.parametrize("stage", [name for name in STAGES if name != CLUSTERS])
GARBAGE = -7
"""In entries of the page table that no key needs."""


def by_turns(*cases: tuple[Any, ...], exhaustive: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """Every case with every stage; `make test` has all `cases` of `STAGE` and, by turns, one of each other."""
    found = []
    for number, case in enumerate((*cases, *exhaustive)):
        for turn, stage in enumerate(STAGES):
            taken = case in cases and (stage == STAGE or turn % len(cases) == number)
            found.append(pytest.param(*case, stage, marks=() if taken else pytest.mark.exhaustive))
    return found


class Cache:
    """Sequences in pages, in a random order, of a pool whose other places hold NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        *,
        kv_heads: int = 2,
        head_dim: int = 64,
        dtype: DType = "float16",
    ) -> None:
        kind = np.dtype(dtype) if dtype == "float16" else np.dtype(ml_dtypes.bfloat16)
        rng = np.random.default_rng(page_size)
        width = -(-(max(lengths) + 2) // page_size)
        self.lengths = np.array(lengths, np.int32)
        pages = rng.permutation(len(lengths) * width + 3)
        shape = (len(pages), kv_heads, page_size, head_dim)
        self.K, self.V = (np.full(shape, np.nan, kind) for _ in range(2))
        self.table = np.full((len(lengths), width), GARBAGE, np.int32)
        self.keys: list[tuple[Any, Any]] = []
        for row, length in enumerate(lengths):
            used = -(-(length + 2) // page_size)  # room for two more
            self.table[row, :used], pages = pages[:used], pages[used:]
            k, v = (rng.standard_normal((kv_heads, length, head_dim)).astype(kind) for _ in range(2))
            for at in range(length):
                self.K[self.table[row, at // page_size], :, at % page_size] = k[:, at]
                self.V[self.table[row, at // page_size], :, at % page_size] = v[:, at]
            self.keys.append((k, v))


def _right(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """Of one sequence, in float64: (heads, q_len, head_dim) over (kv_heads, length, head_dim)."""
    group = len(q) // len(k)
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    q_len, length = scores.shape[1:]
    if causal:
        scores[:, np.arange(length) - np.arange(q_len)[:, None] > length - q_len] = -np.inf
    top = scores.max(-1, keepdims=True, initial=-1e9)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, weights @ v / total, 0.0), (np.log(total) + np.where(total > 0, top, 0))[..., 0]


def _refuse_wrong(cache: Cache, q: Any, stage: str, causal: bool = True, **params: int) -> None:
    out, lse = flashlab.paged_attention(
        q, cache.K, cache.V, cache.table, cache.lengths, causal=causal, return_lse=True, stage=stage, params=params
    )
    for row, (k, v) in enumerate(cache.keys):
        expected, expected_lse = _right(q[row], k, v, causal)
        assert np.abs(out[row] - expected).max() < 2e-3
        assert np.array_equal(np.isneginf(lse[row]), np.isneginf(expected_lse))
        assert np.allclose(lse[row], expected_lse, atol=1e-3)
    assert (out[cache.lengths == 0] == 0).all()


@needs_compiler
@pytest.mark.parametrize(
    ("page_size", "q_len", "causal", "head_dim", "stage"),
    by_turns(
        (1, 1, True, 64), (4, 3, True, 64), (16, 2, False, 64), (128, 5, True, 64), exhaustive=((4, 3, True, 256),)
    ),
)
def test_any_page_table_and_lengths(page_size: int, q_len: int, causal: bool, head_dim: int, stage: str) -> None:
    cache = Cache((0, 37, 290, 1), page_size, head_dim=head_dim)
    q = np.random.default_rng(q_len).standard_normal((4, 8, q_len, head_dim)).astype(np.float16)
    _refuse_wrong(cache, q, stage, causal)


BLOCKS = (1, 3, 8, 13, 40)
LENGTHS = (
    (300, 300, 300, 300),  # as many steps each: shares keep to tiles, but with 3 and 13 blocks
    (289, 304, 300, 290),  # likewise, of other lengths
    (40, 40),  # fewer steps than warps in a share
    (0, 0, 0),
    (1000, *(5,) * 20),
    (*range(70), 400),  # more sequences than a warp has lanes, and than there are blocks
)
SHARED = [
    pytest.param(
        *(stage, blocks, lengths),
        id=f"{stage}-{blocks}-{len(lengths)}x{lengths[-1]}",
        marks=() if stage == STAGE or (turn + i + j) % 8 == 1 else pytest.mark.exhaustive,
    )
    for turn, stage in enumerate(name for name in STAGES if name != CLUSTERS)
    for (i, blocks), (j, lengths) in itertools.product(enumerate(BLOCKS), enumerate(LENGTHS))
    if stage == STAGE or (turn + i + j) % 2
]
"""All of the stage that a call takes; every second of the others, which share its code, `make test` every eighth."""


@needs_compiler
@pytest.mark.parametrize(("stage", "blocks", "lengths"), SHARED)
def test_shares_fall_anywhere_on_sequences(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], blocks: int, stage: str
) -> None:
    """Right, without races, and the workspace is back at 0."""
    reports, build, launch = [], emulator.build_stage, emulator.launch
    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", blocks)
    monkeypatch.setattr(emulator, "build_stage", lambda variant, hooks: build(variant, hooks=True))
    monkeypatch.setattr(emulator, "launch", lambda *args, **how: reports.append(launch(*args, **how)))
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    q = np.random.default_rng(blocks).standard_normal((len(lengths), 8, 1, 64)).astype(np.float16)
    _refuse_wrong(Cache(lengths, 16), q, stage)
    assert [report.findings for report in reports] == [()]
    assert not work.any()


@needs_compiler
@pytest.mark.parametrize("lengths", [(2600,), (2500, 100, 1)], ids=str)
@pytest.mark.parametrize("blocks", [34, 67, 97])
def test_parts_are_added_up_in_groups(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], blocks: int) -> None:
    """Of more blocks than a group has; the last group may be full, and the workspace is back at 0."""
    reports, build, launch = [], emulator.build_stage, emulator.launch
    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", blocks)
    monkeypatch.setattr(emulator, "build_stage", lambda variant, hooks: build(variant, hooks=True))
    monkeypatch.setattr(emulator, "launch", lambda *args, **how: reports.append(launch(*args, **how)))
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    q = np.random.default_rng(blocks).standard_normal((len(lengths), 8, 1, 64)).astype(np.float16)
    _refuse_wrong(Cache(lengths, 16), q, GROUPS, WARPS=2)
    assert [report.findings for report in reports] == [()]
    assert not work.any()


@needs_compiler
@pytest.mark.parametrize("schedule", ["ascending", "descending", "seeded:3"])
@pytest.mark.parametrize("lengths", [(2600,), (2500, 100, 1), (900, 900), (0, 700), (40, 600, 601, 2000)], ids=str)
@pytest.mark.parametrize("blocks", [34, 97])
def test_combiners_sum_slices_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], blocks: int, schedule: str
) -> None:
    """Of sequences of the same length and of different ones, some within one block; the workspace is 0 again."""
    reports, build, launch = [], emulator.build_stage, emulator.launch
    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", blocks)
    monkeypatch.setattr(emulator, "build_stage", lambda variant, hooks: build(variant, hooks=True))
    monkeypatch.setattr(
        emulator, "launch", lambda *args, **how: reports.append(launch(*args, **{**how, "schedule": schedule}))
    )
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    q = np.random.default_rng(blocks).standard_normal((len(lengths), 8, 1, 64)).astype(np.float16)
    _refuse_wrong(Cache(lengths, 16), q, COMBINERS, WARPS=2, COMBINERS=8, LEAST_PARTS=2)
    assert [report.findings for report in reports] == [()]
    assert not work.any()


@needs_compiler
@pytest.mark.parametrize("by_token", [False, True], ids=["by_head", "by_token"])
@pytest.mark.parametrize(("page_size", "lengths"), [(1, (1300,)), (16, (1310,)), (64, (900, 500))], ids=str)
def test_pages_are_prefetched_after_the_first_copies(page_size: int, lengths: tuple[int, ...], by_token: bool) -> None:
    """At least eight steps per warp. The emulator refuses a prefetch outside the pool."""
    cache = Cache(lengths, page_size)
    if by_token:  # the rows of a head are then not contiguous
        cache.K, cache.V = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (cache.K, cache.V))
    q = np.random.default_rng(page_size).standard_normal((len(lengths), 8, 1, 64)).astype(np.float16)
    _refuse_wrong(cache, q, "d23_paged_gap_prefetch", WARPS=2, STEP_KEYS=16, PREFETCH_SHARE=4)


@needs_compiler
@pytest.mark.parametrize("schedule", ["descending", *(f"seeded:{seed}" for seed in range(4))])
@pytest.mark.parametrize("lengths", [LENGTHS[0], LENGTHS[4], LENGTHS[5]], ids=len)
def test_lengths_and_pages_may_change_until_the_kernel_before_has_ended(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], schedule: str
) -> None:
    """Before griddepcontrol.wait the emulator finds anything there, under these schedules; nothing else is read."""
    reports, build, launch = [], emulator.build_stage, emulator.launch

    def scheduled(*args: Any, **how: Any) -> Any:
        assert how["early"], "as a GPU launches it"
        reports.append(launch(*args, **{**how, "schedule": schedule}))
        return reports[-1]

    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", 13)
    monkeypatch.setattr(emulator, "build_stage", lambda variant, hooks: build(variant, hooks=True))
    monkeypatch.setattr(emulator, "launch", scheduled)
    q = np.random.default_rng(1).standard_normal((len(lengths), 8, 1, 64)).astype(np.float16)
    _refuse_wrong(Cache(lengths, 16), q, STAGE)
    assert [report.findings for report in reports] == [()]


@needs_compiler
@every_sharing_stage
def test_a_workspace_serves_other_lengths_one_after_another(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """As a graph's replays have it: the grid is fixed, the lengths are not."""
    work = np.zeros(1 << 19, np.uint32)
    monkeypatch.setattr(attention_module, "_workspace_on_cpu", lambda *_: work)
    monkeypatch.setattr(arguments, "CPU_RESIDENT_BLOCKS", 11)
    cache = Cache((600, 40, 333), 16)
    whole = list(cache.keys)
    q = np.random.default_rng(1).standard_normal((3, 8, 1, 64)).astype(np.float16)
    for lengths in ((600, 40, 333), (0, 40, 1), (33, 33, 33), (600, 1, 0)):
        cache.lengths[:] = lengths
        cache.keys = [tuple(x[:, :n] for x in pair) for pair, n in zip(whole, lengths, strict=True)]
        _refuse_wrong(cache, q, stage)
        assert not work.any()


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [(shape, CLUSTERS) for shape in ("1x32x8x1x4096x128", "2x32x8x1x4096x128", "1x8x1x1x4096x128", "5x8x1x1x64x64")]
    + [(shape, COMBINERS) for shape in ("4x8x1x1x8192x128", "1x8x1x1x4112x64", "1x32x8x1x4112x128")]
    + [(shape, COMBINERS) for shape in ("3x32x8x1x64x128", "8x32x8x1x8192x128", "2x32x8x5x64x128")]
    + [(shape, STAGE) for shape in ("9x32x8x1x64x128", "256x32x8x1x8192x128", "2x32x32x17x64x128")],
)
def test_the_stage_depends_on_the_number_of_work_tiles_and_of_keys(shape: str, wanted: str) -> None:
    assert paged._stage(None, Problem.parse(shape)).id == wanted


def test_only_visible_keys_count_for_the_stage() -> None:
    windowed = Problem.parse("1x32x8x1x131072x128", window=(1000, 0))
    assert paged._stage(None, windowed).id == CLUSTERS


def test_a_mask_of_one_query_row_hides_nothing_and_tables_are_without() -> None:
    one, two = (Problem.parse(f"1x32x8x{rows}x8192x128", mask="causal") for rows in (1, 2))
    assert (paged._as_timed(one).mask, paged._as_timed(two).mask) == ("full", "causal")


@needs_compiler
@pytest.mark.parametrize(
    ("page_size", "q_len", "left", "softcap", "stage"), by_turns((1, 1, 20, 0.0), (4, 3, 15, 5.0), (128, 2, 40, 0.0))
)
def test_a_window_reads_no_page_before_it(page_size: int, q_len: int, left: int, softcap: float, stage: str) -> None:
    """Engines give such pages away: their numbers are none, and what they hold is somebody else's."""
    cache = Cache((37, 290, 5), page_size)
    q = np.random.default_rng(q_len).standard_normal((3, 4, q_len, 64)).astype(np.float16)
    given_away = 0
    for row, length in enumerate(cache.lengths):
        for page in range(max(0, length - q_len - left) // page_size):
            given_away += 1
            cache.K[cache.table[row, page]] = cache.V[cache.table[row, page]] = np.nan
            cache.table[row, page] = GARBAGE
    assert given_away
    how: dict[str, Any] = {"window": (left, None), "softcap": softcap, "stage": stage}
    out, lse = flashlab.paged_attention(q, cache.K, cache.V, cache.table, cache.lengths, return_lse=True, **how)
    for row, pair in enumerate(cache.keys):
        k, v = (x[None] for x in pair)
        of_row = oracle.attention(q[row : row + 1], k, v, causal=True, window=(left, -1), softcap=softcap)
        np.testing.assert_allclose(out[row].astype(float), of_row[0][0], atol=2e-3)
        np.testing.assert_allclose(lse[row], of_row[1][0], atol=2e-3)


@needs_compiler
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (3, 4, 5))])
def test_what_a_gpu_is_asked_at_random(seed: int) -> None:
    drawn = random_calls.paged(seed, registry.get(STAGE).head_dims, most=300)
    cache = Cache(drawn.lengths, **drawn.sizes)
    heads, rows = drawn.queries
    q = np.random.default_rng(seed).standard_normal((len(drawn.lengths), heads, rows, cache.K.shape[3]))
    q = q.astype(cache.K.dtype)
    call = (q, cache.K, cache.V, cache.table, cache.lengths)
    out, lse = flashlab.paged_attention(*call, return_lse=True, **drawn.how)
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    for row, pair in list(enumerate(cache.keys))[1:]:
        k, v = (x[None] for x in pair)
        verdict = check(
            out[row : row + 1], lse[row : row + 1], q[row : row + 1], k, v, dtype=drawn.sizes["dtype"], **drawn.how
        )
        assert verdict.passed, verdict.reason


@needs_compiler
def test_new_tokens_are_appended_and_seen() -> None:
    cache = Cache((17, 31), 16)
    rng = np.random.default_rng(5)
    k, v, q = (rng.standard_normal((2, heads, 2, 64)).astype(np.float16) for heads in (2, 2, 4))
    flashlab.append_kv(cache.K, cache.V, k, v, cache.table, cache.lengths)  # 31 and 32 are in two pages
    out = flashlab.paged_attention(q, cache.K, cache.V, cache.table, cache.lengths + np.int32(2))
    for row, before in enumerate(cache.keys):
        both = (np.concatenate(pair, axis=1) for pair in zip(before, (k[row], v[row]), strict=True))
        assert np.abs(out[row] - _right(q[row], *both, True)[0]).max() < 2e-3
    with pytest.raises(errors.ShapeError, match=r"k, v: wanted \(batch, 2, new tokens, 64\)"):
        flashlab.append_kv(cache.K, cache.V, k[:, :1], v[:, :1], cache.table, cache.lengths)
    with pytest.raises(errors.ShapeError, match=r"lengths: wanted \(batch,\) for k of shape \(2, 2, 2, 64\), got"):
        flashlab.append_kv(cache.K, cache.V, k, v, cache.table, cache.lengths[:1])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_new_tokens_go_to_pages_of_the_cache_or_nowhere(library: str) -> None:
    """NumPy and torch take a negative page number for one from the end, and would write into somebody's page."""
    make: Any = np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy
    cache = Cache((17, 31), 16)  # room for 48 keys each; the first new token of both is in the page at 1
    new = make(np.ones((2, 2, 2, 64), np.float16))
    for page, lengths, words in (
        (-1, (17, 31), "page_table: wanted page numbers of 0 to 8, got -1 of sequence 0"),
        (9, (17, 31), "page_table: wanted page numbers of 0 to 8, got 9 of sequence 0"),
        (0, (17, 47), r"lengths: wanted 0 to 46 .* before 2 new tokens, got 47 of sequence 1"),
        (0, (-1, 31), r"lengths: wanted 0 to 46 .* before 2 new tokens, got -1 of sequence 0"),
        (int(cache.table[1, 1]), (30, 30), "wanted a place of its own for each of 4 new tokens, got 2 places"),
    ):
        pools, table = [make(pool.copy()) for pool in (cache.K, cache.V)], cache.table.copy()
        table[0, 1] = page
        with pytest.raises(errors.InputError, match=words):
            flashlab.append_kv(*pools, new, new, make(table), make(np.array(lengths, np.int32)))
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(pools, (cache.K, cache.V), strict=True))


def _appended(library: str, **changed: Any) -> dict[str, Any]:
    """A sound call of `append_kv`, or that with some arrays changed."""
    cache = Cache((17, 31), 16)
    call = {"k_cache": cache.K, "v_cache": cache.V, "k": None, "v": None, "page_table": cache.table}
    call |= {name: np.ones((2, 2, 2, 64), np.float16) for name in "kv"} | {"lengths": cache.lengths}
    if library == "torch":
        torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
        call = {name: torch.from_numpy(x) for name, x in call.items()}
    return call | {name: change(call.get(name)) for name, change in changed.items()}


@pytest.mark.parametrize(
    ("library", "changed", "error", "words"),
    [
        ("numpy", {"v_cache": lambda x: x[:, :, :8]}, errors.ShapeError, "wanted .* of both, .* got shapes"),
        ("torch", {"v_cache": lambda x: x[:, :1]}, errors.ShapeError, "wanted .* of both, .* got shapes"),
        ("numpy", {"v_cache": lambda x: x[:1]}, errors.ShapeError, "wanted .* of both, .* got shapes"),
        ("numpy", {"k_cache": lambda x: x[0], "v_cache": lambda x: x[0]}, errors.ShapeError, "wanted .* of both"),
        ("numpy", {"k": lambda x: x[0], "v": lambda x: x[0]}, errors.ShapeError, "k, v: wanted"),
        (
            "numpy",
            {"v_cache": lambda x: x.astype(ml_dtypes.bfloat16)},
            errors.DTypeError,
            "v_cache: wanted the type of",
        ),
        (
            "numpy",
            {"k": lambda x: x.astype(np.float32)},
            errors.DTypeError,
            "k: wanted the type of k_cache, float16, got",
        ),
        (
            "numpy",
            {"v": lambda x: x.astype(np.int64)},
            errors.DTypeError,
            "v: wanted the type of k_cache, float16, got",
        ),
        (
            "torch",
            {"v": lambda x: x.bfloat16()},
            errors.DTypeError,
            "v: wanted the type of k_cache, float16, got bfloat16",
        ),
        ("torch", {"lengths": lambda x: x.long()}, errors.DTypeError, r"lengths: wanted int32, .* `lengths\.int\(\)`"),
        (
            "numpy",
            {"page_table": lambda x: x.astype(float)},
            errors.DTypeError,
            "page_table: wanted int32, got float64",
        ),
        ("numpy", {"page_table": lambda x: x[0]}, errors.ShapeError, r"page_table: wanted \(batch, pages"),
        (
            "numpy",
            {name: lambda x: np.repeat(x, 25, axis=2) for name in "kv"},
            errors.ShapeError,
            "k, v: wanted at most 48 new tokens, as the page table has room for, got 50",
        ),
        ("numpy", {"k": lambda _: None}, errors.DeviceError, "all of one library, got .* NoneType as k,"),
        ("numpy", {"lengths": lambda x: x.tolist()}, errors.DeviceError, "all of one library, got .* list as lengths"),
        (
            "torch",
            {"v": lambda x: x.numpy()},
            errors.DeviceError,
            "all of one library, got Tensor as k_cache.* ndarray as v",
        ),
        ("torch", {"v": lambda x: x.to("meta")}, errors.DeviceError, "^v: wanted .* on meta"),
        ("torch", {"k": lambda x: x.requires_grad_()}, errors.InputError, "k: wanted a tensor that needs no gradient"),
        (
            "numpy",
            {"v_cache": lambda x: np.broadcast_to(x[:1], x.shape)},
            errors.LayoutError,
            "v_cache: wanted memory that may be written",
        ),
        ("numpy", {"check": lambda _: "no"}, errors.ParameterError, "check: wanted True or False, got 'no'"),
    ],
)
def test_nothing_is_appended_of_arrays_that_do_not_fit(
    library: str, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    call = _appended(library, **changed)
    before = np.from_dlpack(call["k_cache"]).copy()
    with pytest.raises(error, match=words):
        flashlab.append_kv(**call)
    assert np.array_equal(np.from_dlpack(call["k_cache"]), before, equal_nan=True)


def test_keys_are_not_written_over_by_values_in_one_cache() -> None:
    """Caches that take turns in one array are two; one array is none."""
    call = _appended("numpy")
    both = np.zeros((2, *call["k_cache"].shape), np.float16).swapaxes(0, 1)
    flashlab.append_kv(**call | {"k_cache": both[:, 0], "v_cache": both[:, 1]})
    none = call["k_cache"][: len(call["k"]), :, 1:1]  # of new tokens
    flashlab.append_kv(**call | {"k": none, "v": none})
    with pytest.raises(errors.LayoutError, match="v_cache: wanted memory apart from v, got memory that overlaps it"):
        flashlab.append_kv(**call | {"v": call["v_cache"][: len(call["v"]), :, : call["v"].shape[2]]})
    with pytest.raises(errors.LayoutError, match="v_cache: wanted memory apart from k_cache, got the same"):
        flashlab.append_kv(**call | {"v_cache": call["k_cache"]})


@needs_compiler
def test_torch_tensors_and_a_cache_of_tokens_before_heads() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    cache = Cache((33, 2), 8)
    q = torch.randn(2, 4, 1, 64).half()
    pools = [torch.from_numpy(pool).transpose(1, 2).contiguous().transpose(1, 2) for pool in (cache.K, cache.V)]
    out = torch.zeros(2, 1, 4, 64).half().transpose(1, 2)
    table, lengths = torch.from_numpy(cache.table), torch.from_numpy(cache.lengths)
    assert flashlab.paged_attention(q, *pools, table, lengths, out=out) is out
    for row, (k, v) in enumerate(cache.keys):
        assert np.abs(out[row].numpy() - _right(q[row].numpy(), k, v, True)[0]).max() < 2e-3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"page_table": (1, 0, 99)},
            errors.InputError,
            "page_table: wanted page numbers of 0 to 10, got 99 of sequence 1$",
        ),
        ({"page_table": (1, 0, -1)}, errors.InputError, "page numbers of 0 to 10, got -1 of sequence 1$"),
        ({"lengths": (1, 81)}, errors.InputError, "^lengths: wanted 0 to 64 keys, .* got 81 of sequence 1$"),
        ({"lengths": (0, -1)}, errors.InputError, "^lengths: wanted 0 to 64 keys, .* got -1 of sequence 0$"),
        (
            {"page_table": np.zeros((2, 4), np.int64)},
            errors.DTypeError,
            r'page_table: wanted int32, got int64\. `page_table\.astype\("int32"\)` works',
        ),
        ({"lengths": [50, 60]}, errors.DeviceError, r"got list\. `numpy\.asarray\(lengths, dtype=numpy\.int32\)`"),
        (
            {name: np.zeros((0, 2, 16, 64), np.float16) for name in ("k_cache", "v_cache")},
            errors.ShapeError,
            r"k_cache, v_cache: wanted .* none of them 0, got shapes \(0, 2, 16, 64\)",
        ),
        (
            {"params": {"PAGE_SIZE": 32}},
            errors.ParameterError,
            "params: wanted the PAGE_SIZE of k_cache, 16, .* got 32",
        ),
        ({"page_table": np.zeros((3, 4), np.int32)}, errors.ShapeError, r"page_table: wanted \(batch, pages"),
        ({"lengths": np.zeros((2, 1), np.int32)}, errors.ShapeError, r"lengths: wanted \(batch,\)"),
        ({"page_table": np.zeros((4, 2), np.int32).T}, errors.LayoutError, "page_table: wanted a contiguous last"),
        ({"k_cache": np.zeros((9, 2, 12, 64), np.float16)}, errors.ShapeError, "wanted .* of both, .* got shapes"),
        (
            {name: np.zeros((1, 1 << 16, 1, 64), np.float16) for name in ("k_cache", "v_cache")},
            errors.ShapeError,
            "got 4 query heads for 65536 key heads",
        ),
        (
            {"q": np.zeros((2, 4, 33, 64), np.float16)},
            errors.UnsupportedError,
            r"at most 64 query rows .* 66\. Calls with fewer",
        ),
        ({"q": np.zeros((2, 3, 1, 64), np.float16)}, errors.ShapeError, "multiple of kv_heads"),
        (
            {"q": np.zeros((2, 4, 64), np.float16)},
            errors.ShapeError,
            r"q: wanted \(batch, q_heads, q_len, head_dim\), got",
        ),
        ({"q": np.zeros((2, 4, 1, 64), np.float32)}, errors.DTypeError, "wanted float16"),
        (
            {"v_cache": np.zeros((11, 2, 16, 64), ml_dtypes.float8_e4m3fn)},
            errors.DTypeError,
            r'v_cache: wanted .* got float8_e4m3fn\. `v_cache\.astype\("float16"\)` works',
        ),
        ({"scale": float("nan")}, errors.ParameterError, "scale: wanted a finite number of magnitude"),
        ({"stream": 0}, errors.ParameterError, "stream: wanted None"),
        ({"check": "no"}, errors.ParameterError, "check: wanted True or False, got 'no'"),
        ({"check": 1}, errors.ParameterError, "check: wanted True or False, got 1"),
        (
            {"stage": READY},
            errors.UnknownStageError,
            f"reads a paged cache, {' or '.join(STAGES)}, got '{READY}'",
        ),
    ],
)
def test_what_is_off_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    cache = Cache((50, 60), 16)
    call = {"q": np.zeros((2, 4, 1, 64), np.float16), "k_cache": cache.K, "v_cache": cache.V}
    call |= {"page_table": cache.table, "lengths": cache.lengths}
    for name, value in change.items():
        if isinstance(value, tuple):  # one value of it
            edited = call[name] = call[name].copy()
            edited[value[:-1]] = value[-1]
        else:
            call[name] = value
    with pytest.raises(error, match=words):
        flashlab.paged_attention(**call)


@tiers
@every_stage
def test_there_is_code_for_every_page_size(stage: str, whole: bool) -> None:
    """At one key a page and head dim 256 registers spill. In part, that, and of `STAGE` the size by default."""
    default = registry.get(stage).parameters(256)["PAGE_SIZE"]
    kinds: list[tuple[DType, Mask]] = [(dtype, mask) for dtype in DTYPES for mask in MASKS]
    for number, page_size in enumerate(registry.get(stage).params["PAGE_SIZE"].choices):
        if not whole and page_size != 1 and (stage, page_size) != (STAGE, default):
            continue
        for dtype, mask in kinds if whole and page_size == 1 else [kinds[number % len(kinds)]]:
            problem = Problem.parse("1x8x1x1x300x256", dtype=dtype, mask=mask)
            job = job_of(
                registry.get(stage), problem, "sm_90a", {"aligned": True, "overrides": {"PAGE_SIZE": page_size}}
            )
            assert compiler.compile_stage(job).parameters["PAGE_SIZE"] == page_size


def test_pages_are_of_a_power_of_two() -> None:
    pools = [np.zeros((9, 2, 12, 64), np.float16) for _ in range(2)]
    table, lengths = np.zeros((2, 4), np.int32), np.ones(2, np.int32)
    with pytest.raises(errors.ShapeError, match=r"wanted pages of 1, 2, 4, 8, .* keys, got 12"):
        flashlab.paged_attention(np.zeros((2, 4, 1, 64), np.float16), *pools, table, lengths)
    most = max(registry.get(STAGE).params["PAGE_SIZE"].choices)
    assert f"power of two of at most {most}." in str(flashlab.paged_attention.__doc__)


@needs_compiler
@pytest.mark.parametrize(("page_size", "head_dims", "stage"), by_turns((1, (64,)), (64, (128,)), exhaustive=((8, ()),)))
def test_as_a_stage_it_is_right_and_without_races(page_size: int, head_dims: tuple[int, ...], stage: str) -> None:
    head_dims = head_dims or registry.get(stage).head_dims
    checked = on_cpu.check_on_cpu(
        [f"{stage}[PAGE_SIZE={page_size}{',SPLITS=2' if stage == CLUSTERS else ''}]"],
        lengths=[(1, 1), (2, 17), (1, 300)],
        layouts=("contiguous", "misaligned"),
        masks=("causal",),
        dtypes=("bfloat16",),
        head_dims=head_dims,
        races=True,
        timeout_s=600,
    )
    assert [f"{row.problem.label}: {row.reason}" for row in checked.failures] == []
    assert len(checked.rows) == 3 * 2 * len(head_dims)


def test_copies_are_made_anew_in_place_where_their_tensors_were_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    monkeypatch.setattr(arrays, "torch_stream", lambda *_: nullcontext())  # of tensors in host memory there is none
    source, calls = torch.ones(3), []
    copies = TorchCopies({"K": source}, lambda x: (calls.append(1), (x * 2,))[1], 0)
    (copy,) = copies.made["K"]
    copies.refresh()
    assert (len(calls), copy.tolist()) == (1, [2, 2, 2])
    source[1] = 5
    copies.refresh()
    copies.refresh()
    assert (len(calls), copy.tolist()) == (2, [2, 10, 2])
    assert copies.made["K"][0] is copy
    with torch.inference_mode():  # its tensors do not say whether they were written to
        copies = TorchCopies({"K": torch.ones(3)}, lambda x: (x * 2,), 0)
        copies.made["K"][0][0] = 0
        copies.refresh()
    assert copies.made["K"][0].tolist() == [2, 2, 2]
