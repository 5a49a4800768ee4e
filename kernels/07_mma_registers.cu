// 07_mma_registers: scores, probabilities and output never leave the registers. Parent: 06_cp_async.
// Question: what did the scores' round trip through shared memory cost?
// Change: mma.sync, whose fragment layout is documented, replaces WMMA: a warp owns whole rows and exponentiates its accumulators,
//         which are the PV GEMM's A operand lane for lane. Q_IN_REGISTERS loads Q's fragments once; only boundary tiles are masked.
// Layout: warp w of block x owns rows x·TILE_Q + w·WARP_ROWS onwards. With g = lane / 4 and t = lane % 4 a lane holds, of
//         each 16 × 8 block of scores or output, columns 2·t and 2·t + 1 of rows g and g + 8 (kernels/common/mma.cuh).
#include "attention.cuh"
#include "mma.cuh"
#include "reduce.cuh"
#include "tile.cuh"

// Ablation. EXPONENTIAL: 2^x by ex2.approx.ftz on scores in log2 units (0), or e^x, either through the same instruction
// (1, __expf) or at full accuracy (2, expf).
#ifndef EXPONENTIAL
#define EXPONENTIAL 0
#endif

constexpr int THREADS = WARPS * WARP;
constexpr int WARP_ROWS = TILE_Q / WARPS;
constexpr int ROW_BLOCKS = WARP_ROWS / MMA_M;      // blocks of 16 query rows
constexpr int KEY_BLOCKS = TILE_KV / MMA_N;        // blocks of 8 keys
constexpr int D_STEPS = HEAD_DIM / MMA_K;          // MMAs accumulated into each score
constexpr int COL_BLOCKS = HEAD_DIM / MMA_N;       // blocks of 8 output columns
constexpr int STRIDE = HEAD_DIM + PADDING;         // of Q, K and V rows; padding spreads the 8 rows that ldmatrix reads over the banks
constexpr float LOWEST = -0x1p100f;                // first maximum; finite, so rows with no key need no check; lower scores count as masked
static_assert(TILE_Q % (WARPS * MMA_M) == 0, "each warp must own a multiple of 16 query rows");
static_assert(TILE_KV % MMA_K == 0, "TILE_KV must be a multiple of 16");
static_assert(Q_IN_REGISTERS <= 1, "Q_IN_REGISTERS is 0 or 1");
static_assert(PIPELINE_STAGES >= 1, "PIPELINE_STAGES must be at least 1");
static_assert(STRIDE % CHUNK == 0, "ldmatrix needs 16-byte aligned rows");
static_assert(EXPONENTIAL <= 2, "EXPONENTIAL is 0, 1 or 2");
constexpr float LN_BASE = EXPONENTIAL == 0 ? LN_2 : 1.0f;   // natural logarithm of the base of the exponentials

struct SharedStorage {
  alignas(16) element Q[TILE_Q * STRIDE];
  alignas(16) element K[PIPELINE_STAGES][TILE_KV * STRIDE];
  alignas(16) element V[PIPELINE_STAGES][TILE_KV * STRIDE];
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

// This thread's share of the copies of a head's successive tiles. An incremented pointer saves the address arithmetic, which
// would take more instructions than the copies. cp.async is asynchronous: the caller commits the group and waits for it.
// Unaligned rows cannot be copied 16 bytes at a time, so `fetch` loads and stores them before it returns; the caller's waits
// and barriers cover that case too.
template <int ROWS>
struct TileCopy {
  using Share = TileShare<ROWS, THREADS>;
  Share share;
  const element* source;   // this thread's first chunk of the next tile
  long long step;          // elements between this thread's successive chunks

  __device__ __forceinline__ TileCopy(const element* head_gmem, long long row_stride, int first_row)
      : source(head_gmem + (first_row + share.row) * row_stride + share.d), step(Share::ROWS_PER_STEP * row_stride) {}

