// Arithmetic that is built into CUDA C++ but not into host compilers, under the names of the CUDA Math API.
//
// Everything here operates on values only, so it also compiles outside a kernel, without the runtime. Where CUDA guarantees less than
// the C library (the __…f intrinsics, the ".approx" instructions), the C library's more accurate result is used. Arithmetic intrinsics
// with a rounding other than to nearest even (__fadd_rz, …) are absent: a kernel that calls one does not compile.
#pragma once
#include <math.h>   // not <cmath>: this header compiles in half the time, and declares its names in the global namespace

#include <cstdint>
#include <type_traits>

#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif

namespace emu {

template <typename To, typename From>
__forceinline__ constexpr To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as reinterprets bits: both types must have the same size");
  return __builtin_bit_cast(To, value);
}

// PTX min and max: if one operand is NaN, the result is the other one; -0 is less than 0.
template <typename T>
__forceinline__ constexpr T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return __builtin_signbit(a) ? a : b;
    return a < b || b != b ? a : b;
  } else {
    return b < a ? b : a;
  }
}
template <typename T>
__forceinline__ constexpr T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a == b) return __builtin_signbit(a) ? b : a;
    return a > b || b != b ? a : b;
  } else {
    return a < b ? b : a;
  }
}

// For operands of different types, CUDA's min and max return the type of a + b.
template <typename A, typename B>
using Common = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, decltype(A{} + B{})>;

// To an integer type that may be too small: PTX's cvt saturates, and turns NaN into 0 (64-bit types: into the smallest integer, or
// for unsigned into the highest bit alone).
template <typename Integer, typename Float>
__forceinline__ constexpr Integer saturating_cast(Float rounded) {
  constexpr int DIGITS = static_cast<int>(sizeof(Integer)) * 8 - (std::is_signed_v<Integer> ? 1 : 0);
  constexpr Float END = static_cast<Float>(std::uint64_t{1} << (DIGITS - 1)) * 2;   // one past the largest
  constexpr Integer LARGEST = static_cast<Integer>(~std::uint64_t{0} >> (64 - DIGITS));
  constexpr Integer SMALLEST = std::is_signed_v<Integer> ? static_cast<Integer>(~LARGEST) : Integer{0};
  if (rounded != rounded) return sizeof(Integer) == 8 ? static_cast<Integer>(std::uint64_t{1} << 63) : Integer{0};
  if (rounded >= END) return LARGEST;
  if (rounded <= (std::is_signed_v<Integer> ? -END : Float{0})) return SMALLEST;
  return static_cast<Integer>(rounded);
}

}  // namespace emu

template <typename A, typename B>
__forceinline__ constexpr emu::Common<A, B> min(A a, B b) {
  return emu::smaller<emu::Common<A, B>>(static_cast<emu::Common<A, B>>(a), static_cast<emu::Common<A, B>>(b));
}
template <typename A, typename B>
__forceinline__ constexpr emu::Common<A, B> max(A a, B b) {
  return emu::larger<emu::Common<A, B>>(static_cast<emu::Common<A, B>>(a), static_cast<emu::Common<A, B>>(b));
}
__forceinline__ constexpr unsigned umin(unsigned a, unsigned b) { return emu::smaller(a, b); }
__forceinline__ constexpr unsigned umax(unsigned a, unsigned b) { return emu::larger(a, b); }

// The C library's fmaxf and fminf are function calls: hosts have no instruction with their NaN rule. These are inlined instead;
// gnu_inline means that the library still owns the symbol, and the exception specification copies the library's, whatever it is.
extern "C" inline __attribute__((always_inline, gnu_inline)) float fmaxf(float a, float b) noexcept(noexcept(sqrtf(a))) {
  return emu::larger(a, b);
}
extern "C" inline __attribute__((always_inline, gnu_inline)) float fminf(float a, float b) noexcept(noexcept(sqrtf(a))) {
  return emu::smaller(a, b);
}

