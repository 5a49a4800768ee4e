// bug: the last thread reads past the end of a shared array of fixed size, into the array that follows it.
// mechanism: shared memory bounds
// caught by: out of bounds
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: scores f32[64] normal
// parameter: out f32[64] written
// expect: out = np.maximum(scores, np.append(scores[1:], scores[-1])) + scores.max()
constexpr int COLS = 64;

extern "C" __global__ void shared_array_past_the_end(const float* scores, float* out) {
  __shared__ float row_smem[COLS];
  __shared__ float copy_smem[COLS];
  const int col = threadIdx.x;
  row_smem[col] = scores[col];
  copy_smem[col] = scores[col];
  __syncthreads();   // both rows are complete
#if BUG
  const int neighbour = col + 1;
#else
  const int neighbour = min(col + 1, COLS - 1);
#endif
  float row_max = copy_smem[0];
  for (int other = 1; other < COLS; ++other) row_max = fmaxf(row_max, copy_smem[other]);
  out[col] = fmaxf(row_smem[col], row_smem[neighbour]) + row_max;   // here
}
