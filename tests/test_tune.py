"""The autotuner: variants, records of losers and refused ones, and the table that the records make."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
from shared import tiers

from flashlab.build import compiler
from flashlab.core.errors import CompileError, FlashlabError, NoDataError, ParameterError
from flashlab.core.paths import DATA, ROOT
from flashlab.core.problem import AS_IN_A_MODEL, MASKS, Cache, Problem, suite
from flashlab.kernels import registry
from flashlab.measure import tune, tuned
from flashlab.measure.options import Options, Plan
from flashlab.record import provenance, schema, store
from flashlab.record.schema import Tuning
from flashlab.run import choice, gpu
from flashlab.show import tuning

STAGE = registry.STAGES["03_warp_rows"]
PROBLEM = Problem.parse("16x16x2048x64")


def record(
    parameters: Mapping[str, int],
    time_us: float | None,
    *,
    run: str = synthetic.RUN,
    problem: Problem = PROBLEM,
    samples: int = 5,
    stage: str = STAGE.id,
) -> Tuning:
    row = synthetic.measurement(stage, problem, run=run)
    fields = {name: getattr(row, name) for name in Tuning.model_fields if hasattr(row, name) and name != "kind"}
    fields |= {"stage": stage, "parameters": dict(parameters)}
    if time_us is None:
        fields |= {"status": "error", "reason": "static_assert", "verdict": None, "samples": (), "cubin": None}
    else:
        fields["samples"] = (
            schema.Samples(
                regime="burst", cache="hot", calls=10, time_us=(time_us,) * samples, sm_clock_mhz=(1980.0,) * samples
            ),
        )
    return Tuning(**fields)


def speed_of(parameters: Mapping[str, int]) -> float:
    """A made-up time, µs: more warps are better, everything else is an accident that the variant decides."""
    chance = zlib.crc32(repr(sorted(parameters.items())).encode()) % 100
    return 1000.0 - 50.0 * parameters["WARPS"] + chance / 100


class FakeTiming:
    """In place of `tune.time`: writes records at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, int]], int]] = []

    def __call__(self, tasks: Sequence[tune.Task], *, plan: Plan, options: Options) -> Path:
        self.asked.append((list(tasks[0].variants), plan.samples))
        run = f"20260102T03040{len(self.asked)}Z-0123abc"
        path = options.data / "nvidia-h200" / "tuning" / f"{run}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        for (_, problem), variants, *_ in tasks:
            for variant in variants:
                row = record(variant, speed_of(variant), run=run, problem=problem, samples=plan.samples)
                store.append(path, row)
        return path


def tune_fake(
    tmp_path: Path, timing: FakeTiming, *, grid: Mapping[str, Sequence[int]], problems: Sequence[Problem] = (PROBLEM,)
) -> list[tune.Task]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "time", timing)
        patch.setattr(gpu, "info", lambda _: SimpleNamespace(arch="sm_90a", slug="nvidia-h200"))
        options = Options(data=tmp_path)
        return tune.tune(tune.tasks_of(STAGE, problems, grid, options=options), options=options)


def test_variants_are_every_combination_with_the_defaults_first() -> None:
    found = tune.variants_of(STAGE, 64, {"WARPS": (2, 4), "TILE_KV": (32, 64, 128)})
    assert found[0] == STAGE.parameters(64)
    assert len(found) == 6
    assert {variant["PADDING"] for variant in found} == {STAGE.parameters(64)["PADDING"]}


def test_each_varies_one_tunable_at_a_time() -> None:
    start = STAGE.parameters(64)
    found = tune.variants_of(STAGE, 64, each=True)
    assert all(sum(variant[name] != start[name] for name in start) <= 1 for variant in found)
    assert len(found) == 1 + sum(len(set(param.choices) - {start[name]}) for name, param in STAGE.params.items())


def test_too_many_combinations_are_refused_with_a_way_out() -> None:
    with pytest.raises(ParameterError, match="--each"):
        tune.variants_of(STAGE, 64, limit=3)


@pytest.mark.parametrize("text", ["NOTHING=1", "WARPS", "WARPS=a", "WARPS="])
def test_a_grid_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        tune.parse_grid(STAGE, [text])


def test_values_of_one_tunable_given_twice_are_all_tried() -> None:
    assert tune.parse_grid(STAGE, ["WARPS=2,4", "PADDING=0", "WARPS=8,4"]) == {"WARPS": (2, 4, 8), "PADDING": (0,)}


def test_a_shape_given_twice_is_one_problem() -> None:
    shapes = ["1x8x512x64", "1x8x8x512x512x64", "2x8x512x64"]
    found = tune.problems_of(head_dim=64, mask="full", dtype="float16", shapes=shapes)
    assert [problem.shape for problem in found] == ["1x8x512x64", "2x8x512x64"]


