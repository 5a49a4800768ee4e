// Shared by all stages: the problem as the launcher passes it, and its compile-time parameters.
//
// Compile-time (-D): HEAD_DIM, CAUSAL (0 or 1), ELEMENT (__half or __nv_bfloat16), ALIGNED (1: every row starts on a
// 16-byte boundary, so rows may be read 16 bytes at a time), and the stage's own tunables. A call that uses one of a stage's
// features (listed in its entry) also defines WINDOW=1, SOFTCAP=1 or VARLEN=1; other calls have neither these nor their fields.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if !defined(HEAD_DIM) || !defined(CAUSAL) || !defined(ELEMENT) || !defined(ALIGNED)
#error "A stage is compiled with -DHEAD_DIM=…, -DCAUSAL=…, -DELEMENT=… and -DALIGNED=…; src/flashlab/build/compiler.py does it."
#endif

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef VARLEN
#define VARLEN 0
#endif

using element = ELEMENT;

constexpr int WARP = 32;                      // threads per warp
constexpr unsigned FULL_WARP = 0xffffffffu;   // mask of all lanes
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);

// A (batch, head, row, HEAD_DIM) tensor in global memory; strides in elements, the last dimension contiguous.
struct TensorView {
  void* data;
  long long batch_stride;
  long long head_stride;
  long long row_stride;
};

// src/flashlab/run/arguments.py mirrors this layout, field by field.
struct AttentionParams {
  TensorView Q;        // (batch, q_heads, q_len, HEAD_DIM)
  TensorView K;        // (batch, kv_heads, kv_len, HEAD_DIM)
  TensorView V;        // (batch, kv_heads, kv_len, HEAD_DIM)
  TensorView O;        // (batch, q_heads, q_len, HEAD_DIM)
  float* LSE;          // (batch, q_heads, q_len) contiguous, natural log; null if not requested
  int q_heads;
  int kv_heads;        // divides q_heads
  int q_len;
  int kv_len;
  float scale_log2;    // scale · log2(e): scores are exponentiated in base 2
  int batch;
  unsigned* work;      // persistent stages: {tile counter, number of finished blocks}, or as in shares.cuh. Counters are 0 at every
                       // launch: the last block that uses them resets them (with atomicExch). Null for other stages
  unsigned* fallbacks; // counts warp tiles: [0] whose reference was changed, [1] whose scores were recomputed; null if the caller
                       // does not request them
#if WINDOW || SOFTCAP || VARLEN
  int window_left;     // WINDOW: keys that a query sees before the one on its diagonal, not counting that one; below 2^31 - kv_len
  int window_right;    // and after it; not read if CAUSAL
  float cap_scale;     // SOFTCAP: scale / cap; a score is cap · tanh(cap_scale · q·k), and scale_log2 is cap · log2(e)
#endif
#if VARLEN
  // Packed sequences of different lengths: Q and O are (q_heads, total_q, HEAD_DIM), K and V (kv_heads, total_k, HEAD_DIM),
  // LSE (q_heads, total_q). Their batch strides are 0; q_len and kv_len are not those of any one sequence (see of_sequence).
  const int* cu_seqlens_q;   // (batch + 1): sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1])
  const int* cu_seqlens_k;   // likewise for its keys
  int total_q;
  int total_k;
#endif
};

// Counts one more warp tile that takes the fallback path COUNTER (AttentionParams::fallbacks).
template <int COUNTER>
__device__ __forceinline__ void count_fallback(const AttentionParams& p, int lane) {
  if (p.fallbacks && lane == 0) atomicAdd(&p.fallbacks[COUNTER], 1u);
}

// What the launcher needs to know about a compiled kernel; it reads this constant from the cubin. Omitted fields are 0.
// The grid is (ceil(q_len / tile_q), q_heads, batch). That of a persistent kernel is (G, 1, 1), where G is the number of co-resident
// blocks, but at most the number of tiles, ceil(q_len / tile_q) · q_heads · batch. For a kernel launched in clusters, the tiles of a
// head are rounded up to whole clusters.
struct LaunchShape {
  int threads;      // per block
  int smem_bytes;   // dynamic shared memory per block
  int tile_q;       // query rows per tile
  int box_q;        // rows per TMA copy of Q; nonzero: the kernel takes AttentionMaps (hopper.cuh) as its second parameter
  int box_kv;       // rows per TMA copy of K and V
  int persistent;   // 1: blocks process tiles until none is left
};

