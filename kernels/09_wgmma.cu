// 09_wgmma: a warpgroup multiplies 64 rows per instruction, and TMA loads its tiles. Parent: 08_swizzle.
// Question: what do Hopper's wgmma and TMA loads gain, in a loop that is otherwise that of 07_mma_registers?
// Change: wgmma computes Q·K from shared memory and P·V with P from registers; one thread issues a TMA load per tile, which writes
//         it swizzled, and an mbarrier signals its arrival. The parent's scores one tile ahead, lazy rescaling and sums by MMA are gone.
// Layout: warpgroup w of block x works on rows x·TILE_Q + 64·w onwards; see hopper.cuh for the layout of tiles and registers.
// Requires: sm_90a.
#include "hopper.cuh"

// Ablations; the stage itself uses 0. FEED: tiles are loaded by TMA (0), or by all threads with cp.async, 16 bytes each (1).
// DESCENDING 1: KV tiles run from last to first.
#ifndef FEED
#define FEED 0
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif

constexpr int THREADS = NUM_WARPGROUPS * WARPGROUP;
constexpr int TILE_Q = NUM_WARPGROUPS * WGMMA_ROWS;
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 (wgmma K) and at most 256 (wgmma N)");
static_assert(FEED <= 1 && DESCENDING <= 1, "FEED and DESCENDING are 0 or 1");
static_assert(PIPELINE_STAGES >= 2, "PIPELINE_STAGES must be at least 2: one buffer is filled while another is in use");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[NUM_WARPGROUPS][WGMMA_ROWS * HEAD_DIM];   // one tile per warpgroup, later its output
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  ptx::Mbarrier Q_full;
  ptx::Mbarrier KV_full[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV};

constexpr bool BY_THREADS = FEED && ALIGNED;   // unaligned rows are copied by plain loads and stores either way

