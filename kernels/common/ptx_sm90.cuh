// PTX instructions of Hopper GPUs, one wrapper each, named after the instruction: mbarrier, bulk and tensor copies, clusters.
// wgmma.cuh in this folder has the matrix instructions. Section numbers refer to the PTX ISA 9.0. Compile for sm_90a.
//
// Shared memory is passed by generic pointers. kernels/emulation/ptx_sm90.cuh defines the same names with C++ bodies.
#ifndef FLASHLAB_PTX_SM90
#define FLASHLAB_PTX_SM90

namespace ptx {

// An opaque barrier in shared memory that also counts bytes.
struct alignas(8) Mbarrier {
  unsigned long long state;
};

// A CUtensorMap: filled by cuTensorMapEncodeTiled and passed to a kernel as `const __grid_constant__ ptx::TensorMap`.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

using CachePolicy = unsigned long long;

__device__ __forceinline__ unsigned smem_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// --- 9.7.13.15 mbarrier ------------------------------------------------------------------------------------------------------

// 9.7.13.15.9 mbarrier.init: a phase completes after `count` arrivals, once all bytes that were expected in it have arrived.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

// 9.7.13.15.10 mbarrier.inval: the memory may then be used for something else.
__device__ __forceinline__ void mbarrier_inval(Mbarrier* barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// 9.7.13.15.11 mbarrier.expect_tx: the current phase waits for this many more bytes.
__device__ __forceinline__ void mbarrier_expect_tx(Mbarrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

// 9.7.13.15.13 mbarrier.arrive (release): `count` arrivals in one instruction. Returns the previous state, for test_wait.
__device__ __forceinline__ unsigned long long mbarrier_arrive(Mbarrier* barrier, unsigned count = 1) {
  unsigned long long state;
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state) : "r"(smem_address(barrier)), "r"(count) : "memory");
  return state;
}

// 9.7.13.15.13 mbarrier.arrive.expect_tx: mbarrier_expect_tx, then one arrival.
__device__ __forceinline__ unsigned long long mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes) {
  unsigned long long state;
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %0, [%1], %2;"
               : "=l"(state) : "r"(smem_address(barrier)), "r"(bytes) : "memory");
  return state;
}

// 9.7.13.15.16 mbarrier.test_wait (acquire): whether the phase of `state`, which an arrival returned, has completed. Non-blocking.
__device__ __forceinline__ bool mbarrier_test_wait(Mbarrier* barrier, unsigned long long state) {
  unsigned complete;
  asm volatile("{\n.reg .pred complete;\nmbarrier.test_wait.acquire.cta.shared::cta.b64 complete, [%1], %2;\n"
               "selp.u32 %0, 1, 0, complete;\n}" : "=r"(complete) : "r"(smem_address(barrier)), "l"(state) : "memory");
  return complete;
}

// 9.7.13.15.16 mbarrier.test_wait.parity: whether the phase of this parity, the current or the previous one, has completed.
// Phases count from 0: the first has parity 0, and the one before it, of parity 1, counts as complete.
__device__ __forceinline__ bool mbarrier_test_wait_parity(Mbarrier* barrier, unsigned parity) {
  unsigned complete;
  asm volatile("{\n.reg .pred complete;\nmbarrier.test_wait.parity.acquire.cta.shared::cta.b64 complete, [%1], %2;\n"
               "selp.u32 %0, 1, 0, complete;\n}" : "=r"(complete) : "r"(smem_address(barrier)), "r"(parity) : "memory");
  return complete;
}

// 9.7.13.15.16 mbarrier.try_wait.parity: the same, but may suspend the thread for a limited time first.
__device__ __forceinline__ bool mbarrier_try_wait_parity(Mbarrier* barrier, unsigned parity) {
  unsigned complete;
  asm volatile("{\n.reg .pred complete;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 complete, [%1], %2;\n"
               "selp.u32 %0, 1, 0, complete;\n}" : "=r"(complete) : "r"(smem_address(barrier)), "r"(parity) : "memory");
  return complete;
}

