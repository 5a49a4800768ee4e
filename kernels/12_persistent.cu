// 12_persistent: persistent blocks fetch work tiles, and no consumer computes above its own diagonal. Parent: 11_pingpong.
// Question: what do a block's prologue and epilogue, the last wave of blocks, and scores that the mask discards cost?
// Change: as many blocks as are resident at once fetch tiles of Q from a counter, in causal calls the longest first; the producer loads
//         the next one while the consumers finish this one; a consumer stops at its own rows' diagonal, or immediately if it has no rows.
// Layout: warpgroup 0 is the producer; consumer warpgroup c owns rows 64·c onwards of the block's tile of Q.
// Requires: sm_90a.
#include "hopper.cuh"
#include "parts.cuh"
#include "pingpong.cuh"
#include "work_tiles.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
constexpr int MIN_BLOCKS = 1;   // per SM: the consumers of one block now overlap each other, as several blocks did before
// Registers per thread: what a block gets at launch, in multiples of 8 per thread, is redistributed by setmaxnreg.
constexpr int LAUNCH_REGISTERS = SM_REGISTERS / MIN_BLOCKS / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = MIN_BLOCKS == 1 ? 32 : 24;
constexpr int CONSUMER_SHARE = (LAUNCH_REGISTERS * (1 + NUM_CONSUMERS) - PRODUCER_REGISTERS) / NUM_CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMER_SHARE < 240 ? CONSUMER_SHARE : 240;   // a lone consumer's share exceeds a thread's maximum
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: with more, each would have too few registers");
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 (wgmma K) and at most 256 (wgmma N)");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: V of one tile and K of the next are in use together");
static_assert(Q_STAGES == 1 || Q_STAGES == 2, "Q_STAGES must be 1 or 2: Q is loaded at most one work tile ahead");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[Q_STAGES][NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];   // one tile per consumer
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element O[NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];             // output staging: each warp's own 16 rows
  WorkTile work[Q_STAGES];                                                            // Q's work tile; Q_full and Q_empty guard it, too
  ptx::Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has arrived; empty: all consumer warps are done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; barrier 0 is that of __syncthreads.
enum NamedBarrier {
  PRODUCER_BARRIER = 1,   // without TMA (unaligned rows): all producer threads know the work tile
  ORDER_BARRIER = 2,      // and 3, 4: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// Makes a value warp-uniform for ptxas, which cannot know that what it loads from shared memory is the same in all lanes: descriptors
// computed from it then stay in uniform registers, from which wgmma takes them.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(FULL_WARP, x); }

// The order in which tiles of Q are scheduled. Non-causal: one head after another, which keeps a head's K and V in the L2 cache. Causal:
// the longest first, so that the last ones to finish are short, but only among as many heads as fit in a share of the L2 cache.
__device__ __forceinline__ WorkTile work_at(const AttentionParams& p, int index) {
  const int num_q_tiles = (p.q_len + TILE_Q - 1) / TILE_Q;
  const int num_heads = p.q_heads * p.batch;
  if (index >= num_q_tiles * num_heads) return {0, 0, 0, NO_MORE};
  int q_tile = index % num_q_tiles, any_head = index / num_q_tiles;   // counted over all batches
  if constexpr (CAUSAL) {
    constexpr long long L2_SHARE_BYTES = 16 << 20;
    const long long head_bytes = 2ll * p.kv_len * HEAD_DIM * sizeof(element) * p.kv_heads / p.q_heads;
    const int section = static_cast<int>(max(1ll, min(static_cast<long long>(num_heads), L2_SHARE_BYTES / max(1ll, head_bytes))));
    const int first_head = index / (section * num_q_tiles) * section;
    const int section_heads = min(section, num_heads - first_head);   // the last section may be smaller
    const int section_index = index - first_head * num_q_tiles;
    q_tile = num_q_tiles - 1 - section_index / section_heads;
    any_head = first_head + section_index % section_heads;
  }
  return {q_tile * TILE_Q, any_head % p.q_heads, any_head / p.q_heads, tiles_of_rows(p, q_tile * TILE_Q, TILE_Q)};
}

// The producer: loads Q, K and V for the consumers, each tile as soon as its buffer is free.
__device__ __forceinline__ void produce(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int thread) {
  int fetched = 0;                // K/V tiles loaded so far
  int index = blockIdx.x;         // the first work tile is the block's index; the counter assigns the others
  for (int count = 0;; ++count) {
    const int q_stage = count % Q_STAGES;
    ptx::mbarrier_wait_parity(&smem.Q_empty[q_stage], count / Q_STAGES & 1 ^ 1);   // the consumers are done with the buffer's previous Q
    if (thread == 0) smem.work[q_stage] = work_at(p, index);
    if constexpr (!ALIGNED) ptx::bar_sync(PRODUCER_BARRIER, WARPGROUP);   // all producer threads see it
    const WorkTile work = smem.work[q_stage];
    if (work.num_tiles == NO_MORE) {
      ptx::mbarrier_arrive(&smem.Q_full[q_stage]);
      break;
    }
    const int kv_head = kv_head_of(p, work.head);
    const Source Q_source = {&maps.Q, &p.Q, p.q_len, work.head, work.batch};
    const Source K_source = {&maps.K, &p.K, p.kv_len, kv_head, work.batch};
    const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, work.batch};

    fill_begin(&smem.Q_full[q_stage], TILE_BYTES<TILE_Q>);
    for (int i = 0; i < NUM_CONSUMERS; ++i) {
      fill<WGMMA_ROWS, WARPGROUP>(smem.Q[q_stage][i], Q_source, work.first_q_row + i * WGMMA_ROWS, &smem.Q_full[q_stage], thread);
    }
    fill_end(&smem.Q_full[q_stage]);

    if (thread == 0) index = gridDim.x + atomicAdd(&p.work[0], 1u);   // issued early: it takes as long as a copy

    for (int tile = 0; tile < work.num_tiles; ++tile, ++fetched) {
      const int stage = fetched % PIPELINE_STAGES;
      const unsigned parity = fetched / PIPELINE_STAGES & 1;
      ptx::mbarrier_wait_parity(&smem.K_empty[stage], parity ^ 1);   // the consumers are done with the buffer's previous tile
      if (!does(Part::MEMORY) && fetched >= PIPELINE_STAGES) {
        ptx::mbarrier_arrive(&smem.K_full[stage]);
        ptx::mbarrier_wait_parity(&smem.V_empty[stage], parity ^ 1);
        ptx::mbarrier_arrive(&smem.V_full[stage]);
        continue;
      }
      fill_begin(&smem.K_full[stage], TILE_BYTES<TILE_KV>);
      fill<TILE_KV, WARPGROUP>(smem.K[stage], K_source, tile * TILE_KV, &smem.K_full[stage], thread);
      fill_end(&smem.K_full[stage]);
      ptx::mbarrier_wait_parity(&smem.V_empty[stage], parity ^ 1);
      fill_begin(&smem.V_full[stage], TILE_BYTES<TILE_KV>);
      fill<TILE_KV, WARPGROUP>(smem.V[stage], V_source, tile * TILE_KV, &smem.V_full[stage], thread);
      fill_end(&smem.V_full[stage]);
    }
  }
  if (thread == 0) close_counters(p);
}

