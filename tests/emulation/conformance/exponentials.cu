// feature: ex2.approx.ftz and the exponentials that are made of it, over the range of float32
// tolerance: 2 ulp
// launch: grid=256 block=256
// parameter: exponents f32[65536] grid=-150:130
// parameter: out f32[3,65536] written
// expect: out = np.repeat(np.where(exponents < -126, 0, np.exp2(exponents.astype(np.float64)))[None], 3, axis=0)
#include "ptx.cuh"

constexpr int COUNT = 65536;

extern "C" __global__ void exponentials(const float* exponents, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = exponents[i];
  out[i] = ptx::ex2_approx_ftz(x);
  // Those of <math> do not flush: what lies below the smallest normal number is left out here.
  const bool normal = x >= -126.0f;
  out[COUNT + i] = normal ? exp2f(x) : 0.0f;
  out[2 * COUNT + i] = normal ? ptx::ex2_approx_ftz(x) : 0.0f;
}
