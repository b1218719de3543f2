// GEMM + reduce-scatter: tiles of other ranks' chunks become partial sums, tiles of the own chunk take the peers' in. The work
// that an all-reduce begins with, too.
#pragma once

#include "host/gathering.h"
#include "host/moving.h"

namespace entwine::host {

template <typename In, typename Out>
class PartialSums : protected RankPart<In, Out> {
 protected:
  explicit PartialSums(Seat const& seat)
      : RankPart<In, Out>(seat), order_{raster_, g_.ranks, seat.rank, seat.spec->plan.lead}, moving_(seat) {}

  // Works on all tiles, and as a mover before; `store_sum(tile)` is called for an own one when the accumulators hold what y
  // shall be. False: the call is off.
  template <typename StoreSum>
  bool work(Worker<In>& worker, StoreSum store_sum) {
    TileClaims claims(seat_, worker.stalls);
    if (claims.moves() && !moving_.move_all(worker)) return false;
    for (;;) {
      uint32_t tile = claims.next();
      if (tile >= order_.size()) return true;
      schedule::Tile t = order_.at(tile);
      worker.trace.mark(schedule::Mark::kClaimed, t);
      worker.product.clear();
      worker.trace.mark(schedule::Mark::kFirstLoad, t);
      for (uint32_t i = 0; i < seat_.spec->products.count; ++i) this->add_product(worker, t, i, this->rows_of_whole(t, i));
      worker.trace.mark(schedule::Mark::kMultiplied, t);
      this->scale(worker, t);
      if (t.owner != this->rank()) {
        hand_over(worker, t);
        continue;
      }
      if (!add_partials(worker, t)) return false;
      this->finish(worker, t);
      store_sum(t);
      worker.trace.mark(schedule::Mark::kRounded, t);
    }
  }

  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  uint32_t index(schedule::Tile const& t) const { return raster_.index(t.row, t.col); }
  uint32_t word(schedule::Tile const& t) const { return schedule::partial_signal(index(t), 0, schedule::kHostParts); }

  // The image of source's partial sum of `t`. Pull: it lies with the source; push: with the owner.
  Out* partial(uint32_t source, schedule::Tile const& t) const {
    bool pull = seat_.spec->plan.transport == schedule::Transport::kPull && !moving_.any();
    uint32_t holder = pull ? source : t.owner, set = schedule::peer_slot(holder, pull ? t.owner : source);
    size_t image = size_t(set) * g_.chunk_tiles() + index(t);
    return reinterpret_cast<Out*>(this->arena(holder).staging(seat_.epoch)) + image * g_.tile_m * g_.tile_n;
  }

  // Never waits, so that whoever waits for it is served.
  void hand_over(Worker<In>& worker, schedule::Tile const& t) const {
    this->store(worker, t, moving_.any() ? moving_.outgoing(t) : partial(this->rank(), t), g_.tile_n);
    if (moving_.any())
      moving_.finished(worker, t);
    else
      this->raise(worker, t.owner, word(t));
    worker.trace.mark(schedule::Mark::kLanded, t);
  }

  // Adds the peers' partial sums in rank order, in float.
  bool add_partials(Worker<In>& worker, schedule::Tile const& t) const {
    worker.trace.mark(schedule::Mark::kAwaited, t);
    for (uint32_t slot = 0; slot < g_.ranks - 1; ++slot) {
      uint32_t peer = schedule::peer_of_slot(this->rank(), slot);
      if (!this->await(peer, word(t), t)) return false;
      if (slot == g_.ranks - 2) worker.trace.mark(schedule::Mark::kArrived, t);
      Out const* image = partial(peer, t);
      for (uint32_t i = 0; i < g_.rows(t); ++i)
        for (uint32_t j = 0; j < this->cols(t); ++j) worker.product.row(i)[j] += to_float(image[size_t(i) * g_.tile_n + j]);
    }
    return true;
  }

  schedule::ReduceScatterOrder order_;
  Moving<In, Out> moving_;
};

template <typename In, typename Out>
class ReduceScatter : PartialSums<In, Out> {
 public:
  // Beside the matmul another array may be gathered, with signals and staging of its own.
  explicit ReduceScatter(Seat const& seat) : PartialSums<In, Out>(seat), beside_(seat, seat.operands.z, sizeof(Out)) {}

  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    if (index == seat_.spec->workers) return this->moving_.stand_by(worker);
    beside_.push(worker);
    auto store_sum = [&](schedule::Tile const& t) {
      size_t row = size_t(g_.batch_of(t.row)) * g_.m_shard + g_.first_row(t.row);
      this->store(worker, t, this->y(t, row), g_.n);
    };
    return this->work(worker, store_sum) && beside_.copy_all(worker);
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::seat_;

  Gathering<In, Out> beside_;
};

}  // namespace entwine::host
