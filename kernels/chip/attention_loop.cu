// attention_loop: the inner loop of an attention kernel reduced to GEMMs and softmax: no copies, no barriers, the same tile in every
// iteration. RESCALE: the output is rescaled at every tile, as if a maximum had grown each time. Its time is a lower bound for
// every kernel whose loop has the same ORDER:
//   SERIAL    a warpgroup waits for QK, computes the softmax, waits for PV
//   ACROSS    QK of the next tile is issued, then PV of this one, and the softmax of the next tile overlaps PV
//   SUBTILES  a warpgroup has two tiles of 64 rows: the GEMMs of one are in flight during the softmax of the other
//   HALVES    the same, but the maxima are computed before the GEMMs are issued, and only the exponentials overlap them
// ANCHORED: forces this order on ptxas, which otherwise schedules GEMMs, waits and arithmetic as it likes.
// DETAILS adds to ACROSS what a kernel cannot do without: 1, warpgroups issue GEMMs in ping-pong order, by named barriers; 2, mbarriers
// are tested before tiles are used, and arrived on afterwards; 4, a warp vote on whether a sum was too large, and a branch.
#include "softmax.cuh"

#define SERIAL 0
#define ACROSS 1
#define SUBTILES 2
#define HALVES 3

#define ORDERED 1
#define ASKS 2
#define VOTES 4

constexpr int GROUPS = THREADS / 128;
constexpr int BARRIER_BYTES = 16;
constexpr float LARGEST = 3.0e38f;   // limit of a sum; never reached
constexpr int Q_BYTES = 64 * HEAD_DIM * 2;
constexpr int K_BYTES = KEYS * HEAD_DIM * 2;
// N of the PV GEMM. Where TAKE_SUM is 2 it also computes the row sums, as if V had 8 columns of ones beside it.
constexpr int OUTPUT_WIDTH = HEAD_DIM + (TAKE_SUM == 2 ? 8 : 0);
constexpr int TILES = ORDER >= SUBTILES ? 2 : 1;

extern __shared__ __align__(1024) unsigned char smem[];

// A thread's registers for 64 query rows of its warpgroup.
struct Tile {
  float s[KEYS / 2];
  unsigned p[KEYS / 16][4];
  float o[OUTPUT_WIDTH / 2];
  float row_max[2];
  float row_sum[2];
};

// Issues S = Q · K.
__device__ __forceinline__ void begin_scores(Tile& tile, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int q_step = step / 4 * 64 * ROW_BYTES + step % 4 * 32;
    const int k_step = step / 4 * KEYS * ROW_BYTES + step % 4 * 32;
    ptx::wgmma_ss<KEYS, __half>(tile.s, q + q_step / 16, k + k_step / 16, step > 0);
  }
}

// Issues O += P · V.
__device__ __forceinline__ void begin_output(Tile& tile, unsigned long long v) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    ptx::wgmma_rs<OUTPUT_WIDTH, __half, ptx::Major::MN>(tile.o, tile.p[step], v + step * 2 * PATTERN_BYTES / 16, true);
  }
}

// Rescales the output by the rows' maxima, where RESCALE is 1. No wgmma may be writing it.
__device__ __forceinline__ void rescale(Tile& tile, float scale) {
  if (!RESCALE) return;
#pragma unroll
  for (int i = 0; i < OUTPUT_WIDTH / 2; ++i) tile.o[i] *= tile.row_max[i / 2 % 2] * scale;
}

__device__ __forceinline__ void take_softmax(Tile& tile, float scale) {
  softmax<KEYS / 2, TAKE_MAX, TAKE_SUM == 1, POLYNOMIAL_EVERY, TAKE_MAX>(tile.s, tile.row_max, tile.row_sum, scale);
}

// ptxas moves arithmetic across wgmma.wait_group, which to it is an instruction without operands: it schedules the exponentials
// after the wait, so they do not overlap the GEMMs. It does not move a __syncwarp whose mask depends on a computed value. `value`
// never has this bit pattern, which is a NaN.
__device__ __forceinline__ void anchor(float value) { __syncwarp(__float_as_uint(value) == 0x7fffffffu ? 1u : 0xffffffffu); }

