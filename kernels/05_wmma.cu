// 05_wmma: tensor cores for both GEMMs, fused. Parent: 04_wmma_qk.
// Question: what do tensor cores gain when they do all of the arithmetic?
// Change: the PV GEMM uses WMMA too. The output stays in accumulator fragments. Per-row rescale factors reach them as a 16 × 16
//         tile of equal columns, loaded as a fragment of the same type: element i belongs to the same row in both.
// Layout: warp w of block x owns rows (x·WARPS + w)·16 onwards; in the softmax 8 lanes share a row.
#include "attention.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "wmma.cuh"

constexpr int ROWS_PER_WARP = WMMA_TILE;
constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = WARPS * ROWS_PER_WARP;
constexpr int ROW_LANES = 8;                      // lanes that share a row in the softmax
constexpr int PASSES = ROWS_PER_WARP * ROW_LANES / WARP;   // rows per lane in the softmax
constexpr int QUAD = 4;                           // scores per 16-byte load of a lane
constexpr int LANE_QUADS = TILE_KV / (ROW_LANES * QUAD);
constexpr int STRIDE = HEAD_DIM + PADDING;        // of Q, K and V rows; a WMMA load reads many rows, padding spreads them over the banks
constexpr int P_STRIDE = TILE_KV + PADDING;       // of probability rows, padded for the same reason
constexpr int S_STRIDE = TILE_KV + 8;             // of score rows, in floats: pairs stored by 4 lanes in each of 4 rows cover all 32 banks
static_assert(TILE_KV % (ROW_LANES * QUAD) == 0, "TILE_KV must be a multiple of 32: 8 lanes read 4 scores each at a time");
static_assert(STRIDE % 8 == 0, "WMMA needs a row stride that is a multiple of 16 bytes");

struct SharedStorage {
  alignas(32) element Q[TILE_Q * STRIDE];
  alignas(32) element K[TILE_KV * STRIDE];
  alignas(32) element V[TILE_KV * STRIDE];
  alignas(32) float S[WARPS][ROWS_PER_WARP * S_STRIDE];       // per warp, (ROWS_PER_WARP, S_STRIDE)
  alignas(32) element P[WARPS][ROWS_PER_WARP * P_STRIDE];     // per warp, (ROWS_PER_WARP, P_STRIDE)
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

struct alignas(8) Quad {
  element x[QUAD];
};

extern "C" __global__ void __launch_bounds__(THREADS) attention_05_wmma(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int warp_q_row = first_q_row + warp * ROWS_PER_WARP;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* Q_smem = smem.Q + warp * ROWS_PER_WARP * STRIDE;     // (ROWS_PER_WARP, STRIDE)
  float* S_smem = smem.S[warp];                                       // (ROWS_PER_WARP, S_STRIDE)
  element* P_smem = smem.P[warp];                                     // (ROWS_PER_WARP, P_STRIDE)

  // In pass i of the softmax this lane processes row i + 4·(lane / 8). The two rows that a half warp writes together are then
  // 4 apart, which with PADDING 8 places them in different banks.
  const int lane_row = lane / ROW_LANES * PASSES;
  const int lane_col = lane % ROW_LANES * QUAD;

  load_tile<TILE_Q, STRIDE, THREADS, LOADS_IN_FLIGHT>(smem.Q, Q_gmem, p.Q.row_stride, first_q_row, p.q_len);

  FragC O_frag[HEAD_DIM / WMMA_TILE];
#pragma unroll
  for (int j = 0; j < HEAD_DIM / WMMA_TILE; ++j) wmma::fill_fragment(O_frag[j], 0.0f);
  float row_max[PASSES];        // running maximum of the scores, in log2 units; the same in the 8 lanes of a row
  float row_sum[PASSES] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int i = 0; i < PASSES; ++i) row_max[i] = NEG_INF;

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  for (int tile_key = 0; tile_key < block_keys; tile_key += TILE_KV) {
    __syncthreads();   // everyone is done with the previous tile
    load_tile<TILE_KV, STRIDE, THREADS, LOADS_IN_FLIGHT>(smem.K, K_gmem, p.K.row_stride, tile_key, p.kv_len);
    load_tile<TILE_KV, STRIDE, THREADS, LOADS_IN_FLIGHT>(smem.V, V_gmem, p.V.row_stride, tile_key, p.kv_len);
    __syncthreads();   // the tile is complete; in the first iteration, so is Q

#pragma unroll
    for (int k0 = 0; k0 < TILE_KV; k0 += WMMA_TILE) {
      FragC S_frag;
      wmma::fill_fragment(S_frag, 0.0f);
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
        FragA Q_frag;
        FragBT K_frag;
        wmma::load_matrix_sync(Q_frag, Q_smem + d, STRIDE);
        wmma::load_matrix_sync(K_frag, smem.K + k0 * STRIDE + d, STRIDE);
        wmma::mma_sync(S_frag, Q_frag, K_frag, S_frag);
      }
      wmma::store_matrix_sync(S_smem + k0, S_frag, S_STRIDE, wmma::mem_row_major);
    }
    __syncwarp();   // the warp's scores are complete

#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int row = lane_row + i;
      const int num_keys = visible_keys(p, warp_q_row + row) - tile_key;   // counted from the tile's first key
      float4 score[LANE_QUADS];
      float lane_max = NEG_INF;
#pragma unroll
      for (int q = 0; q < LANE_QUADS; ++q) {
        const int col = lane_col + q * ROW_LANES * QUAD;
        score[q] = *reinterpret_cast<const float4*>(S_smem + row * S_STRIDE + col);
        score[q].x = col + 0 < num_keys ? score[q].x * p.scale_log2 : NEG_INF;
        score[q].y = col + 1 < num_keys ? score[q].y * p.scale_log2 : NEG_INF;
        score[q].z = col + 2 < num_keys ? score[q].z * p.scale_log2 : NEG_INF;
        score[q].w = col + 3 < num_keys ? score[q].w * p.scale_log2 : NEG_INF;
        lane_max = fmaxf(lane_max, fmaxf(fmaxf(score[q].x, score[q].y), fmaxf(score[q].z, score[q].w)));
      }
      __syncwarp();   // the row's scores are in registers: its rescale factor may overwrite them
      const float new_max = fmaxf(row_max[i], lanes_max<ROW_LANES>(lane_max));
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
    __syncwarp();   // the warp's probabilities and factors are complete

