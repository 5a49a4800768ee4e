// Threads, warps, blocks and clusters: scheduling, waiting and barriers.
#include "block.h"

#include <dlfcn.h>
#include <sys/mman.h>
#ifdef __linux__
#include <link.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "../async.h"

// The dynamic shared memory of the block that this operating-system thread runs: what `extern __shared__` names.
alignas(1024) thread_local unsigned char shared_bytes[emu::DYNAMIC_BYTES];

namespace emu {

thread_local Block* the_block = nullptr;

namespace {

constexpr unsigned char POISON = 0xff;            // NaN in every floating-point type
constexpr unsigned GREED = 4;                     // under a seeded schedule a warp continues with probability 1 - 1 / GREED

Block& block() { return *the_block; }
Thread& thread() { return *the_block->current; }

void leave() { switch_fiber(thread().fiber, block().scheduler); }

void thread_main() {
  Block& b = block();
  try {
    the_kernel.call(const_cast<void* const*>(b.launch->arguments.data()));
  } catch (const Failure&) {
  }
  Thread& t = *b.current;
  t.state = Thread::State::done;
  b.thread_returned(t);
  leave();
  std::abort();   // a thread that returned is not resumed
}

#ifdef __linux__
// The thread-local storage of this program for the calling operating-system thread.
int find_tls(dl_phdr_info* info, std::size_t, void* out) {
  auto& found = *static_cast<std::pair<unsigned char*, std::size_t>*>(out);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type == PT_TLS) found = {static_cast<unsigned char*>(info->dlpi_tls_data), info->dlpi_phdr[i].p_memsz};
  }
  return 1;   // the first object is the program itself
}
#endif

}  // namespace

// --- where the calling thread is --------------------------------------------------------------------------------------------

uint3 thread_index() { return thread().index; }
uint3 block_index() { return block().index; }
dim3 block_dim() { return block().launch->block; }
dim3 grid_dim() { return block().launch->grid; }
int thread_id() { return thread().id; }
int lane_id() { return thread().id % WARP; }
unsigned cluster_rank() { return block().rank; }
unsigned cluster_size() { return block().team->size; }

std::uint64_t nanoseconds() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

void print(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vfprintf(stdout, format, values);
  va_end(values);
}

// --- trouble ----------------------------------------------------------------------------------------------------------------

void fail_at(Place place, const char* status, const std::string& message) {
  Block& b = block();
  const std::lock_guard lock(b.team->mutex);
  if (!b.team->failed) {
    b.team->failed = true;
    Trouble& trouble = b.team->trouble;
    trouble.status = status;
    trouble.message = message;
    trouble.place = offset_in_image(place);
    trouble.somewhere = true;
    trouble.block[0] = b.index.x, trouble.block[1] = b.index.y, trouble.block[2] = b.index.z;
    if (b.current) trouble.thread[0] = b.current->index.x, trouble.thread[1] = b.current->index.y, trouble.thread[2] = b.current->index.z;
  }
  throw Failure{};
}

void fail(const char* format, ...) {
  char text[1024];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  // The direct caller may be a function of the runtime. kernel_place walks up the stack to the kernel's own code.
  fail_at(kernel_place(EMULATION_HERE()), "misuse", text);
}

// --- waiting ----------------------------------------------------------------------------------------------------------------

void progress() { block().moved = true; }

void wait_at(Place place, bool (*ready)(void*), void* state, const char* what) {
  Block& b = block();
  Thread& t = thread();
  t.place = place;
  t.waits_in = nullptr;
  std::snprintf(t.what, sizeof t.what, "%s", what);
  if (ready(state)) return;
  t.ready = ready;
  t.ready_state = state;
  t.state = Thread::State::waiting;
  leave();
  if (b.team->failed) throw Failure{};
}

void wait_until(bool (*ready)(void*), void* state, const char* what) {
  wait_at(kernel_place(EMULATION_HERE()), ready, state, what);
}

