// Pusher: one otherwise idle thread in each of some clusters, for what is gathered beside the matmul (x of all-gather, or some
// other array beside reduce-scatter). They claim units of the own chunk in PushOrder and copy them to the peers' staging
// through a small ring in shared memory, all of it asynchronous. Where the whole array is a result, the own chunk's bytes go
// there on their first way through the ring, and then units of the peers' chunks, in CopyOrder, from staging.
//
// Who pushes never waits for a peer. Copies wait for their row block's signal; a pusher turns to them when no push of its rank
// is left to claim and its own have landed and been counted, and nobody waits for a copy.
//
// A row block is pushed by several pushers. Each adds its landed units to the block's arrival counter; the last one resets the
// counter and raises the block's one signal, so that the word keeps its single writer (the acq_rel additions chain the others'
// landed bytes to that release).
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/scheduler.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// A unit of `block` (destination and row block) has landed: counts it, and signals the row block if that makes it complete.
template <class C>
__device__ __forceinline__ void count_unit(Cta<C> const& cta, uint32_t block) {
  Params const& p = cta.params;
  uint32_t destination = block >> 24;
  uint32_t word = schedule::gathered_signal(p.gather.first_word, block & 0xffffff);
  uint32_t* arrivals = reinterpret_cast<uint32_t*>(p.arena[p.rank] + p.arrivals_offset) +
                       schedule::signal_word(destination, p.words_per_source, word);
  if (ptx::add_acquire_release(arrivals, 1) == p.gather.units_per_block - 1) {
    ptx::store_relaxed(arrivals, 0);
    ptx::store_release_system(cta.signal(destination, p.rank, word), schedule::signal_value(cta.epoch));
  }
}

template <class C>
class Pusher {
 public:
  __device__ __forceinline__ Pusher(Cta<C> const& cta, Tracer<C>& trace) : cta_(cta), trace_(trace) {}

  __device__ __forceinline__ void run() {
    Gather const& g = cta_.params.gather;
    if (cta_.first_claim < g.pushers) push_all();
    if (g.whole != nullptr && cta_.first_claim < g.copiers) copy_all();
  }

 private:
  static constexpr uint32_t kPieces = C::kPieces, kAhead = kPieces / 2;  // loads run `kAhead` pieces before stores
  // Every unit begins with slot 0, so that its pieces' slots are known when this is compiled: one thread's instructions, some
  // hundred a piece, are what bounds the rate. So are parities, but for one bit if a unit goes round an odd number of times.
  static constexpr uint32_t kUnitPieces = kUnitBytes / kPieceBytes, kFlip = kUnitPieces / kPieces & 1;
  static_assert(kUnitPieces % kPieces == 0, "every unit begins with slot 0");

  // To `to` and, if it isn't null, to `copy` as well.
  struct Unit {
    uint8_t const* from;
    uint8_t *to, *copy;
    uint32_t bytes;  // 0: it only counts
    uint32_t block;  // push: destination and row block
  };

  // Units from a queue, each claimed while the one before it moves; but the first two one by one, or else half of the pushers
  // would have two units of a short call and the others none.
  struct Claims {
    uint32_t* queue;
    uint32_t unit, next = kNone;
    static constexpr uint32_t kNone = ~0u;

    __device__ __forceinline__ explicit Claims(uint32_t* queue) : queue(queue), unit(ptx::add_relaxed(queue, 1)) {}
    __device__ __forceinline__ void advance() {
      unit = next == kNone ? ptx::add_relaxed(queue, 1) : next;
      next = ptx::add_relaxed(queue, 1);
    }
  };

  __device__ __forceinline__ void push_all() {
    Params const& p = cta_.params;
    Gather const& g = p.gather;
    schedule::PushOrder order{p.ranks, p.rank, g.shape.blocks(), g.units_per_block};
    uint32_t* queue = &cta_.control()->push[cta_.parity()];
    for (Claims claims(queue); claims.unit < order.size(); claims.advance()) {
      schedule::PushOrder::Unit u = order.at(claims.unit);
      uint64_t start = uint64_t(u.piece) * kUnitBytes, at = g.shape.offset(u.row) + start;
      uint8_t* copy = nullptr;
      if (u.first && g.whole != nullptr) copy = g.whole + g.shape.whole_offset(u.row, p.rank, p.ranks) + start;
      move<true>({g.own + at, staged(u.destination, p.rank) + at, copy, unit_bytes(u.row, start), u.destination << 24 | u.row});
    }
    drain<true>();
  }

