// Asynchronous copies, which land (write their destination) as late as possible, and the mbarriers that count them. async.h documents
// the interface.
#include "../async.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>

#include "../narrow.h"
#include "async_state.h"

namespace emu {

namespace {

constexpr unsigned BULK_ALIGNMENT = 16;
constexpr unsigned TENSOR_SMEM_ALIGNMENT = 128;
constexpr unsigned MAX_BOX = 256;
constexpr std::uint64_t MAX_STRIDE = std::uint64_t{1} << 40;
constexpr int REGISTER_FILE = 64 * 1024;   // registers per SM (sm_90)
constexpr int FEWEST_REGISTERS = 24;       // per thread: the minimum for setmaxnreg
constexpr int MOST_REGISTERS = 256;        // per thread: the maximum allocation
constexpr int REGISTER_UNIT = 8;           // per thread: the allocation granularity

Thread& current() { return *the_block->current; }

Block* owner_of(const void* pointer) {
  if (the_block->owns_shared(pointer)) return the_block;
  for (Block* other : the_block->team->blocks) {
    if (other->owns_shared(pointer)) return other;
  }
  return nullptr;
}

unsigned shared_offset(const void* pointer) {
  const Block* owner = owner_of(pointer);
  return owner ? owner->offset_of(pointer) : 0;
}

bool aligned(const void* pointer, unsigned alignment) { return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0; }

ThreadAsync& my_copies() { return state_of(*the_block).threads[static_cast<std::size_t>(current().id)]; }

void want_shared(const void* pointer, std::uint32_t bytes, unsigned alignment, Place place, const char* name) {
  if (!is_shared(pointer)) misuse(place, "%s: wanted shared memory, got address %p, outside shared memory", name, pointer);
  if (!aligned(pointer, alignment)) {
    misuse(place, "%s: wanted a shared-memory address that is a multiple of %u, got offset %u", name, alignment,
           shared_offset(pointer));
  }
  const unsigned left = shared_bytes_left(pointer);
  if (left < bytes) {
    misuse(place, "%s: wanted %u bytes of shared memory from offset %u, got %u up to its end", name, bytes,
           shared_offset(pointer), left);
  }
}

// If no byte is accessed, the pointer may have stepped past its array: only its alignment is checked.
void want_global(const void* pointer, unsigned alignment, Place place, const char* name, bool accessed = true) {
  if (accessed && is_shared(pointer))
    misuse(place, "%s: wanted global memory, got shared memory at offset %u", name, shared_offset(pointer));
  if (!aligned(pointer, alignment)) {
    misuse(place, "%s: wanted a global address that is a multiple of %u, got %p", name, alignment, pointer);
  }
}

}   // namespace

// --- for async.cpp and wgmma.cpp --------------------------------------------------------------------------------------------

void misuse(Place place, const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fail_at(place, "misuse", text);
}

void misuse_of(int thread, Place place, const std::string& text) {
  Thread* const caller = the_block->current;
  the_block->current = &the_block->threads[static_cast<std::size_t>(thread)];
  try {
    fail_at(place, "misuse", text);
  } catch (const Failure&) {
    the_block->current = caller;
    throw;
  }
}

AsyncState& state_of(Block& block) {
  if (!block.async) {
    block.async = new AsyncState;
    block.async->threads.resize(static_cast<std::size_t>(block.num_threads));
    block.async->max_registers.resize(static_cast<std::size_t>((block.num_threads + WARP - 1) / WARP));
  }
  return *block.async;
}

// --- cp.async ---------------------------------------------------------------------------------------------------------------

namespace {

// `into` is null if the issuing thread itself waits; it is then the current thread.
void land(const Copy& copy, Clock* into) {
  std::memcpy(copy.target, copy.source, copy.valid_bytes);
  std::memset(copy.target + copy.valid_bytes, 0, static_cast<std::size_t>(copy.bytes - copy.valid_bytes));
  async_write_end(copy.target, copy.bytes, copy.place, into, Proxy::generic);
}

void arrive_deferred(MbarrierState& barrier, Place place);

// The thread's own wait: lands its copies before number `end`.
void land_own(ThreadAsync& mine, std::uint64_t end) {
  if (mine.copies_landed >= end) return;
  while (mine.copies_landed < end) {
    const Copy copy = mine.copies.front();
    mine.copies.pop_front();
    ++mine.copies_landed;
    land(copy, nullptr);
  }
  // If all copies of a deferred arrival (cp.async.mbarrier.arrive) have landed by now, the barrier will not land them itself.
  // This thread then releases into the barrier's clock.
  for (const auto& barrier : state_of(*the_block).barriers) {
    const bool told = std::any_of(barrier->deferred.begin(), barrier->deferred.end(), [&](const MbarrierState::Deferred& one) {
      return one.thread == current().id && one.copy <= mine.copies_landed;
    });
    if (told) release(barrier->clock[barrier->phase & 1]);
  }
}

}   // namespace

void cp_async(void* target_smem, const void* source, int bytes, int valid_bytes, Place place) {
  if (!place) place = EMULATION_HERE();
  const char* name = "cp.async";
  if (bytes != 4 && bytes != 8 && bytes != 16) misuse(place, "cp.async: wanted 4, 8 or 16 bytes, got %d", bytes);
  if (valid_bytes < 0 || valid_bytes > bytes)
    misuse(place, "cp.async: wanted 0 to %d bytes to read, got %d", bytes, valid_bytes);
  want_shared(target_smem, static_cast<std::uint32_t>(bytes), static_cast<unsigned>(bytes), place, name);
  want_global(source, static_cast<unsigned>(bytes), place, name, valid_bytes > 0);
  ThreadAsync& mine = my_copies();
  mine.copies.push_back({static_cast<unsigned char*>(target_smem), static_cast<const unsigned char*>(source),
                         static_cast<std::uint8_t>(bytes), static_cast<std::uint8_t>(valid_bytes), mine.group, place});
  ++mine.copies_issued;
  if (detecting()) {
    check_access(source, static_cast<unsigned>(valid_bytes), Act::read, Kind::copy, place);
    the_block->counters.access(current().id, place, shared_offset(target_smem), static_cast<unsigned>(bytes), Space::shared,
                               true, Kind::copy);
  }
  async_write_begin(target_smem, static_cast<unsigned>(bytes), place, Proxy::generic);
}

void cp_async_commit() { ++my_copies().group; }

void cp_async_wait(int pending) {
  ThreadAsync& mine = my_copies();
  if (pending == WAIT_ALL) return land_own(mine, mine.copies_issued);
  // Groups before first_kept must complete. The newest `pending` committed groups may stay in flight.
  if (mine.group <= static_cast<std::uint64_t>(pending)) return;
  const std::uint64_t first_kept = mine.group - static_cast<std::uint64_t>(pending);
  const auto end =
      std::find_if(mine.copies.begin(), mine.copies.end(), [&](const Copy& copy) { return copy.group >= first_kept; });
  land_own(mine, mine.copies_landed + static_cast<std::uint64_t>(std::distance(mine.copies.begin(), end)));
}

// --- mbarrier ---------------------------------------------------------------------------------------------------------------

namespace {

// Any use of a barrier counts as an atomic access. mbarrier_init must happen before it.
void note(const MbarrierState& barrier, Place place) {
  if (!detecting()) return;
  Block& block = *the_block;
  const std::vector<std::uint32_t>& seen = current().clock.seen;
  if (static_cast<std::size_t>(block.slot_of(current())) != barrier.init_slot &&
      seen[barrier.init_slot] < barrier.init_moment) {
    const Block& owner = *owner_of(barrier.word);
    block.findings.add({"race",
                        "shared",
                        "",
                        owner.offset_of(barrier.word),
                        sizeof *barrier.word,
                        1,
                        {owner.index.x, owner.index.y, owner.index.z},
                        {barrier.init_thread, static_cast<int>(owner.rank), Act::write, offset_in_image(barrier.place)},
                        {current().id, static_cast<int>(block.rank), Act::atomic, offset_in_image(place)}});
  }
  check_access(barrier.word, sizeof *barrier.word, Act::atomic, Kind::bulk, place);
}

MbarrierState& barrier_at(void* pointer, Place place, const char* name) {
  Block* owner = owner_of(pointer);
  if (!owner) misuse(place, "%s: wanted an mbarrier in shared memory, got address %p, outside shared memory", name, pointer);
  if (owner->live == 0)
    misuse(place, "%s: wanted a barrier of a running block, got one of block %u of the cluster, which has returned", name,
           owner->rank);
  for (const auto& one : state_of(*owner).barriers) {
    if (one->word != pointer) continue;
    if (*one->word != one->pack()) {
      misuse(place, "%s: wanted the mbarrier at shared offset %u, got other bytes there: something has written over it", name,
             owner->offset_of(pointer));
    }
    return *one;
  }
  misuse(place, "%s: wanted an mbarrier that mbarrier_init has initialised, got one that it has not, at shared offset %u%s", name,
         owner->offset_of(pointer), owner == the_block ? "" : " of another block");
}

void store(MbarrierState& barrier) {
  *barrier.word = barrier.pack();
  the_block->moved = true;
}

// Completes the phase if no arrivals or bytes are pending. Returns whether it did.
bool flip(MbarrierState& barrier, Place place) {
  if (barrier.pending != 0) return false;
  if (barrier.tx < 0) {
    misuse(place,
           "mbarrier at shared offset %u: wanted no more bytes than expect_tx announced for phase %llu, got %lld more",
           shared_offset(barrier.word), static_cast<unsigned long long>(barrier.phase), static_cast<long long>(-barrier.tx));
  }
  if (barrier.tx != 0) return false;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  return true;
}

// `place` is that of the arrival.
bool count_down(MbarrierState& barrier, unsigned count, Place place, const char* name) {
  if (count == 0) misuse(place, "%s: wanted at least one arrival, got 0", name);
  if (count > barrier.pending) {
    misuse(place, "%s at shared offset %u: wanted at most the %u of %u arrivals still pending in phase %llu%s, got %u", name,
           shared_offset(barrier.word), barrier.pending, barrier.expected, static_cast<unsigned long long>(barrier.phase),
           barrier.pending == 0 ? " (only bytes are pending)" : "", count);
  }
  barrier.pending -= count;
  return flip(barrier, place);
}

void expect(MbarrierState& barrier, std::int64_t bytes, Place place, const char* name) {
  barrier.tx += bytes;
  if (barrier.tx > static_cast<std::int64_t>(MBARRIER_MAX_COUNT) ||
      -barrier.tx > static_cast<std::int64_t>(MBARRIER_MAX_COUNT)) {
    misuse(place, "%s: wanted at most %u outstanding bytes, got %lld", name, MBARRIER_MAX_COUNT,
           static_cast<long long>(barrier.tx));
  }
}

void land(const Transfer& transfer, Clock* into);

// Called when a thread waits for the current phase. Performs deferred arrivals and, if only bytes are pending, lands copies until the
// phase completes or no copy is left. Returns whether it has completed.
bool land_for(MbarrierState& barrier, Place place) {
  const std::uint64_t phase = barrier.phase;
  if (!barrier.deferred.empty()) arrive_deferred(barrier, place);
  // While arrivals are pending, no copy can complete the phase. Landing it later is as legal and exposes more errors.
  while (barrier.phase == phase && barrier.pending == 0 && !barrier.landings.empty()) {
    const auto at = barrier.landings.begin() + choose(static_cast<unsigned>(barrier.landings.size()));
    const Transfer transfer = std::move(*at);
    barrier.landings.erase(at);
    land(transfer, barrier.clock[barrier.phase & 1]);
    barrier.tx -= transfer.bytes;
    flip(barrier, transfer.place);
    store(barrier);
  }
  return barrier.phase != phase;
}

void arrive_deferred(MbarrierState& barrier, Place place) {
  std::vector<MbarrierState::Deferred> waiting;
  waiting.swap(barrier.deferred);
  for (const auto& [thread, end] : waiting) {
    ThreadAsync& theirs = state_of(*the_block).threads[static_cast<std::size_t>(thread)];
    while (theirs.copies_landed < end) {
      const Copy copy = theirs.copies.front();
      theirs.copies.pop_front();
      ++theirs.copies_landed;
      land(copy, barrier.clock[barrier.phase & 1]);
    }
    count_down(barrier, 1, place, "cp.async.mbarrier.arrive");
    store(barrier);
  }
}

void describe(const MbarrierState& barrier, unsigned parity, char (&text)[sizeof(Thread::what)]) {
  std::snprintf(text, sizeof text, "mbarrier wait, parity %u, phase %llu, %u of %u arrivals pending, %lld bytes outstanding",
                parity, static_cast<unsigned long long>(barrier.phase), barrier.pending, barrier.expected,
                static_cast<long long>(barrier.tx));
}

// Whether the phase with this parity has completed. If not, lands its copies first, because a thread is waiting for them.
bool complete(MbarrierState& barrier, unsigned parity, Place place) {
  return (barrier.phase & 1) != parity || land_for(barrier, place);
}

MbarrierState& barrier_to_wait_for(void* pointer, unsigned parity, Place place, const char* name) {
  if (parity > 1) misuse(place, "%s: wanted a parity, 0 or 1, got %u", name, parity);
  Block* owner = owner_of(pointer);
  if (owner && owner != the_block)
    misuse(place, "%s: wanted a barrier of this block, got one of block %u of the cluster", name, owner->rank);
  return barrier_at(pointer, place, name);
}

void* of_rank(void* pointer, unsigned rank) { return rank == THIS_BLOCK ? pointer : shared_of_rank(pointer, rank); }

}   // namespace

void mbarrier_init(void* barrier, unsigned count) {
  const Place place = EMULATION_HERE();
  const char* name = "mbarrier_init";
  want_shared(barrier, sizeof(std::uint64_t), alignof(std::uint64_t), place, name);
  if (!the_block->owns_shared(barrier))
    misuse(place, "%s: wanted shared memory of this block, got that of another block", name);
  if (count == 0 || count > MBARRIER_MAX_COUNT)
    misuse(place, "%s: wanted a count from 1 to %u, got %u", name, MBARRIER_MAX_COUNT, count);
  AsyncState& state = state_of(*the_block);
  auto* word = static_cast<std::uint64_t*>(barrier);
  const auto old =
      std::find_if(state.barriers.begin(), state.barriers.end(), [&](const auto& one) { return one->word == word; });
  if (old != state.barriers.end()) {
    if (*word == (*old)->pack())
      misuse(place, "%s: wanted memory that is not a barrier, got one in use at shared offset %u: mbarrier_inval it first",
             name, shared_offset(barrier));
    state.barriers.erase(old);
  }
  if (detecting()) check_access(barrier, sizeof *word, Act::write, Kind::bulk, place);
  auto made = std::make_unique<MbarrierState>();
  made->word = word;
  made->expected = made->pending = count;
  made->tx = 0;
  made->phase = 0;
  made->clock[0] = new_clock();
  made->clock[1] = new_clock();
  made->place = place;
  made->init_thread = current().id;
  if (detecting()) {
    made->init_slot = static_cast<std::size_t>(the_block->slot_of(current()));
    made->init_moment = current().clock.seen[made->init_slot];
  }
  store(*made);
  state.barriers.push_back(std::move(made));
}

void mbarrier_inval(void* barrier) {
  const Place place = EMULATION_HERE();
  MbarrierState& it = barrier_to_wait_for(barrier, 0, place, "mbarrier_inval");
  if (!it.landings.empty())
    misuse(place, "mbarrier_inval: wanted no copy in flight, got %zu counted by this barrier", it.landings.size());
  if (detecting()) check_access(barrier, sizeof(std::uint64_t), Act::write, Kind::bulk, place);
  *it.word = ~std::uint64_t{0};
  std::erase_if(state_of(*the_block).barriers, [&](const auto& one) { return one.get() == &it; });
}

std::uint64_t mbarrier_arrive(void* barrier, unsigned count, std::uint32_t expect_bytes, bool expects, unsigned rank) {
  const Place place = EMULATION_HERE();
  const char* name = expects ? "mbarrier_arrive_expect_tx" : "mbarrier_arrive";
  void* at = of_rank(barrier, rank);
  MbarrierState& it = barrier_at(at, place, name);
  note(it, place);
  const std::uint64_t before = it.pack();
  expect(it, expect_bytes, place, name);
  release(it.clock[it.phase & 1]);
  const bool flipped = count_down(it, count, place, name);
  store(it);
  if (flipped) hold_back();
  return before;
}

void mbarrier_expect_tx(void* barrier, std::uint32_t bytes, unsigned rank) {
  const Place place = EMULATION_HERE();
  void* at = of_rank(barrier, rank);
  MbarrierState& it = barrier_at(at, place, "mbarrier_expect_tx");
  note(it, place);
  expect(it, bytes, place, "mbarrier_expect_tx");
  store(it);
}

void mbarrier_complete_tx(void* barrier, std::uint32_t bytes, unsigned rank) {
  const Place place = EMULATION_HERE();
  void* at = of_rank(barrier, rank);
  MbarrierState& it = barrier_at(at, place, "mbarrier_complete_tx");
  note(it, place);
  expect(it, -static_cast<std::int64_t>(bytes), place, "mbarrier_complete_tx");
  flip(it, place);
  store(it);
}

bool mbarrier_test(void* barrier, unsigned parity) {
  const Place place = EMULATION_HERE();
  MbarrierState& it = barrier_to_wait_for(barrier, parity, place, "mbarrier_test_wait");
  note(it, place);
  if (complete(it, parity, place)) {
    acquire(it.clock[parity]);
    return true;
  }
  Block& block = *the_block;
  Thread& thread = *block.current;
  thread.place = place;
  thread.waits_in = nullptr;
  describe(it, parity, thread.what);
  thread.held_until = block.round + 1;
  switch_fiber(thread.fiber, block.scheduler);
  if (block.team->failed) throw Failure{};
  return false;
}

void mbarrier_wait(void* barrier, unsigned parity) {
  const Place place = EMULATION_HERE();
  const char* name = "mbarrier_wait";
  MbarrierState& it = barrier_to_wait_for(barrier, parity, place, name);
  note(it, place);
  if (!complete(it, parity, place)) {
    std::uint64_t seen = 0;
    // Another thread may invalidate the barrier in the meantime, so each test looks it up again.
    wait_at(
        place,
        [&] {
          MbarrierState& now = barrier_at(barrier, place, name);
          if (complete(now, parity, place)) return true;
          if (seen != now.pack()) describe(now, parity, current().what);
          seen = now.pack();
          return false;
        },
        "");
  }
  acquire(it.clock[parity]);
}

void cp_async_mbarrier_arrive(void* barrier, bool noinc) {
  const Place place = EMULATION_HERE();
  const char* name = noinc ? "cp_async_mbarrier_arrive_noinc" : "cp_async_mbarrier_arrive";
  MbarrierState& it = barrier_to_wait_for(barrier, 0, place, name);
  note(it, place);
  if (!noinc) {
    if (it.pending == MBARRIER_MAX_COUNT)
      misuse(place, "%s: wanted at most %u arrivals pending, got one more", name, MBARRIER_MAX_COUNT);
    ++it.pending;
  } else if (it.pending <= it.deferred.size()) {
    misuse(place, "%s: wanted at most the %u arrivals still pending in phase %llu, got %zu from cp.async", name, it.pending,
           static_cast<unsigned long long>(it.phase), it.deferred.size() + 1);
  }
  const ThreadAsync& mine = my_copies();
  if (mine.copies_landed == mine.copies_issued) release(it.clock[it.phase & 1]);   // this thread has already waited for them
  it.deferred.push_back({current().id, mine.copies_issued});
  store(it);
}

// --- tensors ----------------------------------------------------------------------------------------------------------------

namespace {

unsigned bytes_of(TensorType type) {
  switch (type) {
    case TensorType::u8: return 1;
    case TensorType::u16:
    case TensorType::f16:
    case TensorType::bf16: return 2;
    case TensorType::u32:
    case TensorType::i32:
    case TensorType::f32: return 4;
    case TensorType::u64:
    case TensorType::i64:
    case TensorType::f64: return 8;
  }
  return 0;
}

bool is_floating(TensorType type) {
  return type == TensorType::f16 || type == TensorType::bf16 || type == TensorType::f32 || type == TensorType::f64;
}

unsigned swizzle_bits(TensorSwizzle swizzle) { return static_cast<unsigned>(swizzle); }   // 32, 64, 128 bytes: 1, 2, 3
unsigned swizzle_span(TensorSwizzle swizzle) { return 16u << swizzle_bits(swizzle); }

// Checks the rules of cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management") and those of the instruction.
void check_map(const TensorMap* map, unsigned rank, Place place, const char* name) {
  if (is_shared(map))
    misuse(place, "%s: wanted a tensor map in parameters, constant or global memory, got shared memory", name);
  if (!aligned(map, alignof(TensorMap)))
    misuse(place, "%s: wanted a tensor map at a multiple of %zu bytes, got %p", name, alignof(TensorMap),
           static_cast<const void*>(map));
  if (map->mark != TENSOR_MAP_MARK) misuse(place, "%s: wanted a tensor map, got 128 bytes without a tensor map's mark", name);
  if (map->rank < 1 || map->rank > MAX_RANK)
    misuse(place, "tensor map: wanted 1 to %u dimensions, got %u", MAX_RANK, map->rank);
  if (rank && map->rank != rank)
    misuse(place, "%s: wanted a tensor map of %u dimensions, got one of %u", name, rank, map->rank);
  const unsigned element = bytes_of(map->type);
  if (element == 0)
    misuse(place, "tensor map: wanted an element type that is emulated (8 to 64 bits), got CUtensorMapDataType %u",
           static_cast<unsigned>(map->type));
  if (static_cast<unsigned>(map->swizzle) > 3)
    misuse(place, "tensor map: wanted a swizzle of 0, 32, 64 or 128 bytes, got CUtensorMapSwizzle %u",
           static_cast<unsigned>(map->swizzle));
  if (map->nan_fill > 1 || (map->nan_fill && !is_floating(map->type)))
    misuse(place, "tensor map: wanted a fill of 0 (or NaN for floating-point elements), got %u", map->nan_fill);
  if (!aligned(map->base, BULK_ALIGNMENT))
    misuse(place, "tensor map: wanted a global address that is a multiple of %u, got %p", BULK_ALIGNMENT,
           static_cast<const void*>(map->base));
  for (unsigned d = 0; d < map->rank; ++d) {
    if (map->dims[d] == 0) misuse(place, "tensor map: wanted at least one element in dimension %u, got 0", d);
    if (map->box[d] == 0 || map->box[d] > MAX_BOX)
      misuse(place, "tensor map: wanted a box of 1 to %u elements in dimension %u, got %u", MAX_BOX, d, map->box[d]);
    if (map->element_strides[d] != 1)
      misuse(place, "tensor map: wanted element strides of 1 (others are not emulated), got %u in dimension %u",
             map->element_strides[d], d);
    if (d + 1 < map->rank && (map->strides[d] % BULK_ALIGNMENT || map->strides[d] >= MAX_STRIDE)) {
      misuse(place, "tensor map: wanted a stride that is a multiple of %u and less than 2^40 bytes in dimension %u, got %llu",
             BULK_ALIGNMENT, d + 1, static_cast<unsigned long long>(map->strides[d]));
    }
  }
  const unsigned inner = map->box[0] * element;
  if (inner % BULK_ALIGNMENT)
    misuse(place, "tensor map: wanted boxes of a multiple of %u bytes in dimension 0, got %u", BULK_ALIGNMENT, inner);
  if (map->swizzle != TensorSwizzle::none && inner > swizzle_span(map->swizzle)) {
    misuse(place, "tensor map: wanted boxes of at most %u bytes in dimension 0 for a %u-byte swizzle, got %u",
           swizzle_span(map->swizzle), swizzle_span(map->swizzle), inner);
  }
}

std::uint32_t box_bytes(const TensorMap& map) {
  std::uint32_t bytes = bytes_of(map.type);
  for (unsigned d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

// For each row of the box along dimension 0, calls row(byte offset in the packed box, global address of the first element inside the
// tensor, number of elements before the tensor, number inside). If another dimension is out of bounds, no element is inside.
template <typename F>
void for_each_row(const TensorMap& map, const int* coordinates, F row) {
  const unsigned element = bytes_of(map.type);
  const std::int64_t first = coordinates[0], size = map.dims[0], wanted = map.box[0];
  const std::int64_t before = std::clamp<std::int64_t>(-first, 0, wanted);
  const std::int64_t after = std::clamp<std::int64_t>(first + wanted - size, 0, wanted);
  const std::int64_t inside = std::max<std::int64_t>(0, wanted - before - after);
  std::uint32_t at[MAX_RANK] = {};
  for (std::uint32_t offset = 0;; offset += map.box[0] * element) {
    bool exists = true;
    std::int64_t address = (first + before) * element;
    for (unsigned d = 1; d < map.rank; ++d) {
      const std::int64_t x = std::int64_t{coordinates[d]} + at[d];
      exists &= x >= 0 && x < std::int64_t{map.dims[d]};
      address += x * static_cast<std::int64_t>(map.strides[d - 1]);
    }
    const bool any = exists && inside > 0;
    row(offset, any ? map.base + address : nullptr, static_cast<unsigned>(any ? before : wanted),
        static_cast<unsigned>(any ? inside : 0));
    unsigned d = 1;
    while (d < map.rank && ++at[d] == map.box[d]) at[d++] = 0;
    if (d >= map.rank) return;
  }
}

// Shared-memory address of byte `offset` of the packed box. 16-byte pieces stay contiguous.
unsigned char* piece_at(const Transfer& transfer, std::uint32_t offset) {
  const auto address = reinterpret_cast<std::uintptr_t>(transfer.shared) + offset;
  return reinterpret_cast<unsigned char*>(
      transfer.map.swizzle == TensorSwizzle::none ? address : swizzled(address, swizzle_bits(transfer.map.swizzle)));
}

void fill_outside(const TensorMap& map, unsigned char* row, unsigned elements) {
  const unsigned element = bytes_of(map.type);
  if (!map.nan_fill) {
    std::memset(row, 0, elements * element);
    return;
  }
  const std::uint64_t nan = map.type == TensorType::f64   ? 0x7fffffffffffffffull
                            : map.type == TensorType::f32 ? 0x7fffffffull
                                                          : 0x7ff7ull;   // what an H200 fills f16 with; the wider types' bits are a guess
  for (unsigned i = 0; i < elements; ++i) std::memcpy(row + i * element, &nan, element);
}

// --- a bulk copy lands -------------------------------------------------------------------------------------------------------

void land_tensor_load(const Transfer& transfer) {
  const TensorMap& map = transfer.map;
  const unsigned element = bytes_of(map.type), row_bytes = map.box[0] * element;
  unsigned char row[MAX_BOX * sizeof(std::uint64_t)];
  for_each_row(map, transfer.coordinates,
               [&](std::uint32_t offset, const unsigned char* source, unsigned before, unsigned inside) {
                 fill_outside(map, row, map.box[0]);
                 if (inside) std::memcpy(row + before * element, source, inside * element);
                 for (unsigned i = 0; i < row_bytes; i += BULK_ALIGNMENT)
                   std::memcpy(piece_at(transfer, offset + i), row + i, BULK_ALIGNMENT);
               });
}

template <typename T, typename F>
void atomically(unsigned char* pointer, F next) {
  auto* at = reinterpret_cast<T*>(pointer);
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(at, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void add_element(TensorType type, unsigned char* target, const unsigned char* source) {
  switch (type) {
    case TensorType::u32:
    case TensorType::i32: {
      const auto value = *reinterpret_cast<const std::uint32_t*>(source);
      return atomically<std::uint32_t>(target, [&](std::uint32_t old) { return old + value; });
    }
    case TensorType::u64:
    case TensorType::i64: {
      const auto value = *reinterpret_cast<const std::uint64_t*>(source);
      return atomically<std::uint64_t>(target, [&](std::uint64_t old) { return old + value; });
    }
    case TensorType::f32: {
      const auto value = bits_as<float>(*reinterpret_cast<const std::uint32_t*>(source));
      return atomically<std::uint32_t>(target,
                                       [&](std::uint32_t old) { return bits_as<std::uint32_t>(bits_as<float>(old) + value); });
    }
    case TensorType::f16: {
      const float value = Fp16::to_float(*reinterpret_cast<const std::uint16_t*>(source));
      return atomically<std::uint16_t>(
          target, [&](std::uint16_t old) { return static_cast<std::uint16_t>(Fp16::from(Fp16::to_float(old) + value)); });
    }
    case TensorType::bf16: {
      const float value = Bf16::to_float(*reinterpret_cast<const std::uint16_t*>(source));
      return atomically<std::uint16_t>(
          target, [&](std::uint16_t old) { return static_cast<std::uint16_t>(Bf16::from(Bf16::to_float(old) + value)); });
    }
    default: return;   // rejected at issue
  }
}

// Reads the packed box, or the plain bytes, from shared memory.
std::vector<unsigned char> read_shared(const Transfer& transfer) {
  std::vector<unsigned char> data(transfer.bytes);
  if (transfer.kind == Transfer::Kind::bytes) {
    std::memcpy(data.data(), transfer.shared, transfer.bytes);
  } else {
    for (std::uint32_t i = 0; i < transfer.bytes; i += BULK_ALIGNMENT)
      std::memcpy(data.data() + i, piece_at(transfer, i), BULK_ALIGNMENT);
  }
  return data;
}

// Writes the copy to shared memory and records the write in the barrier's clock.
void land(const Transfer& transfer, Clock* into) {
  switch (transfer.kind) {
    case Transfer::Kind::tensor: land_tensor_load(transfer); break;
    case Transfer::Kind::bytes: std::memcpy(transfer.shared, transfer.global, transfer.bytes); break;
    case Transfer::Kind::value: std::memcpy(transfer.shared, transfer.data.data(), transfer.bytes); break;
  }
  async_write_end(transfer.shared, transfer.bytes, transfer.place, into, transfer.proxy);
}

// Ends a store's read of shared memory. The issuing thread is the current one.
void end_read(Transfer& transfer) {
  if (transfer.awaited) return;
  async_read_end(transfer.shared, transfer.bytes, transfer.place, "a bulk store");
  if (transfer.data.empty()) transfer.data = read_shared(transfer);
  transfer.awaited = true;
}

// Ends a store's read, then writes global memory.
void land_store(Transfer& transfer) {
  end_read(transfer);
  const std::vector<unsigned char>& data = transfer.data;
  if (transfer.kind == Transfer::Kind::bytes) {
    check_access(transfer.global, transfer.bytes, Act::async_write, Kind::bulk, transfer.place);
    std::memcpy(transfer.global, data.data(), transfer.bytes);
    return;
  }
  const unsigned element = bytes_of(transfer.map.type);
  for_each_row(
      transfer.map, transfer.coordinates, [&](std::uint32_t offset, unsigned char* target, unsigned before, unsigned inside) {
        if (!inside) return;
        const unsigned char* row = data.data() + offset + before * element;
        check_access(target, inside * element, transfer.reduce ? Act::atomic : Act::async_write, Kind::bulk, transfer.place);
        if (!transfer.reduce) {
          std::memcpy(target, row, inside * element);
        } else {
          for (unsigned i = 0; i < inside; ++i) add_element(transfer.map.type, target + i * element, row + i * element);
        }
      });
}

// --- a bulk copy is issued ---------------------------------------------------------------------------------------------------

Transfer make_transfer(Transfer::Kind kind, const void* shared, const void* global, std::uint32_t bytes, Place place) {
  Transfer transfer{};
  transfer.kind = kind;
  transfer.proxy = Proxy::async;
  transfer.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  transfer.global = static_cast<unsigned char*>(const_cast<void*>(global));
  transfer.bytes = bytes;
  transfer.place = place;
  transfer.thread = current().id;
  transfer.rank = the_block->rank;
  return transfer;
}

Transfer make_tensor_transfer(const TensorMap* map, const void* shared, const int* coordinates, Place place) {
  Transfer transfer = make_transfer(Transfer::Kind::tensor, shared, nullptr, box_bytes(*map), place);
  transfer.map = *map;
  std::copy(coordinates, coordinates + map->rank, transfer.coordinates);
  return transfer;
}

// Issues a copy to `transfer.shared` in shared memory, counted by `barrier`. Both are in the same block of the cluster.
void begin_load(Transfer transfer, void* barrier, Place place, const char* name) {
  MbarrierState& it = barrier_at(barrier, place, name);
  note(it, place);
  async_write_begin(transfer.shared, transfer.bytes, place, transfer.proxy);
  it.landings.push_back(std::move(transfer));
}

// Issues a copy to this block, or to every block in the mask.
void begin_loads(const Transfer& transfer, void* barrier, unsigned cta_mask, Place place, const char* name) {
  if (!the_block->owns_shared(transfer.shared))
    misuse(place, "%s: wanted shared memory of this block, got that of another block", name);
  if (cta_mask == 0) return begin_load(transfer, barrier, place, name);
  const unsigned mask = cta_mask & 0xffff, size = cluster_size();
  if (mask == 0 || mask >> size)
    misuse(place, "%s: wanted a mask of blocks of the cluster, which has %u, got %#x", name, size, mask);
  for (unsigned rank = 0; rank < size; ++rank) {
    if (!(mask >> rank & 1)) continue;
    if (the_block->team->blocks[rank]->live == 0)
      misuse(place, "%s: wanted running blocks, got block %u of the cluster, which has returned", name, rank);
    Transfer one = transfer;
    one.shared = static_cast<unsigned char*>(shared_of_rank(transfer.shared, rank));
    begin_load(std::move(one), shared_of_rank(barrier, rank), place, name);
  }
}

void begin_store(Transfer transfer, const char* name) {
  async_read_begin(transfer.shared, transfer.bytes, transfer.place, name);
  if (choose(2)) transfer.data = read_shared(transfer);   // reads the source now, otherwise at the wait
  my_copies().open_stores.push_back(std::move(transfer));
}

void want_bulk_bytes(std::uint32_t bytes, Place place, const char* name) {
  if (bytes == 0 || bytes % BULK_ALIGNMENT)
    misuse(place, "%s: wanted a multiple of %u bytes, got %u", name, BULK_ALIGNMENT, bytes);
}

}   // namespace

namespace {

// Rejects what raises an illegal-instruction error on an H200. A box must start at a multiple of 16 bytes in its contiguous dimension.
// A box that is loaded may start before the tensor; one that is stored may not. (Either may lie past the tensor's end.)
void check_start(const TensorMap& map, const int* coordinates, bool writes, Place place, const char* name) {
  const std::int64_t start_bytes = std::int64_t{coordinates[0]} * bytes_of(map.type);
  if (start_bytes % BULK_ALIGNMENT) {
    misuse(place, "%s: wanted a first coordinate at a multiple of %u bytes, got %d, which is byte %lld", name,
           static_cast<unsigned>(BULK_ALIGNMENT), coordinates[0], static_cast<long long>(start_bytes));
  }
  for (unsigned d = 0; writes && d < map.rank; ++d) {
    if (coordinates[d] < 0) misuse(place, "%s: wanted coordinates from 0 on, got %d in dimension %u", name, coordinates[d], d);
  }
}

}   // namespace

void tensor_load(void* target_smem, const TensorMap* map, void* barrier, unsigned rank, const int* coordinates,
                 unsigned cta_mask) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.async.bulk.tensor load";
  check_map(map, rank, place, name);
  want_shared(target_smem, box_bytes(*map), TENSOR_SMEM_ALIGNMENT, place, name);
  check_start(*map, coordinates, false, place, name);
  const Transfer transfer = make_tensor_transfer(map, target_smem, coordinates, place);
  if (detecting()) {
    for_each_row(*map, coordinates, [&](std::uint32_t, const unsigned char* source, unsigned, unsigned inside) {
      if (inside) check_access(source, inside * bytes_of(map->type), Act::async_read, Kind::bulk, place);
    });
  }
  begin_loads(transfer, barrier, cta_mask, place, name);
}

void tensor_store(const TensorMap* map, const void* source_smem, unsigned rank, const int* coordinates) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.async.bulk.tensor store";
  check_map(map, rank, place, name);
  want_shared(source_smem, box_bytes(*map), TENSOR_SMEM_ALIGNMENT, place, name);
  check_start(*map, coordinates, true, place, name);
  begin_store(make_tensor_transfer(map, source_smem, coordinates, place), name);
}

void tensor_reduce_add(const TensorMap* map, const void* source_smem, unsigned rank, const int* coordinates) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.reduce.async.bulk.tensor.add";
  check_map(map, rank, place, name);
  if (map->type == TensorType::u8 || map->type == TensorType::u16 || map->type == TensorType::f64) {
    misuse(place, "%s: wanted elements of u32, i32, u64, i64, f16, bf16 or f32, got CUtensorMapDataType %u", name,
           static_cast<unsigned>(map->type));
  }
  want_shared(source_smem, box_bytes(*map), TENSOR_SMEM_ALIGNMENT, place, name);
  check_start(*map, coordinates, true, place, name);
  Transfer transfer = make_tensor_transfer(map, source_smem, coordinates, place);
  transfer.reduce = true;
  begin_store(std::move(transfer), name);
}

void tensor_prefetch(const TensorMap* map, unsigned rank, const int*) {
  check_map(map, rank, EMULATION_HERE(), "cp.async.bulk.prefetch.tensor");
}
void tensor_map_prefetch(const TensorMap* map) { check_map(map, 0, EMULATION_HERE(), "prefetch.tensormap"); }

void bulk_load(void* target_smem, const void* source, std::uint32_t bytes, void* barrier, unsigned cta_mask) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.async.bulk load";
  want_bulk_bytes(bytes, place, name);
  want_shared(target_smem, bytes, BULK_ALIGNMENT, place, name);
  want_global(source, BULK_ALIGNMENT, place, name);
  check_access(source, bytes, Act::async_read, Kind::bulk, place);
  begin_loads(make_transfer(Transfer::Kind::bytes, target_smem, source, bytes, place), barrier, cta_mask, place, name);
}

void bulk_store(void* target, const void* source_smem, std::uint32_t bytes) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.async.bulk store";
  want_bulk_bytes(bytes, place, name);
  want_shared(source_smem, bytes, BULK_ALIGNMENT, place, name);
  want_global(target, BULK_ALIGNMENT, place, name);
  begin_store(make_transfer(Transfer::Kind::bytes, source_smem, target, bytes, place), name);
}