  // Fetches the next tile, of which `num_rows` rows exist (the number may be 0, negative or more than ROWS). Missing rows are not
  // read but filled with 0: a masked key still enters the PV GEMM, and 0 · garbage may be NaN.
  __device__ __forceinline__ void fetch(element* tile_smem, int num_rows) {
    element* target = tile_smem + share.row * STRIDE + share.d;
#pragma unroll
    for (int row = 0; row < ROWS; row += Share::ROWS_PER_STEP) {
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

__device__ __forceinline__ float power(float x) {
  if constexpr (EXPONENTIAL == 0) return ptx::ex2_approx_ftz(x);
  if constexpr (EXPONENTIAL == 1) return __expf(x);
  return expf(x);
}

// Stores two adjacent elements of an output row, the first of which is in the lower half of `pair`.
__device__ __forceinline__ void write_pair(element* target, unsigned pair) {
  if constexpr (ALIGNED) {
    *reinterpret_cast<unsigned*>(target) = pair;
  } else {
    target[0] = reinterpret_cast<const element*>(&pair)[0];
    target[1] = reinterpret_cast<const element*>(&pair)[1];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_07_mma_registers(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0);   // the shuffle tells the compiler that the value is warp-uniform
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int warp_q_row = first_q_row + warp * WARP_ROWS;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)

  element* warp_smem = smem.Q + warp * WARP_ROWS * STRIDE;            // this warp's rows of Q

  // This lane's ldmatrix offset in a 16 × 16 tile, in elements: of_rows for Q and V, of_columns for K.
  const int lane_row = lane / ROW_LANES;              // first of the two accumulator rows that this lane holds
  const int lane_col = lane % ROW_LANES * 2;          // first of the two adjacent columns that it holds
  const int of_rows = lane_row_of_rows(lane) * STRIDE + lane_chunk_of_rows(lane) * CHUNK;            // Q and V
  const int of_columns = lane_row_of_columns(lane) * STRIDE + lane_chunk_of_columns(lane) * CHUNK;   // K

  float O_reg[ROW_BLOCKS][COL_BLOCKS][4] = {};
  float row_max[ROW_BLOCKS][HALVES];        // largest score so far, in units of log2; the same in the 4 lanes of a row
  float row_sum[ROW_BLOCKS][HALVES] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) row_max[r][0] = row_max[r][1] = LOWEST;

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  const int num_tiles = (block_keys + TILE_KV - 1) / TILE_KV;
  const int warp_keys = warp_q_row < p.q_len ? visible_keys(p, min(warp_q_row + WARP_ROWS, p.q_len) - 1) : 0;
  const int full_keys = visible_keys(p, warp_q_row);   // smallest for the first row: no row's visible range ends before it
  TileCopy<TILE_KV> K_copy(K_gmem, p.K.row_stride, 0);
  TileCopy<TILE_KV> V_copy(V_gmem, p.V.row_stride, 0);
  // Fetches the next tile into its ring buffer; past the last tile it writes zeros, so that no branch splits a tile's instructions.
  const auto fetch = [&](int tile) {
    const int buffer = tile % PIPELINE_STAGES;
    K_copy.fetch(smem.K[buffer], block_keys - tile * TILE_KV);
    V_copy.fetch(smem.V[buffer], block_keys - tile * TILE_KV);
    ptx::cp_async_commit_group();
  };

  TileCopy<TILE_Q>(Q_gmem, p.Q.row_stride, first_q_row).fetch(smem.Q, p.q_len - first_q_row);
  ptx::cp_async_commit_group();   // a separate group, committed before those of the tiles
  for (int tile = 0; tile < PIPELINE_STAGES - 1; ++tile) fetch(tile);

  ptx::cp_async_wait_group<PIPELINE_STAGES - 1>();   // this thread's copies of Q have landed; tiles may still be in flight
  __syncthreads();                                   // all threads' copies have landed

  // Row maxima are taken before scaling, so the scale must be positive. The sign of a negative scale is applied to the warp's rows
  // of Q; if the scale is 0, those rows are zeroed and the scale becomes 1.
  const float scale_log2 = p.scale_log2 == 0.0f ? 1.0f : fabsf(p.scale_log2) * (EXPONENTIAL == 0 ? 1.0f : LN_2);
  if (p.scale_log2 <= 0.0f) {
    for (int row = 0; row < WARP_ROWS; ++row) {
      for (int d = lane * 2; d < HEAD_DIM; d += WARP * 2) {
        unsigned& pair = *reinterpret_cast<unsigned*>(warp_smem + row * STRIDE + d);
        pair = p.scale_log2 < 0.0f ? pair ^ 0x80008000u : 0u;
      }
    }
    __syncwarp();   // the warp's rows of Q are updated
  }
  unsigned Q_frag[Q_IN_REGISTERS ? D_STEPS : 1][ROW_BLOCKS][4];
  const auto load_Q = [&](int d, unsigned (&frag)[ROW_BLOCKS][4]) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
      ptx::ldmatrix_x4(frag[r], warp_smem + r * MMA_M * STRIDE + d * MMA_K + of_rows);
    }
  };
  if constexpr (Q_IN_REGISTERS) {
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) load_Q(d, Q_frag[d]);
  }

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_key = tile * TILE_KV;
    const element* K_smem = smem.K[tile % PIPELINE_STAGES];   // (TILE_KV, STRIDE)
    const element* V_smem = smem.V[tile % PIPELINE_STAGES];   // (TILE_KV, STRIDE)
    if constexpr (PIPELINE_STAGES == 1) {
      __syncthreads();   // all threads are done with the previous tile, which occupies the only buffer
      fetch(tile);
      ptx::cp_async_wait_group<0>();
      __syncthreads();   // all threads' copies have landed
    } else {
      ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this tile's own copies have landed; later tiles may still be in flight
      __syncthreads();   // all threads' copies have landed, and all are done with the previous tile, whose buffer is filled next
      fetch(tile + PIPELINE_STAGES - 1);
    }
    if (tile_key >= warp_keys) continue;   // no row of this warp sees a key of this tile

