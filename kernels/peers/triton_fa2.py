"""FlashAttention-2 in plain Triton, its sizes chosen by triton.autotune: what a day's work with Triton gives.

A peer, no stage: nothing in it is chosen by hand or meant for one GPU. src/flashlab/kernels/peers.py calls it.
Layouts: Q, O (batch, q_heads, q_len, HEAD_DIM); K, V (batch, kv_heads, kv_len, HEAD_DIM); contiguous.
Requires: sm_80, float16 or bfloat16, HEAD_DIM a power of two; under a causal mask q_len <= kv_len.
"""

import triton
import triton.language as tl


@triton.jit
def visit(
    acc, top, total, q, K, V, begin, end, rows, shift, kv_len, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, end) to the output `acc`, the maxima `top` (log2) and the sums `total` of a block of rows."""
    d = tl.arange(0, HEAD_DIM)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys < kv_len
        K_ptrs = K + keys[None, :] * HEAD_DIM + d[:, None]
        V_ptrs = V + keys[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(K_ptrs, mask=there[None, :], other=0.0) if MASKED else tl.load(K_ptrs)
        scores = tl.dot(q, k) * scale_log2
        if MASKED:
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + shift)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(V_ptrs, mask=there[:, None], other=0.0) if MASKED else tl.load(V_ptrs)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def attend(
    Q, K, V, O, group, q_len, kv_len, scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_M rows of one head; the grid is (ceil(q_len / BLOCK_M), batch * q_heads)."""
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    rows, d = first + tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    offsets = rows[:, None] * HEAD_DIM + d[None, :]
    inside = rows[:, None] < q_len
    q = tl.load(Q + head * q_len * HEAD_DIM + offsets, mask=inside, other=0.0)
    K += head // group * kv_len * HEAD_DIM
    V += head // group * kv_len * HEAD_DIM

    shift = kv_len - q_len
    end = tl.minimum(first + BLOCK_M + shift, kv_len) if CAUSAL else kv_len
    unmasked = (tl.minimum(first + 1 + shift, kv_len) if CAUSAL else kv_len) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, top, total = visit(
        acc, top, total, q, K, V, 0, unmasked, rows, shift, kv_len, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, False
    )
    acc, top, total = visit(
        acc, top, total, q, K, V, unmasked, end, rows, shift, kv_len, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, True
    )
    acc = acc / total[:, None]
    tl.store(O + head * q_len * HEAD_DIM + offsets, acc.to(O.dtype.element_ty), mask=inside)


SIZES = [
    triton.Config({"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)
    for rows, warps in ((64, 4), (128, 4), (128, 8))
    for keys in (32, 64, 128)
    for stages in (2, 3, 4)
]


def _time(run, quantiles):
    return triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)


tuned = triton.autotune(configs=SIZES, key=["q_len", "kv_len", "HEAD_DIM", "CAUSAL"], do_bench=_time)(attend)
"""`attend` with the sizes that are fastest for these lengths, this head dim, mask and element type, found at its first
call."""
