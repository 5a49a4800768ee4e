// spin: one thread waits `count` nanoseconds, and reports SM clocks and nanoseconds that passed.
// The host enqueues work behind it meanwhile, so that no sample waits for the host; clocks over time is the SM clock.
#include "micro.cuh"
#include "ptx.cuh"

extern "C" __global__ void micro_spin(const __grid_constant__ MicroParams p) {
  // The timer may step by a microsecond: start on a step, and the end is one too.
  const unsigned long long before = ptx::globaltimer();
  unsigned long long start;
  do {
    start = ptx::globaltimer();
  } while (start == before);
  const long long start_clock = clock64();
  unsigned long long now;
  do {
    now = ptx::globaltimer();
  } while (now - start < static_cast<unsigned long long>(p.count));
  const long long clocks = clock64() - start_clock;
  long long* out = static_cast<long long*>(p.out);
  out[0] = clocks;
  out[1] = static_cast<long long>(now - start);
}
