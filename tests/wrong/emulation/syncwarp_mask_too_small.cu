// bug: each half of a warp waits for itself alone, and then reads what the other half stored.
// mechanism: warp barrier
// caught by: race
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: values f32[2,32] normal
// parameter: out f32[2,32] written
// expect: out = values[:, ::-1]
constexpr int LANES = 32;
constexpr int WARPS = 2;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr unsigned LOWER_HALF = 0x0000ffffu;

extern "C" __global__ void syncwarp_mask_too_small(const float* values, float* out) {
  __shared__ float row_smem[WARPS][LANES];
  const int warp = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  row_smem[warp][lane] = values[threadIdx.x];   // here: first
#if BUG
  __syncwarp(lane < LANES / 2 ? LOWER_HALF : ~LOWER_HALF);
#else
  __syncwarp(FULL_WARP);   // the warp's row is complete
#endif
  out[threadIdx.x] = row_smem[warp][LANES - 1 - lane];   // here: second
}
