// bug: the loop over a block's output rows stops one step early, so the last rows keep what was there before.
// mechanism: output index
// caught by: wrong result
// needs: any
// launch: grid=2 block=32 smem=0
// parameter: values f32[2,8,32] normal
// parameter: out f32[2,8,32] written
// expect: out = values * 2
constexpr int ROWS = 8;
constexpr int COLS = 32;

extern "C" __global__ void output_rows_left_unwritten(const float* values, float* out) {
#if BUG
  const int num_rows = ROWS - 1;
#else
  const int num_rows = ROWS;
#endif
  for (int row = 0; row < num_rows; ++row) {
    const int i = (blockIdx.x * ROWS + row) * COLS + threadIdx.x;
    out[i] = values[i] * 2.0f;
  }
}
