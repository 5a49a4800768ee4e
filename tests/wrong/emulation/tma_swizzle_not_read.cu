// bug: the copy engine exchanges the chunks of each row, and the reader does not know.
// mechanism: TMA load, swizzle
// caught by: wrong result
// needs: any
// launch: grid=1 block=64 smem=8192
// parameter: K_map map K f16[64,64] normal box=64x64 swizzle=128
// parameter: out f16[64,64] written
// expect: out = K.T
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 64;
constexpr int COLS = 64;    // 128 bytes a row: one period of the swizzle
constexpr int CHUNK = 8;    // halves in 16 bytes
constexpr int TILE_BYTES = ROWS * COLS * sizeof(__half);

// Where the 128-byte swizzle puts an element: its 16-byte chunk's number exclusive or the row's in 8.
__device__ __forceinline__ int swizzled(int row, int col) {
  return row * COLS + ((col / CHUNK) ^ (row % 8)) * CHUNK + col % CHUNK;
}

extern "C" __global__ void tma_swizzle_not_read(const __grid_constant__ ptx::TensorMap K_map, __half* out) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  __half* K_smem = reinterpret_cast<__half*>(shared_bytes);   // (ROWS, COLS), swizzled
  __shared__ ptx::Mbarrier full;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barrier is there
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(&full, TILE_BYTES);
    ptx::cp_async_bulk_tensor_2d_load(K_smem, &K_map, &full, 0, 0);
  }
  ptx::mbarrier_wait_parity(&full, 0);   // the tile has landed
  const int row = threadIdx.x;
  for (int col = 0; col < COLS; ++col) {
#if BUG
    out[col * ROWS + row] = K_smem[row * COLS + col];
#else
    out[col * ROWS + row] = K_smem[swizzled(row, col)];
#endif
  }
}
