// Leaves out one part of a stage's computation, to measure how much faster the rest is: LEAVE_OUT, 0 for none. The output is then
// wrong, and so is everything computed from it. What the part would have produced keeps its old content, and is used nevertheless.
#pragma once
#include "attention.cuh"

#ifndef LEAVE_OUT
#define LEAVE_OUT 0
#endif

enum class Part {
  QK = 1,    // Q and K fragments, and the QK GEMM
  SOFTMAX,   // scale, mask, maxima, exponentials, sums, and rescaling of the output; raw scores are rounded to P
  PV,        // P and V fragments, and the PV GEMM
  MEMORY,    // loads of K and V tiles after the first ones, which fill the buffers
};
static_assert(LEAVE_OUT >= 0 && LEAVE_OUT <= static_cast<int>(Part::MEMORY), "LEAVE_OUT must be 0 or a value of Part");

__device__ constexpr bool does(Part part) { return LEAVE_OUT != static_cast<int>(part); }

// Replaces COUNT values that would have been computed by distinct ones, so that the compiler keeps what is done with each.
template <int COUNT>
__device__ __forceinline__ void stand_in(float* x) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = static_cast<float>(threadIdx.x % WARP + i);
}

// Keeps COUNT registers alive that nothing else reads, at half an instruction each; the result must be used in the output.
template <int COUNT>
__device__ __forceinline__ void keep_alive(unsigned& noted, const unsigned* x) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) noted ^= x[i];
}
