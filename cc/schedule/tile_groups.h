// Groups of tiles: strategy "signal", where NCCL or copy engines move whole groups of finished tiles while the matmul goes on.
//
//   matmul_reduce_scatter  a *cell* is a tile of every owner's chunk, at the same place in it; cells in raster order
//   matmul_all_reduce      a cell is a tile: rows are rows, no rank owns any
//   all_gather_matmul      a cell is a row block of every rank's chunk
//
// Cells are cut into groups of neighbours. Sums: tiles go to *scratch* as they are, groups one after the other, in a group the
// owners one after the other, of an owner the cells in order. So one collective sums a group, in place, or one copy takes an
// owner's tiles of it, and every tile knows its slot. Gathered rows have their place in the whole array at once, there is
// nothing to reorder.
//
// Progress: a tile of sums waits for nobody, so every group fills up, and collectives come in the order of groups on every
// rank. Rows that are gathered are waited for by the stream that launches their tiles, never by a tile.
#pragma once

#include "schedule/arena_layout.h"
#include "schedule/tile_order.h"

namespace entwine::schedule {

constexpr uint32_t kMaxGroups = 32;

struct Groups {
  uint32_t count = 0;
  uint32_t ends[kMaxGroups] = {};  // each group's, in cells

  ENTWINE_HOST_DEVICE constexpr uint32_t begin(uint32_t group) const { return group == 0 ? 0 : ends[group - 1]; }
  ENTWINE_HOST_DEVICE constexpr uint32_t size(uint32_t group) const { return ends[group] - begin(group); }
  ENTWINE_HOST_DEVICE constexpr uint32_t of(uint32_t cell) const {
    uint32_t group = 0;
    while (cell >= ends[group]) ++group;
    return group;
  }
  // Where the tile of `owner` in a cell lies in scratch, in tiles.
  ENTWINE_HOST_DEVICE constexpr uint32_t slot(uint32_t owners, uint32_t owner, uint32_t cell) const {
    uint32_t group = of(cell), first = begin(group);
    return owners * first + owner * size(group) + (cell - first);
  }
};

// Sums: all owners' tiles of a cell, then those of the next. `raster` is of one owner's chunk.
struct CellOrder {
  Raster raster;
  uint32_t owners;

  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return owners * raster.size(); }
  ENTWINE_HOST_DEVICE constexpr Tile at(uint32_t position) const {
    uint32_t index = position / owners;
    Raster::Cell cell = raster.at(index);
    return {position - index * owners, cell.row, cell.col};
  }
};

// Tiles of some row blocks of each of `owners` chunks, chunk after chunk, from `first_owner` on; `raster` is of these blocks,
// which begin at `first_row`.
struct RowsOrder {
  Raster raster;
  uint32_t first_row, ranks, first_owner, owners;

  ENTWINE_HOST_DEVICE constexpr uint32_t size() const { return owners * raster.size(); }
  ENTWINE_HOST_DEVICE constexpr Tile at(uint32_t position) const {
    uint32_t step = position / raster.size();
    Raster::Cell cell = raster.at(position - step * raster.size());
    return {(first_owner + step) % ranks, first_row + cell.row, cell.col};
  }
};

// The same geometry as this strategy sees it: an all-reduce's rows have no owners.
ENTWINE_HOST_DEVICE constexpr Geometry grouped(Op op, Geometry const& g) {
  return op == Op::kMatmulAllReduce ? Geometry{1, 1, g.all_rows(), g.n, g.k, g.tile_m, g.tile_n} : g;
}

// How many cells there are. `g` is grouped().
constexpr uint32_t cells(Op op, Geometry const& g) { return op == Op::kAllGatherMatmul ? g.chunk_rows() : g.chunk_tiles(); }

// Elements of a group: of x, or of one owner's tiles. `g` is grouped().
constexpr uint64_t group_elements(Op op, Geometry const& g, Groups const& groups, uint32_t group) {
  if (op != Op::kAllGatherMatmul) return uint64_t(groups.size(group)) * g.tile_m * g.tile_n;
  uint64_t rows = 0;
  for (uint32_t block = groups.begin(group); block < groups.ends[group]; ++block) rows += g.rows(block);
  return rows * g.k;
}

// The scratch of a call: counters, then tiles, or the gathered x where that is no result of the call.
//
// Counters, zeroed when a call begins: claims of each launch (one, or of the own rows and of each group's), and parts of tiles
// that are finished of each group.
constexpr uint64_t kScratchHead = 1024;
constexpr uint32_t kClaimWord = 0, kFinishedWord = kMaxGroups + 1;
static_assert((kFinishedWord + kMaxGroups) * 4 <= kScratchHead);

// Of elements of x (all-gather) or y. `g` is grouped().
constexpr uint64_t scratch_bytes(Op op, Geometry const& g, uint32_t element_bytes, bool gathers) {
  if (op != Op::kAllGatherMatmul)
    return kScratchHead + uint64_t(g.ranks) * g.chunk_tiles() * g.tile_m * g.tile_n * element_bytes;
  return kScratchHead + (gathers ? 0 : uint64_t(g.ranks) * g.batch * g.m_shard * g.k * element_bytes);
}

// What copy engines bring lies in an arena: of sums one set of the own cells' tiles for each peer, cells in order; of rows the
// whole x but for the own ones. A peer signals group by group.
constexpr ArenaDemand landing_demand(Op op, Geometry const& g, uint32_t ranks, uint32_t element_bytes) {
  bool gather = op == Op::kAllGatherMatmul;
  uint64_t of_peer = gather ? chunk_bytes(g, element_bytes) : partials_bytes(g, element_bytes);
  return {kMaxGroups, round_up(of_peer * (gather ? ranks : ranks - 1), 1024)};
}
ENTWINE_HOST_DEVICE constexpr uint32_t group_signal(uint32_t group) { return group; }

}  // namespace entwine::schedule
