// Attention, (heads, length, 64) in fp16, as Hopper kernels are built: one warpgroup fetches tiles of K and V with tensor copies
// into a ring, another multiplies them with wgmma, the probabilities straight from its registers; mbarriers in between.
#include <cuda_fp16.h>

#include "ptx_sm90.cuh"

using ptx::Major;
using ptx::Swizzle;

constexpr int D = 64;
constexpr int TILE_Q = 64;
constexpr int TILE_KV = 64;
constexpr int STAGES = 2;
constexpr int WARPGROUP = 128;
constexpr int WARPS_A_GROUP = 4;
constexpr int TILE_BYTES = TILE_KV * D * 2;
constexpr int ROW_BYTES = D * 2;                 // one span of the 128-byte swizzle
constexpr int CORE_BYTES = 8 * ROW_BYTES;        // from one 8 rows to the next
constexpr int STEP = 16;                         // of K, an instruction
constexpr float MINUS_INFINITY = -1e30f;         // finite, so that a difference of two is a number

struct SharedStorage {
  alignas(1024) unsigned char Q[TILE_BYTES];
  alignas(1024) unsigned char K[STAGES][TILE_BYTES];
  alignas(1024) unsigned char V[STAGES][TILE_BYTES];
  ptx::Mbarrier Q_full, K_full[STAGES], V_full[STAGES], empty[STAGES];
};

__device__ __forceinline__ unsigned pack(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&both);
}

__device__ void produce(SharedStorage& s, const ptx::TensorMap& Q, const ptx::TensorMap& K, const ptx::TensorMap& V, int num_tiles) {
  const int head = blockIdx.y;
  ptx::mbarrier_arrive_expect_tx(&s.Q_full, TILE_BYTES);
  ptx::cp_async_bulk_tensor_3d_load(s.Q, &Q, &s.Q_full, 0, blockIdx.x * TILE_Q, head);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    if (round > 0) ptx::mbarrier_wait_parity(&s.empty[stage], (round - 1) & 1);   // its last tile has been used
    ptx::mbarrier_arrive_expect_tx(&s.K_full[stage], TILE_BYTES);
    ptx::cp_async_bulk_tensor_3d_load(s.K[stage], &K, &s.K_full[stage], 0, tile * TILE_KV, head);
    ptx::mbarrier_arrive_expect_tx(&s.V_full[stage], TILE_BYTES);
    ptx::cp_async_bulk_tensor_3d_load(s.V[stage], &V, &s.V_full[stage], 0, tile * TILE_KV, head);
  }
}

__device__ void consume(SharedStorage& s, __half* O_gmem, int length, float scale_log2, int num_tiles) {
  const int thread = threadIdx.x - WARPGROUP, lane = thread % 32;
  const int q_row = blockIdx.x * TILE_Q + thread / 32 * 16 + lane / 4;   // and 8 further
  float O_reg[D / 2], S_reg[TILE_KV / 2], row_max[2] = {MINUS_INFINITY, MINUS_INFINITY}, row_sum[2] = {};
#pragma unroll
  for (int i = 0; i < D / 2; ++i) O_reg[i] = 0;
  ptx::mbarrier_wait_parity(&s.Q_full, 0);

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % STAGES;
    const unsigned parity = tile / STAGES & 1;
    ptx::mbarrier_wait_parity(&s.K_full[stage], parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < D; d += STEP) {
      ptx::wgmma_ss<TILE_KV, __half>(S_reg, ptx::make_descriptor(s.Q + d * 2, 0, CORE_BYTES, Swizzle::b128),
                                     ptx::make_descriptor(s.K[stage] + d * 2, 0, CORE_BYTES, Swizzle::b128), d > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(S_reg);

    float old_max[2] = {row_max[0], row_max[1]};
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) {
      const int h = i / 2 % 2, key = tile * TILE_KV + i / 4 * 8 + lane % 4 * 2 + i % 2;
      S_reg[i] = key < length ? S_reg[i] * scale_log2 : MINUS_INFINITY;
      row_max[h] = fmaxf(row_max[h], S_reg[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffffffffu, row_max[h], 1));
      row_max[h] = fmaxf(row_max[h], __shfl_xor_sync(0xffffffffu, row_max[h], 2));
      row_sum[h] *= exp2f(old_max[h] - row_max[h]);
    }
#pragma unroll
    for (int i = 0; i < D / 2; ++i) O_reg[i] *= exp2f(old_max[i / 2 % 2] - row_max[i / 2 % 2]);
    unsigned P_reg[TILE_KV / STEP][4];
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; i += 2) {
      const int h = i / 2 % 2;
      const float x = exp2f(S_reg[i] - row_max[h]), y = exp2f(S_reg[i + 1] - row_max[h]);
      row_sum[h] += x + y;
      P_reg[i / 8][i / 4 % 2 * 2 + h] = pack(x, y);
    }

    ptx::mbarrier_wait_parity(&s.V_full[stage], parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE_KV; k += STEP) {
      ptx::wgmma_rs<D, __half, Major::MN>(O_reg, P_reg[k / STEP],
                                          ptx::make_descriptor(s.V[stage] + k * ROW_BYTES, 0, CORE_BYTES, Swizzle::b128), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(O_reg);
    if (lane == 0) ptx::mbarrier_arrive(&s.empty[stage]);   // this warp is done with both tiles
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 1);
    row_sum[h] += __shfl_xor_sync(0xffffffffu, row_sum[h], 2);
  }
#pragma unroll
  for (int i = 0; i < D / 2; i += 2) {
    const int h = i / 2 % 2, row = q_row + h * 8, d = i / 4 * 8 + lane % 4 * 2;
    if (row < length) {
      const long long at = (static_cast<long long>(blockIdx.y) * length + row) * D + d;
      *reinterpret_cast<unsigned*>(O_gmem + at) = pack(O_reg[i] / row_sum[h], O_reg[i + 1] / row_sum[h]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP, 1)
sm90_attention(const __grid_constant__ ptx::TensorMap Q, const __grid_constant__ ptx::TensorMap K,
               const __grid_constant__ ptx::TensorMap V, __half* O, int length, float scale_log2) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int num_tiles = (length + TILE_KV - 1) / TILE_KV;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&s.Q_full, 1);
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(&s.K_full[stage], 1);
      ptx::mbarrier_init(&s.V_full[stage], 1);
      ptx::mbarrier_init(&s.empty[stage], WARPS_A_GROUP);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce(s, Q, K, V, num_tiles);
  } else {
    ptx::setmaxnreg_inc<232>();
    consume(s, O, length, scale_log2, num_tiles);
  }
}
