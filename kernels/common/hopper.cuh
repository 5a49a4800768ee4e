// Shared by the Hopper stages: tiles loaded by TMA, wgmma GEMMs, and the softmax on their accumulator registers.
//
// A tile of ROWS rows of Q, K or V is stored in shared memory as panels of 64 columns, [HEAD_DIM / 64][ROWS][64]: a row of a panel is
// 128 bytes, one swizzle span, and a pattern of 8 rows is aligned to 1024 bytes. If HEAD_DIM is an odd multiple of 32, panels have
// 32 columns, spans 64 bytes and patterns 512 bytes.
// Of 64 rows of scores or output, lane l of warp w of the warpgroup holds (see wgmma.cuh): x[4·j + 2·h + e] is row
// 16·w + l / 4 + 8·h, column 8·j + 2·(l % 4) + e. So a lane holds parts of two rows, h = 0 and 1, and 4 lanes share a row.
#pragma once
#include "attention.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "reduce.cuh"
#include "tile.cuh"

// One map per tensor, of dimensions (PANEL, length, HEAD_DIM / PANEL, heads, batch), innermost first, made by run/arguments.py. The box of
// Q has LaunchShape's box_q rows, that of K and V box_kv rows (and panels_kv panels, or all), that of O WARP_ROWS.
// With VARLEN, a copy of a sequence's last rows must not touch the next sequence, but no dimension of a plain map ends there. So the length
// is the total of all sequences, the last dimension runs over rows too, and the map starts `total` rows before the tensor: row r of a
// sequence that ends before row `end` has the coordinates total - length + r and end. The row after its last, r = length, is then out of
// bounds: it is read as 0 and not written. A copy must include at least one row of the sequence: one without any reads at the map's
// start, on an H200 at least, where nothing need be mapped.
struct AttentionMaps {
  ptx::TensorMap Q, K, V, O;
};

constexpr int WARPGROUP = 128;             // threads
constexpr int WARPGROUP_WARPS = 4;
constexpr int WGMMA_ROWS = 64;             // of A and D
constexpr int WARP_ROWS = 16;              // of those, per warp; also the rows per TMA store of O
constexpr int WGMMA_STEP = 16;             // reduction dimension (K) of one instruction
constexpr int PANEL = HEAD_DIM % 64 == 0 ? 64 : 32;   // columns
constexpr int PANEL_CHUNKS = PANEL / CHUNK;           // 16-byte chunks of a panel's row, which the swizzle permutes
constexpr int PANEL_ROW_BYTES = PANEL * sizeof(element);
constexpr int PATTERN_BYTES = 8 * PANEL_ROW_BYTES;
constexpr ptx::Swizzle PANEL_SWIZZLE = PANEL == 64 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
static_assert(HEAD_DIM % PANEL == 0, "HEAD_DIM must be a multiple of 32: tiles are panels of 64 or 32 columns");

constexpr int SM_REGISTERS = 65536;
constexpr int BLOCK_SMEM_BYTES = 232448;   // maximum per block

template <int ROWS>
constexpr unsigned TILE_BYTES = ROWS * HEAD_DIM * sizeof(element);

// --- tiles into shared memory ------------------------------------------------------------------------------------------------

// Offset, in elements, of 8 elements of a tile: columns 8·chunk to 8·chunk + 7 of `row`.
template <int ROWS>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  constexpr int SPAN_ROWS = 8 / PANEL_CHUNKS;   // rows per 128 bytes, whose chunks are permuted alike
  return (chunk / PANEL_CHUNKS * ROWS + row) * PANEL + ((chunk % PANEL_CHUNKS) ^ (row / SPAN_ROWS % PANEL_CHUNKS)) * CHUNK;
}

// One head of Q, K or V as the source of tile copies.
struct Source {
  const ptx::TensorMap* map;   // used if rows are 16-byte aligned
  const TensorView* view;      // used if they are not
  int length;                  // rows
  int head;
  int batch;
  int map_row = 0;             // the map's coordinate of the first row
};

