// What a block keeps of asynchronous operations: async.cpp (copies, mbarriers) and wgmma.cpp share it.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../async.h"
#include "block.h"

namespace emu {

// A cp.async under way. A thread's copies land in the order in which it issued them.
struct Copy {
  unsigned char* target;
  const unsigned char* source;
  std::uint8_t bytes, valid_bytes;
  std::uint64_t group;
  Place place;
};

// A box of a tensor, or plain bytes: between global memory and shared memory. A bulk copy that has not landed.
struct Transfer {
  enum class Kind : std::uint8_t { tensor, bytes, value };
  Kind kind;
  Proxy proxy;
  bool reduce;
  unsigned char* shared;   // target of a load, source of a store
  unsigned char* global;   // of kind bytes
  std::uint32_t bytes;
  TensorMap map;
  int coordinates[MAX_RANK];
  std::vector<unsigned char> data;   // what was read of shared memory; empty: nothing yet
  bool awaited;                      // of a store: somebody has waited for that
  Place place;
  int thread;      // that issued it
  unsigned rank;   // its block's, in the cluster
};

struct MbarrierState {
  std::uint64_t* word;               // in shared memory
  std::uint32_t expected, pending;   // arrivals
  std::int64_t tx;                   // bytes
  std::uint64_t phase;               // the one under way, counted from 0
  Clock* clock[2];                   // of phases with this parity
  Place place;                       // of mbarrier_init
  int init_thread;                   // that made it, and with hooks the moment in that thread's clock
  std::size_t init_slot;
  std::uint32_t init_moment;
  std::deque<Transfer> landings;   // copies that this barrier counts and that have not landed
  struct Deferred {                // cp.async.mbarrier.arrive: an arrival when the thread's copies up to `copy` have landed
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
  std::uint64_t group = 0;             // that the next cp.async belongs to
  std::vector<Transfer> open_stores;   // bulk stores that were not committed
  std::deque<std::vector<Transfer>> store_groups;
};

struct WgmmaState;
void wgmma_block_end(WgmmaState& state);   // what the warps have left undone
struct WgmmaDelete {
  void operator()(WgmmaState* state) const;
};

struct AsyncState {
  std::vector<ThreadAsync> threads;
  std::vector<std::unique_ptr<MbarrierState>> barriers;
  std::vector<std::vector<int>> max_registers;   // per warp, what setmaxnreg asked for
  std::unique_ptr<WgmmaState, WgmmaDelete> wgmma;
};

AsyncState& state_of(Block& block);

// fail, where the place is known: in a wait's condition, which the scheduler calls, no frame of the kernel is below.
[[noreturn]] void misuse(Place place, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Likewise, and the report names this thread of the block, not the calling one.
[[noreturn]] void misuse_of(int thread, Place place, const std::string& text);
// wait_until, likewise. `what` is refreshed with Thread::what by who wants it so.
void wait_at(Place place, bool (*ready)(void*), void* state, const char* what);
template <typename F>
inline void wait_at(Place place, F ready, const char* what) {
  wait_at(place, [](void* state) { return (*static_cast<F*>(state))(); }, &ready, what);
}

// Exchanges 16-byte pieces: PTX ISA 9.0, 5.5.7 "Swizzling modes". By the address, so that a pattern starts at a multiple of its
// size wherever the tile starts. 32-, 64- and 128-byte swizzles take 1, 2 and 3 bits.
constexpr std::uintptr_t swizzled(std::uintptr_t address, unsigned bits) {
  return address ^ ((address >> 7 & ((1u << bits) - 1)) << 4);
}

}   // namespace emu
