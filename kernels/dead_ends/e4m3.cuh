// FP8 e4m3: 4 exponent bits, 3 mantissa bits, at most 448. Conversions round to nearest even and saturate at 448.
#pragma once
#include <cuda_fp8.h>

#include "half2.cuh"
#include "tile.cuh"

// The 8 elements of a chunk as e4m3, the first in the lowest byte.
struct alignas(8) Bytes {
  unsigned word[2];
};
__device__ __forceinline__ Bytes to_e4m3(const Chunk& chunk) {
  Bytes bytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __nv_fp8x2_e4m3 low(pair_of(chunk, 2 * i)), high(pair_of(chunk, 2 * i + 1));
    bytes.word[i] = low.__x | static_cast<unsigned>(high.__x) << 16;
  }
  return bytes;
}

// Converts four floats to e4m3; `a` goes to the lowest byte.
__device__ __forceinline__ unsigned to_e4m3(float a, float b, float c, float d) {
  const __nv_fp8x2_e4m3 low(make_float2(a, b)), high(make_float2(c, d));
  return low.__x | static_cast<unsigned>(high.__x) << 16;
}

// Rounds 8 elements to e4m3 and converts them back to `element`, which is exact.
__device__ __forceinline__ Chunk through_e4m3(const Chunk& chunk) {
  Chunk rounded;
#pragma unroll
  for (int i = 0; i < CHUNK; i += 2) {
    const __half2 pair = static_cast<__half2>(__nv_fp8x2_e4m3(pair_of(chunk, i / 2)));
    rounded.x[i] = __low2half(pair);
    rounded.x[i + 1] = __high2half(pair);
  }
  return rounded;
}
