// What the launches of strategy "signal" hand their kernels.
#pragma once

#include "kernel/sm90/params.h"
#include "schedule/tile_groups.h"

namespace entwine::sm90 {

// The loader and the consumers are those of all-gather, with `tiles`. There a tile of chunk `tiles.rank` reads x[0], which has
// that chunk alone, others gathered[0], which has all chunks. No chunk has this number, so that all read gathered[0]:
constexpr uint32_t kNoRank = ~0u;

struct SignalParams {
  Params tiles;  // without an arena
  schedule::Groups groups;
  uint8_t* scratch;    // sums: of tiles; null: tiles go to y, rows in RowsOrder
  uint32_t* claims;    // of this launch
  uint32_t* finished;  // sums: parts of tiles, by group
  uint32_t count;      // tiles of the launch
  uint32_t owners, first_owner, first_row;
  uint32_t clusters;  // launched
};

constexpr uint32_t kFinishThreads = 256;

struct FinishParams {
  schedule::Groups groups;
  schedule::Raster raster;
  uint8_t const* scratch;
  void* y;
  uint8_t const* landed;  // the peers' sums of the own cells; null: NCCL has added them up in scratch
  uint64_t landed_bytes;  // of each peer's
  uint32_t ranks, rank;   // of the team
  uint32_t first, end;    // cells
  uint32_t owners, owner;
  uint32_t tile_m, tile_n;
  uint32_t row_blocks, m_shard, n;
  Epilogue epilogue;
};

// A wait for the peers' signals of groups `first` to `end`: a thread for each.
struct AwaitParams {
  uint32_t const* words;  // the own arena's
  uint32_t words_per_source;
  uint32_t ranks, rank, first, end;
  uint32_t op, epoch;
  uint64_t timeout_ns;  // 0: none
  schedule::StuckReport* stuck;
};

}  // namespace entwine::sm90
