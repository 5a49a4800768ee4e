// Replaces CUDA's <cuda_fp8.h>: e4m3 (448 at most, no infinities) and e5m2, under the same names (CUDA Math API, "FP8").
// There is no arithmetic: 8-bit numbers are only converted, and multiplied by tensor cores.
#pragma once
#include "cuda_bf16.h"

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;   // the first number in the lower byte
using __nv_fp8x4_storage_t = unsigned int;

// What a value beyond the largest number becomes, infinities included: NaN or infinity, or the largest number.
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace emu {
template <typename Format, typename Float>
__forceinline__ constexpr unsigned char to_fp8(Float x, bool saturate) {
  const unsigned nearest = Format::from(x);
  const unsigned code = nearest & Format::CANONICAL_NAN;
  return static_cast<unsigned char>(saturate && x == x && code == Format::PAST_FINITE ? nearest - 1 : nearest);
}
template <typename Float>
__forceinline__ constexpr unsigned char to_fp8(Float x, __nv_saturation_t saturation,
                                               __nv_fp8_interpretation_t interpretation) {
  const bool saturate = saturation == __NV_SATFINITE;
  return interpretation == __NV_E4M3 ? to_fp8<E4m3>(x, saturate) : to_fp8<E5m2>(x, saturate);
}
__forceinline__ constexpr float fp8_to_float(unsigned char x, __nv_fp8_interpretation_t interpretation) {
  return interpretation == __NV_E4M3 ? E4m3::to_float(x) : E5m2::to_float(x);
}
__forceinline__ constexpr unsigned short two_bytes(unsigned char low, unsigned char high) {
  return static_cast<unsigned short>(low | high << 8);
}
}  // namespace emu

// --- conversions ------------------------------------------------------------------------------------------------------------
// From 32-bit and 64-bit numbers, and from 16-bit ones through float, which is exact.
#define EMULATION_TO_FP8(one, One, two, Two, wide)                                                                           \
  __forceinline__ __nv_fp8_storage_t one(One x, __nv_saturation_t saturation, __nv_fp8_interpretation_t interpretation) {    \
    return emu::to_fp8(wide(x), saturation, interpretation);                                                                 \
  }                                                                                                                          \
  __forceinline__ __nv_fp8x2_storage_t two(Two x, __nv_saturation_t saturation, __nv_fp8_interpretation_t interpretation) {  \
    return emu::two_bytes(one({x.x}, saturation, interpretation), one({x.y}, saturation, interpretation));                   \
  }
namespace emu {
__forceinline__ float raw_to_float(__half_raw x) { return Fp16::to_float(x.x); }
__forceinline__ float raw_to_float(__nv_bfloat16_raw x) { return Bf16::to_float(x.x); }
}  // namespace emu
EMULATION_TO_FP8(__nv_cvt_float_to_fp8, float, __nv_cvt_float2_to_fp8x2, float2, )
EMULATION_TO_FP8(__nv_cvt_double_to_fp8, double, __nv_cvt_double2_to_fp8x2, double2, )
EMULATION_TO_FP8(__nv_cvt_halfraw_to_fp8, __half_raw, __nv_cvt_halfraw2_to_fp8x2, __half2_raw, emu::raw_to_float)
EMULATION_TO_FP8(__nv_cvt_bfloat16raw_to_fp8, __nv_bfloat16_raw, __nv_cvt_bfloat16raw2_to_fp8x2, __nv_bfloat162_raw,
                 emu::raw_to_float)
#undef EMULATION_TO_FP8

__forceinline__ __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t interpretation) {
  return __half(emu::fp8_to_float(x, interpretation));   // exact
}
__forceinline__ __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t interpretation) {
  return {__nv_cvt_fp8_to_halfraw(static_cast<unsigned char>(x), interpretation).x,
          __nv_cvt_fp8_to_halfraw(static_cast<unsigned char>(x >> 8), interpretation).x};
}

// --- types: constructors saturate, conversions back are exact where the target holds the number -----------------------------
namespace emu {

template <__nv_fp8_interpretation_t FORMAT>
struct Fp8 {
  __nv_fp8_storage_t __x;

  Fp8() = default;
  explicit Fp8(float x) : __x(to_fp8(x, __NV_SATFINITE, FORMAT)) {}
  explicit Fp8(double x) : __x(to_fp8(x, __NV_SATFINITE, FORMAT)) {}
  explicit Fp8(__half x) : Fp8(wide(x)) {}
  explicit Fp8(__nv_bfloat16 x) : Fp8(wide(x)) {}
  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  explicit Fp8(Integer x) : Fp8(to_double_odd(x)) {}

