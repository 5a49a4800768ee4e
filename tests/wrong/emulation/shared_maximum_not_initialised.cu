// bug: the running maximum in shared memory is never set before the first tile is compared with it.
// mechanism: initialisation
// caught by: uninitialised
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: scores f32[4,32] normal
// parameter: out f32[32] written
// parameter: num_tiles int 4
// expect: out = scores.max(0)
constexpr int ROWS = 32;
constexpr float NEG_INF = __builtin_bit_cast(float, 0xff800000u);

extern "C" __global__ void shared_maximum_not_initialised(const float* scores, float* out, int num_tiles) {
  __shared__ float max_smem[ROWS];
#if !BUG
  max_smem[threadIdx.x] = NEG_INF;
#endif
  for (int tile = 0; tile < num_tiles; ++tile) {
    max_smem[threadIdx.x] = fmaxf(max_smem[threadIdx.x], scores[tile * ROWS + threadIdx.x]);   // here
  }
  out[threadIdx.x] = max_smem[threadIdx.x];
}
