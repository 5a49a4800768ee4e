// wmma_no_smem: WMMA without shared memory. Parent: 04_wmma_qk.
// Question: what makes an attention kernel on tensor cores take tens of milliseconds for one sequence of 512?
// Change: lanes share nothing, so each gathers all scores of its warp by shuffles into an array, and with COLUMN_LANES 1 computes
//         the whole softmax and all of P·V by itself. Arrays indexed at run time, and 16 rows of output, are in local memory.
// Layout: a block is one warp, which owns 16 rows, or with WARP_A_HEAD 1 all rows of a head, 16 at a time.
#include "attention.cuh"
#include "ptx.cuh"
#include "wmma.cuh"

constexpr int ROWS = WMMA_TILE;
constexpr int KEYS = WMMA_TILE;                    // per K/V tile
constexpr int COLS = HEAD_DIM / COLUMN_LANES;             // output columns per lane: first_col, first_col + COLUMN_LANES, …
constexpr int WHOLE_HEAD = 1 << 30;                // rows per block: more than any head has
constexpr int UNROLL = COLUMN_LANES == 1 ? 1 : ROWS;      // 16 rows × 2 columns fit in registers, 16 rows × 64 columns do not
static_assert(COLUMN_LANES == 1 || COLUMN_LANES == WARP, 
              "COLUMN_LANES must be 1 or 32: after the QK GEMM every lane does all work, or the warp shares it");
static_assert(HEAD_DIM % COLUMN_LANES == 0, "all lanes must have the same number of columns");

extern "C" __device__ const LaunchShape launch_shape = {WARP, 0, WARP_A_HEAD ? WHOLE_HEAD : ROWS};

// 0, 1, 2, …: loaded as a fragment, they tell a lane which elements it holds; CUDA does not specify that mapping.
struct Places {
  float x[ROWS * KEYS];
  __device__ constexpr Places() : x() {
    for (int i = 0; i < ROWS * KEYS; ++i) x[i] = static_cast<float>(i);
  }
};
__device__ const __align__(32) Places places = Places();

// Whether WMMA may load the 16 rows from `first` on: all of them exist and are aligned as WMMA requires. ALIGNED guarantees
// a stride that fits WMMA's unsigned parameter: the registry entry sets `wmma_strides`.
__device__ __forceinline__ bool loadable(const element* rows, long long row_stride, int first, int num_rows) {
  return ALIGNED && first + WMMA_TILE <= num_rows && reinterpret_cast<unsigned long long>(rows) % 32 == 0 && row_stride % 16 == 0;
}

