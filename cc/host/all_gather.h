// All-gather + GEMM: pushers copy the own chunk of x to the peers while workers multiply, the own chunk first.
#pragma once

#include "host/gathering.h"

namespace entwine::host {

template <typename In, typename Out>
class AllGather : RankPart<In, Out> {
 public:
  explicit AllGather(Seat const& seat)
      : RankPart<In, Out>(seat), gathering_(seat, seat.operands.x, sizeof(In)), order_{raster_, g_.ranks, seat.rank} {}

  // Progress: see gathering.h; a tile of another chunk waits for its row block like a copy.
  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    bool movers = gathering_.movers_push();
    if (index == seat_.spec->workers) {
      if (TileClaims::idle_half_moves(seat_)) gathering_.push_all(worker);
      return true;
    }
    TileClaims claims(seat_, worker.stalls);
    if (!movers)
      gathering_.push(worker);
    else if (claims.moves())
      gathering_.push_all(worker);
    for (;;) {
      uint32_t tile = claims.next();
      if (tile >= order_.size()) return gathering_.copy_all(worker);
      schedule::Tile t = order_.at(tile);
      worker.trace.mark(schedule::Mark::kClaimed, t);
      if (t.owner != this->rank() && !this->raised(t.owner, gathering_.word(t.row))) {
        if (!movers) gathering_.push_all(worker);
        if (!this->await(t.owner, gathering_.word(t.row), t)) return false;
      }
      worker.trace.mark(schedule::Mark::kPosted, t);
      worker.product.clear();
      worker.trace.mark(schedule::Mark::kFirstLoad, t);
      this->add_product(worker, t, this->product(t), rows(t));
      worker.trace.mark(schedule::Mark::kMultiplied, t);
      this->scale(worker, t);
      this->finish(worker, t);
      this->gate(worker, t, rows(t));
      size_t row = (size_t(g_.batch_of(t.row)) * g_.ranks + t.owner) * g_.m_shard + g_.first_row(t.row);
      this->store(worker, t, this->y(t, row), this->pitch(t));
      worker.trace.mark(schedule::Mark::kRounded, t);
    }
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  Rows<In> rows(schedule::Tile const& t) const {
    size_t row = size_t(g_.batch_of(t.row)) * g_.m_shard + g_.first_row(t.row);
    In const* chunk = t.owner == this->rank() ? static_cast<In const*>(seat_.operands.x)
                                              : reinterpret_cast<In const*>(gathering_.staged(this->rank(), t.owner));
    return {chunk + row * g_.k, g_.k, 1};
  }

  Gathering<In, Out> gathering_;
  schedule::AllGatherOrder order_;
};

}  // namespace entwine::host
