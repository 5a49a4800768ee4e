"""The cycle model: bounds and loops that can be worked out by hand, and what it says of loops that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import synthetic

from flashlab.core.errors import NoDataError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.experiments import chip, cycle_model, cycle_tables
from flashlab.experiments.cycle_model import Kernel, Rates, Speeds
from flashlab.kernels import registry
from flashlab.query import select
from flashlab.record import schema, store
from flashlab.show import tables

RATES = Rates(
    sm_count=100,
    clock_mhz=1000.0,
    wgmma=4096.0,
    mma_sync=2048.0,
    fma=128.0,
    alu=64.0,
    exp2=16.0,
    shared=1.0,
    alu_beside=32.0,
    exp2_beside=8.0,
    softmax=Speeds(*2 * [{1: 8.0, 2: 16.0, 3: 16.0, 4: 16.0}]),
    softmax_without_max=Speeds(*2 * [{1: 12.0, 2: 16.0, 3: 16.0, 4: 16.0}]),
    gemm_latency=0.0,
    wait=0.0,
    copy=0.0,
)
"""Round numbers: a product of 64 × 128 scores at D=64 takes 256 clocks, a softmax of as many 1,024, and so do two."""

KERNEL = Kernel(
    stage="09_wgmma",
    order="free-running",
    head_dim=64,
    keys=128,
    group_rows=64,
    groups=1,
    blocks=1,
    uses_wgmma=True,
    rescales=False,
    waits=False,
)
SCORES = 64 * 128
LIMITS = cycle_model.floor(KERNEL, RATES)


def loop(kernel: Kernel, rates: Rates = RATES) -> float:
    """Cycles of a tile of one group, shared by all."""
    return SCORES * cycle_model.loop_of(kernel, rates)


def test_alone_a_group_takes_one_step_after_the_other() -> None:
    assert loop(KERNEL) == pytest.approx(256 + 1024 + 256)
    assert loop(KERNEL, replace(RATES, gemm_latency=50.0)) == pytest.approx(256 + 1024 + 256 + 100)


def test_groups_fill_the_gaps_of_each_other_as_far_as_the_units_go() -> None:
    alone, two = loop(KERNEL), loop(replace(KERNEL, groups=2))
    assert 1024 / 2 + 256 <= two < 0.75 * alone
    plenty = replace(RATES, softmax=Speeds(*2 * [{1: 8.0, 2: 16.0, 3: 24.0}]))
    assert loop(replace(KERNEL, groups=3), plenty) < two
    assert loop(replace(KERNEL, groups=3), plenty) >= 512, "the tensor cores need so many clocks a tile"


def test_a_product_under_the_softmax_costs_nothing_more() -> None:
    assert loop(replace(KERNEL, overlaps=True)) == pytest.approx(256 + 1024)


def test_softmaxes_beside_products_are_slower() -> None:
    alone = RATES.softmax.alone
    slowed = replace(RATES, softmax=Speeds(alone, {groups: rate / 4 for groups, rate in alone.items()}))
    assert loop(KERNEL, slowed) == loop(KERNEL), "one group's products are over before its softmax begins"
    both = replace(KERNEL, overlaps=True)
    assert loop(both, slowed) == pytest.approx(256 + 1024 + 256 * 0.75)


def test_without_maxima_the_softmax_is_as_fast_as_it_was_measured() -> None:
    assert loop(replace(KERNEL, maxima=False)) == pytest.approx(256 + SCORES / 12 + 256)
    assert cycle_model.floor(replace(KERNEL, maxima=False), RATES)["ALU pipe"] < LIMITS["ALU pipe"]


def test_turns_keep_products_apart() -> None:
    pair = replace(KERNEL, groups=2, order="ping-pong")
    assert loop(pair) >= 512
    assert loop(pair) <= loop(replace(KERNEL, groups=1))


def test_waiting_costs_what_was_measured() -> None:
    asked = replace(KERNEL, waits=True)
    assert loop(asked, replace(RATES, wait=100.0)) == pytest.approx(256 + 1024 + 256 + 200)


def test_a_rescale_is_work_of_the_fp32_pipe() -> None:
    # At D=64 and 128 keys half a multiplication a score: 1/256 clock, beside 1/8 of a softmax alone.
    assert loop(replace(KERNEL, rescales=True)) - loop(KERNEL) == pytest.approx(1024 * 0.5 / 128 * 16)


def test_the_floor_is_the_slowest_unit() -> None:
    found = cycle_model.floor(KERNEL, RATES)
    assert found["GEMMs and FP32 pipe"] == pytest.approx(256 / 4096 + 2 / 128)
    # 1/16 clock of products, in which half an exponential is done; the other half at the full rate.
    assert found["exponentials"] == pytest.approx(1 / 16 + 0.5 / 16)
    assert max(found.values()) == found["exponentials"]
    longer = cycle_model.floor(replace(KERNEL, head_dim=128), RATES)
    assert max(longer.values()) == longer["GEMMs and FP32 pipe"]


def test_sums_by_products_spare_the_fp32_pipe() -> None:
    spared = replace(KERNEL, sums_by_gemm=True, adds=False)
    assert spared.fma == KERNEL.fma - 1
    assert cycle_model.floor(spared, RATES)["GEMMs and FP32 pipe"] < LIMITS["GEMMs and FP32 pipe"]


def test_warp_level_products_want_their_ceiling() -> None:
    warps = replace(KERNEL, uses_wgmma=False)
    assert cycle_model.floor(warps, RATES)["shared memory"] > 0
    with pytest.raises(NoDataError, match="mma_sync_float16"):
        cycle_model.floor(warps, replace(RATES, mma_sync=None))


def beyond(kernel: Kernel, shape: str, rates: Rates = RATES, mask: str = "full") -> float:
    """A call's cycles over those of the inner loop."""
    loop = max(*cycle_model.floor(kernel, rates).values(), cycle_model.loop_of(kernel, rates))
    return cycle_model.predict(kernel, Problem.parse(shape, mask=mask), rates).cycles_per_score / loop


