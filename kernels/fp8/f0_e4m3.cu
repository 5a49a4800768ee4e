// f0_e4m3: Q, K and V stored in FP8, both GEMMs on e4m3. Parent: 16_ones_column.
// Question: with inputs stored in 8 bits, how much of the tensor cores' doubled rate remains, and at what error?
// Change: both GEMMs are wgmma on e4m3, with one scale per head. A first kernel transposes V, because FP8 operands must be contiguous
//         along the reduction, and permutes its keys so that the rounded score registers are the A operand of PV as they are.
// Layout: as the parent's; a V tile consists of blocks of 32 keys, without swizzle. site/fp8/f0_e4m3.md.
// Requires: sm_90a. The rows of Q, K and V start on 16-byte boundaries.
#include <cuda_fp8.h>

#include "fp8.cuh"
#include "hopper.cuh"
#include "late_fetch.cuh"
#include "pingpong.cuh"

using e4m3 = __nv_fp8_e4m3;
static_assert(HEAD_DIM == 128, "HEAD_DIM must be 128: a row of Q and K is one span of the 128-byte swizzle");

constexpr int THREADS = (1 + NUM_CONSUMERS) * WARPGROUP;
constexpr int TILE_Q = NUM_CONSUMERS * WGMMA_ROWS;
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : 232;
constexpr int ROW_BYTES = HEAD_DIM;        // of Q and K
constexpr int STEP = 32;                   // keys or columns that one instruction sums over
constexpr int NUM_SCORES = TILE_KV / 2;    // per tile and thread
constexpr int BEFORE_PV = NUM_SCORES / 4 / 8 * 8;   // this many of a tile's exponentials precede the wait for the PV GEMM
constexpr int ONES = 8;                    // columns of ones next to V: the smallest increment of an instruction's N
constexpr int O_COLUMNS = HEAD_DIM + ONES;
static_assert(NUM_CONSUMERS >= 1 && NUM_CONSUMERS <= 3, "NUM_CONSUMERS must be 1, 2 or 3: with more, each would have too few registers");
static_assert(TILE_KV % STEP == 0 && TILE_KV <= 224, "TILE_KV must be a multiple of 32 (an instruction's K) up to 224 (a TMA box's rows)");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: V of one tile and K of the next are in use together");

// V as the first kernel writes it: for every 32 keys O_COLUMNS rows of 32 bytes, one row per column of V, in core matrices of
// 8 rows × 16 bytes, each 128 contiguous bytes. TMA copies treat it as 34 rows of 128 bytes.
constexpr int PIECE_ROWS = 8;
constexpr int PIECE_BYTES = 16 * PIECE_ROWS;
constexpr int BLOCK_BYTES = O_COLUMNS * STEP;
constexpr int BLOCK_COPY_ROWS = BLOCK_BYTES / PANEL_ROW_BYTES;
constexpr int V_COPY_ROWS = TILE_KV / STEP * BLOCK_COPY_ROWS;
constexpr int K_BYTES = TILE_KV * ROW_BYTES;
constexpr int V_BYTES = TILE_KV / STEP * BLOCK_BYTES;