void bulk_to_block(void* target_of_rank, const void* source_smem, std::uint32_t bytes, void* barrier_of_rank) {
  const Place place = EMULATION_HERE();
  const char* name = "cp.async.bulk to another block";
  want_bulk_bytes(bytes, place, name);
  want_shared(source_smem, bytes, BULK_ALIGNMENT, place, name);
  want_shared(target_of_rank, bytes, BULK_ALIGNMENT, place, name);
  if (owner_of(target_of_rank) != owner_of(barrier_of_rank))
    misuse(place, "%s: wanted the mbarrier in the shared memory of the block that holds the target, got one elsewhere", name);
  Transfer transfer = make_transfer(Transfer::Kind::value, target_of_rank, nullptr, bytes, place);
  async_read_begin(source_smem, bytes, place, name);
  // The waiting threads are in another block, and nothing signals this block that the source has been read. So it is read at issue.
  transfer.data.assign(static_cast<const unsigned char*>(source_smem), static_cast<const unsigned char*>(source_smem) + bytes);
  async_read_end(source_smem, bytes, place, name);
  begin_load(std::move(transfer), barrier_of_rank, place, name);
}

void bulk_prefetch(const void* source, std::uint32_t bytes) {
  const Place place = EMULATION_HERE();
  want_bulk_bytes(bytes, place, "cp.async.bulk.prefetch");
  want_global(source, BULK_ALIGNMENT, place, "cp.async.bulk.prefetch");
  note_prefetch(source, bytes, place);
}

