// bug: padding was added to the rows and not to the launch's shared memory: the last rows lie past its end.
// mechanism: shared memory bounds
// caught by: out of bounds
// needs: hooks
// launch: grid=1 block=64 smem=4096
// parameter: K f32[16,64] normal
// parameter: out f32[64,16] written
// expect: out = K.T
constexpr int ROWS = 16;
constexpr int COLS = 64;
#if BUG
constexpr int STRIDE = COLS + 1;   // columns in different banks
#else
constexpr int STRIDE = COLS;
#endif

extern "C" __global__ void shared_tile_larger_than_asked_for(const float* K, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* K_smem = reinterpret_cast<float*>(shared_bytes);   // (ROWS, STRIDE)
  for (int row = 0; row < ROWS; ++row) K_smem[row * STRIDE + threadIdx.x] = K[row * COLS + threadIdx.x];   // here
  __syncthreads();   // the tile is complete
  for (int i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) out[i] = K_smem[i % ROWS * STRIDE + i / ROWS];   // here
}