struct SharedStorage {
  alignas(PATTERN_BYTES) unsigned char Q[Q_STAGES][NUM_CONSUMERS][WGMMA_ROWS * ROW_BYTES];
  alignas(PATTERN_BYTES) unsigned char K[PIPELINE_STAGES][K_BYTES];
  alignas(PATTERN_BYTES) unsigned char V[PIPELINE_STAGES][V_BYTES];
  alignas(PATTERN_BYTES) element O[NUM_CONSUMERS][WARPGROUP_WARPS][WARP_ROWS * HEAD_DIM];
  float earlier[NUM_CONSUMERS][WARPGROUP][2 * HALVES];   // see Earlier, whose other sums are in O until the output is staged there
  WorkTile work[Q_STAGES];
  ptx::Mbarrier Q_full[Q_STAGES], Q_empty[Q_STAGES];
  ptx::Mbarrier end_near;
  ptx::Mbarrier K_full[PIPELINE_STAGES], K_empty[PIPELINE_STAGES];
  ptx::Mbarrier V_full[PIPELINE_STAGES], V_empty[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: use fewer keys, rows or stages");
static_assert(V_BYTES % 128 == 0, "the destination of a TMA copy must be aligned to 128 bytes");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, 0, 0, 1};   // maps: src/flashlab/run/fp8.py

enum NamedBarrier {
  ORDER_BARRIER = 1,   // and 2, 3: one per consumer, which waits on it for its turn to issue GEMMs
};
using GemmOrder = Turns<ORDER_BARRIER, NUM_CONSUMERS, PINGPONG>;

// --- V, transposed -----------------------------------------------------------------------------------------------------------

// The key at byte `at` of 16. A thread holds the scores of keys 2·t, 2·t + 1, 2·t + 8 and 2·t + 9 of 16, and as the A operand of the PV
// GEMM it must hold bytes 4·t to 4·t + 3.
__device__ __forceinline__ int key_at(int at) { return at / 4 * 2 + at % 2 + at % 4 / 2 * 8; }

// Each thread block writes one block of V: 32 keys. Keys past the end are 0, and the columns of ones are 1 for every key.
constexpr int TRANSPOSE_THREADS = 256;
extern "C" __global__ void __launch_bounds__(TRANSPOSE_THREADS)
transpose_f0_e4m3(const __grid_constant__ AttentionParams p, const __grid_constant__ Fp8Params fp8) {
  constexpr int ROW_PIECES = ROW_BYTES / 16;
  constexpr int PADDED = ROW_BYTES + 4;   // the bytes of a column lie in different banks
  constexpr unsigned ONE = 0x38;          // 1.0 in e4m3
  __shared__ __align__(16) unsigned char rows_smem[STEP * PADDED];
  static_assert(STEP * ROW_PIECES == TRANSPOSE_THREADS, "each thread must read 16 bytes once");
  const int batch = blockIdx.z, head = blockIdx.y;
  const auto* V_gmem = static_cast<const unsigned char*>(fp8.V.data) + batch * fp8.V.batch_stride + head * fp8.V.head_stride;
  const int row = threadIdx.x / ROW_PIECES, piece = threadIdx.x % ROW_PIECES;
  const long long key = static_cast<long long>(blockIdx.x) * STEP + row;
  uint4 read = {};
  if (key < p.kv_len) read = *reinterpret_cast<const uint4*>(V_gmem + key * fp8.V.row_stride + piece * 16);
  unsigned* target = reinterpret_cast<unsigned*>(rows_smem + row * PADDED + piece * 16);
  target[0] = read.x, target[1] = read.y, target[2] = read.z, target[3] = read.w;
  __syncthreads();
  const long long block = (static_cast<long long>(batch) * p.kv_heads + head) * gridDim.x + blockIdx.x;
  unsigned char* block_gmem = fp8.V_blocks + block * BLOCK_BYTES;
  for (int i = threadIdx.x; i < BLOCK_BYTES / 16; i += TRANSPOSE_THREADS) {
    const int column = i / (2 * PIECE_ROWS) * PIECE_ROWS + i % PIECE_ROWS, first_key = i / PIECE_ROWS % 2 * 16;
    unsigned word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      word[w] = ONE * 0x01010101u;
      if (column < HEAD_DIM) {
        word[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          word[w] |= static_cast<unsigned>(rows_smem[(first_key + key_at(4 * w + b)) * PADDED + column]) << 8 * b;
        }
      }
    }
    *reinterpret_cast<uint4*>(block_gmem + i * 16) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// --- the producer ------------------------------------------------------------------------------------------------------------

// As in late_fetch.cuh, but on bytes, and with TMA tensor copies only.
__device__ __forceinline__ void fetch_Q_bytes(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem) {
  TileScheduler<TILE_Q> scheduler(p);
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_empty[q.stage], q.parity ^ 1);
    if (count > 0) ptx::mbarrier_wait_parity(&smem.end_near, (count - 1) & 1);
    const WorkTile work = scheduler.next(p, count == 0);
    smem.work[q.stage] = work;
    if (work.num_tiles == NO_MORE) {
      ptx::mbarrier_arrive(&smem.Q_full[q.stage]);
      break;
    }
    ptx::mbarrier_arrive_expect_tx(&smem.Q_full[q.stage], sizeof(smem.Q[q.stage]));
    for (int i = 0; i < NUM_CONSUMERS; ++i) {
      ptx::cp_async_bulk_tensor_5d_load(smem.Q[q.stage][i], &maps.Q, &smem.Q_full[q.stage], 0, work.first_q_row + i * WGMMA_ROWS, 0,
                                        work.head, work.batch);
    }
  }
  close_counters(p);
}

