// Copies that are no tensors', and barriers in every form: cp.async counted by an mbarrier, bulk copies both ways, states and
// parities, polling. in, out: (2, 256) ints; out = in + 1, and row 1 twice as much.
#include "ptx.cuh"
#include "ptx_sm90.cuh"

constexpr int N = 256;            // ints a row
constexpr int THREADS = 64;
constexpr int CHUNK = 4;          // ints that one cp.async moves
constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_copies(const int* in, int* out) {
  __shared__ __align__(16) int first[N];
  __shared__ __align__(16) int second[N];
  __shared__ ptx::Mbarrier by_threads, by_bytes, warps_done;
  const int thread = threadIdx.x;
  if (thread == 0) {
    ptx::mbarrier_init(&by_threads, THREADS);
    ptx::mbarrier_init(&by_bytes, 2);
    ptx::mbarrier_init(&warps_done, WARPS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // Row 0 by cp.async of every thread, row 1 by one bulk copy in two halves, the second expected apart.
  for (int i = thread * CHUNK; i < N; i += THREADS * CHUNK) ptx::cp_async_cg_16(first + i, in + i, 16);
  ptx::cp_async_mbarrier_arrive_noinc(&by_threads);
  if (thread / 32 == 0 && ptx::elect_sync()) {
    ptx::mbarrier_expect_tx(&by_bytes, sizeof second / 2);
    ptx::cp_async_bulk_prefetch(in + N, sizeof second);
    ptx::cp_async_bulk_load(second, in + N, sizeof second / 2, &by_bytes);
    ptx::cp_async_bulk_load(second + N / 2, in + N + N / 2, sizeof second / 2, &by_bytes);
    ptx::mbarrier_arrive_expect_tx(&by_bytes, sizeof second / 2);
    ptx::mbarrier_arrive(&by_bytes);
  }
  while (!ptx::mbarrier_test_wait_parity(&by_threads, 0)) {
  }
  while (!ptx::mbarrier_try_wait_parity(&by_bytes, 0)) {
  }
  for (int i = thread; i < N; i += THREADS) {
    first[i] += 1;
    second[i] = 2 * second[i] + 1;
  }
  ptx::fence_proxy_async();   // bulk stores read them
  __syncwarp();

  // Phases of a barrier with one arrival a warp; the last one's state is waited for.
  for (unsigned round = 0; round < 3; ++round) {
    unsigned long long state = 0;
    if (thread % 32 == 0) state = ptx::mbarrier_arrive(&warps_done);
    if (thread % 32 == 0 && round == 2) {
      while (!ptx::mbarrier_test_wait(&warps_done, state)) {
      }
    } else {
      ptx::mbarrier_wait_parity(&warps_done, round & 1);
    }
  }

  if (thread == 0) {
    ptx::cp_async_bulk_store(out, first, sizeof first);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_store(out + N, second, sizeof second);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<1>();
    ptx::cp_async_bulk_wait_group_read<0>();
  }
}
