// O = Q + K + V, row by row, through the launcher's tensor maps, by persistent blocks: no attention, but launched as a stage is.
#include "hopper.cuh"

constexpr int THREADS = 128;
constexpr int TILE_Q = 64;
constexpr int BOX_KV = 32;
constexpr int SPAN = 64;                       // elements: 128 bytes, over which tiles are swizzled
constexpr int SUM_PANELS = HEAD_DIM / SPAN;
constexpr int BYTES_A_TILE = TILE_Q * HEAD_DIM * 2;
constexpr int SMEM_ALIGNMENT = 1024;            // the swizzle repeats after so many bytes

struct SharedStorage {
  alignas(SMEM_ALIGNMENT) element Q[SUM_PANELS][TILE_Q][SPAN];
  alignas(SMEM_ALIGNMENT) element K[TILE_Q / BOX_KV][SUM_PANELS][BOX_KV][SPAN];
  alignas(SMEM_ALIGNMENT) element V[TILE_Q / BOX_KV][SUM_PANELS][BOX_KV][SPAN];
  alignas(SMEM_ALIGNMENT) element O[TILE_Q / WARP_ROWS][SUM_PANELS][WARP_ROWS][SPAN];
  ptx::Mbarrier full;
  unsigned tile;
};

extern "C" __device__ const LaunchShape launch_shape = {THREADS, sizeof(SharedStorage), TILE_Q, TILE_Q, BOX_KV, 1};

// 16-byte pieces of a row of 128 bytes are exchanged by the row's place in its 8 rows.
__device__ __forceinline__ int in_span(int row, int column) { return (column / 8 ^ row % 8) * 8 + column % 8; }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_99_sum(const __grid_constant__ AttentionParams p, const __grid_constant__ AttentionMaps maps) {
  extern __shared__ __align__(SMEM_ALIGNMENT) unsigned char shared_bytes[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const unsigned tiles_a_head = (p.q_len + TILE_Q - 1) / TILE_Q;
  const unsigned num_tiles = tiles_a_head * p.q_heads * p.batch;
  if (threadIdx.x == 0) {
    if (ptx::smem_address(shared_bytes) % SMEM_ALIGNMENT != 0) __trap();
    ptx::mbarrier_init(&s.full, 1);
    ptx::fence_proxy_async_shared();
  }
  __syncthreads();

  for (unsigned parity = 0;; parity ^= 1) {
    if (threadIdx.x == 0) s.tile = atomicAdd(&p.work[0], 1u);
    __syncthreads();   // the tile is chosen
    const unsigned tile = s.tile;
    if (tile >= num_tiles) break;
    const int row = tile % tiles_a_head * TILE_Q, head = tile / tiles_a_head % p.q_heads, batch = tile / tiles_a_head / p.q_heads;
    const int kv_head = kv_head_of(p, head);

#if ALIGNED
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(&s.full, 3 * BYTES_A_TILE);
      ptx::cp_async_bulk_tensor_5d_load(s.Q, &maps.Q, &s.full, 0, row, 0, head, batch);
      for (int box = 0; box < TILE_Q / BOX_KV; ++box) {
        ptx::cp_async_bulk_tensor_5d_load(s.K[box], &maps.K, &s.full, 0, row + box * BOX_KV, 0, kv_head, batch);
        ptx::cp_async_bulk_tensor_5d_load(s.V[box], &maps.V, &s.full, 0, row + box * BOX_KV, 0, kv_head, batch);
      }
    }
    ptx::mbarrier_wait_parity(&s.full, parity);
    for (int i = threadIdx.x; i < TILE_Q * HEAD_DIM; i += THREADS) {
      const int r = i / HEAD_DIM, panel = i % HEAD_DIM / SPAN, column = i % SPAN;
      const int box = r / BOX_KV, in_box = r % BOX_KV;
      s.O[r / WARP_ROWS][panel][r % WARP_ROWS][in_span(r, column)] =
          from_float<element>(to_float(s.Q[panel][r][in_span(r, column)]) +
                              to_float(s.K[box][panel][in_box][in_span(in_box, column)]) +
                              to_float(s.V[box][panel][in_box][in_span(in_box, column)]));
    }
    ptx::fence_proxy_async_shared();   // the store reads what threads wrote
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int box = 0; box < TILE_Q / WARP_ROWS; ++box) {
        ptx::cp_async_bulk_tensor_5d_store(&maps.O, s.O[box], 0, row + box * WARP_ROWS, 0, head, batch);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
      ptx::fence_proxy_async_shared();   // the next tile's copies come after the sums
    }
#else
    const element* Q_gmem = head_of(p.Q, batch, head);
    const element* K_gmem = head_of(p.K, batch, kv_head);
    const element* V_gmem = head_of(p.V, batch, kv_head);
    for (int i = threadIdx.x; i < TILE_Q * HEAD_DIM; i += THREADS) {
      const long long r = row + i / HEAD_DIM, d = i % HEAD_DIM;
      if (r < p.q_len) {
        head_of(p.O, batch, head)[r * p.O.row_stride + d] =
            from_float<element>(to_float(Q_gmem[r * p.Q.row_stride + d]) + to_float(K_gmem[r * p.K.row_stride + d]) +
                                to_float(V_gmem[r * p.V.row_stride + d]));
      }
    }
    __syncthreads();   // all have read s.tile
#endif
  }
#if ALIGNED
  if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group<0>();
#endif
  if (threadIdx.x == 0 && atomicAdd(&p.work[1], 1u) == gridDim.x - 1) {
    atomicExch(&p.work[0], 0u);
    atomicExch(&p.work[1], 0u);
  }
}
