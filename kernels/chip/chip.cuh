// Shared by all single-SM measurements: what a warp reports, and operands for wgmma.
#pragma once

#include <cuda_fp16.h>

#include "micro.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"

#ifndef STAMPS
#define STAMPS 0
#endif

// A warp's words in p.out: cycle counter before and after, number of loop iterations, and STAMPS counter values since the first.
constexpr int WORDS = 3 + STAMPS;

__device__ __forceinline__ long long* words(const MicroParams& p) {
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  return static_cast<long long*>(p.out) + static_cast<long long>(WORDS) * warp;
}

__device__ __forceinline__ void report(const MicroParams& p, long long start, long long end, long long done) {
  if (threadIdx.x % 32 != 0) return;
  long long* out = words(p);
  out[0] = start;
  out[1] = end;
  out[2] = done;
}

// Keeps all of `values` alive, as `keep` does for one value.
template <typename T, int N>
__device__ __forceinline__ void keep_all(const MicroParams& p, const T (&values)[N], bool never) {
  if (!never) return;
#pragma unroll
  for (int i = 0; i < N; ++i) static_cast<T*>(p.out)[i * blockDim.x + threadIdx.x] = values[i];
}

template <typename T, int N, int M>
__device__ __forceinline__ void keep_all(const MicroParams& p, const T (&values)[N][M], bool never) {
  if (!never) return;
#pragma unroll
  for (int i = 0; i < N * M; ++i) static_cast<T*>(p.out)[i * blockDim.x + threadIdx.x] = values[i / M][i % M];
}

// Operand tiles as in all kernels of this folder: panels of rows × 64 elements, 128-byte swizzle.
constexpr int ROW_BYTES = 128;
constexpr int PATTERN_BYTES = 1024;   // 8 rows

// Fills shared memory with numbers from 1 to 1.25. The cycle counts do not depend on the values; none is a NaN.
__device__ __forceinline__ void fill(unsigned* smem, int bytes) {
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) smem[i] = 0x3c003c00u | (i * 2654435761u >> 8 & 0x00ff00ffu);
  ptx::fence_proxy_async_shared();
  __syncthreads();   // all threads have written before any MMA reads
}

__device__ __forceinline__ unsigned long long k_major(const void* smem) {
  return ptx::make_descriptor(smem, 0, PATTERN_BYTES, ptx::Swizzle::b128);
}

// Contiguous along N (MN-major), in panels of 64 elements, like V.
__device__ __forceinline__ unsigned long long mn_major(const void* smem, int rows) {
  return ptx::make_descriptor(smem, rows * ROW_BYTES, PATTERN_BYTES, ptx::Swizzle::b128);
}

__device__ __forceinline__ unsigned pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// 2^x for x ≤ 0 with FP32 and integer instructions only: x = i + f with f in [-1/2, 1/2], a polynomial of degree 3 for
// 2^f (relative error 1e-4, below what FP16 keeps), and i added to its exponent.
__device__ __forceinline__ float exp2_polynomial(float x) {
  constexpr float ROUNDER = 12582912.0f;   // 1.5 · 2^23: adding it rounds to an integer
  const float clamped = fmaxf(x, -126.0f);
  const float rounded = clamped + ROUNDER;
  const float f = clamped - (rounded - ROUNDER);
  const float power = fmaf(fmaf(fmaf(0.0558f, f, 0.2426f), f, 0.6931f), f, 1.0f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(rounded) << 23));
}
