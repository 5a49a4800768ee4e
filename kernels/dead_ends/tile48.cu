// tile48: 48 rows on six warps, with the mapping for four warps: WRONG, kept to show the error. Parent: 05_wmma.
// Question: why did a tile of 48 rows give wrong results where 32 rows gave right ones?
// Change: the sources' V2. A warp computes one 16 × 16 block of scores and half of the columns of 16 rows of P·V, and does the softmax
//         of 8 rows; scores, probabilities and output are in shared memory.
// Layout: the score blocks are (TILE_Q / 16) × 2. Warp w computes block (w % 2, w / 2), which covers all of 2 × 2 blocks, but of 3 × 2
//         misses row block 2. SPLIT_FROM_TILE 1 selects (w / 2, w % 2), which is right for both.
#include "attention.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "wmma.cuh"

constexpr int TILE_KV = WARP;                   // one key per lane in the softmax
constexpr int ROWS_PER_WARP = 8;                // in the softmax
constexpr int WARPS = TILE_Q / ROWS_PER_WARP;
constexpr int THREADS = WARPS * WARP;
constexpr int KEY_BLOCKS = TILE_KV / WMMA_TILE;
constexpr int WARP_COLS = HEAD_DIM / KEY_BLOCKS;   // output columns that a warp computes
constexpr int STRIDE = HEAD_DIM + 8;               // of Q, K and V rows, padded against bank conflicts
constexpr int S_STRIDE = TILE_KV + 8;              // of score rows, in floats
constexpr int P_STRIDE = 2 * S_STRIDE;             // in elements: a row's probabilities overwrite its scores
constexpr int O_STRIDE = HEAD_DIM + 8;             // of output rows, in floats
static_assert(TILE_Q % WMMA_TILE == 0 && HEAD_DIM == 2 * WARP, "TILE_Q must be a multiple of 16, and HEAD_DIM 64: 2 columns per lane");

struct SharedStorage {
  alignas(32) element Q[TILE_Q * STRIDE];
  alignas(32) element K[TILE_KV * STRIDE];
  alignas(32) element V[TILE_KV * STRIDE];
  alignas(32) float S[TILE_Q * S_STRIDE];
  alignas(32) float PV[TILE_Q * O_STRIDE];   // of one K/V tile
  alignas(32) float O[TILE_Q * O_STRIDE];
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

// The whole block copies rows into shared memory; rows past the end are zero-filled.
template <int ROWS>
__device__ __forceinline__ void load_rows(element* tile_smem, const element* head_gmem, long long row_stride, int first_row,
                                          int num_rows) {
#pragma unroll 2
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / CHUNK; i += THREADS) {
    const int row = i / (HEAD_DIM / CHUNK), d = i % (HEAD_DIM / CHUNK) * CHUNK;
    Chunk chunk = {};
    if (first_row + row < num_rows) chunk = read_chunk(head_gmem + (first_row + row) * row_stride + d);
    *reinterpret_cast<Chunk*>(tile_smem + row * STRIDE + d) = chunk;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_tile48(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  const int row_block = SPLIT_FROM_TILE ? warp / KEY_BLOCKS : warp % 2;
  const int key_block = SPLIT_FROM_TILE ? warp % KEY_BLOCKS : warp / 2;   // 2, out of range, for warps 4 and 5
  const int first_q_row = blockIdx.x * TILE_Q;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)

  load_rows<TILE_Q>(smem.Q, Q_gmem, p.Q.row_stride, first_q_row, p.q_len);
  float row_max[ROWS_PER_WARP];        // running maximum of the scores, in log2 units; the same in all lanes
  float row_sum[ROWS_PER_WARP] = {};   // this lane's partial sum of 2^(score - row_max)
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
    const int row = warp * ROWS_PER_WARP + r;
    row_max[r] = NEG_INF;
    smem.O[row * O_STRIDE + lane] = 0.0f;
    smem.O[row * O_STRIDE + lane + WARP] = 0.0f;
  }

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  for (int tile_key = 0; tile_key < block_keys; tile_key += TILE_KV) {
    load_rows<TILE_KV>(smem.K, K_gmem, p.K.row_stride, tile_key, p.kv_len);
    load_rows<TILE_KV>(smem.V, V_gmem, p.V.row_stride, tile_key, p.kv_len);
    __syncthreads();   // the tile is complete; in the first iteration, so is Q

    FragC S_frag;
    wmma::fill_fragment(S_frag, 0.0f);
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
      FragA Q_frag;
      FragBT K_frag;
      wmma::load_matrix_sync(Q_frag, smem.Q + row_block * WMMA_TILE * STRIDE + d, STRIDE);
      wmma::load_matrix_sync(K_frag, smem.K + key_block * WMMA_TILE * STRIDE + d, STRIDE);
      wmma::mma_sync(S_frag, Q_frag, K_frag, S_frag);
    }
    float* S_block = smem.S + row_block * WMMA_TILE * S_STRIDE + key_block * WMMA_TILE;
    wmma::store_matrix_sync(S_block, S_frag, S_STRIDE, wmma::mem_row_major);
    __syncthreads();   // all scores are stored

#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      const int row = warp * ROWS_PER_WARP + r;
      const int num_keys = visible_keys(p, first_q_row + row) - tile_key;   // counted from the tile's first key
      const float score = lane < num_keys ? smem.S[row * S_STRIDE + lane] * p.scale_log2 : NEG_INF;
      const float new_max = fmaxf(row_max[r], lanes_max<WARP>(score));
      const float reference = new_max == NEG_INF ? 0.0f : new_max;         // no visible key yet: -inf - -inf would be NaN
      const float rescale = ptx::ex2_approx_ftz(row_max[r] - reference);   // 0 for a row's first visible keys
      const float prob = ptx::ex2_approx_ftz(score - reference);
      row_max[r] = new_max;
      row_sum[r] = row_sum[r] * rescale + prob;
      smem.O[row * O_STRIDE + lane] *= rescale;
      smem.O[row * O_STRIDE + lane + WARP] *= rescale;
      __syncwarp();   // the row's scores are in registers: its probabilities may overwrite them
      reinterpret_cast<element*>(smem.S)[row * P_STRIDE + lane] = from_float<element>(prob);
    }
    __syncthreads();   // all probabilities are stored

