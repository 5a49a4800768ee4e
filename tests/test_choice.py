"""The choice of stage and tunables: exact problems, the nearest ones, other GPUs, refusals, and `flashlab explain`."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from shared import tiers
from typer.testing import CliRunner, Result

from flashlab.cli.app import app
from flashlab.core.errors import DamagedRecordError, NoDataError, ParameterError, ShapeError, UnsupportedError
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.measure.tuned import left_out, table_text
from flashlab.run import choice as tuned
from flashlab.run import gpu
from flashlab.run.explain import explain as flashlab_explain
from flashlab.show.tuning import left_out_table

H200, ARCH, SMS = "nvidia-h200", "sm_90a", 132
SMALL, LARGE = Problem.parse("1x8x512x64"), Problem.parse("16x16x2048x64")
OLD, NEW = "20260101T000000Z-0123abc", "20260102T000000Z-0123abc"
PINGPONG, PERSISTENT, SWIZZLE = (registry.get(name) for name in ("11_pingpong", "12_persistent", "08_swizzle"))


def row(
    stage: registry.Stage,
    problem: Problem,
    time_us: float,
    *,
    variants: int = 4,
    run: str = OLD,
    tile_q: int = 192,
    **parameters: int,
) -> tuned.Row:
    return row_of(stage.id, problem, stage.parameters(problem.head_dim, parameters), time_us, tile_q, variants, run)


def row_of(stage: str, problem: Problem, parameters: dict[str, int], *rest: Any) -> tuned.Row:
    shown = {name: getattr(problem, name) for name in ("shape", "mask", "dtype")}
    others = dict(zip(("time_us", "tile_q", "variants", "run"), rest, strict=True))
    return tuned.Row(stage=stage, **shown, parameters=parameters, **others)


ROWS = (
    row(PINGPONG, LARGE, 535.0),
    row(PERSISTENT, LARGE, 513.0),
    row(SWIZZLE, LARGE, 800.0, tile_q=128),
    row(PINGPONG, SMALL, 6.7, tile_q=64, run=NEW, NUM_CONSUMERS=1),
    row(PERSISTENT, SMALL, 7.3, tile_q=64, run=NEW, NUM_CONSUMERS=1),
    row(SWIZZLE, SMALL, 11.9, tile_q=128, run=NEW),
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path, ROWS)


def written(data: Path, rows: Sequence[tuned.Row], *, slug: str = H200, arch: str = ARCH, sm_count: int = SMS) -> Path:
    path = tuned.path_of(slug, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(arch, sm_count, rows), encoding="utf-8")
    return data


def first(problem: Problem, data: Path, slug: str = H200, arch: str = ARCH, sm_count: int | None = SMS) -> tuned.Choice:
    return tuned.rank(problem, slug, arch, sm_count, data).choices[0]


# --- The table ---


def test_a_table_reads_back_as_it_was_written_a_line_a_row(data: Path) -> None:
    found = tuned.table(H200, data)
    assert found is not None
    assert found.rows == ROWS
    assert (found.arch, found.sm_count, found.least_us) == (ARCH, SMS, 6.7)
    text = tuned.path_of(H200, data).read_text(encoding="utf-8")
    assert sum('"stage"' in line for line in text.splitlines()) == len(ROWS)
    entry = json.loads(text)["rows"][3]
    assert entry == {
        "stage": "11_pingpong",
        "shape": "1x8x512x64",
        "mask": "full",
        "dtype": "float16",
        "parameters": PINGPONG.parameters(64, {"NUM_CONSUMERS": 1}),
        "time_us": 6.7,
        "timed": "hot",
        "tile_q": 64,
        "variants": 4,
        "run": NEW,
    }
    assert tuned.table("nvidia-l4", data) is None


@pytest.mark.parametrize("text", ["", "{", '[{"stage": "x"}]', "7", '{"arch": "sm_90a", "sm_count": 132}'])
def test_a_damaged_table_says_what_helps(tmp_path: Path, text: str) -> None:
    path = tuned.path_of(H200, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedRecordError, match=r"git, or delete it: `flashlab tuned`") as caught:
        tuned.table(H200, tmp_path)
    assert "\n" not in str(caught.value)


# --- Tunables ---


def test_named_values_come_before_the_table_and_the_table_before_defaults(data: Path) -> None:
    def found(problem: Problem, slug: str | None = H200, arch: str | None = ARCH, **overrides: int) -> dict[str, int]:
        return tuned.parameters(PINGPONG, slug, problem, arch=arch, overrides=overrides, data=data)

    small = PINGPONG.parameters(64, {"NUM_CONSUMERS": 1})
    assert found(SMALL) == small
    assert found(SMALL, TILE_KV=64) == {**small, "TILE_KV": 64}
    assert found(replace(SMALL, batch=2)) == found(replace(SMALL, dtype="bfloat16")) == small
    assert found(LARGE) == found(replace(LARGE, q_len=4096, kv_len=4096)) == PINGPONG.parameters(64)
    assert found(SMALL, None) == found(SMALL, "nvidia-l4", "sm_89") == found(SMALL, "nvidia-gh200", None) == {}
    assert found(SMALL, "nvidia-gh200") == small, "the same architecture lends its tunables"
    assert found(replace(SMALL, head_dim=128)) == {}, "another head dim is another kernel"


def test_what_was_timed_and_not_tuned_decides_no_tunables(tmp_path: Path) -> None:
    measured = row(PINGPONG, SMALL, 9.0, variants=0, run=NEW, NUM_CONSUMERS=2)
    data = written(tmp_path, (row(PINGPONG, LARGE, 535.0), measured))
    assert tuned.parameters(PINGPONG, H200, SMALL, data=data) == PINGPONG.parameters(64)
    choice = first(SMALL, data)
    assert (choice.row, choice.time_us) == (measured, 9.0)
    assert choice.distance > 0, "a time with other tunables is not one of its own"


def test_a_time_there_with_other_tunables_counts_before_one_of_another_type_with_the_same(tmp_path: Path) -> None:
    there = [row(PERSISTENT, SMALL, 7.1), row(PINGPONG, SMALL, 6.7, variants=0, NUM_CONSUMERS=1)]
    other_type = row(PINGPONG, replace(SMALL, dtype="bfloat16"), 6.9, run=NEW, NUM_CONSUMERS=2)
    choice = first(SMALL, written(tmp_path, (*there, other_type)))
    assert (choice.stage, choice.row, choice.parameters["NUM_CONSUMERS"]) == (PINGPONG, there[1], 2)


def test_a_row_from_before_the_stage_changed_counts_for_nothing(tmp_path: Path) -> None:
    gone = row_of("11_pingpong", SMALL, {"GONE": 1}, 1.0, 64, 4, NEW)
    data = written(tmp_path, (*ROWS[:3], gone))
    assert tuned.parameters(PINGPONG, H200, SMALL, data=data) == PINGPONG.parameters(64)
    assert first(SMALL, data).row.run == OLD


# --- The stage ---


def test_a_problem_on_record_gets_what_was_fastest_there(data: Path) -> None:
    choice = first(SMALL, data)
    assert choice.stage is PINGPONG
    assert choice.parameters["NUM_CONSUMERS"] == 1
    assert (choice.time_us, choice.distance, choice.row) == (6.7, 0.0, ROWS[3])
    assert choice.tuned_on == ROWS[3]
    assert first(LARGE, data).stage is PERSISTENT
    assert tuned.stage_for(SMALL, H200, ARCH, SMS, data) is PINGPONG


def test_another_problem_gets_the_choice_of_the_nearest(data: Path) -> None:
    for near, stage in (
        (Problem.parse("2x8x512x64"), PINGPONG),
        (Problem.parse("1x8x500x64", dtype="bfloat16"), PINGPONG),
        (Problem.parse("2x8x2x600x600x64"), PINGPONG),
        (Problem.parse("8x16x4096x64"), PERSISTENT),
        (Problem.parse("16x32x2048x64", mask="causal"), PERSISTENT),
    ):
        choice = first(near, data)
        assert choice.stage is stage, near.label
        assert choice.distance > 0
        assert choice.row.problem == (SMALL if stage is PINGPONG else LARGE)


def test_a_time_is_scaled_by_waves_and_keys(data: Path) -> None:
    fixed = tuned.FIXED_SHARE * 6.7
    # Twice the tiles, 128, are still one wave; the same keys a query.
    assert first(Problem.parse("2x8x512x64"), data).time_us == 6.7
    # 192 tiles are two waves.
    assert first(Problem.parse("3x8x512x64"), data).time_us == pytest.approx(fixed + 2 * (6.7 - fixed))
    longer = first(Problem.parse("1x8x8x512x1024x64"), data)
    assert longer.time_us == pytest.approx(fixed + 2 * (6.7 - fixed))
    # Of 2816 tiles an SM has 22; of twice as many, 43.
    twice = first(Problem.parse("32x16x2048x64"), data)
    assert twice.time_us == pytest.approx(fixed + 43 / 22 * (513.0 - fixed))
    causal = first(Problem.parse("16x16x2048x64", mask="causal"), data)
    assert causal.time_us == pytest.approx(fixed + (513.0 - fixed) / 2)


def test_what_was_measured_there_comes_before_what_is_foretold_unless_it_is_far_slower(tmp_path: Path) -> None:
    away, least = row(PERSISTENT, LARGE, 513.0), row(PINGPONG, replace(SMALL, head_dim=128), 5.0)
    foretold = first(SMALL, written(tmp_path, (away, least, row(PINGPONG, SMALL, 600.0, tile_q=64))))
    assert foretold.stage is PERSISTENT
    assert foretold.row == away
    near = first(
        SMALL, written(tmp_path / "near", (away, least, row(PINGPONG, SMALL, foretold.time_us * 1.5, tile_q=64)))
    )
    assert near.stage is PINGPONG


def test_what_was_measured_a_key_further_is_foretold_all_the_same(tmp_path: Path) -> None:
    off = replace(LARGE, kv_len=2049)
    data = written(tmp_path, (row(PERSISTENT, off, 540.0), row(PINGPONG, LARGE, 535.0)))
    assert first(off, data).stage is PERSISTENT


def test_decoding_takes_as_long_as_its_keys_and_values_take_to_read(tmp_path: Path) -> None:
    """Not as its query heads are many: those that share a K/V head read it once."""
    grouped, own = (Problem.parse(f"4x32x{kv_heads}x1x8192x128") for kv_heads in (8, 32))
    split, short = registry.get("d0_split_kv"), registry.get("d11_short_ends")
    rows = [row(split, Problem.parse("1x8x1x1x128x128"), 4.0, tile_q=16)]
    rows += [row(split, grouped, 30.0, tile_q=16), row(short, grouped, 32.0, tile_q=16)]
    data = written(tmp_path, rows)
    fixed_us = 4.0 * tuned.DECODE_FIXED_SHARE
    assert first(own, data).time_us == pytest.approx(fixed_us + 4 * (30.0 - fixed_us))
    measured = row(short, own, 115.0, tile_q=16)
    taken = first(own, written(tmp_path, [*rows, measured]))
    assert (taken.stage, taken.row) == (short, measured), "not what took less with a fourth of the K/V heads"


def test_one_tile_of_keys_is_read_by_no_more_blocks_than_a_kernel_has_for_it(tmp_path: Path) -> None:
    """With 16 blocks each, eight tiles have nearly all SMs, and one of them alone takes as long."""
    eight, one = Problem.parse("1x32x8x1x8192x128"), Problem.parse("1x4x1x1x8192x128")
    split, groups = registry.get("d0_split_kv"), registry.get("d16_part_groups")
    rows = [row(split, eight, 12.5, tile_q=16, SPLITS=16), row(groups, eight, 14.0, tile_q=16)]
    data = written(tmp_path, [row(split, Problem.parse("1x4x1x1x128x128"), 4.0, tile_q=16), *rows])
    times_us = {choice.stage.id: choice.time_us for choice in tuned.rank(one, H200, ARCH, SMS, data).choices}
    assert times_us[split.id] == pytest.approx(12.5, rel=0.05)
    assert times_us[groups.id] < 7


def test_a_new_table_of_a_kin_is_noticed(data: Path) -> None:
    before = tuned.stamps(data)
    assert tuned.stamps(written(data, ROWS, slug="another")) != before


def test_a_kin_that_lacks_the_stage_does_not_overrule(data: Path) -> None:
    """What it selects among the stages that it has says nothing of one that it never timed."""
    written(data, [row(SWIZZLE, SMALL, 5.0, tile_q=128)], slug="nvidia-h100")
    mine = [row(PINGPONG, SMALL, 9.0, tile_q=64)]
    assert first(SMALL, written(data, mine, slug="nvidia-h200"), "nvidia-h200").stage is PINGPONG


def test_of_two_rows_at_a_problem_the_newer_one_tells_the_time(tmp_path: Path) -> None:
    newer = row(PINGPONG, SMALL, 7.0, variants=0, run=NEW, NUM_CONSUMERS=1)
    data = written(tmp_path, (row(PINGPONG, SMALL, 6.7, run=OLD, NUM_CONSUMERS=1), newer))
    assert first(SMALL, data).row == newer


def test_a_run_that_timed_two_stages_there_tells_their_times_before_a_newer_one_of_one(tmp_path: Path) -> None:
    together = [row(PERSISTENT, SMALL, 7.1, variants=0), row(PINGPONG, SMALL, 6.9, variants=0)]
    alone = row(PINGPONG, SMALL, 7.3, run=NEW)
    choice = first(SMALL, written(tmp_path, (*together, alone)))
    assert (choice.stage, choice.row, choice.tuned_on) == (PINGPONG, together[1], alone)


def test_only_the_ladder_is_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton, dead = registry.get("t0_triton"), registry.get("branch_free")
    data = written(tmp_path, (*ROWS, row(triton, SMALL, 1.0), row(dead, SMALL, 1.0)))
    names = [choice.stage.id for choice in tuned.rank(SMALL, H200, ARCH, SMS, data).choices]
    assert names == ["11_pingpong", "12_persistent", "08_swizzle"]
    left = {name: stage for name, stage in registry.CUDA_STAGES.items() if name != "11_pingpong"}
    monkeypatch.setattr(registry, "CUDA_STAGES", left)
    tuned.choices.cache_clear()
    assert first(SMALL, data).stage is PERSISTENT
    tuned.choices.cache_clear()


def test_a_head_dim_that_is_not_on_record_gets_the_last_rung(data: Path) -> None:
    wide = Problem.parse("1x8x512x128")
    assert tuned.rank(wide, H200, ARCH, SMS, data).choices == ()
    assert tuned.stage_for(wide, H200, ARCH, SMS, data) is registry.best(wide, ARCH)
    assert tuned.stage_for(Problem.parse("1x8x512x256"), H200, ARCH, SMS, data).id == list(registry.CUDA_STAGES)[-1]
    assert tuned.stage_for(Problem.parse("1x8x512x96"), "nvidia-a100", "sm_80", 108, data).id == "08_swizzle"
    with pytest.raises(UnsupportedError, match="head dim: wanted one of 64"):
        tuned.stage_for(Problem.parse("1x8x512x80"), H200, ARCH, SMS, data)


# --- Other GPUs ---


def test_an_unknown_gpu_gets_its_nearest_kins_choice(data: Path) -> None:
    ranking = tuned.rank(SMALL, "nvidia-gh200-480gb", ARCH, SMS, data)
    assert ranking.table is not None
    assert ranking.table.gpu == H200
    assert ranking.choices[0].stage is PINGPONG
    assert ranking.choices[0].parameters["NUM_CONSUMERS"] == 1


def test_an_unknown_gpu_gets_the_tunables_that_its_kin_borrows(data: Path) -> None:
    """The kin's time, which a stage is chosen by, may be of tunables that were lent to the kin."""
    timed = row(PINGPONG, SMALL, 6.8, variants=0, tile_q=64, NUM_CONSUMERS=1)
    written(data, [timed, row(SWIZZLE, SMALL, 11.0, tile_q=128)], slug="nvidia-h100")
    for slug in ("nvidia-h100", "nvidia-a-stranger"):
        taken = first(SMALL, data, slug)
        assert (taken.stage, taken.row, taken.tuned_on) == (PINGPONG, timed, ROWS[3])
        assert tuned.parameters(PINGPONG, slug, SMALL, arch=ARCH, data=data) == timed.parameters


