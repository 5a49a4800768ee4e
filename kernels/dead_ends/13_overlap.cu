// 13_overlap: the softmax waits only for what it needs. Parent: 12_persistent.
// Question: what keeps the tensor cores and the exponential unit from working at the same time, and how much of that can be removed?
// Change: exponentials start immediately, against an old maximum, in bfloat16 even against none; a sum out of range signals that they
//         must be recomputed; the wait for the PV GEMM stands among them; a work tile is fetched late, and waited for during the last
//         GEMM of the previous one; the output is stored by TMA.
// Layout: warpgroup 0 loads, one warp Q, the others K and V; consumer c owns rows 64·c onwards. Diagram: site/dead_ends/13_overlap.md.
// Requires: sm_90a.
#include "hopper.cuh"
#include "pingpong.cuh"
#include "work_tiles.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// At launch a thread has 65536 / THREADS registers, rounded down to a multiple of 8; setmaxnreg redistributes the block's total.
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;
constexpr int Q_THREADS = WARP;            // of the producer
constexpr int KV_THREADS = WARPGROUP - WARP;
constexpr int Q_STAGES = 2;                // the next Q is loaded while the current one is in use
constexpr int TAKE_AHEAD = 2;              // a work tile is fetched when this many K/V tiles of the previous one follow the next to load
constexpr int NUM_SCORES = TILE_KV / 2;    // per thread, of one tile
// This many of a tile's exponentials precede the wait for the PV GEMM; the others follow it and overlap the rounding of the first ones.
// ptxas moves some of them across the wait in either direction, because the wait names no registers.
constexpr int BEFORE_PV = NUM_SCORES / 4;
constexpr long long L2_SHARE_BYTES = static_cast<long long>(L2_SHARE_MB) << 20;
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
  ptx::Mbarrier end_near;                                            // the current work tile has few K/V tiles left to load: TAKE_AHEAD
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has arrived; empty: all consumer warps are done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; barrier 0 is that of __syncthreads.
enum NamedBarrier {
  ORDER_BARRIER = 1,   // and 2, 3: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// A stage of a circular buffer of SIZE stages, and the phase parity of its full barrier.
template <int SIZE>
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ Place next() const {
    return stage + 1 == SIZE ? Place{0, parity ^ 1} : Place{stage + 1, parity};
  }
};
using KvPlace = Place<PIPELINE_STAGES>;
__device__ __forceinline__ Place<Q_STAGES> Q_place(int count) {   // the same from a single counter, to save registers
  return {count % Q_STAGES, static_cast<unsigned>(count / Q_STAGES & 1)};
}

// The tile scheduler: hands out Q tiles through an atomic counter, from as many heads at a time as fit their K and V into a share of the
// L2 cache. Among these heads the longest work tiles come first, so that the last to finish are short: causal, those of the last rows,
// which see the most keys; non-causal, those of the first rows, because a head's last tile may have fewer rows.
class Schedule {
 public:
  // The 64-bit divisions are done here, once.
  __device__ __forceinline__ explicit Schedule(const AttentionParams& p)
      : num_q_tiles((p.q_len + TILE_Q - 1) / TILE_Q), num_heads(p.q_heads * p.batch) {
    const long long head_bytes = 2ll * p.kv_len * HEAD_DIM * sizeof(element) * p.kv_heads / p.q_heads;
    section = static_cast<int>(max(1ll, min(static_cast<long long>(num_heads), L2_SHARE_BYTES / max(1ll, head_bytes))));
  }