def test_a_call_adds_the_last_wave_and_what_a_mask_throws_away() -> None:
    full = "1x100x2048x64"
    assert beyond(replace(KERNEL, persistent=True), full) == 1.0  # 3,200 blocks on 100 SMs
    found = cycle_model.predict(replace(KERNEL, persistent=True), Problem.parse(full), RATES)
    assert found.tflops == pytest.approx(256 / found.cycles_per_score * 100 * 1e9 / 1e12)
    assert beyond(KERNEL, "1x99x2048x64") == pytest.approx(32 * 100 / (99 * 32))
    # Rows 0 to 63 and 64 to 127 see one tile, the next two two tiles, …: of 16 tiles on average 8.5.
    assert beyond(KERNEL, full, mask="causal") == pytest.approx(8.5 / 8)
    assert beyond(KERNEL, full, replace(RATES, copy=1000.0)) > 1
    assert beyond(replace(KERNEL, blocks=2), full, replace(RATES, copy=1000.0)) == 1


def test_uneven_lengths_cost_whole_tiles() -> None:
    assert beyond(KERNEL, "1x100x100x64") == pytest.approx(128 / 100)


@pytest.mark.parametrize("stage_id", cycle_model.described())
@pytest.mark.parametrize("problem", cycle_model.PROBLEMS, ids=str)
def test_every_rung_is_described_with_its_own_tunables(stage_id: str, problem: Problem) -> None:
    kernel = cycle_model.kernel_of(stage_id, problem.head_dim, registry.get(stage_id).parameters(problem.head_dim))
    assert kernel is not None
    assert kernel.stage == stage_id
    assert kernel.keys > 0
    found = cycle_model.predict(kernel, problem, RATES)
    assert found.cycles_per_score >= max(found.floor.values())
    assert found.tflops > 0


def test_interleaved_gemms_run_beside_the_exponentials_of_the_next_step() -> None:
    """Of 256 + 256 cycles of GEMMs and 1,024 of a softmax the first exponentials and the last GEMMs run alone."""
    assert loop(replace(KERNEL, interleaved=2)) == pytest.approx(512 + 512 + 256)
    assert loop(replace(KERNEL, interleaved=4)) == pytest.approx(4 * 256 + 128)


def test_tflops_are_of_the_clock_that_is_asked_for() -> None:
    problem = Problem.parse("1x100x2048x64")
    highest = cycle_model.predict(KERNEL, problem, RATES)
    assert highest.clock_mhz == RATES.clock_mhz
    calls = schema.Samples(
        regime="burst", cache="hot", calls=1, time_us=(1.0,), sm_clock_mhz=(), call_clock_mhz=(900.0,)
    )
    slower = cycle_model.predict(KERNEL, problem, RATES, calls)
    assert slower.clock_mhz == 900.0
    assert slower.cycles_per_score == highest.cycles_per_score
    assert slower.tflops == pytest.approx(0.9 * highest.tflops)


