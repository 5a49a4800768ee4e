// bug: the block ends in half a warp, which multiplies too.
// mechanism: whole warp
// caught by: misuse
// needs: any
// launch: grid=1 block=48 smem=0
// parameter: prob f16[16,16] normal
// parameter: V f16[16,8] normal
// parameter: out f32[16,8] written
// expect: out = prob.astype(np.float32) @ V.astype(np.float32)
// tolerance: 1e-2
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int TILE = 16;   // rows of P, and keys
constexpr int COLS = 8;    // of V
constexpr int LANES = 32;

extern "C" __global__ void mma_by_part_of_a_warp(const __half* prob, const __half* V, float* out) {
  __shared__ __align__(16) __half P_smem[TILE * TILE];
  __shared__ __align__(16) __half V_smem[TILE * COLS];
  for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) P_smem[i] = prob[i];
  for (int i = threadIdx.x; i < TILE * COLS; i += blockDim.x) V_smem[i] = V[i];
  __syncthreads();   // the tiles are complete
#if !BUG
  if (threadIdx.x >= LANES) return;
#endif
  const int lane = threadIdx.x % LANES;
  unsigned P_frag[4];
  unsigned V_frag[2];
  float O_frag[4] = {};
  ptx::ldmatrix_x4(P_frag, P_smem + lane % TILE * TILE + lane / TILE * 8);   // here
  ptx::ldmatrix_x2_trans(V_frag, V_smem + lane % TILE * COLS);
  ptx::mma_m16n8k16_f16(O_frag, P_frag, V_frag);
  if (threadIdx.x >= LANES) return;
  const int row = lane / 4;
  const int col = lane % 4 * 2;
  out[row * COLS + col] = O_frag[0];
  out[row * COLS + col + 1] = O_frag[1];
  out[(row + 8) * COLS + col] = O_frag[2];
  out[(row + 8) * COLS + col + 1] = O_frag[3];
}
