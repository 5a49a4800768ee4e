// Soft-capped scores: cap · tanh(score / cap), if the call requests a cap.
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

// q·k after the soft cap, if any: multiplied by scale_log2, it is a score in units of log2.
__device__ __forceinline__ float capped(const AttentionParams& p, float product) {
#if SOFTCAP
  return ptx::tanh_approx(product * p.cap_scale);
#else
  return product;
#endif
}
