// feature: nvcuda::wmma with __half, both layouts of each operand and of the result
// tolerance: 1e-5
// launch: grid=1 block=32
// parameter: prob f16[16,16] normal
// parameter: V f16[16,16] normal
// parameter: V_t f16[16,16] normal
// parameter: start f32[16,16] normal
// parameter: out f32[5,16,16] written
// expect: out = np.stack([prob.astype(np.float32) @ V.astype(np.float32),
//         prob.astype(np.float32) @ V_t.astype(np.float32).T, prob.astype(np.float32).T @ V.astype(np.float32),
//         (prob.astype(np.float32) @ V.astype(np.float32)).T, prob.astype(np.float32) @ V.astype(np.float32) + start * 2])
#include <cuda_fp16.h>
#include <mma.h>

namespace wmma = nvcuda::wmma;
constexpr int TILE = 16;
template <typename Use, typename Layout>
using Operand = wmma::fragment<Use, TILE, TILE, TILE, __half, Layout>;
using Result = wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float>;

extern "C" __global__ void wmma_half(const __half* prob, const __half* V, const __half* V_t, const float* start, float* out) {
  __shared__ __align__(32) __half P_smem[TILE * TILE];
  for (int i = threadIdx.x; i < TILE * TILE; i += 32) P_smem[i] = prob[i];
  __syncwarp();   // P is complete
  Operand<wmma::matrix_a, wmma::row_major> P_frag;
  Operand<wmma::matrix_a, wmma::col_major> P_frag_t;
  Operand<wmma::matrix_b, wmma::row_major> V_frag;
  Operand<wmma::matrix_b, wmma::col_major> V_frag_t;
  wmma::load_matrix_sync(P_frag, P_smem, TILE);
  wmma::load_matrix_sync(P_frag_t, prob, TILE);
  wmma::load_matrix_sync(V_frag, V, TILE);
  wmma::load_matrix_sync(V_frag_t, V_t, TILE);
  Result zero, product;
  wmma::fill_fragment(zero, 0.0f);
  wmma::mma_sync(product, P_frag, V_frag, zero);
  wmma::store_matrix_sync(out, product, TILE, wmma::mem_row_major);
  wmma::store_matrix_sync(out + 3 * TILE * TILE, product, TILE, wmma::mem_col_major);
  wmma::mma_sync(product, P_frag, V_frag_t, zero);
  wmma::store_matrix_sync(out + TILE * TILE, product, TILE, wmma::mem_row_major);
  wmma::mma_sync(product, P_frag_t, V_frag, zero);
  wmma::store_matrix_sync(out + 2 * TILE * TILE, product, TILE, wmma::mem_row_major);
  wmma::load_matrix_sync(product, start, TILE, wmma::mem_row_major);
  for (int i = 0; i < product.num_elements; ++i) product.x[i] *= 2.0f;
  wmma::mma_sync(product, P_frag, V_frag, product);
  wmma::store_matrix_sync(out + 4 * TILE * TILE, product, TILE, wmma::mem_row_major);
}
