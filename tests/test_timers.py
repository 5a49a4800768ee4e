"""Other timers beside ours: what their files say, what is compared, what separate starts are, and what pages show."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import synthetic

from flashlab.core.errors import LaunchError, NoDataError, NoGpuError, ParameterError, UnknownStageError
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import timer_tables, timers
from flashlab.measure import timer as timing
from flashlab.measure.cells import RefusedError
from flashlab.measure.options import Options, Plan
from flashlab.measure.worker import Candidate
from flashlab.query import select
from flashlab.record import provenance, schema, store
from flashlab.record.schema import Reading, Samples, Source, Start

FIRST, SMALL = Problem.parse(FIRST_SHAPE), Problem.parse("1x8x512x64")
GPU = "nvidia-h200"
NAMES = {"16_ones_column": (500.0, 12.0), "sdpa_cudnn": (590.0, 9.0)}


def reading(
    name: str,
    problem: Problem,
    timer: str,
    time_us: float,
    *,
    inputs: str = "normal",
    cache: str = "hot",
    regime: str = "burst",
    mhz: float | None = 1900.0,
    run: str = synthetic.RUN,
    enqueue_us: float | None = 6.0,
) -> Reading:
    rng = np.random.default_rng([*f"{name}{problem.label}{timer}{inputs}{cache}{regime}".encode()])
    times = tuple(float(t) for t in time_us * rng.normal(1, 0.001, 12))
    return Reading(
        run=run,
        time="2026-01-02T03:04:05Z",
        gpu=synthetic.gpu(),
        source=Source(commit=synthetic.COMMIT, dirty=False),
        software={"torch": "2.11.0"},
        name=name,
        problem=problem,
        timer=timer,  # type: ignore[arg-type]
        inputs=inputs,  # type: ignore[arg-type]
        samples=Samples(
            regime=regime,  # type: ignore[arg-type]
            cache=cache,  # type: ignore[arg-type]
            calls=1,
            time_us=times,
            sm_clock_mhz=(),
            call_clock_mhz=(mhz,) * 12 if mhz else (),
        ),
        enqueue_us=enqueue_us,
    )


def write(data: Path, readings: list[Reading]) -> None:
    folder = data / GPU / "readings"
    folder.mkdir(parents=True, exist_ok=True)
    for one in readings:
        store.append(folder / f"{one.run}.jsonl", one)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Readings of three timers: CUPTI misses a launch a call, NVBench meets a lower clock, and the host when hot."""
    synthetic.write_synthetic(tmp_path, problems=[FIRST])
    found = []
    for name, (first, small) in NAMES.items():
        for problem, time_us in ((FIRST, first), (SMALL, small)):
            for cache, more in (("hot", 0.0), ("cold", 3.0)):
                for inputs, factor in (("normal", 1.0), ("zeros", 0.97)):
                    us = (time_us + more) * factor
                    both: dict[str, Any] = {"cache": cache, "inputs": inputs}
                    found.append(reading(name, problem, "events", us, **both))
                    found.append(reading(name, problem, "torch-profiler", us - 1.2, **both))
                    slowed = us * 1.05 if problem == FIRST else us + (8 if cache == "hot" else 0)
                    mhz = 1900.0 / 1.05 if problem == FIRST and cache == "cold" else None
                    enqueue = {"enqueue_us": 20.0 if problem == SMALL else 6.0}
                    found.append(reading(name, problem, "cuda-bench", slowed, mhz=mhz, **both, **enqueue))
        for inputs, factor in (("normal", 1.2), ("zeros", 1.0)):
            found.append(reading(name, FIRST, "events", first * factor, inputs=inputs, regime="sustained", mhz=1600.0))
    write(tmp_path, found)
    return tmp_path


# --- What other timers write ------------------------------------------------------------------------------------------


