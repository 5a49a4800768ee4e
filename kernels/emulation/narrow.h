// Floating-point formats of 16 and 8 bits: bitwise conversions to and from float and double, for cuda_fp16.h, cuda_bf16.h and
// cuda_fp8.h.
//
// Rounding is to nearest even, once. Where an addition does the rounding (below), it is the host's, which by default rounds that way.
#pragma once
#include "cuda_math.h"

namespace emu {

template <typename Float>
struct Wide;
template <>
struct Wide<float> {
  using Bits = std::uint32_t;
  static constexpr int MANTISSA_BITS = 23, BIAS = 127;
};
template <>
struct Wide<double> {
  using Bits = std::uint64_t;
  static constexpr int MANTISSA_BITS = 52, BIAS = 1023;
};

// EXPONENTS, MANTISSA: numbers of bits of the narrow format. A "code" is the encoding of a number without its sign. Formats without
// infinities have a single NaN, and use the other codes for numbers.
template <int EXPONENTS, int MANTISSA, bool HAS_INFINITIES = true>
struct Narrow {
  static constexpr int BIAS = (1 << (EXPONENTS - 1)) - 1;
  static constexpr int SIGN_SHIFT = EXPONENTS + MANTISSA;
  static constexpr unsigned CANONICAL_NAN = (1u << SIGN_SHIFT) - 1;   // all bits but the sign
  static constexpr unsigned PAST_FINITE = HAS_INFINITIES ? ((1u << EXPONENTS) - 1) << MANTISSA : CANONICAL_NAN;

  // The code nearest to |x|. Beyond the largest finite number the codes continue as if the exponent were unbounded, so that the
  // caller can detect overflow; infinities and NaN also map to that range.
  template <typename Float>
  static __forceinline__ constexpr typename Wide<Float>::Bits round_code(Float x) {
    using W = Wide<Float>;
    using Bits = typename W::Bits;
    constexpr int DROPPED = W::MANTISSA_BITS - MANTISSA;
    constexpr Bits REBIAS = static_cast<Bits>(W::BIAS - BIAS) << W::MANTISSA_BITS;
    const Bits magnitude = magnitude_of(x);
    // Adds half a unit of the last place kept, minus one if that place is even: the carry performs the rounding.
    const Bits normal = (magnitude - REBIAS + ((Bits{1} << (DROPPED - 1)) - 1) + (magnitude >> DROPPED & 1)) >> DROPPED;
    if constexpr (W::BIAS == BIAS) {   // bfloat16 from float: the same exponents, including subnormals
      return normal;
    } else {
      // Subnormals of the narrow format are multiples of one unit. Adding a wide number whose last place is that unit makes the addition
      // round to it.
      constexpr Bits SMALLEST_NORMAL = static_cast<Bits>(W::BIAS + 1 - BIAS) << W::MANTISSA_BITS;
      constexpr Bits UNITS = static_cast<Bits>(W::BIAS + 1 - BIAS + DROPPED) << W::MANTISSA_BITS;
      const Bits subnormal = bits_as<Bits>(bits_as<Float>(magnitude) + bits_as<Float>(UNITS)) - UNITS;
      return magnitude < SMALLEST_NORMAL ? subnormal : normal;
    }
  }

  // With the sign. Overflow gives infinity, or NaN in formats without infinities; any NaN gives the canonical one.
  template <typename Float>
  static __forceinline__ constexpr unsigned from(Float x) {
    const auto code = round_code(x);
    const unsigned number = static_cast<unsigned>(code < PAST_FINITE ? code : PAST_FINITE) | sign_of(x);
    return x != x ? CANONICAL_NAN : number;
  }

  // The number nearest to x that is not larger in magnitude (toward zero).
  template <typename Float>
  static __forceinline__ constexpr unsigned from_toward_zero(Float x) {
    const unsigned nearest = from(x);
    const unsigned code = nearest & CANONICAL_NAN;
    if (x != x || code == 0) return nearest;
    const bool infinite = magnitude_of(x) == magnitude_of(static_cast<Float>(__builtin_inf()));
    if (code == PAST_FINITE) return infinite ? nearest : nearest - 1;
    const double rounded = static_cast<double>(to_float(code));
    return rounded > static_cast<double>(bits_as<Float>(magnitude_of(x))) ? nearest - 1 : nearest;
  }

