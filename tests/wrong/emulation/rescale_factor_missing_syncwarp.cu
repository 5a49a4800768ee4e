// bug: a warp's lanes exchange rescaling factors through shared memory and overwrite them before the others have read.
// mechanism: warp barrier
// caught by: race
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: factors f32[4,64] normal
// parameter: out f32[64] written
// parameter: num_tiles int 4
// expect: out = factors.reshape(4, 2, 32)[:, :, ::-1].sum(0).ravel()
// tolerance: 1e-5
constexpr int LANES = 32;
constexpr int WARPS = 2;

extern "C" __global__ void rescale_factor_missing_syncwarp(const float* factors, float* out, int num_tiles) {
  __shared__ float factor_smem[WARPS][LANES];
  const int warp = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  float sum = 0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) {
    factor_smem[warp][lane] = factors[tile * WARPS * LANES + threadIdx.x];   // here: second
    __syncwarp();   // the warp's factors are complete
    sum += factor_smem[warp][LANES - 1 - lane];   // here: first
#if !BUG
    __syncwarp();   // the warp is done with its factors
#endif
  }
  out[threadIdx.x] = sum;
}
