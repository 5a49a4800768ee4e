"""Records: what may be written, that it reads back, and that damage is found and costs only itself."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import synthetic
from pydantic import BaseModel, TypeAdapter, ValidationError
from shared import read_run

from flashlab.core.errors import DamagedRecordError, NoDataError
from flashlab.core.paths import DATA, slug
from flashlab.core.problem import Problem, suite
from flashlab.kernels import registry
from flashlab.query import contests, select
from flashlab.query.rows import headline
from flashlab.record import schema, store
from flashlab.record.schema import (
    Ceiling,
    Conditions,
    Gpu,
    Machine,
    Measurement,
    PatternCounters,
    Record,
    Samples,
    Source,
    StageCounters,
    Tuning,
    Verdict,
    to_line,
)
from flashlab.record.store import Damage, append

parse_line = TypeAdapter(Record).validate_json

SLUG = "made-up-gpu"
EARLY, LATE = "20260101T000000Z-0123abc", "20260102T000000Z-0123abc-dirty"
GPU = Gpu(
    slug=SLUG, name="Made-Up GPU", compute_capability=(9, 0), sm_count=1, max_sm_clock_mhz=None, memory_bytes=1,
    l2_bytes=1, power_limit_w=None, driver="1", fingerprint="0123456789ab",
)  # fmt: skip
PASSED = Verdict(
    passed=True, reason="", max_abs_error=1e-4, max_abs_limit=1e-3, rms_error=1e-5, rms_limit=1e-4, lse_error=None,
    lse_limit=None,
)  # fmt: skip
PROBLEM = Problem.parse("1x2x1x64x65x64", mask="causal")
CONDITIONS = Conditions(
    sm_clock_mhz_min=None, sm_clock_mhz_max=None, power_w_max=700.0, power_w_mean=650.0, temperature_c_max=None,
    throttle_reasons=(), energy_j_per_call=0.5,
)  # fmt: skip


def samples(*time_us: float, **changes: Any) -> Samples:
    return Samples(**{"regime": "burst", "cache": "hot", "calls": 3, "time_us": time_us, "sm_clock_mhz": (), **changes})


def measurement(**changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "run": EARLY, "time": "2026-01-01T00:00:00Z", "gpu": GPU, "source": Source(commit="0123abc", dirty=False),
        "software": {"numpy": "2"}, "kind": "stage", "name": "00_naive", "problem": PROBLEM,
        "status": "ok", "reason": "", "verdict": PASSED, "samples": (samples(2.0, 1.0, 3.0),),
        "cubin": None,
    }  # fmt: skip
    return Measurement(**{**fields, **changes})


def ceiling(**changes: Any) -> Ceiling:
    fields: dict[str, Any] = {
        "run": EARLY, "time": "2026-01-01T00:00:00Z", "gpu": GPU, "source": Source(commit="0123abc", dirty=False),
        "software": {}, "kind": "ceiling", "name": "copy", "unit": "TB/s", "value": 1.5, "samples": samples(1.0),
        "how": "copied",
    }  # fmt: skip
    return Ceiling(**{**fields, **changes})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two runs of one GPU, sealed."""
    runs = tmp_path / SLUG / "runs"
    runs.mkdir(parents=True)
    append(runs / f"{EARLY}.jsonl", measurement())
    append(runs / f"{EARLY}.jsonl", ceiling())
    append(runs / f"{LATE}.jsonl", measurement(run=LATE, name="01_coalesced"))
    store.write_machine(Machine(gpu=GPU, host={"cores": "2"}), tmp_path)
    store.write_checksums(SLUG, tmp_path)
    return tmp_path


def test_a_stages_row_with_the_log_sum_exp_on_stands_apart(tmp_path: Path) -> None:
    path = tmp_path / SLUG / "runs" / f"{EARLY}.jsonl"
    path.parent.mkdir(parents=True)
    plain, second = measurement(lse=False), measurement(lse=True, samples=(samples(2.0),))
    library = measurement(kind="peer", name="fa3", lse=True, layout="bshd")
    for one in (plain, second, library):
        append(path, one)
    run = read_run(path)
    assert (run.measurements, run.with_lse) == ((plain, library), (second,))
    assert store.count_samples(SLUG, tmp_path)["runs"] == 7


def test_a_record_from_before_says_nothing_of_a_log_sum_exp() -> None:
    old = json.loads(to_line(measurement(kind="peer", name="fa3")))
    del old["lse"], old["layout"]
    read = parse_line(json.dumps(old))
    assert isinstance(read, Measurement)
    assert (read.lse, read.layout) == (None, "bhsd")


# --- One record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record", [measurement(), measurement(kind="peer", name="torch"), ceiling()], ids=["stage", "peer", "ceiling"]
)
def test_a_record_is_one_line_and_reads_back(record: Measurement | Ceiling) -> None:
    line = to_line(record)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert parse_line(line) == record


@pytest.mark.parametrize(
    ("home", "written"), [("/srv/me", "~/.cache/x"), ("/", "/srv/me/.cache/x"), ("", "/srv/me/.cache/x")]
)
def test_a_record_does_not_name_the_home_folder(monkeypatch: pytest.MonkeyPatch, home: str, written: str) -> None:
    monkeypatch.setenv("HOME", home)
    why = "no such file: /srv/me/.cache/x, see https://x"
    failed = measurement(kind="peer", name="fa3", status="error", reason=why, samples=(), verdict=None)
    assert json.loads(to_line(failed))["reason"] == f"no such file: {written}, see https://x"


