// latency: cycles of one step of synchronisation or data transfer, selected by WHAT below; `repeats` steps in a row.
#include "chip.cuh"

#define ARRIVE_AND_WAIT 0   // one thread arrives at an mbarrier of count 1 and waits for that phase
#define TRY_WAIT 1          // one thread waits for a phase that is already complete
#define PING_PONG 2         // two warps alternate through two mbarriers; two handovers per repeat
#define SYNC 3              // all warps of the block execute one bar.sync
#define NAMED_PING_PONG 4   // two halves of the block alternate by two named barriers, bar.sync and bar.arrive; two handovers per repeat
#define BULK_COPY 5         // p.count bytes from L2 to shared memory by a bulk copy, from issue to completion
#define SHARED_LOAD 6       // a shared-memory load whose address is the result of the previous load

constexpr int SLOTS = 32;

__shared__ ptx::Mbarrier barriers[2];
__shared__ unsigned next[SLOTS];
extern __shared__ __align__(1024) unsigned char smem[];

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_latency(const __grid_constant__ MicroParams p) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barriers[0], 1);
    ptx::mbarrier_init(&barriers[1], 1);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < SLOTS) next[threadIdx.x] = (threadIdx.x + 1) % SLOTS;
  __syncthreads();   // the barriers are initialised, and all warps start together
  const bool leader = threadIdx.x % 32 == 0;
  const bool first_half = threadIdx.x < blockDim.x / 2;
  unsigned parity = 0;
  unsigned slot = threadIdx.x % SLOTS;
  const long long start = clock64();
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#if WHAT == ARRIVE_AND_WAIT
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive(&barriers[0]);
      ptx::mbarrier_wait_parity(&barriers[0], parity);
    }
#elif WHAT == TRY_WAIT
    if (threadIdx.x == 0) ptx::mbarrier_wait_parity(&barriers[0], 1);   // the phase before the first counts as complete
#elif WHAT == PING_PONG
    if (leader && first_half) {
      ptx::mbarrier_arrive(&barriers[0]);
      ptx::mbarrier_wait_parity(&barriers[1], parity);
    } else if (leader) {
      ptx::mbarrier_wait_parity(&barriers[0], parity);
      ptx::mbarrier_arrive(&barriers[1]);
    }
#elif WHAT == SYNC
    ptx::bar_sync(1, THREADS);
#elif WHAT == NAMED_PING_PONG
    if (first_half) {
      ptx::bar_arrive(1, THREADS);
      ptx::bar_sync(2, THREADS);
    } else {
      ptx::bar_sync(1, THREADS);
      ptx::bar_arrive(2, THREADS);
    }
#elif WHAT == BULK_COPY
    if (threadIdx.x == 0) {
      const unsigned bytes = static_cast<unsigned>(p.count);
      ptx::mbarrier_arrive_expect_tx(&barriers[0], bytes);
      ptx::cp_async_bulk_load(smem, p.in, bytes, &barriers[0]);
      ptx::mbarrier_wait_parity(&barriers[0], parity);
    }
#else
    slot = next[slot];
#endif
    parity ^= 1;
  }
  const long long end = clock64();
  keep(p, slot, p.count < 0);
  report(p, start, end, p.repeats);
}
