// What a kernel on inputs in FP8 is given beside AttentionParams, whose Q, K and V then are e4m3.
#pragma once
#include "attention.cuh"

// src/flashlab/run/fp8.py mirrors this layout, field by field.
struct Fp8Params {
  TensorView V;             // (batch, kv_heads, kv_len, HEAD_DIM) of e4m3
  unsigned char* V_blocks;  // (batch, kv_heads, ceil(kv_len / 32), bytes a block): V as the attention reads it
  const float* Q_scale;     // (batch, q_heads): what numbers of Q are multiplied by
  const float* K_scale;     // (batch, kv_heads)
  const float* V_scale;     // (batch, kv_heads)
};