// --- functions that C lacks -------------------------------------------------------------------------------------------------
__forceinline__ float rsqrtf(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
__forceinline__ double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
__forceinline__ float fdividef(float x, float y) { return x / y; }
#ifndef __GLIBC__   // glibc has both as extensions
__forceinline__ float exp10f(float x) { return static_cast<float>(::pow(10.0, static_cast<double>(x))); }
__forceinline__ double exp10(double x) { return ::pow(10.0, x); }
#endif

// --- fast forms, and forms that name their rounding (CUDA Math API, "Single Precision Intrinsics") --------------------------
__forceinline__ float __expf(float x) { return ::expf(x); }
__forceinline__ float __exp10f(float x) { return static_cast<float>(::pow(10.0, static_cast<double>(x))); }
__forceinline__ float __logf(float x) { return ::logf(x); }
__forceinline__ float __log2f(float x) { return ::log2f(x); }
__forceinline__ float __log10f(float x) { return ::log10f(x); }
__forceinline__ float __powf(float x, float y) { return ::powf(x, y); }
__forceinline__ float __sinf(float x) { return ::sinf(x); }
__forceinline__ float __cosf(float x) { return ::cosf(x); }
__forceinline__ float __tanf(float x) { return ::tanf(x); }
__forceinline__ float __tanhf(float x) { return ::tanhf(x); }
__forceinline__ float __fdividef(float x, float y) { return x / y; }
__forceinline__ float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }   // NaN becomes 0

__forceinline__ float __fadd_rn(float a, float b) { return a + b; }
__forceinline__ float __fsub_rn(float a, float b) { return a - b; }
__forceinline__ float __fmul_rn(float a, float b) { return a * b; }
__forceinline__ float __fdiv_rn(float a, float b) { return a / b; }
__forceinline__ float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
__forceinline__ float __frcp_rn(float x) { return 1.0f / x; }
__forceinline__ float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
__forceinline__ float __frsqrt_rn(float x) { return rsqrtf(x); }
__forceinline__ double __dadd_rn(double a, double b) { return a + b; }
__forceinline__ double __dsub_rn(double a, double b) { return a - b; }
__forceinline__ double __dmul_rn(double a, double b) { return a * b; }
__forceinline__ double __ddiv_rn(double a, double b) { return a / b; }
__forceinline__ double __fma_rn(double a, double b, double c) { return ::fma(a, b, c); }
__forceinline__ double __drcp_rn(double x) { return 1.0 / x; }
__forceinline__ double __dsqrt_rn(double x) { return __builtin_sqrt(x); }

// --- conversions (CUDA Math API, "Type Casting Intrinsics") -----------------------------------------------------------------
__forceinline__ constexpr int __float_as_int(float x) { return emu::bits_as<int>(x); }
__forceinline__ constexpr unsigned __float_as_uint(float x) { return emu::bits_as<unsigned>(x); }
__forceinline__ constexpr float __int_as_float(int x) { return emu::bits_as<float>(x); }
__forceinline__ constexpr float __uint_as_float(unsigned x) { return emu::bits_as<float>(x); }
__forceinline__ constexpr long long __double_as_longlong(double x) { return emu::bits_as<long long>(x); }
__forceinline__ constexpr double __longlong_as_double(long long x) { return emu::bits_as<double>(x); }
__forceinline__ constexpr int __double2hiint(double x) { return static_cast<int>(emu::bits_as<std::uint64_t>(x) >> 32); }
__forceinline__ constexpr int __double2loint(double x) { return static_cast<int>(emu::bits_as<std::uint64_t>(x)); }

// One function for each rounding: to nearest even, toward zero, up, down.
#define EMULATION_TO_INTEGER(prefix, Float, Integer, rint, trunc, ceil, floor)                                    \
  __forceinline__ Integer prefix##_rn(Float x) { return emu::saturating_cast<Integer>(__builtin_##rint(x)); }     \
  __forceinline__ Integer prefix##_rz(Float x) { return emu::saturating_cast<Integer>(__builtin_##trunc(x)); }    \
  __forceinline__ Integer prefix##_ru(Float x) { return emu::saturating_cast<Integer>(__builtin_##ceil(x)); }     \
  __forceinline__ Integer prefix##_rd(Float x) { return emu::saturating_cast<Integer>(__builtin_##floor(x)); }
