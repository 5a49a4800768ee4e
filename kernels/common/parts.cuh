// A part of a stage's work that is not done, to see by how much the rest is faster: LEAVE_OUT, 0 for none. What comes out is then
// wrong, and so is every number made of it; whatever the part would have handed on stays as it was, and is used all the same.
#pragma once
#include "attention.cuh"

#ifndef LEAVE_OUT
#define LEAVE_OUT 0
#endif

enum class Part {
  QK = 1,    // fragments of Q and K, and their GEMM
  SOFTMAX,   // scale, mask, maxima, exponentials, sums, and the output's factors; scores are rounded as they are
  PV,        // fragments of P and V, and their GEMM
  MEMORY,    // tiles of K and V after those that fill the buffers first
};
static_assert(LEAVE_OUT >= 0 && LEAVE_OUT <= static_cast<int>(Part::MEMORY), "LEAVE_OUT is 0 or one of Part");

__device__ constexpr bool does(Part part) { return LEAVE_OUT != static_cast<int>(part); }

// Stands in for COUNT numbers that would have been computed: all different, so that the compiler keeps what is done with each.
template <int COUNT>
__device__ __forceinline__ void stand_in(float* x) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] = static_cast<float>(threadIdx.x % WARP + i);
}

// Takes note of COUNT registers that nobody reads any more, at half an instruction each; the result must end in the output.
template <int COUNT>
__device__ __forceinline__ void take_note(unsigned& noted, const unsigned* x) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) noted ^= x[i];
}