// `fill` with cp.async: all threads call it; each commits the group and waits for it, for its own copies.
template <int ROWS>
__device__ __forceinline__ void fill_by_threads(element* tile_smem, const Source& source, int first_row) {
  using Share = TileShare<ROWS, THREADS>;
  const Share share;
  const element* head_gmem = head_of(*source.view, source.batch, source.head);
#pragma unroll
  for (int row = share.row; row < ROWS; row += Share::ROWS_PER_STEP) {
    const bool exists = first_row + row < source.length;
    const element* row_gmem = head_gmem + (exists ? first_row + row : 0) * source.view->row_stride;
    ptx::cp_async_cg_16(tile_smem + tile_offset<ROWS>(row, share.d / CHUNK), row_gmem + share.d, exists ? sizeof(Chunk) : 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_09_wgmma(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_bytes);

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // broadcast from lane 0, so that it is warp-uniform to ptxas
  const int warp = threadIdx.x % WARPGROUP / WARP;
  const int lane = threadIdx.x % WARP;
  const int first_q_row = blockIdx.x * TILE_Q;
  const int group_q_row = first_q_row + warpgroup * WGMMA_ROWS;
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int kv_head = kv_head_of(p, head);
  const Source Q_source = {&maps.Q, &p.Q, p.q_len, head, batch};
  const Source K_source = {&maps.K, &p.K, p.kv_len, kv_head, batch};
  const Source V_source = {&maps.V, &p.V, p.kv_len, kv_head, batch};

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // largest for the last row
  const int num_tiles = (block_keys + TILE_KV - 1) / TILE_KV;
  const int lane_row = group_q_row + warp * 16 + lane / ROW_LANES;
  const int lane_col = lane % ROW_LANES * 2;
  const int unmasked_keys = p.scale_log2 > 0.0f ? visible_keys(p, group_q_row) : 0;   // keys visible to all of the warpgroup's rows

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&smem.Q_full, FILL_ARRIVALS<THREADS>);
    for (int stage = 0; stage < PIPELINE_STAGES; ++stage) ptx::mbarrier_init(&smem.KV_full[stage], FILL_ARRIVALS<THREADS>);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the mbarriers are initialised

  const bool fills = !ALIGNED || threadIdx.x == 0;
  // Loads a tile of K and V into its stage of the ring.
  const auto fetch = [&](int tile) {
    const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
    if constexpr (BY_THREADS) {
      if (tile < num_tiles) {
        fill_by_threads<TILE_KV>(smem.K[tile % PIPELINE_STAGES], K_source, tile_key);
        fill_by_threads<TILE_KV>(smem.V[tile % PIPELINE_STAGES], V_source, tile_key);
      }
      ptx::cp_async_commit_group();   // empty past the last tile, because the wait below counts one group per tile
    } else if (fills && tile < num_tiles) {
      const int stage = tile % PIPELINE_STAGES;
      ptx::Mbarrier* full = &smem.KV_full[stage];
      fill_begin(full, 2 * TILE_BYTES<TILE_KV>);
      fill<TILE_KV, THREADS>(smem.K[stage], K_source, tile_key, full, threadIdx.x);
      fill<TILE_KV, THREADS>(smem.V[stage], V_source, tile_key, full, threadIdx.x);
      fill_end(full);
    }
  };
  if constexpr (BY_THREADS) {
    for (int i = 0; i < NUM_WARPGROUPS; ++i) fill_by_threads<WGMMA_ROWS>(smem.Q[i], Q_source, first_q_row + i * WGMMA_ROWS);
  } else if (fills) {
    fill_begin(&smem.Q_full, TILE_BYTES<TILE_Q>);
    for (int i = 0; i < NUM_WARPGROUPS; ++i) {
      fill<WGMMA_ROWS, THREADS>(smem.Q[i], Q_source, first_q_row + i * WGMMA_ROWS, &smem.Q_full, threadIdx.x);
    }
    fill_end(&smem.Q_full);
  }
  for (int tile = 0; tile < PIPELINE_STAGES - 1; ++tile) fetch(tile);

  const Descriptor Q_desc = rows_descriptor(smem.Q[warpgroup]);
  const Descriptor K_desc = rows_descriptor(smem.K[0]);
  const Descriptor V_desc = columns_descriptor<TILE_KV>(smem.V[0]);
  float O_reg[HEAD_DIM / 2] = {};
  RowState rows;
  if constexpr (!BY_THREADS) ptx::mbarrier_wait_parity(&smem.Q_full, 0);   // with cp.async, Q is in the first tile's group

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % PIPELINE_STAGES;
    const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
    if constexpr (BY_THREADS) {
      ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this thread's copies of the tile are complete
      ptx::fence_proxy_async_shared();                   // orders them before wgmma's reads in the async proxy
    } else {
      ptx::mbarrier_wait_parity(&smem.KV_full[stage], tile / PIPELINE_STAGES & 1);
    }
    __syncthreads();   // all warps are done with the previous tile, whose buffer is filled next
    fetch(tile + PIPELINE_STAGES - 1);

    float S_reg[TILE_KV / 2];
    ptx::wgmma_fence();
    multiply_QK<TILE_KV>(S_reg, Q_desc, K_desc + descriptor_step(stage * TILE_BYTES<TILE_KV>));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(S_reg);

    int num_keys[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) num_keys[h] = visible_keys(p, lane_row + 8 * h) - tile_key - lane_col;
    float rescale[HALVES];
    softmax<TILE_KV>(S_reg, rows, rescale, p.scale_log2, tile_key + TILE_KV > unmasked_keys, num_keys);
    scale_O(O_reg, rescale);
    unsigned P_reg[TILE_KV / WGMMA_STEP][4];
    round_P<TILE_KV>(P_reg, S_reg);

    ptx::wgmma_fence();
    multiply_PV<TILE_KV>(O_reg, P_reg, V_desc + descriptor_step(stage * TILE_BYTES<TILE_KV>));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(O_reg);
  }
  if constexpr (BY_THREADS) ptx::cp_async_wait_all();   // if no row has a visible key, Q may still be in flight
  __syncthreads();   // all warps are done with Q, whose buffer is reused for the output

  write_output(p, O_reg, rows, smem.Q[warpgroup], warp, lane, group_q_row, head, batch);
}
