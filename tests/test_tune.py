"""The autotuner: variants, rounds, records of losers and refused ones, and the table that the records make."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashlab import bench, compiler, gpu, records, stages, tune, tuned
from flashlab.errors import CompileError, DamagedRecordError, FlashlabError, NoDataError, ParameterError
from flashlab.paths import DATA, ROOT
from flashlab.problem import MASKS, Problem, suite
from flashlab.records import Tuning

STAGE = stages.STAGES["03_warp_rows"]
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
            records.Samples(
                regime="burst", cache="hot", calls=10, time_us=(time_us,) * samples, sm_clock_mhz=(1980.0,) * samples
            ),
        )
    return Tuning(**fields)


def speed_of(parameters: Mapping[str, int]) -> float:
    """A made-up time, µs: more warps are better, everything else is an accident that the variant decides."""
    chance = zlib.crc32(repr(sorted(parameters.items())).encode()) % 100
    return 1000.0 - 50.0 * parameters["WARPS"] + chance / 100


class FakeTiming:
    """In place of `bench.time_variants`: writes records at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[dict[str, int]], int]] = []

    def __call__(
        self,
        stage_id: str,
        variants: Sequence[Mapping[str, int]],
        problems: Sequence[Problem],
        *,
        data: Path,
        plan: bench.Plan,
        **_: Any,
    ) -> Path:
        self.rounds.append(([dict(variant) for variant in variants], plan.samples))
        run = f"20260102T03040{len(self.rounds)}Z-0123abc"
        path = data / "nvidia-h200" / "tuning" / f"{run}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        for variant in variants:
            for problem in problems:
                records.append(path, record(variant, speed_of(variant), run=run, problem=problem, samples=plan.samples))
        return path


def tune_fake(tmp_path: Path, timing: FakeTiming, **what: Any) -> tune.Tuned:
    what = {"head_dim": 64, "mask": "full", **what}
    return tune.tune(STAGE.id, data=tmp_path, arch="sm_90a", slug="nvidia-h200", timing=timing, **what)


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


def test_variants_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "variants.json"
    path.write_text('[{"WARPS": 2}, {"WARPS": 2}, {}]', encoding="utf-8")
    assert tune.read_variants(path, STAGE, 64) == [STAGE.parameters(64, {"WARPS": 2}), STAGE.parameters(64)]
    path.write_text('{"WARPS": 2}', encoding="utf-8")
    with pytest.raises(ParameterError, match="list"):
        tune.read_variants(path, STAGE, 64)


def test_refused_and_twin_variants_cost_no_gpu_time() -> None:
    start = STAGE.parameters(64)
    crooked = {**start, "TILE_KV": 60}
    found = tune.compile_variants(
        STAGE, [start, crooked, dict(start)], head_dim=64, causal=False, dtype="float16", arch="sm_90a"
    )
    assert found.good == (start,)
    assert found.twins == (start,)
    ((variant, reason),) = found.refused
    assert variant == crooked
    assert "static" in reason
    assert "ommand:" not in reason


def test_losers_cost_little_and_every_variant_is_recorded(tmp_path: Path) -> None:
    timing = FakeTiming()
    grid = {"WARPS": (2, 4, 8), "TILE_KV": (32, 60, 64, 128), "PADDING": (0, 8, 16)}
    done = tune_fake(tmp_path, timing, grid=grid)
    sizes = [len(variants) for variants, _ in timing.rounds]
    samples = [one for _, one in timing.rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 1
    assert samples == sorted(samples)
    assert samples[-1] == 25
    assert sizes[-1] <= 10
    assert all(STAGE.parameters(64) in variants for variants, _ in timing.rounds), "defaults take part in every round"
    first, damage = records.read_tunings(done.rounds[0])
    assert not damage
    assert len(first) == sizes[0] + done.refused
    assert done.refused == 9
    assert {row.parameters["TILE_KV"] for row in first if row.status == "error"} == {60}
    assert sizes[0] + done.refused + done.twins == 36
    best = min((tuple(sorted(v.items())) for v in timing.rounds[0][0]), key=lambda v: speed_of(dict(v)))
    choice = tune.choices("nvidia-h200", tmp_path)[done.key]
    assert choice.parameters == dict(best)
    assert choice.run == done.rounds[-1].stem


def test_a_stage_of_which_nothing_compiles_is_an_error(tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing was to be timed")

    bad = [{**STAGE.parameters(64), "TILE_KV": 60}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "compile_variants", lambda *_, **__: tune.Compiled((), ((bad[0], "static assertion"),), ()))
        with pytest.raises(CompileError, match="static assertion"):
            tune_fake(tmp_path, refuse, variants=bad)  # type: ignore[arg-type]


def test_with_several_problems_the_geometric_mean_decides() -> None:
    long = Problem.parse("4x16x8192x64")
    a, b = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 2})
    rows = [
        record(a, 100.0),
        record(a, 900.0, problem=long),
        record(b, 200.0),
        record(b, 300.0, problem=long),
        record({**a, "WARPS": 8}, 1.0),  # right on one of them alone: no winner
    ]
    assert tune.rank(rows, (PROBLEM, long)) == [b, a]


