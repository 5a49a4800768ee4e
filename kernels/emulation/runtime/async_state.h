// A block's state of asynchronous operations, shared by async.cpp (copies, mbarriers) and wgmma.cpp.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../async.h"
#include "block.h"

namespace emu {

// A cp.async in flight. A thread's copies land in issue order.
struct Copy {
  unsigned char* target;
  const unsigned char* source;
  std::uint8_t bytes, valid_bytes;
  std::uint64_t group;
  Place place;
};

// A bulk copy in flight between global and shared memory: a box of a tensor, or plain bytes. Kind `value` writes `data`, which was
// read at issue, to shared memory (st.async, a copy to another block).
struct Transfer {
  enum class Kind : std::uint8_t { tensor, bytes, value };
  Kind kind;
  Proxy proxy;
  bool reduce;
  unsigned char* shared;   // target of a load, source of a store
  unsigned char* global;   // kind `bytes` only
  std::uint32_t bytes;
  TensorMap map;
  int coordinates[MAX_RANK];
  std::vector<unsigned char> data;   // the source's bytes, once read; empty: not read yet
  bool awaited;                      // a store: a thread has waited for its read
  Place place;
  int thread;      // issued the copy
  unsigned rank;   // of the thread's block in the cluster
};

struct MbarrierState {
  std::uint64_t* word;               // in shared memory
  std::uint32_t expected, pending;   // arrivals
  std::int64_t tx;                   // transaction count: pending bytes
  std::uint64_t phase;               // index of the current phase, from 0
  Clock* clock[2];                   // one per phase parity
  Place place;                       // of mbarrier_init
  int init_thread;                   // called mbarrier_init; with hooks, also its slot and time in the clocks
  std::size_t init_slot;
  std::uint32_t init_moment;
  std::deque<Transfer> landings;   // copies in flight that this barrier counts
  struct Deferred {                // cp.async.mbarrier.arrive: arrives once the thread's first `copy` copies have landed
    int thread;
    std::uint64_t copy;
  };
  std::vector<Deferred> deferred;

  std::uint64_t pack() const {
    constexpr std::uint64_t TX_BITS = (1u << 21) - 1;
    return pending | std::uint64_t{expected} << 20 | (static_cast<std::uint64_t>(tx) & TX_BITS) << 40 | (phase & 1) << 61 |
           std::uint64_t{2} << 62;
  }
};

struct ThreadAsync {
  std::deque<Copy> copies;
  std::uint64_t copies_issued = 0, copies_landed = 0;
  std::uint64_t group = 0;             // of the next cp.async
  std::vector<Transfer> open_stores;   // bulk stores not yet committed
  std::deque<std::vector<Transfer>> store_groups;
};

struct WgmmaState;
void wgmma_block_end(WgmmaState& state);   // reports what the warps left incomplete
struct WgmmaDelete {
  void operator()(WgmmaState* state) const;
};

struct AsyncState {
  std::vector<ThreadAsync> threads;
  std::vector<std::unique_ptr<MbarrierState>> barriers;
  std::vector<std::vector<int>> max_registers;   // per warp: the register counts that setmaxnreg requested
  std::unique_ptr<WgmmaState, WgmmaDelete> wgmma;
};

AsyncState& state_of(Block& block);

// Like fail, with a known place: the scheduler calls a wait's condition, so the stack has no frame of the kernel there.
[[noreturn]] void misuse(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));
// The same, but the report names this thread of the block instead of the calling one.
[[noreturn]] void misuse_of(int thread, Place place, const std::string& text);
// Like wait_until, with a known place. To update `what` during the wait, the condition writes to Thread::what.
void wait_at(Place place, bool (*ready)(void*), void* state, const char* what);
template <typename F>
inline void wait_at(Place place, F ready, const char* what) {
  wait_at(place, [](void* state) { return (*static_cast<F*>(state))(); }, &ready, what);
}

// Permutes 16-byte pieces: PTX ISA 9.0, 5.5.7 "Swizzling modes". The address determines the permutation, so a pattern starts at a
// multiple of its size wherever the tile starts. 32-, 64- and 128-byte swizzles use 1, 2 and 3 bits.
constexpr std::uintptr_t swizzled(std::uintptr_t address, unsigned bits) {
  return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

}   // namespace emu
