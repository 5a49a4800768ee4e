// bug: rows are written as wide as they are stored, over the padding between them, which is not part of the tensor.
// mechanism: strides
// caught by: out of bounds
// needs: hooks
// launch: grid=3 block=8 smem=0
// parameter: values f32[3,6] normal
// parameter: out f32[3,6] written stride=8
// expect: out = values + 1
constexpr int COLS = 6;
constexpr int STRIDE = 8;   // of output rows

extern "C" __global__ void padding_between_rows_written(const float* values, float* out) {
  const int row = blockIdx.x;
  const int col = threadIdx.x;
  const float value = col < COLS ? values[row * COLS + col] + 1.0f : 0.0f;
#if BUG
  if (col < STRIDE) out[row * STRIDE + col] = value;   // here
#else
  if (col < COLS) out[row * STRIDE + col] = value;
#endif
}
