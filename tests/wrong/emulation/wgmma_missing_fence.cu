// bug: the accumulators are set and handed to the tensor cores without a fence between.
// mechanism: wgmma, fence
// caught by: misuse
// needs: any
// launch: grid=1 block=128 smem=16384
// parameter: Q_map map Q f16[64,64] normal box=64x64 swizzle=128
// parameter: K_map map K f16[64,64] normal box=64x64 swizzle=128
// parameter: out f32[64,64] written
// expect: out = Q.astype(np.float32) @ K.astype(np.float32).T + 1
// tolerance: 2e-2
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 64;                        // queries
constexpr int COLS = 64;                        // keys
constexpr int HEAD_DIM = 64;                    // 128 bytes a row: one period of the swizzle
constexpr int WGMMA_K = 16;                     // of HEAD_DIM, an instruction
constexpr int GROUP_BYTES = 8 * HEAD_DIM * sizeof(__half);   // 8 rows
constexpr int UNUSED = 1;                       // the leading offset says nothing where a row is one period of the swizzle
constexpr int TILE_BYTES = ROWS * HEAD_DIM * sizeof(__half);

extern "C" __global__ void
__launch_bounds__(128) wgmma_missing_fence(const __grid_constant__ ptx::TensorMap Q_map,
                  const __grid_constant__ ptx::TensorMap K_map, float* out) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  __half* Q_smem = reinterpret_cast<__half*>(shared_bytes);                // (ROWS, HEAD_DIM), swizzled
  __half* K_smem = reinterpret_cast<__half*>(shared_bytes + TILE_BYTES);   // (COLS, HEAD_DIM), swizzled
  __shared__ ptx::Mbarrier full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barrier is there
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(&full, 2 * TILE_BYTES);
    ptx::cp_async_bulk_tensor_2d_load(Q_smem, &Q_map, &full, 0, 0);
    ptx::cp_async_bulk_tensor_2d_load(K_smem, &K_map, &full, 0, 0);
  }
  ptx::mbarrier_wait_parity(&full, 0);   // both tiles have landed

  float S_reg[COLS / 2];   // this thread's part of the (ROWS, COLS) products
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) S_reg[i] = 1.0f;
#if !BUG
  ptx::wgmma_fence();   // the registers are the tensor cores' from here on
#endif
#pragma unroll
  for (int k = 0; k < HEAD_DIM / WGMMA_K; ++k) {
    const unsigned long long Q_desc = ptx::make_descriptor(Q_smem + k * WGMMA_K, UNUSED, GROUP_BYTES, ptx::Swizzle::b128);
    const unsigned long long K_desc = ptx::make_descriptor(K_smem + k * WGMMA_K, UNUSED, GROUP_BYTES, ptx::Swizzle::b128);
    ptx::wgmma_ss<COLS, __half>(S_reg, Q_desc, K_desc, true);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();   // the products are in the registers

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[row * COLS + col] = S_reg[i];
  }
}