def test_a_stage_that_a_gpu_never_timed_wins_where_its_kin_takes_it(data: Path) -> None:
    small = [row(SWIZZLE, SMALL, 5.0, tile_q=128), row(PINGPONG, SMALL, 9.0, tile_q=64)]
    written(data, [row(PINGPONG, LARGE, 600.0), *small], slug="nvidia-h100-pcie")
    taken = first(LARGE, data, "nvidia-h100-pcie")
    assert (taken.stage, taken.time_us) == (PERSISTENT, 513.0)
    taken = first(SMALL, data, "nvidia-h100-pcie")
    assert (taken.stage, taken.time_us) == (SWIZZLE, 5.0), "it has timed what its kin takes, 11_pingpong"
    assert tuned.parameters(PERSISTENT, "nvidia-h100-pcie", SMALL, arch=ARCH, data=data)["NUM_CONSUMERS"] == 1
    explained = flashlab_explain(LARGE, gpu="nvidia-h100-pcie", data=data)
    assert explained["kin"] == H200
    assert explained["lent"].startswith("nvidia-h100-pcie has no records of that stage at that head dim")


def test_a_problem_that_its_kin_alone_timed_a_stage_at_gets_its_kins_choice(data: Path) -> None:
    """One time of a new stage elsewhere must not hide what the kin measured of it here."""
    near = replace(SMALL, batch=2)
    written(data, [*ROWS, row(PINGPONG, near, 7.0, tile_q=64, NUM_CONSUMERS=1)])
    own = [row(SWIZZLE, near, 8.0, tile_q=128), row(PINGPONG, SMALL, 8.0, variants=0, tile_q=64, NUM_CONSUMERS=1)]
    written(data, own, slug="nvidia-h100-80gb-hbm3")
    explained = flashlab_explain(near, gpu="nvidia-h100-80gb-hbm3", data=data)
    assert (explained["stage"], explained["predicted_us"], explained["kin"]) == ("11_pingpong", 7.0, H200)
    assert explained["lent"].startswith(
        "nvidia-h100-80gb-hbm3 has no time of that stage at that problem, so its nearest"
    )
    written(data, [*own, row(PINGPONG, near, 9.0, variants=0, tile_q=64)], slug="nvidia-h100-80gb-hbm3")
    assert first(near, data, "nvidia-h100-80gb-hbm3").stage is SWIZZLE, "it has timed what its kin takes"