  explicit operator float() const { return fp8_to_float(__x, FORMAT); }
  explicit operator double() const { return static_cast<double>(fp8_to_float(__x, FORMAT)); }
  explicit operator __half() const { return __half(fp8_to_float(__x, FORMAT)); }
  explicit operator __nv_bfloat16() const { return __nv_bfloat16(fp8_to_float(__x, FORMAT)); }
  explicit operator bool() const { return fp8_to_float(__x, FORMAT) != 0.0f; }
  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer> && !std::is_same_v<Integer, bool>, int> = 0>
  explicit operator Integer() const {
    return saturating_cast<Integer>(__builtin_truncf(fp8_to_float(__x, FORMAT)));
  }
};

template <__nv_fp8_interpretation_t FORMAT>
struct alignas(2) Fp8x2 {
  __nv_fp8x2_storage_t __x;

  Fp8x2() = default;
  explicit Fp8x2(float2 x) : __x(__nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, FORMAT)) {}
  explicit Fp8x2(double2 x) : __x(__nv_cvt_double2_to_fp8x2(x, __NV_SATFINITE, FORMAT)) {}
  explicit Fp8x2(__half2 x) : __x(__nv_cvt_halfraw2_to_fp8x2(x, __NV_SATFINITE, FORMAT)) {}
  explicit Fp8x2(__nv_bfloat162 x) : __x(__nv_cvt_bfloat16raw2_to_fp8x2(x, __NV_SATFINITE, FORMAT)) {}

  explicit operator __half2() const { return __half2(__nv_cvt_fp8x2_to_halfraw2(__x, FORMAT)); }
  explicit operator float2() const {
    return {fp8_to_float(static_cast<unsigned char>(__x), FORMAT), fp8_to_float(static_cast<unsigned char>(__x >> 8), FORMAT)};
  }
};

template <__nv_fp8_interpretation_t FORMAT>
struct alignas(4) Fp8x4 {
  __nv_fp8x4_storage_t __x;

  Fp8x4() = default;
  explicit Fp8x4(float4 x) : Fp8x4(Fp8x2<FORMAT>(float2{x.x, x.y}), Fp8x2<FORMAT>(float2{x.z, x.w})) {}
  explicit Fp8x4(double4 x) : Fp8x4(Fp8x2<FORMAT>(double2{x.x, x.y}), Fp8x2<FORMAT>(double2{x.z, x.w})) {}
  Fp8x4(__half2 low, __half2 high) : Fp8x4(Fp8x2<FORMAT>(low), Fp8x2<FORMAT>(high)) {}
  Fp8x4(__nv_bfloat162 low, __nv_bfloat162 high) : Fp8x4(Fp8x2<FORMAT>(low), Fp8x2<FORMAT>(high)) {}

  explicit operator float4() const {
    Fp8x2<FORMAT> low, high;
    low.__x = static_cast<unsigned short>(__x);
    high.__x = static_cast<unsigned short>(__x >> 16);
    const float2 first = static_cast<float2>(low), second = static_cast<float2>(high);
    return {first.x, first.y, second.x, second.y};
  }

 private:
  Fp8x4(Fp8x2<FORMAT> low, Fp8x2<FORMAT> high) : __x(low.__x | static_cast<unsigned>(high.__x) << 16) {}
};

}  // namespace emu

using __nv_fp8_e4m3 = emu::Fp8<__NV_E4M3>;
using __nv_fp8_e5m2 = emu::Fp8<__NV_E5M2>;
using __nv_fp8x2_e4m3 = emu::Fp8x2<__NV_E4M3>;
using __nv_fp8x2_e5m2 = emu::Fp8x2<__NV_E5M2>;
using __nv_fp8x4_e4m3 = emu::Fp8x4<__NV_E4M3>;
using __nv_fp8x4_e5m2 = emu::Fp8x4<__NV_E5M2>;
static_assert(sizeof(__nv_fp8_e4m3) == 1 && sizeof(__nv_fp8x2_e4m3) == 2 && sizeof(__nv_fp8x4_e4m3) == 4,
              "the memory layout must be the same as CUDA's");
static_assert(std::is_trivially_copyable_v<__nv_fp8_e4m3>, "must be trivially copyable");