def test_refused_and_twin_variants_cost_no_gpu_time() -> None:
    start = STAGE.parameters(64)
    crooked = {**start, "TILE_KV": 60}
    task = tune.Task(tune.Key(STAGE.id, PROBLEM), (start, crooked, dict(start)))
    (found,) = tune.compile_tasks([task], arch="sm_90a")
    assert found.variants == (start,)
    assert found.twins == (start,)
    ((variant, reason),) = found.refused
    assert variant == crooked
    assert "static" in reason
    assert "ommand:" not in reason


def test_every_variant_is_timed_once_and_recorded(tmp_path: Path) -> None:
    timing = FakeTiming()
    grid = {"WARPS": (2, 4, 8), "TILE_KV": (32, 60, 64), "PADDING": (0, 8)}
    (done,) = tune_fake(tmp_path, timing, grid=grid)
    ((variants, samples),) = timing.asked
    assert samples == 25
    assert STAGE.parameters(64) in variants, "defaults take part"
    assert done.path is not None
    rows, damage = store.read(done.path, schema.Tuning)
    assert not damage
    assert len(rows) == len(variants) + len(done.refused)
    assert len(done.refused) == 6
    assert {row.parameters["TILE_KV"] for row in rows if row.status == "error"} == {60}
    assert len(variants) + len(done.refused) + len(done.twins) == 18
    best = min(variants, key=speed_of)
    (row,) = tuned.rows("nvidia-h200", tmp_path)
    assert (row.stage, row.problem) == done.key
    assert row.parameters == best
    assert (row.run, row.variants) == (done.path.stem, len(variants))


def test_a_stage_of_which_nothing_compiles_is_an_error(tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing was to be timed")

    def refused(tasks: Sequence[tune.Task], **_: Any) -> list[tune.Task]:
        reason = "static assertion"
        return [one._replace(variants=(), refused=tuple((bad, reason) for bad in one.variants)) for one in tasks]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "compile_tasks", refused)
        with pytest.raises(CompileError, match="static assertion"):
            tune_fake(tmp_path, refuse, grid={"TILE_KV": (60,)})  # type: ignore[arg-type]


def test_a_newer_round_replaces_the_choice_even_where_it_is_slower(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "tuning"
    folder.mkdir(parents=True)
    a, b = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 2})
    newer = "20260102T030406Z-0123abc"
    for row in (record(a, 10.0), record(b, 20.0), record(a, 30.0, run=newer), record(b, 25.0, run=newer)):
        store.append(folder / f"{row.run}.jsonl", row)
    path = tuned.write_table("nvidia-h200", tmp_path)
    found = choice.table("nvidia-h200", tmp_path)
    assert found is not None
    (row,) = found.rows
    assert (row.stage, row.problem, row.parameters, row.time_us, row.tile_q) == (STAGE.id, PROBLEM, b, 25.0, 64)
    assert (row.variants, row.run) == (2, newer)
    assert (found.gpu, found.arch, found.sm_count) == ("nvidia-h200", "sm_90a", 132)
    assert path.read_text(encoding="utf-8") == tuned.table_text("sm_90a", 132, found.rows)


def test_no_table_can_be_made_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="flashlab tune"):
        tuned.write_table("nvidia-h200", tmp_path)


def test_trials_are_compared_within_their_round() -> None:
    start, other = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8})
    later = "20260102T030406Z-0123abc"
    found = tuning.trials(
        [
            record(start, 100.0, samples=3),
            record(other, 50.0, samples=3),
            record({**start, "TILE_KV": 60}, None),
            record(start, 90.0, run=later, samples=25),
            record(other, 60.0, run=later, samples=25),
        ]
    )
    by_variant = {tuple(sorted(trial["parameters"].items())): trial for trial in found}
    assert by_variant[tuple(sorted(other.items()))]["speedup"] == pytest.approx(90 / 60)
    assert by_variant[tuple(sorted(start.items()))]["speedup"] == 1.0
    refused = by_variant[tuple(sorted({**start, "TILE_KV": 60}.items()))]
    assert (refused["status"], refused["speedup"], refused["reason"]) == ("error", None, "static_assert")
    assert tuning.worth(found) == {
        ("WARPS",): {(4,): 1.0, (8,): pytest.approx(1.5)},
        ("TILE_KV",): {(60,): None, (64,): 1.5},
    }


