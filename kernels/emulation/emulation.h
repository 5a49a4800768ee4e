// The CPU emulation of CUDA C++: included ahead of every kernel file (-include) by src/flashlab/run/emulator.py.
//
// g++ or clang++ compiles a .cu file unmodified. This header defines the language's keywords and built-ins; the headers next to it
// replace CUDA's own (<cuda_fp16.h>, <cuda_bf16.h>, <cuda_fp8.h>, <mma.h>) and the PTX wrappers in kernels/common. Using anything
// that is not defined here is a compile error that names it. README.md has an overview.
#pragma once
#if defined(__CUDACC__) || defined(__CUDA_ARCH__)
#error "kernels/emulation is for g++ and clang++; a GPU compiler takes kernels/common alone."
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "emulation_types.h"
#include "runtime.h"

// --- keywords ---------------------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Each block runs on its own operating-system thread, so a thread-local variable exists once per block. In a function the keyword
// implies static, and with extern it declares the dynamic shared memory, which the runtime defines: both as in CUDA.
// Without constinit g++ guards arrays of class types by a flag next to them, which the detector would take for shared memory.
#ifdef __clang__
#define __shared__ thread_local
#else
#define __shared__ constinit thread_local
#endif

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

// --- thread and block indices -----------------------------------------------------------------------------------------------
// Macros that call functions, so that the calling thread's position is looked up again after every fiber switch.
#define threadIdx (::emu::thread_index())
#define blockIdx (::emu::block_index())
#define blockDim (::emu::block_dim())
#define gridDim (::emu::grid_dim())
constexpr int warpSize = 32;

// --- barriers, votes, shuffles (CUDA C++ Programming Guide, "Synchronization functions", "Warp vote", "Warp shuffle") -------
__forceinline__ void __syncthreads() { emu::barrier_sync(0, emu::ALL_THREADS, "__syncthreads"); }
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_sync(mask); }
__forceinline__ int __syncthreads_count(int predicate) { return emu::barrier_reduce(predicate).count; }
__forceinline__ int __syncthreads_and(int predicate) { return emu::barrier_reduce(predicate).all; }
__forceinline__ int __syncthreads_or(int predicate) { return emu::barrier_reduce(predicate).any; }

namespace emu {
template <typename T>
__forceinline__ T shuffle(unsigned mask, T value, int source_lane, const char* name) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 2, 4 or 8 bytes");
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle_bits(mask, bits, source_lane, name);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emu

// `width` splits the warp into segments; a lane whose source is out of range keeps its own value.
template <typename T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source_lane, int width = 32) {
  const int lane = emu::lane_id();
  return emu::shuffle(mask, value, (lane & ~(width - 1)) | (source_lane & (width - 1)), "__shfl_sync");
}
template <typename T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = emu::lane_id();
  const int source = lane ^ lane_mask;
  return emu::shuffle(mask, value, source / width <= lane / width ? source : lane, "__shfl_xor_sync");
}
template <typename T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::lane_id();
  return emu::shuffle(mask, value, lane % width >= static_cast<int>(delta) ? lane - static_cast<int>(delta) : lane, "__shfl_up_sync");
}
template <typename T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu::lane_id();
  return emu::shuffle(mask, value, lane % width + static_cast<int>(delta) < width ? lane + static_cast<int>(delta) : lane, "__shfl_down_sync");
}
__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate, "__ballot_sync"); }
__forceinline__ int __any_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate, "__any_sync") != 0; }
__forceinline__ int __all_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate, "__all_sync") == mask; }
// The maximum over the lanes in `mask`.
__forceinline__ int __reduce_max_sync(unsigned mask, int value) {
  int most = value;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) {
      const int other = emu::shuffle(mask, value, lane, "__reduce_max_sync");
      most = other > most ? other : most;
    }
  }
  return most;
}
__forceinline__ unsigned __activemask() { return 0xffffffffu; }

// --- memory -----------------------------------------------------------------------------------------------------------------
__forceinline__ void __threadfence_block() {}
__forceinline__ void __threadfence() { emu::device_fence(); }
__forceinline__ void __threadfence_system() { emu::device_fence(); }
__forceinline__ std::size_t __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
__forceinline__ void* __cvta_shared_to_generic(std::size_t address) { return emu::shared_pointer(static_cast<unsigned>(address)); }
__forceinline__ unsigned __isShared(const void* pointer) { return emu::is_shared(pointer); }

