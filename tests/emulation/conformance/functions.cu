// feature: functions that are rounded differently on either side
// tolerance: 4 ulp
// launch: grid=64 block=256
// parameter: values f32[16384] grid=-20:20
// parameter: positive f32[16384] grid=0.001:1000
// parameter: out f32[8,16384] written
constexpr int COUNT = 16384;

extern "C" __global__ void functions(const float* values, const float* positive, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = values[i];
  const float p = positive[i];
  out[i] = expf(x);
  out[COUNT + i] = logf(p);
  out[2 * COUNT + i] = log2f(p);
  out[3 * COUNT + i] = rsqrtf(p);
  out[4 * COUNT + i] = tanhf(x);
  out[5 * COUNT + i] = 1.0f / p;
  out[6 * COUNT + i] = sqrtf(p);
  out[7 * COUNT + i] = p / (fabsf(x) + 1.0f);
}
