// The CPU version of kernels/common/ptx.cuh: the same names and signatures, with the instructions' semantics in C++.
// Section numbers are those of the PTX ISA 9.0. Both files have the same include guard, so the first one included is used.
#ifndef FLASHLAB_PTX
#define FLASHLAB_PTX
#include "async.h"
#include "cuda_math.h"
#include "matrix.h"
#include "runtime.h"

namespace emu {

// --- ldmatrix, stmatrix: each of the first 8 · COUNT lanes supplies the address of a 16-byte row ----------------------------
struct MatrixRows {
  void* row;
  unsigned* registers;
};

template <int COUNT, bool TRANSPOSED>
EMULATED inline void load_matrices(void* const (&of_lane)[WARP]) {
  for (int i = 0; i < COUNT; ++i) {
    unsigned short matrix[MATRIX_ROWS][MATRIX_ROWS];
    for (int row = 0; row < MATRIX_ROWS; ++row) {
      __builtin_memcpy(matrix[row], static_cast<const MatrixRows*>(of_lane[i * MATRIX_ROWS + row])->row, ROW_BYTES);
    }
    for (int lane = 0; lane < WARP; ++lane) {
      const int row = row_of(lane), column = column_of(lane);
      const unsigned low = TRANSPOSED ? matrix[column][row] : matrix[row][column];
      const unsigned high = TRANSPOSED ? matrix[column + 1][row] : matrix[row][column + 1];
      static_cast<const MatrixRows*>(of_lane[lane])->registers[i] = low | high << 16;
    }
  }
}

template <int COUNT, bool TRANSPOSED>
EMULATED inline void store_matrices(void* const (&of_lane)[WARP]) {
  for (int i = 0; i < COUNT; ++i) {
    unsigned short matrix[MATRIX_ROWS][MATRIX_ROWS];
    for (int lane = 0; lane < WARP; ++lane) {
      const int row = row_of(lane), column = column_of(lane);
      const unsigned pair = static_cast<const MatrixRows*>(of_lane[lane])->registers[i];
      (TRANSPOSED ? matrix[column][row] : matrix[row][column]) = static_cast<unsigned short>(pair);
      (TRANSPOSED ? matrix[column + 1][row] : matrix[row][column + 1]) = static_cast<unsigned short>(pair >> 16);
    }
    for (int row = 0; row < MATRIX_ROWS; ++row) {
      __builtin_memcpy(static_cast<const MatrixRows*>(of_lane[i * MATRIX_ROWS + row])->row, matrix[row], ROW_BYTES);
    }
  }
}

__forceinline__ bool names_matrix_row(const void* row, int count, const char* name) {
  if (lane_id() >= count * MATRIX_ROWS) return false;   // its address is ignored
  if (!is_shared(row)) fail("%s: wanted the address of a row in shared memory, got an address outside shared memory, %p", name, row);
  if (reinterpret_cast<std::uintptr_t>(row) % ROW_BYTES != 0) {
    fail("%s: wanted a row that starts on a 16-byte boundary, got shared address %u, %u bytes past one", name,
         shared_address(row), static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(row) % ROW_BYTES));
  }
  return true;
}
template <bool TRANSPOSED, int COUNT>
__forceinline__ void ldmatrix(unsigned (&registers)[COUNT], const void* row, const char* name) {
  if (names_matrix_row(row, COUNT, name) && detecting()) on_read(row, ROW_BYTES, Kind::matrix);
  MatrixRows mine = {const_cast<void*>(row), registers};
  warp_collective(FULL_WARP, &mine, load_matrices<COUNT, TRANSPOSED>, name);
}
template <bool TRANSPOSED, int COUNT>
__forceinline__ void stmatrix(void* row, const unsigned (&registers)[COUNT], const char* name) {
  if (names_matrix_row(row, COUNT, name) && detecting()) on_write(row, ROW_BYTES, Kind::matrix);
  MatrixRows mine = {row, const_cast<unsigned*>(registers)};
  warp_collective(FULL_WARP, &mine, store_matrices<COUNT, TRANSPOSED>, name);
}

// --- mma.sync m16n8k16: fragments as in 9.7.14.5.8 --------------------------------------------------------------------------
struct MmaRegisters {
  float* d;
  const unsigned* a;
  const unsigned* b;
};

