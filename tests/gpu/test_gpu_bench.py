"""Measuring on a GPU: clocks, spread, ceilings, and what a broken kernel costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from shared import Run, read_run

from flashlab.core.errors import MissingPackageError, UnsupportedError
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import peers, registry
from flashlab.measure import bench, ceilings, timer, tune
from flashlab.measure.options import BURSTS, Options, Plan
from flashlab.query import roofline
from flashlab.record import schema, store
from flashlab.run import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SMALL = Problem.parse("1x2x130x64")
ENDLESS = "while (p.q_len > 0) __nanosleep(1000u);\n  if (q_row >= p.q_len) return;"
ILLEGAL = "if (q_row >= p.q_len) return;\n  *reinterpret_cast<volatile int*>(0x10) = 1;"


@pytest.fixture(scope="module")
def backend(quiet: None) -> timer.CudaBackend:
    return timer.CudaBackend(0)


def _broken(folder: Path, name: str, replacement: str) -> Path:
    text = registry.get("00_naive").source.read_text(encoding="utf-8")
    line = "if (q_row >= p.q_len) return;"
    assert text.count(line) == 1
    path = folder / f"{name}.cu"
    path.write_text(text.replace(line, replacement), encoding="utf-8")
    return path


def _crash(folder: Path) -> Run:
    """A kernel that crashes, among some that do not."""
    first = bench.run(
        [SMALL],
        stages=["00_naive"],
        peers=["sdpa", "sdpa_math", "fa3"],
        sources={"00_naive": _broken(folder, "illegal", ILLEGAL)},
        plan=Plan(samples=7, cold_samples=3),
        ceilings=["launch"],
        options=Options(data=folder / "data", timeout_s=60),
    )
    return read_run(first)


def _hang(folder: Path) -> Run:
    """A kernel that never ends, beside one that does."""
    path = bench.run(
        [SMALL],
        stages=["00_naive"],
        peers=[],
        sources={"00_naive": _broken(folder, "endless", ENDLESS)},
        plan=Plan(samples=7, cold_samples=0),
        ceilings=False,
        options=Options(data=folder / "data", timeout_s=30),
    )
    return read_run(path)


def _with_lse(folder: Path) -> Run:
    """Stages with second rows, beside libraries of either layout."""
    path = bench.run(
        [Problem.parse("2x4x2x256x256x64", dtype="bfloat16", mask="causal")],
        stages=["08_swizzle", list(registry.STAGES)[-1]],
        peers=["sdpa", "sdpa_flash", "fa3", "fa4"],
        plan=Plan(samples=7, cold_samples=3, sustained_seconds=0.5, sustained_shapes=None, lse=True),
        ceilings=False,
        options=Options(data=folder / "data", timeout_s=120),
    )
    return read_run(path)


TUNED = next(stage for stage in registry.STAGES.values() if stage.params)
TUNABLE, CHOICES = next((name, param.choices) for name, param in TUNED.params.items())
ASIDE = {
    "broken_run": _crash,
    "endless_run": _hang,
    "lse_run": _with_lse,
    "variants": lambda folder: tune.time(
        [tune.Task(tune.Key(TUNED.id, SMALL), tuple({TUNABLE: value} for value in CHOICES), ("sdpa",))],
        plan=BURSTS,
        options=Options(data=folder),
    ),
}


@pytest.fixture(scope="module")
def broken_run(aside: Callable[[str], Run]) -> Run:
    return aside("broken_run")


@pytest.fixture
def endless_run(aside: Callable[[str], Run]) -> Run:
    return aside("endless_run")


@pytest.fixture
def lse_run(aside: Callable[[str], Run]) -> Run:
    return aside("lse_run")


@pytest.fixture
def variants(aside: Callable[[str], Path]) -> Path:
    return aside("variants")


def test_an_illegal_address_costs_its_own_row_only(broken_run: Run) -> None:
    rows = {row.name: row for row in broken_run.measurements}
    assert rows["00_naive@illegal"].status == "crashed"
    assert "ILLEGAL_ADDRESS" in rows["00_naive@illegal"].reason
    assert rows["00_naive"].status == "ok", rows["00_naive"].reason
    assert rows["sdpa"].status == "ok", rows["sdpa"].reason
    assert rows["sdpa_math"].status == "ok", rows["sdpa_math"].reason
    assert not broken_run.damage


def test_a_missing_or_unfit_peer_is_named(broken_run: Run) -> None:
    row = {row.name: row for row in broken_run.measurements}["fa3"]
    assert row.status in ("missing", "unsupported")
    assert "fa3" in row.reason


def test_a_run_carries_what_it_takes_to_judge_it(broken_run: Run) -> None:
    row = {row.name: row for row in broken_run.measurements}["00_naive"]
    assert row.cubin is not None
    assert row.cubin.registers > 0
    assert row.cubin.sass["total"] > 0
    assert row.cubin.blocks_per_sm
    assert all(s.conditions is not None for s in row.samples)
    assert {s.cache for s in row.samples} == {"hot", "cold"}
    assert all(s.sm_clock_mhz for s in row.samples)
    assert [c.name for c in broken_run.ceilings] == ["launch"]
    data = broken_run.path.parents[2]
    assert store.verify(row.gpu.slug, data) == ()


def test_an_endless_kernel_costs_its_own_row_only(endless_run: Run) -> None:
    rows = {row.name: row for row in endless_run.measurements}
    assert rows["00_naive@endless"].status == "timeout"
    assert rows["00_naive"].status == "ok", rows["00_naive"].reason


def test_stages_have_second_rows_and_libraries_say_layout_and_log_sum_exp(lse_run: Run) -> None:
    assert not lse_run.damage
    rows = {row.name: row for row in lse_run.measurements}
    second = {row.name: row for row in lse_run.with_lse}
    ours = {name: row for name, row in rows.items() if row.kind == "stage"}
    assert set(second) == set(ours)
    for name, row in ours.items():
        assert (row.status, second[name].status) in (("ok", "ok"), ("unsupported", "unsupported")), row.reason
        assert (row.lse, second[name].lse) == (False, True)
        if row.status == "ok":
            assert second[name].cubin == row.cubin, "the log-sum-exp is asked for when called, not when compiled"
            assert [s.cache for s in second[name].samples if s.regime == "burst"] == ["hot"]
    assert any(row.samples_of("sustained") for row in second.values())
    for name in ("sdpa", "sdpa_flash", "fa3", "fa4"):
        row = rows[name]
        if row.status == "ok":
            assert (row.layout == "bshd") == (name in ("fa3", "fa4"))
            assert row.lse == peers.get(name).wrote_lse(row.choice)
    assert rows["sdpa"].status == "ok", rows["sdpa"].reason
    assert rows["sdpa"].choice in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


@pytest.mark.parametrize("name", ["sdpa_flash", "fa3", "fa4", "triton_fa2"])
def test_a_library_allocates_a_log_sum_exp_where_the_registry_says_so(name: str) -> None:
    """What a call has allocated at most beyond its output; the others' workspaces would hide it."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    problem = Problem.parse("4x16x1024x64", dtype="bfloat16")
    peer = peers.get(name)
    try:
        peer.require(problem, compute_capability=gpu.info().compute_capability)
    except (MissingPackageError, UnsupportedError) as error:
        pytest.skip(str(error))
    shape = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    given = peers.in_layout(peer.layout, *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)))
    with torch.no_grad():
        attend = peer.build(problem)
        for _ in range(2):  # what the first call compiles and keeps is no part of it
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = attend(*given)
            torch.cuda.synchronize()
            beyond = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
            del out
    lse_bytes = 4 * problem.batch * problem.q_heads * problem.q_len
    assert (beyond >= lse_bytes) == peer.wrote_lse(), (beyond, lse_bytes)


