// smem_read: conflict-free 16-byte reads of shared memory. Each thread executes UNROLL · repeats of them.
#include "micro.cuh"

constexpr int CHUNKS = 2048;   // 16-byte chunks: 32 KiB
static_assert((CHUNKS & (CHUNKS - 1)) == 0, "CHUNKS must be a power of two: positions wrap by a mask");

extern "C" __global__ void __launch_bounds__(512) micro_smem_read(const __grid_constant__ MicroParams p) {
  __shared__ uint4 chunks_smem[CHUNKS];
  for (int i = threadIdx.x; i < CHUNKS; i += blockDim.x) chunks_smem[i] = static_cast<const uint4*>(p.in)[i];
  __syncthreads();   // every chunk is written before any is read
  const unsigned step = static_cast<unsigned>(p.count);   // unknown to the compiler, so that it cannot remove any read
  unsigned position = threadIdx.x;
  uint4 sum = {};
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint4 value = chunks_smem[position & (CHUNKS - 1)];
      position += step;
      sum.x ^= value.x;
      sum.y ^= value.y;
      sum.z ^= value.z;
      sum.w ^= value.w;
    }
  }
  keep(p, sum.x ^ sum.y ^ sum.z ^ sum.w, p.count < 0);
}
