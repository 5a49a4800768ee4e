// The main program of a compiled kernel: reads a request, runs the grid and writes a result. README.md describes the protocol.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#include <mach-o/getsect.h>
#include <mach-o/ldsyms.h>
#include <sys/ucontext.h>
#else
#include <sys/prctl.h>
#include <ucontext.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "block.h"

extern "C" void flashlab_runtime_begins();
extern "C" void __tsan_init() __attribute__((weak));

namespace emu {

namespace {

// --- the program's own image ------------------------------------------------------------------------------------------------

#ifdef __APPLE__
std::uintptr_t image_low() { return reinterpret_cast<std::uintptr_t>(&_mh_execute_header); }
std::uintptr_t image_high() { return get_end() + static_cast<std::uintptr_t>(_dyld_get_image_vmaddr_slide(0)); }
#else
extern "C" const char __executable_start[];
extern "C" const char _end[];
std::uintptr_t image_low() { return reinterpret_cast<std::uintptr_t>(__executable_start); }
std::uintptr_t image_high() { return reinterpret_cast<std::uintptr_t>(_end); }
#endif

bool in_kernel(Place place) {
  const auto address = reinterpret_cast<std::uintptr_t>(place);
  return address >= image_low() && address < reinterpret_cast<std::uintptr_t>(&flashlab_runtime_begins);
}

_Unwind_Reason_Code look_outward(_Unwind_Context* context, void* found) {
  const auto place = reinterpret_cast<Place>(_Unwind_GetIP(context));
  if (!in_kernel(place)) return _URC_NO_REASON;
  *static_cast<Place*>(found) = place;
  return _URC_END_OF_STACK;
}

}  // namespace

bool in_image(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  return address >= image_low() && address < image_high();
}

std::uint32_t offset_in_image(Place place) {
  return in_image(place) ? static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(place) - image_low()) : 0;
}

Place kernel_place(Place fallback) {
  if (in_kernel(fallback)) return fallback;
  Place found = fallback;
  _Unwind_Backtrace(look_outward, &found);
  return found;
}

namespace {

// --- the request ------------------------------------------------------------------------------------------------------------

struct LaunchShape {   // ShareLaunchShape of kernels/common/shares.cuh; fields that the kernel's constant lacks are 0
  int threads, smem_bytes, tile_q, box_q, box_kv, persistent, panels_kv, cluster, split_keys, sm_blocks, tile_blocks, part_words,
      whole_tiles, zero_parts;
};

LaunchShape launch_shape() {
  LaunchShape shape = {};
  std::memcpy(&shape, the_launch_shape, std::min(sizeof shape, the_launch_shape_bytes));
  return shape;
}

struct Request {
  Launch launch;
  std::string result_path;
  std::vector<std::vector<unsigned char>> arguments;
};

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("request: " + why); }

dim3 read_dim3(std::istringstream& in) {
  dim3 size;
  if (!(in >> size.x >> size.y >> size.z) || !size.x || !size.y || !size.z) refuse("wanted three positive numbers");
  return size;
}

void map_memory(GlobalMemory& memory, const std::string& path, std::uint64_t bytes) {
  const int file = ::open(path.c_str(), O_RDWR);
  if (file < 0) refuse("cannot open " + path);
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (base == MAP_FAILED) refuse("cannot map " + path);
  memory.base = static_cast<unsigned char*>(base);
  memory.bytes = bytes;
}

