// half2_fma: independent chains of HFMA2, two multiply-adds each. Each thread executes CHAINS · UNROLL · repeats of them.
#include <cuda_fp16.h>

#include "micro.cuh"

static_assert(CHAINS % 4 == 0, "an arithmetic unit needs several independent chains per thread to stay busy");

extern "C" __global__ void __launch_bounds__(512) micro_half2_fma(const __grid_constant__ MicroParams p) {
  const __half2* in = static_cast<const __half2*>(p.in);
  const __half2 a = in[threadIdx.x];
  const __half2 b = in[threadIdx.x + blockDim.x];
  __half2 chain[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) chain[c] = __hadd2(a, __float2half2_rn(static_cast<float>(c)));
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) chain[c] = __hfma2(chain[c], a, b);
    }
  }
  __half2 sum = chain[0];
#pragma unroll
  for (int c = 1; c < CHAINS; ++c) sum = __hadd2(sum, chain[c]);
  keep(p, sum, p.count < 0);
}
