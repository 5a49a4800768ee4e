// 13_overlap: the softmax waits for nothing that it can do without. Parent: 12_persistent.
// Question: what keeps the tensor cores and the exponential unit from working at the same time, and how far can that be undone?
// Change: exponentials start at once, against an old maximum, in bfloat16 even against none; a sum that is too large tells when they
//         must be redone; the wait for P·V stands among them; a work tile is taken late, and waited for under the last GEMM of the one
//         before; the output leaves by a TMA store.
// Layout: warpgroup 0 fetches, a warp Q, the others K and V; consumer c has rows 64·c onwards. site/dead_ends/13_overlap.md draws it.
// Requires: sm_90a.
#include "hopper.cuh"
#include "turns.cuh"
#include "works.cuh"

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
// A thread's registers: the block's, 65536 / THREADS rounded down to a multiple of 8 for each thread, are dealt anew.
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;
constexpr int Q_THREADS = WARP;            // of the producer
constexpr int KV_THREADS = WARPGROUP - WARP;
constexpr int Q_STAGES = 2;                // the next Q comes while this one is in use
constexpr int TAKE_AHEAD = 2;              // a work tile is taken when so many K/V tiles of the one before are left to fetch
constexpr int NUM_SCORES = TILE_KV / 2;    // of a tile, a thread
// So many of a tile's exponentials stand before the wait for P·V, the others behind it, where they run beside the rounding of the
// first. ptxas moves some across the wait in either direction: it names no registers.
constexpr int BEFORE_PV = NUM_SCORES / 4;
constexpr long long L2_SHARE_BYTES = static_cast<long long>(L2_SHARE_MB) << 20;
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
  ptx::Mbarrier end_near;                                            // the work at hand has few tiles left to fetch: TAKE_AHEAD
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];   // full: the tile has come; empty: every consumer warp is done
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV, 1};

// Named barriers; 0 is __syncthreads.
enum NamedBarrier {
  TURN_BARRIER = 1,   // and 2, 3: a consumer's turn to issue GEMMs has come
};
using ProductTurns = Turns<TURN_BARRIER, NUM_CONSUMERS, PINGPONG>;

// A place in a ring of SIZE buffers, and the parity of its full barrier there.
template <int SIZE>
struct Place {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ Place next() const {
    return stage + 1 == SIZE ? Place{0, parity ^ 1} : Place{stage + 1, parity};
  }
};
using KvPlace = Place<PIPELINE_STAGES>;
__device__ __forceinline__ Place<Q_STAGES> Q_place(int count) {   // the same from one number, where registers are short
  return {count % Q_STAGES, static_cast<unsigned>(count / Q_STAGES & 1)};
}

// Hands a block its work, one after the other: tiles of Q from a counter, of as many heads at once as have room for their K and V in
// a share of the L2 cache. Of these heads the longest work comes first, so that the last to end is short: causal, the last rows',
// which see most keys; full, the first rows', because a head's last tile may have fewer rows.
class Schedule {
 public:
  // What takes long divisions is done once.
  __device__ __forceinline__ explicit Schedule(const AttentionParams& p)
      : num_q_tiles((p.q_len + TILE_Q - 1) / TILE_Q), num_heads(p.q_heads * p.batch) {
    const long long head_bytes = 2ll * p.kv_len * HEAD_DIM * sizeof(element) * p.kv_heads / p.q_heads;
    section = static_cast<int>(max(1ll, min(static_cast<long long>(num_heads), L2_SHARE_BYTES / max(1ll, head_bytes))));
  }

  // The first is given, the others come from the counter.
  __device__ __forceinline__ Work next(const AttentionParams& p, bool first) {
    const int index = first ? blockIdx.x : gridDim.x + atomicAdd(&p.work[0], 1u);
    if (index >= num_q_tiles * num_heads) return {0, 0, 0, NO_MORE};
    const int first_head = index / (section * num_q_tiles) * section;
    const int section_heads = min(section, num_heads - first_head);   // the last section may be smaller
    const int section_index = index - first_head * num_q_tiles;
    const int round = section_index / section_heads;
    const int first_q_row = (CAUSAL ? num_q_tiles - 1 - round : round) * TILE_Q;
    const int any_head = first_head + section_index - round * section_heads;   // of all batches
    const int batch = any_head / p.q_heads;
    return {first_q_row, any_head - batch * p.q_heads, batch, tiles_of_rows(p, first_q_row, TILE_Q)};
  }

