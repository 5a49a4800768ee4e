// The detector: who touched which bytes, and whether anything ordered it.
//
// Happens-before by vector clocks (Lamport; FastTrack's epochs for the last accesses): a thread's clock counts its releases, and
// holds for every other thread of the cluster how much of that thread's past it has synchronised with. Two accesses of the same
// bytes by two threads, one of them a write, are a race when neither thread's clock covers the other's access: whatever the
// schedule made of it. Nothing but a synchronisation orders: not warp lockstep, not a shuffle.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "../runtime.h"
#include "counters.h"

namespace emu {

// What has happened in clusters, by cluster and by thread of it.
using Pasts = std::map<std::uint64_t, std::vector<std::uint32_t>>;

// What has happened, thread by thread; `fenced` is the part of it that reached the asynchronous proxy. Empty: nothing yet. `elsewhere`
// is what was acquired of other clusters, through a fence, an atomic and another fence.
struct Clock {
  std::vector<std::uint32_t> seen;
  std::vector<std::uint32_t> fenced;
  Pasts elsewhere;
};

enum class Act : std::uint8_t { read, write, atomic, async_read, async_write };
const char* name_of(Act act);

struct Access {
  std::int32_t thread = -1;   // linear in its block; -1: not known
  std::int32_t rank = 0;      // of its block in the cluster
  Act act = Act::read;
  std::uint32_t place = 0;
};

struct Finding {
  const char* kind;
  const char* space;
  std::string array;
  std::uint64_t offset;
  unsigned bytes;
  std::uint64_t count;
  unsigned block[3];
  Access first, second;
};

// Findings of one block thread: one for each kind and pair of places, with the first occurrence and their number.
class Findings {
 public:
  void add(Finding finding);
  void merge(const Findings& other);
  std::vector<Finding> list() const;

 private:
  std::map<std::tuple<std::string, std::string, std::uint32_t, std::uint32_t, int, int>, Finding> found_;
};

// An array in global memory, and what a kernel may do to each of its bytes.
struct Region {
  std::string name;
  std::uint64_t offset;
  unsigned element_bytes;
  bool readable, writable;
  std::vector<std::uint64_t> shape;
  std::vector<std::int64_t> strides;   // bytes
  std::uint64_t low, high;             // first and one past the last byte, offsets in the mapping
};

// Global memory: the mapping, what each byte of it is, and which block wrote it.
struct GlobalMemory {
  enum : std::uint8_t { VALID = 1, WRITABLE = 2, INITIALISED = 4 };
  unsigned char* base = nullptr;
  std::uint64_t bytes = 0;
  std::vector<Region> regions;
  std::vector<std::uint8_t> state;       // with hooks: a byte each
  struct Touch {                         // the last access of its kind
    std::uint32_t block;                 // 1 + linear index of the block; 0: none
    std::uint32_t place;
    std::uint32_t clock;                 // of the thread, and which of its cluster's that is
    std::uint16_t slot;
    bool atomic;
  };
  struct Owner {
    Touch written;
    Touch read[2];                       // by two blocks, the last one first: a block that writes finds one of another
  };
  static constexpr unsigned OWNED = 2;   // bytes an owner: the smallest element, so that neighbours may be two blocks'
  std::vector<Owner> owners;             // with hooks: from the first writable array to the end of the last
  std::uint64_t first_owned = 0;         // where they begin
  void describe();                       // fills state from regions
  const Region* region_of(std::uint64_t offset) const;   // the one that reaches over it, or the nearest
};

// The last accesses of a range of memory, 4 bytes a granule.
class Shadow {
 public:
  static constexpr unsigned GRANULE = 4;
  struct Entry {
    std::uint32_t next;
    std::uint32_t clock;
    std::uint32_t place;
    std::uint16_t slot;
    std::uint8_t mask;    // bytes of the granule
    Act act;
  };
  struct Granule {
    std::uint32_t writes = 0;    // lists of entries, 0 ends them
    std::uint32_t reads = 0;
    std::uint32_t epoch = 0;     // full barriers when the last read was listed
    std::uint16_t num_reads = 0;
    std::uint8_t initialised = 0;
    std::uint8_t in_flight = 0;         // bytes that an asynchronous write is about to change
    bool touched = false;
    std::uint16_t async_readers = 0;    // asynchronous reads under way
    std::uint32_t async_place = 0;      // of the last of these
    std::int32_t async_thread = 0;
  };

  void reset(std::size_t bytes);
  Granule& at(std::size_t index);
  Entry& entry(std::uint32_t index) { return entries_[index]; }
  std::uint32_t push(std::uint32_t head, const Entry& entry);
  std::uint32_t drop(std::uint32_t head);                       // frees the list's first entry, gives the next
  void clear(std::uint32_t& head);

 private:
  std::vector<Granule> granules_;
  std::vector<std::uint32_t> touched_;
  std::vector<Entry> entries_;
  std::uint32_t free_ = 0;
};

}  // namespace emu