def test_trials_of_stages_off_the_ladder_are_compared_too() -> None:
    stage, problem = registry.DECODE["d0_split_kv"], Problem.parse("1x32x8x1x8192x128")
    start, other = stage.parameters(128), stage.parameters(128, {"PIPELINE_STAGES": 2})
    assert start != other
    how: dict[str, Any] = {"problem": problem, "stage": stage.id}
    alone = "20260102T030406Z-0123abc"
    found = tuning.trials(
        [
            record(start, 100.0, **how),
            record(other, 50.0, **how),
            record({**start, "PIPELINE_STAGES": 4}, 40.0, run=alone, **how),  # without the defaults
            record({**start, "PIPELINE_STAGES": 99}, None, **how),
        ]
    )
    assert [trial["speedup"] for trial in found] == [1.0, 2.0, None, None]
    levers = tuning.levers_table({tuning.Key(stage.id, problem): found})
    assert "2: 2.000" in levers
    assert "4: not compared, 99: does not run" in levers


def test_what_changed_only_together_has_one_worth() -> None:
    """A list of a few variants says what a change as a whole is worth, and not what each of its tunables is."""
    start = STAGE.parameters(64)
    both = {**start, "WARPS": 8, "PADDING": 16}
    found = tuning.trials([record(start, 100.0), record(both, 50.0)])
    key = found[0]["key"]
    assert tuning.worth(found) == {("WARPS", "PADDING"): {(start["WARPS"], start["PADDING"]): 1.0, (8, 16): 2.0}}
    assert tuning.levers_table({key: found}).count("100.0 %") == 1
    apart = tuning.trials([record(start, 100.0), record(both, 50.0), record({**start, "WARPS": 8}, 80.0)])
    assert set(tuning.worth(apart)) == {("WARPS",), ("PADDING",)}


GPUS = sorted(path.parent.name for path in DATA.glob(f"*/{choice.FILE}")) or [None]


@pytest.mark.parametrize("slug", GPUS)
def test_the_committed_table_is_what_the_records_say(slug: str | None) -> None:
    """What was tuned to the letter; of what was only measured, each row. `flashlab tuned` adds what is newer."""
    found = None if slug is None else choice.table(slug)
    if slug is None or found is None:
        pytest.skip("no GPU has a table yet")
    said = tuned.rows(slug)
    assert [row for row in found.rows if row.variants] == [row for row in said if row.variants]
    recorded = {
        (row.run, row.name, row.problem): (
            row.cubin.parameters,
            {round(samples.median_us, 3) for samples in row.samples if samples.regime == "burst"},
        )
        for row in store.measurements(slug)
        if row.cubin is not None and row.samples
    }
    for row in found.rows:
        if not row.variants:
            parameters, times_us = recorded[row.run, row.stage, row.problem]
            assert parameters == row.parameters
            assert row.time_us in times_us
    written = tuned.table_text(found.arch, found.sm_count, found.rows)
    assert choice.path_of(slug).read_text(encoding="utf-8") == written


@pytest.mark.slow
@tiers
@pytest.mark.parametrize("slug", GPUS)
def test_the_committed_table_fits_the_stages_and_compiles(slug: str | None, whole: bool) -> None:
    """All that it names, and for unaligned rows each stage, head dim and values in one type, under one mask.

    In part, each stage with the first values for it.
    """
    found = None if slug is None else choice.table(slug)
    if found is None:
        pytest.skip("no GPU has a table yet")
    jobs, unaligned, seen = {}, set(), set()
    for row in found.rows:
        stage = registry.get(row.stage)
        assert row.parameters.keys() == stage.params.keys(), f"{row}: write the table anew"
        if not row.variants or (stage.language == "triton" and find_spec("triton") is None):
            continue  # Triton comes with the GPU extra alone
        problem = row.problem
        values = (stage.id, problem.head_dim, *sorted(row.parameters.items()))
        if not whole and stage.id in seen:
            continue
        seen.add(stage.id)
        for aligned in (True,) if values in unaligned or not whole else (True, False):
            unaligned.add(values)
            job = compiler.Job(
                stage=stage,
                head_dim=problem.head_dim,
                dtype=problem.dtype,
                causal=problem.causal,
                arch=found.arch,
                aligned=aligned,
                overrides=row.parameters,
            )
            jobs[job.label] = job
    refused = {
        label: str(cubin)
        for label, cubin in zip(jobs, compiler.compile_many(list(jobs.values())), strict=True)
        if isinstance(cubin, CompileError)
    }
    assert not refused


SLOWER = {"nvidia-h100-80gb-hbm3": {Problem.parse("1x32x1x1x8192x128")}}
"""Where torch's SDPA wins, by 4 %: one K/V head, whose keys a cluster of 16 blocks shares. Where another GPU's table
decides, because this one has not timed the stage, nothing is held against the library."""


