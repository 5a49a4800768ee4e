// wgmma (PTX ISA 9.0, 9.7.15): MMAs whose results arrive when their warp waits for them.
//
// Each warp of a warpgroup computes its own 16 rows. Its lanes execute an instruction one after another: the first one creates the
// operation, the others must pass the same arguments, and the last one issues it. Until a wait_group that covers the operation, the
// accumulators in the lanes' arrays hold poison, and Accumulator::value holds their values.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>

#include "../narrow.h"
#include "async_state.h"

namespace emu {

namespace {

constexpr int WARPGROUP_WARPS = 4;
constexpr int ROWS = 16;         // of D, per warp
constexpr int K_BYTES = 32;      // of A and B along K, per instruction
constexpr int MAX_K = K_BYTES;   // elements of one byte
constexpr int MAX_N = 256;
constexpr unsigned PIECE = 16;      // bytes that swizzles and layouts keep contiguous
constexpr unsigned CORE_ROWS = 8;   // rows of a core matrix, each one piece wide
// A signalling NaN. Reading it gives NaN, and arithmetic on it gives a NaN with other bits, so that every write is detected.
constexpr std::uint32_t POISON = 0xffa5a5a5u;

std::uint32_t bits_of(float x) { return bits_as<std::uint32_t>(x); }

// --- operands in shared memory -----------------------------------------------------------------------------------------------

// 9.7.15.5.1.2.2 Matrix descriptor.
struct Operand {
  unsigned start, leading, stride, swizzle;   // swizzle: the number of address bits, 0 to 3
  bool mn_major;

  Operand(std::uint64_t descriptor, bool is_mn_major, Place place, char which) : mn_major(is_mn_major) {
    const auto field = [&](unsigned shift) { return static_cast<unsigned>(descriptor >> shift & 0x3fff) << 4; };
    start = field(0), leading = field(16), stride = field(32);
    constexpr unsigned BITS[] = {0, 3, 2, 1};
    swizzle = BITS[descriptor >> 62];
    constexpr std::uint64_t RESERVED = 0xc000ull | 0xc000ull << 16 | 0x1c000ull << 32 | 0x3ffull << 52;
    if (descriptor & RESERVED)
      misuse(place, "wgmma: wanted a matrix descriptor of %c, got %#llx, whose unused bits are set", which,
             static_cast<unsigned long long>(descriptor));
    if (descriptor >> 49 & 7)
      misuse(place, "wgmma: wanted a base offset of 0 in the descriptor of %c (others are not emulated), got %u", which,
             static_cast<unsigned>(descriptor >> 49 & 7));
  }

