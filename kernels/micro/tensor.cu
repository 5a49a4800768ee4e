// tensor: independent chains of 16×16×16 warp-level MMAs, FP32 accumulation, operands in registers.
// Each warp executes CHAINS · UNROLL · repeats of them, 2 · 16³ operations each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include "micro.cuh"

using namespace nvcuda;

constexpr int TILE = 16;   // edge of a warp's matrix tile

extern "C" __global__ void __launch_bounds__(256) micro_tensor(const __grid_constant__ MicroParams p) {
  const ELEMENT* in = static_cast<const ELEMENT*>(p.in);   // (2 · TILE, TILE)
  wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, ELEMENT, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, ELEMENT, wmma::col_major> b;
  wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> chain[CHAINS];
  wmma::load_matrix_sync(a, in, TILE);
  wmma::load_matrix_sync(b, in + TILE * TILE, TILE);
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) wmma::fill_fragment(chain[c], static_cast<float>(c));
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) wmma::mma_sync(chain[c], a, b, chain[c]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
    for (int i = 0; i < chain[c].num_elements; ++i) sum += chain[c].x[i];
  }
  keep(p, sum, p.count < 0);
}