// Number of arrivals that a barrier expects from NUM_THREADS threads that fill tiles: with TMA, one thread issues all copies.
template <int NUM_THREADS>
constexpr int FILL_ARRIVALS = ALIGNED ? 1 : NUM_THREADS;

// Fills tiles whose completion one barrier signals: fill_begin, then fill for each tile, then fill_end. If rows are aligned, only
// `thread` 0 of the NUM_THREADS threads calls these; it issues TMA loads and returns. Otherwise all of them call these, and copy.
__device__ __forceinline__ void fill_begin(ptx::Mbarrier* full, unsigned bytes) {
  if constexpr (ALIGNED) ptx::mbarrier_arrive_expect_tx(full, bytes);
}

// Rows [first_row, first_row + ROWS); rows past the end become 0, because a masked key still takes part in the PV GEMM.
template <int ROWS, int NUM_THREADS>
__device__ __forceinline__ void fill(element* tile_smem, const Source& source, int first_row, ptx::Mbarrier* full, int thread) {
  if constexpr (ALIGNED) {
    const int row = VARLEN ? min(first_row, source.length - 1) : first_row;   // see AttentionMaps; only of Q a tile may begin past the end
    ptx::cp_async_bulk_tensor_5d_load(tile_smem, source.map, full, 0, source.map_row + row, 0, source.head, source.batch);
  } else {
    const element* head_gmem = head_of(*source.view, source.batch, source.head);
    for (int i = thread; i < ROWS * (HEAD_DIM / CHUNK); i += NUM_THREADS) {
      const int row = i / (HEAD_DIM / CHUNK), chunk = i % (HEAD_DIM / CHUNK);
      Chunk copied = {};
      if (first_row + row < source.length) {
        copied = read_chunk(head_gmem + (first_row + row) * source.view->row_stride + chunk * CHUNK);
      }
      *reinterpret_cast<Chunk*>(tile_smem + tile_offset<ROWS>(row, chunk)) = copied;
    }
  }
}

__device__ __forceinline__ void fill_end(ptx::Mbarrier* full) {
  if constexpr (!ALIGNED) {
    ptx::fence_proxy_async_shared();   // makes the ordinary stores visible to the tensor cores (async proxy)
    ptx::mbarrier_arrive(full);
  }
}

// --- GEMMs -------------------------------------------------------------------------------------------------------------------
// Adding to a descriptor advances its start address, in units of 16 bytes. The caller executes wgmma_fence before, and commits and
// waits after.

using Descriptor = unsigned long long;

// Of Q or K (K-major): the tile's rows are the rows of A or the columns of B, contiguous along the reduction dimension.
__device__ __forceinline__ Descriptor rows_descriptor(const element* tile_smem) {
  return ptx::make_descriptor(tile_smem, 0, PATTERN_BYTES, PANEL_SWIZZLE);
}

// Of V (MN-major): contiguous along the columns of the output; one panel is KEYS rows after the previous one.
template <int KEYS>
__device__ __forceinline__ Descriptor columns_descriptor(const element* tile_smem) {
  return ptx::make_descriptor(tile_smem, KEYS * PANEL_ROW_BYTES, PATTERN_BYTES, PANEL_SWIZZLE);
}

__device__ constexpr Descriptor descriptor_step(int bytes) { return bytes / 16; }

// S (64, KEYS) = Q (64, HEAD_DIM) · K (KEYS, HEAD_DIM) transposed.
template <int KEYS>
__device__ __forceinline__ void multiply_QK(float (&S_reg)[KEYS / 2], Descriptor Q_desc, Descriptor K_desc) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += WGMMA_STEP) {
    const int panel = d / PANEL, column_bytes = d % PANEL * sizeof(element);
    ptx::wgmma_ss<KEYS, element>(S_reg, Q_desc + descriptor_step(panel * WGMMA_ROWS * PANEL_ROW_BYTES + column_bytes),
                                 K_desc + descriptor_step(panel * KEYS * PANEL_ROW_BYTES + column_bytes), d > 0);
  }
}

