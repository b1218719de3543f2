// How one collective matmul is cut into chunks, row blocks and tiles. Every rank of the team computes the same numbers.
//
//   all_gather_matmul       x (batch, m_shard, k)          w (k, n)   y (batch, ranks * m_shard, n)
//   matmul_reduce_scatter   x (batch, ranks * m_shard, k)  w (k, n)   y (batch, m_shard, n)
//
// A chunk is what one rank owns: m_shard rows of every batch. Chunks are tiled separately, and batches too, so that no tile
// straddles two owners or two batches; a chunk's last row block and a row's last tile may be partly empty.
#pragma once

#include "schedule/integers.h"

namespace entwine::schedule {

enum class Op : uint32_t { kAllGatherMatmul = 0, kMatmulReduceScatter = 1 };

constexpr uint32_t kMaxRanks = 8;

// One output tile: the rank whose chunk it lies in, its row block in that chunk (batch-major), its column.
struct Tile {
  uint32_t owner, row, col;
};

struct Geometry {
  uint32_t ranks, batch, m_shard, n, k;  // n and k are those of one rank's matmul
  uint32_t tile_m, tile_n;

  ENTWINE_HOST_DEVICE constexpr uint32_t row_blocks() const { return ceil_div(m_shard, tile_m); }  // in one batch of a chunk
  ENTWINE_HOST_DEVICE constexpr uint32_t chunk_rows() const { return batch * row_blocks(); }       // row blocks in a chunk
  ENTWINE_HOST_DEVICE constexpr uint32_t cols() const { return ceil_div(n, tile_n); }
  ENTWINE_HOST_DEVICE constexpr uint32_t chunk_tiles() const { return chunk_rows() * cols(); }
  ENTWINE_HOST_DEVICE constexpr uint32_t tiles() const { return ranks * chunk_tiles(); }
  // Row block `row` of a chunk covers `rows(row)` rows from `first_row(row)` on, in batch `batch_of(row)`.
  ENTWINE_HOST_DEVICE constexpr uint32_t batch_of(uint32_t row) const { return row / row_blocks(); }
  ENTWINE_HOST_DEVICE constexpr uint32_t first_row(uint32_t row) const { return row % row_blocks() * tile_m; }
  ENTWINE_HOST_DEVICE constexpr uint32_t rows(uint32_t row) const { return smaller(tile_m, m_shard - first_row(row)); }
};

// Peers of `self` are numbered 0 .. ranks-2 in rank order with `self` left out: a rank keeps no staging for itself.
ENTWINE_HOST_DEVICE constexpr uint32_t peer_slot(uint32_t self, uint32_t peer) { return peer < self ? peer : peer - 1; }
ENTWINE_HOST_DEVICE constexpr uint32_t peer_of_slot(uint32_t self, uint32_t slot) { return slot < self ? slot : slot + 1; }

}  // namespace entwine::schedule