  // Shared address of a 16-byte piece. K-major: `line` is a row of A or a column of B, `piece` counts along K. MN-major: `line`
  // is k, `piece` counts along M or N.
  unsigned at(unsigned line, unsigned piece) const {
    const unsigned inner = line % CORE_ROWS, outer = line / CORE_ROWS;
    if (swizzle == 0) {
      return start + inner * PIECE + (mn_major ? outer * leading + piece * stride : outer * stride + piece * leading);
    }
    const unsigned span = PIECE << swizzle, per_span = 1u << swizzle;
    const unsigned address = start + inner * span + outer * stride +
                             (mn_major ? piece % per_span * PIECE + piece / per_span * leading : piece * PIECE);
    return static_cast<unsigned>(swizzled(address, swizzle));
  }
};

// Returns a pointer to shared address `low`, after checking that [low, high) is shared memory of this block.
const unsigned char* shared_range(unsigned low, unsigned high, Place place, char which) {
  const bool dynamic = low < DYNAMIC_BYTES;
  const std::size_t end = dynamic ? the_block->launch->smem_bytes : WINDOW_BYTES;
  if (high > end) {
    misuse(place, "wgmma: wanted %c inside of shared memory, got a descriptor that reaches over offsets %u to %u of %zu", which,
           low, high, end);
  }
  const void* pointer = shared_pointer(low);
  if (!dynamic && shared_bytes_left(pointer) < high - low)
    misuse(place, "wgmma: wanted %c inside of shared memory, got offsets %u to %u", which, low, high);
  return static_cast<const unsigned char*>(pointer);
}

struct Pieces {
  unsigned lines, count;   // `count` pieces on each line
};

// Calls each(line, piece, its 16 bytes).
template <typename F>
void for_each_piece(const Operand& operand, unsigned first_line, unsigned first_piece, Pieces pieces, Place place, char which,
                    F each) {
  unsigned low = ~0u, high = 0;
  for (unsigned line = 0; line < pieces.lines; ++line) {
    for (unsigned piece = 0; piece < pieces.count; ++piece) {
      const unsigned address = operand.at(first_line + line, first_piece + piece);
      low = std::min(low, address), high = std::max(high, address + PIECE);
    }
  }
  const unsigned char* base = shared_range(low, high, place, which);
  for (unsigned line = 0; line < pieces.lines; ++line) {
    for (unsigned piece = 0; piece < pieces.count; ++piece)
      each(line, piece, base + (operand.at(first_line + line, first_piece + piece) - low));
  }
}

// Converts a piece to float: 8 numbers of 16 bits, or 16 of 8 bits.
template <typename Format, typename Bits>
void widen(const unsigned char* piece, float* out) {
  Bits bits[PIECE / sizeof(Bits)];
  std::memcpy(bits, piece, PIECE);
  for (unsigned i = 0; i < PIECE / sizeof(Bits); ++i) out[i] = Format::to_float(bits[i]);
}

void widen(Input input, const unsigned char* piece, float* out) {
  switch (input) {
    case Input::f16: return widen<Fp16, std::uint16_t>(piece, out);
    case Input::bf16: return widen<Bf16, std::uint16_t>(piece, out);
    case Input::e4m3: return widen<E4m3, std::uint8_t>(piece, out);
    case Input::e5m2: return widen<E5m2, std::uint8_t>(piece, out);
  }
}

int element_bytes(Input input) { return input == Input::f16 || input == Input::bf16 ? 2 : 1; }

// --- the arithmetic ----------------------------------------------------------------------------------------------------------

// 4 floats: a vector register on every processor this runs on.
using Four = float __attribute__((vector_size(16), aligned(4)));
constexpr int FOUR = 4;

// value (16 × n) = a (16 × K) · b (K × n), plus the old value if `accumulate`. Products of these types are exact in FP32 (those of
// 16-bit floats have 22 bits). The sum over k is rounded after each addition and then added to the old value. Hardware adds in its
// own order and rounds to its own widths.
template <int K>
void multiply(float* value, const float* a, const float* b, int n, bool accumulate) {
  for (int row = 0; row < ROWS; ++row) {
    for (int column = 0; column < n; column += 2 * FOUR) {
      Four low{}, high{};
      for (int k = 0; k < K; ++k) {
        const float* from = b + k * n + column;
        Four first, second;
        std::memcpy(&first, from, sizeof first);
        std::memcpy(&second, from + FOUR, sizeof second);
        const float scale = a[row * K + k];
        low += scale * first;
        high += scale * second;
      }
      float* to = value + row * n + column;
      Four first{}, second{};
      if (accumulate) {
        std::memcpy(&first, to, sizeof first);
        std::memcpy(&second, to + FOUR, sizeof second);
      }
      first += low;
      second += high;
      std::memcpy(to, &first, sizeof first);
      std::memcpy(to + FOUR, &second, sizeof second);
    }
  }
}

// --- state -------------------------------------------------------------------------------------------------------------------

// Accumulators in flight: each lane's array, and the values that the arrays will receive.
struct Accumulator {
  float* d[WARP] = {};
  int n = 0;
  unsigned pending = 0;       // operations in flight
  std::vector<float> value;   // (16, n)
};

struct Operation {
  Wgmma what{};
  Place place = nullptr;
  std::uint64_t group = 0;
  std::uint32_t lanes = 0;   // that have executed it
  bool computed = false;
  Accumulator* accumulator = nullptr;
  float a[ROWS * MAX_K];   // A, if it is in registers
};

// Registers of a lane that a wgmma has used as D or A, and their contents at the last wgmma_fence, use or delivery.
struct Known {
  const void* registers;
  std::vector<std::uint32_t> held;
  bool in_flight = false;
  bool landed = false;   // delivered since the last fence
};

struct Lane {
  std::uint64_t issued = 0, groups = 0;   // numbers of operations and of commits
  bool fenced = false;                    // ever
  bool fenced_since_wait = false;
  std::vector<Known> known;