// The same for a kernel launched in clusters.
struct ClusterLaunchShape {
  LaunchShape block;
  int panels_kv;    // panels (hopper.cuh) per TMA copy of K and V; 0: all
  int cluster;      // blocks per cluster, which process neighbouring tiles of a head; the grid is in whole clusters. 0 or 1: none
};

// The same for a split-KV kernel. A tile packs the rows of the `group` query heads that share a K/V head: packed row r is query row
// r / group of head r % group. The grid is (splits · ceil(group · q_len / tile_q), kv_heads, batch), in clusters of `splits` blocks
// along x; the launcher chooses `splits` where `cluster` is 0.
struct SplitLaunchShape {
  ClusterLaunchShape blocks;
  int split_keys;   // keys that a block processes per step, and the minimum per block: with more blocks, some would be idle
};

// Pointer to the first row of one head.
__device__ __forceinline__ element* head_of(const TensorView& tensor, int batch, int head) {
  return static_cast<element*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride;
}

// The K/V head that a query head reads (grouped-query attention); the same head if q_heads equals kv_heads.
__device__ __forceinline__ int kv_head_of(const AttentionParams& p, int q_head) {
  return q_head / (p.q_heads / p.kv_heads);
}

// Index of a head's row in LSE.
__device__ __forceinline__ long long lse_row(const AttentionParams& p, int batch, int head, int q_row) {
#if VARLEN
  return static_cast<long long>(head) * p.total_q + q_row;
#else
  return (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
#endif
}

#if VARLEN
// The rows of one sequence: [first_q, first_q + q_len) of Q and O, and likewise of K and V.
struct Sequence {
  int first_q, q_len;
  int first_k, kv_len;
};

// Sequence `number` of the batch, clamped to the tensors: no value in cu_seqlens can cause an access outside of them.
__device__ __forceinline__ Sequence sequence_at(const AttentionParams& p, int number) {
  Sequence s;
  s.first_q = max(0, min(p.cu_seqlens_q[number], p.total_q));
  s.q_len = max(0, min(p.cu_seqlens_q[number + 1], p.total_q) - s.first_q);
  s.first_k = max(0, min(p.cu_seqlens_k[number], p.total_k));
  s.kv_len = max(0, min(p.cu_seqlens_k[number + 1], p.total_k) - s.first_k);
  return s;
}

// The parameters of a call with this sequence alone: its lengths, and the tensors from its first row on.
__device__ __forceinline__ AttentionParams of_sequence(const AttentionParams& p, const Sequence& s) {
  const auto from = [](const TensorView& tensor, int first_row) {
    TensorView rows = tensor;
    rows.data = static_cast<element*>(tensor.data) + first_row * tensor.row_stride;
    return rows;
  };
  AttentionParams own = p;
  own.Q = from(p.Q, s.first_q);
  own.K = from(p.K, s.first_k);
  own.V = from(p.V, s.first_k);
  own.O = from(p.O, s.first_q);
  own.LSE = p.LSE ? p.LSE + s.first_q : nullptr;
  own.q_len = s.q_len;
  own.kv_len = s.kv_len;
  return own;
}
#endif

// Keys visible to query `q_row`: [first_key, visible_keys). The diagonal is aligned to the bottom right, so visible_keys can be 0. Neither
// decreases from row to row. Rows past the end use the last row's first_key, so that they see some keys.
__device__ __forceinline__ int first_key(const AttentionParams& p, int q_row) {
#if WINDOW
  return max(0, min(q_row, p.q_len - 1) + p.kv_len - p.q_len - p.window_left);
#else
  return 0;
#endif
}
__device__ __forceinline__ int visible_keys(const AttentionParams& p, int q_row) {
#if WINDOW
  return max(0, min(p.kv_len, q_row + 1 + p.kv_len - p.q_len + (CAUSAL ? 0 : p.window_right)));
#else
  return CAUSAL ? max(0, min(p.kv_len, q_row + 1 + p.kv_len - p.q_len)) : p.kv_len;
#endif
}

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