def test_a_record_of_the_first_schema_reads_on() -> None:
    new = measurement(samples=(samples(2.0, sm_clock_mhz=(1000.0,), conditions=CONDITIONS),))
    old = json.loads(to_line(new))
    old["schema_version"] = 1
    assert old["samples"][0]["conditions"].pop("power_w_mean") == 650.0
    for one in old["samples"]:
        del one["cycles_per_score"], one["continuous_s"], one["call_clock_mhz"]
    read = parse_line(json.dumps(old))
    assert isinstance(read, Measurement)
    assert read.schema_version == 1
    without = CONDITIONS.model_copy(update={"power_w_mean": None})
    assert read.samples == (new.samples[0].model_copy(update={"conditions": without}),)
    assert new.schema_version == schema.SCHEMA_VERSION == 2


def test_a_line_from_before_there_were_kinds_of_inputs_is_on_normal_ones() -> None:
    old = json.loads(to_line(measurement()))
    del old["problem"]["inputs"], old["trained"], old["samples"][0]["layer"], old["fallbacks"]
    read = parse_line(json.dumps(old))
    assert read == measurement()
    assert read.problem.inputs == "normal"
    assert read.problem == PROBLEM


def test_fallbacks_read_back() -> None:
    row = measurement(fallbacks=(12, 345678))
    assert '"fallbacks":[12,345678]' in to_line(row).replace(" ", "")
    assert parse_line(to_line(row)) == row


def test_the_kind_of_inputs_reads_back_and_an_unknown_one_is_refused() -> None:
    sink = replace(PROBLEM, inputs="sink_first")
    row = measurement(problem=sink)
    read = parse_line(to_line(row))
    assert isinstance(read, Measurement)
    assert read.problem == sink
    assert headline(read)["inputs"] == "sink_first"
    assert headline(read)["worst_layer_us"] is None
    line = to_line(row).replace("sink_first", "sink_fist")
    with pytest.raises(ValidationError, match="the nearest is sink_first"):
        parse_line(line)


def test_the_time_on_trained_inputs_is_the_median_over_layers() -> None:
    problem = Problem.parse("1x16x64x64", inputs="trained")
    layers = [(1.0, 2.0, 9.0), (5.0, 4.0, 3.0), (8.0, 7.0, 6.0), (3.0, 3.0, 3.0)]
    taken = [
        samples(*times, layer=layer, sm_clock_mhz=(900.0 + layer,) * 3, conditions=CONDITIONS)
        for layer, times in enumerate(layers)
    ]
    row = measurement(
        problem=problem,
        samples=(*reversed(taken), samples(70.0, layer=0, regime="sustained")),
        trained={"digest": "0123", "loss": 0.5, "layers": [{"sd": 2.5}]},
    )
    read = parse_line(to_line(row))
    assert isinstance(read, Measurement)
    assert read == row
    found = read.samples_of()
    assert found is not None
    assert found.time_us == (2.0, 4.0, 7.0, 3.0)
    assert found.sm_clock_mhz == (900.0, 901.0, 902.0, 903.0)
    assert found.median_us == 3.5
    flat = headline(read)
    assert (flat["median_us"], flat["worst_layer_us"]) == (3.5, 7.0)
    sustained = read.samples_of("sustained")
    assert sustained is not None
    assert sustained.time_us == (70.0,)
    assert read.samples_of("burst", "cold") is None


def test_cycles_per_score_follow_from_clock_and_time() -> None:
    # Two SMs at 1000 MHz for 3 us: 6000 clocks, over 2 batches, 4 heads and 30 scores.
    full = Problem.parse("2x4x4x5x6x64")
    taken = samples(1.0, 3.0, 100.0, call_clock_mhz=(1000.0, 1000.0, 1000.0))
    assert schema.cycles_per_score(taken, full, 2) == pytest.approx(6000 / (2 * 4 * 30))
    half = Problem.parse("2x4x4x6x6x64", mask="causal")
    assert schema.cycles_per_score(taken, half, 2) == pytest.approx(6000 / (2 * 4 * 18))
    slower = samples(6.0, call_clock_mhz=(500.0,))
    assert schema.cycles_per_score(slower, full, 2) == schema.cycles_per_score(taken, full, 2)
    # The clock after the calls says nothing of them.
    assert schema.cycles_per_score(samples(1.0, sm_clock_mhz=(1000.0,)), full, 2) is None


def test_a_record_holds_the_cycles_that_its_samples_say() -> None:
    taken = samples(2.0, call_clock_mhz=(1000.0,))
    right = schema.cycles_per_score(taken, PROBLEM, GPU.sm_count)
    assert right is not None
    kept = measurement(samples=(taken.model_copy(update={"cycles_per_score": right}),))
    assert headline(kept)["cycles_per_score"] == pytest.approx(right)
    with pytest.raises(ValidationError, match="cycles_per_score"):
        measurement(samples=(taken.model_copy(update={"cycles_per_score": 2 * right}),))
    with pytest.raises(ValidationError, match="cycles_per_score"):
        measurement(samples=(samples(2.0, cycles_per_score=1.0),))


def test_power_is_the_energy_counters_and_never_a_bursts() -> None:
    long = samples(1000.0, regime="sustained", conditions=CONDITIONS)
    assert schema.power_w(long) == pytest.approx(500.0)
    silent = CONDITIONS.model_copy(update={"energy_j_per_call": None})
    assert schema.power_w(long.model_copy(update={"conditions": silent})) == 650.0
    assert schema.power_w(samples(1000.0, conditions=silent)) is None
    assert schema.power_w(None) is None


