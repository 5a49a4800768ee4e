// feature: barrier 0 by its number and its count, and as __syncthreads
// launch: grid=1 block=128
// parameter: values i32[128] range=1000
// parameter: out i32[128] written
// expect: out = values[::-1] + values.sum()
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int HALF = 64;

extern "C" __global__ void barrier_zero(const int* values, int* out) {
  __shared__ int all_smem[THREADS];
  const int i = threadIdx.x;
  all_smem[i] = values[i];
  if (i < HALF) {
    __syncthreads();
  } else {
    ptx::bar_sync(0, THREADS);
  }
  int sum = 0;
  for (int j = 0; j < THREADS; ++j) sum += all_smem[j];
  out[i] = sum + all_smem[THREADS - 1 - i];
}