void store_async(void* target_of_rank, const void* value, unsigned bytes, void* barrier_of_rank) {
  const Place place = EMULATION_HERE();
  const char* name = "st.async";
  want_shared(target_of_rank, bytes, bytes, place, name);
  if (owner_of(target_of_rank) != owner_of(barrier_of_rank))
    misuse(place, "%s: wanted the mbarrier in the shared memory of the block that holds the target, got one elsewhere", name);
  Transfer transfer = make_transfer(Transfer::Kind::value, target_of_rank, nullptr, bytes, place);
  transfer.proxy = Proxy::generic;
  transfer.data.assign(static_cast<const unsigned char*>(value), static_cast<const unsigned char*>(value) + bytes);
  begin_load(std::move(transfer), barrier_of_rank, place, name);
}

void bulk_commit() {
  ThreadAsync& mine = my_copies();
  mine.store_groups.emplace_back(std::move(mine.open_stores));
  mine.open_stores.clear();
}

// With `read_only`, waits only until shared memory has been read. Global memory is written as late as possible.
void bulk_wait(int pending, bool read_only) {
  auto& groups = my_copies().store_groups;
  const std::size_t kept = std::min(groups.size(), static_cast<std::size_t>(pending));
  const auto end = groups.end() - static_cast<std::ptrdiff_t>(kept);
  for (auto group = groups.begin(); group != end; ++group) std::for_each(group->begin(), group->end(), end_read);
  if (read_only) return;
  while (groups.size() > kept) {
    std::vector<Transfer> group = std::move(groups.front());
    groups.pop_front();
    std::for_each(group.begin(), group.end(), land_store);
  }
}

