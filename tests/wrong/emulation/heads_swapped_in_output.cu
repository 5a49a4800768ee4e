// bug: batch and head change places in the output's index; every element is written once, in the wrong place.
// mechanism: output index
// caught by: wrong result
// needs: any
// launch: grid=2x3 block=32 smem=0
// parameter: values f32[2,3,32] normal
// parameter: out f32[2,3,32] written
// expect: out = values * 3
constexpr int COLS = 32;

extern "C" __global__ void heads_swapped_in_output(const float* values, float* out) {
  const int batch = blockIdx.x;
  const int head = blockIdx.y;
  const int in_row = batch * gridDim.y + head;
#if BUG
  const int out_row = head * gridDim.x + batch;
#else
  const int out_row = batch * gridDim.y + head;
#endif
  out[out_row * COLS + threadIdx.x] = values[in_row * COLS + threadIdx.x] * 3.0f;
}
