// bug: the copy for both blocks of the cluster names one of them.
// mechanism: cluster, multicast
// caught by: deadlock
// needs: any
// launch: grid=4 block=32 smem=0 cluster=2
// parameter: K_map map K f32[16,32] normal box=8x32
// parameter: out f32[4,32] written
// expect: out = np.repeat([K[:8].sum(0), K[8:].sum(0)], 2, axis=0)
// tolerance: 1e-5
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 8;
constexpr int COLS = 32;
constexpr int TILE_BYTES = ROWS * COLS * sizeof(float);
constexpr int CLUSTER = 2;

extern "C" __global__ void
__cluster_dims__(CLUSTER, 1, 1) cluster_multicast_mask_wrong(const __grid_constant__ ptx::TensorMap K_map, float* out) {
  __shared__ __align__(128) float K_smem[ROWS * COLS];
  __shared__ ptx::Mbarrier full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, TILE_BYTES);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();   // the barriers of both blocks are there
  if (threadIdx.x == 0 && ptx::cluster_ctarank() == 0) {
#if BUG
    ptx::cp_async_bulk_tensor_2d_load_multicast(K_smem, &K_map, &full, 0b01, 0, blockIdx.x / CLUSTER * ROWS);
#else
    ptx::cp_async_bulk_tensor_2d_load_multicast(K_smem, &K_map, &full, 0b11, 0, blockIdx.x / CLUSTER * ROWS);
#endif
  }
  ptx::mbarrier_wait_parity(&full, 0);   // the tile has landed here
  float sum = 0.0f;
  for (int row = 0; row < ROWS; ++row) sum += K_smem[row * COLS + threadIdx.x];
  out[blockIdx.x * COLS + threadIdx.x] = sum;
}
