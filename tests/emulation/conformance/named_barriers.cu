// feature: bar.sync and bar.arrive between parts of a block
// launch: grid=1 block=128
// parameter: values i32[8,64] range=1000
// parameter: out i32[64] written
// expect: out = values[:, ::-1].sum(0)
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int HALF = 64;
constexpr int THREADS = 128;
constexpr int TILES = 8;
enum Barrier { FULL = 1, EMPTY = 2, GROUP = 3 };

extern "C" __global__ void named_barriers(const int* values, int* out) {
  __shared__ int tile_smem[HALF];
  const int i = threadIdx.x % HALF;
  int sum = 0;
  for (int tile = 0; tile < TILES; ++tile) {
    if (threadIdx.x < HALF) {
      if (tile > 0) ptx::bar_sync(EMPTY, THREADS);   // the readers are done with the previous tile
      tile_smem[i] = values[tile * HALF + i];
      ptx::bar_arrive(FULL, THREADS);   // the tile is complete
    } else {
      ptx::bar_sync(FULL, THREADS);
      sum += tile_smem[HALF - 1 - i];
      if (tile + 1 < TILES) ptx::bar_arrive(EMPTY, THREADS);
    }
  }
  if (threadIdx.x >= HALF) {
    ptx::bar_sync(GROUP, HALF);   // the readers alone
    out[i] = sum;
  }
}
