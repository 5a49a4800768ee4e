// What Hopper stages share: tiles that arrive by TMA loads, GEMMs by wgmma, and the softmax in their registers.
//
// A tile of ROWS rows of Q, K or V lies in shared memory as panels of 64 columns, [HEAD_DIM / 64][ROWS][64]: a panel's row is
// 128 bytes, one span of the swizzle, and a pattern of 8 rows starts on 1024 bytes. Where HEAD_DIM is an odd multiple of 32, panels
// have 32 columns, a span 64 bytes and a pattern 512.
// A thread holds of 64 rows of scores or output, for warp w of the warpgroup and lane l (see wgmma.cuh): x[4·j + 2·h + e] is
// row 16·w + l / 4 + 8·h, column 8·j + 2·(l % 4) + e. So it meets two rows, h = 0 and 1, and 4 lanes share a row.
#pragma once
#include "attention.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "ptx_sm90.cuh"
#include "reduce.cuh"
#include "tile.cuh"

// A map per tensor, of dimensions (PANEL, length, HEAD_DIM / PANEL, heads, batch), innermost first. run/arguments.py makes them: a copy
// of Q has LaunchShape's box_q rows, one of K or V box_kv (and panels_kv panels, or all), one of O WARP_ROWS.
// With VARLEN no dimension ends where a sequence does, and a copy of its last rows must not touch the next one's. So the length is the
// total of all sequences, the last dimension runs over rows too, and the map starts `total` rows before the tensor: row r of a sequence
// that ends before row `end` has the coordinates total - length + r and end. Its row past the last, r = length, is past the map's: it
// is read as 0, and not written. A copy has at least one row of the sequence: one that has none reads where the map starts, on an
// H200 at least, and nothing need be mapped there.
struct AttentionMaps {
  ptx::TensorMap Q, K, V, O;
};

constexpr int WARPGROUP = 128;             // threads
constexpr int WARPGROUP_WARPS = 4;
constexpr int WGMMA_ROWS = 64;             // of A and D
constexpr int WARP_ROWS = 16;              // of those, a warp's; rows a copy of O
constexpr int WGMMA_STEP = 16;             // of the dimension summed over, an instruction
constexpr int PANEL = HEAD_DIM % 64 == 0 ? 64 : 32;   // columns
constexpr int PANEL_CHUNKS = PANEL / CHUNK;           // that a swizzle exchanges
constexpr int PANEL_ROW_BYTES = PANEL * sizeof(element);
constexpr int PATTERN_BYTES = 8 * PANEL_ROW_BYTES;
constexpr ptx::Swizzle PANEL_SWIZZLE = PANEL == 64 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
static_assert(HEAD_DIM % PANEL == 0, "HEAD_DIM must be a multiple of 32: tiles are panels of 64 or 32 columns");

constexpr int SM_REGISTERS = 65536;
constexpr int BLOCK_SMEM_BYTES = 232448;   // that a block may have

template <int ROWS>
constexpr unsigned TILE_BYTES = ROWS * HEAD_DIM * sizeof(element);

// --- tiles into shared memory ------------------------------------------------------------------------------------------------

// Element offset of 8 elements of a tile: column 8·chunk of `row`.
template <int ROWS>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  constexpr int SPAN_ROWS = 8 / PANEL_CHUNKS;   // rows in 128 bytes, whose chunks are exchanged alike
  return (chunk / PANEL_CHUNKS * ROWS + row) * PANEL + ((chunk % PANEL_CHUNKS) ^ (row / SPAN_ROWS % PANEL_CHUNKS)) * CHUNK;
}

// One head of Q, K or V as the copies see it.
struct Source {
  const ptx::TensorMap* map;   // where rows are 16-byte aligned
  const TensorView* view;      // where they are not
  int length;                  // rows
  int head;
  int batch;
  int map_row = 0;             // the map's coordinate of the first row
};

