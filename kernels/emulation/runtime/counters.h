// The cost of a warp's accesses, per place in the code: shared-memory wavefronts (bank conflicts) and 32-byte global-memory sectors.
//
// The emulator runs a warp's lanes one after another, each up to its next wait. So one hardware request arrives here as up to 32
// separate accesses, with whole loops in between. A request is assembled from the k-th access of each lane at one place since the
// warp last converged. This matches the hardware where the lanes that execute a place do so together. Lanes that execute it in
// different iterations of a loop are merged into fewer requests than the hardware issues.
//
// The model:
//   Shared memory has 32 banks of 4 bytes. A wavefront serves each bank once; lanes that access the same word share it.
//   A request of at most 4 bytes per lane is one part of 32 lanes; of 8 bytes, two parts of 16; of 16 bytes, four parts of 8; of a
//   matrix instruction (ldmatrix, stmatrix), one part of 8 rows per matrix. Parts do not share wavefronts, except in loads: the two
//   parts of a half (16 bytes) or of the whole (8 bytes) do if neighbouring lanes, or lanes two apart, access the same address.
//   A part takes as many wavefronts as its worst bank has distinct words.
//   A request to global memory takes one sector for each aligned 32-byte sector that its lanes access.
//   The ideal number of sectors is that of the distinct bytes if they were contiguous. The ideal number of wavefronts is one
//   per part with an active lane; for loads of 8 and 16 bytes, one per such pair of parts, but at least the distinct bytes / 128.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "../runtime.h"

namespace emu {

enum class Space : std::uint8_t { shared, global };

// One per operating-system thread that runs blocks. Threads do not share it; all are merged at the end.
class Counters {
 public:
  struct Line {
    Place place;
    Space space;
    bool write;
    Kind kind;
    unsigned bytes;   // per lane
    std::uint64_t requests;
    std::uint64_t wavefronts, ideal_wavefronts;   // shared memory only, otherwise 0
    std::uint64_t sectors, ideal_sectors;         // global memory only, otherwise 0
  };

  Counters();
  Counters(Counters&&) noexcept;
  Counters& operator=(Counters&&) noexcept;
  ~Counters();

  void begin_block(int threads);
  // A lane's access: `address` is the offset in the shared window, or the global address. A size above 16 bytes, or one that is not a
  // power of two, counts as several accesses. Kind::bulk is not counted.
  void access(int thread, Place place, std::uint64_t address, unsigned bytes, Space space, bool write, Kind kind);
  // Called when all lanes of the warp have arrived at one point or returned: counts their accesses since the last flush.
  void flush(int warp);
  void end_block();   // flushes every warp
  void merge(const Counters& other);   // `other` must be between blocks

  std::vector<Line> lines() const;   // with at least one request; by place, bytes, space, reads first

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace emu
