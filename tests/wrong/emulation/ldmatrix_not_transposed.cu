// bug: V's tile is loaded as it lies; the product wants it transposed.
// mechanism: ldmatrix, layout
// caught by: wrong result
// needs: any
// launch: grid=1 block=32 smem=0
// parameter: prob f16[16,16] normal
// parameter: V f16[16,8] normal
// parameter: out f32[16,8] written
// expect: out = prob.astype(np.float32) @ V.astype(np.float32)
// tolerance: 1e-2
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int TILE = 16;   // rows of P, and keys
constexpr int COLS = 8;    // of V
constexpr int STRIDE = TILE + 8;   // of P's rows: 8 of them then lie in different banks
constexpr int LANES = 32;

extern "C" __global__ void ldmatrix_not_transposed(const __half* prob, const __half* V, float* out) {
  __shared__ __align__(16) __half P_smem[TILE * STRIDE];
  __shared__ __align__(16) __half V_smem[TILE * COLS];
  const int lane = threadIdx.x;
  for (int i = lane; i < TILE * TILE; i += LANES) P_smem[i / TILE * STRIDE + i % TILE] = prob[i];
  for (int i = lane; i < TILE * COLS; i += LANES) V_smem[i] = V[i];
  __syncwarp();   // the warp's tiles are complete
  unsigned P_frag[4];
  unsigned V_frag[2];
  float O_frag[4] = {};
  ptx::ldmatrix_x4(P_frag, P_smem + lane % TILE * STRIDE + lane / TILE * 8);
#if BUG
  ptx::ldmatrix_x2(V_frag, V_smem + lane % TILE * COLS);
#else
  ptx::ldmatrix_x2_trans(V_frag, V_smem + lane % TILE * COLS);
#endif
  ptx::mma_m16n8k16_f16(O_frag, P_frag, V_frag);
  const int row = lane / 4;
  const int col = lane % 4 * 2;
  out[row * COLS + col] = O_frag[0];
  out[row * COLS + col + 1] = O_frag[1];
  out[(row + 8) * COLS + col] = O_frag[2];
  out[(row + 8) * COLS + col + 1] = O_frag[3];
}
