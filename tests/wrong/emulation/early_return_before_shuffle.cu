// bug: lanes past the end return early, and the others shuffle with the whole warp.
// mechanism: warp shuffle
// caught by: deadlock
// needs: any
// launch: grid=1 block=32 smem=0
// parameter: scores f32[20] normal
// parameter: out f32[20] written
// parameter: num_keys int 20
// expect: out = scores - scores.max()
constexpr int LANES = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);

extern "C" __global__ void early_return_before_shuffle(const float* scores, float* out, int num_keys) {
  const int lane = threadIdx.x;
#if BUG
  if (lane >= num_keys) return;
#endif
  const float score = lane < num_keys ? scores[lane] : NEG_INF;
  float row_max = score;
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, distance));
  }
  if (lane < num_keys) out[lane] = score - row_max;
}
