// 09_wgmma: a warpgroup multiplies 64 rows at once, and a copy engine fetches its tiles. Parent: 08_swizzle.
// Question: what do Hopper's own matrix instruction and tensor copies bring, in a loop that is otherwise the same?
// Change: wgmma multiplies Q·K from shared memory and P·V with P from registers; one thread starts a tensor copy per tile, which
//         lays it down swizzled, and an mbarrier announces it. No thread computes an address or waits for its own copy.
// Layout: warpgroup w of block x works on rows x·TILE_Q + 64·w onwards; see hopper.cuh for tiles and registers.
// Requires: sm_90a.
#include "hopper.cuh"

// For ablations, what the stage does first. FEED: tiles by tensor copies (0), or by every thread's own cp.async, 16 bytes each (1).
// DESCENDING: the last keys first.
#ifndef FEED
#define FEED 0
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif

constexpr int THREADS = NUM_WARPGROUPS * WARPGROUP;
constexpr int TILE_Q = NUM_WARPGROUPS * WGMMA_ROWS;
static_assert(TILE_KV % WGMMA_STEP == 0 && TILE_KV <= 256, "TILE_KV must be a multiple of 16 up to 256: an instruction's N and K");
static_assert(FEED <= 1 && DESCENDING <= 1, "FEED and DESCENDING are 0 or 1");
static_assert(PIPELINE_STAGES >= 2, "one buffer must be free to be filled while another is in use");

struct SharedStorage {
  alignas(PATTERN_BYTES) element Q[NUM_WARPGROUPS][WGMMA_ROWS * HEAD_DIM];   // each warpgroup's own; then its output
  alignas(PATTERN_BYTES) element K[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  alignas(PATTERN_BYTES) element V[PIPELINE_STAGES][TILE_KV * HEAD_DIM];
  ptx::Mbarrier Q_full;
  ptx::Mbarrier KV_full[PIPELINE_STAGES];
};
static_assert(sizeof(SharedStorage) <= BLOCK_SMEM_BYTES, "the tiles must fit into shared memory: fewer keys, rows or buffers");

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, WGMMA_ROWS, TILE_KV};

constexpr bool BY_THREADS = FEED && ALIGNED;   // rows that are not aligned are copied by hand either way

// `fill` by cp.async: all threads call it, commit the group and wait for it, each for its own copies.
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

  const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);   // by a shuffle, so that ptxas sees one for a warp
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

  const int block_keys = visible_keys(p, min(first_q_row + TILE_Q, p.q_len) - 1);   // the last row sees the most
  const int num_tiles = (block_keys + TILE_KV - 1) / TILE_KV;
  const int lane_row = group_q_row + warp * 16 + lane / ROW_LANES;
  const int lane_col = lane % ROW_LANES * 2;
  const int unmasked_keys = p.scale_log2 > 0.0f ? visible_keys(p, group_q_row) : 0;   // by all rows of the warpgroup

  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&smem.Q_full, FILL_ARRIVALS<THREADS>);
    for (int stage = 0; stage < PIPELINE_STAGES; ++stage) ptx::mbarrier_init(&smem.KV_full[stage], FILL_ARRIVALS<THREADS>);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();   // the barriers exist

  const bool fills = !ALIGNED || threadIdx.x == 0;
  // Fetch one tile into its buffer of the ring.
  const auto fetch = [&](int tile) {
    const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
    if constexpr (BY_THREADS) {
      if (tile < num_tiles) {
        fill_by_threads<TILE_KV>(smem.K[tile % PIPELINE_STAGES], K_source, tile_key);
        fill_by_threads<TILE_KV>(smem.V[tile % PIPELINE_STAGES], V_source, tile_key);
      }
      ptx::cp_async_commit_group();   // empty past the last tile, so that the number of groups is the number of tiles
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
  if constexpr (!BY_THREADS) ptx::mbarrier_wait_parity(&smem.Q_full, 0);   // else Q is in the first tile's group

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % PIPELINE_STAGES;
    const int tile_key = (DESCENDING ? num_tiles - 1 - tile : tile) * TILE_KV;
    if constexpr (BY_THREADS) {
      ptx::cp_async_wait_group<PIPELINE_STAGES - 2>();   // this thread's copies of the tile have landed
      ptx::fence_proxy_async_shared();                   // the tensor cores will read them
    } else {
      ptx::mbarrier_wait_parity(&smem.KV_full[stage], tile / PIPELINE_STAGES & 1);
    }
    __syncthreads();   // everyone is done with the previous tile, whose buffer is next to be filled
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
  if constexpr (BY_THREADS) ptx::cp_async_wait_all();   // where no row sees a key, Q is still on its way
  __syncthreads();   // everyone is done with Q, whose place the output takes

  write_output(p, O_reg, rows, smem.Q[warpgroup], warp, lane, group_q_row, head, batch);
}
