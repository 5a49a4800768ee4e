"""A model trains on the GPU in a few steps, and its activations are what its own attention took."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flashlab.core.problem import Problem
from flashlab.measure import trained

torch = pytest.importorskip("torch", reason="needs torch: `pip install 'flashlab[gpu]'`")

STEPS = 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=trained.CONFIGS.values(), ids=lambda config: f"D{config.head_dim}")
def model(request: pytest.FixtureRequest, cache: None) -> dict[str, Any]:
    before = torch.cuda.memory_allocated()
    description = trained.train(replace(request.param, steps=STEPS))
    assert torch.cuda.memory_allocated() - before < 1 << 28, "weights stay on the GPU"
    return description


def test_it_trains(model: dict[str, Any]) -> None:
    assert model["gpu"] == torch.cuda.get_device_name()
    assert model["loss"] < 0.7 * math.log(256)
    assert model["held_out_loss"] < 0.7 * math.log(256)
    assert trained.describe(model["head_dim"]) == model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", ["16x16x2048", "4x16x8192", "1x16x515"])
def test_activations(model: dict[str, Any], shape: str, dtype: str) -> None:
    problem = Problem.parse(f"{shape}x{model['head_dim']}", dtype=dtype, mask="causal")
    assert trained.why_not(problem) is None
    shown = (problem.batch, problem.q_heads, problem.q_len, problem.head_dim)
    sums = set()
    found = trained.activations(problem)
    for tensors in found:
        for x in tensors:
            assert (x.is_cuda, x.is_contiguous(), x.dtype, x.shape) == (True, True, getattr(torch, dtype), shown)
            assert x.isfinite().all().item()
            sums.add(x.double().sum().item())
    assert len(sums) == 3 * len(found)


def test_attention_of_the_activations_is_the_models_own(model: dict[str, Any]) -> None:
    config = trained.Config(**model["config"])
    path = trained._folder(config.head_dim) / f"{model['digest']}.pt"
    weights = trained._on(trained._load(path), "cuda")
    hidden = torch.ones(600, 600, dtype=torch.bool, device="cuda").triu(1)
    layers = []

    def see(layer: int, q: Any, k: Any, v: Any, out: Any) -> None:
        layers.append(layer)
        assert {x.dtype for x in (q, k, v, out)} == {torch.bfloat16}
        scores = q.double() @ k.double().transpose(-1, -2) * config.head_dim**-0.5
        exact = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()
        assert (out.double() - exact).abs().max().item() < 0.02 * exact.abs().max().item()

    with torch.no_grad():
        trained.forward(weights, config, trained._windows(weights["held_out"], 2, 600), see)
    assert layers == list(range(config.layers))
