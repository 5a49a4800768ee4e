// 17_around_the_loop: a work tile's prologue and epilogue take less time. Parent: 16_ones_column.
// Question: what do a work tile's prologue and epilogue cost a kernel whose main loop is as fast as its GEMMs and softmax allow?
// Change: K and V of the next work tile are loaded before its Q has arrived; in the first tile, rounding P overlaps the exponentials, and
//         only partially masked columns are compared; the next work tile is read under the last PV GEMM; a row is divided by an approximate
//         reciprocal, its FP32 sum is reduced for the log-sum-exp alone; causal, the last section of heads has work for every block; at
//         one panel, and at two without a mask, every fifth K/V tile is read before those between (TileOrder).
// Layout: warpgroup 0 loads, one warp Q, the others K and V; consumer warpgroup c has rows 64·c onwards. site/stages/17_around_the_loop.md.
// Requires: sm_90a.
#define WORK_BEFORE_Q 1             // see late_fetch.cuh
#define LAST_SECTION_FILLS CAUSAL   // likewise: where work tiles differ in length
// Scores that grow by a few nats per tile otherwise move a row again and again. At two panels a move costs a smaller part of a tile, and
// causal the order costs more than it gains. By 5 - 1 the producer divides faster than by 3. See late_fetch.cuh.
#define COARSE_STRIDE (HEAD_DIM == PANEL || (HEAD_DIM == 2 * PANEL && !CAUSAL) ? 5 : 1)
#include "hopper.cuh"
#include "late_fetch.cuh"
#include "softcap.cuh"
#include "pingpong.cuh"
#include "work_tiles.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// Registers per thread: the block's, 65536 / THREADS rounded down to a multiple of 8 per thread, are redistributed by setmaxnreg.
constexpr bool WIDE = Q_BUFFERS == 1;      // wide rows: shared memory has no room for the output, and registers are scarce
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : WIDE ? 24 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : WIDE ? 240 : 232;
constexpr int NUM_SCORES = TILE_KV / 2;    // per tile and thread
// Where P is rounded, and where ptxas places rarely executed code, affects the run time; the best choice can only be found by measuring.
// Without PINGPONG both are as in 16_ones_column, where either would spill a register; here only rounding early does, causal.
constexpr bool ROUND_EARLY = HEAD_DIM == PANEL && PINGPONG;              // before the range check; raised rows are rounded again
constexpr bool FIRST_APART = HEAD_DIM == PANEL && !WINDOW && (CAUSAL || PINGPONG);   // a work tile's first K/V tile has its own code
constexpr bool MOVE_APART = HEAD_DIM == PANEL && CAUSAL && !PINGPONG;    // the renormalisation path rounds P itself, and returns
constexpr bool IN_SPANS = FIRST_APART && PINGPONG;   // in a partially masked first tile, only some columns are compared
constexpr int ONES = 8;                    // columns of ones: the granularity of an instruction's N
constexpr int O_COLUMNS = HEAD_DIM + ONES;
constexpr int WEIGHT = HEAD_DIM / 2;       // of a lane's accumulators, the first of its four in the columns of ones: two for each row
// An instruction has at most 256 columns: if O has more, the panels of V before the last get an instruction of their own.
constexpr int APART_COLUMNS = O_COLUMNS > 256 ? HEAD_DIM - PANEL : 0;
// Panels of B are equally spaced. If the ones' instruction reads one panel of V, the ones can be anywhere behind it, and 16 rows of ones
// serve every instruction. If it reads more, they follow the last panel, TILE_KV rows in every stage.
constexpr bool SHARED_ONES = HEAD_DIM - APART_COLUMNS == PANEL;
constexpr int STAGE_ONES = SHARED_ONES ? 0 : TILE_KV * PANEL;
static_assert(HEAD_DIM <= 256, "HEAD_DIM must be at most 256: the output must fit in registers");
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: with more, each would have too few registers");
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 (wgmma K) and at most 256 (wgmma N)");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: V of one tile and K of the next are in use together");
static_assert(!WINDOW || (NUM_CONSUMERS - 1) * WGMMA_ROWS <= (WIDE && PINGPONG ? 1 : TAKE_AHEAD) * TILE_KV,
              "deadlock: a consumer would wait for the next work tile while others wait for it to release tiles or pass on its turn");

