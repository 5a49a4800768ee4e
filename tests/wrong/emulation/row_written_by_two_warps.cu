// bug: the warps that share an output row disagree on where its second half begins, so one column belongs to both.
// mechanism: output split
// caught by: race
// needs: hooks
// launch: grid=2 block=64 smem=0
// parameter: values f32[2,64] normal
// parameter: out f32[2,64] written
// expect: out = values * 2
constexpr int COLS = 64;
constexpr int LANES = 32;

extern "C" __global__ void row_written_by_two_warps(const float* values, float* out) {
  const int warp = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
#if BUG
  const int first = warp * (COLS / 2 - 1);
#else
  const int first = warp * (COLS / 2);
#endif
  const int col = blockIdx.x * COLS + first + lane;
  out[col] = values[col] * 2.0f;   // here: first, second
}