def test_a_tuning_is_a_record_of_its_own(tmp_path: Path) -> None:
    fields = measurement().model_dump() | {"kind": "tuning", "stage": "00_naive", "parameters": {"THREADS": 64}}
    for name in ("name", "choice", "layout", "lse"):
        del fields[name]
    tuning = Tuning(**fields)
    folder = tmp_path / SLUG / "tuning"
    folder.mkdir(parents=True)
    append(folder / f"{EARLY}.jsonl", tuning)
    with (folder / f"{EARLY}.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n")
    assert store.records(SLUG, schema.Tuning, tmp_path) == (tuning,)
    assert store.records("another", schema.Tuning, tmp_path) == ()
    store.write_machine(Machine(gpu=GPU, host={}), tmp_path)
    store.write_checksums(SLUG, tmp_path)
    assert [damage.line for damage in store.verify(SLUG, tmp_path)] == [2]
    with pytest.raises(ValidationError, match="samples"):
        Tuning(**{**fields, "status": "error", "reason": "static_assert"})


def test_line_breaks_inside_a_record_do_not_break_its_line() -> None:
    record = measurement(status="error", reason="first\nsecond\u2028third", samples=(), verdict=None)
    assert to_line(record).count("\n") == 1
    assert parse_line(to_line(record)) == record


def test_median_and_spread() -> None:
    taken = samples(2.0, 1.0, 4.0)
    assert taken.median_us == 2.0
    assert taken.cv_percent == pytest.approx(100 * math.sqrt(7 / 3) / (7 / 3))
    assert samples(5.0).cv_percent == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "wrong", "reason": "it is"},
        {"verdict": None},
        {"verdict": PASSED.model_copy(update={"passed": False})},
        {"reason": "no reason needed"},
        {"status": "timeout", "samples": ()},
        {"status": "fine"},
        {"run": "yesterday"},
        {"kind": "kernel"},
        {"unknown": 1},
    ],
)
def test_a_measurement_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        measurement(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"time_us": ()},
        {"time_us": (1.0, 0.0)},
        {"time_us": (-1.0,)},
        {"time_us": (math.nan,)},
        {"time_us": (math.inf,)},
        {"sm_clock_mhz": (1980.0, 1980.0)},
        {"call_clock_mhz": (1980.0, 1980.0)},
        {"calls": 0},
        {"regime": "idle"},
    ],
)
def test_samples_are_positive_finite_times(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        samples(*changes.pop("time_us", (1.0,)), **changes)


def test_numbers_that_json_cannot_hold_are_refused_when_written() -> None:
    with pytest.raises(ValidationError):
        PASSED.model_validate({**PASSED.model_dump(), "max_abs_error": math.nan})
    with pytest.raises(ValidationError):
        ceiling(value=math.inf)


def test_samples_are_found_by_regime_and_cache() -> None:
    cold, sustained = samples(1.0, cache="cold"), samples(1.0, regime="sustained")
    record = measurement(samples=(cold, sustained))
    assert record.samples_of() is None
    assert record.samples_of(cache="cold") == cold
    assert record.samples_of("sustained") == sustained


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("  A100-SXM4 (80GB) ", "a100-sxm4-80gb"),
    ],
)
def test_a_gpu_name_makes_a_folder_name(name: str, expected: str) -> None:
    assert slug(name) == expected


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_run_reads_back_in_order(data: Path) -> None:
    run = read_run(data / SLUG / "runs" / f"{EARLY}.jsonl")
    assert run.measurements == (measurement(),)
    assert run.ceilings == (ceiling(),)
    assert run.damage == ()


@pytest.mark.parametrize(
    "line", [b"{", b"not json", b"\xff\xfe", b"[]", b'{"kind": "stage"}', to_line(measurement()).encode()[:-20]]
)
def test_a_damaged_line_is_named_and_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / f"{EARLY}.jsonl"
    append(path, measurement())
    with path.open("ab") as file:
        file.write(line + b"\n")
    append(path, ceiling())
    run = read_run(path)
    assert run.records == (measurement(), ceiling())
    assert [(d.path, d.line) for d in run.damage] == [(path, 2)]
    assert str(run.damage[0]).startswith(f"{path}:2: ")


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / f"{EARLY}.jsonl"
    append(path, measurement())
    with path.open("ab") as file:
        file.write(to_line(measurement()).encode()[:50])
    append(path, ceiling())
    run = read_run(path)
    assert run.records == (measurement(), ceiling())
    assert [d.line for d in run.damage] == [2]


def test_appending_never_rewrites(tmp_path: Path) -> None:
    path = tmp_path / f"{EARLY}.jsonl"
    append(path, measurement())
    before = path.read_bytes()
    append(path, ceiling())
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"kind": "made_up"}', "kind: wanted one of 'stage', 'peer', 'ceiling', got 'made_up'"),
        ('{"run": "made_up"}', "kind: wanted this field, got none"),
    ],
)
def test_damage_by_an_unknown_kind_lists_the_known_ones(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / f"{EARLY}.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert [damage.reason for damage in read_run(path).damage] == [reason]


def test_an_empty_run_has_no_records_and_no_damage(tmp_path: Path) -> None:
    path = tmp_path / f"{EARLY}.jsonl"
    path.write_bytes(b"\n\n")
    assert (read_run(path).records, read_run(path).damage) == ((), ())


def test_runs_are_oldest_first_and_the_newest_ceiling_wins(data: Path) -> None:
    assert [row.run for row in store.measurements(SLUG, data)] == [EARLY, LATE]
    later = "20260103T000000Z-0123abc"
    append(data / SLUG / "runs" / f"{later}.jsonl", ceiling(run=later, value=2.0))
    assert store.newest_ceilings(SLUG, data)["copy"].value == 2.0


def test_gpus_are_those_with_runs(data: Path) -> None:
    (data / "empty-gpu" / "runs").mkdir(parents=True)
    (data / "claims.csv").write_text("", encoding="utf-8")
    assert store.gpus(data) == (SLUG,)
    assert store.gpus(data / "nowhere") == ()


def test_the_main_gpu_is_the_named_one_else_the_one_with_the_most_on_record(data: Path) -> None:
    for number in range(3):  # many files, and little in them
        path = data / "late-gpu" / "runs" / f"2026010{number + 4}T000000Z-0123abc.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n", encoding="utf-8")
    assert store.gpus(data) == (SLUG, "late-gpu")
    (data / store.MAIN).write_text("late-gpu\n", encoding="utf-8")
    assert store.gpus(data) == ("late-gpu", SLUG)
    (data / store.MAIN).write_text("a-gpu-without-records\n", encoding="utf-8")
    assert store.gpus(data) == (SLUG, "late-gpu")


