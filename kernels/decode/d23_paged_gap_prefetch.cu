// d23_paged_gap_prefetch: the first pages beyond the ring are prefetched into the L2 cache. Parent: d21_parallel_lookup.
// Question: at the start of a call all warps fill their rings at once, and issue no more copies until the first keys arrive. How long does
//           the memory idle in between, and what is gained if it does not?
// Change: after its first copies a warp prefetches its next steps into the L2 cache, at most two and at most an eighth of its steps: it
//         has already looked up their pages. The change of d22_gap_prefetch for paged keys.
// Layout: as the parent's. K and V are pools of pages, in any order (paged.cuh). Requires: as the parent.
#include "attention.cuh"
#include "mma.cuh"
#include "paged.cuh"
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
constexpr int STEP_PAGES = STEP_KEYS > PAGE_SIZE ? STEP_KEYS / PAGE_SIZE : 1;
constexpr int PAGE_STEPS = PAGE_SIZE > STEP_KEYS ? PAGE_SIZE / STEP_KEYS : 1;
constexpr int BATCH_STEPS = WARP / STEP_PAGES;       // steps that a warp looks up at a time
constexpr int PART = 4;                              // adjacent columns that one thread combines: 16 bytes of FP32
constexpr int ROW_PARTS = HEAD_DIM / PART;
constexpr int FEW_PARTS = 4, MANY_PARTS = HEAD_DIM < 256 ? 16 : 8;   // partial results of a tile whose loads are in flight together
constexpr unsigned KEY_COUNTS = 64;                  // radix for packing key counts (0 to STEP_KEYS) into one number
constexpr float LOWEST = -0x1p100f;                  // below any realistic score: reference of a warp or block with no visible key
static_assert(STEP_KEYS % MMA_K == 0, "STEP_KEYS must be a multiple of 16");
static_assert(STEP_KEYS <= WARP, "a warp holds one page number per lane, so a step has at most WARP keys");
static_assert((PAGE_SIZE & PAGE_SIZE - 1) == 0, "PAGE_SIZE must be a power of two");
static_assert(PIPELINE_STAGES >= 2, "a warp copies into one buffer while it reads another");
static_assert(SPLITS >= 1, "SPLITS must be a positive number of blocks");
static_assert(COMBINERS >= 0 && COMBINERS <= WARP, "COMBINERS is a number of blocks, at most 32");
static_assert(LEAST_PARTS >= 2, "LEAST_PARTS is a number of partial results, at least 2");

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

// Packed rows of one K/V head of one sequence.
struct Tile {
  int batch, kv_head, first_row, num_rows;
};

// Tile `tile` of sequence `batch`, which has `keys` keys.
struct SeqTile {
  int batch, keys;
  int tile;
};

// A step of the warp, looked up by one of its lanes.
struct LookUp {
  SeqTile at;
  unsigned step;       // counted from the start of tile `at`
  unsigned place;      // packed: K/V head, steps before it in its page, its keys before every row's window, and its number of keys
};

struct SharedStorage {
  Step ring[WARPS][PIPELINE_STAGES];   // at the end of a tile, the buffer read last holds the warp's output, not yet divided by its sum
  float warp_max[WARPS][TILE_Q], warp_sum[WARPS][TILE_Q];
  int warp_slot[WARPS];                // index of that buffer
  int first_block;                     // first block with a partial result of the tile that this block combines
  LookUp next[THREADS];                // private to each thread, like `at`; in shared memory they occupy no registers
  SeqTile at[THREADS];
  Tile last_of;                        // tile that other blocks began and this block ends and combines; num_rows 0: none
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
    0, 1};

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
    ptx::cp_async_cg_16_hint(target_smem, source_gmem, exists ? sizeof(Chunk) : 0, ptx::createpolicy_evict_first());
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

