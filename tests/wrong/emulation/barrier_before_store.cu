// bug: the barrier comes before the probabilities are stored instead of after.
// mechanism: block barrier
// caught by: race
// needs: hooks
// launch: grid=2 block=64 smem=0
// parameter: scores f32[2,64] normal
// parameter: out f32[2,64] written
// expect: out = np.exp2(scores) / np.exp2(scores).sum(1, keepdims=True)
// tolerance: 1e-5
#include "ptx.cuh"

constexpr int KEYS = 64;

extern "C" __global__ void barrier_before_store(const float* scores, float* out) {
  __shared__ float prob_smem[KEYS];
  const int col = threadIdx.x;
  const float prob = ptx::ex2_approx_ftz(scores[blockIdx.x * KEYS + col]);
#if BUG
  __syncthreads();
  prob_smem[col] = prob;   // here: first
#else
  prob_smem[col] = prob;
  __syncthreads();   // the row's probabilities are complete
#endif
  float sum = 0.0f;
  for (int key = 0; key < KEYS; ++key) sum += prob_smem[key];   // here: second
  out[blockIdx.x * KEYS + col] = prob / sum;
}