def test_a_stage_that_its_kin_timed_farther_from_a_model_does_not_win(data: Path) -> None:
    """In a step the order of kernels for decoding is another than back to back."""
    for mine, theirs, taken in (
        ("hot", "hot", PINGPONG),
        ("step", "rotating", PERSISTENT),
        ("rotating", "step", PINGPONG),
    ):
        written(data, [one.model_copy(update={"timed": theirs}) for one in ROWS])
        own = row(PERSISTENT, SMALL, 9.0).model_copy(update={"timed": mine})
        assert first(SMALL, written(data, [own], slug="nvidia-h100"), "nvidia-h100").stage is taken


def test_a_problem_that_its_kin_was_tuned_nearer_to_gets_its_kins_tunables(data: Path) -> None:
    near = replace(SMALL, batch=2)
    own = [row(PINGPONG, LARGE, 600.0, TILE_KV=96), row(PINGPONG, near, 8.0, variants=0, tile_q=192)]
    written(data, own, slug="nvidia-h100-pcie")
    taken = first(near, data, "nvidia-h100-pcie")
    assert (taken.stage, taken.row, taken.tuned_on) == (PINGPONG, own[1], ROWS[3])
    named = tuned.parameters(PINGPONG, "nvidia-h100-pcie", near, arch=ARCH, data=data)
    assert dict(taken.parameters) == named == ROWS[3].parameters
    assert first(LARGE, data, "nvidia-h100-pcie").parameters["NUM_CONSUMERS"] == 3
    assert tuned.parameters(PINGPONG, "nvidia-h100-pcie", LARGE, arch=ARCH, data=data) == own[0].parameters, "its own"
    assert tuned.parameters(PINGPONG, "nvidia-h100-pcie", near, data=data) == own[0].parameters, "nobody lends"


