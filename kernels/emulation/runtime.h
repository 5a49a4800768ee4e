// The runtime's interface to the emulation's headers. The runtime (runtime/*.cpp) is compiled separately, once, and never instrumented.
//
// A CUDA thread is a fiber; a block is an operating-system thread that runs the block's fibers one at a time, each warp until it has
// to wait. The functions here act on the calling CUDA thread. In a kernel built with hooks, those that access memory or wait also
// report to the detector: the thread, and the source line (by their return address).
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "emulation_types.h"

namespace emu {

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int ALL_THREADS = -1;

// --- position of the calling thread -----------------------------------------------------------------------------------------
uint3 thread_index();
uint3 block_index();
dim3 block_dim();
dim3 grid_dim();
int thread_id();              // linear, in the block
int lane_id();                // thread_id() % 32
unsigned cluster_rank();      // of the block in its cluster (%cluster_ctarank)
unsigned cluster_size();      // blocks in it (%cluster_nctarank)

// --- failure ----------------------------------------------------------------------------------------------------------------
// Ends the launch with this message, and the thread, block and source line. For misuse that would crash on hardware or that PTX
// calls undefined. The format is printf's.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void print(const char* format, ...) __attribute__((format(printf, 1, 2)));   // device printf
std::uint64_t nanoseconds();

// --- waiting ----------------------------------------------------------------------------------------------------------------
// Blocks the calling thread until ready(state) is true. The scheduler calls `ready` with this thread as the current one, any number
// of times, so it may have side effects (a copy lands when a thread must have it). `what` describes the wait in a deadlock report,
// for example "mbarrier try_wait, parity 1"; it is copied.
void wait_until(bool (*ready)(void* state), void* state, const char* what);
template <typename F>
__attribute__((always_inline)) inline void wait_until(F ready, const char* what) {
  wait_until([](void* state) { return (*static_cast<F*>(state))(); }, &ready, what);
}
void yield();        // lets other threads run; this one stays runnable
void hold_back();    // lets other threads run first: called after a release, so that those waiting for it may overtake
void progress();     // marks a change that another thread may be waiting for: not a deadlock

// --- warp collectives -------------------------------------------------------------------------------------------------------
// Blocks until every lane in `mask` has called it; the last one to arrive runs `body` on the arguments of all (null for lanes that
// are not in `mask`). Does not order memory accesses, because shuffles, votes, ldmatrix and mma.sync do not either.
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
// The shared window: 32-bit addresses as in PTX. Dynamic shared memory starts at 0, static follows at 227 KiB; an address of another
// block of the cluster has bit 31 set and that block's rank from bit 24 on.
bool is_shared(const void* pointer);                 // of any block of the cluster
unsigned shared_address(const void* pointer);        // fails if it is not in shared memory
void* shared_pointer(unsigned address);              // fails outside the window
void* shared_of_rank(const void* mine, unsigned rank);   // the same place in another block of the cluster (mapa)
unsigned shared_bytes_left(const void* pointer);     // from here to the end of its allocation

// --- memory accesses, as seen by the detector ---------------------------------------------------------------------------------
// Plain loads and stores of kernel code reach the detector through the compiler's hooks. Emulation code that moves bytes for a
// kernel is not instrumented (EMULATED) and reports its accesses itself.
enum class Kind : std::uint8_t {
  plain,      // a lane's own load or store, grouped with its warp's by source line
  matrix,     // ldmatrix, stmatrix: a lane supplies the address of a 16-byte row
  copy,       // cp.async: like plain, but one instruction both reads global and writes shared memory
  bulk,       // copy engines, wgmma, mbarriers: checked, but not counted per lane
};
#define EMULATED __attribute__((no_sanitize("thread"), noinline))
bool detecting();   // built with hooks, and detection was requested
// The calling thread reads or writes `bytes` at `pointer`, counted as one access of a lane.
void on_read(const void* pointer, unsigned bytes, Kind kind = Kind::plain);
void on_write(const void* pointer, unsigned bytes, Kind kind = Kind::plain);
void atomic_note(const void* pointer, unsigned bytes);
std::uint64_t atomic_load(const void* pointer, unsigned bytes);
// ld.relaxed. While the previous kernel may still write, it returns the value in memory or any other, as the schedule decides.
std::uint64_t relaxed_load(const void* pointer, unsigned bytes);
void grid_wait();   // griddepcontrol.wait: the previous kernel's writes are visible
bool atomic_replace(void* pointer, std::uint64_t expected, std::uint64_t desired, unsigned bytes);
void device_fence();   // together with atomics, also between blocks: earlier accesses are released by the thread's next atomics, and
                       // what the atomics since the last fence found released is acquired

// The position of the calling thread's code: any pointer into it, kept to attribute an asynchronous operation to its source line.
using Place = const void*;
#define EMULATION_HERE() (__builtin_return_address(0))

// Happens-before for asynchronous operations. A Clock is a set of "everything that had happened by then"; release adds to it what the
// calling thread has seen, acquire adds it to what the thread has seen. Clocks belong to the block and are destroyed with it.
struct Clock;
Clock* new_clock();
void release(Clock* into);
void acquire(const Clock* from);

// An asynchronous write (cp.async, st.async, a bulk copy). `begin`: from now on the bytes belong to the copy: they are filled with
// poison, and any access before `end` is a race. `end`: the bytes have arrived, as a write by the calling thread (cp.async: `into`
// null), or one ordered before whatever acquires `into`. Bulk copies belong to the async proxy. cp.async and st.async belong to
// the generic proxy (PTX ISA 9.0, 9.7.9.25.2 names only cp.async.bulk and cp.reduce.async.bulk): no proxy fence is required between
// plain accesses and theirs.
enum class Proxy : std::uint8_t { generic, async };
void async_write_begin(void* pointer, unsigned bytes, Place place, Proxy proxy);
void async_write_end(void* pointer, unsigned bytes, Place place, Clock* into, Proxy proxy);
// An asynchronous read (wgmma operands, a bulk store's source) by the calling thread. Called when it is issued and again when
// it has completed: a write in between, or one not ordered before it, is a race. A plain write that no fence.proxy.async orders
// before it is reported as such.
void async_read_begin(const void* pointer, unsigned bytes, Place place, const char* what);
void async_read_end(const void* pointer, unsigned bytes, Place place, const char* what);
void proxy_fence();   // fence.proxy.async: makes the plain writes that the calling thread has seen visible to the async proxy

// State that a block keeps for async.cpp, created on first use and destroyed with the block.
struct AsyncState;
AsyncState*& async_state();

// --- choices of the schedule --------------------------------------------------------------------------------------------------
unsigned choose(unsigned n);   // a number below n: 0 under the ascending schedule, n - 1 under descending, random under seeded

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