void yield() {
  Thread& t = thread();
  t.place = kernel_place(EMULATION_HERE());
  t.waits_in = nullptr;
  std::snprintf(t.what, sizeof t.what, "a polling loop");
  t.held_until = block().round + 1;
  leave();
  if (block().team->failed) throw Failure{};
}

void hold_back() {
  block().moved = true;
  thread().held_until = block().round + 2;
  leave();
  if (block().team->failed) throw Failure{};
}

unsigned choose(unsigned n) { return block().draw(n); }

unsigned Block::draw(unsigned n) {
  if (launch->schedule == Schedule::ascending) return 0;
  if (launch->schedule == Schedule::descending) return n - 1;
  random ^= random << 13, random ^= random >> 7, random ^= random << 17;   // xorshift64 (Marsaglia)
  return static_cast<unsigned>(random % n);
}

// --- a warp's collectives ---------------------------------------------------------------------------------------------------

namespace {

void meet(unsigned mask, void* mine, void (*body)(void* const (&)[WARP]), const char* name, Place place, bool orders) {
  Block& b = block();
  Thread& t = thread();
  const int lane = t.id % WARP;
  const int warp = t.id / WARP;
  const int lanes = std::min(WARP, b.num_threads - warp * WARP);
  if (lanes < WARP) mask &= (1u << lanes) - 1;
  if (!(mask >> lane & 1)) {
    char text[160];
    std::snprintf(text, sizeof text, "%s: wanted a mask with the calling lane, %d, in it, got %#x", name, lane, mask);
    fail_at(place, "misuse", text);
  }
  auto& all = b.rendezvous[static_cast<std::size_t>(warp)];
  Rendezvous* r = nullptr;
  for (Rendezvous& one : all) {
    if (one.mask == mask) r = &one;
  }
  if (!r) {
    if (all.size() == all.capacity()) fail_at(place, "misuse", std::string(name) + ": wanted at most 64 different masks in one warp, got one more");
    r = &all.emplace_back();
    r->mask = mask;
  }
  if (r->arrived && std::strcmp(r->name, name) != 0) {
    fail_at(place, "misuse", std::string(name) + ": wanted the lanes of a mask in one collective, got some in " + r->name);
  }
  r->name = name;
  r->slot[lane] = mine;
  r->arrived |= 1u << lane;
  b.moved = true;
  if (r->arrived != mask) {
    struct State {
      Rendezvous* r;
      std::uint64_t generation;
    } state{r, r->generation};
    t.place = place;
    t.waits_in = name;
    t.waits_mask = mask;
    t.ready = [](void* p) { return static_cast<State*>(p)->r->generation != static_cast<State*>(p)->generation; };
    t.ready_state = &state;
    t.state = Thread::State::waiting;
    leave();
    if (b.team->failed) throw Failure{};
    return;
  }
  r->arrived = 0;
  void* given[WARP];
  std::memcpy(given, r->slot, sizeof given);
  std::memset(r->slot, 0, sizeof r->slot);
  if (body) body(given);
  ++r->generation;
  if (b.detect) {
    if (orders) {
      Clock clock;
      for (int i = 0; i < lanes; ++i) {
        if (mask >> i & 1) release_thread(b, b.threads[static_cast<std::size_t>(warp * WARP + i)], clock);
      }
      for (int i = 0; i < lanes; ++i) {
        if (mask >> i & 1) acquire_thread(b, b.threads[static_cast<std::size_t>(warp * WARP + i)], clock);
      }
    }
    if (lanes == WARP ? mask == FULL_WARP : mask == (1u << lanes) - 1) b.counters.flush(warp);
  }
}

}  // namespace

