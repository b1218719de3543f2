// All-gather + GEMM: pushers copy the own chunk of x to the peers while workers multiply, the own chunk first.
#pragma once

#include <cstring>

#include "host/worker.h"

namespace entwine::host {

template <typename In, typename Out>
class AllGather : RankPart<In, Out> {
 public:
  explicit AllGather(Seat const& seat)
      : RankPart<In, Out>(seat),
        order_{raster_, g_.ranks, seat.rank},
        pushes_{g_.ranks, seat.rank, g_.chunk_rows(), kUnitsPerBlock} {}

  // Progress: pushing never waits, and nobody waits before every push of this rank is claimed. So one worker a rank finishes.
  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    if (index < seat_.spec->plan.pushers) push_all(worker);
    for (;;) {
      worker.stalls.maybe();
      uint32_t position = this->own().tile_queue().fetch_add(1);
      if (position >= order_.size()) return true;
      schedule::Tile t = order_.at(position);
      if (t.owner != this->rank() && !this->raised(t.owner, schedule::gathered_signal(t.row))) {
        push_all(worker);
        if (!this->await(t.owner, schedule::gathered_signal(t.row), t)) return false;
      }
      this->multiply(worker, t, rows(t));
      size_t row = (size_t(g_.batch_of(t.row)) * g_.ranks + t.owner) * g_.m_shard + g_.first_row(t.row);
      this->store(worker, t, static_cast<Out*>(seat_.operands.y) + row * g_.n + size_t(t.col) * g_.tile_n, g_.n);
    }
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  // Where row block `row` of a chunk begins, in elements.
  size_t offset(uint32_t row) const { return (size_t(g_.batch_of(row)) * g_.m_shard + g_.first_row(row)) * g_.k; }

  // The copy of source's chunk that `holder` keeps.
  In* gathered(uint32_t holder, uint32_t source) const {
    size_t chunk = size_t(g_.batch) * g_.m_shard * g_.k;
    return reinterpret_cast<In*>(this->arena(holder).staging(seat_.epoch)) + schedule::peer_slot(holder, source) * chunk;
  }
  In const* chunk() const { return static_cast<In const*>(seat_.operands.x); }

  In const* rows(schedule::Tile const& t) const {
    return (t.owner == this->rank() ? chunk() : gathered(this->rank(), t.owner)) + offset(t.row);
  }

  void push_all(Worker<In>& worker) const {
    for (;;) {
      worker.stalls.maybe();
      uint32_t unit = this->own().push_queue().fetch_add(1);
      if (unit >= pushes_.size()) return;
      push(worker, pushes_.at(unit));
    }
  }

  // Copies one piece of a row block; whoever brings the last piece signals for all.
  void push(Worker<In>& worker, schedule::PushOrder::Unit const& u) const {
    uint64_t rows = g_.rows(u.row), begin = rows * u.piece / kUnitsPerBlock, end = rows * (u.piece + 1) / kUnitsPerBlock;
    size_t at = offset(u.row) + begin * g_.k;
    std::memcpy(gathered(u.destination, this->rank()) + at, chunk() + at, (end - begin) * g_.k * sizeof(In));
    uint32_t word = schedule::gathered_signal(u.row);
    Arena::Word& arrivals =
        this->own().arrivals(schedule::signal_word(u.destination, this->own().layout().words_per_source, word));
    if (arrivals.fetch_add(1) + 1 < kUnitsPerBlock) return;
    arrivals.store(0);  // for the next call; nobody else arrives in this one
    this->raise(worker, u.destination, word);
  }

  schedule::AllGatherOrder order_;
  schedule::PushOrder pushes_;
};

}  // namespace entwine::host
