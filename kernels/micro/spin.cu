// spin: one thread spins for `count` nanoseconds, and reports its SM and, before and after, the SM's cycle counter and the time.
// Meanwhile the host enqueues work behind it, so that no sample includes the host. Cycles divided by time are the SM clock:
// within one spin, the unloaded clock; from the end of one to the start of the next on the same SM, that of the work between.
#include "micro.cuh"
#include "ptx.cuh"

extern "C" __global__ void micro_spin(const __grid_constant__ MicroParams p) {
  // The timer may advance in steps of a microsecond: start right after a step, and end right after one too.
  const unsigned long long before = ptx::globaltimer();
  unsigned long long start;
  do {
    start = ptx::globaltimer();
  } while (start == before);
  const long long start_clock = clock64();
  unsigned long long now;
  unsigned long long last = start;
  do {
    now = ptx::globaltimer();
    if (now - start >= static_cast<unsigned long long>(p.count) && now != last) break;
    last = now;
  } while (true);
  const long long end_clock = clock64();
  long long* out = static_cast<long long*>(p.out);
  out[0] = start_clock;
  out[1] = static_cast<long long>(start);
  out[2] = end_clock;
  out[3] = static_cast<long long>(now);
  out[4] = ptx::smid();
}