constexpr int O_ALIGNMENT = WIDE ? 16 : PATTERN_BYTES;
constexpr int O_ELEMENTS = WIDE ? CHUNK : WARP_ROWS * HEAD_DIM;   // WIDE does not use it: the minimum, one chunk

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[Q_BUFFERS][NUM_CONSUMERS][WGMMA_ROWS * HEAD_DIM];  // one tile per consumer
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM + STAGE_ONES];
  alignas(PATTERN_BYTES) element ones[WGMMA_STEP * PANEL];                            // if SHARED_ONES: one panel for all stages
  alignas(O_ALIGNMENT) element O[NUM_CONSUMERS][WARPGROUP_WARPS][O_ELEMENTS];         // output staging, one buffer per warp
  WorkTile work[Q_STAGES];                                                            // Q's work tile; Q_full and Q_empty guard it, too
  ptx::Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  ptx::Mbarrier end_near;                                            // the current work tile has few K/V tiles left to load
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has arrived; empty: all consumer warps are done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
  ptx::Mbarrier work_ready[Q_STAGES];                                // `work` is known, its Q may still be in flight
  unsigned moves, ended;                                             // 32 per renormalised tile of a warp; consumer warps that are done
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: use fewer keys, rows or stages");
constexpr int V_STAGE_BYTES = sizeof(SharedStorage::V) / PIPELINE_STAGES;
constexpr int APART_BYTES = APART_COLUMNS * TILE_KV * sizeof(element);   // of V, before the panels in the ones' instruction
constexpr int ONES_DISTANCE = sizeof(SharedStorage::V) - APART_BYTES;    // from those panels to the ones, which follow V
static_assert(ONES_DISTANCE % PATTERN_BYTES == 0, "the ones must follow V directly, aligned to the swizzle pattern of 8 rows");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; barrier 0 is that of __syncthreads.
enum NamedBarrier {
  ORDER_BARRIER = 1,   // and 2, 3: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// --- softmax -----------------------------------------------------------------------------------------------------------------
// A probability is P = 2^(score - reference), with scores in units of log2. A row's reference is set from its first scores, HEADROOM
// powers of two above the largest of a few of them, and raised by powers of two when a sum leaves its range: P, the sums and O are
// multiplied by a power of two, which does not round. What happens to a row depends on its own scores alone, not on other rows', and so do
// its last bits, but for the order of its tiles (TileOrder): causal, that follows from the last row of its work tile.

// Headroom and range. float16 has little range below 1: P starts near 2^-2, else weights far below a row's largest, which FlashAttention
// keeps, would be lost; a lane's sum below 65504 means that none of its P rounds to infinity. bfloat16 has FP32's exponent range, and small
// P are as precise as large ones: P starts near 2^-48 and stays below 1, as against the row's maximum, so that P·V overflows only where it
// would overflow there, too. The cost: values of V below 2^-70 lose bits.
template <typename T>
constexpr int HEADROOM_OF = 48;
template <>
constexpr int HEADROOM_OF<__half> = 2;
constexpr int HEADROOM = HEADROOM_OF<element>;
constexpr float HEADROOM_FACTOR = static_cast<float>(1ull << HEADROOM);
template <typename T>
constexpr float SUM_LIMIT_OF = 1.0f;
template <>
constexpr float SUM_LIMIT_OF<__half> = 65504.0f;
constexpr float SUM_LIMIT = SUM_LIMIT_OF<element>;   // of a lane's sum of P over one tile
// A sum out of range is brought to 2^SETTLED. 2^-2 in float16, too, would leave more room, but was slower where scores grow by about that
// much in a tile or two: a warp's rows then renormalise in different tiles, so that the warp does so in every one.
constexpr int SETTLED = SUM_LIMIT > 1.0f ? 0 : -HEADROOM;
constexpr float OVERFLOWN = 0x1p126f;       // a sum this large, or NaN, means that FP32 may not hold some exponential
constexpr float NOTHING_SEEN = -0x1p100f;   // a reference against which every realistic score overflows

// Where a move is counted. In shared memory it takes one instruction, yet in bfloat16, at one panel without a mask, inputs on which no row
// moves got slower; counting last made them faster causal at one panel, slower at two. They never run it: it changes the order of the loop.
constexpr bool COUNT_IN_SHARED = SUM_LIMIT > 1.0f || HEAD_DIM != PANEL || CAUSAL;
constexpr bool COUNT_LAST = HEAD_DIM == PANEL && CAUSAL;

// The columns of a tile that a lane's rows see: from first_key[h] on and below num_keys[h], counted from the lane's first column.
struct Visible {
#if WINDOW
  int first_key[HALVES] = {};
#endif
  int num_keys[HALVES] = {TILE_KV, TILE_KV};
  // All rows of the warp see the tile's columns below warp_whole; none of them sees columns from warp_keys on.
  int warp_whole = 0, warp_keys = TILE_KV;
  __device__ __forceinline__ bool operator()(int i) const {
    const int column = i / 4 * 8 + i % 2, h = i / 2 % 2;
#if WINDOW
    if (column < first_key[h]) return false;
#endif
    return column < num_keys[h];
  }
};

// A lane's sums over a tile, in two independent chains of additions per row.
struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
};

