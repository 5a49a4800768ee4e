// 03_warp_rows: the lanes of a warp share its rows. Parent: 02_half2.
// Question: is the limit that one thread holds a whole row in registers, which leaves few threads?
// Change: a warp owns ROWS_PER_WARP rows together. In the QK GEMM a lane scores every 32nd key of the tile; in the PV GEMM it owns
//         two of every 64 output columns. Maxima are reduced by shuffles; probabilities are exchanged through shared memory.
// Layout: warp w of block x owns rows (x·WARPS + w)·ROWS_PER_WARP onwards.
#include "attention.cuh"
#include "half2.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = WARPS * ROWS_PER_WARP;
constexpr int LANE_KEYS = TILE_KV / WARP;      // keys scored per lane: lane, lane + 32, …
constexpr int LANE_PAIRS = HEAD_DIM / 2 / WARP;   // column pairs of the output per lane: 2·lane and 2·lane + 1, then 64 further on
constexpr int STRIDE = HEAD_DIM + PADDING;     // of Q and K rows; lanes read 32 rows of K in parallel, padding spreads them over the banks
constexpr int FLUSH_TERMS = 8;                 // fp16 terms per half of a pair before the sum is flushed to FP32
static_assert(TILE_KV % WARP == 0, "TILE_KV must be a multiple of 32: a lane processes every 32nd key");
static_assert(ROWS_PER_WARP % CHUNK == 0, "ROWS_PER_WARP must be a multiple of 8: probabilities are exchanged 8 rows at a time");
static_assert(HEAD_DIM % (2 * FLUSH_TERMS) == 0, "HEAD_DIM must be a multiple of 2 * FLUSH_TERMS");

struct SharedStorage {
  alignas(16) element Q[TILE_Q * STRIDE];
  alignas(16) element K[TILE_KV * STRIDE];
  alignas(16) element V[TILE_KV * HEAD_DIM];
  alignas(16) element P[WARPS][TILE_KV * ROWS_PER_WARP];   // per warp, key-major: (TILE_KV, ROWS_PER_WARP)
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

extern "C" __global__ void __launch_bounds__(THREADS) attention_03_warp_rows(const __grid_constant__ AttentionParams p) {
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
  element* P_smem = smem.P[warp];                                     // (TILE_KV, ROWS_PER_WARP)

  load_tile<TILE_Q, STRIDE, THREADS, LOADS_IN_FLIGHT>(smem.Q, Q_gmem, p.Q.row_stride, first_q_row, p.q_len);

  float O_reg[ROWS_PER_WARP][LANE_PAIRS][2] = {};
  float row_max[ROWS_PER_WARP];        // running maximum of the scores, in log2 units; the same in all lanes
  float row_sum[ROWS_PER_WARP] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) row_max[r] = NEG_INF;

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  for (int tile_key = 0; tile_key < block_keys; tile_key += TILE_KV) {
    __syncthreads();   // everyone is done with the previous tile
    load_tile<TILE_KV, STRIDE, THREADS, LOADS_IN_FLIGHT>(smem.K, K_gmem, p.K.row_stride, tile_key, p.kv_len);
    load_tile<TILE_KV, HEAD_DIM, THREADS, LOADS_IN_FLIGHT>(smem.V, V_gmem, p.V.row_stride, tile_key, p.kv_len);
    __syncthreads();   // the tile is complete; in the first iteration, so is Q

    float score[ROWS_PER_WARP][LANE_KEYS] = {};
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; d += 2 * FLUSH_TERMS) {
      Chunk K_chunk[LANE_KEYS][2];
#pragma unroll
      for (int k = 0; k < LANE_KEYS; ++k) {
        const element* K_row = smem.K + (lane + k * WARP) * STRIDE + d;
        K_chunk[k][0] = *reinterpret_cast<const Chunk*>(K_row);
        K_chunk[k][1] = *reinterpret_cast<const Chunk*>(K_row + CHUNK);
      }
#pragma unroll
      for (int r = 0; r < ROWS_PER_WARP; ++r) {
        const Chunk Q_chunk[2] = {*reinterpret_cast<const Chunk*>(Q_smem + r * STRIDE + d),   // broadcast: all lanes read the same address
                                  *reinterpret_cast<const Chunk*>(Q_smem + r * STRIDE + d + CHUNK)};
#pragma unroll
        for (int k = 0; k < LANE_KEYS; ++k) {
          __half2 pair_sum = {};
#pragma unroll
          for (int i = 0; i < CHUNK; ++i) {
            pair_sum = __hfma2(pair_of(Q_chunk[i / (CHUNK / 2)], i % (CHUNK / 2)),
                               pair_of(K_chunk[k][i / (CHUNK / 2)], i % (CHUNK / 2)), pair_sum);
          }
          score[r][k] += __low2float(pair_sum) + __high2float(pair_sum);
        }
      }
    }

