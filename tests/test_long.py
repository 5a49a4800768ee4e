"""Many keys: every index of the kernels that `attention` takes for them, on a CPU; and sizes that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shared import needs_compiler

from flashlab.core.errors import ShapeError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.run.arrays import HOST, DeviceArray, contiguous_strides
from flashlab.run.attention import emulate
from flashlab.run.plan import plan
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import Oracle, check

STAGES = ("d0_split_kv", list(registry.CUDA_STAGES)[-1], "08_swizzle")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1 << 17) + 3, id="more than 16 bits count"),
        pytest.param((1 << 20) + 3, id="a million", marks=pytest.mark.exhaustive),
    ],
)
def inputs(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Of one row, the last of whose keys decides it: a kernel that loses its way before does not see that key."""
    q, k, v = make_inputs(Problem(batch=1, q_heads=1, kv_heads=1, q_len=1, kv_len=request.param, head_dim=64), seed=0)
    k[:, :, -1] = 4 * q[:, :, 0]
    return q, k, v


@pytest.fixture(scope="module")
def oracle(inputs: tuple[Any, ...]) -> Oracle:
    """Asked once for all stages."""
    return Oracle()


@needs_compiler
@pytest.mark.parametrize("stage", STAGES)
def test_the_last_of_many_keys_is_seen(stage: str, inputs: tuple[Any, ...], oracle: Oracle) -> None:
    found = emulate(*inputs, stage=stage, causal=True)
    out = np.asarray(found.out)
    assert check(out, found.lse, *inputs, causal=True, dtype="float16", oracle=oracle).reason == ""
    assert abs(out[0, 0, 0] - inputs[2][0, 0, -1]).max() < 0.1


def _array(*shape: int) -> DeviceArray:
    strides = contiguous_strides(shape)
    return DeviceArray(
        pointer=1 << 20, shape=shape, strides=strides, dtype="float16", device=HOST, owner=None, library="other"
    )


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        ((1, 1, 1, 64), (1, 1, (1 << 29) + 1, 64), "kv_len: wanted at most 536870912"),
        ((1 << 15, 1 << 15, 33, 64), (1 << 15, 1, 1, 64), r"q: wanted fewer than 2\^31 tiles of 16 rows"),
        ((1, 1 << 16, 1, 64), (1, 1, 1, 64), "q_heads: wanted at most 65535"),
    ],
)
def test_what_a_kernel_cannot_count_is_refused(q: tuple[int, ...], k: tuple[int, ...], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        plan(_array(*q), _array(*k), _array(*k), arch="sm_90a")


def test_what_it_can_count_is_taken() -> None:
    k = _array(1, 1, 1 << 29, 64)
    assert plan(_array(1, 1, 1, 64), k, k, arch="sm_90a").aligned