def test_a_decoders_tunables_are_for_about_as_many_work_tiles(tmp_path: Path) -> None:
    """SPLITS is how many blocks share the keys of one work tile: with 512 tiles, eight each are far too many."""
    d0, one = registry.get("d0_split_kv"), Problem.parse("1x32x8x1x8192x64")
    won = row(d0, one, 8.5, tile_q=16, WARPS=8, SPLITS=8)
    written(tmp_path, [won])
    for problem, taken in (
        (one, won.parameters),
        (replace(one, kv_len=1000), won.parameters),
        (replace(one, q_heads=48, kv_heads=12), won.parameters),
        (replace(one, batch=2), {}),
        (replace(one, batch=64), {}),
        (replace(one, kv_heads=4, q_heads=16), {}),
    ):
        assert tuned.parameters(d0, H200, problem, arch=ARCH, data=tmp_path) == taken
    wide = first(replace(one, batch=64), tmp_path)
    assert (wide.stage, wide.tuned_on, wide.parameters) == (d0, None, d0.parameters(64))


def test_a_decoder_takes_what_was_timed_on_the_problem_then_what_its_own_gpu_was_tuned_to(tmp_path: Path) -> None:
    """GPUs of one architecture differ in memory: an H100's tunables made d0_split_kv an eighth slower on an H200."""
    d0 = registry.get("d0_split_kv")
    short, here, long = (Problem.parse(f"1x32x8x1x{keys}x128") for keys in (8192, 32768, 131072))
    own = row(d0, short, 12.6, tile_q=16, WARPS=8, SPLITS=8)
    theirs = row(d0, here, 45.0, tile_q=16, PIPELINE_STAGES=2)
    written(tmp_path, [theirs], slug="nvidia-h100-pcie")
    written(tmp_path, [own])
    assert tuned.parameters(d0, H200, here, arch=ARCH, data=tmp_path) == own.parameters
    slow = row(d0, here, 39.3, variants=0, tile_q=16, PIPELINE_STAGES=2)
    fast = row(d0, here, 34.8, variants=0, tile_q=16, run=NEW, WARPS=4, SPLITS=16)
    written(tmp_path, [own, slow, fast])
    assert tuned.parameters(d0, H200, here, arch=ARCH, data=tmp_path) == fast.parameters
    assert tuned.parameters(d0, H200, long, arch=ARCH, data=tmp_path) == own.parameters, "nobody tuned it nearer"