Region read_region(std::istringstream& in) {
  Region region;
  std::string mode;
  std::size_t dimensions = 0;
  in >> region.name >> region.offset >> region.element_bytes >> mode >> dimensions;
  region.readable = mode.find('r') != std::string::npos;
  region.writable = mode.find('w') != std::string::npos;
  region.shape.resize(dimensions);
  region.strides.resize(dimensions);
  for (auto& n : region.shape) in >> n;
  for (auto& n : region.strides) in >> n;
  if (!in) refuse("wanted: region name offset element_bytes r|w|rw dimensions shape… strides…");
  std::int64_t low = 0, high = region.element_bytes;
  for (std::size_t d = 0; d < dimensions; ++d) {
    const std::int64_t reach = (static_cast<std::int64_t>(region.shape[d]) - 1) * region.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  region.low = region.offset + static_cast<std::uint64_t>(low);
  region.high = region.offset + static_cast<std::uint64_t>(high);
  return region;
}

Request read_request(std::istream& input) {
  Request request;
  Launch& launch = request.launch;
  if (the_launch_shape) {
    const LaunchShape shape = launch_shape();
    launch.block.x = static_cast<unsigned>(shape.threads);
    launch.smem_bytes = static_cast<std::size_t>(shape.smem_bytes);
  }
  launch.detect = __tsan_init != nullptr && the_kernel_is_hooked;
  std::string line;
  while (std::getline(input, line) && line != "run") {
    std::istringstream in(line);
    std::string item;
    in >> item;
    if (item == "result") {
      in >> std::ws;
      std::getline(in, request.result_path);
    } else if (item == "memory") {
      const std::size_t space = line.rfind(' ');
      map_memory(launch.memory, line.substr(7, space - 7), std::stoull(line.substr(space + 1)));
    } else if (item == "grid") {
      launch.grid = read_dim3(in);
    } else if (item == "block") {
      launch.block = read_dim3(in);
    } else if (item == "cluster") {
      launch.cluster = read_dim3(in);
    } else if (item == "smem") {
      in >> launch.smem_bytes;
    } else if (item == "argument") {
      std::string hex;
      in >> hex;
      std::vector<unsigned char> bytes;
      for (std::size_t i = 0; i + 1 < hex.size(); i += 2) bytes.push_back(static_cast<unsigned char>(std::stoul(hex.substr(i, 2), nullptr, 16)));
      request.arguments.push_back(bytes);
    } else if (item == "pointer") {
      std::size_t argument = 0, byte = 0;
      std::uint64_t offset = 0;
      in >> argument >> byte >> offset;
      if (!launch.memory.base) refuse("pointer: wanted the item memory before it");
      if (argument >= request.arguments.size() || byte + 8 > request.arguments[argument].size()) refuse("pointer: outside of the argument");
      const std::uint64_t value = reinterpret_cast<std::uint64_t>(launch.memory.base) + offset;
      std::memcpy(request.arguments[argument].data() + byte, &value, sizeof value);
    } else if (item == "region") {
      launch.memory.regions.push_back(read_region(in));
    } else if (item == "schedule") {
      std::string name;
      in >> name;
      if (name == "seeded") in >> launch.seed;
      launch.schedule = name == "seeded" ? Schedule::seeded : name == "descending" ? Schedule::descending : Schedule::ascending;
    } else if (item == "threads") {
      in >> launch.max_threads;
    } else if (item == "blocks") {
      in >> launch.max_blocks;
    } else if (item == "early") {
      launch.early = true;
    } else if (item == "detect") {
      int wanted = 0;
      in >> wanted;
      launch.detect = launch.detect && wanted;
    } else {
      refuse("unknown item " + item);
    }
  }
  if (request.arguments.size() != the_kernel.num_arguments) {
    refuse("wanted " + std::to_string(the_kernel.num_arguments) + " arguments, got " + std::to_string(request.arguments.size()));
  }
  for (std::size_t i = 0; i < request.arguments.size(); ++i) {
    if (request.arguments[i].size() != the_kernel.argument_sizes[i]) {
      refuse("argument " + std::to_string(i) + ": wanted " + std::to_string(the_kernel.argument_sizes[i]) + " bytes, got " +
             std::to_string(request.arguments[i].size()));
    }
  }
  if (launch.grid.x % launch.cluster.x || launch.grid.y % launch.cluster.y || launch.grid.z % launch.cluster.z) {
    refuse("cluster: wanted sizes that divide the grid's");
  }
  if (launch.smem_bytes > DYNAMIC_BYTES) {
    refuse("smem: wanted at most " + std::to_string(DYNAMIC_BYTES) + " bytes a block, got " + std::to_string(launch.smem_bytes));
  }
  if (launch.block.x * launch.block.y * launch.block.z > 1024) refuse("block: wanted at most 1024 threads");
  return request;
}

// --- the result -------------------------------------------------------------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string json_of(const unsigned (&three)[3]) {
  return "[" + std::to_string(three[0]) + ", " + std::to_string(three[1]) + ", " + std::to_string(three[2]) + "]";
}

std::string json_of(const Access& access) {
  if (!access.place) return "null";
  std::ostringstream out;
  out << "{\"thread\": " << access.thread << ", \"block\": " << access.rank << ", \"access\": \"" << name_of(access.act)
      << "\", \"place\": " << access.place << "}";
  return out.str();
}

