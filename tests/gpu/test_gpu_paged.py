"""Attention over a cache in pages on a GPU: any page table and lengths, in CUDA graphs, and faults that are counted."""

from __future__ import annotations

from typing import Any

import pytest

import flashlab
from flashlab.core.errors import InputError
from flashlab.kernels import registry
from flashlab.run import gpu

STAGES = ("d1_paged_kv", "d6_paged_parts")
every_stage = pytest.mark.parametrize("stage", STAGES)
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
torch = pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    stage = registry.get(STAGES[0])
    if gpu.info().arch not in stage.archs:
        pytest.skip(f"needs {stage.needs}")


def _cache(lengths: list[int], page_size: int, kv_heads: int, head_dim: int, dtype: Any) -> tuple[Any, ...]:
    """Pools with NaN where no key is, page table, lengths; and K and V of each sequence."""
    width = -(-max(*lengths, 1) // page_size)
    count = len(lengths) * width + 3
    pools = [torch.full((count, kv_heads, page_size, head_dim), torch.nan, dtype=dtype, device="cuda") for _ in "KV"]
    table = torch.full((len(lengths), width), -5, dtype=torch.int32, device="cuda")
    pages, keys = torch.randperm(count, device="cuda").int(), []
    for row, length in enumerate(lengths):
        used = -(-length // page_size)
        table[row, :used], pages = pages[:used], pages[used:]
        keys.append([torch.randn(1, kv_heads, length, head_dim, device="cuda").to(dtype) for _ in "KV"])
        at = torch.arange(length, device="cuda")
        for pool, one in zip(pools, keys[-1], strict=True):
            pool[table[row][at // page_size], :, at % page_size] = one[0].transpose(0, 1)
    return *pools, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"), keys


def _right(q: Any, k: Any, v: Any) -> Any:
    q_len, length = q.shape[2], k.shape[2]
    mask = torch.ones(q_len, length, dtype=torch.bool, device="cuda").tril(length - q_len)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True)
    return torch.where(mask.any(-1)[:, None], out, 0.0)


@every_stage
@pytest.mark.parametrize("seed", range(24))
def test_any_page_table_and_lengths(seed: int, stage: str) -> None:
    torch.manual_seed(seed)
    page_size = (1, 16, 64, 128)[seed % 4]
    head_dim, dtype = (64, 128, 256)[seed // 4 % 3], (torch.float16, torch.bfloat16)[seed // 8 % 2]
    batch, q_len = int(torch.randint(1, 9, ())), int(torch.randint(1, 5, ()))
    lengths = [0, *torch.randint(1, 3000, (batch,)).tolist()]
    *cache, keys = _cache(lengths, page_size, 2, head_dim, dtype)
    q = torch.randn(len(lengths), 8, q_len, head_dim, device="cuda").to(dtype)
    out, lse = flashlab.paged_attention(q, *cache, return_lse=True, check=True, stage=stage)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    for row in range(1, len(lengths)):
        error = (out[row].double() - _right(q[row : row + 1], *keys[row])[0]).abs().max()
        assert error < (2e-3 if dtype == torch.float16 else 1.5e-2)


@every_stage
@pytest.mark.parametrize("lengths", [[4000], [8192] * 4, [9000] + [20] * 30, [*range(1, 301)]], ids=len)
def test_shares_of_one_call_after_another(lengths: list[int], stage: str) -> None:
    """A launch finds the workspace as the one before it, of other lengths, left it, and may begin while that ends."""
    *cache, keys = _cache(lengths, 16, 2, 128, torch.float16)
    q = torch.randn(len(lengths), 8, 1, 128, device="cuda").half()
    least = torch.zeros_like(cache[-1])
    outs = [flashlab.paged_attention(q, *cache[:3], kept, stage=stage) for kept in (cache[-1], least, cache[-1]) * 8]
    for out in outs[1::3]:
        assert (out == 0).all()
    for out in outs[::3] + outs[2::3]:
        assert torch.equal(out, outs[0])
    for row, pair in enumerate(keys):
        assert (outs[0][row].double() - _right(q[row : row + 1], *pair)[0]).abs().max() < 2e-3


@every_stage
def test_a_graph_replays_with_other_lengths_and_pages(stage: str) -> None:
    *cache, keys = _cache([700, 90], 16, 4, 128, torch.float16)
    q = torch.randn(2, 8, 1, 128, device="cuda").half()
    lengths = cache[-1]
    flashlab.paged_attention(q, *cache, stage=stage)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashlab.paged_attention(q, *cache, stage=stage)
    for shorter in (0, 33, 80):
        lengths.copy_(torch.tensor([700 - shorter, 90 - shorter], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        for row, (k, v) in enumerate(keys):
            length = k.shape[2] - shorter
            expected = _right(q[row : row + 1], k[:, :, :length], v[:, :, :length])[0]
            assert (out[row].double() - expected).abs().max() < 2e-3


@every_stage
def test_faults_are_counted_and_harm_nothing(stage: str) -> None:
    *cache, _ = _cache([700, 90], 16, 4, 128, torch.float16)
    q = torch.randn(2, 8, 1, 128, device="cuda").half()
    table, lengths = cache[2], cache[3]
    kept = table.clone()
    table[0, 3] = 10**9
    with pytest.raises(InputError, match="page numbers of 0 to"):
        flashlab.paged_attention(q, *cache, check=True, stage=stage)
    assert not flashlab.paged_attention(q, *cache, stage=stage).isnan().any()
    table[0, 700 // 16] = -1  # the page that the next key goes to
    new = torch.ones(2, 4, 1, 128, device="cuda").half()
    pool = cache[0].clone()
    with pytest.raises(InputError, match="page_table: wanted page numbers of 0 to"):
        flashlab.append_kv(*cache[:2], new, new, table, lengths, check=True)
    assert torch.equal(pool.nan_to_num(), cache[0].nan_to_num())
    table.copy_(kept)
    lengths[1] = 10**6
    with pytest.raises(InputError, match="lengths: wanted 0 to"):
        flashlab.append_kv(*cache[:2], new, new, table, lengths, check=True)
    with pytest.raises(InputError, match="lengths of 0 to"):
        flashlab.paged_attention(q, *cache, check=True, stage=stage)
