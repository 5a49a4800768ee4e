// Arithmetic of a 16-bit type, under CUDA's names: cuda_fp16.h and cuda_bf16.h each include this file once, with NARROW and
// NARROW2 defined as the names of their type and of its pair. No include guard: the names are overloads.
//
// Each operation rounds once, as the .f16 and .bf16 instructions of sm_90 do.
// - Add, subtract, divide, square root: float has at least 2 more than twice the significant bits (24 ≥ 2 · 11 + 2), so that
//   rounding its result a second time gives the same as rounding once.
// - Multiply: the float product is exact for fp16; for bf16 it may lie below float's range, so it is computed in double.
// - Fused multiply-add: the product is exact in double. For fp16 the sum is either exact or so lopsided that it does not matter: the
//   product has 22 bits and the sum 53, so in an inexact sum one term is at least 2^31 times the other. If the larger term is c, no
//   midpoint between fp16 numbers is so close to it that the smaller term reaches it. If it is the product, c's last unit of at least
//   2^-24 is lost, so the product is at least 2^28: infinite. For bf16 the larger term may be a product that is a midpoint, so that
//   the smaller term decides; that sum is therefore rounded to odd first.

// --- a number ---------------------------------------------------------------------------------------------------------------
namespace emu {
__forceinline__ double wider(NARROW x) { return static_cast<double>(wide(x)); }
__forceinline__ NARROW saturated(NARROW x) {   // to [0, 1]; NaN becomes 0
  return rounded<NARROW>(__saturatef(wide(x)));
}
__forceinline__ NARROW rectified(NARROW x) {   // negative becomes 0; NaN stays
  return wide(x) < 0.0f ? rounded<NARROW>(0.0f) : x;
}
__forceinline__ bool is_nan(NARROW x) { return wide(x) != wide(x); }
}  // namespace emu

__forceinline__ NARROW __hadd(NARROW a, NARROW b) { return emu::rounded<NARROW>(emu::wide(a) + emu::wide(b)); }
__forceinline__ NARROW __hsub(NARROW a, NARROW b) { return emu::rounded<NARROW>(emu::wide(a) - emu::wide(b)); }
__forceinline__ NARROW __hdiv(NARROW a, NARROW b) { return emu::rounded<NARROW>(emu::wide(a) / emu::wide(b)); }
__forceinline__ NARROW __hmul(NARROW a, NARROW b) {
  if constexpr (emu::FormatOf<NARROW>::BIAS == emu::Fp16::BIAS) {
    return emu::rounded<NARROW>(emu::wide(a) * emu::wide(b));
  } else {
    return emu::rounded<NARROW>(emu::wider(a) * emu::wider(b));
  }
}
__forceinline__ NARROW __hfma(NARROW a, NARROW b, NARROW c) {
  const double product = emu::wider(a) * emu::wider(b);
  if constexpr (emu::FormatOf<NARROW>::BIAS == emu::Fp16::BIAS) {
    return emu::rounded<NARROW>(product + emu::wider(c));
  } else {
    return emu::rounded<NARROW>(emu::add_to_odd(product, emu::wider(c)));
  }
}
// The _rn forms are never fused into a multiply-add; here the plain ones are not, either.
__forceinline__ NARROW __hadd_rn(NARROW a, NARROW b) { return __hadd(a, b); }
__forceinline__ NARROW __hsub_rn(NARROW a, NARROW b) { return __hsub(a, b); }
__forceinline__ NARROW __hmul_rn(NARROW a, NARROW b) { return __hmul(a, b); }
__forceinline__ NARROW __hadd_sat(NARROW a, NARROW b) { return emu::saturated(__hadd(a, b)); }
__forceinline__ NARROW __hsub_sat(NARROW a, NARROW b) { return emu::saturated(__hsub(a, b)); }
__forceinline__ NARROW __hmul_sat(NARROW a, NARROW b) { return emu::saturated(__hmul(a, b)); }
__forceinline__ NARROW __hfma_sat(NARROW a, NARROW b, NARROW c) { return emu::saturated(__hfma(a, b, c)); }
__forceinline__ NARROW __hfma_relu(NARROW a, NARROW b, NARROW c) { return emu::rectified(__hfma(a, b, c)); }