def event(ts: float, dur: float, name: str, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_kernels_between_spins_are_calls() -> None:
    events = [
        event(0, 900, "void micro_spin(MicroParams)"),
        event(1000, 5, "warm"),
        event(1010, 21, "micro_spin"),
        event(2000, 30, "Memset (Device)", "gpu_memset"),  # the L2 is overwritten before the spin
        event(2100, 900, "micro_spin"),
        event(3000, 40, "attend"),
        event(3041, 2, "Memset (Device)", "gpu_memset"),  # a library's own
        event(3044, 44, "attend"),
        event(3090, 2, "Memset (Device)", "gpu_memset"),
        event(3100, 21, "micro_spin"),
        event(3050, 9, "cudaLaunchKernel", "cuda_runtime"),
    ]
    assert timers.kernel_times({"traceEvents": events[::-1]}, [2]) == [44.0]
    assert timers.kernel_times({"traceEvents": events}, [1, 2]) == [5.0, 44.0]


def test_a_trace_that_lost_kernels_is_no_reading() -> None:
    events = [event(0, 900, "micro_spin"), event(1000, 5, "attend"), event(1010, 21, "micro_spin")]
    with pytest.raises(LaunchError, match="wanted 2 samples in the profiler's trace, found 1"):
        timers.kernel_times({"traceEvents": events}, [1, 1])
    with pytest.raises(LaunchError, match="kernels of 2 calls"):
        timers.kernel_times({"traceEvents": events}, [2])


def nvbench_file(folder: Path, *, with_samples: bool = True) -> Path:
    """JSON in the form that NVBench writes with `--jsonbin`."""

    def summary(tag: str, **values: object) -> dict[str, Any]:
        return {
            "tag": tag,
            "name": tag,
            "data": [{"name": k, "type": "any", "value": str(v)} for k, v in values.items()],
        }

    for name, numbers in (("times", (1e-3, 1.1e-3)), ("freqs", (1.9e9, 1.8e9))):
        (folder / f"out-{name}").mkdir()
        (folder / f"out-{name}" / "0.bin").write_bytes(struct.pack("<2f", *numbers))
    summaries = [
        summary("nv/cold/sample_size", value=2),
        summary("nv/batch/sample_size", value=50),
        summary("nv/batch/time/gpu/mean", value=9.5e-4),
        summary("nv/json/freqs-bin:nv/cold/sample_freqs", filename="out-freqs/0.bin", size=2),
    ]
    if with_samples:
        summaries.append(summary("nv/json/bin:nv/cold/sample_times", filename="out-times/0.bin", size=2))
    axis = [{"name": "step", "type": "int64", "value": "7"}]
    state = {"name": "step=7", "axis_values": axis, "summaries": summaries, "is_skipped": False}
    skipped = {"name": "step=8", "axis_values": axis, "summaries": None, "is_skipped": True}
    file = folder / "out.json"
    file.write_text(json.dumps({"benchmarks": [{"name": "flashlab_method", "states": [state, skipped]}]}))
    return file


def test_nvbench_gives_cold_samples_and_a_hot_batch(tmp_path: Path) -> None:
    (cold_step, cold), (hot_step, hot) = timers.nvbench_samples(nvbench_file(tmp_path))
    assert (cold_step, hot_step) == (7, 7)
    assert (cold["cache"], cold["calls"], hot["cache"], hot["calls"]) == ("cold", 1, "hot", 50)
    assert cold["time_us"] == pytest.approx([1000.0, 1100.0])
    assert cold["call_clock_mhz"] == pytest.approx([1900.0, 1800.0])
    assert hot["time_us"] == pytest.approx([950.0])
    for samples in (cold, hot):
        Samples.model_validate(samples)


def test_nvbench_without_samples_is_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="step 7"):
        timers.nvbench_samples(nvbench_file(tmp_path, with_samples=False))


# --- The parent and its workers ---------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
path = sys.argv[sys.argv.index("--connect") + 1]
pipe = open(path, "w")
job = json.load(open(os.path.dirname(path) + "/job.json"))
def say(**message):
    pipe.write(json.dumps(message) + "\\n")
    pipe.flush()
hello, reading = {hello!r}, {reading!r}
if {refuse}:
    say(type="refused", error="NoGpuError", message="wanted a CUDA GPU, got none")
else:
    say(type="hello", **hello)
    second = "cuda-bench" in job["timers"]
    {more}
    if second:
        assert job["names"] == ["16_ones_column"], job
        print("its last words", flush=True)
        os._exit(5)
    say(type="row", row=reading)
    say(type="missing", what="00_naive at it", reason="made up", name="00_naive")
    say(type="done")