    scale_rows<HEAD_DIM / WMMA_TILE, S_STRIDE>(O_frag, S_smem);
#pragma unroll
    for (int k0 = 0; k0 < TILE_KV; k0 += WMMA_TILE) {
      FragA P_frag;
      wmma::load_matrix_sync(P_frag, P_smem + k0, P_STRIDE);
#pragma unroll
      for (int j = 0; j < HEAD_DIM / WMMA_TILE; ++j) {
        FragB V_frag;
        wmma::load_matrix_sync(V_frag, smem.V + k0 * STRIDE + j * WMMA_TILE, STRIDE);
        wmma::mma_sync(O_frag[j], P_frag, V_frag, O_frag[j]);
      }
    }
    __syncwarp();   // the warp is done with its scores, probabilities and factors
  }

#pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int row = lane_row + i;
    const float sum = lanes_sum<ROW_LANES>(row_sum[i]);
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    *reinterpret_cast<float2*>(S_smem + row * S_STRIDE + lane % ROW_LANES * 2) = make_float2(inv_sum, inv_sum);
    if (p.LSE && lane % ROW_LANES == 0 && warp_q_row + row < p.q_len) {
      const long long lse_row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + warp_q_row + row;
      p.LSE[lse_row] = sum == 0.0f ? NEG_INF : row_max[i] * LN_2 + logf(sum);
    }
  }
  __syncwarp();   // the warp's factors are complete
  scale_rows<HEAD_DIM / WMMA_TILE, S_STRIDE>(O_frag, S_smem);
  __syncwarp();   // the factors have been read: their buffer can now hold the output

  // The output is staged through the warp's score buffer, 16 columns at a time; a lane stores 8 columns of one row.
  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
  const int q_row = warp_q_row + lane / 2;
#pragma unroll
  for (int j = 0; j < HEAD_DIM / WMMA_TILE; ++j) {
    wmma::store_matrix_sync(S_smem, O_frag[j], S_STRIDE, wmma::mem_row_major);
    __syncwarp();   // the 16 columns are complete
    const float* source = S_smem + lane / 2 * S_STRIDE + lane % 2 * CHUNK;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) chunk.x[i] = from_float<element>(source[i]);
    if (q_row < p.q_len) write_chunk(O_gmem + q_row * p.O.row_stride + j * WMMA_TILE + lane % 2 * CHUNK, chunk);
    __syncwarp();   // the buffer is free again
  }
}
