// Few rows (decode): time goes into reading w once and into latency, so the work is cut otherwise than for tiles.
//
//   w's columns go in tiles of 128 to clusters of `slices` CTAs, each of which has a slice of k. All rows of all chunks are in
//   one tile, so that w is read once. The CTAs of a cluster exchange float32 sums; each finishes its *portion* of the rows,
//   octets of them in turn.
//   all_gather_matmul      x goes to every rank, in units of (slice of k, piece), each of which has one signal a source
//   matmul_reduce_scatter  each rank's sums go to the owners' staging, one signal a (tile, portion) and source
//   matmul_all_reduce      the same to all ranks; each adds all ranks' in rank order: one shot
//
// Sums or rows of x that are few travel as packets, each of which tells by itself that it has landed: twice the bytes, but no
// fence after them, no signal, and no second trip to memory for who has seen that. On two H200s that saves 2.5 to 3.5 us of 26
// to 31 up to kPacketSumsMost, and costs 1 us at 1.5 times as many.
//
// Sums lie in staging and among packets as the threads that add them hold them: by (tile, octet, thread of 256), four values
// each, of two rows and two columns.
#pragma once

#include "schedule/arena_layout.h"
#include "schedule/plan.h"

namespace entwine::schedule {

constexpr uint32_t kFewRowsRoom[] = {16, 64, 128}, kFewRowsMost = 128, kFewRowsTileN = 128, kFewRowsSlicesMost = 8, kOctet = 8,
                   kPacketSumsMost = 32 * 8192;
// All-gather: up to so many rows of x, and k blocks of 64 elements in a slice, are kept in shared memory through all tiles.
constexpr uint32_t kResidentRows = 16, kResidentBlocks = 64;

// Clusters of so many CTAs that surely run at once on an H200: larger ones don't divide the multiprocessors of a GPC.
constexpr uint32_t clusters_at_once(uint32_t ctas) { return ctas == 1 ? 132 : ctas == 2 ? 66 : ctas == 4 ? 28 : 14; }

struct FewRows {
  uint32_t ranks, batch, m_shard, n, k;
  uint32_t rows;        // of the matmul: all chunks, all batches
  uint32_t chunk_rows;  // of one chunk, all batches
  uint32_t tiles, slices;
  uint32_t octets;  // of rows, the last of which may not be full
  uint32_t pieces;  // all-gather: units of a slice
  uint32_t room;    // rows of the kernel that takes them
  bool packets;     // sums, or x, travel as packets

  // Signals of one source, where nothing travels as packets.
  ENTWINE_HOST_DEVICE constexpr uint32_t words(Op op) const { return slices * (op == Op::kAllGatherMatmul ? pieces : tiles); }
  // Values in one source's part of what a rank receives, those of missing rows and columns too.
  ENTWINE_HOST_DEVICE constexpr uint64_t received(Op op) const {
    return op == Op::kAllGatherMatmul ? uint64_t(chunk_rows) * k : uint64_t(tiles) * kFewRowsTileN * octets * kOctet;
  }
};

constexpr uint32_t rows_of(Op op, Geometry const& g) {
  return op == Op::kMatmulAllReduce ? g.all_rows() : g.ranks * g.batch * g.m_shard;
}

// Whether the kernels for few rows can take the call.
constexpr bool are_few_rows(Op op, Geometry const& g) {
  return op == Op::kMatmulAllReduce ? g.all_rows() <= kFewRowsMost : double(g.ranks) * g.batch * g.m_shard <= kFewRowsMost;
}

constexpr FewRows few_rows(Op op, Geometry const& g) {
  uint32_t tiles = ceil_div(g.n, kFewRowsTileN), slices = 1, rows = rows_of(op, g), k_blocks = ceil_div(g.k, 64);
  // As many slices as there are multiprocessors for, while each has some k blocks of 64, or half as many of 128.
  while (slices < kFewRowsSlicesMost && tiles <= clusters_at_once(slices * 2) && k_blocks >= slices * 8) slices *= 2;
  uint32_t room = 0;
  for (uint32_t each : kFewRowsRoom)
    if (room < rows) room = each;
  uint32_t chunk_rows = g.batch * g.m_shard;
  bool packets = false;
  if (op == Op::kAllGatherMatmul) {
    packets = rows <= kResidentRows && ceil_div(k_blocks, slices) <= kResidentBlocks;
  } else {
    uint64_t sent = uint64_t(op == Op::kMatmulReduceScatter ? chunk_rows : rows) * g.n * (g.ranks - 1);
    packets = room < kFewRowsMost && sent <= kPacketSumsMost;
  }
  return {g.ranks,
          g.batch,
          g.m_shard,
          g.n,
          g.k,
          rows,
          chunk_rows,
          tiles,
          slices,
          ceil_div(rows, kOctet),
          smaller(tiles, clusters_at_once(slices)),
          room,
          packets};
}

// What a call needs of its arena; `element_bytes`, `beside` and `moved` as in arena_demand().
constexpr ArenaDemand call_demand(Op op, Form form, Geometry const& g, uint32_t parts, uint32_t element_bytes,
                                  Gathering const& beside = {}, bool moved = false) {
  if (form == Form::kTiles) return arena_demand(op, g, parts, element_bytes, beside, moved);
  FewRows f = few_rows(op, g);
  uint64_t each = f.received(op) * element_bytes, peers = each * (f.ranks - 1);
  if (f.packets) return {0, 0, round_up(2 * peers, 1024)};
  // Gathered rows are read as one matrix, the own ones among them.
  return {f.words(op), round_up(op == Op::kAllGatherMatmul ? peers + each : peers, 1024)};
}

}  // namespace entwine::schedule
