// Consumer warpgroups that issue their GEMMs in ping-pong order: the GEMMs of one overlap the softmax of another.
#pragma once
#include "hopper.cuh"

// A consumer warpgroup issues its GEMMs after the previous one has issued its own; it waits on named barrier FIRST_BARRIER + consumer.
// `begin`: the last consumer lets the first one start. `end`: the first consumer waits for the last, unmatched arrival at its barrier.
// Without ORDERED, or with one consumer, nothing waits.
template <int FIRST_BARRIER, int CONSUMERS, bool ORDERED>
struct Turns {
  static constexpr bool TAKEN = ORDERED && CONSUMERS > 1;

  static __device__ __forceinline__ void wait(int consumer) {
    if constexpr (TAKEN) ptx::bar_sync(FIRST_BARRIER + consumer, 2 * WARPGROUP);
  }
  static __device__ __forceinline__ void pass(int consumer) {
    if constexpr (TAKEN) ptx::bar_arrive(FIRST_BARRIER + (consumer + 1) % CONSUMERS, 2 * WARPGROUP);
  }
  static __device__ __forceinline__ void begin(int consumer) {
    if (consumer == CONSUMERS - 1) pass(consumer);
  }
  static __device__ __forceinline__ void end(int consumer) {
    if (consumer == 0) wait(consumer);
  }
};
