// bug: each half of a warp sums its own lanes under a mask of its own, and starts at the distance of a whole warp.
// mechanism: warp shuffle, mask
// caught by: misuse
// needs: any
// launch: grid=1 block=32 smem=0
// parameter: values f32[2,16] normal
// parameter: out f32[2] written
// expect: out = values.sum(1)
// tolerance: 1e-5
constexpr int HALF = 16;   // lanes
#if BUG
constexpr int FIRST_DISTANCE = HALF;
#else
constexpr int FIRST_DISTANCE = HALF / 2;
#endif

extern "C" __global__ void shuffle_from_lane_outside_mask(const float* values, float* out) {
  const int lane = threadIdx.x;
  const unsigned mask = lane < HALF ? 0x0000ffffu : 0xffff0000u;
  float sum = values[lane];
  for (int distance = FIRST_DISTANCE; distance > 0; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);   // here
  if (lane % HALF == 0) out[lane / HALF] = sum;
}