// Repeats mbarrier_try_wait_parity until the phase has completed.
__device__ __forceinline__ void mbarrier_wait_parity(Mbarrier* barrier, unsigned parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// The same for a barrier on which threads of other blocks of the cluster arrive: their earlier writes are then visible.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(Mbarrier* barrier, unsigned parity) {
  unsigned complete;
  asm volatile("{\n.reg .pred complete;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n"
               "selp.u32 %0, 1, 0, complete;\n}" : "=r"(complete) : "r"(smem_address(barrier)), "r"(parity) : "memory");
  return complete;
}
__device__ __forceinline__ void mbarrier_wait_parity_cluster(Mbarrier* barrier, unsigned parity) {
  while (!mbarrier_try_wait_parity_cluster(barrier, parity)) {
  }
}

// 9.7.9.23 mapa: the address, in the shared::cluster window, of the same location in another block of the cluster.
__device__ __forceinline__ unsigned mapa_shared(unsigned address, unsigned rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// 9.7.9.23 mapa: the same as a generic pointer, for ordinary loads, stores and atomics.
template <typename T>
__device__ __forceinline__ T* mapa(T* mine, unsigned rank) {
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(mine), "r"(rank));
  return mapped;
}

// 9.7.13.15.13 mbarrier.arrive on the barrier at the same location in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier* barrier, unsigned rank, unsigned count = 1) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;"
               ::"r"(mapa_shared(smem_address(barrier), rank)), "r"(count) : "memory");
}
// The same if no earlier writes need to be visible there, for example to release a buffer that was read. The release has CTA scope,
// the instruction's default, because a release at cluster scope waits until all of the thread's writes have reached the L2 cache.
__device__ __forceinline__ void mbarrier_arrive_cluster_cta(Mbarrier* barrier, unsigned rank, unsigned count = 1) {
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0], %1;"
               ::"r"(mapa_shared(smem_address(barrier), rank)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(Mbarrier* barrier, unsigned bytes, unsigned rank) {
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;"
               ::"r"(mapa_shared(smem_address(barrier), rank)), "r"(bytes) : "memory");
}

// 9.7.13.15.15 cp.async.mbarrier.arrive.noinc: triggers one of the phase's arrivals once this thread's earlier cp.async are complete.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Without .noinc the pending count is first incremented, so the net change is zero and the initial count need not include it.
__device__ __forceinline__ void cp_async_mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// --- 9.7.13.4 fences ---------------------------------------------------------------------------------------------------------

// fence.mbarrier_init: makes this thread's barrier initialisations visible to the cluster, after a barrier of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// fence.proxy.async: orders this thread's ordinary accesses with those of the async proxy (TMA, tensor cores).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// For shared memory only.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- 9.7.9.25.4 bulk copies --------------------------------------------------------------------------------------------------
// Addresses and sizes are multiples of 16 bytes.

// 9.7.9.25.4.1 cp.async.bulk, global to shared: the mbarrier counts the bytes.
__device__ __forceinline__ void cp_async_bulk_load(void* target_smem, const void* source_gmem, unsigned bytes,
                                                   Mbarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(smem_address(target_smem)), "l"(source_gmem), "r"(bytes), "r"(smem_address(barrier)) : "memory");
}
// Multicast to the same location in every block of `cta_mask`; the barrier at the same location there counts the bytes.
__device__ __forceinline__ void cp_async_bulk_load_multicast(void* target_smem, const void* source_gmem, unsigned bytes,
                                                             Mbarrier* barrier, unsigned short cta_mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(smem_address(target_smem)), "l"(source_gmem), "r"(bytes), "r"(smem_address(barrier)), "h"(cta_mask)
               : "memory");
}
// Shared to global, as part of a bulk group of this thread.
__device__ __forceinline__ void cp_async_bulk_store(void* target_gmem, const void* source_smem, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(target_gmem), "r"(smem_address(source_smem)), "r"(bytes) : "memory");
}
// Shared memory of this block to block `rank` of the cluster, at the same location as `target`; the barrier there counts the bytes.
__device__ __forceinline__ void cp_async_bulk_to_block(void* target, const void* source_smem, unsigned bytes, Mbarrier* barrier,
                                                       unsigned rank) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(mapa_shared(smem_address(target), rank)), "r"(smem_address(source_smem)), "r"(bytes),
               "r"(mapa_shared(smem_address(barrier), rank)) : "memory");
}