__forceinline__ NARROW __hneg(NARROW a) {
  return emu::bits_as<NARROW>(static_cast<unsigned short>(emu::bits_as<unsigned short>(a) ^ 0x8000u));
}
__forceinline__ NARROW __habs(NARROW a) {
  return emu::bits_as<NARROW>(static_cast<unsigned short>(emu::bits_as<unsigned short>(a) & 0x7fffu));
}
__forceinline__ NARROW __hmax(NARROW a, NARROW b) { return emu::rounded<NARROW>(emu::larger(emu::wide(a), emu::wide(b))); }
__forceinline__ NARROW __hmin(NARROW a, NARROW b) { return emu::rounded<NARROW>(emu::smaller(emu::wide(a), emu::wide(b))); }
__forceinline__ NARROW __hmax_nan(NARROW a, NARROW b) {
  return emu::is_nan(a) || emu::is_nan(b) ? emu::rounded<NARROW>(__builtin_nanf("")) : __hmax(a, b);
}
__forceinline__ NARROW __hmin_nan(NARROW a, NARROW b) {
  return emu::is_nan(a) || emu::is_nan(b) ? emu::rounded<NARROW>(__builtin_nanf("")) : __hmin(a, b);
}
__forceinline__ bool __hisnan(NARROW a) { return emu::is_nan(a); }
__forceinline__ int __hisinf(NARROW a) {
  const float x = emu::wide(a);
  return x == __builtin_inff() ? 1 : x == -__builtin_inff() ? -1 : 0;
}

// --- a pair -----------------------------------------------------------------------------------------------------------------
#define EMULATION_PAIRWISE_1(name2, name) \
  __forceinline__ NARROW2 name2(NARROW2 a) { return NARROW2(name(a.x), name(a.y)); }
#define EMULATION_PAIRWISE_2(name2, name) \
  __forceinline__ NARROW2 name2(NARROW2 a, NARROW2 b) { return NARROW2(name(a.x, b.x), name(a.y, b.y)); }
#define EMULATION_PAIRWISE_3(name2, name) \
  __forceinline__ NARROW2 name2(NARROW2 a, NARROW2 b, NARROW2 c) { return NARROW2(name(a.x, b.x, c.x), name(a.y, b.y, c.y)); }
EMULATION_PAIRWISE_2(__hadd2, __hadd)
EMULATION_PAIRWISE_2(__hsub2, __hsub)
EMULATION_PAIRWISE_2(__hmul2, __hmul)
EMULATION_PAIRWISE_2(__h2div, __hdiv)
EMULATION_PAIRWISE_2(__hadd2_rn, __hadd)
EMULATION_PAIRWISE_2(__hsub2_rn, __hsub)
EMULATION_PAIRWISE_2(__hmul2_rn, __hmul)
EMULATION_PAIRWISE_2(__hadd2_sat, __hadd_sat)
EMULATION_PAIRWISE_2(__hsub2_sat, __hsub_sat)
EMULATION_PAIRWISE_2(__hmul2_sat, __hmul_sat)
EMULATION_PAIRWISE_3(__hfma2, __hfma)
EMULATION_PAIRWISE_3(__hfma2_sat, __hfma_sat)
EMULATION_PAIRWISE_3(__hfma2_relu, __hfma_relu)
EMULATION_PAIRWISE_1(__hneg2, __hneg)
EMULATION_PAIRWISE_1(__habs2, __habs)
EMULATION_PAIRWISE_2(__hmax2, __hmax)
EMULATION_PAIRWISE_2(__hmin2, __hmin)
EMULATION_PAIRWISE_2(__hmax2_nan, __hmax_nan)
EMULATION_PAIRWISE_2(__hmin2_nan, __hmin_nan)

