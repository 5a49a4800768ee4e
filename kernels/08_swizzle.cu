// 08_swizzle: swizzled tiles without padding, scores one tile ahead of the output. Parent: 07_mma_registers.
// Question: how fast is mma.sync when a warp's MMAs overlap its exponentials?
// Change: rows of shared memory are not padded; their 16-byte chunks are swizzled instead, so that a deeper ring fits. The next
//         tile's scores are computed into the registers whose scores have just been exponentiated, so that independent MMAs are
//         always ready to issue.
// Layout: as the parent's; chunk c of row r of Q, K and V is stored at chunk c ^ (r % 8), at head dim 96 at c ^ (r / 2 % 4).
#include "attention.cuh"
#include "mma.cuh"
#include "parts.cuh"
#include "reduce.cuh"
#include "softcap.cuh"
#include "tile.cuh"

// Ablation. SWIZZLE 0: chunks keep their positions, and PADDING elements are appended to each row.
#ifndef SWIZZLE
#define SWIZZLE 1
#endif
#ifndef PADDING
#define PADDING 0
#endif

constexpr int THREADS = WARPS * WARP;
constexpr int WARP_ROWS = TILE_Q / WARPS;
constexpr int ROW_BLOCKS = WARP_ROWS / MMA_M;      // blocks of 16 query rows
constexpr int KEY_BLOCKS = TILE_KV / MMA_N;        // blocks of 8 keys
constexpr int KEY_STEPS = TILE_KV / STEP_KEYS;
constexpr int STEP_BLOCKS = STEP_KEYS / MMA_N;     // blocks of 8 keys in a step
constexpr int COL_BLOCKS = HEAD_DIM / MMA_N;       // blocks of 8 output columns
constexpr int SUM_BLOCK = COL_BLOCKS;              // with SUM_BY_MMA: extra accumulator block, every column of which is the row's sum
constexpr int O_BLOCKS = COL_BLOCKS + SUM_BY_MMA;
constexpr int D_STEPS = HEAD_DIM / MMA_K;
constexpr int STRIDE = HEAD_DIM + PADDING;              // of Q, K and V rows in shared memory, in elements
constexpr int ROW_BYTES = STRIDE * sizeof(element);     // the same in bytes
constexpr int TILE_BYTES = TILE_KV * ROW_BYTES;         // of each of K and V
constexpr int SWAPPED_CHUNKS = HEAD_DIM % 64 == 0 ? 8 : 4;   // of a row, permuted together; one chunk of 8 rows falls into different banks
// All threads copy tiles; at head dim 96, whose rows have 12 chunks, 3/4 of them do, which cover whole rows.
constexpr int COPY_THREADS = HEAD_DIM % 64 == 0 ? THREADS : THREADS / 4 * 3;
constexpr float LOWEST = -0x1p100f;                // first maximum; finite, so rows with no key need no check; lower scores count as masked
static_assert(TILE_Q % (WARPS * MMA_M) == 0, "each warp must own a multiple of 16 query rows");
static_assert(STEP_KEYS % MMA_K == 0 && TILE_KV % STEP_KEYS == 0, "STEP_KEYS must be a multiple of 16 and divide TILE_KV");
static_assert(Q_IN_REGISTERS <= 1, "Q_IN_REGISTERS is 0 or 1");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: scores run one tile ahead of the output");
static_assert(SUM_BY_MMA <= 1, "SUM_BY_MMA is 0 or 1");
static_assert(SWIZZLE == 0 || SWIZZLE == 1 && PADDING == 0, "SWIZZLE is 0 or 1, and swizzled rows have no PADDING");
static_assert(STRIDE % CHUNK == 0, "ldmatrix needs 16-byte aligned rows");

struct SharedStorage {
  alignas(128) element Q[TILE_Q * STRIDE];   // reused for the output at the end
  alignas(128) element K[PIPELINE_STAGES][TILE_KV * STRIDE];
  alignas(128) element V[PIPELINE_STAGES][TILE_KV * STRIDE];
};

