// Scores that a call bounds: cap · tanh(score / cap).
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

// A product q·k as the softmax takes it: times scale_log2 it is a score in units of log2.
__device__ __forceinline__ float capped(const AttentionParams& p, float product) {
#if SOFTCAP
  return ptx::tanh_approx(product * p.cap_scale);
#else
  return product;
#endif
}