extern "C" __global__ void __launch_bounds__(WARP) attention_wmma_no_smem(const __grid_constant__ AttentionParams p) {
  const int lane = threadIdx.x;
  const int first_col = COLUMN_LANES == 1 ? 0 : lane;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  element* O_gmem = head_of(p.O, batch, head);                        // (q_len, HEAD_DIM)

  FragC place_frag;
  wmma::load_matrix_sync(place_frag, places.x, KEYS, wmma::mem_row_major);

  const int first_tile = WARP_A_HEAD ? 0 : blockIdx.x * ROWS;
  const int end_row = WARP_A_HEAD ? p.q_len : min(first_tile + ROWS, p.q_len);
#pragma unroll 1
  for (int tile_row = first_tile; tile_row < end_row; tile_row += ROWS) {
    const element* Q_tile = Q_gmem + tile_row * p.Q.row_stride;
    const int num_rows = min(ROWS, p.q_len - tile_row);
    float O_own[ROWS][COLS];
    float row_max[ROWS];   // running maximum of the scores, in log2 units; the same in all lanes
    float row_sum[ROWS];   // sum of 2^(score - row_max); the same in all lanes
#pragma unroll UNROLL
    for (int r = 0; r < ROWS; ++r) {
      row_max[r] = NEG_INF;
      row_sum[r] = 0.0f;
#pragma unroll UNROLL
      for (int i = 0; i < COLS; ++i) O_own[r][i] = 0.0f;
    }

    const int tile_keys = visible_keys(p, tile_row + num_rows - 1);   // largest for the last row
#pragma unroll 1
    for (int tile_key = 0; tile_key < tile_keys; tile_key += KEYS) {
      const element* K_tile = K_gmem + tile_key * p.K.row_stride;
      const element* V_tile = V_gmem + tile_key * p.V.row_stride;
      const int num_keys = min(KEYS, p.kv_len - tile_key);
      float S_own[ROWS * KEYS];   // all scores of the warp, replicated in every lane
      if (loadable(Q_tile, p.Q.row_stride, tile_row, p.q_len) && loadable(K_tile, p.K.row_stride, tile_key, p.kv_len)) {
        FragC S_frag;
        wmma::fill_fragment(S_frag, 0.0f);
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += WMMA_TILE) {
          FragA Q_frag;   // reloaded for every K/V tile
          FragBT K_frag;
          wmma::load_matrix_sync(Q_frag, Q_tile + d, static_cast<unsigned>(p.Q.row_stride));
          wmma::load_matrix_sync(K_frag, K_tile + d, static_cast<unsigned>(p.K.row_stride));
          wmma::mma_sync(S_frag, Q_frag, K_frag, S_frag);
        }
#pragma unroll 1
        for (int source = 0; source < WARP; ++source) {
#pragma unroll
          for (int i = 0; i < S_frag.num_elements; ++i) {
            const int place = static_cast<int>(__shfl_sync(FULL_WARP, place_frag.x[i], source));
            S_own[place] = __shfl_sync(FULL_WARP, S_frag.x[i], source);
          }
        }
      } else {
#pragma unroll 1
        for (int place = 0; place < ROWS * KEYS; ++place) {
          const int r = min(place / KEYS, num_rows - 1), key = min(place % KEYS, num_keys - 1);
          float score = 0.0f;
#pragma unroll 4
          for (int d = 0; d < HEAD_DIM; ++d) {
            score += to_float(Q_tile[r * p.Q.row_stride + d]) * to_float(K_tile[key * p.K.row_stride + d]);
          }
          S_own[place] = score;
        }
      }

#pragma unroll UNROLL
      for (int r = 0; r < ROWS; ++r) {
        const int row_keys = min(visible_keys(p, min(tile_row + r, p.q_len - 1)) - tile_key, num_keys);
        float new_max = row_max[r];
#pragma unroll 1
        for (int key = 0; key < row_keys; ++key) new_max = fmaxf(new_max, S_own[r * KEYS + key] * p.scale_log2);
        const float reference = new_max == NEG_INF ? 0.0f : new_max;         // no visible key yet: -inf - -inf would be NaN
        const float rescale = ptx::ex2_approx_ftz(row_max[r] - reference);   // 0 for a row's first visible keys
        row_max[r] = new_max;
        row_sum[r] *= rescale;
#pragma unroll UNROLL
        for (int i = 0; i < COLS; ++i) O_own[r][i] *= rescale;
#pragma unroll 1
        for (int key = 0; key < row_keys; ++key) {
          const float prob = ptx::ex2_approx_ftz(S_own[r * KEYS + key] * p.scale_log2 - reference);
          row_sum[r] += prob;
          const element* V_row = V_tile + key * p.V.row_stride + first_col;
#pragma unroll UNROLL
          for (int i = 0; i < COLS; ++i) O_own[r][i] += prob * to_float(V_row[i * COLUMN_LANES]);
        }
      }
    }

#pragma unroll UNROLL
    for (int r = 0; r < ROWS; ++r) {
      if (r >= num_rows || (COLUMN_LANES == 1 && lane > 0)) continue;   // with COLUMN_LANES 1 all lanes hold the same results
      const float inv_sum = row_sum[r] == 0.0f ? 0.0f : 1.0f / row_sum[r];   // 0 if the row has no visible key
      element* target = O_gmem + (tile_row + r) * p.O.row_stride + first_col;
#pragma unroll UNROLL
      for (int i = 0; i < COLS; ++i) target[i * COLUMN_LANES] = from_float<element>(O_own[r][i] * inv_sum);
      if (p.LSE && lane == 0) {
        const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + tile_row + r;
        p.LSE[row] = row_sum[r] == 0.0f ? NEG_INF : row_max[r] * LN_2 + logf(row_sum[r]);
      }
    }
  }
}
