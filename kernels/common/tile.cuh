// Moving tiles between global memory, shared memory and registers.
#pragma once
#include "attention.cuh"

constexpr int CHUNK = 8;   // elements in a 16-byte access

struct alignas(16) Chunk {
  element x[CHUNK];
};

// 8 consecutive elements at `source`, in one access where rows are 16-byte aligned.
__device__ __forceinline__ Chunk read_chunk(const element* source) {
  if constexpr (ALIGNED) {
    return *reinterpret_cast<const Chunk*>(source);
  } else {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) chunk.x[i] = source[i];
    return chunk;
  }
}

__device__ __forceinline__ void write_chunk(element* target, const Chunk& chunk) {
  if constexpr (ALIGNED) {
    *reinterpret_cast<Chunk*>(target) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) target[i] = chunk.x[i];
  }
}

// The whole block copies rows [first_row, first_row + ROWS) of a head into shared memory rows of STRIDE elements.
// Neighbouring threads take neighbouring chunks, so a warp reads whole 128-byte lines. Rows past `num_rows` are not read;
// they become 0, because a key that is masked still meets the product with V, and 0 · garbage may be NaN.
template <int ROWS, int STRIDE, int NUM_THREADS>
__device__ __forceinline__ void load_tile(element* tile_smem, const element* head_gmem, long long row_stride,
                                          int first_row, int num_rows) {
  static_assert(STRIDE % CHUNK == 0, "a shared-memory row must be a whole number of 16-byte chunks");
  constexpr int CHUNKS_PER_ROW = HEAD_DIM / CHUNK;
  for (int i = threadIdx.x; i < ROWS * CHUNKS_PER_ROW; i += NUM_THREADS) {
    const int row = i / CHUNKS_PER_ROW;
    const int d = i % CHUNKS_PER_ROW * CHUNK;
    Chunk chunk = {};
    if (first_row + row < num_rows) chunk = read_chunk(head_gmem + (first_row + row) * row_stride + d);
    *reinterpret_cast<Chunk*>(tile_smem + row * STRIDE + d) = chunk;
  }
}