__device__ __forceinline__ void fetch_KV_bytes(const AttentionParams& p, const AttentionMaps& maps, SharedStorage& smem) {
  KvPlace kv;
  for (int count = 0;; ++count) {
    const Place<Q_STAGES> q = Q_place(count);
    ptx::mbarrier_wait_parity(&smem.Q_full[q.stage], q.parity);   // the work tile is known
    const WorkTile work = smem.work[q.stage];
    ptx::mbarrier_arrive(&smem.Q_empty[q.stage]);
    if (work.num_tiles == NO_MORE) break;
    const int kv_head = kv_head_of(p, work.head);
    const int last_tiles = min(work.num_tiles - 1, TAKE_AHEAD);
    if (work.num_tiles == 0) ptx::mbarrier_arrive(&smem.end_near);
    for (int tile = work.num_tiles - 1; tile >= 0; --tile, kv = kv.next()) {
      if (tile == last_tiles) ptx::mbarrier_arrive(&smem.end_near);
      ptx::mbarrier_wait_parity(&smem.K_empty[kv.stage], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&smem.K_full[kv.stage], K_BYTES);
      ptx::cp_async_bulk_tensor_5d_load(smem.K[kv.stage], &maps.K, &smem.K_full[kv.stage], 0, tile * TILE_KV, 0, kv_head, work.batch);
      ptx::mbarrier_wait_parity(&smem.V_empty[kv.stage], kv.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&smem.V_full[kv.stage], V_BYTES);
      ptx::cp_async_bulk_tensor_5d_load(smem.V[kv.stage], &maps.V, &smem.V_full[kv.stage], 0, tile * V_COPY_ROWS, 0, kv_head, work.batch);
    }
  }
}

__device__ __forceinline__ void init_barriers_bytes(SharedStorage& smem) {
  ptx::mbarrier_init(&smem.end_near, 1);
  for (int stage = 0; stage < Q_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.Q_full[stage], 1);
    ptx::mbarrier_init(&smem.Q_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS + 1);
  }
  for (int stage = 0; stage < PIPELINE_STAGES; ++stage) {
    ptx::mbarrier_init(&smem.K_full[stage], 1);
    ptx::mbarrier_init(&smem.V_full[stage], 1);
    ptx::mbarrier_init(&smem.K_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
    ptx::mbarrier_init(&smem.V_empty[stage], NUM_CONSUMERS * WARPGROUP_WARPS);
  }
  ptx::fence_mbarrier_init();
}

