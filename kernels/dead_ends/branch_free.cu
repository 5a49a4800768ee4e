// branch_free: branches written as predicates. Parent: 00_naive.
// Question: do the few branches of the textbook loop cost anything, and does inline PTX remove them?
// Change: selects mask the scores, predicated stores replace the early return, and the loop bound is uniform for the block.
// Layout: thread t of block x owns row x·THREADS + t; its query row and its output row live in registers.
#include "attention.cuh"
#include "ptx.cuh"

extern "C" __device__ const LaunchShape launch_shape = {THREADS, 0, THREADS};

extern "C" __global__ void __launch_bounds__(THREADS) attention_branch_free(const __grid_constant__ AttentionParams p) {
  const int first_q_row = blockIdx.x * THREADS;
  const bool in_range = first_q_row + threadIdx.x < p.q_len;
  const int q_row = min(first_q_row + static_cast<int>(threadIdx.x), p.q_len - 1);   // duplicates the last row, and does not store it
  const int head = blockIdx.y;
  const int batch = blockIdx.z;

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
  const int block_keys = visible_keys(p, min(first_q_row + THREADS, p.q_len) - 1);   // largest for the last row
  for (int key = 0; key < block_keys; ++key) {
    float score = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) score += to_float(Q_reg[d]) * to_float(K_gmem[key * p.K.row_stride + d]);
    score = ptx::selp_f32(score * p.scale_log2, NEG_INF, key < num_keys);

    const float new_max = fmaxf(row_max, score);
    const float reference = ptx::selp_f32(0.0f, new_max, new_max == NEG_INF);   // no visible key yet: -inf - -inf would be NaN
    const float rescale = ptx::ex2_approx_ftz(row_max - reference);             // 0 at the first key
    const float prob = ptx::ex2_approx_ftz(score - reference);
    row_max = new_max;
    row_sum = row_sum * rescale + prob;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) O_reg[d] = O_reg[d] * rescale + prob * to_float(V_gmem[key * p.V.row_stride + d]);
  }

  const bool saw_keys = num_keys > 0;
  const float inv_sum = ptx::selp_f32(1.0f / row_sum, 0.0f, saw_keys);
  element* O_gmem = head_of(p.O, batch, head) + q_row * p.O.row_stride;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) ptx::st_global_if(O_gmem + d, from_float<element>(O_reg[d] * inv_sum), in_range);
  const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
  const float lse = ptx::selp_f32(row_max * LN_2 + logf(row_sum), NEG_INF, saw_keys);
  ptx::st_global_if(p.LSE + row, lse, in_range && p.LSE != nullptr);
}
