"""Kinds of inputs on a GPU: the same recipe as on a CPU, and a run that measures them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import Run, read_run

from flashlab.core import inputs
from flashlab.core.problem import DTYPES, MASKS, Problem
from flashlab.kernels import peers, registry
from flashlab.measure import bench
from flashlab.measure.check import check_stages
from flashlab.measure.options import Options, Plan
from flashlab.verify.oracle import make_torch_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DRAWN = [name for name in inputs.KINDS if name != inputs.TRAINED]
SMALL = Problem.parse("2x4x2x130x300x64", mask="causal")
STAGES = [stage_id for stage_id in registry.STAGES if stage_id in ("00_naive", "12_persistent", "13_overlap")]


def _run(folder: Path) -> Run:
    path = bench.run(
        [replace(SMALL, inputs=name) for name in inputs.KINDS],
        stages=STAGES,
        peers=["sdpa", "sdpa_math", "flex"],
        plan=Plan(samples=5, min_samples=3, cold_samples=0, sustained_seconds=0.2, sustained_shapes=None),
        ceilings=False,
        options=Options(data=folder, timeout_s=120),
    )
    return read_run(path)


ASIDE = {"run": _run}


@pytest.fixture(scope="module")
def run(aside: Callable[[str], Run]) -> Run:
    return aside("run")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAWN)
def test_a_gpu_makes_the_inputs_that_a_cpu_makes_of_the_same_numbers(name: str, dtype: Any, mask: Any) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    pytest.importorskip("cupy", reason="needs CuPy: pip install 'flashlab[gpu]'")
    problem = replace(SMALL, dtype=dtype, mask=mask, inputs=name)
    generator = torch.Generator(device="cuda").manual_seed(7)
    q_shape, kv_shape = (2, 4, 130, 64), (2, 2, 300, 64)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda") for shape in (q_shape, kv_shape, kv_shape))
    on_host = q.cpu().numpy(), k.cpu().numpy()
    inputs.change(name, *on_host, causal=problem.causal, xp=np)
    made = make_torch_inputs(problem, 7)
    wanted = [torch.from_numpy(x).to(v.to(getattr(torch, dtype)).dtype) for x in on_host] + [
        v.to(getattr(torch, dtype))
    ]
    for got, want in zip(made, wanted, strict=True):
        assert got.dtype == getattr(torch, dtype)
        assert got.is_contiguous()
        # Sums of squares may differ in their last bit.
        close = {"rtol": 2e-2, "atol": 1e-3} if name == "one_hot" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got.cpu(), want.cpu(), **close)


@pytest.mark.parametrize("name", ["one_hot", "scale4"])
def test_inputs_are_whole_on_a_stream_that_waits_for_no_other(name: str) -> None:
    """A benchmark's stream is torch's alone: CuPy's, on which a kind is made, is busy here when torch goes on."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    pytest.importorskip("cupy", reason="needs CuPy: pip install 'flashlab[gpu]'")
    problem = replace(SMALL, inputs=name)
    wanted = make_torch_inputs(problem, 7)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles, on the default stream
    with torch.cuda.stream(torch.cuda.Stream()):
        made = make_torch_inputs(problem, 7)
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, wanted))


def test_normal_inputs_are_torchs_own_numbers() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")
    generator = torch.Generator(device="cuda").manual_seed(3)
    shapes = ((2, 4, 130, 64), (2, 2, 300, 64), (2, 2, 300, 64))
    for made, shape in zip(make_torch_inputs(SMALL, 3), shapes, strict=True):
        assert torch.equal(made, torch.randn(shape, generator=generator, device="cuda").half())


@pytest.mark.parametrize("name", DRAWN)
def test_a_run_checks_and_times_every_kind(name: str, run: Run) -> None:
    rows = [row for row in run.measurements if row.problem.inputs == name]
    assert {row.name for row in rows} == {*STAGES, "sdpa", "sdpa_math", "flex"}
    for row in rows:
        if row.name in peers.PEERS and row.status in ("missing", "unsupported"):
            continue
        assert row.status == "ok", (row.name, row.reason)
        assert row.samples_of() is not None
        assert row.samples_of("sustained") is not None
        assert row.trained is None


def test_trained_inputs_that_cannot_be_made_are_named(run: Run) -> None:
    rows = [row for row in run.measurements if row.problem.inputs == inputs.TRAINED]
    assert {row.name for row in rows} == {*STAGES, "sdpa", "sdpa_math", "flex"}
    assert {row.status for row in rows} == {"unsupported"}  # four heads, two of them shared
    assert all(row.reason.startswith("trained inputs: ") for row in rows)


@pytest.mark.parametrize("name", DRAWN)
def test_stages_are_right_on_every_kind(name: str) -> None:
    for module in ("torch", "cupy"):
        pytest.importorskip(module, reason=f"needs {module}: pip install 'flashlab[gpu]'")
    options: dict[str, Any] = {"lengths": [(130, 300), (65, 66)], "layouts": ["contiguous"], "record": False}
    found = check_stages(list(registry.STAGES), inputs=[name], **options)
    assert found.rows
    assert not found.failures, [(row.stage, row.problem.label, row.reason) for row in found.failures]
