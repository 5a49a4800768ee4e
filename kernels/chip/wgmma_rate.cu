// wgmma_rate: MMAs m64nWIDTHk16 in FP16, back to back into the same accumulators, by each of THREADS / 128 warpgroups.
// STEPS of them form a group; up to IN_FLIGHT groups are in flight when the next one is issued.
#include "chip.cuh"

constexpr int GROUPS = THREADS / 128;
constexpr int A_BYTES = 64 * ROW_BYTES;

extern __shared__ __align__(1024) unsigned char smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_wgmma_rate(const __grid_constant__ MicroParams p) {
  fill(reinterpret_cast<unsigned*>(smem), SMEM_BYTES);
  const unsigned long long a = k_major(smem + threadIdx.x / 128 * A_BYTES);
  unsigned char* const b_smem = smem + GROUPS * A_BYTES;
  const unsigned long long b = B_TRANSPOSED ? mn_major(b_smem, 64) : k_major(b_smem);
  constexpr int B_STEP = B_TRANSPOSED ? 2 * PATTERN_BYTES : 32;   // bytes from k to k + 16
  float d[WIDTH / 2];
  unsigned a_registers[4][4];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) a_registers[i / 4][i % 4] = threadIdx.x + i;
  __syncthreads();   // all warps start together
  const long long start = clock64();
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const unsigned long long b_step = b + step % 4 * B_STEP / 16;
      constexpr ptx::Major MAJOR = B_TRANSPOSED ? ptx::Major::MN : ptx::Major::K;
      if (A_IN_REGISTERS)
        ptx::wgmma_rs<WIDTH, __half, MAJOR>(d, a_registers[step % 4], b_step, true);
      else
        ptx::wgmma_ss<WIDTH, __half, ptx::Major::K, MAJOR>(d, a + step % 4 * 2, b_step, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<IN_FLIGHT>();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(d);
  const long long end = clock64();
  keep_all(p, d, p.count < 0);
  report(p, start, end, p.repeats);
}
