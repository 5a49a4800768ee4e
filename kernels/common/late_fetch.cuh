// The producer warpgroup of the persistent stages from 13 on, and the tile scheduler. One warp fetches work tiles and loads their Q,
// each as late as it can still arrive in time; the other three load K and V. With TMA, one thread each of the first two warps does it all.
//
// The stage defines TILE_KV, NUM_CONSUMERS, PIPELINE_STAGES and L2_SHARE_MB; its SharedStorage has Q[Q_BUFFERS][NUM_CONSUMERS],
// K and V[PIPELINE_STAGES], work[Q_STAGES] and the mbarriers used here.
#pragma once
#include "work_tiles.cuh"

constexpr int Q_THREADS = WARP;            // of the producer
constexpr int KV_THREADS = WARPGROUP - WARP;
constexpr int Q_STAGES = 2;                // the next work tile's Q is loaded while this one is in use
// Wide rows leave room for one Q. The next work tile and its K are still fetched as early, but its Q only once the previous Q is free.
constexpr int Q_BUFFERS = HEAD_DIM > 128 ? 1 : Q_STAGES;
// 1: K and V are fetched as soon as the work tile is known; 0: once its Q has arrived. A stage may define it; 1 needs `work_ready`.
#ifndef WORK_BEFORE_Q
#define WORK_BEFORE_Q (Q_BUFFERS == 1)
#endif
// 1: the last section of heads has at least one work tile per block (TileScheduler). A stage may define it.
#ifndef LAST_SECTION_FILLS
#define LAST_SECTION_FILLS 0
#endif
// Every so many K/V tiles, one is read before those between them (TileOrder); 1: all are read from the last to the first. A stage may
// define it.
#ifndef COARSE_STRIDE
#define COARSE_STRIDE 1
#endif
constexpr int TAKE_AHEAD = 2;              // the next work tile is fetched when this many K/V tiles remain after the one to be loaded next
constexpr long long L2_SHARE_BYTES = static_cast<long long>(L2_SHARE_MB) << 20;

// A stage of a circular buffer, and the phase parity of its full barrier.
template <int SIZE>
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ Place next() const {
    return stage + 1 == SIZE ? Place{0, parity ^ 1} : Place{stage + 1, parity};
  }
  __device__ __forceinline__ Place previous() const {
    return stage == 0 ? Place{SIZE - 1, parity ^ 1} : Place{stage - 1, parity};
  }
};
using KvPlace = Place<PIPELINE_STAGES>;
__device__ __forceinline__ Place<Q_STAGES> Q_place(int count) {   // the same from a single counter, to save registers
  return {count % Q_STAGES, static_cast<unsigned>(count / Q_STAGES & 1)};
}
__device__ __forceinline__ int Q_buffer(int count) { return Q_BUFFERS == 1 ? 0 : count % Q_STAGES; }

// The order in which a block reads a work tile's K/V tiles. The last ones, which may be masked for some row, come first, in descending
// order. So do the others, or with COARSE_STRIDE every so many of them, and then those between, in ascending order: where scores grow
// towards the first key, most tiles then hold none above those read before.
struct TileOrder {
  // Whatever the lengths, a row that does not see a tile whole can only be found in so many of the last tiles.
  static constexpr int LAST = CAUSAL ? (NUM_CONSUMERS * WGMMA_ROWS + 2 * TILE_KV - 2) / TILE_KV : 1;
  static constexpr int STRIDE = WINDOW ? 1 : COARSE_STRIDE;
  unsigned others, coarse;   // number of other tiles; of these, of those read first
  __device__ __forceinline__ explicit TileOrder(const WorkTile& work)
      : others(max(0, work.num_tiles - LAST)), coarse((others + STRIDE - 1) / STRIDE) {}
  // The tile after which `left` are left to read.
  __device__ __forceinline__ int at(int left) const {
    if constexpr (STRIDE > 1) {
      if (left < static_cast<int>(others)) {
        const unsigned read = others - 1 - left, between = read - coarse;
        return read < coarse ? (coarse - 1 - read) * STRIDE : between + between / max(STRIDE - 1, 1) + 1;
      }
    }
    return left;
  }
};

#if !VARLEN
// The tile scheduler. Work tiles come from an atomic counter, in sections of as many heads as fit their K and V into a share of the L2
// cache. Within a section the longest work tiles come first, so that the last to finish are short. The longest are, causal, those of the
// last rows, which see the most keys; non-causal, those of the first rows, because a head's last tile may have fewer rows. The last section
// decides how evenly blocks finish: if it has fewer work tiles than there are blocks, some of the longest are among the last to finish.
template <int TILE_ROWS>
class TileScheduler {
 public:
  // The 64-bit divisions are done here, once.
  __device__ __forceinline__ explicit TileScheduler(const AttentionParams& p)
      : num_q_tiles((p.q_len + TILE_ROWS - 1) / TILE_ROWS), num_heads(p.q_heads * p.batch) {
    const long long head_bytes = 2ll * p.kv_len * HEAD_DIM * sizeof(element) * p.kv_heads / p.q_heads;
    section = static_cast<int>(max(1ll, min(static_cast<long long>(num_heads), L2_SHARE_BYTES / max(1ll, head_bytes))));
    if constexpr (LAST_SECTION_FILLS) {
      const int heads_for_all = (static_cast<int>(gridDim.x) + num_q_tiles - 1) / num_q_tiles;
      num_before = num_heads - min(num_heads, max(section, heads_for_all));
    }
  }

