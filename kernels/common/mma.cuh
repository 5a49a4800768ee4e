// Warp-level MMAs through mma.sync, 16 × 8 × 16 with FP32 accumulators, on fragments whose layout is documented
// (ptx.cuh says it): with g = lane / 4 and t = lane % 4, a lane holds columns 2·t and 2·t + 1 of rows g and g + 8.
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

constexpr int MMA_M = 16;    // rows of the accumulator
constexpr int MMA_N = 8;     // its columns
constexpr int MMA_K = 16;    // the length of the sum
constexpr int ROW_LANES = 4;   // lanes that share a row of the accumulator
constexpr int HALVES = 2;      // rows of an accumulator that a lane holds: lane / 4, and that plus 8
constexpr int MATRIX = 8;      // rows of an 8 × 8 matrix of ldmatrix, and elements in one

// The address that this lane gives ldmatrix for a 16 × 16 tile is that of its row and of its chunk of 8 elements. ROWS: of a
// tile whose rows are the rows of the first operand, or of the second one transposed; matrices 1 and 3 are 8 rows further.
// COLUMNS: whose rows are the columns of the second operand; matrices 2 and 3 are.
__device__ __forceinline__ int lane_row_of_rows(int lane) { return lane % 16; }
__device__ __forceinline__ int lane_chunk_of_rows(int lane) { return lane / 16; }
__device__ __forceinline__ int lane_row_of_columns(int lane) { return lane / 16 * MATRIX + lane % MATRIX; }
__device__ __forceinline__ int lane_chunk_of_columns(int lane) { return lane / MATRIX % 2; }

// Two elements in a register, `low` in its lower half.
__device__ __forceinline__ unsigned pack(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }
__device__ __forceinline__ unsigned pack(__nv_bfloat162 pair) { return *reinterpret_cast<const unsigned*>(&pair); }

// Two numbers, rounded, in a register, and d += a · b on either type of element. The last parameter says which.
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

// Two blocks of the second operand, (16, 8) each, in one ldmatrix: the 16 columns that the rows of a 16 × 16 tile are, or,
// TRANSPOSED, its columns. `row_smem` is this lane's row, as above.
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
