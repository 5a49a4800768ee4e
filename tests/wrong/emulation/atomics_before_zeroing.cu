// bug: warps add to the shared row sum before thread 0 has set it to zero for sure.
// mechanism: block barrier, atomics
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: values f32[128] normal
// parameter: out f32[1] written
// expect: out = values.sum(keepdims=True)
// tolerance: 1e-4
extern "C" __global__ void atomics_before_zeroing(const float* values, float* out) {
  __shared__ float sum_smem;
  if (threadIdx.x == 0) sum_smem = 0.0f;   // here: first
#if !BUG
  __syncthreads();   // the sum starts at zero
#endif
  atomicAdd(&sum_smem, values[threadIdx.x]);   // here: second
  __syncthreads();   // everyone has added
  if (threadIdx.x == 0) out[0] = sum_smem;
}
