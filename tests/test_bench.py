"""The worker protocol with real processes that crash, hang and talk nonsense; no GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from shared import Run, needs_compiler, read_run
from synthetic import measurement
from test_timer import Fake as FakeGpu

from flashlab.build.compiler import Resources
from flashlab.core import errors
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import peers, registry
from flashlab.measure import bench, ceilings, check, tune
from flashlab.measure import worker as worker_module
from flashlab.measure.cells import Cell, RefusedError, refusal
from flashlab.measure.options import BURSTS, Options, Plan, plan_of
from flashlab.measure.timer import Reading, State, Timer
from flashlab.measure.worker import BenchWorker, Candidate
from flashlab.record import checks, provenance, schema, store
from flashlab.record.checks import CheckRow
from flashlab.run import gpu
from flashlab.run.attention import Fallbacks
from flashlab.verify import cases, on_cpu
from flashlab.verify.oracle import make_inputs

PROBLEMS = [Problem.parse("1x2x64x64"), Problem.parse("1x2x64x64", mask="causal")]
GPU = {
    "slug": "test-gpu", "name": "Test GPU", "compute_capability": [9, 0], "sm_count": 4, "max_sm_clock_mhz": 1000.0,
    "memory_bytes": 1 << 30, "l2_bytes": 1 << 20, "power_limit_w": None, "driver": "1", "fingerprint": "0123456789ab",
}  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    script = Path(__file__).with_name("fake_worker.py")

    def command(**plan: Any) -> list[str]:
        plan["log"] = str(tmp_path / "jobs.jsonl")
        # A GPU of its own: tests run beside one another, and a GPU is locked while it is measured.
        gpu = {**GPU, "fingerprint": sha256(str(tmp_path).encode()).hexdigest()[:12]}
        return [sys.executable, str(script), json.dumps(gpu), json.dumps(plan)]

    return command


def _options(tmp_path: Path, worker: list[str], **reports: Any) -> Options:
    return Options(data=tmp_path / "data", worker=worker, timeout_s=2.0, startup_s=20.0, **reports)


def _run(tmp_path: Path, worker: list[str], **options: Any) -> Run:
    options = {"stages": ["00_naive", "01_coalesced"], "peers": ["sdpa"], "ceilings": ["launch"], **options}
    reports = {name: options.pop(name) for name in ("progress", "note") if name in options}
    path = bench.run(PROBLEMS, options=_options(tmp_path, worker, **reports), **options)
    assert path is not None
    assert store.verify("test-gpu", tmp_path / "data") == ()
    return read_run(path)


def _statuses(run: Run) -> dict[tuple[str, str], str]:
    return {(row.problem.mask, row.name): row.status for row in run.measurements}


def _jobs(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "jobs.jsonl").read_text().splitlines()]


def test_every_row_is_recorded_and_the_data_is_sound(tmp_path: Path, fake: Any) -> None:
    progress: list[tuple[int, int, str]] = []
    run = _run(tmp_path, fake(), progress=lambda *step: progress.append(step))
    assert set(_statuses(run).values()) == {"ok"}
    assert len(run.measurements) == 6
    assert [c.name for c in run.ceilings] == ["launch"]
    assert {row.kind for row in run.measurements if row.name == "sdpa"} == {"peer"}
    assert run.path.parent == tmp_path / "data" / "test-gpu" / "runs"
    assert progress[-1][1] == 7
    assert [done for done, *_ in progress] == sorted(done for done, *_ in progress)
    assert (tmp_path / "data" / "test-gpu" / "machine.json").is_file()


def test_a_problem_may_want_some_of_them_only(tmp_path: Path, fake: Any) -> None:
    found = _statuses(_run(tmp_path, fake(), only=lambda problem, name: name == "sdpa" or not problem.causal))
    assert set(found) == {("full", "00_naive"), ("full", "01_coalesced"), ("full", "sdpa"), ("causal", "sdpa")}


def test_a_runs_machine_code_is_made_ahead(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(gpu, "available", lambda: None)
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(arch="sm_90a", slug="test-gpu"))

    def compile_many(jobs: Sequence[Any], **_: Any) -> list[errors.CompileError]:
        made.extend(job.label for job in jobs)
        return [errors.CompileError("made up", command="", log="")] * len(jobs)

    monkeypatch.setattr(bench.compiler, "compile_many", compile_many)
    _run(tmp_path, fake(), only=lambda problem, name: name == "00_naive" or problem.causal)
    assert sorted(made) == [
        "00_naive D64 causal float16 sm_90a",
        "00_naive D64 full float16 sm_90a",
        "01_coalesced D64 causal float16 sm_90a",
    ]


def test_a_resumed_run_takes_what_is_left(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {PROBLEMS[0]: frozenset({"01_coalesced", "sdpa"}), PROBLEMS[1]: frozenset({"00_naive"})}
    monkeypatch.setattr(
        bench,
        "_left",
        lambda names, *_: {at: [name for name in names[at] if name in some] for at, some in left.items()},
    )
    monkeypatch.setattr(bench, "ceilings_left", lambda names, _: [name for name in names if name == "launch"])
    said: list[str] = []
    resumed = replace(_options(tmp_path, fake()), resume=True, note=said.append)
    how: dict[str, Any] = {"stages": ["00_naive", "01_coalesced"], "peers": ["sdpa"], "options": resumed}
    only = {"only": lambda problem, name: name != "sdpa", "ceilings": ["launch", "copy"]}
    path = bench.run(PROBLEMS, **how, **only)
    assert path is not None
    found = read_run(path)
    assert set(_statuses(found)) == {("full", "01_coalesced"), ("causal", "00_naive")}
    assert [one.name for one in found.ceilings] == ["launch"]
    assert "no record of this code and software has 01_coalesced, 00_naive at 2 problems" in said[0]
    left.clear()
    assert bench.run(PROBLEMS, **how, ceilings=["copy"]) is None
    assert said[1:] == ["all of it is on record; nothing was measured"]


@pytest.mark.parametrize(
    ("death", "status", "words"),
    [
        ("segfault", "crashed", "killed by SIGSEGV.*about to segfault"),
        ("exit", "crashed", "exit status 7"),
        ("hang", "timeout", "no answer within 2 s"),
        ("garbage", "crashed", "no message"),
        ("fatal", "crashed", "ILLEGAL_ADDRESS"),
        ("bad_row", "crashed", "no message"),
        ("unknown", "crashed", "dance"),
        ("orphan", "crashed", "exit status 5"),
    ],
)
def test_a_death_costs_the_implementation_in_hand_only(
    death: str, status: str, words: str, tmp_path: Path, fake: Any
) -> None:
    run = _run(tmp_path, fake(**{"01_coalesced": death}))
    found = _statuses(run)
    assert {name: s for name, s in found.items() if name[1] == "01_coalesced"} == {
        ("full", "01_coalesced"): status,
        ("causal", "01_coalesced"): status,
    }
    assert {s for name, s in found.items() if name[1] != "01_coalesced"} == {"ok"}
    assert len(found) == len(run.measurements) == 6
    reasons = " ".join(row.reason for row in run.measurements if row.name == "01_coalesced")
    import re

    assert re.search(words, reasons), reasons
    assert len(run.ceilings) == 1
    # Each restart leaves out what is done: the second worker has no ceiling left, the third not the first problem.
    jobs = _jobs(tmp_path)
    assert [len(job["cells"]) for job in jobs] == [3, 2, 1]


def test_a_death_before_any_implementation_is_charged_to_the_problem(tmp_path: Path, fake: Any) -> None:
    run = _run(tmp_path, fake(inputs="exit"), ceilings=False)
    assert set(_statuses(run).values()) == {"crashed"}
    assert len(run.measurements) == 6
    assert all("make inputs" in row.reason for row in run.measurements)


def test_a_ceiling_that_kills_its_worker_is_left_out(tmp_path: Path, fake: Any) -> None:
    notes: list[str] = []
    run = _run(tmp_path, fake(copy="segfault"), ceilings=["launch", "copy", "exp2"], note=notes.append)
    assert [c.name for c in run.ceilings] == ["launch", "exp2"]
    assert len(notes) == 1
    assert "copy not measured" in notes[0]
    assert set(_statuses(run).values()) == {"ok"}


def test_a_state_that_cannot_be_timed_is_noted_and_costs_no_row(tmp_path: Path, fake: Any) -> None:
    notes: list[str] = []
    run = _run(tmp_path, fake(sdpa="missing"), note=notes.append)
    assert set(_statuses(run).values()) == {"ok"}
    assert notes == ["sdpa in a CUDA graph not measured: not permitted when stream is capturing"] * 2
    assert len(_jobs(tmp_path)) == 1, "no worker had to start anew"


def test_a_forgotten_implementation_gets_a_row(tmp_path: Path, fake: Any) -> None:
    run = _run(tmp_path, fake(forget=["sdpa"]))
    assert _statuses(run)["full", "sdpa"] == "error"
    assert len(run.measurements) == 6


def test_a_worker_that_never_starts(tmp_path: Path, fake: Any) -> None:
    with pytest.raises(errors.LaunchError, match=r"exit status 7.*about to exit"):
        _run(tmp_path, fake(start="exit"))
    with pytest.raises(errors.LaunchError, match="exit status"):
        _run(tmp_path, [sys.executable, "-c", "raise SystemExit(9)"])


@pytest.mark.parametrize("error", ["NoGpuError", "MissingPackageError", "UnsupportedError"])
def test_a_refusal_is_raised_as_what_it_is(error: str, tmp_path: Path, fake: Any) -> None:
    with pytest.raises(getattr(errors, error), match="wanted a GPU"):
        _run(tmp_path, fake(refuse=error))
    assert not (tmp_path / "data" / "test-gpu").exists()


def test_the_real_worker_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    from flashlab.run import gpu

    if gpu.available() is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(errors.NoGpuError, match="wanted a CUDA GPU"):
        bench.run(PROBLEMS, options=Options(data=tmp_path))


def test_an_unwritable_folder_is_found_before_any_work(read_only_dir: Path, fake: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.OutputError, match="writable folder"):
        bench.run(PROBLEMS, options=Options(data=read_only_dir, worker=fake()))
    assert not (tmp_path / "jobs.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stages": ["99_none"]}, errors.UnknownStageError, "99_none"),
        ({"peers": ["cublas"]}, errors.ParameterError, "cublas_unfused"),
        ({"ceilings": ["speed"]}, errors.ParameterError, "smem_read"),
        ({"stages": [], "peers": []}, errors.ParameterError, "at least one stage or peer"),
        ({"plan": Plan(sustained_names=("fa9",))}, errors.ParameterError, "among 00_naive.*got fa9"),
        ({"sources": {"00_naive": Path("/no/such.cu")}}, errors.ParameterError, "such.cu"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    options: Any, error: type[Exception], words: str, tmp_path: Path, fake: Any
) -> None:
    with pytest.raises(error, match=words):
        bench.run(PROBLEMS, options=_options(tmp_path, fake()), **options)
    assert not (tmp_path / "jobs.jsonl").exists()


@pytest.mark.parametrize(
    ("make", "numbers", "words"),
    [
        (Plan, {"samples": 0}, "samples"),
        (Plan, {"cap_s": -1.0}, "cap_s"),
        (Options, {"timeout_s": 0.0}, "timeout_s"),
        (Options, {"device": -1}, "device"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Any, numbers: Any, words: str) -> None:
    with pytest.raises(errors.ParameterError, match=words):
        make(**numbers)


def test_an_edited_copy_is_measured_beside_the_stage(tmp_path: Path, fake: Any) -> None:
    copy = tmp_path / "mine.cu"
    copy.write_text(registry.get("00_naive").source.read_text(encoding="utf-8"), encoding="utf-8")
    run = _run(tmp_path, fake(), sources={"00_naive": copy})
    assert {row.name for row in run.measurements} == {"00_naive", "01_coalesced", "sdpa", "00_naive@mine"}
    sent = _jobs(tmp_path)[0]["implementations"]["00_naive@mine"]
    assert (sent["kind"], sent["id"], sent["source"], sent["params"]) == ("stage", "00_naive", str(copy), {})


def test_the_plan_reaches_the_worker(tmp_path: Path, fake: Any) -> None:
    plan = Plan(samples=3, sustained_shapes=None, sustained_names=("sdpa",), checked_scores=5)
    _run(tmp_path, fake(), plan=plan)
    sent = Plan(**_jobs(tmp_path)[0]["plan"])
    assert (sent.samples, sent.checked_scores) == (3, 5)
    assert sent.sustains(PROBLEMS[0], "sdpa")
    assert not sent.sustains(PROBLEMS[0], "00_naive")
    assert not Plan().sustains(PROBLEMS[0], "sdpa")
    assert Plan().sustains(Problem.parse(FIRST_SHAPE), "sdpa")
    assert not Plan(sustained_seconds=0).sustains(Problem.parse(FIRST_SHAPE), "sdpa")


def test_a_stage_has_a_second_row_with_the_log_sum_exp_on(tmp_path: Path, fake: Any) -> None:
    run = _run(tmp_path, fake(**{"01_coalesced+lse": "segfault"}), plan=Plan(lse=True))
    sent = _jobs(tmp_path)[0]["implementations"]
    second = {"lse_of": "00_naive", "record": {"name": "00_naive", "kind": "stage", "lse": True}}
    assert sent["00_naive+lse"] == {**sent["00_naive"], **second}
    assert set(sent) == {"00_naive", "01_coalesced", "sdpa", "00_naive+lse", "01_coalesced+lse"}
    assert {(row.name, row.lse, row.status) for row in run.measurements} == {
        ("00_naive", False, "ok"),
        ("01_coalesced", False, "ok"),
        ("sdpa", None, "ok"),
    }
    assert {(row.name, row.lse, row.status) for row in run.with_lse} == {
        ("00_naive", True, "ok"),
        ("01_coalesced", True, "crashed"),
    }
    assert all(row.kind == "stage" for row in run.with_lse)
    assert plan_of("peers").lse
    assert plan_of("inputs").lse
    assert not plan_of("standard").lse


def test_only_problems_that_want_a_stage_get_its_second_row(tmp_path: Path, fake: Any) -> None:
    run = _run(tmp_path, fake(), plan=Plan(lse=True), only=lambda problem, name: not problem.causal)
    assert {(row.name, row.problem.mask) for row in run.with_lse} == {("00_naive", "full"), ("01_coalesced", "full")}


def test_variants_become_tuning_records(tmp_path: Path, fake: Any) -> None:
    variants = ({"THREADS": 64}, {"THREADS": 256}, {})
    tasks = [tune.Task(tune.Key("00_naive", problem), variants) for problem in PROBLEMS]
    path = tune.time(tasks, plan=BURSTS, options=_options(tmp_path, fake(**{"00_naive[THREADS=64]": "segfault"})))
    assert path.parent == tmp_path / "data" / "test-gpu" / "tuning"
    found = store.records("test-gpu", schema.Tuning, tmp_path / "data")
    assert {record.stage for record in found} == {"00_naive"}
    assert {(record.parameters["THREADS"], record.status) for record in found} == {
        (64, "crashed"),
        (128, "ok"),
        (256, "ok"),
    }
    assert len(found) == 6
    sent = _jobs(tmp_path)[0]["implementations"]
    assert [one["params"] for one in sent.values()] == list(variants)
    assert store.verify("test-gpu", tmp_path / "data") == ()


def test_what_is_tried_on_one_problem_is_interleaved_with_the_libraries_beside_it(tmp_path: Path, fake: Any) -> None:
    full = PROBLEMS[0]
    naive, coalesced = "00_naive", "01_coalesced"
    tasks = [
        *(tune.Task(tune.Key(naive, problem), ({"THREADS": 64}, {}), ("sdpa",)) for problem in PROBLEMS),
        tune.Task(tune.Key(coalesced, full), ({},), ("sdpa",)),
    ]
    path = tune.time(tasks, plan=BURSTS, options=_options(tmp_path, fake()))
    (job,) = _jobs(tmp_path)
    assert [cell["pending"] for cell in job["cells"]] == [
        ["00_naive[THREADS=64]", "00_naive[]", "sdpa", "01_coalesced[]"],
        ["00_naive[THREADS=64]", "00_naive[]", "sdpa"],
    ]
    assert {name: one["kind"] for name, one in job["implementations"].items()} == {
        "00_naive[THREADS=64]": "stage",
        "00_naive[]": "stage",
        "01_coalesced[]": "stage",
        "sdpa": "peer",
    }
    found, damage = store.read(path, schema.Tuning)
    assert not damage
    assert [(one.problem.mask, one.parameters) for one in found if one.stage == "sdpa"] == [
        ("full", {}),
        ("causal", {}),
    ]
    assert {one.status for one in found} == {"ok"}, "what a library's row says beyond a tuning's is left out"
    assert store.verify("test-gpu", tmp_path / "data") == ()
    with pytest.raises(errors.ParameterError, match="peer: wanted one of"):
        tune.time([tune.Task(tune.Key(naive, full), ({},), ("nobody",))], plan=BURSTS, options=Options())


def test_variants_that_make_no_sense_are_refused_before_any_work(tmp_path: Path, fake: Any) -> None:
    key = tune.Key("00_naive", PROBLEMS[0])
    wrong = ([tune.Task(key, ({"TILE": 3},))], "TILE"), ([tune.Task(key, ())], "at least one"), ([], "at least one")
    for tasks, words in wrong:
        with pytest.raises(errors.ParameterError, match=words):
            tune.time(tasks, plan=BURSTS, options=_options(tmp_path, fake()))
    assert not (tmp_path / "jobs.jsonl").exists()


PASSED = schema.Verdict(
    passed=True, reason="", max_abs_error=0.1, max_abs_limit=1.0, rms_error=None, rms_limit=None, lse_error=None,
    lse_limit=None,
)  # fmt: skip


def _job(plan: Plan | None = None, implementations: Any = None) -> Any:
    """As the job arrives: through JSON, which knows no tuples."""
    job = {"device": 0, "seed": 0, "implementations": implementations or {}, "plan": asdict(plan or Plan())}
    return json.loads(json.dumps(job))


def test_the_worker_times_what_passed_and_sustains_from_the_slowest_to_the_fastest() -> None:
    fake = FakeGpu({"fast": 100.0, "slow": 1000.0, "other": 500.0})
    plan = Plan(samples=5, min_samples=3, cold_samples=4, sustained_shapes=None, sustained_names=("fast", "slow"))
    sent: list[Any] = []
    worker = BenchWorker(_job(plan), sent.append)
    worker._backend = fake  # type: ignore[assignment]
    worker.info = SimpleNamespace(sm_count=4)  # type: ignore[assignment]
    worker.torch = SimpleNamespace(no_grad=contextlib.nullcontext)
    ready = {name: Candidate(run, PASSED, lambda: None) for name, run in fake.runs().items()}
    worker.time(0, PROBLEMS[0], ready, worker._plan, (), [()])
    steps = [(m["name"], m["what"]) for m in sent if m["type"] == "step" and "sustained" in m["what"]]
    assert [name for name, _ in steps] == ["slow", "fast"]
    assert all(m["extra_s"] > 2 * 5 for m in sent if m["type"] == "step" and "sustained" in m["what"])
    rows = {m["name"]: m["row"] for m in sent if m["type"] == "row"}
    assert set(rows) == {"fast", "slow", "other"}
    for name, row in rows.items():
        found = [schema.Samples.model_validate(one) for one in row["samples"]]
        wanted = [("burst", "hot"), ("burst", "cold"), *([("sustained", "hot")] if name != "other" else [])]
        assert [(one.regime, one.cache) for one in found] == wanted
        assert [len(one.time_us) for one in found[:2]] == [5, 4]
        assert all(len(one.call_clock_mhz) == len(one.time_us) for one in found)
        for one in found:  # of four SMs, over 2 heads of 64 by 64 scores
            clocks = one.call_clock_mhz[0] * one.median_us * 4
            assert one.cycles_per_score == pytest.approx(clocks / (2 * 64 * 64), rel=0.1)
        for one in found[2:]:
            assert one.continuous_s is not None
            assert one.continuous_s >= 5
            assert one.conditions is not None
            assert one.conditions.energy_j_per_call == pytest.approx(500.0 * one.median_us / 1e6, rel=0.05)


def test_calls_of_few_query_rows_are_timed_on_copies_in_turn_as_many_as_l2_forgets() -> None:
    decoding = Problem.parse("1x2x2x1x64x64")
    seen: list[str] = []
    numbers = itertools.count(1)

    class Array:
        def __init__(self, name: str) -> None:
            self.name = name

        def numel(self) -> int:
            return 100

        def element_size(self) -> int:
            return 2

        def clone(self) -> Array:
            return Array(f"copy {next(numbers)}")

    fake = FakeGpu({"stage": 100.0, "library": 110.0})
    sent: list[Any] = []
    worker = BenchWorker(_job(Plan(samples=4, min_samples=3, cold_samples=0, sustained_seconds=0)), sent.append)
    worker._backend = fake  # type: ignore[assignment]
    worker.info = SimpleNamespace(sm_count=4, l2_bytes=400, memory_bytes=1 << 20)  # type: ignore[assignment]
    worker.torch = SimpleNamespace(no_grad=contextlib.nullcontext)

    def candidate(name: str, run: Any) -> Candidate:
        def on(q: Array, k: Array, v: Array) -> Any:
            return lambda: (seen.append(f"{name} {v.name}"), run())

        return Candidate(run, PASSED, lambda: None, on=on)

    ready = {name: candidate(name, run) for name, run in fake.runs().items()}
    worker.time(0, decoding, ready, worker._plan, tuple(map(Array, "qkv")), [()])
    rows = {m["name"]: m["row"] for m in sent if m["type"] == "row"}
    for row in rows.values():
        assert [(one["regime"], one["cache"]) for one in row["samples"]] == [("burst", "hot"), ("burst", "rotating")]
    of_stage = [one for one in seen if one.startswith("stage")]
    assert of_stage == list(dict.fromkeys(of_stage)), "one after the other"
    assert not worker._plan.rotates(PROBLEMS[0])

    cloned: list[int] = []
    for size, memory, wanted in (
        (200, 1 << 20, 12),
        (40, 1 << 20, 16),
        (1, 1 << 20, 64),
        (200, 16000, 5),
        (200, 400, 2),
    ):
        of = SimpleNamespace(numel=lambda size=size: size, element_size=lambda: 1, clone=lambda: cloned.append(0))
        worker.info = SimpleNamespace(l2_bytes=400, memory_bytes=memory)  # type: ignore[assignment]
        cloned.clear()
        worker._on_copies({}, (Array("q"), of, of))
        assert 1 + len(cloned) // 2 == wanted


def test_a_call_in_a_step_is_what_its_graph_takes_longer_than_the_kernels_that_write_q() -> None:
    fake = FakeGpu({"stage": 100.0, "library": 110.0})
    captured: list[str] = []
    refused = "library"
    behind_us = 3.0

    class Graph:
        replay: Any

    @contextlib.contextmanager
    def graph(made: Graph, stream: object) -> Iterator[None]:
        captured.clear()
        yield
        if refused in captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        name = f"graph {len(fake.call_us)}"
        fake.call_us[name] = sum(behind_us if one == "q" else fake.call_us[one] + 0.5 for one in captured)
        made.replay = fake.run(name)

    def run(name: str) -> Any:
        call = fake.run(name)
        return lambda: (captured.append(name), call())

    sent: list[Any] = []
    plan = Plan(samples=4, min_samples=3, cold_samples=0, step_samples=4, sustained_seconds=0)
    worker = BenchWorker(_job(plan), sent.append)
    worker._backend = fake  # type: ignore[assignment]
    worker.info = SimpleNamespace(sm_count=4)  # type: ignore[assignment]
    cuda = SimpleNamespace(CUDAGraph=Graph, graph=graph, current_stream=lambda device: 1)
    worker.torch = SimpleNamespace(no_grad=contextlib.nullcontext, cuda=cuda)
    worker.survive = lambda error: None  # type: ignore[method-assign]
    ready = {name: Candidate(run(name), PASSED, lambda: None) for name in ("stage", "library")}
    q = SimpleNamespace(mul_=lambda factor: captured.append("q"))
    worker.time(0, PROBLEMS[0], ready, plan, (q, None, None), [()])
    rows = {m["name"]: m["row"]["samples"] for m in sent if m["type"] == "row"}
    assert [(one["regime"], one["cache"]) for one in rows["library"]] == [("burst", "hot")]
    (missing,) = (m for m in sent if m["type"] == "missing")
    assert missing["what"] == "library in a CUDA graph"
    assert "capturing" in missing["reason"]
    hot, step = rows["stage"]
    assert (hot["cache"], step["cache"]) == ("hot", "step")
    assert step["time_us"] == pytest.approx([100.5] * 4)
    assert step["calls"] % 8 == 0
    refused = "q"  # with nothing to subtract, no call has a time in a step
    worker.time(0, PROBLEMS[0], ready, plan, (q, None, None), [()])
    assert [len(m["row"]["samples"]) for m in sent[-2:]] == [1, 1]


def test_second_rows_take_turns_in_hot_bursts_and_the_fastest_is_kept_busy() -> None:
    names = {"stage": 100.0, "slow": 300.0, "library": 110.0, "stage+lse": 101.0, "slow+lse": 303.0}
    fake = FakeGpu(names)
    plan = Plan(samples=5, min_samples=3, cold_samples=4, sustained_shapes=None)
    implementations = {
        name: {"kind": "stage", "id": "x", "lse_of": name.removesuffix("+lse")} for name in names if "+" in name
    }
    sent: list[Any] = []
    worker = BenchWorker(_job(plan, implementations), sent.append)
    worker._backend = fake  # type: ignore[assignment]
    worker.info = SimpleNamespace(sm_count=4)  # type: ignore[assignment]
    worker.torch = SimpleNamespace(no_grad=contextlib.nullcontext)
    ready = {name: Candidate(run, PASSED, lambda: None) for name, run in fake.runs().items()}
    worker.time(0, PROBLEMS[0], ready, plan, (), [()])
    taken = {
        m["name"]: [(one["regime"], one["cache"]) for one in m["row"]["samples"]] for m in sent if m["type"] == "row"
    }
    every = [("burst", "hot"), ("burst", "cold"), ("sustained", "hot")]
    assert taken == {
        "stage": every,
        "slow": every,
        "library": every,
        "stage+lse": [every[0], every[2]],
        "slow+lse": [every[0]],
    }


def test_a_library_gets_its_own_layout_and_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    problem = Problem.parse("1x4x2x64x64x64", mask="causal")
    seen: list[Any] = []

    def build(of: Problem) -> Any:
        def attend(*tensors: Any) -> Any:
            seen.append(tensors)
            q, k, v = (x.transpose(1, 2) for x in tensors)
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, v, is_causal=of.causal, enable_gqa=True).transpose(1, 2).contiguous()

        return attend

    made = peers.Peer(name="made", title="made", how="", build=build, packages=(), layout="bshd", writes_lse=True)
    monkeypatch.setattr(peers, "PEERS", {name: replace(made, name=name) for name in ("made", "again")})
    monkeypatch.setattr(gpu, "synchronize", lambda device: None)
    monkeypatch.setattr(gpu, "memory_free_bytes", lambda device: 0)
    worker = BenchWorker(_job(), lambda message: None)
    worker.torch = torch
    worker.cupy = NumPyAsCuPy()
    worker.info = SimpleNamespace(compute_capability=(9, 0))  # type: ignore[assignment]
    worker._checked_scores = 1 << 20
    (q, k, v), other = (tuple(torch.randn(1, heads, 64, 64).half() for heads in (4, 2, 2)) for _ in range(2))
    found = [worker._peer(name, problem, q, k, v) for name in ("made", "again")]
    for one in found:
        assert one.verdict is not None
        assert one.verdict.passed, one.verdict.reason
        assert one.fields == {"choice": "", "layout": "bshd", "lse": True}
        one.run()
    assert len(seen) == 4
    assert all(tensors is not None and tensors[0].shape == (1, 64, 4, 64) for tensors in seen)
    assert {tensors[0].data_ptr() for tensors in seen} == {seen[0][0].data_ptr()}, "one copy for all of that layout"
    assert seen[0][0].is_contiguous()
    # Other values come into the same tensors, as layer by layer of a model, and into the copies.
    worker._load((q, k, v), other)
    verdict = found[0].judge()
    assert verdict is not None
    assert verdict.passed, verdict.reason
    assert torch.equal(seen[-1][0].transpose(1, 2), other[0])


class NumPyAsCuPy:
    """What a worker asks CuPy for, from NumPy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)


