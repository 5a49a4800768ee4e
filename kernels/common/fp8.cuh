// Parameters of an FP8 kernel in addition to AttentionParams, whose Q, K and V are then e4m3.
#pragma once
#include "attention.cuh"

// src/flashlab/run/fp8.py mirrors this layout, field by field.
struct Fp8Params {
  TensorView V;             // (batch, kv_heads, kv_len, HEAD_DIM) of e4m3
  unsigned char* V_blocks;  // (batch, kv_heads, ceil(kv_len / 32), bytes per block): V in the layout that the attention kernel reads
  const float* Q_scale;     // (batch, q_heads): dequantisation factors of Q
  const float* K_scale;     // (batch, kv_heads)
  const float* V_scale;     // (batch, kv_heads)
};
