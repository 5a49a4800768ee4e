"""Sliding windows and soft caps on a GPU: right against float64, in graphs, compiled, and cheaper than all keys."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

import flashlab
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.run import gpu
from flashlab.run.attention import prepare

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
STAGES = [stage.id for stage in registry.STAGES.values() if stage.features]


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> str:
    entry = registry.get(request.param)
    if gpu.info().arch not in entry.archs:
        pytest.skip(f"needs {entry.needs}")
    return entry.id


def qkv(problem: Problem) -> list[Any]:
    made = torch.Generator(device="cuda").manual_seed(problem.q_len)
    lengths = ((problem.q_heads, problem.q_len), *((problem.kv_heads, problem.kv_len),) * 2)
    return [
        torch.randn(problem.batch, heads, length, problem.head_dim, generator=made, device="cuda").to(
            getattr(torch, problem.dtype)
        )
        for heads, length in lengths
    ]


def right(problem: Problem, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64, by the definition."""
    group = problem.q_heads // problem.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / problem.head_dim**0.5
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    apart = torch.arange(problem.kv_len, device="cuda") - torch.arange(problem.q_len, device="cuda")[:, None]
    apart -= problem.kv_len - problem.q_len
    left, right_ = problem.reach
    scores.masked_fill_((apart < -left) | (apart > right_), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.where(lse.isneginf()[..., None], 0.0, (scores - lse[..., None]).exp() @ v), lse


@pytest.mark.parametrize("seed", range(40))
def test_any_window_and_cap(stage: str, seed: int) -> None:
    rng = random.Random(seed)
    problem = Problem(
        batch=rng.choice([1, 3]),
        q_heads=4,
        kv_heads=rng.choice([1, 2, 4]),
        q_len=rng.choice([1, 64, 129, 511, 1000, 2048]),
        kv_len=rng.choice([1, 65, 128, 777, 1500, 3000]),
        head_dim=rng.choice([64, 128]),
        dtype=rng.choice(["float16", "bfloat16"]),
        mask=rng.choice(["full", "causal"]),
        window=(rng.choice([-1, 0, 1, 63, 64, 200, 1024]), rng.choice([-1, -1, 0, 5, 128, 300])),
        softcap=rng.choice([0.0, 0.0, 1.0, 30.0, 50.0]),
    )
    inputs = qkv(problem)
    wanted, wanted_lse = right(problem, *inputs)
    out, lse = flashlab.attention(*inputs, **problem.options, stage=stage, return_lse=True)
    tolerance = 4e-3 if problem.dtype == "float16" else 3e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", [stage.id for stage in registry.DECODE.values() if stage.features])
@pytest.mark.parametrize("seed", range(20))
def test_decoding_in_any_window(name: str, seed: int) -> None:
    rng = random.Random(seed)
    problem = Problem(
        batch=rng.choice([1, 4, 64]),
        q_heads=rng.choice([8, 16]),
        kv_heads=rng.choice([1, 2, 8]),
        q_len=rng.choice([1, 1, 2, 4]),
        kv_len=rng.choice([1, 65, 1500, 3000, 8192]),
        head_dim=rng.choice(registry.get(name).head_dims),
        dtype=rng.choice(["float16", "bfloat16"]),
        mask=rng.choice(["full", "causal"]),
        window=(rng.choice([-1, 0, 1, 63, 64, 200, 1024]), rng.choice([-1, -1, 0, 5])),
        softcap=rng.choice([0.0, 0.0, 1.0, 50.0]),
    )
    if registry.get(name).why_not(problem, gpu.info().arch):
        pytest.skip(f"{name} does not run {problem.label}")
    q, k, v = qkv(problem)
    wanted, wanted_lse = right(problem, q, k, v)
    first_seen = problem.kv_len - problem.q_len - problem.reach[0]
    for x in (k, v):
        x[:, :, : max(0, first_seen)] = torch.nan
    out, lse = flashlab.attention(q, k, v, **problem.options, stage=name, return_lse=True)
    tolerance = 4e-3 if problem.dtype == "float16" else 3e-2
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=5e-3, rtol=5e-3)


def test_keys_outside_the_window_may_hold_anything(stage: str) -> None:
    """Tiles without a key of the window are not read: NaN in one would show."""
    problem = Problem.parse("1x4x2x128x8192x128", dtype="bfloat16", mask="causal", window=(500, -1))
    q, k, v = qkv(problem)
    wanted, _ = right(problem, q, k, v)
    for x in (k, v):
        x[:, :, : 8192 - 128 - 500 - 128] = torch.nan
    out = flashlab.attention(q, k, v, **problem.options, stage=stage)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)


def test_repeated_calls_and_graphs_keep_windows_apart(stage: str) -> None:
    problem = Problem.parse("2x4x700x64", mask="causal")
    inputs = qkv(problem)
    asked = ({}, {"window": (100, None)}, {"window": (10, None)}, {"softcap": 3.0}, {"softcap": 1.0})
    calls = [lambda how=how: flashlab.attention(*inputs, causal=True, stage=stage, **how) for how in asked]
    first = [call() for call in calls]
    assert all(not torch.equal(one, other) for i, one in enumerate(first) for other in first[:i])
    for _ in range(3):
        assert all(torch.equal(call(), one) for call, one in zip(calls, first, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls[1]()
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first[1])


def test_the_operator_compiles_with_a_window(stage: str) -> None:
    operators = importlib.import_module("flashlab.torch")
    inputs = qkv(Problem.parse("2x4x300x64"))

    def windowed(*x: Any) -> Any:
        return operators.attention(*x, causal=True, window=(64, None), softcap=20.0, stage=stage)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(windowed, fullgraph=True)(*inputs), windowed(*inputs))


def test_time_falls_with_the_window(stage: str) -> None:
    inputs = qkv(Problem.parse("2x16x8192x128", dtype="bfloat16"))

    def milliseconds(**how: Any) -> float:
        call = prepare(*inputs, causal=True, stage=stage, **how)
        times = []
        for _ in range(8):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in "12")
            began.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        return min(times)

    whole = milliseconds()
    # An eighth of the keys that a query sees on average, and what a tile too many at either end costs.
    assert milliseconds(window=(511, None)) < 0.4 * whole
    assert milliseconds(window=(4095, None)) < whole
