// empty: an empty kernel. Its time is a lower bound for all others.
#include "micro.cuh"

extern "C" __global__ void micro_empty(const __grid_constant__ MicroParams p) {}
