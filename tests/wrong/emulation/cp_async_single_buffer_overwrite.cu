// bug: with one buffer, the next tile is fetched before every thread is done with this one.
// mechanism: cp.async, single buffer
// caught by: race
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: keys f32[4,256] normal
// parameter: out f32[256] written
// parameter: num_tiles int 4
// expect: out = keys[:, ::-1].sum(0)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int COLS = 256;
constexpr int CHUNK = 4;   // floats in 16 bytes

extern "C" __global__ void cp_async_single_buffer_overwrite(const float* keys, float* out, int num_tiles) {
  __shared__ __align__(16) float K_smem[COLS];
  float sum[CHUNK] = {};
  for (int tile = 0; tile < num_tiles; ++tile) {
#if !BUG
    __syncthreads();   // everyone is done with the previous tile, which the only buffer holds
#endif
    ptx::cp_async_cg_16(K_smem + threadIdx.x * CHUNK, keys + tile * COLS + threadIdx.x * CHUNK, 16);   // here: second
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();   // this thread's copies have landed
    __syncthreads();   // everyone's have
    for (int i = 0; i < CHUNK; ++i) sum[i] += K_smem[COLS - 1 - (threadIdx.x * CHUNK + i)];   // here: first
  }
  for (int i = 0; i < CHUNK; ++i) out[threadIdx.x * CHUNK + i] = sum[i];
}
