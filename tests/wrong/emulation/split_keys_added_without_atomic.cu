// bug: the blocks that share a row's keys add their partial results to global memory with a plain += .
// mechanism: atomics, between blocks
// caught by: race
// needs: hooks
// launch: grid=4 block=64 smem=0
// parameter: values f32[4,64] normal
// parameter: out f32[64] zeros
// expect: out = values.sum(0)
// tolerance: 1e-5
constexpr int COLS = 64;

extern "C" __global__ void split_keys_added_without_atomic(const float* values, float* out) {
  const float partial = values[blockIdx.x * COLS + threadIdx.x];
#if BUG
  out[threadIdx.x] += partial;   // here: first, second
#else
  atomicAdd(&out[threadIdx.x], partial);
#endif
}