// Loads a warp's 16 rows of Q into registers: the fragment of the 16 columns from 16·k on, or (load_Q) those of all columns.
__device__ __forceinline__ void load_Q_part(unsigned (&fragment)[4], const element* tile_smem, int k, int warp, int lane) {
  const int row = warp * 16 + lane_row_of_rows(lane), chunk = k * (WGMMA_STEP / CHUNK) + lane_chunk_of_rows(lane);
  ptx::ldmatrix_x4(fragment, tile_smem + tile_offset<WGMMA_ROWS>(row, chunk));
}
__device__ __forceinline__ void load_Q(unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4], const element* tile_smem, int warp, int lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / WGMMA_STEP; ++k) load_Q_part(Q_reg[k], tile_smem, k, warp, lane);
}

// The same with Q in registers, one fragment per 16 columns.
template <int KEYS>
__device__ __forceinline__ void multiply_QK(float (&S_reg)[KEYS / 2], const unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4],
                                            Descriptor K_desc) {
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += WGMMA_STEP) {
    const int panel = d / PANEL, column_bytes = d % PANEL * sizeof(element);
    ptx::wgmma_rs<KEYS, element>(S_reg, Q_reg[d / WGMMA_STEP],
                                 K_desc + descriptor_step(panel * KEYS * PANEL_ROW_BYTES + column_bytes), d > 0);
  }
}

// O (64, HEAD_DIM) += P (64, KEYS) · V (KEYS, HEAD_DIM).
template <int KEYS>
__device__ __forceinline__ void multiply_PV(float (&O_reg)[HEAD_DIM / 2], const unsigned (&P_reg)[KEYS / WGMMA_STEP][4],
                                            Descriptor V_desc) {
#pragma unroll
  for (int k = 0; k < KEYS; k += WGMMA_STEP) {
    ptx::wgmma_rs<HEAD_DIM, element, ptx::Major::MN>(O_reg, P_reg[k / WGMMA_STEP],
                                                     V_desc + descriptor_step(k * PANEL_ROW_BYTES), true);
  }
}

// --- softmax -----------------------------------------------------------------------------------------------------------------

// Softmax state of a thread's two rows.
struct RowState {
  float max[HALVES] = {NEG_INF, NEG_INF};   // largest score so far, in units of log2; the same in the 4 lanes of a row
  float sum[HALVES] = {};                   // this lane's partial sum of 2^(score - max)
};

// Turns the tile's scores into probabilities 2^(score - max), and sets `rescale` to the factors for earlier sums and outputs.
// If `masked`, row h sees columns below num_keys[h], counted from this lane's first column. Otherwise nothing is compared, and one
// FMA both scales a score and subtracts the maximum, which requires a positive scale.
template <int KEYS>
__device__ __forceinline__ void softmax(float (&S_reg)[KEYS / 2], RowState& rows, float (&rescale)[HALVES], float scale_log2,
                                        bool masked, const int (&num_keys)[HALVES]) {
  if (masked) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      S_reg[i] = i / 4 * 8 + i % 2 < num_keys[i / 2 % 2] ? S_reg[i] * scale_log2 : NEG_INF;
    }
  }
  const float scale = masked ? 1.0f : scale_log2;
  float minus_reference[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float lane_max = NEG_INF;
#pragma unroll
    for (int i = 2 * h; i < KEYS / 2; i += 4) lane_max = fmaxf(lane_max, fmaxf(S_reg[i], S_reg[i + 1]));
    const float new_max = fmaxf(rows.max[h], lanes_max<ROW_LANES>(lane_max) * scale);
    const float reference = new_max == NEG_INF ? 0.0f : new_max;      // no visible key yet: -inf - -inf would be NaN
    rescale[h] = ptx::ex2_approx_ftz(rows.max[h] - reference);        // 0 for a row's first visible keys
    rows.max[h] = new_max;
    rows.sum[h] *= rescale[h];
    minus_reference[h] = -reference;
  }
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) {
    const int h = i / 2 % 2;
    S_reg[i] = ptx::ex2_approx_ftz(fmaf(S_reg[i], scale, minus_reference[h]));
    S_reg[i + 1] = ptx::ex2_approx_ftz(fmaf(S_reg[i + 1], scale, minus_reference[h]));
    rows.sum[h] += S_reg[i] + S_reg[i + 1];
  }
}