#pragma unroll
    for (int j = 0; j < WARP_COLS; j += WMMA_TILE) {
      FragC PV_frag;
      wmma::fill_fragment(PV_frag, 0.0f);
      const int col = key_block * WARP_COLS + j;   // key_block also selects the columns
#pragma unroll
      for (int k0 = 0; k0 < TILE_KV; k0 += WMMA_TILE) {
        FragA P_frag;
        FragB V_frag;
        wmma::load_matrix_sync(P_frag, reinterpret_cast<const element*>(smem.S) + row_block * WMMA_TILE * P_STRIDE + k0, P_STRIDE);
        wmma::load_matrix_sync(V_frag, smem.V + k0 * STRIDE + col, STRIDE);
        wmma::mma_sync(PV_frag, P_frag, V_frag, PV_frag);
      }
      float* PV_block = smem.PV + row_block * WMMA_TILE * O_STRIDE + col;
      wmma::store_matrix_sync(PV_block, PV_frag, O_STRIDE, wmma::mem_row_major);
    }
    __syncthreads();   // P·V of the tile is stored, and its K and V may be overwritten

#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
      const int row = warp * ROWS_PER_WARP + r;
      smem.O[row * O_STRIDE + lane] += smem.PV[row * O_STRIDE + lane];
      smem.O[row * O_STRIDE + lane + WARP] += smem.PV[row * O_STRIDE + lane + WARP];
    }
  }

  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r) {
    const int row = warp * ROWS_PER_WARP + r, q_row = first_q_row + row;
    const float sum = lanes_sum<WARP>(row_sum[r]);
    if (q_row >= p.q_len) continue;
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    element* target = O_gmem + q_row * p.O.row_stride + lane;
    target[0] = from_float<element>(smem.O[row * O_STRIDE + lane] * inv_sum);
    target[WARP] = from_float<element>(smem.O[row * O_STRIDE + lane + WARP] * inv_sum);
    if (p.LSE && lane == 0) {
      const long long lse_row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
      p.LSE[lse_row] = sum == 0.0f ? NEG_INF : row_max[r] * LN_2 + logf(sum);
    }
  }
}