void warp_collective(unsigned mask, void* mine, void (*body)(void* const (&)[WARP]), const char* name) {
  const Place place = kernel_place(EMULATION_HERE());
  const int lanes = block().num_threads - thread().id / WARP * WARP;
  if (body && lanes < WARP) {   // the body reads the arguments of all lanes
    char text[160];
    std::snprintf(text, sizeof text, "%s: wanted a whole warp, %d threads, got one of %d at the end of a block of %d", name, WARP,
                  lanes, block().num_threads);
    fail_at(place, "misuse", text);
  }
  meet(mask, mine, body, name, place, false);
}

void warp_sync(unsigned mask) { meet(mask, nullptr, nullptr, "__syncwarp", kernel_place(EMULATION_HERE()), true); }

std::uint64_t shuffle_bits(unsigned mask, std::uint64_t value, int source_lane, const char* name) {
  struct Mine {
    std::uint64_t value, got;
    int source;
    bool found;
  } mine{value, value, source_lane & (WARP - 1), true};
  const Place place = kernel_place(EMULATION_HERE());
  meet(mask, &mine, [](void* const (&of_lane)[WARP]) {
    for (void* one : of_lane) {
      if (!one) continue;
      auto* taker = static_cast<Mine*>(one);
      auto* giver = static_cast<Mine*>(of_lane[taker->source]);
      taker->found = giver;
      if (giver) taker->got = giver->value;
    }
  }, name, place, false);
  if (!mine.found) {
    char text[160];
    std::snprintf(text, sizeof text, "%s: wanted a lane in the mask, %#x, to take a value from, got lane %d", name, mask, mine.source);
    fail_at(place, "misuse", text);
  }
  return mine.got;
}

unsigned ballot(unsigned mask, int predicate, const char* name) {
  struct Mine {
    bool yes;
    unsigned votes;
  } mine{predicate != 0, 0};
  meet(mask, &mine, [](void* const (&of_lane)[WARP]) {
    unsigned votes = 0;
    for (int i = 0; i < WARP; ++i) {
      if (of_lane[i] && static_cast<Mine*>(of_lane[i])->yes) votes |= 1u << i;
    }
    for (void* one : of_lane) {
      if (one) static_cast<Mine*>(one)->votes = votes;
    }
  }, name, kernel_place(EMULATION_HERE()), false);
  return mine.votes;
}

// --- a block's barriers -----------------------------------------------------------------------------------------------------

void Block::complete(Barrier& barrier) {
  const bool full = barrier.expected == ALL_THREADS || barrier.expected == live;
  barrier.reduction = {barrier.predicates, barrier.predicates == barrier.arrived, barrier.predicates > 0};
  if (detect) {
    if (full) join(barrier.clock, exited);
    for (const int id : barrier.waiters) acquire_thread(*this, threads[static_cast<std::size_t>(id)], barrier.clock);
    if (full) {
      ++full_barriers;
      for (int warp = 0; warp * WARP < num_threads; ++warp) counters.flush(warp);
    }
  }
  barrier.waiters.clear();
  barrier.clock = {};
  barrier.arrived = barrier.expected = barrier.predicates = 0;
  barrier.first_place = nullptr;
  ++barrier.generation;
  moved = true;
}

