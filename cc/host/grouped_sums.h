// GEMM + reduce-scatter and + all-reduce, strategy "signal": tiles are stored group by group, and one worker sums each group
// over the ranks when it is whole, as NCCL does on a GPU.
#pragma once

#include "host/worker.h"
#include "schedule/tile_groups.h"

namespace entwine::host {

template <typename In, typename Out>
class GroupedSums : RankPart<In, Out> {
 public:
  explicit GroupedSums(Seat const& seat) : RankPart<In, Out>(seat), groups_(seat.spec->groups()) {
    g_ = schedule::grouped(seat.spec->op, g_);
    raster_ = {g_.chunk_rows(), g_.cols(), seat.spec->plan.raster};
    order_ = {raster_, g_.ranks};
  }

  // Progress: tiles wait for nobody, and groups are summed in order. The worker after all others communicates.
  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    if (index == seat_.spec->workers) return sum_all(worker);
    for (;;) {
      worker.stalls.maybe();
      uint32_t position = this->own().tile_queue().fetch_add(1);
      if (position >= order_.size()) return true;
      schedule::Tile t = order_.at(position);
      worker.trace.mark(schedule::Mark::kClaimed, t);
      worker.product.clear();
      worker.trace.mark(schedule::Mark::kFirstLoad, t);
      this->add_product(worker, t, 0, this->rows_of_whole(t, 0));
      worker.trace.mark(schedule::Mark::kMultiplied, t);
      uint32_t cell = raster_.index(t.row, t.col), group = groups_.of(cell);
      this->store(worker, t, image(partials(this->rank()), t.owner, cell), g_.tile_n);
      worker.trace.mark(schedule::Mark::kLanded, t);
      if (finished_[group].fetch_add(1) + 1 == whole(group)) this->own().bell().ring();
    }
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  bool scatters() const { return seat_.spec->op == schedule::Op::kMatmulReduceScatter; }
  uint32_t owner() const { return scatters() ? this->rank() : 0; }  // of the tiles that this rank sums
  uint32_t whole(uint32_t group) const { return groups_.size(group) * g_.ranks; }
  std::byte* partials(uint32_t rank) const { return this->arena(rank).staging(seat_.epoch); }
  Out* image(std::byte* tiles, uint32_t owner, uint32_t cell) const {
    return reinterpret_cast<Out*>(tiles) + size_t(groups_.slot(g_.ranks, owner, cell)) * g_.tile_m * g_.tile_n;
  }

  bool sum_all(Worker<In>& worker) {
    uint32_t team = seat_.spec->geometry.ranks;
    for (uint32_t group = 0; group < groups_.count; ++group) {
      auto done = [&] { return finished_[group].load() == whole(group) || seat_.off->load(); };
      this->own().bell().wait(Timeout(0), done);
      if (seat_.off->load()) return false;
      worker.trace.mark_group(schedule::Mark::kSending, group);
      for (uint32_t peer = 0; peer < team; ++peer)
        if (peer != this->rank()) this->raise(worker, peer, group);
      schedule::Raster::Cell first = raster_.at(groups_.begin(group));
      for (uint32_t peer = 0; peer < team; ++peer)
        if (peer != this->rank() && !this->await(peer, group, {owner(), first.row, first.col})) return false;
      for (uint32_t cell = groups_.begin(group); cell < groups_.ends[group]; ++cell) sum(worker, cell);
      worker.trace.mark_group(schedule::Mark::kSent, group);
    }
    worker.trace.mark_group(schedule::Mark::kCopying, groups_.count - 1);
    for (uint32_t cell = 0; cell < raster_.size(); ++cell) copy(worker, cell);
    worker.trace.mark_group(schedule::Mark::kCopied, groups_.count - 1);
    return true;
  }

  schedule::Tile tile(uint32_t cell) const {
    schedule::Raster::Cell at = raster_.at(cell);
    return {owner(), at.row, at.col};
  }
  Out* summed(uint32_t cell) const { return image(seat_.operands.scratch + schedule::kScratchHead, owner(), cell); }

  // In rank order, rounded once.
  void sum(Worker<In>& worker, uint32_t cell) const {
    schedule::Tile t = tile(cell);
    worker.product.clear();
    for (uint32_t rank = 0; rank < seat_.spec->geometry.ranks; ++rank) add(worker, t, image(partials(rank), owner(), cell));
    this->store(worker, t, summed(cell), g_.tile_n);
  }
  // To its place in y, finished.
  void copy(Worker<In>& worker, uint32_t cell) const {
    schedule::Tile t = tile(cell);
    worker.product.clear();
    add(worker, t, summed(cell));
    this->finish(worker, t);
    size_t row = size_t(g_.batch_of(t.row)) * g_.m_shard + g_.first_row(t.row);
    this->store(worker, t, this->y(t, row), g_.n);
  }
  void add(Worker<In>& worker, schedule::Tile const& t, Out const* image) const {
    for (uint32_t i = 0; i < g_.rows(t); ++i)
      for (uint32_t j = 0; j < this->cols(t); ++j) worker.product.row(i)[j] += to_float(image[size_t(i) * g_.tile_n + j]);
  }

  schedule::Groups groups_;
  schedule::CellOrder order_{};
  std::atomic<uint32_t> finished_[schedule::kMaxGroups] = {};  // tiles of each group
};

}  // namespace entwine::host
