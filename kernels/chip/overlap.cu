// overlap: TENSOR_GROUPS warpgroups issue MMAs without a pause while the others execute one kind of arithmetic until the MMAs are
// done: is either slower than alone?
#include "once.cuh"
#include "softmax.cuh"

constexpr int GROUPS = THREADS / 128;
constexpr int A_BYTES = 64 * ROW_BYTES;
constexpr int SCORES = 32;
constexpr int CHAINS = 8;
constexpr int UNROLL = 16;
constexpr int BARRIER_BYTES = 16;

extern __shared__ __align__(1024) unsigned char smem[];

__device__ __forceinline__ long long multiply(const MicroParams& p) {
  const unsigned long long a = k_major(smem + threadIdx.x / 128 * A_BYTES);
  const unsigned long long b = k_major(smem + GROUPS * A_BYTES);
  float d[WIDTH / 2];
  unsigned a_registers[4][4];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) a_registers[i / 4][i % 4] = threadIdx.x + i;
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (A_IN_REGISTERS)
        ptx::wgmma_rs<WIDTH, __half>(d, a_registers[step % 4], b + step % 4 * 2, true);
      else
        ptx::wgmma_ss<WIDTH, __half>(d, a + step % 4 * 2, b + step % 4 * 2, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(d);
  keep_all(p, d, p.count < 0);
  return p.repeats;
}

__device__ __forceinline__ long long calculate(const MicroParams& p, ptx::Mbarrier* done) {
  const float* in = static_cast<const float*>(p.in);
  const float a = in[threadIdx.x];
  const float b = in[threadIdx.x + blockDim.x];
  float row_max[2] = {a, b};
  float row_sum[2] = {a, b};
#if OP == OP_SOFTMAX
  float chain[SCORES];
  unsigned packed[SCORES / 8][4];
#else
  float chain[CHAINS];
#endif
#pragma unroll
  for (int c = 0; c < static_cast<int>(sizeof(chain) / sizeof(float)); ++c) chain[c] = a - c;
  long long repeat = 0;
  // Without tensor warpgroups to wait for, the loop runs p.repeats times.
#pragma unroll 1
  while (repeat < (TENSOR_GROUPS > 0 ? p.count : p.repeats)) {
    const bool stop = ptx::mbarrier_test_wait_parity(done, 0);   // tested here and used below, so that nothing waits for the result
#if OP == OP_SOFTMAX
    softmax<SCORES, TAKE_MAX, true, 0, false>(chain, row_max, row_sum, b);
    pack_all(chain, packed);
    keep_all(p, packed, p.count < 0);
#else
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) chain[c] = once(chain[c], a, b, u);
    }
#endif
    ++repeat;
    if (stop) break;
  }
  keep_all(p, chain, p.count < 0);
  keep_all(p, row_sum, p.count < 0);
  return repeat;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_overlap(const __grid_constant__ MicroParams p) {
  ptx::Mbarrier* const done = reinterpret_cast<ptx::Mbarrier*>(smem + SMEM_BYTES - BARRIER_BYTES);
  fill(reinterpret_cast<unsigned*>(smem), SMEM_BYTES - BARRIER_BYTES);
  if (threadIdx.x == 0) ptx::mbarrier_init(done, 1);   // thread 0, in a tensor warpgroup, signals that it is done
  __syncthreads();   // the barrier is initialised, and all warps start together
  const long long start = clock64();
  long long times;
  if (TENSOR_GROUPS > 0 && threadIdx.x < 128 * TENSOR_GROUPS) {
    times = multiply(p);
    report(p, start, clock64(), times);
    if (threadIdx.x == 0) ptx::mbarrier_arrive(done);
  } else {
    times = calculate(p, done);
    report(p, start, clock64(), times);
  }
}