@pytest.mark.parametrize("slug", GPUS)
def test_the_choice_is_never_slower_than_torch_where_its_variants_were_tried(slug: str | None) -> None:
    """On the problems that were tuned beside torch's SDPA; `flashlab tuned` lists those that only a bench has timed."""
    held = [one for one in tuned.held_against(slug or "") if one.small_grids]
    if not held:
        pytest.skip("torch's SDPA was timed beside no tuning yet")
    slower = {
        one.problem: f"{one.choice.stage.id} {dict(one.choice.parameters)} takes {one.time_us} µs, SDPA "
        f"{one.peer_us} µs, run {one.run}"
        for one in held
        if one.ratio is not None and one.ratio < 1
    }
    assert slower.keys() == SLOWER.get(slug or "", set()), slower


def test_a_choice_is_held_against_the_library_in_one_process_alone(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "tuning"
    folder.mkdir(parents=True)
    a, b = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8})
    other = Problem.parse("2x8x512x64")
    newer = "20260102T030406Z-0123abc"
    for row in (
        record({}, 9.0, stage="sdpa"),
        record(a, 12.0),
        record(b, 10.0),
        record({}, 15.0, stage="sdpa", problem=other),
        record(b, 11.0, run=newer, problem=other),
        record(a, 14.0, run=newer, problem=other),
    ):
        store.append(folder / f"{row.run}.jsonl", row)
    assert store.read(folder / f"{newer}.jsonl", schema.Tuning)[1] == ()
    tuned.write_table("nvidia-h200", tmp_path)
    first, second = tuned.held_against("nvidia-h200", data=tmp_path)
    assert (first.problem, first.choice.parameters, first.time_us, first.peer_us) == (PROBLEM, b, 10.0, 9.0)
    assert (first.ratio, first.small_grids, first.run) == (0.9, True, synthetic.RUN)
    assert (second.problem, second.ratio, second.run) == (other, None, ""), "two processes are no comparison"
    shown = tuning.choices_table([first, second])
    assert "| 0.90 |" in shown
    assert "| 11.0 | – | – | not in one process |" in shown
    assert shown.startswith("SDPA is faster at 1 of the 1 problems where one run timed both. At 1 none did")
    lent = tuning.choices_table([replace(second, lender="nvidia-h100")])
    assert re.search(r"\| – \| – \| – \| .*not timed here: chosen by the records of nvidia-h100<", lent)
    assert "sdpa" not in tuning.trials_table(tuning.by_key("nvidia-h200", tmp_path)), "a library is no variant"


def test_a_choice_is_held_by_the_variant_that_a_bench_named(tmp_path: Path) -> None:
    """`flashlab bench --stages ID[NAME=VALUE]` times the stage with the tunables that a tuning then chose."""
    folder = runs_beside_a_tuning(tmp_path)
    tuned.write_table("nvidia-h200", tmp_path)
    run = "20260102T030406Z-0123abc"
    named = registry.variant_name(STAGE.id, {"WARPS": 4})
    mine = synthetic.measurement(STAGE.id, PROBLEM, run=run)
    assert mine.cubin is not None
    cubin = mine.cubin.model_copy(update={"parameters": STAGE.parameters(64)})
    for row in (
        mine.model_copy(update={"name": named, "cubin": cubin}),
        mine.model_copy(update={"name": f"{STAGE.id}@edited", "cubin": cubin}),
        synthetic.measurement("sdpa", PROBLEM, run=run),
    ):
        store.append(folder / f"{run}.jsonl", row)
    (held,) = tuned.held_against("nvidia-h200", data=tmp_path)
    assert (held.run, held.small_grids) == (run, False)
    assert held.time_us == pytest.approx(mine.samples_of().median_us)


def test_a_choice_by_another_gpus_records_names_that_gpu(tmp_path: Path) -> None:
    beside, kin = tmp_path / "nvidia-h200" / "tuning", tmp_path / "nvidia-h100-80gb-hbm3"
    beside.mkdir(parents=True)
    for row in (record({}, 9.0, stage="sdpa"), record(STAGE.parameters(64), 12.0)):
        store.append(beside / f"{row.run}.jsonl", row)
    tuned.write_table("nvidia-h200", tmp_path)
    (own,) = tuned.held_against("nvidia-h200", data=tmp_path)
    assert (own.choice.stage, own.lender) == (STAGE, "")
    kin.mkdir()
    better = registry.get("11_pingpong")
    rows = [
        schema.ChoiceRow(
            stage=stage.id,
            **{name: getattr(PROBLEM, name) for name in ("shape", "mask", "dtype")},
            parameters=stage.parameters(64),
            time_us=time_us,
            tile_q=192,
            variants=4,
            run=synthetic.RUN,
        )
        for stage, time_us in ((better, 6.0), (STAGE, 13.0))
    ]
    choice.path_of(kin.name, tmp_path).write_text(tuned.table_text("sm_90a", 132, rows), encoding="utf-8")
    (lent,) = tuned.held_against("nvidia-h200", data=tmp_path)
    assert (lent.choice.stage, lent.lender, lent.ratio) == (better, kin.name, None)


