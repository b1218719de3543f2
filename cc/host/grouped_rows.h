// All-gather + GEMM, strategy "signal": one worker gathers x group by group of row blocks, as NCCL does on a GPU, and tiles of
// a group wait until it is there.
#pragma once

#include <cstring>

#include "host/worker.h"
#include "schedule/tile_groups.h"

namespace entwine::host {

template <typename In, typename Out>
class GroupedRows : RankPart<In, Out> {
 public:
  explicit GroupedRows(Seat const& seat) : RankPart<In, Out>(seat), groups_(seat.spec->groups()) {
    void* whole = seat.operands.gathered;
    whole_ = static_cast<In*>(whole != nullptr ? whole : static_cast<void*>(seat.operands.scratch + schedule::kScratchHead));
  }

  // Progress: whoever gathers waits only for others who do, and each has sent a group before it waits for it. The worker after
  // all others gathers.
  bool run(uint32_t index) {
    Worker<In> worker(seat_, index);
    if (index == seat_.spec->workers) return gather_all(worker);
    for (;;) {
      worker.stalls.maybe();
      uint32_t position = this->own().tile_queue().fetch_add(1);
      if (position >= g_.tiles()) return true;
      schedule::Tile t = tile_at(position);
      worker.trace.mark(schedule::Mark::kClaimed, t);
      if (t.owner != this->rank() && !await_group(groups_.of(t.row))) return false;
      worker.trace.mark(schedule::Mark::kPosted, t);
      worker.product.clear();
      worker.trace.mark(schedule::Mark::kFirstLoad, t);
      this->add_product(worker, t, 0, rows(t));
      worker.trace.mark(schedule::Mark::kMultiplied, t);
      this->finish(worker, t);
      size_t row = (size_t(g_.batch_of(t.row)) * g_.ranks + t.owner) * g_.m_shard + g_.first_row(t.row);
      this->store(worker, t, this->y(t, row), this->pitch(t));
      worker.trace.mark(schedule::Mark::kRounded, t);
    }
  }

 private:
  using RankPart<In, Out>::g_;
  using RankPart<In, Out>::raster_;
  using RankPart<In, Out>::seat_;

  // The own chunk's first, then the peers' of each group.
  schedule::Tile tile_at(uint32_t position) const {
    schedule::Raster raster = raster_;
    if (position < raster.size()) return schedule::RowsOrder{raster, 0, g_.ranks, this->rank(), 1}.at(position);
    position -= raster.size();
    for (uint32_t group = 0;; ++group) {
      raster.rows = groups_.size(group);
      schedule::RowsOrder order{raster, groups_.begin(group), g_.ranks, this->rank() + 1, g_.ranks - 1};
      if (position < order.size()) return order.at(position);
      position -= order.size();
    }
  }

  Rows<In> rows(schedule::Tile const& t) const {
    uint32_t batch = g_.batch_of(t.row), first = g_.first_row(t.row);
    In const* own = static_cast<In const*>(seat_.operands.x) + (size_t(batch) * g_.m_shard + first) * g_.k;
    return {t.owner == this->rank() ? own : place(t.owner, t.row), g_.k, 1};
  }
  // Of a row block in the whole array.
  In* place(uint32_t owner, uint32_t block) const {
    return whole_ + ((size_t(g_.batch_of(block)) * g_.ranks + owner) * g_.m_shard + g_.first_row(block)) * g_.k;
  }

  bool await_group(uint32_t group) const {
    this->own().bell().wait(Timeout(0), [&] { return there_.load() > group || seat_.off->load(); });
    return there_.load() > group;
  }

  bool gather_all(Worker<In>& worker) {
    for (uint32_t group = 0; group < groups_.count; ++group) {
      worker.trace.mark_group(schedule::Mark::kSending, group);
      for (uint32_t slot = 0; slot < g_.ranks - 1; ++slot) {
        uint32_t peer = schedule::peer_of_slot(this->rank(), slot);
        each_block(group, [&](uint32_t block, size_t offset, size_t bytes) {
          std::memcpy(staged(peer, this->rank()) + offset, own_rows(block), bytes);
        });
        this->raise(worker, peer, group);
      }
      for (uint32_t slot = 0; slot < g_.ranks - 1; ++slot) {
        uint32_t peer = schedule::peer_of_slot(this->rank(), slot);
        if (!this->await(peer, group, {peer, groups_.begin(group), 0})) return false;
        each_block(group, [&](uint32_t block, size_t offset, size_t bytes) {
          std::memcpy(place(peer, block), staged(this->rank(), peer) + offset, bytes);
        });
      }
      worker.trace.mark_group(schedule::Mark::kSent, group);
      there_.store(group + 1);
      this->own().bell().ring();
    }
    if (seat_.operands.gathered != nullptr)
      for (uint32_t group = 0; group < groups_.count; ++group)
        each_block(group, [&](uint32_t block, size_t, size_t bytes) {
          std::memcpy(place(this->rank(), block), own_rows(block), bytes);
        });
    return true;
  }

  In const* own_rows(uint32_t block) const {
    return static_cast<In const*>(seat_.operands.x) + (size_t(g_.batch_of(block)) * g_.m_shard + g_.first_row(block)) * g_.k;
  }
  // What `holder` has of source's chunk.
  std::byte* staged(uint32_t holder, uint32_t source) const {
    return this->arena(holder).staging(seat_.epoch) +
           schedule::peer_slot(holder, source) * schedule::chunk_bytes(g_, sizeof(In));
  }
  // use(block, where it begins in its chunk, bytes).
  template <typename Use>
  void each_block(uint32_t group, Use use) const {
    for (uint32_t block = groups_.begin(group); block < groups_.ends[group]; ++block)
      use(block, (size_t(g_.batch_of(block)) * g_.m_shard + g_.first_row(block)) * g_.k * sizeof(In),
          size_t(g_.rows(block)) * g_.k * sizeof(In));
  }

  schedule::Groups groups_;
  In* whole_;
  std::atomic<uint32_t> there_{0};  // groups
};

}  // namespace entwine::host
