// bug: every row of the output lands one row too low, the last one below the tensor.
// mechanism: output index
// caught by: out of bounds
// needs: hooks
// launch: grid=5 block=32 smem=0
// parameter: values f32[5,32] normal
// parameter: out f32[5,32] written
// expect: out = values * 3
constexpr int COLS = 32;

extern "C" __global__ void output_row_off_by_one(const float* values, float* out) {
  const int row = blockIdx.x;
#if BUG
  const int out_row = row + 1;
#else
  const int out_row = row;
#endif
  out[out_row * COLS + threadIdx.x] = values[row * COLS + threadIdx.x] * 3.0f;   // here
}
