// mix: the softmax of a tile of scores, HELD in each of THREADS threads, repeated with nothing running beside it.
#include "softmax.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_mix(const __grid_constant__ MicroParams p) {
  const float* in = static_cast<const float*>(p.in);
  const float scale = in[0];
  float scores[HELD];
  unsigned packed[HELD / 8][4];
  float row_max[2] = {in[1], in[2]};
  float row_sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < HELD; ++i) scores[i] = in[threadIdx.x] - i;
  __syncthreads();   // all warps start together
  const long long start = clock64();
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
    softmax<HELD, TAKE_MAX, TAKE_SUM, POLYNOMIAL_EVERY, SHUFFLES>(scores, row_max, row_sum, scale);
    pack_all(scores, packed);
    keep_all(p, packed, p.count < 0);
  }
  const long long end = clock64();
  keep_all(p, row_sum, p.count < 0);
  keep_all(p, scores, p.count < 0);
  report(p, start, end, p.repeats);
}
