// bug: the last thread reads its right neighbour's score, which lies past the end of the shared array.
// mechanism: shared memory bounds
// caught by: out of bounds
// needs: hooks
// launch: grid=1 block=64 smem=256
// parameter: scores f32[64] normal
// parameter: out f32[64] written
// expect: out = np.maximum(scores, np.append(scores[1:], scores[-1]))
constexpr int COLS = 64;

extern "C" __global__ void shared_index_past_the_end(const float* scores, float* out) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* row_smem = reinterpret_cast<float*>(shared_bytes);   // (COLS)
  const int col = threadIdx.x;
  row_smem[col] = scores[col];
  __syncthreads();   // the row is complete
#if BUG
  const int neighbour = col + 1;
#else
  const int neighbour = min(col + 1, COLS - 1);
#endif
  out[col] = fmaxf(row_smem[col], row_smem[neighbour]);   // here
}
