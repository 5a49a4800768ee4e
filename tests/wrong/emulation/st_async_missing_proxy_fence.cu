// bug: what st.async has stored is handed to the copy engine without a fence: st.async itself needs none after plain stores.
// mechanism: asynchronous store, proxy fence
// caught by: missing fence
// needs: hooks
// launch: grid=4 block=64 smem=0 cluster=2
// parameter: values i32[4,64] range=1000
// parameter: out i32[4,64] written
// expect: out = values[[1, 0, 3, 2]] * 3
#include "ptx_sm90.cuh"

constexpr int COLS = 64;

extern "C" __global__ void __cluster_dims__(2, 1, 1) st_async_missing_proxy_fence(const int* values, int* out) {
  __shared__ __align__(16) unsigned row_smem[COLS];
  __shared__ ptx::Mbarrier full;
  const int col = threadIdx.x;
  const unsigned peer = ptx::cluster_ctarank() ^ 1;
  row_smem[col] = 0;   // a plain store, that st.async replaces
  if (col == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&full, sizeof row_smem);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();   // the barriers of both blocks are ready
  ptx::st_async(&row_smem[col], 3u * values[blockIdx.x * COLS + col], &full, peer);   // here
  ptx::mbarrier_wait_parity_cluster(&full, 0);
  if (col == 0) {
#if !BUG
    ptx::fence_proxy_async();
#endif
    ptx::cp_async_bulk_store(out + blockIdx.x * COLS, row_smem, sizeof row_smem);   // here
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
  }
  ptx::cluster_arrive();   // a block must not end while the other may still store into its memory
  ptx::cluster_wait();
}
