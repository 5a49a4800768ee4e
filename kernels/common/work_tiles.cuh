// The work tiles of a persistent kernel, and the counters of its tile scheduler. The stage defines TILE_KV.
#pragma once
#include "hopper.cuh"

// A work tile: query rows of one head.
struct WorkTile {
  int first_q_row;
  int head;
  int batch;
  int num_tiles;   // number of K/V tiles; NO_MORE: no work tile is left
#if VARLEN
  Sequence sequence;   // within which first_q_row counts
#endif
};
constexpr int NO_MORE = -1;

// The parameters for a work tile: lengths and tensors of its sequence.
#if VARLEN
__device__ __forceinline__ AttentionParams params_of(const AttentionParams& p, const WorkTile& work) {
  return of_sequence(p, work.sequence);
}
#else
__device__ __forceinline__ const AttentionParams& params_of(const AttentionParams& p, const WorkTile&) { return p; }
#endif

// Tensor-map coordinates of the first row of a work tile's sequence (AttentionMaps).
struct InMap {
  int row;
  int batch;
  int length;   // the map's length, with VARLEN; else 0
};
__device__ __forceinline__ InMap q_in_map(const AttentionParams& p, const WorkTile& work) {
#if VARLEN
  return {p.total_q - work.sequence.q_len, work.sequence.first_q + work.sequence.q_len, p.total_q};
#else
  return {0, work.batch, 0};
#endif
}
__device__ __forceinline__ InMap kv_in_map(const AttentionParams& p, const WorkTile& work) {
#if VARLEN
  return {p.total_k - work.sequence.kv_len, work.sequence.first_k + work.sequence.kv_len, p.total_k};
#else
  return {0, work.batch, 0};
#endif
}

// The first K/V tile with a key that is visible to any row from `first_q_row` on.
__device__ __forceinline__ int first_tile_of_rows(const AttentionParams& p, int first_q_row) {
  return first_key(p, first_q_row) / TILE_KV;   // the first row has the smallest first key
}

// Number of K/V tiles, from that one on, with keys visible to any of `num_rows` rows from `first_q_row` on; 0 if there are no such rows.
__device__ __forceinline__ int tiles_of_rows(const AttentionParams& p, int first_q_row, int num_rows) {
  if (first_q_row >= p.q_len) return 0;
  return (visible_keys(p, min(first_q_row + num_rows, p.q_len) - 1) + TILE_KV - 1) / TILE_KV   // the last row sees the last key
         - first_tile_of_rows(p, first_q_row);
}

// Resets the counters for the next launch. One thread of each block calls this after its last fetch from the tile counter.
__device__ __forceinline__ void close_counters(const AttentionParams& p) {
  __threadfence();   // that fetch is ordered before this block counts as done
  if (atomicAdd(&p.work[1], 1u) == gridDim.x - 1) {   // all blocks are done: the counters can be reset
    atomicExch(&p.work[0], 0u);
    atomicExch(&p.work[1], 0u);
  }
}