def test_an_architecture_that_cannot_run_that_stage_gets_the_best_that_it_can(data: Path) -> None:
    choice = first(SMALL, data, "nvidia-a100-sxm4-80gb", "sm_80", 108)
    assert choice.stage is SWIZZLE
    assert choice.tuned_on is None
    assert choice.parameters == SWIZZLE.parameters(64), "tunables stay within an architecture"
    with pytest.raises(UnsupportedError):
        tuned.stage_for(replace(SMALL, dtype="bfloat16"), "tesla-t4", "sm_75", 40, data)


def test_the_nearest_kin_is_of_the_same_architecture_then_capability_then_size(tmp_path: Path) -> None:
    def lender(arch: str, sm_count: int | None = None) -> str:
        found = tuned.table_for("nobody", arch, sm_count, tmp_path)
        assert found is not None
        return found.gpu

    assert tuned.table_for("nobody", ARCH, SMS, tmp_path) is None
    for slug, arch, sm_count in (("a100", "sm_80", 108), ("h200", ARCH, 132), ("h100-pcie", ARCH, 114)):
        written(tmp_path, ROWS, slug=slug, arch=arch, sm_count=sm_count)
    assert lender(ARCH, 132) == "h200"
    assert lender(ARCH, 110) == "h100-pcie"
    assert lender("sm_86") == lender("sm_75") == "a100"
    assert lender("sm_100a", 130) == "h200"
    own = tuned.table_for("a100", ARCH, SMS, tmp_path)
    assert own is not None
    assert own.gpu == "a100", "its own comes first"


# --- The committed table ---


@pytest.mark.parametrize("stages", [registry.CUDA_STAGES, registry.DECODE], ids=["ladder", "decode"])
@pytest.mark.parametrize("gpu", [H200, "nvidia-h100-80gb-hbm3"])
def test_a_problem_left_out_of_the_committed_table_gets_nearly_the_best(
    gpu: str, stages: Mapping[str, registry.Stage]
) -> None:
    """The rule judged by the records: forget one problem, choose for it by the others, and look up what that takes."""
    found = left_out(gpu, stages)
    lost = [math.log(one.time_us / one.least_us) for one in found]
    wrong = [abs(math.log(one.choice.time_us / one.time_us)) for one in found]
    assert len(lost) > 10
    assert math.exp(math.fsum(lost) / len(lost)) < 1.05, "slower than the best, on geometric average"
    assert math.exp(max(lost)) < 1.3
    assert math.exp(math.fsum(wrong) / len(wrong)) < 1.15, "predicted over measured, or the other way round"