template <typename T>
EMULATED inline void mma_of_warp(void* const (&of_lane)[WARP]) {
  constexpr int M = 16, N = 8, HALF = 8;
  Operands<M, N> operands;
  for (int lane = 0; lane < WARP; ++lane) {
    const MmaRegisters& mine = *static_cast<const MmaRegisters*>(of_lane[lane]);
    const int row = row_of(lane), column = column_of(lane);
    for (int i = 0; i < 4; ++i) {
      __builtin_memcpy(&operands.a[row + i % 2 * HALF][column + i / 2 * HALF], &mine.a[i], sizeof(unsigned));
    }
    for (int i = 0; i < 2; ++i) {
      operands.b[column + i * HALF][row] = static_cast<unsigned short>(mine.b[i]);
      operands.b[column + i * HALF + 1][row] = static_cast<unsigned short>(mine.b[i] >> 16);
    }
  }
  alignas(16) float sum[M][N];
  multiply<T>(operands, sum);
  for (int lane = 0; lane < WARP; ++lane) {
    float* d = static_cast<const MmaRegisters*>(of_lane[lane])->d;
    for (int i = 0; i < 4; ++i) d[i] += sum[row_of(lane) + i / 2 * HALF][column_of(lane) + i % 2];
  }
}

}  // namespace emu

namespace ptx {

// 9.7.3.21 ex2: 2^x, about 2 ulp; 2^-inf = 0; results below 2^-126 are flushed to 0.
__forceinline__ float ex2_approx_ftz(float x) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;   // 2^-126
  const float y = ::exp2f(x);
  return y < SMALLEST_NORMAL ? 0.0f : y;
}

// 9.7.3.13 rcp: 1 / x, at most 1 ulp off, here rounded to nearest; inputs and results below 2^-126 are flushed to 0.
__forceinline__ float rcp_approx_ftz(float x) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;   // 2^-126
  const float y = 1.0f / (::fabsf(x) < SMALLEST_NORMAL ? ::copysignf(0.0f, x) : x);
  return ::fabsf(y) < SMALLEST_NORMAL ? ::copysignf(0.0f, y) : y;
}

// 9.7.3.22 tanh: relative error at most 2^-11. The hardware's last bits are not documented; rounding to 11 bits makes errors as large as
// that bound allows.
__forceinline__ float tanh_approx(float x) {
  int exponent;
  const float fraction = ::frexpf(::tanhf(x), &exponent);
  return ::ldexpf(::nearbyintf(::ldexpf(fraction, 11)), exponent - 11);
}

// 9.7.6.3 selp, 9.7.9.11 st.global under a predicate.
__forceinline__ float selp_f32(float a, float b, bool predicate) { return predicate ? a : b; }
template <typename T>
__forceinline__ void st_global_if(T* target, T value, bool predicate) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "T must have 2 or 4 bytes");
  if (predicate) *target = value;
}

// 10.8 %smid: as if there were one SM.
__forceinline__ unsigned smid() { return 0; }

// 10.28 %globaltimer: nanoseconds since a fixed moment.
__forceinline__ unsigned long long globaltimer() { return emu::nanoseconds(); }

// 9.7.13.1 bar.sync, bar.arrive: barrier `id` (0 to 15) for `threads` threads, a multiple of 32.
__forceinline__ void bar_sync(int id, int threads) { emu::barrier_sync(id, threads, "bar.sync"); }
__forceinline__ void bar_arrive(int id, int threads) { emu::barrier_arrive(id, threads, "bar.arrive"); }

// 9.7.9.8 ld.relaxed, 9.7.9.11 st.relaxed: like atomics, one word at a time.
__forceinline__ unsigned ld_relaxed_gpu(const unsigned* word) { return static_cast<unsigned>(emu::relaxed_load(word, sizeof *word)); }
__forceinline__ int ld_relaxed_gpu(const int* word) { return static_cast<int>(emu::relaxed_load(word, sizeof *word)); }
__forceinline__ void st_relaxed_gpu(unsigned* word, unsigned value) {
  unsigned old = ld_relaxed_gpu(word);
  while (!emu::atomic_replace(word, old, value, sizeof *word)) old = ld_relaxed_gpu(word);
}
__forceinline__ uint4 ld_relaxed_gpu(const uint4* source_gmem) {
  return {ld_relaxed_gpu(&source_gmem->x), ld_relaxed_gpu(&source_gmem->y), ld_relaxed_gpu(&source_gmem->z), ld_relaxed_gpu(&source_gmem->w)};
}
__forceinline__ uint2 ld_relaxed_gpu(const uint2* source_gmem) {
  return {ld_relaxed_gpu(&source_gmem->x), ld_relaxed_gpu(&source_gmem->y)};
}
__forceinline__ void st_relaxed_gpu(uint4* target_gmem, uint4 r) {
  st_relaxed_gpu(&target_gmem->x, r.x), st_relaxed_gpu(&target_gmem->y, r.y);
  st_relaxed_gpu(&target_gmem->z, r.z), st_relaxed_gpu(&target_gmem->w, r.w);
}
__forceinline__ void st_relaxed_gpu(uint2* target_gmem, uint2 r) {
  st_relaxed_gpu(&target_gmem->x, r.x), st_relaxed_gpu(&target_gmem->y, r.y);
}