// A consumer warpgroup: 64 query rows of each work tile.
__device__ __forceinline__ void consume(const AttentionParams& p, SharedStorage& smem, int consumer, int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int lane_col = lane % ROW_LANES * 2;
  int used = 0;   // K/V tiles of earlier work tiles

  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);

  GemmOrder::begin(consumer);
  for (int count = 0;; ++count) {
    const int q_stage = count % Q_STAGES;
    ptx::mbarrier_wait_parity(&smem.Q_full[q_stage], count / Q_STAGES & 1);
    const WorkTile work = smem.work[q_stage];
    __syncwarp();   // all lanes have read it before lane 0 releases Q's buffer
    if (work.num_tiles == NO_MORE) break;
    const int group_q_row = work.first_q_row + consumer * WGMMA_ROWS;
    const int num_tiles = tiles_of_rows(p, group_q_row, WGMMA_ROWS);   // at most work.num_tiles
    const int lane_row = group_q_row + warp * 16 + lane / ROW_LANES;
    const int unmasked_keys = p.scale_log2 > 0.0f ? visible_keys(p, group_q_row) : 0;   // keys visible to all of the consumer's rows

    const Descriptor Q_desc = rows_descriptor(smem.Q[q_stage][consumer]);
    unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
    float O_reg[HEAD_DIM / 2] = {};
    float S_reg[TILE_KV / 2];
    unsigned noted = 0;
    if constexpr (!does(Part::QK)) stand_in<TILE_KV / 2>(S_reg);
    if constexpr (!does(Part::PV)) stand_in<HEAD_DIM / 2>(O_reg);
    unsigned P_reg[TILE_KV / WGMMA_STEP][4];
    RowState rows;
    float rescale[HALVES];

    const auto stage_of = [&](int tile) { return (used + tile) % PIPELINE_STAGES; };
    const auto parity_of = [&](int tile) { return (used + tile) / PIPELINE_STAGES & 1; };
    const auto issue_QK = [&](int tile) {
      const Descriptor desc = K_desc + descriptor_step(stage_of(tile) * TILE_BYTES<TILE_KV>);
      if constexpr (!does(Part::QK)) return;
      if constexpr (Q_IN_REGISTERS) {
        multiply_QK<TILE_KV>(S_reg, Q_reg, desc);
      } else {
        multiply_QK<TILE_KV>(S_reg, Q_desc, desc);
      }
      ptx::wgmma_commit_group();
    };
    const auto issue_PV = [&](int tile) {
      if constexpr (!does(Part::PV)) {
        keep_alive<TILE_KV / WGMMA_STEP * 4>(noted, &P_reg[0][0]);
        return;
      }
      multiply_PV<TILE_KV>(O_reg, P_reg, V_desc + descriptor_step(stage_of(tile) * TILE_BYTES<TILE_KV>));
      ptx::wgmma_commit_group();
    };
    // An mbarrier test has latency, so it is issued early; where the tile is needed, a wait follows only if the test failed.
    const auto K_arrived = [&](int tile) { return ptx::mbarrier_test_wait_parity(&smem.K_full[stage_of(tile)], parity_of(tile)); };
    const auto V_arrived = [&](int tile) { return ptx::mbarrier_test_wait_parity(&smem.V_full[stage_of(tile)], parity_of(tile)); };
    const auto wait_for_K = [&](int tile) { ptx::mbarrier_wait_parity(&smem.K_full[stage_of(tile)], parity_of(tile)); };
    const auto wait_for_V = [&](int tile) { ptx::mbarrier_wait_parity(&smem.V_full[stage_of(tile)], parity_of(tile)); };
    // Releases a buffer: one arrival per warp.
    const auto release = [&](ptx::Mbarrier* empty) {
      if (lane == 0) ptx::mbarrier_arrive(empty);
    };
    const auto softmax_of = [&](int tile) {
      if constexpr (!does(Part::SOFTMAX)) return;
      const int tile_key = tile * TILE_KV;
      int num_keys[HALVES];
#pragma unroll
      for (int h = 0; h < HALVES; ++h) num_keys[h] = visible_keys(p, lane_row + 8 * h) - tile_key - lane_col;
      softmax<TILE_KV>(S_reg, rows, rescale, p.scale_log2, tile_key + TILE_KV > unmasked_keys, num_keys);
    };

    if constexpr (Q_IN_REGISTERS) {
      load_Q(Q_reg, smem.Q[q_stage][consumer], warp, lane);
      __syncwarp();   // all lanes have loaded their fragments
      release(&smem.Q_empty[q_stage]);
    }
    if (num_tiles > 0) {
      wait_for_K(0);
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(0);
      GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[stage_of(0)]);
      softmax_of(0);
      round_P<TILE_KV>(P_reg, S_reg);

      bool K_ready = false, V_ready = false;
      for (int tile = 1; tile < num_tiles; ++tile) {
        if (!K_ready) wait_for_K(tile);
        if (!V_ready) wait_for_V(tile - 1);
        GemmOrder::wait(consumer);
        ptx::wgmma_fence();
        issue_QK(tile);
        issue_PV(tile - 1);
        GemmOrder::pass(consumer);
        ptx::wgmma_wait_group<OVERLAP && does(Part::PV) ? 1 : 0>();   // the QK GEMM is complete; the PV GEMM may be in flight
        ptx::wgmma_pin(S_reg);
        release(&smem.K_empty[stage_of(tile)]);
        V_ready = V_arrived(tile);
        softmax_of(tile);
        K_ready = K_arrived(tile + 1);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_pin(O_reg);
        release(&smem.V_empty[stage_of(tile - 1)]);
        if constexpr (does(Part::SOFTMAX)) scale_O(O_reg, rescale);
        round_P<TILE_KV>(P_reg, S_reg);
      }
      if constexpr (!Q_IN_REGISTERS) release(&smem.Q_empty[q_stage]);

      if (!V_ready) wait_for_V(num_tiles - 1);
      ptx::wgmma_fence();
      issue_PV(num_tiles - 1);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[stage_of(num_tiles - 1)]);
    } else if constexpr (!Q_IN_REGISTERS) {
      release(&smem.Q_empty[q_stage]);
    }
    for (int tile = num_tiles; tile < work.num_tiles; ++tile) {   // tiles that the other consumers need and this one does not
      wait_for_K(tile);
      wait_for_V(tile);
      __syncwarp();   // all lanes have seen both tiles arrive before lane 0 releases them
      release(&smem.K_empty[stage_of(tile)]);
      release(&smem.V_empty[stage_of(tile)]);
      GemmOrder::wait(consumer);
      GemmOrder::pass(consumer);
    }
    used = uniform(used + work.num_tiles);
    if constexpr (!does(Part::PV)) O_reg[0] += static_cast<float>(noted);
    if constexpr (!does(Part::SOFTMAX)) rows.sum[0] = rows.sum[1] = 1.0f / ROW_LANES;

    write_output(p, O_reg, rows, smem.O[consumer], warp, lane, group_q_row, work.head, work.batch);
  }
  GemmOrder::end(consumer);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_12_persistent(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      ptx::mbarrier_init(&smem.Q_full[stage], FILL_ARRIVALS<WARPGROUP>);
      ptx::mbarrier_init(&smem.Q_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
    }
    for (int stage = 0; stage < PIPELINE_STAGES; ++stage) {
      ptx::mbarrier_init(&smem.K_full[stage], FILL_ARRIVALS<WARPGROUP>);
      ptx::mbarrier_init(&smem.V_full[stage], FILL_ARRIVALS<WARPGROUP>);
      ptx::mbarrier_init(&smem.K_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
      ptx::mbarrier_init(&smem.V_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the mbarriers are initialised

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (thread < FILL_ARRIVALS<WARPGROUP>) produce(p, maps, smem, thread);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, smem, warpgroup - 1, thread);
  }
}
