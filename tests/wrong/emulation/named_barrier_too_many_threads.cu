// bug: the barrier between producer and consumers waits for a warp that the block does not have in this role.
// mechanism: named barrier
// caught by: deadlock
// needs: any
// launch: grid=1 block=128 smem=0
// parameter: keys f32[4,64] normal
// parameter: out f32[64] written
// parameter: num_tiles int 4
// expect: out = keys[:, ::-1].sum(0)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int CONSUMERS = 64;
#if BUG
constexpr int MEMBERS = CONSUMERS + 2 * LANES;
#else
constexpr int MEMBERS = CONSUMERS + LANES;   // threads that meet: the consumers and the producing warp
#endif
enum Barrier { FULL = 1, EMPTY = 2 };

extern "C" __global__ void named_barrier_too_many_threads(const float* keys, float* out, int num_tiles) {
  __shared__ float K_smem[CONSUMERS];
  if (threadIdx.x >= CONSUMERS + LANES) return;   // a warp with nothing to do
  if (threadIdx.x >= CONSUMERS) {
    const int lane = threadIdx.x - CONSUMERS;
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (tile > 0) ptx::bar_sync(EMPTY, MEMBERS);   // the consumers are done with the previous tile
      for (int col = lane; col < CONSUMERS; col += LANES) K_smem[col] = keys[tile * CONSUMERS + col];
      ptx::bar_arrive(FULL, MEMBERS);   // the tile is complete
    }
  } else {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) {
      ptx::bar_sync(FULL, MEMBERS);
      sum += K_smem[CONSUMERS - 1 - threadIdx.x];
      if (tile + 1 < num_tiles) ptx::bar_arrive(EMPTY, MEMBERS);
    }
    out[threadIdx.x] = sum;
  }
}