"""


def worker(tmp_path: Path, *, refuse: bool = False, more: str = "pass") -> list[str]:
    one = reading("16_ones_column", FIRST, "events", 500.0)
    fields = one.model_dump(mode="json", include={"name", "problem", "timer", "inputs", "samples", "enqueue_us"})
    hello = {"gpu": synthetic.own_gpu(tmp_path), "software": {"torch": "2.11.0"}}
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT.format(hello=hello, reading=fields, refuse=refuse, more=more))
    return [sys.executable, str(script)]


def options(data: Path, command: list[str], **others: Any) -> Options:
    return Options(data=data, worker=command, **others)


def test_readings_outlive_a_worker_that_dies(tmp_path: Path) -> None:
    said: list[str] = []
    path, missing = timers.measure(
        ["00_naive", "16_ones_column"], [], [FIRST_SHAPE], options=options(tmp_path, worker(tmp_path), note=said.append)
    )
    (one,) = store.read(path, schema.Reading)[0]
    assert (one.name, one.timer, one.start is None) == ("16_ones_column", "events", provenance.start() is None)
    assert path.parent == tmp_path / GPU / "readings"
    assert missing[0] == "00_naive at it: made up"
    assert "cuda-bench, events: the worker ended: exit status 5; its last words: its last words" in missing[1]
    assert len(said) == 2
    checksums = (tmp_path / GPU / "CHECKSUMS").read_text()
    assert f"readings/{path.name}" in checksums


def test_a_reading_is_on_disk_before_the_next_is_made(tmp_path: Path) -> None:
    wait = (
        "say(type='row', row=reading)\n"
        "    import glob, time\n"
        f"    while not glob.glob({str(tmp_path)!r} + '/*/readings/*.jsonl'): time.sleep(0.05)\n"
        "    say(type='done'); os._exit(0)"
    )
    path, missing = timers.measure(
        ["16_ones_column"], [], options=options(tmp_path, worker(tmp_path, more=wait)), limit_s=20
    )
    assert missing == ()
    assert len(store.read(path, schema.Reading)[0]) == 2


def test_what_both_workers_take_has_one_limit(tmp_path: Path) -> None:
    hang = "say(type='row', row=reading)\n    import time\n    time.sleep(60)"
    path, missing = timers.measure(
        ["16_ones_column"], [], options=options(tmp_path, worker(tmp_path, more=hang)), limit_s=4
    )
    assert len(store.read(path, schema.Reading)[0]) == 2
    assert [": no answer within " in reason for reason in missing] == [True, True]


def test_a_second_worker_that_cannot_work_costs_its_own_readings(tmp_path: Path) -> None:
    no = "if second: say(type='refused', error='MissingPackageError', message='no CuPy any more'); os._exit(0)"
    path, missing = timers.measure(["16_ones_column"], [], options=options(tmp_path, worker(tmp_path, more=no)))
    assert len(store.read(path, schema.Reading)[0]) == 1
    assert "cuda-bench, events: no CuPy any more" in missing


def test_an_unsound_reading_costs_itself(tmp_path: Path) -> None:
    bad = "say(type='row', row={{**reading, 'inputs': 'none'}})".replace("{{", "{").replace("}}", "}")
    path, missing = timers.measure(
        ["00_naive", "16_ones_column"], [], options=options(tmp_path, worker(tmp_path, more=bad))
    )
    assert len(store.read(path, schema.Reading)[0]) == 1
    assert missing[0].startswith("16_ones_column: wanted a sound row, got: ")


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_what_one_problem_or_timer_loses_is_not_the_others(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    problems = [vars(problem) for problem in (FIRST, SMALL)]
    job = {
        "device": 0,
        "seed": 0,
        "seconds": seconds,
        "problems": problems,
        "samples": 4,
        "timers": list(timers.TIMERS),
        "plan": vars(Plan()),
    }
    one = timers._Worker(job, sent.append)
    read: list[tuple[str, str]] = []

    def events(problem: Problem) -> None:
        read.append(("events", problem.shape))

    def profiler(problem: Problem) -> None:
        if problem == FIRST:
            raise LaunchError("no kernels in the trace")
        read.append(("torch-profiler", problem.shape))

    monkeypatch.setattr(one, "_events", events)
    monkeypatch.setattr(one, "_profiler", profiler)
    monkeypatch.setitem(sys.modules, "cuda.bench", None)  # not installed
    one._read()
    sent = [message for message in sent if message["type"] == "missing"]
    lost = [message["what"] for message in sent]
    if seconds:
        assert lost == [f"torch-profiler at {FIRST.label}", "cuda-bench"]
        assert "`pip install cuda-bench`" in sent[-1]["reason"]
        assert read == [("events", FIRST.shape), ("events", SMALL.shape), ("torch-profiler", SMALL.shape)]
    else:
        assert (len(lost), read) == (5, [])
        assert all("were over" in message["reason"] for message in sent)


def test_what_is_read_was_checked_and_runs_on_zeros_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    job = {"device": 0, "seed": 0, "seconds": 60, "problems": [vars(SMALL)], "names": ["wrong", "right"]}
    one = timers._Worker(job | {"plan": vars(Plan())}, sent.append)
    one.torch = SimpleNamespace(zeros_like=lambda tensor: f"zeros like {tensor}")
    monkeypatch.setattr(one, "inputs", lambda problem: ("q", "k", "v"))
    ran: list[tuple[str, ...]] = []

    def candidate(name: str, problem: Problem, *tensors: str) -> Candidate:
        if name == "wrong":
            raise RefusedError("wrong", "max abs error 1")

        def on(*tensors: str) -> Any:
            return lambda: ran.append(tensors)

        return Candidate(on(*tensors), None, lambda: None, on=on)

    monkeypatch.setattr(one, "candidate", candidate)
    taken = timing.Reading(time_us=7.0, sm_clock_mhz=1.0, call_clock_mhz=1.0, enqueue_us=10.0, starved=False)
    one._backend = SimpleNamespace(warm_up=lambda run, calls: run(), sample=lambda run, **how: taken)  # type: ignore[assignment]
    one._build(SMALL)
    assert ran == [("q", "k", "v"), ("zeros like q", "zeros like k", "zeros like v")]
    assert [(case.name, case.inputs, case.call_us, case.enqueue_us) for case in one._cases.values()] == [
        ("right", "normal", 7.0, 2.0),
        ("right", "zeros", 7.0, 2.0),
    ]
    ((message),) = sent
    assert (message["type"], message["name"], message["reason"]) == ("missing", "wrong", "max abs error 1")


def test_measuring_needs_none_of_what_shows_results(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('pandas', 'seaborn', 'matplotlib', 'papermill', 'nbformat', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from flashlab.experiments import timers\n"
        "from flashlab.measure.options import Options\n"
        "from flashlab.record import schema, store\n"
        f"options = Options(data=Path({str(tmp_path)!r}), worker={worker(tmp_path)!r})\n"
        "path, _ = timers.measure(['08_swizzle'], [], options=options)\n"
        "print(len(store.read(path, schema.Reading)[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_a_worker_that_hangs_is_stopped(tmp_path: Path) -> None:
    script = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(LaunchError, match="within"):
        timers.measure(["16_ones_column"], [], options=options(tmp_path, script), limit_s=0.5)


def test_a_machine_without_a_gpu_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoGpuError, match="wanted a CUDA GPU"):
        timers.measure(["16_ones_column"], [], options=options(tmp_path, worker(tmp_path, refuse=True)))


def test_nonsense_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UnknownStageError):
        timers.measure(["99_nothing"], options=options(tmp_path, ["false"]))
    with pytest.raises(ParameterError, match="peer"):
        timers.measure([], ["nobody"], options=options(tmp_path, ["false"]))
    with pytest.raises(ParameterError, match="at least one"):
        timers.measure([], [], options=options(tmp_path, ["false"]))


def test_defaults_name_what_exists() -> None:
    from flashlab.kernels import peers, registry

    assert set(timers.STAGES) <= registry.STAGES.keys()
    assert set(timers.PEERS) <= peers.PEERS.keys()
    assert set(timers.SUSTAINED) <= {*timers.STAGES, *timers.PEERS}


# --- Comparisons ------------------------------------------------------------------------------------------------------


def test_a_difference_is_explained_by_what_the_data_bears_out(data: Path) -> None:
    found = timer_tables.comparisons(timer_tables.pools(store.records(GPU, schema.Reading, data)))
    by = {
        (c.ours.name, c.ours.problem, c.other.timer, c.ours.samples.cache): c
        for c in found
        if c.ours.inputs == "normal"
    }
    assert by["16_ones_column", FIRST, "torch-profiler", "hot"].agrees
    assert by["16_ones_column", FIRST, "torch-profiler", "hot"].why == ""
    short = by["16_ones_column", SMALL, "torch-profiler", "hot"]
    assert not short.agrees
    assert short.why.startswith("launch overhead: events include 1.2")
    assert by["16_ones_column", SMALL, "cuda-bench", "hot"].why.startswith("the host: 20.0 µs")
    assert by["16_ones_column", SMALL, "cuda-bench", "cold"].agrees
    assert by["16_ones_column", FIRST, "cuda-bench", "cold"].why.startswith("the clock: 1,810 MHz")
    assert by["16_ones_column", FIRST, "cuda-bench", "hot"].why.startswith("not explained")
    for one in found:
        assert one.ratio.low <= one.ratio.value <= one.ratio.high


def test_only_the_newest_run_of_a_problem_counts(data: Path) -> None:
    newer = "20260202T030405Z-0123abc"
    write(data, [reading("16_ones_column", SMALL, "events", 99.0, run=newer)])
    found = timer_tables.pools(store.records(GPU, schema.Reading, data))
    assert {pool.run for pool in found if pool.problem == SMALL} == {newer}
    assert {pool.run for pool in found if pool.problem == FIRST} == {synthetic.RUN}


def test_readings_of_one_state_are_pooled(tmp_path: Path) -> None:
    write(tmp_path, [reading("16_ones_column", FIRST, "events", us) for us in (500.0, 502.0)])
    (pool,) = timer_tables.pools(store.records(GPU, schema.Reading, tmp_path))
    assert len(pool.samples.time_us) == 24
    assert timer_tables.clock_mhz(pool) == 1900.0


# --- Separate starts --------------------------------------------------------------------------------------------------


def started(name: str, at: str, boot: str, slower: float, *, run: str) -> schema.Measurement:
    """A row from that start, whose clock was lower by that factor."""
    row = synthetic.measurement(name, FIRST, run=run)
    taken = []
    for samples in row.samples:
        clocks = tuple(mhz / slower for mhz in samples.call_clock_mhz)
        times = tuple(us * slower for us in samples.time_us)
        changed = samples.model_copy(update={"time_us": times, "call_clock_mhz": clocks})
        cycles = schema.cycles_per_score(changed, FIRST, row.gpu.sm_count)
        taken.append(changed.model_copy(update={"cycles_per_score": cycles}))
    return row.model_copy(update={"samples": tuple(taken), "start": Start(boot=boot, at=at), "time": at})


BOOTS = (
    ("20260102T030405Z-0123abc", "2026-01-02T03:00:00+00:00", "00000001", 1.0),
    ("20260202T030405Z-0123abc", "2026-02-02T03:00:00+00:00", "00000001", 1.02),  # an image resumed a month later
    ("20260302T030405Z-0123abc", "2026-03-02T03:00:00+00:00", "00000002", 1.01),
    ("20260402T030405Z-0123abc", "2026-03-02T03:00:01+00:00", "00000002", 1.03),  # the same start, and newer
)


def spreads(folder: Path, *rows: schema.Measurement) -> tuple[timer_tables.Spread, ...]:
    """Those of a GPU that has these rows on record, and no others."""
    (folder / GPU / "runs").mkdir(parents=True)
    for row in rows:
        store.append(folder / GPU / "runs" / f"{row.run}.jsonl", row)
    return timer_tables.spreads(GPU, folder)


def test_spread_between_starts_takes_the_newest_row_of_each(tmp_path: Path) -> None:
    rows = [started("16_ones_column", at, boot, slower, run=run) for run, at, boot, slower in BOOTS]
    (found,) = spreads(tmp_path, *rows)
    assert [row.run for row in found] == [BOOTS[0][0], BOOTS[1][0], BOOTS[3][0]]
    of_starts = timer_tables.samples(found)
    assert timer_tables.between_percent([one.median_us for one in of_starts]) == pytest.approx(3.0)
    assert timer_tables.between_percent([one.cycles_per_score for one in of_starts]) == pytest.approx(0.0)
    assert timer_tables.between_percent([1.0, None]) is None


def test_other_code_and_rows_without_a_start_do_not_count(tmp_path: Path) -> None:
    rows = [started("16_ones_column", at, boot, slower, run=run) for run, at, boot, slower in BOOTS]
    cubin = rows[1].cubin
    assert cubin is not None
    other = rows[1].model_copy(update={"cubin": cubin.model_copy(update={"sha256": "f" * 64})})
    assert [len(found) for found in spreads(tmp_path / "code", rows[0], other, rows[3])] == [2]
    unknown = rows[1].model_copy(update={"start": None})
    assert [len(found) for found in spreads(tmp_path / "start", rows[0], unknown, rows[3])] == [2]
    peer = [started("sdpa", at, boot, slower, run=run) for run, at, boot, slower in BOOTS]
    newer = [row.model_copy(update={"software": {"torch": "3"}}) for row in peer[1:]]
    assert [len(found) for found in spreads(tmp_path / "library", peer[0], *newer)] == [2]
    assert spreads(tmp_path / "once", *rows[2:]) == ()


def test_this_machine_tells_its_start(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("11111111-2222\n")
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1767322800\n")
    found = provenance.start(tmp_path)
    assert found is not None
    start = Start.model_validate(found)
    assert start.at == "2026-01-02T03:00:00+00:00"
    assert "1111" not in start.boot
    assert provenance.start(tmp_path / "nothing") is None
    assert start.same_as(start.model_copy(update={"at": "2026-01-02T03:00:30+00:00"}))
    assert not start.same_as(start.model_copy(update={"boot": "00000000"}))


# --- Samples and pages ------------------------------------------------------------------------------------------------


def test_enough_raw_samples_are_committed() -> None:
    counts = store.count_samples(GPU, DATA)
    assert counts["runs"] >= timer_tables.ENOUGH_SAMPLES
    assert f"**{sum(counts.values()):,}**" in timer_tables.samples_line(GPU, DATA)
    assert "are needed" not in timer_tables.samples_line(GPU, DATA)


def test_samples_are_counted_where_they_lie(data: Path) -> None:
    counts = store.count_samples(GPU, data)
    rows = store.measurements(GPU, data)
    assert counts["runs"] == sum(len(samples.time_us) for row in rows for samples in row.samples)
    assert counts["readings"] == 12 * len(store.records(GPU, schema.Reading, data))
    assert "20,000 are needed" in timer_tables.samples_line(GPU, data)


def test_pages_show_what_there_is(data: Path) -> None:
    found = timer_tables.pools(store.records(GPU, schema.Reading, data))
    table = timer_tables.timers_table(found)
    assert table.index(FIRST.label) < table.index(SMALL.label)
    assert "4 of 8 medians are within 2 %" in table
    assert "the host: 20.0 µs" in table
    assert timer_tables.missing_timers(found) == ""
    zeros = timer_tables.zeros_table(found)
    assert "sustained" in zeros
    assert "0.970" in zeros
    assert "CUPTI" in timer_tables.cache_table(found)
    chart = timer_tables.timers_chart(found)
    for text in (table, zeros, timer_tables.cache_table(found), chart.provenance):
        assert synthetic.gpu(GPU).name in text
    assert "NVBench, hot L2" in chart.alt
    assert chart.data_files == (f"{GPU}/readings/{synthetic.RUN}.jsonl",)
    clocks = timer_tables.clock_table(select.load(GPU, data))
    assert "power limit" in clocks or "nothing" in clocks
    assert timer_tables.summary(found, ())["compared"] == 16


def test_pages_name_a_timer_that_was_not_there(tmp_path: Path) -> None:
    write(tmp_path, [reading("16_ones_column", FIRST, timer, 500.0) for timer in ("events", "torch-profiler")])
    assert "NVBench (`pip install cuda-bench`)" in timer_tables.missing_timers(
        timer_tables.pools(store.records(GPU, schema.Reading, tmp_path))
    )


def test_pages_show_starts(data: Path) -> None:
    for name in ("16_ones_column", "sdpa_cudnn"):
        for run, at, boot, slower in BOOTS:
            store.append(data / GPU / "runs" / f"{run}.jsonl", started(name, at, boot, slower, run=run))
    found = timer_tables.spreads(GPU, data)
    table = timer_tables.spread_table(found)
    assert "start 3, µs" in table
    assert "2026-01-02 03:00 UTC, 2026-02-02 03:00 UTC, 2026-03-02 03:00 UTC" in table
    assert "2026-03-02 03:00 UTC, 2026-03-02 03:00 UTC" not in table
    assert "the runs were on 1 GPU (NVIDIA H200)." in table
    chart = timer_tables.spread_chart(found)
    assert "start 3" in chart.alt


@pytest.mark.parametrize(
    ("draw", "command"),
    [
        (timer_tables.timers_chart, "flashlab method"),
        (timer_tables.spread_chart, "flashlab bench --suite first"),
        (lambda _: timer_tables.clock_table(select.load("")), "flashlab bench --suite peers"),
    ],
)
def test_pages_say_that_nothing_is_there(draw: Any, command: str) -> None:
    with pytest.raises(NoDataError, match=command):
        draw(())