def test_a_newer_round_replaces_the_choice_even_where_it_is_slower(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "tuning"
    folder.mkdir(parents=True)
    a, b = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 2})
    newer = "20260102T030406Z-0123abc"
    for row in (record(a, 10.0), record(b, 20.0), record(a, 30.0, run=newer), record(b, 25.0, run=newer)):
        records.append(folder / f"{row.run}.jsonl", row)
    path = tune.write_table("nvidia-h200", tmp_path)
    found = tuned.table("nvidia-h200", tmp_path)
    assert found == {
        tuned.Key(STAGE.id, 64, "full", "float16"): tuned.Choice(b, newer, (PROBLEM.shape,)),
    }
    assert path.read_text(encoding="utf-8") == tune.table_text(found)


def test_named_values_come_before_the_table_and_the_table_before_defaults(tmp_path: Path) -> None:
    choice = {**STAGE.parameters(64), "WARPS": 8, "TILE_KV": 32}
    text = tune.table_text({tuned.Key(STAGE.id, 64, "full", "float16"): tuned.Choice(choice, synthetic.RUN, ("x",))})
    path = tuned.path_of("nvidia-h200", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")

    def found(gpu: str | None = "nvidia-h200", *, causal: bool = False, **overrides: int) -> dict[str, int]:
        values = tuned.parameters(
            STAGE, gpu, head_dim=64, causal=causal, dtype="float16", overrides=overrides, data=tmp_path
        )
        return STAGE.parameters(64, values)

    assert found() == choice
    assert found(WARPS=2) == {**choice, "WARPS": 2}
    assert found(causal=True) == found(None) == found("nvidia-l4") == STAGE.parameters(64)


def test_a_table_from_before_the_stage_changed_counts_for_nothing(tmp_path: Path) -> None:
    text = tune.table_text({tuned.Key(STAGE.id, 64, "full", "float16"): tuned.Choice({"GONE": 1}, "r", ())})
    path = tuned.path_of("nvidia-h200", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    values = tuned.parameters(STAGE, "nvidia-h200", head_dim=64, causal=False, dtype="float16", data=tmp_path)
    assert values == {}


@pytest.mark.parametrize("text", ["", "{", '[{"stage": "x"}]', "7"])
def test_a_damaged_table_says_what_helps(tmp_path: Path, text: str) -> None:
    path = tuned.path_of("nvidia-h200", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedRecordError, match="flashlab tuned"):
        tuned.table("nvidia-h200", tmp_path)


def test_no_table_can_be_made_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="flashlab tune"):
        tune.write_table("nvidia-h200", tmp_path)


def test_trials_are_compared_within_their_round() -> None:
    start, other = STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8})
    later = "20260102T030406Z-0123abc"
    found = tune.trials(
        [
            record(start, 100.0, samples=3),
            record(other, 50.0, samples=3),
            record({**start, "TILE_KV": 60}, None),
            record(start, 90.0, run=later, samples=25),
            record(other, 60.0, run=later, samples=25),
        ]
    )
    by_variant = {tuple(sorted(trial.parameters.items())): trial for trial in found}
    assert by_variant[tuple(sorted(other.items()))].speedup == pytest.approx(90 / 60)
    assert by_variant[tuple(sorted(start.items()))].speedup == 1.0
    refused = by_variant[tuple(sorted({**start, "TILE_KV": 60}.items()))]
    assert (refused.status, refused.speedup, refused.reason) == ("error", None, "static_assert")
    best = {(lever.name, lever.value): lever.best for lever in tune.levers(found)}
    assert best == {("WARPS", 4): 1.0, ("WARPS", 8): pytest.approx(1.5), ("TILE_KV", 60): None, ("TILE_KV", 64): 1.5}


@pytest.mark.parametrize("slug", sorted(path.parent.name for path in DATA.glob(f"*/{tuned.FILE}")) or [None])
def test_the_committed_table_is_what_the_records_say(slug: str | None) -> None:
    if slug is None:
        pytest.skip("no GPU has a table yet")
    assert tuned.path_of(slug).read_text(encoding="utf-8") == tune.table_text(tune.choices(slug))


