// 13_tma_store: work tiles are fetched late, and their output is stored by TMA. Parent: 12_persistent.
// Question: what do the epilogues and prologues of work tiles cost, on data of any kind?
// Change: a dedicated producer warp fetches work tiles, each as late as its Q can still arrive in time; consumers wait for the next one
//         under the last PV GEMM; output is stored by TMA; heads are scheduled in groups that fit the L2 cache, K/V tiles last to first.
// Layout: warpgroup 0 loads, one warp Q, the others K and V; consumer warpgroup c has rows 64·c onwards. The producer is in late_fetch.cuh.
// Requires: sm_90a.
#include "hopper.cuh"
#include "late_fetch.cuh"
#include "pingpong.cuh"
#include "work_tiles.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// Registers per thread: the block's, 65536 / THREADS rounded down to a multiple of 8 per thread, are redistributed by setmaxnreg.
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;
constexpr int NUM_SCORES = TILE_KV / 2;    // per tile and thread
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: with more, each would have too few registers");
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 (wgmma K) and at most 256 (wgmma N)");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: V of one tile and K of the next are in use together");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[Q_STAGES][NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];   // one tile per consumer
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element O[NUM_CONSUMERS][WARPGROUP_WARPS][WARP_ROWS * HEAD_DIM];   // output staging, one buffer per warp
  WorkTile work[Q_STAGES];                                                            // Q's work tile; Q_full and Q_empty guard it, too
  ptx::Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  ptx::Mbarrier end_near;                                            // the current work tile has few K/V tiles left to load
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has arrived; empty: all consumer warps are done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: use fewer keys, rows or stages");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; barrier 0 is that of __syncthreads.
enum NamedBarrier {
  ORDER_BARRIER = 1,   // and 2, 3: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// A consumer warpgroup: up to 64 query rows of each work tile.
__device__ __forceinline__ void consume(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int consumer,
                                        int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int lane_col = lane % ROW_LANES * 2;
  KvPlace kv;   // stage of the tile whose QK GEMM is next; the previous stage has the tile whose probabilities are in P_reg

  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  // Releases a stage: one arrival per warp.
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  float O_reg[HEAD_DIM / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;
  int count = -1;      // number of work tiles before the current one
  int num_tiles = 0;   // K/V tiles of the current work tile that this consumer's rows need: at most the block's
  int tiles_to_skip = 0;  // K/V tiles that the block needs and this consumer skips; they come first
  float rescale[HALVES];

  const auto wait_for_Q = [&](int at) { ptx::mbarrier_wait_parity(&smem.Q_full[Q_place(at).stage], Q_place(at).parity); };
  const auto wait_for_K = [&]() { ptx::mbarrier_wait_parity(&smem.K_full[kv.stage], kv.parity); };
  const auto wait_for_V = [&](KvPlace at) { ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity); };
  const auto current = [&]() -> const WorkTile& { return smem.work[count % Q_STAGES]; };   // re-read each time, which saves registers
  const auto issue_QK = [&](int stage) {
    const Descriptor desc = K_desc + descriptor_step(stage * TILE_BYTES<TILE_KV>);
    if constexpr (Q_IN_REGISTERS) {
      multiply_QK<TILE_KV>(S_reg, Q_reg, desc);
    } else {
      multiply_QK<TILE_KV>(S_reg, rows_descriptor(smem.Q[count % Q_STAGES][consumer]), desc);
    }
    ptx::wgmma_commit_group();
  };
  const auto issue_PV = [&](int stage) {
    multiply_PV<TILE_KV>(O_reg, P_reg, V_desc + descriptor_step(stage * TILE_BYTES<TILE_KV>));
    ptx::wgmma_commit_group();
  };
  // Number of tiles fully visible to all of the consumer's rows; 0 if the scale is not positive, as in the earlier stages.
  const auto whole_tiles = [&]() {
    return p.scale_log2 > 0.0f ? visible_keys(p, current().first_q_row + consumer * WGMMA_ROWS) / TILE_KV : 0;
  };
  const auto warp_row = [&]() { return current().first_q_row + consumer * WGMMA_ROWS + warp * WARP_ROWS; };
  // Advances to the next work tile; false if there is none.
  const auto next_work_tile = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(p, current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    tiles_to_skip = current().num_tiles - num_tiles;
    if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[count % Q_STAGES][consumer], warp, lane);
    return true;
  };
  // The online softmax with the tile's own maximum, and the mask.
  const auto exact_softmax = [&](int tile) {
    int num_keys[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      num_keys[h] = visible_keys(p, warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
    }
    softmax<TILE_KV>(S_reg, rows, rescale, p.scale_log2, tile >= whole_tiles(), num_keys);
  };
  // Stores a work tile's output, and resets O and the row state for the next one.
  const auto store_output = [&](const WorkTile& done) {
    const int first_row = done.first_q_row + consumer * WGMMA_ROWS;
    if constexpr (ALIGNED) {
      copy_output(p, maps, O_reg, rows, smem.O[consumer][warp], lane, first_row + warp * WARP_ROWS, done.head, done.batch);
    } else {
      write_output(p, O_reg, rows, smem.O[consumer][0], warp, lane, first_row, done.head, done.batch);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O_reg[i] = 0.0f;
    rows = {};
  };

  GemmOrder::begin(consumer);
  bool more = next_work_tile();
  while (more) {
    for (; tiles_to_skip > 0; --tiles_to_skip, kv = kv.next()) {
      wait_for_K();
      __syncwarp();   // all lanes have seen the phase complete before lane 0 releases the stage: its next fill could hide that phase
      release(&smem.K_empty[kv.stage]);
      GemmOrder::wait(consumer);
      GemmOrder::pass(consumer);
      wait_for_V(kv);
      __syncwarp();
      release(&smem.V_empty[kv.stage]);
    }
    if (num_tiles > 0) {
      wait_for_K();
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      exact_softmax(num_tiles - 1);   // O is 0: nothing to rescale
      round_P<TILE_KV>(P_reg, S_reg);
      kv = kv.next();
    }
    int tile = num_tiles - 2;

    bool K_ready = false, V_ready = false;   // tested before the tiles are needed, because an mbarrier test has latency
    for (; tile >= 0; --tile) {
      if (!K_ready) wait_for_K();
      if (!V_ready) wait_for_V(kv.previous());
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(kv.previous().stage);
      GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<1>();   // the QK GEMM is complete; the previous tile's PV GEMM is in flight
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      const KvPlace after = kv.next();
      V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);
      exact_softmax(tile);
      // As in the parent, this test keeps the wait behind the softmax's maximum. Without it ptxas moves the wait, which names no register
      // that the softmax uses, to before the maximum, and nothing overlaps the PV GEMM.
      K_ready = ptx::mbarrier_test_wait_parity(&smem.K_full[after.stage], after.parity);
      ptx::wgmma_wait_group<0>();   // the PV GEMM is complete, too
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
      scale_O(O_reg, rescale);
      round_P<TILE_KV>(P_reg, S_reg);
      kv = after;
    }

    // The last PV GEMM. The wait for the next work tile overlaps it; the next work tile is read before the output is stored.
    if (num_tiles > 0) {
      wait_for_V(kv.previous());
      ptx::wgmma_fence();
      issue_PV(kv.previous().stage);
      wait_for_Q(count + 1);   // or for NO_MORE in its place
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
    }
    const WorkTile done = current();
    __syncwarp();   // all lanes are done reading the work tile and Q
    release(&smem.Q_empty[count % Q_STAGES]);
    more = next_work_tile();
    store_output(done);
  }
  if constexpr (ALIGNED) output_copied(lane);
  GemmOrder::end(consumer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_13_tma_store(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();   // the mbarriers are initialised

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(p, maps, smem, thread);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, maps, smem, warpgroup - 1, thread);
  }
}