// 9.7.9.25.4.3 cp.async.bulk.prefetch: prefetches into the L2 cache.
__device__ __forceinline__ void cp_async_bulk_prefetch(const void* source_gmem, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source_gmem), "r"(bytes) : "memory");
}

// 9.7.9.25.6.1 cp.async.bulk.commit_group: this thread's bulk stores since the last commit become one group.
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// 9.7.9.25.6.2 cp.async.bulk.wait_group: waits until at most NUM_PENDING of this thread's most recent groups are pending.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(NUM_PENDING) : "memory");
}
// The same, but only until all older groups have read their shared memory, which may then be overwritten.
template <int NUM_PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NUM_PENDING) : "memory");
}

// 9.7.9.12 st.async: stores a value in block `rank` of the cluster, where the barrier counts the bytes. It belongs to the generic
// proxy: no fence.proxy.async is needed between it and ordinary accesses.
__device__ __forceinline__ void st_async(unsigned* target, unsigned value, Mbarrier* barrier, unsigned rank) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
               ::"r"(mapa_shared(smem_address(target), rank)), "r"(value), "r"(mapa_shared(smem_address(barrier), rank))
               : "memory");
}
__device__ __forceinline__ void st_async(float* target, float value, Mbarrier* barrier, unsigned rank) {
  st_async(reinterpret_cast<unsigned*>(target), __float_as_uint(value), barrier, rank);
}

// --- 9.7.9.25.5 tensor copies: boxes of tensors of 2 to 5 dimensions ---------------------------------------------------------
// Coordinates are in elements, the contiguous dimension first. Elements out of bounds are read as 0 and not written.

// 9.7.9.15 prefetch.tensormap
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 9.7.9.18 createpolicy: how long lines should stay in the L2 cache, for the wrappers whose names end in _hint.
__device__ __forceinline__ CachePolicy createpolicy_evict_first() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ CachePolicy createpolicy_evict_last() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 9.7.9.25.3.1 cp.async with such a policy, otherwise as cp_async_cg_16. Without the policy on GPUs other than Hopper: for sm_100a and
// sm_120, ptxas 13.0 makes some of these copies address memory by UR0 and UR1, which nothing sets (tests/test_decode.py checks for it).
__device__ __forceinline__ void cp_async_cg_16_hint(void* target_smem, const void* source_gmem, int valid_bytes, CachePolicy policy) {
#if __CUDA_ARCH__ == 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               ::"r"(smem_address(target_smem)), "l"(source_gmem), "r"(valid_bytes), "l"(policy) : "memory");
#else
  cp_async_cg_16(target_smem, source_gmem, valid_bytes);
#endif
}

// For each number of dimensions: the coordinates as parameters of the wrapper, their placeholders in the assembly (they are the
// first operands, from %0 on), and the operands themselves.
#define FLASHLAB_COORDINATES_2 int x0, int x1
#define FLASHLAB_COORDINATES_3 int x0, int x1, int x2
#define FLASHLAB_COORDINATES_4 int x0, int x1, int x2, int x3
#define FLASHLAB_COORDINATES_5 int x0, int x1, int x2, int x3, int x4
#define FLASHLAB_PLACES_2 "{%0, %1}"
#define FLASHLAB_PLACES_3 "{%0, %1, %2}"
#define FLASHLAB_PLACES_4 "{%0, %1, %2, %3}"
#define FLASHLAB_PLACES_5 "{%0, %1, %2, %3, %4}"
#define FLASHLAB_OPERANDS_2 "r"(x0), "r"(x1)
#define FLASHLAB_OPERANDS_3 "r"(x0), "r"(x1), "r"(x2)
#define FLASHLAB_OPERANDS_4 "r"(x0), "r"(x1), "r"(x2), "r"(x3)
#define FLASHLAB_OPERANDS_5 "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)

