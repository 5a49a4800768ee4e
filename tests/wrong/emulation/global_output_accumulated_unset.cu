// bug: the first tile adds to an output that nobody has set.
// mechanism: initialisation
// caught by: uninitialised
// needs: hooks
// launch: grid=2 block=32 smem=0
// parameter: values f32[4,64] normal
// parameter: out f32[64] written
// parameter: num_tiles int 4
// expect: out = values.sum(0)
// tolerance: 1e-5
constexpr int COLS = 64;

extern "C" __global__ void global_output_accumulated_unset(const float* values, float* out, int num_tiles) {
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
#if !BUG
  out[col] = 0.0f;
#endif
  for (int tile = 0; tile < num_tiles; ++tile) out[col] += values[tile * COLS + col];   // here
}
