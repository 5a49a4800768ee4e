// wgmma_issue: the cycle counter before, after the issue of each of STAMPS - 1 MMAs m64nWIDTHk16, and after their completion. Where
// an issue suddenly takes as long as the MMA itself, the queue was full. All THREADS / 128 warpgroups issue at the same time.
#include "chip.cuh"

constexpr int ISSUES = STAMPS - 1;
constexpr int GROUPS = THREADS / 128;
constexpr int A_BYTES = 64 * ROW_BYTES;

extern __shared__ __align__(1024) unsigned char smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_wgmma_issue(const __grid_constant__ MicroParams p) {
  fill(reinterpret_cast<unsigned*>(smem), SMEM_BYTES);
  const unsigned long long a = k_major(smem + threadIdx.x / 128 * A_BYTES);
  const unsigned long long b = k_major(smem + GROUPS * A_BYTES);
  float d[WIDTH / 2];
  unsigned a_registers[4][4];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) a_registers[i / 4][i % 4] = threadIdx.x + i;
  long long start = 0;
  unsigned stamp[STAMPS];
  // The first iteration misses in the instruction caches; the last one is reported.
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
    __syncthreads();   // all warps start together
    ptx::wgmma_fence();
    start = clock64();
#pragma unroll
    for (int i = 0; i < ISSUES; ++i) {
      if (A_IN_REGISTERS)
        ptx::wgmma_rs<WIDTH, __half>(d, a_registers[i % 4], b + i % 4 * 2, true);
      else
        ptx::wgmma_ss<WIDTH, __half>(d, a + i % 4 * 2, b + i % 4 * 2, true);
      if (EACH || i == ISSUES - 1) stamp[i] = static_cast<unsigned>(clock64());
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    stamp[ISSUES] = static_cast<unsigned>(clock64());
    ptx::wgmma_pin(d);
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < STAMPS; ++i)
      words(p)[3 + i] = EACH || i >= ISSUES - 1 ? stamp[i] - static_cast<unsigned>(start) : 0;
  }
  keep_all(p, d, p.count < 0);
  report(p, start, clock64(), p.repeats);
}
