// Shared by all micro-benchmarks. src/flashlab/measure/timer.py mirrors the struct, field by field.
#pragma once

struct MicroParams {
  void* out;
  const void* in;
  long long count;     // meaning depends on the kernel
  long long repeats;   // iterations of the measured loop
};

// Keeps `value` alive: the store is never executed, which the compiler cannot know.
template <typename T>
__device__ __forceinline__ void keep(const MicroParams& p, T value, bool never) {
  if (never) static_cast<T*>(p.out)[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