// The call's parameters with this length for all sequences.
__device__ __forceinline__ AttentionParams of_length(const AttentionParams& p, int keys) {
  AttentionParams own = p;
  own.kv_len = keys;
  return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_d23_paged_gap_prefetch(const __grid_constant__ AttentionParams p, const __grid_constant__ PagedCache cache) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (!ALLOW_LATE) ptx::griddepcontrol_launch_dependents();
  const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0);   // the shuffle tells the compiler that the value is warp-uniform
  const int lane = threadIdx.x % WARP;
  const int group = short_quotient(p.q_heads, p.kv_heads);               // query heads per K/V head
  const int q_tiles = (group * p.q_len + TILE_Q - 1) / TILE_Q;     // tiles per K/V head
  const int seq_tiles = q_tiles * p.kv_heads;                      // tiles per sequence
  // Query row of a packed row. The operands are small, and adding half a row keeps the quotient away from the next integer.
  const float inv_group = __fdividef(1.0f, group);
  const auto kv_head_of = [&](int id) { return q_tiles == 1 ? id : id / q_tiles; };
  const auto tile_of = [&](int batch, int id) {   // tile number `id` of the sequence
    const int kv_head = kv_head_of(id), first_row = (id - kv_head * q_tiles) * TILE_Q;
    return Tile{batch, kv_head, first_row, min(TILE_Q, group * p.q_len - first_row)};
  };
  const auto q_row_of = [&](const Tile& tile, int row) { return static_cast<int>((tile.first_row + row + 0.5f) * inv_group); };
  const auto head_of_row = [&](const Tile& tile, int row) {
    return tile.kv_head * group + tile.first_row + row - q_row_of(tile, row) * group;
  };
  const auto row_of = [&](const TensorView& tensor, const Tile& tile, int row) {   // address of a packed row in Q or O
    return head_of(tensor, tile.batch, head_of_row(tile, row)) + q_row_of(tile, row) * tensor.row_stride;
  };

  // The last blocks of the grid are combiners, equally many per tile, if LEAST_PARTS blocks per tile or more are left to read keys.
  const int num_tiles = seq_tiles * p.batch;
  const int slices = short_quotient(COMBINERS, num_tiles);   // of a tile's output: one per combiner
  const int combiners = static_cast<int>(gridDim.x) >= num_tiles * (slices + LEAST_PARTS) ? num_tiles * slices : 0;
  const int num_blocks = gridDim.x - combiners;              // blocks that read keys
  const int combiner = static_cast<int>(blockIdx.x) - num_blocks;   // negative: this block reads keys
  const int own_tile = combiner < 0 ? 0 : short_quotient(combiner, slices);   // the tile that this block combines
  if (combiner >= 0) ptx::griddepcontrol_launch_dependents();

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

  // If all tiles have the same number of steps and `tile_blocks` blocks per tile leave at most a sixteenth of the blocks idle, a tile is
  // split into `tile_blocks` shares, or fewer if it has few steps.
  const int tile_blocks = num_tiles <= num_blocks ? short_quotient(num_blocks, num_tiles) : 0;
  const bool keep_whole = WHOLE_TILES && num_tiles * tile_blocks * 16 >= num_blocks * 15;
  // The block's tile and its first step in that tile, if tiles are split in this way. Neither depends on a length.
  const int whole_id = combiner < 0 ? short_quotient(blockIdx.x, max(1, tile_blocks)) : own_tile;
  const int whole_batch = short_quotient(whole_id, seq_tiles), whole_tile = whole_id - whole_batch * seq_tiles;
  const int whole_first = (blockIdx.x - whole_id * tile_blocks) * WARPS;

  Step* ring = smem.ring[warp];
  const int copy_row = lane / ROW_CHUNKS, copy_chunk_id = lane % ROW_CHUNKS;
  const bool copies = COPY_LANES == WARP || lane < COPY_LANES;
  // Address of this lane's chunk in the first row that it copies, in page 0; for a step of several pages, in row 0 of the page.
  const auto lane_source = [&](const TensorView& tensor, int kv_head, int page_row) {
    return head_of(tensor, 0, kv_head) + (STEP_PAGES > 1 ? 0 : page_row + copy_row) * tensor.row_stride + copy_chunk_id * CHUNK;
  };
  // Copies keys [hidden_keys, num_keys) of a step. Lane `from` + k holds its page number k, or -1.
  const auto copy_step = [&](Step& target, const element* K_source, const element* V_source, int page, int from, int hidden_keys,
                             int num_keys) {
    int row_page = __shfl_sync(FULL_WARP, page, from);
    const auto copy_rows = [&](element* target_smem, const TensorView& tensor, const element* page0) {
#pragma unroll
      for (int first = 0; first < STEP_KEYS; first += COPY_ROWS) {
        const int row = copy_row + first;
        if (STEP_PAGES > 1) row_page = __shfl_sync(FULL_WARP, page, from + row / PAGE_SIZE % STEP_PAGES);
        // Of a row that does not exist nothing is read, but its address lies in the pool as well.
        const element* page_start = page0 + max(row_page, 0) * tensor.batch_stride;
        const bool exists = row_page >= 0 && row < num_keys && (!WINDOW || row >= hidden_keys);
        if (copies) {
          copy_chunk(target_smem + swizzled(row, copy_chunk_id),
                     page_start + (STEP_PAGES > 1 ? row % PAGE_SIZE : first) * tensor.row_stride, exists);
        }
      }
    };
    copy_rows(target.K, p.K, K_source);
    copy_rows(target.V, p.V, V_source);
  };

  ptx::griddepcontrol_wait();   // a preceding kernel may produce all inputs, and may still use O and the workspace

  // Page numbers of the warp's first steps, and the length of the lane's first sequence: two loads that are in flight together. Of the
  // numbers some may be of no key.
  int early_page = -1;
  if (PARALLEL && !WINDOW && keep_whole && combiner < 0 && whole_id < num_tiles) {
    const int key = (whole_first + warp + lane / STEP_PAGES * tile_blocks * WARPS) * STEP_KEYS + lane % STEP_PAGES * PAGE_SIZE;
    if (key < p.kv_len) early_page = cache.page_table[whole_batch * cache.table_stride + key / PAGE_SIZE];
  }
  // Each warp sums the steps of one tile of every sequence for itself; each lane sums a run of consecutive sequences.
  const int lane_batch = (p.batch + WARP - 1) / WARP;
  const int lane_first = min(lane * lane_batch, p.batch), lane_last = min(lane_first + lane_batch, p.batch);
  const int length_of_first = lane_first < lane_last ? cache.lengths[lane_first] : 0;
  // Computed while they are in flight; unpinned, the compiler would compute it after the branch that waits for the lengths.
  const int early_step = whole_first + warp, early_row = early_step % PAGE_STEPS * STEP_KEYS;
  const element* early_K = lane_source(p.K, kv_head_of(whole_tile), early_row);
  const element* early_V = lane_source(p.V, kv_head_of(whole_tile), early_row);
  if (PARALLEL) ptx::pin(early_K), ptx::pin(early_V);
  bool copied = false;   // the copies of the warp's first step are already issued
  int stride = WARPS;    // steps from one step of a warp to its next

  // The steps of all tiles, STEP_KEYS keys each, are concatenated. This block's share begins within `first_tile` and is dealt out
  // round-robin to its warps, so that the block reads consecutive keys; or, if tiles are kept whole, every tile's steps are dealt out
  // round-robin to the warps of all its blocks. A warp may get none. A tile without keys has one step, so that some block writes its zeros.
  int whole_steps = 0;   // steps of every tile if tiles are kept whole, else 0
  const auto steps_of = [&](int keys) {
    if (WHOLE_TILES && whole_steps > 0) return whole_steps;
    return max(1, (keys + STEP_KEYS - 1) / STEP_KEYS - first_key(of_length(p, keys), 0) / STEP_KEYS);
  };
  const auto keys_of = [&](int batch) { return cut_length(p, cache.lengths[batch]); };
  const auto seq_steps_of = [&](int keys) { return static_cast<unsigned>(seq_tiles) * steps_of(keys); };
  int lane_keys = 0, lane_steps_of_first = 0;   // of the lane's first sequence
  bool same = keep_whole, cut = false;
  unsigned long long lane_steps = 0;
