// Linked right after the kernel's own object file, before the rest of the runtime: code below this address is the kernel's.
extern "C" void flashlab_runtime_begins() {}
