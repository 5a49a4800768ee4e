// bug: the last block writes output rows that do not exist.
// mechanism: tail guard
// caught by: out of bounds
// needs: hooks
// launch: grid=2 block=64 smem=0
// parameter: Q f32[100] normal
// parameter: out f32[100] written
// parameter: q_len int 100
// expect: out = Q * 2
constexpr int ROWS = 64;

extern "C" __global__ void tail_guard_missing_on_write(const float* Q, float* out, int q_len) {
  const int q_row = blockIdx.x * ROWS + threadIdx.x;
  const float q = q_row < q_len ? Q[q_row] : 0.0f;
#if BUG
  out[q_row] = q * 2.0f;   // here
#else
  if (q_row < q_len) out[q_row] = q * 2.0f;
#endif
}
