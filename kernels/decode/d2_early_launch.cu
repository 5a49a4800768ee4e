// d2_early_launch: the next call starts while this one ends. Parent: d0_split_kv.
// Question: how many of the microseconds that a short sequence takes are the launch itself, and can the launch overlap the end of the
//           preceding call?
// Change: programmatic dependent launch. A block that has its last keys allows the next kernel of the stream to launch, and before
//         it touches global memory it waits until the preceding kernels have ended.
// Layout: as the parent's.
// Requires: as the parent.
#include "attention.cuh"
#include "mma.cuh"
#include "ptx_sm90.cuh"
#include "reduce.cuh"
#include "softcap.cuh"
#include "tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = MMA_M;                        // packed rows: M of one MMA; a larger group takes more tiles
constexpr int MAX_SPLITS = 16;                       // blocks per cluster
constexpr int KEY_BLOCKS = STEP_KEYS / MMA_N;        // blocks of 8 keys in a warp's step
constexpr int COL_BLOCKS = HEAD_DIM / MMA_N;         // blocks of 8 output columns
constexpr int D_STEPS = HEAD_DIM / MMA_K;
constexpr int ROW_BYTES = HEAD_DIM * sizeof(element);
constexpr int STEP_BYTES = STEP_KEYS * ROW_BYTES;    // of each of K and V
constexpr int ROW_CHUNKS = HEAD_DIM / CHUNK;
constexpr int COPY_ROWS = WARP / ROW_CHUNKS;         // rows that a warp copies with one instruction
enum : int {   // for head dim 96 (12 chunks per row); an enum, as constants' names would appear in the other head dims' machine code
  SWAPPED_CHUNKS = ROW_CHUNKS % MATRIX == 0 ? MATRIX : 4,   // size of the groups of chunks that the swizzle permutes
  COPY_LANES = COPY_ROWS * ROW_CHUNKS,                      // lanes of a warp with a chunk to copy
};
constexpr int PART = 4;                              // adjacent columns that one thread combines: 16 bytes of FP32
constexpr int ROW_PARTS = (HEAD_DIM / PART + MAX_SPLITS - 1) / MAX_SPLITS * MAX_SPLITS;   // rounded up: an even split over the cluster
constexpr int PARTIAL_STRIDE = HEAD_DIM + 8;         // in floats: 4 rows of an accumulator cover every bank once
constexpr float LOWEST = -0x1p100f;                  // below any realistic score: reference of a warp or block with no visible key
static_assert(STEP_KEYS % MMA_K == 0, "STEP_KEYS must be a multiple of 16");
static_assert(PIPELINE_STAGES >= 2, "a warp copies into one buffer while it reads another");
static_assert(SPLITS <= MAX_SPLITS && (SPLITS & SPLITS - 1) == 0, "SPLITS must be 1, 2, 4, 8 or 16, or 0 if the launcher chooses");

struct alignas(16) Part {
  float x[PART];
};

// One stage of a warp's ring: STEP_KEYS rows of K, then STEP_KEYS rows of V.
struct Step {
  alignas(128) element K[STEP_KEYS * HEAD_DIM];
  alignas(128) element V[STEP_KEYS * HEAD_DIM];
};

struct SharedStorage {
  union {
    Step ring[WARPS][PIPELINE_STAGES];                    // in the main loop
    float O_warp[WARPS][TILE_Q][PARTIAL_STRIDE];          // after the main loop: the warps' outputs, not yet divided by their sums
  };
  float warp_max[WARPS][TILE_Q], warp_sum[WARPS][TILE_Q];
  // Written through DSMEM by the cluster's blocks, each at the index of its own rank. Not part of the union, because a block that has
  // finished sends its results while another still reads keys from its ring.
  Part O_split[TILE_Q * ROW_PARTS];                       // [rank][row][this block's Parts of a row]
  float split_max[MAX_SPLITS][TILE_Q], split_sum[MAX_SPLITS][TILE_Q];
};

extern "C" __device__ const SplitLaunchShape launch_shape = {
    {{THREADS, sizeof(SharedStorage), TILE_Q}, 0, SPLITS}, WARPS * STEP_KEYS};

// Offset in elements of chunk `chunk` of row `row`. The swizzle places the 8 rows of one chunk column, which ldmatrix reads together,
// in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * HEAD_DIM + (chunk ^ row / (MATRIX / SWAPPED_CHUNKS) % SWAPPED_CHUNKS) * CHUNK;
}

