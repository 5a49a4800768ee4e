// Tensor copies: one box of a tensor of 2 to 5 dimensions into shared memory, its bytes as they lie there to `seen`, and from
// there into the same box of another tensor. Coordinates x: the box's first element, innermost first.
#include "ptx_sm90.cuh"

struct Coordinates {
  int x[5];
};

__device__ __forceinline__ void load(int rank, unsigned char* tile, const ptx::TensorMap* map, ptx::Mbarrier* barrier, const int (&x)[5]) {
  if (rank == 2) ptx::cp_async_bulk_tensor_2d_load(tile, map, barrier, x[0], x[1]);
  if (rank == 3) ptx::cp_async_bulk_tensor_3d_load(tile, map, barrier, x[0], x[1], x[2]);
  if (rank == 4) ptx::cp_async_bulk_tensor_4d_load_hint(tile, map, barrier, x[0], x[1], x[2], x[3], ptx::createpolicy_evict_first());
  if (rank == 5) ptx::cp_async_bulk_tensor_5d_load(tile, map, barrier, x[0], x[1], x[2], x[3], x[4]);
}

__device__ __forceinline__ void store(int rank, const ptx::TensorMap* map, const unsigned char* tile, const int (&x)[5], bool add) {
  if (rank == 2 && !add) ptx::cp_async_bulk_tensor_2d_store(map, tile, x[0], x[1]);
  if (rank == 3 && !add) ptx::cp_async_bulk_tensor_3d_store(map, tile, x[0], x[1], x[2]);
  if (rank == 4 && !add) ptx::cp_async_bulk_tensor_4d_store(map, tile, x[0], x[1], x[2], x[3]);
  if (rank == 5 && !add) ptx::cp_async_bulk_tensor_5d_store(map, tile, x[0], x[1], x[2], x[3], x[4]);
  if (rank == 2 && add) ptx::cp_reduce_async_bulk_tensor_2d_add(map, tile, x[0], x[1]);
  if (rank == 3 && add) ptx::cp_reduce_async_bulk_tensor_3d_add(map, tile, x[0], x[1], x[2]);
}

extern "C" __global__ void __launch_bounds__(64, 1)
sm90_tensor(const __grid_constant__ ptx::TensorMap source, const __grid_constant__ ptx::TensorMap target, unsigned char* seen,
            const __grid_constant__ Coordinates at, int rank, int bytes, int then) {   // then: 0 store, 1 add, 2 neither
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  __shared__ ptx::Mbarrier full;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(&source);
    ptx::mbarrier_init(&full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(&full, bytes);
    load(rank, shared_bytes, &source, &full, at.x);
  }
  ptx::mbarrier_wait_parity(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) seen[i] = shared_bytes[i];
  if (threadIdx.x == 0) {
    if (then != 2) store(rank, &target, shared_bytes, at.x, then == 1);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
  }
}