  Known* find(const void* registers) {
    for (Known& one : known) {
      if (one.registers == registers) return &one;
    }
    return nullptr;
  }
};

struct Warp {
  Lane lanes[WARP];
  std::deque<Operation> operations;   // in flight, oldest first
  std::uint64_t landed = 0;           // number of operations before these
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::uint32_t waiting = 0;   // lanes in wgmma_wait
  int waiting_for = 0;
  std::uint64_t waits = 0;
  Clock* clock = nullptr;   // of the completed reads
};

}   // namespace

struct WgmmaState {
  std::deque<Warp> warps;                           // a deque: its elements never move
  std::vector<std::vector<std::uint64_t>> issued;   // per warpgroup: a digest of each operation, by the first warp to issue it
  struct Count {
    std::uint64_t operations;
    Place place;   // of the last one
  };
  std::vector<Count> counts;   // per warp
};

void WgmmaDelete::operator()(WgmmaState* state) const { delete state; }

namespace {

WgmmaState& state() {
  AsyncState& all = state_of(*the_block);
  if (!all.wgmma) {
    all.wgmma.reset(new WgmmaState);
    const std::size_t warps = static_cast<std::size_t>((the_block->num_threads + WARP - 1) / WARP);
    all.wgmma->warps.resize(warps);
    all.wgmma->counts.resize(warps);
    all.wgmma->issued.resize((warps + WARPGROUP_WARPS - 1) / WARPGROUP_WARPS);
  }
  return *all.wgmma;
}

std::size_t my_warp() { return static_cast<std::size_t>(the_block->current->id / WARP); }

void want_warpgroup(Place place, const char* name) {
  const int threads = WARPGROUP_WARPS * WARP;
  if (the_block->current->id / threads * threads + threads > the_block->num_threads) {
    misuse(place, "%s: wanted a whole warpgroup, %d threads from a multiple of %d on, got a block of %d", name, threads,
           threads, the_block->num_threads);
  }
}

// Row and column of a lane's accumulator i in the warp's 16 × n tile.
int row_of(int lane, int i) { return lane / 4 + 8 * (i >> 1 & 1); }
int column_of(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + (i & 1); }

// Calls each(16 bytes) for every piece of A and B that the warp reads from shared memory, which is through the async proxy.
template <typename F>
void for_each_read(const Wgmma& what, int warp_in_group, Place place, F each) {
  const unsigned pieces_per_k = K_BYTES / PIECE, k = static_cast<unsigned>(K_BYTES / element_bytes(what.input));
  if (!what.registers_a) {
    const Operand a(what.desc_a, what.mn_major_a, place, 'A');
    const unsigned row = static_cast<unsigned>(warp_in_group * ROWS);
    const Pieces pieces = what.mn_major_a ? Pieces{k, ROWS / 8} : Pieces{ROWS, pieces_per_k};
    for_each_piece(a, what.mn_major_a ? 0 : row, what.mn_major_a ? row / 8 : 0, pieces, place, 'A',
                   [&](unsigned, unsigned, const unsigned char* bytes) { each(bytes); });
  }
  const Operand b(what.desc_b, what.mn_major_b, place, 'B');
  const Pieces pieces = what.mn_major_b ? Pieces{k, what.n / 8u} : Pieces{what.n, pieces_per_k};
  for_each_piece(b, 0, 0, pieces, place, 'B', [&](unsigned, unsigned, const unsigned char* bytes) { each(bytes); });
}

void compute(Operation& operation, int warp_in_group) {
  const Wgmma& what = operation.what;
  const int bytes = element_bytes(what.input), k = K_BYTES / bytes, n = what.n, per_piece = static_cast<int>(PIECE) / bytes;
  const unsigned pieces_per_k = K_BYTES / PIECE;
  float a[ROWS * MAX_K], b[MAX_K * MAX_N], piece_values[PIECE];
  if (what.registers_a) {
    std::memcpy(a, operation.a, sizeof a);
  } else {
    const Operand operand(what.desc_a, what.mn_major_a, operation.place, 'A');
    const int row = warp_in_group * ROWS;
    if (what.mn_major_a) {
      for_each_piece(operand, 0, static_cast<unsigned>(row / 8), {static_cast<unsigned>(k), ROWS / 8}, operation.place, 'A',
                     [&](unsigned line, unsigned piece, const unsigned char* from) {
                       widen(what.input, from, piece_values);
                       for (unsigned i = 0; i < 8; ++i) a[(piece * 8 + i) * static_cast<unsigned>(k) + line] = piece_values[i];
                     });
    } else {
      for_each_piece(operand, static_cast<unsigned>(row), 0, {ROWS, pieces_per_k}, operation.place, 'A',
                     [&](unsigned line, unsigned piece, const unsigned char* from) {
                       widen(what.input, from, a + static_cast<int>(line) * k + static_cast<int>(piece) * per_piece);
                     });
    }
  }
  const Operand operand(what.desc_b, what.mn_major_b, operation.place, 'B');
  if (what.mn_major_b) {
    for_each_piece(operand, 0, 0, {static_cast<unsigned>(k), static_cast<unsigned>(n) / 8}, operation.place, 'B',
                   [&](unsigned line, unsigned piece, const unsigned char* from) {
                     widen(what.input, from, b + static_cast<int>(line) * n + static_cast<int>(piece) * 8);
                   });
  } else {
    for_each_piece(operand, 0, 0, {static_cast<unsigned>(n), pieces_per_k}, operation.place, 'B',
                   [&](unsigned line, unsigned piece, const unsigned char* from) {
                     widen(what.input, from, piece_values);
                     for (int i = 0; i < per_piece; ++i)
                       b[(static_cast<int>(piece) * per_piece + i) * n + static_cast<int>(line)] = piece_values[i];
                   });
  }
  if (what.negate_a != what.negate_b) {
    for (int i = 0; i < ROWS * k; ++i) a[i] = -a[i];
  }
  (k == 16 ? multiply<16> : multiply<32>)(operation.accumulator->value.data(), a, b, n, what.accumulate);
  operation.computed = true;
}

// Computes the operations of the warp's queue up to and including `last`.
void compute_up_to(Warp& warp, std::size_t last, int warp_in_group) {
  for (std::size_t i = 0; i <= last; ++i) {
    if (!warp.operations[i].computed) compute(warp.operations[i], warp_in_group);
  }
}

std::uint64_t digest(const Wgmma& what) {
  std::uint64_t hash = 0xcbf29ce484222325ull;   // FNV-1a, word by word
  for (const std::uint64_t word :
       {what.desc_a, what.desc_b, std::uint64_t{what.n} << 8 | static_cast<unsigned>(what.input),
        std::uint64_t{what.mn_major_a} << 4 | unsigned{what.mn_major_b} << 3 | unsigned{what.negate_a != what.negate_b} << 2 |
            unsigned{what.accumulate} << 1 | unsigned{what.registers_a != nullptr}}) {
    hash = (hash ^ word) * 0x100000001b3ull;
  }
  return hash;
}

// Called when all lanes of the warp have executed the instruction.
void issue(WgmmaState& all, Warp& warp, std::size_t index, std::uint64_t number) {
  Operation& operation = warp.operations[index];
  const std::size_t me = my_warp(), group = me / WARPGROUP_WARPS;
  const int warp_in_group = static_cast<int>(me % WARPGROUP_WARPS);
  auto& log = all.issued[group];
  const std::uint64_t mine = digest(operation.what);
  if (log.size() <= number) {
    log.push_back(mine);
  } else if (log[number] != mine) {
    misuse(operation.place,
           "wgmma: wanted the same instruction and descriptors in all four warps of the warpgroup, warp %zu differs", me);
  }
  all.counts[me] = {number + 1, operation.place};
  // Check the descriptors at issue, no matter when the operands are read.
  if (detecting()) {
    for_each_read(operation.what, warp_in_group, operation.place,
                  [&](const unsigned char* bytes) { async_read_begin(bytes, PIECE, operation.place, "wgmma"); });
  } else {
    for_each_read(operation.what, warp_in_group, operation.place, [](const unsigned char*) {});
  }
  if (choose(2)) compute_up_to(warp, index, warp_in_group);   // reads the operands now, otherwise at the wait
}

// Copies one lane's fragment of A to the warp's 16 × K tile.
void take_registers(Operation& operation, int lane) {
  const int k = K_BYTES / element_bytes(operation.what.input), per_register = 4 / element_bytes(operation.what.input);
  unsigned char bytes[PIECE] = {};
  std::memcpy(bytes, operation.what.registers_a, PIECE);   // set by the caller to this lane's
  float values[PIECE];
  widen(operation.what.input, bytes, values);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i % 2), column = lane % 4 * per_register + i / 2 * (k / 2);
    for (int e = 0; e < per_register; ++e) operation.a[row * k + column + e] = values[i * per_register + e];
  }
}

