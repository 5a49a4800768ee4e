// bug: the tile's rows past the last key keep what was there before; 0 times that may be NaN.
// mechanism: tail, wmma
// caught by: uninitialised
// needs: hooks
// launch: grid=1 block=32 smem=0
// parameter: prob f16[16,16] normal
// parameter: V f16[11,16] normal
// parameter: out f32[16,16] written
// parameter: num_keys int 11
// expect: out = prob[:, :11].astype(np.float32) @ V.astype(np.float32)
// tolerance: 1e-2
#include <cuda_fp16.h>
#include <mma.h>

namespace wmma = nvcuda::wmma;
constexpr int TILE = 16;

extern "C" __global__ void shared_tail_not_zeroed(const __half* prob, const __half* V, float* out, int num_keys) {
  __shared__ __align__(32) __half P_smem[TILE * TILE];
  __shared__ __align__(32) __half V_smem[TILE * TILE];
  for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
    const int key_of_prob = i % TILE;
    const int key_of_value = i / TILE;
    P_smem[i] = key_of_prob < num_keys ? prob[i] : __float2half(0.0f);
#if BUG
    if (key_of_value < num_keys) V_smem[i] = V[i];
#else
    V_smem[i] = key_of_value < num_keys ? V[i] : __float2half(0.0f);
#endif
  }
  __syncthreads();   // both tiles are complete
  wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, __half, wmma::row_major> P_frag;
  wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, __half, wmma::row_major> V_frag;
  wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> O_frag;
  wmma::fill_fragment(O_frag, 0.0f);
  wmma::load_matrix_sync(P_frag, P_smem, TILE);
  wmma::load_matrix_sync(V_frag, V_smem, TILE);   // here
  wmma::mma_sync(O_frag, P_frag, V_frag, O_frag);
  wmma::store_matrix_sync(out, O_frag, TILE, wmma::mem_row_major);
}
