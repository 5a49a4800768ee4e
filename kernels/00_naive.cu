// 00_naive: one thread per query row, scalar FP32, online softmax.
// Question: how fast is the textbook loop?
// Layout: thread t of block x owns row x·THREADS + t; its query row and its output row live in registers.
#include "attention.cuh"
#include "ptx.cuh"

// Ablation: maximum registers per thread; 0 leaves it to the compiler. __maxnreg__ and __launch_bounds__ cannot be combined.
#ifndef MAX_REGISTERS
#define MAX_REGISTERS 0
#endif
#if MAX_REGISTERS
#define BOUNDS __maxnreg__(MAX_REGISTERS)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

extern "C" __device__ const LaunchShape launch_shape = {THREADS, 0, THREADS};

extern "C" __global__ void BOUNDS attention_00_naive(const __grid_constant__ AttentionParams p) {
  const int q_row = blockIdx.x * THREADS + threadIdx.x;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  if (q_row >= p.q_len) return;

  const element* Q_gmem = head_of(p.Q, batch, head) + q_row * p.Q.row_stride;   // (HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));             // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));             // (kv_len, HEAD_DIM)

  element Q_reg[HEAD_DIM];
  float O_reg[HEAD_DIM];
  for (int d = 0; d < HEAD_DIM; ++d) {
    Q_reg[d] = Q_gmem[d];
    O_reg[d] = 0.0f;
  }
  float row_max = NEG_INF;   // running maximum of the scores, in log2 units
  float row_sum = 0.0f;      // sum of 2^(score - row_max)

  const int num_keys = visible_keys(p, q_row);
  for (int key = 0; key < num_keys; ++key) {
    float score = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) score += to_float(Q_reg[d]) * to_float(K_gmem[key * p.K.row_stride + d]);
    score *= p.scale_log2;

    const float new_max = fmaxf(row_max, score);
    const float rescale = ptx::ex2_approx_ftz(row_max - new_max);   // 0 at the first key
    const float prob = ptx::ex2_approx_ftz(score - new_max);
    row_max = new_max;
    row_sum = row_sum * rescale + prob;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) O_reg[d] = O_reg[d] * rescale + prob * to_float(V_gmem[key * p.V.row_stride + d]);
  }

  const float inv_sum = num_keys > 0 ? 1.0f / row_sum : 0.0f;
  element* O_gmem = head_of(p.O, batch, head) + q_row * p.O.row_stride;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) O_gmem[d] = from_float<element>(O_reg[d] * inv_sum);
  if (p.LSE) {
    const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
    p.LSE[row] = num_keys > 0 ? row_max * LN_2 + logf(row_sum) : NEG_INF;
  }
}
