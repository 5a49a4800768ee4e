// exp2: independent chains of ex2.approx. Each thread executes CHAINS · UNROLL · repeats of them.
#include "micro.cuh"
#include "ptx.cuh"

static_assert(CHAINS % 4 == 0, "an arithmetic unit needs several independent chains per thread to stay busy");

extern "C" __global__ void __launch_bounds__(512) micro_exp2(const __grid_constant__ MicroParams p) {
  const float* in = static_cast<const float*>(p.in);
  float chain[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) chain[c] = in[threadIdx.x] - c;
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) chain[c] = ptx::ex2_approx_ftz(chain[c]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sum += chain[c];
  keep(p, sum, p.count < 0);
}