class Tensor:
    """Holds the number of a layer."""

    def __init__(self, layer: int = -1) -> None:
        self.layer = layer

    def copy_(self, other: Tensor) -> None:
        self.layer = other.layer


TRAINED = Problem.parse("1x16x128x64", inputs="trained")


def _on_layers(monkeypatch: pytest.MonkeyPatch, plan: Plan, why_not: str | None = None) -> list[Any]:
    """What a worker says of three implementations on a model of four layers; `odd` is wrong on the third."""
    made: list[int] = []

    def activations(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor]]:
        assert problem == TRAINED
        made.extend(range(4))
        return [(Tensor(layer), Tensor(layer), Tensor(layer)) for layer in range(4)]

    model = SimpleNamespace(
        why_not=lambda problem: why_not,
        activations=activations,
        describe=lambda head_dim: {"digest": "0123", "head_dim": head_dim, "layers": [{"sd": 2.5}] * 4},
    )
    monkeypatch.setitem(sys.modules, "flashlab.measure.trained", model)
    fake = FakeGpu({"fast": 100.0, "slow": 1000.0, "odd": 500.0})
    sent: list[Any] = []
    worker = BenchWorker(_job(plan), sent.append)
    worker._backend = fake  # type: ignore[assignment]
    worker.info = SimpleNamespace(sm_count=4)  # type: ignore[assignment]
    worker.torch = SimpleNamespace(
        no_grad=contextlib.nullcontext, empty_like=lambda x, memory_format: Tensor(), contiguous_format=None
    )
    monkeypatch.setattr(worker, "free", lambda: None)
    monkeypatch.setattr(worker, "survive", lambda error: None)

    def candidate(name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
        plain = fake.run(name)
        least = fake.call_us[name]

        def run() -> None:
            fake.call_us[name] = least * (1 + v.layer)
            plain()

        def judge() -> schema.Verdict:
            assert q.layer == k.layer == v.layer
            overall = {"overall_max_error": (0.5, 0.2, 0.7, 0.3)[v.layer], "overall_rms_error": float(v.layer)}
            verdict = PASSED.model_copy(update={"max_abs_error": 0.1 * (v.layer + 1), **overall})
            if name == "odd" and v.layer == 2:
                raise RefusedError("wrong", "too far off", verdict=verdict.model_copy(update={"passed": False}))
            return verdict

        checked: list[int] = []

        def counted() -> Fallbacks | None:
            return Fallbacks(renormalized=len(checked), recomputed=0) if name == "fast" else None

        def checks_again() -> schema.Verdict:
            checked.append(v.layer)
            return judge()

        return Candidate(run, checks_again(), checks_again, fallbacks=counted)

    monkeypatch.setattr(worker, "candidate", candidate)
    worker.bench(0, TRAINED, list(fake.call_us))
    assert made == ([] if why_not else [0, 1, 2, 3])
    return sent


def test_trained_inputs_are_timed_layer_by_layer_and_checked_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(samples=15, min_samples=5, cold_samples=0, sustained_shapes=None, sustained_seconds=2.0)
    durations: list[float] = []
    sustained = Timer.sustained

    def timed(self: Timer, run: Any, *, seconds: float, call_us: float) -> schema.Samples:
        durations.append(seconds)
        return sustained(self, run, seconds=seconds, call_us=call_us)

    monkeypatch.setattr(Timer, "sustained", timed)
    sent = _on_layers(monkeypatch, plan)
    rows = {message["name"]: message["row"] for message in sent if message["type"] == "row"}
    assert (rows["odd"]["status"], rows["odd"]["reason"]) == ("wrong", "layer 2: too far off")
    assert "samples" not in rows["odd"]
    for name, least in (("fast", 100.0), ("slow", 1000.0)):
        row = rows[name]
        assert row["status"] == "ok"
        assert row["verdict"]["max_abs_error"] == pytest.approx(0.4)  # the closest to its limit
        assert row["verdict"]["overall_max_error"] == 0.7  # over all layers
        assert row["verdict"]["overall_rms_error"] == pytest.approx(((0 + 1 + 4 + 9) / 4) ** 0.5)
        assert row["trained"]["digest"] == "0123"
        assert row.get("fallbacks") == ([4, 0] if name == "fast" else None)
        found = [schema.Samples.model_validate(one) for one in row["samples"]]
        assert [one.layer for one in found] == [0, 1, 2, 3] * 2
        assert [one.regime for one in found] == ["burst"] * 4 + ["sustained"] * 4
        assert [one.median_us for one in found] == [least, 2 * least, 3 * least, 4 * least] * 2
        assert all(len(one.time_us) == 5 for one in found[:4])
    # Kept warm: the slow one first, through all layers.
    steps = [m["name"] for m in sent if m["type"] == "step" and m["what"] == "time, sustained"]
    assert steps == ["slow"] * 4 + ["fast"] * 4
    # Each first loads the chip alone: a layer's share is too short for the clock to settle.
    assert durations == [2.0, *[0.5] * 4] * 2


def test_trained_inputs_that_cannot_be_made_are_named_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = _on_layers(monkeypatch, Plan(), why_not="no weights in the cache")
    rows = {message["name"]: message["row"] for message in sent if message["type"] == "row"}
    assert list(rows) == ["fast", "slow", "odd"]
    refused = {"status": "unsupported", "reason": "trained inputs: no weights in the cache"}
    assert all(row == refused for row in rows.values())


def test_a_library_is_built_once_for_all_kinds_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(problem: Problem) -> Any:
        built.append(problem.label)
        return lambda q, k, v: q

    library = peers.Peer(name="flex", title="", how="", build=build, packages=())
    monkeypatch.setattr(peers, "get", lambda name: library)
    monkeypatch.setattr(gpu, "memory_free_bytes", lambda device: 0)
    monkeypatch.setattr(gpu, "synchronize", lambda device: None)
    worker = BenchWorker(_job(), lambda message: None)
    worker.info = SimpleNamespace(compute_capability=(9, 0))
    memory = SimpleNamespace(memory_reserved=lambda: 0, memory_allocated=lambda: 0)
    worker.torch = SimpleNamespace(no_grad=contextlib.nullcontext, cuda=memory)
    monkeypatch.setattr(worker, "_judge", lambda *_: {"passed": True})
    one, other = PROBLEMS
    for problem in (one, replace(one, inputs="zeros"), replace(one, inputs="steps"), other, one):
        worker._peer("flex", problem, None, None, None)
    assert built == [one.label, other.label, one.label]


def test_layers_together_cost_about_what_one_kind_costs() -> None:
    plan = Plan().shared(12)
    assert plan.samples == plan.cold_samples == 5
    assert 12 * plan.cap_s == pytest.approx(Plan().cap_s)
    assert 12 * plan.sustained_seconds == pytest.approx(Plan().sustained_seconds)
    assert Plan(sustained_seconds=0.0, cold_samples=0).shared(12).cold_samples == 0
    assert Plan(sustained_seconds=0.0).shared(12).sustained_seconds == 0


def test_the_oracle_sees_less_of_other_inputs_than_normal() -> None:
    normal = Problem.parse(FIRST_SHAPE)
    other = replace(normal, inputs="sink_first")
    assert Plan().checks(normal) == 1 << 30
    assert Plan().checks(other) == plan_of("inputs").checks(normal) == 1 << 27
    assert Plan(checked_scores=5).checks(other) == 5


# --- How long it will take --------------------------------------------------------------------------------------------


def _seconds(problem: Problem, **options: Any) -> bench.Estimate:
    ((one,), total) = bench.estimate([problem], ceilings=False, **options)
    assert total > one.seconds
    return one


def test_an_estimate_counts_what_is_taken() -> None:
    first = Problem.parse(FIRST_SHAPE)
    short = Plan(sustained_seconds=0.0, cold_samples=0)
    plain = _seconds(first, stages=["00_naive"], peers=["sdpa", "fa3"], plan=short)
    assert (plain.implementations, plain.sustained) == (2, 0)  # the wheel (fa3-fwd) lacks float16
    long = _seconds(first, stages=["00_naive"], peers=["sdpa", "fa3"], plan=replace(short, sustained_seconds=5.0))
    assert long.sustained == 2
    assert 10 < long.seconds - plain.seconds < 14
    only = replace(short, sustained_seconds=5.0, sustained_names=("sdpa",))
    assert _seconds(first, stages=["00_naive"], peers=["sdpa", "fa3"], plan=only).sustained == 1
    assert _seconds(first, stages=["00_naive"], peers=[], plan=replace(short, cold_samples=50)).seconds > (
        _seconds(first, stages=["00_naive"], peers=[], plan=short).seconds
    )


def test_an_estimate_leaves_out_libraries_that_do_not_take_the_problem() -> None:
    windowed = Problem.parse(FIRST_SHAPE, window=(511, -1))
    what: dict[str, Any] = {"stages": ["16_ones_column"], "peers": ["sdpa", "flex", "flashinfer"]}
    assert _seconds(windowed, **what).implementations == 2
    assert _seconds(Problem.parse(FIRST_SHAPE), **what).implementations == 3, "FlashInfer decodes"


def test_an_estimate_counts_second_rows() -> None:
    first = Problem.parse(FIRST_SHAPE)
    plan = Plan(cold_samples=0, sustained_seconds=5.0)
    what: dict[str, Any] = {"stages": ["00_naive"], "peers": ["sdpa"]}
    more = _seconds(first, plan=replace(plan, lse=True), **what).seconds - _seconds(first, plan=plan, **what).seconds
    assert 5 < more < 12


def test_an_estimate_compiles_a_library_once_for_all_kinds_of_inputs() -> None:
    first = Problem.parse(FIRST_SHAPE)
    options: dict[str, Any] = {"stages": [], "peers": ["fa4"], "ceilings": False, "plan": plan_of("inputs")}
    found, _ = bench.estimate([replace(first, inputs=kind) for kind in ("normal", "zeros", "steps")], **options)
    assert found[0].seconds - found[1].seconds == pytest.approx(5.0)
    assert found[1].seconds == pytest.approx(found[2].seconds)


def test_a_hanging_worker_is_ended_with_all_it_started(tmp_path: Path, fake: Any) -> None:
    run = _run(tmp_path, fake(sdpa="hang"))
    assert {row.status for row in run.measurements if row.name == "sdpa"} == {"timeout"}


def test_checks_give_a_verdict_for_every_stage_and_layout(tmp_path: Path, fake: Any) -> None:
    found = check.check_stages(
        ["00_naive", "01_coalesced"],
        lengths=[(1, 1), (65, 17)],
        masks=["causal"],
        dtypes=["float16"],
        head_dims=[64],
        options=_options(tmp_path, fake(**{"00_naive": "segfault"})),
    )
    assert len(found.rows) == 2 * 2 * len(cases.LAYOUTS)
    assert {row.status for row in found.rows if row.stage == "01_coalesced"} == {"ok"}
    assert {row.status for row in found.failures} == {"crashed"}
    assert {row.stage for row in found.failures} == {"00_naive"}
    assert found.path is not None
    lines = checks.read_lines(found.path)
    assert len(lines) == len(found.rows)
    assert {line.layout for line in lines} == set(cases.LAYOUTS)
    assert {line.header.gpu.name for line in lines} == {"Test GPU"}
    # What holds for all of them stands there once.
    assert found.path.read_text().count("Test GPU") == 1
    assert store.verify("test-gpu", tmp_path / "data") == ()


def test_a_stage_that_does_not_end_is_not_waited_for_in_every_layout(tmp_path: Path, fake: Any) -> None:
    options = replace(_options(tmp_path, fake(**{"00_naive": "hang"})), timeout_s=1.0)
    how: dict[str, Any] = {"masks": ["causal"], "dtypes": ["float16"], "head_dims": [64], "options": options}
    found = check.check_stages(["00_naive", "01_coalesced"], lengths=[(1, 1), (3, 3), (5, 5), (7, 7)], **how)
    late = [row.reason for row in found.rows if row.stage == "00_naive"]
    assert [row.status for row in found.failures] == ["timeout"] * len(late) == ["timeout"] * 4 * len(cases.LAYOUTS)
    waited = [reason for reason in late if "no answer within" in reason]
    assert len(waited) == 2, "in one layout of a problem, and of another"
    assert all(reason in waited or reason.startswith("not run: no end at B") for reason in late)


def test_a_check_that_was_cut_off_goes_on_in_its_file(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = _options(tmp_path, fake())
    source = provenance.source().model_copy(update={"dirty": False})
    there = {**json.loads(options.worker[2]), "arch": "sm_90a"}
    monkeypatch.setattr(provenance, "source", lambda: source)
    monkeypatch.setattr(provenance, "software", lambda: {"python": "3"})
    monkeypatch.setattr(gpu, "info", lambda _: SimpleNamespace(**there, record=SimpleNamespace(**there)))
    monkeypatch.setattr(gpu, "available", lambda: "no compiling ahead")
    said: list[str] = []
    how: dict[str, Any] = {"masks": ["causal"], "dtypes": ["float16"], "head_dims": [64]}
    how["options"] = replace(options, resume=True, note=said.append)
    begun = check.check_stages(["00_naive"], lengths=[(1, 1)], **how)
    assert begun.path is not None
    begun.path.write_bytes(begun.path.read_bytes().removesuffix(b"\n"))  # a crash left out the end of a line
    lengths = [(1, 1), (65, 17)]
    rest = check.check_stages(["00_naive", "01_coalesced"], lengths=lengths, **how)
    assert rest.path == begun.path
    each = len(cases.LAYOUTS)
    assert Counter((row.problem.q_len, row.stage) for row in rest.rows) == dict.fromkeys(
        [(1, "01_coalesced"), (65, "00_naive"), (65, "01_coalesced")], each
    )
    assert len(checks.read_lines(begun.path)) == 4 * each
    assert store.verify("test-gpu", tmp_path / "data") == ()
    assert check.check_stages(["00_naive", "01_coalesced"], lengths=lengths, **how).path is None
    assert said == ["all of it is on record; nothing was checked"]
    seeded = {**how, "options": replace(how["options"], seed=1)}
    assert check.check_stages(["00_naive"], lengths=[(1, 1)], **seeded).path not in (None, begun.path)
    assert check.check_stages(["00_naive"], lengths=[(1, 1)], **seeded).path is None
    assert check.check_stages(["00_naive"], lengths=[(1, 1)], **how).path is None
    source = source.model_copy(update={"commit": "f" * 40})
    assert check.check_stages(["00_naive"], lengths=[(1, 1)], **how).path not in (None, begun.path)


def test_a_case_is_not_written_while_another_process_seals_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "test-gpu" / "checks" / "20260105T000000Z-0123abc-4f2a91.jsonl"
    path.parent.mkdir(parents=True)
    path.touch()
    rows = [CheckRow(stage="00_naive", problem=PROBLEMS[0], status="ok", verdict=PASSED)]
    with ThreadPoolExecutor() as pool:
        with store.locked(tmp_path / "test-gpu"):
            written = pool.submit(check._append, SimpleNamespace(path=path), rows, 0)
            assert wait([written], timeout=0.2).not_done
        written.result()
    assert json.loads(path.read_bytes())["ok"].keys() == {"00_naive"}


def test_a_check_does_not_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ubuntu")
    path = tmp_path / "test-gpu" / "checks" / "20260105T000000Z-0123abc-4f2a91.jsonl"
    path.parent.mkdir(parents=True)
    path.touch()
    reason = "OSError: /home/ubuntu/lib/libcuda.so: cannot open"
    row = CheckRow(stage="00_naive", problem=PROBLEMS[0], status="error", reason=reason)
    check._append(SimpleNamespace(path=path), [row], 0)
    assert json.loads(path.read_bytes())["other"][0]["reason"] == "OSError: ~/lib/libcuda.so: cannot open"


def test_checks_without_a_folder_leave_nothing_behind(tmp_path: Path, fake: Any) -> None:
    found = check.check_stages(["00_naive"], lengths=[(1, 1)], record=False, options=Options(worker=fake()))
    assert found.path is None
    assert found.rows
    assert not found.failures


def test_checks_refuse_what_does_not_exist() -> None:
    with pytest.raises(errors.ParameterError, match="bshd"):
        check.check_stages(["00_naive"], layouts=["diagonal"], record=False)
    with pytest.raises(errors.ParameterError, match="at least one stage"):
        check.check_stages(["00_naive"], dtypes=["bfloat16"], record=False)


def test_errors_become_statuses() -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    assert refusal(errors.UnsupportedError("too old"))["status"] == "unsupported"
    assert refusal(errors.MissingPackageError("no torch"))["status"] == "missing"
    assert refusal(RuntimeError("No available kernel. Aborting execution."))["status"] == "unsupported"
    assert refusal(OutOfMemoryError("CUDA out of memory"))["status"] == "unsupported"
    assert refusal(ZeroDivisionError("oh"))["status"] == "error"
    assert refusal(ZeroDivisionError("oh"))["reason"] == "ZeroDivisionError: oh"


@needs_compiler
def test_the_worker_checks_on_while_the_emulator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [Problem.parse("1x2x1x17x9x64", mask="causal"), Problem.parse("1x1x3x64")]
    names = ["00_naive", "05_wmma"]
    sent: list[Any] = []
    job = {
        "device": 0,
        "seed": 0,
        "emulate": True,
        "implementations": {name: {"kind": "stage", "id": name, "source": None, "params": {}} for name in names},
        "cells": [
            {"index": index, "problem": asdict(problem), "pending": names, "layout": "padded"}
            for index, problem in enumerate(problems)
        ],
    }
    worker = check.CheckWorker(job, sent.append)
    monkeypatch.setattr(worker, "hold", lambda: None)
    worker.info = SimpleNamespace(arch="sm_90a")
    worker.cupy = np
    monkeypatch.setattr(worker, "inputs", make_inputs)
    monkeypatch.setattr(worker, "for_oracle", lambda array: array)
    monkeypatch.setattr(worker, "on_host", lambda array: array)
    monkeypatch.setattr(worker, "survive", lambda error: None)
    monkeypatch.setattr(check, "_guarded_inputs", lambda values, layout: [])

    counted = Fallbacks(renormalized=1, recomputed=2)

    def in_place_of_a_gpu(stage_id: str, problem: Problem, values: Any, inputs: Any, **options: Any) -> Any:
        if (stage_id, problem) == ("00_naive", problems[1]):
            return schema.Verdict(passed=False, reason="bad"), None, None, None
        verdict, ran = on_cpu.emulated_verdict(stage_id, problem, values, **options)
        return verdict, ran.out, ran.lse, counted

    monkeypatch.setattr(check, "_guarded_run", in_place_of_a_gpu)
    worker.work()
    for index in range(2):
        of_cell = [message["type"] for message in sent if message.get("cell") == index and message["type"] != "step"]
        assert of_cell == ["row", "row"]
    rows = {
        (message["cell"], message["name"]): TypeAdapter(CheckRow).validate_python(
            {"stage": message["name"], "problem": problems[message["cell"]], "layout": "padded", **message["row"]}
        )
        for message in json.loads(json.dumps(sent))
        if message["type"] == "row"
    }
    assert {key: row.status for key, row in rows.items()} == {
        (0, "00_naive"): "ok", (0, "05_wmma"): "ok", (1, "00_naive"): "wrong", (1, "05_wmma"): "ok",
    }  # fmt: skip
    assert [rows[key].fallbacks for key in sorted(rows)] == [counted, counted, None, counted]
    assert rows[1, "00_naive"].emulator is None
    for key in ((0, "00_naive"), (0, "05_wmma"), (1, "05_wmma")):
        found = rows[key].emulator
        assert found is not None
        assert found.agreement is not None
        assert found.agreement.max_abs_error == 0


class _Prepared:
    """What `prepare` gives, on the CPU: calls torch's own attention."""

    def __init__(self, torch: Any, q: Any, k: Any, v: Any, **how: Any) -> None:
        self._torch, self._inputs, self._how = torch, (q, k, v), how
        resources = dict.fromkeys(("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes"), 0)
        self.cubin = SimpleNamespace(
            sha256="0" * 64, arch="sm_90a", compiler="none", parameters=dict(how["params"]), options=(), entry="",
            code=b"", resources=Resources(**resources, static_smem_bytes=0),
        )  # fmt: skip
        self.launch_shape = SimpleNamespace(smem_bytes=0, threads=128, tile_q=64)

    def __call__(self) -> None:
        q, k, v = (x.float() for x in self._inputs)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        wrong = 1.5 if self._how["params"].get("THREADS") == 64 else 1.0
        self._how["out"].copy_(wrong * scores.softmax(-1) @ v)
        if self._how.get("lse") is not None:
            self._how["lse"].copy_(scores.logsumexp(-1))

    def blocks_per_sm(self) -> int:
        return 1

    def fallbacks(self) -> Fallbacks | None:
        return Fallbacks(1, 2) if self._how.get("count_fallbacks") else None


class _Clock:
    """A GPU whose calls all take 100 µs."""

    def __init__(self, *_: int) -> None:
        self.time_s = 0.0

    def sample(self, run: Any, *, calls: int, **_: Any) -> Any:
        run()
        self.time_s += 1e-4 * calls
        return Reading(time_us=100.0, sm_clock_mhz=900.0, call_clock_mhz=800.0, enqueue_us=1.0, starved=False)

    def warm_up(self, run: Any, calls: int) -> None:
        run()

    def state(self) -> Any:
        return State(sm_clock_mhz=900.0, power_w=1.0, temperature_c=40.0, throttle_reasons=())

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def test_a_workers_rows_are_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """From inputs to records with all but the GPU: what is right is timed, and what is wrong is not."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    problem, sent = PROBLEMS[0], list[Any]()
    named = bench.implementations_of([], ["00_naive", "00_naive[THREADS=64]"], ["sdpa_math", "fa3"])
    named["00_naive+lse"] = replace(named["00_naive"], lse_of="00_naive", record={"name": "00_naive", "kind": "stage"})
    job = _job(Plan(samples=5, min_samples=3, cold_samples=3, sustained_seconds=0.0))
    job["implementations"] = json.loads(json.dumps({name: asdict(one) for name, one in named.items()}))
    cells = [Cell(None, ["launch"]), Cell(problem, list(named))]
    job["cells"] = json.loads(json.dumps([{"index": at, **asdict(cell)} for at, cell in enumerate(cells)]))
    one = BenchWorker(job, sent.append)
    one.torch, one.cupy = torch, NumPyAsCuPy()  # type: ignore[attr-defined]
    one.info = SimpleNamespace(arch="sm_90a", compute_capability=(9, 0), sm_count=4)  # type: ignore[assignment]
    nothing = ceilings.Workload(run=int, amount=1, unit="us", how="")
    q, k, v = (torch.randn(1, 2, 64, 64).half() for _ in range(3))
    for place, name, stand_in in (
        (one, "hold", lambda: None),
        (one, "inputs", lambda _: (q, k, v)),
        (one, "survive", lambda _: None),
        (torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0)),
        (torch.cuda, "Stream", lambda _: None),
        (torch.cuda, "stream", contextlib.nullcontext),
        (worker_module, "CudaBackend", _Clock),
        (worker_module, "prepare", lambda *tensors, **how: _Prepared(torch, *tensors, **how)),
        (worker_module.sass, "mix", lambda *_: {"mma": 1}),
        (gpu, "synchronize", lambda _: None),
        (gpu, "memory_free_bytes", lambda _: 1 << 40),
        (worker_module.ceilings, "CEILINGS", {"launch": lambda *_: nothing}),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, stand_in)
    one.work()
    rows = {message["name"]: message["row"] for message in json.loads(json.dumps(sent)) if message["type"] == "row"}
    assert (rows["launch"]["reason"], rows["launch"].get("value")) == ("", 100.0)
    header = {"run": "20260102T030405Z-0123abc", "time": "2026-01-02T03:04:05+00:00", "gpu": GPU, "software": {}}
    header["source"] = {"commit": "unknown", "dirty": True}
    found = {name: bench._record(schema.Measurement, header, named[name], problem, rows[name]) for name in (*named,)}
    assert {name: record.status for name, record in found.items()} == {  # type: ignore[union-attr]
        "00_naive": "ok", "00_naive[THREADS=64]": "wrong", "sdpa_math": "ok", "fa3": "missing", "00_naive+lse": "ok",
    }  # fmt: skip
    naive, twin = found["00_naive"], found["00_naive+lse"]
    assert isinstance(naive, schema.Measurement)
    assert isinstance(twin, schema.Measurement)
    assert [(one.cache, len(one.time_us)) for one in naive.samples] == [("hot", 5), ("cold", 3)]
    assert [one.cache for one in twin.samples] == ["hot"]
    assert naive.samples[0].cycles_per_score == pytest.approx(100 * 800 * 4 / (2 * 64 * 64))
    assert (naive.fallbacks, twin.fallbacks) == ((1, 2), None)
    assert naive.verdict is not None
    assert naive.verdict.lse_error is not None
    assert naive.cubin is not None
    assert naive.cubin.sass == {"mma": 1}
    variant = replace(named["00_naive"], record={"stage": "00_naive"})
    tuning = bench._record(schema.Tuning, header, variant, problem, rows["00_naive"])
    assert isinstance(tuning, schema.Tuning)
    assert tuning.parameters == registry.get("00_naive").parameters(64)


def test_ablations_with_the_same_machine_code_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is measured whole, and what differs in driver, software or machine code is measured again."""
    here = SimpleNamespace(slug="nvidia-h200", record=SimpleNamespace(), fingerprint="0123456789ab")
    row = measurement("03_warp_rows", PROBLEMS[0])
    here.record.driver = row.gpu.driver
    monkeypatch.setattr(gpu, "info", lambda _: here)
    software = row.software
    monkeypatch.setattr(bench.provenance, "software", lambda: software)
    row = row.model_copy(update={"software": software | {provenance.UNUSED: "13.5.37"}})
    names = {"padding: 0": 0, "padding: 8": 8}
    named = {
        name: registry.Implementation(
            id="03_warp_rows",
            params={"PADDING": value},
            record={"axis": "padding", "level": name, "stage": "03_warp_rows"},
        )
        for name, value in names.items()
    }
    cells = [(problem, list(named)) for problem in PROBLEMS]
    made = bench.compile_for(named, cells, arch="sm_80", slug=None)
    resumed = Options(data=tmp_path, resume=True)
    assert bench.not_recorded(schema.Ablation, cells, named, made, resumed) == cells
    path = tmp_path / "nvidia-h200" / "ablations" / f"{row.run}.jsonl"
    path.parent.mkdir(parents=True)
    base = row.model_dump(include=set(schema.Ablation.model_fields) - {"kind"}) | {"parameters": {}}
    for name, one in named.items():
        code = made[PROBLEMS[0], name]
        assert not isinstance(code, errors.CompileError)
        cubin = row.cubin.model_dump() | {"sha256": code.sha256}  # type: ignore[union-attr]
        store.append(path, schema.Ablation.model_validate({**base, **one.record, "cubin": cubin}))
    assert bench.not_recorded(schema.Ablation, cells, named, made, resumed) == cells[1:]
    assert bench.not_recorded(schema.Ablation, cells, named, made, replace(resumed, resume=False)) == cells
    here.record.driver = "590.1"
    assert bench.not_recorded(schema.Ablation, cells, named, made, resumed) == cells


def test_what_is_on_record_for_the_same_code_is_left_out(tmp_path: Path) -> None:
    problem, other = PROBLEMS
    named = bench.implementations_of([], ["00_naive", "01_coalesced", "02_half2", "09_wgmma"], ["sdpa", "fa3"])
    cells = [(one, list(named)) for one in PROBLEMS]
    code = bench.compile_for(named, cells, arch="sm_80", slug=None)
    assert (problem, "09_wgmma") not in code, "it needs Hopper"

    def row(name: str, **changes: Any) -> schema.Measurement:
        made = measurement(name, changes.pop("problem", problem))
        compiled = code.get((made.problem, name))
        if compiled is not None and made.cubin is not None:
            changes.setdefault("cubin", made.cubin.model_copy(update={"sha256": getattr(compiled, "sha256", "")}))
        return made.model_copy(update=changes)

    nothing: dict[str, Any] = {"samples": (), "verdict": None, "cubin": None, "reason": "made up"}
    known = [
        *(row(name) for name in ("00_naive", "01_coalesced", "02_half2", "sdpa")),
        *(row(name, status="unsupported", **nothing) for name in ("09_wgmma", "fa3")),
    ]
    plan = replace(BURSTS, cold_samples=0)
    assert bench.not_on_record(cells, named, known, code, plan) == {other: frozenset(named)}
    assert bench.not_on_record(cells[:1], named, known, code, plan) == {}

    def without(name: str) -> list[schema.Measurement]:
        other_code = row(name, cubin=row(name).cubin.model_copy(update={"sha256": "f" * 64}))  # type: ignore[union-attr]
        return [other_code if one.name == name else one for one in known]

    # Of a stage whose code has changed, the parent and the libraries too: a ratio is of one run.
    todo = bench.not_on_record(cells[:1], named, without("02_half2"), code, plan)
    assert todo == {problem: {"02_half2", "01_coalesced", "sdpa", "fa3"}}
    # The last rung too, for a ratio to a library is of it.
    todo = bench.not_on_record(cells[:1], named, without("01_coalesced"), code, plan)
    assert todo == {problem: {"01_coalesced", "00_naive", "02_half2", "sdpa", "fa3"}}
    # A row that failed is tried again, and a library beside the last rung.
    failed = [one for one in known if one.name != "sdpa"] + [row("sdpa", status="crashed", **nothing)]
    assert bench.not_on_record(cells[:1], named, failed, code, plan) == {problem: {"sdpa", "02_half2"}}
    # A state that the plan wants and the record lacks.
    busy = replace(plan, sustained_seconds=1.0, sustained_names=("sdpa",), sustained_shapes=None)
    lacking = [
        one.model_copy(update={"samples": tuple(taken for taken in one.samples if taken.regime == "burst")})
        for one in known
    ]
    assert bench.not_on_record(cells[:1], named, lacking, code, busy) == {problem: {"sdpa", "02_half2"}}
    # The second rows, with the log-sum-exp.
    both, stages = replace(plan, lse=True), ("00_naive", "01_coalesced", "02_half2")
    second = [one.model_copy(update={"lse": True}) for one in known if one.name in stages]
    assert bench.not_on_record(cells[:1], named, [*known, *second], code, both) == {}
    assert bench.not_on_record(cells[:1], named, [*known, *second[1:]], code, both) == {
        problem: {"00_naive", "02_half2", "sdpa", "fa3"}
    }
    assert bench.not_on_record(cells[:1], named, [*second, known[3], *known[4:]], code, plan)[problem] >= {*stages}
    # Few query rows are timed on other keys and values in each call too.
    few = Problem.parse("1x2x2x1x64x64")
    names = {"sdpa": named["sdpa"]}
    hot = row("sdpa", problem=few)
    turned = hot.samples[0].model_copy(update={"cache": "rotating"})
    assert bench.not_on_record([(few, ["sdpa"])], names, [hot], {}, plan) == {few: {"sdpa"}}
    rotated = hot.model_copy(update={"samples": (*hot.samples, turned)})
    assert bench.not_on_record([(few, ["sdpa"])], names, [rotated], {}, plan) == {}
