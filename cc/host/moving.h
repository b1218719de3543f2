// Strategy "resident", reduce-scatter and all-reduce: tiles leave what they have finished with their own rank, and movers take
// it to the peers.
#pragma once

#include <cstring>

#include "host/tile_claims.h"

namespace entwine::host {

template <typename In, typename Out>
class Moving : RankPart<In, Out> {
 public:
  explicit Moving(Seat const& seat)
      : RankPart<In, Out>(seat),
        order_{raster_, g_.ranks, seat.rank, seat.spec->plan.lead, seat.spec->op == schedule::Op::kMatmulAllReduce} {}

  bool any() const { return seat_.spec->plan.movers != 0; }

  // Where a tile's image is left: a partial sum, or the finished tile of the own chunk.
  Out* outgoing(schedule::Tile const& t) const {
    std::byte* sets =
        this->own().staging(seat_.epoch) + schedule::outgoing_offset(seat_.spec->op, g_, sizeof(Out), seat_.spec->gathering);
    size_t set = schedule::outgoing_set(g_.ranks, this->rank(), t.owner);
    return reinterpret_cast<Out*>(sets) + (set * g_.chunk_tiles() + index(t)) * image();
  }
  void finished(Worker<In>& worker, schedule::Tile const& t) const { this->raise(worker, this->rank(), flag(t)); }

  // Until there is nothing left to move. False: the call is off.
  bool move_all(Worker<In>& worker) const {
    for (;;) {
      worker.stalls.maybe();
      uint32_t job = this->own().move_queue().fetch_add(1);
      if (job >= order_.size()) return true;
      if (!move(worker, order_.at(job))) return false;
    }
  }
  // Of ticket 0's idle half.
  bool stand_by(Worker<In>& worker) const { return TileClaims::idle_half_moves(seat_) ? move_all(worker) : !seat_.off->load(); }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  size_t image() const { return size_t(g_.tile_m) * g_.tile_n; }
  uint32_t index(schedule::Tile const& t) const { return raster_.index(t.row, t.col); }
  uint32_t flag(schedule::Tile const& t) const {
    uint32_t set = schedule::outgoing_set(g_.ranks, this->rank(), t.owner);
    return schedule::finished_flag(g_.chunk_tiles(), set, index(t), 0, schedule::kHostParts);
  }

  bool move(Worker<In>& worker, schedule::MoveOrder::Job const& job) const {
    schedule::Raster::Cell cell = raster_.at(job.index);
    schedule::Tile t{job.result ? this->rank() : job.peer, cell.row, cell.col};
    if (job.result && g_.rows(t) == 0) return true;  // nobody makes it
    this->own().bell().wait(Timeout(0), [&] { return this->raised(this->rank(), flag(t)) || seat_.off->load(); });
    if (!this->raised(this->rank(), flag(t))) return false;
    worker.trace.mark(schedule::Mark::kMoving, {job.peer, cell.row, cell.col});
    size_t set = schedule::peer_slot(job.peer, this->rank());
    size_t results = job.result ? schedule::results_offset(g_, sizeof(Out)) : 0;
    std::byte* to = this->arena(job.peer).staging(seat_.epoch) + results;
    std::memcpy(reinterpret_cast<Out*>(to) + (set * g_.chunk_tiles() + job.index) * image(), outgoing(t),
                image() * sizeof(Out));
    this->raise(worker, job.peer,
                job.result ? schedule::result_signal(g_.chunk_tiles(), job.index, 0, schedule::kHostParts)
                           : schedule::partial_signal(job.index, 0, schedule::kHostParts));
    worker.trace.mark(schedule::Mark::kMoved, {});
    return true;
  }

  schedule::MoveOrder order_;
};

}  // namespace entwine::host
