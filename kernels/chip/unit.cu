// unit: instructions of one kind that an SM executes per cycle. CHAINS independent chains per thread, of UNROLL · repeats
// instructions each; with one warp and one chain, the instruction's latency.
#include "once.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_unit(const __grid_constant__ MicroParams p) {
  const float* in = static_cast<const float*>(p.in);
  const float a = in[threadIdx.x];
  const float b = in[threadIdx.x + blockDim.x];
  float chain[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) chain[c] = a + c;
  __syncthreads();   // all warps start together
  const long long start = clock64();
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < CHAINS; ++c) chain[c] = once(chain[c], a, b, u);
    }
  }
  const long long end = clock64();
  keep_all(p, chain, p.count < 0);
  report(p, start, end, p.repeats);
}