// --- softmax -----------------------------------------------------------------------------------------------------------------
// As in 15_renormalize, with the range of e4m3: 2^-9 to 448, with reduced precision below 2^-6. P of a row's first 8 keys is at most
// 2^3. A lane sums P in two chains per row; while each chain is below 448, so is every P, and none saturates. Where a chain is not, the
// row's reference is raised so that its largest chain lies between 2^6 and 2^7: a key that outweighs all others then has P in that
// range, and P of a key with a thousandth of its weight still has full precision.
constexpr int HEADROOM = -3;   // log2 of the headroom; negative: the reference is below the first scores
constexpr float HEADROOM_FACTOR = 0x1p-3f;
constexpr float CHAIN_LIMIT = 448.0f;
constexpr int SETTLED = 6;
constexpr float OVERFLOWN = 0x1p126f;   // a chain this large, or NaN, means that FP32 may not hold some exponential

struct Visible {
  int num_keys[HALVES] = {TILE_KV, TILE_KV};
  __device__ __forceinline__ bool operator()(int i) const { return i / 4 * 8 + i % 2 < num_keys[i / 2 % 2]; }
};

struct TileSums {
  float chain[HALVES][2] = {};
  __device__ __forceinline__ float of(int h) const { return chain[h][0] + chain[h][1]; }
  __device__ __forceinline__ float larger(int h) const { return fmaxf(chain[h][0], chain[h][1]); }
  __device__ __forceinline__ bool in_range() const {   // false for NaN
    return chain[0][0] < CHAIN_LIMIT && chain[0][1] < CHAIN_LIMIT && chain[1][0] < CHAIN_LIMIT && chain[1][1] < CHAIN_LIMIT;
  }
};

// Converts four floats to e4m3; `a` goes to the lowest byte.
__device__ __forceinline__ unsigned to_e4m3(float a, float b, float c, float d) {
  const __nv_fp8x2_e4m3 low(make_float2(a, b)), high(make_float2(c, d));
  return low.__x | static_cast<unsigned>(high.__x) << 16;
}

template <int FIRST, int END, bool MASKED>
__device__ __forceinline__ void exponentials(float (&S_reg)[NUM_SCORES], const float (&reference)[HALVES], float scale_log2,
                                             TileSums& sums, const Visible& visible = {}) {
#pragma unroll
  for (int i = FIRST; i < END; ++i) {
    const int h = i / 2 % 2;
    const float x = fmaf(S_reg[i], scale_log2, -reference[h]);
    S_reg[i] = ptx::ex2_approx_ftz(!MASKED || visible(i) ? x : NEG_INF);
    sums.chain[h][i % 2] += S_reg[i];
  }
}

constexpr int FLUSH_ACCESSES = HEAD_DIM / 2 / 8;   // 16-byte accesses per lane

// A thread's output sums of earlier tiles. The tensor cores accumulate e4m3 products with some 13 bits, and what every instruction
// truncates is no longer negligible after thousands of keys: every FLUSH_TILES tiles, O is added to these sums in shared memory and
// restarts from 0. Pairs of bfloat16 keep more bits than e4m3 does.
struct Earlier {
  uint4* pairs;    // one lane's are WARP apart
  float* of_rows;  // this lane's, for each of its rows: the sum of the ones columns, and the factor from `pairs` to the current reference
  bool any;

  __device__ __forceinline__ void scale(int h, float by) const {
    if (!any) return;
    of_rows[2 * h] *= by;
    of_rows[2 * h + 1] *= by;
  }
  __device__ __forceinline__ void add_to(float (&O_reg)[O_COLUMNS / 2], int lane) const {
    const float factor[HALVES] = {of_rows[1], of_rows[3]};
#pragma unroll
    for (int i = 0; i < FLUSH_ACCESSES; ++i) {
      const uint4 four = pairs[i * WARP + lane];
      const unsigned word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {   // pair 4·i + w belongs to row w % 2
        O_reg[8 * i + 2 * w] += __uint_as_float(word[w] << 16) * factor[w % 2];
        O_reg[8 * i + 2 * w + 1] += __uint_as_float(word[w] & 0xffff0000u) * factor[w % 2];
      }
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) O_reg[HEAD_DIM / 2 + 2 * h] += of_rows[2 * h];
  }
  // Moves O into these sums.
  __device__ __forceinline__ void flush(float (&O_reg)[O_COLUMNS / 2], int lane) {
    if (any) {
      add_to(O_reg, lane);
    } else {
      if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();   // the TMA store of the previous output has read this buffer
      __syncwarp();
    }
    any = true;
#pragma unroll
    for (int i = 0; i < FLUSH_ACCESSES; ++i) {
      unsigned word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = pack(O_reg[8 * i + 2 * w], O_reg[8 * i + 2 * w + 1], __nv_bfloat16{});
      pairs[i * WARP + lane] = make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      of_rows[2 * h] = O_reg[HEAD_DIM / 2 + 2 * h];
      of_rows[2 * h + 1] = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; ++i) O_reg[i] = 0.0f;
  }
};

