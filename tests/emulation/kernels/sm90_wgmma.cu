// wgmma in every shape, type and layout of its operands: block c works out case c, D (64, N) = D + A (64, K) · B (N, K)^T.
// A and B come as (rows, 128 bytes), K contiguous, and are put into shared memory in the layout that the case wants.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx_sm90.cuh"

using ptx::Major;
using ptx::Swizzle;

constexpr int ROWS = 64;
constexpr int MAX_N = 256;
constexpr int K_BYTES = 128;      // of a row
constexpr int STEP_BYTES = 32;    // of a row, that one instruction takes
constexpr int STEPS = K_BYTES / STEP_BYTES;
constexpr int PIECE = 16;
constexpr int B_OFFSET = ROWS * K_BYTES;

// An operand of EXTENT rows (of A; of B columns): where its bytes lie, and the descriptor of one step along K.
template <Major MAJOR, Swizzle SWIZZLE, int EXTENT>
struct Layout {
  static constexpr int SPAN = SWIZZLE == Swizzle::b128 ? 128 : SWIZZLE == Swizzle::b64 ? 64 : SWIZZLE == Swizzle::b32 ? 32 : 16;
  static constexpr int PER_SPAN = SPAN / PIECE;
  static constexpr int CORE = 8 * SPAN;                      // bytes of 8 lines of a span
  static constexpr int K_LINES = K_BYTES / 2;                // of MN-major operands, which have 2-byte elements
  // MN-major with a swizzle narrower than EXTENT: the next span's worth of columns follows after all of K.
  static constexpr int LEADING = MAJOR == Major::K ? EXTENT * PIECE : SWIZZLE == Swizzle::none ? EXTENT / 8 * CORE : K_LINES / 8 * CORE;
  static constexpr int STRIDE = CORE;

  // Byte `byte` of row `row` (counted along K).
  static __device__ int offset(int row, int byte) {
    int at;
    if (MAJOR == Major::K) {
      const int piece = byte / PIECE;
      at = row % 8 * SPAN + row / 8 * CORE + byte % PIECE +
           (SWIZZLE == Swizzle::none ? piece * LEADING : piece % PER_SPAN * PIECE + piece / PER_SPAN * EXTENT * SPAN);
    } else {
      const int k = byte / 2, piece = row / 8;
      at = k % 8 * SPAN + row % 8 * 2 + byte % 2 +
           (SWIZZLE == Swizzle::none ? k / 8 * LEADING + piece * STRIDE
                                     : k / 8 * STRIDE + piece % PER_SPAN * PIECE + piece / PER_SPAN * LEADING);
    }
    return SWIZZLE == Swizzle::none ? at : at ^ at >> 7 << 4 & (PER_SPAN - 1) * PIECE;
  }

  static __device__ unsigned long long descriptor(const unsigned char* base, int step) {
    const int piece = step * STEP_BYTES / PIECE;
    const int advance = MAJOR == Major::K ? SWIZZLE == Swizzle::none ? piece * LEADING
                                                                     : piece % PER_SPAN * PIECE + piece / PER_SPAN * EXTENT * SPAN
                                          : step * 2 * (SWIZZLE == Swizzle::none ? LEADING : STRIDE);
    return ptx::make_descriptor(base + advance, LEADING, STRIDE, SWIZZLE);
  }
};

template <int N, class In, Major A_MAJOR, Major B_MAJOR, Swizzle SWIZZLE, bool A_IN_REGISTERS, int SCALE_A = 1, int SCALE_B = 1>
__device__ void run(unsigned char* smem, const unsigned char* A_gmem, const unsigned char* B_gmem, float* D_gmem) {
  using A = Layout<A_MAJOR, SWIZZLE, ROWS>;
  using B = Layout<B_MAJOR, SWIZZLE, (N + 63) / 64 * 64>;   // whole spans
  unsigned char* A_smem = smem;
  unsigned char* B_smem = smem + B_OFFSET;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < ROWS * K_BYTES; i += blockDim.x) A_smem[A::offset(i / K_BYTES, i % K_BYTES)] = A_gmem[i];
  for (int i = thread; i < N * K_BYTES; i += blockDim.x) B_smem[B::offset(i / K_BYTES, i % K_BYTES)] = B_gmem[i];
  ptx::fence_proxy_async_shared();
  __syncthreads();

  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = D_gmem[(row + i / 2 % 2 * 8) * MAX_N + i / 4 * 8 + column + i % 2];
  unsigned a[STEPS][4];
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + i % 2 * 8) * K_BYTES + step * STEP_BYTES + lane % 4 * 4 + i / 2 * 16;
      a[step][i] = *reinterpret_cast<const unsigned*>(A_gmem + at);
    }
  }

  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if constexpr (A_IN_REGISTERS) {
      ptx::wgmma_rs<N, In, B_MAJOR, SCALE_A, SCALE_B>(d, a[step], B::descriptor(B_smem, step), true);
    } else {
      ptx::wgmma_ss<N, In, A_MAJOR, B_MAJOR, SCALE_A, SCALE_B>(d, A::descriptor(A_smem, step), B::descriptor(B_smem, step), true);
    }
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) D_gmem[(row + i / 2 % 2 * 8) * MAX_N + i / 4 * 8 + column + i % 2] = d[i];
}