std::string json_of(const Finding& f) {
  std::ostringstream out;
  out << "{\"kind\": \"" << f.kind << "\", \"space\": \"" << f.space << "\", \"array\": " << quoted(f.array) << ", \"offset\": "
      << static_cast<std::int64_t>(f.offset) << ", \"bytes\": " << f.bytes << ", \"count\": " << f.count << ", \"block\": " << json_of(f.block)
      << ", \"first\": " << json_of(f.first) << ", \"second\": " << json_of(f.second) << "}";
  return out.str();
}

std::string json_of(const Counters::Line& c) {
  std::ostringstream out;
  out << "{\"place\": " << offset_in_image(c.place) << ", \"space\": \"" << (c.space == Space::shared ? "shared" : "global") << "\", \"access\": \""
      << (c.write ? "write" : "read") << "\", \"kind\": \"" << (c.kind == Kind::matrix ? "matrix" : c.kind == Kind::copy ? "async copy" : "plain") << "\", \"bytes\": "
      << c.bytes << ", \"requests\": " << c.requests << ", \"wavefronts\": " << c.wavefronts << ", \"ideal_wavefronts\": " << c.ideal_wavefronts
      << ", \"sectors\": " << c.sectors << ", \"ideal_sectors\": " << c.ideal_sectors << "}";
  return out.str();
}

template <typename T>
std::string json_list(const std::vector<T>& values) {
  std::string out = "[";
  for (const T& value : values) out += (out.size() > 1 ? ",\n  " : "") + json_of(value);
  return out + "]";
}

struct Waiting {
  unsigned block[3];
  int first, last, count;
  std::string what;
  std::uint32_t place;
};

std::string json_of(const Waiting& w) {
  return "{\"block\": " + json_of(w.block) + ", \"first\": " + std::to_string(w.first) + ", \"last\": " + std::to_string(w.last) +
         ", \"count\": " + std::to_string(w.count) + ", \"what\": " + quoted(w.what) + ", \"place\": " + std::to_string(w.place) + "}";
}

// Lists what threads wait for, and where: one entry for all threads that wait for the same at the same place.
void list_waiting(const Block& block, std::vector<Waiting>& waiting) {
  const std::size_t begin = waiting.size();
  for (const Thread& t : block.threads) {
    const bool returned = t.state == Thread::State::done;
    const std::string what = what_of(block, t);
    const std::uint32_t place = returned ? 0 : offset_in_image(t.place);
    const auto same = std::find_if(waiting.begin() + static_cast<std::ptrdiff_t>(begin), waiting.end(),
                                   [&](const Waiting& w) { return w.what == what && w.place == place; });
    if (same == waiting.end()) {
      waiting.push_back({{block.index.x, block.index.y, block.index.z}, t.id, t.id, 1, what, place});
    } else {
      same->last = t.id;
      ++same->count;
    }
  }
}

std::string result_json(const Trouble& trouble, double seconds, const std::vector<Waiting>& waiting, const Findings& findings, const Counters* counters) {
  std::ostringstream out;
  out << "{\"status\": " << quoted(trouble.status.empty() ? "ok" : trouble.status) << ", \"message\": " << quoted(trouble.message)
      << ", \"seconds\": " << seconds << ",\n \"where\": ";
  if (trouble.somewhere) {
    out << "{\"block\": " << json_of(trouble.block) << ", \"thread\": " << json_of(trouble.thread) << ", \"place\": " << trouble.place << "}";
  } else {
    out << "null";
  }
  out << ",\n \"waiting\": " << json_list(waiting) << ",\n \"findings\": " << json_list(findings.list()) << ",\n \"counters\": "
      << (counters ? json_list(counters->lines()) : "[]") << "}\n";
  return out.str();
}

// --- crashes and time-outs: the signal handler writes the result from the state that is left ---------------------------------

std::string crash_path;
std::atomic<bool> dying{false};

