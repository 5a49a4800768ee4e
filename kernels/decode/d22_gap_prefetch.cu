// d22_gap_prefetch: the first steps beyond the ring are prefetched into the L2 cache. Parent: d19_batched_polls.
// Question: at the start of a call all warps fill their rings at once, and issue no more copies until the first keys arrive. How long does
//           the memory idle in between, and what is gained if it does not?
// Change: after its first copies a warp prefetches its next steps into the L2 cache, at most two and at most an eighth of its steps.
//         Nothing is prefetched before the preceding kernel has ended.
// Layout: as the parent's. Requires: as the parent.
#include "attention.cuh"
#include "mma.cuh"
#include "ptx_sm90.cuh"
#include "reduce.cuh"
#include "shares.cuh"
#include "softcap.cuh"
#include "tile.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_Q = MMA_M;                        // packed rows: M of one MMA; a larger group takes more tiles
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
constexpr int ROW_PARTS = HEAD_DIM / PART;
constexpr int FEW_PARTS = 4, MANY_PARTS = HEAD_DIM < 256 ? 16 : 4;   // partial results of a tile whose loads are in flight together
constexpr bool KEEP_TILES_WHOLE = WHOLE_TILES && HEAD_DIM < 256;   // at head dim 256 no registers are left for it
constexpr float LOWEST = -0x1p100f;                  // below any realistic score: reference of a warp or block with no visible key
static_assert(STEP_KEYS % MMA_K == 0, "STEP_KEYS must be a multiple of 16");
static_assert(PIPELINE_STAGES >= 2, "a warp copies into one buffer while it reads another");
static_assert(SPLITS >= 1, "SPLITS must be a positive number of blocks");
static_assert(COMBINERS >= 0, "COMBINERS is a number of blocks");
static_assert(LEAST_PARTS >= 2, "LEAST_PARTS is a number of partial results, at least 2");
static_assert(PREFETCH_STEPS >= 0, "PREFETCH_STEPS must not be negative");

struct alignas(16) Part {
  float x[PART];
};

// One stage of a warp's ring: STEP_KEYS rows of K, then STEP_KEYS rows of V.
struct Step {
  alignas(128) element K[STEP_KEYS * HEAD_DIM];
  alignas(128) element V[STEP_KEYS * HEAD_DIM];
};

// A block's partial result of a tile, in the workspace. Each word is the complement of a float, or 0 before it is written: a complement
// is never 0, as arithmetic never yields the all-ones NaN. Each Part has its own maximum and sum, so that one thread reads and clears it.
struct TilePart {
  uint4 O[TILE_Q * ROW_PARTS];   // not yet divided by the sum
  uint2 max_sum[TILE_Q * ROW_PARTS];
};

struct SharedStorage {
  Step ring[WARPS][PIPELINE_STAGES];   // at the end of a tile, the buffer read last holds the warp's output, not yet divided by its sum
  float warp_max[WARPS][TILE_Q], warp_sum[WARPS][TILE_Q];
  int warp_slot[WARPS];                // index of that buffer
  int last_of;                         // tile that other blocks began and this block ends and combines; -1: none
  int first_block;                     // first block with a partial result of that tile
};
static_assert(sizeof(float[TILE_Q][HEAD_DIM]) <= sizeof(Step), "a warp's output must fit into one buffer of its ring");

// One Part of a tile's output, not yet divided by the sum, with the reference and the sum of its row.
struct Sum {
  Part O;
  float max, sum;
};

