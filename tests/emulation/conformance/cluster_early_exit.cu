// feature: threads that arrive at the cluster's barrier and end, while the others wait for it
// launch: grid=4 block=64 cluster=2
// parameter: values i32[4,32] range=1000
// parameter: out i32[4,32] written
// expect: out = values[[1, 0, 3, 2]][:, ::-1] * 2
#include "ptx_sm90.cuh"

constexpr int COLS = 32;

// Of each block, one warp has nothing to do but to be counted. It ends before the other has arrived, which must be waited for.
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_early_exit(const int* values, int* out) {
  __shared__ int row_smem[COLS];
  if (threadIdx.x >= COLS) {
    ptx::cluster_arrive();
    return;
  }
  const int col = threadIdx.x;
  row_smem[col] = values[blockIdx.x * COLS + col];
  __syncwarp();
  row_smem[col] *= 2;   // between two waits of the warp: the other threads have arrived by now
  ptx::cluster_arrive();
  ptx::cluster_wait();   // both blocks' rows are complete
  out[blockIdx.x * COLS + col] = *ptx::mapa(row_smem + COLS - 1 - col, ptx::cluster_ctarank() ^ 1);
  ptx::cluster_arrive();   // of two warps in the cluster alone: the others have ended
  ptx::cluster_wait();
}