def test_what_a_bench_measured_is_in_the_table_too(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x130x64")
    synthetic.write_synthetic(tmp_path, problems=[problem])
    folder = tmp_path / "nvidia-h200" / "tuning"
    folder.mkdir(parents=True)
    store.append(folder / f"{synthetic.RUN}.jsonl", record(STAGE.parameters(64), 10.0))
    made = tuned.rows("nvidia-h200", tmp_path)
    assert [row.variants for row in made if row.problem == PROBLEM] == [1]
    measured = [row for row in made if row.problem == problem]
    assert {row.stage for row in measured} == set(registry.STAGES), "no library, and each stage once"
    assert {row.variants for row in measured} == {0}


def runs_beside_a_tuning(data: Path) -> Path:
    """A folder for runs of a GPU that has tuned a stage."""
    folder = data / "nvidia-h200" / "runs"
    folder.mkdir(parents=True)
    (data / "nvidia-h200" / "tuning").mkdir()
    store.append(data / "nvidia-h200" / "tuning" / f"{synthetic.RUN}.jsonl", record(STAGE.parameters(64), 10.0))
    return folder


def test_stages_are_compared_by_runs_that_timed_several(tmp_path: Path) -> None:
    """A newer run of one stage alone, on a slower machine, does not put it behind another."""
    problem = Problem.parse("1x2x130x64")
    folder = runs_beside_a_tuning(tmp_path)
    for name in ("01_coalesced", "08_swizzle"):
        store.append(folder / f"{synthetic.RUN}.jsonl", synthetic.measurement(name, problem))
    later = "20991231T000000Z-0123abc"
    for name in ("01_coalesced", "02_half2"):
        at = problem if name == "01_coalesced" else Problem.parse("1x2x131x64")
        store.append(folder / f"{later}.jsonl", synthetic.measurement(name, at).model_copy(update={"run": later}))
    made = {(row.stage, row.problem): row.run for row in tuned.rows("nvidia-h200", tmp_path) if not row.variants}
    assert made == {
        ("01_coalesced", problem): synthetic.RUN,
        ("08_swizzle", problem): synthetic.RUN,
        ("02_half2", Problem.parse("1x2x131x64")): later,
    }


@pytest.mark.parametrize("cache", AS_IN_A_MODEL)
def test_few_rows_count_as_a_model_has_them_where_there_are_such_times(tmp_path: Path, cache: Cache) -> None:
    problem = Problem.parse("1x2x2x1x130x64")
    folder = runs_beside_a_tuning(tmp_path)
    for name in ("01_coalesced", "08_swizzle"):
        row = synthetic.measurement(name, problem)
        if name == "01_coalesced":
            hot = row.samples[0]
            slower = hot.model_copy(update={"cache": "rotating", "time_us": tuple(3 * x for x in hot.time_us)})
            turned = hot.model_copy(update={"cache": cache, "time_us": tuple(2 * x for x in hot.time_us)})
            row = row.model_copy(update={"samples": (*row.samples, *[slower] * (cache == "step"), turned)})
        store.append(folder / f"{synthetic.RUN}.jsonl", row)
    made = [row for row in tuned.rows("nvidia-h200", tmp_path) if row.problem == problem]
    assert [row.stage for row in made] == ["01_coalesced"], "what has no such time is not compared with one"
    assert made[0].time_us == pytest.approx(turned.median_us, abs=1e-3)


def test_many_rows_count_hot_whatever_a_few_stages_take_in_a_step(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x130x64")
    folder = runs_beside_a_tuning(tmp_path)
    rows = [synthetic.measurement(name, problem) for name in ("01_coalesced", "08_swizzle")]
    step = rows[0].samples[0].model_copy(update={"cache": "step"})
    rows[0] = rows[0].model_copy(update={"samples": (*rows[0].samples, step)})
    for row in rows:
        store.append(folder / f"{synthetic.RUN}.jsonl", row)
    assert {row.stage for row in tuned.rows("nvidia-h200", tmp_path) if row.problem == problem} == {
        "01_coalesced",
        "08_swizzle",
    }


def test_times_on_other_inputs_are_not_in_the_table(tmp_path: Path) -> None:
    problem = Problem.parse("1x2x130x64")
    folders = {kind: tmp_path / "nvidia-h200" / kind for kind in ("tuning", "runs")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    store.append(folders["tuning"] / f"{synthetic.RUN}.jsonl", record(STAGE.parameters(64), 10.0))
    later = record(STAGE.parameters(64), 20.0, run="20990101T000000Z-0123abc", problem=replace(PROBLEM, inputs="steps"))
    store.append(folders["tuning"] / f"{later.run}.jsonl", later)
    for inputs in ("normal", "steps"):
        row = synthetic.measurement(STAGE.id, replace(problem, inputs=inputs), run=synthetic.RUN)
        store.append(folders["runs"] / f"{synthetic.RUN}.jsonl", row)
    made = {(row.problem, row.run): row.time_us for row in tuned.rows("nvidia-h200", tmp_path)}
    assert made.keys() == {(PROBLEM, synthetic.RUN), (problem, synthetic.RUN)}
    normal = synthetic.measurement(STAGE.id, problem, run=synthetic.RUN).samples_of()
    assert normal is not None
    assert made[problem, synthetic.RUN] == round(normal.median_us, 3)


def test_the_command_says_what_it_would_try(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashlab.cli.app import app

    what = ["tune", STAGE.id, "--head-dim", "64", "--param", "WARPS=2,4", "--param", "PADDING=0,8", "--dry-run"]
    shown = CliRunner().invoke(app, [*what, "--data", str(tmp_path), "--json"])
    assert shown.exit_code == 0
    row = {"stage": STAGE.id, "variants": 4, "beside": []}
    labels = [Problem.parse("16x16x2048x64", mask=mask).label for mask in MASKS]
    assert json.loads(shown.stdout) == [row | {"problem": label} for label in labels]
    again = CliRunner().invoke(app, [*what, "--head-dim", "64", "--data", str(tmp_path), "--json"])
    assert again.stdout == shown.stdout
    shapes = [part for shape in ("1x8x512x128", "1x8x512x64", "2x8x512x128") for part in ("--shape", shape)]
    shown = CliRunner().invoke(app, ["tune", STAGE.id, *shapes, "--mask", "full", *what[4:], "--json"])
    found = [row["problem"] for row in json.loads(shown.stdout)]
    assert found == [Problem.parse(shape).label for shape in ("1x8x512x64", "1x8x512x128", "2x8x512x128")]
    for wrong, why in (
        ([*what, "--shape", "1x8x512x128"], "wanted head dim 64"),
        (["tune", "d0_split_kv", "--dry-run"], "--shape: wanted one, such as 16x32x8x1x8192x64, for d0_split_kv"),
        (["tune", "d0_split_kv", "--head-dim", "80", "--dry-run"], "takes head dim 64"),
    ):
        refused = CliRunner().invoke(app, wrong).exception
        assert isinstance(refused, FlashlabError)
        assert why in str(refused)
    works = CliRunner().invoke(app, ["tune", "d0_split_kv", "--shape", "16x32x8x1x8192x64", "--each", "--dry-run"])
    assert works.exit_code == 0
    assert not list(tmp_path.iterdir())


def test_pages_show_winners_levers_and_losers(tmp_path: Path) -> None:
    assert tuning.by_key("nvidia-h200", tmp_path) == {}
    tune_fake(tmp_path, FakeTiming(), grid={"WARPS": (2, 4, 8), "TILE_KV": (60, 64)})
    found = tuning.by_key("nvidia-h200", tmp_path)
    assert "| WARPS=8 |" in tuning.winners_table(found, rows=tuned.rows("nvidia-h200", tmp_path))
    levers = tuning.levers_table(found)
    assert "60: does not run" in levers
    trials = tuning.trials_table(found)
    assert "6 variants" in trials
    assert trials.count("| error: ") + trials.count(">error: ") == 3


# --- Plans ------------------------------------------------------------------------------------------------------------


PLANS = sorted((ROOT / "scripts").glob("tuning*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_committed_plans_name_what_there_is_and_try_each_variant_once(path: Path) -> None:
    tasks = tune.read_plan(path)
    assert len({task.key for task in tasks}) == len(tasks)
    for task in tasks:
        stage = registry.get(task.key.stage)
        assert all(variant.keys() == stage.params.keys() for variant in task.variants)
        assert 1 <= len(task.variants) <= 20
        if not task.peers:
            assert stage.parameters(task.key.problem.head_dim) not in task.variants, "the defaults take part anyway"


def test_the_plan_of_small_grids_is_short_and_has_what_fills_them() -> None:
    tasks = tune.read_plan(ROOT / "scripts" / "tuning_small.json")
    assert all(task.peers == (tuned.BESIDE,) for task in tasks)
    assert tune.estimate_s(tasks) <= 180
    tried: dict[Problem, set[int]] = {}
    for task in tasks:
        rows = [variant.get("NUM_CONSUMERS", 0) for variant in task.variants]
        tried.setdefault(task.key.problem, set()).update(rows)
    assert {problem.mask for problem in tried} == set(MASKS)
    for problem, consumers in tried.items():
        if choice.tiles(problem, choice.Tile(192, decodes=False)) < 132:
            assert 1 in consumers, f"{problem.label}: tiles of 192 rows do not fill the SMs"


def test_a_plan_says_masks_and_type_or_means_all_masks_and_float16(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    short = {"stage": STAGE.id, "head_dim": 64, "variants": [{"WARPS": 2}, {"WARPS": 2}, {}]}
    path.write_text(json.dumps([short]), encoding="utf-8")
    variants = (STAGE.parameters(64, {"WARPS": 2}), STAGE.parameters(64))
    problems = [Problem.parse("16x16x2048x64", mask=mask) for mask in MASKS]
    assert tune.read_plan(path) == [tune.Task(tune.Key(STAGE.id, problem), variants) for problem in problems]
    hopper = {"stage": "09_wgmma", "head_dim": 128, "masks": ["causal"], "dtype": "bfloat16", "variants": [{}]}
    path.write_text(json.dumps([hopper]), encoding="utf-8")
    wide = Problem.parse("16x16x2048x128", mask="causal", dtype="bfloat16")
    assert [task.key for task in tune.read_plan(path)] == [("09_wgmma", wide)]
    shapes = ["1x8x512x128", "1x8x8x1x512x128"]
    path.write_text(json.dumps([{**hopper, "shapes": shapes, "dtype": ["float16", "bfloat16"], "peers": ["sdpa"]}]))
    found = tune.read_plan(path)
    assert [(task.key.problem.shape, task.key.problem.dtype) for task in found] == [
        (shape, dtype) for dtype in ("float16", "bfloat16") for shape in shapes
    ]
    assert {task.peers for task in found} == {("sdpa",)}
    for bad, words in (
        ({"a": 1}, "--plan: wanted a JSON list"),
        ({"long": 99 * ["text"]}, r"plan\.json: wanted a valid list, got .{80}$"),
        ([{"stage": STAGE.id}], "--plan: wanted a JSON list"),
        ([{**short, "variants": [{"NOTHING": 1}]}], "no parameter 'NOTHING'"),
        ([{**short, "masks": ["round"]}], "mask"),
        ([{**short, "dtype": "bfloat16"}], "takes float16"),
        ([{**short, "shapes": ["1x8x512x128"]}], "wanted head dim 64"),
        ([{**short, "peers": ["nobody"]}], "peer: wanted one of"),
        ([{**short, "stage": "99_none"}], "00_naive"),
    ):
        path.write_text(json.dumps(bad), encoding="utf-8")
        with pytest.raises(FlashlabError, match=words):
            tune.read_plan(path)
    for text, words in (("# flashlab", r"Expecting value"), ('[{"head_dim": "x"}]', r"0\.\w+: wanted")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FlashlabError, match=words) as caught:
            tune.read_plan(path)
        assert "\n" not in str(caught.value)


def _timing(slug: str, asked: list[list[tune.Task]]) -> Any:
    """In place of `tune.time`, for a plan."""

    def timing(tasks: list[tune.Task], *, plan: Plan, options: Options) -> Path:
        asked.append(tasks)
        path = options.data / slug / "tuning" / f"{synthetic.RUN}.jsonl"
        path.parent.mkdir(parents=True)
        for (stage, problem), variants, *_ in tasks:
            for variant in variants:
                store.append(path, record(variant, speed_of(variant), problem=problem, stage=stage))
        return path

    return timing


def test_a_plan_is_timed_in_one_go_and_makes_a_choice_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[tune.Task]] = []
    monkeypatch.setattr(tune, "time", _timing("nvidia-h200", asked))
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(arch="sm_90a", slug="nvidia-h200"))
    variants = tuple(STAGE.parameters(64, {"WARPS": warps, "TILE_KV": keys}) for warps in (2, 8) for keys in (60, 64))
    keys = [tune.Key(STAGE.id, Problem.parse("16x16x2048x64", mask=mask)) for mask in MASKS]
    done = tune.tune(
        [tune.Task(key, variants, ("sdpa",)) for key in keys],
        options=Options(data=tmp_path),
    )
    (tasks,) = asked
    assert [(*task.key, task.peers) for task in tasks] == [(*key, ("sdpa",)) for key in keys]
    for task in tasks:
        assert STAGE.parameters(64) in task.variants
        assert {variant["TILE_KV"] for variant in task.variants} == {64}
    assert [(*one.key, len(one.refused)) for one in done] == [(*key, 2) for key in keys]
    found, damage = store.read(done[0].path, schema.Tuning)
    assert not damage
    assert sum(row.status == "error" for row in found) == 4
    rows = tuned.rows("nvidia-h200", tmp_path)
    assert {(row.stage, row.problem): row.parameters["WARPS"] for row in rows} == dict.fromkeys(keys, 8)


def test_a_plan_leaves_out_the_stages_that_the_gpu_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[tune.Task]] = []
    messages: list[str] = []
    monkeypatch.setattr(tune, "time", _timing("nvidia-a100", asked))
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(arch="sm_80", slug="nvidia-a100"))
    hopper = registry.get("09_wgmma")
    tasks = [tune.Task(tune.Key(stage.id, PROBLEM), (stage.parameters(64),)) for stage in (hopper, STAGE)]
    options = Options(data=tmp_path, note=messages.append)
    (done,) = tune.tune(tasks, options=options)
    assert [task.key.stage for task in asked[0]] == [STAGE.id] == [done.key.stage]
    assert any("09_wgmma needs sm_90a and this GPU is sm_80" in line for line in messages)
    with pytest.raises(ParameterError, match="runs on sm_80"):
        tune.tune(tasks[:1], options=options)


def test_a_plan_goes_on_with_the_problems_that_lack_a_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tune.Task]] = []
    made = record(STAGE.parameters(64), 1.0)
    here = SimpleNamespace(arch="sm_90a", slug="nvidia-h200", record=made.gpu)
    monkeypatch.setattr(gpu, "info", lambda _: here)
    monkeypatch.setattr(provenance, "software", lambda: made.software)
    variants = (STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8}))
    first, second = (Problem.parse("16x16x2048x64", mask=mask) for mask in MASKS)
    tasks = [tune.Task(tune.Key(STAGE.id, problem), variants, ("sdpa",)) for problem in (first, second)]
    path = tmp_path / "nvidia-h200" / "tuning" / f"{synthetic.RUN}.jsonl"
    path.parent.mkdir(parents=True)
    for problem, several in ((first, variants), (second, variants[:1])):
        for variant in several:
            cubin = compiler.compile_stage(compiler.Job.of(STAGE, problem, arch="sm_90a", overrides=variant))
            row = record(variant, 1.0, problem=problem, stage=STAGE.id)
            assert row.cubin is not None
            store.append(path, row.model_copy(update={"cubin": row.cubin.model_copy(update={"sha256": cubin.sha256})}))
    said: list[str] = []
    options = Options(data=tmp_path, resume=True, note=said.append)
    monkeypatch.setattr(tune, "time", lambda tasks, **_: asked.append(tasks) or path)
    tune.tune(tasks, options=options)
    assert [task.key.problem for task in asked[0]] == [second]
    assert tune.tune(tasks[:1], options=options) == []
    assert said[-1] == "all of it is on record; nothing was measured"


