// What every stage shares: the problem as the launcher passes it, and the compile-time choices it makes.
//
// Compile-time (-D): HEAD_DIM, CAUSAL (0 or 1), ELEMENT (__half or __nv_bfloat16), ALIGNED (1: every row starts on a
// 16-byte boundary, so rows may be read 16 bytes at a time), and the stage's own tunables. A call that asks for one of a
// stage's features (its entry names them) also has WINDOW=1, SOFTCAP=1 or VARLEN=1; others have none, nor the fields they are for.
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

constexpr int WARP = 32;                      // threads a warp
constexpr unsigned FULL_WARP = 0xffffffffu;   // lane mask: all of it
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
  float* LSE;          // (batch, q_heads, q_len) contiguous, natural log; null where the caller wants none
  int q_heads;
  int kv_heads;        // divides q_heads
  int q_len;
  int kv_len;
  float scale_log2;    // scale · log2(e): scores are exponentiated in base 2
  int batch;
  unsigned* work;      // persistent stages: {next tile, blocks that are done} or as shares.cuh says; counters are 0 at every launch,
                       // and the last block that needs them puts them back to 0 (with atomicExch); null for other stages
  unsigned* fallbacks; // counts tiles of a warp: [0] whose reference was moved, [1] whose scores were computed again; null where
                       // nobody asks
#if WINDOW || SOFTCAP || VARLEN
  int window_left;     // WINDOW: keys before its diagonal that a query sees beside the one on it, below 2^31 - kv_len
  int window_right;    // and after it; not read where CAUSAL
  float cap_scale;     // SOFTCAP: scale / cap; a score is cap · tanh(cap_scale · q·k), and scale_log2 is cap · log2(e)
#endif
#if VARLEN
  // Sequences of lengths of their own, one behind the other: Q and O are (q_heads, total_q, HEAD_DIM), K and V (kv_heads, total_k,
  // HEAD_DIM), LSE (q_heads, total_q). Their batch strides are 0; q_len and kv_len say nothing of any one sequence (of_sequence).
  const int* cu_seqlens_q;   // (batch + 1): sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1])
  const int* cu_seqlens_k;   // likewise its keys
  int total_q;
  int total_k;
#endif
};

// The next one of a warp's tiles falls back on the way of COUNTER (AttentionParams::fallbacks).
template <int COUNTER>
__device__ __forceinline__ void count_fallback(const AttentionParams& p, int lane) {
  if (p.fallbacks && lane == 0) atomicAdd(&p.fallbacks[COUNTER], 1u);
}

// What the launcher needs to know of a compiled kernel; it reads the constant out of the machine code. What is left out is 0.
// The grid is (ceil(q_len / tile_q), q_heads, batch). That of a persistent kernel is (G, 1, 1), where G is as many blocks as are
// resident at once, and at most the number of tiles, ceil(q_len / tile_q) · q_heads · batch. Where blocks come in clusters, a head's
// tiles are rounded up to whole clusters.
struct LaunchShape {
  int threads;      // a block
  int smem_bytes;   // dynamic shared memory a block
  int tile_q;       // query rows a tile
  int box_q;        // rows a copy of Q; not 0: the kernel takes AttentionMaps (hopper.cuh) as its second parameter
  int box_kv;       // rows a copy of K and V
  int persistent;   // 1: blocks take tiles until none is left
};

// The same of a kernel whose blocks come in clusters.
struct ClusterLaunchShape {
  LaunchShape block;
  int panels_kv;    // panels of 64 columns a copy of K and V (hopper.cuh); 0: all
  int cluster;      // blocks a cluster, which take neighbouring tiles of a head: the grid is in whole clusters; 0 or 1: none
};

// The same of a kernel whose blocks split keys. A tile's rows are packed: query row r / group of head r % group of the `group` query
// heads that share a K/V head. The grid is (splits · ceil(group · q_len / tile_q), kv_heads, batch), in clusters of `splits` blocks
// along x, which the launcher chooses where `cluster` is 0.
struct SplitLaunchShape {
  ClusterLaunchShape blocks;
  int split_keys;   // keys that a block takes at a time: a block more would be idle where there are fewer than that for each
};

// First row of one head.
__device__ __forceinline__ element* head_of(const TensorView& tensor, int batch, int head) {
  return static_cast<element*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride;
}

// The key/value head that a query head reads (grouped-query attention; the same head where their numbers agree).
__device__ __forceinline__ int kv_head_of(const AttentionParams& p, int q_head) {
  return q_head / (p.q_heads / p.kv_heads);
}

// The place in LSE of a head's row.
__device__ __forceinline__ long long lse_row(const AttentionParams& p, int batch, int head, int q_row) {
#if VARLEN
  return static_cast<long long>(head) * p.total_q + q_row;
#else
  return (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
#endif
}

#if VARLEN
// A sequence's rows of Q and O, [first_q, first_q + q_len), and of K and V.
struct Sequence {
  int first_q, q_len;
  int first_k, kv_len;
};

// Sequence `number` of the batch. Whatever numbers the caller gave, it lies within the tensors: nothing outside of them is touched.
__device__ __forceinline__ Sequence sequence_at(const AttentionParams& p, int number) {
  Sequence s;
  s.first_q = max(0, min(p.cu_seqlens_q[number], p.total_q));
  s.q_len = max(0, min(p.cu_seqlens_q[number + 1], p.total_q) - s.first_q);
  s.first_k = max(0, min(p.cu_seqlens_k[number], p.total_k));
  s.kv_len = max(0, min(p.cu_seqlens_k[number + 1], p.total_k) - s.first_k);
  return s;
}

// The call as if it were of this sequence alone: its lengths, and the tensors from its first row on.
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

// Keys that query `q_row` sees: [first_key, visible_keys). The diagonal is aligned bottom right, so that the latter can be 0. Both grow
// with the row; rows past the end have the last one's first key, so that they see some.
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
