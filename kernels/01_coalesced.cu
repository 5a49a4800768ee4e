// 01_coalesced: shared-memory tiles, 128-bit coalesced loads. Parent: 00_naive.
// Question: are the loads the bottleneck?
// Change: the block stages TILE_KV keys and values in shared memory: each element is loaded once per block, 16 bytes per access.
//         A thread then reads 8 elements per access and processes KEYS keys at a time, with one rescale for all of them.
// Layout: thread t of block x owns row x·THREADS + t; its query row and its output row live in registers.
#include "attention.cuh"
#include "ptx.cuh"
#include "tile.cuh"

static_assert(TILE_KV % KEYS == 0, "TILE_KV must be a multiple of KEYS");

struct SharedStorage {
  alignas(16) element K[TILE_KV * HEAD_DIM];
  alignas(16) element V[TILE_KV * HEAD_DIM];
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), THREADS};

extern "C" __global__ void __launch_bounds__(THREADS) attention_01_coalesced(const __grid_constant__ AttentionParams p) {
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
      for (int d = 0; d < HEAD_DIM; d += CHUNK) {
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
          const Chunk chunk = *reinterpret_cast<const Chunk*>(smem.K + (k0 + k) * HEAD_DIM + d);   // same address in all lanes: broadcast
#pragma unroll
          for (int i = 0; i < CHUNK; ++i) score[k] += to_float(Q_reg[d / CHUNK].x[i]) * to_float(chunk.x[i]);
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
#pragma unroll
      for (int k = 0; k < KEYS; ++k) {
        score[k] = ptx::ex2_approx_ftz(score[k] - new_max);   // from here on, score[k] holds a probability
        row_sum += score[k];
      }

#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += CHUNK) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) O_reg[d + i] *= rescale;
#pragma unroll
        for (int k = 0; k < KEYS; ++k) {
          const Chunk chunk = *reinterpret_cast<const Chunk*>(smem.V + (k0 + k) * HEAD_DIM + d);
#pragma unroll
          for (int i = 0; i < CHUNK; ++i) O_reg[d + i] += score[k] * to_float(chunk.x[i]);
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
