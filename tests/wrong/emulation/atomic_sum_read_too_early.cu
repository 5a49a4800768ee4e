// bug: thread 0 writes the row's sum out before the other threads have added to it for sure.
// mechanism: block barrier, atomics
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: values f32[128] normal
// parameter: out f32[1] written
// expect: out = values.sum(keepdims=True)
// tolerance: 1e-4
extern "C" __global__ void atomic_sum_read_too_early(const float* values, float* out) {
  __shared__ float sum_smem;
  if (threadIdx.x == 0) sum_smem = 0.0f;
  __syncthreads();   // the sum starts at zero
  atomicAdd(&sum_smem, values[threadIdx.x]);   // here: first
#if !BUG
  __syncthreads();   // everyone has added
#endif
  if (threadIdx.x == 0) out[0] = sum_smem;   // here: second
}