@pytest.mark.parametrize("slug", sorted(path.parent.name for path in DATA.glob(f"*/{tuned.FILE}")) or [None])
def test_the_committed_table_fits_the_stages_and_compiles(slug: str | None) -> None:
    if slug is None:
        pytest.skip("no GPU has a table yet")
    for key, choice in tuned.table(slug).items():
        stage = stages.get(key.stage)
        assert choice.parameters.keys() == stage.params.keys(), f"{key}: tune it anew"
        run = records.runs(slug)[0].records[0]
        arch = stages.arch_for(run.gpu.compute_capability)
        if stage.language == "triton" and find_spec("triton") is None:
            continue  # Triton comes with the GPU extra alone
        for aligned in (True, False):
            compiler.compile_stage(
                stage,
                head_dim=key.head_dim,
                dtype=key.dtype,
                causal=key.mask == "causal",
                arch=arch,
                aligned=aligned,
                overrides=choice.parameters,
            )


def test_the_table_is_a_list_of_plain_entries(tmp_path: Path) -> None:
    entries = json.loads(
        tune.table_text({tuned.Key("s", 64, "full", "float16"): tuned.Choice({"A": 1}, "run", ("1x1x1x64",))})
    )
    assert entries == [
        {
            "stage": "s",
            "head_dim": 64,
            "mask": "full",
            "dtype": "float16",
            "parameters": {"A": 1},
            "run": "run",
            "shapes": ["1x1x1x64"],
        }
    ]