 private:
  int num_q_tiles;
  int num_heads;
  int section;   // heads worked on at the same time
};

// One part of the producer: takes work tiles and fetches their Q. One is taken as late as its Q can still come in time: whoever takes
// early takes by its place in a queue and not by being free, and the last to end are late.
__device__ __forceinline__ void fetch_Q(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int thread) {
  Schedule schedule(p);
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_empty[q.stage], q.parity ^ 1);   // the consumers are done with the buffer's last work
    if (count > 0) ptx::mbarrier_wait_parity(&smem.end_near, (count - 1) & 1);   // the work before will be done soon
    if (thread == 0) smem.work[q.stage] = schedule.next(p, count == 0);
    if constexpr (!ALIGNED) __syncwarp();   // the others see it
    const Work work = smem.work[q.stage];
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

// The other part: fetches K and V, as early as there is room for them, and says when a work tile comes to its end.
// Tiles come from the last to the first, so that those that the mask cuts come first, when a maximum must be found anyway.
__device__ __forceinline__ void fetch_KV(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int thread) {
  KvPlace kv;
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_full[q.stage], q.parity);   // the work is known
    const Work work = smem.work[q.stage];
    if constexpr (!ALIGNED) __syncwarp();   // all lanes have read it: without tiles, consumers could be done with it at once
    if (thread % WARP == 0) ptx::mbarrier_arrive(&smem.Q_empty[q.stage]);
    if (work.num_tiles == NO_MORE) break;
    const int kv_head = kv_head_of(p, work.head);
    const Source K_source = {&maps.K, &p.K, p.kv_len, kv_head, work.batch};
    const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, work.batch};
    const int last_tiles = min(work.num_tiles - 1, TAKE_AHEAD);
    if (work.num_tiles == 0 && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
    for (int tile = work.num_tiles - 1; tile >= 0; --tile, kv = kv.next()) {
      if (tile == last_tiles && thread == 0) ptx::mbarrier_arrive(&smem.end_near);
      ptx::mbarrier_wait_parity(&smem.K_empty[kv.stage], kv.parity ^ 1);   // the consumers are done with the buffer's last tile
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

// A tile's scores become probabilities against its own maximum, with the mask, and `rescale` what earlier sums and outputs must be
// multiplied by. Row h sees columns below num_keys[h], counted from this lane's first; no row of the warp sees more than warp_keys.
// What the whole warp does not see costs nothing.
__device__ __forceinline__ void exact_softmax(float (&S_reg)[NUM_SCORES], RowState& rows, float (&rescale)[HALVES], float scale_log2,
                                              int warp_keys, const int (&num_keys)[HALVES]) {
  constexpr int BLOCK = 8;   // scores of a lane in 16 columns
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
    const float reference = new_max == NEG_INF ? 0.0f : new_max;   // no key seen yet: -inf - -inf would be NaN
    rescale[h] = ptx::ex2_approx_ftz(rows.max[h] - reference);     // 0 at the first keys
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

// A lane's sums over a tile, in two chains of additions for each row.
struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
};

// The exponentials of a tile's scores FIRST to END, 2^(scale · score - max), in their place, against maxima of earlier tiles; and
// what they add to the sums. Nothing here waits for another lane. Where a score is far above the old maximum, a sum says so: see
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

// All of a tile's, with the mask: row h sees columns below num_keys[h], counted from this lane's first.
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

// While a lane's sum over a tile is below this, each of its exponentials can be rounded to 16 bits: they are not negative. It holds
// for no NaN. 2^15 leaves fp16 a factor of two. bfloat16 has FP32's range, in which their products with V must find room too: a row's
// sum stays below 2^32 a tile, and with 2^20 tiles values of V from 2^-80 to 2^70 have it, the small ones by SMALLEST_SUM.
template <typename T>
constexpr float LARGEST_SUM = 1 << 30;
template <>
constexpr float LARGEST_SUM<__half> = 32768.0f;
constexpr float SUM_LIMIT = LARGEST_SUM<element>;

// With FP32's range a work tile can begin without a maximum, as if it were 0: a row's first sum says whether that will do. Small
// probabilities are as exact as large ones there; in fp16, what is below 2^-14 loses bits. A maximum of rows before would serve as
// well, but which those are is chance, and so would be the last bits of the output.
constexpr bool NO_MAXIMUM = SUM_LIMIT > LARGEST_SUM<__half>;
constexpr float SMALLEST_SUM = 1.0f / SUM_LIMIT;

// The exponentials are void: some score is too far above the old maximum, or all of a row's are too far below it. The warp's scores
// are worked out again by mma.sync, 8 keys at a time, whose accumulator has the layout of wgmma's, once for the maximum and once for
// the probabilities. K comes from global memory: its buffer is not held back for what hardly ever happens.
__device__ __forceinline__ void redo(unsigned (&P_reg)[TILE_KV / WGMMA_STEP][4], float (&O_reg)[HEAD_DIM / 2], RowState& rows,
                                     const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4],
                                     const element* Q_smem, const AttentionParams& p, const Work& work,
                                     int tile, int warp_row, int warp, int lane) {
  if (p.fallbacks && lane == 0) atomicAdd(&p.fallbacks[1], 1u);
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

// A consumer: up to 64 query rows of each work.
__device__ __forceinline__ void consume(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem, int consumer,
                                        int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int lane_col = lane % ROW_LANES * 2;
  KvPlace kv;   // of the tile whose scores are next

  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  // This warp is done with the buffer.
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  unsigned Q_reg[HEAD_DIM / WGMMA_STEP][4];
  float O_reg[HEAD_DIM / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / WGMMA_STEP][4];
  RowState rows;
  KvPlace before;      // of the tile whose probabilities are in P_reg
  int count = -1;      // of work tiles before the current one
  int num_tiles = 0;   // that this consumer's rows need of the current work: at most the block's
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
  // Keys of a tile that each of the lane's rows sees, counted from the lane's first.
  const auto count_keys = [&](int (&num_keys)[HALVES], int tile) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) num_keys[h] = visible_keys(p, warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
  };
  const auto exact_probabilities = [&](int tile) {
    int num_keys[HALVES];
    count_keys(num_keys, tile);
    exact_softmax(S_reg, rows, rescale, p.scale_log2, visible_keys(p, warp_row() + WARP_ROWS - 1) - tile * TILE_KV, num_keys);
  };
  // Takes the next work; false where there is none.
  const auto take = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(p, current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    not_mine = current().num_tiles - num_tiles;
    if constexpr (Q_IN_REGISTERS) load_Q(Q_reg, smem.Q[count % Q_STAGES][consumer], warp, lane);
    return true;
  };
  // What a work tile's first K/V tile needs once its scores are there. There is no maximum yet; and O is 0.
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
  // A work's output leaves; nothing of it is left for the next.
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
      first_probabilities();
    }
    int tile = num_tiles - 2;

    // Further tiles that the mask cuts, if any.
    for (const int first_whole = whole_tiles(); tile >= 0 && tile >= first_whole; --tile) {
      wait_for_K();
      wait_for_V(before);
      ProductTurns::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(before.stage);
      ProductTurns::pass(consumer);
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

    bool K_came = false, V_came = false;   // tested before it must be known, because an answer takes a while
    for (; tile >= 0; --tile) {
      if (!K_came) wait_for_K();
      if (!V_came) wait_for_V(before);
      ProductTurns::wait(consumer);
      ptx::wgmma_fence();
      issue_QK(kv.stage);
      issue_PV(before.stage);
      ProductTurns::pass(consumer);
      ptx::wgmma_wait_group<1>();   // Q·K is done; P·V of the tile before is under way
      ptx::wgmma_pin(S_reg);
      release(&smem.K_empty[kv.stage]);
      const KvPlace after = kv.next();
      K_came = ptx::mbarrier_test_wait_parity(&smem.K_full[after.stage], after.parity);
      V_came = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage], kv.parity);
      TileSums sums;
      exponentials<0, BEFORE_PV>(S_reg, rows, p.scale_log2, sums);
      ptx::wgmma_wait_group<0>();   // so is P·V
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

    // The last P·V. Under it the next work is waited for, and taken before the output leaves.
    if (num_tiles > 0) {
      wait_for_V(before);
      ptx::wgmma_fence();
      issue_PV(before.stage);
      wait_for_Q(count + 1);   // or word that there is no more
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[before.stage]);
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
attention_13_overlap(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // by a shuffle, so that ptxas sees one for a warp
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    constexpr int KV_WARPS = ALIGNED ? 1 : KV_THREADS / WARP;   // that read what the work is
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
  __syncthreads();   // the barriers exist

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
