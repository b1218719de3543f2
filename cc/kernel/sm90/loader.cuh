// Loader: one thread a CTA, TMA loads of x and w into the pipeline's stages.
//
// x coordinates, all-gather: (k, row, batch, chunk), the own x has one chunk, the gathered window ranks-1 by peer_slot;
// reduce-scatter: (k, row, chunk, batch), the rows of a batch are the chunks in rank order. Rows past a chunk and k past the
// end read as zeros. All-reduce: (k, row, 0, 0), chunks are just rows; those past a chunk are the next one's, and what comes of
// them is never stored. w coordinates: (n, k), or (k, n) when stored transposed.
//
// x stored transposed has coordinates (row, k, 0, batch), whatever the op: chunks are just rows. A CTA's part of it are images
// of 64 rows, contiguous, by a k block, one for each consumer that has rows of its own.
//
// Of several products all-gather's tile belongs to one, by its column; in the other ops a tile's k blocks go on from one pair
// of x and w to the next. Each has its own maps, and coordinates begin with each. Gated, the first CTA's half of w's tile is
// the gate's and the second one's up's, of the same columns.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

template <class C>
__device__ __forceinline__ void load_operands(Cta<C> const& cta) {
  Params const& p = cta.params;
  Shared<C> const& shared = cta.shared;
  TileStream<C> tiles(shared);
  Tracer<C> trace(p, 0);
  uint32_t stage = 0, phase = 1;
  uint32_t ask_at = p.k_blocks > kClaimAhead ? p.k_blocks - kClaimAhead : 0;
  for (uint32_t packed; (packed = tiles.next()) != kNoTile;) {
    schedule::Tile tile = unpack_tile(packed);
    uint32_t batch = tile.row / p.row_blocks;
    uint32_t row = (tile.row - batch * p.row_blocks) * C::kTileM + cta.rank_in_cluster * C::kCtaM;
    uint32_t product = C::kGather ? p.begin.of(tile.col) : 0;
    CUtensorMap const *x = p.x, *w = &p.w[product];
    uint32_t col = (tile.col - (C::kGather ? p.begin.at[product] : 0)) * C::kTileN;
    if constexpr (C::kGates)
      if (p.gated) {
        w = &p.w[cta.rank_in_cluster];
        col = (tile.col - cta.rank_in_cluster) * (C::kTileN / 2);  // less where its half of the tile begins
      }
    uint32_t first = 0, next = C::kGather ? 0 : p.begin.at[1];  // k blocks at which a pair begins
    uint32_t third = tile.owner, fourth = batch;
    if constexpr (C::kReplicate) {
      row += tile.owner * p.m_shard;
      third = 0;
    }
    if constexpr (C::kGather) {
      third = batch;
      fourth = 0;
      if (tile.owner != p.rank) {
        ptx::fence_proxy_async_global();  // the scheduler has seen these rows land
        x = &p.gathered[cta.parity()];
        fourth = schedule::peer_slot(p.rank, tile.owner);
      }
    }
    bool turned = C::kTurnsX && p.transposed_x;
    if (turned) {
      if constexpr (!C::kReplicate) row += tile.owner * p.m_shard;
      third = 0;
      fourth = batch;
    }
    for (uint32_t k = 0; k < p.k_blocks; ++k) {
      if (k == ask_at) tiles.taken();
      if constexpr (!C::kGather)
        if (k == next) {
          ++product;
          ++x;
          ++w;
          first = next;
          next = p.begin.at[product + 1];
        }
      uint32_t depth = (k - first) * C::kBlockK;
      ptx::mbarrier_wait(shared.empty(stage), phase);
      if (k == 0) trace.mark(schedule::Mark::kFirstLoad, packed);
      ptx::mbarrier_arrive_expect(shared.full(stage), C::kStageBytes);
      if (turned) {
#pragma unroll
        for (uint32_t rows = 0; rows < C::kCtaM; rows += 64)
          ptx::tma_load_4d(x, shared.a(stage) + rows * kBlockBytes, shared.full(stage), row + rows, depth, third, fourth);
      } else {
        ptx::tma_load_4d(x, shared.a(stage), shared.full(stage), depth, row, third, fourth);
      }
      // Each CTA loads half of w's tile for both.
      constexpr uint16_t kBoth = 3;
      if constexpr (C::kTransposedW) {
        uint32_t half = cta.rank_in_cluster * (C::kTileN / 2);
        ptx::tma_load_2d(w, shared.b(stage) + half * kBlockBytes, shared.full(stage), depth, col + half, kBoth);
      } else {
        constexpr uint32_t kFirsts = (C::kPanels + 1) / kCtas;
        uint32_t begin = cta.rank_in_cluster == 0 ? 0 : kFirsts, end = cta.rank_in_cluster == 0 ? kFirsts : C::kPanels;
        for (uint32_t panel = begin; panel < end; ++panel)
          ptx::tma_load_2d(w, shared.b(stage) + panel * kImageBytes, shared.full(stage), col + panel * 64, depth, kBoth);
      }
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    trace.mark(schedule::Mark::kLastLoad, packed);
  }
}

}  // namespace entwine::sm90
