// bug: a tile is read back when the copy engine has read it from shared memory, and not when it has written it.
// mechanism: bulk store, completion
// caught by: race|uninitialised|wrong result
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: values f32[8,32] normal
// parameter: out f32[8,32] written
// parameter: sums f32[8] written
// expect: out = values * 2
// expect: sums = values.sum(1) * 2
// tolerance: 1e-5
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int ROWS = 8;
constexpr int COLS = 32;

extern "C" __global__ void bulk_store_read_back_too_early(const float* values, float* out, float* sums) {
  __shared__ __align__(128) float O_smem[ROWS * COLS];
  for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) O_smem[i] = values[i] * 2.0f;
  ptx::fence_proxy_async_shared();   // this thread's stores reach the copy engine
  __syncthreads();                   // everyone's have
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_store(out, O_smem, sizeof(O_smem));   // here: first, second
    ptx::cp_async_bulk_commit_group();
#if BUG
    ptx::cp_async_bulk_wait_group_read<0>();
#else
    ptx::cp_async_bulk_wait_group<0>();   // the tile is in global memory
#endif
  }
  __syncthreads();   // what one thread waited for is there for all
  if (threadIdx.x >= ROWS) return;
  float sum = 0.0f;
  for (int d = 0; d < COLS; ++d) sum += out[threadIdx.x * COLS + d];   // here: first, second
  sums[threadIdx.x] = sum;
}
