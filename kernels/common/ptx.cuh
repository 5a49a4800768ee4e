// PTX instructions, one wrapper each, named after them. Section numbers are those of the PTX ISA 9.0.
// Nothing outside this folder contains assembly: a CPU backend gives the same names C++ bodies.
#pragma once

namespace ptx {

// 9.7.3.22 ex2: 2^x, about 2 ulp; 2^-inf = 0; results below 2^-126 are flushed to 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
