// bug: the next tile of keys overwrites the shared tile while other warps still read it.
// mechanism: block barrier
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: keys f32[512] normal
// parameter: out f32[128] written
// parameter: num_tiles int 4
// expect: out = keys.reshape(4, 128)[:, ::-1].sum(0)
constexpr int TILE = 128;

extern "C" __global__ void barrier_missing_before_overwrite(const float* keys, float* out, int num_tiles) {
  __shared__ float tile_smem[TILE];
  float sum = 0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) {
    tile_smem[threadIdx.x] = keys[tile * TILE + threadIdx.x];   // here: second
    __syncthreads();   // the tile is complete
    sum += tile_smem[TILE - 1 - threadIdx.x];   // here: first
#if !BUG
    __syncthreads();   // everyone is done with the tile
#endif
  }
  out[threadIdx.x] = sum;
}
