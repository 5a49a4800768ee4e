// 06_cp_async: copies of the next tiles overlap the arithmetic on this one. Parent: 05_wmma.
// Question: how much of the time was spent waiting for memory?
// Change: K and V go through a ring of PIPELINE_STAGES shared-memory buffers filled by cp.async. In addition, several warps may
//         share a row block of 16 rows (each processes every n-th 16-column block), so that more warps can hide latency.
// Layout: warp w of block x works on row block w / GROUP of rows x·TILE_Q onwards; in the softmax 8 lanes share a row.
#include "attention.cuh"
#include "parts.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "wmma.cuh"

// Ablations; the stage itself uses 0. REDUCTION: the row maximum is reduced by shuffles (0), through shared memory with each lane
// reading all values after a warp barrier (1), or pairwise with block barriers (2). DESCENDING 1: KV tiles run from last to first.
#ifndef REDUCTION
#define REDUCTION 0
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif

constexpr int THREADS = WARPS * WARP;
constexpr int ROW_BLOCKS = TILE_Q / WMMA_TILE;
constexpr int GROUP = WARPS / ROW_BLOCKS;         // warps that share a row block
constexpr int WARP_O_BLOCKS = HEAD_DIM / WMMA_TILE / GROUP;   // output column blocks per warp
constexpr int ROW_LANES = 8;                      // lanes that share a row in the softmax
constexpr int PASSES = WMMA_TILE * ROW_LANES / WARP / GROUP;   // rows per lane in the softmax
constexpr int QUAD = 4;                           // scores per 16-byte load of a lane
constexpr int LANE_QUADS = TILE_KV / (ROW_LANES * QUAD);
constexpr int STRIDE = HEAD_DIM + PADDING;        // of Q, K and V rows; a WMMA load reads many rows, padding spreads them over the banks
constexpr int P_STRIDE = TILE_KV + PADDING;       // of probability rows, padded for the same reason
constexpr int S_STRIDE = TILE_KV + 8;             // of score rows, in floats: pairs stored by 4 lanes in each of 4 rows cover all 32 banks
static_assert(TILE_Q % WMMA_TILE == 0 && WARPS % ROW_BLOCKS == 0 && GROUP <= 4,
              "TILE_Q must be a multiple of 16, and 1, 2 or 4 warps must share each 16 rows");
static_assert(TILE_KV / WMMA_TILE % GROUP == 0 && HEAD_DIM / WMMA_TILE % GROUP == 0,
              "the key blocks and the output column blocks must divide evenly among the warps of a group");
static_assert(PIPELINE_STAGES >= 1, "PIPELINE_STAGES must be at least 1");
static_assert(REDUCTION <= 2 && DESCENDING <= 1, "REDUCTION is 0, 1 or 2, DESCENDING 0 or 1");
static_assert(TILE_KV % (ROW_LANES * QUAD) == 0, "TILE_KV must be a multiple of 32: 8 lanes read 4 scores each at a time");
static_assert(STRIDE % 8 == 0, "WMMA needs a row stride that is a multiple of 16 bytes");

