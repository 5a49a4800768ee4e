// cublaslt_unfused: the softmax between two cuBLASLt GEMMs. Parent: 00_naive.
// Question: what do three passes with the best matrix library achieve?
// Change: cuBLASLt writes the scores to global memory, and this kernel writes the probabilities back there for the second GEMM; see
//         src/flashlab/experiments/cublaslt.py, which calls the GEMMs and reads HEADS_A_CALL, SETUP_EACH_CALL and SPLIT_K.
// Layout: ROW_LANES threads share a row; blockIdx.y is the head, counted from the first head of the call.
#include "attention.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr int THREADS = 128;
constexpr int ROWS = THREADS / ROW_LANES;
constexpr int WIDTH = ROW_LANES == 1 ? 1 : 8;   // scores per access: rows are padded to a multiple of 8
constexpr int STRIDE = ROW_LANES * WIDTH;
static_assert(ROW_LANES == 1 || ROW_LANES == WARP, "ROW_LANES must be 1 or 32");

// src/flashlab/experiments/cublaslt.py mirrors this layout, field by field.
struct SoftmaxParams {
  const float* scores;    // (heads, q_len, pitch), in units of log2; unused with SCORES_FP32 0, where they are in `probs`
  element* probs;         // (heads, q_len, pitch)
  float* LSE;             // (heads, q_len), natural log; null if not requested
  long long pitch;        // elements from one row to the next
  int q_len;
  int kv_len;
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, 0, ROWS};

template <typename T>
struct alignas(sizeof(T) * WIDTH < 16 ? sizeof(T) * WIDTH : 16) Scores {
  T x[WIDTH];
};

// Scores of keys [key, key + WIDTH); -inf for keys that the row does not see.
template <typename T>
__device__ __forceinline__ void read_scores(float (&score)[WIDTH], const T* row, int key, int num_keys) {
  const Scores<T> stored = *reinterpret_cast<const Scores<T>*>(row + key);
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    if constexpr (sizeof(T) == sizeof(float)) {
      score[i] = stored.x[i];
    } else {
      score[i] = to_float(stored.x[i]);
    }
    if (key + i >= num_keys) score[i] = NEG_INF;
  }
}

template <typename T>
__device__ __forceinline__ void softmax_row(const T* S_gmem, element* P_gmem, float* lse, int num_keys, int kv_len, int lane) {
  float score[WIDTH];
  float row_max = NEG_INF;
  for (int key = lane * WIDTH; key < num_keys; key += STRIDE) {
    read_scores(score, S_gmem, key, num_keys);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) row_max = fmaxf(row_max, score[i]);
  }
  row_max = lanes_max<ROW_LANES>(row_max);

  float row_sum = 0.0f;
  for (int key = lane * WIDTH; key < num_keys; key += STRIDE) {
    read_scores(score, S_gmem, key, num_keys);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) row_sum += ptx::ex2_approx_ftz(score[i] - row_max);
  }
  row_sum = lanes_sum<ROW_LANES>(row_sum);

  const float inv_sum = num_keys > 0 ? 1.0f / row_sum : 0.0f;
  const float reference = num_keys > 0 ? row_max : 0.0f;   // -inf - -inf would be NaN
  for (int key = lane * WIDTH; key < kv_len; key += STRIDE) {
    Scores<element> probs;
    if (key < num_keys) {
      read_scores(score, S_gmem, key, num_keys);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) score[i] = NEG_INF;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) probs.x[i] = from_float<element>(ptx::ex2_approx_ftz(score[i] - reference) * inv_sum);
    *reinterpret_cast<Scores<element>*>(P_gmem + key) = probs;
  }
  if (lse && lane == 0) *lse = num_keys > 0 ? row_max * LN_2 + logf(row_sum) : NEG_INF;
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_cublaslt_unfused(const __grid_constant__ SoftmaxParams p) {
  const int q_row = blockIdx.x * ROWS + threadIdx.x / ROW_LANES;
  const int lane = threadIdx.x % ROW_LANES;
  if (q_row >= p.q_len) return;   // uniform for the lanes of a row
  const long long row = static_cast<long long>(blockIdx.y) * p.q_len + q_row;
  const int num_keys = CAUSAL ? max(0, min(p.kv_len, q_row + 1 + p.kv_len - p.q_len)) : p.kv_len;
  element* P_gmem = p.probs + row * p.pitch;   // (kv_len)
  float* lse = p.LSE ? p.LSE + row : nullptr;
  if constexpr (SCORES_FP32) {
    softmax_row(p.scores + row * p.pitch, P_gmem, lse, num_keys, p.kv_len, lane);
  } else {
    softmax_row(static_cast<const element*>(P_gmem), P_gmem, lse, num_keys, p.kv_len, lane);
  }
}
