// feature: atomics in shared and global memory, between threads and blocks; sums that are exact in any order
// launch: grid=4 block=64
// parameter: values i32[256] range=1000
// parameter: out i32[8] zeros
// parameter: sums f32[2] zeros
// parameter: wide u64[1] zeros
// expect: sums = np.array([values.sum(), values.sum() / 4])
// expect: wide = np.array([values.astype(np.uint64).sum() << np.uint64(20)])
// expect: out = np.array([values.sum(), -values.sum(), values.max(), 0, np.bitwise_or.reduce(values),
//         np.bitwise_xor.reduce(values), 256, 256])
extern "C" __global__ void atomics(const int* values, int* out, float* sums, unsigned long long* wide) {
  __shared__ int sum_smem;
  __shared__ float float_smem;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int value = values[i];
  if (threadIdx.x == 0) sum_smem = 0, float_smem = 0.0f;
  __syncthreads();   // the block's sums start at zero
  atomicAdd(&sum_smem, value);
  atomicAdd(&float_smem, static_cast<float>(value) * 0.25f);
  atomicSub(&out[1], value);
  atomicMax(&out[2], value);
  atomicMin(&out[3], value);
  atomicOr(&out[4], value);
  atomicXor(&out[5], value);
  atomicAdd(&sums[0], static_cast<float>(value));
  atomicAdd(wide, static_cast<unsigned long long>(value) << 20);
  int seen = 0;
  while (true) {   // a counter by compare and swap
    const int before = atomicCAS(&out[6], seen, seen + 1);
    if (before == seen) break;
    seen = before;
  }
  if (atomicExch(&out[7], 256) < 0) out[0] = -1;
  __syncthreads();   // the block's sums are complete
  if (threadIdx.x == 0) {
    atomicAdd(&out[0], sum_smem);
    atomicAdd(&sums[1], float_smem);
  }
}
