// bug: a tile is prefetched whole, though the last one has fewer rows.
// mechanism: bulk prefetch
// caught by: out of bounds
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: K f32[20,8] normal
// parameter: out f32[20] written
// parameter: num_keys int 20
// expect: out = K.sum(1)
// tolerance: 1e-5
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int COLS = 8;
constexpr int TILE_KV = 8;

extern "C" __global__ void prefetch_past_the_end(const float* K, float* out, int num_keys) {
  for (int tile_key = 0; tile_key < num_keys; tile_key += TILE_KV) {
    const int next_key = tile_key + TILE_KV;
    if (threadIdx.x == 0 && next_key < num_keys) {
#if BUG
      const int rows = TILE_KV;
#else
      const int rows = min(TILE_KV, num_keys - next_key);
#endif
      ptx::cp_async_bulk_prefetch(K + next_key * COLS, rows * COLS * sizeof(float));   // here
    }
    const int key = tile_key + threadIdx.x;
    if (threadIdx.x >= TILE_KV || key >= num_keys) continue;
    float sum = 0.0f;
    for (int d = 0; d < COLS; ++d) sum += K[key * COLS + d];
    out[key] = sum;
  }
}
