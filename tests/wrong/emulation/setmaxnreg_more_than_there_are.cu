// bug: the two consuming warpgroups ask for more registers than the producing one leaves, and wait for them for ever.
// mechanism: setmaxnreg
// caught by: misuse
// needs: any
// launch: grid=1 block=384 smem=0
// parameter: values f32[256] normal
// parameter: out f32[256] written
// expect: out = values * 2
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

constexpr int WARPGROUP = 128;
constexpr int THREADS = 3 * WARPGROUP;
constexpr int FILE_REGISTERS = 65536;   // of an SM
constexpr int PRODUCER_REGISTERS = 40;
#if BUG
constexpr int CONSUMER_REGISTERS = 240;
#else
constexpr int CONSUMER_REGISTERS = 232;
static_assert(WARPGROUP * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= FILE_REGISTERS, "the SM has no more registers");
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) setmaxnreg_more_than_there_are(const float* values, float* out) {
  if (threadIdx.x < WARPGROUP) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();   // here
    return;
  }
  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();   // here
  const int i = threadIdx.x - WARPGROUP;
  out[i] = values[i] * 2.0f;
}