// Byte offsets of K and V in shared memory: ldmatrix addresses are computed from offsets.
constexpr int K_START = TILE_Q * ROW_BYTES;
constexpr int V_START = K_START + PIPELINE_STAGES * TILE_BYTES;
static_assert(sizeof(SharedStorage) == V_START + PIPELINE_STAGES * TILE_BYTES, "tiles must be contiguous, without gaps");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

// Offset of chunk `chunk` of row `row` within a tile, in elements. The same chunk of 8 consecutive rows, which ldmatrix reads
// together, falls into different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * STRIDE + (SWIZZLE ? chunk ^ row / (MATRIX / SWAPPED_CHUNKS) % SWAPPED_CHUNKS : chunk) * CHUNK;
}

// This thread's share of the copies of a head's successive tiles. An incremented pointer saves the address arithmetic, which
// would take more instructions than the copies. cp.async is asynchronous: the caller commits the group and waits for it.
// Unaligned rows cannot be copied 16 bytes at a time, so `fetch` loads and stores them before it returns; the caller's waits
// and barriers cover that case too.
template <int ROWS>
struct TileCopy {
  using Share = TileShare<ROWS, COPY_THREADS>;
  static_assert(Share::ROWS_PER_STEP % MATRIX == 0 || Share::ROWS_PER_STEP == 4 && SWAPPED_CHUNKS == MATRIX,
                "the swizzle must be the same for all rows of a thread, or alternate between two patterns");
  Share share;
  const element* source;   // this thread's first chunk of the next tile
  long long step;          // elements between this thread's successive chunks

  __device__ __forceinline__ TileCopy(const element* head_gmem, long long row_stride, int first_row)
      : source(head_gmem + (first_row + share.row) * row_stride + share.d), step(Share::ROWS_PER_STEP * row_stride) {}

  // Fetches the next tile, of which `num_rows` rows exist (the number may be 0, negative or more than ROWS). Missing rows are not
  // read but filled with 0: a masked key still enters the PV GEMM, and 0 · garbage may be NaN.
  __device__ __forceinline__ void fetch(element* tile_smem, int num_rows) {
    if (COPY_THREADS < THREADS && threadIdx.x >= COPY_THREADS) return;
#pragma unroll
    for (int row = 0; row < ROWS; row += Share::ROWS_PER_STEP) {
      element* target = tile_smem + swizzled(share.row, share.d / CHUNK ^ (SWIZZLE ? row % MATRIX : 0));
      const bool exists = share.row + row < num_rows;
      if constexpr (ALIGNED) {
        ptx::cp_async_cg_16(target + row * STRIDE, source, exists ? sizeof(Chunk) : 0);
      } else {
        Chunk chunk = {};
        if (exists) chunk = read_chunk(source);
        *reinterpret_cast<Chunk*>(target + row * STRIDE) = chunk;
      }
      source += step;
    }
  }
};