// Returns `scale` such that arithmetic that uses it is scheduled after the GEMMs issued before: ptxas does not move them across
// a read of the cycle counter, whose upper two bits are 0.
__device__ __forceinline__ float after(float value, float scale) {
  anchor(value);
  return __int_as_float(__float_as_int(scale) + static_cast<int>(clock64() >> 62));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chip_attention_loop(const __grid_constant__ MicroParams p) {
  fill(reinterpret_cast<unsigned*>(smem), SMEM_BYTES - BARRIER_BYTES);
  const float* in = static_cast<const float*>(p.in);
  float scale = in[0];
  const unsigned char* const q_smem = smem + threadIdx.x / 128 * TILES * Q_BYTES;
  const unsigned long long q = k_major(q_smem);
  const unsigned long long k = k_major(smem + GROUPS * TILES * Q_BYTES);
  const unsigned long long v = mn_major(smem + GROUPS * TILES * Q_BYTES + K_BYTES, KEYS);
  Tile tile[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) tile[t].s[i] = in[i];
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) tile[t].p[i / 4][i % 4] = threadIdx.x + i;
#pragma unroll
    for (int i = 0; i < OUTPUT_WIDTH / 2; ++i) tile[t].o[i] = 0.0f;
    tile[t].row_max[0] = tile[t].row_max[1] = tile[t].row_sum[0] = tile[t].row_sum[1] = 0.0f;
  }
  const int group = threadIdx.x / 128;
  ptx::Mbarrier* const tiles_came = reinterpret_cast<ptx::Mbarrier*>(smem + SMEM_BYTES - BARRIER_BYTES);
  ptx::Mbarrier* const tiles_done = tiles_came + 1;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(tiles_came, 1);
    ptx::mbarrier_init(tiles_done, THREADS / 32);
    ptx::fence_mbarrier_init();
  }
  bool came = false;
  __syncthreads();   // the barriers are initialised, and all warps start together
  if (DETAILS & ORDERED && group == GROUPS - 1) ptx::bar_arrive(1, 256);    // warpgroup 0 issues first
  const long long start = clock64();
#pragma unroll 1
  for (long long repeat = 0; repeat < p.repeats; ++repeat) {
#if ORDER == SERIAL
    ptx::wgmma_fence();
    begin_scores(tile[0], q, k);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(tile[0].s);
    take_softmax(tile[0], scale);
    pack_all(tile[0].s, tile[0].p);
    rescale(tile[0], scale);
    ptx::wgmma_fence();
    begin_output(tile[0], v);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(tile[0].o);
#elif ORDER == ACROSS
    if (DETAILS & ASKS && !came) came = ptx::mbarrier_test_wait_parity(tiles_came, 1);
    if (DETAILS & ORDERED) ptx::bar_sync(1 + group, 256);
    ptx::wgmma_fence();
    begin_scores(tile[0], q, k);
    ptx::wgmma_commit_group();
    begin_output(tile[0], v);
    ptx::wgmma_commit_group();
    if (DETAILS & ORDERED) ptx::bar_arrive(1 + (group + 1) % GROUPS, 256);
    ptx::wgmma_wait_group<1>();   // QK is complete; PV is in flight
    ptx::wgmma_pin(tile[0].s);
    if (DETAILS & ASKS) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(tiles_done);
      came = ptx::mbarrier_test_wait_parity(tiles_came, 1);   // tested early, because the test has some latency
    }
    take_softmax(tile[0], scale);
    if (ANCHORED) anchor(TAKE_SUM == 1 ? tile[0].row_sum[0] : tile[0].s[0]);
    ptx::wgmma_wait_group<0>();   // PV is complete: P may be overwritten
    ptx::wgmma_pin(tile[0].o);
    if (DETAILS & VOTES && __any_sync(0xffffffffu, !(tile[0].row_sum[0] < LARGEST && tile[0].row_sum[1] < LARGEST))) {
      tile[0].row_sum[0] = tile[0].row_sum[1] = 0.0f;
    } else {
      pack_all(tile[0].s, tile[0].p);
    }
    rescale(tile[0], scale);
#else
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#if ORDER == HALVES
      scale_scores<KEYS / 2, TAKE_MAX, TAKE_MAX>(tile[1 - t].s, tile[1 - t].row_max, scale);
#endif
      rescale(tile[t], scale);
      ptx::wgmma_fence();
      begin_output(tile[t], v);
      begin_scores(tile[t], q + t * Q_BYTES / 16, k);
      ptx::wgmma_commit_group();
#if ORDER == HALVES
      if (ANCHORED) tile[1 - t].s[0] = after(tile[1 - t].s[0], tile[1 - t].s[0]);
      take_powers<KEYS / 2, TAKE_SUM == 1, POLYNOMIAL_EVERY>(tile[1 - t].s, tile[1 - t].row_sum);
#else
      if (ANCHORED) scale = after(tile[1 - t].s[0], scale);
      take_softmax(tile[1 - t], scale);
#endif
      pack_all(tile[1 - t].s, tile[1 - t].p);
      if (ANCHORED) anchor(TAKE_SUM == 1 ? tile[1 - t].row_sum[0] : tile[1 - t].s[0]);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_pin(tile[t].s);
      ptx::wgmma_pin(tile[t].o);
    }
#endif
  }
  const long long end = clock64();
  if (DETAILS & ORDERED && group == 0) ptx::bar_sync(1, 256);    // consumes the last arrival: no barrier is left half full
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    keep_all(p, tile[t].o, p.count < 0);
    keep_all(p, tile[t].row_sum, p.count < 0);
  }
  report(p, start, end, p.repeats);
}