// Cache operators have no effect: these are plain loads and stores.
template <typename T>
__forceinline__ T __ldg(const T* pointer) { return *pointer; }
template <typename T>
__forceinline__ T __ldcg(const T* pointer) { return *pointer; }
template <typename T>
__forceinline__ T __ldcs(const T* pointer) { return *pointer; }
template <typename T>
__forceinline__ void __stcs(T* pointer, T value) { *pointer = value; }
template <typename T>
__forceinline__ void __stcg(T* pointer, T value) { *pointer = value; }

// Atomics: each returns the old value. Blocks run on several operating-system threads, so global ones are real atomics.
namespace emu {
template <typename T, typename F>
__attribute__((always_inline)) inline T atomic_update(T* pointer, F next) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics act on 4 or 8 bytes");
  using Bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  T old_value;
  Bits old_bits, new_bits;
  do {
    old_bits = static_cast<Bits>(atomic_load(pointer, sizeof(T)));
    __builtin_memcpy(&old_value, &old_bits, sizeof(T));
    const T new_value = next(old_value);
    __builtin_memcpy(&new_bits, &new_value, sizeof(T));
  } while (!atomic_replace(pointer, old_bits, new_bits, sizeof(T)));
  return old_value;
}
}  // namespace emu
template <typename T>
__forceinline__ T atomicAdd(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return static_cast<T>(old + v); }); }
template <typename T>
__forceinline__ T atomicSub(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return static_cast<T>(old - v); }); }
template <typename T>
__forceinline__ T atomicMax(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return old > v ? old : v; }); }
template <typename T>
__forceinline__ T atomicMin(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return old < v ? old : v; }); }
template <typename T>
__forceinline__ T atomicAnd(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return old & v; }); }
template <typename T>
__forceinline__ T atomicOr(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return old | v; }); }
template <typename T>
__forceinline__ T atomicXor(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T old) { return old ^ v; }); }
template <typename T>
__forceinline__ T atomicExch(T* p, std::type_identity_t<T> v) { return emu::atomic_update(p, [&](T) { return v; }); }
template <typename T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> v) {
  return emu::atomic_update(p, [&](T old) { return old == compare ? v : old; });
}

// --- miscellaneous ----------------------------------------------------------------------------------------------------------
__forceinline__ void __nanosleep(unsigned) { emu::yield(); }
__forceinline__ long long clock64() { return static_cast<long long>(emu::nanoseconds()); }
[[noreturn]] inline void __trap() { emu::fail("__trap"); }
#define assert(condition) ((condition) ? void() : ::emu::fail("assertion failed: " #condition))
#define printf(...) ::emu::print(__VA_ARGS__)

// --- a kernel as the runtime calls it ----------------------------------------------------------------------------------------
namespace emu {
template <typename... A, std::size_t... I>
void call_with(void (*kernel)(A...), void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}
template <auto KERNEL, typename... A>
Kernel describe(const char* name, void (*)(A...)) {
  static const std::size_t sizes[] = {sizeof(A)..., 0};
  return {name, [](void* const* arguments) { call_with(KERNEL, arguments, std::index_sequence_for<A...>{}); }, sizes, sizeof...(A)};
}
template <typename T>
constexpr std::size_t bytes_of(const T*) { return sizeof(T); }
constexpr std::size_t bytes_of(std::nullptr_t) { return 0; }
}  // namespace emu
// Defines what the runtime runs: a kernel, and its LaunchShape (null if the file defines none).
#define EMULATE(kernel, shape) \
  const emu::Kernel emu::the_kernel = emu::describe<&kernel>(#kernel, &kernel); \
  const void* const emu::the_launch_shape = shape; \
  const std::size_t emu::the_launch_shape_bytes = emu::bytes_of(shape); \
  const bool emu::the_kernel_is_hooked = EMULATION_HOOKED;
// Set on the compiler's command line, because not every compiler defines a macro for -fsanitize=thread.
#ifndef EMULATION_HOOKED
#define EMULATION_HOOKED false
#endif

#include "cuda_math.h"
#include "cuda_fp16.h"
#include "cuda_bf16.h"
#include "ptx.cuh"
#include "ptx_sm90.cuh"

// CUDA allows alignas between __shared__ and the type, C++ does not.
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))
#define asm static_assert(false, "inline PTX cannot run on a CPU: call a wrapper of kernels/common/ptx.cuh or ptx_sm90.cuh");