def test_resident_blocks_that_the_driver_counted_stand_above_those_asked_for() -> None:
    asked = {"TILE_KV": 64, "MIN_BLOCKS": 1, "NUM_WARPGROUPS": 1, "NUM_CONSUMERS": 1, "WARPS": 4, "TILE_Q": 128}
    for stage_id in cycle_model.described():
        at_least, counted = (cycle_model.kernel_of(stage_id, 64, asked, blocks_per_sm=blocks) for blocks in (None, 5))
        assert at_least is not None
        assert counted is not None
        assert (at_least.blocks, counted.blocks) == (1, 5)


def test_stages_that_the_model_does_not_know_are_left_out() -> None:
    assert cycle_model.kernel_of("00_naive", 64, {"THREADS": 128}) is None


def test_without_readings_it_says_so(tmp_path: Path) -> None:
    assert "flashlab chip" in cycle_tables.predictions("nvidia-h200", tmp_path)
    with pytest.raises(NoDataError, match="flashlab chip"):
        cycle_model.rates_of({})


every_gpu = pytest.mark.parametrize(
    "slug", [slug for slug in store.gpus(DATA) if any((DATA / slug / "chip").glob("*.jsonl"))]
)
"""Whose readings are committed under data/."""


@every_gpu
def test_loops_that_were_measured_are_predicted(slug: str) -> None:
    """Nothing in the model is fitted to these loops: it knows the units alone."""
    readings = chip.newest(slug)
    rates = cycle_model.rates_of(readings)
    off = {
        name: predicted / reading.value - 1
        for name, reading in readings.items()
        if not reading.defines.get("ANCHORED") and (predicted := cycle_model.predict_loop(reading, rates)) is not None
    }
    assert len(off) >= 20
    within = [abs(one) <= 0.12 for one in off.values()]
    assert sum(within) >= 0.8 * len(off), off


def ceilings(samples: Mapping[str, tuple[float, ...]]) -> dict[str, schema.Ceiling]:
    """A ceiling of mma.sync of 600 TFLOP/s with these clocks."""
    made = synthetic.ceiling("mma_sync_float16")
    return {made.name: made.model_copy(update={"samples": made.samples.model_copy(update=dict(samples))})}


@every_gpu
def test_products_of_a_clock_are_of_the_clock_in_the_calls(slug: str) -> None:
    """The clock right after them is that of an idle chip: by it mma.sync would do less a clock than it does."""
    readings = chip.newest(slug)
    after: tuple[float, ...] = (2000.0,) * 40
    during: tuple[float, ...] = (1600.0,) * 40
    both = cycle_model.rates_of(readings, ceilings({"sm_clock_mhz": after, "call_clock_mhz": during})).mma_sync
    old = cycle_model.rates_of(readings, ceilings({"sm_clock_mhz": after, "call_clock_mhz": ()})).mma_sync
    assert both is not None
    assert old is not None
    assert both == pytest.approx(old * 2000 / 1600)
    assert cycle_model.rates_of(readings, ceilings({"sm_clock_mhz": (), "call_clock_mhz": ()})).mma_sync is None


@every_gpu
def test_products_of_warps_stand_below_those_of_warpgroups(slug: str) -> None:
    readings, measured = chip.newest(slug), store.newest_ceilings(slug)
    rates = cycle_model.rates_of(readings, measured)
    assert rates.mma_sync is not None
    share = f"{100 * rates.mma_sync / rates.wgmma:.0f} %"
    assert f"mma.sync reaches {tables.number(rates.mma_sync, 4)}" in cycle_tables.wgmma(readings, ceilings=measured)
    assert share in cycle_tables.wgmma(readings, ceilings=measured)
    assert "mma.sync" not in cycle_tables.wgmma(readings, ceilings={}), "no ceilings there"


@every_gpu
def test_a_stage_is_predicted_as_it_was_recorded(slug: str) -> None:
    """With the blocks that were resident, and at the clock that it ran at."""
    newest = {(row.name, row.problem): row for row in store.measurements(slug) if row.status == "ok"}
    for problem, rows in select.load(slug).problems.items():
        newest |= {(row.name, problem): row for row in rows if row.status == "ok"}
    for one in cycle_model.compare(slug):
        row = newest.get((one.kernel.stage, one.problem))
        if row is None:
            assert not one.clock_measured
            continue
        assert row.cubin is not None
        assert one.kernel.blocks == row.cubin.blocks_per_sm
        samples = row.samples_of()
        assert samples is not None
        assert one.clock_measured == bool(samples.call_clock_mhz)
        if samples.call_clock_mhz:
            assert one.clock_mhz == median(samples.call_clock_mhz)


@every_gpu
def test_pages_show_every_rung(slug: str) -> None:
    text = cycle_tables.predictions(slug)
    for stage_id in cycle_model.described():
        assert stage_id not in registry.STAGES or f"| {stage_id} |" in text