// Soft-caps a tile's scores, if the call asks for it.
__device__ __forceinline__ void cap_scores(float (&S_reg)[NUM_SCORES], const AttentionParams& p) {
#pragma unroll
  for (int i = 0; i < NUM_SCORES; ++i) S_reg[i] = capped(p, S_reg[i]);
}

// Turns COUNT of a lane's scores, from FIRST on, into probabilities in place, and adds them up.
template <int FIRST, int COUNT, bool COMPARED>
__device__ __forceinline__ void exponentials_of(float (&S_reg)[NUM_SCORES], const float (&reference)[HALVES], float scale_log2,
                                                TileSums& sums, const Visible& visible) {
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; ++i) {
    const int h = i / 2 % 2;
    const float x = fmaf(S_reg[i], scale_log2, -reference[h]);
    S_reg[i] = ptx::ex2_approx_ftz(!COMPARED || visible(i) ? x : NEG_INF);
    sums.chain[h][i % 2] += S_reg[i];
  }
}

// All of a tile's scores, in spans of COUNT. No step depends on another lane. A span that is masked for the whole warp is set to 0; with
// BRANCHES, a span fully visible to the warp needs no comparisons. Spans must be wide for that: ptxas does not branch around a few
// instructions, but issues them all, predicated.
template <bool MASKED, bool BRANCHES = false, int FIRST = 0>
__device__ __forceinline__ void exponentials(float (&S_reg)[NUM_SCORES], const float (&reference)[HALVES], float scale_log2,
                                             TileSums& sums, const Visible& visible = {}) {
  constexpr int COUNT = !MASKED ? NUM_SCORES : BRANCHES && NUM_SCORES % 16 == 0 ? 16 : 8;   // a lane's scores in 32 columns, or in 16
  if (!MASKED || (BRANCHES && 2 * (FIRST + COUNT) <= visible.warp_whole)) {
    exponentials_of<FIRST, COUNT, false>(S_reg, reference, scale_log2, sums, visible);
  } else if (2 * FIRST < visible.warp_keys) {
    exponentials_of<FIRST, COUNT, true>(S_reg, reference, scale_log2, sums, visible);
  } else {
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i) S_reg[i] = 0.0f;
  }
  if constexpr (FIRST + COUNT < NUM_SCORES) {
    exponentials<MASKED, BRANCHES, FIRST + COUNT>(S_reg, reference, scale_log2, sums, visible);
  }
}

// Raises row h's reference by `powers` powers of two, at most 126.
__device__ __forceinline__ void move_reference(float (&S_reg)[NUM_SCORES], float (&O_reg)[O_COLUMNS / 2], RowState& rows, float& sum,
                                               int h, int powers) {
  const float factor = __int_as_float((127 - powers) << 23);   // 2^-powers
  rows.max[h] += static_cast<float>(powers);
  rows.sum[h] *= factor;
  sum *= factor;
#pragma unroll
  for (int i = 0; i < NUM_SCORES; ++i) {
    if (i / 2 % 2 == h) S_reg[i] *= factor;
  }
#pragma unroll
  for (int i = 0; i < O_COLUMNS / 2; ++i) {
    if (i / 2 % 2 == h) O_reg[i] *= factor;
  }
}

