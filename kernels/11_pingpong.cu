// 11_pingpong: GEMMs overlap the softmax, that of another warpgroup or of another tile. Parent: 10_warp_specialized.
// Question: how much tensor core time was lost while a warpgroup computed its softmax, and how much softmax time during its GEMMs?
// Change: two orderings, each of which can be disabled. PINGPONG: consumers issue their GEMMs in ping-pong order, one in its softmax
//         while another's GEMMs run. OVERLAP: a tile's PV GEMM, issued after the next tile's QK GEMM, runs under that tile's softmax.
// Layout: warpgroup 0 is the producer; consumer warpgroup c of block x owns rows x·TILE_Q + 64·c onwards.
// Requires: sm_90a.
#include "hopper.cuh"
#include "pingpong.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// Registers per thread: what a block gets at launch, in multiples of 8 per thread, is redistributed by setmaxnreg.
constexpr int LAUNCH_REGISTERS = SM_REGISTERS / MIN_BLOCKS / THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = MIN_BLOCKS == 1 ? 32 : 24;
constexpr int CONSUMER_SHARE = (LAUNCH_REGISTERS * (1 + NUM_CONSUMERS) - PRODUCER_REGISTERS) / NUM_CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMER_SHARE < 240 ? CONSUMER_SHARE : 240;   // a lone consumer's share exceeds a thread's maximum
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: with more, each would have too few registers");
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 (wgmma K) and at most 256 (wgmma N)");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: V of one tile and K of the next are in use together");
static_assert(MIN_BLOCKS >= 1, "MIN_BLOCKS must be at least 1");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];   // one tile per consumer; later its output
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  ptx::Mbarrier Q_full;
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has arrived; empty: all consumer warps are done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV};

// Named barriers; barrier 0 is that of __syncthreads.
enum NamedBarrier {
  CONSUMER_BARRIER = 1,   // and 2, 3: one per consumer
  ORDER_BARRIER = 4,      // and 5, 6: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// A block's work tile.
struct WorkTile {
  int first_q_row;
  int head;
  int batch;
  int num_tiles;   // of K and V
};

__device__ __forceinline__ WorkTile work_of_block(const AttentionParams& p) {
  const int first_q_row = blockIdx.x * TILE_Q;
  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  return {first_q_row, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z), (block_keys + TILE_KV - 1) / TILE_KV};
}

// The producer: loads Q, K and V for the consumers, each tile as soon as its buffer is free.
__device__ __forceinline__ void produce(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, const WorkTile& work,
                                        int thread) {
  const int kv_head = kv_head_of(p, work.head);
  const Source Q_source = {&maps.Q, &p.Q, p.q_len, work.head, work.batch};
  const Source K_source = {&maps.K, &p.K, p.kv_len, kv_head, work.batch};
  const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, work.batch};

  fill_begin(&smem.Q_full, TILE_BYTES<TILE_Q>);
  for (int i = 0; i < NUM_CONSUMERS; ++i) {
    fill<WGMMA_ROWS, WARPGROUP>(smem.Q[i], Q_source, work.first_q_row + i * WGMMA_ROWS, &smem.Q_full, thread);
  }
  fill_end(&smem.Q_full);

  for (int tile = 0; tile < work.num_tiles; ++tile) {
    const int stage = tile % PIPELINE_STAGES;
    const unsigned parity = tile / PIPELINE_STAGES & 1;
    ptx::mbarrier_wait_parity(&smem.K_empty[stage], parity ^ 1);   // the consumers are done with the buffer's previous tile
    fill_begin(&smem.K_full[stage], TILE_BYTES<TILE_KV>);
    fill<TILE_KV, WARPGROUP>(smem.K[stage], K_source, tile * TILE_KV, &smem.K_full[stage], thread);
    fill_end(&smem.K_full[stage]);
    ptx::mbarrier_wait_parity(&smem.V_empty[stage], parity ^ 1);
    fill_begin(&smem.V_full[stage], TILE_BYTES<TILE_KV>);
    fill<TILE_KV, WARPGROUP>(smem.V[stage], V_source, tile * TILE_KV, &smem.V_full[stage], thread);
    fill_end(&smem.V_full[stage]);
  }
}

