// Clusters of 2 blocks: a multicast tensor copy, arrivals from the other block, its memory by pointer, by st.async and by a bulk
// copy. `result` (block, 6, 64): what each block saw.
#include "ptx_sm90.cuh"

constexpr int N = 64;
constexpr unsigned short BOTH = 3;

struct SharedStorage {
  alignas(128) int half[2][N];       // each block fetches one for both
  alignas(16) int given[N];          // by the other block's st.async
  alignas(16) int copied[N];         // by its bulk copy
  alignas(16) int own[N];
  ptx::Mbarrier full, arrived, stored;
};

#define IN_PAIRS __cluster_dims__(2, 1, 1)

extern "C" __global__ void IN_PAIRS __launch_bounds__(N, 1)
sm90_cluster(const __grid_constant__ ptx::TensorMap source, int* result) {
  __shared__ SharedStorage s;
  const unsigned rank = ptx::cluster_ctarank(), other = rank ^ 1;
  const int thread = threadIdx.x;
  int* out = result + blockIdx.x * 6 * N;
  s.own[thread] = 1000 * static_cast<int>(rank) + thread;
  if (thread == 0) {
    ptx::mbarrier_init(&s.full, 1);
    ptx::mbarrier_init(&s.arrived, N + 1);
    ptx::mbarrier_init(&s.stored, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::fence_proxy_async();   // `own` is read by a bulk copy
  ptx::cluster_arrive();
  ptx::cluster_wait();

  // Rows 2·cluster and 2·cluster + 1 of the tensor, one from each block, both to both.
  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(&s.full, 2 * sizeof s.half[0]);
    ptx::cp_async_bulk_tensor_2d_load_multicast(s.half[rank], &source, &s.full, BOTH, 0, static_cast<int>(blockIdx.x));
  }
  ptx::mbarrier_wait_parity_cluster(&s.full, 0);
  out[thread] = s.half[0][thread];
  out[N + thread] = s.half[1][thread];

  // The other block's memory by pointer; it may go on when all have read.
  out[2 * N + thread] = ptx::mapa(&s.own[0], other)[thread];
  ptx::mbarrier_arrive_cluster(&s.arrived, other);

  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx_cluster(&s.arrived, 0, other);
    ptx::mbarrier_arrive_expect_tx(&s.stored, sizeof s.given + sizeof s.copied);
    ptx::cp_async_bulk_to_block(s.copied, s.own, sizeof s.own, &s.stored, other);
  }
  ptx::st_async(reinterpret_cast<unsigned*>(&s.given[thread]), 7u * thread + rank, &s.stored, other);
  ptx::mbarrier_wait_parity_cluster(&s.stored, 0);
  out[3 * N + thread] = s.given[thread];
  out[4 * N + thread] = s.copied[thread];
  ptx::mbarrier_wait_parity_cluster(&s.arrived, 0);
  out[5 * N + thread] = static_cast<int>(ptx::cluster_nctarank());
  ptx::cluster_arrive();   // a block must not end while the other may still reach for its memory
  ptx::cluster_wait();
}
