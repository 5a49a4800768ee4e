// The CPU version of kernels/common/ptx_sm90.cuh and wgmma.cuh: the same names, bodies in C++. Sections are those of the PTX ISA 9.0.
// Asynchronous operations are in runtime/async.cpp and runtime/wgmma.cpp; async.h says when they take effect.
#ifndef FLASHLAB_PTX_SM90
#define FLASHLAB_PTX_SM90

#include "async.h"
#include "cuda_fp8.h"

namespace ptx {

struct alignas(8) Mbarrier {
  unsigned long long state;
};

using emu::TensorMap;

using CachePolicy = unsigned long long;

__forceinline__ unsigned smem_address(const void* pointer) { return emu::shared_address(pointer); }

// --- 9.7.13.15 mbarrier ---------------------------------------------------------------------------------------------------
__forceinline__ void mbarrier_init(Mbarrier* barrier, unsigned count) { emu::mbarrier_init(barrier, count); }
__forceinline__ void mbarrier_inval(Mbarrier* barrier) { emu::mbarrier_inval(barrier); }
__forceinline__ void mbarrier_expect_tx(Mbarrier* barrier, unsigned bytes) { emu::mbarrier_expect_tx(barrier, bytes); }
__forceinline__ unsigned long long mbarrier_arrive(Mbarrier* barrier, unsigned count = 1) {
  return emu::mbarrier_arrive(barrier, count, 0, false);
}
__forceinline__ unsigned long long mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes) {
  return emu::mbarrier_arrive(barrier, 1, bytes, true);
}
__forceinline__ bool mbarrier_test_wait(Mbarrier* barrier, unsigned long long state) {
  return emu::mbarrier_test(barrier, emu::mbarrier_parity_of(state));
}
__forceinline__ bool mbarrier_test_wait_parity(Mbarrier* barrier, unsigned parity) {
  return emu::mbarrier_test(barrier, parity);
}
__forceinline__ bool mbarrier_try_wait_parity(Mbarrier* barrier, unsigned parity) {
  return emu::mbarrier_test(barrier, parity);
}
__forceinline__ void mbarrier_wait_parity(Mbarrier* barrier, unsigned parity) { emu::mbarrier_wait(barrier, parity); }
__forceinline__ bool mbarrier_try_wait_parity_cluster(Mbarrier* barrier, unsigned parity) {
  return emu::mbarrier_test(barrier, parity);
}
__forceinline__ void mbarrier_wait_parity_cluster(Mbarrier* barrier, unsigned parity) { emu::mbarrier_wait(barrier, parity); }

// 9.7.9.23 mapa
__forceinline__ unsigned mapa_shared(unsigned address, unsigned rank) {
  return emu::shared_address(emu::shared_of_rank(emu::shared_pointer(address), rank));
}
template <typename T>
__forceinline__ T* mapa(T* mine, unsigned rank) {
  return static_cast<T*>(emu::shared_of_rank(mine, rank));
}

__forceinline__ void mbarrier_arrive_cluster(Mbarrier* barrier, unsigned rank, unsigned count = 1) {
  emu::mbarrier_arrive(barrier, count, 0, false, rank);
}
__forceinline__ void mbarrier_arrive_cluster_cta(Mbarrier* barrier, unsigned rank, unsigned count = 1) {
  emu::mbarrier_arrive(barrier, count, 0, false, rank);
}
__forceinline__ void mbarrier_arrive_expect_tx_cluster(Mbarrier* barrier, unsigned bytes, unsigned rank) {
  emu::mbarrier_arrive(barrier, 1, bytes, true, rank);
}

// 9.7.13.15.15 cp.async.mbarrier.arrive
__forceinline__ void cp_async_mbarrier_arrive_noinc(Mbarrier* barrier) { emu::cp_async_mbarrier_arrive(barrier, true); }
__forceinline__ void cp_async_mbarrier_arrive(Mbarrier* barrier) { emu::cp_async_mbarrier_arrive(barrier, false); }