  __device__ __forceinline__ void copy_all() {
    Params const& p = cta_.params;
    Gather const& g = p.gather;
    schedule::CopyOrder order{p.ranks, p.rank, g.shape.blocks(), g.units_per_block};
    uint32_t* queue = &cta_.control()->counts[cta_.parity()].copied;
    for (Claims claims(queue); claims.unit < order.size(); claims.advance()) {
      schedule::CopyOrder::Unit u = order.at(claims.unit);
      uint64_t start = uint64_t(u.piece) * kUnitBytes;
      uint32_t bytes = unit_bytes(u.row, start);
      if (bytes == 0) continue;
      wait_for_peer(cta_, cta_.signal(p.rank, u.source, schedule::gathered_signal(g.first_word, u.row)), u.source, u.row, 0);
      move<false>({staged(p.rank, u.source) + g.shape.offset(u.row) + start,
                   g.whole + g.shape.whole_offset(u.row, u.source, p.ranks) + start, nullptr, bytes, 0});
    }
    drain<false>();
  }

  // The copy of source's chunk that `holder` keeps.
  __device__ __forceinline__ uint8_t* staged(uint32_t holder, uint32_t source) const {
    Gather const& g = cta_.params.gather;
    return cta_.staging(holder) + g.staging_offset + schedule::peer_slot(holder, source) * g.shape.chunk_bytes();
  }
  // Of the unit that begins at `start` of a row block: a short block leaves its last units empty.
  __device__ __forceinline__ uint32_t unit_bytes(uint32_t row, uint64_t start) const {
    uint64_t block = cta_.params.gather.shape.block_bytes(row);
    return start >= block ? 0 : block - start < kUnitBytes ? uint32_t(block - start) : uint32_t(kUnitBytes);
  }

  // Loads a unit; stores the end of the one before it and all but the end of this one. Of pushes, counts the one before that,
  // which has landed by now or soon.
  template <bool kPush>
  __device__ __forceinline__ void move(Unit const& unit) {
#pragma unroll
    for (uint32_t i = 0; i < kUnitPieces; ++i) {
      ptx::bulk_wait_read<kPieces - kAhead - 1>();  // the slot's last store has left it
      uint32_t slot = i % kPieces, n = piece_bytes(i, unit.bytes), loaded = cta_.shared.piece_loaded(slot);
      ptx::mbarrier_arrive_expect(loaded, n);
      if (n != 0) ptx::bulk_load(cta_.shared.piece(slot), unit.from + i * kPieceBytes, n, loaded);
      if (i >= kAhead) {
        store(unit, i - kAhead, parity_);
      } else if (holding_ != 0) {
        store(held_, kUnitPieces - kAhead + i, parity_ ^ kFlip);
      }
    }
    parity_ ^= kFlip;
    if (kPush && holding_ == 2) {
      ptx::bulk_wait<2 * kUnitPieces - kAhead>();
      count(before_);
    }
    before_ = held_.block;
    held_ = unit;
    if (holding_ < 2) ++holding_;
  }

  // Until all that is in the ring has landed.
  template <bool kPush>
  __device__ __forceinline__ void drain() {
    if (holding_ != 0)
#pragma unroll
      for (uint32_t i = kUnitPieces - kAhead; i < kUnitPieces; ++i) store(held_, i, parity_ ^ kFlip);
    ptx::bulk_wait<0>();
    if (kPush && holding_ == 2) count(before_);
    if (kPush && holding_ != 0) count(held_.block);
    holding_ = 0;
  }

  // One piece out of the ring, as a bulk group of its own (also when it is empty: groups are counted). `parity` is that of the
  // unit's first time round.
  __device__ __forceinline__ void store(Unit const& unit, uint32_t i, uint32_t parity) const {
    uint32_t slot = i % kPieces, n = piece_bytes(i, unit.bytes);
    ptx::mbarrier_wait(cta_.shared.piece_loaded(slot), (i / kPieces & 1) ^ parity);
    if (n != 0) {
      ptx::bulk_store(unit.to + i * kPieceBytes, cta_.shared.piece(slot), n);
      if (unit.copy != nullptr) ptx::bulk_store(unit.copy + i * kPieceBytes, cta_.shared.piece(slot), n);
    }
    ptx::bulk_commit();
  }

  __device__ __forceinline__ void count(uint32_t block) {
    trace_.mark(schedule::Mark::kPushed, block);
    count_unit(cta_, block);
  }

  static __device__ __forceinline__ uint32_t piece_bytes(uint32_t i, uint32_t unit_bytes) {
    uint32_t start = i * kPieceBytes;
    return start < unit_bytes ? schedule::smaller(kPieceBytes, unit_bytes - start) : 0;
  }

  Cta<C> const& cta_;
  Tracer<C>& trace_;
  uint32_t parity_ = 0;   // of the next unit's first time round
  uint32_t holding_ = 0;  // units that are held or not counted yet: at most the last two
  uint32_t before_;       // block of the one before
  Unit held_;             // the last one, whose end is in the ring
};

}  // namespace entwine::sm90
