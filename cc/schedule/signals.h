// Signals: 32-bit words in the arena which tell that bytes have landed.
//
// A word has one writer, the rank in whose source region it lies, for all ops that share the arena; its value is the epoch of
// the call plus one and only grows (modulo 2^32). So a word is never reset, and a late write of an earlier call can't undo a
// later one. (Regions are of fixed size for that reason: words of varying shapes must not move between writers.)
#pragma once

#include "schedule/gathering.h"
#include "schedule/geometry.h"

namespace entwine::schedule {

ENTWINE_HOST_DEVICE constexpr uint32_t signal_value(uint32_t epoch) { return epoch + 1; }

// Whether a word that holds `seen` has been raised in the call that waits for `wanted`. A peer is at most one call ahead (see
// arena_layout.h), so the word holds `wanted` or the next value then. All else is old, however old: a plain wrap-safe
// `seen >= wanted` would take a word for raised which no call has used for 2^31 epochs.
ENTWINE_HOST_DEVICE constexpr bool signal_reached(uint32_t seen, uint32_t wanted) { return seen - wanted <= 1; }

// Where source `source` signals: word `index` of its region.
ENTWINE_HOST_DEVICE constexpr uint32_t signal_word(uint32_t source, uint32_t words_per_source, uint32_t index) {
  return source * words_per_source + index;
}

// GEMM + reduce-scatter: one word per part of a tile; `tile` is the raster index in the owner's chunk. A Hopper cluster tile
// comes in four parts (2 CTAs x 2 warpgroups), a host tile in one.
ENTWINE_HOST_DEVICE constexpr uint32_t partial_signal(uint32_t tile, uint32_t part, uint32_t parts) {
  return tile * parts + part;
}

// GEMM + all-reduce: partial sums signal as for reduce-scatter. The words after those tell of finished tiles: of the *source's*
// own chunk, whose parts land with everybody else.
ENTWINE_HOST_DEVICE constexpr uint32_t result_signal(uint32_t chunk_tiles, uint32_t tile, uint32_t part, uint32_t parts) {
  return (chunk_tiles + tile) * parts + part;
}

// A gathered array: one word per row block of the source's chunk, from word `first` on. For x of all-gather + GEMM that is 0;
// what reduce-scatter gathers beside its matmul comes after the words of the partials.
ENTWINE_HOST_DEVICE constexpr uint32_t gathered_signal(uint32_t first, uint32_t block) { return first + block; }
ENTWINE_HOST_DEVICE constexpr uint32_t first_gathered_signal(Op op, Geometry const& g, uint32_t parts) {
  return op == Op::kAllGatherMatmul ? 0 : g.chunk_tiles() * parts;
}

// Strategy "resident": a rank's own flags, which tell its movers that a part of a tile lies in its outgoing set `set`
// (movers.h). They lie in its own region of its own words, where no peer signals.
ENTWINE_HOST_DEVICE constexpr uint32_t finished_flag(uint32_t chunk_tiles, uint32_t set, uint32_t tile, uint32_t part,
                                                     uint32_t parts) {
  return (set * chunk_tiles + tile) * parts + part;
}

// Words that one source raises at one destination; `beside` is what reduce-scatter gathers beside its matmul.
ENTWINE_HOST_DEVICE constexpr uint32_t signals_per_source(Op op, Geometry const& g, uint32_t parts, Gathering const& beside) {
  if (op == Op::kAllGatherMatmul) return g.chunk_rows();
  return g.chunk_tiles() * parts * (op == Op::kMatmulAllReduce ? 2 : 1) +
         (op == Op::kMatmulReduceScatter ? beside.blocks() : 0);
}

}  // namespace entwine::schedule
