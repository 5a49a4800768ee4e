// What the emulation's headers ask of its runtime (runtime/*.cpp): compiled apart, once, and never instrumented.
//
// A CUDA thread is a fiber; a block is an operating-system thread that runs the block's fibers one at a time, a warp as far as
// its waits let it. The functions here act on the calling CUDA thread. Each that touches memory or waits also tells the
// detector, where the kernel was built with hooks: who did it, and (the address it returns to) on which source line.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "emulation_types.h"

namespace emu {

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int ALL_THREADS = -1;

// --- where the calling thread is --------------------------------------------------------------------------------------------
uint3 thread_index();
uint3 block_index();
dim3 block_dim();
dim3 grid_dim();
int thread_id();              // linear, in the block
int lane_id();                // thread_id() % 32
unsigned cluster_rank();      // of the block in its cluster (%cluster_ctarank)
unsigned cluster_size();      // blocks in it (%cluster_nctarank)

// --- trouble ----------------------------------------------------------------------------------------------------------------
// Ends the launch with this message, the thread, block and source line. For misuse that hardware would not survive or that
// PTX calls undefined. printf's format.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void print(const char* format, ...) __attribute__((format(printf, 1, 2)));   // device printf
std::uint64_t nanoseconds();

// --- waiting ----------------------------------------------------------------------------------------------------------------
// Blocks the calling thread until ready(state) is true. The scheduler calls `ready` with this thread as the current one,
// as often as it likes, so it may have effects of its own (a copy lands when someone must have it). `what` is said in a
// report of a deadlock, for example "mbarrier try_wait, parity 1"; it is copied.
void wait_until(bool (*ready)(void* state), void* state, const char* what);
template <typename F>
__attribute__((always_inline)) inline void wait_until(F ready, const char* what) {
  wait_until([](void* state) { return (*static_cast<F*>(state))(); }, &ready, what);
}
void yield();        // others may run; the thread stays runnable
void hold_back();    // others run first: called after a release, so that whoever waited for it may overtake
void progress();     // something that another thread may wait for has changed: not a deadlock

// --- a warp's collectives ---------------------------------------------------------------------------------------------------
// Blocks until every lane in `mask` has called it; the last to come runs `body` on what each handed in (null for lanes that
// are not in `mask`). Orders no memory accesses: shuffles, votes, ldmatrix and mma.sync do not either.
void warp_collective(unsigned mask, void* mine, void (*body)(void* const (&of_lane)[WARP]), const char* name);
void warp_sync(unsigned mask);   // __syncwarp: orders the lanes' memory accesses
std::uint64_t shuffle_bits(unsigned mask, std::uint64_t value, int source_lane, const char* name);
unsigned ballot(unsigned mask, int predicate, const char* name);

// --- a block's barriers (bar.sync, bar.arrive, bar.red), 0 to 15 ---------------------------------------------------------------
// `count` threads, a multiple of 32, or ALL_THREADS: every thread of the block that has not returned.
void barrier_sync(int id, int count, const char* name);
void barrier_arrive(int id, int count, const char* name);
struct Reduction {
  int count, all, any;
};
Reduction barrier_reduce(int predicate);

// --- a cluster's barrier ----------------------------------------------------------------------------------------------------
void cluster_arrive(bool release);
void cluster_wait();

// --- shared memory ----------------------------------------------------------------------------------------------------------
// The shared window: 32-bit addresses as PTX has them. Dynamic shared memory starts at 0, static follows at 227 KiB; bits 24
// and up hold the block's rank in its cluster, so that an address of another block is told from one's own.
bool is_shared(const void* pointer);                 // of any block of the cluster
unsigned shared_address(const void* pointer);        // fails where it is not shared memory
void* shared_pointer(unsigned address);              // fails outside of the window
void* shared_of_rank(const void* mine, unsigned rank);   // the same place in another block of the cluster (mapa)
unsigned shared_bytes_left(const void* pointer);     // from here to the end of its allocation

// --- memory, seen by the detector ---------------------------------------------------------------------------------------------
// Plain loads and stores of kernel code reach the detector through the compiler's hooks. Code of the emulation that moves
// bytes for a kernel is not instrumented (EMULATED) and says what it does instead.
enum class Kind : std::uint8_t {
  plain,      // a lane's own load or store, grouped with its warp's by source line
  matrix,     // ldmatrix, stmatrix: a lane's address names a row of 16 bytes
  copy,       // cp.async: like plain, but one instruction both reads global and writes shared memory
  bulk,       // a copy engine's: checked, not counted by lanes
};
#define EMULATED __attribute__((no_sanitize("thread"), noinline))
bool detecting();   // built with hooks, and asked to look
// The calling thread reads or writes `bytes` at `pointer`, counted as one access of a lane.
void on_read(const void* pointer, unsigned bytes, Kind kind = Kind::plain);
void on_write(const void* pointer, unsigned bytes, Kind kind = Kind::plain);
void atomic_note(const void* pointer, unsigned bytes);
std::uint64_t atomic_load(const void* pointer, unsigned bytes);
// ld.relaxed. Where the kernel before may still write, it finds what is there, or anything else: as the schedule has it.
std::uint64_t relaxed_load(const void* pointer, unsigned bytes);
void grid_wait();   // griddepcontrol.wait: what the kernel before wrote can be seen
bool atomic_replace(void* pointer, std::uint64_t expected, std::uint64_t desired, unsigned bytes);
void device_fence();   // of other blocks' atomics too: what came before it is released by the thread's next atomics, and what the
                       // last ones found released is acquired

// Where the calling thread's code is: any pointer into it, kept to blame an asynchronous operation on its source line.
using Place = const void*;
#define EMULATION_HERE() (__builtin_return_address(0))

// Happens-before for what is asynchronous. A Clock is a set of "everything that had happened by then"; release adds what the
// calling thread has seen to it, acquire lets the thread see it. Clocks belong to the block and die with it.
struct Clock;
Clock* new_clock();
void release(Clock* into);
void acquire(const Clock* from);

// An asynchronous write (cp.async, st.async, a bulk copy). `begin`: the bytes now belong to the copy: they are filled with
// poison, and any access before `end` is a race. `end`: the bytes are there, written by the calling thread's past (cp.async:
// `into` null), or for those who acquire `into`. Bulk copies are of the asynchronous proxy. cp.async and st.async are of the
// generic one (PTX ISA 9.0, 9.7.9.25.2 names cp.async.bulk and cp.reduce.async.bulk alone): no proxy fence is asked between
// plain accesses and theirs.
enum class Proxy : std::uint8_t { generic, async };
void async_write_begin(void* pointer, unsigned bytes, Place place, Proxy proxy);
void async_write_end(void* pointer, unsigned bytes, Place place, Clock* into, Proxy proxy);
// An asynchronous read (wgmma operands, a bulk store's source) by the calling thread. Called when it is issued and again when
// it has completed: a write in between, or one not ordered before it, is a race. A plain write that no fence.proxy.async
// orders before is reported as such.
void async_read_begin(const void* pointer, unsigned bytes, Place place, const char* what);
void async_read_end(const void* pointer, unsigned bytes, Place place, const char* what);
void proxy_fence();   // fence.proxy.async: the calling thread's view of plain writes reaches the asynchronous proxy

// State that a block keeps for async.cpp, made on first use and destroyed with the block.
struct AsyncState;
AsyncState*& async_state();

// --- choices of the schedule --------------------------------------------------------------------------------------------------
unsigned choose(unsigned n);   // 0 … n - 1: 0 under the ascending schedule, n - 1 under the descending, drawn under a seeded one

// --- the kernel ---------------------------------------------------------------------------------------------------------------
struct Kernel {
  const char* name;
  void (*call)(void* const* arguments);
  const std::size_t* argument_sizes;
  std::size_t num_arguments;
};
extern const Kernel the_kernel;
extern const void* const the_launch_shape;
extern const std::size_t the_launch_shape_bytes;
extern const bool the_kernel_is_hooked;   // its plain loads and stores call the detector

}  // namespace emu
