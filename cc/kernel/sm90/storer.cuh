// Storer: one thread a consumer. It owns the consumer's C buffers: fetches the peers' partial sums into them, stores images of
// y or of partials for other owners, and signals. In an all-reduce it also sends the images of y to all peers. No math warp
// polls a peer or waits for a store to land.
//
// y coordinates, all-gather: (n, row, chunk, batch), the rows of a batch are the chunks in rank order; reduce-scatter:
// (n, row, batch, 0); all-reduce: (n, row, 0, 0). Rows past a chunk and columns past the end are clipped by TMA, but in an
// all-reduce rows past a chunk are the next one's: see inside(). Partials and finished tiles travel as raw images. Of several
// products, all-gather's tile is one's, whose columns begin anew. A gated tile has half as many columns of y.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/collector.cuh"
#include "kernel/sm90/outgoing.cuh"
#include "kernel/sm90/scheduler.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// Where the first image of this consumer's part of a partial tile lies: written by `producer`, added by `owner`.
template <class C>
__device__ __forceinline__ uint8_t* partial(Cta<C> const& cta, uint32_t producer, uint32_t owner, uint32_t index,
                                            uint32_t part) {
  bool pull = cta.params.pull && cta.params.movers.count == 0;
  uint32_t keeper = pull ? producer : owner, slot = schedule::peer_slot(keeper, pull ? owner : producer);
  uint64_t tile = uint64_t(slot) * cta.params.raster.size() + index;
  return cta.staging(keeper) + (tile * schedule::kSm90Parts + part) * C::kPartBytes;
}

// Push: waits until the link is this tile's to use. Remote tiles go over it in the order in which they are claimed, `pushers`
// at once: the earliest part lands first, where a free-for-all would let all land late, and stalled stores hold up no loads. An
// earlier remote tile is at an earlier position of this rank's queue, so this keeps the progress rule.
template <class C>
__device__ __forceinline__ void await_link(Cta<C> const& cta, schedule::Tile tile, uint32_t index) {
  Params const& p = cta.params;
  uint32_t ordinal = schedule::remote_ordinal(p.ranks, p.rank, tile.owner, index);
  if (ordinal < p.pushers) return;
  uint32_t wanted = (ordinal - p.pushers + 1) * schedule::kSm90Parts;
  while (ptx::load_relaxed(&cta.control()->counts[cta.parity()].landed) < wanted) __nanosleep(40);
}