// Byte offset of an ldmatrix row's chunk 2·d or 2·d + 1, given its offset `at` for d = 0. Tiles and rows start on multiples of 128
// bytes, so the swizzled chunk index is three bits of the whole offset, which one XOR changes. Where 4 chunks are permuted, rows
// start on multiples of 64 bytes, and it is two bits.
__device__ __forceinline__ unsigned chunks_at(unsigned at, int d) {
  constexpr int SWAPPED = SWAPPED_CHUNKS * sizeof(Chunk);   // span in bytes within which chunks are permuted
  const int distance = 2 * d * sizeof(Chunk);
  if constexpr (!SWIZZLE) return at + distance;
  return (at ^ distance % SWAPPED) + distance / SWAPPED * SWAPPED;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_08_swizzle(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0);   // the shuffle tells the compiler that the value is warp-uniform
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int warp_q_row = first_q_row + warp * WARP_ROWS;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
#if VARLEN
  const AttentionParams p = of_sequence(params, sequence_at(params, batch));
  if (first_q_row >= p.q_len) return;   // the grid is sized for the longest sequence
#else
  const AttentionParams& p = params;
#endif

  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  element* warp_smem = smem.Q + warp * WARP_ROWS * STRIDE;            // this warp's rows of Q and of the output

  const int lane_row = lane / ROW_LANES;              // first of the two accumulator rows that this lane holds
  const int lane_col = lane % ROW_LANES * 2;          // first of the two adjacent columns that it holds
  // This lane's ldmatrix offset in a 16 × 16 tile, in bytes.
  const unsigned of_rows = swizzled(lane_row_of_rows(lane), lane_chunk_of_rows(lane)) * sizeof(element);            // Q and V
  const unsigned of_columns = swizzled(lane_row_of_columns(lane), lane_chunk_of_columns(lane)) * sizeof(element);   // K

  float O_reg[ROW_BLOCKS][O_BLOCKS][4] = {};
  float row_max[ROW_BLOCKS][HALVES];        // reference of the exponentials, in log2 units; the same in the 4 lanes of a row
  float row_sum[ROW_BLOCKS][HALVES] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) row_max[r][0] = row_max[r][1] = LOWEST;

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  const int num_tiles = (block_keys + TILE_KV - 1) / TILE_KV;
  const int warp_keys = warp_q_row < p.q_len ? visible_keys(p, min(warp_q_row + WARP_ROWS, p.q_len) - 1) : 0;
  const int warp_tiles = (warp_keys + TILE_KV - 1) / TILE_KV;
  const int full_keys = visible_keys(p, warp_q_row);   // smallest for the first row: no row's visible range ends before it
  // First tile with a key that the block sees, first that the warp sees, and first key that the window hides from none of its rows.
  const int first_tile = first_key(p, first_q_row) / TILE_KV;
  const int first_warp_tile = first_key(p, warp_q_row) / TILE_KV;
  const int first_full_key = first_key(p, warp_q_row + WARP_ROWS - 1);
  TileCopy<TILE_KV> K_copy(K_gmem, p.K.row_stride, first_tile * TILE_KV);
  TileCopy<TILE_KV> V_copy(V_gmem, p.V.row_stride, first_tile * TILE_KV);
  // Fetches the next tile of V into buffer `slot` of its ring, and the K tile after it into buffer `next_slot` of the K ring; past
  // the last tile it writes zeros, so that no branch splits a tile's instructions.
  const auto fetch = [&](int tile, int slot, int next_slot) {
    K_copy.fetch(smem.K[next_slot], block_keys - (tile + 1) * TILE_KV);
    V_copy.fetch(smem.V[slot], block_keys - tile * TILE_KV);
    ptx::cp_async_commit_group();
  };

  TileCopy<TILE_Q>(Q_gmem, p.Q.row_stride, first_q_row).fetch(smem.Q, p.q_len - first_q_row);
  K_copy.fetch(smem.K[0], block_keys - first_tile * TILE_KV);
  ptx::cp_async_commit_group();   // a separate group, committed before those of the tiles
  for (int slot = 0; slot < PIPELINE_STAGES - 1; ++slot) fetch(first_tile + slot, slot, slot + 1);
  if constexpr (!does(Part::MEMORY)) V_copy.fetch(smem.V[PIPELINE_STAGES - 1], block_keys - (PIPELINE_STAGES - 1) * TILE_KV);

  ptx::cp_async_wait_group<PIPELINE_STAGES - 1>();   // this thread's copies of Q and of the first K tile have landed
  __syncthreads();                                   // all threads' copies have landed

  // Row maxima are taken before scaling, so the scale must be positive. The sign of a negative scale is applied to the warp's rows
  // of Q; if the scale is 0, those rows are zeroed and the scale becomes 1.
  const float scale_log2 = p.scale_log2 == 0.0f ? 1.0f : fabsf(p.scale_log2);
  if (p.scale_log2 <= 0.0f) {
    for (int row = 0; row < WARP_ROWS; ++row) {
      for (int d = lane * 2; d < HEAD_DIM; d += WARP * 2) {
        unsigned& pair = *reinterpret_cast<unsigned*>(warp_smem + row * STRIDE + d);
        pair = p.scale_log2 < 0.0f ? pair ^ 0x80008000u : 0u;
      }
    }
    __syncwarp();   // the warp's rows of Q are updated
  }
  const unsigned Q_at = warp * WARP_ROWS * ROW_BYTES + of_rows;
  unsigned Q_frag[Q_IN_REGISTERS ? D_STEPS : 1][ROW_BLOCKS][4];
  const auto load_Q = [&](int d, unsigned (&frag)[ROW_BLOCKS][4]) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) ptx::ldmatrix_x4(frag[r], shared_bytes + chunks_at(Q_at, d) + r * MMA_M * ROW_BYTES);
  };
  if constexpr (Q_IN_REGISTERS) {
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) load_Q(d, Q_frag[d]);
  }
  if constexpr (!does(Part::PV)) stand_in<ROW_BLOCKS * O_BLOCKS * 4>(&O_reg[0][0][0]);

  float S_reg[ROW_BLOCKS][KEY_BLOCKS][4];
  float tile_max[ROW_BLOCKS][HALVES];   // maximum of the unscaled scores in S_reg: this lane's, then, after share_max, the row's
  unsigned noted = 0;
  if constexpr (!does(Part::QK)) stand_in<ROW_BLOCKS * KEY_BLOCKS * 4>(&S_reg[0][0][0]);
  // Computes the scores of step `step` from the K tile at K_at, overwriting the step's previous scores in S_reg.
  const auto multiply_QK = [&](int step, unsigned K_at) {
    if constexpr (!does(Part::QK)) return;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int j = step * STEP_BLOCKS; j < (step + 1) * STEP_BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) S_reg[r][j][i] = 0.0f;
      }
    }
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) {
      unsigned(&Q)[ROW_BLOCKS][4] = Q_frag[Q_IN_REGISTERS ? d : 0];
      if constexpr (!Q_IN_REGISTERS) load_Q(d, Q);
#pragma unroll
      for (int j = step * STEP_BLOCKS; j < (step + 1) * STEP_BLOCKS; j += 2) {
        unsigned K_frag[2][2];
        load_pair<false>(K_frag, shared_bytes + chunks_at(K_at, d) + j * MMA_N * ROW_BYTES);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
          mma(S_reg[r][j], Q[r], K_frag[0], element{});
          mma(S_reg[r][j + 1], Q[r], K_frag[1], element{});
        }
      }
    }
