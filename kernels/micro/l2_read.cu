// l2_read: `repeats` passes over a buffer that fits in L2, bypassing L1, 16 bytes per thread and load.
// `count` is in units of 16 bytes, a multiple of four times the number of threads in the grid.
#include "micro.cuh"

constexpr int IN_FLIGHT = 4;   // loads in flight per thread

extern "C" __global__ void __launch_bounds__(512) micro_l2_read(const __grid_constant__ MicroParams p) {
  const uint4* source = static_cast<const uint4*>(p.in);
  const long long num_threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
    for (long long i = thread; i < p.count; i += IN_FLIGHT * num_threads) {
      uint4 value[IN_FLIGHT];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) value[k] = __ldcg(source + i + k * num_threads);
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) sum += value[k].x ^ value[k].y ^ value[k].z ^ value[k].w;
    }
    sum = sum * 3u + 1u;   // each pass depends on the previous one, so the compiler cannot remove any
  }
  keep(p, sum, p.count < 0);
}
