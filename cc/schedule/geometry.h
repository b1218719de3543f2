// How one collective matmul is cut into chunks, row blocks and tiles. Every rank of the team computes the same numbers.
//
//   all_gather_matmul       x (batch, m_shard, k)          w (k, n)   y (batch, ranks * m_shard, n)
//   matmul_reduce_scatter   x (batch, ranks * m_shard, k)  w (k, n)   y (batch, m_shard, n)
//   matmul_all_reduce       x (rows, k)                    w (k, n)   y (rows, n)
//
// A chunk is what one rank owns: m_shard rows of every batch. Chunks are tiled separately, and batches too, so that no tile
// straddles two owners or two batches; a chunk's last row block and a row's last tile may be partly empty.
//
// To an all-reduce, rows are rows: those of all batches are one matrix. Any number of them will do, since who owns which is
// nobody's business but the kernel's: chunks have ceil(rows / ranks) rows, rounded up to what the target stores at once, and
// the last ones are short of rows, or have none.
#pragma once

#include "schedule/integers.h"

namespace entwine::schedule {

enum class Op : uint32_t { kAllGatherMatmul = 0, kMatmulReduceScatter = 1, kMatmulAllReduce = 2 };

constexpr char const* op_name(Op op) {
  return op == Op::kAllGatherMatmul       ? "all_gather_matmul"
         : op == Op::kMatmulReduceScatter ? "matmul_reduce_scatter"
                                          : "matmul_all_reduce";
}

constexpr uint32_t kMaxRanks = 8;

// One output tile: the rank whose chunk it lies in, its row block in that chunk (batch-major), its column.
struct Tile {
  uint32_t owner, row, col;
};

struct Geometry {
  uint32_t ranks, batch, m_shard, n, k;  // n and k are those of one rank's matmul
  uint32_t tile_m, tile_n;
  uint32_t missing = 0;  // all-reduce: rows that the last chunks are short of

  ENTWINE_HOST_DEVICE constexpr uint32_t row_blocks() const { return ceil_div(m_shard, tile_m); }  // in one batch of a chunk
  ENTWINE_HOST_DEVICE constexpr uint32_t chunk_rows() const { return batch * row_blocks(); }       // row blocks in a chunk
  ENTWINE_HOST_DEVICE constexpr uint32_t cols() const { return ceil_div(n, tile_n); }
  ENTWINE_HOST_DEVICE constexpr uint32_t chunk_tiles() const { return chunk_rows() * cols(); }
  ENTWINE_HOST_DEVICE constexpr uint32_t tiles() const { return ranks * chunk_tiles(); }
  // Row block `row` of a chunk covers `rows(row)` rows from `first_row(row)` on, in batch `batch_of(row)`.
  ENTWINE_HOST_DEVICE constexpr uint32_t batch_of(uint32_t row) const { return row / row_blocks(); }
  ENTWINE_HOST_DEVICE constexpr uint32_t first_row(uint32_t row) const { return row % row_blocks() * tile_m; }
  ENTWINE_HOST_DEVICE constexpr uint32_t rows(uint32_t row) const { return smaller(tile_m, m_shard - first_row(row)); }

  // All-reduce: the rows there are, and how many of a tile's are among them.
  ENTWINE_HOST_DEVICE constexpr uint32_t all_rows() const { return ranks * m_shard - missing; }
  ENTWINE_HOST_DEVICE constexpr uint32_t rows(Tile const& t) const {
    uint32_t first = t.owner * m_shard + first_row(t.row);
    return first < all_rows() ? smaller(rows(t.row), all_rows() - first) : 0;
  }
};

// Of an all-reduce; chunks are multiples of `unit` rows.
constexpr Geometry all_reduce_geometry(uint32_t ranks, uint32_t rows, uint32_t n, uint32_t k, uint32_t tile_m, uint32_t tile_n,
                                       uint32_t unit) {
  uint32_t m_shard = static_cast<uint32_t>(round_up(ceil_div(rows, ranks), unit));
  return {ranks, 1, m_shard, n, k, tile_m, tile_n, ranks * m_shard - rows};
}

// Peers of `self` are numbered 0 .. ranks-2 in rank order with `self` left out: a rank keeps no staging for itself.
ENTWINE_HOST_DEVICE constexpr uint32_t peer_slot(uint32_t self, uint32_t peer) { return peer < self ? peer : peer - 1; }
ENTWINE_HOST_DEVICE constexpr uint32_t peer_of_slot(uint32_t self, uint32_t slot) { return slot < self ? slot : slot + 1; }

}  // namespace entwine::schedule
