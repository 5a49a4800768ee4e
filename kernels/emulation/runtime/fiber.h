// A fiber: an execution context with its own stack, switched explicitly. A switch saves only the registers that the calling
// convention requires a function to preserve, and takes a few nanoseconds. On targets other than x86-64 and aarch64, or with
// -DFLASHLAB_UCONTEXT, POSIX ucontext is used, which is slower.
#pragma once
#include <cstddef>

#if !defined(FLASHLAB_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define FLASHLAB_UCONTEXT
#endif

#ifdef FLASHLAB_UCONTEXT
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#include <ucontext.h>
#endif

namespace emu {

struct Fiber {
#ifdef FLASHLAB_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
};

// Prepares `fiber` to start in `entry`, which must never return, at the top of the stack [stack, stack + bytes).
void prepare(Fiber& fiber, unsigned char* stack, std::size_t bytes, void (*entry)());

// Suspends `from` here and resumes `to` where it was suspended.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace emu