// Sums Part i of a tile's partial results from number `from` to `end`, COUNT loads in flight at a time, and resets each to 0 for the next
// launch. `first_block` wrote number 0. The order of the additions is fixed, whichever arrives last: every call gives the same bits.
template <int COUNT>
__device__ __forceinline__ Sum add_up(TilePart* parts, int first_block, int from, int end, int i) {
  float max = LOWEST, sum = 0.0f;
  Part O = {};
  for (; from < end; from += COUNT) {
    uint4 part[COUNT];
    uint2 max_sum[COUNT];
    const auto of_block = [&](int k) -> TilePart& { return parts[2 * (first_block + from + k) + (from + k == 0)]; };
    const auto read = [&](int k) {
      part[k] = ptx::ld_relaxed_gpu(&of_block(k).O[i]);
      max_sum[k] = ptx::ld_relaxed_gpu(&of_block(k).max_sum[i]);
    };
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      if (from + k < end) {
        read(k);
      } else {
        part[k] = make_uint4(~0u, ~0u, ~0u, ~0u), max_sum[k] = make_uint2(~__float_as_uint(LOWEST), ~0u);   // zeros
      }
    }
    // Those that have not arrived are read again together, so that each round takes one trip to the L2 cache.
    for (bool missing = true; missing;) {
      missing = false;
#pragma unroll
      for (int k = 0; k < COUNT; ++k) {
        if (part[k].x && part[k].y && part[k].z && part[k].w && max_sum[k].x && max_sum[k].y) continue;
        read(k);
        missing = true;
      }
    }
    float new_max = max;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      if (from + k < end) {
        ptx::st_relaxed_gpu(&of_block(k).O[i], make_uint4(0, 0, 0, 0));
        ptx::st_relaxed_gpu(&of_block(k).max_sum[i], make_uint2(0, 0));
      }
      new_max = fmaxf(new_max, __uint_as_float(~max_sum[k].x));
    }
    const float rescale = ptx::ex2_approx_ftz(max - new_max);
    max = new_max, sum *= rescale;
#pragma unroll
    for (int c = 0; c < PART; ++c) O.x[c] *= rescale;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const float weight = ptx::ex2_approx_ftz(__uint_as_float(~max_sum[k].x) - max);
      sum = fmaf(weight, __uint_as_float(~max_sum[k].y), sum);
      O.x[0] = fmaf(weight, __uint_as_float(~part[k].x), O.x[0]), O.x[1] = fmaf(weight, __uint_as_float(~part[k].y), O.x[1]);
      O.x[2] = fmaf(weight, __uint_as_float(~part[k].z), O.x[2]), O.x[3] = fmaf(weight, __uint_as_float(~part[k].w), O.x[3]);
    }
  }
  return {O, max, sum};
}

extern "C" __device__ const ShareLaunchShape launch_shape = {
    {{{THREADS, sizeof(SharedStorage), TILE_Q, 0, 0, 1}, 0, 1}, WARPS * STEP_KEYS}, MIN_BLOCKS, SPLITS, sizeof(TilePart) / 4,
    KEEP_TILES_WHOLE, 1};

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

// Offset in floats of column `col` of row `row` of a warp's output. 4 rows of an accumulator cover every bank once.
__device__ __forceinline__ int swizzled_output(int row, int col) { return row * HEAD_DIM + (col ^ row % 4 * MMA_N); }

// Copies 8 elements, or writes zeros if `exists` is false: a masked key still takes part in the PV GEMM, where 0 · garbage may be NaN.
// cp.async returns immediately; the caller commits the group and waits for it.
__device__ __forceinline__ void copy_chunk(element* target_smem, const element* source_gmem, bool exists) {
  if constexpr (ALIGNED) {
    // In the causal kernel at head dim 256, ptxas 13.0 lets some hinted copies address memory through UR0 and UR1, which nothing sets; the
    // GPU stops at them with an illegal instruction (tests/test_decode.py looks for such copies). That head dim therefore has no hint.
    const int bytes = exists ? sizeof(Chunk) : 0;
    if constexpr (HEAD_DIM < 256) {
      ptx::cp_async_cg_16_hint(target_smem, source_gmem, bytes, ptx::createpolicy_evict_first());
    } else {
      ptx::cp_async_cg_16(target_smem, source_gmem, bytes);
    }
  } else {
    Chunk chunk = {};
    if (exists) chunk = read_chunk(source_gmem);
    *reinterpret_cast<Chunk*>(target_smem) = chunk;
  }
}

