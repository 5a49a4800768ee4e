// The detector: which thread accessed which bytes, and whether the accesses are ordered.
//
// Vector clocks track happens-before (Lamport; FastTrack's epochs for the last accesses). A thread's clock counts its own releases and
// holds, for every other thread of the cluster, how much of that thread's past it has synchronised with. Two accesses to the same
// bytes by two threads, at least one of them a write, are a data race if neither thread's clock covers the other's access, whatever
// order the schedule ran them in. Only synchronisation orders accesses: warp lockstep and shuffles do not.
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

// The known past of several clusters: for each, a vector clock with one component per thread.
using Pasts = std::map<std::uint64_t, std::vector<std::uint32_t>>;

// A vector clock. `seen` is the known past of each thread; `fenced` is the part of it that a proxy fence made visible to the async
// proxy. Empty: nothing yet. `elsewhere` is what was acquired from other clusters, through a fence, an atomic and another fence.
struct Clock {
  std::vector<std::uint32_t> seen;
  std::vector<std::uint32_t> fenced;
  Pasts elsewhere;
};

enum class Act : std::uint8_t { read, write, atomic, async_read, async_write };
const char* name_of(Act act);

struct Access {
  std::int32_t thread = -1;   // linear index in its block; -1: unknown
  std::int32_t rank = 0;      // of the thread's block in the cluster
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

// Findings of one operating-system thread: one for each kind, array and pair of accesses (by place and act), with the first
// occurrence and the number of occurrences.
class Findings {
 public:
  void add(Finding finding);
  void merge(const Findings& other);
  std::vector<Finding> list() const;

 private:
  std::map<std::tuple<std::string, std::string, std::uint32_t, std::uint32_t, int, int>, Finding> found_;
};

// An array in global memory, and the accesses that a kernel may make to it.
struct Region {
  std::string name;
  std::uint64_t offset;
  unsigned element_bytes;
  bool readable, writable;
  std::vector<std::uint64_t> shape;
  std::vector<std::int64_t> strides;   // bytes
  std::uint64_t low, high;             // first and one past the last byte, offsets in the mapping
};

// Global memory: the mapping, the state of each byte, and the last accesses of the writable arrays.
struct GlobalMemory {
  enum : std::uint8_t { VALID = 1, WRITABLE = 2, INITIALISED = 4 };
  unsigned char* base = nullptr;
  std::uint64_t bytes = 0;
  std::vector<Region> regions;
  std::vector<std::uint8_t> state;       // with hooks: one per byte
  struct Touch {                         // the last access of one kind
    std::uint32_t block;                 // 1 + linear index of the block; 0: none
    std::uint32_t place;
    std::uint32_t clock;                 // of the thread; `slot` is the thread's slot in the cluster's clocks
    std::uint16_t slot;
    bool atomic;
  };
  struct Owner {
    Touch written;
    Touch read[2];                       // by two blocks, the latest first, so that a writing block finds one by another block
  };
  static constexpr unsigned OWNED = 2;   // bytes per owner: the smallest element tracked, because neighbours may belong to two blocks
  std::vector<Owner> owners;             // with hooks: from the first writable array to the end of the last
  std::uint64_t first_owned = 0;         // offset of the first owner
  void describe();                       // fills state and owners from regions
  const Region* region_of(std::uint64_t offset) const;   // the region that contains the offset, or the nearest
};

// Shadow memory: the last accesses to a range of memory, in granules of 4 bytes.
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
    std::uint32_t writes = 0;    // lists of entries; 0 ends a list
    std::uint32_t reads = 0;
    std::uint32_t epoch = 0;     // the block's full_barriers when the last read was recorded
    std::uint16_t num_reads = 0;
    std::uint8_t initialised = 0;
    std::uint8_t in_flight = 0;         // bytes with an asynchronous write in flight
    bool touched = false;
    std::uint16_t async_readers = 0;    // asynchronous reads in flight
    std::uint32_t async_place = 0;      // of the latest of these
    std::int32_t async_thread = 0;
  };

  void reset(std::size_t bytes);
  Granule& at(std::size_t index);
  Entry& entry(std::uint32_t index) { return entries_[index]; }
  std::uint32_t push(std::uint32_t head, const Entry& entry);
  std::uint32_t drop(std::uint32_t head);                       // frees the list's first entry, returns the next
  void clear(std::uint32_t& head);

 private:
  std::vector<Granule> granules_;
  std::vector<std::uint32_t> touched_;
  std::vector<Entry> entries_;
  std::uint32_t free_ = 0;
};

}  // namespace emu
