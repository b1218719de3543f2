// GEMM + all-reduce: partial sums as for reduce-scatter; the finished tiles of the own chunk go to all peers, and theirs are
// collected into y.
#pragma once

#include <cstring>

#include "host/reduce_scatter.h"

namespace entwine::host {

template <typename In, typename Out>
class AllReduce : PartialSums<In, Out> {
 public:
  explicit AllReduce(Seat const& seat)
      : PartialSums<In, Out>(seat), collect_{raster_, g_.ranks, seat.rank, schedule::kHostParts} {}

  // Progress: schedule/movers.h, and a worker collects once all tiles of this rank are claimed, and what it waits for then are
  // tiles. So one worker a rank finishes.
  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    if (index == seat_.spec->workers) return this->moving_.stand_by(worker);
    return this->work(worker, [&](schedule::Tile const& t) { publish(worker, t); }) && collect_all(worker);
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  Out* y(schedule::Tile const& t) const {
    size_t row = size_t(t.owner) * g_.m_shard + g_.first_row(t.row);
    return RankPart<In, Out>::y(t, row);
  }
  uint32_t word(uint32_t index) const { return schedule::result_signal(g_.chunk_tiles(), index, 0, schedule::kHostParts); }
  // The image of a finished tile of `owner`, with `holder`.
  Out* result(uint32_t holder, uint32_t owner, uint32_t index) const {
    size_t image = size_t(schedule::peer_slot(holder, owner)) * g_.chunk_tiles() + index;
    std::byte* results = this->arena(holder).staging(seat_.epoch) + schedule::results_offset(g_, sizeof(Out));
    return reinterpret_cast<Out*>(results) + image * g_.tile_m * g_.tile_n;
  }

  void publish(Worker<In>& worker, schedule::Tile const& t) const {
    if (g_.rows(t) == 0) return;  // of a chunk that is short of these rows; nobody waits for it
    this->store(worker, t, y(t), g_.n);
    if (this->moving_.any()) {
      this->store(worker, t, this->moving_.outgoing(t), g_.tile_n);
      this->moving_.finished(worker, t);
      return;
    }
    uint32_t index = raster_.index(t.row, t.col);
    for (uint32_t slot = 0; slot < g_.ranks - 1; ++slot) {
      uint32_t peer = schedule::peer_of_slot(this->rank(), slot);
      this->store(worker, t, result(peer, this->rank(), index), g_.tile_n);
      this->raise(worker, peer, word(index));
    }
    worker.trace.mark(schedule::Mark::kLanded, t);
  }

  bool collect_all(Worker<In>& worker) const {
    for (;;) {
      worker.stalls.maybe();
      uint32_t position = this->own().push_queue().fetch_add(1);
      if (position >= collect_.size()) return true;
      schedule::CollectOrder::Job job = collect_.at(position);
      schedule::Raster::Cell cell = raster_.at(job.index);
      schedule::Tile t{job.owner, cell.row, cell.col};
      if (g_.rows(t) == 0) continue;
      if (!this->await(job.owner, word(job.index), t)) return false;
      worker.trace.mark(schedule::Mark::kCollected, t);
      Out const* image = result(this->rank(), job.owner, job.index);
      for (uint32_t i = 0; i < g_.rows(t); ++i)
        std::memcpy(y(t) + size_t(i) * g_.n, image + size_t(i) * g_.tile_n, this->cols(t) * sizeof(Out));
    }
  }

  schedule::CollectOrder collect_;
};

}  // namespace entwine::host
