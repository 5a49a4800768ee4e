// fp8: both GEMMs on e4m3. Parent: fp8_simulated.
// Question: what do FP8 tensor cores gain when the inputs are 16-bit?
// Change: wgmma on e4m3. Q, K and V are rounded on their way into shared memory, V is also transposed: FP8 operands must be contiguous
//         along the reduction. V's keys are permuted so that the rounded score registers are the A operand of PV as they are.
// Layout: warpgroup w of block x owns rows x·TILE_Q + 64·w onwards. A tile in shared memory consists of core matrices, 8 rows × 16 bytes.
// Requires: sm_90a. (mma.sync on e4m3, which sm_89 has, compiles to fp16 instructions there.)
#include "attention.cuh"
#include "e4m3.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "reduce.cuh"

constexpr int WARPGROUP = 128;
constexpr int GROUP_ROWS = 64;        // rows of A and D of one wgmma
constexpr int STEP = 32;              // elements that one instruction sums over
constexpr int HALVES = 2;             // rows of S and O that a lane holds: lane / 4 of its warp's 16 rows, and the one 8 below
constexpr int ROW_LANES = 4;          // lanes that share a row
constexpr int THREADS = NUM_WARPGROUPS * WARPGROUP;
constexpr int TILE_Q = NUM_WARPGROUPS * GROUP_ROWS;
constexpr int BLOCK_ROWS = 8;         // rows of a core matrix in shared memory
constexpr int BLOCK_COLS = 16;        // bytes per row of a core matrix
constexpr int BLOCK_BYTES = BLOCK_ROWS * BLOCK_COLS;
constexpr int MIN_BLOCKS = TILE_KV > 64 ? 1 : 2;   // resident per SM: twice the scores need twice the registers
constexpr float PROB_LOG2_MAX = 8;    // probabilities are scaled by 2^8 before rounding, to use e4m3's range from the top down
static_assert(TILE_KV % STEP == 0 && HEAD_DIM % STEP == 0, "TILE_KV and HEAD_DIM must be multiples of 32: an instruction's K");

struct SharedStorage {
  alignas(128) unsigned char Q[NUM_WARPGROUPS][GROUP_ROWS * HEAD_DIM];   // (GROUP_ROWS, HEAD_DIM)
  alignas(128) unsigned char K[TILE_KV * HEAD_DIM];                      // (TILE_KV, HEAD_DIM)
  alignas(128) unsigned char V[HEAD_DIM * TILE_KV];                      // (HEAD_DIM, TILE_KV), keys permuted
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q};

// Byte offset in a tile whose rows are ROW_BYTES long.
template <int ROW_BYTES>
__device__ __forceinline__ int tile_offset(int row, int column) {
  return (row / BLOCK_ROWS * (ROW_BYTES / BLOCK_COLS) + column / BLOCK_COLS) * BLOCK_BYTES + row % BLOCK_ROWS * BLOCK_COLS +
         column % BLOCK_COLS;
}

template <int ROW_BYTES>
__device__ __forceinline__ unsigned long long tile_descriptor(const unsigned char* tile_smem) {
  return ptx::make_descriptor(tile_smem, BLOCK_BYTES, ROW_BYTES / BLOCK_COLS * BLOCK_BYTES, ptx::Swizzle::none);
}
constexpr unsigned long long STEP_DESCRIPTOR = STEP / BLOCK_COLS * BLOCK_BYTES / 16;   // to the columns of the next instruction

__device__ __forceinline__ Bytes read_e4m3(const element* head_gmem, long long row_stride, int row, int num_rows, int d) {
  if (row >= num_rows) return {};   // the PV GEMM also multiplies masked keys, and 0 · garbage may be NaN
  return to_e4m3(read_chunk(head_gmem + row * row_stride + d));
}

// The block rounds rows of Q or K to e4m3 and writes them to a tile.
template <int ROWS>
__device__ __forceinline__ void fill_rows(unsigned char* tile_smem, const element* head_gmem, long long row_stride,
                                          int first_row, int num_rows) {
#pragma unroll 2
  for (int i = threadIdx.x; i < ROWS * HEAD_DIM / CHUNK; i += THREADS) {
    const int row = i / (HEAD_DIM / CHUNK), d = i % (HEAD_DIM / CHUNK) * CHUNK;
    *reinterpret_cast<Bytes*>(tile_smem + tile_offset<HEAD_DIM>(row, d)) =
        read_e4m3(head_gmem, row_stride, first_row + row, num_rows, d);
  }
}