Place program_counter(void* context) {
  const auto* c = static_cast<const ucontext_t*>(context);
#if defined(__APPLE__) && defined(__x86_64__)
  return reinterpret_cast<Place>(c->uc_mcontext->__ss.__rip);
#elif defined(__APPLE__)
  return reinterpret_cast<Place>(c->uc_mcontext->__ss.__pc);
#elif defined(__x86_64__)
  return reinterpret_cast<Place>(c->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<Place>(c->uc_mcontext.pc);
#else
  return nullptr;
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (dying.exchange(true)) {
    for (;;) pause();   // another thread is writing the result
  }
  Trouble trouble;
  trouble.status = signal == SIGTERM ? "timeout" : "crash";
  const char* what = signal == SIGSEGV  ? "segmentation fault"
                     : signal == SIGBUS ? "bus error"
                     : signal == SIGFPE ? "arithmetic fault, such as a division by zero"
                     : signal == SIGILL ? "illegal instruction"
                     : signal == SIGTERM ? "stopped while running"
                                         : "abort";
  char text[200];
  if (signal == SIGSEGV || signal == SIGBUS) {
    std::snprintf(text, sizeof text, "%s at address %p", what, info->si_addr);
  } else {
    std::snprintf(text, sizeof text, "%s", what);
  }
  trouble.message = text;
  std::vector<Waiting> waiting;
  if (Block* b = the_block) {
    const Place at = program_counter(context);
    // Elsewhere, places are return addresses, which lie past the call. So add 1 to the address of the interrupted instruction.
    trouble.place = in_kernel(at) ? offset_in_image(at) + 1 : offset_in_image(kernel_place(at));
    trouble.somewhere = true;
    trouble.block[0] = b->index.x, trouble.block[1] = b->index.y, trouble.block[2] = b->index.z;
    if (b->current) trouble.thread[0] = b->current->index.x, trouble.thread[1] = b->current->index.y, trouble.thread[2] = b->current->index.z;
    if (signal == SIGTERM) list_waiting(*b, waiting);
  }
  const std::string json = result_json(trouble, 0, waiting, the_block ? the_block->findings : Findings{}, nullptr);
  const int file = ::open(crash_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (file >= 0) {
    std::size_t done = 0;
    while (done < json.size()) {
      const ssize_t n = ::write(file, json.data() + done, json.size() - done);
      if (n <= 0) break;
      done += static_cast<std::size_t>(n);
    }
    ::close(file);
  }
  std::fflush(stdout);
  ::_exit(0);
}

constexpr int CRASHES[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM};

void catch_signals() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (const int signal : CRASHES) sigaction(signal, &action, nullptr);
}

// Gives the calling thread an alternate signal stack, because a fiber's own stack may be the one that overflowed.
void give_signals_a_stack(std::vector<unsigned char>& memory) {
  memory.resize(256 * 1024);
  stack_t stack = {};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  sigaltstack(&stack, nullptr);
}

// --- running the grid -------------------------------------------------------------------------------------------------------

constexpr std::uint64_t MAX_IDLE_ROUNDS = 5000;   // consecutive, of the whole grid, before polling loops are a deadlock

struct Grid {
  const Launch& launch;
  std::uint64_t clusters = 0;
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  unsigned running = 0;                  // teams that have not run out of clusters
  unsigned idle = 0;                     // of these, the ones that have ended the current round without progress
  std::uint64_t round = 0, idle_rounds = 0;
  std::atomic<bool> counting{false};     // whether there is anything for `progress` to reset

  void progress() {
    if (!counting) return;
    const std::lock_guard lock(mutex);
    reset();
  }

  void leave() {
    const std::lock_guard lock(mutex);
    --running;
    reset();
  }

  // Notes a round without progress of a team that polls, and returns whether there have been too many. A round of the grid ends when
  // every team has ended one: a block that computes, however long, keeps those that poll for it alive.
  bool stuck(Team& team) {
    std::unique_lock lock(mutex);
    counting = true;
    if (team.idle_round == round) {
      lock.unlock();
      std::this_thread::yield();
      return false;
    }
    team.idle_round = round;
    if (++idle < running) return false;
    idle = 0;
    ++round;
    return ++idle_rounds >= MAX_IDLE_ROUNDS;
  }

 private:
  void reset() {
    idle = 0;
    idle_rounds = 0;
    ++round;
    counting = false;
  }
};

uint3 block_of(const Launch& launch, std::uint64_t cluster, unsigned rank) {
  const dim3 per{launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y, launch.grid.z / launch.cluster.z};
  const auto x = static_cast<unsigned>(cluster % per.x), y = static_cast<unsigned>(cluster / per.x % per.y), z = static_cast<unsigned>(cluster / per.x / per.y);
  const unsigned rx = rank % launch.cluster.x, ry = rank / launch.cluster.x % launch.cluster.y, rz = rank / launch.cluster.x / launch.cluster.y;
  return {x * launch.cluster.x + rx, y * launch.cluster.y + ry, z * launch.cluster.z + rz};
}

// Runs one block of each of a team's clusters, one cluster after another. Each block of a cluster has an operating-system thread; they
// run in turn, one round at a time.
void run_member(Grid& grid, Team& team, Block& block, unsigned rank) {
  std::vector<unsigned char> signal_stack;
  give_signals_a_stack(signal_stack);
  block.open(team, grid.launch, rank);
  std::unique_lock lock(team.mutex);
  team.blocks[rank] = &block;
  if (++team.finished == team.size) {   // the last block to open starts the first cluster
    team.finished = team.size;
    team.changed.notify_all();
  }
  std::uint64_t generation = 0;
  for (;;) {
    team.changed.wait(lock, [&] { return team.over || team.finished == team.size || team.generation > generation; });
    if (team.over) return;
    if (team.generation == generation) {   // no block is running: fetch the next cluster
      const std::uint64_t cluster = grid.next++;
      if (cluster >= grid.clusters || grid.failed) {
        team.over = true;
        team.changed.notify_all();
        grid.leave();
        return;
      }
      team.cluster = cluster;
      ++team.generation;
      team.finished = 0;
      team.started = 0;
      team.turn = 0;
      team.stalled = 0;
      team.arrived = team.left = 0;
      team.alive = static_cast<int>(team.size) * block.num_threads;
      team.barrier_clock = {};
      team.changed.notify_all();
    }
    generation = team.generation;
    lock.unlock();
    block.start(team.cluster * team.size + rank, block_of(grid.launch, team.cluster, rank));
    lock.lock();
    if (++team.started == team.size) team.changed.notify_all();
    team.changed.wait(lock, [&] { return team.started == team.size; });
    bool done = false;
    while (!done) {
      team.changed.wait(lock, [&] { return team.turn == rank || team.failed; });
      if (team.failed) break;
      lock.unlock();
      const bool moved = block.run_round();
      lock.lock();
      if (team.failed) break;
      done = block.live == 0;
      team.stalled = moved ? 0 : team.stalled + 1;
      team.done_blocks[rank] = done;
      if (std::all_of(team.done_blocks.begin(), team.done_blocks.end(), [](char d) { return d; })) team.all_done = true;
      const auto running = static_cast<unsigned>(std::count(team.done_blocks.begin(), team.done_blocks.end(), 0));
      if (moved) grid.progress();
      const bool polls = std::any_of(team.blocks.begin(), team.blocks.end(), [](const Block* b) { return b->polls; });
      if (!done && team.stalled >= running && (!polls || grid.failed || grid.stuck(team))) {
        team.failed = true;
        if (!polls || !grid.failed) {   // otherwise it polls for a block that has failed
          team.trouble.status = "deadlock";
          team.trouble.message = "every thread waits: " + who_waits(block);
        }
        team.changed.notify_all();
        break;
      }
      if (running) {
        do {
          team.turn = (team.turn + 1) % team.size;
        } while (team.done_blocks[team.turn]);
      }
      team.changed.notify_all();
    }
    // A block's shared memory must outlive the threads of the cluster that may still read it.
    if (!team.failed) {
      team.changed.wait(lock, [&] { return team.all_done || team.failed; });
    }
    if (!team.failed) {
      lock.unlock();
      block.finish();
      lock.lock();
    }
    if (team.failed) {
      grid.failed = true;
      team.over = true;
      team.changed.notify_all();
      // The blocks keep their state for the report.
      return;
    }
    if (++team.finished == team.size) {
      std::fill(team.done_blocks.begin(), team.done_blocks.end(), 0);
      team.all_done = false;
      team.changed.notify_all();
    }
  }
}

int run(std::istream& input) {
  Request request = read_request(input);
  Launch& launch = request.launch;
  crash_path = request.result_path;
  std::uintptr_t low = ~std::uintptr_t{0}, high = 0;
  for (auto& bytes : request.arguments) {
    // Tensor maps require 64-byte alignment.
    const std::size_t room = (bytes.size() + 63) / 64 * 64;
    auto* copy = static_cast<unsigned char*>(std::aligned_alloc(64, std::max<std::size_t>(room, 64)));
    std::memcpy(copy, bytes.data(), bytes.size());
    launch.arguments.push_back(copy);
    low = std::min(low, reinterpret_cast<std::uintptr_t>(copy));
    high = std::max(high, reinterpret_cast<std::uintptr_t>(copy) + room);
  }
  launch.arguments.push_back(nullptr);
  if (high) launch.arguments_low = low, launch.arguments_high = high;
  if (launch.detect) launch.memory.describe();

  const unsigned cluster_blocks = launch.cluster.x * launch.cluster.y * launch.cluster.z;
  Grid grid{launch};
  grid.clusters = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z / cluster_blocks;
  grid.clusters = std::min(grid.clusters, std::max<std::uint64_t>(1, launch.max_blocks / cluster_blocks));
  const unsigned cores = launch.max_threads ? launch.max_threads : std::max(1u, std::thread::hardware_concurrency());
  const auto num_teams = static_cast<unsigned>(std::min<std::uint64_t>(cluster_blocks > 1 ? 1 : cores, grid.clusters));
  grid.running = num_teams;

  catch_signals();
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < num_teams; ++t) {
    Team& team = *teams.emplace_back(std::make_unique<Team>());
    team.size = cluster_blocks;
    team.blocks.resize(cluster_blocks);
    team.done_blocks.assign(cluster_blocks, 0);
    for (unsigned rank = 0; rank < cluster_blocks; ++rank) {
      Block& block = *blocks.emplace_back(std::make_unique<Block>());
      threads.emplace_back([&grid, &team, &block, rank] { run_member(grid, team, block, rank); });
    }
  }
  // Block signals in this thread, so that they reach a thread that runs blocks and knows its position in the kernel.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  Trouble trouble;
  std::vector<Waiting> waiting;
  for (const auto& team : teams) {
    if (trouble.status.empty()) trouble = team->trouble;
  }
  for (const auto& team : teams) {
    if (!team->failed || trouble.status != "deadlock") continue;
    for (const Block* block : team->blocks) list_waiting(*block, waiting);
  }
  Findings findings;
  Counters counters;
  for (const auto& block : blocks) {
    findings.merge(block->findings);
    counters.merge(block->counters);
  }
  const std::string json = result_json(trouble, seconds, waiting, findings, &counters);
  FILE* out = std::fopen(request.result_path.c_str(), "w");
  if (!out || std::fwrite(json.data(), 1, json.size(), out) != json.size() || std::fclose(out)) {
    std::fprintf(stderr, "cannot write the result to %s\n", request.result_path.c_str());
    return 1;
  }
  std::fflush(stdout);
  // Fibers abandoned after a failure hold nothing that must be destroyed.
  ::_exit(0);
}

