// bug: all blocks read the last one's part, which it overwrites, and nothing says that they have read it.
// mechanism: global memory reused, between blocks
// caught by: race
// needs: hooks
// launch: grid=2 block=32 smem=0
// parameter: values f32[2,32] normal
// parameter: parts f32[2,32] zeros
// parameter: out f32[2,32] written
// expect: out = np.zeros((2, 32), np.float32)
// expect: parts = values
constexpr int COLS = 32;

extern "C" __global__ void part_overwritten_before_it_is_read(const float* values, float* parts, float* out) {
#if BUG
  const int of_block = gridDim.x - 1;
#else
  const int of_block = blockIdx.x;
#endif
  out[blockIdx.x * COLS + threadIdx.x] = parts[of_block * COLS + threadIdx.x];        // here: first
  parts[blockIdx.x * COLS + threadIdx.x] = values[blockIdx.x * COLS + threadIdx.x];   // here: second
}
