from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from copy import copy as shallow_copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared import needs_compiler
from synthetic import RUN, measurement, write_synthetic

from flashlab.build.parallel import Follow
from flashlab.cli import app, doctor
from flashlab.core import errors
from flashlab.core.errors import CompileError, NoGpuError, UnknownStageError
from flashlab.core.inputs import KINDS
from flashlab.core.paths import ROOT
from flashlab.core.problem import FIRST_SHAPE, Problem, suite
from flashlab.experiments import ablation, packed
from flashlab.kernels import registry
from flashlab.kernels.registry import ARCHS, STAGES
from flashlab.measure import bench, check, profile
from flashlab.query import select
from flashlab.record import schema, store
from flashlab.record.checks import CheckRow
from flashlab.run import emulator, gpu
from flashlab.run.attention import Fallbacks
from flashlab.show import site
from flashlab.show.pages import PAGE_OF
from flashlab.verify import cases, on_cpu
from flashlab.verify.on_cpu import CheckRun

FIRST_STAGE = next(iter(STAGES))
PLAN = str(ROOT / "scripts" / "tuning.json")


class Result:
    """What one run of the program left."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program in this process, through the same `main` as the installed script."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["flashlab", *map(str, arguments)])
        code: object = 0
        try:
            app.main()
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        return Result(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_synthetic(tmp_path / "data", problems=(*suite("smoke"), *suite("first")))
    return tmp_path / "data"


def test_help_lists_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for command in (
        *("doctor", "stages", "compile", "sass", "check", "bench", "tune", "explain", "ablate", "split", "results"),
        "report",
    ):
        assert f" {command} " in result.out


@pytest.mark.parametrize(
    "arguments",
    [("nope",), ("results", "--nope"), ("sass",), ("sass", "00", "--mask", "sparse"), ("bench", "--samples", "0")],
)
def test_wrong_usage_exits_2(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert "Usage" in result.err
    assert result.out == ""


def test_stages(run: Run) -> None:
    table = run("stages").out
    rows = run("stages", "--json").json
    assert [row["id"] for row in rows] == list(STAGES)
    for stage in STAGES.values():
        assert stage.id in table
        assert stage.title in table


def test_compile(run: Run) -> None:
    result = run("compile", FIRST_STAGE, "--arch", "sm_80", "--json")
    assert result.code == 0
    rows = result.json
    stage = STAGES[FIRST_STAGE]
    assert len(rows) == 2 * len(stage.head_dims) * len(stage.dtypes)
    assert all(row["registers"] > 0 and row["arch"] == "sm_80" and len(row["sha256"]) == 64 for row in rows)
    table = run("compile", FIRST_STAGE, "--arch", "sm_80")
    assert table.code == 0
    assert "registers" in table.out


def test_compile_failure_shows_source_line_command_and_log(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlab.build import compiler

    error = CompileError(
        "a.cu: refused", command="nvrtc a.cu", log="a.cu(3): error: what", source_line="a.cu:3: what()"
    )
    monkeypatch.setattr(compiler, "compile_many", lambda work, follow: tuple(error for _ in work))
    result = run("compile", FIRST_STAGE, "--arch", "sm_80")
    assert result.code == 1
    for part in ("a.cu: refused", "a.cu:3: what()", "nvrtc a.cu", "error: what"):
        assert result.err.count(part) == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.ShapeError("wanted more"),
        errors.TooLargeError("too large", seconds=9.5),
        errors.PerformanceWarningError("spills", command="nvrtc a.cu", log="1 spill", source_line="a.cu:1: x"),
        errors.EmulationError("deadlock", report={"blocks": 1}),
    ],
)
def test_an_error_of_another_process_arrives_whole(error: Exception) -> None:
    error.add_note("by the way")
    for other in (pickle.loads(pickle.dumps(error)), shallow_copy(error)):
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_a_stage_newer_than_the_architecture_is_said(run: Run) -> None:
    newer = [stage for stage in STAGES.values() if stage.min_arch != ARCHS[0]]
    if not newer:
        pytest.skip("every stage runs on the oldest architecture")
    for command in ("compile", "sass"):
        result = run(command, newer[0].id, "--arch", ARCHS[0])
        assert result.code == 1
        assert f"got {ARCHS[0]}" in result.err
        assert newer[0].min_arch in result.err
        assert "this GPU" not in result.err


def test_sass(run: Run) -> None:
    counts = run("sass", FIRST_STAGE, "--arch", "sm_80", "--json").json["counts"]
    assert counts["total"] == sum(count for name, count in counts.items() if name != "total") > 0
    assert "what it holds" in run("sass", FIRST_STAGE, "--arch", "sm_80").out


def test_sass_listing(run: Run) -> None:
    listing = run("sass", FIRST_STAGE, "--arch", "sm_80", "--listing").out
    instructions = run("sass", FIRST_STAGE, "--arch", "sm_80", "--listing", "--json").json
    assert len(listing.splitlines()) == len(instructions)
    assert any(instruction["opcode"] == "EXIT" for instruction in instructions)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("sass", "99_none"), FIRST_STAGE),
        (("compile", "99_none"), FIRST_STAGE),
        (("sass", FIRST_STAGE, "--arch", "sm_10"), "sm_75"),
        (("compile", "--arch", "sm_10"), "sm_75"),
        (("sass", FIRST_STAGE, "--head-dim", "96"), "64"),
        (("sass", FIRST_STAGE, "--head-dim", "0"), "positive"),
        (("results", "--shape", "16x16"), "BxHxSxD"),
        (("results", "--inputs", "sink_frist"), "got 'sink_frist'; the nearest is sink_first"),
        (("bench", "--inputs", "normal,scale3"), "inputs: wanted one of normal, scale2, scale4"),
        (("check", "--on", "cpu", "--inputs", "trained"), "wanted a kind that is drawn from a seed"),
        (("profile", "--inputs", "trained"), "wanted a kind that is drawn from a seed"),
        (("results", "--gpu", "none-such"), "nvidia-h200"),
        (("results", "--regime", "sustained", "--cache", "cold"), "--regime burst --cache cold"),
        (
            ("results", "--against-peers", "--cache", "cold"),
            "no --regime, --cache, --window or --softcap, got --cache cold",
        ),
        (("results", "--against-peers", "--regime", "burst"), "got --regime burst"),
        (("results", "--against-peers", "--window", "3"), "got --window 3"),
        (("results", "--verify", "--shape", "16x16x2048x64"), "--gpu, --data and --json, got --shape"),
        (("results", "--verify", "--against-peers"), "got --against-peers"),
        (("results", "--verify", "--inputs", "zeros"), "got --inputs"),
        (("bench", "--dry-run", "--sustained-on", "fa9"), "sustained: wanted names among 00_naive"),
        (("bench", "--dry-run", "--sustained-on", "13"), "stage: wanted a unique prefix, got '13', which begins 13_"),
    ],
)
def test_bad_input_is_named_with_what_works(run: Run, data: Path, arguments: tuple[str, ...], wanted: str) -> None:
    if arguments[0] == "results":
        arguments = (*arguments, "--data", str(data))
    result = run(*arguments)
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("flashlab: ")
    assert wanted in result.err
    assert "Traceback" not in result.err


def test_results_have_the_promised_fields(run: Run, data: Path) -> None:
    arguments = ("--gpu", "nvidia-h200", "--shape", FIRST_SHAPE, "--dtype", "float16", "--mask", "causal")
    rows = run("results", *arguments, "--data", data, "--json").json
    assert {row["name"] for row in rows} >= set(STAGES)
    for row in rows:
        assert row.keys() >= {"name", "kind", "median_us", "tflops", "cv_percent", "samples", "run", "commit"}
        assert row["kind"] in ("stage", "peer")
        assert (row["shape"], row["dtype"], row["mask"], row["run"]) == (FIRST_SHAPE, "float16", "causal", RUN)
        assert (row["median_us"] is None) == (row["status"] != "ok")
        assert (row["samples"] > 0) == (row["status"] == "ok")


def test_results_filter(run: Run, data: Path) -> None:
    everything = run("results", "--data", data, "--json").json
    full = run("results", "--data", data, "--mask", "full", "--json").json
    assert 2 * len(full) == len(everything)
    long_form = FIRST_SHAPE.replace("16x16x2048", "16x16x16x2048x2048", 1)
    assert run("results", "--data", data, "--shape", long_form, "--json").json == [
        row for row in everything if row["shape"] == FIRST_SHAPE
    ]
    sustained = run("results", "--data", data, "--regime", "sustained", "--json").json
    assert {row["regime"] for row in sustained} == {"sustained"}


def test_results_say_that_short_sustained_load_is_not_shown(run: Run, tmp_path: Path) -> None:
    row = measurement("00_naive", Problem.parse(FIRST_SHAPE))
    short = (one.model_copy(update={"continuous_s": one.continuous_s and 0.5}) for one in row.samples)
    path = tmp_path / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True)
    store.append(path, row.model_copy(update={"samples": tuple(short)}))
    result = run("results", "--data", tmp_path, "--regime", "sustained")
    assert result.code == 1
    assert "--regime sustained --cache hot, found none of at least 1.5 s in these rows" in result.err
    assert "Shown: --regime burst --cache cold; --regime burst --cache hot\n" in result.err
    result = run("results", "--data", tmp_path, "--cache", "step")
    assert "--cache step, found none in these rows" in result.err


def test_results_table_names_run_and_reasons(run: Run, data: Path) -> None:
    table = run("results", "--data", data).out
    assert RUN in table
    assert "missing: " in table


def test_a_newer_fragment_does_not_hide_the_ladder(run: Run, data: Path) -> None:
    runs = data / "nvidia-h200" / "runs"
    lines = (runs / f"{RUN}.jsonl").read_text(encoding="utf-8").splitlines()
    whole = run("results", "--data", data, "--json").json
    newer = "20270102T030405Z-0123abc"
    line = next(line for line in lines if FIRST_STAGE in line).replace(RUN, newer)
    (runs / f"{newer}.jsonl").write_text(line + "\n", encoding="utf-8")
    assert run("results", "--data", data, "--json").json == whole
    alphabetically_first = data / "a-gpu" / "runs"
    alphabetically_first.mkdir(parents=True)
    (alphabetically_first / f"{newer}.jsonl").write_text(line + "\n", encoding="utf-8")
    assert run("results", "--data", data, "--json").json == whole


def test_results_are_what_the_report_shows(run: Run) -> None:
    shown = select.load_all()[0]
    rows = run("results", "--json").json
    medians = {
        (row.name, problem.shape, problem.dtype, problem.mask): taken.median_us if (taken := row.samples_of()) else None
        for problem, rows_there in shown.problems.items()
        for row in rows_there
    }
    assert {(row["name"], row["shape"], row["dtype"], row["mask"]): row["median_us"] for row in rows} == medians


def test_no_matching_rows_lists_the_nearest_that_there_are(run: Run, tmp_path: Path) -> None:
    write_synthetic(tmp_path, problems=(*suite("smoke"), *suite("standard")))
    result = run("results", "--data", tmp_path, "--shape", "8x16x2048x64", "--softcap", "30", "--mask", "causal")
    assert result.code == 1
    assert "wanted rows of 8x16x2048x64 causal --softcap 30 normal on nvidia-h200, found none" in result.err
    nearest = result.err.split("recorded problems: ")[1].split("; ")
    assert nearest[0] == "B16 H16 S2048 D64 causal float16"
    assert len(nearest) == 5


def test_results_of_what_the_ladder_was_not_measured_at(run: Run, data: Path) -> None:
    decoding, *_ = suite("decode")
    capped = replace(Problem.parse(FIRST_SHAPE, mask="causal"), softcap=50.0, window=(511, -1))
    stage, *_ = registry.DECODE
    for problem, name, later in ((decoding, stage, "20270102T030405Z-0123abc"), (capped, FIRST_STAGE, RUN)):
        path = data / "nvidia-h200" / "runs" / f"{later}.jsonl"
        for one in (name, "sdpa"):
            store.append(path, measurement(one, problem, run=later))
    shown = ("results", "--data", data, "--json", "--shape")
    assert [row["name"] for row in run(*shown, decoding.shape).json] == [stage, "sdpa"]
    features = ("--window", "511", "--softcap", "50")
    assert [row["name"] for row in run(*shown, FIRST_SHAPE, *features).json] == [FIRST_STAGE, "sdpa"]
    assert run(*shown, FIRST_SHAPE, *features[:2]).code == 1
    assert all(row["features"] == "" for row in run(*shown, FIRST_SHAPE).json)


def test_no_data_says_how_to_make_some(run: Run, tmp_path: Path) -> None:
    result = run("results", "--data", tmp_path)
    assert result.code == 1
    assert "flashlab bench" in result.err


def test_verify(run: Run, data: Path) -> None:
    sound = run("results", "--verify", "--data", data)
    assert sound.code == 0
    assert "sound" in sound.out
    assert run("results", "--verify", "--data", data, "--json").json == []


def test_repair_leaves_alone_what_is_no_gpus_folder(run: Run, data: Path) -> None:
    (data / "src").mkdir()
    assert run("repair", "--data", data).code == 0
    assert list((data / "src").iterdir()) == []
    refused = run("repair", "src", "--data", data)
    assert (refused.code, "Existing: nvidia-h200" in refused.err) == (1, True)


def test_a_gpu_goes_by_its_product_name_too(run: Run) -> None:
    named, by_folder = (
        run("results", "--gpu", name, "--shape", FIRST_SHAPE) for name in ("NVIDIA H200", "nvidia-h200")
    )
    assert (named.code, named.out) == (0, by_folder.out)


def test_every_command_takes_a_product_name(run: Run, data: Path, tmp_path: Path) -> None:
    assert run("repair", "NVIDIA H200", "--dry-run", "--data", data).err == "0 files to repair\n"
    where = ("--data", data, "--out", tmp_path / "out", "--json")
    for command in (("report", "--dry-run", "--source", "replay"), ("sweep", "plan", "--set", "quick")):
        named, by_folder = (run(*command, "--gpu", gpu, *where) for gpu in ("NVIDIA H200", "nvidia-h200"))
        assert (named.code, named.out) == (0, by_folder.out)
    wrong = run("sweep", "plan", "--gpu", "nvidia-h200", "--gpu", "--", *where)
    assert "or a product name, got '--'" in wrong.err


def test_verify_looks_at_every_gpu(run: Run, data: Path) -> None:
    shutil.copytree(data / "nvidia-h200", data / "nvidia-z100")
    for path in (one for one in (data / "nvidia-z100").rglob("*") if one.is_file()):
        path.write_text(path.read_text(encoding="utf-8").replace("nvidia-h200", "nvidia-z100"), encoding="utf-8")
    (data / "nvidia-z100" / "CHECKSUMS").unlink()
    store.write_checksums("nvidia-z100", data)
    assert run("results", "--verify", "--data", data).out.count("is sound") == 2
    path = data / "nvidia-z100" / "runs" / f"{RUN}.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    verified = run("results", "--verify", "--data", data)
    assert verified.code == 1
    assert str(path) in verified.err
    assert run("results", "--verify", "--data", data, "--gpu", "nvidia-h200").code == 0


def test_a_damaged_line_is_named_and_the_rest_still_shown(run: Run, data: Path) -> None:
    path = data / "nvidia-h200" / "runs" / f"{RUN}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], lines[1][:40], *lines[2:]]) + "\n", encoding="utf-8")
    verified = run("results", "--verify", "--data", data)
    assert verified.code == 1
    assert f"{path}:2:" in verified.err
    assert run("results", "--verify", "--data", data, "--json").code == 1
    shown = run("results", "--data", data, "--json")
    assert shown.code == 0
    assert f"{path}:2:" in shown.err
    assert len(shown.json) > 1
    contest = run("results", "--data", data, "--against-peers")
    assert f"{path}:2:" in contest.err


def test_what_is_shown_of_a_damaged_folder_is_not_said_to_be_left_out(run: Run, data: Path) -> None:
    """A file that CHECKSUMS does not list is named, and its rows are in the table all the same."""
    (data / "nvidia-h200" / "CHECKSUMS").unlink()
    shown = run("results", "--data", data, "--json")
    assert (shown.code, len(shown.json) > 1) == (0, True)
    assert "not listed in CHECKSUMS" in shown.err
    assert f"damaged, left out: {data / 'nvidia-h200' / 'runs'}" not in shown.err
    assert "`flashlab repair nvidia-h200`" in shown.err


def test_doctor(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--data", tmp_path)
    assert result.code == 0
    assert "compiler" in result.out
    assert {finding["state"] for finding in run("doctor", "--data", tmp_path, "--json").json} <= {"ok", "absent"}


def test_doctor_fails_and_prints_the_fix_where_something_is_broken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Finding(name="compiler", state="broken", detail="no NVRTC", fix="pip install it")
    monkeypatch.setattr(doctor, "examine", lambda data: (broken,))
    result = run("doctor")
    assert result.code == 1
    assert "no NVRTC" in result.out
    assert "pip install it" in result.err


@pytest.mark.parametrize(
    "command", ["bench", "check --on gpu", "check 00_naive --on both --length 1x1", "check --record"]
)
def test_measuring_without_a_gpu_says_what_works(run: Run, tmp_path: Path, command: str) -> None:
    if gpu.available() is None:
        pytest.skip("there is a GPU")
    result = run(*command.split(), "--data", tmp_path)
    assert result.code == 1
    assert "wanted a CUDA GPU" in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("bench", "--suite", "none-such"), "smoke, first, quick, standard"),
        (("bench", "--shape", "16x16"), "BxHxSxD"),
        (("bench", "--shape", "1x8x512x64", "--suite", "first"), "wanted no --suite, which it replaces"),
        (("bench", "--shape", "1x8x512x64", "--sustained-on", "fa3", "--dry-run"), "wanted --sustained SECONDS too"),
        (("bench", "--shape", "1x8x512x64", "--sustained", "inf", "--dry-run"), "still changes, got inf. 5 works"),
        (("bench", "--shape", "1x8x512x64", "--sustained", "0.5", "--dry-run"), "wanted 0 or at least 1.5 seconds"),
        (("method", "--sustained", "0.5"), "wanted 0 or at least 1.5 seconds"),
        (("bench", "--stages", "", "--dry-run"), "wanted comma-separated names, or none, got ''"),
        (("bench", "--stages", "99_none"), FIRST_STAGE),
        (("bench", "--peers", "none-such"), "sdpa"),
        (("bench", "--stages", "none", "--peers", "none"), "at least one stage or peer"),
        (("bench", "--stages", "none", "--peers", "none", "--dry-run"), "at least one stage or peer"),
        (("bench", "--source", FIRST_STAGE), "STAGE=FILE"),
        (("bench", "--source", f"{FIRST_STAGE}=/none/such.cu"), "an existing file"),
        (("check", "99_none"), FIRST_STAGE),
        (("check", "--length", "113"), "SQxSK"),
        (
            ("check", "05", "--on", "cpu", "--length", "16x16", "--window", "3"),
            "supports those problems, got none. Stage 05_wmma takes no window. Runnable: 08_swizzle",
        ),
        (
            ("check", "05", "--on", "cpu", "--length", "16x16", "--dtype", "bfloat16"),
            "got none. Stage 05_wmma takes float16, got bfloat16. Runnable: ",
        ),
        (("check", "--length", "0x5"), "positive"),
        (("check", "--on", "cpu", "--schedule", "random"), "seeded:7"),
        (("check", "--on", "cpu", "--record"), "--on gpu or both"),
        (("check", "--on", "cpu", "--suite", "llama"), "suite: wanted one of flash-attention"),
        (("check", "--on", "cpu", "--suite", "flash-attention", "--length", "1x1"), "wanted no --random, --length"),
        (("check", "--on", "gpu", "--races"), "--on cpu"),
        (("check", "--on", "cpu", "--device", "1"), "--device: wanted --on gpu or both"),
        (
            ("check", "00", "--on", "cpu", "--suite", "flash-attention", "--dtype", "bfloat16"),
            "got none. They take float16 at head dims 64, 128",
        ),
        (("compile", "05[TILE_KV=32]"), "wanted an id alone, got '05_wmma[TILE_KV=32]'. Values of tunables"),
        (("report", "--source", "guess"), "replay"),
        (("sweep", "plan", "--set", "none-such"), "quick, full, got"),
        (("sweep", "plan", "--ray", "local"), "flashlab[sweep]"),
        (("sweep", "plan", "--gpu", "nope"), "wanted a GPU, got nope. --gpu selects one to plan for"),
        (("sweep", "run", "--gpu", "nope"), "wanted a GPU, got nope"),
        (("collect", "/none/such"), "does not exist"),
        (("compare", "a", "b"), "wanted records"),
        (("repair",), "wanted folders of records under"),
        (("tune", "09", "--shape", "bad", "--dry-run"), "shape: wanted BxHxSxD"),
        (("tune", "09", "--head-dim", "80", "--dry-run"), "Stage 09_wgmma takes head dim"),
        (("tune", "09[TILE_KV=64]", "--dry-run"), "wanted an id alone, got '09_wgmma[TILE_KV=64]'"),
        (("tune", "--plan", PLAN, "--limit", "3", "--dry-run"), "wanted no --limit"),
        (("tune", "09", "--each", "--limit", "3", "--dry-run"), "--limit: wanted no --each"),
        (("tune", "--plan", PLAN, "--head-dim", "80", "--dry-run"), "has head dims 64, 96, 128, 256"),
        (("tune", "--plan", "none-such.json"), "got none-such.json: No such file or directory"),
        (("profile", "09", "--shape", "1x1x64x80"), "got none. Stage 09_wgmma takes head dim 64"),
        (("split", "08", "--shape", "1x1x64x80"), "got none. Stage 08_swizzle takes head dim 64"),
        (("ablate", "exp", "--shape", "1x1x64x80"), "wanted a stage that takes B1 H1"),
        (("ablate", "--levers", "--shape", "1x1x64x80"), "wanted a stage that takes B1 H1"),
        (("bench", "--stages", "09", "--peers", "none", "--shape", "1x1x64x80"), "got none. Stage 09_wgmma takes head"),
        (("packed", "--decode", "--mask", "full"), "--mask: wanted no --decode"),
        (("packed", "--head-dim", "80"), "wanted a stage that takes B1 H16 S1 D80"),
        (("packed", "--lengths", "none"), "lengths: wanted one of equal, uniform, one_long, short, got none"),
        (("llama", "--attention", "none"), "attention: wanted one of flashlab, sdpa, fa3, nothing, sdpa_cudnn"),
        (("llama", "--attention", "fa9"), "wanted one of flashlab, sdpa, fa3, nothing, sdpa_cudnn"),
        (("tune", "--plan", "p.json", "--shape", "1x1x64x64", "--dtype", "float16"), "wanted no --dtype, --shape"),
        (("report", "--stages", "99_none"), FIRST_STAGE),
        (("report", "--source", "replay", "--gpu", "none-such"), "GPUs with data"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], wanted: str
) -> None:
    where = () if arguments[0] == "compile" else ("--data", tmp_path)
    result = run(*arguments, *where)
    assert result.code == 1
    assert result.out == ""
    assert wanted in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["bench", "report"])
def test_an_unwritable_folder_is_said(run: Run, read_only_dir: Path, tmp_path: Path, command: str) -> None:
    place = ("--data", read_only_dir) if command == "bench" else ("--out", read_only_dir, "--data", tmp_path)
    result = run(command, *place)
    assert result.code == 1
    assert "writable folder" in result.err


def test_bench_hands_on_what_was_asked_and_shows_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measure(problems: Any, **options: Any) -> Path:
        asked.update(options, problems=list(problems))
        options["options"].progress(1, 2, "timing")
        return write_synthetic(options["options"].data, problems=problems)

    monkeypatch.setattr(bench, "run", measure)
    result = run("bench", "--shape", "1x2x130x64", "--dtype", "float16", "--mask", "full", "--peers", "none",
                 "--stages", FIRST_STAGE, "--data", tmp_path, "--json")  # fmt: skip
    assert result.code == 0
    assert [problem.label for problem in asked["problems"]] == ["B1 H2 S130 D64 full float16"]
    assert (asked["stages"], asked["peers"]) == ([FIRST_STAGE], [])
    assert {row["name"] for row in result.json} >= set(STAGES)
    assert "[1/2] timing" in result.err
    assert f"recorded in {tmp_path}" in result.err
    assert "tflops" in run("bench", "--suite", "smoke", "--data", tmp_path).out
    assert {problem.mask for problem in asked["problems"]} == {"full", "causal"}
    assert (asked["stages"], asked["peers"]) == (None, None)


def test_a_resumed_bench_asks_for_what_is_left(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(bench, "run", lambda problems, **how: asked.append(how["options"].resume))
    for what in ((), ("--resume",)):
        done = run("bench", "--suite", "smoke", *what, "--data", tmp_path)
        assert (done.code, done.out) == (0, "")
    assert asked == [False, True]


def test_nothing_left_to_measure_is_an_empty_list_in_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda problems, **how: None)
    monkeypatch.setattr(profile, "profile", lambda *how: (None, (), ()))
    monkeypatch.setattr(ablation, "measure", lambda axes, **how: None)
    for command in ("bench", "profile", "ablate"):
        done = run(command, "--resume", "--json", "--data", tmp_path)
        assert (done.code, done.json) == (0, [])


def test_bench_takes_part_of_a_suite(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(problems: Any, **options: Any) -> Path:
        asked.update(options, problems=list(problems))
        return write_synthetic(options["options"].data, problems=problems)

    monkeypatch.setattr(bench, "run", measure)
    lengths = ("bench", "--suite", "lengths", "--dtype", "float16", "--mask", "full", "--data", tmp_path)
    assert run(*lengths, "--head-dim", "64", "--length", "512", "--length", "16384").code == 0
    assert [problem.shape for problem in asked["problems"]] == ["64x16x512x64", "2x16x16384x64"]
    assert asked["plan"] == bench.plan_of("lengths")
    run(*lengths, "--length", "512", "--sustained", "7", "--sustained-on", "17,sdpa", "--samples", "9", "--cold", "2")
    plan = asked["plan"]
    assert (plan.samples, plan.cold_samples, plan.sustained_seconds) == (9, 2, 7.0)
    assert (plan.sustained_shapes, plan.sustained_names) == (None, ("17_around_the_loop", "sdpa"))
    refused = run(*lengths, "--length", "513")
    assert refused.code == 1
    assert "lengths 512, 1024, 2048, 4096, 8192, 16384" in refused.err
    # A suite without a plan of its own is sustained at the first shape alone.
    run("bench", "--suite", "first", "--data", tmp_path)
    assert asked["plan"] == bench.Plan()


def test_bench_measures_each_problem_on_each_kind_of_inputs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measure(problems: Any, **options: Any) -> Path:
        asked.update(options, problems=list(problems))
        return write_synthetic(options["options"].data, problems=asked["problems"][:1])

    monkeypatch.setattr(bench, "run", measure)
    some = ("--head-dim", "64", "--length", "2048", "--mask", "full", "--dtype", "float16", "--data", tmp_path)
    assert run("bench", "--suite", "inputs", *some).code == 0
    assert [problem.inputs for problem in asked["problems"]] == list(KINDS)
    assert len({problem.shape for problem in asked["problems"]}) == 1
    assert asked["plan"] == bench.plan_of("inputs")
    assert "scale4" in run("bench", "--suite", "lengths", *some, "--inputs", "scale4").out
    assert [problem.inputs for problem in asked["problems"]] == ["scale4"]
    run("bench", "--suite", "gqa", "--head-dim", "64", "--data", tmp_path)
    assert {problem.inputs for problem in asked["problems"]} == {"normal"}
    # Kinds of one problem follow one another.
    run("bench", "--shape", "1x2x64x64", "--dtype", "float16", "--inputs", "zeros,rising", "--data", tmp_path)
    assert [problem.label for problem in asked["problems"]] == [
        f"B1 H2 S64 D64 {mask} float16 {kind}" for mask in ("full", "causal") for kind in ("zeros", "rising")
    ]


def test_bench_foretells_all_kinds_of_inputs(run: Run) -> None:
    asked = ("bench", "--suite", "inputs", "--dry-run", "--head-dim", "64", "--stages", "none", "--peers", "sdpa,fa4")
    found = run(*asked, "--json").json
    assert Counter(one["problem"]["inputs"] for one in found["problems"]) == dict.fromkeys(KINDS, 8)
    assert all(one["implementations"] == 2 for one in found["problems"])
    assert "sink_first" in run(*asked, "--inputs", "sink_first").out


def test_results_of_other_inputs_where_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    first = Problem.parse(FIRST_SHAPE)
    write_synthetic(tmp_path, problems=[first, replace(first, inputs="falling")])

    def shown(*arguments: str) -> Counter[str]:
        return Counter(row["inputs"] for row in run("results", *arguments, "--json", "--data", tmp_path).json)

    assert set(shown()) == {"normal"}
    assert set(shown("--inputs", "falling")) == {"falling"}
    assert set(shown("--inputs", "all")) == {"normal", "falling"}
    assert shown("--against-peers") == {"normal": 1}
    assert shown("--against-peers", "--inputs", "all") == {"normal": 1, "falling": 1}
    assert "falling" in run("results", "--against-peers", "--inputs", "all", "--data", tmp_path).out
    refused = run("results", "--against-peers", "--inputs", "zeros", "--data", tmp_path)
    assert refused.code == 1
    assert "on zeros inputs among the records" in refused.err


def test_check_takes_kinds_of_inputs_and_says_which_it_leaves_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measure(*_: Any, **options: Any) -> CheckRun:
        asked.update(options)
        return CheckRun(None, ())

    monkeypatch.setattr(check, "check_stages", measure)
    result = run("check", "--on", "gpu", "--inputs", "all")
    assert asked["inputs"] == tuple(kind for kind in KINDS if kind != "trained")
    assert "trained inputs are skipped" in result.err
    run("check", "--on", "gpu")
    assert asked["inputs"] is None  # hostile ones too


def test_a_shape_given_twice_is_measured_and_foretold_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("bench", "--dry-run", "--json", "--dtype", "float16", "--stages", "17", "--shape", "1x8x512x64")
    once = run(*some).json
    assert len(once["problems"]) == 2
    assert run(*some, "--shape", "1X8X8X512X512X64").json == once
    asked: dict[str, Any] = {}
    monkeypatch.setattr(on_cpu, "check_on_cpu", lambda *_, **options: asked.update(options) or CheckRun(None, ()))
    run("check", "--on", "cpu", "--length", "3x5", "--length", "3X5", "--length", "5x5")
    assert asked["lengths"] == [(3, 5), (5, 5)]


def test_decoding_is_timed_with_the_library_alone_where_no_stage_is_wanted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[Any] = []

    def record_rows(_: Any, job: dict[str, Any], *__: Any, **___: Any) -> None:
        assert job["cases"]
        names.append(job["names"])
        raise NoGpuError("none")

    monkeypatch.setattr(packed, "record_rows", record_rows)
    run("packed", "--decode", "--stages", "none")
    run("packed", "--decode")
    assert names == [("flashinfer",), packed.DECODE_NAMES]


def test_bench_foretells_how_long_it_takes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("a dry run measures nothing"))
    asked = ("bench", "--suite", "peers", "--dry-run", "--head-dim", "64", "--peers", "sdpa,fa3", "--stages", "none")
    result = run(*asked)
    assert result.code == 0
    assert "minutes including start-up; nothing was measured" in result.err
    found = run(*asked, "--json").json
    assert {one["problem"]["dtype"]: one["implementations"] for one in found["problems"]} == {
        "float16": 1,
        "bfloat16": 2,
    }
    assert all(one["sustained"] == one["implementations"] for one in found["problems"])
    assert found["seconds"] > sum(one["seconds"] for one in found["problems"]) > 6 * 5


def test_a_dry_run_of_bench_says_that_it_resumes_nothing(run: Run) -> None:
    asked = ("bench", "--dry-run", "--stages", "06", "--peers", "none", "--suite", "first", "--no-ceilings")
    assert "less what --resume skips" in run(*asked, "--resume").err


def test_records_in_no_folder_are_refused(run: Run, tmp_path: Path) -> None:
    for verify in ((), ("--verify",)):
        assert "found no such folder" in run("results", *verify, "--data", tmp_path / "none-such").err


def test_results_against_peers(run: Run, data: Path) -> None:
    result = run("results", "--against-peers", "--data", data)
    assert result.code == 0
    assert "sustained ratio" in result.out
    rows = run("results", "--against-peers", "--shape", FIRST_SHAPE, "--mask", "causal", "--json", "--data", data).json
    assert [(row["shape"], row["dtype"], row["mask"]) for row in rows] == [(FIRST_SHAPE, "float16", "causal")]
    (row,) = rows
    assert row["ratio"] == pytest.approx(row["peer_median_us"] / row["stage_median_us"])
    assert row["best_stage"] in STAGES
    assert row["sustained"]["ratio"] > 0
    assert row["against_named"]["burst"]["best_peer"] in ("fa3", "sdpa_cudnn")
    refused = run("results", "--against-peers", "--shape", "1x1x7x64", "--data", data)
    assert refused.code == 1
    assert "among the records" in refused.err


def test_results_of_a_folder_without_a_sound_row_names_no_nearest_problem(run: Run, tmp_path: Path) -> None:
    runs = tmp_path / "nvidia-x" / "runs"
    runs.mkdir(parents=True)
    (runs / f"{RUN}.jsonl").write_text("", encoding="utf-8")
    result = run("results", "--data", tmp_path)
    assert result.code == 1
    assert "wanted rows of normal on nvidia-x, found none, and none of any other problem\n" in result.err


def test_bench_fails_where_a_row_failed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(problems: Any, **options: Any) -> Path:
        row = measurement(FIRST_STAGE, next(iter(problems)))
        lost = {"status": "crashed", "reason": "illegal address", "samples": (), "verdict": None}
        path = tmp_path / f"{RUN}.jsonl"
        path.write_text(schema.to_line(row.model_copy(update=lost)), encoding="utf-8")
        return path

    monkeypatch.setattr(bench, "run", measure)
    result = run("bench", "--suite", "smoke", "--data", tmp_path)
    assert result.code == 1
    assert "crashed: illegal address" in result.out
    assert f"{FIRST_STAGE} at B1 H2 S130 D64 full float16: crashed" in result.err


def test_check_counts_and_names_failures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(iter(suite("smoke")))

    def row(status: str, reason: str) -> CheckRow:
        return CheckRow(stage=FIRST_STAGE, problem=problem, layout="padded", status=status, reason=reason, verdict=None)

    def found(*rows: CheckRow) -> None:
        monkeypatch.setattr(check, "check_stages", lambda *_, **__: CheckRun(None, rows))

    found(row("ok", ""), row("unsupported", "too old"), row("unsupported", "too old"))
    result = run("check", "--on", "gpu")
    assert result.code == 0
    assert result.err.splitlines() == [f"{FIRST_STAGE}: 2 unsupported: too old"]
    found(*(row("unsupported", f"too old by {years}") for years in range(9)))
    result = run("check", "--on", "gpu")
    assert result.code == 1
    assert "further reasons, listed by --json: 1" in result.err
    assert "nothing was checked: all 9 checks are unsupported" in result.err
    found(row("ok", ""), row("wrong", "output: NaN at (0, 0, 0, 0)"))
    result = run("check", "--on", "gpu")
    assert result.code == 1
    assert FIRST_STAGE in result.out
    assert "padded: wrong: output: NaN" in result.err
    assert "1 of 2 checks failed" in result.err
    assert [shown["status"] for shown in run("check", "--on", "gpu", "--json").json] == ["ok", "wrong"]
    found(replace(row("wrong", "max abs error 0.8"), findings=("race: reads what", "race: writes", "out of bounds")))
    assert "wrong: max abs error 0.8; race: reads what, and 2 more\n" in run("check", "--on", "gpu").err
    found(replace(row("wrong", "race: reads what"), findings=("race: reads what",)))
    assert run("check", "--on", "gpu").err.count("race: reads what") == 1
    counted = replace(row("ok", ""), fallbacks=Fallbacks(renormalized=5, recomputed=7))
    found(counted, counted, row("ok", ""))
    result = run("check", "--on", "gpu")
    assert result.out.split() == [
        *("stage", "passed", "failed", "unsupported", "renormalized", "recomputed"),
        *(FIRST_STAGE, "3", "0", "0", "10", "14"),
    ]  # fmt: skip
    assert [shown["fallbacks"] for shown in run("check", "--on", "gpu", "--json").json] == [
        *[{"renormalized": 5, "recomputed": 7}] * 2, None
    ]  # fmt: skip


CPU_CHECK = ("check", FIRST_STAGE, "--length", "65x66", "--mask", "causal")


@needs_compiler
def test_check_runs_on_the_cpu(run: Run) -> None:
    result = run(*CPU_CHECK, "--on", "cpu", "--schedule", "descending", "--schedule", "seeded:7", "--races", "--json")
    assert result.code == 0, result.err
    rows = result.json
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["schedule"] for row in rows} == {"descending", "seeded:7"}
    assert {row["layout"] for row in rows} == set(cases.LAYOUTS)
    assert all(row["findings"] == [] and row["verdict"]["passed"] for row in rows)
    if gpu.available() is not None:
        result = run(*CPU_CHECK)
        assert result.code == 0
        (line,) = (line for line in result.err.splitlines() if "no GPU" in line)
        assert line == f"no GPU ({gpu.absence()}): checking on the CPU"
        assert FIRST_STAGE in result.out


@needs_compiler
def test_a_named_stage_that_takes_none_of_the_problems_is_said(run: Run) -> None:
    some = ("--on", "cpu", "--length", "5x7", "--softcap", "9", "--dtype", "float16", "--mask", "full")
    result = run("check", FIRST_STAGE, "08_swizzle", *some)
    assert (result.code, FIRST_STAGE in result.out) == (0, False)
    assert f"{FIRST_STAGE}: not checked: it supports none of these problems" in result.err


@needs_compiler
def test_a_problem_too_large_for_the_cpu_is_refused_before_its_inputs_are_made(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("check", FIRST_STAGE, "--on", "cpu", "--dtype", "float16", "--mask", "full", "--length")

    def make_inputs(problem: Problem, seed: int) -> None:
        raise MemoryError(f"Unable to allocate what {problem.label} takes")

    monkeypatch.setattr(on_cpu, "make_inputs", make_inputs)
    result = run(*how, "99999999x99999999")
    assert result.code == 1
    assert "would take about" in result.err
    assert "nothing was checked" in result.err
    result = run(*how, "7x8")
    assert result.code == 1
    assert "flashlab: out of host memory: Unable to allocate what B1 H2/1" in result.err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("q_row >= p.q_len", "q_row + 1 >= p.q_len", "unwritten"),
        ("const int q_row", "const int oops q_row", "wanted code for the CPU"),
    ],
)
@needs_compiler
def test_check_on_the_cpu_says_what_is_wrong_with_an_edited_kernel(
    run: Run, tmp_path: Path, old: str, new: str, words: str
) -> None:
    source = tmp_path / "edited.cu"
    text = STAGES[FIRST_STAGE].source.read_text(encoding="utf-8")
    assert old in text
    source.write_text(text.replace(old, new), encoding="utf-8")
    result = run(*CPU_CHECK, "--on", "cpu", "--source", f"{FIRST_STAGE}={source}")
    assert result.code == 1
    assert f"{FIRST_STAGE}@edited" in result.err
    assert words in result.err
    assert "8 of 16 checks failed" in result.err


@needs_compiler
def test_several_edited_copies_of_one_stage_are_all_checked(run: Run, tmp_path: Path) -> None:
    text = STAGES[FIRST_STAGE].source.read_text(encoding="utf-8")
    copies = [tmp_path / "one.cu", tmp_path / "two.cu"]
    for copy in copies:
        copy.write_text(text, encoding="utf-8")
    given = [option for copy in copies for option in ("--source", f"{FIRST_STAGE}={copy}")]
    result = run("check", "--length", "65x66", "--on", "cpu", *given, "--json")
    assert result.code == 0, result.err
    assert {row["stage"] for row in result.json} == {f"{FIRST_STAGE}@one", f"{FIRST_STAGE}@two"}


def test_two_edited_copies_of_one_name_are_refused(run: Run, tmp_path: Path) -> None:
    given: list[str] = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        copy = tmp_path / folder / "edited.cu"
        copy.write_text(STAGES[FIRST_STAGE].source.read_text(encoding="utf-8"), encoding="utf-8")
        given += ["--source", f"{FIRST_STAGE}={copy}"]
    result = run("check", "--length", "65x66", "--on", "cpu", *given)
    assert result.code != 0
    assert "copies with different file names" in result.err


def test_check_goes_through_an_edited_copy_alone_where_no_stage_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(on_cpu, "check_on_cpu", lambda chosen, **how: asked.append(chosen) or CheckRun(None, ()))
    for named in ((), (FIRST_STAGE,), ("--random", "3")):
        run("check", *named, "--on", "cpu", "--source", f"{FIRST_STAGE}={STAGES[FIRST_STAGE].source}")
    assert asked == [[], [FIRST_STAGE], []]


def test_check_on_the_cpu_without_a_compiler_names_the_package(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(*CPU_CHECK, "--on", "cpu")
    assert result.code == 1
    assert emulator.install_command() in result.err
    assert "Traceback" not in result.err


def test_report_says_where_it_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "site" / "index.html"
    monkeypatch.setattr(site, "plan", lambda **options: ())
    monkeypatch.setattr(site, "run", lambda **options: index)
    shown = run("report", "--out", tmp_path)
    assert shown.code == 0
    assert str(index) in shown.out
    assert "search works only when it is served: `make serve`" in shown.out
    assert run("report", "--out", tmp_path, "--json").json == {"index": str(index)}


def test_a_second_report_into_a_folder_is_refused_while_the_first_runs(
    run: Run, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ("report", "--source", "replay", "--data", data, "--out", tmp_path)
    results: list[Any] = []

    def build(**options: object) -> Path:
        results.append(None)
        if len(results) == 1:
            results.append(run(*again))
        return tmp_path / "site" / "index.html"

    monkeypatch.setattr(site, "run", build)
    assert run(*again).code == 0
    refused = results[1]
    assert (refused.code, refused.out) == (1, "")
    assert f"wanted {tmp_path} for this report alone, got another's: process {os.getpid()} runs it" in refused.err
    assert run(*again).code == 0


def test_a_report_says_what_it_would_do_and_does_nothing(run: Run, tmp_path: Path, data: Path) -> None:
    said = run("report", "--dry-run", "--source", "replay", "--out", tmp_path / "out", "--data", data, "--json")
    assert {row["notebook"] for row in said.json} == set(PAGE_OF)
    assert all(row["state"] == "left" and row["minutes"] > 0 for row in said.json)
    assert (
        f"{len(said.json)} of {len(said.json)} cells to run, 0 of them measure: about 2 min\nnothing was run"
        in said.err
    )
    assert not list((tmp_path / "out").rglob("*.ipynb"))


def test_a_sweep_without_a_gpu_is_planned_for_one_with_records(
    run: Run, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "device_count", lambda: 0)
    for action in ("plan", "run", "resume"):
        refused = run("sweep", action, "--set", "quick", "--data", data)
        assert (refused.code, refused.out) == (1, "")
        assert "got none here. --gpu selects one to plan for, present or with records: nvidia-h200" in refused.err
    planned = run("sweep", "plan", "--set", "quick", "--gpu", "nvidia-h200", "--data", data, "--json")
    assert planned.json
    assert {row["gpu"] for row in planned.json} == {"nvidia-h200"}


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashlab", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=120, check=False
    )


def test_the_module_runs_as_the_program() -> None:
    result = program("stages", "--json")
    assert result.returncode == 0
    assert [row["id"] for row in json.loads(result.stdout)] == list(STAGES)


def test_an_unwritable_cache_is_said_without_a_traceback(read_only_dir: Path) -> None:
    result = program("compile", FIRST_STAGE, "--arch", "sm_80", FLASHLAB_CACHE=str(read_only_dir))
    assert result.returncode == 1
    assert str(read_only_dir) in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_early_is_no_fault() -> None:
    command = f"'{sys.executable}' -m flashlab sass {FIRST_STAGE} --arch sm_80 --listing | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr == ""


def test_starting_imports_nothing_heavy() -> None:
    heavy = ("torch", "cupy", "cuda.bindings", "numpy", "pandas", "seaborn", "matplotlib", "pynvml", "pydantic")
    code = f"import sys, flashlab.cli; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_reading_records_imports_no_compiler() -> None:
    code = (
        "import sys; from flashlab.cli.app import app; sys.argv = ['flashlab', 'results', '--shape', '16x16x2048x64']\n"
        "try: app()\nexcept SystemExit: pass\n"
        "parts = ('build', 'run', 'verify', 'measure', 'experiments.ledger', 'experiments.ablation')\n"
        "print([name for name in sys.modules if name.startswith(tuple(f'flashlab.{part}' for part in parts))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("given", "full"),
    [("16", "16_ones_column"), ("00_n", "00_naive"), ("t0", "t0_triton"), ("09[STAGES=3]", "09_wgmma[STAGES=3]")],
)
def test_a_unique_prefix_names_a_stage(given: str, full: str) -> None:
    assert registry.resolve(given) == full


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("0", "wanted a unique prefix, got '0', which begins 00_naive, 01_coalesced"),
        ("16_one_colum", "Did you mean 16_ones_column?"),
        ("pingpng", "Did you mean 11_pingpong"),
        ("", "wanted one of 00_naive"),
    ],
)
def test_a_name_that_is_none_is_answered_with_what_was_meant(given: str, words: str) -> None:
    with pytest.raises(UnknownStageError, match=re.escape(words)):
        registry.resolve(given)


def test_commands_take_prefixes(run: Run, tmp_path: Path) -> None:
    assert next(row["stage"] for row in run("compile", "00", "--arch", "sm_80", "--json").json) == FIRST_STAGE
    assert run("sass", "00", "--arch", "sm_80", "--json").json["stage"] == FIRST_STAGE
    asked = ("bench", "--suite", "first", "--dry-run", "--peers", "none", "--json", "--stages")
    assert run(*asked, "00,01").json == run(*asked, "00_naive,01_coalesced").json
    assert "Did you mean 11_pingpong" in run("tune", "11_pingpng", "--dry-run").err


def test_a_shell_completes_stages() -> None:
    environment = {"_FLASHLAB_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "flashlab check 0"}
    assert "09_wgmma" in program(**environment).stdout.split()
    assert "--install-completion" in program("--help").stdout


def test_ablate_lists_its_axes(run: Run) -> None:
    table = run("ablate", "--list").out
    listed = run("ablate", "--list", "tile", "exp", "--json").json
    assert [axis["name"] for axis in listed] == ["tile", "exp"]
    assert all(axis["prediction"] and axis["levels"] for axis in listed)
    assert "64 × 64, 8 warps" in table
    refused = run("ablate", "colour")
    assert refused.code == 1
    assert "tile" in refused.err


def test_ablate_lists_its_levers(run: Run) -> None:
    table = run("ablate", "--levers", "--list").out
    listed = run("ablate", "--levers", "--list", "take_early", "--json").json
    assert [lever["name"] for lever in listed] == ["take_early"]
    assert listed[0]["diff"].startswith("--- a/kernels/")
    assert len(listed[0]["problems"]) == 4
    assert "static_rows" in table
    causal = run("ablate", "--levers", "--list", "take_early", "--mask", "causal", "--dtype", "float16", "--json").json
    assert causal[0]["problems"] == [f"B16 H16 S2048 D{d} causal float16" for d in (64, 128)]
    other = run("ablate", "--levers", "--list", "take_early", "--shape", "1x2x64x64", "--json").json
    assert other[0]["problems"] == [f"B1 H2 S64 D64 {mask} bfloat16" for mask in ("full", "causal")]
    steep = run("ablate", "--levers", "--list", "take_early", "--inputs", "steps", "--mask", "full", "--json").json
    assert all(problem.endswith("steps") for problem in steep[0]["problems"])
    shapes = ("--shape", "1x2x64x64", "--shape", "1x2x64x128", "--inputs", "normal,steps", "--mask", "full")
    several = run("ablate", "--levers", "--list", "take_early", *shapes, "--json").json[0]["problems"]
    whole = "B1 H2 S64 D{} full bfloat16{}".format
    assert several == [whole(d, kind) for d in (64, 128) for kind in ("", " steps")]
    one = run("ablate", "exp", "--shape", "1x2x64x64", "--shape", "1x2x64x128")
    assert (one.code, "wanted one shape" in one.err) == (1, True)
    refused = run("ablate", "--levers", "colour")
    assert refused.code == 1
    assert "take_early" in refused.err


def test_train_tells_what_each_model_became(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashlab.measure import trained

    asked: list[tuple[int, int, str]] = []

    def train(config: trained.Config, *, device: str, follow: Follow) -> dict[str, Any]:
        asked.append((config.head_dim, config.steps, device))
        follow(0, config.steps, "loss 5.5")
        facts = {"head_dim": config.head_dim, "digest": "abc", "loss": 0.9, "held_out_loss": 1.0, "steps": config.steps}
        return {**facts, "seconds": 50.0, "layers": [{"std_nats": 2.5, "largest_nats": 31.0}] * config.layers}

    monkeypatch.setattr(trained, "train", train)
    assert [one["head_dim"] for one in run("train", "--json").json] == [64, 128]
    assert asked == [(config.head_dim, config.steps, "cuda:0") for config in trained.CONFIGS.values()]
    asked.clear()
    table = run("train", "--head-dim", "128", "--steps", "7", "--device", "1")
    assert asked == [(128, 7, "cuda:1")]
    assert "[0/7] loss 5.5" in table.err
    assert table.out.count("31") == trained.CONFIGS[128].layers
    refused = run("train", "--head-dim", "96")
    assert refused.code == 1
    assert "wanted one of 64, 128, got 96" in refused.err
    refused = run("train", "--head-dim", "64", "--head-dim", "96")
    assert (refused.code, "wanted one of 64, 128, got 96" in refused.err) == (1, True)


@pytest.mark.skipif(gpu.available() is None, reason="this machine has a GPU")
def test_train_needs_torch_and_a_gpu_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    result = run("train")
    assert result.code == 1
    assert "torch" in result.err or "GPU" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(gpu.available() is None, reason="this machine has a GPU")
@pytest.mark.parametrize("command", [["ablate"], ["ablate", "--levers"], ["split"]], ids=" ".join)
def test_ablations_need_a_gpu_and_say_so(run: Run, command: list[str], tmp_path: Path) -> None:
    result = run(*command, "--data", tmp_path)
    assert result.code == 1
    assert "GPU" in result.err
    assert not list(tmp_path.iterdir())


def test_claims_are_measured_for_the_gpu_at_hand_alone(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "info", lambda index: SimpleNamespace(slug="nvidia-l4"))
    result = run("claims", "--data", data, "--measure", "--gpu", "nvidia-h200")
    assert result.code == 1
    assert "--gpu: wanted nvidia-l4, the GPU that --measure uses, got nvidia-h200" in result.err


def test_a_chart_that_cannot_be_written_is_said(run: Run, data: Path, tmp_path: Path) -> None:
    sides = ("compare", "nvidia-h200", "nvidia-h200", "--shape", FIRST_SHAPE, "--mask", "full", "--data", data)
    result = run(*sides, "--chart", tmp_path / "none" / "ratios.svg")
    assert result.code == 1
    assert "--chart: wanted a writable file in an existing folder, got " in result.err
    assert run(*sides, "--chart", tmp_path / "ratios.svg").code == 0


@pytest.mark.slow
def test_claims_are_judged_written_and_compared(run: Run, data: Path) -> None:
    shown = run("claims", "--data", data, "--json")
    assert shown.code == 0
    assert len(shown.json) == 65
    first = shown.json[0]
    assert (first["id"], first["unit"]) == ("A01", "TFLOP/s")
    assert first["interval"][0] < first["value"] < first["interval"][1]
    assert first["record"].startswith("nvidia-h200/runs/")
    assert first["reason"]
    assert (first["quote"], first["lines"]) == ("Configuration: B=16, H=16, S=2048, D=64 … TFLOPS: 1.6", [12, 14])
    assert first["states"]["shape"] == {"text": "B16 H16 S2048 D64", "lines": [12]}
    assert first["assumptions"]["dtype"] == "float16"
    assert first["why"]
    assert first["history"]["written"].startswith("2026-11-21")
    assert "each judged by records of the GPU that it is about" in run("claims", "--data", data).out
    needs = next(row for row in shown.json if row["id"] == "B08")
    assert (needs["verdict"], needs["command"]) == ("needs_hardware", "flashlab ablate reduction")
    written = run("claims", "--data", data, "--write")
    assert written.code == 0
    assert "A01" in written.out
    path = data / "nvidia-h200" / "verdicts.json"
    assert "needs hardware" in written.err
    same = run("claims", "--data", data, "--compare", path)
    assert (same.code, same.out) == (0, "")
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert entries[0]["verdict"] == "not_comparable"
    entries[0]["verdict"] = "needs_hardware"
    path.write_text(json.dumps(entries), encoding="utf-8")
    other = run("claims", "--data", data, "--compare", path, "--json")
    assert other.code == 1
    assert [(one["id"], one["there"]["verdict"]) for one in other.json] == [("A01", "needs_hardware")]
    assert "1 of 65 verdicts differ" in other.err
    assert "A01" in run("claims", "--data", data, "--compare", path).out
    assert "flashlab claims --write" in run("claims", "--data", data, "--compare", data / "none.json").err
