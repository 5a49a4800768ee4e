// copy: device memory to device memory, 16 bytes a thread and access, four loads in flight before the first store.
// `count` is in units of 16 bytes, a multiple of four times the grid's threads.
#include "micro.cuh"

constexpr int IN_FLIGHT = 4;   // loads

extern "C" __global__ void __launch_bounds__(512) micro_copy(const __grid_constant__ MicroParams p) {
  const uint4* source = static_cast<const uint4*>(p.in);
  uint4* target = static_cast<uint4*>(p.out);
  const long long num_threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (long long i = thread; i < p.count; i += IN_FLIGHT * num_threads) {
    uint4 value[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) value[k] = __ldcs(source + i + k * num_threads);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; ++k) __stcs(target + i + k * num_threads, value[k]);
  }
}
