// bug: a tile's shared buffer starts 16 bytes after a 128-byte boundary.
// mechanism: TMA load, alignment
// caught by: misuse
// needs: any
// launch: grid=1 block=32 smem=0
// parameter: K_map map K f32[24,32] normal box=8x32
// parameter: V_map map V f32[24,32] normal box=8x32
// parameter: out f32[32] written
// parameter: num_tiles int 3
// expect: out = (K * V[:, ::-1]).sum(0)
// tolerance: 1e-5
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 8;
constexpr int COLS = 32;
constexpr int TILE_BYTES = ROWS * COLS * sizeof(float);

extern "C" __global__ void
tma_misaligned_buffer(const __grid_constant__ ptx::TensorMap K_map, const __grid_constant__ ptx::TensorMap V_map, float* out,
                      int num_tiles) {
  __shared__ __align__(128) float K_smem[ROWS * COLS];
  __shared__ __align__(128) float V_smem[ROWS * COLS];
  __shared__ ptx::Mbarrier full;
  const int col = threadIdx.x;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barrier is there
  float sum = 0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(&full, 2 * TILE_BYTES);
#if BUG
      ptx::cp_async_bulk_tensor_2d_load(K_smem + 4, &K_map, &full, 0, tile * ROWS);
#else
      ptx::cp_async_bulk_tensor_2d_load(K_smem, &K_map, &full, 0, tile * ROWS);
#endif
      ptx::cp_async_bulk_tensor_2d_load(V_smem, &V_map, &full, 0, tile * ROWS);
    }
    ptx::mbarrier_wait_parity(&full, tile & 1);   // both tiles have landed
    for (int row = 0; row < ROWS; ++row) sum += K_smem[row * COLS + col] * V_smem[row * COLS + COLS - 1 - col];
    __syncthreads();   // everyone is done with both tiles
  }
  out[col] = sum;
}
