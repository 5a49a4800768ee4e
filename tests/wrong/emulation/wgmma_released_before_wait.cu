// bug: the tile is given back to the producer while the tensor cores may still read it.
// mechanism: wgmma, mbarrier ring
// caught by: race
// needs: hooks
// launch: grid=1 block=160 smem=24576
// parameter: Q_map map Q f16[64,64] normal box=64x64 swizzle=128
// parameter: K_map map K f16[256,64] normal box=64x64 swizzle=128
// parameter: out f32[64,64] written
// parameter: num_tiles int 4
// expect: out = sum(Q.astype(np.float32) @ K[i : i + 64].astype(np.float32).T for i in range(0, 256, 64))
// tolerance: 5e-2
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 64;            // queries
constexpr int COLS = 64;            // keys a tile
constexpr int HEAD_DIM = 64;        // 128 bytes a row: one period of the swizzle
constexpr int WGMMA_K = 16;         // of HEAD_DIM, an instruction
constexpr int GROUP_BYTES = 8 * HEAD_DIM * sizeof(__half);   // 8 rows
constexpr int UNUSED = 1;           // the leading offset says nothing where a row is one period of the swizzle
constexpr int TILE_BYTES = ROWS * HEAD_DIM * sizeof(__half);
constexpr int CONSUMERS = 128;      // and a producing warp after them
constexpr int BUFFERS = 2;

extern "C" __global__ void
__launch_bounds__(160) wgmma_released_before_wait(const __grid_constant__ ptx::TensorMap Q_map,
                  const __grid_constant__ ptx::TensorMap K_map, float* out, int num_tiles) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  unsigned char* Q_smem = shared_bytes;                // (ROWS, HEAD_DIM), swizzled
  unsigned char* K_smem = shared_bytes + TILE_BYTES;   // BUFFERS of (COLS, HEAD_DIM), swizzled
  __shared__ ptx::Mbarrier Q_full, full[BUFFERS], empty[BUFFERS];
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&Q_full, 1);
    for (int b = 0; b < BUFFERS; ++b) {
      ptx::mbarrier_init(&full[b], 1);
      ptx::mbarrier_init(&empty[b], CONSUMERS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barriers are there
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x > CONSUMERS) return;   // one thread loads
    ptx::mbarrier_arrive_expect_tx(&Q_full, TILE_BYTES);
    ptx::cp_async_bulk_tensor_2d_load(Q_smem, &Q_map, &Q_full, 0, 0);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile % BUFFERS;
      const int round = tile / BUFFERS;
      if (round > 0) ptx::mbarrier_wait_parity(&empty[buffer], (round - 1) & 1);   // the consumers are done with what it held
      ptx::mbarrier_arrive_expect_tx(&full[buffer], TILE_BYTES);
      ptx::cp_async_bulk_tensor_2d_load(K_smem + buffer * TILE_BYTES, &K_map, &full[buffer], 0, tile * COLS);   // here: second
    }
    return;
  }
  float S_reg[COLS / 2] = {};   // this thread's part of the (ROWS, COLS) sums
  ptx::mbarrier_wait_parity(&Q_full, 0);   // the queries have landed
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int buffer = tile % BUFFERS;
    ptx::mbarrier_wait_parity(&full[buffer], tile / BUFFERS & 1);   // the tile has landed
    ptx::wgmma_fence();   // the registers are the tensor cores' from here on
#pragma unroll
    for (int k = 0; k < HEAD_DIM / WGMMA_K; ++k) {
      const int offset = k * WGMMA_K * static_cast<int>(sizeof(__half));
      const unsigned long long Q_desc = ptx::make_descriptor(Q_smem + offset, UNUSED, GROUP_BYTES, ptx::Swizzle::b128);
      const unsigned long long K_desc =
          ptx::make_descriptor(K_smem + buffer * TILE_BYTES + offset, UNUSED, GROUP_BYTES, ptx::Swizzle::b128);
      ptx::wgmma_ss<COLS, __half>(S_reg, Q_desc, K_desc, true);   // here: first
    }
    ptx::wgmma_commit_group();
#if BUG
    ptx::mbarrier_arrive(&empty[buffer]);
    ptx::wgmma_wait_group<0>();
#else
    ptx::wgmma_wait_group<0>();   // the products are in the registers, the tile has been read
    ptx::mbarrier_arrive(&empty[buffer]);   // this thread is done with it
#endif
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < COLS / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    out[row * COLS + col] = S_reg[i];
  }
}