    float S_reg[ROW_BLOCKS][KEY_BLOCKS][4] = {};
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) {
      unsigned(&Q)[ROW_BLOCKS][4] = Q_frag[Q_IN_REGISTERS ? d : 0];
      if constexpr (!Q_IN_REGISTERS) load_Q(d, Q);
#pragma unroll
      for (int j = 0; j < KEY_BLOCKS; j += 2) {
        unsigned K_frag[2][2];
        load_pair<false>(K_frag, K_smem + j * MMA_N * STRIDE + d * MMA_K + of_columns);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
          mma(S_reg[r][j], Q[r], K_frag[0], element{});
          mma(S_reg[r][j + 1], Q[r], K_frag[1], element{});
        }
      }
    }

    if (tile_key + TILE_KV > full_keys) {
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
        }
      }
    }

    unsigned P_frag[ROW_BLOCKS][KEY_BLOCKS / 2][4];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        float lane_max = fmaxf(S_reg[r][0][2 * half], S_reg[r][0][2 * half + 1]);
#pragma unroll
        for (int j = 1; j < KEY_BLOCKS; ++j) {
          lane_max = fmaxf(lane_max, fmaxf(S_reg[r][j][2 * half], S_reg[r][j][2 * half + 1]));
        }
        const float new_max = fmaxf(row_max[r][half], lanes_max<ROW_LANES>(lane_max) * scale_log2);
        const float rescale = power(row_max[r][half] - new_max);   // 0 for a row's first visible keys
        row_max[r][half] = new_max;
        row_sum[r][half] *= rescale;
#pragma unroll
        for (int j = 0; j < COL_BLOCKS; ++j) {
          O_reg[r][j][2 * half] *= rescale;
          O_reg[r][j][2 * half + 1] *= rescale;
        }
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j) {
          const float low = power(fmaf(S_reg[r][j][2 * half], scale_log2, -new_max));
          const float high = power(fmaf(S_reg[r][j][2 * half + 1], scale_log2, -new_max));
          row_sum[r][half] += low + high;
          // Two 8-column accumulator blocks have the register layout of one 16-column block of the PV GEMM's A operand.
          P_frag[r][j / 2][j % 2 * 2 + half] = pack(low, high, element{});
        }
      }
    }

#pragma unroll
    for (int k = 0; k < TILE_KV / MMA_K; ++k) {
#pragma unroll
      for (int j = 0; j < COL_BLOCKS; j += 2) {
        unsigned V_frag[2][2];
        load_pair<true>(V_frag, V_smem + k * MMA_K * STRIDE + j * MMA_N + of_rows);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; ++r) {
          mma(O_reg[r][j], P_frag[r][k], V_frag[0], element{});
          mma(O_reg[r][j + 1], P_frag[r][k], V_frag[1], element{});
        }
      }
    }
  }

  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; ++r) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int q_row = warp_q_row + r * MMA_M + half * MATRIX + lane_row;
      const float sum = lanes_sum<ROW_LANES>(row_sum[r][half]);
      const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
      if (q_row >= p.q_len) continue;
      if (p.LSE && lane % ROW_LANES == 0) {
        const long long lse_row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
        p.LSE[lse_row] = sum == 0.0f ? NEG_INF : row_max[r][half] * LN_BASE + logf(sum);
      }
      element* target = O_gmem + q_row * p.O.row_stride + lane_col;
#pragma unroll
      for (int j = 0; j < COL_BLOCKS; ++j) {
        const float low = O_reg[r][j][2 * half] * inv_sum;
        const float high = O_reg[r][j][2 * half + 1] * inv_sum;
        write_pair(target + j * MMA_N, pack(low, high, element{}));
      }
    }
  }
}
