// Collector (all-reduce): the otherwise idle thread of every cluster. The owner of a tile stores its finished images into
// every peer's results, and signals; the peer's collectors claim the parts of those tiles in CollectOrder, wait for each, and
// copy its images to y through two pieces of shared memory. Images are what TMA stores, so a part that sticks out of y is
// clipped on its way; one that is out of y as a whole was never sent.
//
// Why it can't deadlock. A collector waits only for own tiles of the other ranks, and those only for partial sums, which never
// wait: see body.cuh. Nobody waits for a collector but its own cluster, and that only to end; and a cluster that can't end
// keeps no tile from being claimed by any resident cluster, itself among them. So all tiles get done whatever collectors do,
// then no collector waits, and the one of the rank's first ticket alone collects everything.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/scheduler.cuh"
#include "kernel/sm90/wait.cuh"
#include "schedule/tile_parts.h"

namespace entwine::sm90 {

// Where the first image of `owner`'s part of a finished tile lies at `holder`.
template <class C>
__device__ __forceinline__ uint8_t* result(Cta<C> const& cta, uint32_t holder, uint32_t owner, uint32_t index, uint32_t part) {
  uint64_t tile = uint64_t(schedule::peer_slot(holder, owner)) * cta.params.raster.size() + index;
  return cta.staging(holder) + cta.params.results_offset + (tile * schedule::kSm90Parts + part) * C::kPartBytes;
}
// The word that tells `holder` of it.
template <class C>
__device__ __forceinline__ uint32_t* result_word(Cta<C> const& cta, uint32_t holder, uint32_t owner, uint32_t index,
                                                 uint32_t part) {
  uint32_t tiles = cta.params.raster.size();
  return cta.signal(holder, owner, schedule::result_signal(tiles, index, part, schedule::kSm90Parts));
}

// What of a part of a tile is inside y.
template <class C>
__device__ __forceinline__ schedule::PartInside inside(Params const& p, schedule::Tile tile, uint32_t part) {
  constexpr schedule::TileParts kParts{{C::kTileM, C::kTileN}};
  static_assert(kParts.stacked() == C::kStacked && kParts.cols() == C::kConsumerN, "parts are the consumers'");
  return schedule::part_inside(kParts, tile, part, p.m_shard, p.rows, p.n[0], C::kImageCols);
}

template <class C>
class Collector {
 public:
  __device__ __forceinline__ Collector(Cta<C> const& cta, Tracer<C>& trace)
      : cta_(cta), trace_(trace), order_{cta.params.raster, cta.params.ranks, cta.params.rank, schedule::kSm90Parts} {}

  __device__ __forceinline__ void run() {
    uint32_t* queue = &cta_.control()->push[cta_.parity()];
    // The next claim is on its way while a part is copied. Holding one that is ready behind one that isn't holds up nobody.
    for (uint32_t job = ptx::add_relaxed(queue, 1), next; job < order_.size(); job = next) {
      next = ptx::add_relaxed(queue, 1);
      collect(order_.at(job));
    }
    if (stored_ < loaded_) store();
    ptx::bulk_wait<0>();
  }

 private:
  static constexpr uint32_t kPieces = C::kPieces;
  static_assert(kPieces == 2, "one piece comes while the one before it goes");

  __device__ __forceinline__ void collect(schedule::CollectOrder::Job job) {
    Params const& p = cta_.params;
    schedule::Raster::Cell cell = p.raster.at(job.index);
    schedule::PartInside there = inside<C>(p, {job.owner, cell.row, cell.col}, job.part);
    if (there.images == 0) return;
    uint32_t const* word = result_word(cta_, p.rank, job.owner, job.index, job.part);
    // What has come need not wait with us.
    if (stored_ < loaded_ && !schedule::signal_reached(ptx::load_acquire_system(word), schedule::signal_value(cta_.epoch)))
      store();
    wait_for_peer(cta_, word, job.owner, cell.row, cell.col);
    trace_.mark(schedule::Mark::kCollected, pack_tile({job.owner, cell.row, cell.col}));
    uint8_t const* from = result(cta_, p.rank, job.owner, job.index, job.part);
    for (uint32_t image = 0; image < there.images; ++image) {
      ptx::bulk_wait_read<0>();  // the piece before the last has left
      uint32_t slot = loaded_ % kPieces;
      ptx::mbarrier_arrive_expect(cta_.shared.piece_loaded(slot), kImageBytes);
      ptx::bulk_load(cta_.shared.piece(slot), from + image * kImageBytes, kImageBytes, cta_.shared.piece_loaded(slot));
      if (stored_ < loaded_) store();
      ++loaded_;
      col_ = there.col + C::image_begin(image);
      row_ = there.row;
    }
  }

  // The last piece but for the one that was only just asked for.
  __device__ __forceinline__ void store() {
    uint32_t slot = stored_ % kPieces;
    ptx::mbarrier_wait(cta_.shared.piece_loaded(slot), (stored_ / kPieces) & 1);
    ptx::tma_store_4d(&cta_.params.y[0], cta_.shared.piece(slot), col_, row_, 0, 0);
    ptx::bulk_commit();
    ++stored_;
  }

  Cta<C> const& cta_;
  Tracer<C>& trace_;
  schedule::CollectOrder order_;
  uint32_t loaded_ = 0, stored_ = 0;  // pieces
  uint32_t col_ = 0, row_ = 0;        // where the piece that is not stored yet belongs
};

}  // namespace entwine::sm90
