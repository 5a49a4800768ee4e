// Warp-level MMAs by nvcuda::wmma, 16 × 16 × 16, with FP32 accumulators.
#pragma once
#include <mma.h>

#include "attention.cuh"

namespace wmma = nvcuda::wmma;

constexpr int WMMA_TILE = 16;

using FragA = wmma::fragment<wmma::matrix_a, WMMA_TILE, WMMA_TILE, WMMA_TILE, element, wmma::row_major>;
using FragB = wmma::fragment<wmma::matrix_b, WMMA_TILE, WMMA_TILE, WMMA_TILE, element, wmma::row_major>;
using FragBT = wmma::fragment<wmma::matrix_b, WMMA_TILE, WMMA_TILE, WMMA_TILE, element, wmma::col_major>;   // reads its tile transposed
using FragC = wmma::fragment<wmma::accumulator, WMMA_TILE, WMMA_TILE, WMMA_TILE, float>;

// Multiplies each row of NUM_BLOCKS accumulators by its factor. The factors are a (16, 16) tile with identical columns in shared
// memory, with rows of STRIDE floats. Loaded as an accumulator fragment, its element i is in the same row as element i of
// the accumulators, whatever the layout is.
template <int NUM_BLOCKS, int STRIDE>
__device__ __forceinline__ void scale_rows(FragC (&blocks)[NUM_BLOCKS], const float* factor_smem) {
  FragC factor;
  wmma::load_matrix_sync(factor, factor_smem, STRIDE, wmma::mem_row_major);
#pragma unroll
  for (int j = 0; j < NUM_BLOCKS; ++j) {
#pragma unroll
    for (int i = 0; i < factor.num_elements; ++i) blocks[j].x[i] *= factor.x[i];
  }
}
