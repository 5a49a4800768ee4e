// Packed fp16 arithmetic on chunks, only for stages whose elements are fp16.
#pragma once
#include "tile.cuh"

// Elements 2·i and 2·i + 1 of a chunk.
__device__ __forceinline__ __half2 pair_of(const Chunk& chunk, int i) {
  return __halves2half2(chunk.x[2 * i], chunk.x[2 * i + 1]);
}