// Probabilities as A of the PV GEMM: once rounded, the accumulator elements that a thread holds are its elements of A.
template <int KEYS>
__device__ __forceinline__ void round_P(unsigned (&P_reg)[KEYS / WGMMA_STEP][4], const float (&S_reg)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) P_reg[i / 8][i / 2 % 4] = pack(S_reg[i], S_reg[i + 1], element{});
}

// Rounds the thread's row h only. Not a parameter of round_P: another signature would change the code digests in the records.
template <int KEYS>
__device__ __forceinline__ void round_rows(unsigned (&P_reg)[KEYS / WGMMA_STEP][4], const float (&S_reg)[KEYS / 2], int h) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) {
    if (i / 2 % 2 == h) P_reg[i / 8][i / 2 % 4] = pack(S_reg[i], S_reg[i + 1], element{});
  }
}

__device__ __forceinline__ void scale_O(float (&O_reg)[HEAD_DIM / 2], const float (&factor)[HALVES]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) O_reg[i] *= factor[i / 2 % 2];
}

// --- output ------------------------------------------------------------------------------------------------------------------

// Finishes a warp's 16 rows before they are stored: divides O by `weight`, the sum of a row's probabilities, and writes the
// log-sum-exp, from `sum`, if requested. Both are sums over the whole row, identical in its 4 lanes.
__device__ __forceinline__ void finish_rows(const AttentionParams& p, float (&O_reg)[HEAD_DIM / 2], const RowState& rows,
                                            const float (&weight)[HALVES], const float (&sum)[HALVES], int lane, int warp_q_row,
                                            int head, int batch) {
  float inv_weight[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    inv_weight[h] = weight[h] == 0.0f ? 0.0f : 1.0f / weight[h];   // 0 if the row has no visible key
    const int q_row = warp_q_row + lane / ROW_LANES + 8 * h;
    if (p.LSE && lane % ROW_LANES == 0 && q_row < p.q_len) {
      const long long place = lse_row(p, batch, head, q_row);
      p.LSE[place] = sum[h] == 0.0f ? NEG_INF : rows.max[h] * LN_2 + logf(sum[h]);
    }
  }
  scale_O(O_reg, inv_weight);
}
__device__ __forceinline__ void finish_rows(const AttentionParams& p, float (&O_reg)[HEAD_DIM / 2], const RowState& rows, int lane,
                                            int warp_q_row, int head, int batch) {
  const float sum[HALVES] = {lanes_sum<ROW_LANES>(rows.sum[0]), lanes_sum<ROW_LANES>(rows.sum[1])};
  finish_rows(p, O_reg, rows, sum, sum, lane, warp_q_row, head, batch);
}

// Rounds a warp's 16 rows of O into a tile of ROWS rows, from `first_row` on.
template <int ROWS>
__device__ __forceinline__ void stage_rows(element* tile_smem, const float (&O_reg)[HEAD_DIM / 2], int first_row, int lane) {
  // Lane l addresses row l % 8 of matrix l / 8: matrices 0 and 1 are the halves of 16 rows, 2 and 3 the next 8 columns.
  const int matrix_row = first_row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack(O_reg[d / 2 + 2 * i], O_reg[d / 2 + 2 * i + 1], element{});
    ptx::stmatrix_x4(tile_smem + tile_offset<ROWS>(matrix_row, d / CHUNK + lane / 16), pairs);
  }
}

