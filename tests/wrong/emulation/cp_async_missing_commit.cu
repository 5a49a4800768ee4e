// bug: the copies were never committed to a group, so waiting for every group does not wait for them.
// mechanism: cp.async
// caught by: in flight
// needs: hooks
// launch: grid=2 block=32 smem=0
// parameter: keys f32[2,128] normal
// parameter: out f32[2,128] written
// expect: out = keys[:, ::-1]
#include "ptx.cuh"

constexpr int COLS = 128;
constexpr int CHUNK = 4;   // floats in 16 bytes

extern "C" __global__ void cp_async_missing_commit(const float* keys, float* out) {
  __shared__ __align__(16) float K_smem[COLS];
  const int first = blockIdx.x * COLS;
  ptx::cp_async_cg_16(K_smem + threadIdx.x * CHUNK, keys + first + threadIdx.x * CHUNK, 16);   // here: first
#if !BUG
  ptx::cp_async_commit_group();
#endif
  ptx::cp_async_wait_group<0>();   // this thread's copies have landed
  __syncthreads();   // everyone's have
  for (int col = threadIdx.x; col < COLS; col += blockDim.x) out[first + col] = K_smem[COLS - 1 - col];   // here: second
}
