// feature: cp.async of 4, 8 and 16 bytes with each number of valid ones; groups
// launch: grid=1 block=32
// parameter: source u8[32,16] bits
// parameter: out u8[3,32,16] written
// expect: out = np.stack([np.where(np.arange(16) % n < np.arange(32)[:, None] % (n + 1), source, 0) for n in (16, 4, 8)])
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int LANES = 32;
constexpr int ROW = 16;

extern "C" __global__ void copies(const unsigned char* source, unsigned char* out) {
  __shared__ __align__(16) unsigned char rows_smem[3][LANES * ROW];
  const int lane = threadIdx.x;
  const unsigned char* from = source + lane * ROW;
  ptx::cp_async_cg_16(rows_smem[0] + lane * ROW, from, lane % 17);
  ptx::cp_async_commit_group();
  for (int i = 0; i < ROW; i += 4) ptx::cp_async_ca<4>(rows_smem[1] + lane * ROW + i, from + i, lane % 5);
  ptx::cp_async_commit_group();
  for (int i = 0; i < ROW; i += 8) ptx::cp_async_ca<8>(rows_smem[2] + lane * ROW + i, from + i, lane % 9);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<2>();   // the first group has landed
  for (int i = 0; i < ROW; ++i) out[lane * ROW + i] = rows_smem[0][lane * ROW + i];
  ptx::cp_async_wait_group<0>();   // so have the others
  for (int i = 0; i < ROW; ++i) out[(LANES + lane) * ROW + i] = rows_smem[1][lane * ROW + i];
  for (int i = 0; i < ROW; ++i) out[(2 * LANES + lane) * ROW + i] = rows_smem[2][lane * ROW + i];
}
