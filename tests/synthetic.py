"""Made-up records, valid by the schema, for tests of what reads and shows data. Never written under data/."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashlab.build import sass
from flashlab.core.paths import DATA
from flashlab.core.problem import Cache, Problem, Regime, suite
from flashlab.kernels import peers, registry
from flashlab.measure.profile import METRICS
from flashlab.record import checks, schema, store
from flashlab.record.schema import (
    Ceiling,
    Conditions,
    CubinFields,
    Gpu,
    LineStalls,
    Machine,
    Measurement,
    Samples,
    Source,
    StageProfile,
    Verdict,
)

COMMIT = "0123abcdef0123abcdef0123abcdef0123abcdef"
RUN = "20260102T030405Z-0123abc"
HOSTILE = (
    '<script>window.hacked=1</script>"><img src=x onerror=window.hacked=1>]]>'
    '<a href="javascript:window.hacked=1">a</a> '
    "[b](javascript:window.hacked=1) | table | {{ x }} {% x %} ${x} `<i>`"
)
"""What a page must show as it is, and never run, link or take for its own."""
MISSING_PEER_REASON = f"made up: its package is not installed {HOSTILE}"

_STAGE_TFLOPS = (2.6, 7.4, 13.1, 21.0, 17.5, 64.0, 118.0, 205.0, 230.0, 380.0, 440.0, 470.0, 490.0, 510.0)
_PEER_TFLOPS = (441.0, 457.0, 289.0, 124.0, 41.0, 61.0, 378.0, 489.0)
_LIBRARIES = [name for name in peers.PEERS if peers.is_rival(name)]
_SOFTWARE = {"flashlab": "0.1.0", "numpy": "2.4.6", "torch": "2.11.0"}


def gpu(slug: str = "nvidia-h200") -> Gpu:
    return Gpu(
        slug=slug,
        name=slug.replace("-", " ").upper(),
        compute_capability=(9, 0),
        sm_count=132,
        max_sm_clock_mhz=1980.0,
        memory_bytes=150 * 10**9,
        l2_bytes=50 * 2**20,
        power_limit_w=700.0,
        driver="580.00",
        fingerprint="0123456789ab",
    )


def own_gpu(folder: Path) -> dict[str, Any]:
    """As a worker names it. Whoever measures locks a GPU by its fingerprint, and tests run side by side."""
    return {**gpu().model_dump(mode="json"), "fingerprint": hashlib.sha256(str(folder).encode()).hexdigest()[:12]}


def _tflops(name: str, problem: Problem) -> float:
    if name in registry.RUNGS:
        peak = _STAGE_TFLOPS[list(registry.RUNGS).index(name) % len(_STAGE_TFLOPS)]
    else:
        peak = _PEER_TFLOPS[_LIBRARIES.index(name) % len(_PEER_TFLOPS)] if name in _LIBRARIES else 900.0
    size = problem.flops / (problem.flops + 2e10)
    return peak * size * (0.8 if problem.causal else 1.0) * (1.25 if problem.head_dim == 128 else 1.0)


def _samples(rng: np.random.Generator, time_us: float, regime: Regime, cache: Cache) -> Samples:
    clock = 1980.0 if regime == "burst" else 1740.0
    slower = {"hot": 1.0, "cold": 1.08}[cache] * 1980.0 / clock
    times = time_us * slower * (1 + rng.gamma(2.0, 0.003, size=40))
    return Samples(
        regime=regime,
        cache=cache,
        calls=10,
        time_us=tuple(float(t) for t in times),
        sm_clock_mhz=tuple(float(c) for c in clock - rng.integers(0, 3, size=40) * 15),
        call_clock_mhz=tuple(float(c) for c in clock - rng.uniform(0, 200, size=40)),
        conditions=Conditions(
            sm_clock_mhz_min=clock - 30,
            sm_clock_mhz_max=clock,
            power_w_max=698.0 if regime == "sustained" else 240.0,
            power_w_mean=650.0 if regime == "sustained" else 200.0,
            temperature_c_max=61.0,
            throttle_reasons=("sw_power_cap",) if regime == "sustained" and time_us > 1000 else (),
            energy_j_per_call=6.5e-4 * time_us if regime == "sustained" else None,
        ),
        continuous_s=5.0 if regime == "sustained" else None,
    )


def _cubin(name: str, problem: Problem) -> CubinFields:
    position = list(registry.RUNGS).index(name)
    mix = {kind: 10 + 7 * i for i, kind in enumerate(sass.CLASSES) if kind != "total"}
    mix["tensor"] = 0 if position < 4 else 64
    return CubinFields(
        sha256=hashlib.sha256(f"{name} {problem.label}".encode()).hexdigest(),
        arch="sm_90a",
        compiler="NVRTC 13.0",
        parameters=registry.RUNGS[name].parameters(problem.head_dim),
        options=("--std=c++17",),
        registers=64 + 8 * position,
        spill_store_bytes=0,
        spill_load_bytes=0,
        stack_bytes=0,
        static_smem_bytes=0,
        dynamic_smem_bytes=4096 * position,
        threads=128,
        tile_q=64,
        blocks_per_sm=4,
        sass=mix | {"total": sum(mix.values())},
    )


def measurement(
    name: str, problem: Problem, *, run: str = RUN, slug: str = "nvidia-h200", seed: int = 0
) -> Measurement:
    """A sound record of a stage or peer; one that cannot do the problem says so, the last peer is not installed."""
    is_stage = name in registry.RUNGS
    base = {
        "run": run,
        "time": "2026-01-02T03:04:05Z",
        "gpu": gpu(slug),
        "source": Source(commit=COMMIT, dirty=False),
        "software": _SOFTWARE,
        "kind": "stage" if is_stage else "peer",
        "name": name,
        "problem": problem,
    }
    nothing = {"verdict": None, "samples": (), "cubin": None}
    if not is_stage and name == list(peers.PEERS)[-1]:
        return Measurement(**base, **nothing, status="missing", reason=MISSING_PEER_REASON)
    if is_stage and (reason := registry.RUNGS[name].why_not(problem)):
        return Measurement(**base, **nothing, status="unsupported", reason=reason)
    rng = np.random.default_rng([seed, *name.encode(), *problem.label.encode()])
    time_us = problem.flops / _tflops(name, problem) / 1e6
    return Measurement(
        **base,
        status="ok",
        reason="",
        verdict=Verdict(
            passed=True,
            reason="",
            max_abs_error=float(rng.uniform(1e-4, 4e-4)),
            max_abs_limit=1e-3,
            rms_error=1e-5,
            rms_limit=4e-5,
            lse_error=1e-6 if is_stage else None,
            lse_limit=1e-4 if is_stage else None,
            overall_max_error=float(rng.uniform(4e-4, 5e-4)),
            overall_rms_error=1e-5,
        ),
        samples=(
            _samples(rng, time_us, "burst", "hot"),
            _samples(rng, time_us, "burst", "cold"),
            _samples(rng, time_us, "sustained", "hot"),
        ),
        cubin=_cubin(name, problem) if is_stage else None,
    )


def profile(
    name: str,
    problem: Problem,
    *,
    metrics: Mapping[str, float] | None = None,
    samples: Mapping[str, int] | None = None,
    run: str = RUN,
) -> StageProfile:
    """A profile of a stage; with every metric that is asked for where `metrics` is None, else with those."""
    states = {"wait": 60, "short_scoreboard": 30, "selected": 10} if samples is None else dict(samples)
    line = LineStalls(file=f"{name}.cu", line=7, text="O[row] |= exp2f(S[row]);", samples=states)
    cubin = _cubin(name, problem)
    shares = {metric: 5.0 + 3 * position for position, metric in enumerate(METRICS)}
    return StageProfile(
        gpu="NVIDIA H200",
        commit=COMMIT,
        dirty=False,
        metrics=shares if metrics is None else dict(metrics),
        run=run,
        stage=name,
        problem=problem,
        parameters=cubin.parameters,
        cubin_sha256=cubin.sha256,
        tile_q=cubin.tile_q,
        ncu="2025.3.1.0",
        samples=states,
        lines=(line,),
        time="2026-01-02T03:04:05Z",
    )


def _ceilings(slug: str) -> tuple[Ceiling, ...]:
    rng = np.random.default_rng(7)
    values = (
        ("launch", "us", 2.3),
        ("copy", "TB/s", 4.2),
        ("l2_read", "TB/s", 9.1),
        ("fp32_fma", "TFLOP/s", 61.0),
        ("half2_fma", "TFLOP/s", 121.0),
        ("exp2", "Tex2/s", 4.1),
        ("mma_sync_float16", "TFLOP/s", 630.0),
        ("tensor_float16", "TFLOP/s", 735.0),
        ("tensor_bfloat16", "TFLOP/s", 745.0),
    )
    return tuple(
        Ceiling(
            kind="ceiling",
            run=RUN,
            time="2026-01-02T03:04:05Z",
            gpu=gpu(slug),
            source=Source(commit=COMMIT, dirty=False),
            software=_SOFTWARE,
            name=name,
            unit=unit,
            value=value,
            samples=_samples(rng, 100.0, "burst", "hot"),
            how="made up",
        )
        for name, unit, value in values
    )


def ceiling(name: str, slug: str = "nvidia-h200") -> Ceiling:
    """The made-up ceiling of that name."""
    return next(one for one in _ceilings(slug) if one.name == name)


def checks_header(run: str = RUN) -> checks.Header:
    source = Source(commit=COMMIT, dirty=False)
    return checks.Header(run=run, time="2026-01-02T03:04:05Z", gpu=gpu(), source=source, software=_SOFTWARE)


def write_checks(path: Path, rows: Iterable[checks.CheckRow]) -> Path:
    """Write a file of comparisons, named by its run, a line a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (checks_header(path.stem).line(), *(checks.case_line([row]) for row in rows))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_partial(data: Path, slug: str = "nvidia-h100", run: str = "20260202T030405Z-0123abc") -> Path:
    """Write a later run of another GPU, a quarter slower: every second stage and two libraries at one problem."""
    path = data / slug / "runs" / f"{run}.jsonl"
    path.parent.mkdir(parents=True)
    rows = [
        measurement(name, suite("first")[0], run=run, slug=slug)
        for name in (*list(registry.STAGES)[::2], "fa4", "sdpa_cudnn")
    ]
    for row in rows:
        slower = [one.model_copy(update={"time_us": tuple(1.25 * t for t in one.time_us)}) for one in row.samples]
        store.append(path, row.model_copy(update={"samples": tuple(slower)}))
    store.write_machine(Machine(gpu=gpu(slug), host={"processor": "made up"}), data)
    store.write_checksums(slug, data)
    return path


def write_synthetic(data: Path, slug: str = "nvidia-h200", *, problems: Iterable[Problem] | None = None) -> Path:
    """Write one made-up run of every stage and peer over `problems` (the standard suite, where None); its file.

    Raises:
        ValueError: `data` lies in the repository's data folder, where only measurements belong.
    """
    if data.resolve().is_relative_to(DATA):
        raise ValueError(f"wanted a folder outside {DATA}, got {data}: made-up records stay out of the committed data")
    path = data / slug / "runs" / f"{RUN}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        measurement(name, problem, slug=slug)
        for problem in (suite("standard") if problems is None else problems)
        for name in (*registry.STAGES, *_LIBRARIES)
    ]
    # One write rather than records.append for each: that flushes every line to disk.
    path.write_text("".join(map(schema.to_line, [*rows, *_ceilings(slug)])), encoding="utf-8")
    store.write_machine(
        Machine(gpu=gpu(slug), host={"processor": "made up", "cores": "32", "memory": "256 GiB", "system": "Linux"}),
        data,
    )
    store.write_checksums(slug, data)
    return path