// D dimensions; E to H are D + 1 to D + 4. The operands after the coordinates are %D, %E, %F, %G, %H.
#define FLASHLAB_TENSOR_COPIES(D, E, F, G, H)                                                                                  \
  /* 9.7.9.25.5.2 cp.async.bulk.tensor, global to shared: the barrier counts the bytes of the whole box. */                   \
  __device__ __forceinline__ void cp_async_bulk_tensor_##D##d_load(void* target_smem, const TensorMap* map, Mbarrier* barrier, \
                                                                   FLASHLAB_COORDINATES_##D) {                                \
    asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "                     \
                 "[%" #D "], [%" #E ", " FLASHLAB_PLACES_##D "], [%" #F "];" ::FLASHLAB_OPERANDS_##D,                         \
                 "r"(smem_address(target_smem)), "l"(map), "r"(smem_address(barrier)) : "memory");                            \
  }                                                                                                                           \
  __device__ __forceinline__ void cp_async_bulk_tensor_##D##d_load_hint(                                                      \
      void* target_smem, const TensorMap* map, Mbarrier* barrier, FLASHLAB_COORDINATES_##D, CachePolicy policy) {             \
    asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "      \
                 "[%" #D "], [%" #E ", " FLASHLAB_PLACES_##D "], [%" #F "], %" #G ";" ::FLASHLAB_OPERANDS_##D,                \
                 "r"(smem_address(target_smem)), "l"(map), "r"(smem_address(barrier)), "l"(policy) : "memory");               \
  }                                                                                                                           \
  /* Multicast to the same location in every block of `cta_mask`; the barrier at the same location there counts the bytes. */ \
  __device__ __forceinline__ void cp_async_bulk_tensor_##D##d_load_multicast(                                                 \
      void* target_smem, const TensorMap* map, Mbarrier* barrier, unsigned short cta_mask, FLASHLAB_COORDINATES_##D) {        \
    asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "  \
                 "[%" #D "], [%" #E ", " FLASHLAB_PLACES_##D "], [%" #F "], %" #G ";" ::FLASHLAB_OPERANDS_##D,                \
                 "r"(smem_address(target_smem)), "l"(map), "r"(smem_address(barrier)), "h"(cta_mask) : "memory");             \
  }                                                                                                                           \
  __device__ __forceinline__ void cp_async_bulk_tensor_##D##d_load_multicast_hint(                                            \
      void* target_smem, const TensorMap* map, Mbarrier* barrier, unsigned short cta_mask, FLASHLAB_COORDINATES_##D,          \
      CachePolicy policy) {                                                                                                   \
    asm volatile("cp.async.bulk.tensor." #D "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"   \
                 ".L2::cache_hint [%" #D "], [%" #E ", " FLASHLAB_PLACES_##D "], [%" #F "], %" #G ", %" #H ";"                \
                 ::FLASHLAB_OPERANDS_##D, "r"(smem_address(target_smem)), "l"(map), "r"(smem_address(barrier)),               \
                 "h"(cta_mask), "l"(policy) : "memory");                                                                      \
  }                                                                                                                           \
  /* 9.7.9.25.5.2 cp.async.bulk.tensor, shared to global, as part of a bulk group of this thread. */                          \
  __device__ __forceinline__ void cp_async_bulk_tensor_##D##d_store(const TensorMap* map, const void* source_smem,            \
                                                                    FLASHLAB_COORDINATES_##D) {                               \
    asm volatile("cp.async.bulk.tensor." #D "d.global.shared::cta.tile.bulk_group [%" #D ", " FLASHLAB_PLACES_##D             \
                 "], [%" #E "];" ::FLASHLAB_OPERANDS_##D, "l"(map), "r"(smem_address(source_smem)) : "memory");               \
  }                                                                                                                           \
  /* 9.7.9.25.5.3 cp.reduce.async.bulk.tensor: adds to the tensor in global memory, element by element. */                    \
  __device__ __forceinline__ void cp_reduce_async_bulk_tensor_##D##d_add(const TensorMap* map, const void* source_smem,       \
                                                                         FLASHLAB_COORDINATES_##D) {                          \
    asm volatile("cp.reduce.async.bulk.tensor." #D "d.global.shared::cta.add.tile.bulk_group [%" #D ", " FLASHLAB_PLACES_##D  \
                 "], [%" #E "];" ::FLASHLAB_OPERANDS_##D, "l"(map), "r"(smem_address(source_smem)) : "memory");               \
  }                                                                                                                           \
  /* 9.7.9.25.5.4 cp.async.bulk.prefetch.tensor: prefetches into the L2 cache. */                                             \
  __device__ __forceinline__ void cp_async_bulk_prefetch_tensor_##D##d(const TensorMap* map, FLASHLAB_COORDINATES_##D) {      \
    asm volatile("cp.async.bulk.prefetch.tensor." #D "d.L2.global.tile [%" #D ", " FLASHLAB_PLACES_##D "];"                   \
                 ::FLASHLAB_OPERANDS_##D, "l"(map) : "memory");                                                               \
  }
