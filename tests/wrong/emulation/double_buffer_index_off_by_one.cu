// bug: the products read the buffer of the next tile, which is still being filled.
// mechanism: double buffer
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

extern "C" __global__ void double_buffer_index_off_by_one(const float* keys, float* out, int num_tiles) {
  __shared__ __align__(16) float K_smem[BUFFERS][COLS];
  const int first_col = threadIdx.x * CHUNK;   // that this thread copies
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      ptx::cp_async_cg_16(K_smem[tile % BUFFERS] + first_col, keys + tile * COLS + first_col, 16);   // here: first
    }
    ptx::cp_async_commit_group();
  };
  float sum[CHUNK] = {};
  fetch(0);
  for (int tile = 0; tile < num_tiles; ++tile) {
    ptx::cp_async_wait_group<0>();   // this tile has landed
    __syncthreads();   // everyone's part of it; and everyone is done with the previous tile, whose buffer is next to be filled
    fetch(tile + 1);
#if BUG
    const float* tile_smem = K_smem[(tile + 1) % BUFFERS];
#else
    const float* tile_smem = K_smem[tile % BUFFERS];
#endif
    for (int i = 0; i < CHUNK; ++i) sum[i] += tile_smem[COLS - 1 - (threadIdx.x * CHUNK + i)];   // here: second
  }
  for (int i = 0; i < CHUNK; ++i) out[threadIdx.x * CHUNK + i] = sum[i];
}
