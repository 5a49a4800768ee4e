// Detects races and uninitialised, out-of-bounds and misaligned accesses. Defines the compiler's hooks, which report plain loads and
// stores.
#include "detector.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <utility>

#include "block.h"

namespace emu {

// --- findings ---------------------------------------------------------------------------------------------------------------

const char* name_of(Act act) {
  switch (act) {
    case Act::read: return "read";
    case Act::write: return "write";
    case Act::atomic: return "atomic";
    case Act::async_read: return "async read";
    case Act::async_write: return "async write";
  }
  return "";
}

void Findings::add(Finding finding) {
  const auto key = std::make_tuple(std::string(finding.kind), finding.array, finding.first.place, finding.second.place,
                                   static_cast<int>(finding.first.act), static_cast<int>(finding.second.act));
  const auto [at, is_new] = found_.try_emplace(key, finding);
  if (!is_new) at->second.count += finding.count;
}

void Findings::merge(const Findings& other) {
  for (const auto& [key, finding] : other.found_) add(finding);
}

std::vector<Finding> Findings::list() const {
  std::vector<Finding> all;
  for (const auto& [key, finding] : found_) all.push_back(finding);
  return all;
}

// --- clocks -----------------------------------------------------------------------------------------------------------------

namespace {

void most(std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b) {
  if (a.size() < b.size()) a.resize(b.size(), 0);
  std::uint32_t* const ours = a.data();   // plain pointers let the compiler vectorise the loop
  const std::uint32_t* const theirs = b.data();
  for (std::size_t i = 0, n = b.size(); i < n; ++i) ours[i] = std::max(ours[i], theirs[i]);
}

void most(Pasts& a, const Pasts& b) {
  for (const auto& [cluster, past] : b) most(a[cluster], past);
}

std::uint64_t cluster_of(const Block& block, std::uint64_t linear) { return linear / block.team->size; }

// What threads released by a fence before an atomic, by the atomic's address. A thread with a later atomic on that address may acquire
// it. Nothing is ever removed, because a worker runs one launch.
std::mutex published_mutex;
std::map<const void*, Pasts> published;

// Blocks run in parallel, so several may look up the last accesses to the same bytes of global memory concurrently.
std::array<std::mutex, 64> owner_mutexes;

}  // namespace

void join(Clock& into, const Clock& from) {
  most(into.seen, from.seen);
  most(into.fenced, from.fenced);
  most(into.elsewhere, from.elsewhere);
}

void release_thread(Block& block, Thread& thread, Clock& into) {
  join(into, thread.clock);
  ++thread.clock.seen[static_cast<std::size_t>(block.slot_of(thread))];
}

void acquire_thread(Block&, Thread& thread, const Clock& from) { join(thread.clock, from); }

Clock* new_clock() {
  the_block->clocks.push_back(std::make_unique<Clock>());
  return the_block->clocks.back().get();
}

void release(Clock* into) {
  if (the_block->detect) release_thread(*the_block, *the_block->current, *into);
}

void acquire(const Clock* from) {
  if (the_block->detect) acquire_thread(*the_block, *the_block->current, *from);
}

void proxy_fence() {
  if (!the_block->detect) return;
  Clock& clock = the_block->current->clock;
  // Everything that has happened before, including the calling thread's own accesses so far.
  clock.fenced.resize(std::max(clock.fenced.size(), clock.seen.size()), 0);
  for (std::size_t i = 0; i < clock.seen.size(); ++i) clock.fenced[i] = std::max(clock.fenced[i], clock.seen[i]);
  ++clock.seen[static_cast<std::size_t>(the_block->slot_of(*the_block->current))];
}

void device_fence() {
  if (!the_block->detect) return;
  Thread& thread = *the_block->current;
  most(thread.clock.elsewhere, thread.found);   // acquires
  thread.found.clear();
  thread.released = thread.clock.elsewhere;
  most(thread.released[cluster_of(*the_block, the_block->linear)], thread.clock.seen);
  ++thread.clock.seen[static_cast<std::size_t>(the_block->slot_of(thread))];   // later accesses are not part of the release
}

// --- the shadow -------------------------------------------------------------------------------------------------------------

void Shadow::reset(std::size_t bytes) {
  const std::size_t granules = (bytes + GRANULE - 1) / GRANULE;
  if (granules_.size() != granules) {
    granules_.assign(granules, {});
  } else {
    for (const std::uint32_t index : touched_) granules_[index] = {};
  }
  touched_.clear();
  entries_.assign(1, {});   // index 0 ends a list
  free_ = 0;
}

Shadow::Granule& Shadow::at(std::size_t index) {
  Granule& granule = granules_[index];
  if (!granule.touched) {
    granule.touched = true;
    touched_.push_back(static_cast<std::uint32_t>(index));
  }
  return granule;
}

std::uint32_t Shadow::push(std::uint32_t head, const Entry& entry) {
  std::uint32_t index = free_;
  if (index) {
    free_ = entries_[index].next;
  } else {
    index = static_cast<std::uint32_t>(entries_.size());
    entries_.emplace_back();
  }
  entries_[index] = entry;
  entries_[index].next = head;
  return index;
}

std::uint32_t Shadow::drop(std::uint32_t head) {
  const std::uint32_t next = entries_[head].next;
  entries_[head].next = free_;
  free_ = head;
  return next;
}

void Shadow::clear(std::uint32_t& head) {
  while (head) head = drop(head);
}

// --- global memory ----------------------------------------------------------------------------------------------------------

void GlobalMemory::describe() {
  state.assign(bytes, 0);
  std::uint64_t low = bytes, high = 0;
  for (const Region& region : regions) {
    if (region.writable) low = std::min(low, region.low), high = std::max(high, region.high);
  }
  first_owned = low / OWNED * OWNED;
  owners.assign(high > low ? (high - first_owned) / OWNED + 1 : 0, {});
  for (const Region& region : regions) {
    const std::uint8_t what = static_cast<std::uint8_t>(VALID | (region.writable ? WRITABLE : 0) | (region.readable ? INITIALISED : 0));
    std::uint64_t elements = 1;
    for (const std::uint64_t n : region.shape) elements *= n;
    std::vector<std::uint64_t> index(region.shape.size(), 0);
    for (std::uint64_t i = 0; i < elements; ++i) {
      std::int64_t at = static_cast<std::int64_t>(region.offset);
      for (std::size_t d = 0; d < index.size(); ++d) at += static_cast<std::int64_t>(index[d]) * region.strides[d];
      std::memset(state.data() + at, what, region.element_bytes);
      for (std::size_t d = index.size(); d-- > 0;) {
        if (++index[d] < region.shape[d]) break;
        index[d] = 0;
      }
    }
  }
}

const Region* GlobalMemory::region_of(std::uint64_t offset) const {
  const Region* best = nullptr;
  std::uint64_t best_distance = ~std::uint64_t{0};
  for (const Region& region : regions) {
    const std::uint64_t distance = offset < region.low ? region.low - offset : offset >= region.high ? offset - region.high + 1 : 0;
    if (distance < best_distance) best = &region, best_distance = distance;
  }
  return best;
}

int Block::copy_slot() const { return num_threads * static_cast<int>(team->size) + static_cast<int>(rank); }

// --- one access -------------------------------------------------------------------------------------------------------------

namespace {

struct By {
  Block& block;
  Thread& thread;
  std::uint32_t place;
  std::uint16_t slot;
};

Access access_of(const Block& block, std::uint16_t slot, Act act, std::uint32_t place) {
  if (slot >= block.num_threads * static_cast<int>(block.team->size)) return {-1, slot - block.num_threads * static_cast<int>(block.team->size), act, place};
  return {slot % block.num_threads, slot / block.num_threads, act, place};
}

void report(const By& by, const char* kind, const char* space, const Block& where, const std::string& array, std::uint64_t offset, unsigned bytes,
            const Access& first, Act act) {
  by.block.findings.add({kind, space, array, offset, bytes, 1, {where.index.x, where.index.y, where.index.z}, first,
                         access_of(by.block, by.slot, act, by.place)});
}

bool ordered(const By& by, const Shadow::Entry& entry) {
  return entry.slot == by.slot || (entry.slot < by.thread.clock.seen.size() && by.thread.clock.seen[entry.slot] >= entry.clock);
}

bool fenced(const By& by, const Shadow::Entry& entry) {
  return entry.slot < by.thread.clock.fenced.size() && by.thread.clock.fenced[entry.slot] >= entry.clock;
}

// Whether another block's access happens before this one.
bool ordered(const By& by, const GlobalMemory::Touch& touch) {
  const std::uint64_t cluster = cluster_of(by.block, touch.block - 1);
  const auto elsewhere = by.thread.clock.elsewhere.find(cluster);
  const std::vector<std::uint32_t>* past = cluster == cluster_of(by.block, by.block.linear) ? &by.thread.clock.seen
                                           : elsewhere == by.thread.clock.elsewhere.end()   ? nullptr
                                                                                            : &elsewhere->second;
  return past && touch.slot < past->size() && (*past)[touch.slot] >= touch.clock;
}

bool writes(Act act) { return act == Act::write || act == Act::atomic || act == Act::async_write; }

// Checks and records an access to bytes [low, high) of `shadow`, whose memory belongs to `owner`.
void shadow_access(const By& by, Block& owner, Shadow& shadow, std::uint64_t low, std::uint64_t high, Act act, bool check_initialised, const char* space,
                   const std::string& array, std::uint64_t array_offset, bool over = true) {
  const std::uint32_t now = by.thread.clock.seen[by.slot];
  for (std::uint64_t index = low / Shadow::GRANULE; index <= (high - 1) / Shadow::GRANULE; ++index) {
    const std::uint64_t first_byte = index * Shadow::GRANULE;
    const unsigned from = static_cast<unsigned>(low > first_byte ? low - first_byte : 0);
    const unsigned to = static_cast<unsigned>(std::min<std::uint64_t>(high - first_byte, Shadow::GRANULE));
    const auto mask = static_cast<std::uint8_t>((1u << to) - (1u << from));
    Shadow::Granule& granule = shadow.at(index);
    const std::uint64_t offset = first_byte + from - array_offset;

    if (granule.in_flight & mask) {
      Access first{-1, static_cast<int>(owner.rank), Act::async_write, 0};
      for (const Block::Flight& flight : owner.flights) {
        if (flight.low < high && low < flight.high) first.thread = flight.thread, first.place = flight.place;
      }
      report(by, "in flight", space, owner, array, offset, to - from, first, act);
      continue;
    }
    if (granule.async_readers && writes(act)) {
      report(by, "in flight", space, owner, array, offset, to - from,
             {granule.async_thread, static_cast<int>(owner.rank), Act::async_read, granule.async_place}, act);
    }
    if (check_initialised && !writes(act) && (granule.initialised & mask) != mask) {
      report(by, "uninitialised", space, owner, array, offset, to - from, {}, act);
    }
    for (std::uint32_t at = granule.writes; at; at = shadow.entry(at).next) {
      const Shadow::Entry& entry = shadow.entry(at);
      if (!(entry.mask & mask)) continue;
      if (act == Act::atomic && entry.act == Act::atomic) continue;
      if (!ordered(by, entry)) {
        report(by, "race", space, owner, array, offset, to - from, access_of(by.block, entry.slot, entry.act, entry.place), act);
        break;
      }
      if ((act == Act::async_read || act == Act::async_write) && entry.act == Act::write && !fenced(by, entry)) {
        report(by, "missing fence", space, owner, array, offset, to - from, access_of(by.block, entry.slot, entry.act, entry.place), act);
        break;
      }
    }
    if (writes(act)) {
      for (std::uint32_t at = granule.reads; at; at = shadow.entry(at).next) {
        const Shadow::Entry& entry = shadow.entry(at);
        if ((entry.mask & mask) && !ordered(by, entry)) {
          report(by, "race", space, owner, array, offset, to - from, access_of(by.block, entry.slot, entry.act, entry.place), act);
          break;
        }
      }
      // A write replaces all earlier entries for these bytes. An atomic replaces only atomics that happen before it: atomics do not
      // race with each other, so it cannot stand for an earlier plain access.
      for (std::uint32_t* head : {&granule.writes, &granule.reads}) {
        std::uint32_t kept = 0;
        for (std::uint32_t at = *head; at;) {
          Shadow::Entry entry = shadow.entry(at);
          at = shadow.drop(at);
          if (act != Act::atomic || (entry.act == Act::atomic && ordered(by, entry))) entry.mask &= static_cast<std::uint8_t>(~mask);
          if (entry.mask) kept = shadow.push(kept, entry);
        }
        *head = kept;
      }
      if (act != Act::atomic) granule.num_reads = 0;
      granule.initialised |= mask;
      granule.writes = shadow.push(granule.writes, {0, now, by.place, by.slot, mask, act});
      continue;
    }
    if (!over) continue;
    // Reads. Those before a full barrier of the block happen before all later accesses; in a cluster, other blocks may read too.
    if (granule.reads) {
      const Shadow::Entry& newest = shadow.entry(granule.reads);
      if (newest.slot == by.slot && newest.clock == now && (newest.mask & mask) == mask) continue;
      if (granule.epoch != owner.full_barriers && by.block.team->size == 1) {
        shadow.clear(granule.reads);
        granule.num_reads = 0;
      }
    }
    if (granule.num_reads >= 512) {
      std::uint32_t kept = 0;
      granule.num_reads = 0;
      for (std::uint32_t at = granule.reads; at;) {
        const Shadow::Entry entry = shadow.entry(at);
        at = shadow.drop(at);
        if (!ordered(by, entry)) kept = shadow.push(kept, entry), ++granule.num_reads;
      }
      granule.reads = kept;
    }
    granule.epoch = owner.full_barriers;
    ++granule.num_reads;
    granule.reads = shadow.push(granule.reads, {0, now, by.place, by.slot, mask, act});
  }
}

void shared_access(const By& by, Block& owner, const void* pointer, unsigned bytes, Act act, bool over) {
  const unsigned offset = owner.offset_of(pointer);
  const std::size_t end = offset < DYNAMIC_BYTES ? owner.launch->smem_bytes : WINDOW_BYTES;
  if (offset + bytes > end) {
    report(by, "out of bounds", "shared", owner, "", offset, bytes, {}, act);
    return;
  }
  shadow_access(by, owner, owner.shared, offset, offset + bytes, act, true, "shared", "", 0, over);
}

// Another block's shared memory ceases to exist when its threads have returned, so an access must happen before that.
void note_remote(const By& by, Block& owner, const void* pointer, unsigned bytes, Act act, Kind kind) {
  const unsigned offset = owner.offset_of(pointer);
  if (owner.live == 0) {
    report(by, "race", "shared", owner, "of a block that has returned", offset, bytes, {}, act);
    return;
  }
  if (act == Act::atomic || kind == Kind::bulk) return;   // what remains incomplete of these is found at the block's end
  const std::uint32_t now = by.thread.clock.seen[by.slot];
  if (!owner.remote.empty() && owner.remote.back().slot == by.slot && owner.remote.back().place == by.place && owner.remote.back().clock == now) return;
  owner.remote.push_back({by.slot, now, by.place, offset, bytes, act});
}

void global_access(const By& by, std::uint64_t offset, unsigned bytes, Act act) {
  GlobalMemory& memory = const_cast<GlobalMemory&>(by.block.launch->memory);
  const std::uint8_t wanted = writes(act) ? GlobalMemory::VALID | GlobalMemory::WRITABLE : GlobalMemory::VALID | GlobalMemory::INITIALISED;
  bool writable = false;
  for (unsigned i = 0; i < bytes; ++i) {
    const std::uint8_t state = memory.state[offset + i];
    if (act == Act::atomic ? (state & 7) == 7 : (state & wanted) == wanted) {
      writable |= (state & GlobalMemory::WRITABLE) != 0;
      continue;
    }
    const Region* region = memory.region_of(offset + i);
    const char* kind = !(state & GlobalMemory::VALID) ? "out of bounds" : writes(act) && !(state & GlobalMemory::WRITABLE) ? "input modified" : "uninitialised";
    report(by, kind, "global", by.block, region ? region->name : "", offset - (region ? region->offset : 0), bytes, {}, act);
    return;
  }
  if (!writable && !writes(act)) return;   // an input, which no thread writes
  const Region* region = memory.region_of(offset);
  const std::string& name = region->name;
  // Cluster barriers, or fences around atomics, order the accesses of different blocks.
  const bool atomic = act == Act::atomic;
  const GlobalMemory::Touch mine = {static_cast<std::uint32_t>(by.block.linear + 1), by.place, by.thread.clock.seen[by.slot], by.slot, atomic};
  bool raced = false;   // at most one finding per access
  const auto look_at = [&](const GlobalMemory::Touch& theirs, Act their_act) {
    if (raced || !theirs.block || theirs.block == mine.block || (theirs.atomic && atomic) || ordered(by, theirs)) return;
    raced = true;
    const Access first = access_of(by.block, theirs.slot, theirs.atomic ? Act::atomic : their_act, theirs.place);
    report(by, "race", "global", by.block, name, offset - region->offset, bytes, {first.thread, 0, first.act, first.place}, act);
  };
  const std::uint64_t end = bytes < GlobalMemory::OWNED ? 0 : offset + bytes;   // a single byte may share its owner with another block's
  for (std::uint64_t at = std::max(offset, memory.first_owned) / GlobalMemory::OWNED; at * GlobalMemory::OWNED < end; ++at) {
    const std::uint64_t index = at - memory.first_owned / GlobalMemory::OWNED;
    if (index >= memory.owners.size()) break;   // an input
    const std::lock_guard lock(owner_mutexes[index % owner_mutexes.size()]);
    GlobalMemory::Owner& owner = memory.owners[index];
    look_at(owner.written, Act::write);
    if (writes(act)) {
      for (const GlobalMemory::Touch& touch : owner.read) look_at(touch, Act::read);
      owner.written = mine;
    } else {
      if (owner.read[0].block != mine.block) owner.read[1] = owner.read[0];
      owner.read[0] = mine;
    }
  }
  shadow_access(by, by.block, by.block.global, offset, offset + bytes, act, false, "global", name, region->offset);
  if (writes(act)) {
    for (unsigned i = 0; i < bytes; ++i) memory.state[offset + i] |= GlobalMemory::INITIALISED;
  }
}

}  // namespace

void check_access(const void* pointer, unsigned bytes, Act act, Kind kind, Place place, bool over) {
  Block* block = the_block;
  if (!block || !block->detect || !block->current || bytes == 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  // Local variables, on the threads' stacks.
  if (address - reinterpret_cast<std::uintptr_t>(block->stacks) < STACK_BYTES * static_cast<std::size_t>(block->num_threads)) return;
  const By by{*block, *block->current, offset_in_image(place), static_cast<std::uint16_t>(block->slot_of(*block->current))};
  const bool is_write = writes(act);
  const GlobalMemory& memory = block->launch->memory;
  const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(memory.base);
  if (offset < memory.bytes) {
    if (offset + bytes > memory.bytes) {
      report(by, "out of bounds", "global", *block, "", offset, bytes, {}, act);
      return;
    }
    if (block->launch->early && !by.thread.waited_for_grid) {
      const Region* region = memory.region_of(offset);
      report(by, "before griddepcontrol.wait", "global", *block, region ? region->name : "", offset - (region ? region->offset : 0), bytes, {}, act);
    }
    global_access(by, offset, bytes, act);
    if (kind != Kind::bulk) block->counters.access(by.thread.id, place, address, bytes, Space::global, is_write, kind);
    return;
  }
  if (block->owns_shared(pointer)) {
    shared_access(by, *block, pointer, bytes, act, over);
    if (kind != Kind::bulk) block->counters.access(by.thread.id, place, block->offset_of(pointer), bytes, Space::shared, is_write, kind);
    return;
  }
  for (Block* other : block->team->blocks) {
    if (other->owns_shared(pointer)) {
      shared_access(by, *other, pointer, bytes, act, over);
      note_remote(by, *other, pointer, bytes, act, kind);
      return;
    }
  }
  if (address - block->launch->arguments_low < block->launch->arguments_high - block->launch->arguments_low) return;
  const auto list = reinterpret_cast<std::uintptr_t>(block->launch->arguments.data());
  if (address - list < block->launch->arguments.size() * sizeof(void*)) return;
  if (in_image(pointer)) return;   // constants
  report(by, "out of bounds", "global", *block, "", address, bytes, {}, act);
}

void note_prefetch(const void* pointer, unsigned bytes, Place place) {
  Block* block = the_block;
  if (!block->detect) return;
  const By by{*block, *block->current, offset_in_image(place), static_cast<std::uint16_t>(block->slot_of(*block->current))};
  const GlobalMemory& memory = block->launch->memory;
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(memory.base);
  const bool within = offset < memory.bytes && bytes <= memory.bytes - offset;
  const auto exists = [](std::uint8_t state) { return (state & GlobalMemory::VALID) != 0; };
  const auto first = memory.state.begin() + static_cast<std::ptrdiff_t>(within ? offset : 0);
  if (within && std::all_of(first, first + bytes, exists)) return;
  const Region* region = within ? memory.region_of(offset) : nullptr;
  report(by, "out of bounds", "global", *block, region ? region->name : "", offset - (region ? region->offset : 0), bytes, {}, Act::async_read);
}

void note_misaligned(const void* pointer, unsigned alignment, Act act, Place place) {
  Block* block = the_block;
  if (!block || !block->detect || !block->current) return;
  const By by{*block, *block->current, offset_in_image(place), static_cast<std::uint16_t>(block->slot_of(*block->current))};
  const GlobalMemory& memory = block->launch->memory;
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(memory.base);
  if (offset < memory.bytes) {
    const Region* region = memory.region_of(offset);
    report(by, "misaligned", "global", *block, region ? region->name : "", offset - (region ? region->offset : 0), alignment, {}, act);
    return;
  }
  for (Block* owner : block->team->blocks) {
    if (owner->owns_shared(pointer)) return report(by, "misaligned", "shared", *owner, "", owner->offset_of(pointer), alignment, {}, act);
  }
}

bool detecting() { return the_block && the_block->detect; }
void on_read(const void* pointer, unsigned bytes, Kind kind) { check_access(pointer, bytes, Act::read, kind, kernel_place(EMULATION_HERE())); }
void on_write(const void* pointer, unsigned bytes, Kind kind) { check_access(pointer, bytes, Act::write, kind, kernel_place(EMULATION_HERE())); }
void atomic_note(const void* pointer, unsigned bytes) { check_access(pointer, bytes, Act::atomic, Kind::plain, kernel_place(EMULATION_HERE())); }

std::uint64_t atomic_load(const void* pointer, unsigned bytes) {
  if (the_block->detect) {
    check_access(pointer, bytes, Act::atomic, Kind::plain, kernel_place(EMULATION_HERE()));
    if (!the_block->current->released.empty()) {   // before the value changes: no thread sees the new value without this
      const std::lock_guard lock(published_mutex);
      most(published[pointer], the_block->current->released);
    }
  }
  if (bytes == 4) return __atomic_load_n(static_cast<const std::uint32_t*>(pointer), __ATOMIC_SEQ_CST);
  return __atomic_load_n(static_cast<const std::uint64_t*>(pointer), __ATOMIC_SEQ_CST);
}

void grid_wait() { the_block->current->waited_for_grid = true; }

std::uint64_t relaxed_load(const void* pointer, unsigned bytes) {
  Block& block = *the_block;
  const GlobalMemory& memory = block.launch->memory;
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(memory.base);
  const bool known = offset < memory.bytes && bytes <= memory.bytes - offset;
  if (!known || (block.detect && memory.state[offset] & GlobalMemory::WRITABLE)) return atomic_load(pointer, bytes);
  const std::uint64_t value = bytes == 4 ? __atomic_load_n(static_cast<const std::uint32_t*>(pointer), __ATOMIC_SEQ_CST)
                                         : __atomic_load_n(static_cast<const std::uint64_t*>(pointer), __ATOMIC_SEQ_CST);
  bool& waited = block.current->waited_for_grid;
  const bool early = block.launch->early && !waited;
  if (block.detect) {   // an input, which no thread of this launch writes
    const bool before = std::exchange(waited, true);   // this load may precede griddepcontrol.wait
    check_access(pointer, bytes, Act::read, Kind::plain, kernel_place(EMULATION_HERE()));
    waited = before;
  }
  if (!early || block.draw(2) == 0) return value;
  switch (block.draw(3)) {   // an old value, or a partly written one
    case 0: return 0;
    case 1: return ~std::uint64_t{0} / (1 + block.draw(1u << 16));
    default: return block.draw(1000);
  }
}

bool atomic_replace(void* pointer, std::uint64_t expected, std::uint64_t desired, unsigned bytes) {
  auto narrow = static_cast<std::uint32_t>(expected);
  const bool done = bytes == 4 ? __atomic_compare_exchange_n(static_cast<std::uint32_t*>(pointer), &narrow, static_cast<std::uint32_t>(desired),
                                                             false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
                               : __atomic_compare_exchange_n(static_cast<std::uint64_t*>(pointer), &expected, desired, false, __ATOMIC_SEQ_CST,
                                                             __ATOMIC_SEQ_CST);
  if (done && the_block->detect) {
    const std::lock_guard lock(published_mutex);
    if (const auto there = published.find(pointer); there != published.end()) most(the_block->current->found, there->second);
  }
  return done;
}

// --- asynchronous accesses --------------------------------------------------------------------------------------------------

namespace {

Block* shared_owner(const void* pointer) {
  if (the_block->owns_shared(pointer)) return the_block;
  for (Block* other : the_block->team->blocks) {
    if (other->owns_shared(pointer)) return other;
  }
  return nullptr;
}

void mark_in_flight(Block& owner, unsigned low, unsigned high, bool flying) {
  for (unsigned byte = low; byte < high; ++byte) {
    Shadow::Granule& granule = owner.shared.at(byte / Shadow::GRANULE);
    const auto bit = static_cast<std::uint8_t>(1u << byte % Shadow::GRANULE);
    granule.in_flight = static_cast<std::uint8_t>(flying ? granule.in_flight | bit : granule.in_flight & ~bit);
  }
}

}  // namespace

void async_write_begin(void* pointer, unsigned bytes, Place place, Proxy proxy) {
  Block* owner = shared_owner(pointer);
  if (owner) std::memset(pointer, 0xff, bytes);   // NaN until the copy lands
  if (!the_block->detect) return;
  check_access(pointer, bytes, proxy == Proxy::generic ? Act::write : Act::async_write, Kind::bulk, place);
  if (!owner) return;
  const unsigned offset = owner->offset_of(pointer);
  mark_in_flight(*owner, offset, offset + bytes, true);
  owner->flights.push_back({offset, offset + bytes, offset_in_image(place), the_block->current->id});
}

void async_write_end(void* pointer, unsigned bytes, Place place, Clock* into, Proxy proxy) {
  if (!the_block->detect) return;
  Block* owner = shared_owner(pointer);
  if (!owner) return;
  const unsigned offset = owner->offset_of(pointer);
  mark_in_flight(*owner, offset, offset + bytes, false);
  std::erase_if(owner->flights, [&](const Block::Flight& flight) { return flight.low == offset && flight.high == offset + bytes; });
  // Record the write. If the issuing thread itself waited (cp.async, `into` null), it is a write by that thread. Otherwise it gets its
  // own time in the block's copy slot, and happens before whatever acquires the barrier's clock. The thread that lands such a copy is
  // whichever waits first, and it learns of the write through the barrier, like every other thread.
  Block& block = *the_block;
  Thread& thread = *block.current;
  const auto slot = static_cast<std::size_t>(into ? block.copy_slot() : block.slot_of(thread));
  std::uint32_t now;
  if (into) {
    now = ++block.copies_landed;
    if (into->seen.size() <= slot) into->seen.resize(slot + 1, 0);
    into->seen[slot] = std::max(into->seen[slot], now);
  } else {
    now = thread.clock.seen[slot];
  }
  for (unsigned at = offset; at < offset + bytes; at = (at / Shadow::GRANULE + 1) * Shadow::GRANULE) {
    Shadow::Granule& granule = owner->shared.at(at / Shadow::GRANULE);
    const unsigned end = std::min<unsigned>(offset + bytes, (at / Shadow::GRANULE + 1) * Shadow::GRANULE);
    const auto mask = static_cast<std::uint8_t>(((1u << (end - at)) - 1) << at % Shadow::GRANULE);
    std::uint32_t kept = 0;
    for (std::uint32_t one = granule.writes; one;) {
      Shadow::Entry entry = owner->shared.entry(one);
      one = owner->shared.drop(one);
      entry.mask &= static_cast<std::uint8_t>(~mask);
      if (entry.mask) kept = owner->shared.push(kept, entry);
    }
    granule.initialised |= mask;
    granule.writes = owner->shared.push(kept, {0, now, offset_in_image(place), static_cast<std::uint16_t>(slot), mask,
                                               proxy == Proxy::generic ? Act::write : Act::async_write});
  }
}

namespace {

void count_async_readers(const void* pointer, unsigned bytes, Place place, int change) {
  Block* owner = shared_owner(pointer);
  if (!owner) return;
  const unsigned low = owner->offset_of(pointer);
  for (unsigned index = low / Shadow::GRANULE; index <= (low + bytes - 1) / Shadow::GRANULE; ++index) {
    Shadow::Granule& granule = owner->shared.at(index);
    granule.async_readers = static_cast<std::uint16_t>(granule.async_readers + change);
    granule.async_place = offset_in_image(place);
    granule.async_thread = the_block->current->id;
  }
}

}  // namespace

void async_read_begin(const void* pointer, unsigned bytes, Place place, const char*) {
  if (!the_block->detect) return;
  check_access(pointer, bytes, Act::async_read, Kind::bulk, place, false);   // recorded at its end, maybe by another lane of the warp
  count_async_readers(pointer, bytes, place, 1);
}

void async_read_end(const void* pointer, unsigned bytes, Place place, const char*) {
  if (!the_block->detect) return;
  count_async_readers(pointer, bytes, place, -1);
  check_access(pointer, bytes, Act::async_read, Kind::bulk, place);
}

// --- a block's life ---------------------------------------------------------------------------------------------------------

void detect_start(Block& block) {
  block.full_barriers = 0;
  block.copies_landed = 0;
  block.shared.reset(WINDOW_BYTES);
  block.global.reset(block.launch->memory.bytes);
  block.flights.clear();
  block.remote.clear();
  block.exited = {};
  const std::size_t slots = (static_cast<std::size_t>(block.num_threads) + 1) * block.team->size;   // and one for the copies of each block
  for (Thread& thread : block.threads) {
    thread.clock.seen.assign(slots, 0);
    thread.clock.fenced.clear();
    thread.clock.elsewhere.clear();
    thread.released.clear();
    thread.found.clear();
    thread.clock.seen[static_cast<std::size_t>(block.slot_of(thread))] = 1;
  }
  block.counters.begin_block(block.num_threads);
}

void detect_finish(Block&) {}

void detect_returned(Block& block) {
  for (const Block::Remote& access : block.remote) {
    if (access.slot < block.exited.seen.size() && block.exited.seen[access.slot] >= access.clock) continue;
    block.findings.add({"race", "shared", "of a block that has returned", access.offset, access.bytes, 1, {block.index.x, block.index.y, block.index.z}, {},
                        access_of(block, access.slot, access.act, access.place)});
  }
}

}  // namespace emu

// --- -fsanitize=bounds and =alignment call these: an index outside its array, an address misaligned for its type --------------

extern "C" void __ubsan_handle_out_of_bounds(void*, void* index) {
  emu::Block* block = emu::the_block;
  if (!block || !block->detect || !block->current) return;
  block->findings.add({"out of bounds", "array index", "", reinterpret_cast<std::uintptr_t>(index), 0, 1,
                       {block->index.x, block->index.y, block->index.z}, {},
                       {block->current->id, static_cast<int>(block->rank), emu::Act::read, emu::offset_in_image(EMULATION_HERE())}});
}

namespace {

// What the compiler passes about the place, in the layout of its own library (compiler-rt, ubsan_handlers.h).
struct TypeMismatch {
  const char* file;
  std::uint32_t line, column;
  const void* type;
  std::uint8_t log2_alignment;
  std::uint8_t use;   // 1: a store
};

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(const TypeMismatch* what, void* pointer) {
  emu::note_misaligned(pointer, 1u << what->log2_alignment, what->use == 1 ? emu::Act::write : emu::Act::read, EMULATION_HERE());
}

// --- the compiler's hooks: -fsanitize=thread calls these before each load and store of instrumented code --------------------

#define HOOK(name, bytes, act) \
  extern "C" void __tsan_##name(void* pointer) { emu::check_access(pointer, bytes, emu::Act::act, emu::Kind::plain, EMULATION_HERE()); }
#define HOOKS(bytes)                                  \
  HOOK(read##bytes, bytes, read)                      \
  HOOK(write##bytes, bytes, write)                    \
  HOOK(volatile_read##bytes, bytes, read)             \
  HOOK(volatile_write##bytes, bytes, write)           \
  HOOK(unaligned_read##bytes, bytes, read)            \
  HOOK(unaligned_write##bytes, bytes, write)          \
  HOOK(unaligned_volatile_read##bytes, bytes, read)   \
  HOOK(unaligned_volatile_write##bytes, bytes, write) \
  extern "C" void __tsan_read_write##bytes(void* pointer) {                                              \
    emu::check_access(pointer, bytes, emu::Act::read, emu::Kind::plain, EMULATION_HERE());              \
    emu::check_access(pointer, bytes, emu::Act::write, emu::Kind::plain, EMULATION_HERE());             \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_read_range(void* pointer, std::size_t bytes) {
  emu::check_access(pointer, static_cast<unsigned>(bytes), emu::Act::read, emu::Kind::plain, EMULATION_HERE());
}
void __tsan_write_range(void* pointer, std::size_t bytes) {
  emu::check_access(pointer, static_cast<unsigned>(bytes), emu::Act::write, emu::Kind::plain, EMULATION_HERE());
}
void* __tsan_memcpy(void* target, const void* source, std::size_t bytes) {
  emu::check_access(source, static_cast<unsigned>(bytes), emu::Act::read, emu::Kind::plain, EMULATION_HERE());
  emu::check_access(target, static_cast<unsigned>(bytes), emu::Act::write, emu::Kind::plain, EMULATION_HERE());
  return std::memcpy(target, source, bytes);
}
void* __tsan_memmove(void* target, const void* source, std::size_t bytes) {
  emu::check_access(source, static_cast<unsigned>(bytes), emu::Act::read, emu::Kind::plain, EMULATION_HERE());
  emu::check_access(target, static_cast<unsigned>(bytes), emu::Act::write, emu::Kind::plain, EMULATION_HERE());
  return std::memmove(target, source, bytes);
}
void* __tsan_memset(void* target, int value, std::size_t bytes) {
  emu::check_access(target, static_cast<unsigned>(bytes), emu::Act::write, emu::Kind::plain, EMULATION_HERE());
  return std::memset(target, value, bytes);
}
}
