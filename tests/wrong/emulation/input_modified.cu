// bug: the scores are scaled in place, in the caller's own tensor.
// mechanism: output index
// caught by: input modified
// needs: hooks
// launch: grid=2 block=32 smem=0
// parameter: scores f32[2,32] normal
// parameter: out f32[2,32] written
// expect: out = scores * 0.5 + 1
extern "C" __global__ void input_modified(float* scores, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float scaled = scores[i] * 0.5f;
#if BUG
  scores[i] = scaled;   // here
#endif
  out[i] = scaled + 1.0f;
}