// Byte address of an ldmatrix row whose chunk is 2·d or 2·d + 1, given its address `at` for d = 0.
__device__ __forceinline__ unsigned chunks_at(unsigned at, int d) {
  constexpr int SWAPPED = SWAPPED_CHUNKS * sizeof(Chunk);   // span in bytes within which chunks are permuted
  const int distance = 2 * d * sizeof(Chunk);
  return (at ^ distance % SWAPPED) + distance / SWAPPED * SWAPPED;
}

// Copies 8 elements, or writes zeros if `exists` is false: a masked key still takes part in the PV GEMM, where 0 · garbage may be NaN.
// cp.async returns immediately; the caller commits the group and waits for it.
__device__ __forceinline__ void copy_chunk(element* target_smem, const element* source_gmem, bool exists) {
  if constexpr (ALIGNED) {
    ptx::cp_async_cg_16(target_smem, source_gmem, exists ? sizeof(Chunk) : 0);
  } else {
    Chunk chunk = {};
    if (exists) chunk = read_chunk(source_gmem);
    *reinterpret_cast<Chunk*>(target_smem) = chunk;
  }
}

// Reads two adjacent elements into one register.
__device__ __forceinline__ unsigned read_pair(const element* source) {
  if constexpr (ALIGNED) return *reinterpret_cast<const unsigned*>(source);
  const element pair[2] = {source[0], source[1]};
  return *reinterpret_cast<const unsigned*>(pair);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_d2_early_launch(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (!ALLOW_LATE) ptx::griddepcontrol_launch_dependents();
  ptx::cluster_arrive_relaxed();   // signals that this block has started; waited for before the first DSMEM write

  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0);   // the shuffle tells the compiler that the value is warp-uniform
  const int lane = threadIdx.x % WARP;
  const int log2_splits = __ffs(ptx::cluster_nctarank()) - 1;   // a power of two: shifts, since divisions would delay the first load
  const int splits = 1 << log2_splits;
  const int split = ptx::cluster_ctarank();
  const int kv_head = blockIdx.y;
  const int batch = blockIdx.z;
  const int group = p.q_heads / p.kv_heads;                        // query heads per K/V head
  const int first_row = (blockIdx.x >> log2_splits) * TILE_Q;      // in packed rows
  const int num_rows = min(TILE_Q, group * p.q_len - first_row);
  // Query row of a packed row. The operands are small, and adding half a row keeps the quotient away from the next integer.
  const float inv_group = __fdividef(1.0f, group);
  const auto q_row_of = [&](int row) { return static_cast<int>((first_row + row + 0.5f) * inv_group); };
  const auto head_of_row = [&](int row) { return kv_head * group + first_row + row - q_row_of(row) * group; };
  const auto row_of = [&](const TensorView& tensor, int row) {   // address of a packed row in Q or O
    return head_of(tensor, batch, head_of_row(row)) + q_row_of(row) * tensor.row_stride;
  };
  const int tile_keys = visible_keys(p, q_row_of(num_rows - 1));   // largest for the last row
  const int full_keys = visible_keys(p, q_row_of(0));              // the first row sees the fewest: up to here nothing is masked
  const int tile_first = first_key(p, q_row_of(0));                // with a window: the first row's window begins first
  const int full_first = first_key(p, q_row_of(num_rows - 1));     // and the last row's window begins last

  const element* K_gmem = head_of(p.K, batch, kv_head);   // (kv_len, HEAD_DIM)
  const element* V_gmem = head_of(p.V, batch, kv_head);   // (kv_len, HEAD_DIM)

  // The tile's keys in steps of STEP_KEYS: each block takes a contiguous range of steps and deals them out round-robin to its warps, so
  // that it reads one contiguous stretch of K and V. A block or warp may get none.
  const int hidden_steps = tile_first / STEP_KEYS;   // before every row's window
  const unsigned num_steps = (tile_keys + STEP_KEYS - 1) / STEP_KEYS - hidden_steps;
  const int first_step = hidden_steps + static_cast<int>(num_steps * split >> log2_splits) + warp;
  const int last_step = hidden_steps + (num_steps * (split + 1) >> log2_splits);
  const int warp_steps = max(0, (last_step - first_step + WARPS - 1) / WARPS);

  Step* ring = smem.ring[warp];
  const int copy_row = lane / ROW_CHUNKS, copy_chunk_id = lane % ROW_CHUNKS;
  const bool copies = COPY_LANES == WARP || lane < COPY_LANES;
  // This lane's chunk of the first row that it copies. Incrementing the pointers saves recomputing addresses.
  const long long first_copied = static_cast<long long>(first_step) * STEP_KEYS + copy_row;
  const element* K_source = K_gmem + first_copied * p.K.row_stride + copy_chunk_id * CHUNK;
  const element* V_source = V_gmem + first_copied * p.V.row_stride + copy_chunk_id * CHUNK;
  // Copies the warp's step `i` into buffer `slot` of its ring; does nothing past the last step.
  const auto fetch = [&](int i, int slot) {
    if (i >= warp_steps || !copies) return;
    const int num_keys = tile_keys - (first_step + i * WARPS) * STEP_KEYS;   // keys from the step's first one on
    const int hidden_keys = tile_first - (first_step + i * WARPS) * STEP_KEYS;   // before every row's window
#pragma unroll
    for (int row = 0; row < STEP_KEYS; row += COPY_ROWS) {
      const int place = swizzled(copy_row + row, copy_chunk_id);
      copy_chunk(ring[slot].K + place, K_source + row * p.K.row_stride,
                 copy_row + row < num_keys && (!WINDOW || copy_row + row >= hidden_keys));
    }
#pragma unroll
    for (int row = 0; row < STEP_KEYS; row += COPY_ROWS) {
      const int place = swizzled(copy_row + row, copy_chunk_id);
      copy_chunk(ring[slot].V + place, V_source + row * p.V.row_stride,
                 copy_row + row < num_keys && (!WINDOW || copy_row + row >= hidden_keys));
    }
    K_source += WARPS * STEP_KEYS * p.K.row_stride;
    V_source += WARPS * STEP_KEYS * p.V.row_stride;
  };

  ptx::griddepcontrol_wait();   // a preceding kernel may produce Q, K and V, and may still read what is overwritten as O
#pragma unroll
  for (int i = 0; i < PIPELINE_STAGES - 1; ++i) {
    fetch(i, i);
    ptx::cp_async_commit_group();
  }

  // This lane's ldmatrix offset in a 16 × 16 tile, in bytes.
  const unsigned of_rows = swizzled(lane_row_of_rows(lane), lane_chunk_of_rows(lane)) * sizeof(element);            // Q and V
  const unsigned of_columns = swizzled(lane_row_of_columns(lane), lane_chunk_of_columns(lane)) * sizeof(element);   // K
  const unsigned ring_at = warp * PIPELINE_STAGES * sizeof(Step);   // byte offset in shared memory
  const int lane_row = lane / ROW_LANES;              // first of the two accumulator rows that this lane holds
  const int lane_col = lane % ROW_LANES * 2;          // first of the two adjacent columns that it holds

  // The row maximum is taken over unscaled scores, so the scale must be positive: the sign of a negative scale is applied to Q, and for
  // a scale of 0, Q is set to 0.
  const float scale_log2 = p.scale_log2 == 0.0f ? 1.0f : fabsf(p.scale_log2);
  const unsigned sign = p.scale_log2 < 0.0f ? 0x80008000u : 0u;
  // Q is loaded directly into registers while the first keys are in flight: it is small, and every warp needs all of it. Rows past the
  // last are 0.
  unsigned Q_frag[D_STEPS][4] = {};
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = half * MATRIX + lane_row;
    if (row >= num_rows || p.scale_log2 == 0.0f) continue;
    const element* Q_gmem = row_of(p.Q, row) + lane_col;
#pragma unroll
    for (int i = 0; i < 2 * D_STEPS; ++i) Q_frag[i / 2][i % 2 * 2 + half] = read_pair(Q_gmem + i * MMA_N) ^ sign;
  }

  float O_reg[COL_BLOCKS][4] = {};              // (16, HEAD_DIM), over the warp's own keys
  float row_max[HALVES] = {LOWEST, LOWEST};     // reference of the exponentials, in log2 units; the same in the 4 lanes of a row
  float row_sum[HALVES] = {};                   // this lane's partial sum of 2^(score - row_max)
  int slot = 0;
  for (int i = 0; i < warp_steps; ++i) {
    ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this lane's chunks of this step have arrived
    __syncwarp();                                      // the whole warp's have, and all lanes are done with the buffer filled next
    fetch(i + PIPELINE_STAGES - 1, slot == 0 ? PIPELINE_STAGES - 1 : slot - 1);
    ptx::cp_async_commit_group();
    const unsigned K_at = ring_at + slot * sizeof(Step) + of_columns;
    const unsigned V_at = ring_at + slot * sizeof(Step) + STEP_BYTES + of_rows;
    slot = slot + 1 == PIPELINE_STAGES ? 0 : slot + 1;

    float S_reg[KEY_BLOCKS][4] = {};   // (16, STEP_KEYS) = Q · K transposed
#pragma unroll
    for (int d = 0; d < D_STEPS; ++d) {
#pragma unroll
      for (int j = 0; j < KEY_BLOCKS; j += 2) {
        unsigned K_frag[2][2];
        load_pair<false>(K_frag, shared_bytes + chunks_at(K_at, d) + j * MMA_N * ROW_BYTES);
        mma(S_reg[j], Q_frag[d], K_frag[0], element{});
        mma(S_reg[j + 1], Q_frag[d], K_frag[1], element{});
      }
    }

#if SOFTCAP
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; ++j) {
#pragma unroll
      for (float& score : S_reg[j]) score = capped(p, score);
    }