// A consumer warpgroup: 64 query rows.
__device__ __forceinline__ void consume(const AttentionParams& p, SharedStorage& smem, const WorkTile& work, int consumer, int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int group_q_row = work.first_q_row + consumer * WGMMA_ROWS;
  const int lane_row = group_q_row + warp * 16 + lane / ROW_LANES;
  const int lane_col = lane % ROW_LANES * 2;
  const int unmasked_keys = p.scale_log2 > 0.0f ? visible_keys(p, group_q_row) : 0;   // keys visible to all of the consumer's rows

  const Descriptor Q_desc = rows_descriptor(smem.Q[consumer]);
  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  float O_reg[HEAD_DIM / 2] = {};
  float S_reg[TILE_KV / 2];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;
  float rescale[HALVES];

  const auto stage_of = [](int tile) { return tile % PIPELINE_STAGES; };
  const auto parity_of = [](int tile) { return tile / PIPELINE_STAGES & 1; };
  const auto issue_QK = [&](int tile) {
    const Descriptor desc = K_desc + descriptor_step(stage_of(tile) * TILE_BYTES<TILE_KV>);
    if constexpr (Q_IN_REGISTERS) {
      multiply_QK<TILE_KV>(S_reg, Q_reg, desc);
    } else {
      multiply_QK<TILE_KV>(S_reg, Q_desc, desc);
    }
    ptx::wgmma_commit_group();
  };
  const auto issue_PV = [&](int tile) {
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
    const int tile_key = tile * TILE_KV;
    int num_keys[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) num_keys[h] = visible_keys(p, lane_row + 8 * h) - tile_key - lane_col;
    softmax<TILE_KV>(S_reg, rows, rescale, p.scale_log2, tile_key + TILE_KV > unmasked_keys, num_keys);
  };

  ptx::mbarrier_wait_parity(&smem.Q_full, 0);
  if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[consumer], warp, lane);
  GemmOrder::begin(consumer);
  if (group_q_row >= p.q_len) {   // no rows: only releases the tiles that the other consumers need
    for (int tile = 0; tile < work.num_tiles; ++tile) {
      wait_for_K(tile);
      wait_for_V(tile);
      __syncwarp();   // all lanes have seen both tiles arrive before lane 0 releases them
      release(&smem.K_empty[stage_of(tile)]);
      release(&smem.V_empty[stage_of(tile)]);
      GemmOrder::wait(consumer);
      GemmOrder::pass(consumer);
    }
  } else if (work.num_tiles > 0) {
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
    for (int tile = 1; tile < work.num_tiles; ++tile) {
      if (!K_ready) wait_for_K(tile);
      if (!V_ready) wait_for_V(tile - 1);
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(tile);
      // The next consumer's QK GEMM may go ahead of this one's PV GEMM, whose result is needed later.
      if constexpr (EARLY_TURN) GemmOrder::pass(consumer);
      issue_PV(tile - 1);
      if constexpr (!EARLY_TURN) GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<OVERLAP ? 1 : 0>();   // the QK GEMM is complete; the PV GEMM may be in flight
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[stage_of(tile)]);
      V_ready = V_arrived(tile);
      softmax_of(tile);
      K_ready = K_arrived(tile + 1);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[stage_of(tile - 1)]);
      scale_O(O_reg, rescale);
      round_P<TILE_KV>(P_reg, S_reg);
    }

    if (!V_ready) wait_for_V(work.num_tiles - 1);
    ptx::wgmma_fence();
    issue_PV(work.num_tiles - 1);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(O_reg);
  }
  GemmOrder::end(consumer);
  ptx::bar_sync(CONSUMER_BARRIER + consumer, WARPGROUP);   // all four warps are done with Q, whose buffer is reused for the output

  write_output(p, O_reg, rows, smem.Q[consumer], warp, lane, group_q_row, work.head, work.batch);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_11_pingpong(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;
  const WorkTile work = work_of_block(p);

  if (threadIdx.x == 0) {
    if constexpr (ALIGNED && PREFETCH_MAPS) {
      ptx::prefetch_tensormap(&maps.Q);
      ptx::prefetch_tensormap(&maps.K);
      ptx::prefetch_tensormap(&maps.V);
    }
    ptx::mbarrier_init(&smem.Q_full, FILL_ARRIVALS<WARPGROUP>);
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
    if (thread < FILL_ARRIVALS<WARPGROUP>) produce(p, maps, smem, work, thread);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, smem, work, warpgroup - 1, thread);
  }
}
