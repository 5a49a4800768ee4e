// 13_tma_store: work tiles are fetched late, and their output leaves by TMA. Parent: 12_persistent.
// Question: what do the ends and beginnings of work tiles cost, on data of any kind?
// Change: a warp of the producer of its own fetches work tiles, as late as their Q can come in time; the next one is waited for under
//         the last P·V; output leaves by a TMA store; heads are worked on in groups that fit the L2 cache, K/V tiles last to first.
// Layout: warpgroup 0 fetches, a warp Q, the others K and V; consumer c has rows 64·c onwards. The producer is in late_fetch.cuh.
// Requires: sm_90a.
#include "hopper.cuh"
#include "late_fetch.cuh"
#include "turns.cuh"
#include "works.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// A thread's registers: the block's, 65536 / THREADS rounded down to a multiple of 8 for each thread, are redistributed.
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;
constexpr int NUM_SCORES = TILE_KV / 2;    // of a tile, per thread
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: more would have too few registers");
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 up to 256: an instruction's N and K");
static_assert(PIPELINE_STAGES >= 2, "P·V of one tile and Q·K of the next must both be there");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[Q_STAGES][NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];   // each consumer's own
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element O[NUM_CONSUMERS][WARPGROUP_WARPS][WARP_ROWS * HEAD_DIM];   // each warp's own, on their way out
  Work work[Q_STAGES];                                                                // what Q belongs to; comes and goes with it
  ptx::Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  ptx::Mbarrier end_near;                                            // the work tile at hand has few K/V tiles left to fetch
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has come; empty: every consumer warp is done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or stages");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; 0 is __syncthreads.
enum NamedBarrier {
  TURN_BARRIER = 1,   // and 2, 3: a consumer's turn to issue GEMMs has come
};
using ProductTurns = Turns<TURN_BARRIER, NUM_CONSUMERS, PINGPONG>;

// A consumer: up to 64 query rows of each work tile.
__device__ __forceinline__ void consume(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int consumer,
                                        int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int lane_col = lane % ROW_LANES * 2;
  KvPlace kv;   // of the tile whose scores are next; the one before it has the tile whose probabilities are in P_reg

  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  // This warp is done with the stage.
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  float O_reg[HEAD_DIM / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;
  int count = -1;      // of work tiles before the current one
  int num_tiles = 0;   // K/V tiles that this consumer's rows need of the current work tile: at most the block's
  int not_mine = 0;    // tiles that the block needs and this consumer does not; they come first
  float rescale[HALVES];

  const auto wait_for_Q = [&](int at) { ptx::mbarrier_wait_parity(&smem.Q_full[Q_place(at).stage], Q_place(at).parity); };
  const auto wait_for_K = [&]() { ptx::mbarrier_wait_parity(&smem.K_full[kv.stage], kv.parity); };
  const auto wait_for_V = [&](KvPlace at) { ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity); };
  const auto current = [&]() -> const Work& { return smem.work[count % Q_STAGES]; };   // read again, rather than kept in registers
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
  // Tiles that all of the consumer's rows see whole; none where the scale is not positive, as in the stages before.
  const auto whole_tiles = [&]() {
    return p.scale_log2 > 0.0f ? visible_keys(p, current().first_q_row + consumer * WGMMA_ROWS) / TILE_KV : 0;
  };
  const auto warp_row = [&]() { return current().first_q_row + consumer * WGMMA_ROWS + warp * WARP_ROWS; };
  // Takes the next work tile; false where there is none.
  const auto take = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(p, current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    not_mine = current().num_tiles - num_tiles;
    if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[count % Q_STAGES][consumer], warp, lane);
    return true;
  };
  // The softmax with a tile's own maximum, and the mask.
  const auto exact_softmax = [&](int tile) {
    int num_keys[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      num_keys[h] = visible_keys(p, warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
    }
    softmax<TILE_KV>(S_reg, rows, rescale, p.scale_log2, tile >= whole_tiles(), num_keys);
  };
  // A work tile's output leaves; nothing of it is left for the next.
  const auto leave = [&](const Work& done) {
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

  ProductTurns::begin(consumer);
  bool more = take();
  while (more) {
    for (; not_mine > 0; --not_mine, kv = kv.next()) {
      wait_for_K();
      __syncwarp();   // no lane still waits for a phase that an arrival could end for good
      release(&smem.K_empty[kv.stage]);
      ProductTurns::wait(consumer);
      ProductTurns::pass(consumer);
      wait_for_V(kv);
      __syncwarp();
      release(&smem.V_empty[kv.stage]);
    }
    if (num_tiles > 0) {
      wait_for_K();
      ProductTurns::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      ProductTurns::pass(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      exact_softmax(num_tiles - 1);   // O is 0
      round_P<TILE_KV>(P_reg, S_reg);
      kv = kv.next();
    }
    int tile = num_tiles - 2;

    bool K_came = false, V_came = false;   // tested before it must be known, because an answer takes a while
    for (; tile >= 0; --tile) {
      if (!K_came) wait_for_K();
      if (!V_came) wait_for_V(kv.previous());
      ProductTurns::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(kv.previous().stage);
      ProductTurns::pass(consumer);
      ptx::wgmma_wait_group<1>();   // Q·K is done; P·V of the tile before is under way
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      const KvPlace after = kv.next();
      K_came = ptx::mbarrier_test_wait_parity(&smem.K_full[after.stage], after.parity);
      V_came = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);
      exact_softmax(tile);
      ptx::wgmma_wait_group<0>();   // so is P·V
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
      scale_O(O_reg, rescale);
      round_P<TILE_KV>(P_reg, S_reg);
      kv = after;
    }

    // The last P·V. Under it the next work tile is waited for, and taken before the output leaves.
    if (num_tiles > 0) {
      wait_for_V(kv.previous());
      ptx::wgmma_fence();
      issue_PV(kv.previous().stage);
      wait_for_Q(count + 1);   // or word that there is no more
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
    }
    const Work done = current();
    __syncwarp();   // all lanes have read it, and Q
    release(&smem.Q_empty[count % Q_STAGES]);
    more = take();
    leave(done);
  }
  if constexpr (ALIGNED) output_copied(lane);
  ProductTurns::end(consumer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_13_tma_store(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // by a shuffle, so that ptxas sees one for a warp
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();   // the barriers exist

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(p, maps, smem, thread);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, maps, smem, warpgroup - 1, thread);
  }
}
