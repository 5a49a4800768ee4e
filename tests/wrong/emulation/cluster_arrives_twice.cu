// bug: a block says that it runs, and again that it has sent, and has waited only once.
// mechanism: cluster barrier, phases
// caught by: misuse
// needs: any
// launch: grid=2 block=32 smem=0 cluster=2
// parameter: values f32[2,32] normal
// parameter: out f32[2,32] written
// expect: out = values[::-1]
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int COLS = 32;

extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_arrives_twice(const float* values, float* out) {
  __shared__ float sent[COLS];
  ptx::cluster_arrive_relaxed();   // this block runs
#if !BUG
  ptx::cluster_wait();   // so does the other: its memory may be written
#endif
  const unsigned rank = ptx::cluster_ctarank();
  *ptx::mapa(&sent[threadIdx.x], rank ^ 1) = values[rank * COLS + threadIdx.x];
  ptx::cluster_arrive();   // here
  ptx::cluster_wait();     // what was sent has come
  out[rank * COLS + threadIdx.x] = sent[threadIdx.x];
}
