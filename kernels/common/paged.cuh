// A cache of keys and values in pages of PAGE_SIZE keys: what a kernel that reads one takes as its second parameter.
#pragma once
#include "attention.cuh"

// K and V of AttentionParams are then pools, (pages, kv_heads, PAGE_SIZE, HEAD_DIM), whose batch stride is that of a page, and its
// kv_len is what a sequence of the page table has room for. src/flashlab/run/paged.py mirrors this layout, field by field.
struct PagedCache {
  const int* page_table;   // (batch, table_stride): the pages of a sequence, in the order of its keys
  const int* lengths;      // (batch): keys of a sequence
  long long table_stride;  // entries
  int num_pages;
  unsigned* faults;        // counts [0] page numbers that are none, [1] lengths below 0 or beyond the table; null where nobody asks
};

// A length within the table: one beyond is cut down to it.
__device__ __forceinline__ int cut_length(const AttentionParams& p, int length) { return max(0, min(length, p.kv_len)); }

// Keys of a sequence.
__device__ __forceinline__ int cached_keys(const AttentionParams& p, const PagedCache& cache, int batch) {
  const int length = cache.lengths[batch], most = cut_length(p, length);
  if (length != most && cache.faults && threadIdx.x == 0) atomicAdd(&cache.faults[1], 1u);
  return most;
}

// A page number from the table; -1, which nobody follows, where it is none.
__device__ __forceinline__ int checked_page(const PagedCache& cache, int page) {
  if (static_cast<unsigned>(page) < static_cast<unsigned>(cache.num_pages)) return page;
  if (cache.faults) atomicAdd(&cache.faults[0], 1u);
  return -1;
}
