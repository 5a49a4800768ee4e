// feature: conversions to and from e4m3 and e5m2
// launch: grid=256 block=256
// parameter: codes u16[65536] all
// parameter: values f32[65536] normal
// parameter: out u8[5,65536] written
// parameter: half_out f16[2,256] written
#include <cuda_fp8.h>

constexpr int COUNT = 65536;
constexpr int CODES = 256;

extern "C" __global__ void
fp8_conversions(const unsigned short* codes, const float* values, unsigned char* out, __half* half_out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float scaled = ldexpf(values[i], i % 40 - 22);
  const __half_raw raw = static_cast<__half_raw>(__ushort_as_half(codes[i]));
  out[i] = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
  out[COUNT + i] = __nv_cvt_float_to_fp8(scaled, __NV_NOSAT, __NV_E5M2);
  out[2 * COUNT + i] = __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E5M2);
  out[3 * COUNT + i] = __nv_cvt_halfraw_to_fp8(raw, __NV_SATFINITE, __NV_E4M3);
  out[4 * COUNT + i] = __nv_cvt_halfraw_to_fp8(raw, __NV_SATFINITE, __NV_E5M2);
  if (i < CODES) {
    half_out[i] = __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(i), __NV_E4M3));
    half_out[CODES + i] = __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(i), __NV_E5M2));
  }
}
