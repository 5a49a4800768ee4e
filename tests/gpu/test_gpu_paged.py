"""Attention over a cache in pages on a GPU: any page table and lengths, in CUDA graphs, and faults that are counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import random_calls
from shared import right

import flashlab
from flashlab.build import compiler
from flashlab.core.errors import InputError
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.run import gpu, paged
from flashlab.run.paged import job_of
from flashlab.run.plan import with_features

STAGES = tuple(stage.id for stage in registry.DECODE.values() if stage.runner == paged.__name__)
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


DRAWN = 500


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """What the drawn calls run of the stages that are asked for, on all cores."""
    wanted = {item.callspec.params.get("stage") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {}
    for seed, stage in itertools.product(range(DRAWN), map(registry.get, wanted & set(STAGES))):
        drawn = random_calls.paged(seed, stage.head_dims)
        page_size, kv_heads, head_dim, dtype = drawn.sizes.values()
        width = -(-max(drawn.lengths) // page_size) * page_size
        heads, rows = drawn.queries
        shape = f"{len(drawn.lengths)}x{heads}x{kv_heads}x{rows}x{width}x{head_dim}"
        problem = Problem.parse(shape, dtype=dtype, mask="causal" if drawn.how["causal"] else "full")
        problem = with_features(problem, drawn.how.get("window"), drawn.how.get("softcap", 0.0))
        job = job_of(stage, problem, gpu.info().arch, {"aligned": True, "overrides": {"PAGE_SIZE": page_size}})
        jobs[job.label] = job
    compiler.compile_many(list(jobs.values()))


@pytest.mark.usefixtures("compiled")
@every_stage
@pytest.mark.parametrize("seed", range(DRAWN))
def test_any_page_table_and_lengths(seed: int, stage: str) -> None:
    torch.manual_seed(seed)
    drawn = random_calls.paged(seed, registry.get(stage).head_dims)
    page_size, kv_heads, head_dim, dtype = drawn.sizes.values()
    *cache, keys = _cache(drawn.lengths, page_size, kv_heads, head_dim, getattr(torch, dtype))
    heads, rows = drawn.queries
    q = torch.randn(len(drawn.lengths), heads, rows, head_dim, device="cuda").to(getattr(torch, dtype))
    out, lse = flashlab.paged_attention(q, *cache, return_lse=True, check=True, stage=stage, **drawn.how)
    assert (out[0] == 0).all()
    assert torch.isneginf(lse[0]).all()
    within = dict.fromkeys(("atol", "rtol"), 4e-3 if dtype == "float16" else 3e-2)
    for row in range(1, len(drawn.lengths)):
        alone = [x[0].transpose(0, 1) for x in (q[row : row + 1], *keys[row])]
        expected, expected_lse = right(*alone, **drawn.how)
        torch.testing.assert_close(out[row].double(), expected.transpose(0, 1), **within)
        torch.testing.assert_close(lse[row].double(), expected_lse, atol=5e-3, rtol=5e-3)


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
        alone = [x[0].transpose(0, 1) for x in (q[row : row + 1], *pair)]
        assert (outs[0][row].double() - right(*alone, causal=True)[0].transpose(0, 1)).abs().max() < 2e-3


LATE = r"""
// The next kernel may start at once; what it reads comes later, a half of it much later.
extern "C" __global__ void late(int* table, const int* true_table, int entries, int* lengths, const int* true_lengths,
                                int batch) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long begin = clock64();
  while (clock64() - begin < 30000) {}
  for (int i = threadIdx.x; i < batch; i += blockDim.x) lengths[i] = true_lengths[i];
  __syncthreads();
  while (clock64() - begin < 60000) {}
  for (int i = threadIdx.x; i < entries; i += blockDim.x) table[i] = true_table[i];
}
"""


@every_stage
@pytest.mark.parametrize("lengths", [[8192] * 4, [9000] + [20] * 30, [*range(1, 301)]], ids=len)
def test_lengths_and_pages_that_the_kernel_before_writes(lengths: list[int], stage: str) -> None:
    """Whatever a launch reads before that has ended, it attends to what the kernel before has written."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'flashlab[gpu]'")
    late = cupy.RawKernel(LATE, "late")
    *pools, table, sizes, _ = _cache(lengths, 16, 2, 128, torch.float16)
    q = torch.randn(len(lengths), 8, 1, 128, device="cuda").half()
    right_out = flashlab.paged_attention(q, *pools, table, sizes, stage=stage)
    most = table.shape[1] * 16
    wrong_tables = (*(torch.full_like(table, page) for page in (0, -7, 2**31 - 1)), table.flip(0, 1))
    wrong_lengths = (*(torch.full_like(sizes, length) for length in (0, most, -1)), sizes.flip(0))
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    for old_table, old_lengths in itertools.product(wrong_tables, (*wrong_lengths, sizes)):
        its_table, its_lengths = old_table.clone(), old_lengths.clone()
        arguments = (its_table, table, table.numel(), its_lengths, sizes, len(lengths))
        torch.cuda.synchronize()
        given = (cupy.asarray(x) if isinstance(x, torch.Tensor) else cupy.int32(x) for x in arguments)
        with stream:
            late((1,), (256,), tuple(given))
        out = flashlab.paged_attention(q, *pools, its_table, its_lengths, stage=stage)
        assert torch.equal(out, right_out)


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
            alone = [x[0].transpose(0, 1) for x in (q[row : row + 1], k[:, :, :length], v[:, :, :length])]
            expected, _ = right(*alone, causal=True)
            assert (out[row].double() - expected.transpose(0, 1)).abs().max() < 2e-3


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
    with pytest.raises(InputError, match=r"lengths: wanted 0 to .* got others"):
        flashlab.paged_attention(q, *cache, check=True, stage=stage)
