// Replaces CUDA's <cuda_fp16.h>: half precision, under the same names (CUDA Math API, "Half Precision Intrinsics").
// The types have CUDA's sizes and alignments and are trivially copyable, so memory has the same layout as on a GPU.
#pragma once
#include "emulation_types.h"
#include "narrow.h"

struct __half_raw {
  unsigned short x;
};
struct alignas(4) __half2_raw {
  unsigned short x, y;
};

struct alignas(2) __half {
  __half() = default;
  constexpr __half(const __half_raw& raw) : __x(raw.x) {}
  __forceinline__ __half(float x) : __x(static_cast<unsigned short>(emu::Fp16::from(x))) {}
  __forceinline__ __half(double x) : __x(static_cast<unsigned short>(emu::Fp16::from(x))) {}
  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  __forceinline__ __half(Integer x) : __half(emu::to_double_odd(x)) {}

  __forceinline__ operator float() const { return emu::Fp16::to_float(__x); }
  __forceinline__ operator __half_raw() const { return {__x}; }

 protected:
  unsigned short __x;
};
using half = __half;
using nv_half = __half;

struct alignas(4) __half2 {
  __half x, y;

  __half2() = default;
  __forceinline__ constexpr __half2(const __half& low, const __half& high) : x(low), y(high) {}
  __forceinline__ constexpr __half2(const __half2_raw& raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
  __forceinline__ operator __half2_raw() const { return {static_cast<__half_raw>(x).x, static_cast<__half_raw>(y).x}; }
};
using half2 = __half2;
using nv_half2 = __half2;

namespace emu {
template <>
struct FormatOf<__half> : Fp16 {};
}  // namespace emu

// --- bits -------------------------------------------------------------------------------------------------------------------
__forceinline__ unsigned short __half_as_ushort(__half x) { return emu::bits_as<unsigned short>(x); }
__forceinline__ short __half_as_short(__half x) { return emu::bits_as<short>(x); }
__forceinline__ __half __ushort_as_half(unsigned short x) { return emu::bits_as<__half>(x); }
__forceinline__ __half __short_as_half(short x) { return emu::bits_as<__half>(x); }

#define CUDART_INF_FP16 __ushort_as_half(0x7c00)
#define CUDART_NAN_FP16 __ushort_as_half(0x7fff)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7bff)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000)
#define CUDART_ZERO_FP16 __ushort_as_half(0x0000)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00)

// --- conversions ------------------------------------------------------------------------------------------------------------
__forceinline__ float __half2float(__half x) { return emu::wide(x); }
__forceinline__ __half __float2half(float x) { return emu::rounded<__half>(x); }
__forceinline__ __half __float2half_rn(float x) { return emu::rounded<__half>(x); }
__forceinline__ __half __float2half_rz(float x) { return emu::rounded_toward_zero<__half>(x); }
__forceinline__ __half __float2half_ru(float x) { return emu::rounded_up<__half>(x); }
__forceinline__ __half __float2half_rd(float x) { return emu::rounded_up<__half>(x, -1.0f); }
__forceinline__ __half __double2half(double x) { return emu::rounded<__half>(x); }

// To and from an integer, rounded to nearest even, toward zero, up and down.
#define EMULATION_TO_INTEGER(name, Integer)                               \
  __forceinline__ Integer __half2##name##_rn(__half x) {                  \
    return emu::saturating_cast<Integer>(__builtin_rintf(emu::wide(x)));  \
  }                                                                       \
  __forceinline__ Integer __half2##name##_rz(__half x) {                  \
    return emu::saturating_cast<Integer>(__builtin_truncf(emu::wide(x))); \
  }                                                                       \
  __forceinline__ Integer __half2##name##_ru(__half x) {                  \
    return emu::saturating_cast<Integer>(__builtin_ceilf(emu::wide(x)));  \
  }                                                                       \
  __forceinline__ Integer __half2##name##_rd(__half x) {                  \
    return emu::saturating_cast<Integer>(__builtin_floorf(emu::wide(x))); \
  }                                                                       \
  __forceinline__ __half __##name##2half_rn(Integer x) {                  \
    return emu::rounded<__half>(emu::to_double_odd(x));                   \
  }                                                                       \
  __forceinline__ __half __##name##2half_rz(Integer x) {                  \
    return emu::rounded_toward_zero<__half>(emu::to_double_odd(x));       \
  }                                                                       \
  __forceinline__ __half __##name##2half_ru(Integer x) {                  \
    return emu::rounded_up<__half>(emu::to_double_odd(x));                \
  }                                                                       \
  __forceinline__ __half __##name##2half_rd(Integer x) {                  \
    return emu::rounded_up<__half>(emu::to_double_odd(x), -1.0);          \
  }
EMULATION_TO_INTEGER(short, short)
EMULATION_TO_INTEGER(ushort, unsigned short)
EMULATION_TO_INTEGER(int, int)
EMULATION_TO_INTEGER(uint, unsigned)
EMULATION_TO_INTEGER(ll, long long)
EMULATION_TO_INTEGER(ull, unsigned long long)
#undef EMULATION_TO_INTEGER

// --- pairs ------------------------------------------------------------------------------------------------------------------
__forceinline__ __half2 make_half2(__half low, __half high) { return __half2(low, high); }
__forceinline__ __half2 __halves2half2(__half low, __half high) { return __half2(low, high); }
__forceinline__ __half2 __half2half2(__half x) { return __half2(x, x); }
__forceinline__ __half2 __float2half2_rn(float x) { return __half2half2(__float2half_rn(x)); }
__forceinline__ __half2 __floats2half2_rn(float low, float high) {
  return __half2(__float2half_rn(low), __float2half_rn(high));
}
__forceinline__ __half2 __float22half2_rn(float2 x) { return __floats2half2_rn(x.x, x.y); }
__forceinline__ float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
__forceinline__ __half __low2half(__half2 x) { return x.x; }
__forceinline__ __half __high2half(__half2 x) { return x.y; }
__forceinline__ float __low2float(__half2 x) { return __half2float(x.x); }
__forceinline__ float __high2float(__half2 x) { return __half2float(x.y); }
__forceinline__ __half2 __low2half2(__half2 x) { return __half2(x.x, x.x); }
__forceinline__ __half2 __high2half2(__half2 x) { return __half2(x.y, x.y); }
__forceinline__ __half2 __lows2half2(__half2 a, __half2 b) { return __half2(a.x, b.x); }
__forceinline__ __half2 __highs2half2(__half2 a, __half2 b) { return __half2(a.y, b.y); }
__forceinline__ __half2 __lowhigh2highlow(__half2 x) { return __half2(x.y, x.x); }

#define NARROW __half
#define NARROW2 __half2
#include "narrow_arithmetic.h"
#undef NARROW
#undef NARROW2

static_assert(sizeof(__half) == 2 && sizeof(__half2) == 4 && alignof(__half2) == 4, "the memory layout must be the same as CUDA's");
static_assert(std::is_trivially_copyable_v<__half> && std::is_trivially_copyable_v<__half2>, "must be trivially copyable");