  // Exact; NaN becomes the canonical one, as cvt does.
  static __forceinline__ constexpr float to_float(unsigned bits) {
    using W = Wide<float>;
    constexpr int ADDED = W::MANTISSA_BITS - MANTISSA;
    constexpr std::uint32_t REBIAS = static_cast<std::uint32_t>(W::BIAS - BIAS) << W::MANTISSA_BITS;
    constexpr std::uint32_t WIDE_NAN = 0x7fffffffu;
    const std::uint32_t code = bits & CANONICAL_NAN;
    const std::uint32_t sign = (bits >> SIGN_SHIFT & 1) << 31;
    const std::uint32_t shifted = code << ADDED;
    std::uint32_t wide;
    if constexpr (REBIAS == 0) {
      wide = shifted;
    } else {
      // A subnormal is read as if it had an implicit leading 1 and the smallest exponent; that leading 1 is then subtracted.
      constexpr std::uint32_t LEADING = REBIAS + (std::uint32_t{1} << W::MANTISSA_BITS);
      const std::uint32_t subnormal = bits_as<std::uint32_t>(bits_as<float>(shifted + LEADING) - bits_as<float>(LEADING));
      const std::uint32_t normal = shifted + (code < PAST_FINITE ? REBIAS : 2 * REBIAS);
      wide = code >> MANTISSA ? normal : subnormal;
    }
    return bits_as<float>(code > PAST_FINITE - (HAS_INFINITIES ? 0 : 1) ? WIDE_NAN : wide | sign);
  }

  template <typename Float>
  static __forceinline__ constexpr typename Wide<Float>::Bits magnitude_of(Float x) {
    using Bits = typename Wide<Float>::Bits;
    return bits_as<Bits>(x) & (~Bits{0} >> 1);
  }
  template <typename Float>
  static __forceinline__ constexpr unsigned sign_of(Float x) {
    return static_cast<unsigned>(bits_as<typename Wide<Float>::Bits>(x) >> (sizeof(Float) * 8 - 1)) << SIGN_SHIFT;
  }
};

using Fp16 = Narrow<5, 10>;
using E5m2 = Narrow<5, 2>;
using E4m3 = Narrow<4, 3, false>;

struct Bf16 : Narrow<8, 7> {
  // The upper half of a float; a NaN keeps its bits.
  static __forceinline__ constexpr float to_float(unsigned bits) { return bits_as<float>(std::uint32_t{bits} << 16); }
};

// Specialised by the header that defines the type.
template <typename T>
struct FormatOf;

template <typename T>
__forceinline__ constexpr float wide(T x) {
  return FormatOf<T>::to_float(bits_as<unsigned short>(x));
}
template <typename T, typename Float>
__forceinline__ constexpr T rounded(Float x) {
  return bits_as<T>(static_cast<unsigned short>(FormatOf<T>::from(x)));
}
template <typename T, typename Float>
__forceinline__ constexpr T rounded_toward_zero(Float x) {
  return bits_as<T>(static_cast<unsigned short>(FormatOf<T>::from_toward_zero(x)));
}
// Rounds up, or with `sign` -1 down: one code beyond the rounding toward zero, if that is the direction and x is not exact.
template <typename T, typename Float>
__forceinline__ constexpr T rounded_up(Float x, Float sign = 1) {
  const T inner = rounded_toward_zero<T>(x);
  const bool exact = static_cast<Float>(wide(inner)) == x || x != x;
  return exact || x * sign < 0 ? inner : bits_as<T>(static_cast<unsigned short>(bits_as<unsigned short>(inner) + 1));
}

// x + y in double, but the last bit of an inexact sum is set (round to odd). Rounding the result to a format of at most 51 bits gives
// the same as rounding the exact sum once.
__forceinline__ constexpr double add_to_odd(double x, double y) {
  const double sum = x + y;
  const double of_y = sum - x;
  const double overflowed = (x - (sum - of_y)) + (y - of_y);   // exact
  if (!(overflowed < 0.0 || overflowed > 0.0)) return sum;  // NaN where a term is not finite
  const std::uint64_t bits = bits_as<std::uint64_t>(sum);
  if (bits & 1) return sum;
  return bits_as<double>((overflowed > 0.0) == (sum > 0.0) ? bits + 1 : bits - 1);
}

// An integer as a double that rounds like the integer: bits that do not fit are ORed into the last one that does (round to odd).
template <typename Integer>
__forceinline__ constexpr double to_double_odd(Integer value) {
  if constexpr (sizeof(Integer) <= 4) {
    return static_cast<double>(value);
  } else {
    constexpr std::uint64_t LOST = 0x7ff;   // the lower 64 - 53 bits
    const bool negative = value < 0;
    std::uint64_t magnitude = negative ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
    if (magnitude >> 53) magnitude = (magnitude & ~LOST) | (magnitude & LOST ? LOST + 1 : 0);
    return negative ? -static_cast<double>(magnitude) : static_cast<double>(magnitude);
  }
}

}  // namespace emu