namespace {

void arrive(int id, int count, const char* name, bool waits, int predicate, Place place) {
  Block& b = block();
  Thread& t = thread();
  char text[200];
  if (id < 0 || id >= NUM_BARRIERS) {
    std::snprintf(text, sizeof text, "%s: wanted a barrier from 0 to %d, got %d", name, NUM_BARRIERS - 1, id);
    fail_at(place, "misuse", text);
  }
  if (count != ALL_THREADS && (count <= 0 || count % WARP || count > b.num_threads)) {
    std::snprintf(text, sizeof text, "%s: wanted a multiple of %d threads, up to the block's %d, got %d", name, WARP, b.num_threads, count);
    fail_at(place, "misuse", text);
  }
  Barrier& barrier = b.barriers[id];
  // Also if the numbers agree: an H200 raises an illegal-instruction error when __syncthreads meets bar.sync 0 with a number.
  if (barrier.arrived && barrier.expected != count) {
    const auto number_of = [](int threads) { return threads == ALL_THREADS ? std::string("no number") : std::to_string(threads); };
    fail_at(place, "misuse",
            std::string(name) + ", barrier " + std::to_string(id) + ": wanted one number of threads for a barrier, got " + number_of(count) +
                " here and " + number_of(barrier.expected) + " from those already there");
  }
  barrier.expected = count;
  if (b.detect && count == ALL_THREADS) {
    if (!barrier.first_place) {
      barrier.first_place = place;
      barrier.first_thread = t.id;
    } else if (barrier.first_place != place) {
      b.findings.add({"divergent barrier", "shared", "", 0, 0, 1, {b.index.x, b.index.y, b.index.z},
                      {barrier.first_thread, static_cast<int>(b.rank), Act::read, offset_in_image(barrier.first_place)},
                      {t.id, static_cast<int>(b.rank), Act::read, offset_in_image(place)}});
    }
  }
  if (b.detect) release_thread(b, t, barrier.clock);
  if (waits) barrier.waiters.push_back(t.id);
  barrier.predicates += predicate != 0;
  ++barrier.arrived;
  b.moved = true;
  const std::uint64_t generation = barrier.generation;
  if (barrier.arrived == (count == ALL_THREADS ? b.live : count)) b.complete(barrier);
  if (!waits || barrier.generation != generation) return;
  struct State {
    Barrier* barrier;
    std::uint64_t generation;
  } state{&barrier, generation};
  t.place = place;
  t.waits_in = name;
  t.waits_mask = 0;
  t.waits_id = id;
  t.waits_count = count;
  t.ready = [](void* p) { return static_cast<State*>(p)->barrier->generation != static_cast<State*>(p)->generation; };
  t.ready_state = &state;
  t.state = Thread::State::waiting;
  leave();
  if (b.team->failed) throw Failure{};
}

}  // namespace

void barrier_sync(int id, int count, const char* name) { arrive(id, count, name, true, 0, kernel_place(EMULATION_HERE())); }
void barrier_arrive(int id, int count, const char* name) { arrive(id, count, name, false, 0, kernel_place(EMULATION_HERE())); }
Reduction barrier_reduce(int predicate) {
  arrive(0, ALL_THREADS, "__syncthreads", true, predicate, kernel_place(EMULATION_HERE()));
  return block().barriers[0].reduction;
}

void Block::thread_returned(Thread& t) {
  --live;
  moved = true;
  if (detect) release_thread(*this, t, exited);
  if (detect && live == 0) detect_returned(*this);
  for (Barrier& barrier : barriers) {
    if (barrier.arrived && barrier.expected == ALL_THREADS && barrier.arrived == live) complete(barrier);
  }
  // A thread that has arrived at the cluster barrier in the current phase counts in `arrived` and `alive` until the phase completes.
  if (t.cluster_arrived && t.cluster_generation == team->barrier_generation) {
    ++team->left;
  } else {
    --team->alive;
  }
  team->complete_if_all_arrived();
}

// --- a cluster's barrier: only one block of the cluster runs at a time, so its state needs no lock --------------------------

void Team::complete_if_all_arrived() {
  if (arrived == 0 || arrived != alive) return;
  for (const Block* block : blocks) join(barrier_clock, block->exited);
  alive -= left;
  arrived = left = 0;
  ++barrier_generation;
  last_clock = barrier_clock;
  barrier_clock = {};
}

void cluster_arrive(bool release) {
  Block& b = block();
  Team& team = *b.team;
  if (thread().cluster_arrived) {
    fail_at(kernel_place(EMULATION_HERE()), "misuse", "barrier.cluster.arrive: wanted barrier.cluster.wait after the previous arrive, got none");
  }
  if (b.detect && release) release_thread(b, thread(), team.barrier_clock);
  b.moved = true;
  // The thread will wait for the generation in which it arrived. It arrives once before each wait.
  thread().cluster_generation = team.barrier_generation;
  thread().cluster_arrived = true;
  ++team.arrived;
  team.complete_if_all_arrived();
}

