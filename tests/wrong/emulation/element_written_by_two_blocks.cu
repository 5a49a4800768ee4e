// bug: blocks that share a row of halves disagree on where the second one's begins, so one column belongs to both.
// mechanism: output split, between blocks
// caught by: race
// needs: hooks
// launch: grid=2 block=32 smem=0
// parameter: values f16[64] normal
// parameter: out f16[64] written
// expect: out = values
#include <cuda_fp16.h>

constexpr int COLS = 32;   // of a block

extern "C" __global__ void element_written_by_two_blocks(const __half* values, __half* out) {
#if BUG
  const int first = blockIdx.x * (COLS - 1);
#else
  const int first = blockIdx.x * COLS;
#endif
  const int col = first + threadIdx.x;
  out[col] = values[col];   // here: first, second
}
