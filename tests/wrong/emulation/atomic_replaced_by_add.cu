// bug: the threads of a block add to shared bins with a plain += instead of an atomic add.
// mechanism: atomics
// caught by: race
// needs: hooks
// launch: grid=1 block=128 smem=0
// parameter: expert i32[128] range=8
// parameter: out i32[8] written
// expect: out = np.bincount(expert, minlength=8)
constexpr int BINS = 8;

extern "C" __global__ void atomic_replaced_by_add(const int* expert, int* out) {
  __shared__ int count_smem[BINS];
  if (threadIdx.x < BINS) count_smem[threadIdx.x] = 0;
  __syncthreads();   // the bins are empty
#if BUG
  count_smem[expert[threadIdx.x]] += 1;   // here: first, second
#else
  atomicAdd(&count_smem[expert[threadIdx.x]], 1);
#endif
  __syncthreads();   // everyone has counted
  if (threadIdx.x < BINS) out[threadIdx.x] = count_smem[threadIdx.x];
}