void remember(Lane& lane, const void* registers, std::size_t count, bool in_flight) {
  Known* known = lane.find(registers);
  if (!known) {
    lane.known.emplace_back();
    known = &lane.known.back();
    known->registers = registers;
  }
  known->held.resize(count);
  std::memcpy(known->held.data(), registers, count * sizeof(std::uint32_t));
  known->in_flight = in_flight;
  known->landed = false;
}

// 9.7.15.7.1: a wgmma_fence must separate an access to registers from a wgmma that uses them.
void check_registers(Lane& lane, const void* registers, std::size_t count, bool reads, bool is_a, Place place) {
  const char* name = is_a ? "A" : "the accumulators";
  if (!lane.fenced) misuse(place, "wgmma: wanted wgmma_fence before the first wgmma, got none");
  const Known* known = lane.find(registers);
  if (!known || known->held.size() < count) {
    // The first use of these registers: assume that a fence since the last wait orders earlier accesses.
    if (is_a && !lane.fenced_since_wait)
      misuse(place,
             "wgmma: wanted wgmma_fence between writing the registers of A and the wgmma that reads them, got none since the "
             "last wgmma_wait_group");
    return;
  }
  if (known->in_flight) return;
  if (!reads) {
    if (known->landed)
      misuse(place,
             "wgmma: wanted wgmma_fence between reading the accumulators and the wgmma that overwrites them, got none since "
             "they landed");
    return;
  }
  std::uint32_t now[MAX_N / 2];
  std::memcpy(now, registers, count * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < count; ++i) {
    if (now[i] != known->held[i]) {
      misuse(place,
             "wgmma: wanted wgmma_fence between writing registers and the wgmma that reads them, got %s with element %zu "
             "written after the last one",
             name, i);
    }
  }
}

}   // namespace

