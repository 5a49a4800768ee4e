// feature: integer intrinsics
// launch: grid=16 block=256
// parameter: first u32[4096] bits
// parameter: second u32[4096] bits
// parameter: out u32[16,4096] written
constexpr int COUNT = 4096;

extern "C" __global__ void integers(const unsigned* first, const unsigned* second, unsigned* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned a = first[i];
  const unsigned b = second[i];
  const unsigned sparse = a & (a << 7) & (b >> 3) & (b << 5);   // often 0, or with few bits
  unsigned* row = out + i;
  row[0 * COUNT] = __popc(a);
  row[1 * COUNT] = __clz(static_cast<int>(sparse));
  row[2 * COUNT] = __ffs(static_cast<int>(sparse));
  row[3 * COUNT] = __brev(a);
  row[4 * COUNT] = __byte_perm(a, b, b >> 9);
  row[5 * COUNT] = __funnelshift_l(a, b, a >> 26);
  row[6 * COUNT] = __funnelshift_r(a, b, a >> 26);
  row[7 * COUNT] = __funnelshift_lc(a, b, a >> 26);
  row[8 * COUNT] = __funnelshift_rc(a, b, a >> 26);
  row[9 * COUNT] = __umulhi(a, b);
  row[10 * COUNT] = static_cast<unsigned>(__mulhi(static_cast<int>(a), static_cast<int>(b)));
  row[11 * COUNT] = __umul24(a, b);
  row[12 * COUNT] = static_cast<unsigned>(__mul24(static_cast<int>(a), static_cast<int>(b)));
  row[13 * COUNT] = __sad(static_cast<int>(a), static_cast<int>(b), 17);
  const unsigned long long wide_a = a;
  const unsigned long long wide_b = b;
  row[14 * COUNT] = static_cast<unsigned>(__clzll(static_cast<long long>(sparse) << 20) + __popcll(wide_a * wide_b));
  row[15 * COUNT] = static_cast<unsigned>(__umul64hi(wide_a << 31, wide_b << 17));
}
