// An arena is one rank's share of a team's peer-mapped memory. All arenas of a team have the same layout:
//
//   control   queue, epoch and the counters of the local workers; zeroed once, touched by this rank only
//   signals   [source][words_per_source], written by peers
//   packets   two halves, as staging; words of 8 bytes, each four of data and the call's signal value: nothing else is ever
//             written here, so that whoever finds the value has the data, too
//   staging   two halves; a call uses the half of its epoch's parity
//
// Why two halves need no barrier: to start call e, a rank has finished call e-1, in which it heard from every peer; so every
// peer had started e-1, hence finished e-2, the last call to touch this half. That needs every rank to hear from every other in
// every call (all ops do: each chunk has at least one tile), and one epoch for all ops that share the arena. (Whoever copies a
// peer's chunk out of staging does it within the call, so that holds for copies too.)
#pragma once

#include "schedule/signals.h"

namespace entwine::schedule {

// What one call needs of its arena.
struct ArenaDemand {
  uint32_t words_per_source;
  uint64_t staging_half;      // bytes
  uint64_t packets_half = 0;  // bytes
};

// Staging of one call. Reduce-scatter keeps whole tile images of partial sums, one set per peer (pull: in the producer's arena,
// by owner; push: in the owner's arena, by source), and after them the peers' chunks of what it gathers beside; all-gather
// keeps the peers' chunks of x. All-reduce keeps partial sums like reduce-scatter and after them the peers' finished tiles, by
// owner, as images too. Strategy "resident" keeps partial sums as by push, and what its movers have yet to take.
ENTWINE_HOST_DEVICE constexpr uint64_t chunk_bytes(Geometry const& g, uint32_t element_bytes) {
  return uint64_t(g.batch) * g.m_shard * g.k * element_bytes;
}
// A tile travels as whole images of 64 columns where it has more than two (tile_parts.h).
ENTWINE_HOST_DEVICE constexpr uint64_t staged_elements(Geometry const& g) {
  return g.tile_m * (g.tile_n > 128 ? round_up(g.tile_n, 64) : g.tile_n);
}
ENTWINE_HOST_DEVICE constexpr uint64_t partials_bytes(Geometry const& g, uint32_t element_bytes) {
  return g.chunk_tiles() * staged_elements(g) * element_bytes;
}

// Where the finished tiles of an all-reduce begin in a half.
ENTWINE_HOST_DEVICE constexpr uint64_t results_offset(Geometry const& g, uint32_t element_bytes) {
  return partials_bytes(g, element_bytes) * (g.ranks - 1);
}

// Where the peers' chunks of what is gathered begin in a half.
constexpr uint64_t gathered_offset(Op op, Geometry const& g, uint32_t element_bytes) {
  return op == Op::kAllGatherMatmul ? 0 : round_up(partials_bytes(g, element_bytes) * (g.ranks - 1), 1024);
}

// Strategy "resident", all but all-gather: the sets of tiles that movers have yet to take, and their flags.
constexpr uint32_t outgoing_sets(Op op, Geometry const& g) {
  return op == Op::kAllGatherMatmul ? 0 : g.ranks - (op == Op::kMatmulAllReduce ? 0 : 1);
}

// `element_bytes` is that of x (all-gather) or of y and a partial sum (the others); `beside` is what reduce-scatter gathers
// beside its matmul; `moved` by movers: what they have yet to take lies behind all else.
constexpr ArenaDemand arena_demand(Op op, Geometry const& g, uint32_t parts, uint32_t element_bytes,
                                   Gathering const& beside = {}, bool moved = false) {
  uint64_t per_peer = op == Op::kAllGatherMatmul ? chunk_bytes(g, element_bytes) : partials_bytes(g, element_bytes);
  if (op == Op::kMatmulAllReduce) per_peer *= 2;
  uint64_t besides = op == Op::kMatmulReduceScatter ? beside.chunk_bytes() : 0;
  ArenaDemand demand{signals_per_source(op, g, parts, beside),
                     round_up(per_peer * (g.ranks - 1), 1024) + round_up(besides * (g.ranks - 1), 1024)};
  if (!moved) return demand;
  uint32_t sets = outgoing_sets(op, g);
  demand.words_per_source = larger(demand.words_per_source, sets * g.chunk_tiles() * parts);
  demand.staging_half += round_up(partials_bytes(g, element_bytes) * sets, 1024);
  return demand;
}

// Where that begins in a half.
constexpr uint64_t outgoing_offset(Op op, Geometry const& g, uint32_t element_bytes, Gathering const& beside) {
  return arena_demand(op, g, 1, element_bytes, beside).staging_half;
}

struct ArenaLayout {
  uint32_t ranks;
  uint32_t words_per_source;
  uint64_t staging_half;
  uint64_t packets_half = 0;

  // Control: kHeaderBytes, then one arrival counter per (peer, signal word) for pushers that share a row block.
  static constexpr uint64_t kHeaderBytes = 1024;
  constexpr uint64_t arrivals_offset() const { return kHeaderBytes; }
  constexpr uint64_t signals_offset() const { return round_up(arrivals_offset() + words() * 4, 1024); }
  constexpr uint64_t packets_offset() const { return round_up(signals_offset() + words() * 4, 1024); }
  constexpr uint64_t staging_offset(uint32_t parity) const {
    return packets_offset() + 2 * packets_half + parity * staging_half;
  }
  constexpr uint64_t bytes() const { return staging_offset(2); }
  constexpr bool fits(ArenaDemand const& d) const {
    return d.words_per_source <= words_per_source && d.staging_half <= staging_half && d.packets_half <= packets_half;
  }

 private:
  constexpr uint64_t words() const { return uint64_t(ranks) * words_per_source; }
};

// An arena of just what a call needs.
constexpr ArenaLayout exactly(uint32_t ranks, ArenaDemand const& d) {
  return {ranks, d.words_per_source, d.staging_half, d.packets_half};
}

// The layout of a team's next arena: twice what the last one held, or what the call needs. All sources' words together are
// numbered in 32 bits. Packets, which are few, only grow if they have to.
constexpr ArenaLayout grown(ArenaLayout const& last, ArenaDemand const& d) {
  uint32_t most = ~0u / last.ranks, twice = last.words_per_source > most / 2 ? most : last.words_per_source * 2;
  uint32_t words = larger(twice, d.words_per_source);
  uint64_t half = last.staging_half * 2 < d.staging_half ? d.staging_half : last.staging_half * 2;
  uint64_t packets = d.packets_half <= last.packets_half      ? last.packets_half
                     : d.packets_half > 2 * last.packets_half ? d.packets_half
                                                              : 2 * last.packets_half;
  return {last.ranks, larger(words, 4096), half < (1u << 20) ? (1u << 20) : half, packets};
}

}  // namespace entwine::schedule
