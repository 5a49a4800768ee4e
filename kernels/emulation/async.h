// The asynchronous half of the emulation: called by ptx.cuh and ptx_sm90.cuh, implemented in runtime/async.cpp and runtime/wgmma.cpp.
//
// Nothing asynchronous takes effect when it is issued. A copy lands, and a wgmma's result appears, when a thread waits for it and
// must have it (under some schedules a bulk store or a wgmma reads its operands at issue, which is as legal). Until then the
// destination in shared memory or registers holds poison: reading it too early gives NaN, and writing to it is reported. A thread that
// completes an mbarrier's phase is held back, so that the threads waiting for it may overtake.
//
// Functions end the launch (emu::fail) where PTX calls a use undefined: they report what was expected and what was found.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime.h"

namespace emu {

// --- life of a block ---------------------------------------------------------------------------------------------------------
// Called when every thread of the block has returned, on the block's thread. Asynchronous work that should have been waited for is
// misuse. Frees the block's AsyncState in any case.
void async_block_end();

// --- cp.async (PTX ISA 9.0, 9.7.9.25.3) --------------------------------------------------------------------------------------
// One thread's copy of 4, 8 or 16 bytes from global to shared memory: the first `valid_bytes` are read, the rest is zero-filled.
// `place` null: that of the calling code.
void cp_async(void* target_smem, const void* source, int bytes, int valid_bytes, Place place = nullptr);
void cp_async_commit();
constexpr int WAIT_ALL = -1;             // cp.async.wait_all: includes copies that were never committed
void cp_async_wait(int pending);         // until at most `pending` of the thread's newest groups are in flight
void cp_async_mbarrier_arrive(void* barrier, bool noinc);

// --- mbarrier (9.7.13.15) ----------------------------------------------------------------------------------------------------
// The 64-bit object in shared memory holds, from bit 0: 20 bits of arrivals still pending in this phase, 20 bits of arrivals expected
// in each phase, 21 bits of transaction count (expected bytes that have not arrived, two's complement), the phase parity, and in the
// top two bits 2, which marks an initialised barrier (zeros and poison differ).
constexpr unsigned MBARRIER_MAX_COUNT = (1u << 20) - 1;
void mbarrier_init(void* barrier, unsigned count);
void mbarrier_inval(void* barrier);
// Returns the state before the arrival; mbarrier_test takes its parity. `rank`: the barrier at the same place in another block.
constexpr unsigned THIS_BLOCK = ~0u;
std::uint64_t mbarrier_arrive(void* barrier, unsigned count, std::uint32_t expect_bytes, bool expects,
                              unsigned rank = THIS_BLOCK);
void mbarrier_expect_tx(void* barrier, std::uint32_t bytes, unsigned rank = THIS_BLOCK);
void mbarrier_complete_tx(void* barrier, std::uint32_t bytes, unsigned rank = THIS_BLOCK);
// Whether the phase with this parity has completed. A failed test suspends the thread until the scheduler's next round, so that a loop
// around it makes progress; too many rounds in which nothing but such loops runs are a deadlock.
bool mbarrier_test(void* barrier, unsigned parity);
void mbarrier_wait(void* barrier, unsigned parity);
constexpr unsigned mbarrier_parity_of(std::uint64_t state) { return static_cast<unsigned>(state >> 61 & 1); }

// --- tensor maps -------------------------------------------------------------------------------------------------------------
// Replaces CUtensorMap: same size and alignment, filled by src/flashlab with the arguments of cuTensorMapEncodeTiled, whose limits
// also apply here. Little-endian; byte offsets are given next to the fields.
constexpr std::uint32_t TENSOR_MAP_MARK = 0x50414d54;   // "TMAP"
constexpr unsigned MAX_RANK = 5;
enum class TensorType : std::uint8_t {   // CUtensorMapDataType
  u8 = 0, u16 = 1, u32 = 2, i32 = 3, u64 = 4, i64 = 5, f16 = 6, f32 = 7, f64 = 8, bf16 = 9,
};
enum class TensorSwizzle : std::uint8_t { none = 0, b32 = 1, b64 = 2, b128 = 3 };   // CUtensorMapSwizzle
struct alignas(64) TensorMap {
  unsigned char* base;                       //   0  global address of coordinates 0, a multiple of 16; may lie outside the tensor
  std::uint32_t mark;                        //   8  TENSOR_MAP_MARK
  TensorType type;                           //  12
  std::uint8_t rank;                         //  13  1 to 5
  TensorSwizzle swizzle;                     //  14
  std::uint8_t nan_fill;                     //  15  1: out-of-bounds elements are NaN (floating-point types), 0: they are 0
  std::uint64_t strides[MAX_RANK - 1];       //  16  byte strides of dimensions 1 to 4
  std::uint32_t dims[MAX_RANK];              //  48  elements, dimension 0 contiguous
  std::uint32_t box[MAX_RANK];               //  68  elements, up to 256
  std::uint32_t element_strides[MAX_RANK];   //  88  all 1
  std::uint32_t reserved[5];                 // 108
};
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "CUtensorMap has 128 bytes and an alignment of 64");
static_assert(offsetof(TensorMap, strides) == 16 && offsetof(TensorMap, dims) == 48 && offsetof(TensorMap, box) == 68 &&
                  offsetof(TensorMap, element_strides) == 88, "Python fills these fields by their offsets");