// How many arrivals a barrier expects of NUM_THREADS threads that fill tiles: with tensor copies one thread does it all.
template <int NUM_THREADS>
constexpr int FILL_ARRIVALS = ALIGNED ? 1 : NUM_THREADS;

// Filling tiles whose arrival one barrier announces: fill_begin, fill for each tile, fill_end. Of NUM_THREADS threads, `thread` 0
// alone calls them where rows are aligned; it starts copies and returns. Elsewhere all call them and copy by hand.
__device__ __forceinline__ void fill_begin(ptx::Mbarrier* full, unsigned bytes) {
  if constexpr (ALIGNED) ptx::mbarrier_arrive_expect_tx(full, bytes);
}

// Rows [first_row, first_row + ROWS); those past the end become 0, because a key that is masked still meets the product with V.
template <int ROWS, int NUM_THREADS>
__device__ __forceinline__ void fill(element* tile_smem, const Source& source, int first_row, ptx::Mbarrier* full, int thread) {
  if constexpr (ALIGNED) {
    const int row = VARLEN ? min(first_row, source.length - 1) : first_row;   // AttentionMaps; rows past the end may have anything
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
    ptx::fence_proxy_async_shared();   // the tensor cores will read what was written by plain stores
    ptx::mbarrier_arrive(full);
  }
}

// --- GEMMs -------------------------------------------------------------------------------------------------------------------
// What is added to a descriptor moves its start, in units of 16 bytes. The caller fences before, and commits and waits
// after.

using Descriptor = unsigned long long;

// Of Q or K: the rows are the rows (columns) of the product, and contiguous along the dimension summed over.
__device__ __forceinline__ Descriptor rows_descriptor(const element* tile_smem) {
  return ptx::make_descriptor(tile_smem, 0, PATTERN_BYTES, PANEL_SWIZZLE);
}

// Of V: contiguous along the columns of the product; from one panel to the next are KEYS rows.
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

// A warp's 16 rows of Q to its registers: a fragment for 16 columns from 16·k on, and one for each 16 columns.
__device__ __forceinline__ void load_Q_part(unsigned (&fragment)[4], const element* tile_smem, int k, int warp, int lane) {
  const int row = warp * 16 + lane_row_of_rows(lane), chunk = k * (WGMMA_STEP / CHUNK) + lane_chunk_of_rows(lane);
  ptx::ldmatrix_x4(fragment, tile_smem + tile_offset<WGMMA_ROWS>(row, chunk));
}
__device__ __forceinline__ void load_Q(unsigned (&Q_reg)[HEAD_DIM / WGMMA_STEP][4], const element* tile_smem, int warp, int lane) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / WGMMA_STEP; ++k) load_Q_part(Q_reg[k], tile_smem, k, warp, lane);
}

// The same with Q in registers, a fragment for each 16 columns.
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

// Of a thread's two rows.
struct RowState {
  float max[HALVES] = {NEG_INF, NEG_INF};   // largest score so far, in units of log2; the same in the 4 lanes of a row
  float sum[HALVES] = {};                   // this lane's share of the sum of 2^(score - max)
};

// The tile's scores become probabilities 2^(score - max), and `rescale` what earlier sums and outputs must be multiplied by.
// Where `masked`, row h sees columns below num_keys[h], counted from this lane's first; elsewhere no comparison is made, and one
// multiply-add both scales a score and subtracts the maximum, for which the scale must be positive.
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
    const float reference = new_max == NEG_INF ? 0.0f : new_max;      // no key seen yet: -inf - -inf would be NaN
    rescale[h] = ptx::ex2_approx_ftz(rows.max[h] - reference);        // 0 at the first keys
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

// Probabilities as A of the PV GEMM: what a thread holds of D is what it must hold of A, once rounded.
template <int KEYS>
__device__ __forceinline__ void round_P(unsigned (&P_reg)[KEYS / WGMMA_STEP][4], const float (&S_reg)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) P_reg[i / 8][i / 2 % 4] = pack(S_reg[i], S_reg[i + 1], element{});
}

