// bug: a warp loads its probabilities as a fragment while its own lanes may still be storing them.
// mechanism: warp barrier, wmma
// caught by: race
// needs: hooks
// launch: grid=1 block=64 smem=0
// parameter: prob f16[2,16,16] normal
// parameter: V f16[16,16] normal
// parameter: out f32[2,16,16] written
// expect: out = prob.astype(np.float32) @ V.astype(np.float32)
// tolerance: 1e-2
#include <cuda_fp16.h>
#include <mma.h>

namespace wmma = nvcuda::wmma;
constexpr int TILE = 16;
constexpr int LANES = 32;
constexpr int WARPS = 2;

extern "C" __global__ void syncwarp_missing_before_wmma(const __half* prob, const __half* V, float* out) {
  __shared__ __align__(32) __half P_smem[WARPS][TILE * TILE];
  __shared__ __align__(32) __half V_smem[TILE * TILE];
  const int warp = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) V_smem[i] = V[i];
  __syncthreads();   // V is complete
  for (int i = lane; i < TILE * TILE; i += LANES) P_smem[warp][i] = prob[warp * TILE * TILE + i];   // here: first
#if !BUG
  __syncwarp();   // the warp's probabilities are complete
#endif
  wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, __half, wmma::row_major> P_frag;
  wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, __half, wmma::row_major> V_frag;
  wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> O_frag;
  wmma::fill_fragment(O_frag, 0.0f);
  wmma::load_matrix_sync(P_frag, P_smem[warp], TILE);   // here: second
  wmma::load_matrix_sync(V_frag, V_smem, TILE);
  wmma::mma_sync(O_frag, P_frag, V_frag, O_frag);
  wmma::store_matrix_sync(out + warp * TILE * TILE, O_frag, TILE, wmma::mem_row_major);
}
