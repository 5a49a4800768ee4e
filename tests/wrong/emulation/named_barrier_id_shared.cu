// bug: two groups of warps meet at one barrier instead of each at its own, so a warp pairs with one of the other group.
// mechanism: named barrier
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: values f32[2,64] normal
// parameter: out f32[2,64] written
// expect: out = values[:, ::-1]
#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 64;
enum Barrier { GROUP_READY = 1 };   // and as many after it as there are groups

extern "C" __global__ void named_barrier_id_shared(const float* values, float* out) {
  __shared__ float row_smem[GROUPS][GROUP_THREADS];
  const int warp = threadIdx.x / LANES;
  const int group = warp % GROUPS;
  const int col = warp / GROUPS * LANES + threadIdx.x % LANES;
  row_smem[group][col] = values[group * GROUP_THREADS + col];   // here: first
#if BUG
  ptx::bar_sync(GROUP_READY, GROUP_THREADS);
#else
  ptx::bar_sync(GROUP_READY + group, GROUP_THREADS);   // the group's row is complete
#endif
  out[group * GROUP_THREADS + col] = row_smem[group][GROUP_THREADS - 1 - col];   // here: second
}
