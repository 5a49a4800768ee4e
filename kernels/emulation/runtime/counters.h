// What a warp's accesses cost: shared-memory wavefronts (bank conflicts) and 32-byte sectors of global memory, by place.
//
// The emulator runs a warp's lanes one after another, each as far as its next wait, so what the hardware issues as one request
// arrives here in up to 32 parts with whole loops in between. A request is put together from the k-th access that each lane
// made at one place since the warp last came together. That is the hardware's grouping wherever the lanes that pass a place do
// so together; lanes that pass it in different iterations of a loop are merged into fewer requests than hardware makes.
//
// The model, also in README.md:
//   Shared memory has 32 banks of 4 bytes; a wavefront serves each bank once, a word that several lanes want once for all.
//   A request of at most 4 bytes a lane is one part of 32 lanes, of 8 bytes two parts of 16, of 16 bytes four parts of 8, of a
//   matrix instruction (ldmatrix, stmatrix) a part of 8 rows for each matrix. Parts do not share a wavefront, except that of
//   one load the two parts of a half (16 bytes) or the whole (8 bytes) do where neighbouring lanes want the same.
//   A part takes as many wavefronts as its worst bank has distinct words.
//   A request to global memory takes the distinct aligned 32-byte sectors that its lanes touch.
//   Ideal is what the distinct bytes would take if they lay side by side: 128 a wavefront, 32 a sector.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../runtime.h"

namespace emu {

enum class Space : std::uint8_t { shared, global };

// One for each operating-system thread that runs blocks; not shared between them. Merged at the end.
class Counters {
 public:
  struct Line {
    Place place;
    Space space;
    bool write;
    Kind kind;
    unsigned bytes;   // a lane
    std::uint64_t requests;
    std::uint64_t wavefronts, ideal_wavefronts;   // of shared memory, else 0
    std::uint64_t sectors, ideal_sectors;         // of global memory, else 0
  };

  Counters();
  Counters(Counters&&) noexcept;
  Counters& operator=(Counters&&) noexcept;
  ~Counters();

  void begin_block(int threads);
  // A lane's access: `address` is the offset in the shared window, or the global address. `bytes` beyond 16 count as several
  // accesses. Kind::bulk is not counted.
  void access(int thread, Place place, std::uint64_t address, unsigned bytes, Space space, bool write, Kind kind);
  // All lanes of the warp have come to one point or returned: what they have done since the last one is counted.
  void flush(int warp);
  void end_block();   // flushes every warp
  void merge(const Counters& other);   // `other` between blocks

  std::vector<Line> lines() const;   // by place, then space, reads before writes; those with at least one request

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emu
