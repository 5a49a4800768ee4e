// Products of small matrices held by a warp, for mma.h and ptx.cuh: 16-bit operands, accumulation in float.
//
// Products are exact in float (11 + 11 and 8 + 8 significant bits fit 24); they are summed from k = 0 on, each sum rounded to nearest,
// and the accumulator is added last. A tensor core adds several products at once, aligned to the largest exponent, and truncates the
// bits below: results differ in the last bits, as they do between GPU generations.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "runtime.h"

namespace emu {

constexpr int K_STEP = 16;   // K of every 16-bit MMA instruction here

// How the 32 lanes hold an 8×8 matrix of 16-bit elements (PTX ISA 9.0, 9.7.14.5.8 and 9.7.14.5.15): lane l holds columns
// 2 · (l % 4) and 2 · (l % 4) + 1 of row l / 4. Larger fragments consist of such matrices; accumulators have the same layout.
constexpr int MATRIX_ROWS = 8;
constexpr int ROW_BYTES = 16;
__forceinline__ constexpr int row_of(int lane) { return lane / 4; }
__forceinline__ constexpr int column_of(int lane) { return lane % 4 * 2; }

typedef float Floats __attribute__((vector_size(16)));            // both compilers support these on every processor
typedef std::uint32_t Words __attribute__((vector_size(16)));
constexpr int LANES = 4;

// Converts four numbers at a time, in the same steps as Narrow::to_float, or for bfloat16 by a shift.
template <typename T>
__forceinline__ Floats widen(const unsigned short* numbers) {
  const Words bits = {numbers[0], numbers[1], numbers[2], numbers[3]};
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return reinterpret_cast<Floats>(bits << 16);
  } else {
    static_assert(std::is_same_v<T, __half>, "a 16-bit operand must be __half or __nv_bfloat16");
    constexpr int ADDED = Wide<float>::MANTISSA_BITS - 10;
    constexpr std::uint32_t ONE = std::uint32_t{1} << Wide<float>::MANTISSA_BITS;
    constexpr std::uint32_t REBIAS = (Wide<float>::BIAS - Fp16::BIAS) * ONE;
    const Words zero = {};
    const Words code = bits & (zero + Fp16::CANONICAL_NAN);
    const Words shifted = code << ADDED;
    const Words leading = zero + (REBIAS + ONE);
    const Floats subnormal_number = reinterpret_cast<Floats>(shifted + leading) - reinterpret_cast<Floats>(leading);
    const Words subnormal = reinterpret_cast<Words>(subnormal_number);
    const Words special = reinterpret_cast<Words>(code >= (zero + Fp16::PAST_FINITE));   // all bits set where true
    const Words is_subnormal = reinterpret_cast<Words>(code < (zero + (1u << 10)));
    const Words normal = shifted + REBIAS + (special & (zero + REBIAS));
    const Words magnitude = (normal & ~is_subnormal) | (subnormal & is_subnormal);
    return reinterpret_cast<Floats>(magnitude | (bits & (zero + 0x8000u)) << 16);
  }
}

template <typename T, int ROWS, int COLUMNS>
__forceinline__ void widen(const unsigned short (&from)[ROWS][COLUMNS], float (&to)[ROWS][COLUMNS]) {
  static_assert(COLUMNS % LANES == 0, "COLUMNS must be a multiple of 4, the numbers that are widened at a time");
  for (int row = 0; row < ROWS; ++row) {
    for (int column = 0; column < COLUMNS; column += LANES) {
      const Floats wide_numbers = widen<T>(&from[row][column]);
      __builtin_memcpy(&to[row][column], &wide_numbers, sizeof wide_numbers);
    }
  }
}

// A warp's operands as bits, gathered from its lanes.
template <int M, int N>
struct Operands {
  alignas(16) unsigned short a[M][K_STEP];
  alignas(16) unsigned short b[K_STEP][N];
};

// sum = a · b.
template <typename T, int M, int N>
__forceinline__ void multiply(const Operands<M, N>& operands, float (&sum)[M][N]) {
  alignas(16) float a[M][K_STEP];
  alignas(16) float b[K_STEP][N];
  widen<T>(operands.a, a);
  widen<T>(operands.b, b);
  constexpr int VECTORS = N / LANES;
  for (int m = 0; m < M; ++m) {
    Floats row[VECTORS] = {};
    for (int k = 0; k < K_STEP; ++k) {
      const float factor = a[m][k];
      const Floats factors = {factor, factor, factor, factor};
      for (int v = 0; v < VECTORS; ++v) {
        Floats numbers;
        __builtin_memcpy(&numbers, &b[k][v * LANES], sizeof numbers);
        row[v] += factors * numbers;
      }
    }
    __builtin_memcpy(&sum[m], &row, sizeof row);
  }
}

}  // namespace emu
