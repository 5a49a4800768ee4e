#include "counters.h"

#include <algorithm>
#include <array>
#include <functional>

namespace emu {
namespace {

using Address = std::uint64_t;

constexpr unsigned BANK_BYTES = 4;
constexpr unsigned WAVEFRONT_BYTES = 128;   // 32 banks
constexpr unsigned SECTOR_BYTES = 32;
constexpr unsigned WIDEST = 16;             // the widest access of one lane
constexpr unsigned ROWS_PER_MATRIX = 8;     // ldmatrix, stmatrix

// A log holds each lane's addresses at one place since the last flush, in chunks of this many addresses per lane.
constexpr unsigned CHUNK = 32;
// The first lane logs all of a loop without synchronisation before the second lane starts. Beyond this limit (per operating-system
// thread), accesses are only counted, and their cost is extrapolated from the logged accesses at the same place.
constexpr std::size_t LOGGED_BYTES = std::size_t{64} << 20;

using ChunkOfLanes = std::array<std::array<Address, CHUNK>, WARP>;

struct Key {
  Place place;
  std::uint32_t what;   // bytes, space, direction and kind, packed

  bool operator==(const Key&) const = default;
};

std::uint32_t what_of(unsigned bytes, Space space, bool write, Kind kind) {
  static_assert(static_cast<unsigned>(Kind::bulk) < 4, "a kind takes two bits of the key");
  const unsigned direction = write ? 1 : 0;
  return bytes << 4 | static_cast<unsigned>(space) << 3 | direction << 2 | static_cast<unsigned>(kind);
}

// The addresses of one request's active lanes, in lane order.
struct Request {
  Address address[WARP];
  unsigned lane[WARP];
  unsigned active = 0;

  void add(unsigned of_lane, Address at) {
    address[active] = at;
    lane[active] = of_lane;
    ++active;
  }
};

// Number of distinct values after the shift. Most inputs are sorted, ascending or descending.
unsigned distinct(const Address* values, unsigned num_values, unsigned shift) {
  Address seen[WARP];
  unsigned num_seen = 0;
  Address low = ~Address{0}, high = 0;
  for (unsigned i = 0; i < num_values; ++i) {
    const Address value = values[i] >> shift;
    if (num_seen == 0 || value > high || value < low) {
      low = std::min(low, value);
      high = std::max(high, value);
    } else if (value == seen[num_seen - 1] || std::find(seen, seen + num_seen, value) != seen + num_seen) {
      continue;
    }
    seen[num_seen++] = value;
  }
  return num_seen;
}

unsigned log2_of(unsigned power_of_two) {
  unsigned shift = 0;
  while (power_of_two >> (shift + 1)) ++shift;
  return shift;
}

// Wavefronts that active lanes [first, end) of a request take together. An access of 8 or 16 bytes occupies 2 or 4 adjacent banks
// and is aligned to them, so it can be modelled with half or a quarter as many banks that are wider.
unsigned wavefronts_of(const Request& request, unsigned first, unsigned end, unsigned unit_shift) {
  const unsigned num_banks = WAVEFRONT_BYTES >> unit_shift;
  Address words[WAVEFRONT_BYTES / BANK_BYTES][WARP];
  unsigned char depth[WAVEFRONT_BYTES / BANK_BYTES] = {};
  unsigned worst = 0;
  for (unsigned i = first; i < end; ++i) {
    const Address word = request.address[i] >> unit_shift;
    const unsigned bank = static_cast<unsigned>(word) & (num_banks - 1);
    const Address* const begin = words[bank];
    if (std::find(begin, begin + depth[bank], word) != begin + depth[bank]) continue;   // the same word: a broadcast
    words[bank][depth[bank]++] = word;
    worst = std::max<unsigned>(worst, depth[bank]);
  }
  return worst;
}

struct Cost {
  unsigned taken, ideal;
};

// The same for a request split into parts of `lanes_per_part` lanes. `ideal` counts the parts with an active lane.
Cost in_parts(const Request& request, unsigned lanes_per_part, unsigned unit_shift) {
  Cost cost{0, 0};
  for (unsigned first = 0; first < request.active;) {
    const unsigned part = request.lane[first] / lanes_per_part;
    unsigned end = first + 1;
    while (end < request.active && request.lane[end] / lanes_per_part == part) ++end;
    cost.taken += wavefronts_of(request, first, end, unit_shift);
    ++cost.ideal;
    first = end;
  }
  return cost;
}

// Whether both lanes of every pair of active lanes whose numbers differ only in this bit access the same address.
bool pairs_agree(const Request& request, unsigned bit) {
  Address of_lane[WARP];
  unsigned active = 0;
  for (unsigned i = 0; i < request.active; ++i) {
    of_lane[request.lane[i]] = request.address[i];
    active |= 1u << request.lane[i];
  }
  for (unsigned i = 0; i < request.active; ++i) {
    const unsigned partner = request.lane[i] ^ bit;
    if ((active >> partner & 1u) && of_lane[partner] != request.address[i]) return false;
  }
  return true;
}

Cost shared_cost(const Request& request, unsigned bytes, bool write, Kind kind) {
  const unsigned unit = std::max(bytes, BANK_BYTES);
  const unsigned unit_shift = log2_of(unit);
  if (kind == Kind::matrix) return in_parts(request, ROWS_PER_MATRIX, unit_shift);
  const unsigned lanes_per_part = WAVEFRONT_BYTES / unit;
  const Cost cost = in_parts(request, lanes_per_part, unit_shift);
  if (write || unit == BANK_BYTES) return cost;
  // Loads of 8 and 16 bytes: two parts share wavefronts if neighbouring lanes, or lanes two apart, access the same address, and if
  // sharing takes fewer wavefronts. A wavefront returns at most 8 bytes per lane, so `ideal` is at least merged.ideal.
  const Cost merged = in_parts(request, 2 * lanes_per_part, unit_shift);
  const unsigned num_distinct = distinct(request.address, request.active, 0);
  const unsigned ideal = std::max(merged.ideal, (num_distinct * bytes + WAVEFRONT_BYTES - 1) / WAVEFRONT_BYTES);
  const bool merges = merged.taken < cost.taken && (pairs_agree(request, 1) || pairs_agree(request, 2));
  return {merges ? merged.taken : cost.taken, ideal};
}

Cost global_cost(const Request& request, unsigned bytes) {
  const unsigned taken = distinct(request.address, request.active, log2_of(SECTOR_BYTES));
  const unsigned needed = distinct(request.address, request.active, 0) * bytes;
  return {taken, (needed + SECTOR_BYTES - 1) / SECTOR_BYTES};
}

struct Log {
  std::uint32_t count[WARP] = {};   // accesses of each lane since the last flush
  std::vector<ChunkOfLanes*> chunks;
  std::uint32_t capacity = 0;       // of the chunks, per lane
  bool full = false;                // gets no more chunks before the next flush
  bool touched = false;
};

}  // namespace

struct Counters::State {
  struct Site {
    Key key;
    Line line;
  };
  struct WarpLogs {
    std::vector<std::unique_ptr<Log>> of_site;   // by site id; null if the warp has made no access there
    std::vector<std::uint32_t> touched;
  };

