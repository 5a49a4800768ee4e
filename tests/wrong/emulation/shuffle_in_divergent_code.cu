// bug: a shuffle that names the whole warp stands inside the guard of the tail; lanes past the end never come.
// mechanism: warp shuffle
// caught by: deadlock
// needs: any
// launch: grid=1 block=64 smem=0
// parameter: scores f32[50] normal
// parameter: out f32[64] written
// parameter: num_keys int 50
// expect: out = np.repeat([scores[:32].sum(), scores[32:].sum()], 32)
// tolerance: 1e-4
constexpr int LANES = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

extern "C" __global__ void shuffle_in_divergent_code(const float* scores, float* out, int num_keys) {
  float sum = threadIdx.x < num_keys ? scores[threadIdx.x] : 0.0f;
#if BUG
  if (threadIdx.x < num_keys)
#endif
    for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
  __syncthreads();   // the scores may be overwritten from here on
  out[threadIdx.x] = sum;
}