#endif

    const int step_key = (first_step + i * WARPS) * STEP_KEYS;
    if (step_key + STEP_KEYS > full_keys || WINDOW && step_key < full_first) {   // some key is masked for some row
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int q_row = q_row_of(e / 2 * MATRIX + lane_row), column = step_key + lane_col + e % 2;
        const int num_keys = visible_keys(p, q_row) - column;   // visible keys from this column on
        const int hidden_keys = first_key(p, q_row) - column;   // keys from this column on that precede the row's window
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; ++j) {
          if (j * MMA_N >= num_keys || WINDOW && j * MMA_N < hidden_keys) S_reg[j][e] = NEG_INF;
        }
      }
    }

    float new_max[HALVES];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float step_max = fmaxf(S_reg[0][2 * half], S_reg[0][2 * half + 1]);
#pragma unroll
      for (int j = 1; j < KEY_BLOCKS; ++j) step_max = fmaxf(step_max, fmaxf(S_reg[j][2 * half], S_reg[j][2 * half + 1]));
      new_max[half] = fmaxf(row_max[half], __fmul_rn(lanes_max<ROW_LANES>(step_max), scale_log2));
      grown |= new_max[half] > row_max[half] + LAZY_RESCALE;
    }
    if (__any_sync(FULL_WARP, grown)) {   // otherwise the old reference is kept
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const float rescale = ptx::ex2_approx_ftz(row_max[half] - new_max[half]);   // 0 for a row's first visible keys
        row_max[half] = new_max[half];
        row_sum[half] *= rescale;
#pragma unroll
        for (int j = 0; j < COL_BLOCKS; ++j) {
          O_reg[j][2 * half] *= rescale;
          O_reg[j][2 * half + 1] *= rescale;
        }
      }
    }

    // Two 8-column blocks of an accumulator have the register layout of one 16-column A fragment of the next GEMM.
    // A score is scaled and rounded as the maximum was, and only then is the maximum subtracted. With a fused multiply-add the rounding
    // error of the maximum would remain: thousands, in the exponent, for the largest inputs. The extra instruction is affordable here.
