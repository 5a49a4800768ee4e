// The numeric headers of kernels/emulation under test, with no kernel and no runtime: test_numerics.py runs
// `numerics OPERATION`, arrays of bytes in and out. An operation of several operands takes them as one array after the other.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_fp8.h"

namespace {

size_t num_bytes = 0;
unsigned char* bytes = nullptr;

void read_input() {
  size_t room = 1 << 20;
  bytes = static_cast<unsigned char*>(malloc(room));
  while (size_t got = fread(bytes + num_bytes, 1, room - num_bytes, stdin)) {
    num_bytes += got;
    if (num_bytes == room) bytes = static_cast<unsigned char*>(realloc(bytes, room *= 2));
  }
}

template <typename In, typename Out, typename F>
void map(F f, int operands) {
  const size_t count = num_bytes / sizeof(In) / operands;
  const In* in = reinterpret_cast<const In*>(bytes);
  Out* out = static_cast<Out*>(malloc(count * sizeof(Out) + 1));
  for (size_t i = 0; i < count; ++i) out[i] = f(in + i, count);
  fwrite(out, sizeof(Out), count, stdout);
}
template <typename In, typename Out, typename F>
void unary(F f) {
  map<In, Out>([&](const In* x, size_t) { return static_cast<Out>(f(x[0])); }, 1);
}
template <typename In, typename Out, typename F>
void binary(F f) {
  map<In, Out>([&](const In* x, size_t n) { return static_cast<Out>(f(x[0], x[n])); }, 2);
}
template <typename In, typename Out, typename F>
void ternary(F f) {
  map<In, Out>([&](const In* x, size_t n) { return static_cast<Out>(f(x[0], x[n], x[2 * n])); }, 3);
}

// Bits of the six ordered and six unordered comparisons, a bit each.
template <typename T>
unsigned short compare(T a, T b) {
  const bool results[] = {__heq(a, b),  __hne(a, b),  __hlt(a, b),  __hle(a, b),  __hgt(a, b),  __hge(a, b),
                          __hequ(a, b), __hneu(a, b), __hltu(a, b), __hleu(a, b), __hgtu(a, b), __hgeu(a, b)};
  unsigned short bits = 0;
  for (int i = 0; i < 12; ++i) bits |= static_cast<unsigned short>(results[i] << i);
  return bits;
}

// Each function of a pair against the function of a number: 1 where both halves agree.
template <typename Pair, typename T>
unsigned char pairs_agree(T a, T b, T c) {
  const Pair ab(a, b), bc(b, c), ca(c, a);
  const auto same = [](Pair got, T low, T high) {
    const Pair wanted(low, high);
    return memcmp(&got, &wanted, sizeof(Pair)) == 0;
  };
  return same(__hadd2(ab, bc), __hadd(a, b), __hadd(b, c)) && same(__hsub2(ab, bc), __hsub(a, b), __hsub(b, c)) &&
         same(__hmul2(ab, bc), __hmul(a, b), __hmul(b, c)) && same(__h2div(ab, bc), __hdiv(a, b), __hdiv(b, c)) &&
         same(__hfma2(ab, bc, ca), __hfma(a, b, c), __hfma(b, c, a)) && same(__hneg2(ab), __hneg(a), __hneg(b)) &&
         same(__hmax2(ab, bc), __hmax(a, b), __hmax(b, c)) && same(h2exp2(ab), hexp2(a), hexp2(b)) &&
         __hbgt2(ab, bc) == (a > b && b > c) && __hgt2_mask(ab, bc) == ((a > b ? 0xffffu : 0) | (b > c ? 0xffff0000u : 0)) &&
         same(-ab + bc * ca, -a + b * c, -b + c * a);
}

// What __half and __nv_bfloat16 have in common.
template <typename T, typename Pair>
bool arithmetic(const char* name) {
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if (is("from_float")) unary<float, T>([](float x) { return T(x); });
  else if (is("from_double")) unary<double, T>([](double x) { return T(x); });
  else if (is("from_ll")) unary<long long, T>([](long long x) { return T(x); });
  else if (is("to_float")) unary<T, float>([](T x) { return static_cast<float>(x); });
  else if (is("add")) binary<T, T>([](T a, T b) { return __hadd(a, b); });
  else if (is("sub")) binary<T, T>([](T a, T b) { return a - b; });
  else if (is("mul")) binary<T, T>([](T a, T b) { return __hmul(a, b); });
  else if (is("div")) binary<T, T>([](T a, T b) { return __hdiv(a, b); });
  else if (is("fma")) ternary<T, T>([](T a, T b, T c) { return __hfma(a, b, c); });
  else if (is("max")) binary<T, T>([](T a, T b) { return __hmax(a, b); });
  else if (is("min")) binary<T, T>([](T a, T b) { return __hmin(a, b); });
  else if (is("max_nan")) binary<T, T>([](T a, T b) { return __hmax_nan(a, b); });
  else if (is("min_nan")) binary<T, T>([](T a, T b) { return __hmin_nan(a, b); });
  else if (is("sqrt")) unary<T, T>([](T x) { return hsqrt(x); });
  else if (is("compare")) binary<T, unsigned short>([](T a, T b) { return compare(a, b); });
  else if (is("pairs")) ternary<T, unsigned char>([](T a, T b, T c) { return pairs_agree<Pair>(a, b, c); });
  else return false;
  return true;
}

template <__nv_fp8_interpretation_t FORMAT>
bool fp8(const char* name) {
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  using T = emu::Fp8<FORMAT>;
  if (is("from_float")) unary<float, unsigned char>([](float x) { return __nv_cvt_float_to_fp8(x, __NV_NOSAT, FORMAT); });
  else if (is("saturated")) unary<float, unsigned char>([](float x) { return T(x).__x; });
  else if (is("from_double"))
    unary<double, unsigned char>([](double x) { return __nv_cvt_double_to_fp8(x, __NV_NOSAT, FORMAT); });
  else if (is("to_float")) unary<T, float>([](T x) { return static_cast<float>(x); });
  else if (is("to_half")) unary<unsigned char, __half_raw>([](unsigned char x) { return __nv_cvt_fp8_to_halfraw(x, FORMAT); });
  else if (is("pairs"))
    binary<float, unsigned char>([](float a, float b) {
      const unsigned short pair = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, FORMAT);
      const emu::Fp8x4<FORMAT> four(float4{b, a, b, b});
      return pair == (T(a).__x | T(b).__x << 8) && four.__x == (T(b).__x | static_cast<unsigned>(pair) << 8 | T(b).__x << 24u);
    });
  else return false;
  return true;
}