void wgmma_fence() {
  want_warpgroup(EMULATION_HERE(), "wgmma_fence");
  Lane& lane = state().warps[my_warp()].lanes[lane_id()];
  lane.fenced = lane.fenced_since_wait = true;
  for (Known& known : lane.known) {
    known.landed = false;
    if (!known.in_flight) std::memcpy(known.held.data(), known.registers, known.held.size() * sizeof(std::uint32_t));
  }
}

void wgmma(float* d, const Wgmma& asked) {
  const Place place = EMULATION_HERE();
  want_warpgroup(place, "wgmma");
  WgmmaState& all = state();
  Warp& warp = all.warps[my_warp()];
  const int id = lane_id();
  Lane& lane = warp.lanes[id];
  const std::uint64_t number = lane.issued++;
  const std::size_t index = static_cast<std::size_t>(number - warp.landed), registers = asked.n / 2u;
  if (index == warp.operations.size()) {
    warp.operations.emplace_back();
    Operation& made = warp.operations.back();
    made.what = asked;
    made.place = place;
    made.group = lane.groups;
    for (const auto& one : warp.accumulators) {
      if (one->d[id] == d) made.accumulator = one.get();
    }
    if (!made.accumulator) {
      warp.accumulators.push_back(std::make_unique<Accumulator>());
      made.accumulator = warp.accumulators.back().get();
      made.accumulator->n = asked.n;
      made.accumulator->value.resize(static_cast<std::size_t>(ROWS * asked.n));
    }
    ++made.accumulator->pending;
  }
  Operation& operation = warp.operations[index];
  if (digest(operation.what) != digest(asked) || operation.group != lane.groups) {
    misuse(place, "wgmma: wanted the same instruction, descriptors and commits in all lanes of the warp, lane %d differs", id);
  }
  Accumulator& accumulator = *operation.accumulator;
  if (accumulator.n != asked.n)
    misuse(place, "wgmma: wanted the accumulators in shape n%d while an operation is in flight, got n%d", accumulator.n,
           asked.n);
  check_registers(lane, d, registers, asked.accumulate, false, place);
  if (asked.registers_a) {
    check_registers(lane, asked.registers_a, 4, true, true, place);
    remember(lane, asked.registers_a, 4, false);
    operation.what.registers_a = asked.registers_a;
    take_registers(operation, id);
  }
  if (!accumulator.d[id]) {
    accumulator.d[id] = d;
    if (asked.accumulate) {
      for (int i = 0; i < static_cast<int>(registers); ++i)
        accumulator.value[static_cast<std::size_t>(row_of(id, i) * asked.n + column_of(id, i))] = d[i];
    }
    for (std::size_t i = 0; i < registers; ++i) std::memcpy(d + i, &POISON, sizeof POISON);
    remember(lane, d, registers, true);
  } else if (accumulator.d[id] != d) {
    misuse(place, "wgmma: wanted the same accumulators in all lanes of the warp, lane %d differs", id);
  }
  operation.lanes |= 1u << id;
  if (operation.lanes == FULL_WARP) issue(all, warp, index, number);
}