void cluster_wait() {
  Thread& t = thread();
  if (!t.cluster_arrived) fail_at(kernel_place(EMULATION_HERE()), "misuse", "barrier.cluster.wait: wanted barrier.cluster.arrive before it, got none");
  Team& team = *block().team;
  wait_until([&] { return team.barrier_generation != t.cluster_generation; }, "barrier.cluster.wait");
  t.cluster_arrived = false;
  if (block().detect) acquire_thread(block(), t, team.last_clock);
}

// --- shared memory ----------------------------------------------------------------------------------------------------------

bool Block::owns_shared(const void* pointer) const {
  const auto* p = static_cast<const unsigned char*>(pointer);
  return (p >= smem && p < smem + DYNAMIC_BYTES) || (p >= tls_low && p < tls_low + tls_bytes);
}

unsigned Block::offset_of(const void* pointer) const {
  const auto* p = static_cast<const unsigned char*>(pointer);
  if (p >= smem && p < smem + DYNAMIC_BYTES) return static_cast<unsigned>(p - smem);
  // Static shared memory keeps its address modulo 1024, so that a swizzle of the offset matches one of the pointer.
  const auto low = reinterpret_cast<std::uintptr_t>(tls_low) & ~std::uintptr_t{1023};
  return static_cast<unsigned>(DYNAMIC_BYTES + (reinterpret_cast<std::uintptr_t>(p) - low));
}

namespace {

Block* owner_of(const void* pointer) {
  if (block().owns_shared(pointer)) return &block();
  for (Block* other : block().team->blocks) {
    if (other->owns_shared(pointer)) return other;
  }
  return nullptr;
}

}  // namespace

bool is_shared(const void* pointer) { return owner_of(pointer) != nullptr; }

unsigned shared_address(const void* pointer) {
  const Block* owner = owner_of(pointer);
  if (!owner) fail_at(kernel_place(EMULATION_HERE()), "misuse", "wanted an address in shared memory, got an address outside shared memory");
  const unsigned offset = owner->offset_of(pointer);
  return owner == the_block ? offset : offset | owner->rank << RANK_SHIFT | 1u << 31;
}

void* shared_pointer(unsigned address) {
  Block* owner = address >> 31 ? block().team->blocks.at(address >> RANK_SHIFT & 0x7f) : the_block;
  const unsigned offset = address & ((1u << RANK_SHIFT) - 1);
  if (offset < DYNAMIC_BYTES) return owner->smem + offset;
  const auto low = reinterpret_cast<std::uintptr_t>(owner->tls_low) & ~std::uintptr_t{1023};
  auto* p = reinterpret_cast<unsigned char*>(low + offset - DYNAMIC_BYTES);
  if (!owner->owns_shared(p)) {
    char text[120];
    std::snprintf(text, sizeof text, "wanted an address in shared memory, got %#x", address);
    fail_at(kernel_place(EMULATION_HERE()), "misuse", text);
  }
  return p;
}

void* shared_of_rank(const void* mine, unsigned rank) {
  if (rank >= block().team->size) {
    char text[120];
    std::snprintf(text, sizeof text, "mapa: wanted a rank below the cluster's size, %u, got %u", block().team->size, rank);
    fail_at(kernel_place(EMULATION_HERE()), "misuse", text);
  }
  const Block* owner = owner_of(mine);
  if (!owner) fail_at(kernel_place(EMULATION_HERE()), "misuse", "mapa: wanted an address in shared memory, got an address outside shared memory");
  const Block* other = block().team->blocks[rank];
  const auto* p = static_cast<const unsigned char*>(mine);
  if (p >= owner->smem && p < owner->smem + DYNAMIC_BYTES) return other->smem + (p - owner->smem);
  return other->tls_low + (p - owner->tls_low);
}