// --- bulk copies (9.7.9.25.4, 9.7.9.25.5) -----------------------------------------------------------------------------------
// `coordinates` are those of the box's first element, dimension 0 first. `cta_mask` 0: to this block only; otherwise to the same
// address in every block of the cluster whose bit is set, each with its own barrier.
constexpr unsigned multicast(unsigned short cta_mask) { return cta_mask | 1u << 16; }   // distinguishes an empty mask from no multicast
void tensor_load(void* target_smem, const TensorMap* map, void* barrier, unsigned rank, const int* coordinates,
                 unsigned cta_mask);
void tensor_store(const TensorMap* map, const void* source_smem, unsigned rank, const int* coordinates);
void tensor_reduce_add(const TensorMap* map, const void* source_smem, unsigned rank, const int* coordinates);
void tensor_prefetch(const TensorMap* map, unsigned rank, const int* coordinates);   // only checks the map
void tensor_map_prefetch(const TensorMap* map);
void bulk_load(void* target_smem, const void* source, std::uint32_t bytes, void* barrier, unsigned cta_mask);
void bulk_store(void* target, const void* source_smem, std::uint32_t bytes);
void bulk_to_block(void* target_of_rank, const void* source_smem, std::uint32_t bytes, void* barrier_of_rank);
void bulk_prefetch(const void* source, std::uint32_t bytes);
void bulk_commit();
void bulk_wait(int pending, bool read_only);
// st.async (9.7.9.12): 4, 8 or 16 bytes into another block's shared memory, counted by an mbarrier of that block.
void store_async(void* target_of_rank, const void* value, unsigned bytes, void* barrier_of_rank);

// --- wgmma (9.7.15) ----------------------------------------------------------------------------------------------------------
enum class Input : std::uint8_t { f16, bf16, e4m3, e5m2 };
struct Wgmma {
  std::uint64_t desc_a, desc_b;
  const std::uint32_t* registers_a;   // four, or null: A is in shared memory, at desc_a
  std::uint16_t n;
  Input input;
  bool mn_major_a, mn_major_b;
  bool negate_a, negate_b;
  bool accumulate;                    // false: d is not read
};
void wgmma_fence();
void wgmma(float* d, const Wgmma& what);   // d: what.n / 2 registers
void wgmma_commit();
void wgmma_wait(int pending);

// --- the rest ----------------------------------------------------------------------------------------------------------------
void set_max_registers(int registers, bool more);
bool elect(unsigned mask);

}  // namespace emu