#if SHAPES
#ifndef FIRST_N
#define FIRST_N 8
#define LAST_N 256
#endif
// Every N from FIRST_N to LAST_N. Case: (N / 8 - 1) · 3 + 0 both K-major, 1 both MN-major, 2 A in registers and B MN-major.
template <int N>
__device__ __forceinline__ void run_shape(int index, unsigned char* smem, const unsigned char* A, const unsigned char* B, float* D) {
  if (index / 3 == N / 8 - 1) {
    if (index % 3 == 0) run<N, __half, Major::K, Major::K, Swizzle::b128, false>(smem, A, B, D);
    if (index % 3 == 1) run<N, __half, Major::MN, Major::MN, Swizzle::b128, false>(smem, A, B, D);
    if (index % 3 == 2) run<N, __half, Major::K, Major::MN, Swizzle::b128, true>(smem, A, B, D);
  } else if constexpr (N < LAST_N) {
    run_shape<N + 8>(index, smem, A, B, D);
  }
}
#else
// N = 96, so that no swizzle's span divides it. Case: type · 24 + swizzle · 6 + layout; 8-bit types have K-major layouts alone.
template <class In, Swizzle SWIZZLE>
__device__ void run_layout(int layout, unsigned char* smem, const unsigned char* A, const unsigned char* B, float* D) {
  constexpr int N = 96;
  if (layout == 0) run<N, In, Major::K, Major::K, SWIZZLE, false>(smem, A, B, D);
  if (layout == 1) run<N, In, Major::K, Major::K, SWIZZLE, true, -1, 1>(smem, A, B, D);
  if constexpr (sizeof(In) == 2) {
    if (layout == 2) run<N, In, Major::K, Major::MN, SWIZZLE, false, 1, -1>(smem, A, B, D);
    if (layout == 3) run<N, In, Major::MN, Major::K, SWIZZLE, false, -1, -1>(smem, A, B, D);
    if (layout == 4) run<N, In, Major::MN, Major::MN, SWIZZLE, false>(smem, A, B, D);
    if (layout == 5) run<N, In, Major::K, Major::MN, SWIZZLE, true>(smem, A, B, D);
  }
}
template <class In>
__device__ void run_swizzle(int index, unsigned char* smem, const unsigned char* A, const unsigned char* B, float* D) {
  if (index / 6 == 0) run_layout<In, Swizzle::none>(index % 6, smem, A, B, D);
  if (index / 6 == 1) run_layout<In, Swizzle::b32>(index % 6, smem, A, B, D);
  if (index / 6 == 2) run_layout<In, Swizzle::b64>(index % 6, smem, A, B, D);
  if (index / 6 == 3) run_layout<In, Swizzle::b128>(index % 6, smem, A, B, D);
}
#endif

// A: (type, 64, 128 bytes), B: (type, 256, 128 bytes), D: (case, 64, 256). `first`: the case of block 0.
extern "C" __global__ void __launch_bounds__(128, 1)
sm90_wgmma(const unsigned char* A, const unsigned char* B, float* D, int first) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const int index = first + blockIdx.x;
  D += static_cast<long long>(blockIdx.x) * ROWS * MAX_N;
#if SHAPES
  run_shape<FIRST_N>(index, shared_bytes, A, B, D);
#else
  A += index / 24 * ROWS * K_BYTES;
  B += index / 24 * MAX_N * K_BYTES;
  if (index / 24 == 0) run_swizzle<__half>(index % 24, shared_bytes, A, B, D);
  if (index / 24 == 1) run_swizzle<__nv_bfloat16>(index % 24, shared_bytes, A, B, D);
  if (index / 24 == 2) run_swizzle<__nv_fp8_e4m3>(index % 24, shared_bytes, A, B, D);
  if (index / 24 == 3) run_swizzle<__nv_fp8_e5m2>(index % 24, shared_bytes, A, B, D);
#endif
}