EMULATION_TO_INTEGER(__float2int, float, int, rintf, truncf, ceilf, floorf)
EMULATION_TO_INTEGER(__float2uint, float, unsigned, rintf, truncf, ceilf, floorf)
EMULATION_TO_INTEGER(__float2ll, float, long long, rintf, truncf, ceilf, floorf)
EMULATION_TO_INTEGER(__float2ull, float, unsigned long long, rintf, truncf, ceilf, floorf)
EMULATION_TO_INTEGER(__double2int, double, int, rint, trunc, ceil, floor)
EMULATION_TO_INTEGER(__double2uint, double, unsigned, rint, trunc, ceil, floor)
EMULATION_TO_INTEGER(__double2ll, double, long long, rint, trunc, ceil, floor)
EMULATION_TO_INTEGER(__double2ull, double, unsigned long long, rint, trunc, ceil, floor)
#undef EMULATION_TO_INTEGER

__forceinline__ constexpr float __int2float_rn(int x) { return static_cast<float>(x); }
__forceinline__ constexpr float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
__forceinline__ constexpr float __ll2float_rn(long long x) { return static_cast<float>(x); }
__forceinline__ constexpr float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
__forceinline__ constexpr float __double2float_rn(double x) { return static_cast<float>(x); }
__forceinline__ constexpr double __int2double_rn(int x) { return x; }
__forceinline__ constexpr double __uint2double_rn(unsigned x) { return x; }
__forceinline__ constexpr double __ll2double_rn(long long x) { return static_cast<double>(x); }
__forceinline__ constexpr double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }

// --- integers (CUDA Math API, "Integer Intrinsics") -------------------------------------------------------------------------
__forceinline__ constexpr int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ constexpr int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__forceinline__ constexpr int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
__forceinline__ constexpr int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
__forceinline__ constexpr int __ffs(int x) { return __builtin_ffs(x); }       // counts from 1; 0 if no bit is set
__forceinline__ constexpr int __ffsll(long long x) { return __builtin_ffsll(x); }
__forceinline__ constexpr unsigned __brev(unsigned x) {
  x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
  x = (x & 0x0f0f0f0fu) << 4 | (x >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(x);
}
__forceinline__ constexpr unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 | __brev(static_cast<unsigned>(x >> 32));
}
// Selects four of the eight bytes y:x; each hexadecimal digit of the selector selects one, and its highest bit is ignored.
__forceinline__ constexpr unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
// hi:lo shifted by `shift`, taken modulo 32, or for _lc and _rc limited to 32.
__forceinline__ constexpr unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(hi) << 32 | lo) << (shift & 31) >> 32);
}
__forceinline__ constexpr unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(hi) << 32 | lo) >> (shift & 31));
}
__forceinline__ constexpr unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned shift) {
  return shift >= 32 ? lo : __funnelshift_l(lo, hi, shift);
}
__forceinline__ constexpr unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned shift) {
  return shift >= 32 ? hi : __funnelshift_r(lo, hi, shift);
}
__forceinline__ constexpr int __mulhi(int a, int b) { return static_cast<int>(static_cast<std::int64_t>(a) * b >> 32); }
__forceinline__ constexpr unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
__forceinline__ constexpr long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
__forceinline__ constexpr unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
__forceinline__ constexpr int __mul24(int a, int b) {   // the low 32 bits of the product of the low 24 bits
  return static_cast<int>(static_cast<unsigned>(a << 8 >> 8) * static_cast<unsigned>(b << 8 >> 8));
}
__forceinline__ constexpr unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
__forceinline__ constexpr unsigned __sad(int a, int b, unsigned c) {
  const unsigned forward = static_cast<unsigned>(b) - static_cast<unsigned>(a);
  return c + (a < b ? forward : 0 - forward);
}
__forceinline__ constexpr unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a < b ? b - a : a - b); }