#pragma unroll 1
  for (int batch = lane_first; batch < lane_last; ++batch) {
    const int length = batch == lane_first ? length_of_first : cache.lengths[batch], keys = cut_length(p, length), steps = steps_of(keys);
    if (batch == lane_first) lane_keys = keys, lane_steps_of_first = steps;
    same &= steps == lane_steps_of_first;
    cut |= length != keys;
    lane_steps += steps;
  }
  if (cut && cache.faults) atomicAdd(&cache.faults[1], 1u);
  const int steps_of_first = __shfl_sync(FULL_WARP, lane_steps_of_first, 0);
  same &= lane_first == lane_last || lane_steps_of_first == steps_of_first;
  // The block's first tile, its first step within that tile, its number of steps, and the block that has that tile's first step.
  SeqTile first_tile;
  int first_step, block_steps, begun_by, num_parts = 0;
  if (WHOLE_TILES && __all_sync(FULL_WARP, same)) {
    if (whole_id >= num_tiles || combiner < 0 && whole_first >= steps_of_first) return;
    const int keys = lane_batch == 1 ? __shfl_sync(FULL_WARP, lane_keys, whole_batch) : keys_of(whole_batch);
    if (PARALLEL && !WINDOW && combiner < 0) {
      const bool exists = static_cast<unsigned>(early_page) < static_cast<unsigned>(cache.num_pages);
      copy_step(ring[0], early_K, early_V, exists ? early_page : -1, 0, 0, max(0, min(STEP_KEYS, keys - early_step * STEP_KEYS)));
      copied = true;
    }
    whole_steps = steps_of_first;
    stride = tile_blocks * WARPS;
    first_tile = {whole_batch, keys, whole_tile};
    first_step = whole_first;
    block_steps = whole_steps - first_step;   // of these the block takes one in tile_blocks groups
    begun_by = whole_id * tile_blocks;
    num_parts = min(tile_blocks, (whole_steps + WARPS - 1) / WARPS);   // blocks that have steps
  } else {
    unsigned long long through = lane_steps;   // up to the lane's last sequence, after the prefix sum
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const unsigned long long before = __shfl_up_sync(FULL_WARP, through, distance);
      if (lane >= distance) through += before;
    }
    // A tile's end counts as END_STEPS steps in which nothing is read: the shares split steps and ends together.
    const unsigned long long with_ends = (through + static_cast<unsigned long long>(END_STEPS) * lane_last) * seq_tiles;
    const unsigned long long whole_time = __shfl_sync(FULL_WARP, with_ends, WARP - 1);
    const unsigned long long share = max((whole_time + num_blocks - 1) / num_blocks, static_cast<unsigned long long>(WARPS));
    // Start of a share: its sequence and its first step within the sequence, which is the sequence's number of steps if the share starts
    // with the next sequence. From here on steps are counted without ends; a sequence has fewer than 2^32 of them.
    struct Begin {
      int batch, keys;
      unsigned seq_step;
      unsigned long long step;         // counted over all tiles
      unsigned long long tile_place;   // start of its tile, counted with ends
    };
    const auto begin_of = [&](unsigned long long place) {
      place = min(place, whole_time);
      const unsigned owners = __ballot_sync(FULL_WARP, with_ends > place);
      const int owner = owners ? __ffs(owners) - 1 : WARP - 1;
      const unsigned long long steps_before = __shfl_sync(FULL_WARP, through - lane_steps, owner) * seq_tiles;
      Begin begin = {__shfl_sync(FULL_WARP, lane_first, owner), __shfl_sync(FULL_WARP, lane_keys, owner), 0, steps_before, 0};
      const unsigned seq_ends = seq_tiles * END_STEPS;
      unsigned long long rest = place - steps_before - static_cast<unsigned long long>(seq_ends) * begin.batch;
      for (; rest >= seq_steps_of(begin.keys) + seq_ends && begin.batch + 1 < p.batch; begin.keys = keys_of(++begin.batch)) {
        rest -= seq_steps_of(begin.keys) + seq_ends;
        begin.step += seq_steps_of(begin.keys);
      }
      const unsigned in_seq = rest, tile_steps = steps_of(begin.keys), tile = in_seq / (tile_steps + END_STEPS);
      const unsigned in_tile = in_seq - tile * (tile_steps + END_STEPS);
      begin.seq_step = tile * tile_steps + min(in_tile, tile_steps);
      begin.step += begin.seq_step;
      begin.tile_place = place - in_tile;
      return begin;
    };
    if (combiner < 0) {
      const Begin begin = begin_of(share * blockIdx.x);
      block_steps = begin_of(share * (blockIdx.x + 1)).step - begin.step;
      if (block_steps == 0) return;   // shares are rounded up: a block may get no steps
      const int tile = begin.seq_step / steps_of(begin.keys);
      first_tile = {begin.batch, begin.keys, tile};
      first_step = begin.seq_step - tile * steps_of(begin.keys);
      begun_by = begin.tile_place / share;
    } else {   // with combiners there are few tiles, so a lane has one sequence at most
      const int batch = short_quotient(own_tile, seq_tiles), tile = own_tile - batch * seq_tiles;
      const unsigned steps = __shfl_sync(FULL_WARP, static_cast<unsigned>(lane_steps), batch);
      const unsigned long long tiles_after = seq_tiles - tile;   // this tile and those after it in its sequence
      const unsigned long long place = __shfl_sync(FULL_WARP, with_ends, batch) - tiles_after * (steps + END_STEPS);
      first_tile = {batch, 0, tile};
      begun_by = place / share;
      num_parts = (place + steps - 1) / share + 1 - begun_by;
    }
  }

  if (combiner >= 0) {
    if (num_parts == 1) return;   // the block that has read the keys writes the output
    const Tile tile = tile_of(first_tile.batch, first_tile.tile);
    const int num_columns = tile.num_rows * ROW_PARTS, slice = combiner - own_tile * slices;
    const int begin = num_columns * slice / slices, end = num_columns * (slice + 1) / slices;
    if (COMBINERS > ROW_PARTS && begin == end) return;   // a tile of one row may have fewer columns than slices
    const int column_warps = min(WARPS, (end - begin + WARP - 1) / WARP);   // warps that read different columns
    const int part_warps = WARPS / column_warps;                            // warps that split the partial results of the same columns
    const int warp_parts = (num_parts + part_warps - 1) / part_warps;
    const int part_id = warp / column_warps;                                // this warp's index among those
    const int from = min(part_id * warp_parts, num_parts), to = min(from + warp_parts, num_parts);
    Sum (&sums)[THREADS] = reinterpret_cast<Sum(&)[THREADS]>(smem);
    for (int first_column = begin; first_column < end; first_column += column_warps * WARP) {
      const int column = first_column + (warp - part_id * column_warps) * WARP + lane;
      if (part_id < part_warps && from < to && column < end) {
        sums[threadIdx.x] = add_up<MANY_PARTS>(parts, begun_by, from, to, column);
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

  const int warp_steps = max(0, (block_steps - warp + stride - 1) / stride);
  // Steps are looked up one batch ahead; each lane looks up one step or one page of a step. A load whose result is used immediately would
  // queue behind all the keys in flight, so page numbers are not examined before their batch is due.
  smem.next[threadIdx.x] = {first_tile, static_cast<unsigned>(first_step + warp + lane / STEP_PAGES * stride), 0};
  const auto look_up = [&](int first) {   // in the batch that starts at the warp's step `first`; returns the page number
    LookUp next = smem.next[threadIdx.x];
    next.place = 0;
    int page = 0;
    if (first + lane / STEP_PAGES < warp_steps) {
      unsigned tile_steps = steps_of(next.at.keys);
      while (next.step >= tile_steps || next.at.tile == seq_tiles) {   // the step is in a later tile
        const unsigned tiles = min(next.step / tile_steps, static_cast<unsigned>(seq_tiles - next.at.tile));
        next.step -= tiles * tile_steps, next.at.tile += tiles;
        if (next.at.tile < seq_tiles) continue;
        next.at = {next.at.batch + 1, keys_of(next.at.batch + 1), 0};
        tile_steps = steps_of(next.at.keys);
      }
      const int seen_from = first_key(of_length(p, next.at.keys), 0);   // first key that any row sees
      const int step_key = (seen_from / STEP_KEYS + static_cast<int>(next.step)) * STEP_KEYS;
      const int num_keys = max(0, min(STEP_KEYS, next.at.keys - step_key));
      const int hidden_keys = max(0, min(STEP_KEYS, seen_from - step_key));
      next.place = kv_head_of(next.at.tile) * PAGE_STEPS + step_key / STEP_KEYS % PAGE_STEPS;
      next.place = (next.place * KEY_COUNTS + hidden_keys) * KEY_COUNTS + num_keys;
      const int page_key = lane % STEP_PAGES * PAGE_SIZE;   // offset of the lane's page within the step, in keys
      // A page before every row's window may have been freed, and its page number may be invalid.
      if (page_key < num_keys && (!WINDOW || page_key + STEP_KEYS / STEP_PAGES > hidden_keys)) {
        const long long entry = next.at.batch * cache.table_stride + (step_key + page_key) / PAGE_SIZE;
        page = copied && first == 0 ? early_page : cache.page_table[entry];
      }
    }
    next.step += BATCH_STEPS * stride;
    smem.next[threadIdx.x] = next;
    return page;
  };
  int next_page = look_up(0), page;
  unsigned place;
  // Copies the warp's next step into buffer `slot` of its ring; does nothing past the last step.
  int fetched = 0;
  const auto fetch = [&](int slot) {
    const int i = fetched++;
    if (i >= warp_steps) return;
    if (i % BATCH_STEPS == 0) {
      const int due = next_page;
      place = smem.next[threadIdx.x].place;
      next_page = look_up(i + BATCH_STEPS);
      page = checked_page(cache, due);
    }
    if (copied && i == 0) return;
    const int from = i % BATCH_STEPS * STEP_PAGES;   // lane that looked up the step, or the step's first page
    const unsigned step_place = __shfl_sync(FULL_WARP, place, from);
    const int num_keys = step_place % KEY_COUNTS, hidden_keys = step_place / KEY_COUNTS % KEY_COUNTS;
    const int page_row = step_place / (KEY_COUNTS * KEY_COUNTS) % PAGE_STEPS * STEP_KEYS;
    const int kv_head = step_place / (KEY_COUNTS * KEY_COUNTS * PAGE_STEPS);
    copy_step(ring[slot], lane_source(p.K, kv_head, page_row), lane_source(p.V, kv_head, page_row), page, from, hidden_keys, num_keys);
  };

#pragma unroll
  for (int i = 0; i < PIPELINE_STAGES - 1; ++i) {
    fetch(i);
    ptx::cp_async_commit_group();
  }

  // The L2 cache prefetches the steps after those, for which the ring has no buffer yet, to keep the memory busy until the copies that are
  // issued when the first keys arrive. Row by row, or all rows of a page at once if they are contiguous.
  if constexpr (ALIGNED && PREFETCH_STEPS > 0) {
    constexpr int FIRST = PIPELINE_STAGES - 1;   // number of steps copied so far; the pages of the first BATCH_STEPS are looked up
    const int prefetch_end = FIRST + min(min(PREFETCH_STEPS, BATCH_STEPS - FIRST), warp_steps / PREFETCH_SHARE);
    const int rows_at_once = p.K.row_stride == HEAD_DIM && p.V.row_stride == HEAD_DIM ? STEP_KEYS / STEP_PAGES : 1;
#pragma unroll 1
    for (int i = FIRST; i < prefetch_end; ++i) {
      const int row = lane % STEP_KEYS, from = i * STEP_PAGES;   // lane that looked up the step, or the step's first page
      const int row_page = __shfl_sync(FULL_WARP, page, from + row / PAGE_SIZE % STEP_PAGES);
      const int step_place = __shfl_sync(FULL_WARP, place, from);
      const int page_row = step_place / (KEY_COUNTS * KEY_COUNTS) % PAGE_STEPS * STEP_KEYS + row % PAGE_SIZE;
      const int kv_head = step_place / (KEY_COUNTS * KEY_COUNTS * PAGE_STEPS);
      if (row_page < 0 || row >= step_place % KEY_COUNTS || row % rows_at_once != 0) continue;
      for (int k = lane / STEP_KEYS; k < 2; k += WARP / STEP_KEYS) {
        const TensorView& tensor = k == 0 ? p.K : p.V;
        ptx::cp_async_bulk_prefetch(head_of(tensor, row_page, kv_head) + page_row * tensor.row_stride, rows_at_once * ROW_BYTES);
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

  SeqTile& at = smem.at[threadIdx.x];
  at = first_tile;
  // Read only after the block-wide barrier at the end of the first tile. In shared memory these values occupy no registers.
  if (threadIdx.x == 0) {
    smem.first_block = begun_by, smem.last_of = tile_of(first_tile.batch, first_tile.tile);
    const bool ends =
        whole_steps > 0 ? blockIdx.x - begun_by == num_parts - 1 : first_step + block_steps >= steps_of(first_tile.keys);
    if (first_step == 0 || !ends) smem.last_of.num_rows = 0;
  }
  int slot = 0;
  int step = first_step + warp;   // the warp's current step, counted from the start of the current tile
  int steps_left = block_steps;
  for (int begin = first_step; steps_left > 0; begin = 0) {
    if (at.tile == seq_tiles) at.tile = 0, at.keys = keys_of(++at.batch);
    const Tile tile = tile_of(at.batch, at.tile++);
    const int keys = at.keys, tile_steps = steps_of(keys);
    const int end = min(tile_steps, begin + steps_left);   // this block's steps of the tile: [begin, end)
    steps_left -= end - begin;
    const AttentionParams seq = of_length(p, keys);
    const int hidden_steps = first_key(seq, 0) / STEP_KEYS;   // before every row's window
    const int full_keys = visible_keys(seq, q_row_of(tile, 0));   // smallest for the first row: no row's visible range ends before it
    const int full_first = first_key(seq, q_row_of(tile, tile.num_rows - 1));   // with a window: the last row's window begins last

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
    for (; step < end; step += stride) {
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
          const int num_keys = visible_keys(seq, q_row) - column;   // visible keys from this column on
          const int hidden_keys = first_key(seq, q_row) - column;   // keys from this column on that precede the row's window
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
    const bool whole = whole_steps > 0 ? num_parts == 1 : begin == 0 && end == tile_steps;
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
  const Tile tile = smem.last_of;
  if (combiners > 0 || tile.num_rows == 0) return;
  const int first_block = smem.first_block;
  num_parts = blockIdx.x - first_block + 1;
  for (int i = threadIdx.x; i < tile.num_rows * ROW_PARTS; i += THREADS) {
    const Sum sum = num_parts <= FEW_PARTS ? add_up<FEW_PARTS>(parts, first_block, 0, num_parts, i)
                                           : add_up<MANY_PARTS>(parts, first_block, 0, num_parts, i);
    finish(tile, i / ROW_PARTS, i % ROW_PARTS, sum.O, sum.max, sum.sum);
  }
}