def test_the_command_says_what_it_would_try(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashlab.cli import app

    what = ["tune", STAGE.id, "--head-dim", "64", "--param", "WARPS=2,4", "--param", "PADDING=0,8", "--dry-run"]
    shown = CliRunner().invoke(app, [*what, "--data", str(tmp_path)])
    assert shown.exit_code == 0
    for mask in ("full", "causal"):
        assert f"{STAGE.id} D64 {mask} float16: 4 variants" in shown.stderr
    assert not list(tmp_path.iterdir())


def test_pages_show_winners_levers_and_losers(tmp_path: Path) -> None:
    for show in (tune.winners_table, tune.levers_table, tune.trials_table):
        assert show("nvidia-h200", tmp_path) == tune.NOTHING_YET
    tune_fake(tmp_path, FakeTiming(), grid={"WARPS": (2, 4, 8), "TILE_KV": (60, 64)})
    assert "| WARPS=8 |" in tune.winners_table("nvidia-h200", tmp_path)
    levers = tune.levers_table("nvidia-h200", tmp_path)
    assert "60: does not run" in levers
    trials = tune.trials_table("nvidia-h200", tmp_path)
    assert "6 variants" in trials
    assert trials.count("| error: ") + trials.count(">error: ") == 3


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_the_committed_plan_names_what_there_is_and_tries_each_variant_once() -> None:
    tasks = tune.read_plan(ROOT / "scripts" / "tuning.json")
    assert len({task.key for task in tasks}) == len(tasks)
    for task in tasks:
        stage = stages.get(task.key.stage)
        assert all(variant.keys() == stage.params.keys() for variant in task.variants)
        assert stage.parameters(task.key.head_dim) not in task.variants, "the defaults take part anyway"
        assert 1 <= len(task.variants) <= 20


def test_a_plan_says_masks_and_type_or_means_all_masks_and_float16(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    short = {"stage": STAGE.id, "head_dim": 64, "variants": [{"WARPS": 2}, {"WARPS": 2}, {}]}
    path.write_text(json.dumps([short]), encoding="utf-8")
    variants = (STAGE.parameters(64, {"WARPS": 2}), STAGE.parameters(64))
    assert tune.read_plan(path) == [
        (tuned.Key(STAGE.id, 64, mask, "float16"), variants)
        for mask in MASKS
    ]  # fmt: skip
    hopper = {"stage": "09_wgmma", "head_dim": 128, "masks": ["causal"], "dtype": "bfloat16", "variants": [{}]}
    path.write_text(json.dumps([hopper]), encoding="utf-8")
    assert [task.key for task in tune.read_plan(path)] == [tuned.Key("09_wgmma", 128, "causal", "bfloat16")]
    for bad, words in (
        ({"a": 1}, "--plan: wanted a JSON list"),
        ([{"stage": STAGE.id}], "--plan: wanted a JSON list"),
        ([{**short, "variants": [{"NOTHING": 1}]}], "no parameter 'NOTHING'"),
        ([{**short, "masks": ["round"]}], "mask"),
        ([{**short, "dtype": "bfloat16"}], "takes float16"),
    ):
        path.write_text(json.dumps(bad), encoding="utf-8")
        with pytest.raises(FlashlabError, match=words):
            tune.read_plan(path)


def test_a_plan_is_timed_in_one_go_and_makes_a_choice_for_each_key(tmp_path: Path) -> None:
    asked: list[list[bench.Task]] = []

    def timing(tasks: list[bench.Task], *, data: Path, plan: bench.Plan, **_: Any) -> Path:
        asked.append(tasks)
        path = data / "nvidia-h200" / "tuning" / f"{synthetic.RUN}.jsonl"
        path.parent.mkdir(parents=True)
        for task in tasks:
            for variant in task.variants:
                records.append(path, record(variant, speed_of(variant), problem=task.problems[0], stage=task.stage))
        return path

    variants = tuple(STAGE.parameters(64, {"WARPS": warps, "TILE_KV": keys}) for warps in (2, 8) for keys in (60, 64))
    keys = [tuned.Key(STAGE.id, 64, mask, "float16") for mask in MASKS]
    done = tune.tune_all(
        [tune.Task(key, variants) for key in keys], data=tmp_path, arch="sm_90a", slug="nvidia-h200", timing=timing
    )
    (tasks,) = asked
    assert [(task.stage, task.problems[0].mask) for task in tasks] == [(STAGE.id, mask) for mask in MASKS]
    for task in tasks:
        assert STAGE.parameters(64) in task.variants
        assert {variant["TILE_KV"] for variant in task.variants} == {64}
    assert [(one.key, one.refused) for one in done] == [(key, 2) for key in keys]
    found, damage = records.read_tunings(done[0].rounds[0])
    assert not damage
    assert sum(row.status == "error" for row in found) == 4
    choices = tune.choices("nvidia-h200", tmp_path)
    assert {key: choice.parameters["WARPS"] for key, choice in choices.items()} == dict.fromkeys(keys, 8)


def test_a_plan_leaves_out_the_stages_that_the_gpu_does_not_run(tmp_path: Path) -> None:
    timed: list[str] = []
    told: list[str] = []

    def timing(tasks: list[bench.Task], *, data: Path, **_: Any) -> Path:
        timed.extend(task.stage for task in tasks)
        path = data / "nvidia-a100" / "tuning" / f"{synthetic.RUN}.jsonl"
        path.parent.mkdir(parents=True)
        for task in tasks:
            for variant in task.variants:
                records.append(path, record(variant, speed_of(variant), problem=task.problems[0], stage=task.stage))
        return path

    hopper = stages.get("09_wgmma")
    tasks = [
        tune.Task(tuned.Key(stage.id, 64, "full", "float16"), (stage.parameters(64),)) for stage in (hopper, STAGE)
    ]
    where: dict[str, Any] = {"data": tmp_path, "arch": "sm_80", "slug": "nvidia-a100", "timing": timing}
    (done,) = tune.tune_all(tasks, announce=told.append, **where)
    assert timed == [STAGE.id] == [done.key.stage]
    assert any("09_wgmma needs sm_90a and this GPU is sm_80" in line for line in told)
    with pytest.raises(ParameterError, match="runs on sm_80"):
        tune.tune_all(tasks[:1], **where)


def test_a_gpu_that_was_only_tuned_gets_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from flashlab.cli import app

    monkeypatch.setattr(gpu, "available", lambda: "wanted a CUDA GPU, got none")
    synthetic.write_synthetic(tmp_path, problems=suite("first"))  # the runs of another one
    folder = tmp_path / "nvidia-a100" / "tuning"
    folder.mkdir(parents=True)
    for variant in (STAGE.parameters(64), STAGE.parameters(64, {"WARPS": 8})):
        records.append(folder / f"{synthetic.RUN}.jsonl", record(variant, speed_of(variant)))
    made = CliRunner().invoke(app, ["tuned", "--data", str(tmp_path)])
    assert made.exit_code == 0, made.exception
    assert (tmp_path / "nvidia-a100" / "tuned.json").is_file()
    assert not (tmp_path / "nvidia-h200" / "tuned.json").exists()
    refused = CliRunner().invoke(app, ["tuned", "--gpu", "nvidia-h200", "--data", str(tmp_path)])
    assert isinstance(refused.exception, NoDataError)
    assert "GPUs with some: nvidia-a100" in str(refused.exception)


def test_the_command_takes_a_stage_or_a_plan(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashlab.cli import app

    plan = str(ROOT / "scripts" / "tuning.json")
    shown = CliRunner().invoke(app, ["tune", "--plan", plan, "--head-dim", "64", "--mask", "full", "--dry-run"])
    assert shown.exit_code == 0
    (pingpong,) = (
        task for task in tune.read_plan(Path(plan)) if task.key == tuned.Key("11_pingpong", 64, "full", "float16")
    )
    assert f"11_pingpong D64 full float16: {len(pingpong.variants)} variants" in shown.stderr
    assert "D128" not in shown.stderr
    for what in ([], [STAGE.id, "--plan", plan]):
        refused = CliRunner().invoke(app, ["tune", *what])
        assert isinstance(refused.exception, ParameterError)
