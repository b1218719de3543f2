// The order in which a rank's workers claim tiles from its one queue.
//
// The progress rule: work is claimed in queue order, and whoever waits waits only for work that stands at an *earlier* queue
// position of the rank that produces it; work that other ranks wait for never waits itself. Then the lowest position at which
// any rank waits can always be served, and any number of workers >= 1 a rank finishes.
#pragma once

#include "schedule/geometry.h"

namespace entwine::schedule {

// Walks a chunk's tiles in groups of `group` row blocks, rows fastest, so that tiles in flight share columns of w in L2.
struct Raster {
  uint32_t rows, cols, group;

  struct Cell {
    uint32_t row, col;
  };
  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return rows * cols; }
  ENTWINE_HOST_DEVICE constexpr Cell at(uint32_t index) const {
    uint32_t per_group = group * cols, g = index / per_group, i = index - g * per_group;
    uint32_t height = smaller(group, rows - g * group), col = i / height;
    return {g * group + (i - col * height), col};
  }
  // The inverse of at().
  ENTWINE_HOST_DEVICE constexpr uint32_t index(uint32_t row, uint32_t col) const {
    uint32_t g = row / group, height = smaller(group, rows - g * group);
    return g * group * cols + col * height + (row - g * group);
  }
};

// Where a remote tile, number `index` in the raster of `owner`'s chunk, stands among the remote tiles of `rank`.
ENTWINE_HOST_DEVICE constexpr uint32_t remote_ordinal(uint32_t ranks, uint32_t rank, uint32_t owner, uint32_t index) {
  return index * (ranks - 1) + (owner + ranks - rank - 1) % ranks;
}

// GEMM + reduce-scatter: `lead` remote tiles (other ranks' chunks), then groups of {1 own, ranks-1 remote} tiles, then what is
// left of either. Remote tiles go round the owners rank+1, rank+2, ... with the raster index outermost: every receiver hears
// every sender at an even pace all through the GEMM.
//
// An own tile of raster index g waits for raster index g of each peer, which is remote tile number <= g (ranks-1) + ranks-2
// there. With lead >= ranks-1 that stands before position lead + g ranks, the own tile's; so lead is raised to ranks-1.
struct ReduceScatterOrder {
  Raster raster;
  uint32_t ranks, rank, lead;

  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return ranks * raster.size(); }
  ENTWINE_HOST_DEVICE constexpr Tile at(uint32_t position) const {
    uint32_t own = raster.size();
    if (ranks == 1) return tile(rank, position);
    uint32_t peers = ranks - 1, remote = own * peers, ahead = smaller(larger(lead, peers), remote);
    if (position < ahead) return remote_tile(position);
    uint32_t groups = (remote - ahead) / peers, i = position - ahead;  // groups with all their remote tiles
    if (i < groups * ranks) {
      uint32_t g = i / ranks, j = i - g * ranks;
      return j == 0 ? tile(rank, g) : remote_tile(ahead + g * peers + j - 1);
    }
    i -= groups * ranks;
    uint32_t left = remote - ahead - groups * peers;
    return i < left ? remote_tile(ahead + groups * peers + i) : tile(rank, groups + i - left);
  }

 private:
  ENTWINE_HOST_DEVICE constexpr Tile tile(uint32_t owner, uint32_t index) const {
    Raster::Cell cell = raster.at(index);
    return {owner, cell.row, cell.col};
  }
  ENTWINE_HOST_DEVICE constexpr Tile remote_tile(uint32_t r) const {
    uint32_t peers = ranks - 1, index = r / peers;
    return tile((rank + 1 + (r - index * peers)) % ranks, index);
  }
};

// GEMM + all-reduce: tiles as for reduce-scatter. A finished own tile goes to all peers, and this is the order in which a rank
// collects theirs: as they are made, tile by tile, each from all owners (rank+1 first), part by part. A collect job waits for
// the owner's tile; nobody waits for a collect job. So, numbered after all tiles, these jobs keep the progress rule.
struct CollectOrder {
  Raster raster;
  uint32_t ranks, rank, parts;

  struct Job {
    uint32_t owner, index, part;  // index: the tile's, in raster order
  };
  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return (ranks - 1) * raster.size() * parts; }
  ENTWINE_HOST_DEVICE constexpr Job at(uint32_t job) const {
    uint32_t peers = ranks - 1, tile = job / parts, index = tile / peers;
    return {(rank + 1 + (tile - index * peers)) % ranks, index, job - tile * parts};
  }
};

// All-gather + GEMM: the own chunk first, then rank+1, rank+2, ... A tile of another chunk waits for its row block, which that
// chunk's owner pushes without ever waiting: see PushOrder.
struct AllGatherOrder {
  Raster raster;
  uint32_t ranks, rank;

  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return ranks * raster.size(); }
  ENTWINE_HOST_DEVICE constexpr Tile at(uint32_t position) const {
    uint32_t step = position / raster.size();
    Raster::Cell cell = raster.at(position - step * raster.size());
    return {(rank + step) % ranks, cell.row, cell.col};
  }
};

// The order in which a rank pushes the row blocks of its chunk: to rank-1 first, which consumes this chunk next, then to
// rank-2, ...; row blocks in order, each in `units_per_block` pieces that different pushers may claim.
struct PushOrder {
  uint32_t ranks, rank, chunk_rows, units_per_block;

  struct Unit {
    uint32_t destination, row, piece;
    bool first;  // of the pushes of this piece: whoever keeps a copy takes it here
  };
  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return (ranks - 1) * chunk_rows * units_per_block; }
  ENTWINE_HOST_DEVICE constexpr Unit at(uint32_t unit) const {
    uint32_t block = unit / units_per_block, step = block / chunk_rows;
    return {(rank + ranks - 1 - step) % ranks, block - step * chunk_rows, unit - block * units_per_block, step == 0};
  }
};

// The order in which a rank copies what its peers have pushed out of staging, if it is asked for the gathered array: in the
// order in which chunks come, rank+1's first. A copy waits for its row block, which a push raises, and nobody waits for a copy;
// so copies are a queue of their own, and a worker that pushes turns to it when all pushes of its rank are claimed and its own
// have landed.
struct CopyOrder {
  uint32_t ranks, rank, chunk_rows, units_per_block;

  struct Unit {
    uint32_t source, row, piece;
  };
  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return (ranks - 1) * chunk_rows * units_per_block; }
  ENTWINE_HOST_DEVICE constexpr Unit at(uint32_t unit) const {
    uint32_t block = unit / units_per_block, step = block / chunk_rows;
    return {(rank + 1 + step) % ranks, block - step * chunk_rows, unit - block * units_per_block};
  }
};

}  // namespace entwine::schedule