struct SharedStorage {
  alignas(32) element Q[TILE_Q * STRIDE];
  alignas(32) element K[PIPELINE_STAGES][TILE_KV * STRIDE];
  alignas(32) element V[PIPELINE_STAGES][TILE_KV * STRIDE];
  alignas(32) float S[ROW_BLOCKS][WMMA_TILE * S_STRIDE];              // per row block, (16, S_STRIDE)
  alignas(32) element P[ROW_BLOCKS][WMMA_TILE * P_STRIDE];            // per row block, (16, P_STRIDE)
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

struct alignas(8) Quad {
  element x[QUAD];
};

// `load_tile` with cp.async: issues the copies and returns; the caller commits the group and waits for it. Unaligned rows cannot
// be copied 16 bytes at a time, so they are loaded and stored synchronously; the caller's wait and barrier cover that case too.
template <int ROWS>
__device__ __forceinline__ void load_tile_async(element* tile_smem, const element* head_gmem, long long row_stride,
                                                int first_row, int num_rows) {
  if constexpr (ALIGNED) {
    using Share = TileShare<ROWS, THREADS>;
    const Share share;
    const element* source = head_gmem + (first_row + share.row) * row_stride + share.d;
    element* target = tile_smem + share.row * STRIDE + share.d;
#pragma unroll
    for (int row = 0; row < ROWS; row += Share::ROWS_PER_STEP) {
      const bool exists = first_row + share.row + row < num_rows;
      ptx::cp_async_cg_16(target + row * STRIDE, exists ? source + row * row_stride : head_gmem, exists ? sizeof(Chunk) : 0);
    }
  } else {
    load_tile<ROWS, STRIDE, THREADS, 1>(tile_smem, head_gmem, row_stride, first_row, num_rows);
  }
}

// Synchronises the warps that share a row block.
__device__ __forceinline__ void group_sync() {
  if constexpr (GROUP == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// The maximum over the lanes that share a row.
template <int HOW>
__device__ __forceinline__ float max_of_row(float x) {
  if constexpr (HOW == 0) {
    return lanes_max<ROW_LANES>(x);
  } else {
    __shared__ float shared_x[THREADS];
    if constexpr (HOW == 1) {
      shared_x[threadIdx.x] = x;
      __syncwarp();   // the row's values have been written
#pragma unroll
      for (int i = 1; i < ROW_LANES; ++i) x = fmaxf(x, shared_x[threadIdx.x ^ i]);
      __syncwarp();   // the row's values have been read
    } else {
#pragma unroll
      for (int distance = ROW_LANES / 2; distance > 0; distance /= 2) {
        shared_x[threadIdx.x] = x;
        __syncthreads();   // the row's values have been written
        x = fmaxf(x, shared_x[threadIdx.x ^ distance]);
        __syncthreads();   // the row's values have been read
      }
    }
    return x;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_06_cp_async(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int row_block = warp / GROUP;
  const int part = warp % GROUP;   // selects the warp's columns of the row block, and its rows in the softmax
  const int block_q_row = first_q_row + row_block * WMMA_TILE;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* Q_smem = smem.Q + row_block * WMMA_TILE * STRIDE;    // (16, STRIDE)
  float* S_smem = smem.S[row_block];                                  // (16, S_STRIDE)
  element* P_smem = smem.P[row_block];                                // (16, P_STRIDE)

  // In pass i of the softmax this lane processes row PASSES·part + i + 4·(lane / 8). The two rows that a half warp writes
  // together are then 4 apart, which with PADDING 8 places them in different banks.
  const int lane_row = part * PASSES + lane / ROW_LANES * (WMMA_TILE * ROW_LANES / WARP);
  const int lane_col = lane % ROW_LANES * QUAD;

  FragC O_frag[WARP_O_BLOCKS];
#pragma unroll
  for (int j = 0; j < WARP_O_BLOCKS; ++j) wmma::fill_fragment(O_frag[j], 0.0f);
  if constexpr (!does(Part::PV)) {
    for (FragC& block : O_frag) stand_in<FragC::num_elements>(block.x);
  }
  float row_max[PASSES];        // running maximum of the scores, in log2 units; the same in the 8 lanes of a row
  float row_sum[PASSES] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int i = 0; i < PASSES; ++i) row_max[i] = NEG_INF;

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  const int num_tiles = (block_keys + TILE_KV - 1) / TILE_KV;
  // Issues the copies of one tile into its ring buffer. Always commits a group, possibly empty, so that groups stay in step with tiles.
  const auto fetch = [&](int tile) {
    if (tile < num_tiles) {
      const int buffer = tile % PIPELINE_STAGES;
      const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
      load_tile_async<TILE_KV>(smem.K[buffer], K_gmem, p.K.row_stride, tile_key, p.kv_len);
      load_tile_async<TILE_KV>(smem.V[buffer], V_gmem, p.V.row_stride, tile_key, p.kv_len);
    }
    ptx::cp_async_commit_group();
  };

  load_tile_async<TILE_Q>(smem.Q, Q_gmem, p.Q.row_stride, first_q_row, p.q_len);   // committed with the first tile's group
  for (int tile = 0; tile < PIPELINE_STAGES - 1; ++tile) fetch(tile);
  if constexpr (!does(Part::MEMORY)) fetch(PIPELINE_STAGES - 1);

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
    const element* K_smem = smem.K[tile % PIPELINE_STAGES];   // (TILE_KV, STRIDE)
    const element* V_smem = smem.V[tile % PIPELINE_STAGES];   // (TILE_KV, STRIDE)
    if constexpr (PIPELINE_STAGES == 1) {
      __syncthreads();   // all threads are done with the previous tile, which occupies the only buffer
      if constexpr (does(Part::MEMORY)) fetch(tile);
      ptx::cp_async_wait_group<0>();
      __syncthreads();   // all threads' copies have landed
    } else {
      ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this tile's own copies have landed; later tiles may still be in flight
      __syncthreads();   // all threads' copies have landed, and all are done with the previous tile, whose buffer is filled next
      if constexpr (does(Part::MEMORY)) {
        fetch(tile + PIPELINE_STAGES - 1);
      } else {
        ptx::cp_async_commit_group();
      }
    }

#pragma unroll
    for (int k0 = part * WMMA_TILE; k0 < TILE_KV; k0 += GROUP * WMMA_TILE) {
      FragC S_frag;
      wmma::fill_fragment(S_frag, does(Part::QK) ? 0.0f : static_cast<float>(lane));
#pragma unroll
      for (int d = 0; does(Part::QK) && d < HEAD_DIM; d += WMMA_TILE) {
        FragA Q_frag;
        FragBT K_frag;
        wmma::load_matrix_sync(Q_frag, Q_smem + d, STRIDE);
        wmma::load_matrix_sync(K_frag, K_smem + k0 * STRIDE + d, STRIDE);
        wmma::mma_sync(S_frag, Q_frag, K_frag, S_frag);
      }
      wmma::store_matrix_sync(S_smem + k0, S_frag, S_STRIDE, wmma::mem_row_major);
    }
    group_sync();   // the row block's scores are complete, and its probabilities of the previous tile have been read

#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int row = lane_row + i;
      const int num_keys = visible_keys(p, block_q_row + row) - tile_key;   // counted from the tile's first key
      float4 score[LANE_QUADS];
      float lane_max = NEG_INF;
#pragma unroll
      for (int q = 0; q < LANE_QUADS; ++q) {
        const int col = lane_col + q * ROW_LANES * QUAD;
        score[q] = *reinterpret_cast<const float4*>(S_smem + row * S_STRIDE + col);
        if constexpr (!does(Part::SOFTMAX)) continue;
        score[q].x = col + 0 < num_keys ? score[q].x * p.scale_log2 : NEG_INF;
        score[q].y = col + 1 < num_keys ? score[q].y * p.scale_log2 : NEG_INF;
        score[q].z = col + 2 < num_keys ? score[q].z * p.scale_log2 : NEG_INF;
        score[q].w = col + 3 < num_keys ? score[q].w * p.scale_log2 : NEG_INF;
        lane_max = fmaxf(lane_max, fmaxf(fmaxf(score[q].x, score[q].y), fmaxf(score[q].z, score[q].w)));
      }
      __syncwarp();   // the row's scores are in registers: its rescale factor may overwrite them
      if constexpr (!does(Part::SOFTMAX)) {
#pragma unroll
        for (int q = 0; q < LANE_QUADS; ++q) {
          const Quad rounded = {from_float<element>(score[q].x), from_float<element>(score[q].y), from_float<element>(score[q].z),
                                from_float<element>(score[q].w)};
          *reinterpret_cast<Quad*>(P_smem + row * P_STRIDE + lane_col + q * ROW_LANES * QUAD) = rounded;
        }
        continue;
      }
      const float new_max = fmaxf(row_max[i], max_of_row<REDUCTION>(lane_max));
      const float reference = new_max == NEG_INF ? 0.0f : new_max;           // no visible key yet: -inf - -inf would be NaN
      const float rescale = ptx::ex2_approx_ftz(row_max[i] - reference);     // 0 for a row's first visible keys
      row_max[i] = new_max;
      row_sum[i] *= rescale;
#pragma unroll
      for (int q = 0; q < LANE_QUADS; ++q) {
        const float prob[QUAD] = {ptx::ex2_approx_ftz(score[q].x - reference), ptx::ex2_approx_ftz(score[q].y - reference),
                                  ptx::ex2_approx_ftz(score[q].z - reference), ptx::ex2_approx_ftz(score[q].w - reference)};
        row_sum[i] += prob[0] + prob[1] + prob[2] + prob[3];
        Quad rounded;
#pragma unroll
        for (int c = 0; c < QUAD; ++c) rounded.x[c] = from_float<element>(prob[c]);
        *reinterpret_cast<Quad*>(P_smem + row * P_STRIDE + lane_col + q * ROW_LANES * QUAD) = rounded;
      }
      *reinterpret_cast<float2*>(S_smem + row * S_STRIDE + lane % ROW_LANES * 2) = make_float2(rescale, rescale);
    }
    group_sync();   // the row block's probabilities and factors are complete, and its scores have been read

    if constexpr (does(Part::SOFTMAX)) scale_rows<WARP_O_BLOCKS, S_STRIDE>(O_frag, S_smem);
#pragma unroll
    for (int k0 = 0; does(Part::PV) && k0 < TILE_KV; k0 += WMMA_TILE) {
      FragA P_frag;
      wmma::load_matrix_sync(P_frag, P_smem + k0, P_STRIDE);
#pragma unroll
      for (int j = 0; j < WARP_O_BLOCKS; ++j) {
        FragB V_frag;
        wmma::load_matrix_sync(V_frag, V_smem + k0 * STRIDE + (part + j * GROUP) * WMMA_TILE, STRIDE);
        wmma::mma_sync(O_frag[j], P_frag, V_frag, O_frag[j]);
      }
    }
  }
  group_sync();   // all warps of the row block have read its factors

#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int row = lane_row + i;
    const float sum = does(Part::SOFTMAX) ? lanes_sum<ROW_LANES>(row_sum[i]) : 1.0f;
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    *reinterpret_cast<float2*>(S_smem + row * S_STRIDE + lane % ROW_LANES * 2) = make_float2(inv_sum, inv_sum);
    if (p.LSE && lane % ROW_LANES == 0 && block_q_row + row < p.q_len) {
      const long long lse_row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + block_q_row + row;
      p.LSE[lse_row] = sum == 0.0f ? NEG_INF : row_max[i] * LN_2 + logf(sum);
    }
  }
  group_sync();   // the row block's factors are complete
  scale_rows<WARP_O_BLOCKS, S_STRIDE>(O_frag, S_smem);
  group_sync();   // the factors have been read: their buffer can now hold the output

  // The output is staged through the warp's part of the score buffer, 16 columns at a time; a lane stores 8 columns of one row.
  static_assert(GROUP * WMMA_TILE <= S_STRIDE, "each warp of a group needs 16 columns of the score buffer");
  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
  const int q_row = block_q_row + lane / 2;
#pragma unroll
  for (int j = 0; j < WARP_O_BLOCKS; ++j) {
    wmma::store_matrix_sync(S_smem + part * WMMA_TILE, O_frag[j], S_STRIDE, wmma::mem_row_major);
    __syncwarp();   // the 16 columns are complete
    const float* source = S_smem + lane / 2 * S_STRIDE + part * WMMA_TILE + lane % 2 * CHUNK;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) chunk.x[i] = from_float<element>(source[i]);
    const int d = (part + j * GROUP) * WMMA_TILE + lane % 2 * CHUNK;
    if (q_row < p.q_len) write_chunk(O_gmem + q_row * p.O.row_stride + d, chunk);
    __syncwarp();   // the columns are free again
  }
}
