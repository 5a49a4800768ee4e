// Warp-level MMAs by mma.sync, 16 × 8 × 16 with FP32 accumulators, on fragments whose layout is documented (see ptx.cuh):
// with g = lane / 4 and t = lane % 4, a lane holds columns 2·t and 2·t + 1 of rows g and g + 8.
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

constexpr int MMA_M = 16;    // rows of the accumulator
constexpr int MMA_N = 8;     // its columns
constexpr int MMA_K = 16;    // length of the reduction
constexpr int ROW_LANES = 4;   // lanes that share a row of the accumulator
constexpr int HALVES = 2;      // rows of an accumulator that a lane holds: lane / 4 and lane / 4 + 8
constexpr int MATRIX = 8;      // rows of an 8 × 8 ldmatrix matrix, and elements per row

// The row and the 8-element chunk of a 16 × 16 tile whose address this lane passes to ldmatrix. `of_rows`: the tile's rows are
// rows of A, or rows of B (loaded with .trans); matrices 1 and 3 are 8 rows further. `of_columns`: the tile's rows are columns
// of B; matrices 2 and 3 are 8 rows further.
__device__ __forceinline__ int lane_row_of_rows(int lane) { return lane % 16; }
__device__ __forceinline__ int lane_chunk_of_rows(int lane) { return lane / 16; }
__device__ __forceinline__ int lane_row_of_columns(int lane) { return lane / 16 * MATRIX + lane % MATRIX; }
__device__ __forceinline__ int lane_chunk_of_columns(int lane) { return lane / MATRIX % 2; }

// Packs two elements into a register, the first one in its lower half.
__device__ __forceinline__ unsigned pack(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }
__device__ __forceinline__ unsigned pack(__nv_bfloat162 pair) { return *reinterpret_cast<const unsigned*>(&pair); }

// pack rounds two floats into one register, mma computes d += a · b, for either element type. The last parameter selects the type.
__device__ __forceinline__ unsigned pack(float low, float high, __half) { return pack(__floats2half2_rn(low, high)); }
__device__ __forceinline__ unsigned pack(float low, float high, __nv_bfloat16) {
  return pack(__floats2bfloat162_rn(low, high));
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
  ptx::mma_m16n8k16_f16(d, a, b);
}
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
  ptx::mma_m16n8k16_bf16(d, a, b);
}

// Two B fragments, (16, 8) each, by one ldmatrix. Their 16 columns are the rows of a 16 × 16 tile in shared memory or, with
// TRANSPOSED, its columns. `row_smem` is the address for this lane, as above.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_pair(unsigned (&b)[2][2], const void* row_smem) {
  unsigned r[4];
  if constexpr (TRANSPOSED) {
    ptx::ldmatrix_x4_trans(r, row_smem);
  } else {
    ptx::ldmatrix_x4(r, row_smem);
  }
  b[0][0] = r[0];
  b[0][1] = r[1];
  b[1][0] = r[2];
  b[1][1] = r[3];
}
