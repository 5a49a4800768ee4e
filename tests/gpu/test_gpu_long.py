"""A million keys and tensors of more than 2^31 elements on a GPU, at every head dim of a stage."""

from __future__ import annotations

from typing import Any

import pytest

import flashlab
from flashlab.kernels import registry
from flashlab.run import gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")

LAST = list(registry.CUDA_STAGES)[-1]
STAGES = ("08_swizzle", LAST, "d0_split_kv", "d2_early_launch")
each = pytest.mark.parametrize(
    ("stage", "head_dim"), [(stage, dim) for stage in STAGES for dim in registry.get(stage).head_dims]
)
CHUNK = 1 << 18


def _able(stage: str, gigabytes: float) -> None:
    if gpu.info().arch not in registry.get(stage).archs:
        pytest.skip(f"needs {registry.get(stage).needs}")
    torch.cuda.empty_cache()
    if gpu.memory_free_bytes(gpu.info().index) < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:g} GB of GPU memory")


def _normal(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _right(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64, without a mask, of a few rows: keys go through in chunks."""
    scale = q.shape[-1] ** -0.5
    parts = []
    for first in range(0, k.shape[2], CHUNK):
        keys, values = (one[:, :, first : first + CHUNK].double() for one in (k, v))
        scores = q.double() @ keys.transpose(-1, -2) * scale
        parts.append((scores.logsumexp(-1), scores.softmax(-1) @ values))
    lse = torch.stack([one for one, _ in parts]).logsumexp(0)
    return sum((one - lse).exp().unsqueeze(-1) * out for one, out in parts), lse


def _check(stage: str, q: Any, k: Any, v: Any, *, causal: bool = False) -> None:
    k[:, :, -1] = 4 * q[:, :, -1]  # the last key decides the last row
    # Summed by the tensor cores, as 08_swizzle does by default, a million probabilities lose more than the limit below.
    params = {"SUM_BY_MMA": 0} if stage == "08_swizzle" else None
    out, lse = flashlab.attention(q, k, v, stage=stage, causal=causal, return_lse=True, params=params)
    rows = slice(-1, None) if causal else slice(None)  # the last row sees every key
    right, right_lse = _right(q[:, :, rows], k, v)
    assert (out[:, :, rows].double() - right).abs().max() < 5e-3
    assert (lse[:, :, rows].double() - right_lse).abs().max() < 1e-3
    assert (out[:, :, -1] - v[:, :, -1]).abs().max() < 0.1
    assert torch.isfinite(out).all()


@each
@pytest.mark.parametrize("causal", [False, True])
def test_a_million_keys(stage: str, head_dim: int, causal: bool) -> None:
    _able(stage, 12)
    torch.manual_seed(0)
    q, k, v = _normal(1, 1, 5, head_dim), *(_normal(1, 1, (1 << 20) + 3, head_dim) for _ in "kv")
    _check(stage, q, k, v, causal=causal)


@each
def test_keys_of_more_than_2_to_the_31_elements(stage: str, head_dim: int) -> None:
    _able(stage, 24)
    torch.manual_seed(0)
    keys = (1 << 31) // head_dim + 1000
    _check(stage, _normal(1, 1, 2, head_dim), *(_normal(1, 1, keys, head_dim) for _ in "kv"))


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("head_dim", registry.get(LAST).head_dims)
@pytest.mark.parametrize("stage", ["08_swizzle", LAST])
def test_queries_of_more_than_2_to_the_31_elements(stage: str, head_dim: int, order: str) -> None:
    _able(stage, 30)
    torch.manual_seed(0)
    batch, heads = 5, 16
    q_len = (1 << 31) // (4 * heads * head_dim) + 77  # the fifth sequence begins past 2^31 elements

    def made(length: int) -> Any:
        if order == "bhsd":
            return _normal(batch, heads, length, head_dim)
        return _normal(batch, length, heads, head_dim).transpose(1, 2)

    q, k, v = made(q_len), made(33), made(33)
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="cuda").fill_(torch.nan)
    flashlab.attention(q, k, v, stage=stage, out=out)
    for sequence in (0, batch - 1):
        for rows in (slice(0, 200), slice(q_len - 200, None)):
            right, _ = _right(q[sequence : sequence + 1, :, rows], *(one[sequence : sequence + 1] for one in (k, v)))
            assert (out[sequence : sequence + 1, :, rows].double() - right).abs().max() < 5e-3
    assert all(torch.isfinite(one).all() for one in out)
