// bug: the sum of a row reuses the warps' partial results of its maximum before every warp has read them.
// mechanism: block barrier
// caught by: race
// needs: hooks
// launch: grid=2 block=128 smem=0
// parameter: scores f32[2,128] normal
// parameter: out f32[2,128] written
// expect: out = np.exp2(scores) / np.exp2(scores).sum(1, keepdims=True)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int THREADS = 128;
constexpr int LANES = 32;
constexpr int WARPS = THREADS / LANES;
constexpr unsigned FULL_WARP = 0xffffffffu;

extern "C" __global__ void reduction_missing_second_barrier(const float* scores, float* out) {
  __shared__ float partial_smem[WARPS];
  const int warp = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  const float score = scores[blockIdx.x * THREADS + threadIdx.x];

  float row_max = score;
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, distance));
  }
  if (lane == 0) partial_smem[warp] = row_max;
  __syncthreads();   // every warp's maximum is there
  for (int w = 0; w < WARPS; ++w) row_max = fmaxf(row_max, partial_smem[w]);   // here: first
#if !BUG
  __syncthreads();   // every warp has read them: the buffer is free
#endif

  const float prob = ptx::ex2_approx_ftz(score - row_max);
  float sum = prob;
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
  if (lane == 0) partial_smem[warp] = sum;   // here: second
  __syncthreads();   // every warp's sum is there
  sum = 0.0f;
  for (int w = 0; w < WARPS; ++w) sum += partial_smem[w];
  out[blockIdx.x * THREADS + threadIdx.x] = prob / sum;
}
