// bug: a block may end while its peer still reads its shared memory.
// mechanism: cluster, distributed shared memory
// caught by: race
// needs: hooks
// launch: grid=4 block=64 smem=0 cluster=2
// parameter: values f32[4,64] normal
// parameter: out f32[4,64] written
// expect: out = values[[1, 0, 3, 2]][:, ::-1]
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int COLS = 64;

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_left_too_early(const float* values, float* out) {
  __shared__ float row_smem[COLS];
  const int col = threadIdx.x;
  row_smem[col] = values[blockIdx.x * COLS + col];
  ptx::cluster_arrive();
  ptx::cluster_wait();   // the rows of both blocks are complete
  const unsigned peer = ptx::cluster_ctarank() ^ 1;
  const float value = *ptx::mapa(row_smem + COLS - 1 - col, peer);
#if !BUG
  ptx::cluster_arrive();
  ptx::cluster_wait();   // the other block has read this one's row: shared memory may go
#endif
  out[blockIdx.x * COLS + col] = value;
}
