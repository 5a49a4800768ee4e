// bug: the next tile is fetched into the buffer of the tile at hand.
// mechanism: cp.async, double buffer
// caught by: race
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: keys f32[6,128] normal
// parameter: out f32[128] written
// parameter: num_tiles int 6
// expect: out = keys[:, ::-1].sum(0)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int COLS = 128;
constexpr int CHUNK = 4;   // floats in 16 bytes
constexpr int BUFFERS = 2;

extern "C" __global__ void cp_async_prefetch_into_buffer_in_use(const float* keys, float* out, int num_tiles) {
  __shared__ __align__(16) float K_smem[BUFFERS][COLS];
  const auto fetch = [&](int tile, int buffer) {
    if (tile < num_tiles) {
      ptx::cp_async_cg_16(K_smem[buffer] + threadIdx.x * CHUNK, keys + tile * COLS + threadIdx.x * CHUNK, 16);   // here: first
    }
    ptx::cp_async_commit_group();
  };
  float sum[CHUNK] = {};
  fetch(0, 0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    ptx::cp_async_wait_group<0>();   // this tile has landed
    __syncthreads();   // everyone's part of it; and everyone is done with the previous tile
#if BUG
    fetch(tile + 1, tile % BUFFERS);
#else
    fetch(tile + 1, (tile + 1) % BUFFERS);
#endif
    for (int i = 0; i < CHUNK; ++i) sum[i] += K_smem[tile % BUFFERS][COLS - 1 - (threadIdx.x * CHUNK + i)];   // here: second
  }
  for (int i = 0; i < CHUNK; ++i) out[threadIdx.x * CHUNK + i] = sum[i];
}
