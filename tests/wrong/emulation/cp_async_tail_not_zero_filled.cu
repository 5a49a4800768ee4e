// bug: rows past the last key are not copied, and nothing else writes them; yet the sum over the tile reads them.
// mechanism: cp.async, tail
// caught by: uninitialised
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: V f32[13,8] normal
// parameter: out f32[8] written
// parameter: num_keys int 13
// expect: out = V.sum(0)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int ROWS = 16;
constexpr int COLS = 8;
constexpr int CHUNK = 4;   // floats in 16 bytes

extern "C" __global__ void cp_async_tail_not_zero_filled(const float* V, float* out, int num_keys) {
  __shared__ __align__(16) float V_smem[ROWS][COLS];
  const int row = threadIdx.x / (COLS / CHUNK);
  const int col = threadIdx.x % (COLS / CHUNK) * CHUNK;
  const bool exists = row < num_keys;
#if BUG
  if (exists) ptx::cp_async_cg_16(&V_smem[row][col], V + row * COLS + col, 16);
#else
  ptx::cp_async_cg_16(&V_smem[row][col], exists ? V + row * COLS + col : V, exists ? 16 : 0);   // the rest becomes 0
#endif
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();   // this thread's copies have landed
  __syncthreads();   // everyone's have
  if (threadIdx.x < COLS) {
    float sum = 0.0f;
    for (int key = 0; key < ROWS; ++key) sum += V_smem[key][threadIdx.x];   // here
    out[threadIdx.x] = sum;
  }
}
