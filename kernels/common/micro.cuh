// What every micro-benchmark shares. src/flashlab/measure/timer.py mirrors the struct, field by field.
#pragma once

struct MicroParams {
  void* out;
  const void* in;
  long long count;     // what is counted is the kernel's to say
  long long repeats;   // times the inner loop runs
};

// Keeps `value` alive: the store never happens, and the compiler cannot know.
template <typename T>
__device__ __forceinline__ void keep(const MicroParams& p, T value, bool never) {
  if (never) static_cast<T*>(p.out)[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
