// Replaces CUDA's <cuda_bf16.h>: bfloat16, under the same names (CUDA Math API, "Bfloat16 Precision Intrinsics").
// The types have CUDA's sizes and alignments and are trivially copyable, so memory has the same layout as on a GPU.
#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct alignas(4) __nv_bfloat162_raw {
  unsigned short x, y;
};

struct alignas(2) __nv_bfloat16 {
  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
  __forceinline__ __nv_bfloat16(float x) : __x(static_cast<unsigned short>(emu::Bf16::from(x))) {}
  __forceinline__ __nv_bfloat16(double x) : __x(static_cast<unsigned short>(emu::Bf16::from(x))) {}
  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  __forceinline__ __nv_bfloat16(Integer x) : __nv_bfloat16(emu::to_double_odd(x)) {}

  __forceinline__ operator float() const { return emu::Bf16::to_float(__x); }
  __forceinline__ operator __nv_bfloat16_raw() const { return {__x}; }

 protected:
  unsigned short __x;
};
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;

  __nv_bfloat162() = default;
  __forceinline__ constexpr __nv_bfloat162(const __nv_bfloat16& low, const __nv_bfloat16& high) : x(low), y(high) {}
  __forceinline__ constexpr __nv_bfloat162(const __nv_bfloat162_raw& raw)
      : x(__nv_bfloat16_raw{raw.x}), y(__nv_bfloat16_raw{raw.y}) {}
  __forceinline__ operator __nv_bfloat162_raw() const {
    return {static_cast<__nv_bfloat16_raw>(x).x, static_cast<__nv_bfloat16_raw>(y).x};
  }
};
using nv_bfloat162 = __nv_bfloat162;

namespace emu {
template <>
struct FormatOf<__nv_bfloat16> : Bf16 {};
}  // namespace emu

// --- bits -------------------------------------------------------------------------------------------------------------------
__forceinline__ unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return emu::bits_as<unsigned short>(x); }
__forceinline__ short __bfloat16_as_short(__nv_bfloat16 x) { return emu::bits_as<short>(x); }
__forceinline__ __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return emu::bits_as<__nv_bfloat16>(x); }
__forceinline__ __nv_bfloat16 __short_as_bfloat16(short x) { return emu::bits_as<__nv_bfloat16>(x); }

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7f80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7fff)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7f7f)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3f80)

// --- conversions ------------------------------------------------------------------------------------------------------------
__forceinline__ float __bfloat162float(__nv_bfloat16 x) { return emu::wide(x); }
__forceinline__ __nv_bfloat16 __float2bfloat16(float x) { return emu::rounded<__nv_bfloat16>(x); }
__forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) { return emu::rounded<__nv_bfloat16>(x); }
__forceinline__ __nv_bfloat16 __float2bfloat16_rz(float x) { return emu::rounded_toward_zero<__nv_bfloat16>(x); }
__forceinline__ __nv_bfloat16 __float2bfloat16_ru(float x) { return emu::rounded_up<__nv_bfloat16>(x); }
__forceinline__ __nv_bfloat16 __float2bfloat16_rd(float x) { return emu::rounded_up<__nv_bfloat16>(x, -1.0f); }
__forceinline__ __nv_bfloat16 __double2bfloat16(double x) { return emu::rounded<__nv_bfloat16>(x); }

// To and from an integer, rounded to nearest even, toward zero, up and down.
#define EMULATION_TO_INTEGER(name, Integer)                                \
  __forceinline__ Integer __bfloat162##name##_rn(__nv_bfloat16 x) {        \
    return emu::saturating_cast<Integer>(__builtin_rintf(emu::wide(x)));   \
  }                                                                        \
  __forceinline__ Integer __bfloat162##name##_rz(__nv_bfloat16 x) {        \
    return emu::saturating_cast<Integer>(__builtin_truncf(emu::wide(x)));  \
  }                                                                        \
  __forceinline__ Integer __bfloat162##name##_ru(__nv_bfloat16 x) {        \
    return emu::saturating_cast<Integer>(__builtin_ceilf(emu::wide(x)));   \
  }                                                                        \
  __forceinline__ Integer __bfloat162##name##_rd(__nv_bfloat16 x) {        \
    return emu::saturating_cast<Integer>(__builtin_floorf(emu::wide(x)));  \
  }                                                                        \
  __forceinline__ __nv_bfloat16 __##name##2bfloat16_rn(Integer x) {        \
    return emu::rounded<__nv_bfloat16>(emu::to_double_odd(x));             \
  }                                                                        \
  __forceinline__ __nv_bfloat16 __##name##2bfloat16_rz(Integer x) {        \
    return emu::rounded_toward_zero<__nv_bfloat16>(emu::to_double_odd(x)); \
  }                                                                        \
  __forceinline__ __nv_bfloat16 __##name##2bfloat16_ru(Integer x) {        \
    return emu::rounded_up<__nv_bfloat16>(emu::to_double_odd(x));          \
  }                                                                        \
  __forceinline__ __nv_bfloat16 __##name##2bfloat16_rd(Integer x) {        \
    return emu::rounded_up<__nv_bfloat16>(emu::to_double_odd(x), -1.0);    \
  }
EMULATION_TO_INTEGER(short, short)
EMULATION_TO_INTEGER(ushort, unsigned short)
EMULATION_TO_INTEGER(int, int)
EMULATION_TO_INTEGER(uint, unsigned)
EMULATION_TO_INTEGER(ll, long long)
EMULATION_TO_INTEGER(ull, unsigned long long)
#undef EMULATION_TO_INTEGER

// --- pairs ------------------------------------------------------------------------------------------------------------------
__forceinline__ __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return __nv_bfloat162(low, high); }
__forceinline__ __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return __nv_bfloat162(low, high); }
__forceinline__ __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return __nv_bfloat162(x, x); }
__forceinline__ __nv_bfloat162 __float2bfloat162_rn(float x) { return __bfloat162bfloat162(__float2bfloat16_rn(x)); }
__forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return __nv_bfloat162(__float2bfloat16_rn(low), __float2bfloat16_rn(high));
}
__forceinline__ __nv_bfloat162 __float22bfloat162_rn(float2 x) { return __floats2bfloat162_rn(x.x, x.y); }
__forceinline__ float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
__forceinline__ __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
__forceinline__ __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
__forceinline__ float __low2float(__nv_bfloat162 x) { return __bfloat162float(x.x); }
__forceinline__ float __high2float(__nv_bfloat162 x) { return __bfloat162float(x.y); }
__forceinline__ __nv_bfloat162 __low2bfloat162(__nv_bfloat162 x) { return __nv_bfloat162(x.x, x.x); }
__forceinline__ __nv_bfloat162 __high2bfloat162(__nv_bfloat162 x) { return __nv_bfloat162(x.y, x.y); }
__forceinline__ __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(a.x, b.x); }
__forceinline__ __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(a.y, b.y); }
__forceinline__ __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 x) { return __nv_bfloat162(x.y, x.x); }

#define NARROW __nv_bfloat16
#define NARROW2 __nv_bfloat162
#include "narrow_arithmetic.h"
#undef NARROW
#undef NARROW2

static_assert(sizeof(__nv_bfloat16) == 2 && sizeof(__nv_bfloat162) == 4 && alignof(__nv_bfloat162) == 4,
              "the memory layout must be the same as CUDA's");
static_assert(std::is_trivially_copyable_v<__nv_bfloat16> && std::is_trivially_copyable_v<__nv_bfloat162>,
              "must be trivially copyable");