FLASHLAB_TENSOR_COPIES(2, 3, 4, 5, 6)
FLASHLAB_TENSOR_COPIES(3, 4, 5, 6, 7)
FLASHLAB_TENSOR_COPIES(4, 5, 6, 7, 8)
FLASHLAB_TENSOR_COPIES(5, 6, 7, 8, 9)
#undef FLASHLAB_COORDINATES_2
#undef FLASHLAB_COORDINATES_3
#undef FLASHLAB_COORDINATES_4
#undef FLASHLAB_COORDINATES_5
#undef FLASHLAB_PLACES_2
#undef FLASHLAB_PLACES_3
#undef FLASHLAB_PLACES_4
#undef FLASHLAB_PLACES_5
#undef FLASHLAB_OPERANDS_2
#undef FLASHLAB_OPERANDS_3
#undef FLASHLAB_OPERANDS_4
#undef FLASHLAB_OPERANDS_5
#undef FLASHLAB_TENSOR_COPIES

// --- clusters, grids, registers ----------------------------------------------------------------------------------------------

// 9.7.13.3 barrier.cluster.arrive (release) and .wait (acquire), by all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// The same without the release, whose fence waits for the thread's writes: it signals that the block runs, not that its writes are visible.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 10.16 %cluster_ctarank: the block's rank in its cluster; 10.17 %cluster_nctarank: the number of blocks in the cluster.
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned cluster_nctarank() {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// 9.7.13.14 elect.sync: true for one lane of `mask`, always the same one.
__device__ __forceinline__ bool elect_sync(unsigned mask = 0xffffffffu) {
  unsigned elected;
  asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, %1;\nselp.u32 %0, 1, 0, elected;\n}" : "=r"(elected) : "r"(mask));
  return elected;
}

// 9.7.13.13 griddepcontrol.launch_dependents: the next grid may start once all blocks have executed this or exited; .wait: waits
// until the preceding grids have completed and their writes are visible.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 9.7.19.5 setmaxnreg: sets the warpgroup's registers per thread; an increase blocks until enough registers have been released.
// The block has the registers of its launch and no more: with `__launch_bounds__(threads, blocks)`, for each thread 65536 / blocks /
// threads, rounded down to a multiple of 8, or the largest REGISTERS if that is less. Without such a bound ptxas does not know this
// number at the kernel's entry and ignores the instruction, with advisory C7508, which flashlab's compiler treats as an error.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "REGISTERS must be a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "REGISTERS must be a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace ptx

#include "wgmma.cuh"

#endif