int describe() {
  std::printf("{\"kernel\": \"%s\", \"arguments\": [", the_kernel.name);
  for (std::size_t i = 0; i < the_kernel.num_arguments; ++i) std::printf("%s%zu", i ? ", " : "", the_kernel.argument_sizes[i]);
  std::printf("], \"launch_shape\": ");
  if (the_launch_shape) {
    const LaunchShape shape = launch_shape();
    std::printf("{\"threads\": %d, \"smem_bytes\": %d, \"tile_q\": %d, \"box_q\": %d, \"box_kv\": %d, \"persistent\": %s, "
                "\"panels_kv\": %d, \"cluster\": %d, \"split_keys\": %d, \"sm_blocks\": %d, \"tile_blocks\": %d, \"part_words\": %d, "
                "\"whole_tiles\": %d, \"zero_parts\": %d}",
                shape.threads, shape.smem_bytes, shape.tile_q, shape.box_q, shape.box_kv, shape.persistent ? "true" : "false",
                shape.panels_kv, shape.cluster, shape.split_keys, shape.sm_blocks, shape.tile_blocks, shape.part_words,
                shape.whole_tiles, shape.zero_parts);
  } else {
    std::printf("null");
  }
  std::printf(", \"hooks\": %s}\n", the_kernel_is_hooked ? "true" : "false");
  return 0;
}

}  // namespace
}  // namespace emu

int main(int count, char** values) {
#ifndef __APPLE__
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // sent when the thread that started it ends: a kernel may hang
#endif
  try {
    if (count == 2 && std::strcmp(values[1], "--describe") == 0) return emu::describe();
    return emu::run(std::cin);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