    float rescale[ROWS_PER_WARP];
#pragma unroll
    for (int r0 = 0; r0 < ROWS_PER_WARP; r0 += CHUNK) {
      Chunk prob[LANE_KEYS];   // per key, the probabilities of 8 rows
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const int r = r0 + i;
        const int num_keys = visible_keys(p, warp_q_row + r);
        float lane_max = NEG_INF;
#pragma unroll
        for (int k = 0; k < LANE_KEYS; ++k) {
          score[r][k] = tile_key + lane + k * WARP < num_keys ? score[r][k] * p.scale_log2 : NEG_INF;
          lane_max = fmaxf(lane_max, score[r][k]);
        }
        const float new_max = fmaxf(row_max[r], lanes_max<WARP>(lane_max));
        const float reference = new_max == NEG_INF ? 0.0f : new_max;   // no visible key yet: -inf - -inf would be NaN
        rescale[r] = ptx::ex2_approx_ftz(row_max[r] - reference);      // 0 for a row's first visible keys
        row_max[r] = new_max;
        row_sum[r] *= rescale[r];
#pragma unroll
        for (int k = 0; k < LANE_KEYS; ++k) {
          const float exact_prob = ptx::ex2_approx_ftz(score[r][k] - reference);
          row_sum[r] += exact_prob;
          prob[k].x[i] = from_float<element>(exact_prob);
        }
      }
#pragma unroll
      for (int k = 0; k < LANE_KEYS; ++k) {
        *reinterpret_cast<Chunk*>(P_smem + (lane + k * WARP) * ROWS_PER_WARP + r0) = prob[k];
      }
    }
    __syncwarp();   // the warp's probabilities are complete

#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
#pragma unroll
      for (int i = 0; i < LANE_PAIRS; ++i) {
        O_reg[r][i][0] *= rescale[r];
        O_reg[r][i][1] *= rescale[r];
      }
    }
#pragma unroll 1
    for (int k0 = 0; k0 < TILE_KV; k0 += FLUSH_TERMS) {
      __half2 pair_sum[ROWS_PER_WARP][LANE_PAIRS] = {};
#pragma unroll
      for (int k = k0; k < k0 + FLUSH_TERMS; ++k) {
        __half2 V_pair[LANE_PAIRS];
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
          V_pair[i] = *reinterpret_cast<const __half2*>(smem.V + k * HEAD_DIM + 2 * (lane + i * WARP));
        }
#pragma unroll
        for (int r0 = 0; r0 < ROWS_PER_WARP; r0 += CHUNK) {
          const Chunk prob = *reinterpret_cast<const Chunk*>(P_smem + k * ROWS_PER_WARP + r0);   // broadcast
#pragma unroll
          for (int r = 0; r < CHUNK; ++r) {
#pragma unroll
            for (int i = 0; i < LANE_PAIRS; ++i) {
              pair_sum[r0 + r][i] = __hfma2(__half2half2(prob.x[r]), V_pair[i], pair_sum[r0 + r][i]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS_PER_WARP; ++r) {
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; ++i) {
          O_reg[r][i][0] += __low2float(pair_sum[r][i]);
          O_reg[r][i][1] += __high2float(pair_sum[r][i]);
        }
      }
    }
    __syncwarp();   // the warp is done with its probabilities
  }

  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
    const int q_row = warp_q_row + r;
    const float sum = lanes_sum<WARP>(row_sum[r]);
    if (q_row >= p.q_len) continue;   // uniform across the warp
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
#pragma unroll
    for (int i = 0; i < LANE_PAIRS; ++i) {
      element* target = O_gmem + q_row * p.O.row_stride + 2 * (lane + i * WARP);
      target[0] = from_float<element>(O_reg[r][i][0] * inv_sum);
      target[1] = from_float<element>(O_reg[r][i][1] * inv_sum);
    }
    if (p.LSE && lane == 0) {
      const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
      p.LSE[row] = sum == 0.0f ? NEG_INF : row_max[r] * LN_2 + logf(sum);
    }
  }
}