  // The first work tile is given by the block index, the others by the counter.
  __device__ __forceinline__ WorkTile next(const AttentionParams& p, bool first) {
    const int index = first ? blockIdx.x : gridDim.x + atomicAdd(&p.work[0], 1u);
    if (index >= num_q_tiles * num_heads) return {0, 0, 0, NO_MORE};
    const int first_head = index / (section * num_q_tiles) * section;
    const int section_heads = min(section, num_heads - first_head);   // the last section may be smaller
    const int section_index = index - first_head * num_q_tiles;
    const int round = section_index / section_heads;
    const int first_q_row = (CAUSAL ? num_q_tiles - 1 - round : round) * TILE_Q;
    const int any_head = first_head + section_index - round * section_heads;   // counted over all batches
    const int batch = any_head / p.q_heads;
    return {first_q_row, any_head - batch * p.q_heads, batch, tiles_of_rows(p, first_q_row, TILE_Q)};
  }

 private:
  int num_q_tiles;
  int num_heads;
  int section;   // heads processed at the same time
};

// The producer warp for Q: fetches work tiles and loads their Q. It fetches each as late as its Q can still arrive in time: a block that
// fetches early gets work by its place in a queue and not because it is free, and the last work tiles then finish late.
__device__ __forceinline__ void fetch_Q(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int thread) {
  Schedule schedule(p);
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_empty[q.stage], q.parity ^ 1);   // all readers have released this stage
    if (count > 0) ptx::mbarrier_wait_parity(&smem.end_near, (count - 1) & 1);   // the previous work tile is nearly done
    if (thread == 0) smem.work[q.stage] = schedule.next(p, count == 0);
    if constexpr (!ALIGNED) __syncwarp();   // makes it visible to the other lanes
    const WorkTile work = smem.work[q.stage];
    if (work.num_tiles == NO_MORE) {
      ptx::mbarrier_arrive(&smem.Q_full[q.stage]);
      break;
    }
    const Source source = {&maps.Q, &p.Q, p.q_len, work.head, work.batch};
    fill_begin(&smem.Q_full[q.stage], TILE_BYTES<TILE_Q>);
    for (int i = 0; i < NUM_CONSUMERS; ++i) {
      fill<WGMMA_ROWS, Q_THREADS>(smem.Q[q.stage][i], source, work.first_q_row + i * WGMMA_ROWS, &smem.Q_full[q.stage], thread);
    }
    fill_end(&smem.Q_full[q.stage]);
  }
  if (thread == 0) close_counters(p);
}