// --- 9.7.13.4 fences --------------------------------------------------------------------------------------------------------
__forceinline__ void fence_mbarrier_init() {}
__forceinline__ void fence_proxy_async() { emu::proxy_fence(); }
__forceinline__ void fence_proxy_async_shared() { emu::proxy_fence(); }

// --- 9.7.9.25.4 bulk copies -------------------------------------------------------------------------------------------------
__forceinline__ void cp_async_bulk_load(void* target_smem, const void* source_gmem, unsigned bytes, Mbarrier* barrier) {
  emu::bulk_load(target_smem, source_gmem, bytes, barrier, 0);
}
__forceinline__ void cp_async_bulk_load_multicast(void* target_smem, const void* source_gmem, unsigned bytes, Mbarrier* barrier,
                                                  unsigned short cta_mask) {
  emu::bulk_load(target_smem, source_gmem, bytes, barrier, emu::multicast(cta_mask));
}
__forceinline__ void cp_async_bulk_store(void* target_gmem, const void* source_smem, unsigned bytes) {
  emu::bulk_store(target_gmem, source_smem, bytes);
}
__forceinline__ void cp_async_bulk_to_block(void* target, const void* source_smem, unsigned bytes, Mbarrier* barrier,
                                            unsigned rank) {
  emu::bulk_to_block(emu::shared_of_rank(target, rank), source_smem, bytes, emu::shared_of_rank(barrier, rank));
}
__forceinline__ void cp_async_bulk_prefetch(const void* source_gmem, unsigned bytes) { emu::bulk_prefetch(source_gmem, bytes); }
__forceinline__ void cp_async_bulk_commit_group() { emu::bulk_commit(); }
template <int NUM_PENDING>
__forceinline__ void cp_async_bulk_wait_group() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  emu::bulk_wait(NUM_PENDING, false);
}
template <int NUM_PENDING>
__forceinline__ void cp_async_bulk_wait_group_read() {
  static_assert(NUM_PENDING >= 0, "NUM_PENDING must not be negative");
  emu::bulk_wait(NUM_PENDING, true);
}

// 9.7.9.12 st.async
__forceinline__ void st_async(unsigned* target, unsigned value, Mbarrier* barrier, unsigned rank) {
  emu::store_async(emu::shared_of_rank(target, rank), &value, sizeof value, emu::shared_of_rank(barrier, rank));
}
__forceinline__ void st_async(float* target, float value, Mbarrier* barrier, unsigned rank) {
  emu::store_async(emu::shared_of_rank(target, rank), &value, sizeof value, emu::shared_of_rank(barrier, rank));
}

// --- 9.7.9.25.5 tensor copies ------------------------------------------------------------------------------------------------
__forceinline__ void prefetch_tensormap(const TensorMap* map) { emu::tensor_map_prefetch(map); }

// 9.7.9.18 createpolicy: there are no caches here, so a policy has no effect.
__forceinline__ CachePolicy createpolicy_evict_first() { return 0; }
__forceinline__ CachePolicy createpolicy_evict_last() { return 0; }
__forceinline__ void cp_async_cg_16_hint(void* target_smem, const void* source_gmem, int valid_bytes, CachePolicy) {
  cp_async_cg_16(target_smem, source_gmem, valid_bytes);
}