  // A block's first work tile has the block's index; the others come from the counter.
  __device__ __forceinline__ WorkTile next(const AttentionParams& p, bool first) {
    const int index = first ? blockIdx.x : gridDim.x + atomicAdd(&p.work[0], 1u);
    if (index >= num_q_tiles * num_heads) return {0, 0, 0, NO_MORE};
    // The heads left over from whole sections come first: as the last section, their longest work tiles would finish last.
    const int left_over = (LAST_SECTION_FILLS ? num_before : num_heads) % section;
    const int in_sections = index - left_over * num_q_tiles;
    int first_head = in_sections < 0 ? 0 : left_over + in_sections / (section * num_q_tiles) * section;
    int section_heads = in_sections < 0 ? left_over : section;
    if constexpr (LAST_SECTION_FILLS) {
      if (first_head >= num_before) {
        first_head = num_before;
        section_heads = num_heads - num_before;
      }
    }
    const int section_index = index - first_head * num_q_tiles;
    const int round = section_index / section_heads;
    const int first_q_row = (CAUSAL ? num_q_tiles - 1 - round : round) * TILE_ROWS;
    const int any_head = first_head + section_index - round * section_heads;   // counted over all batches
    const int batch = any_head / p.q_heads;
    return {first_q_row, any_head - batch * p.q_heads, batch, tiles_of_rows(p, first_q_row, TILE_ROWS)};
  }

 private:
  int num_q_tiles;
  int num_heads;
  int section;      // heads processed at the same time
  int num_before;   // heads before the last section, where that has its own size
};
#else
// The tile scheduler for packed sequences: sequence by sequence in order, head by head, and within a head the longest work tiles first, as
// above. Blocks that run at the same time have neighbouring tiles, and therefore share the K and V of few heads.
template <int TILE_ROWS>
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const AttentionParams&) {}

  // The indices that a block fetches increase, so it walks the sequences once, resuming where it stopped. It keeps no more state: the
  // producer has few registers.
  __device__ __forceinline__ WorkTile next(const AttentionParams& p, bool first) {
    const int number = first ? blockIdx.x : gridDim.x + atomicAdd(&p.work[0], 1u);
    for (; batch < p.batch; ++batch) {
      const Sequence sequence = sequence_at(p, batch);
      const int num_q_tiles = (sequence.q_len + TILE_ROWS - 1) / TILE_ROWS, index = number - tiles_before;
      if (index < num_q_tiles * p.q_heads) {
        const int head = index / num_q_tiles, round = index - head * num_q_tiles;
        const int first_q_row = (CAUSAL ? num_q_tiles - 1 - round : round) * TILE_ROWS;
        return {first_q_row, head, batch, tiles_of_rows(of_sequence(p, sequence), first_q_row, TILE_ROWS), sequence};
      }
      tiles_before += num_q_tiles * p.q_heads;
    }
    return {0, 0, 0, NO_MORE};
  }

 private:
  int batch = 0;          // the current sequence
  int tiles_before = 0;   // work tiles of the sequences before it
};
#endif

// One producer warp: fetches work tiles and loads their Q, as late as Q can still arrive in time. Blocks that fetch early get tiles in the
// order of their requests, not in the order in which they become free, and the last blocks finish later.
template <class Smem>
__device__ __forceinline__ void fetch_Q(const AttentionParams& p, const AttentionMaps& maps, Smem& smem, int thread) {
  constexpr int ROWS = NUM_CONSUMERS * WGMMA_ROWS;
  TileScheduler<ROWS> scheduler(p);
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_empty[q.stage], q.parity ^ 1);   // consumers and K/V warps have released the stage
    if (count > 0) ptx::mbarrier_wait_parity(&smem.end_near, (count - 1) & 1);   // the previous work tile is near its end
    if (thread == 0) smem.work[q.stage] = scheduler.next(p, count == 0);
    if constexpr (!ALIGNED) __syncwarp();   // makes it visible to the other lanes
    const WorkTile work = smem.work[q.stage];
    if constexpr (WORK_BEFORE_Q) {
      if (thread == 0) ptx::mbarrier_arrive(&smem.work_ready[q.stage]);
    }
    if (work.num_tiles == NO_MORE) {
      ptx::mbarrier_arrive(&smem.Q_full[q.stage]);
      break;
    }
    if constexpr (Q_BUFFERS == 1) {
      const Place<Q_STAGES> last = Q_place(max(count, 1) - 1);   // the consumers are done with the previous Q
      if (count > 0) ptx::mbarrier_wait_parity(&smem.Q_empty[last.stage], last.parity);
    }
    const AttentionParams& own = params_of(p, work);
    const InMap place = q_in_map(p, work);
    const Source source = {&maps.Q, &own.Q, own.q_len, work.head, place.batch, place.row};
    fill_begin(&smem.Q_full[q.stage], TILE_BYTES<ROWS>);
    auto& tiles = smem.Q[Q_buffer(count)];
    for (int i = 0; i < NUM_CONSUMERS; ++i) {
      fill<WGMMA_ROWS, Q_THREADS>(tiles[i], source, work.first_q_row + i * WGMMA_ROWS, &smem.Q_full[q.stage], thread);
    }
    fill_end(&smem.Q_full[q.stage]);
  }
  if (thread == 0) close_counters(p);
}

