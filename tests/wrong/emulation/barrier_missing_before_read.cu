// bug: nothing separates the stores of a row of scores from other threads' reads of it.
// mechanism: block barrier
// caught by: race
// needs: hooks
// launch: grid=2 block=128 smem=0
// parameter: scores f32[2,128] normal
// parameter: out f32[2,128] written
// expect: out = scores[:, ::-1]
constexpr int THREADS = 128;

extern "C" __global__ void barrier_missing_before_read(const float* scores, float* out) {
  __shared__ float row_smem[THREADS];
  const int first = blockIdx.x * THREADS;
  row_smem[threadIdx.x] = scores[first + threadIdx.x];   // here: first
#if !BUG
  __syncthreads();   // the row is complete
#endif
  out[first + threadIdx.x] = row_smem[THREADS - 1 - threadIdx.x];   // here: second
}