__device__ __forceinline__ void move_reference(float (&S_reg)[NUM_SCORES], float (&O_reg)[O_COLUMNS / 2], RowState& rows,
                                               const Earlier& earlier, float& sum, int h, int powers) {
  const float factor = __int_as_float((127 - powers) << 23);   // 2^-powers
  rows.max[h] += static_cast<float>(powers);
  rows.sum[h] *= factor;
  earlier.scale(h, factor);
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

// Converts four e4m3 numbers to fp16, which is exact.
__device__ __forceinline__ void widen(unsigned bytes, unsigned& low, unsigned& high) {
  __nv_fp8x2_e4m3 pair;
  pair.__x = static_cast<__nv_fp8x2_storage_t>(bytes);
  low = pack(static_cast<__half2>(pair));
  pair.__x = static_cast<__nv_fp8x2_storage_t>(bytes >> 16);
  high = pack(static_cast<__half2>(pair));
}

// As in 15_renormalize: recomputes by mma.sync the scores of `overflowed` rows, over a hundred powers of two above their reference.
// Both operands are widened to fp16, which is exact, from four consecutive bytes per thread: Q and K are permuted alike along the sum.
__device__ __forceinline__ void rescore(float (&S_reg)[NUM_SCORES], float (&O_reg)[O_COLUMNS / 2], RowState& rows,
                                        const Earlier& earlier, float (&sum)[HALVES], const bool (&overflowed)[HALVES],
                                        const unsigned char* Q_smem, const AttentionParams& p, float scale_log2,
                                        const WorkTile& work, int tile, const Visible& visible, int warp, int lane) {
  count_fallback<1>(p, lane);
  const auto* K_gmem = static_cast<const unsigned char*>(p.K.data) + work.batch * p.K.batch_stride +
                       kv_head_of(p, work.head) * p.K.head_stride + tile * TILE_KV * p.K.row_stride;
  const int last_key = p.kv_len - 1 - tile * TILE_KV;   // the tile may have fewer than TILE_KV keys
#pragma unroll 1
  for (int j = 0; j < TILE_KV / MATRIX; ++j) {
    float S[4] = {};
    const unsigned char* key = K_gmem + min(j * MATRIX + lane / ROW_LANES, last_key) * p.K.row_stride + lane % ROW_LANES * 4;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / STEP; ++k) {
      unsigned Q_part[4];   // row lane / 4 (and 8 below), 4 bytes from 4 · (lane % 4) on of 16 (and of the next 16)
      const int row = warp * WARP_ROWS + lane_row_of_rows(lane), chunk = k * 2 + lane_chunk_of_rows(lane);
      ptx::ldmatrix_x4(Q_part, Q_smem + row * ROW_BYTES + (chunk ^ row % 8) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned A[4], B[2];
        widen(Q_part[2 * i], A[0], A[2]);
        widen(Q_part[2 * i + 1], A[1], A[3]);
        widen(*reinterpret_cast<const unsigned*>(key + k * STEP + 16 * i), B[0], B[1]);
        mma(S, A, B, __half{});
      }
    }
#pragma unroll
    for (int i = 0; i < NUM_SCORES; ++i) S_reg[i] = i / 4 == j && overflowed[i / 2 % 2] ? S[i % 4] * scale_log2 : S_reg[i];
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
    // The largest P is then 2^SETTLED, which e4m3 holds: a chain may exceed its limit, but no P does.
    const float reference = (row_max == NEG_INF ? 0.0f : row_max) - SETTLED;
    const float factor = ptx::ex2_approx_ftz(fminf(rows.max[h] - reference, 0.0f));
    rows.max[h] = reference;
    rows.sum[h] *= factor;
    earlier.scale(h, factor);
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

// Stores a warp's 16 rows through its own part of shared memory, where the output's rows are not aligned.
__device__ __forceinline__ void write_warp_rows(const AttentionParams& p, const float (&O_out)[HEAD_DIM / 2], element* rows_smem, int lane,
                                                int warp_q_row, int head, int batch) {
  stage_rows<WARP_ROWS>(rows_smem, O_out, 0, lane);
  __syncwarp();   // all rows are staged
  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
  constexpr int ROW_CHUNKS = HEAD_DIM / CHUNK;
#pragma unroll
  for (int i = lane; i < WARP_ROWS * ROW_CHUNKS; i += WARP) {
    const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
    if (warp_q_row + row < p.q_len) {
      write_chunk(O_gmem + (warp_q_row + row) * p.O.row_stride + chunk * CHUNK,
                  *reinterpret_cast<const Chunk*>(rows_smem + tile_offset<WARP_ROWS>(row, chunk)));
    }
  }
  __syncwarp();   // the warp's rows in shared memory may be overwritten
}

// --- the consumers -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume(const AttentionParams& p, const AttentionMaps& maps, const Fp8Params& fp8, SharedStorage& smem,
                                        int consumer, int thread) {
  const int warp = thread / WARP;
  const int lane = thread % WARP;
  const int lane_col = lane % ROW_LANES * 2;
  KvPlace kv;   // stage of the tile whose QK GEMM is next; the previous stage has the tile whose probabilities are in P_reg

  const Descriptor K_desc = ptx::make_descriptor(smem.K[0], 0, PATTERN_BYTES, ptx::Swizzle::b128);
  const Descriptor V_desc = ptx::make_descriptor(smem.V[0], PIECE_BYTES, 2 * PIECE_BYTES, ptx::Swizzle::none);
  const auto release = [&](ptx::Mbarrier* empty) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  };

  float O_reg[O_COLUMNS / 2] = {};
  float S_reg[NUM_SCORES];
  unsigned P_reg[TILE_KV / STEP][4];
  Earlier earlier = {reinterpret_cast<uint4*>(smem.O[consumer][warp]), smem.earlier[consumer][thread], false};
  RowState rows;         // max: the row's reference, -inf until it has one
  float scale_log2 = 0;  // for the work tile's head, with its Q and K scales
  int count = -1;
  int num_tiles = 0;
  int tiles_to_skip = 0;

  const auto wait_for_Q = [&](int at) { ptx::mbarrier_wait_parity(&smem.Q_full[Q_place(at).stage], Q_place(at).parity); };
  const auto wait_for_K = [&]() { ptx::mbarrier_wait_parity(&smem.K_full[kv.stage], kv.parity); };
  const auto wait_for_V = [&](KvPlace at) { ptx::mbarrier_wait_parity(&smem.V_full[at.stage], at.parity); };
  const auto current = [&]() -> const WorkTile& { return smem.work[count % Q_STAGES]; };
  const auto issue_QK = [&](int stage) {
    const Descriptor Q_desc = ptx::make_descriptor(smem.Q[count % Q_STAGES][consumer], 0, PATTERN_BYTES, ptx::Swizzle::b128);
    const Descriptor desc = K_desc + descriptor_step(stage * K_BYTES);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / STEP; ++k) {
      ptx::wgmma_ss<TILE_KV, e4m3>(S_reg, Q_desc + descriptor_step(k * STEP), desc + descriptor_step(k * STEP), k > 0);
    }
    ptx::wgmma_commit_group();
  };
  const auto issue_PV = [&](int stage) {
    const Descriptor desc = V_desc + descriptor_step(stage * V_BYTES);
#pragma unroll
    for (int k = 0; k < TILE_KV / STEP; ++k) {
      ptx::wgmma_rs<O_COLUMNS, e4m3>(O_reg, P_reg[k], desc + descriptor_step(k * BLOCK_BYTES), true);
    }
    ptx::wgmma_commit_group();
  };
  const auto whole_tiles = [&]() { return (visible_keys(p, current().first_q_row + consumer * WGMMA_ROWS) - CAUSAL) / TILE_KV; };
  const auto warp_row = [&]() { return current().first_q_row + consumer * WGMMA_ROWS + warp * WARP_ROWS; };
  const auto next_work_tile = [&]() {
    wait_for_Q(++count);
    if (current().num_tiles == NO_MORE) return false;
    num_tiles = tiles_of_rows(p, current().first_q_row + consumer * WGMMA_ROWS, WGMMA_ROWS);
    tiles_to_skip = current().num_tiles - num_tiles;
    const int kv_head = current().batch * p.kv_heads + kv_head_of(p, current().head);
    scale_log2 = p.scale_log2 * fp8.Q_scale[current().batch * p.q_heads + current().head] * fp8.K_scale[kv_head];
    return true;
  };
  const auto finish_tile = [&](const TileSums& sums, int tile, const Visible& visible) {
    float sum[HALVES] = {sums.of(0), sums.of(1)};
    if (__any_sync(FULL_WARP, !sums.in_range())) {
      count_fallback<0>(p, lane);
      bool overflowed[HALVES];
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float chain = sum[h] == sum[h] ? sums.larger(h) : sum[h];   // fmaxf would drop a NaN
        const unsigned bits = lanes_max<ROW_LANES>(__float_as_uint(chain));   // not negative: ordered as their bits, NaN largest
        overflowed[h] = bits >= __float_as_uint(OVERFLOWN);
        const int powers = bits < __float_as_uint(CHAIN_LIMIT) || overflowed[h]
                               ? 0
                               : min(126, static_cast<int>(bits >> 23) - 127 - SETTLED);
        if (__any_sync(FULL_WARP, powers > 0)) move_reference(S_reg, O_reg, rows, earlier, sum[h], h, powers);
      }
      if (__any_sync(FULL_WARP, overflowed[0] || overflowed[1])) {
        rescore(S_reg, O_reg, rows, earlier, sum, overflowed, smem.Q[count % Q_STAGES][consumer], p, scale_log2, current(), tile,
                     visible, warp, lane);
      }
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    // One register packs keys 2·t, 2·t + 1, 2·t + 8 and 2·t + 9 of 16, of one row.
#pragma unroll
    for (int j = 0; j < TILE_KV / MATRIX; j += 2) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float* S = S_reg + 4 * j + 2 * h;
        P_reg[j / 4][j % 4 + h] = to_e4m3(S[0], S[1], S[4], S[5]);
      }
    }
  };
  // The softmax of a tile that may have a row's first visible keys: a row that sees any key of the tile sees the tile's first key.
  const auto set_reference = [&](int tile, bool masked) {
    Visible visible;
    if (masked) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        visible.num_keys[h] = visible_keys(p, warp_row() + lane / ROW_LANES + 8 * h) - tile * TILE_KV - lane_col;
      }
    }
    float reference[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const float one = !masked || visible(2 * h) ? S_reg[2 * h] * scale_log2 : NEG_INF;
      const float other = !masked || visible(2 * h + 1) ? S_reg[2 * h + 1] * scale_log2 : NEG_INF;
      const float first = lanes_max<ROW_LANES>(fmaxf(one, other)) + HEADROOM;   // from the row's first 8 scores of the tile
      rows.max[h] = rows.max[h] == NEG_INF ? first : rows.max[h];
      reference[h] = masked && rows.max[h] == NEG_INF ? 0.0f : rows.max[h];     // no visible key yet: P = 2^-inf = 0
    }
    TileSums sums;
    if (masked) {
      exponentials<0, NUM_SCORES, true>(S_reg, reference, scale_log2, sums, visible);
    } else {
      exponentials<0, NUM_SCORES, false>(S_reg, reference, scale_log2, sums);
    }
    finish_tile(sums, tile, visible);
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
    set_reference(tile, CAUSAL || tile >= first_whole);
    kv = kv.next();
  };
  const auto store_output = [&](const WorkTile& done) {
    if (earlier.any) {
      earlier.add_to(O_reg, lane);
      __syncwarp();   // all lanes have read their sums: the output is staged in the same buffer
    }
    const int first_row = done.first_q_row + consumer * WGMMA_ROWS;
    const float V_scale = fp8.V_scale[done.batch * p.kv_heads + kv_head_of(p, done.head)];
    float O_out[HEAD_DIM / 2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) O_out[i] = O_reg[i] * V_scale;
    float weight[HALVES], sum[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      rows.max[h] -= HEADROOM;
      weight[h] = O_reg[HEAD_DIM / 2 + 2 * h];   // the columns of ones: the sum of the rounded P
      sum[h] = lanes_sum<ROW_LANES>(rows.sum[h]) * HEADROOM_FACTOR;
    }
    finish_rows(p, O_out, rows, weight, sum, lane, first_row + warp * WARP_ROWS, done.head, done.batch);
    if constexpr (ALIGNED) {
      copy_rows(maps, O_out, smem.O[consumer][warp], lane, first_row + warp * WARP_ROWS, done.head, done.batch);
    } else {
      write_warp_rows(p, O_out, smem.O[consumer][warp], lane, first_row + warp * WARP_ROWS, done.head, done.batch);
    }
#pragma unroll
    for (int i = 0; i < O_COLUMNS / 2; ++i) O_reg[i] = 0.0f;
    rows = {};
    earlier.any = false;
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
    int tile = num_tiles - 1;
    const int first_whole = whole_tiles();
    for (bool first = true; tile >= 0 && (first || tile >= first_whole); first = false) masked_tile(tile--, first_whole, first);

    bool K_ready = false, V_ready = false;
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
      TileSums sums;
      exponentials<0, BEFORE_PV, false>(S_reg, rows.max, scale_log2, sums);
      // ptxas would move these exponentials behind the wait, which names no registers; so a test's address depends on their sums' signs.
      const int zero = (__float_as_uint(sums.chain[0][0]) | __float_as_uint(sums.chain[0][1]) | __float_as_uint(sums.chain[1][0]) |
                        __float_as_uint(sums.chain[1][1])) >> 31;
      V_ready = ptx::mbarrier_test_wait_parity(&smem.V_full[kv.stage] + zero, kv.parity);
      ptx::wgmma_wait_group<0>();   // the PV GEMM is complete, too
      ptx::wgmma_pin(O_reg);
      release(&smem.V_empty[kv.previous().stage]);
      exponentials<BEFORE_PV, NUM_SCORES, false>(S_reg, rows.max, scale_log2, sums);
      if (FLUSH_TILES > 0 && tile % max(1, FLUSH_TILES) == 0) earlier.flush(O_reg, lane);
      finish_tile(sums, tile, {});
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
attention_f0_e4m3(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps,
                  const __grid_constant__ Fp8Params fp8) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) init_barriers_bytes(smem);
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (thread == 0) {
      fetch_Q_bytes(p, maps, smem);
    } else if (thread == WARP) {
      fetch_KV_bytes(p, maps, smem);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, maps, fp8, smem, warpgroup - 1, thread);
  }
}
