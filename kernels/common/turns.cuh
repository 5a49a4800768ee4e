// Consumers that issue their GEMMs in ping-pong order: one's are in the tensor cores while another's softmax runs.
#pragma once
#include "hopper.cuh"

// A consumer's turn comes when the one before it has issued its own; it waits at named barrier FIRST_BARRIER + consumer. The last
// one starts by passing to the first; whoever took the last turn leaves one that nobody needs, which `end` takes. Without IN_TURNS,
// or alone, nobody waits.
template <int FIRST_BARRIER, int CONSUMERS, bool IN_TURNS>
struct Turns {
  static constexpr bool TAKEN = IN_TURNS && CONSUMERS > 1;

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
