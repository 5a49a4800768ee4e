// PTX instructions, one wrapper each, named after them. Section numbers are those of the PTX ISA 9.0.
// Nothing outside this folder contains assembly: a CPU backend gives the same names C++ bodies.
#pragma once

namespace ptx {

// 9.7.3.22 ex2: 2^x, about 2 ulp; 2^-inf = 0; results below 2^-126 are flushed to 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 10.29 %globaltimer: nanoseconds since a fixed moment, the same counter on every SM. It may step by a microsecond.
__device__ __forceinline__ unsigned long long globaltimer() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// 9.7.9.25.3.1 cp.async: copy 16 bytes from global to shared memory without passing through registers. Only the first
// `valid_bytes` (0 to 16) are read, the rest of the 16 is written as 0. Both addresses are 16-byte aligned. The copy
// belongs to the group that this thread commits next.
__device__ __forceinline__ void cp_async_cg_16(void* target_smem, const void* source_gmem, int valid_bytes) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(target_smem));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source_gmem), "r"(valid_bytes) : "memory");
}

// 9.7.9.25.3.2 cp.async.commit_group: the copies this thread issued since the last commit become one group (empty if none).
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// 9.7.9.25.3.3 cp.async.wait_group: wait until at most NUM_PENDING of this thread's newest groups are still under way.
// It says nothing of other threads' copies: a barrier must follow before their bytes are read.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_PENDING) : "memory");
}

}  // namespace ptx