def test_spread_at_the_first_shape(quiet: None, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    problem = Problem.parse(FIRST_SHAPE)
    fastest = registry.best(problem, gpu.info().arch).id
    plan, options = Plan(sustained_seconds=1.0), Options(data=tmp_path)
    path = bench.run([problem], stages=[fastest], peers=["sdpa"], ceilings=False, plan=plan, options=options)
    rows = {row.name: row for row in read_run(path).measurements}
    row = rows[fastest]
    assert row.status == "ok", row.reason
    hot, sustained = row.samples_of(), row.samples_of("sustained")
    assert hot is not None
    assert sustained is not None
    assert len(hot.time_us) >= 30
    assert hot.cv_percent < 2, hot
    cold = row.samples_of("burst", "cold")
    assert cold is not None
    assert cold.median_us > 0.9 * hot.median_us
    top = gpu.info().record.max_sm_clock_mhz
    assert top is not None
    assert median(hot.sm_clock_mhz) > timer.FULL_CLOCK * top, "a burst is measured at the highest clock"
    assert sustained.continuous_s is not None
    assert sustained.continuous_s >= 1.0
    assert hot.cycles_per_score is not None
    assert hot.cycles_per_score == pytest.approx(sustained.cycles_per_score, rel=0.1)
    assert median(hot.call_clock_mhz) <= 1.01 * median(hot.sm_clock_mhz)


def test_variants_are_tuning_records(variants: Path) -> None:
    assert variants.parent.name == "tuning"
    found = [
        record
        for record in store.records(gpu.info().slug, schema.Tuning, variants.parents[2])
        if record.stage == TUNED.id  # the library beside them has no tunables
    ]
    assert [record.parameters[TUNABLE] for record in found if record.status == "ok"]
    assert {record.parameters[TUNABLE] for record in found} == set(CHOICES)
    for record in found:
        if record.status == "ok":
            assert record.cubin is not None
            assert record.cubin.parameters == record.parameters


def test_the_clock_on_the_chip(backend: timer.CudaBackend) -> None:
    reading = backend.sample(lambda: None, calls=1, spin_us=500, cold=False)
    limit = gpu.info().record.max_sm_clock_mhz
    assert limit is not None
    assert 100 < reading.sm_clock_mhz <= 1.05 * limit
    assert not reading.starved


def test_the_clock_of_the_calls_is_read_between_two_spins(backend: timer.CudaBackend) -> None:
    limit = gpu.info().record.max_sm_clock_mhz
    assert limit is not None
    readings = [backend.sample(lambda: None, calls=1, spin_us=500, cold=False) for _ in range(5)]
    for reading in readings:
        assert reading.call_clock_mhz is not None, "the spins ran on two SMs"
    # Work that draws little power runs at the clock of the spin beside it.
    buffer = gpu.Zeroed(0, 64)
    params = [timer.MicroParams(buffer.pointer, None, 500_000, 1)]
    quiet = gpu.Launch(timer.micro("spin", 0), grid=(1, 1, 1), block=(1, 1, 1), smem_bytes=0, params=params, stream=0)
    reading = backend.sample(quiet, calls=2, spin_us=500, cold=False)
    assert reading.call_clock_mhz == pytest.approx(reading.sm_clock_mhz, rel=0.01)


def test_a_host_that_is_late_is_noticed(backend: timer.CudaBackend) -> None:
    import time

    late = backend.sample(lambda: time.sleep(0.02), calls=1, spin_us=100, cold=False)
    assert late.starved
    assert late.enqueue_us > 10_000


def test_two_spins_take_twice_as_long_as_one(backend: timer.CudaBackend) -> None:
    # Known durations, to judge the timer by: spins on the chip's nanosecond timer.
    def spin(nanoseconds: int) -> timer.Run:
        buffer = gpu.Zeroed(0, 64)
        launch = gpu.Launch(
            timer.micro("spin", 0),
            grid=(1, 1, 1),
            block=(1, 1, 1),
            smem_bytes=0,
            params=[timer.MicroParams(buffer.pointer, None, nanoseconds, 1)],
            stream=0,
        )

        def run() -> Any:
            assert buffer
            launch()

        return run

    found = timer.Timer(backend).burst({"one": spin(100_000), "two": spin(200_000)}, samples=9)
    assert found["one"].median_us == pytest.approx(100, rel=0.06)
    assert found["two"].median_us == pytest.approx(200, rel=0.04)


def test_ceilings_are_plausible(backend: timer.CudaBackend) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    found = {name: ceilings.measure(name, timer.Timer(backend), 0, 0)["value"] for name in ceilings.CEILINGS}
    sheet = roofline.DATASHEETS.get(gpu.info().slug)
    for name, value in found.items():
        assert value > 0
        peak = sheet.peak(name) if sheet else None
        if peak:
            # The clock may pass the sheet's boost clock a little.
            assert 0.3 * peak < value < 1.15 * peak, (name, value, peak)
    assert found["l2_read"] > found["copy"] / 2
    assert found["half2_fma"] > found["fp32_fma"]


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize(
    "problem",
    [
        Problem.parse("2x4x256x64", dtype="bfloat16", mask="causal"),
        Problem.parse("1x4x2x128x256x64", mask="causal"),
        Problem.parse("1x4x4x128x256x64", dtype="bfloat16"),
        Problem.parse("3x8x2x1x208x128", dtype="bfloat16"),
    ],
    ids=lambda problem: problem.label,
)
def test_peers_agree_with_torchs_unfused_answer(name: str, problem: Problem) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    peer = peers.get(name)
    capability, free_bytes = gpu.info().compute_capability, gpu.memory_free_bytes(0)
    try:
        peer.require(problem, compute_capability=capability, free_bytes=free_bytes)
    except (MissingPackageError, UnsupportedError) as error:
        pytest.skip(str(error))
    dtype = getattr(torch, problem.dtype)
    q = torch.randn(problem.batch, problem.q_heads, problem.q_len, problem.head_dim, device="cuda").to(dtype)
    k, v = (
        torch.randn(problem.batch, problem.kv_heads, problem.kv_len, problem.head_dim, device="cuda").to(dtype)
        for _ in range(2)
    )
    with torch.no_grad():
        got = peers.bhsd_view(peer.layout, peer.build(problem)(*peers.in_layout(peer.layout, q, k, v)))
    assert got.shape == q.shape
    group = problem.q_heads // problem.kv_heads
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.float() @ keys.transpose(-2, -1) * problem.head_dim**-0.5
    if problem.causal:
        seen = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool, device="cuda")
        scores.masked_fill_(~seen.tril(problem.kv_len - problem.q_len), float("-inf"))
    wanted = torch.softmax(scores, dim=-1) @ values
    if peer.precision == "input":
        torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)
    else:  # three bits of a mantissa: single values are off by a sixteenth
        assert (got.float() - wanted).square().mean() < 0.07**2 * wanted.square().mean()


def test_calls_in_a_step_are_timed_apart_from_the_kernels_before_them(quiet: None, tmp_path: Path) -> None:
    problem = Problem.parse("4x32x8x1x8192x128")
    path = bench.run(
        [problem],
        stages=["d0_split_kv", "d2_early_launch", "d12_paged_ends"],
        peers=["sdpa"],
        plan=Plan(samples=7, cold_samples=0, step_samples=7, sustained_seconds=0.0),
        ceilings=False,
        options=Options(data=tmp_path, timeout_s=60),
    )
    rows = read_run(path).measurements
    assert {row.name for row in rows} == {"d0_split_kv", "d2_early_launch", "d12_paged_ends", "sdpa"}
    for row in rows:
        step, rotating = row.samples_of("burst", "step"), row.samples_of("burst", "rotating")
        assert step is not None
        assert rotating is not None
        assert 0.7 < step.median_us / rotating.median_us < 1.5, row.name