// The producer's other warps: load K and V as soon as a stage is free, and signal when a work tile has few K/V tiles left to load.
// Tiles are processed from last to first, so that the partially masked ones come first, when a maximum must be computed anyway.
__device__ __forceinline__ void fetch_KV(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int thread) {
  KvPlace kv;
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_full[q.stage], q.parity);   // smem.work[q.stage] is valid
    const WorkTile work = smem.work[q.stage];
    if constexpr (!ALIGNED) __syncwarp();   // all lanes have read it: with no K/V tiles, consumers could release it right away
    if (thread % WARP == 0) ptx::mbarrier_arrive(&smem.Q_empty[q.stage]);
    if (work.num_tiles == NO_MORE) break;
    const int kv_head = kv_head_of(p, work.head);
    const Source K_source = {&maps.K, &p.K, p.kv_len, kv_head, work.batch};
    const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, work.batch};
    const int last_tiles = min(work.num_tiles - 1, TAKE_AHEAD);
    if (work.num_tiles == 0 && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
    for (int tile = work.num_tiles - 1; tile >= 0; --tile, kv = kv.next()) {
      if (tile == last_tiles && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
      ptx::mbarrier_wait_parity(&smem.K_empty[kv.stage], kv.parity ^ 1);   // the consumers are done with the buffer's previous tile
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

// Masks a tile's scores and turns them into probabilities against the running maximum, this tile included; `rescale` gets the factor for
// earlier sums and outputs. Row h sees columns below num_keys[h], counted from this lane's first; no row of the warp sees more than
// warp_keys. Blocks of 16 columns that no row of the warp sees skip the maximum and the exponentials.
__device__ __forceinline__ void exact_softmax(float (&S_reg)[NUM_SCORES], RowState& rows, float (&rescale)[HALVES], float scale_log2,
                                              int warp_keys, const int (&num_keys)[HALVES]) {
  constexpr int BLOCK = 8;   // a lane's scores in 16 columns
  float lane_max[HALVES] = {NEG_INF, NEG_INF};
#pragma unroll
  for (int b = 0; b < NUM_SCORES; b += BLOCK) {
    if (2 * b < warp_keys) {
#pragma unroll
      for (int i = b; i < b + BLOCK; ++i) {
        S_reg[i] = i / 4 * 8 + i % 2 < num_keys[i / 2 % 2] ? S_reg[i] * scale_log2 : NEG_INF;
        lane_max[i / 2 % 2] = fmaxf(lane_max[i / 2 % 2], S_reg[i]);
      }
    }
  }
  float minus_reference[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    const float new_max = fmaxf(rows.max[h], lanes_max<ROW_LANES>(lane_max[h]));
    const float reference = new_max == NEG_INF ? 0.0f : new_max;   // no visible key yet: -inf - -inf would be NaN
    rescale[h] = ptx::ex2_approx_ftz(rows.max[h] - reference);     // 0 for a row's first visible keys
    rows.max[h] = new_max;
    rows.sum[h] *= rescale[h];
    minus_reference[h] = -reference;
  }
#pragma unroll
  for (int b = 0; b < NUM_SCORES; b += BLOCK) {
    const bool seen = 2 * b < warp_keys;
#pragma unroll
    for (int i = b; i < b + BLOCK; ++i) {
      S_reg[i] = seen ? ptx::ex2_approx_ftz(S_reg[i] + minus_reference[i / 2 % 2]) : 0.0f;
      rows.sum[i / 2 % 2] += S_reg[i];
    }
  }
}

// A lane's sums over a tile, in two independent chains of additions per row.
struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
};

// Replaces a tile's scores FIRST to END - 1 by their exponentials, 2^(scale · score - max), against the maximum of earlier tiles, and
// adds them to the sums. No dependency on other lanes. Where a score is far above the old maximum, a sum is out of range: see
// SUM_LIMIT.
template <int FIRST, int END>
__device__ __forceinline__ void exponentials(float (&S_reg)[NUM_SCORES], const RowState& rows, float scale_log2, TileSums& sums) {
#pragma unroll
  for (int i = FIRST; i < END; ++i) {
    const int h = i / 2 % 2;
    S_reg[i] = ptx::ex2_approx_ftz(fmaf(S_reg[i], scale_log2, -rows.max[h]));
    sums.chain[h][i % 2] += S_reg[i];
  }
}

// The same for all of a tile's scores, with the mask: row h sees columns below num_keys[h], counted from this lane's first.
__device__ __forceinline__ void masked_exponentials(float (&S_reg)[NUM_SCORES], const RowState& rows, float scale_log2,
                                                    TileSums& sums, const int (&num_keys)[HALVES]) {
#pragma unroll
  for (int i = 0; i < NUM_SCORES; ++i) {
    const int h = i / 2 % 2;
    const float x = fmaf(S_reg[i], scale_log2, -rows.max[h]);
    S_reg[i] = ptx::ex2_approx_ftz(i / 4 * 8 + i % 2 < num_keys[h] ? x : NEG_INF);
    sums.chain[h][i % 2] += S_reg[i];
  }
}

// While a lane's sum over a tile is below this limit, each of its exponentials fits 16 bits, because none is negative. The comparison is
// false for NaN. 2^15 leaves fp16 a factor of two. bfloat16 has FP32's range, but the products with V must fit FP32, too: a row's sum
// stays below 2^32 per tile, so with 2^20 tiles values of V from 2^-80 to 2^70 are safe, the small ones because of SMALLEST_SUM.
template <typename T>
constexpr float LARGEST_SUM = 1 << 30;
template <>
constexpr float LARGEST_SUM<__half> = 32768.0f;
constexpr float SUM_LIMIT = LARGEST_SUM<element>;

// With FP32's range a work tile can start without a maximum, as if it were 0: a row's first sum shows whether that is valid. Small
// probabilities are as exact as large ones there; in fp16, values below 2^-14 lose bits. The maximum of the block's previous work tile
// would also serve, but which work tile that is depends on timing, and so would the last bits of the output.
constexpr bool NO_MAXIMUM = SUM_LIMIT > LARGEST_SUM<__half>;
constexpr float SMALLEST_SUM = 1.0f / SUM_LIMIT;

// The exponentials are invalid: some score is too far above the old maximum, or all of a row's scores are too far below it. Recomputes
// the warp's scores with mma.sync, 8 keys at a time, whose accumulator layout is that of wgmma, once for the maximum and once for the
// probabilities. K is read from global memory, so that its stage need not be held for this rare case.
__device__ __forceinline__ void redo(unsigned (&P_reg)[TILE_KV / WGMMA_STEP][4], float (&O_reg)[HEAD_DIM / 2], RowState& rows,
                                     const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4],
                                     const element* Q_smem, const AttentionParams& p, const WorkTile& work,
                                     int tile, int warp_row, int warp, int lane) {
  if (p.fallbacks && lane == 0) atomicAdd(&p.fallbacks[1], 1u);
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
  KvPlace kv;   // stage of the next QK GEMM's tile

  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  // Releases a buffer: one arrival per warp.
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  float O_reg[HEAD_DIM / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;
  KvPlace before;      // stage of the tile whose probabilities are in P_reg
  int count = -1;      // number of work tiles before the current one
  int num_tiles = 0;   // K/V tiles that this consumer's rows need of the current work tile: at most the block's
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
  // The number of a tile's keys that each of the lane's rows sees, counted from the lane's first column.
  const auto count_keys = [&](int (&num_keys)[HALVES], int tile) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) num_keys[h] = visible_keys(p, warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
  };
  const auto exact_probabilities = [&](int tile) {
    int num_keys[HALVES];
    count_keys(num_keys, tile);
    exact_softmax(S_reg, rows, rescale, p.scale_log2, visible_keys(p, warp_row() + WARP_ROWS - 1) - tile * TILE_KV, num_keys);
  };
  // Waits for the next work tile; returns false if there is none.
  const auto next_work_tile = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(p, current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    tiles_to_skip = current().num_tiles - num_tiles;
    if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[count % Q_STAGES][consumer], warp, lane);
    return true;
  };
  // Releases K and computes P of a work tile's first K/V tile after its QK GEMM. There is no maximum yet, and O is 0.
  const auto first_probabilities = [&]() {
    release(&smem.K_empty[kv.stage]);
    const int tile = num_tiles - 1;
    if constexpr (NO_MAXIMUM) {
      rows.max[0] = rows.max[1] = 0.0f;
      TileSums sums;
      if (!CAUSAL && tile < whole_tiles()) {
        exponentials<0, NUM_SCORES>(S_reg, rows, p.scale_log2, sums);
      } else {
        int num_keys[HALVES];
        count_keys(num_keys, tile);
        masked_exponentials(S_reg, rows, p.scale_log2, sums, num_keys);
      }
      bool good = true;
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        rows.sum[h] = sums.of(h);
        const float row_sum = lanes_sum<ROW_LANES>(rows.sum[h]);
        good = good && SMALLEST_SUM < row_sum && row_sum < SUM_LIMIT;
      }
      if (__any_sync(FULL_WARP, !good)) {
        rows = {};
        redo(P_reg, O_reg, rows, Q_reg, smem.Q[count % Q_STAGES][consumer], p, current(), tile, warp_row(), warp, lane);
      } else {
        round_P<TILE_KV>(P_reg, S_reg);
      }
    } else {
      exact_probabilities(tile);
      round_P<TILE_KV>(P_reg, S_reg);
    }
    before = kv;
    kv = kv.next();
  };
  // Stores a work tile's output, and resets the accumulators and row state for the next.
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
      first_probabilities();
    }
    int tile = num_tiles - 2;

    // Further tiles that do not count as whole, such as partially masked ones.
    for (const int first_whole = whole_tiles(); tile >= 0 && tile >= first_whole; --tile) {
      wait_for_K();
      wait_for_V(before);
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(before.stage);
      GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(S_reg);
      ptx::wgmma_pin(O_reg);
      release(&smem.K_empty[kv.stage]);
      release(&smem.V_empty[before.stage]);
      exact_probabilities(tile);
      scale_O(O_reg, rescale);
      round_P<TILE_KV>(P_reg, S_reg);
      before = kv;
      kv = kv.next();
    }

    bool K_ready = false, V_ready = false;   // tested before the tiles are needed, because an mbarrier test has latency
    for (; tile >= 0; --tile) {
      if (!K_ready) wait_for_K();
      if (!V_ready) wait_for_V(before);
      GemmOrder::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(before.stage);
      GemmOrder::pass(consumer);
      ptx::wgmma_wait_group<1>();   // the QK GEMM is complete; the previous tile's PV GEMM is in flight
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      const KvPlace after = kv.next();
      K_ready = ptx::mbarrier_test_wait_parity(&smem.K_full[after.stage], after.parity);
      V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);
      TileSums sums;
      exponentials<0, BEFORE_PV>(S_reg, rows, p.scale_log2, sums);
      ptx::wgmma_wait_group<0>();   // the PV GEMM is complete, too
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[before.stage]);
      exponentials<BEFORE_PV, NUM_SCORES>(S_reg, rows, p.scale_log2, sums);
      const float sum[HALVES] = {sums.of(0), sums.of(1)};
      if (__any_sync(FULL_WARP, !(sum[0] < SUM_LIMIT && sum[1] < SUM_LIMIT))) {
        redo(P_reg, O_reg, rows, Q_reg, smem.Q[count % Q_STAGES][consumer], p, current(), tile, warp_row(), warp, lane);
      } else {
        rows.sum[0] += sum[0];
        rows.sum[1] += sum[1];
        round_P<TILE_KV>(P_reg, S_reg);
      }
      before = kv;
      kv = after;
    }

    // The last PV GEMM. It overlaps the wait for the next work tile, which is read before the output is stored.
    if (num_tiles > 0) {
      wait_for_V(before);
      ptx::wgmma_fence();
      issue_PV(before.stage);
      wait_for_Q(count + 1);   // or for NO_MORE in its place
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[before.stage]);
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
attention_13_overlap(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    constexpr int KV_WARPS = ALIGNED ? 1 : KV_THREADS / WARP;   // warps that read smem.work
    ptx::mbarrier_init(&smem.end_near, 1);
    for (int stage = 0; stage < Q_STAGES; ++stage) {
      ptx::mbarrier_init(&smem.Q_full[stage], FILL_ARRIVALS<Q_THREADS>);
      ptx::mbarrier_init(&smem.Q_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS + KV_WARPS);
    }
    for (int stage = 0; stage < PIPELINE_STAGES; ++stage) {
      ptx::mbarrier_init(&smem.K_full[stage], FILL_ARRIVALS<KV_THREADS>);
      ptx::mbarrier_init(&smem.V_full[stage], FILL_ARRIVALS<KV_THREADS>);
      ptx::mbarrier_init(&smem.K_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
      ptx::mbarrier_init(&smem.V_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the mbarriers are initialised

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (thread < FILL_ARRIVALS<Q_THREADS>) {
      fetch_Q(p, maps, smem, thread);
    } else if (thread >= Q_THREADS && thread < Q_THREADS + FILL_ARRIVALS<KV_THREADS>) {
      fetch_KV(p, maps, smem, thread - Q_THREADS);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, maps, smem, warpgroup - 1, thread);
  }
}
