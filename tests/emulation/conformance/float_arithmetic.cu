// feature: float32 arithmetic that IEEE 754 fixes to the bit, subnormals among the operands
// launch: grid=256 block=256
// parameter: first f32[65536] bits
// parameter: second f32[65536] bits
// parameter: third f32[65536] normal
// parameter: out f32[13,65536] written
constexpr int COUNT = 65536;

extern "C" __global__ void float_arithmetic(const float* first, const float* second, const float* third, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float a = first[i];
  const float b = second[i];
  const float c = third[i];
  out[i] = __fadd_rn(a, b);
  out[COUNT + i] = __fsub_rn(a, b);
  out[2 * COUNT + i] = __fmul_rn(a, b);
  out[3 * COUNT + i] = __fmul_rn(a, c);
  out[4 * COUNT + i] = __fdiv_rn(a, b);
  out[5 * COUNT + i] = __fmaf_rn(c, c, a);
  out[6 * COUNT + i] = __fmaf_rn(a, c, b);
  out[7 * COUNT + i] = __fsqrt_rn(fabsf(a));
  out[8 * COUNT + i] = fmaxf(a, b);
  out[9 * COUNT + i] = fminf(a, b);
  out[10 * COUNT + i] = rintf(c * 8.0f);
  out[11 * COUNT + i] = truncf(c * 8.0f) + floorf(c) + ceilf(c);
  out[12 * COUNT + i] = __frcp_rn(a);
}