#define FLASHLAB_COORDINATES_2 int x0, int x1
#define FLASHLAB_COORDINATES_3 int x0, int x1, int x2
#define FLASHLAB_COORDINATES_4 int x0, int x1, int x2, int x3
#define FLASHLAB_COORDINATES_5 int x0, int x1, int x2, int x3, int x4
#define FLASHLAB_ARRAY_2 {x0, x1}
#define FLASHLAB_ARRAY_3 {x0, x1, x2}
#define FLASHLAB_ARRAY_4 {x0, x1, x2, x3}
#define FLASHLAB_ARRAY_5 {x0, x1, x2, x3, x4}
#define FLASHLAB_TENSOR_COPIES(D)                                                                                           \
  __forceinline__ void cp_async_bulk_tensor_##D##d_load(void* target_smem, const TensorMap* map, Mbarrier* barrier,         \
                                                        FLASHLAB_COORDINATES_##D) {                                         \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_load(target_smem, map, barrier, D, coordinates, 0);                                                         \
  }                                                                                                                         \
  __forceinline__ void cp_async_bulk_tensor_##D##d_load_hint(void* target_smem, const TensorMap* map, Mbarrier* barrier,    \
                                                             FLASHLAB_COORDINATES_##D, CachePolicy) {                       \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_load(target_smem, map, barrier, D, coordinates, 0);                                                         \
  }                                                                                                                         \
  __forceinline__ void cp_async_bulk_tensor_##D##d_load_multicast(void* target_smem, const TensorMap* map,                  \
                                                                  Mbarrier* barrier, unsigned short cta_mask,               \
                                                                  FLASHLAB_COORDINATES_##D) {                               \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_load(target_smem, map, barrier, D, coordinates, emu::multicast(cta_mask));                                  \
  }                                                                                                                         \
  __forceinline__ void cp_async_bulk_tensor_##D##d_load_multicast_hint(void* target_smem, const TensorMap* map,             \
                                                                       Mbarrier* barrier, unsigned short cta_mask,          \
                                                                       FLASHLAB_COORDINATES_##D, CachePolicy) {             \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_load(target_smem, map, barrier, D, coordinates, emu::multicast(cta_mask));                                  \
  }                                                                                                                         \
  __forceinline__ void cp_async_bulk_tensor_##D##d_store(const TensorMap* map, const void* source_smem,                     \
                                                         FLASHLAB_COORDINATES_##D) {                                        \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_store(map, source_smem, D, coordinates);                                                                    \
  }                                                                                                                         \
  __forceinline__ void cp_reduce_async_bulk_tensor_##D##d_add(const TensorMap* map, const void* source_smem,                \
                                                              FLASHLAB_COORDINATES_##D) {                                   \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_reduce_add(map, source_smem, D, coordinates);                                                               \
  }                                                                                                                         \
  __forceinline__ void cp_async_bulk_prefetch_tensor_##D##d(const TensorMap* map, FLASHLAB_COORDINATES_##D) {               \
    const int coordinates[] = FLASHLAB_ARRAY_##D;                                                                           \
    emu::tensor_prefetch(map, D, coordinates);                                                                              \
  }
FLASHLAB_TENSOR_COPIES(2)
FLASHLAB_TENSOR_COPIES(3)
FLASHLAB_TENSOR_COPIES(4)
FLASHLAB_TENSOR_COPIES(5)
#undef FLASHLAB_COORDINATES_2
#undef FLASHLAB_COORDINATES_3
#undef FLASHLAB_COORDINATES_4
#undef FLASHLAB_COORDINATES_5
#undef FLASHLAB_ARRAY_2
#undef FLASHLAB_ARRAY_3
#undef FLASHLAB_ARRAY_4
#undef FLASHLAB_ARRAY_5
#undef FLASHLAB_TENSOR_COPIES

// --- clusters, grids, registers ----------------------------------------------------------------------------------------------
__forceinline__ void cluster_arrive() { emu::cluster_arrive(true); }
__forceinline__ void cluster_arrive_relaxed() { emu::cluster_arrive(false); }
__forceinline__ void cluster_wait() { emu::cluster_wait(); }
__forceinline__ unsigned cluster_ctarank() { return emu::cluster_rank(); }
__forceinline__ unsigned cluster_nctarank() { return emu::cluster_size(); }
__forceinline__ bool elect_sync(unsigned mask = 0xffffffffu) { return emu::elect(mask); }
// Grids run one after another here: none starts early. The detector reports accesses that an early launch makes before the wait.
__forceinline__ void griddepcontrol_launch_dependents() {}
__forceinline__ void griddepcontrol_wait() { emu::grid_wait(); }
template <int REGISTERS>
__forceinline__ void setmaxnreg_inc() {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "REGISTERS must be a multiple of 8 from 24 to 256");
  emu::set_max_registers(REGISTERS, true);
}
template <int REGISTERS>
__forceinline__ void setmaxnreg_dec() {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "REGISTERS must be a multiple of 8 from 24 to 256");
  emu::set_max_registers(REGISTERS, false);
}