  std::vector<Site> sites;
  std::vector<std::uint32_t> slots;   // open addressing: site id + 1, or 0 if empty
  std::vector<WarpLogs> warps;
  int num_warps = 0;
  std::vector<std::unique_ptr<ChunkOfLanes>> chunks;   // all that have been allocated
  std::vector<ChunkOfLanes*> free_chunks;

  State() : slots(256) {}

  std::size_t slot_of(const Key& key) const {
    constexpr std::uint64_t SPREAD = 0x9e3779b97f4a7c15u;   // 2^64 / golden ratio
    const std::uint64_t mixed = (reinterpret_cast<std::uintptr_t>(key.place) ^ std::uint64_t{key.what} << 48) * SPREAD;
    std::size_t slot = static_cast<std::size_t>(mixed >> 32) & (slots.size() - 1);
    while (slots[slot] != 0 && !(sites[slots[slot] - 1].key == key)) slot = (slot + 1) & (slots.size() - 1);
    return slot;
  }

  std::uint32_t site_of(Place place, unsigned bytes, Space space, bool write, Kind kind) {
    const Key key{place, what_of(bytes, space, write, kind)};
    const std::size_t slot = slot_of(key);
    if (slots[slot] != 0) return slots[slot] - 1;
    sites.push_back({key, {place, space, write, kind, bytes, 0, 0, 0, 0, 0}});
    slots[slot] = static_cast<std::uint32_t>(sites.size());
    if (sites.size() * 2 > slots.size()) {
      slots.assign(slots.size() * 2, 0);
      for (std::size_t i = 0; i < sites.size(); ++i) slots[slot_of(sites[i].key)] = static_cast<std::uint32_t>(i + 1);
    }
    return static_cast<std::uint32_t>(sites.size() - 1);
  }

  Log& log_of(WarpLogs& warp, std::uint32_t site) {
    if (site >= warp.of_site.size()) warp.of_site.resize(sites.size());
    std::unique_ptr<Log>& log = warp.of_site[site];
    if (!log) log = std::make_unique<Log>();
    return *log;
  }

  // Adds a chunk to the log, and returns whether it did. The first chunk is always granted, because extrapolation needs a sample.
  bool grow(Log& log) {
    if (log.full) return false;
    if (free_chunks.empty()) {
      if (!log.chunks.empty() && chunks.size() * sizeof(ChunkOfLanes) >= LOGGED_BYTES) {
        log.full = true;
        return false;
      }
      chunks.push_back(std::make_unique<ChunkOfLanes>());
      free_chunks.push_back(chunks.back().get());
    }
    log.chunks.push_back(free_chunks.back());
    free_chunks.pop_back();
    log.capacity += CHUNK;
    return true;
  }

