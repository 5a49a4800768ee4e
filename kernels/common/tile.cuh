// Copies of tiles between global memory, shared memory and registers.
#pragma once
#include "attention.cuh"

constexpr int CHUNK = 8;   // elements per 16-byte access

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

// A thread's share of the copy of a tile: one chunk of every ROWS_PER_STEP-th row. Neighbouring threads copy neighbouring chunks,
// so a warp accesses whole 128-byte lines. The number of steps is a compile-time constant. The usual loop from threadIdx.x in
// steps of the block size hides it from the compiler, which does not know that threadIdx.x is less than that size.
template <int ROWS, int NUM_THREADS>
struct TileShare {
  static constexpr int CHUNKS_PER_ROW = HEAD_DIM / CHUNK;
  static constexpr int ROWS_PER_STEP = NUM_THREADS / CHUNKS_PER_ROW;
  static_assert(NUM_THREADS % CHUNKS_PER_ROW == 0 && ROWS % ROWS_PER_STEP == 0,
                "a step must cover whole rows of the tile, and the steps must cover all of the tile");

  int row = threadIdx.x / CHUNKS_PER_ROW;   // of the thread's first chunk
  int d = threadIdx.x % CHUNKS_PER_ROW * CHUNK;
};

// The block copies rows [first_row, first_row + ROWS) of a head into shared memory, in rows of STRIDE elements. Each thread issues
// IN_FLIGHT loads before its first store. Rows from `num_rows` on are not read but set to 0, because a masked key still takes part in
// the product with V, and 0 · garbage may be NaN.
template <int ROWS, int STRIDE, int NUM_THREADS, int IN_FLIGHT>
__device__ __forceinline__ void load_tile(element* tile_smem, const element* head_gmem, long long row_stride,
                                          int first_row, int num_rows) {
  static_assert(STRIDE % CHUNK == 0, "a shared-memory row must be a whole number of 16-byte chunks");
  using Share = TileShare<ROWS, NUM_THREADS>;
  const Share share;
  const element* source = head_gmem + (first_row + share.row) * row_stride + share.d;
  element* target = tile_smem + share.row * STRIDE + share.d;
#pragma unroll IN_FLIGHT
  for (int row = 0; row < ROWS; row += Share::ROWS_PER_STEP) {
    Chunk chunk = {};
    if (first_row + share.row + row < num_rows) chunk = read_chunk(source + row * row_stride);
    *reinterpret_cast<Chunk*>(target + row * STRIDE) = chunk;
  }
}
