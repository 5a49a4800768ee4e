// 14_stale_max: exponentials start immediately, against the maximum of earlier tiles. Parent: 13_tma_store.
// Question: what is gained if no exponential waits for its tile's maximum?
// Change: a tile fully visible to the consumer's rows takes its exponentials against a stale maximum; if a sum is too large for 16 bits,
//         the tile's scores are recomputed, with their maximum. The wait for the PV GEMM is placed among the exponentials.
//         At a head dim of 128 a third consumer fits, with tiles of 64 keys.
// Layout: warpgroup 0 loads, one warp Q, the others K and V; consumer warpgroup c has rows 64·c onwards.
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
constexpr int BEFORE_PV = NUM_SCORES / 4;  // a tile's exponentials before the wait for the PV GEMM; ptxas moves some across the wait
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

// --- softmax -----------------------------------------------------------------------------------------------------------------

// While a lane's sum over a tile is below this, none of its exponentials, which are not negative, overflows when rounded to 16 bits. A NaN
// fails the test. 2^15 leaves fp16 a factor of two. bfloat16 has FP32's range, in which the products of P and V must also fit.
template <typename T>
constexpr float SUM_LIMIT_OF = 1 << 30;
template <>
constexpr float SUM_LIMIT_OF<__half> = 32768.0f;
constexpr float SUM_LIMIT = SUM_LIMIT_OF<element>;

// A lane's sums over a tile, in two independent chains of additions per row.
struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
};

// Turns a tile's scores FIRST to END into probabilities in place, against the maximum of earlier tiles, and adds them up. No step
// depends on another lane.
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

// Some score is too far above the stale maximum. The warp recomputes its scores of the tile by mma.sync, 8 keys at a time, whose
// accumulator has the layout of wgmma's, once for the maximum and once for the probabilities. K is read from global memory: its stage is
// not held back for a case that was expected to be very rare.
__device__ __forceinline__ void redo(unsigned (&P_reg)[TILE_KV / WGMMA_STEP][4], float (&O_reg)[HEAD_DIM / 2], RowState& rows,
                                     const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4],
                                     const element* Q_smem, const AttentionParams& p, const WorkTile& work,
                                     int tile, int warp_row, int warp, int lane) {
  count_fallback<1>(p, lane);
  const element* K_gmem = head_of(p.K, work.batch, kv_head_of(p, work.head)) + tile * TILE_KV * p.K.row_stride;
  const int last_key = p.kv_len - 1 - tile * TILE_KV;   // the tile may have fewer than TILE_KV keys
  int num_keys[HALVES];                                  // visible to row h, counted from this lane's first column
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    num_keys[h] = visible_keys(p, warp_row + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane % ROW_LANES * 2;
  }
  const auto scores = [&](float (&S)[4], int j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) S[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / WGMMA_STEP; ++k) {
      unsigned K_part[2];   // B fragment: of key lane / 4, the column pairs at 2 · (lane % 4) and 8 further, of 16 columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = min(j * MATRIX + lane / ROW_LANES, last_key);
        const element* source = K_gmem + key * p.K.row_stride + k * WGMMA_STEP + 8 * i + lane % ROW_LANES * 2;
        K_part[i] = pack(to_float(source[0]), to_float(source[1]), element{});   // exact: the values are of type element
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
    for (int i = 0; i < TILE_KV / MATRIX; ++i) {   // registers cannot be indexed at run time: visits all, sets those of j
#pragma unroll
      for (int h = 0; h < HALVES; ++h) P_reg[i / 2][i % 2 * 2 + h] = i == j ? pairs[h] : P_reg[i / 2][i % 2 * 2 + h];
    }
  }
}

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
  // Number of tiles fully visible to all of the consumer's rows. Causal, a tile that ends at the first row's last visible key is excluded,
  // because it is the first that this row processes (last to first). 0 if the scale is not positive, as in the earlier stages.
  const auto whole_tiles = [&]() {
    return p.scale_log2 > 0.0f ? (visible_keys(p, current().first_q_row + consumer * WGMMA_ROWS) - CAUSAL) / TILE_KV : 0;
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

    // Further tiles that do not count as whole, such as partially masked ones.
    for (const int first_whole = whole_tiles(); tile >= 0 && tile >= first_whole; --tile) {
      wait_for_K();
      wait_for_V(kv.previous());
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(kv.previous().stage);
      GemmOrder::pass(consumer);
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
      K_ready = ptx::mbarrier_test_wait_parity(&smem.K_full[after.stage], after.parity);
      V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);
      TileSums sums;
      exponentials<0, BEFORE_PV>(S_reg, rows.max, p.scale_log2, sums);
      ptx::wgmma_wait_group<0>();   // the PV GEMM is complete, too
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
attention_14_stale_max(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
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
