// bug: the empty barriers open when one of four consuming warps is done with the tile.
// mechanism: mbarrier
// caught by: race|deadlock
// needs: hooks
// launch: grid=1 block=160 smem=0
// parameter: keys f32[6,128] normal
// parameter: out f32[128] written
// parameter: num_tiles int 6
// expect: out = keys[:, ::-1].sum(0)
// tolerance: 1e-5
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int COLS = 128;
constexpr int CONSUMERS = COLS;
constexpr int PRODUCERS = 32;   // the last warp
constexpr int BUFFERS = 2;

extern "C" __global__ void mbarrier_empty_count_too_small(const float* keys, float* out, int num_tiles) {
  __shared__ float K_smem[BUFFERS][COLS];
  __shared__ ptx::Mbarrier full[BUFFERS], empty[BUFFERS];
  if (threadIdx.x == 0) {
    for (int b = 0; b < BUFFERS; ++b) {
      ptx::mbarrier_init(&full[b], PRODUCERS);
#if BUG
      ptx::mbarrier_init(&empty[b], CONSUMERS / 4);
#else
      ptx::mbarrier_init(&empty[b], CONSUMERS);
#endif
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barriers are there
  if (threadIdx.x >= CONSUMERS) {
    const int lane = threadIdx.x - CONSUMERS;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile % BUFFERS;
      const int round = tile / BUFFERS;
      if (round > 0) ptx::mbarrier_wait_parity(&empty[buffer], (round - 1) & 1);   // the consumers are done with what it held
      for (int col = lane; col < COLS; col += PRODUCERS) K_smem[buffer][col] = keys[tile * COLS + col];   // here: second
      ptx::mbarrier_arrive(&full[buffer]);
    }
  } else {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int buffer = tile % BUFFERS;
      const int round = tile / BUFFERS;
      ptx::mbarrier_wait_parity(&full[buffer], round & 1);   // the tile is complete
      sum += K_smem[buffer][COLS - 1 - threadIdx.x];   // here: first
      ptx::mbarrier_arrive(&empty[buffer]);   // this thread is done with the tile
    }
    out[threadIdx.x] = sum;
  }
}
