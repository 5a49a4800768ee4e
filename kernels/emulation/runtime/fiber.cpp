#include "fiber.h"

#include <cstdint>
#include <cstring>

namespace emu {

#ifdef FLASHLAB_UCONTEXT

void prepare(Fiber& fiber, unsigned char* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#else

#ifdef __APPLE__
#define SYMBOL(name) "_" #name
#else
#define SYMBOL(name) #name
#endif

extern "C" void flashlab_switch(void** save_stack_pointer, void* load_stack_pointer);

#ifdef __x86_64__

// System V ABI, 3.2.1: a function preserves rbx, rbp, r12 to r15 and the stack pointer. The return address is on top of the stack.
asm(".text\n"
    ".globl " SYMBOL(flashlab_switch) "\n"
    SYMBOL(flashlab_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

static constexpr int SAVED_WORDS = 6;

static void** initial_frame(void** top, void (*entry)()) {
  *--top = nullptr;                               // entry's return address, unused; aligns the stack as after a call
  *--top = reinterpret_cast<void*>(entry);        // `ret` jumps here
  top -= SAVED_WORDS;
  std::memset(top, 0, SAVED_WORDS * sizeof(void*));
  return top;
}

#else

// AAPCS64, 6.1: a function preserves x19 to x29 and the low halves of v8 to v15. The link register holds the return address.
asm(".text\n"
    ".globl " SYMBOL(flashlab_switch) "\n"
    ".p2align 2\n"
    SYMBOL(flashlab_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");

static constexpr int SAVED_WORDS = 20;
static constexpr int LINK_REGISTER = 11;   // word of x30 in the frame

static void** initial_frame(void** top, void (*entry)()) {
  top -= SAVED_WORDS;
  std::memset(top, 0, SAVED_WORDS * sizeof(void*));
  top[LINK_REGISTER] = reinterpret_cast<void*>(entry);
  return top;
}

#endif

void prepare(Fiber& fiber, unsigned char* stack, std::size_t bytes, void (*entry)()) {
  const auto top = reinterpret_cast<std::uintptr_t>(stack + bytes) & ~std::uintptr_t{15};
  fiber.stack_pointer = initial_frame(reinterpret_cast<void**>(top), entry);
}

void switch_fiber(Fiber& from, Fiber& to) { flashlab_switch(&from.stack_pointer, to.stack_pointer); }

#endif

}  // namespace emu
