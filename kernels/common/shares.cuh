// For kernels that split the keys of all tiles evenly over their blocks: the launch, and the workspace for split-KV partials.
#pragma once
#include "attention.cuh"

// AttentionParams::work then holds MAX_SHARES counters, 0 before and after every launch, and after them two partials per block, of any
// content or, with zero_parts, 0 like the counters. Its layout does not depend on the grid: launches of a stream may share the memory.
constexpr int MAX_SHARES = 4096;   // maximum number of blocks in such a launch; also defined in src/flashlab/run/arguments.py

// The launch of a persistent split-KV kernel without clusters (`tiles.blocks.cluster` is 1). The grid is (G, 1, 1), where G is the minimum
// of the co-resident blocks with at most sm_blocks per SM; tiles · tile_blocks; the blocks that get split_keys keys each; and MAX_SHARES.
// With whole_tiles, a number from 15 G / 16 to G is preferred with which every block gets equally many whole tiles or an equal part of one.
struct ShareLaunchShape {
  SplitLaunchShape tiles;
  int sm_blocks;
  int tile_blocks;   // maximum number of blocks that split a tile, not counting one more where the tile begins within a block's share
  int part_words;    // size of a block's partial result of a tile in the workspace, in 4-byte words
  int whole_tiles;   // 1: prefer fewer blocks to shares that cross from one tile into the next
  int zero_parts;    // 1: the partials too are 0 before every launch and reset to 0
};
