// bug: the producing warpgroup keeps 32 registers a thread, and what the others ask for is more than the launch gave the block.
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
constexpr int CONSUMER_REGISTERS = 240;
#if BUG
constexpr int PRODUCER_REGISTERS = 32;
#else
constexpr int PRODUCER_REGISTERS = 24;
// A thread has 168 at launch, with __launch_bounds__(THREADS, 1): they are given out by eights, and what is left of the file is
// lost. 32 + 2 · 240 would fill the file, but the block shares 3 · 168.
constexpr int FILE_REGISTERS = 65536;   // of an SM
constexpr int LAUNCH_REGISTERS = FILE_REGISTERS / THREADS / 8 * 8;
static_assert(PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * LAUNCH_REGISTERS, "the block has no more registers");
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