#if SOFTCAP
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int j = step * STEP_BLOCKS; j < (step + 1) * STEP_BLOCKS; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) S_reg[r][j][i] = capped(p, S_reg[r][j][i]);
      }
    }
#endif
  };
  // Updates tile_max with the step's scores; the first step starts a new maximum.
  const auto take_max = [&](int step) {
    if constexpr (!does(Part::SOFTMAX)) return;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
#pragma unroll
        for (int j = step * STEP_BLOCKS; j < (step + 1) * STEP_BLOCKS; ++j) {
          const float larger = fmaxf(S_reg[r][j][2 * half], S_reg[r][j][2 * half + 1]);
          tile_max[r][half] = j == 0 ? larger : fmaxf(tile_max[r][half], larger);
        }
      }
    }
  };
  const auto share_max = [&] {
    if constexpr (!does(Part::SOFTMAX)) return;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) tile_max[r][half] = lanes_max<ROW_LANES>(tile_max[r][half]);
    }
  };
  // The step's probabilities. Two 8-column accumulator blocks have the register layout of 16 columns of the PV GEMM's A operand.
  const auto exponentiate = [&](int step, unsigned (&P_frag)[STEP_BLOCKS / 2][ROW_BLOCKS][4]) {
#pragma unroll
    for (int k = 0; k < STEP_BLOCKS / 2; ++k) {
#pragma unroll
      for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* S = S_reg[r][step * STEP_BLOCKS + 2 * k + i / 2] + i % 2 * 2;
          if constexpr (!does(Part::SOFTMAX)) {
            P_frag[k][r][i] = pack(S[0], S[1], element{});
            continue;
          }
          const float low = ptx::ex2_approx_ftz(fmaf(S[0], scale_log2, -row_max[r][i % 2]));
          const float high = ptx::ex2_approx_ftz(fmaf(S[1], scale_log2, -row_max[r][i % 2]));
          if constexpr (!SUM_BY_MMA) row_sum[r][i % 2] += low + high;
          P_frag[k][r][i] = pack(low, high, element{});
        }
      }
    }
  };
  // Accumulates the step's contribution to the output, from the V tile at V_at.
  const auto multiply_PV = [&](int step, const unsigned (&P_frag)[STEP_BLOCKS / 2][ROW_BLOCKS][4], unsigned V_at) {
#pragma unroll
    for (int k = 0; k < STEP_BLOCKS / 2; ++k) {
      if constexpr (!does(Part::PV)) keep_alive<ROW_BLOCKS * 4>(noted, &P_frag[k][0][0]);
#pragma unroll
      for (int d = 0; does(Part::PV) && d < D_STEPS; ++d) {
        unsigned V_frag[2][2];
        load_pair<true>(V_frag, shared_bytes + chunks_at(V_at, d) + (step * STEP_KEYS + k * MMA_K) * ROW_BYTES);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
          mma(O_reg[r][2 * d], P_frag[k][r], V_frag[0], element{});
          mma(O_reg[r][2 * d + 1], P_frag[k][r], V_frag[1], element{});
        }
      }
      if constexpr (SUM_BY_MMA && does(Part::SOFTMAX)) {
        const unsigned ones[2] = {pack(1.0f, 1.0f, element{}), pack(1.0f, 1.0f, element{})};
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) mma(O_reg[r][SUM_BLOCK], P_frag[k][r], ones, element{});
      }
    }
  };
  // Masks the keys that a row does not see, in a partially masked tile, and recomputes tile_max.
  const auto mask = [&](int tile_key) {
    if constexpr (!does(Part::SOFTMAX)) return;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q_row = warp_q_row + r * MMA_M + i / 2 * MATRIX + lane_row;
        const int num_keys = visible_keys(p, q_row) - tile_key - lane_col - i % 2;   // counted from this element's column in the tile
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j) {
          if (j * MMA_N >= num_keys) S_reg[r][j][i] = NEG_INF;
        }
