// feature: mma.sync on random numbers; the chip truncates the terms that it adds up
// tolerance: 1e-5
// launch: grid=1 block=32
// parameter: first f16[16,16] normal
// parameter: second f16[8,16] normal
// parameter: start f32[16,8] normal
// parameter: out f32[16,8] written
// expect: out = first.astype(np.float64) @ second.astype(np.float64).T + start
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int K = 16;
constexpr int N = 8;

extern "C" __global__ void products_rounded(const __half* first, const __half* second, const float* start, float* out) {
  __shared__ __align__(16) __half A_smem[16 * K];
  __shared__ __align__(16) __half B_smem[N * K];
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * K; i += 32) A_smem[i] = first[i];
  for (int i = lane; i < N * K; i += 32) B_smem[i] = second[i];
  __syncwarp();   // both operands are complete
  unsigned a[4], b[2];
  ptx::ldmatrix_x4(a, A_smem + lane % 16 * K + lane / 16 * 8);
  ptx::ldmatrix_x2(b, B_smem + lane % 8 * K + lane / 8 % 2 * 8);
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = start[(lane / 4 + i / 2 * 8) * N + lane % 4 * 2 + i % 2];
  ptx::mma_m16n8k16_f16(d, a, b);
  for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * N + lane % 4 * 2 + i % 2] = d[i];
}
