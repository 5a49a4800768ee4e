// feature: every shuffle form, width and distance
// launch: grid=1 block=32
// parameter: values u32[32] bits
// parameter: wide u64[32] bits
// parameter: out u32[5,4,32,32] written
// parameter: wide_out u64[32] written
// parameter: half_out u16[32] written
#include <cuda_fp16.h>

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int LANES = 32;
constexpr int FORMS = 4;

extern "C" __global__ void
shuffles(const unsigned* values, const unsigned long long* wide, unsigned* out, unsigned long long* wide_out,
         unsigned short* half_out) {
  const int lane = threadIdx.x;
  const unsigned value = values[lane];
  for (int w = 0; w < 5; ++w) {
    const int width = 2 << w;
    for (int distance = 0; distance < LANES; ++distance) {
      unsigned* row = out + (w * FORMS * LANES + distance) * LANES + lane;
      row[0] = __shfl_sync(FULL_WARP, value, distance, width);
      row[LANES * LANES] = __shfl_up_sync(FULL_WARP, value, distance, width);
      row[2 * LANES * LANES] = __shfl_down_sync(FULL_WARP, value, distance, width);
      row[3 * LANES * LANES] = __shfl_xor_sync(FULL_WARP, value, distance, width);
    }
  }
  wide_out[lane] = __shfl_xor_sync(FULL_WARP, wide[lane], 5);
  half_out[lane] = __half_as_ushort(__shfl_down_sync(FULL_WARP, __ushort_as_half(static_cast<unsigned short>(value)), 3));
}
