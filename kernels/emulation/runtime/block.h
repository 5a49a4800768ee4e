// A block, its threads and its cluster, as the scheduler sees them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../emulation_types.h"
#include "../runtime.h"
#include "detector.h"
#include "fiber.h"

namespace emu {

constexpr std::size_t DYNAMIC_BYTES = 227 * 1024;     // the most that a block can request on any GPU so far (sm_90)
constexpr std::size_t WINDOW_BYTES = 256 * 1024;      // range of a matrix descriptor's 14-bit address, in units of 16 bytes
constexpr unsigned RANK_SHIFT = 24;                   // a shared::cluster address: the block's rank from this bit on, the offset below
constexpr std::size_t STACK_BYTES = 128 * 1024;       // per thread
constexpr int NUM_BARRIERS = 16;

enum class Schedule { ascending, descending, seeded };

struct Launch {
  dim3 grid, block, cluster;
  std::size_t smem_bytes = 0;
  std::vector<void*> arguments;
  std::uintptr_t arguments_low = 0, arguments_high = 0;
  GlobalMemory memory;
  Schedule schedule = Schedule::ascending;
  std::uint64_t seed = 0;
  unsigned max_threads = 0;
  std::uint64_t max_blocks = ~std::uint64_t{0};
  bool detect = false;
  bool early = false;   // the previous kernel may still write; a thread knows that it has completed only after griddepcontrol.wait
};

// Thrown where a kernel cannot continue. Caught at the base of a fiber or in the scheduler.
struct Failure {};

struct Trouble {
  std::string status, message;
  bool somewhere = false;
  unsigned block[3] = {}, thread[3] = {};
  std::uint32_t place = 0;
};

struct Thread {
  enum class State : std::uint8_t { runnable, waiting, done };
  Fiber fiber;
  uint3 index{};
  int id = 0;
  State state = State::runnable;
  std::uint64_t held_until = 0;      // does not run before this round of the block
  bool (*ready)(void*) = nullptr;
  void* ready_state = nullptr;
  // What the thread waits for. The text is composed only when a report needs it.
  const char* waits_in = nullptr;    // name of the collective or barrier
  unsigned waits_mask = 0;           // lanes of the collective; 0: a barrier
  int waits_id = 0, waits_count = 0; // of the barrier
  char what[120] = {};               // if waits_in is null: the caller's text
  Place place = nullptr;             // of the wait
  bool waited_for_grid = false;
  bool cluster_arrived = false;
  std::uint64_t cluster_generation = 0;
  Clock clock;                       // with hooks
  Pasts released, found;             // what the last fence released, and what later atomics found released
};

// Lanes of a warp that have arrived at a collective.
struct Rendezvous {
  unsigned mask = 0, arrived = 0;
  std::uint64_t generation = 0;
  const char* name = nullptr;
  void* slot[WARP] = {};
};

struct Barrier {
  int arrived = 0, expected = 0;
  std::uint64_t generation = 0;
  std::vector<int> waiters;          // threads that acquire the barrier's clock when it completes
  Clock clock;
  Place first_place = nullptr;
  int first_thread = -1;
  int predicates = 0;
  Reduction reduction{};
};

struct Team;

struct Block {
  Team* team = nullptr;
  const Launch* launch = nullptr;
  unsigned rank = 0;                 // in the cluster
  uint3 index{};
  std::uint64_t linear = 0;
  int num_threads = 0, live = 0;
  std::vector<Thread> threads;
  unsigned char* stacks = nullptr;
  Fiber scheduler;
  Thread* current = nullptr;
  std::uint64_t round = 0;
  bool moved = false;
  bool polls = false;                // whether the last round made no progress, but a later one will resume a thread
  std::uint64_t random = 0;
  std::vector<int> warp_order;
  std::vector<std::vector<Rendezvous>> rendezvous;   // per warp
  Barrier barriers[NUM_BARRIERS];
  unsigned char* smem = nullptr;     // dynamic shared memory
  unsigned char* tls_low = nullptr;  // the thread-local storage, which holds static shared memory
  std::size_t tls_bytes = 0;
  AsyncState* async = nullptr;
  std::vector<std::unique_ptr<Clock>> clocks;