// FP32 cannot hold exponentials of `overflowed` rows: some score is over a hundred powers of two above the reference. The warp recomputes
// its scores of the tile by mma.sync, 8 keys at a time, whose accumulator has the layout of wgmma's, and sets the reference of those rows
// from their maximum. K is read from global memory: its stage is not held back for a very rare case.
__device__ __forceinline__ void rescore(float (&S_reg)[NUM_SCORES], float (&O_reg)[O_COLUMNS / 2], RowState& rows,
                                             float (&sum)[HALVES], const bool (&overflowed)[HALVES],
                                             const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4], const element* Q_smem,
                                             const AttentionParams& p, const WorkTile& work, int tile, const Visible& visible, int warp,
                                             int lane) {
  count_fallback<1>(p, lane);
  const element* K_gmem = head_of(p.K, work.batch, kv_head_of(p, work.head)) + tile * TILE_KV * p.K.row_stride;
  const int last_key = p.kv_len - 1 - tile * TILE_KV;   // the tile may have fewer than TILE_KV keys
#pragma unroll 1
  for (int j = 0; j < TILE_KV / MATRIX; ++j) {
    float S[4] = {};
    const element* key = K_gmem + min(j * MATRIX + lane / ROW_LANES, last_key) * p.K.row_stride + lane % ROW_LANES * 2;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / WGMMA_STEP; ++k) {
      unsigned K_part[2];   // B fragment: of key lane / 4, the column pairs at 2 · (lane % 4) and 8 further, of 16 columns
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const element* pair = key + k * WGMMA_STEP + 8 * i;
        if constexpr (ALIGNED) {
          K_part[i] = *reinterpret_cast<const unsigned*>(pair);
        } else {
          K_part[i] = pack(to_float(pair[0]), to_float(pair[1]), element{});   // exact: the values are of type element
        }
      }
      if constexpr (Q_IN_REGISTERS) {
        mma(S, Q_reg[k], K_part, element{});
      } else {
        unsigned Q_part[4];
        load_Q_part(Q_part, Q_smem, k, warp, lane);
        mma(S, Q_part, K_part, element{});
      }
    }
    // Registers cannot be indexed at run time, so the loop visits all of them and selects four.
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) S_reg[i] = i / 4 == j && overflowed[i / 2 % 2] ? capped(p, S[i % 4]) * p.scale_log2 : S_reg[i];
  }
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float row_max = NEG_INF;
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) {
      if (i / 2 % 2 == h && visible(i)) row_max = fmaxf(row_max, S_reg[i]);
    }
    row_max = lanes_max<ROW_LANES>(row_max);
    if (!overflowed[h]) continue;
    const float reference = (row_max == NEG_INF ? 0.0f : row_max) + HEADROOM;
    const float factor = ptx::ex2_approx_ftz(fminf(rows.max[h] - reference, 0.0f));   // clamped: above 1 only after NaN or FP32 overflow
    rows.max[h] = row_max == NEG_INF ? NEG_INF : reference;   // -inf: the row still has no reference
    rows.sum[h] *= factor;
    sum[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) {
      if (i / 2 % 2 == h) {
        S_reg[i] = ptx::ex2_approx_ftz(visible(i) ? S_reg[i] - reference : NEG_INF);
        sum[h] += S_reg[i];
      }
    }
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; ++i) {
      if (i / 2 % 2 == h) O_reg[i] *= factor;
    }
  }
}

// Columns FIRST to FIRST + COLUMNS of O (64, O_COLUMNS) += P (64, 16) · V (16, O_COLUMNS), in one instruction; none if COLUMNS is 0.
template <int FIRST, int COLUMNS>
__device__ __forceinline__ void multiply_PV_columns(float (&O_reg)[O_COLUMNS / 2], const unsigned (&P)[4], Descriptor V_desc) {
  if constexpr (COLUMNS > 0) {
    ptx::wgmma_rs<COLUMNS, element, ptx::Major::MN>(reinterpret_cast<float(&)[COLUMNS / 2]>(O_reg[FIRST / 2]), P, V_desc, true);
  }
}

