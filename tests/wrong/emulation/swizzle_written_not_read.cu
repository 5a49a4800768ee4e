// bug: rows are stored with their chunks exchanged by exclusive or, and read as if they were not.
// mechanism: swizzle by hand
// caught by: wrong result
// needs: any
// launch: grid=1 block=64 smem=0
// parameter: K f32[8,32] normal
// parameter: out f32[32,8] written
// expect: out = K.T
constexpr int ROWS = 8;
constexpr int CHUNK = 4;    // floats in 16 bytes
constexpr int CHUNKS = 8;   // a row

struct alignas(16) Chunk {
  float x[CHUNK];
};

// Where a chunk of a row is kept: chunks of one column then lie in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * CHUNKS + (chunk ^ row % CHUNKS); }

extern "C" __global__ void swizzle_written_not_read(const float* K, float* out) {
  __shared__ Chunk K_smem[ROWS * CHUNKS];
  const int row = threadIdx.x / CHUNKS;
  const int chunk = threadIdx.x % CHUNKS;
  K_smem[swizzled(row, chunk)] = reinterpret_cast<const Chunk*>(K)[threadIdx.x];
  __syncthreads();   // the tile is complete
  const int read_row = threadIdx.x % ROWS;
  const int read_chunk = threadIdx.x / ROWS;
#if BUG
  const Chunk value = K_smem[read_row * CHUNKS + read_chunk];
#else
  const Chunk value = K_smem[swizzled(read_row, read_chunk)];
#endif
  for (int i = 0; i < CHUNK; ++i) out[(read_chunk * CHUNK + i) * ROWS + read_row] = value.x[i];
}
