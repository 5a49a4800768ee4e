// What blocks need that share the keys of all tiles equally: how they are launched, and the workspace in which their parts meet.
#pragma once
#include "attention.cuh"

// AttentionParams' work is then MAX_SHARES counters, 0 before and after every launch, and behind them two parts for each block, of any
// content, or 0 as the counters are with zero_parts. No place in it depends on the grid: launches of a stream may use the same memory.
constexpr int MAX_SHARES = 4096;   // blocks of such a launch at most; src/flashlab/run/arguments.py has it too

// The launch of a persistent kernel that splits keys without clusters (`tiles.blocks.cluster` is 1). The grid is (G, 1, 1), where G is
// the least of: blocks that are resident at once with at most sm_blocks an SM; tiles · tile_blocks; blocks that all find split_keys keys.
// With whole_tiles it is the most below G, but at least 15 G / 16, of which each takes whole tiles or an equal part of one tile, if any.
struct ShareLaunchShape {
  SplitLaunchShape tiles;
  int sm_blocks;
  int tile_blocks;   // that a tile's keys are split over, but for one more where the tile begins within a block's share
  int part_words;    // of 4 bytes: a block's part of a tile in the workspace
  int whole_tiles;   // 1: rather fewer blocks than a share that crosses from one tile into another
  int zero_parts;    // 1: the parts too are 0 at every launch and put back to 0
};