// Stores a warp's 16 rows from registers, 16 bytes per lane: each of a row's 4 lanes holds 2 columns of each of 4 blocks of 8 columns,
// and they exchange pairs until each lane holds a block.
__device__ __forceinline__ void store_rows(const AttentionParams& p, const float (&O_reg)[HEAD_DIM / 2], int lane, int warp_q_row,
                                           int head, int batch) {
  constexpr int COLUMNS = ROW_LANES * CHUNK;   // that the lanes of a row store in one instruction
  const int lane_id = lane % ROW_LANES;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    uint4 blocks[HEAD_DIM / COLUMNS];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / COLUMNS; ++j) {
      unsigned pair[ROW_LANES];   // pair[i]: first of block i; after the exchange, lane i's pair of this lane's block
#pragma unroll
      for (int i = 0; i < ROW_LANES; ++i) {
        const float* O = O_reg + j * COLUMNS / 2 + 4 * i + 2 * h;
        pair[i] = pack(O[0], O[1], element{});
      }
#pragma unroll
      for (int bit = 1; bit < ROW_LANES; bit *= 2) {
        const bool upper = lane_id & bit;
#pragma unroll
        for (int i = 0; i < ROW_LANES; ++i) {
          if (i & bit) continue;
          const unsigned received = __shfl_xor_sync(FULL_WARP, upper ? pair[i] : pair[i | bit], bit);
          pair[i] = upper ? received : pair[i];
          pair[i | bit] = upper ? pair[i | bit] : received;
        }
      }
      blocks[j] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
    const int q_row = warp_q_row + lane / ROW_LANES + 8 * h;
    if (q_row >= p.q_len) continue;
    element* row_gmem = head_of(p.O, batch, head) + q_row * p.O.row_stride + lane_id * CHUNK;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / COLUMNS; ++j) {
      if constexpr (ALIGNED) {
        *reinterpret_cast<uint4*>(row_gmem + j * COLUMNS) = blocks[j];   // as a Chunk, the compiler splits some stores
      } else {
        write_chunk(row_gmem + j * COLUMNS, reinterpret_cast<const Chunk&>(blocks[j]));
      }
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
  // If all stages share the ones, the distance from V's panel to them differs for every stage and step: see PV_STEP.
  const Descriptor V_desc =
      SHARED_ONES ? ptx::make_descriptor(smem.V[0] + APART_COLUMNS * TILE_KV, ONES_DISTANCE, PATTERN_BYTES, PANEL_SWIZZLE)
                  : columns_descriptor<TILE_KV>(smem.V[0]);
  const Descriptor V_apart_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  // Advances V's descriptor by 16 bytes; if the ones are shared, the distance to the next panel (from bit 16 on) shrinks by as much.
  constexpr Descriptor PV_STEP = SHARED_ONES ? 1 - (1ull << 16) : 1;
  // Releases a stage: one arrival per warp.
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  float O_reg[O_COLUMNS / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;       // max: the row's reference, -inf until it has one
  int count = -1;      // number of work tiles before the current one
  int num_tiles = 0;   // K/V tiles of the current work tile that this consumer's rows need: at most the block's
  int tiles_to_skip = 0;  // K/V tiles after these that the block needs and this consumer skips; they come first

  const auto wait_for_Q = [&](int at) { ptx::mbarrier_wait_parity(&smem.Q_full[Q_place(at).stage], Q_place(at).parity); };
  const auto wait_for_K = [&]() { ptx::mbarrier_wait_parity(&smem.K_full[kv.stage], kv.parity); };
  const auto wait_for_V = [&](KvPlace at) { ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity); };
  const auto current = [&]() -> const WorkTile& { return smem.work[count % Q_STAGES]; };   // re-read each time, which saves registers
  const auto issue_QK = [&](int stage) {
    const Descriptor desc = K_desc + descriptor_step(stage * TILE_BYTES<TILE_KV>);
    if constexpr (Q_IN_REGISTERS) {
      multiply_QK<TILE_KV>(S_reg, Q_reg, desc);
    } else {
      multiply_QK<TILE_KV>(S_reg, rows_descriptor(smem.Q[Q_buffer(count)][consumer]), desc);
    }
    ptx::wgmma_commit_group();
  };
  const auto issue_PV = [&](int stage) {
    const Descriptor desc = V_desc + descriptor_step(stage * V_STAGE_BYTES) * PV_STEP;
    const Descriptor apart_desc = V_apart_desc + descriptor_step(stage * V_STAGE_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KV; k += WGMMA_STEP) {
      const Descriptor step = descriptor_step(k * PANEL_ROW_BYTES);
      multiply_PV_columns<0, APART_COLUMNS>(O_reg, P_reg[k / WGMMA_STEP], apart_desc + step);
      multiply_PV_columns<APART_COLUMNS, O_COLUMNS - APART_COLUMNS>(O_reg, P_reg[k / WGMMA_STEP], desc + step * PV_STEP);
    }
    ptx::wgmma_commit_group();
  };
  const auto own = [&]() -> decltype(auto) { return params_of(p, current()); };
  // The first K/V tile that the consumer's rows see, and the first that is not masked on its left for any of them; 0 without a window.
  const auto first_tile = [&]() {
    if constexpr (WINDOW) return first_tile_of_rows(own(), current().first_q_row + consumer * WGMMA_ROWS);
    return 0;
  };
  const auto first_whole_tile = [&]() {
    if constexpr (WINDOW) {
      return (first_key(own(), current().first_q_row + (consumer + 1) * WGMMA_ROWS - 1) + TILE_KV - 1) / TILE_KV;
    }
    return 0;
  };
  // One past the last tile whose end all of these rows see; with a mask, less one that ends at the first row's last key, the first it sees.
  const auto whole_tiles = [&]() {
    return (visible_keys(own(), current().first_q_row + consumer * WGMMA_ROWS) - (CAUSAL || WINDOW)) / TILE_KV;
  };
  const auto warp_row = [&]() { return current().first_q_row + consumer * WGMMA_ROWS + warp * WARP_ROWS; };
  // Number of K/V tiles at the end that the block needs and this consumer does not.
  const auto tiles_skipped = [&]() {
    int tiles = current().num_tiles - num_tiles;
#if WINDOW
    if (num_tiles > 0) tiles -= first_tile() - first_tile_of_rows(own(), current().first_q_row);
#endif
    return tiles;
  };
  // Advances to the next work tile; false if there is none.
  const auto next_work_tile = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(own(), current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    if constexpr (!WIDE) tiles_to_skip = tiles_skipped();
    if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[Q_buffer(count)][consumer], warp, lane);
    return true;
  };
  const auto release_Q = [&]() {
    const WorkTile done = current();
    __syncwarp();   // all lanes are done reading the work tile and Q
    release(&smem.Q_empty[count % Q_STAGES]);
    return done;
  };
  const auto add_and_round = [&](const float (&sum)[HALVES], bool rounded) {
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    if (!rounded) round_P<TILE_KV>(P_reg, S_reg);
  };
  // Counts a tile in which some of the warp's rows are renormalised.
  const auto count_move = [&]() {
    if constexpr (COUNT_IN_SHARED) {
      atomicAdd(&smem.moves, 1u);   // by every lane: one instruction, and no branch
    } else {
      count_fallback<0>(p, lane);
    }
  };
  // Finishes a tile's softmax. Rows in which a lane's sum is out of range are first renormalised. With `early`, P is rounded before that
  // check, so that rounding some scores overlaps the exponentials of others, and again in rows that are renormalised. `tile` counts the
  // tiles left to read; a partially masked tile has the same number, a whole one that of TileOrder.
  const auto finish_tile = [&](float (&sum)[HALVES], int tile, bool whole, const Visible& visible, bool early) {
    if (early) round_P<TILE_KV>(P_reg, S_reg);
    if (__any_sync(FULL_WARP, !(sum[0] < SUM_LIMIT && sum[1] < SUM_LIMIT))) {
      if constexpr (!COUNT_LAST) count_move();
      const bool any_overflowed = __any_sync(FULL_WARP, !(sum[0] < OVERFLOWN && sum[1] < OVERFLOWN));   // some row's largest sum is
      bool any_over[HALVES], overflowed[HALVES];
      int powers[HALVES];
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        any_over[h] = __any_sync(FULL_WARP, !(sum[h] < SUM_LIMIT));   // in any of the warp's rows h; often few rows need it in a tile
        // The row's largest sum, by three shuffles that do not wait for each other. Sums are not negative: their bits order them, NaN last.
        const unsigned own_bits = __float_as_uint(sum[h]);
        const auto bits_of = [&](int distance) { return __shfl_xor_sync(FULL_WARP, own_bits, distance); };
        const unsigned bits = max(max(own_bits, bits_of(1)), max(bits_of(2), bits_of(3)));
        overflowed[h] = bits >= __float_as_uint(OVERFLOWN);
        const int raised = min(126, static_cast<int>(bits >> 23) - 127 - SETTLED);
        powers[h] = bits < __float_as_uint(SUM_LIMIT) || overflowed[h] ? 0 : raised;
      }
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        if (!any_over[h]) continue;
        move_reference(S_reg, O_reg, rows, sum[h], h, powers[h]);
        if (early) round_rows<TILE_KV>(P_reg, S_reg, h);
      }
      if (any_overflowed) {
        const element* Q_smem = smem.Q[Q_buffer(count)][consumer];
        const int K_tile = whole ? TileOrder(current()).at(tile) : tile;
        rescore(S_reg, O_reg, rows, sum, overflowed, Q_reg, Q_smem, own(), current(), K_tile, visible, warp, lane);
        if (early) round_P<TILE_KV>(P_reg, S_reg);
      }
      if constexpr (COUNT_LAST) count_move();
      if constexpr (MOVE_APART) {
        add_and_round(sum, false);
        return;
      }
    }
    add_and_round(sum, early);
  };
  // The softmax of a tile in which rows may see their first keys, such as a work tile's first K/V tile and partially masked ones. A row
  // that sees any key of the tile sees the tile's first key, unless there is a window.
  const auto set_reference = [&](int tile, bool masked, bool first) {
    cap_scores(S_reg, p);
    Visible visible;
    if (masked) {
      if (FIRST_APART && first) {
        visible.warp_whole = visible_keys(own(), warp_row()) - tile * TILE_KV;
        visible.warp_keys = visible_keys(own(), warp_row() + WARP_ROWS - 1) - tile * TILE_KV;
      }
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        visible.num_keys[h] = visible_keys(own(), warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
#if WINDOW
        visible.first_key[h] = first_key(own(), warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
#endif
      }
    }
#if WINDOW
    const bool settled = !__any_sync(FULL_WARP, rows.max[0] == NEG_INF || rows.max[1] == NEG_INF);   // as in tiles masked only on the left
#else
    constexpr bool settled = false;
#endif
    float reference[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      if (!settled) {
        float some = NEG_INF;   // this lane's maximum: of the row's first 8 keys of the tile, or with a window, of all keys that it sees
#pragma unroll
        for (int i = 2 * h; i < (WINDOW ? NUM_SCORES : 4); i += 4) {
          const float one = !masked || visible(i) ? S_reg[i] * p.scale_log2 : NEG_INF;
          const float other = !masked || visible(i + 1) ? S_reg[i + 1] * p.scale_log2 : NEG_INF;
          some = i < 4 ? fmaxf(one, other) : fmaxf(some, fmaxf(one, other));
        }
        const float first = lanes_max<ROW_LANES>(some) + HEADROOM;
        rows.max[h] = rows.max[h] == NEG_INF ? first : rows.max[h];
      }
      // No reference if the first scores are all -inf: against NOTHING_SEEN, P of -inf is 0, and any finite score makes the row overflow.
      reference[h] = masked && rows.max[h] == NEG_INF ? NOTHING_SEEN : rows.max[h];
    }
    TileSums sums;
    if (masked && IN_SPANS && first) {
      exponentials<true, true>(S_reg, reference, p.scale_log2, sums, visible);
    } else if (masked) {
      exponentials<true>(S_reg, reference, p.scale_log2, sums, visible);
    } else {
      exponentials<false>(S_reg, reference, p.scale_log2, sums);
    }
    float sum[HALVES] = {sums.of(0), sums.of(1)};
    finish_tile(sum, tile, false, visible, ROUND_EARLY && FIRST_APART && first);
  };
  // A work tile's first K/V tile, or a further one that is partially masked or the first that some row sees.
  const auto masked_tile = [&](int tile, int first_whole, bool first) {
    wait_for_K();
    if (!first) wait_for_V(kv.previous());
    GemmOrder::wait(consumer);
    ptx::wgmma_fence();
    issue_QK(kv.stage);
    if (!first) issue_PV(kv.previous().stage);
    GemmOrder::pass(consumer);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(S_reg);
    if (!first) ptx::wgmma_pin(O_reg);
    release(&smem.K_empty[kv.stage]);
    if (!first) release(&smem.V_empty[kv.previous().stage]);
    set_reference(tile, CAUSAL || WINDOW || tile >= first_whole, first);
    kv = kv.next();
  };
  // Stores a work tile's output, and resets O and the row state for the next one.
  const auto store_output = [&](const WorkTile& done) {
    const int first_row = done.first_q_row + consumer * WGMMA_ROWS;
    float O_out[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O_out[i] = O_reg[i];
    const AttentionParams& of_done = params_of(p, done);
    const int warp_q_row = first_row + warp * WARP_ROWS;
    float inv_weight[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const float weight = O_reg[WEIGHT + 2 * h];
      inv_weight[h] = weight == 0.0f ? 0.0f : ptx::rcp_approx_ftz(weight);
    }
    if (of_done.LSE) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float sum = lanes_sum<ROW_LANES>(rows.sum[h]) * HEADROOM_FACTOR;   // the headroom would cost the logarithm's last bits
        const int q_row = warp_q_row + lane / ROW_LANES + 8 * h;
        if (lane % ROW_LANES == 0 && q_row < of_done.q_len) {
          const long long place = lse_row(of_done, done.batch, done.head, q_row);
          of_done.LSE[place] = sum == 0.0f ? NEG_INF : (rows.max[h] - HEADROOM) * LN_2 + logf(sum);
        }
      }
    }
    scale_O(O_out, inv_weight);
    if constexpr (WIDE) {
      store_rows(of_done, O_out, lane, warp_q_row, done.head, done.batch);
    } else if constexpr (ALIGNED) {
      const InMap place = q_in_map(p, done);
      const int map_row = place.row + warp_q_row;
      copy_rows(maps, O_out, smem.O[consumer][warp], lane, map_row, done.head, place.batch, place.length);
    } else {
      write_rows(of_done, O_out, smem.O[consumer][0], warp, lane, first_row, done.head, done.batch);
    }
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; ++i) O_reg[i] = 0.0f;
    rows = {};
  };

  GemmOrder::begin(consumer);
  // Skips a tile that the block needs and this consumer does not.
  const auto skip_tile = [&]() {
    wait_for_K();
    __syncwarp();   // all lanes have seen the phase complete before lane 0 releases the stage: its next fill could hide that phase
    release(&smem.K_empty[kv.stage]);
    GemmOrder::wait(consumer);
    GemmOrder::pass(consumer);
    wait_for_V(kv);
    __syncwarp();
    release(&smem.V_empty[kv.stage]);
    kv = kv.next();
  };
  bool more = next_work_tile();
  while (more) {
    if constexpr (WIDE) tiles_to_skip = tiles_skipped();   // computed after the output is stored: registers are scarce
    for (; tiles_to_skip > 0; --tiles_to_skip) skip_tile();
    const int last_tile = first_tile(), last_whole = first_whole_tile();   // tiles are processed last to first
    int tile = last_tile + num_tiles - 1;
    const int first_whole = whole_tiles();
    if constexpr (FIRST_APART) {
      if (tile >= 0) masked_tile(tile--, first_whole, true);
    }
    for (bool first = !FIRST_APART; tile >= last_tile && (first || tile >= first_whole); first = false) {
      masked_tile(tile--, first_whole, first);
    }

    bool K_ready = false, V_ready = false;   // tested before the tiles are needed, because an mbarrier test has latency
    for (; tile >= last_whole; --tile) {
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
      ptx::wgmma_wait_group<0>();   // the PV GEMM is complete, too; the wait names no registers: ptxas moves some exponentials before it
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
      cap_scores(S_reg, p);
      TileSums sums;
      exponentials<false>(S_reg, rows.max, p.scale_log2, sums);
      float sum[HALVES] = {sums.of(0), sums.of(1)};
      finish_tile(sum, tile, true, {}, ROUND_EARLY);
      kv = after;
    }
    if constexpr (WINDOW) {
      while (tile >= last_tile) masked_tile(tile--, first_whole, false);
    }

    // The last PV GEMM. The next work tile is waited for and read while it runs.
    const bool any_tiles = num_tiles > 0;
    WorkTile done;
    if constexpr (WIDE) done = release_Q();     // one Q buffer: the next Q is loaded under the last PV GEMM
    if (any_tiles) {
      wait_for_V(kv.previous());
      ptx::wgmma_fence();
      issue_PV(kv.previous().stage);
    }
    if constexpr (!WIDE) done = release_Q();
    more = next_work_tile();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(O_reg);
    if (any_tiles) {
      release(&smem.V_empty[kv.previous().stage]);
      if constexpr (WINDOW) {
        for (int left = last_tile - first_tile_of_rows(params_of(p, done), done.first_q_row); left > 0; --left) skip_tile();
      }
    }
    store_output(done);
  }
  if constexpr (ALIGNED && !WIDE) output_copied(lane);
  if constexpr (COUNT_IN_SHARED) {
    if (p.fallbacks && lane == 0) {   // the block's last consumer warp adds the number of renormalised tiles to the caller's
      __threadfence_block();
      const unsigned warps = atomicAdd(&smem.ended, 1u) + 1;
      if (warps == NUM_CONSUMERS * WARPGROUP_WARPS) atomicAdd(&p.fallbacks[0], atomicAdd(&smem.moves, 0u) / WARP);
    }
  }
  GemmOrder::end(consumer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_17_around_the_loop(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    init_barriers(smem);
    if constexpr (COUNT_IN_SHARED) smem.moves = smem.ended = 0;
  }
  if constexpr (SHARED_ONES) {
    for (int i = threadIdx.x; i < WGMMA_STEP * PANEL; i += THREADS) smem.ones[i] = from_float<element>(1.0f);
  } else {
    for (int stage = 0; stage < PIPELINE_STAGES; ++stage) {
      for (int i = threadIdx.x; i < STAGE_ONES; i += THREADS) smem.V[stage][TILE_KV * HEAD_DIM + i] = from_float<element>(1.0f);
    }
  }
  ptx::fence_proxy_async_shared();   // makes the ordinary stores visible to the tensor cores (async proxy)
  __syncthreads();   // the mbarriers are initialised, and the ones written

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(p, maps, smem, thread);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, maps, smem, warpgroup - 1, thread);
  }
}