// The block rounds and transposes rows of V. Each thread handles 8 columns of the 4 keys whose scores one lane holds: of 16 keys these
// are 2·t, 2·t + 1, 2·t + 8 and 2·t + 9. They move to positions 4·t to 4·t + 3, whose P that lane must hold as the A operand.
__device__ __forceinline__ void fill_V(unsigned char* tile_smem, const element* head_gmem, long long row_stride,
                                       int first_row, int num_rows) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TILE_KV / 4 * HEAD_DIM / CHUNK; i += THREADS) {
    const int four = i / (HEAD_DIM / CHUNK), d = i % (HEAD_DIM / CHUNK) * CHUNK;
    const int key = four / 4 * 16 + four % 4 * 2;
    Bytes row[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) row[k] = read_e4m3(head_gmem, row_stride, first_row + key + k / 2 * 8 + k % 2, num_rows, d);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {   // of columns: bytes 2·pair and 2·pair + 1 of the four rows' words
        const unsigned bytes = pair == 0 ? 0x5140 : 0x7362;
        const unsigned first = __byte_perm(row[0].word[w], row[1].word[w], bytes);
        const unsigned second = __byte_perm(row[2].word[w], row[3].word[w], bytes);
        unsigned char* target = tile_smem + tile_offset<TILE_KV>(d + 4 * w + 2 * pair, 4 * four);
        *reinterpret_cast<unsigned*>(target) = __byte_perm(first, second, 0x5410);
        *reinterpret_cast<unsigned*>(target + BLOCK_COLS) = __byte_perm(first, second, 0x7632);   // the next row
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention_fp8(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int warp = threadIdx.x % WARPGROUP / WARP;
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int lane_row = first_q_row + warpgroup * GROUP_ROWS + warp * 16 + lane / ROW_LANES;
  const int lane_col = lane % ROW_LANES * 2;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const element* Q_gmem = head_of(p.Q, batch, head);                  // (q_len, HEAD_DIM)
  const element* K_gmem = head_of(p.K, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head_of(p, head));   // (kv_len, HEAD_DIM)

  for (int g = 0; g < NUM_WARPGROUPS; ++g) {
    fill_rows<GROUP_ROWS>(smem.Q[g], Q_gmem, p.Q.row_stride, first_q_row + g * GROUP_ROWS, p.q_len);
  }
  const unsigned long long Q_desc = tile_descriptor<HEAD_DIM>(smem.Q[warpgroup]);
  const unsigned long long K_desc = tile_descriptor<HEAD_DIM>(smem.K);
  const unsigned long long V_desc = tile_descriptor<TILE_KV>(smem.V);

  float O_reg[HEAD_DIM / 2] = {};   // x[4·j + 2·h + e]: row lane_row + 8·h, column 8·j + lane_col + e
  float row_max[HALVES] = {NEG_INF, NEG_INF};   // largest score so far, in units of log2; the same in the row's lanes
  float row_sum[HALVES] = {};                   // this lane's part of the sum of 2^(score - row_max + PROB_LOG2_MAX)

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  for (int tile_key = 0; tile_key < block_keys; tile_key += TILE_KV) {
    __syncthreads();   // everyone is done with the previous tile
    fill_rows<TILE_KV>(smem.K, K_gmem, p.K.row_stride, tile_key, p.kv_len);
    fill_V(smem.V, V_gmem, p.V.row_stride, tile_key, p.kv_len);
    ptx::fence_proxy_async_shared();   // makes the ordinary stores visible to the tensor cores (async proxy)
    __syncthreads();                   // the tile is complete; in the first iteration, so is Q

    float S_reg[TILE_KV / 2];   // laid out as O_reg, with keys as columns
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / STEP; ++k) {
      ptx::wgmma_ss<TILE_KV, __nv_fp8_e4m3>(S_reg, Q_desc + k * STEP_DESCRIPTOR, K_desc + k * STEP_DESCRIPTOR, k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(S_reg);

    unsigned P_reg[TILE_KV / STEP][4];   // one register: 4 keys of one row, adjacent in V's permuted order
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int num_keys = visible_keys(p, lane_row + 8 * h) - tile_key - lane_col;   // of this tile, counted from this lane's first
      float lane_max = NEG_INF;
#pragma unroll
      for (int j = 0; j < TILE_KV / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = S_reg[4 * j + 2 * h + e];
          score = 8 * j + e < num_keys ? score * p.scale_log2 : NEG_INF;
          lane_max = fmaxf(lane_max, score);
        }
      }
      const float new_max = fmaxf(row_max[h], lanes_max<ROW_LANES>(lane_max));
      const float reference = new_max == NEG_INF ? 0.0f : new_max;         // no visible key yet: -inf - -inf would be NaN
      const float rescale = ptx::ex2_approx_ftz(row_max[h] - reference);   // 0 for a row's first visible keys
      row_max[h] = new_max;
      row_sum[h] *= rescale;
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 8; ++j) {
        O_reg[4 * j + 2 * h] *= rescale;
        O_reg[4 * j + 2 * h + 1] *= rescale;
      }
#pragma unroll
      for (int j = 0; j < TILE_KV / 8; j += 2) {
        float prob[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          prob[i] = ptx::ex2_approx_ftz(S_reg[4 * (j + i / 2) + 2 * h + i % 2] + (PROB_LOG2_MAX - reference));
          row_sum[h] += prob[i];
        }
        P_reg[j / 4][j % 4 + h] = to_e4m3(prob[0], prob[1], prob[2], prob[3]);
      }
    }

    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_KV / STEP; ++k) {
      ptx::wgmma_rs<HEAD_DIM, __nv_fp8_e4m3>(O_reg, P_reg[k], V_desc + k * STEP_DESCRIPTOR, true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(O_reg);
  }

  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    const int q_row = lane_row + 8 * h;
    const float sum = lanes_sum<ROW_LANES>(row_sum[h]);
    if (q_row >= p.q_len) continue;
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    element* target = O_gmem + q_row * p.O.row_stride + lane_col;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; ++j) {
      target[8 * j] = from_float<element>(O_reg[4 * j + 2 * h] * inv_sum);
      target[8 * j + 1] = from_float<element>(O_reg[4 * j + 2 * h + 1] * inv_sum);
    }
    if (p.LSE && lane % ROW_LANES == 0) {
      const long long row = (static_cast<long long>(batch) * p.q_heads + head) * p.q_len + q_row;
      p.LSE[row] = sum == 0.0f ? NEG_INF : (row_max[h] - PROB_LOG2_MAX) * LN_2 + logf(sum);
    }
  }
}
