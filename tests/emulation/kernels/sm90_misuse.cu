// One wrong use of the asynchronous instructions for each value of `which`; the names below are what tests call them. For the
// CPU alone: what a chip makes of these is undefined.
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "ptx_sm90.cuh"

constexpr int TILE_BYTES = 8192;   // 64 rows of 128 bytes

enum Which {
  NONE, UNINITIALISED, TWICE, TOO_MANY_ARRIVALS, TOO_FEW_BYTES, TOO_MANY_BYTES, NEVER_EXPECTED, OVERWRITTEN, MISALIGNED_TILE,
  TILE_PAST_END, WRONG_RANK, NOT_A_MAP, NO_FENCE, NO_WAIT, NO_COMMIT, TOUCHED, DESCRIPTOR_PAST_END, WARP_DIFFERS, TOUCHED_WITHOUT_FENCE,
  STORE_NOT_READ, COUNT_TOO_HIGH, NO_RELEASE, TOO_MANY_REGISTERS, COPY_NOT_WAITED, ODD_BULK_BYTES,
  ODD_COORDINATE, NEGATIVE_STORE, COMMITS_DIFFER, WAIT_DIFFERS, FEWER_IN_A_WARP,
};

extern "C" __global__ void __launch_bounds__(128, 1)
sm90_misuse(const __grid_constant__ ptx::TensorMap map, const unsigned char* in, unsigned char* out, int which) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  __shared__ ptx::Mbarrier full, empty, other;
  const int thread = threadIdx.x;
  unsigned char* tile = shared_bytes;
  if (thread == 0) {
    if (which != UNINITIALISED) ptx::mbarrier_init(&full, which == COUNT_TOO_HIGH ? 2 : 1);
    if (which == TWICE) ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&empty, 128);
    ptx::mbarrier_init(&other, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (which == OVERWRITTEN && thread == 0) full.state = 0;

  if (thread == 0) {
    const int expected = which == TOO_FEW_BYTES ? TILE_BYTES - 16 : which == TOO_MANY_BYTES ? TILE_BYTES + 16 : TILE_BYTES;
    if (which == NEVER_EXPECTED) {
      ptx::mbarrier_arrive(&full);
    } else {
      ptx::mbarrier_arrive_expect_tx(&full, expected);
    }
    const unsigned char* wrong = in + (64 - reinterpret_cast<unsigned long long>(in) % 64) % 64;   // aligned as a map must be
    if (which == WRONG_RANK) ptx::cp_async_bulk_tensor_3d_load(tile, &map, &full, 0, 0, 0);
    if (which == NOT_A_MAP) ptx::cp_async_bulk_tensor_2d_load(tile, reinterpret_cast<const ptx::TensorMap*>(wrong), &full, 0, 0);
    if (which == ODD_COORDINATE) ptx::cp_async_bulk_tensor_2d_load(tile, &map, &full, 4, 0);
    if (which == NEGATIVE_STORE) ptx::cp_async_bulk_tensor_2d_store(&map, tile, 0, -1);
    if (which == MISALIGNED_TILE) tile += 16;
    if (which == TILE_PAST_END) tile += 4 * TILE_BYTES - 1024;
    ptx::cp_async_bulk_tensor_2d_load(tile, &map, &full, 0, 0);
    if (which == TOO_MANY_ARRIVALS) {
      ptx::mbarrier_arrive(&other, 2);
    }
    if (which == COPY_NOT_WAITED) {
      ptx::mbarrier_arrive_expect_tx(&other, TILE_BYTES);
      ptx::cp_async_bulk_tensor_2d_load(tile + TILE_BYTES, &map, &other, 0, 0);
    }
    if (which == ODD_BULK_BYTES) ptx::cp_async_bulk_load(tile, in, 24, &full);
  }
  ptx::mbarrier_wait_parity(&full, 0);
  if (which == NO_RELEASE) {
    if (thread < 125) ptx::mbarrier_arrive(&empty);
    ptx::mbarrier_wait_parity(&empty, 0);
  }
  if (which == TOO_MANY_REGISTERS) ptx::setmaxnreg_inc<256>();

  float d[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = 0;
  if (which != NO_FENCE) ptx::wgmma_fence();
  const unsigned offset = which == DESCRIPTOR_PAST_END ? 3 * TILE_BYTES + 1024 : which == WARP_DIFFERS && thread / 32 == 2 ? 32 : 0;
  const unsigned long long b = ptx::make_descriptor(shared_bytes + offset, 0, 1024, ptx::Swizzle::b128);
  ptx::wgmma_ss<64, __half>(d, ptx::make_descriptor(shared_bytes, 0, 1024, ptx::Swizzle::b128), b, true);
  if (which != NO_COMMIT) ptx::wgmma_commit_group();
  if (which == TOUCHED && thread == 40) d[5] *= 2;
  if (which == COMMITS_DIFFER && thread % 32 == 3) ptx::wgmma_commit_group();
  if (which == WAIT_DIFFERS && thread % 32 == 3) {
    ptx::wgmma_wait_group<1>();
  } else if (which != NO_WAIT) {
    ptx::wgmma_wait_group<0>();
  }
  if (which == FEWER_IN_A_WARP && thread < 96) {
    ptx::wgmma_fence();
    ptx::wgmma_ss<64, __half>(d, ptx::make_descriptor(shared_bytes, 0, 1024, ptx::Swizzle::b128), b, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }
  if (which == TOUCHED_WITHOUT_FENCE) {
    d[3] += 1;
    ptx::wgmma_ss<64, __half>(d, ptx::make_descriptor(shared_bytes, 0, 1024, ptx::Swizzle::b128), b, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }
  reinterpret_cast<float*>(out)[thread] = d[0];

  if (which == STORE_NOT_READ && thread == 0) {
    ptx::cp_async_bulk_store(out, shared_bytes, 256);
    ptx::cp_async_bulk_commit_group();
  }
}
