// PTX instructions, one wrapper each, named after the instruction. Section numbers refer to the PTX ISA 9.0.
// No kernel outside this folder contains inline assembly: kernels/emulation/ptx.cuh defines the same names with C++ bodies,
// behind the same include guard, so that this file is empty on a CPU.
#ifndef FLASHLAB_PTX
#define FLASHLAB_PTX

namespace ptx {

// 9.7.3.21 ex2: 2^x, about 2 ulp; 2^-inf = 0; results below 2^-126 are flushed to 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3.13 rcp: 1 / x, at most 1 ulp off; results and inputs below 2^-126 are flushed to 0.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3.22 tanh: relative error at most 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.6.3 selp: `a` if the predicate is true, else `b`; both are evaluated.
__device__ __forceinline__ float selp_f32(float a, float b, bool predicate) {
  float y;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}" : "=f"(y) : "f"(a), "f"(b), "r"(static_cast<int>(predicate)));
  return y;
}

// 9.7.9.11 st.global under a predicate: stores 2 or 4 bytes, or nothing if the predicate is false.
template <typename T>
__device__ __forceinline__ void st_global_if(T* target, T value, bool predicate) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "T must have 2 or 4 bytes");
  if constexpr (sizeof(T) == 2) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.b16 [%0], %1;\n}" ::"l"(target),
                 "h"(*reinterpret_cast<unsigned short*>(&value)), "r"(static_cast<int>(predicate))
                 : "memory");
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p st.global.b32 [%0], %1;\n}" ::"l"(target),
                 "r"(*reinterpret_cast<unsigned*>(&value)), "r"(static_cast<int>(predicate))
                 : "memory");
  }
}

// 10.8 %smid: the SM that the thread runs on.
__device__ __forceinline__ unsigned smid() {
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

// 10.28 %globaltimer: nanoseconds since a fixed point in time, from the same counter on every SM. Its resolution is not
// specified.
__device__ __forceinline__ unsigned long long globaltimer() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// 9.7.13.1 bar.sync: waits until `threads` threads (a multiple of 32) have arrived at barrier `id` (0 to 15; __syncthreads is 0),
// including those that only execute bar.arrive. Their earlier writes are then visible to the threads that waited. Both are
// .aligned: all threads of a warp must execute the same instruction together.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.13.1 bar.arrive: arrives at the barrier without waiting.
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.9.8 ld.relaxed, 9.7.9.11 st.relaxed: for words that other blocks access at the same time. Each word of a vector is accessed
// as a whole, but on its own; other accesses are not ordered by it.
__device__ __forceinline__ int ld_relaxed_gpu(const int* source_gmem) {
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(source_gmem) : "memory");
  return r;
}
__device__ __forceinline__ uint4 ld_relaxed_gpu(const uint4* source_gmem) {
  uint4 r;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(source_gmem)
               : "memory");
  return r;
}
__device__ __forceinline__ uint2 ld_relaxed_gpu(const uint2* source_gmem) {
  uint2 r;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(source_gmem) : "memory");
  return r;
}
__device__ __forceinline__ void st_relaxed_gpu(uint4* target_gmem, uint4 r) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target_gmem), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w)
               : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(uint2* target_gmem, uint2 r) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(target_gmem), "r"(r.x), "r"(r.y) : "memory");
}

// 9.7.9.25.3.1 cp.async: copies 16 bytes from global to shared memory, bypassing registers. Only the first `valid_bytes`
// (0 to 16) are read; the rest of the 16 bytes is filled with zeros. Both addresses are 16-byte aligned. The copy belongs to
// the group that this thread commits next.
__device__ __forceinline__ void cp_async_cg_16(void* target_smem, const void* source_gmem, int valid_bytes) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(target_smem));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source_gmem), "r"(valid_bytes) : "memory");
}

// 9.7.9.25.3.1 cp.async through L1: the same for BYTES of 4, 8 or 16, each aligned to its size.
template <int BYTES>
__device__ __forceinline__ void cp_async_ca(void* target_smem, const void* source_gmem, int valid_bytes) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(target_smem));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source_gmem), "n"(BYTES), "r"(valid_bytes)
               : "memory");
}

// 9.7.9.25.3.2 cp.async.commit_group: the copies this thread issued since the last commit become one group (empty if none).
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// 9.7.9.25.3.3 cp.async.wait_group: waits until at most NUM_PENDING of this thread's most recent groups are pending.
// It does not cover other threads' copies: a barrier must follow before their bytes are read.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_PENDING) : "memory");
}

// 9.7.9.25.3.3 cp.async.wait_all: waits for all of this thread's copies, committed or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 9.7.14.5.15 ldmatrix: the warp loads 1, 2 or 4 matrices of 8×8 16-bit elements from shared memory. Lane 8 · i + j passes the
// address of row j of matrix i, 16 bytes on a 16-byte boundary; the addresses of other lanes are ignored. r[i] of lane l receives
// elements 2 · (l % 4), in its lower half, and 2 · (l % 4) + 1 of row l / 4 of matrix i; with _trans, of its transpose.
// It does not order memory accesses between lanes.
__device__ __forceinline__ void ldmatrix_x1(unsigned (&r)[1], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x1_trans(unsigned (&r)[1], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row_smem) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// 9.7.14.5.16 stmatrix (sm_90): the inverse of ldmatrix, with the same register layout.
__device__ __forceinline__ void stmatrix_x1(void* row_smem, const unsigned (&r)[1]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(r[0]) : "memory");
}
__device__ __forceinline__ void stmatrix_x2(void* row_smem, const unsigned (&r)[2]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(void* row_smem, const unsigned (&r)[4]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_x1_trans(void* row_smem, const unsigned (&r)[1]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(r[0]) : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(void* row_smem, const unsigned (&r)[2]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row_smem, const unsigned (&r)[4]) {
  const unsigned row = static_cast<unsigned>(__cvta_generic_to_shared(row_smem));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// 9.7.14.5.14 mma.m16n8k16: d (16, 8) += a (16, 16) · b (16, 8) by one warp, with FP32 accumulators. With g = lane / 4 and
// t = lane % 4 (9.7.14.5.8):
//   a[0], a[1]: columns 2 · t and 2 · t + 1 of rows g and g + 8; a[2], a[3]: the same, 8 columns further
//   b[0]: rows 2 · t and 2 · t + 1 of column g; b[1]: the same, 8 rows further
//   d[0], d[1]: columns 2 · t and 2 · t + 1 of row g; d[2], d[3]: of row g + 8
// So ldmatrix loads a from row-major memory, and b from memory with contiguous columns (_trans: with contiguous rows).
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An empty statement that reads and writes a pointer: the compiler computes it before, not where it is first used.
template <typename T>
__device__ __forceinline__ void pin(T*& pointer) {
  asm volatile("" : "+l"(pointer));
}

}  // namespace ptx
#endif  // FLASHLAB_PTX