def test_a_problem_left_out_is_chosen_for_by_the_others(tmp_path: Path) -> None:
    """By the larger problem 12_persistent is the fastest, and by the smaller one 11_pingpong is."""
    stages, data = registry.CUDA_STAGES, written(tmp_path, ROWS)
    found = {one.problem: one for one in left_out(H200, stages, data)}
    assert {problem: one.choice.stage.id for problem, one in found.items()} == {
        SMALL: "12_persistent",
        LARGE: "11_pingpong",
    }
    assert (found[SMALL].time_us, found[SMALL].least_us) == (7.3, 6.7)
    assert found[SMALL].choice.row in ROWS[:3], "foretold by the other problem"
    text = left_out_table({"the ladder": [*found.values()], "for decoding": left_out(H200, registry.DECODE, data)})
    assert "| the ladder | 2 | 1.066 | 1.090 |" in text
    assert "decoding" not in text


def plainly(
    problem: Problem, found: tuned.Table, lenders: Sequence[tuned.Table], arch: str, sm_count: int
) -> list[tuple[Any, ...]]:
    """The three steps as the module says them, row by row."""
    sms = found.sm_count / sm_count

    def distance(row: tuned.Row, sms: float = 1.0) -> float:
        work_tiles, *others = tuned.ratios(problem, row).values()
        *apart, group = (abs(math.log2(ratio)) for ratio in (work_tiles * sms, *others))
        return sum(apart) + 0.25 * group + (3 * (problem.mask != row.problem.mask) + (problem.dtype != row.dtype) / 2)

    def more_tiles(row: tuned.Row) -> float:
        both = (
            one.batch * one.kv_heads * math.ceil(one.q_heads // one.kv_heads * one.q_len / row.tile_q)
            for one in (problem, row.problem)
        )
        return next(both) / next(both)

    def busiest(one: Problem, row: tuned.Row, sm_count: int) -> float:
        rows = one.q_heads // one.kv_heads * one.q_len
        waves = one.batch * one.q_heads * math.ceil(one.q_len / row.tile_q) / sm_count
        if row.stage in registry.DECODE:
            splits = row.parameters["SPLITS"] or 16  # where the launch chooses
            waves = max(one.batch * one.kv_heads * math.ceil(rows / row.tile_q) / sm_count, 1 / splits)
        return (waves if row.stage in registry.DECODE else math.ceil(waves)) * one.visible_scores / one.q_len

    choices = []
    for stage in (*registry.CUDA_STAGES.values(), *registry.DECODE.values()):
        by_table = {
            of.gpu: [
                row
                for row in of.rows
                if (row.stage, row.problem.head_dim) == (stage.id, problem.head_dim)
                and row.parameters.keys() == stage.params.keys()
            ]
            for of in (found, *lenders)
        }
        rows = by_table[found.gpu]
        if stage.by_name_only or stage.why_not(problem, arch) or not rows:
            continue
        decodes = stage.id in registry.DECODE
        tried = [
            ((number, distance(row), row.time_us if here else 0) if decodes else distance(row), row)
            for number, of in enumerate(lenders)
            for row in by_table[of.gpu]
            for here in [decodes and number == 0 and distance(row) == 0]
            if (row.variants or here) and of.arch == arch and (not decodes or 0.5 < more_tiles(row) < 2)
        ]
        tuned_on = min(tried, key=itemgetter(0), default=(None, None))[1]
        values = stage.parameters(problem.head_dim, tuned_on.parameters if tuned_on else None)
        beside = {(row.run, row.problem) for row in found.rows if row.stage != stage.id}
        rows.sort(key=lambda row: ((row.run, row.problem) in beside, row.run), reverse=True)
        far, row = min(
            ((distance(row, sms) + 0.25 * (row.parameters != values), row) for row in rows), key=itemgetter(0)
        )
        times = busiest(problem, row, sm_count) / busiest(row.problem, row, found.sm_count)
        share = tuned.DECODE_FIXED_SHARE if stage.id in registry.DECODE else tuned.FIXED_SHARE
        fixed = min(share * found.least_us, row.time_us)
        time_us = row.time_us if times == 1 else fixed + (row.time_us - fixed) * times
        choices.append((stage, values, time_us, row, tuned_on, far))
    return sorted(choices, key=lambda one: one[2] * tuned.FARTHER ** max(one[5], one[3].problem != problem))


@tiers
def test_the_choice_is_what_the_three_steps_say_of_any_problem(whole: bool) -> None:
    tables, rng = tuned._tables(H200, ARCH, SMS, DATA), random.Random(0)
    compared = 0
    for _ in range(1500 if whole else 400):
        kv_heads, q_len, kv_len = (
            rng.choice((1, 2, 8)),
            *(
                rng.choice((1, rng.randint(1, 20000), 2 ** rng.randint(0, 14), 3 * 2 ** rng.randint(0, 10)))
                for _ in "qk"
            ),
        )
        problem = Problem(
            batch=rng.choice((1, 2, 3, 16, 64)),
            q_heads=kv_heads * rng.choice((1, 3, 4, 8)),
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            head_dim=rng.choice((64, 128, 256)),
            dtype=rng.choice(("float16", "bfloat16")),
            mask=rng.choice(("full", "causal")),
        )
        arch, sm_count = rng.choice(((ARCH, SMS), (ARCH, 114), ("sm_80", 108)))
        table, choices = tuned.rank(problem, H200, arch, sm_count)
        assert table is not None
        # Where a stage has no records here, the kin's table may decide, which borrows from nobody.
        lenders = tables if table is tables[0] else tables[1:2]
        assert list(map(tuple, choices)) == plainly(problem, table, lenders, arch, sm_count), problem.label
        compared += len(choices)
        if choices:
            one = choices[-1 if table is tables[0] else 0]
            stage, row = one.stage, one.tuned_on
            named = tuned.parameters(stage, H200, problem, arch=arch)
            assert named == (row.parameters if row and arch == ARCH else {})
    assert compared > (5000 if whole else 1300)


# --- flashlab explain ---


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: "wanted a CUDA GPU, got none")


