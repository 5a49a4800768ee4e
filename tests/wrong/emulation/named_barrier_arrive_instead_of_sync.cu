// bug: the consumers only arrive at the barrier that tells them the tile is there, and go on.
// mechanism: named barrier
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: keys f32[4,64] normal
// parameter: out f32[64] written
// parameter: num_tiles int 4
// expect: out = keys[:, ::-1].sum(0)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int CONSUMERS = 64;
constexpr int MEMBERS = CONSUMERS + LANES;   // threads that meet: the consumers and the producing warp
enum Barrier { FULL = 1, EMPTY = 2 };

extern "C" __global__ void named_barrier_arrive_instead_of_sync(const float* keys, float* out, int num_tiles) {
  __shared__ float K_smem[CONSUMERS];
  if (threadIdx.x >= CONSUMERS + LANES) return;   // a warp with nothing to do
  if (threadIdx.x >= CONSUMERS) {
    const int lane = threadIdx.x - CONSUMERS;
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (tile > 0) ptx::bar_sync(EMPTY, MEMBERS);   // the consumers are done with the previous tile
      for (int col = lane; col < CONSUMERS; col += LANES) K_smem[col] = keys[tile * CONSUMERS + col];   // here: second
      ptx::bar_arrive(FULL, MEMBERS);   // the tile is complete
    }
  } else {
    float sum = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) {
#if BUG
      ptx::bar_arrive(FULL, MEMBERS);
#else
      ptx::bar_sync(FULL, MEMBERS);   // the tile is complete
#endif
      sum += K_smem[CONSUMERS - 1 - threadIdx.x];   // here: first
      if (tile + 1 < num_tiles) ptx::bar_arrive(EMPTY, MEMBERS);
    }
    out[threadIdx.x] = sum;
  }
}