// a / b by an approximate reciprocal, for a < 2^20. With a + 0.5 the exact quotient is at least 0.5 / b away from every integer. The
// relative error is below 2^-21, so the absolute error is below 0.5 / b, and truncation is exact.
__device__ __forceinline__ int short_quotient(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

// Reads two adjacent elements into one register.
__device__ __forceinline__ unsigned read_pair(const element* source) {
  if constexpr (ALIGNED) return *reinterpret_cast<const unsigned*>(source);
  const element pair[2] = {source[0], source[1]};
  return *reinterpret_cast<const unsigned*>(pair);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_d22_gap_prefetch(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (!ALLOW_LATE) ptx::griddepcontrol_launch_dependents();
  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0);   // the shuffle tells the compiler that the value is warp-uniform
  const int lane = threadIdx.x % WARP;
  const int group = short_quotient(p.q_heads, p.kv_heads);               // query heads per K/V head
  const int q_tiles = (group * p.q_len + TILE_Q - 1) / TILE_Q;     // tiles per K/V head
  // Query row of a packed row. The operands are small, and adding half a row keeps the quotient away from the next integer.
  const float inv_group = __fdividef(1.0f, group);
  struct Tile { int batch, kv_head, first_row, num_rows; };
  const auto tile_of = [&](int id) {
    const int head = q_tiles == 1 ? id : id / q_tiles, batch = head / p.kv_heads, first_row = (id - head * q_tiles) * TILE_Q;
    return Tile{batch, head - batch * p.kv_heads, first_row, min(TILE_Q, group * p.q_len - first_row)};
  };
  const auto q_row_of = [&](const Tile& tile, int row) { return static_cast<int>((tile.first_row + row + 0.5f) * inv_group); };
  const auto head_of_row = [&](const Tile& tile, int row) {
    return tile.kv_head * group + tile.first_row + row - q_row_of(tile, row) * group;
  };
  const auto row_of = [&](const TensorView& tensor, const Tile& tile, int row) {   // address of a packed row in Q or O
    return head_of(tensor, tile.batch, head_of_row(tile, row)) + q_row_of(tile, row) * tensor.row_stride;
  };

  // The steps of all tiles, STEP_KEYS keys each, are concatenated. This block's share begins at step `first_step` of tile `first_tile` and
  // is dealt out round-robin to its warps, so that the block reads contiguous stretches of K and V. A warp may get none.
  const int hidden_steps = first_key(p, 0) / STEP_KEYS;   // steps before the window of every row of every tile
  const int num_tiles = q_tiles * p.kv_heads * p.batch;
  int tile_steps = (p.kv_len + STEP_KEYS - 1) / STEP_KEYS - hidden_steps;
  // The last blocks of the grid are combiners, equally many per tile, if LEAST_PARTS blocks per tile or more are left to read keys.
  const int slices = short_quotient(COMBINERS, num_tiles);   // of a tile's output: one per combiner
  const int combiners = static_cast<int>(gridDim.x) >= num_tiles * (slices + LEAST_PARTS) ? num_tiles * slices : 0;
  const int readers = gridDim.x - combiners;                 // blocks that read keys
  const int tile_blocks = short_quotient(readers, num_tiles);
  const bool even = KEEP_TILES_WHOLE && tile_blocks > 0 && tile_blocks * num_tiles == readers;
  const unsigned long long num_steps = static_cast<unsigned long long>(num_tiles) * tile_steps;
  const unsigned long long uneven_share = (num_steps + readers - 1) / readers;

  // Writes PART columns of an output row and, with the first of them, the row's log-sum-exp.
  const auto finish = [&](const Tile& tile, int row, int part_id, const Part& O, float max, float sum) {
    const float inv_sum = sum == 0.0f ? 0.0f : 1.0f / sum;   // 0 if the row has no visible key
    element* O_gmem = row_of(p.O, tile, row) + part_id * PART;
    if constexpr (ALIGNED) {
      *reinterpret_cast<uint2*>(O_gmem) = make_uint2(pack(O.x[0] * inv_sum, O.x[1] * inv_sum, element{}),
                                                     pack(O.x[2] * inv_sum, O.x[3] * inv_sum, element{}));
    } else {
#pragma unroll
      for (int c = 0; c < PART; ++c) O_gmem[c] = from_float<element>(O.x[c] * inv_sum);
    }
    if (p.LSE && part_id == 0) {
      const long long head = static_cast<long long>(tile.batch) * p.q_heads + head_of_row(tile, row);
      p.LSE[head * p.q_len + q_row_of(tile, row)] = sum == 0.0f ? NEG_INF : max * LN_2 + logf(sum);
    }
  };
  // Partial results of block b: [2b] of a tile begun by an earlier block, [2b + 1] of a tile begun by block b and continued by a later one.
  TilePart* parts = reinterpret_cast<TilePart*>(p.work + MAX_SHARES);

  if (static_cast<int>(blockIdx.x) >= readers) {
    ptx::griddepcontrol_launch_dependents();
    const int combiner = blockIdx.x - readers;
    const int tile_id = short_quotient(combiner, slices), slice = combiner - tile_id * slices;
    const Tile tile = tile_of(tile_id);
    int first_block, end_block;   // range of the blocks that read the tile's keys
    if (even) {
      first_block = tile_id * tile_blocks, end_block = first_block + tile_blocks;
    } else {
      const unsigned long long tile_first = static_cast<unsigned long long>(tile_id) * tile_steps;
      first_block = tile_first / uneven_share, end_block = (tile_first + tile_steps - 1) / uneven_share + 1;
    }
    const int num_parts = end_block - first_block;
    const int num_columns = tile.num_rows * ROW_PARTS, begin = num_columns * slice / slices, end = num_columns * (slice + 1) / slices;
    if (COMBINERS > ROW_PARTS && begin == end) return;   // a tile of one row may have fewer columns than slices
    const int column_warps = min(WARPS, (end - begin + WARP - 1) / WARP);   // warps that read different columns
    const int part_warps = WARPS / column_warps;                            // warps that split the partial results of the same columns
    const int warp_parts = (num_parts + part_warps - 1) / part_warps;
    const int part_id = warp / column_warps;                                // this warp's index among those
    const int from = min(part_id * warp_parts, num_parts), to = min(from + warp_parts, num_parts);
    Sum (&sums)[THREADS] = reinterpret_cast<Sum(&)[THREADS]>(smem);
    ptx::griddepcontrol_wait();   // the previous kernel may still use O and the workspace
    if (num_parts == 1) return;   // the block that has read the keys writes the output
    for (int first_column = begin; first_column < end; first_column += column_warps * WARP) {
      const int column = first_column + (warp - part_id * column_warps) * WARP + lane;
      if (part_id < part_warps && from < to && column < end) {
        sums[threadIdx.x] = add_up<MANY_PARTS>(parts, first_block, from, to, column);
      } else {
        sums[threadIdx.x] = {{}, LOWEST, 0.0f};
      }
      __syncthreads();
      if (part_id == 0 && column < end) {
        float max = LOWEST, sum = 0.0f;
        for (int k = 0; k < part_warps; ++k) max = fmaxf(max, sums[threadIdx.x + k * column_warps * WARP].max);
        Part O = {};
        for (int k = 0; k < part_warps; ++k) {
          const Sum& part = sums[threadIdx.x + k * column_warps * WARP];
          const float weight = ptx::ex2_approx_ftz(part.max - max);
          sum = fmaf(weight, part.sum, sum);
#pragma unroll
          for (int c = 0; c < PART; ++c) O.x[c] = fmaf(weight, part.O.x[c], O.x[c]);
        }
        finish(tile, column / ROW_PARTS, column % ROW_PARTS, O, max, sum);
      }
      __syncthreads();
    }
    return;
  }

  int first_tile, first_step, steps_left;
  if (even) {   // equally many blocks per tile: steps without keys pad the last block's share
    const int share = (tile_steps + tile_blocks - 1) / tile_blocks;
    tile_steps = share * tile_blocks;
    first_tile = short_quotient(blockIdx.x, tile_blocks);
    first_step = (blockIdx.x - first_tile * tile_blocks) * share;
    steps_left = share;
    if (threadIdx.x == 0) smem.first_block = first_tile * tile_blocks;
  } else {
    const unsigned long long share = uneven_share;
    const unsigned long long first = min(share * blockIdx.x, num_steps);
    first_tile = first / tile_steps;
    first_step = first - static_cast<unsigned long long>(first_tile) * tile_steps;
    steps_left = min(share, num_steps - first);
    if (steps_left == 0) return;   // shares are rounded up: a block may get no steps
    if (threadIdx.x == 0) smem.first_block = (first - first_step) / share;
  }
  // Read only after the block-wide barrier at the end of the first tile. In shared memory these values occupy no registers.
  if (threadIdx.x == 0) smem.last_of = first_step > 0 && first_step + steps_left >= tile_steps ? first_tile : -1;

  Step* ring = smem.ring[warp];
  const int copy_row = lane / ROW_CHUNKS, copy_chunk_id = lane % ROW_CHUNKS;
  const bool copies = COPY_LANES == WARP || lane < COPY_LANES;
  int fetch_at = first_step + warp;   // the warp's next step to copy, counted from the start of the block's first tile
  const int last_step = first_step + steps_left;
  int fetch_step;                       // the same, counted from the start of its own tile
  const element *K_source, *V_source;   // this lane's chunk of the first row it copies; incrementing saves recomputing addresses
  Tile fetch_tile;
  const auto seek = [&] {
    const int tiles_before = fetch_at < tile_steps ? 0 : fetch_at / tile_steps;
    fetch_step = fetch_at - tiles_before * tile_steps;
    fetch_tile = tile_of(first_tile + tiles_before);
    const long long row = static_cast<long long>(hidden_steps + fetch_step) * STEP_KEYS + copy_row;
    K_source = head_of(p.K, fetch_tile.batch, fetch_tile.kv_head) + row * p.K.row_stride + copy_chunk_id * CHUNK;
    V_source = head_of(p.V, fetch_tile.batch, fetch_tile.kv_head) + row * p.V.row_stride + copy_chunk_id * CHUNK;
  };
  seek();
  // Copies the warp's next step into buffer `slot` of its ring; the next tile's first after a tile's last. Does nothing past the end.
  const auto fetch = [&](int slot, bool is_first = false) {
    if (fetch_at >= last_step || !copies) return;
    if (!is_first && fetch_step >= tile_steps) seek();
    const int num_keys = p.kv_len - (hidden_steps + fetch_step) * STEP_KEYS;            // keys from the step's first one on
    const int hidden_keys = first_key(p, 0) - (hidden_steps + fetch_step) * STEP_KEYS;   // before every row's window
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
    fetch_at += WARPS;
    fetch_step += WARPS;
  };

  ptx::griddepcontrol_wait();   // a preceding kernel may produce Q, K and V, and may still use O and the workspace
#pragma unroll
  for (int i = 0; i < PIPELINE_STAGES - 1; ++i) {
    fetch(i, i == 0);
    ptx::cp_async_commit_group();
  }

  // The L2 cache prefetches the steps after those, for which the ring has no buffer yet, to keep the memory busy until the copies that are
  // issued when the first keys arrive. Row by row, or all rows of a step at once if they are contiguous.
  if constexpr (ALIGNED && PREFETCH_STEPS > 0) {
    const auto prefetch = [&](const TensorView& tensor, int key, int num_rows) {
      const element* source = head_of(tensor, fetch_tile.batch, fetch_tile.kv_head) + static_cast<long long>(key) * tensor.row_stride;
      ptx::cp_async_bulk_prefetch(source, num_rows * ROW_BYTES);
    };
    const int rows_at_once = p.K.row_stride == HEAD_DIM && p.V.row_stride == HEAD_DIM ? STEP_KEYS : 1;
    const int steps_ahead = min(PREFETCH_STEPS, (last_step - first_step) / (WARPS * PREFETCH_SHARE));
    const int prefetch_end = min(fetch_at + steps_ahead * WARPS, min(last_step, tile_steps));
    for (int step = fetch_at; step < prefetch_end; step += WARPS) {
      for (int row = lane * rows_at_once; row < 2 * STEP_KEYS; row += WARP * rows_at_once) {   // rows of K, then of V
        const int key = (hidden_steps + step) * STEP_KEYS + row % STEP_KEYS;
        if (key < p.kv_len) prefetch(row < STEP_KEYS ? p.K : p.V, key, min(rows_at_once, p.kv_len - key));
      }
    }
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

  int slot = 0;
  int step = first_step + warp;   // the warp's current step, counted from the start of the current tile
  for (int tile_id = first_tile, begin = first_step; steps_left > 0; ++tile_id, begin = 0) {
    const Tile tile = tile_of(tile_id);
    const int end = min(tile_steps, begin + steps_left);   // this block's steps of the tile: [begin, end)
    steps_left -= end - begin;
    const int full_keys = visible_keys(p, q_row_of(tile, 0));   // smallest for the first row: no row's visible range ends before it
    const int full_first = first_key(p, q_row_of(tile, tile.num_rows - 1));   // with a window: the last row's window begins last

    // Q is loaded directly into registers while the first keys are in flight: it is small, and every warp needs all of it. Rows
    // past the last are 0.
    unsigned Q_frag[D_STEPS][4] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const int row = half * MATRIX + lane_row;
      if (row >= tile.num_rows || p.scale_log2 == 0.0f) continue;
      const element* Q_gmem = row_of(p.Q, tile, row) + lane_col;
#pragma unroll
      for (int i = 0; i < 2 * D_STEPS; ++i) Q_frag[i / 2][i % 2 * 2 + half] = read_pair(Q_gmem + i * MMA_N) ^ sign;
    }

    float O_reg[COL_BLOCKS][4] = {};              // (16, HEAD_DIM), over the warp's own keys
    float row_max[HALVES] = {LOWEST, LOWEST};     // reference of the exponentials, in log2 units; the same in the 4 lanes of a row
    float row_sum[HALVES] = {};                   // this lane's partial sum of 2^(score - row_max)
    for (; step < end; step += WARPS) {
      ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this lane's chunks of this step have arrived
      __syncwarp();                                      // the whole warp's have, and all lanes are done with the buffer filled next
      fetch(slot == 0 ? PIPELINE_STAGES - 1 : slot - 1);
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

      const int step_key = (hidden_steps + step) * STEP_KEYS;
      if (step_key + STEP_KEYS > full_keys || WINDOW && step_key < full_first) {   // some key is masked for some row
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int q_row = q_row_of(tile, e / 2 * MATRIX + lane_row), column = step_key + lane_col + e % 2;
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
    step -= tile_steps;   // now counted from the start of the next tile

    // Lets the next kernel's blocks launch wherever there is room; like this one, they wait at griddepcontrol.wait.
    if (ALLOW_LATE && steps_left == 0) ptx::griddepcontrol_launch_dependents();

    // The warps' partial results of the tile are combined in shared memory while the next tile's first keys are in flight.
    const int read_slot = slot == 0 ? PIPELINE_STAGES - 1 : slot - 1;   // no copy into this buffer is in flight
    float* O_warp = reinterpret_cast<float*>(&ring[read_slot]);
    __syncwarp();   // all lanes are done with the keys in it
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
        *reinterpret_cast<float2*>(&O_warp[swizzled_output(row, j * MMA_N + lane_col)]) =
            make_float2(O_reg[j][2 * half], O_reg[j][2 * half + 1]);
      }
    }
    if (lane == 0) smem.warp_slot[warp] = read_slot;
    __syncthreads();   // all warps' partial results are in shared memory
    const bool whole = begin == 0 && end == tile_steps;
    TilePart& mine = parts[2 * blockIdx.x + (begin == 0)];
    for (int i = threadIdx.x; i < tile.num_rows * ROW_PARTS; i += THREADS) {
      const int row = i / ROW_PARTS, part_id = i % ROW_PARTS;
      float max = smem.warp_max[0][row], sum = 0.0f;
#pragma unroll
      for (int w = 1; w < WARPS; ++w) max = fmaxf(max, smem.warp_max[w][row]);
      Part O = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float* O_warp = reinterpret_cast<const float*>(&smem.ring[w][smem.warp_slot[w]]);
        const Part part = *reinterpret_cast<const Part*>(&O_warp[swizzled_output(row, part_id * PART)]);
        const float weight = ptx::ex2_approx_ftz(smem.warp_max[w][row] - max);   // 0 if the warp saw no key, or 1 if no warp did
        sum = fmaf(weight, smem.warp_sum[w][row], sum);
#pragma unroll
        for (int c = 0; c < PART; ++c) O.x[c] = fmaf(weight, part.x[c], O.x[c]);
      }
      if (whole) {
        finish(tile, row, part_id, O, max, sum);
      } else {
        ptx::st_relaxed_gpu(&mine.O[i], make_uint4(~__float_as_uint(O.x[0]), ~__float_as_uint(O.x[1]), ~__float_as_uint(O.x[2]),
                                                   ~__float_as_uint(O.x[3])));
        ptx::st_relaxed_gpu(&mine.max_sum[i], make_uint2(~__float_as_uint(max), ~__float_as_uint(sum)));
      }
    }
    __syncthreads();   // the buffers that held the outputs may be refilled
  }

  // At most one of the block's tiles has partial results of earlier blocks and ends in this block. The earlier blocks were launched before
  // this one, so it can wait for them.
  const int tile_id = smem.last_of;
  if (combiners > 0 || tile_id < 0) return;
  const Tile tile = tile_of(tile_id);
  const int first_block = smem.first_block, num_parts = blockIdx.x - first_block + 1;
  for (int i = threadIdx.x; i < tile.num_rows * ROW_PARTS; i += THREADS) {
    const Sum sum = num_parts <= FEW_PARTS ? add_up<FEW_PARTS>(parts, first_block, 0, num_parts, i)
                                           : add_up<MANY_PARTS>(parts, first_block, 0, num_parts, i);
    finish(tile, i / ROW_PARTS, i % ROW_PARTS, sum.O, sum.max, sum.sum);
  }
}