def explained(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments, "--data", str(data)])


def as_json(data: Path, *arguments: str) -> Mapping[str, Any]:
    result = explained(data, *arguments, "--json")
    assert result.exit_code == 0, result.exception
    found: Mapping[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.usefixtures("without_gpu")
def test_explain_tells_the_choice_its_record_and_the_runners_up(data: Path) -> None:
    found = as_json(data, "1x8x512x64")
    assert found["problem"] == "B1 H8 S512 D64 full float16"
    assert (found["gpu"], found["arch"], found["kin"], found["lent"]) == (H200, ARCH, None, "")
    assert (found["stage"], found["parameters"]["NUM_CONSUMERS"]) == ("11_pingpong", 1)
    assert (found["predicted_us"], found["on_record"], found["run"]) == (6.7, True, NEW)
    assert [(one["stage"], one["predicted_us"]) for one in found["runners_up"]] == [
        ("12_persistent", 7.3),
        ("08_swizzle", 11.9),
    ]
    assert found["reason"] == (
        f"On record at this problem, where 11_pingpong took 6.7 µs in run {NEW}; the least of 3 stages, 3 of them "
        "timed there."
    )
    shown = explained(data, "1x8x512x64").stdout
    assert found["reason"] in shown
    assert shown.index("11_pingpong") < shown.index("12_persistent") < shown.index("08_swizzle")


@pytest.mark.usefixtures("without_gpu")
def test_explain_says_in_what_the_nearest_problem_is_near(data: Path) -> None:
    found = as_json(data, "2x8x512x64", "--dtype", "bfloat16")
    assert not found["on_record"]
    assert found["time_from"] == found["tuned_on"] == "B1 H8 S512 D64 full float16"
    assert found["reason"].startswith(
        "Nearest problem on record: B1 H8 S512 D64 full float16 (same kv_len, q_len, GQA ratio, mask; 2 times the work "
        "tiles, another type), where 11_pingpong took 6.7 µs"
    )
    alike = as_json(data, "2x4x512x64")
    assert not alike["on_record"], "as much work is not the same problem"
    assert alike["reason"].startswith("Nearest problem on record: B1 H8 S512 D64")


@pytest.mark.usefixtures("without_gpu")
def test_explain_says_why_what_is_predicted_to_be_faster_is_not_taken(tmp_path: Path) -> None:
    far = Problem.parse("1x8x8x1024x1024x64")
    idle = row(SWIZZLE, Problem.parse("1x1x64x64"), 5.0, tile_q=128)
    data = written(tmp_path, [row(PINGPONG, SMALL, 9.0), row(SWIZZLE, far, 12.0, tile_q=128), idle])
    found = as_json(data, SMALL.shape)
    (second,) = found["runners_up"]
    assert second["predicted_us"] < found["predicted_us"]
    assert found["reason"].endswith(
        "; first of 2 stages, 1 of them timed there. 08_swizzle may take less, but what says so is of other tunables "
        "or of a farther problem."
    )


@pytest.mark.usefixtures("without_gpu")
def test_explain_predicts_no_less_than_a_launch_takes(data: Path, tmp_path: Path) -> None:
    found = as_json(data, "1x8x256x64")
    assert found["predicted_us"] == 6.7
    assert found["reason"].endswith(
        " Scaled to this problem that is 6.4 µs, but no launch of 11_pingpong on record took less than 6.7 µs, which "
        "is predicted."
    )
    assert "but no launch" not in as_json(data, "1x8x512x64")["reason"]
    # A stage that only ever had much to do says nothing of small launches: no launch of any took less.
    only_large = written(tmp_path / "large", [row(PINGPONG, LARGE, 535.0), row(SWIZZLE, SMALL, 11.9, tile_q=128)])
    runner_up = as_json(only_large, "1x1x8x64")
    times = {one["stage"]: one["predicted_us"] for one in (runner_up, *runner_up["runners_up"])}
    assert times == {"08_swizzle": 11.9, "11_pingpong": 11.9}
    of_records = as_json(DATA, "1x32x8x1x8192x128", "--gpu", H200, "--window", "1023")
    table = tuned.table(H200)
    assert table is not None
    assert of_records["predicted_us"] >= min(one.time_us for one in table.rows if one.stage == of_records["stage"])


@pytest.mark.usefixtures("without_gpu")
def test_explain_says_whose_choice_an_unknown_gpu_gets(data: Path) -> None:
    found = as_json(data, "1x8x512x64", "--gpu", "nvidia-h100-80gb-hbm3")
    assert (found["kin"], found["stage"], found["predicted_us"]) == (H200, "11_pingpong", 6.7)
    assert found["lent"].startswith("nvidia-h100-80gb-hbm3 has no table of choices, so its nearest kin, nvidia-h200")
    assert "device memory" in found["lent"]
    assert f"11_pingpong took 6.7 µs on {H200} in run" in found["reason"]
    written(data, [row(PERSISTENT, LARGE, 500.0), row(PINGPONG, LARGE, 520.0)], slug="nvidia-h100-80gb-hbm3")
    written(data, ROWS[3:4], slug=H200)
    found = as_json(data, LARGE.shape, "--gpu", H200)
    assert (found["kin"], found["stage"], found["predicted_us"]) == ("nvidia-h100-80gb-hbm3", "12_persistent", 500.0)
    written(data, ROWS, slug=H200)
    stranger = as_json(data, "1x8x512x64", "--gpu", "nvidia-a100-sxm4-80gb", "--arch", "sm_80")
    assert (stranger["stage"], stranger["predicted_us"]) == ("08_swizzle", None)
    assert "no time is predicted" in stranger["lent"]
    assert stranger["lent"] in explained(data, "1x8x512x64", "--gpu", "nvidia-a100-sxm4-80gb", "--arch", "sm_80").stdout


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("window", "as_called"), [("511", ()), ("4096,511", ()), ("-1,0", ("--mask", "causal")), ("9,0", None)]
)
def test_explain_takes_a_window_as_the_call_does(window: str, as_called: tuple[str, ...] | None) -> None:
    """A side that hides no key asks for no stage that takes windows, and one of no later keys is the causal mask."""
    found = as_json(DATA, SMALL.shape, "--gpu", H200, "--window", window)
    if as_called is None:
        assert (found["mask"], found["window"]) == ("causal", [9, -1])
    else:
        assert found == as_json(DATA, SMALL.shape, "--gpu", H200, *as_called)


