// feature: conversions between float32, float16, bfloat16 and integers, in each rounding mode
// launch: grid=256 block=256
// parameter: codes u16[65536] all
// parameter: floats f32[65536] bits
// parameter: near_half f32[65536] normal
// parameter: half_out f16[6,65536] written
// parameter: bf16_out bf16[5,65536] written
// parameter: float_out f32[2,65536] written
// parameter: int_out i32[8,65536] written
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int COUNT = 65536;

extern "C" __global__ void
narrow_conversions(const unsigned short* codes, const float* floats, const float* near_half, __half* half_out,
                   __nv_bfloat16* bf16_out, float* float_out, int* int_out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float any = floats[i];   // of every magnitude
  const float scaled = ldexpf(near_half[i], i % 48 - 28);   // around and below the smallest float16
  half_out[i] = __float2half_rn(any);
  half_out[COUNT + i] = __float2half_rn(scaled);
  half_out[2 * COUNT + i] = __float2half_rz(scaled);
  half_out[3 * COUNT + i] = __float2half_ru(scaled);
  half_out[4 * COUNT + i] = __float2half_rd(scaled);
  half_out[5 * COUNT + i] = __int2half_rn(static_cast<int>(codes[i]) * 3 - 100000);
  bf16_out[i] = __float2bfloat16_rn(any);
  bf16_out[COUNT + i] = __float2bfloat16_rz(any);
  bf16_out[2 * COUNT + i] = __float2bfloat16_ru(any);
  bf16_out[3 * COUNT + i] = __float2bfloat16_rd(any);
  bf16_out[4 * COUNT + i] = __int2bfloat16_rn(__float_as_int(any));
  const __half h = __ushort_as_half(codes[i]);
  const __nv_bfloat16 b = __ushort_as_bfloat16(codes[i]);
  float_out[i] = __half2float(h);
  float_out[COUNT + i] = __bfloat162float(b);
  int_out[i] = __half2int_rn(h);
  int_out[COUNT + i] = __half2int_rz(h);
  int_out[2 * COUNT + i] = __half2int_ru(h);
  int_out[3 * COUNT + i] = __half2int_rd(h);
  int_out[4 * COUNT + i] = __bfloat162int_rn(b);
  int_out[5 * COUNT + i] = __bfloat162int_rz(b);
  int_out[6 * COUNT + i] = __float2int_rn(any);
  int_out[7 * COUNT + i] = static_cast<int>(__float2uint_rz(any));
}