// Those of the thread's row h alone. Not an argument of round_P: another signature would change the digests that records name.
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

// What a warp's 16 rows need before they leave: O is divided by `weight`, the sum of a row's probabilities; the log-sum-exp, from
// `sum`, is written where it is wanted. Both are sums over the whole row, the same in its 4 lanes.
__device__ __forceinline__ void finish_rows(const AttentionParams& p, float (&O_reg)[HEAD_DIM / 2], const RowState& rows,
                                            const float (&weight)[HALVES], const float (&sum)[HALVES], int lane, int warp_q_row,
                                            int head, int batch) {
  float inv_weight[HALVES];
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    inv_weight[h] = weight[h] == 0.0f ? 0.0f : 1.0f / weight[h];   // 0 when the row sees no key
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

// Rounds them into a tile of ROWS rows, from `first_row` on.
template <int ROWS>
__device__ __forceinline__ void stage_rows(element* tile_smem, const float (&O_reg)[HEAD_DIM / 2], int first_row, int lane) {
  // Lane l names row l % 8 of matrix l / 8: the two halves of 16 rows, then the next 8 columns.
  const int matrix_row = first_row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack(O_reg[d / 2 + 2 * i], O_reg[d / 2 + 2 * i + 1], element{});
    ptx::stmatrix_x4(tile_smem + tile_offset<ROWS>(matrix_row, d / CHUNK + lane / 16), pairs);
  }
}

// A warp's 16 rows, by way of shared memory, so that whole lines leave. `tile_smem` is [HEAD_DIM / PANEL][64][PANEL], of which the
// warp uses rows 16·warp onwards and nobody else may.
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
    const bool needed = WARP % ROW_CHUNKS == 0 || lane < ROWS_AT_ONCE * ROW_CHUNKS;   // where rows have no power of two of chunks
    if (needed && first_q_row + row < p.q_len) {   // read here, not before: else the compiler stores 4 bytes at a time
      write_chunk(O_gmem + (first_q_row + row) * p.O.row_stride + chunk * CHUNK,
                  *reinterpret_cast<const Chunk*>(tile_smem + tile_offset<WGMMA_ROWS>(row, chunk)));
    }
  }
  __syncwarp();   // the rows are free again
}
__device__ __forceinline__ void write_output(const AttentionParams& p, float (&O_reg)[HEAD_DIM / 2], const RowState& rows,
                                             element* tile_smem, int warp, int lane, int first_q_row, int head, int batch) {
  finish_rows(p, O_reg, rows, lane, first_q_row + warp * WARP_ROWS, head, batch);
  write_rows(p, O_reg, tile_smem, warp, lane, first_q_row, head, batch);
}

// The same by a TMA store, which runs on while the warp does something else and leaves out rows past the end. Where rows are
// aligned alone. `rows_smem` is the warp's own, [HEAD_DIM / PANEL][16][PANEL]. The warp calls output_copied before it ends.
// `warp_q_row` and `batch` are the map's coordinates, and VARLEN needs the map's length.
__device__ __forceinline__ void copy_rows(const AttentionMaps& maps, const float (&O_reg)[HEAD_DIM / 2], element* rows_smem, int lane,
                                          int warp_q_row, int head, int batch, int map_length = 0) {
  if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();   // the rows before have been read
  __syncwarp();
  stage_rows<WARP_ROWS>(rows_smem, O_reg, 0, lane);
  ptx::fence_proxy_async_shared();   // the copy will read what was written by plain stores
  __syncwarp();                      // of every lane
#if VARLEN
  if (warp_q_row >= map_length) lane = WARP;   // no row is the sequence's (AttentionMaps): nobody stores
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
  if (lane == 0) ptx::cp_async_bulk_wait_group_read<0>();   // shared memory is given back when the block ends
}