// The other producer warps: load K and V as soon as stages are free, and signal when a work tile is near its end. K/V tiles are loaded
// in TileOrder, in which the partially masked ones come first.
template <class Smem>
__device__ __forceinline__ void fetch_KV(const AttentionParams& p, const AttentionMaps& maps, Smem& smem, int thread) {
  KvPlace kv;
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    if constexpr (WORK_BEFORE_Q) {
      ptx::mbarrier_wait_parity(&smem.work_ready[q.stage], q.parity);
    } else {
      ptx::mbarrier_wait_parity(&smem.Q_full[q.stage], q.parity);   // the work tile is known
    }
    const WorkTile work = smem.work[q.stage];
    if constexpr (!ALIGNED) __syncwarp();   // all lanes have read it: consumers could release a work tile without K/V tiles immediately
    if (thread % WARP == 0) ptx::mbarrier_arrive(&smem.Q_empty[q.stage]);
    if (work.num_tiles == NO_MORE) break;
    const int kv_head = kv_head_of(p, work.head);
    const AttentionParams& own = params_of(p, work);
    const InMap place = kv_in_map(p, work);
    const Source K_source = {&maps.K, &own.K, own.kv_len, kv_head, place.batch, place.row};
    const Source V_source = {&maps.V, &own.V, own.kv_len, kv_head, place.batch, place.row};
    const int first_tile = first_tile_of_rows(own, work.first_q_row);
    const int last_tiles = first_tile + min(work.num_tiles - 1, TAKE_AHEAD);
    if (work.num_tiles == 0 && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
    for (int i = first_tile + work.num_tiles - 1; i >= first_tile; --i, kv = kv.next()) {
      const int tile = TileOrder(work).at(i);
      if (i == last_tiles && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
      ptx::mbarrier_wait_parity(&smem.K_empty[kv.stage], kv.parity ^ 1);   // the consumers have released the stage's previous tile
      fill_begin(&smem.K_full[kv.stage], TILE_BYTES<TILE_KV>);
      fill<TILE_KV, KV_THREADS>(smem.K[kv.stage], K_source, tile * TILE_KV, &smem.K_full[kv.stage], thread);
      fill_end(&smem.K_full[kv.stage]);
      ptx::mbarrier_wait_parity(&smem.V_empty[kv.stage], kv.parity ^ 1);
      fill_begin(&smem.V_full[kv.stage], TILE_BYTES<TILE_KV>);
      fill<TILE_KV, KV_THREADS>(smem.V[kv.stage], V_source, tile * TILE_KV, &smem.V_full[kv.stage], thread);
      fill_end(&smem.V_full[kv.stage]);
    }
  }
}

// Called by one thread of the block, before any other thread uses the barriers.
template <class Smem>
__device__ __forceinline__ void init_barriers(Smem& smem) {
  constexpr int KV_WARPS = ALIGNED ? 1 : KV_THREADS / WARP;   // K/V warps that read the work tile
  ptx::mbarrier_init(&smem.end_near, 1);
  for (int stage = 0; stage < Q_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.Q_full[stage], FILL_ARRIVALS<Q_THREADS>);
    ptx::mbarrier_init(&smem.Q_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS + KV_WARPS);
    if constexpr (WORK_BEFORE_Q) ptx::mbarrier_init(&smem.work_ready[stage], 1);
  }
  for (int stage = 0; stage < PIPELINE_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.K_full[stage], FILL_ARRIVALS<KV_THREADS>);
    ptx::mbarrier_init(&smem.V_full[stage], FILL_ARRIVALS<KV_THREADS>);
    ptx::mbarrier_init(&smem.K_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
    ptx::mbarrier_init(&smem.V_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
  }
  ptx::fence_mbarrier_init();
}

// The producer warpgroup; `thread` is the index within it.
template <class Smem>
__device__ __forceinline__ void produce(const AttentionParams& p, const AttentionMaps& maps, Smem& smem, int thread) {
  if (thread < FILL_ARRIVALS<Q_THREADS>) {
    fetch_Q(p, maps, smem, thread);
  } else if (thread >= Q_THREADS && thread < Q_THREADS + FILL_ARRIVALS<KV_THREADS>) {
    fetch_KV(p, maps, smem, thread - Q_THREADS);
  }
}