def test_the_main_gpu_of_the_repository_has_records_and_is_whole() -> None:
    first = suite("first")[0]
    named = (DATA / store.MAIN).read_text(encoding="utf-8").strip()
    assert store.gpus()[0] == named
    loaded = select.load(named)
    timed = {row.name for row in loaded.rows(first)}
    absent = [stage for stage in registry.CUDA_STAGES if stage not in timed]
    assert absent == list(registry.CUDA_STAGES)[len(registry.CUDA_STAGES) - len(absent) :], "the newest rungs alone"
    assert loaded.lacking == (f"{len(absent)} of {len(registry.STAGES)} stages at {first.label}" if absent else "")


def test_a_gpu_without_data_is_refused_with_those_that_have_some(data: Path) -> None:
    with pytest.raises(NoDataError, match=f"GPU 'other-gpu' .* GPUs with data: {SLUG}"):
        store.require_runs("other-gpu", data)
    with pytest.raises(NoDataError, match="GPUs with data: none yet"):
        store.require_runs("other-gpu", data / "nowhere")


def test_a_run_of_ceilings_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / SLUG / "runs").mkdir(parents=True)
    append(tmp_path / SLUG / "runs" / f"{EARLY}.jsonl", ceiling())
    assert contests.against_peers(SLUG, tmp_path) == ()


# --- Checksums --------------------------------------------------------------------------------------------------------


def test_sound_data_has_nothing_wrong(data: Path) -> None:
    assert store.verify(SLUG, data) == ()
    assert store.verify(SLUG, data) == ()


def test_sha256sum_agrees(data: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "CHECKSUMS"]
    assert subprocess.run(command, cwd=data / SLUG, capture_output=True, check=False).returncode == 0


def _change(folder: Path) -> None:
    path = folder / "runs" / f"{EARLY}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"numpy":"2"', b'"numpy":"3"'))


def _seal_anew(folder: Path) -> None:
    """As somebody would who means to deceive, with all sums of what is there now."""
    (folder / "CHECKSUMS").unlink(missing_ok=True)
    store.write_checksums(SLUG, folder.parent)


def _break_line(folder: Path) -> None:
    path = folder / "runs" / f"{EARLY}.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes())
    _seal_anew(folder)


def _remove_run(folder: Path) -> None:
    (folder / "runs" / f"{EARLY}.jsonl").unlink()


def _add_file(folder: Path) -> None:
    (folder / "runs" / "stray.txt").write_text("", encoding="utf-8")


def _remove_checksums(folder: Path) -> None:
    (folder / "CHECKSUMS").unlink()


def _spoil_checksums(folder: Path) -> None:
    with (folder / "CHECKSUMS").open("ab") as file:
        file.write(b"\xff\xfe\n")


def _remove_machine(folder: Path) -> None:
    (folder / "machine.json").unlink()
    _seal_anew(folder)


def _spoil_machine(folder: Path) -> None:
    (folder / "machine.json").write_text(json.dumps({"gpu": {}}), encoding="utf-8")
    _seal_anew(folder)


@pytest.mark.parametrize(
    ("harm", "place", "reason"),
    [
        (_change, f"runs/{EARLY}.jsonl", "differs from CHECKSUMS"),
        (_break_line, f"runs/{EARLY}.jsonl:1", "Invalid JSON"),
        (_remove_run, f"runs/{EARLY}.jsonl", "listed in CHECKSUMS, missing"),
        (_add_file, "runs/stray.txt", "not listed in CHECKSUMS"),
        (_remove_checksums, "CHECKSUMS", "missing"),
        (_spoil_checksums, "CHECKSUMS:4", "not a checksum line"),
        (_remove_machine, "machine.json", "missing"),
        (_spoil_machine, "machine.json", "gpu.slug: wanted this field, got none"),
    ],
)
def test_damage_is_found_and_named(data: Path, harm: Any, place: str, reason: str) -> None:
    harm(data / SLUG)
    found = [str(damage) for damage in store.verify(SLUG, data)]
    assert any(line.startswith(f"{data / SLUG / place}: {reason}") for line in found), found