#pragma unroll
    for (int k = 0; k < STEP_KEYS / MMA_K; ++k) {
      unsigned P_frag[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* S = S_reg[2 * k + e / 2] + e % 2 * 2;
        const float low = ptx::ex2_approx_ftz(__fmul_rn(S[0], scale_log2) - row_max[e % 2]);
        const float high = ptx::ex2_approx_ftz(__fmul_rn(S[1], scale_log2) - row_max[e % 2]);
        row_sum[e % 2] += low + high;
        P_frag[e] = pack(low, high, element{});
      }
#pragma unroll
      for (int d = 0; d < D_STEPS; ++d) {
        unsigned V_frag[2][2];
        load_pair<true>(V_frag, shared_bytes + chunks_at(V_at, d) + k * MMA_K * ROW_BYTES);
        mma(O_reg[2 * d], P_frag, V_frag[0], element{});
        mma(O_reg[2 * d + 1], P_frag, V_frag[1], element{});
      }
    }
  }

  // Lets the next kernel's blocks launch wherever there is room; like this one, they wait at griddepcontrol.wait.
  if (ALLOW_LATE) ptx::griddepcontrol_launch_dependents();

  // The warps' partial results are combined in shared memory, in place of the rings.
  ptx::cp_async_wait_group<0>();   // nothing is pending: the loop waited for every fetched step; the rings are no longer used
  __syncthreads();                 // all warps are done with their rings
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int row = half * MATRIX + lane_row;
    const float sum = lanes_sum<ROW_LANES>(row_sum[half]);
    if (lane % ROW_LANES == 0) {
      smem.warp_max[warp][row] = row_max[half];
      smem.warp_sum[warp][row] = sum;
    }
