// bug: the rows are padded by 2 floats, so every other row starts 8 bytes off what a 16-byte copy needs.
// mechanism: cp.async, alignment
// caught by: misuse
// needs: any
// launch: grid=1 block=32 smem=0
// parameter: V f32[16,8] normal
// parameter: out f32[16,8] written
// expect: out = V * 2
#include "ptx.cuh"

constexpr int ROWS = 16;
constexpr int COLS = 8;
constexpr int CHUNK = 4;   // floats in 16 bytes
#if BUG
constexpr int STRIDE = COLS + 2;
#else
constexpr int STRIDE = COLS + CHUNK;
#endif

extern "C" __global__ void cp_async_misaligned(const float* V, float* out) {
  __shared__ __align__(16) float V_smem[ROWS * STRIDE];
  const int row = threadIdx.x / (COLS / CHUNK);
  const int col = threadIdx.x % (COLS / CHUNK) * CHUNK;
  ptx::cp_async_cg_16(V_smem + row * STRIDE + col, V + row * COLS + col, 16);   // here
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();   // this thread's copies have landed
  __syncthreads();   // everyone's have
  for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) out[i] = V_smem[i / COLS * STRIDE + i % COLS] * 2.0f;
}