// --- the rest ---------------------------------------------------------------------------------------------------------------

void set_max_registers(int registers, bool more) {
  const Place place = EMULATION_HERE();
  const char* name = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
  warp_collective(FULL_WARP, nullptr, nullptr, name);
  auto& of_warp = state_of(*the_block).max_registers;
  const int warp = current().id / WARP;
  if (lane_id() == 0) of_warp[static_cast<std::size_t>(warp)].push_back(registers);
  // On hardware, a warpgroup that requests more registers waits until others have released theirs. The pool is what the launch gave
  // the block: for a kernel compiled with __launch_bounds__(threads, 1), the most that this many threads can get from the register file.
  // No thread can use the rest of the file. The schedule decides which request is the last, so each is checked; a warp without a
  // request so far counts with the minimum, which it will keep at least.
  const int threads = the_block->num_threads;
  const int at_launch = std::min(MOST_REGISTERS, REGISTER_FILE / threads / REGISTER_UNIT * REGISTER_UNIT);
  const int pool = at_launch * threads;
  int total = 0;
  for (const auto& asked : of_warp) total += WARP * (asked.empty() ? FEWEST_REGISTERS : asked.back());
  if (total > pool) {
    misuse(place,
           "%s %d: wanted at most the %d registers of the block's %d threads, %d each at launch (__launch_bounds__(%d, 1)), got "
           "%d: a warpgroup would deadlock",
           name, registers, pool, threads, at_launch, threads, total);
  }
}