def test_nothing_is_drawn_from_what_was_withdrawn(data: Path) -> None:
    kept = store.records(SLUG, Measurement, data)
    steps = [measurement(problem=replace(PROBLEM, inputs="steps"), run=run) for run in (EARLY, LATE)]
    for row in steps:
        append(data / SLUG / "runs" / f"{row.run}.jsonl", row)
    entry = schema.Withdrawn(inputs=("steps",), runs=(EARLY,), reason="made up")
    (data / SLUG / "withdrawn.json").write_text(f"[{entry.model_dump_json()}]")
    store.write_checksums(SLUG, data)
    found = store.records(SLUG, Measurement, data)
    assert [row for row in found if row.problem.inputs == "steps"] == steps[1:]
    assert [row for row in found if row.problem.inputs != "steps"] == list(kept)
    assert store.extent(SLUG, data).endswith(" records in 2 runs, and 1 record that was withdrawn")
    assert steps[0] in store.read(data / SLUG / "runs" / f"{EARLY}.jsonl", Measurement)[0]
    assert not [damage for damage in store.verify(SLUG, data) if "withdrawn" in str(damage)]
    (data / SLUG / "withdrawn.json").write_text("{}")
    with pytest.raises(DamagedRecordError, match="wanted a list of inputs, runs and reason"):
        store.records(SLUG, Measurement, data)


@pytest.mark.parametrize(
    ("only", "gone"),
    [({}, True), ({"head_dim": 64, "mask": "causal"}, True), ({"head_dim": 128}, False), ({"mask": "full"}, False)],
)
def test_a_head_dim_or_a_mask_alone_may_be_withdrawn(only: dict[str, Any], gone: bool) -> None:
    entry = schema.Withdrawn(inputs=("steps", "one_hot"), runs=(EARLY,), reason="made up", **only)
    steps = replace(PROBLEM, inputs="steps")
    assert entry.takes_back(measurement(problem=steps)) is gone
    assert not entry.takes_back(measurement(problem=steps, run=LATE))
    assert not entry.takes_back(measurement())
    assert not entry.takes_back(ceiling())


def test_a_measurement_of_other_inputs_is_found(data: Path) -> None:
    """The same machine code falls back as often on the same problem, but on a model's activations."""
    cubin = synthetic.measurement("16_ones_column", PROBLEM).cubin
    for run, problem, fallbacks in (
        (EARLY, replace(PROBLEM, inputs="one_hot"), (489880, 0)),
        (EARLY, replace(PROBLEM, inputs="trained"), (7, 0)),
        (LATE, replace(PROBLEM, inputs="one_hot"), (88, 0)),
        (LATE, replace(PROBLEM, inputs="trained"), (9, 0)),
        (LATE, replace(PROBLEM, inputs="steps"), (5, 0)),
    ):
        row = measurement(name="16_ones_column", problem=problem, run=run, cubin=cubin, fallbacks=fallbacks)
        append(data / SLUG / "runs" / f"{run}.jsonl", row)
    found = [str(damage) for damage in store.verify(SLUG, data) if "fallbacks" in str(damage)]
    assert len(found) == 1
    assert f"{LATE}.jsonl:" in found[0]
    assert "(88, 0), where" in found[0]


def test_no_append_makes_a_falsified_file_sound(data: Path) -> None:
    _change(data / SLUG)
    with pytest.raises(DamagedRecordError, match="differs from CHECKSUMS"):
        store.write_checksums(SLUG, data)
    append(data / SLUG / "runs" / f"{LATE}.jsonl", ceiling(run=LATE))
    store.write_checksums(SLUG, data)  # Of what was written since, everything is sound.
    assert [str(one.path.name) for one in store.verify(SLUG, data)] == [f"{EARLY}.jsonl"]
    # What was appended to a sound file is listed all the same, and nothing else was left behind.
    assert {path.name for path in (data / SLUG).iterdir()} == {"CHECKSUMS", "machine.json", "runs"}


def test_a_file_that_is_removed_stays_listed(data: Path) -> None:
    _remove_run(data / SLUG)
    store.write_checksums(SLUG, data)
    assert [one.reason for one in store.verify(SLUG, data)] == ["listed in CHECKSUMS, missing"]


def test_appended_lines_and_new_files_are_listed(data: Path) -> None:
    append(data / SLUG / "runs" / f"{LATE}.jsonl", ceiling(run=LATE))
    later = "20260103T000000Z-0123abc-4f2a91"
    append(data / SLUG / "runs" / f"{later}.jsonl", ceiling(run=later))
    store.write_checksums(SLUG, data)
    assert store.verify(SLUG, data) == ()


def test_what_a_killed_process_had_half_written_goes_with_the_next_record(data: Path) -> None:
    (data / SLUG / ".machine.json.4242").write_text("{", encoding="utf-8")
    assert [one.reason for one in store.verify(SLUG, data)] == ["not listed in CHECKSUMS", "of no known kind"]
    store.write_checksums(SLUG, data)
    assert store.verify(SLUG, data) == ()


def _append_long_lines(path: Path) -> None:
    for line in range(60):
        append(path, ceiling(run=LATE, samples=samples(*(1.0 + line + i * 1e-9 for i in range(3000)))))


def test_two_processes_record_into_one_folder(data: Path) -> None:
    other = get_context("spawn").Process(target=_append_long_lines, args=(data / SLUG / "runs" / f"{LATE}.jsonl",))
    other.start()
    while other.is_alive():
        store.write_checksums(SLUG, data)
    assert other.exitcode == 0
    store.write_checksums(SLUG, data)
    assert store.verify(SLUG, data) == ()


def test_lines_appended_under_a_clock_that_was_set_back_are_listed(data: Path) -> None:
    path = data / SLUG / "runs" / f"{LATE}.jsonl"
    append(path, ceiling(run=LATE))
    earlier = (data / SLUG / "CHECKSUMS").stat().st_mtime - 3600
    os.utime(path, (earlier, earlier))
    store.write_checksums(SLUG, data, written=path)
    assert store.verify(SLUG, data) == ()


