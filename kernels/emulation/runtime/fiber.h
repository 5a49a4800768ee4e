// A fiber: a stack of its own and a place in the code, entered and left by name. The switch saves what the calling convention
// asks a function to preserve, nothing else: a few nanoseconds. Elsewhere than on x86-64 and aarch64, or with
// -DFLASHLAB_UCONTEXT, POSIX ucontext does the same, slower.
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

// `fiber` will start in `entry`, which must never return, at the top of [stack, stack + bytes).
void prepare(Fiber& fiber, unsigned char* stack, std::size_t bytes, void (*entry)());

// Leave `from` here, go on with `to` where it was left.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace emu