bool elect(unsigned mask) {
  ballot(mask, 1, "elect.sync");
  return lane_id() == __builtin_ctz(mask);
}

// --- a block ends -----------------------------------------------------------------------------------------------------------

namespace {

void check_nothing_left(AsyncState& state) {
  for (const auto& barrier : state.barriers) {
    if (*barrier->word != barrier->pack()) continue;   // its memory has been reused
    if (!barrier->landings.empty()) {
      const Transfer& transfer = barrier->landings.front();
      misuse_of(transfer.rank == the_block->rank ? transfer.thread : 0, transfer.place,
                "the block ends while a copy of " + std::to_string(transfer.bytes) +
                    " bytes into its shared memory is in flight: no thread has waited for it");
    }
    if (barrier->tx != 0) {
      misuse_of(0, barrier->place,
                "the block ends while the mbarrier at shared offset " + std::to_string(shared_offset(barrier->word)) +
                    " still expects " + std::to_string(barrier->tx) + " bytes in phase " + std::to_string(barrier->phase));
    }
  }
  for (std::size_t id = 0; id < state.threads.size(); ++id) {
    const ThreadAsync& thread = state.threads[id];
    // A cp.async that no thread waited for is not misuse: hardware completes it before it reallocates the memory.
    if (!thread.open_stores.empty()) {
      misuse_of(static_cast<int>(id), thread.open_stores.front().place,
                "the block ends with a bulk store that was not committed: wanted cp_async_bulk_commit_group, then "
                "cp_async_bulk_wait_group_read");
    }
    for (const auto& group : thread.store_groups) {
      const auto left = std::find_if(group.begin(), group.end(), [](const Transfer& one) { return !one.awaited; });
      if (left != group.end())
        misuse_of(
            static_cast<int>(id), left->place,
            "the block ends while a bulk store may still read its shared memory: wanted cp_async_bulk_wait_group_read before");
    }
  }
  const auto& registers = state.max_registers;
  constexpr std::size_t WARPGROUP = 4;
  for (std::size_t warp = 0; warp < registers.size(); ++warp) {
    const std::size_t first = warp / WARPGROUP * WARPGROUP;
    if (registers[warp] != registers[first]) {
      misuse_of(static_cast<int>(warp) * WARP, nullptr,
                "setmaxnreg: wanted the same sequence in all four warps of a warpgroup, warps " + std::to_string(first) +
                    " and " + std::to_string(warp) + " differ (" + std::to_string(registers[first].size()) + " and " +
                    std::to_string(registers[warp].size()) + " instructions)");
    }
  }
  if (state.wgmma) wgmma_block_end(*state.wgmma);
}

}   // namespace

void async_block_end() {
  if (!the_block->async) return;
  const std::unique_ptr<AsyncState> state(the_block->async);
  struct Forget {
    ~Forget() { the_block->async = nullptr; }
  } forget;
  check_nothing_left(*state);
  for (std::size_t id = 0; id < state->threads.size(); ++id) {
    the_block->current = &the_block->threads[id];   // the caller resets it
    for (auto& group : state->threads[id].store_groups) std::for_each(group.begin(), group.end(), land_store);
  }
}

}   // namespace emu