unsigned shared_bytes_left(const void* pointer) {
  const Block* owner = owner_of(pointer);
  if (!owner) return 0;
  const auto* p = static_cast<const unsigned char*>(pointer);
  if (p >= owner->smem && p < owner->smem + DYNAMIC_BYTES) {
    const std::size_t offset = static_cast<std::size_t>(p - owner->smem);
    return offset < owner->launch->smem_bytes ? static_cast<unsigned>(owner->launch->smem_bytes - offset) : 0;
  }
  return static_cast<unsigned>(owner->tls_low + owner->tls_bytes - p);
}

AsyncState*& async_state() { return block().async; }

// --- a block's life ---------------------------------------------------------------------------------------------------------

Block::~Block() {
  if (stacks) munmap(stacks, STACK_BYTES * static_cast<std::size_t>(num_threads));
}

void Block::open(Team& its_team, const Launch& its_launch, unsigned its_rank) {
  team = &its_team;
  launch = &its_launch;
  rank = its_rank;
  the_block = this;
  detect = launch->detect;
  num_threads = static_cast<int>(launch->block.x * launch->block.y * launch->block.z);
  const std::size_t n = static_cast<std::size_t>(num_threads);
  threads.resize(n);
  void* mapped = mmap(nullptr, STACK_BYTES * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON
#ifdef MAP_NORESERVE
                      | MAP_NORESERVE
#endif
                      , -1, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("wanted memory for the stacks of a block's threads, got none");
  stacks = static_cast<unsigned char*>(mapped);
  // The lowest page of each stack is a guard page, so that an overflow ends in a report and does not corrupt the adjacent stack.
  for (std::size_t i = 0; i < n; ++i) mprotect(stacks + i * STACK_BYTES, 4096, PROT_NONE);
  smem = shared_bytes;
#ifdef __linux__
  std::pair<unsigned char*, std::size_t> tls{nullptr, 0};
  dl_iterate_phdr(find_tls, &tls);
  tls_low = tls.first;
  tls_bytes = tls.second;
#endif
  const std::size_t warps = (n + WARP - 1) / WARP;
  rendezvous.resize(warps);
  for (auto& one : rendezvous) one.reserve(64);   // so that pointers into it stay valid
  warp_order.resize(warps);
}

void Block::start(std::uint64_t its_linear, uint3 its_index) {
  linear = its_linear;
  index = its_index;
  live = num_threads;
  round = 0;
  random = (launch->seed + 1) * 0x9e3779b97f4a7c15ull + linear;   // any odd constant: adjacent seeds must differ
  std::memset(smem, POISON, std::min(launch->smem_bytes, DYNAMIC_BYTES));
  // All thread-local storage but dynamic shared memory and the runtime's own pointer is the kernel's static shared memory.
  for (unsigned char* p = tls_low; p && p < tls_low + tls_bytes; ++p) {
    if (p == smem) p += DYNAMIC_BYTES;
    if (p == reinterpret_cast<unsigned char*>(&the_block)) p += sizeof the_block;
    if (p < tls_low + tls_bytes) *p = POISON;
  }
  for (auto& one : rendezvous) one.clear();
  for (Barrier& barrier : barriers) barrier = {};
  clocks.clear();
  for (int i = 0; i < num_threads; ++i) {
    Thread& t = threads[static_cast<std::size_t>(i)];
    const dim3& size = launch->block;
    const unsigned u = static_cast<unsigned>(i);
    t.index = {u % size.x, u / size.x % size.y, u / (size.x * size.y)};
    t.id = i;
    t.state = Thread::State::runnable;
    t.held_until = 0;
    t.waited_for_grid = false;
    t.cluster_arrived = false;
    t.what[0] = 0;
    t.waits_in = nullptr;
    prepare(t.fiber, stacks + STACK_BYTES * static_cast<std::size_t>(i), STACK_BYTES, thread_main);
  }
  for (std::size_t i = 0; i < warp_order.size(); ++i) {
    warp_order[i] = static_cast<int>(launch->schedule == Schedule::descending ? warp_order.size() - 1 - i : i);
  }
  if (detect) detect_start(*this);
}

void Block::run_thread(Thread& t) {
  current = &t;
  t.state = Thread::State::runnable;
  switch_fiber(scheduler, t.fiber);
  current = nullptr;
}

// Runs each warp in turn until its threads wait, or until a seeded schedule preempts it. The farther a warp runs ahead of the others,
// the more likely it exposes a missing wait.
bool Block::run_round() {
  ++round;
  bool any = false;
  if (launch->schedule == Schedule::seeded) {
    for (std::size_t i = warp_order.size() - 1; i > 0; --i) std::swap(warp_order[i], warp_order[draw(static_cast<unsigned>(i + 1))]);
  }
  for (const int warp : warp_order) {
    const int low = warp * WARP, high = std::min(num_threads, low + WARP);
    bool backward = launch->schedule == Schedule::descending;
    if (launch->schedule == Schedule::seeded) backward = draw(2);
    do {
      moved = false;
      for (int i = 0; i < high - low; ++i) {
        Thread& t = threads[static_cast<std::size_t>(backward ? high - 1 - i : low + i)];
        if (t.state == Thread::State::done || t.held_until > round) continue;
        if (t.state == Thread::State::waiting) {
          current = &t;
          bool ready = false;
          try {
            ready = t.ready(t.ready_state);
          } catch (const Failure&) {
          }
          current = nullptr;
          if (team->failed) return false;
          if (!ready) continue;
          moved = true;
        } else if (t.held_until == 0) {
          moved = true;   // its first run
        }
        t.held_until = 0;
        run_thread(t);
        if (team->failed) return false;
      }
      any |= moved;
    } while (moved && (launch->schedule != Schedule::seeded || draw(GREED)));
  }
  polls = !any && std::any_of(threads.begin(), threads.end(), [&](const Thread& t) {
    return t.state == Thread::State::runnable && t.held_until > round;
  });
  return any;
}

void Block::finish() {
  current = &threads[0];
  try {
    async_block_end();
  } catch (const Failure&) {
  }
  current = nullptr;
  if (detect) {
    counters.end_block();
    detect_finish(*this);
  }
}

std::string what_of(const Block& b, const Thread& t) {
  if (t.state == Thread::State::done) return "returned";
  if (!t.waits_in) return t.what[0] ? t.what : "not started";
  if (t.state == Thread::State::runnable) return std::string("past ") + t.waits_in;   // when the kernel was stopped
  char text[160];
  if (t.waits_mask) {
    unsigned arrived = 0;
    for (const Rendezvous& r : b.rendezvous[static_cast<std::size_t>(t.id / WARP)]) {
      if (r.mask == t.waits_mask) arrived = r.arrived;
    }
    std::snprintf(text, sizeof text, "%s, lanes %#x of mask %#x there", t.waits_in, arrived, t.waits_mask);
  } else if (t.waits_count == ALL_THREADS) {
    std::snprintf(text, sizeof text, "%s, %d of %d threads there", t.waits_in, b.barriers[t.waits_id].arrived, b.live);
  } else {
    std::snprintf(text, sizeof text, "%s, barrier %d, %d of %d threads there", t.waits_in, t.waits_id, b.barriers[t.waits_id].arrived,
                  t.waits_count);
  }
  return text;
}

std::string who_waits(const Block& b) {
  std::vector<std::string> all;
  for (const Thread& t : b.threads) {
    if (t.state == Thread::State::done) continue;
    std::string what = what_of(b, t);
    if (std::find(all.begin(), all.end(), what) == all.end()) all.push_back(std::move(what));
  }
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "" : "; ") + one;
  return text;
}

}  // namespace emu