  void log(unsigned thread, Place place, Address address, unsigned bytes, Space space, bool write, Kind kind) {
    WarpLogs& warp = warps[thread / WARP];
    const unsigned lane = thread % WARP;
    const std::uint32_t site = site_of(place, bytes, space, write, kind);
    Log& log = log_of(warp, site);
    if (!log.touched) {
      log.touched = true;
      warp.touched.push_back(site);
    }
    const std::uint32_t occurrence = log.count[lane]++;
    if (occurrence < log.capacity || grow(log)) (*log.chunks[occurrence / CHUNK])[lane][occurrence % CHUNK] = address;
  }

  void count(Line& line, Log& log) {
    const std::uint32_t occurrences = *std::max_element(log.count, log.count + WARP);
    const std::uint32_t logged = std::min(occurrences, log.capacity);
    std::uint64_t taken = 0, ideal = 0;
    for (std::uint32_t occurrence = 0; occurrence < logged; ++occurrence) {
      const ChunkOfLanes& chunk = *log.chunks[occurrence / CHUNK];
      Request request;
      for (unsigned lane = 0; lane < WARP; ++lane) {
        if (occurrence < log.count[lane]) request.add(lane, chunk[lane][occurrence % CHUNK]);
      }
      const Cost cost = line.space == Space::shared ? shared_cost(request, line.bytes, line.write, line.kind)
                                                    : global_cost(request, line.bytes);
      taken += cost.taken;
      ideal += cost.ideal;
    }
    // Extrapolate to the accesses that were not logged.
    taken += (taken * (occurrences - logged) + logged / 2) / logged;
    ideal += (ideal * (occurrences - logged) + logged / 2) / logged;
    line.requests += occurrences;
    (line.space == Space::shared ? line.wavefronts : line.sectors) += taken;
    (line.space == Space::shared ? line.ideal_wavefronts : line.ideal_sectors) += ideal;
  }

  void flush(WarpLogs& warp) {
    for (const std::uint32_t site : warp.touched) {
      Log& log = *warp.of_site[site];
      count(sites[site].line, log);
      std::fill_n(log.count, WARP, 0u);
      // Keep one chunk: most places need no more than one, and need it again soon.
      while (log.chunks.size() > 1) {
        free_chunks.push_back(log.chunks.back());
        log.chunks.pop_back();
      }
      log.capacity = static_cast<std::uint32_t>(log.chunks.size()) * CHUNK;
      log.full = log.touched = false;
    }
    warp.touched.clear();
  }
};

Counters::Counters() : state_(std::make_unique<State>()) {}
Counters::Counters(Counters&&) noexcept = default;
Counters& Counters::operator=(Counters&&) noexcept = default;
Counters::~Counters() = default;

void Counters::begin_block(int threads) {
  state_->num_warps = (threads + WARP - 1) / WARP;
  if (state_->warps.size() < static_cast<std::size_t>(state_->num_warps)) state_->warps.resize(state_->num_warps);
}

void Counters::access(int thread, Place place, std::uint64_t address, unsigned bytes, Space space, bool write, Kind kind) {
  if (kind == Kind::bulk) return;
  // An access wider than four registers, or of a size that no instruction has, counts as several instructions.
  while (bytes != 0) {
    unsigned piece = WIDEST;
    while (piece > bytes) piece /= 2;
    state_->log(static_cast<unsigned>(thread), place, address, piece, space, write, kind);
    address += piece;
    bytes -= piece;
  }
}

void Counters::flush(int warp) { state_->flush(state_->warps[static_cast<std::size_t>(warp)]); }

void Counters::end_block() {
  for (int warp = 0; warp < state_->num_warps; ++warp) flush(warp);
}

void Counters::merge(const Counters& other) {
  for (const State::Site& from : other.state_->sites) {
    const Line& line = from.line;
    Line& into = state_->sites[state_->site_of(line.place, line.bytes, line.space, line.write, line.kind)].line;
    into.requests += line.requests;
    into.wavefronts += line.wavefronts;
    into.ideal_wavefronts += line.ideal_wavefronts;
    into.sectors += line.sectors;
    into.ideal_sectors += line.ideal_sectors;
  }
}

std::vector<Counters::Line> Counters::lines() const {
  std::vector<Line> found;
  for (const State::Site& site : state_->sites) {
    if (site.line.requests != 0) found.push_back(site.line);
  }
  std::sort(found.begin(), found.end(), [](const Line& a, const Line& b) {
    if (a.place != b.place) return std::less<Place>{}(a.place, b.place);
    return what_of(a.bytes, a.space, a.write, a.kind) < what_of(b.bytes, b.space, b.write, b.kind);
  });
  return found;
}

}  // namespace emu
