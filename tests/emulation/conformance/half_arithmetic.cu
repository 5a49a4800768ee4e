// feature: __half arithmetic on every value of the first operand: subnormals, infinities and NaN among them
// launch: grid=256 block=256
// parameter: first f16[65536] all
// parameter: second f16[65536] bits
// parameter: third f16[65536] bits
// parameter: out f16[21,65536] written
// parameter: pairs f16[6,65536] written
// parameter: relation_out u32[65536] written
#include <cuda_fp16.h>

constexpr int COUNT = 65536;

extern "C" __global__ void
half_arithmetic(const __half* first, const __half* second, const __half* third, __half* out, __half2* pairs,
                unsigned* relation_out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const __half a = first[i];
  const __half b = second[i];
  const __half c = third[i];
  out[0 * COUNT + i] = __hadd(a, b);
  out[1 * COUNT + i] = __hsub(a, b);
  out[2 * COUNT + i] = __hmul(a, b);
  out[3 * COUNT + i] = __hadd_sat(a, b);
  out[4 * COUNT + i] = __hsub_sat(a, b);
  out[5 * COUNT + i] = __hmul_sat(a, b);
  out[6 * COUNT + i] = __hmin(a, b);
  out[7 * COUNT + i] = __hmax(a, b);
  out[8 * COUNT + i] = __hmin_nan(a, b);
  out[9 * COUNT + i] = __hmax_nan(a, b);
  out[10 * COUNT + i] = __hdiv(a, b);
  out[11 * COUNT + i] = __hfma(a, b, c);
  out[12 * COUNT + i] = __hfma_sat(a, b, c);
  out[13 * COUNT + i] = __hfma_relu(a, b, c);
  out[14 * COUNT + i] = __hneg(a);
  out[15 * COUNT + i] = __habs(a);
  out[16 * COUNT + i] = hsqrt(a);
  out[17 * COUNT + i] = hceil(a);
  out[18 * COUNT + i] = hfloor(a);
  out[19 * COUNT + i] = hrint(a);
  out[20 * COUNT + i] = htrunc(a);

  unsigned relations = 0;
  relations |= __heq(a, b) ? 1u : 0u;
  relations |= __hne(a, b) ? 2u : 0u;
  relations |= __hlt(a, b) ? 4u : 0u;
  relations |= __hle(a, b) ? 8u : 0u;
  relations |= __hgt(a, b) ? 16u : 0u;
  relations |= __hge(a, b) ? 32u : 0u;
  relations |= __hequ(a, b) ? 64u : 0u;
  relations |= __hneu(a, b) ? 128u : 0u;
  relations |= __hltu(a, b) ? 256u : 0u;
  relations |= __hleu(a, b) ? 512u : 0u;
  relations |= __hgtu(a, b) ? 1024u : 0u;
  relations |= __hgeu(a, b) ? 2048u : 0u;
  relations |= __hisnan(a) ? 4096u : 0u;
  relation_out[i] = relations;

  if (i % 2) return;
  const int pair = i / 2;
  const __half2 a2 = reinterpret_cast<const __half2*>(first)[pair];
  const __half2 b2 = reinterpret_cast<const __half2*>(second)[pair];
  const __half2 c2 = reinterpret_cast<const __half2*>(third)[pair];
  pairs[0 * COUNT / 2 + pair] = __hadd2(a2, b2);
  pairs[1 * COUNT / 2 + pair] = __hsub2(a2, b2);
  pairs[2 * COUNT / 2 + pair] = __hmul2(a2, b2);
  pairs[3 * COUNT / 2 + pair] = __hmin2(a2, b2);
  pairs[4 * COUNT / 2 + pair] = __hmax2(a2, b2);
  pairs[5 * COUNT / 2 + pair] = __hfma2(a2, b2, c2);
}
