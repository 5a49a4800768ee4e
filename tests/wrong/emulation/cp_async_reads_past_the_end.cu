// bug: the copy of a tile takes 16 bytes of rows that do not exist.
// mechanism: cp.async, tail
// caught by: out of bounds
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

extern "C" __global__ void cp_async_reads_past_the_end(const float* V, float* out, int num_keys) {
  __shared__ __align__(16) float V_smem[ROWS][COLS];
  const int row = threadIdx.x / (COLS / CHUNK);
  const int col = threadIdx.x % (COLS / CHUNK) * CHUNK;
#if BUG
  const int valid_bytes = 16;
#else
  const int valid_bytes = row < num_keys ? 16 : 0;
#endif
  ptx::cp_async_cg_16(&V_smem[row][col], V + row * COLS + col, valid_bytes);   // here
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();   // this thread's copies have landed
  __syncthreads();   // everyone's have
  if (threadIdx.x < COLS) {
    float sum = 0.0f;
    for (int key = 0; key < num_keys; ++key) sum += V_smem[key][threadIdx.x];
    out[threadIdx.x] = sum;
  }
}
