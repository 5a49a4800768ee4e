// 02_half2: packed fp16 arithmetic. Parent: 01_coalesced.
// Question: is the arithmetic the bottleneck?
// Change: both GEMMs use packed half2 FMAs, two multiply-adds per instruction, on unconverted Q, K and V. An fp16 sum loses a bit or
//         two every few terms, so it is added to an FP32 sum after FLUSH_TERMS (QK) or KEYS (PV) terms per half of the pair.
// Layout: thread t of block x owns row x·THREADS + t; its query row and its output row live in registers.
#include "attention.cuh"
#include "half2.cuh"
#include "ptx.cuh"
#include "tile.cuh"

constexpr int FLUSH_TERMS = 8;   // terms per flush to FP32 in the QK GEMM; the PV GEMM flushes every KEYS terms
static_assert(TILE_KV % KEYS == 0, "TILE_KV must be a multiple of KEYS");
static_assert(HEAD_DIM % (2 * FLUSH_TERMS) == 0, "HEAD_DIM must be a multiple of 2 * FLUSH_TERMS");

struct SharedStorage {
  alignas(16) element K[TILE_KV * HEAD_DIM];
  alignas(16) element V[TILE_KV * HEAD_DIM];
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), THREADS};

extern "C" __global__ void __launch_bounds__(THREADS) attention_02_half2(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int first_q_row = blockIdx.x * THREADS;
  const int q_row = first_q_row + threadIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const bool owns_row = q_row < p.q_len;

  const element* Q_gmem = head_of(p.Q, batch, head) + q_row * p.Q.row_stride;   // (HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));             // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));             // (kv_len, HEAD_DIM)

  Chunk Q_reg[HEAD_DIM / CHUNK];
  float O_reg[HEAD_DIM];
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += CHUNK) {
    if (owns_row) Q_reg[d / CHUNK] = read_chunk(Q_gmem + d);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) O_reg[d + i] = 0.0f;
  }
  float row_max = NEG_INF;   // running maximum of the scores, in log2 units
  float row_sum = 0.0f;      // sum of 2^(score - row_max)

  const int num_keys = owns_row ? visible_keys(p, q_row) : 0;
  const int block_keys = visible_keys(p, min(first_q_row + THREADS, p.q_len) - 1);   // largest for the last row
  for (int tile_key = 0; tile_key < block_keys; tile_key += TILE_KV) {
    __syncthreads();   // everyone is done with the previous tile
    load_tile<TILE_KV, HEAD_DIM, THREADS, LOADS_IN_FLIGHT>(smem.K, K_gmem, p.K.row_stride, tile_key, p.kv_len);
    load_tile<TILE_KV, HEAD_DIM, THREADS, LOADS_IN_FLIGHT>(smem.V, V_gmem, p.V.row_stride, tile_key, p.kv_len);
    __syncthreads();   // the tile is complete

#pragma unroll 1
    for (int k0 = 0; k0 < TILE_KV && tile_key + k0 < num_keys; k0 += KEYS) {
      float score[KEYS] = {};
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 2 * FLUSH_TERMS) {
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
          __half2 pair_sum = __half2half2(__ushort_as_half(0));
#pragma unroll
          for (int c = d; c < d + 2 * FLUSH_TERMS; c += CHUNK) {
            const Chunk chunk = *reinterpret_cast<const Chunk*>(smem.K + (k0 + k) * HEAD_DIM + c);   // same address in all lanes: broadcast
#pragma unroll
            for (int i = 0; i < CHUNK / 2; ++i) pair_sum = __hfma2(pair_of(Q_reg[c / CHUNK], i), pair_of(chunk, i), pair_sum);
          }
          score[k] += __low2float(pair_sum) + __high2float(pair_sum);
        }
      }

      float new_max = row_max;
#pragma unroll
      for (int k = 0; k < KEYS; ++k) {
        score[k] = tile_key + k0 + k < num_keys ? score[k] * p.scale_log2 : NEG_INF;
        new_max = fmaxf(new_max, score[k]);
      }
      const float rescale = ptx::ex2_approx_ftz(row_max - new_max);   // 0 for a row's first visible keys
      row_max = new_max;
      row_sum *= rescale;
      __half2 prob[KEYS];   // each probability, in both halves of a pair
#pragma unroll
      for (int k = 0; k < KEYS; ++k) {
        const float exact_prob = ptx::ex2_approx_ftz(score[k] - new_max);
        row_sum += exact_prob;
        prob[k] = __float2half2_rn(exact_prob);
      }

#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += CHUNK) {
        __half2 pair_sum[CHUNK / 2] = {};
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
          const Chunk chunk = *reinterpret_cast<const Chunk*>(smem.V + (k0 + k) * HEAD_DIM + d);
#pragma unroll
          for (int i = 0; i < CHUNK / 2; ++i) pair_sum[i] = __hfma2(prob[k], pair_of(chunk, i), pair_sum[i]);
        }
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
          O_reg[d + 2 * i] = O_reg[d + 2 * i] * rescale + __low2float(pair_sum[i]);
          O_reg[d + 2 * i + 1] = O_reg[d + 2 * i + 1] * rescale + __high2float(pair_sum[i]);
        }
      }
    }
  }

  if (!owns_row) return;
  const float inv_sum = num_keys > 0 ? 1.0f / row_sum : 0.0f;
  element* O_gmem = head_of(p.O, batch, head) + q_row * p.O.row_stride;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += CHUNK) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) chunk.x[i] = from_float<element>(O_reg[d + i] * inv_sum);
    write_chunk(O_gmem + d, chunk);
  }
  if (p.LSE) {
    const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
    p.LSE[row] = num_keys > 0 ? row_max * LN_2 + logf(row_sum) : NEG_INF;
  }
}
