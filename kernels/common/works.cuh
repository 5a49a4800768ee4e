// The work tiles of a persistent block, and the counters that hand them out. TILE_KV is the stage's.
#pragma once
#include "hopper.cuh"

// Some rows of a head.
struct Work {
  int first_q_row;
  int head;
  int batch;
  int num_tiles;   // of K and V; NO_MORE: the block is done
#if VARLEN
  Sequence sequence;   // that the rows are counted in
#endif
};
constexpr int NO_MORE = -1;

// The call as a work tile has it: lengths and tensors of its sequence.
#if VARLEN
__device__ __forceinline__ AttentionParams params_of(const AttentionParams& p, const Work& work) { return of_sequence(p, work.sequence); }
#else
__device__ __forceinline__ const AttentionParams& params_of(const AttentionParams& p, const Work&) { return p; }
#endif

// What tensor maps call the first row of a work tile's sequence (AttentionMaps).
struct InMap {
  int row;
  int batch;
  int length;   // of the map, where it is no sequence's
};
__device__ __forceinline__ InMap q_in_map(const AttentionParams& p, const Work& work) {
#if VARLEN
  return {p.total_q - work.sequence.q_len, work.sequence.first_q + work.sequence.q_len, p.total_q};
#else
  return {0, work.batch, 0};
#endif
}
__device__ __forceinline__ InMap kv_in_map(const AttentionParams& p, const Work& work) {
#if VARLEN
  return {p.total_k - work.sequence.kv_len, work.sequence.first_k + work.sequence.kv_len, p.total_k};
#else
  return {0, work.batch, 0};
#endif
}

// The first tile with a key that rows from `first_q_row` on see.
__device__ __forceinline__ int first_tile_of_rows(const AttentionParams& p, int first_q_row) {
  return first_key(p, first_q_row) / TILE_KV;   // the first row's is the first
}

// So many tiles, from that one on, have keys that any of `num_rows` rows from `first_q_row` on sees; 0 where there are no such rows.
__device__ __forceinline__ int tiles_of_rows(const AttentionParams& p, int first_q_row, int num_rows) {
  if (first_q_row >= p.q_len) return 0;
  return (visible_keys(p, min(first_q_row + num_rows, p.q_len) - 1) + TILE_KV - 1) / TILE_KV   // the last row's is the last
         - first_tile_of_rows(p, first_q_row);
}

// Leaves the counters as it found them. One thread of each block calls it, after it took its last number.
__device__ __forceinline__ void close_counters(const AttentionParams& p) {
  __threadfence();   // it has taken that number before it counts as done
  if (atomicAdd(&p.work[1], 1u) == gridDim.x - 1) {   // everyone has: the counters may be used again
    atomicExch(&p.work[0], 0u);
    atomicExch(&p.work[1], 0u);
  }
}
