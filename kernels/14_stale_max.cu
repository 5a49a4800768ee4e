// 14_stale_max: exponentials start at once, against the maximum of the tiles before. Parent: 13_tma_store.
// Question: what does it buy that no exponential waits for its tile's maximum?
// Change: a tile that its rows see whole takes its exponentials against an old maximum; where a sum is too large for 16 bits, its
//         scores are computed again, with their maximum. The wait for P·V stands among the exponentials.
// Layout: warpgroup 0 fetches, a warp Q, the others K and V; consumer c has rows 64·c onwards.
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
constexpr int BEFORE_PV = NUM_SCORES / 4;  // so many of a tile's exponentials come before the wait for P·V; ptxas moves some across it
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

// --- softmax -----------------------------------------------------------------------------------------------------------------

// While a lane's sum over a tile is below this, each of its exponentials can be rounded to 16 bits: they are not negative. It holds
// for no NaN. 2^15 leaves fp16 a factor of two. bfloat16 has FP32's range, in which their products with V must find room too.
template <typename T>
constexpr float SUM_LIMIT_OF = 1 << 30;
template <>
constexpr float SUM_LIMIT_OF<__half> = 32768.0f;
constexpr float SUM_LIMIT = SUM_LIMIT_OF<element>;

// A lane's sums over a tile, in two chains of additions for each row.
struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
};

// A tile's scores FIRST to END become probabilities against a maximum of earlier tiles, in their place, and are added up. Nothing
// here waits for another lane.
template <int FIRST, int END>
__device__ __forceinline__ void exponentials(float (&S_reg)[NUM_SCORES], const float (&reference)[HALVES], float scale_log2,
                                             TileSums& sums) {
#pragma unroll
  for (int i = FIRST; i < END; ++i) {
    const int h = i / 2 % 2;
    S_reg[i] = ptx::ex2_approx_ftz(fmaf(S_reg[i], scale_log2, -reference[h]));
    sums.chain[h][i % 2] += S_reg[i];
  }
}

// Some score is too far above the old maximum. The warp's scores are computed again by mma.sync, 8 keys at a time, whose accumulator has
// the layout of wgmma's, once for the maximum and once for the probabilities. K comes from global memory: its stage is not held back
// for what was thought to happen hardly ever.
__device__ __forceinline__ void redo(unsigned (&P_reg)[TILE_KV / WGMMA_STEP][4], float (&O_reg)[HEAD_DIM / 2], RowState& rows,
                                     const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4],
                                     const element* Q_smem, const AttentionParams& p, const Work& work,
                                     int tile, int warp_row, int warp, int lane) {
  count_fallback<1>(p, lane);
  const element* K_gmem = head_of(p.K, work.batch, kv_head_of(p, work.head)) + tile * TILE_KV * p.K.row_stride;
  const int last_key = p.kv_len - 1 - tile * TILE_KV;   // there may be fewer than TILE_KV
  int num_keys[HALVES];                                  // that row h sees, counted from this lane's first
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    num_keys[h] = visible_keys(p, warp_row + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane % ROW_LANES * 2;
  }
  const auto scores = [&](float (&S)[4], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) S[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / WGMMA_STEP; ++k) {
      unsigned K_part[2];   // as B: key lane / 4, and of the 16 columns 2 · (lane % 4) onwards and 8 further
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = min(j * MATRIX + lane / ROW_LANES, last_key);
        const element* source = K_gmem + key * p.K.row_stride + k * WGMMA_STEP + 8 * i + lane % ROW_LANES * 2;
        K_part[i] = pack(to_float(source[0]), to_float(source[1]), element{});   // exact: they are such elements
      }
      if constexpr (Q_IN_REGISTERS) {
        mma(S, Q_reg[k], K_part, element{});
      } else {
        unsigned Q_part[4];
        load_Q_part(Q_part, Q_smem, k, warp, lane);
        mma(S, Q_part, K_part, element{});
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) S[i] = j * MATRIX + i % 2 < num_keys[i / 2] ? S[i] * p.scale_log2 : NEG_INF;
  };
  float lane_max[HALVES] = {NEG_INF, NEG_INF};
#pragma unroll 1
  for (int j = 0; j < TILE_KV / MATRIX; ++j) {
    float S[4];
    scores(S, j);
#pragma unroll
    for (int i = 0; i < 4; ++i) lane_max[i / 2] = fmaxf(lane_max[i / 2], S[i]);
  }
  float reference[HALVES], rescale[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    const float new_max = fmaxf(rows.max[h], lanes_max<ROW_LANES>(lane_max[h]));
    reference[h] = new_max == NEG_INF ? 0.0f : new_max;
    rescale[h] = ptx::ex2_approx_ftz(rows.max[h] - reference[h]);
    rows.max[h] = new_max;
    rows.sum[h] *= rescale[h];
  }
  scale_O(O_reg, rescale);
#pragma unroll 1
  for (int j = 0; j < TILE_KV / MATRIX; ++j) {
    float S[4];
    scores(S, j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      S[i] = ptx::ex2_approx_ftz(S[i] - reference[i / 2]);
      rows.sum[i / 2] += S[i];
    }
    const unsigned pairs[HALVES] = {pack(S[0], S[1], element{}), pack(S[2], S[3], element{})};
#pragma unroll
    for (int i = 0; i < TILE_KV / MATRIX; ++i) {   // registers have no index: all are visited, one is meant
#pragma unroll
      for (int h = 0; h < HALVES; ++h) P_reg[i / 2][i % 2 * 2 + h] = i == j ? pairs[h] : P_reg[i / 2][i % 2 * 2 + h];
    }
  }
}

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
  // Tiles that all of the consumer's rows see whole, where none of these rows has its first key; none where the scale is not
  // positive, as in the stages before.
  const auto whole_tiles = [&]() {
    return p.scale_log2 > 0.0f ? (visible_keys(p, current().first_q_row + consumer * WGMMA_ROWS) - CAUSAL) / TILE_KV : 0;
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

    // Further tiles that the mask cuts, if any.
    for (const int first_whole = whole_tiles(); tile >= 0 && tile >= first_whole; --tile) {
      wait_for_K();
      wait_for_V(kv.previous());
      ProductTurns::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(kv.previous().stage);
      ProductTurns::pass(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(S_reg);
      ptx::wgmma_pin(O_reg);
      release(&smem.K_empty[kv.stage]);
      release(&smem.V_empty[kv.previous().stage]);
      exact_softmax(tile);
      scale_O(O_reg, rescale);
      round_P<TILE_KV>(P_reg, S_reg);
      kv = kv.next();
    }

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
      TileSums sums;
      exponentials<0, BEFORE_PV>(S_reg, rows.max, p.scale_log2, sums);
      ptx::wgmma_wait_group<0>();   // so is P·V
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
      exponentials<BEFORE_PV, NUM_SCORES>(S_reg, rows.max, p.scale_log2, sums);
      const float sum[HALVES] = {sums.of(0), sums.of(1)};
      if (__any_sync(FULL_WARP, !(sum[0] < SUM_LIMIT && sum[1] < SUM_LIMIT))) {
        redo(P_reg, O_reg, rows, Q_reg, smem.Q[count % Q_STAGES][consumer], p, current(), tile, warp_row(), warp, lane);
      } else {
        rows.sum[0] += sum[0];
        rows.sum[1] += sum[1];
        round_P<TILE_KV>(P_reg, S_reg);
      }
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
attention_14_stale_max(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
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
