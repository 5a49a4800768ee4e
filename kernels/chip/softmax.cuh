// A warp's softmax of a tile of scores in registers, as in the Hopper kernels: a thread holds SCORES scores, in pairs that
// alternate between two rows.
#pragma once

#include "chip.cuh"

// Turns scores into exponents, in place. WITH_MAX: updates the rows' maxima, which are constant otherwise. SHUFFLE: reduces
// a maximum over the four lanes of a row.
template <int SCORES, bool WITH_MAX, bool SHUFFLE>
__device__ __forceinline__ void scale_scores(float (&s)[SCORES], float (&row_max)[2], float scale) {
  if (WITH_MAX) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float part[2] = {row_max[row], s[2 * row]};   // two chains: an instruction's latency is four cycles
#pragma unroll
      for (int i = 0; i < SCORES / 4; ++i) {
        part[0] = fmaxf(part[0], s[4 * i + 2 * row]);
        part[1] = fmaxf(part[1], s[4 * i + 2 * row + 1]);
      }
      row_max[row] = fmaxf(part[0], part[1]);
      if (SHUFFLE) {
        row_max[row] = fmaxf(row_max[row], __shfl_xor_sync(0xffffffffu, row_max[row], 1));
        row_max[row] = fmaxf(row_max[row], __shfl_xor_sync(0xffffffffu, row_max[row], 2));
      }
    }
  }
  const float shift[2] = {-row_max[0] * scale, -row_max[1] * scale};
#pragma unroll
  for (int i = 0; i < SCORES; ++i) s[i] = fmaf(s[i], scale, shift[i / 2 % 2]);
}

// Turns exponents into powers of two, in place. WITH_SUM: adds them to the rows' sums. Every POLYNOMIAL-th exponential is computed
// by a polynomial; none if it is 0.
template <int SCORES, bool WITH_SUM, int POLYNOMIAL>
__device__ __forceinline__ void take_powers(float (&s)[SCORES], float (&row_sum)[2]) {
  float part[4] = {row_sum[0], 0.0f, row_sum[1], 0.0f};
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    const bool polynomial = POLYNOMIAL > 0 && i % (POLYNOMIAL > 0 ? POLYNOMIAL : 1) == 0;
    s[i] = polynomial ? exp2_polynomial(s[i]) : ptx::ex2_approx_ftz(s[i]);
    if (WITH_SUM) part[i % 4] += s[i];
  }
  if (WITH_SUM) {
    row_sum[0] = part[0] + part[1];
    row_sum[1] = part[2] + part[3];
  }
}

// Both steps.
template <int SCORES, bool WITH_MAX, bool WITH_SUM, int POLYNOMIAL, bool SHUFFLE>
__device__ __forceinline__ void softmax(float (&s)[SCORES], float (&row_max)[2], float (&row_sum)[2], float scale) {
  scale_scores<SCORES, WITH_MAX, SHUFFLE>(s, row_max, scale);
  take_powers<SCORES, WITH_SUM, POLYNOMIAL>(s, row_sum);
}

// The powers as the A operand of the PV GEMM; p[k] is for its k-th step of 16 keys.
template <int SCORES>
__device__ __forceinline__ void pack_all(const float (&s)[SCORES], unsigned (&p)[SCORES / 8][4]) {
#pragma unroll
  for (int i = 0; i < SCORES / 2; ++i) p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
}
