// feature: mma.sync on small integers, whose products and sums are exact in any order: to the bit
// launch: grid=1 block=32
// parameter: first f16[16,16] range=9
// parameter: second f16[8,16] range=9
// parameter: out f32[2,16,8] written
// expect: out = np.repeat((first.astype(np.float32) @ second.astype(np.float32).T)[None], 2, axis=0) + np.array([3, -5])[:,
//         None, None]
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

constexpr int M = 16;
constexpr int N = 8;
constexpr int K = 16;

template <typename T>
__device__ __forceinline__ unsigned pair_of(const __half* source) {
  const T low = static_cast<T>(__half2float(source[0]));
  const T high = static_cast<T>(__half2float(source[1]));
  const unsigned short* low_bits = reinterpret_cast<const unsigned short*>(&low);
  const unsigned short* high_bits = reinterpret_cast<const unsigned short*>(&high);
  return *low_bits | static_cast<unsigned>(*high_bits) << 16;
}

// The fragments by their definition: row lane / 4, columns from 2·(lane % 4).
template <typename T>
__device__ __forceinline__ void load(unsigned (&a)[4], unsigned (&b)[2], const __half* first, const __half* second) {
  const int row = threadIdx.x / 4;
  const int col = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; ++i) a[i] = pair_of<T>(first + (row + i % 2 * 8) * K + col + i / 2 * 8);
  for (int i = 0; i < 2; ++i) b[i] = pair_of<T>(second + row * K + col + i * 8);
}

extern "C" __global__ void products_exact(const __half* first, const __half* second, float* out) {
  unsigned a[4], b[2];
  float d[2][4];
  for (int i = 0; i < 4; ++i) d[0][i] = 3.0f, d[1][i] = -5.0f;
  load<__half>(a, b, first, second);
  ptx::mma_m16n8k16_f16(d[0], a, b);
  load<__nv_bfloat16>(a, b, first, second);
  ptx::mma_m16n8k16_bf16(d[1], a, b);
  for (int type = 0; type < 2; ++type) {
    for (int i = 0; i < 4; ++i) {
      out[type * M * N + (threadIdx.x / 4 + i / 2 * 8) * N + threadIdx.x % 4 * 2 + i % 2] = d[type][i];
    }
  }
}
