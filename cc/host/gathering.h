// What gathers an array beside the matmul: x of all-gather, or another one beside reduce-scatter. Pushers copy the own chunk to
// the peers' staging; if the gathered array is a result, the own chunk goes there on the way, and copiers copy the peers'.
//
// Progress: pushing never waits, and somebody does it all: movers (schedule/movers.h), or and whoever waits for a peer's row
// block claims every push of this rank that is left first. So one worker a rank finishes, and nobody waits for a copy.
#pragma once

#include <cstring>

#include "host/tile_claims.h"

namespace entwine::host {

template <typename In, typename Out>
class Gathering : RankPart<In, Out> {
 public:
  // `own` is this rank's chunk, and `element_bytes` are those of a partial sum or of x.
  Gathering(Seat const& seat, void const* own, uint32_t element_bytes)
      : RankPart<In, Out>(seat),
        gathering_(seat.spec->gathering),
        own_(static_cast<std::byte const*>(own)),
        whole_(static_cast<std::byte*>(seat.operands.gathered)),
        first_word_(schedule::first_gathered_signal(seat.spec->op, seat.spec->geometry, schedule::kHostParts)),
        offset_(schedule::gathered_offset(seat.spec->op, seat.spec->geometry, element_bytes)),
        pushes_{seat.spec->geometry.ranks, seat.rank, gathering_.blocks(), kUnitsPerBlock},
        copies_{seat.spec->geometry.ranks, seat.rank, gathering_.blocks(), kUnitsPerBlock} {}

  uint32_t word(uint32_t block) const { return schedule::gathered_signal(first_word_, block); }

  // The copy of source's chunk that `holder` keeps.
  std::byte* staged(uint32_t holder, uint32_t source) const {
    return this->arena(holder).staging(this->seat_.epoch) + offset_ +
           schedule::peer_slot(holder, source) * gathering_.chunk_bytes();
  }

  // Strategy "resident", all-gather: pushing is the movers'.
  bool movers_push() const {
    return this->seat_.spec->plan.movers != 0 && this->seat_.spec->op == schedule::Op::kAllGatherMatmul;
  }

  // To be called by every worker, before its tiles, but where movers push.
  void push(Worker<In>& worker) const {
    schedule::Plan const& plan = this->seat_.spec->plan;
    uint32_t pushers = this->seat_.spec->op == schedule::Op::kAllGatherMatmul ? plan.pushers : plan.copiers;
    if (worker.index < pushers) push_all(worker);
  }

  void push_all(Worker<In>& worker) const {
    for (;;) {
      worker.stalls.maybe();
      uint32_t unit = this->own().push_queue().fetch_add(1);
      if (unit >= pushes_.size()) return;
      push(worker, pushes_.at(unit));
    }
  }

  // To be called by every worker, after its tiles. False: the call is off.
  bool copy_all(Worker<In>& worker) const {
    if (whole_ == nullptr || worker.index >= this->seat_.spec->plan.copiers) return true;
    if (!movers_push()) push_all(worker);
    for (;;) {
      worker.stalls.maybe();
      uint32_t unit = this->own().copy_queue().fetch_add(1);
      if (unit >= copies_.size()) return true;
      auto [source, block, piece] = copies_.at(unit);
      if (!this->await(source, word(block), {source, block, 0})) return false;
      Piece p = piece_of(block, piece);
      std::memcpy(whole_ + gathering_.whole_offset(block, source, this->g_.ranks) + p.begin,
                  staged(this->rank(), source) + gathering_.offset(block) + p.begin, p.bytes);
    }
  }

 private:
  struct Piece {
    uint64_t begin, bytes;  // in its row block
  };
  Piece piece_of(uint32_t block, uint32_t piece) const {
    uint64_t bytes = gathering_.block_bytes(block), begin = bytes * piece / kUnitsPerBlock;
    return {begin, bytes * (piece + 1) / kUnitsPerBlock - begin};
  }

  // Copies one piece of a row block; whoever brings the last piece signals for all.
  void push(Worker<In>& worker, schedule::PushOrder::Unit const& u) const {
    Piece p = piece_of(u.row, u.piece);
    std::byte const* from = own_ + gathering_.offset(u.row) + p.begin;
    if (u.first && whole_ != nullptr)
      std::memcpy(whole_ + gathering_.whole_offset(u.row, this->rank(), this->g_.ranks) + p.begin, from, p.bytes);
    std::memcpy(staged(u.destination, this->rank()) + gathering_.offset(u.row) + p.begin, from, p.bytes);
    worker.trace.mark_unit(u.destination, u.row);
    Arena::Word& arrivals =
        this->own().arrivals(schedule::signal_word(u.destination, this->own().layout().words_per_source, word(u.row)));
    if (arrivals.fetch_add(1) + 1 < kUnitsPerBlock) return;
    arrivals.store(0);  // for the next call; nobody else arrives in this one
    this->raise(worker, u.destination, word(u.row));
  }

  schedule::Gathering gathering_;
  std::byte const* own_;
  std::byte* whole_;
  uint32_t first_word_;
  uint64_t offset_;
  schedule::PushOrder pushes_;
  schedule::CopyOrder copies_;
};

}  // namespace entwine::host
