// bug: the block ends, and its shared memory with it, while the copy engine still reads.
// mechanism: TMA store, exit
// caught by: misuse
// needs: any
// launch: grid=2 block=64 smem=0
// parameter: values f32[16,32] normal
// parameter: out_map map out f32[16,32] written box=8x32
// expect: out = values * 2
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 8;
constexpr int COLS = 32;

extern "C" __global__ void tma_store_in_flight_at_exit(const float* values, const __grid_constant__ ptx::TensorMap out_map) {
  __shared__ __align__(128) float O_smem[ROWS * COLS];
  const int first = blockIdx.x * ROWS * COLS;
  for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) O_smem[i] = values[first + i] * 2.0f;
  ptx::fence_proxy_async_shared();   // this thread's stores reach the copy engine
  __syncthreads();   // everyone's have
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_tensor_2d_store(&out_map, O_smem, 0, blockIdx.x * ROWS);   // here
    ptx::cp_async_bulk_commit_group();
#if !BUG
    ptx::cp_async_bulk_wait_group_read<0>();   // the tile has been read: shared memory may go
#endif
  }
}