  // with hooks
  bool detect = false;
  std::uint32_t full_barriers = 0;
  Shadow shared, global;
  struct Flight {
    std::uint32_t low, high, place;
    int thread;
  };
  std::vector<Flight> flights;       // asynchronous writes in flight to this block's shared memory
  struct Remote {
    std::uint16_t slot;
    std::uint32_t clock, place;
    unsigned offset, bytes;
    Act act;
  };
  std::vector<Remote> remote;        // accesses by other blocks to this block's shared memory
  Clock exited;                      // joined from the threads that returned
  Findings findings;
  Counters counters;

  ~Block();
  void open(Team& team, const Launch& launch, unsigned rank);   // on the operating-system thread that will run it
  void start(std::uint64_t linear, uint3 index);
  bool run_round();                  // returns whether any thread made progress
  void finish();                     // after every thread has returned
  void run_thread(Thread& thread);
  unsigned draw(unsigned n);
  std::uint32_t copies_landed = 0;   // bulk copies have a slot of their own in the clocks, after those of the cluster's threads
  int copy_slot() const;
  int slot_of(const Thread& thread) const { return static_cast<int>(rank) * num_threads + thread.id; }
  bool owns_shared(const void* pointer) const;
  unsigned offset_of(const void* pointer) const;   // in the shared window
  void complete(Barrier& barrier);
  void thread_returned(Thread& thread);
};

// The blocks of one cluster, each on its own operating-system thread. Only one of them runs at a time.
struct Team {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned size = 1, turn = 0, stalled = 0, finished = 0;
  bool failed = false, all_done = false;
  unsigned started = 0;
  std::vector<char> done_blocks;
  std::vector<Block*> blocks;
  std::uint64_t cluster = 0;         // index of the running cluster
  std::uint64_t idle_round = ~std::uint64_t{0};   // the last of the grid's rounds that it has ended without progress
  std::uint64_t generation = 0;
  bool over = false;
  // the cluster's barrier
  int arrived = 0, alive = 0;        // arrivals of this phase; threads that it waits for
  int left = 0;                      // threads among these that returned after they had arrived
  std::uint64_t barrier_generation = 0;
  Clock barrier_clock, last_clock;
  void complete_if_all_arrived();
  Trouble trouble;
};

extern thread_local Block* the_block;        // the block that this operating-system thread runs

std::uint32_t offset_in_image(Place place);
bool in_image(const void* pointer);
Place kernel_place(Place fallback);      // the innermost return address on the calling stack that lies in the kernel's own code
[[noreturn]] void fail_at(Place place, const char* status, const std::string& message);   // throws Failure
// Like wait_until, with a known place in the kernel.
void wait_at(Place place, bool (*ready)(void*), void* state, const char* what);
std::string what_of(const Block& block, const Thread& thread);
std::string who_waits(const Block& block);

// detector.cpp
void detect_start(Block& block);
void detect_finish(Block& block);
void detect_returned(Block& block);      // after every thread of the block has returned
void join(Clock& into, const Clock& from);
void release_thread(Block& block, Thread& thread, Clock& into);
void acquire_thread(Block& block, Thread& thread, const Clock& from);
// `over` is false at the start of an asynchronous read: the access is checked, but recorded only when the read ends.
void check_access(const void* pointer, unsigned bytes, Act act, Kind kind, Place place, bool over = true);
void note_prefetch(const void* pointer, unsigned bytes, Place place);   // checks that the bytes exist, but does not read them
void note_misaligned(const void* pointer, unsigned alignment, Act act, Place place);   // a fault on a GPU

}  // namespace emu
