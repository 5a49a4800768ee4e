"""t0_triton: the same algorithm in Triton, which chooses layouts and instructions itself. Parent: 07_mma_registers.

Question: how far does a compiler for tiles get on its own?
Change: Python instead of C++; TILE_Q, TILE_KV, WARPS and PIPELINE_STAGES are all that is chosen here.
Layouts: Q, O (batch, q_heads, q_len, HEAD_DIM); K, V (batch, kv_heads, kv_len, HEAD_DIM); any strides, in elements.
Requires: sm_80, float16 or bfloat16, HEAD_DIM a power of two.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def add_keys(
    O_acc, row_max, row_sum, Q_tile, K, V, K_row, V_row, first_key, last_key, last_of_row, kv_len, scale_log2,
    HEAD_DIM: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The tiles of keys [first_key, last_key) go into the output and its rows' state.

    MASKED: row i sees the keys below last_of_row[i] and kv_len; else every row sees every key.
    """
    d = tl.arange(0, HEAD_DIM)
    first = first_key + tl.arange(0, TILE_KV)
    K_ptrs = K + first[None, :] * K_row + d[:, None]  # (HEAD_DIM, TILE_KV): transposed
    V_ptrs = V + first[:, None] * V_row + d[None, :]  # (TILE_KV, HEAD_DIM)
    for tile in tl.range(first_key, last_key, TILE_KV):
        keys = tile + tl.arange(0, TILE_KV)
        if MASKED:
            S = tl.dot(Q_tile, tl.load(K_ptrs, mask=keys[None, :] < kv_len, other=0.0))
            seen = keys[None, :] < tl.minimum(last_of_row, kv_len)[:, None]
            S = tl.where(seen, S * scale_log2, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(S, 1))
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: -inf - -inf would be NaN
            P = tl.exp2(S - reference[:, None])
        else:
            S = tl.dot(Q_tile, tl.load(K_ptrs))
            # The scale is positive, so one multiply-add both scales a score and subtracts the maximum.
            new_max = tl.maximum(row_max, tl.max(S, 1) * scale_log2)
            reference = new_max
            P = tl.exp2(S * scale_log2 - reference[:, None])
        rescale = tl.exp2(row_max - reference)  # 0 at the first keys
        row_sum = row_sum * rescale + tl.sum(P, 1)
        row_max = new_max
        V_tile = tl.load(V_ptrs, mask=keys[:, None] < kv_len, other=0.0) if MASKED else tl.load(V_ptrs)
        O_acc = tl.dot(P.to(V_tile.dtype), V_tile, O_acc * rescale[:, None])
        K_ptrs += TILE_KV * K_row
        V_ptrs += TILE_KV * V_row
    return O_acc, row_max, row_sum


@triton.jit
def attention_t0_triton(
    Q, K, V, O, LSE,
    Q_batch, Q_head, Q_row, K_batch, K_head, K_row, V_batch, V_head, V_row, O_batch, O_head, O_row,
    q_heads, kv_heads, q_len, kv_len, wants_lse, scale_log2,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    """A program computes TILE_Q rows of one head; the grid is (ceil(q_len / TILE_Q), q_heads, batch)."""
    q_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last rows see most: they begin
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_head = head // (q_heads // kv_heads)
    rows = q_tile * TILE_Q + tl.arange(0, TILE_Q)
    d = tl.arange(0, HEAD_DIM)

    Q_ptrs = Q + batch * Q_batch + head * Q_head + rows[:, None] * Q_row + d[None, :]
    Q_tile = tl.load(Q_ptrs, mask=rows[:, None] < q_len, other=0.0)
    K += batch * K_batch + kv_head * K_head
    V += batch * V_batch + kv_head * V_head

    # Keys below `for_all` are seen by every row of the tile, those from `for_any` on by none.
    first = q_tile * TILE_Q + 1 + kv_len - q_len
    for_all = tl.minimum(tl.maximum(first, 0), kv_len) if CAUSAL else kv_len
    for_any = tl.minimum(tl.maximum(first + TILE_Q - 1, 0), kv_len) if CAUSAL else kv_len
    last_of_row = rows + 1 + kv_len - q_len if CAUSAL else rows * 0 + kv_len
    # The way without a mask needs a positive scale. Turning Q instead of leaving it would keep it in registers.
    unmasked = tl.where(scale_log2 > 0, for_all // TILE_KV * TILE_KV, 0)

    O_acc = tl.zeros([TILE_Q, HEAD_DIM], tl.float32)
    row_max = tl.full([TILE_Q], float("-inf"), tl.float32)  # in units of log2
    row_sum = tl.zeros([TILE_Q], tl.float32)
    O_acc, row_max, row_sum = add_keys(
        O_acc, row_max, row_sum, Q_tile, K, V, K_row, V_row, 0, unmasked, last_of_row, kv_len, scale_log2,
        HEAD_DIM, TILE_KV, False,
    )  # fmt: skip
    O_acc, row_max, row_sum = add_keys(
        O_acc, row_max, row_sum, Q_tile, K, V, K_row, V_row, unmasked, for_any, last_of_row, kv_len, scale_log2,
        HEAD_DIM, TILE_KV, True,
    )  # fmt: skip

    some = row_sum != 0.0  # a row that sees no key has output 0 and log-sum-exp -inf
    O_ptrs = O + batch * O_batch + head * O_head + rows[:, None] * O_row + d[None, :]
    O_tile = O_acc * tl.where(some, 1.0 / row_sum, 0.0)[:, None]
    tl.store(O_ptrs, O_tile.to(O.dtype.element_ty), mask=rows[:, None] < q_len)
    if wants_lse:
        lse = tl.where(some, row_max * LN_2 + tl.log(row_sum), float("-inf"))
        tl.store(LSE + (batch * q_heads + head) * q_len + rows, lse, mask=rows < q_len)