// --- 9.7.15 wgmma ------------------------------------------------------------------------------------------------------------
enum class Major { K = 0, MN = 1 };
enum class Swizzle { none = 0, b128 = 1, b64 = 2, b32 = 3 };   // bits 62 and 63 of a descriptor

__forceinline__ unsigned long long make_descriptor(const void* smem, unsigned leading_bytes, unsigned stride_bytes,
                                                   Swizzle swizzle) {
  constexpr unsigned ADDRESS_BITS = 0x3ffff;
  return static_cast<unsigned long long>((emu::shared_address(smem) & ADDRESS_BITS) >> 4) |
         static_cast<unsigned long long>((leading_bytes & ADDRESS_BITS) >> 4) << 16 |
         static_cast<unsigned long long>((stride_bytes & ADDRESS_BITS) >> 4) << 32 |
         static_cast<unsigned long long>(swizzle) << 62;
}

__forceinline__ void wgmma_fence() { emu::wgmma_fence(); }
__forceinline__ void wgmma_commit_group() { emu::wgmma_commit(); }
template <int NUM_PENDING>
__forceinline__ void wgmma_wait_group() {
  static_assert(NUM_PENDING >= 0 && NUM_PENDING <= 7, "NUM_PENDING must be from 0 to 7");
  emu::wgmma_wait(NUM_PENDING);
}
// No effect here: accumulators are memory whose address was passed to wgmma, so no access to them moves across a call.
template <int N>
__forceinline__ void wgmma_pin(float (&)[N]) {}

namespace wgmma_detail {
template <class In>
constexpr emu::Input INPUT = std::is_same_v<In, __half>          ? emu::Input::f16
                             : std::is_same_v<In, __nv_bfloat16> ? emu::Input::bf16
                             : std::is_same_v<In, __nv_fp8_e4m3> ? emu::Input::e4m3
                                                                 : emu::Input::e5m2;

template <int N, class In, Major A, Major B, int SCALE_A, int SCALE_B>
constexpr void check() {
  constexpr bool BITS_16 = std::is_same_v<In, __half> || std::is_same_v<In, __nv_bfloat16>;
  static_assert(N >= 8 && N <= 256 && N % 8 == 0, "N must be a multiple of 8 from 8 to 256");
  static_assert(BITS_16 || std::is_same_v<In, __nv_fp8_e4m3> || std::is_same_v<In, __nv_fp8_e5m2>,
                "wgmma takes __half, __nv_bfloat16, __nv_fp8_e4m3 and __nv_fp8_e5m2");
  static_assert(BITS_16 || (A == Major::K && B == Major::K), "wgmma takes 8-bit types K-major only");
  static_assert((SCALE_A == 1 || SCALE_A == -1) && (SCALE_B == 1 || SCALE_B == -1), "SCALE_A and SCALE_B must be 1 or -1");
}
}  // namespace wgmma_detail

// 9.7.15.5.2 wgmma.mma_async
template <int N, class In, Major A = Major::K, Major B = Major::K, int SCALE_A = 1, int SCALE_B = 1>
__forceinline__ void wgmma_ss(float (&d)[N / 2], unsigned long long desc_a, unsigned long long desc_b, bool accumulate) {
  wgmma_detail::check<N, In, A, B, SCALE_A, SCALE_B>();
  emu::wgmma(d, {desc_a, desc_b, nullptr, N, wgmma_detail::INPUT<In>, A == Major::MN, B == Major::MN, SCALE_A < 0, SCALE_B < 0,
                 accumulate});
}
template <int N, class In, Major B = Major::K, int SCALE_A = 1, int SCALE_B = 1>
__forceinline__ void wgmma_rs(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long desc_b, bool accumulate) {
  wgmma_detail::check<N, In, Major::K, B, SCALE_A, SCALE_B>();
  emu::wgmma(d, {0, desc_b, a, N, wgmma_detail::INPUT<In>, false, B == Major::MN, SCALE_A < 0, SCALE_B < 0, accumulate});
}

}  // namespace ptx

#endif
