// bug: the barrier stands inside the guard of the tail, so that threads past the end meet another barrier.
// mechanism: block barrier
// caught by: divergent barrier
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: scores f32[100] normal
// parameter: out f32[100] written
// parameter: num_keys int 100
// expect: out = scores - scores.max()
constexpr int THREADS = 128;
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);

extern "C" __global__ void barrier_in_divergent_code(const float* scores, float* out, int num_keys) {
  __shared__ float row_smem[THREADS];
  const bool exists = threadIdx.x < num_keys;
  row_smem[threadIdx.x] = NEG_INF;
  if (exists) {
    row_smem[threadIdx.x] = scores[threadIdx.x];
#if BUG
    __syncthreads();
#endif
  }
#if !BUG
  __syncthreads();   // the row is complete
#endif
  float row_max = NEG_INF;
  for (int key = 0; key < num_keys; ++key) row_max = fmaxf(row_max, row_smem[key]);
  __syncthreads();   // everyone has read the row: it may be used again
  if (exists) out[threadIdx.x] = scores[threadIdx.x] - row_max;
}