// --- comparisons: false if a number is NaN; with a u at the end, true -------------------------------------------------------
// For pairs: 1.0 or 0.0 each, a mask of 0xffff or 0 each, or (__hb…) whether both hold.
#define EMULATION_COMPARE(relation, condition)                                                                            \
  __forceinline__ bool __h##relation(NARROW a, NARROW b) {                                                                \
    const float x = emu::wide(a), y = emu::wide(b);                                                                       \
    return condition;                                                                                                     \
  }                                                                                                                       \
  __forceinline__ NARROW2 __h##relation##2(NARROW2 a, NARROW2 b) {                                                        \
    return NARROW2(emu::rounded<NARROW>(__h##relation(a.x, b.x) ? 1.0f : 0.0f),                                           \
                   emu::rounded<NARROW>(__h##relation(a.y, b.y) ? 1.0f : 0.0f));                                          \
  }                                                                                                                       \
  __forceinline__ unsigned __h##relation##2_mask(NARROW2 a, NARROW2 b) {                                                  \
    return (__h##relation(a.x, b.x) ? 0xffffu : 0u) | (__h##relation(a.y, b.y) ? 0xffff0000u : 0u);                       \
  }                                                                                                                       \
  __forceinline__ bool __hb##relation##2(NARROW2 a, NARROW2 b) { return __h##relation(a.x, b.x) && __h##relation(a.y, b.y); }
EMULATION_COMPARE(eq, x == y)
EMULATION_COMPARE(ne, x < y || x > y)
EMULATION_COMPARE(lt, x < y)
EMULATION_COMPARE(le, x <= y)
EMULATION_COMPARE(gt, x > y)
EMULATION_COMPARE(ge, x >= y)
EMULATION_COMPARE(equ, !(x < y || x > y))
EMULATION_COMPARE(neu, x != y)
EMULATION_COMPARE(ltu, !(x >= y))
EMULATION_COMPARE(leu, !(x > y))
EMULATION_COMPARE(gtu, !(x <= y))
EMULATION_COMPARE(geu, !(x < y))
#undef EMULATION_COMPARE
__forceinline__ NARROW2 __hisnan2(NARROW2 a) {
  return NARROW2(emu::rounded<NARROW>(emu::is_nan(a.x) ? 1.0f : 0.0f), emu::rounded<NARROW>(emu::is_nan(a.y) ? 1.0f : 0.0f));
}

// --- functions: the float function's result, rounded ------------------------------------------------------------------------
#define EMULATION_FUNCTION(name, expression)                       \
  __forceinline__ NARROW h##name(NARROW a) {                       \
    const float x = emu::wide(a);                                  \
    return emu::rounded<NARROW>(expression);                       \
  }                                                                \
  EMULATION_PAIRWISE_1(h2##name, h##name)
EMULATION_FUNCTION(exp, ::expf(x))
EMULATION_FUNCTION(exp2, ::exp2f(x))
EMULATION_FUNCTION(exp10, __exp10f(x))
EMULATION_FUNCTION(log, ::logf(x))
EMULATION_FUNCTION(log2, ::log2f(x))
EMULATION_FUNCTION(log10, ::log10f(x))
EMULATION_FUNCTION(sin, ::sinf(x))
EMULATION_FUNCTION(cos, ::cosf(x))
EMULATION_FUNCTION(tanh, ::tanhf(x))
EMULATION_FUNCTION(tanh_approx, ::tanhf(x))
EMULATION_FUNCTION(rcp, 1.0f / x)
EMULATION_FUNCTION(sqrt, __builtin_sqrtf(x))
EMULATION_FUNCTION(rsqrt, rsqrtf(x))
EMULATION_FUNCTION(ceil, __builtin_ceilf(x))
EMULATION_FUNCTION(floor, __builtin_floorf(x))
EMULATION_FUNCTION(rint, __builtin_rintf(x))
EMULATION_FUNCTION(trunc, __builtin_truncf(x))
#undef EMULATION_FUNCTION
#undef EMULATION_PAIRWISE_1
#undef EMULATION_PAIRWISE_2
#undef EMULATION_PAIRWISE_3

// --- operators --------------------------------------------------------------------------------------------------------------
__forceinline__ NARROW operator+(const NARROW& a, const NARROW& b) { return __hadd(a, b); }
__forceinline__ NARROW operator-(const NARROW& a, const NARROW& b) { return __hsub(a, b); }
__forceinline__ NARROW operator*(const NARROW& a, const NARROW& b) { return __hmul(a, b); }
__forceinline__ NARROW operator/(const NARROW& a, const NARROW& b) { return __hdiv(a, b); }
__forceinline__ NARROW& operator+=(NARROW& a, const NARROW& b) { return a = __hadd(a, b); }
__forceinline__ NARROW& operator-=(NARROW& a, const NARROW& b) { return a = __hsub(a, b); }
__forceinline__ NARROW& operator*=(NARROW& a, const NARROW& b) { return a = __hmul(a, b); }
__forceinline__ NARROW& operator/=(NARROW& a, const NARROW& b) { return a = __hdiv(a, b); }
__forceinline__ NARROW& operator++(NARROW& a) { return a = __hadd(a, emu::rounded<NARROW>(1.0f)); }
__forceinline__ NARROW& operator--(NARROW& a) { return a = __hsub(a, emu::rounded<NARROW>(1.0f)); }
__forceinline__ NARROW operator++(NARROW& a, int) {
  const NARROW before = a;
  ++a;
  return before;
}
__forceinline__ NARROW operator--(NARROW& a, int) {
  const NARROW before = a;
  --a;
  return before;
}
__forceinline__ NARROW operator+(const NARROW& a) { return a; }
__forceinline__ NARROW operator-(const NARROW& a) { return __hneg(a); }
__forceinline__ bool operator==(const NARROW& a, const NARROW& b) { return __heq(a, b); }
__forceinline__ bool operator!=(const NARROW& a, const NARROW& b) { return __hneu(a, b); }
__forceinline__ bool operator<(const NARROW& a, const NARROW& b) { return __hlt(a, b); }
__forceinline__ bool operator<=(const NARROW& a, const NARROW& b) { return __hle(a, b); }
__forceinline__ bool operator>(const NARROW& a, const NARROW& b) { return __hgt(a, b); }
__forceinline__ bool operator>=(const NARROW& a, const NARROW& b) { return __hge(a, b); }

__forceinline__ NARROW2 operator+(const NARROW2& a, const NARROW2& b) { return __hadd2(a, b); }
__forceinline__ NARROW2 operator-(const NARROW2& a, const NARROW2& b) { return __hsub2(a, b); }
__forceinline__ NARROW2 operator*(const NARROW2& a, const NARROW2& b) { return __hmul2(a, b); }
__forceinline__ NARROW2 operator/(const NARROW2& a, const NARROW2& b) { return __h2div(a, b); }
__forceinline__ NARROW2& operator+=(NARROW2& a, const NARROW2& b) { return a = __hadd2(a, b); }
__forceinline__ NARROW2& operator-=(NARROW2& a, const NARROW2& b) { return a = __hsub2(a, b); }
__forceinline__ NARROW2& operator*=(NARROW2& a, const NARROW2& b) { return a = __hmul2(a, b); }
__forceinline__ NARROW2& operator/=(NARROW2& a, const NARROW2& b) { return a = __h2div(a, b); }
__forceinline__ NARROW2 operator+(const NARROW2& a) { return a; }
__forceinline__ NARROW2 operator-(const NARROW2& a) { return __hneg2(a); }
__forceinline__ bool operator==(const NARROW2& a, const NARROW2& b) { return __hbeq2(a, b); }
__forceinline__ bool operator!=(const NARROW2& a, const NARROW2& b) { return __hbneu2(a, b); }
__forceinline__ bool operator<(const NARROW2& a, const NARROW2& b) { return __hblt2(a, b); }
__forceinline__ bool operator<=(const NARROW2& a, const NARROW2& b) { return __hble2(a, b); }
__forceinline__ bool operator>(const NARROW2& a, const NARROW2& b) { return __hbgt2(a, b); }
__forceinline__ bool operator>=(const NARROW2& a, const NARROW2& b) { return __hbge2(a, b); }
