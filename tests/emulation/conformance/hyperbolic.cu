// feature: tanh.approx, which is right to 11 bits: here and on a chip the errors are others
// tolerance: 16384 ulp
// launch: grid=256 block=256
// parameter: x f32[65536] grid=-12:12
// parameter: out f32[65536] written
// expect: out = np.tanh(x.astype(np.float64))
#include "ptx.cuh"

extern "C" __global__ void hyperbolic(const float* x, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = ptx::tanh_approx(x[i]);
}
