// bug: the last block reads the parts of the others without a fence after the atomic that said they are there.
// mechanism: fences and atomics, between blocks
// caught by: race
// needs: hooks
// launch: grid=5 block=64 smem=0
// parameter: values f32[5,64] normal
// parameter: parts f32[5,64] written
// parameter: counter u32[1] zeros
// parameter: out f32[64] written
// expect: parts = values * 2
// expect: counter = np.array([5])
// expect: out = values.sum(0) * 2
// tolerance: 1e-5
constexpr int COLS = 64;

extern "C" __global__ void last_block_missing_acquire_fence(const float* values, float* parts, unsigned* counter, float* out) {
  __shared__ bool is_last;
  parts[blockIdx.x * COLS + threadIdx.x] = 2 * values[blockIdx.x * COLS + threadIdx.x];   // here: first
  __syncthreads();   // the block has written its part
  if (threadIdx.x == 0) {
    __threadfence();   // releases the part
    is_last = atomicAdd(counter, 1u) == gridDim.x - 1;
#if !BUG
    __threadfence();   // acquires those of the others
#endif
  }
  __syncthreads();   // who is last is known
  if (!is_last) return;
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += __ldcg(&parts[block * COLS + threadIdx.x]);   // here: second
  out[threadIdx.x] = sum;
}