@pytest.mark.usefixtures("without_gpu")
def test_explain_falls_back_to_the_last_rung_and_says_so(data: Path) -> None:
    found = as_json(data, "1x8x512x128", "--mask", "causal")
    assert found["stage"] == registry.best(Problem.parse("1x8x512x128"), ARCH).id
    assert (found["predicted_us"], found["runners_up"]) == (None, [])
    assert found["reason"].startswith("Nothing of head dim 128 is on record")


@pytest.mark.usefixtures("without_gpu")
def test_explain_refuses_what_it_cannot_know(data: Path, tmp_path: Path) -> None:
    for arguments, error, words in (
        (("1x8x512",), ValueError, "shape: wanted"),
        (("1x8x512x80",), UnsupportedError, "head dim: wanted one of 64"),
        (("1x8x512x64", "--gpu", "nvidia-nobody"), ParameterError, "--arch too, got 'nvidia-nobody'"),
        (("1x8x512x64", "--gpu", "nvidia-nobody", "--arch", "sm_1"), ParameterError, "arch: wanted one of"),
        (("1x8x512x64", "--gpu", ".."), ParameterError, "gpu: wanted a folder under data/, such as nvidia-h200"),
        (("1x8x512x64", "--arch", "sm_80"), ParameterError, "arch: wanted --gpu too"),
        (("1x8x512x64", "--gpu", H200, "--arch", "sm_80"), ParameterError, f"arch: wanted {ARCH}, which {H200} is"),
        (("1x8x512x64", "--gpu", "nvidia-h100-80gb-hbm3", "--arch", "sm_80"), ParameterError, f"arch: wanted {ARCH}"),
        (("1x8x99999999999x64",), ShapeError, "q_len: wanted at most 536870912"),
        (("1x8x512x64", "--softcap", "1e39"), ParameterError, "softcap: wanted a positive finite number of at most"),
    ):
        refused = explained(data, *arguments)
        assert isinstance(refused.exception, error)
        assert words in str(refused.exception)
    nothing = explained(tmp_path / "empty", "1x8x512x64")
    assert isinstance(nothing.exception, NoDataError)
    assert "flashlab tuned" in str(nothing.exception)


@pytest.mark.usefixtures("without_gpu")
def test_explain_takes_the_committed_records() -> None:
    assert as_json(DATA, "16x16x2048x64", "--gpu", H200)["on_record"]


def test_a_kernel_with_features_has_its_defaults() -> None:
    """Tunables that won without a window or a soft cap may not even compile with one."""
    stage = registry.get("08_swizzle")
    plain = Problem.parse("4x16x2048x64")
    assert tuned.parameters(stage, "nvidia-h200", plain) != {}
    for features in ({"softcap": 30.0}, {"window": (100, -1)}):
        asked = replace(plain, **features)
        assert tuned.parameters(stage, "nvidia-h200", asked) == {}
        taken = next(one for one in tuned.rank(asked, "nvidia-h200", "sm_90a").choices if one.stage is stage)
        assert taken.parameters == stage.parameters(64)