bool integers(const char* name) {
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  using u = unsigned;
  if (is("popc")) unary<u, int>([](u x) { return __popc(x); });
  else if (is("clz")) unary<u, int>([](u x) { return __clz(static_cast<int>(x)); });
  else if (is("ffs")) unary<u, int>([](u x) { return __ffs(static_cast<int>(x)); });
  else if (is("brev")) unary<u, u>([](u x) { return __brev(x); });
  else if (is("umulhi")) binary<u, u>([](u a, u b) { return __umulhi(a, b); });
  else if (is("mulhi")) binary<int, int>([](int a, int b) { return __mulhi(a, b); });
  else if (is("byte_perm")) ternary<u, u>([](u a, u b, u s) { return __byte_perm(a, b, s); });
  else if (is("funnelshift_l")) ternary<u, u>([](u lo, u hi, u s) { return __funnelshift_l(lo, hi, s); });
  else if (is("funnelshift_r")) ternary<u, u>([](u lo, u hi, u s) { return __funnelshift_r(lo, hi, s); });
  else if (is("float2int_rn")) unary<float, int>([](float x) { return __float2int_rn(x); });
  else if (is("float2int_rz")) unary<float, int>([](float x) { return __float2int_rz(x); });
  else if (is("float2uint_ru")) unary<float, u>([](float x) { return __float2uint_ru(x); });
  else if (is("float2int_rd")) unary<float, int>([](float x) { return __float2int_rd(x); });
  else if (is("fmaxf")) binary<float, float>([](float a, float b) { return fmaxf(a, b); });
  else if (is("fminf")) binary<float, float>([](float a, float b) { return fminf(a, b); });
  else if (is("max")) binary<float, float>([](float a, float b) { return max(a, b); });
  else if (is("saturate")) unary<float, float>([](float x) { return __saturatef(x); });
  else return false;
  return true;
}

static_assert(std::is_same_v<decltype(min(1, 2u)), unsigned> && std::is_same_v<decltype(max(1, 2.0f)), float> &&
              std::is_same_v<decltype(max(1ll, 2)), long long> && std::is_same_v<decltype(min(1.0f, 2.0)), double>);

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  read_input();
  const char *type = argv[1], *name = argv[2];
  bool known = false;
  if (strcmp(type, "float16") == 0) {
    known = arithmetic<__half, __half2>(name);
    if (strcmp(name, "rz") == 0) known = (unary<float, __half>([](float x) { return __float2half_rz(x); }), true);
    if (strcmp(name, "ru") == 0) known = (unary<float, __half>([](float x) { return __float2half_ru(x); }), true);
    if (strcmp(name, "rd") == 0) known = (unary<float, __half>([](float x) { return __float2half_rd(x); }), true);
  } else if (strcmp(type, "bfloat16") == 0) {
    known = arithmetic<__nv_bfloat16, __nv_bfloat162>(name);
    if (strcmp(name, "rz") == 0) known = (unary<float, __nv_bfloat16>([](float x) { return __float2bfloat16_rz(x); }), true);
    if (strcmp(name, "ru") == 0) known = (unary<float, __nv_bfloat16>([](float x) { return __float2bfloat16_ru(x); }), true);
    if (strcmp(name, "rd") == 0) known = (unary<float, __nv_bfloat16>([](float x) { return __float2bfloat16_rd(x); }), true);
  } else if (strcmp(type, "float8_e4m3fn") == 0) {
    known = fp8<__NV_E4M3>(name);
  } else if (strcmp(type, "float8_e5m2") == 0) {
    known = fp8<__NV_E5M2>(name);
  } else if (strcmp(type, "math") == 0) {
    known = integers(name);
  }
  return known ? 0 : 3;
}
