// bug: one half of the block waits at __syncthreads, the other at bar.sync 0 with the number of the block's threads.
// mechanism: named barrier, barrier 0
// caught by: misuse
// needs: any
// launch: grid=1 block=128 smem=0
// parameter: values i32[128] range=1000
// parameter: out i32[128] written
// expect: out = values[::-1] + values.sum()
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int HALF = 64;

extern "C" __global__ void barrier_zero_in_two_forms(const int* values, int* out) {
  __shared__ int all_smem[THREADS];
  const int i = threadIdx.x;
  all_smem[i] = values[i];
  if (i < HALF) {
    ptx::bar_sync(0, THREADS);   // here
  } else {
#if BUG
    __syncthreads();   // here
#else
    ptx::bar_sync(0, THREADS);   // the same
#endif
  }
  int sum = 0;
  for (int j = 0; j < THREADS; ++j) sum += all_smem[j];
  out[i] = sum + all_smem[THREADS - 1 - i];
}
