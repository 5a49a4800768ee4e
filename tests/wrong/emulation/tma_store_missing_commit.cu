// bug: the store is never committed to a group, so waiting for every group does not wait for it.
// mechanism: TMA store, commit
// caught by: misuse
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: values f32[24,32] normal
// parameter: out_map map out f32[24,32] written box=8x32
// parameter: num_tiles int 3
// expect: out = values * 2
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 8;
constexpr int COLS = 32;

extern "C" __global__ void
tma_store_missing_commit(const float* values, const __grid_constant__ ptx::TensorMap out_map, int num_tiles) {
  __shared__ __align__(128) float O_smem[ROWS * COLS];
  for (int tile = 0; tile < num_tiles; ++tile) {
    for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) {
      O_smem[i] = values[tile * ROWS * COLS + i] * 2.0f;   // here: second
    }
    ptx::fence_proxy_async_shared();   // this thread's stores reach the copy engine
    __syncthreads();   // everyone's have
    if (threadIdx.x == 0) {
      ptx::cp_async_bulk_tensor_2d_store(&out_map, O_smem, 0, tile * ROWS);   // here: first
#if !BUG
      ptx::cp_async_bulk_commit_group();
#endif
      ptx::cp_async_bulk_wait_group_read<0>();   // the tile has been read: its buffer is free
    }
    __syncthreads();   // the buffer may be filled again
  }
}
