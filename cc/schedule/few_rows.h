// Few rows (decode): time goes into reading w once and into latency, so the work is cut otherwise than for tiles.
//
//   w's columns go in tiles of 128 to clusters of `slices` CTAs, each of which has a slice of k. All rows of all chunks are in
//   one tile, so that w is read once. The CTAs of a cluster exchange float32 sums; each finishes a *portion* of the rows.
//   all_gather_matmul      x goes to every rank's staging, in units of (slice of k, piece); a slice has one signal a source
//   matmul_reduce_scatter  each rank's sums go to the owners' staging, one signal a (tile, portion) and source
//   matmul_all_reduce      the same to all ranks; each adds all ranks' in rank order: one shot
//
// Sums that are few travel as packets, each of which tells by itself that it has landed: twice the bytes, but no fence after
// them, no signal, and no second trip to memory for who has seen that. On two H200s that saves 2.5 to 3.5 us of 26 to 31 up to
// kPacketSumsMost, and costs 1 us at 1.5 times as many.
#pragma once

#include "schedule/arena_layout.h"
#include "schedule/plan.h"

namespace entwine::schedule {

constexpr uint32_t kFewRowsRoom[] = {16, 64, 128}, kFewRowsMost = 128, kFewRowsTileN = 128, kFewRowsSlicesMost = 8,
                   kPacketSumsMost = 32 * 8192;

// Clusters of so many CTAs that surely run at once on an H200: larger ones don't divide the multiprocessors of a GPC.
constexpr uint32_t clusters_at_once(uint32_t ctas) { return ctas == 1 ? 132 : ctas == 2 ? 66 : ctas == 4 ? 28 : 14; }

struct FewRows {
  uint32_t ranks, batch, m_shard, n, k;
  uint32_t rows;        // of the matmul: all chunks, all batches
  uint32_t chunk_rows;  // of one chunk, all batches
  uint32_t tiles, slices;
  uint32_t room;  // rows of the kernel that takes them
  bool packets;   // sums travel as packets

  ENTWINE_HOST_DEVICE constexpr uint32_t words(Op op) const { return op == Op::kAllGatherMatmul ? slices : tiles * slices; }
};

constexpr uint32_t rows_of(Op op, Geometry const& g) {
  return op == Op::kMatmulAllReduce ? g.all_rows() : g.ranks * g.batch * g.m_shard;
}

// Whether the kernels for few rows can take the call.
constexpr bool are_few_rows(Op op, Geometry const& g) {
  return op == Op::kMatmulAllReduce ? g.all_rows() <= kFewRowsMost : double(g.ranks) * g.batch * g.m_shard <= kFewRowsMost;
}

constexpr FewRows few_rows(Op op, Geometry const& g) {
  uint32_t tiles = ceil_div(g.n, kFewRowsTileN), slices = 1, rows = rows_of(op, g);
  // As many slices as there are multiprocessors for, while each has some k blocks of 64, or half as many of 128.
  while (slices < kFewRowsSlicesMost && tiles <= clusters_at_once(slices * 2) && ceil_div(g.k, 64) >= slices * 8) slices *= 2;
  uint32_t room = 0;
  for (uint32_t each : kFewRowsRoom)
    if (room < rows) room = each;
  uint32_t chunk_rows = g.batch * g.m_shard;
  uint64_t sums = uint64_t(op == Op::kMatmulReduceScatter ? chunk_rows : rows) * g.n * (g.ranks - 1);  // that a rank sends
  bool packets = op != Op::kAllGatherMatmul && room < kFewRowsMost && sums <= kPacketSumsMost;
  return {g.ranks, g.batch, g.m_shard, g.n, g.k, rows, chunk_rows, tiles, slices, room, packets};
}

// What a call needs of its arena; `element_bytes`, `beside` and `moved` as in arena_demand().
constexpr ArenaDemand call_demand(Op op, Form form, Geometry const& g, uint32_t parts, uint32_t element_bytes,
                                  Gathering const& beside = {}, bool moved = false) {
  if (form == Form::kTiles) return arena_demand(op, g, parts, element_bytes, beside, moved);
  FewRows f = few_rows(op, g);
  uint64_t gathered = uint64_t(f.rows) * f.k * element_bytes;
  uint64_t sums = uint64_t(f.ranks - 1) * (op == Op::kMatmulReduceScatter ? f.chunk_rows : f.rows) * f.n * element_bytes;
  if (f.packets) return {0, 0, round_up(2 * sums, 1024)};
  return {f.words(op), round_up(op == Op::kAllGatherMatmul ? gathered : sums, 1024)};
}

}  // namespace entwine::schedule
