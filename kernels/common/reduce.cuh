// Reductions over groups of LANES neighbouring lanes of a warp. LANES is a power of two; every lane of a group gets the result.
#pragma once
#include "attention.cuh"

template <int LANES>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
  return x;
}

template <int LANES>
__device__ __forceinline__ unsigned lanes_max(unsigned x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, distance));
  return x;
}

template <int LANES>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
  return x;
}
