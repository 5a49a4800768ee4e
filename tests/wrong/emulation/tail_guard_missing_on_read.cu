// bug: the last block reads query rows that do not exist.
// mechanism: tail guard
// caught by: out of bounds
// needs: hooks
// launch: grid=2 block=64 smem=0
// parameter: Q f32[100] normal
// parameter: out f32[100] written
// parameter: q_len int 100
// expect: out = Q - np.repeat(np.pad(Q, (0, 28)).reshape(4, 32).sum(1), 32)[:100]
// tolerance: 1e-5
constexpr int ROWS = 64;
constexpr int LANES = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

extern "C" __global__ void tail_guard_missing_on_read(const float* Q, float* out, int q_len) {
  const int q_row = blockIdx.x * ROWS + threadIdx.x;
#if BUG
  const float q = Q[q_row];   // here
#else
  const float q = q_row < q_len ? Q[q_row] : 0.0f;
#endif
  float sum = q;
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
  if (q_row < q_len) out[q_row] = q - sum;
}