#if WINDOW
        const int hidden_keys = first_key(p, q_row) - tile_key - lane_col - i % 2;
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j) {
          if (j * MMA_N < hidden_keys) S_reg[r][j][i] = NEG_INF;
        }
#endif
      }
    }
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) take_max(step);
    share_max();
  };
  // Updates the rows' references, and rescales output and sums to match.
  const auto update_max = [&] {
    if constexpr (!does(Part::SOFTMAX)) return;
    float new_max[ROW_BLOCKS][HALVES];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        new_max[r][half] = fmaxf(row_max[r][half], tile_max[r][half] * scale_log2);
        grown |= new_max[r][half] > row_max[r][half] + LAZY_RESCALE;
      }
    }
    if (LAZY_RESCALE > 0 && !__any_sync(FULL_WARP, grown)) return;   // keep the old reference
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const float rescale = ptx::ex2_approx_ftz(row_max[r][half] - new_max[r][half]);   // 0 for a row's first visible keys
        row_max[r][half] = new_max[r][half];
        row_sum[r][half] *= rescale;
#pragma unroll
        for (int j = 0; j < O_BLOCKS; ++j) {
          O_reg[r][j][2 * half] *= rescale;
          O_reg[r][j][2 * half + 1] *= rescale;
        }
      }
    }
  };
  // Turns one tile, whose scores are in S_reg, into output and replaces its scores by the next tile's. A step issues QK MMAs of the
  // next tile, PV MMAs of this one and the next step's exponentials, which are independent. The compiler would schedule all QK MMAs
  // last; the branch between the steps, which a warp with keys left never takes, prevents that.
  const auto process_tile = [&](int tile, int slot, int next_slot, bool has_next) {
    const int tile_key = tile * TILE_KV;
    const unsigned K_at = K_START + next_slot * TILE_BYTES + of_columns;   // the next tile's
    const unsigned V_at = V_START + slot * TILE_BYTES + of_rows;
    if (tile_key + TILE_KV > full_keys || WINDOW && tile_key < first_full_key) mask(tile_key);
    update_max();
    unsigned P_frag[2][STEP_BLOCKS / 2][ROW_BLOCKS][4];
    exponentiate(0, P_frag[0]);
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
      if (tile_key + step * STEP_KEYS >= warp_keys) break;
      if (step + 1 < KEY_STEPS) exponentiate(step + 1, P_frag[(step + 1) % 2]);
      if (has_next) multiply_QK(step, K_at);
      multiply_PV(step, P_frag[step % 2], V_at);
      if (has_next && step > 0) take_max(step - 1);
      if (has_next && step + 1 == KEY_STEPS) {
        take_max(step);
        share_max();
      }
    }
  };

  // Computes the scores of the warp's first tile, whose K is at K_at, with no other work to overlap.
  const auto begin = [&](unsigned K_at) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) {
      multiply_QK(step, K_at);
      take_max(step);
    }
    share_max();
  };
  if (warp_tiles > first_tile && first_warp_tile == first_tile) begin(K_START + of_columns);
  int slot = 0;   // (tile - first_tile) % PIPELINE_STAGES, without the division
  for (int tile = first_tile; tile < num_tiles; ++tile) {
    const int next_slot = slot + 1 == PIPELINE_STAGES ? 0 : slot + 1;
    const int free_slot = slot == 0 ? PIPELINE_STAGES - 1 : slot - 1;   // the V buffer to refill; K's is `slot`
    ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this thread's copies of this V tile and of the next K tile have landed
    __syncthreads();   // all threads' copies have landed, and all threads are done with the buffers that are filled next
    if constexpr (does(Part::MEMORY)) {
      fetch(tile + PIPELINE_STAGES - 1, free_slot, slot);
    } else {
      ptx::cp_async_commit_group();
    }
    if (tile < first_warp_tile) {
      if (tile + 1 == first_warp_tile) begin(K_START + next_slot * TILE_BYTES + of_columns);
    } else if (tile + 1 < warp_tiles) {
      process_tile(tile, slot, next_slot, true);
    } else if (tile + 1 == warp_tiles) {
      process_tile(tile, slot, next_slot, false);
    }
    slot = next_slot;
  }

  if constexpr (!does(Part::PV)) O_reg[0][0][0] += static_cast<float>(noted);
  // The output is staged in the warp's rows of Q, which no other warp reads, and stored in 16-byte chunks and whole lines.
  __syncwarp();   // the warp is done reading its rows of Q
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int row = r * MMA_M + half * MATRIX + lane_row;
      const int q_row = warp_q_row + row;
      const float sum = !does(Part::SOFTMAX) ? 1.0f
                        : SUM_BY_MMA         ? O_reg[r][O_BLOCKS - 1][2 * half]
                                             : lanes_sum<ROW_LANES>(row_sum[r][half]);
      const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
      if (p.LSE && lane % ROW_LANES == 0 && q_row < p.q_len) {
        const long long place = lse_row(p, batch, head, q_row);
        p.LSE[place] = sum == 0.0f ? NEG_INF : row_max[r][half] * LN_2 + logf(sum);
      }
#pragma unroll
      for (int j = 0; j < COL_BLOCKS; ++j) {
        *reinterpret_cast<unsigned*>(warp_smem + swizzled(row, j) + lane_col) =
            pack(O_reg[r][j][2 * half] * inv_sum, O_reg[r][j][2 * half + 1] * inv_sum, element{});
      }
    }
  }
  __syncwarp();   // the warp's rows of the output are complete
  constexpr int CHUNKS = HEAD_DIM / CHUNK;   // per row
  constexpr int ROWS_AT_ONCE = WARP / CHUNKS;
  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
#pragma unroll
  for (int step = 0; step < WARP_ROWS / ROWS_AT_ONCE; ++step) {
    const int row = step * ROWS_AT_ONCE + lane / CHUNKS;
    const int chunk = lane % CHUNKS;
    if (warp_q_row + row >= p.q_len || WARP % CHUNKS != 0 && lane >= ROWS_AT_ONCE * CHUNKS) break;
    write_chunk(O_gmem + (warp_q_row + row) * p.O.row_stride + chunk * CHUNK,
                *reinterpret_cast<const Chunk*>(warp_smem + swizzled(row, chunk)));
  }
}