// Stores a warp's 16 rows by way of shared memory, so that whole cache lines are written. `tile_smem` is [HEAD_DIM / PANEL][64][PANEL];
// the warp uses its 16 rows from 16·warp on, which no other warp may use.
__device__ __forceinline__ void write_rows(const AttentionParams& p, const float (&O_reg)[HEAD_DIM / 2], element* tile_smem,
                                           int warp, int lane, int first_q_row, int head, int batch) {
  const int tile_row = warp * WARP_ROWS;
  stage_rows<WGMMA_ROWS>(tile_smem, O_reg, tile_row, lane);
  __syncwarp();   // the warp's rows are complete
  element* O_gmem = head_of(p.O, batch, head);   // (q_len, HEAD_DIM)
  constexpr int ROW_CHUNKS = HEAD_DIM / CHUNK, ROWS_AT_ONCE = WARP / ROW_CHUNKS;
#pragma unroll
  for (int i = 0; i < WARP_ROWS; i += ROWS_AT_ONCE) {
    const int row = tile_row + i + lane / ROW_CHUNKS, chunk = lane % ROW_CHUNKS;
    const bool needed = WARP % ROW_CHUNKS == 0 || lane < ROWS_AT_ONCE * ROW_CHUNKS;   // if ROW_CHUNKS is not a power of two
    if (needed && first_q_row + row < p.q_len) {   // read here, not earlier: otherwise the compiler stores 4 bytes at a time
      write_chunk(O_gmem + (first_q_row + row) * p.O.row_stride + chunk * CHUNK,
                  *reinterpret_cast<const Chunk*>(tile_smem + tile_offset<WGMMA_ROWS>(row, chunk)));
    }
  }
  __syncwarp();   // the warp's rows in shared memory may be overwritten
}
__device__ __forceinline__ void write_output(const AttentionParams& p, float (&O_reg)[HEAD_DIM / 2], const RowState& rows,
                                             element* tile_smem, int warp, int lane, int first_q_row, int head, int batch) {
  finish_rows(p, O_reg, rows, lane, first_q_row + warp * WARP_ROWS, head, batch);
  write_rows(p, O_reg, tile_smem, warp, lane, first_q_row, head, batch);
}

// The same by a TMA store, which runs asynchronously and skips rows past the end; only if rows are aligned. `rows_smem` belongs to
// the warp, [HEAD_DIM / PANEL][16][PANEL]. The warp must call output_copied before it exits.
// `warp_q_row` and `batch` are coordinates of the map; VARLEN also needs the map's length.
__device__ __forceinline__ void copy_rows(const AttentionMaps& maps, const float (&O_reg)[HEAD_DIM / 2], element* rows_smem, int lane,
                                          int warp_q_row, int head, int batch, int map_length = 0) {
  if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();   // the previous store has read the buffer
  __syncwarp();
  stage_rows<WARP_ROWS>(rows_smem, O_reg, 0, lane);
  ptx::fence_proxy_async_shared();   // makes the ordinary stores visible to the TMA store (async proxy)
  __syncwarp();                      // every lane has executed the fence
#if VARLEN
  if (warp_q_row >= map_length) lane = WARP;   // no row belongs to the sequence (see AttentionMaps): no lane stores
#endif
  if (lane == 0) {
    ptx::cp_async_bulk_tensor_5d_store(&maps.O, rows_smem, 0, warp_q_row, 0, head, batch);
    ptx::cp_async_bulk_commit_group();
  }
}
__device__ __forceinline__ void copy_output(const AttentionParams& p, const AttentionMaps& maps, float (&O_reg)[HEAD_DIM / 2],
                                            const RowState& rows, element* rows_smem, int lane, int warp_q_row, int head, int batch) {
  finish_rows(p, O_reg, rows, lane, warp_q_row, head, batch);
  copy_rows(maps, O_reg, rows_smem, lane, warp_q_row, head, batch);
}
__device__ __forceinline__ void output_copied(int lane) {
  if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();   // shared memory is released when the block exits
}