void wgmma_commit() {
  want_warpgroup(EMULATION_HERE(), "wgmma_commit_group");
  ++state().warps[my_warp()].lanes[lane_id()].groups;
}

namespace {

// Copies an accumulator's values to the lanes, after its last operation has been computed.
void deliver(Warp& warp, Accumulator& accumulator, Place place) {
  const int registers = accumulator.n / 2;
  for (int id = 0; id < WARP; ++id) {
    float* d = accumulator.d[id];
    for (int i = 0; i < registers; ++i) {
      if (bits_of(d[i]) != POISON) {
        const int row = static_cast<int>(my_warp() % WARPGROUP_WARPS) * ROWS + row_of(id, i);
        misuse_of(static_cast<int>(my_warp()) * WARP + id, place,
                  "wgmma: wanted no access to accumulators in flight, got d[" + std::to_string(i) +
                      "] (row " + std::to_string(row) + ", column " + std::to_string(column_of(id, i)) +
                      ") of this thread written before wgmma_wait_group");
      }
      d[i] = accumulator.value[static_cast<std::size_t>(row_of(id, i) * accumulator.n + column_of(id, i))];
    }
    remember(warp.lanes[id], d, static_cast<std::size_t>(registers), false);
    warp.lanes[id].find(d)->landed = true;
  }
}

// Called by the last lane of the warp to arrive at the wait: completes all groups but the newest `pending`.
void land(Warp& warp, int pending, Place place) {
  const Lane& first = warp.lanes[0];
  for (const Lane& lane : warp.lanes) {
    if (lane.issued != first.issued || lane.groups != first.groups) {
      misuse(place,
             "wgmma_wait_group: wanted all lanes of the warp to issue and commit alike, got %llu wgmma and %llu commits in lane "
             "0, %llu and %llu in lane %d",
             static_cast<unsigned long long>(first.issued), static_cast<unsigned long long>(first.groups),
             static_cast<unsigned long long>(lane.issued), static_cast<unsigned long long>(lane.groups),
             static_cast<int>(&lane - warp.lanes));
    }
  }
  const int warp_in_group = static_cast<int>(my_warp() % WARPGROUP_WARPS);
  const std::uint64_t groups = first.groups, kept = static_cast<std::uint64_t>(pending);
  bool any = false;
  while (!warp.operations.empty() && warp.operations.front().group + kept < groups) {
    compute_up_to(warp, 0, warp_in_group);
    Operation& operation = warp.operations.front();
    if (detecting()) {
      for_each_read(operation.what, warp_in_group, operation.place,
                    [&](const unsigned char* bytes) { async_read_end(bytes, PIECE, operation.place, "wgmma"); });
    }
    Accumulator* accumulator = operation.accumulator;
    if (--accumulator->pending == 0) {
      deliver(warp, *accumulator, place);
      std::erase_if(warp.accumulators, [&](const auto& one) { return one.get() == accumulator; });
    }
    warp.operations.pop_front();
    ++warp.landed;
    any = true;
  }
  if (!any) return;
  for (Lane& lane : warp.lanes) lane.fenced_since_wait = false;
  if (!warp.clock) warp.clock = new_clock();
  release(warp.clock);
}

}   // namespace