// 9.7.9.25.3.1 cp.async, 9.7.9.25.3.2 cp.async.commit_group, 9.7.9.25.3.3 cp.async.wait_group and cp.async.wait_all.
__forceinline__ void cp_async_cg_16(void* target_smem, const void* source_gmem, int valid_bytes) {
  emu::cp_async(target_smem, source_gmem, 16, valid_bytes);
}
template <int BYTES>
__forceinline__ void cp_async_ca(void* target_smem, const void* source_gmem, int valid_bytes) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emu::cp_async(target_smem, source_gmem, BYTES, valid_bytes);
}
__forceinline__ void cp_async_commit_group() { emu::cp_async_commit(); }
template <int NUM_PENDING>
__forceinline__ void cp_async_wait_group() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  emu::cp_async_wait(NUM_PENDING);
}
__forceinline__ void cp_async_wait_all() {
  emu::cp_async_wait(emu::WAIT_ALL);
}

// 9.7.14.5.15 ldmatrix
__forceinline__ void ldmatrix_x1(unsigned (&r)[1], const void* row_smem) { emu::ldmatrix<false>(r, row_smem, "ldmatrix.x1"); }
__forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row_smem) { emu::ldmatrix<false>(r, row_smem, "ldmatrix.x2"); }
__forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) { emu::ldmatrix<false>(r, row_smem, "ldmatrix.x4"); }
__forceinline__ void ldmatrix_x1_trans(unsigned (&r)[1], const void* row_smem) {
  emu::ldmatrix<true>(r, row_smem, "ldmatrix.x1.trans");
}
__forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row_smem) {
  emu::ldmatrix<true>(r, row_smem, "ldmatrix.x2.trans");
}
__forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row_smem) {
  emu::ldmatrix<true>(r, row_smem, "ldmatrix.x4.trans");
}

// 9.7.14.5.16 stmatrix
__forceinline__ void stmatrix_x1(void* row_smem, const unsigned (&r)[1]) { emu::stmatrix<false>(row_smem, r, "stmatrix.x1"); }
__forceinline__ void stmatrix_x2(void* row_smem, const unsigned (&r)[2]) { emu::stmatrix<false>(row_smem, r, "stmatrix.x2"); }
__forceinline__ void stmatrix_x4(void* row_smem, const unsigned (&r)[4]) { emu::stmatrix<false>(row_smem, r, "stmatrix.x4"); }
__forceinline__ void stmatrix_x1_trans(void* row_smem, const unsigned (&r)[1]) {
  emu::stmatrix<true>(row_smem, r, "stmatrix.x1.trans");
}
__forceinline__ void stmatrix_x2_trans(void* row_smem, const unsigned (&r)[2]) {
  emu::stmatrix<true>(row_smem, r, "stmatrix.x2.trans");
}
__forceinline__ void stmatrix_x4_trans(void* row_smem, const unsigned (&r)[4]) {
  emu::stmatrix<true>(row_smem, r, "stmatrix.x4.trans");
}

// 9.7.14.5.14 mma.m16n8k16: d += a · b
__forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emu::MmaRegisters mine = {d, a, b};
  emu::warp_collective(emu::FULL_WARP, &mine, emu::mma_of_warp<__half>, "mma.sync.m16n8k16.f16");
}
__forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emu::MmaRegisters mine = {d, a, b};
  emu::warp_collective(emu::FULL_WARP, &mine, emu::mma_of_warp<__nv_bfloat16>, "mma.sync.m16n8k16.bf16");
}

template <typename T>
__forceinline__ void pin(T*&) {}   // on a CPU the order of arithmetic is the compiler's choice

}  // namespace ptx
#endif  // FLASHLAB_PTX