#pragma unroll
    for (int j = 0; j < COL_BLOCKS; ++j) {
      *reinterpret_cast<float2*>(&smem.O_warp[warp][row][j * MMA_N + lane_col]) =
          make_float2(O_reg[j][2 * half], O_reg[j][2 * half + 1]);
    }
  }
  __syncthreads();       // all warps' partial results are in shared memory
  ptx::cluster_wait();   // all blocks of the cluster have started, long before this

  // Sends the block's partial result to the cluster: to each rank its Parts of every row, and to all ranks the maxima and sums.
  const auto block_max = [&](int row) {
    float max = smem.warp_max[0][row];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) max = fmaxf(max, smem.warp_max[w][row]);
    return max;
  };
  const int rank_parts = ROW_PARTS >> log2_splits;   // per row
  for (int i = threadIdx.x; i < num_rows * ROW_PARTS; i += THREADS) {
    const int row = i / ROW_PARTS, part_id = i % ROW_PARTS, rank = part_id * splits / ROW_PARTS;
    if (HEAD_DIM < ROW_PARTS * PART && part_id * PART >= HEAD_DIM) continue;
    const float max = block_max(row);
    Part sum = {};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const Part part = *reinterpret_cast<const Part*>(&smem.O_warp[w][row][part_id * PART]);
      const float weight = ptx::ex2_approx_ftz(smem.warp_max[w][row] - max);   // 0 if the warp saw no key, or 1 if no warp did
#pragma unroll
      for (int c = 0; c < PART; ++c) sum.x[c] = fmaf(weight, part.x[c], sum.x[c]);
    }
    *ptx::mapa(&smem.O_split[(split * TILE_Q + row) * rank_parts + part_id % rank_parts], rank) = sum;
  }
  for (int i = threadIdx.x; i < TILE_Q * splits; i += THREADS) {
    const int row = i % TILE_Q, rank = i / TILE_Q;
    const float max = block_max(row);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += smem.warp_sum[w][row] * ptx::ex2_approx_ftz(smem.warp_max[w][row] - max);
    *ptx::mapa(&smem.split_max[split][row], rank) = max;
    *ptx::mapa(&smem.split_sum[split][row], rank) = sum;
  }
  __syncwarp();          // cluster_arrive is .aligned, and the loops may have diverged
  ptx::cluster_arrive();
  ptx::cluster_wait();   // all data sent to this block has arrived; no block accesses another's memory from here on, so each may exit

  for (int i = threadIdx.x; i < num_rows * rank_parts; i += THREADS) {
    const int row = i * splits / ROW_PARTS, col = (split * rank_parts + i % rank_parts) * PART;
    if (HEAD_DIM < ROW_PARTS * PART && col >= HEAD_DIM) continue;
    float max = smem.split_max[0][row];
    for (int rank = 1; rank < splits; ++rank) max = fmaxf(max, smem.split_max[rank][row]);
    Part O = {};
    float sum = 0.0f;
#pragma unroll 4
    for (int rank = 0; rank < splits; ++rank) {
      const Part part = smem.O_split[rank * TILE_Q * rank_parts + i];
      const float weight = ptx::ex2_approx_ftz(smem.split_max[rank][row] - max);
      sum = fmaf(weight, smem.split_sum[rank][row], sum);
#pragma unroll
      for (int c = 0; c < PART; ++c) O.x[c] = fmaf(weight, part.x[c], O.x[c]);
    }
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    element* O_gmem = row_of(p.O, row) + col;
    if constexpr (ALIGNED) {
      *reinterpret_cast<uint2*>(O_gmem) = make_uint2(pack(O.x[0] * inv_sum, O.x[1] * inv_sum, element{}),
                                                     pack(O.x[2] * inv_sum, O.x[3] * inv_sum, element{}));
    } else {
#pragma unroll
      for (int c = 0; c < PART; ++c) O_gmem[c] = from_float<element>(O.x[c] * inv_sum);
    }
    if (p.LSE && col == 0) {
      const long long head = static_cast<long long>(batch) * p.q_heads + head_of_row(row);
      p.LSE[head * p.q_len + q_row_of(row)] = sum == 0.0f ? NEG_INF : max * LN_2 + logf(sum);
    }
  }
}