void wgmma_wait(int pending) {
  const Place place = EMULATION_HERE();
  want_warpgroup(place, "wgmma_wait_group");
  Warp& warp = state().warps[my_warp()];
  const std::uint64_t number = warp.waits;
  if (warp.waiting && warp.waiting_for != pending)
    misuse(place, "wgmma_wait_group: wanted the same number of pending groups in all lanes of the warp, got %d and %d",
           warp.waiting_for, pending);
  warp.waiting_for = pending;
  warp.waiting |= 1u << lane_id();
  the_block->moved = true;
  if (warp.waiting == FULL_WARP) {
    land(warp, pending, place);
    warp.waiting = 0;
    ++warp.waits;
  } else {
    wait_at(place, [&] { return warp.waits != number; }, "wgmma.wait_group, for the other lanes of the warp");
  }
  // The reads of shared memory have completed for every lane, whichever lane completed them.
  if (warp.clock) acquire(warp.clock);
}

void wgmma_block_end(WgmmaState& all) {
  for (std::size_t i = 0; i < all.warps.size(); ++i) {
    const auto end = [&](Place place, const std::string& text) { misuse_of(static_cast<int>(i) * WARP, place, text); };
    if (!all.warps[i].operations.empty()) {
      const Operation& operation = all.warps[i].operations.front();
      end(operation.place,
          operation.group == all.warps[i].lanes[0].groups
              ? "the block ends with a wgmma that was not committed: wanted wgmma_commit_group, then wgmma_wait_group"
              : "the block ends with a wgmma in flight: wanted wgmma_wait_group before");
    }
    const std::size_t first = i / WARPGROUP_WARPS * WARPGROUP_WARPS;
    if (all.counts[i].operations != all.counts[first].operations) {
      end(all.counts[i].place ? all.counts[i].place : all.counts[first].place,
          "wgmma: wanted the same number of wgmma in all four warps of the warpgroup, got " + std::to_string(all.counts[i].operations) +
              " in warp " + std::to_string(i) + " and " + std::to_string(all.counts[first].operations) + " in warp " +
              std::to_string(first));
    }
  }
}

}   // namespace emu