def test_a_gpu_that_was_only_tuned_gets_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from flashlab.cli.app import app

    monkeypatch.setattr(gpu, "available", lambda: "wanted a CUDA GPU, got none")
    synthetic.write_synthetic(tmp_path, problems=suite("first"))  # the runs of another one
    folder = tmp_path / "nvidia-a100" / "tuning"
    folder.mkdir(parents=True)
    for variant in (STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8})):
        store.append(folder / f"{synthetic.RUN}.jsonl", record(variant, speed_of(variant)))
    made = CliRunner().invoke(app, ["tuned", "--data", str(tmp_path)])
    assert made.exit_code == 0, made.exception
    assert (tmp_path / "nvidia-a100" / "tuned.json").is_file()
    assert not (tmp_path / "nvidia-h200" / "tuned.json").exists()
    refused = CliRunner().invoke(app, ["tuned", "--gpu", "nvidia-h200", "--data", str(tmp_path)])
    assert isinstance(refused.exception, NoDataError)
    assert "GPUs with some: nvidia-a100" in str(refused.exception)


def test_the_command_takes_a_stage_or_a_plan(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashlab.cli.app import app

    plan = str(ROOT / "scripts" / "tuning.json")
    shown = CliRunner().invoke(app, ["tune", "--plan", plan, "--head-dim", "64", "--mask", "full", "--dry-run"])
    assert shown.exit_code == 0
    (pingpong,) = (task for task in tune.read_plan(Path(plan)) if task.key == ("11_pingpong", PROBLEM))
    assert re.search(rf"^11_pingpong +{PROBLEM.label} +{len(pingpong.variants)} ", shown.stdout, re.MULTILINE)
    assert "D128" not in shown.stdout
    assert re.search(r"^about \d+ s including start-up", shown.stderr, re.MULTILINE)
    for what in ([], [STAGE.id, "--plan", plan]):
        refused = CliRunner().invoke(app, ["tune", *what])
        assert isinstance(refused.exception, ParameterError)
