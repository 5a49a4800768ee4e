// A KV cache in pages of PAGE_SIZE keys: the second parameter of a kernel that reads one.
#pragma once
#include "attention.cuh"

// K and V of AttentionParams are then pools of pages, (pages, kv_heads, PAGE_SIZE, HEAD_DIM), whose batch stride is the page stride, and
// kv_len is the capacity of a sequence in the page table. src/flashlab/run/paged.py mirrors this layout, field by field.
struct PagedCache {
  const int* page_table;   // (batch, table_stride): the page numbers of a sequence, in the order of its keys
  const int* lengths;      // (batch): number of keys of a sequence
  long long table_stride;  // in entries
  int num_pages;
  unsigned* faults;        // counts [0] invalid page numbers, [1] lengths below 0 or beyond the table; null if not requested
};

// Clamps a length to the capacity of the page table.
__device__ __forceinline__ int cut_length(const AttentionParams& p, int length) { return max(0, min(length, p.kv_len)); }

// Number of keys of a sequence. A length out of range is clamped, and counted as a fault.
__device__ __forceinline__ int cached_keys(const AttentionParams& p, const PagedCache& cache, int batch) {
  const int length = cache.lengths[batch], most = cut_length(p, length);
  if (length != most && cache.faults && threadIdx.x == 0) atomicAdd(&cache.faults[1], 1u);
  return most;
}

// A page number from the table, or -1 if it is invalid, which is counted. Page -1 is never read.
__device__ __forceinline__ int checked_page(const PagedCache& cache, int page) {
  if (static_cast<unsigned>(page) < static_cast<unsigned>(cache.num_pages)) return page;
  if (cache.faults) atomicAdd(&cache.faults[0], 1u);
  return -1;
}
