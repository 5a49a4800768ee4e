// bug: rows of 20 elements are read 16 bytes at a time, and every other one starts 8 bytes off what such a load needs.
// mechanism: vector access, alignment
// caught by: misaligned
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: K f16[16,16] normal stride=24
// parameter: odd_K f16[16,16] normal stride=20
// parameter: out f32[16,16] written
// expect: out = K.astype(np.float32) * 2
#include <cuda_fp16.h>

constexpr int COLS = 16;
constexpr int CHUNK = 8;   // elements in 16 bytes

struct alignas(16) Chunk {
  __half x[CHUNK];
};

extern "C" __global__ void vector_load_misaligned(const __half* K, const __half* odd_K, float* out) {
  const int row = threadIdx.x / (COLS / CHUNK);
  const int col = threadIdx.x % (COLS / CHUNK) * CHUNK;
#if BUG
  const __half* source = odd_K + row * 20 + col;
#else
  const __half* source = K + row * 24 + col;
#endif
  const Chunk chunk = *reinterpret_cast<const Chunk*>(source);   // here
  for (int i = 0; i < CHUNK; ++i) out[row * COLS + col + i] = __half2float(chunk.x[i]) * 2.0f;
}
