// feature: ldmatrix and stmatrix, each number of matrices, plain and transposed: to the bit
// launch: grid=1 block=32
// parameter: values u16[32,8] all
// parameter: loaded u32[6,4,32] zeros
// parameter: stored u16[6,32,8] zeros
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int ROWS = 32;
constexpr int COLS = 8;
constexpr int TILE = ROWS * COLS;

extern "C" __global__ void matrices(const unsigned short* values, unsigned* loaded, unsigned short* stored) {
  __shared__ __align__(16) unsigned short rows_smem[TILE];
  __shared__ __align__(16) unsigned short stored_smem[6][TILE];
  const int lane = threadIdx.x;
  for (int i = lane; i < TILE; i += LANES) {
    rows_smem[i] = values[i];
    for (int form = 0; form < 6; ++form) stored_smem[form][i] = 0;
  }
  __syncwarp();   // the rows are complete
  const unsigned short* row = rows_smem + lane * COLS;
  unsigned r1[1], r2[2], r4[4], t1[1], t2[2], t4[4];
  ptx::ldmatrix_x1(r1, row);
  ptx::ldmatrix_x2(r2, row);
  ptx::ldmatrix_x4(r4, row);
  ptx::ldmatrix_x1_trans(t1, row);
  ptx::ldmatrix_x2_trans(t2, row);
  ptx::ldmatrix_x4_trans(t4, row);
  unsigned* out = loaded + lane;
  out[0] = r1[0];
  for (int i = 0; i < 2; ++i) out[(4 + i) * LANES] = r2[i];
  for (int i = 0; i < 4; ++i) out[(8 + i) * LANES] = r4[i];
  out[12 * LANES] = t1[0];
  for (int i = 0; i < 2; ++i) out[(16 + i) * LANES] = t2[i];
  for (int i = 0; i < 4; ++i) out[(20 + i) * LANES] = t4[i];

  // The registers are the lane's own: what lands where says which lane and register it came from.
  unsigned mine[4];
  for (unsigned i = 0; i < 4; ++i) mine[i] = (lane * 8 + i * 2) | (lane * 8 + i * 2 + 1) << 16;
  const unsigned m1[1] = {mine[0]};
  const unsigned m2[2] = {mine[0], mine[1]};
  ptx::stmatrix_x1(stored_smem[0] + lane * COLS, m1);
  ptx::stmatrix_x2(stored_smem[1] + lane * COLS, m2);
  ptx::stmatrix_x4(stored_smem[2] + lane * COLS, mine);
  ptx::stmatrix_x1_trans(stored_smem[3] + lane * COLS, m1);
  ptx::stmatrix_x2_trans(stored_smem[4] + lane * COLS, m2);
  ptx::stmatrix_x4_trans(stored_smem[5] + lane * COLS, mine);
  __syncwarp();   // the matrices are stored
  for (int i = lane; i < 6 * TILE; i += LANES) stored[i] = stored_smem[0][i];
}
