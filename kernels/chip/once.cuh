// The operations that unit and overlap repeat.
#pragma once

#include "chip.cuh"

#define OP_EX2 0
#define OP_FFMA 1
#define OP_FADD 2
#define OP_FMUL 3
#define OP_FMNMX 4
#define OP_PACK 5
#define OP_HFMA2 6
#define OP_SHUFFLE 7
#define OP_POLYNOMIAL 8
#define OP_HMNMX2 9
#define OP_IMAD 10
#define OP_SHF 11
#define OP_SOFTMAX 12
#define OP_NOTHING 13

// One operation of kind OP on a register, whose bits are reinterpreted as needed. `i` makes consecutive operations differ, because
// max(max(x, a), a) would be folded into max(x, a).
__device__ __forceinline__ float once(float x, float a, float b, int i) {
#if OP == OP_EX2
  return ptx::ex2_approx_ftz(x);
#elif OP == OP_FFMA
  return fmaf(x, a, b);
#elif OP == OP_FADD
  return x + a;
#elif OP == OP_FMUL
  return x * a;
#elif OP == OP_FMNMX
  return fmaxf(x, i % 2 ? a : b);
#elif OP == OP_PACK
  return __uint_as_float(pack(x, a));
#elif OP == OP_HFMA2 || OP == OP_HMNMX2
  const __half2 half_x = *reinterpret_cast<__half2*>(&x);
  const __half2 half_a = *reinterpret_cast<__half2*>(&a);
  const __half2 half_b = *reinterpret_cast<__half2*>(&b);
  const __half2 result = OP == OP_HFMA2 ? __hfma2(half_x, half_a, half_b) : i % 2 ? __hmax2(half_x, half_a) : __hmin2(half_x, half_b);
  return *reinterpret_cast<const float*>(&result);
#elif OP == OP_SHUFFLE
  return __shfl_xor_sync(0xffffffffu, x, 1);
#elif OP == OP_POLYNOMIAL
  return exp2_polynomial(x);
#elif OP == OP_IMAD
  return __int_as_float(__float_as_int(x) * __float_as_int(a) + __float_as_int(b));
#elif OP == OP_SHF
  return __uint_as_float(__funnelshift_l(__float_as_uint(x), __float_as_uint(a), 7));
#else
  return x;
#endif
}
