// feature: votes of a warp and of a block
// launch: grid=1 block=96
// parameter: values u32[96] bits
// parameter: warp_out u32[3,32,32] written
// parameter: part_out u32[3,96] written
// parameter: block_out i32[3,32] written
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr unsigned EVEN_LANES = 0x55555555u;
constexpr int LANES = 32;
constexpr int BITS = 32;

extern "C" __global__ void votes(const unsigned* values, unsigned* warp_out, unsigned* part_out, int* block_out) {
  const int lane = threadIdx.x % LANES;
  const unsigned value = values[threadIdx.x];
  // The predicates of bit b: about half of the lanes, and in bits 30 and 31 all and none.
  for (int bit = 0; bit < BITS; ++bit) {
    const int predicate = bit == 30 ? 1 : bit == 31 ? 0 : static_cast<int>(value >> bit & 1);
    const unsigned ballot = __ballot_sync(FULL_WARP, predicate);
    const int any = __any_sync(FULL_WARP, predicate);
    const int all = __all_sync(FULL_WARP, predicate);
    warp_out[(threadIdx.x / LANES * BITS + bit) * LANES + lane] = ballot ^ (any ? 1u : 0u) ^ (all ? 2u : 0u);
    const int count = __syncthreads_count(predicate);
    const int block_all = __syncthreads_and(predicate);
    const int block_any = __syncthreads_or(predicate);
    if (threadIdx.x == 0) {
      block_out[bit] = count;
      block_out[BITS + bit] = block_all != 0;
      block_out[2 * BITS + bit] = block_any != 0;
    }
  }
  unsigned part = 0;
  if (lane % 2 == 0) part = __ballot_sync(EVEN_LANES, value & 1);
  part_out[threadIdx.x] = part;
  part_out[96 + threadIdx.x] = lane % 2 == 0 ? __any_sync(EVEN_LANES, value & 2) != 0 : 7;
  part_out[192 + threadIdx.x] = lane % 2 == 0 ? __all_sync(EVEN_LANES, value & 4) != 0 : 7;
}
