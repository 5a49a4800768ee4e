// bug: shared rows are padded by one float, and a pair of accumulators is stored 8 bytes at a time.
// mechanism: vector access, alignment
// caught by: misaligned
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: values f32[8,16] normal
// parameter: out f32[8,16] written
// expect: out = values * 2
constexpr int ROWS = 8;
constexpr int COLS = 16;
#if BUG
constexpr int STRIDE = COLS + 1;
#else
constexpr int STRIDE = COLS + 2;
#endif

extern "C" __global__ void vector_store_misaligned(const float* values, float* out) {
  __shared__ __align__(16) float O_smem[ROWS * STRIDE];
  const int row = threadIdx.x / (COLS / 2);
  const int col = threadIdx.x % (COLS / 2) * 2;
  const float* source = values + row * COLS + col;
  *reinterpret_cast<float2*>(O_smem + row * STRIDE + col) = make_float2(source[0] * 2.0f, source[1] * 2.0f);   // here
  __syncthreads();   // the rows are complete
  for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) out[i] = O_smem[i / COLS * STRIDE + i % COLS];
}