def test_a_document_is_not_written_over_a_falsified_one(data: Path) -> None:
    path = data / SLUG / "machine.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"2"', '"3"'), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(DamagedRecordError, match=r"to match CHECKSUMS before replacing it.*Restore it with git"):
        store.write_machine(Machine(gpu=GPU, host={"cores": "2"}), data)
    assert path.read_bytes() == before
    path.unlink()
    store.write_machine(Machine(gpu=GPU, host={"cores": "4"}), data)
    assert store.verify(SLUG, data) == ()


CHECKED = ("checks", "random", "flash-attention")
"""Folders of comparisons with the oracle."""


@pytest.mark.parametrize(
    "name",
    [
        *(f"{folder}/x.jsonl" for folder in dict.fromkeys((*store.FOLDERS.values(), *CHECKED))),
        *("tuned.json", "verdicts.json", "machine.json", "withdrawn.json", "figures/ladder.svg", "notes/x.txt"),
    ],
)
def test_garbage_of_any_kind_is_damage(data: Path, name: str) -> None:
    path = data / SLUG / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"stage": "00_naive"}\n', encoding="utf-8")
    _seal_anew(data / SLUG)
    assert [one.path for one in store.verify(SLUG, data)] == [path]


def test_a_link_in_place_of_a_file_is_damage(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = data / SLUG / "runs" / f"{EARLY}.jsonl"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run.jsonl"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert [(one.path, one.reason) for one in store.verify(SLUG, data)] == [(path, "a link, where records are files")]


# --- What was cut off -------------------------------------------------------------------------------------------------

CUT = b'{"kind":"ceiling","run":"2026'


def _tear(path: Path) -> None:
    with path.open("ab") as file:
        file.write(CUT)


def test_a_line_that_was_cut_short_is_set_aside_and_nothing_else(data: Path) -> None:
    path = data / SLUG / "runs" / f"{LATE}.jsonl"
    before = path.read_bytes() if path.exists() else b""
    _tear(path)
    append(path, ceiling(run=LATE))  # a later one goes to a line of its own
    sound = path.read_bytes().replace(CUT + b"\n", b"")
    assert sound.startswith(before)
    (mend,) = store.mends(SLUG, data)
    assert (mend.action, list(mend.torn.values())) == ("set aside", [CUT])
    assert path.read_bytes() != sound  # so far nothing was done
    assert store.repair(SLUG, data) == (mend,)
    assert path.read_bytes() == sound
    (aside,) = store.lines(SLUG, "aside", data)
    assert (aside.record.file, aside.record.line) == (f"runs/{LATE}.jsonl", *mend.torn)
    assert aside.record.text == CUT.decode()
    assert store.verify(SLUG, data) == ()
    assert store.repair(SLUG, data) == ()


def test_a_folder_without_machine_and_checksums_is_completed(data: Path) -> None:
    for name in ("machine.json", "CHECKSUMS"):
        (data / SLUG / name).unlink()
    (data / SLUG / ".CHECKSUMS.4242").write_text("half", encoding="utf-8")
    assert {mend.action for mend in store.repair(SLUG, data, host={"cores": "2"})} == {"remove", "list", "make"}
    assert Machine.model_validate_json((data / SLUG / "machine.json").read_bytes()).gpu == GPU
    assert store.verify(SLUG, data) == ()


@pytest.mark.parametrize("harm", ["changed", "committed"])
def test_no_repair_makes_a_falsified_file_sound(data: Path, harm: str) -> None:
    if harm == "changed":
        _change(data / SLUG)
    else:
        _tear(data / SLUG / "runs" / f"{EARLY}.jsonl")
        _seal_anew(data / SLUG)
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
            _git(data, *arguments)
    before = {path: path.read_bytes() for path in data.rglob("*.jsonl")}
    found = store.verify(SLUG, data)
    assert store.repair(SLUG, data) == ()
    assert {path: path.read_bytes() for path in data.rglob("*.jsonl")} == before
    assert store.verify(SLUG, data) == found != ()


# --- Whoever means to deceive -----------------------------------------------------------------------------------------

FUTURE = "20990101T000000Z-0123abc"
NO_DAY = "20261399T000000Z-0123abc"
HOPPER = GPU.model_copy(update={"compute_capability": (9, 0), "sm_count": 132, "max_sm_clock_mhz": 1980.0})
LARGE = Problem.parse("16x16x2048x64")
TAKEN = (31.25, 31.5, 30.75, 32.0, 31.0)


def _path(folder: Path, run: str = EARLY, kind: str = "runs") -> Path:
    return folder / kind / f"{run}.jsonl"


def _append(folder: Path, record: Measurement | Ceiling, run: str = EARLY) -> None:
    append(_path(folder, run), record)


def _move_line(folder: Path) -> None:
    lines = _path(folder).read_bytes().splitlines(keepends=True)
    _path(folder).write_bytes(lines[0])
    with _path(folder, LATE).open("ab") as file:
        file.write(lines[1])


def _double_line(folder: Path) -> None:
    _append(folder, measurement(samples=(samples(*TAKEN),)))
    _append(folder, measurement(samples=(samples(*TAKEN),), name="01_coalesced"))


def _copy_run(folder: Path) -> None:
    _append(folder, measurement(run=FUTURE, time="2099-01-01T00:00:00Z"), FUTURE)


def _named_ahead(folder: Path) -> None:
    _append(folder, measurement(run=FUTURE), FUTURE)


def _named_by_no_day(folder: Path) -> None:
    line = to_line(measurement(samples=(samples(*TAKEN),))).replace(EARLY, NO_DAY)
    _path(folder, NO_DAY).write_text(line, encoding="utf-8")


def _too_fast(folder: Path) -> None:
    _append(folder, measurement(gpu=HOPPER, problem=LARGE, samples=(samples(100.0),)))


def _too_high_a_ceiling(folder: Path) -> None:
    _append(folder, ceiling(gpu=HOPPER, name="tensor_float16", unit="TFLOP/s", value=1100.0))


def _of_another_gpu(folder: Path) -> None:
    _append(folder, measurement(gpu=GPU.model_copy(update={"slug": "other-gpu"})))


def _many_samples(folder: Path) -> None:
    line = json.loads(to_line(measurement()))
    line["samples"][0]["time_us"] = [2.0] * 3_000_000
    with _path(folder).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _odd_name(folder: Path) -> None:
    (folder / "runs" / "[x](javascript:alert(1)).jsonl").write_text("", encoding="utf-8")


def _live_drawing(folder: Path) -> None:
    (folder / "figures").mkdir()
    drawing = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    (folder / "figures" / "ladder.svg").write_text(drawing, encoding="utf-8")


def _of_another_machine(folder: Path) -> None:
    text = (folder / "machine.json").read_text(encoding="utf-8").replace(SLUG, "other-gpu")
    (folder / "machine.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "sound"),
    [("f0_e4m3", True), ("f0_e4m3[TILE_KV=64]", True), ("fa3_fp8", True), ("fp8_simulated", False), ("fa3", False)],
)
def test_what_multiplies_fp8_may_pass_the_peak_of_16_bits(data: Path, name: str, sound: bool) -> None:
    time_us = LARGE.flops / 1100e6  # between the peak and twice the peak of a Hopper GPU
    _append(data / SLUG, measurement(name=name, gpu=HOPPER, problem=LARGE, samples=(samples(time_us),)))
    _seal_anew(data / SLUG)
    assert (not list(store.verify(SLUG, data))) == sound


@pytest.mark.parametrize(
    ("harm", "place", "reason"),
    [
        (_move_line, f"runs/{LATE}.jsonl:2", f"run: wanted {LATE}, the file's name, got {EARLY}"),
        (_double_line, f"runs/{EARLY}.jsonl:4", f"the samples of runs/{EARLY}.jsonl:3 again"),
        (_copy_run, f"runs/{FUTURE}.jsonl:1", "time: 2099-01-01T00:00:00Z is in the future"),
        (_named_ahead, f"runs/{FUTURE}.jsonl:1", "run: 20990101T000000Z is in the future"),
        (_named_by_no_day, f"runs/{NO_DAY}.jsonl:1", "stage.run: month must be in 1..12"),
        (_too_fast, f"runs/{EARLY}.jsonl:3", "2749 TFLOP/s, above the 1071 that its GPU can reach"),
        (_too_high_a_ceiling, f"runs/{EARLY}.jsonl:3", "1100 TFLOP/s, above the 1071"),
        (_of_another_gpu, f"runs/{EARLY}.jsonl:3", "gpu: of other-gpu"),
        (_many_samples, f"runs/{EARLY}.jsonl:3", "stage.samples.0.time_us: wanted at most"),
        (_odd_name, "runs/[x](javascript:alert(1)).jsonl", "not named by a run's id"),
        (_live_drawing, "figures/ladder.svg", "a drawing whose <script> runs or loads something"),
        (_of_another_machine, "machine.json", "of other-gpu"),
    ],
)
def test_deceit_is_found_though_the_sums_are_right(data: Path, harm: Any, place: str, reason: str) -> None:
    harm(data / SLUG)
    _seal_anew(data / SLUG)
    found = [str(damage) for damage in store.verify(SLUG, data)]
    assert len(found) == 1
    assert found[0].startswith(f"{data / SLUG / place}: {reason}")


def test_a_line_of_another_run_is_not_read(data: Path) -> None:
    _move_line(data / SLUG)
    assert store.measurements(SLUG, data) == (measurement(), measurement(run=LATE, name="01_coalesced"))
    assert store.newest_ceilings(SLUG, data) == {}


def test_a_folder_or_file_that_is_a_link_is_not_read(data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (data / SLUG).rename(elsewhere / SLUG)
    (data / SLUG).symlink_to(elsewhere / SLUG)
    (data / "<b>").mkdir()
    for name in (SLUG, "<b>"):
        assert [one.path for one in store.verify(name, data)] == [data / name]
    assert store.gpus(data) == ()


def _git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def _append_one(folder: Path) -> None:
    _append(folder, ceiling(name="exp2"))


def _delete_line(folder: Path) -> None:
    _path(folder).write_bytes(_path(folder).read_bytes().splitlines(keepends=True)[0])


@pytest.mark.parametrize("harm", [_append_one, _delete_line, _change])
@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
def test_a_file_is_never_changed_after_the_commit_that_added_it(data: Path, harm: Any, committed: bool) -> None:
    for arguments in (("init",), ("add", "."), ("commit", "-m", "Record")):
        _git(data, *arguments)
    assert store.verify(SLUG, data) == ()
    harm(data / SLUG)
    _seal_anew(data / SLUG)
    _append(data / SLUG, ceiling(run="20260104T000000Z-0123abc"), "20260104T000000Z-0123abc")
    store.write_checksums(SLUG, data)
    if committed:
        _git(data, "commit", "-a", "-m", "Mend")
    (found,) = map(str, store.verify(SLUG, data))
    assert found.startswith(f"{_path(data / SLUG)}: changed since commit ")


def test_a_run_that_a_later_commit_removed_is_missed(data: Path) -> None:
    for arguments in (("init",), ("add", "."), ("commit", "-m", "Record")):
        _git(data, *arguments)
    _path(data / SLUG).unlink()
    _seal_anew(data / SLUG)
    _git(data, "commit", "-a", "-m", "Forget")
    (found,) = map(str, store.verify(SLUG, data))
    assert re.fullmatch(rf"{re.escape(str(_path(data / SLUG)))}: added by commit [0-9a-f]{{7}}, missing", found)


HOSTILE = '<script>hacked=1</script>"><img src=x onerror=hacked=1>'


@pytest.mark.parametrize(
    "text", [HOSTILE, "[x](javascript:alert(1))", "]]>", "a | b", "{{ x }}", "a\nb", "`x`", "x" * 301]
)
def test_a_label_holds_nothing_that_a_page_would_read_as_its_own(text: str) -> None:
    for changes in ({"name": text}, {"software": {"numpy": text}}, {"software": {text: "1"}}, {"time": text}):
        with pytest.raises(ValidationError):
            measurement(**changes)
    for field in ("slug", "name", "driver", "fingerprint"):
        with pytest.raises(ValidationError):
            Gpu.model_validate({**GPU.model_dump(), field: text})
    with pytest.raises(ValidationError):
        ceiling(how=text)
    with pytest.raises(ValidationError):
        Machine(gpu=GPU, host={"processor": text})
    with pytest.raises(ValidationError):
        Source(commit=text, dirty=False)


def test_every_text_of_a_record_is_a_label_or_known_to_be_prose() -> None:
    """So that no field is added that a page would show unescaped."""
    prose = {"reason", "findings", "text"}
    models = [one for one in vars(schema).values() if isinstance(one, type) and issubclass(one, BaseModel)]
    for model in models:
        hints = get_type_hints(model, include_extras=True)
        for name in model.model_fields:
            free = "AfterValidator(func=<function _readable" in repr(hints[name])
            assert free == (name in prose and name in model.model_fields), f"{model.__name__}.{name}"
            bare = re.sub(r"Annotated\[str, |Literal\[[^\]]*\]|dict\[str, .*JsonValue.*", "", repr(hints[name]))
            alone = hints[name] is str and not model.model_fields[name].metadata
            assert not alone, f"{model.__name__}.{name}: wanted Label, Prose or a pattern"
            assert "dict[str" not in bare, f"{model.__name__}.{name}: wanted keys that are labels"
            assert "tuple[str" not in bare, f"{model.__name__}.{name}: wanted labels"


def test_two_runs_of_one_second_have_two_names() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    source = Source(commit="0123abcdef", dirty=True)
    names = {schema.run_id(source, start) for _ in range(20)}
    assert len(names) == 20
    for name in names:
        assert name.startswith("20260101T000000Z-0123abc-dirty-")
        assert measurement(run=name).run == name


def test_damage_names_the_line_where_there_is_one() -> None:
    assert str(Damage(Path("a/b"), 3, "bad")) == "a/b:3: bad"
    assert str(Damage(Path("a/b"), None, "bad")) == "a/b: bad"


# --- What Nsight Compute counted ---

_STAGE_LINE: dict[str, Any] = {
    "stage": "00_naive",
    "shape": "1x2x128x64",
    "gpu": "Made-Up GPU",
    "commit": "0123abc",
    "dirty": False,
    "metrics": {"smsp__inst_executed.sum": 3, "a_metric_of_tomorrow.avg": 0.5},
}
_PATTERN_LINE: dict[str, Any] = {key: _STAGE_LINE[key] for key in ("gpu", "commit", "dirty", "metrics")} | {
    "pattern": "one for all",
    "kernel": "pattern_load_4",
    "offsets": [0] * 31 + [-1],
}


def write_counters(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "counters" / f"{EARLY}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_counters_read_back_whatever_their_metrics(tmp_path: Path) -> None:
    path = write_counters(tmp_path, _STAGE_LINE, _PATTERN_LINE)
    ((stage,), damage), ((pattern,), _) = store.read(path, StageCounters), store.read(path, PatternCounters)
    assert damage == ()
    assert stage.metrics == _STAGE_LINE["metrics"]
    assert pattern.offsets[-1] == -1


@pytest.mark.parametrize(
    "line",
    [
        {key: value for key, value in _STAGE_LINE.items() if key != "metrics"},
        {**_STAGE_LINE, "metrics": {"x": "many"}},
        {**_PATTERN_LINE, "offsets": [0]},
        {"gpu": "Made-Up GPU"},
    ],
    ids=["no metrics", "no number", "too few lanes", "neither stage nor pattern"],
)
def test_a_damaged_line_of_counters_costs_itself(line: dict[str, Any], tmp_path: Path) -> None:
    path = write_counters(tmp_path, line, _STAGE_LINE)
    found, damaged = store.read(path, StageCounters)
    assert len(found) == 1
    assert [(damage.path, damage.line) for damage in damaged] == [(path, 1)]


def test_checksums_cover_counters(data: Path) -> None:
    path = write_counters(data / SLUG, _STAGE_LINE)
    assert [str(damage) for damage in store.verify(SLUG, data)] == [f"{path}: not listed in CHECKSUMS"]
    store.write_checksums(SLUG, data)
    assert store.verify(SLUG, data) == ()
    path.write_text("{broken\n", encoding="utf-8")
    _seal_anew(data / SLUG)
    (damage,) = store.verify(SLUG, data)
    assert (damage.path, damage.line) == (path, 1)


def test_threads_may_write_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "edited.cu"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: store.write_at_once(path, "text"), range(200)))
    assert path.read_text(encoding="utf-8") == "text"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
