// bug: threads meet first and wait for their own copies afterwards, so the barrier publishes nothing.
// mechanism: cp.async
// caught by: race
// needs: hooks
// launch: grid=2 block=64 smem=0
// parameter: keys f32[2,256] normal
// parameter: out f32[2,256] written
// expect: out = keys[:, ::-1]
#include "ptx.cuh"

constexpr int COLS = 256;
constexpr int CHUNK = 4;   // floats in 16 bytes

extern "C" __global__ void cp_async_barrier_before_wait(const float* keys, float* out) {
  __shared__ __align__(16) float K_smem[COLS];
  const int first = blockIdx.x * COLS;
  ptx::cp_async_cg_16(K_smem + threadIdx.x * CHUNK, keys + first + threadIdx.x * CHUNK, 16);   // here: first
  ptx::cp_async_commit_group();
#if BUG
  __syncthreads();
  ptx::cp_async_wait_group<0>();
#else
  ptx::cp_async_wait_group<0>();   // this thread's copies have landed
  __syncthreads();   // everyone's have
#endif
  for (int col = threadIdx.x; col < COLS; col += blockDim.x) out[first + col] = K_smem[COLS - 1 - col];   // here: second
}