template <class C>
__device__ __forceinline__ void store_tiles(Cta<C> const& cta, uint32_t consumer) {
  Params const& p = cta.params;
  Shared<C> const& shared = cta.shared;
  TileStream<C> tiles(shared);
  Tracer<C> trace(p, 1 + consumer);
  uint32_t used = 0;   // C buffers used by finished tiles
  uint32_t armed = 0;  // of the tile at hand: buffers handed to the consumer
  for (uint32_t packed = tiles.next(); packed != kNoTile;) {
    tiles.taken();
    schedule::Tile tile = unpack_tile(packed);
    bool remote = !C::kGather && tile.owner != p.rank, reduce = !C::kGather && !remote;
    uint32_t batch = tile.row / p.row_blocks;
    uint32_t row =
        (tile.row - batch * p.row_blocks) * C::kTileM + cta.rank_in_cluster * C::kCtaM + (C::kStacked ? consumer * 64 : 0);
    uint32_t product = C::kGather ? p.begin.of(tile.col) : 0;
    uint32_t col =
        (tile.col - (C::kGather ? p.begin.at[product] : 0)) * C::kTileN + (C::kStacked ? 0 : consumer * C::kConsumerN);
    bool moved = p.movers.count != 0;
    uint32_t set = schedule::outgoing_set(p.ranks, p.rank, tile.owner);
    uint32_t index = C::kGather ? 0 : p.raster.index(tile.row, tile.col), part = cta.rank_in_cluster * kConsumers + consumer;
    schedule::PartInside there{};
    if constexpr (C::kReplicate) {
      if (!remote) there = inside<C>(p, tile, part);
    }
    uint32_t sources = reduce ? p.ranks - 1 : 1, items = C::kImages * sources;  // an item is one use of a buffer
    if constexpr (C::kGates)
      if (p.gated) {
        col /= 2;
        items /= 2;
      }
    auto buffer = [&](uint32_t item) { return (used + item) % C::kBuffers; };

    for (uint32_t item = 0; item < items; ++item) {
      if (armed < items && armed < item + C::kBuffers) {
        ptx::bulk_wait_read<0>();  // what was stored from these buffers has left them
        for (; armed < items && armed < item + C::kBuffers; ++armed) {
          uint32_t ready = shared.buffer_ready(consumer, buffer(armed));
          if (reduce) {
            uint32_t image = armed / sources, source = schedule::peer_of_slot(p.rank, armed - image * sources);
            if (image == 0) {
              if (armed == 0) trace.mark(schedule::Mark::kAwaited, packed);
              wait_for_peer(cta, cta.signal(p.rank, source, schedule::partial_signal(index, part, schedule::kSm90Parts)),
                            source, tile.row, tile.col);
              if (armed == sources - 1) trace.mark(schedule::Mark::kArrived, packed);
            }
            ptx::mbarrier_arrive_expect(ready, kImageBytes);
            ptx::bulk_load(shared.image(consumer, buffer(armed)),
                           partial(cta, source, p.rank, index, part) + image * kImageBytes, kImageBytes, ready);
          } else {
            ptx::mbarrier_arrive(ready);
          }
        }
      }
      uint32_t from = shared.image(consumer, buffer(item));
      ptx::mbarrier_wait(shared.buffer_done(consumer, buffer(item)), ((used + item) / C::kBuffers) & 1);
      if (item == sources - 1) trace.mark(schedule::Mark::kMultiplied, packed);
      if (item == items - 1) trace.mark(schedule::Mark::kRounded, packed);
      if (remote) {
        if (item == 0 && !p.pull) await_link(cta, tile, index);
        uint8_t* to = moved ? outgoing(cta, set, index, part) : partial(cta, p.rank, tile.owner, index, part);
        ptx::bulk_store(to + item * kImageBytes, from, kImageBytes);
        ptx::bulk_commit();
      } else if (uint32_t image = item / sources; item - image * sources == sources - 1) {
        if constexpr (!C::kReplicate) {
          ptx::tma_store_4d(&p.y[product], from, col + C::image_begin(image), row, C::kGather ? tile.owner : batch,
                            C::kGather ? batch : 0);
        } else if (image < there.images) {
          ptx::tma_store_4d(&p.y[0], from, there.col + C::image_begin(image), there.row, 0, 0);
          if (moved) ptx::bulk_store(outgoing(cta, set, index, part) + image * kImageBytes, from, kImageBytes);
          for (uint32_t peer = 0; peer < p.ranks && !moved; ++peer)
            if (peer != p.rank)
              ptx::bulk_store(result(cta, peer, p.rank, index, part) + image * kImageBytes, from, kImageBytes);
        }
        ptx::bulk_commit();
      }
    }
    used += items;
    armed = 0;

    uint32_t stored = packed;
    packed = tiles.next();
    if (remote || C::kReplicate) {
      // Buffers are free before their writes have landed: let the consumer go on. Then signal, before waiting for anyone.
      ptx::bulk_wait_read<0>();
      if (packed != kNoTile && unpack_tile(packed).owner != p.rank)
        for (; armed < C::kBuffers && armed < C::kImages; ++armed)
          ptx::mbarrier_arrive(shared.buffer_ready(consumer, buffer(armed)));
      ptx::bulk_wait<0>();
      if (remote) {
        if (!p.pull) ptx::count_relaxed(&cta.control()->counts[cta.parity()].landed);
        uint32_t* word = moved ? outgoing_flag(cta, set, index, part)
                               : cta.signal(tile.owner, p.rank, schedule::partial_signal(index, part, schedule::kSm90Parts));
        ptx::store_release_system(word, schedule::signal_value(cta.epoch));
      } else if (moved) {
        ptx::store_release_system(outgoing_flag(cta, set, index, part), schedule::signal_value(cta.epoch));
      } else if (there.images != 0) {
        for (uint32_t peer = 0; peer < p.ranks; ++peer)
          if (peer != p.rank)
            ptx::store_release_system(result_word(cta, peer, p.rank, index, part), schedule::signal_value(cta.epoch));
      }
      trace.mark(schedule::Mark::kLanded, stored);
    }
  }
  ptx::bulk_wait<0>();
}

}  // namespace entwine::sm90
