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

template <class C>
class Pusher {
 public:
  __device__ __forceinline__ explicit Pusher(Cta<C> const& cta) : cta_(cta), trace_(cta.params, 3) {}

  __device__ __forceinline__ void run() {
    Gather const& g = cta_.params.gather;
    if (cta_.first_claim < g.pushers) push_all();
    if (g.whole != nullptr && cta_.first_claim < g.copiers) copy_all();
  }

 private:
  static constexpr uint32_t kPieces = C::kPieces, kAhead = kPieces / 2;  // loads run `kAhead` pieces before stores
  static constexpr uint32_t kPiecesPerUnit = kUnitBytes / kPieceBytes;
  static constexpr uint32_t kLag = 16;  // pieces in flight over the link before an arrival is looked for
  static_assert((kLag + kAhead) / kPiecesPerUnit + 2 <= kUnitsInFlight, "a unit is remembered until it has been counted");

  __device__ __forceinline__ void push_all() {
    Params const& p = cta_.params;
    Gather const& g = p.gather;
    schedule::PushOrder order{p.ranks, p.rank, g.shape.blocks(), g.units_per_block};
    uint32_t* queue = &cta_.control()->push[cta_.parity()];
    for (uint32_t unit = ptx::add_relaxed(queue, 1), next; unit < order.size(); unit = next) {
      next = ptx::add_relaxed(queue, 1);
      schedule::PushOrder::Unit u = order.at(unit);
      uint64_t start = uint64_t(u.piece) * kUnitBytes, at = g.shape.offset(u.row) + start;
      uint8_t* copy = nullptr;
      if (u.first && g.whole != nullptr) copy = g.whole + g.shape.whole_offset(u.row, p.rank, p.ranks) + start;
      move<true>(g.own + at, staged(u.destination, p.rank) + at, copy, unit_bytes(u.row, start), u.destination << 24 | u.row);
    }
    drain();
    count(stored_);
  }

  __device__ __forceinline__ void copy_all() {
    Params const& p = cta_.params;
    Gather const& g = p.gather;
    schedule::CopyOrder order{p.ranks, p.rank, g.shape.blocks(), g.units_per_block};
    uint32_t* queue = &cta_.control()->counts[cta_.parity()].copied;
    for (uint32_t unit = ptx::add_relaxed(queue, 1), next; unit < order.size(); unit = next) {
      next = ptx::add_relaxed(queue, 1);
      schedule::CopyOrder::Unit u = order.at(unit);
      uint64_t start = uint64_t(u.piece) * kUnitBytes;
      uint32_t bytes = unit_bytes(u.row, start);
      if (bytes == 0) continue;
      wait_for_peer(cta_, cta_.signal(p.rank, u.source, schedule::gathered_signal(g.first_word, u.row)), u.source, u.row, 0);
      move<false>(staged(p.rank, u.source) + g.shape.offset(u.row) + start,
                  g.whole + g.shape.whole_offset(u.row, u.source, p.ranks) + start, nullptr, bytes, 0);
    }
    drain();
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

  // Sends one unit through the ring, to `to` and, if it isn't null, to `copy` as well. Pushes are counted under `block` once
  // they have landed; an empty one only counts.
  template <bool kPush>
  __device__ __forceinline__ void move(uint8_t const* from, uint8_t* to, uint8_t* copy, uint32_t bytes, uint32_t block) {
    uint32_t entry = cta_.shared.unit(loaded_ / kPiecesPerUnit);
    ptx::store_shared_64(entry, reinterpret_cast<uint64_t>(to));
    ptx::store_shared(entry + 8, block);
    ptx::store_shared(entry + 12, bytes);
    ptx::store_shared_64(entry + 16, reinterpret_cast<uint64_t>(copy));

    for (uint32_t i = 0; i < kPiecesPerUnit; ++i) {
      if (loaded_ >= kPieces) ptx::bulk_wait_read<kPieces - kAhead - 1>();  // the slot's last store has left it
      uint32_t slot = loaded_ % kPieces, n = piece_bytes(i, bytes);
      ptx::mbarrier_arrive_expect(cta_.shared.piece_loaded(slot), n);
      if (n != 0) ptx::bulk_load(cta_.shared.piece(slot), from + i * kPieceBytes, n, cta_.shared.piece_loaded(slot));
      ++loaded_;
      while (stored_ + kAhead < loaded_) store();
      if (kPush && stored_ >= kLag) {
        ptx::bulk_wait<kLag>();
        count(stored_ - kLag);
      }
    }
  }

  // Until all that is in the ring has landed.
  __device__ __forceinline__ void drain() {
    while (stored_ < loaded_) store();
    ptx::bulk_wait<0>();
  }

  // One piece out of the ring, as a bulk group of its own (also when it is empty: groups are counted).
  __device__ __forceinline__ void store() {
    uint32_t slot = stored_ % kPieces, i = stored_ % kPiecesPerUnit, entry = cta_.shared.unit(stored_ / kPiecesPerUnit);
    uint32_t n = piece_bytes(i, ptx::load_shared(entry + 12));
    ptx::mbarrier_wait(cta_.shared.piece_loaded(slot), (stored_ / kPieces) & 1);
    if (n != 0) {
      ptx::bulk_store(reinterpret_cast<uint8_t*>(ptx::load_shared_64(entry)) + i * kPieceBytes, cta_.shared.piece(slot), n);
      uint64_t copy = ptx::load_shared_64(entry + 16);
      if (copy != 0) ptx::bulk_store(reinterpret_cast<uint8_t*>(copy) + i * kPieceBytes, cta_.shared.piece(slot), n);
    }
    ptx::bulk_commit();
    ++stored_;
  }

  // The first `landed` pieces have landed: counts their units, signals the row blocks that are complete.
  __device__ __forceinline__ void count(uint32_t landed) {
    Params const& p = cta_.params;
    for (; (counted_ + 1) * kPiecesPerUnit <= landed; ++counted_) {
      uint32_t block = ptx::load_shared(cta_.shared.unit(counted_) + 8), destination = block >> 24;
      trace_.mark(schedule::Mark::kPushed, block);
      uint32_t word = schedule::gathered_signal(p.gather.first_word, block & 0xffffff);
      uint32_t* arrivals = reinterpret_cast<uint32_t*>(p.arena[p.rank] + p.arrivals_offset) +
                           schedule::signal_word(destination, p.words_per_source, word);
      if (ptx::add_acquire_release(arrivals, 1) == p.gather.units_per_block - 1) {
        ptx::store_relaxed(arrivals, 0);
        ptx::store_release_system(cta_.signal(destination, p.rank, word), schedule::signal_value(cta_.epoch));
      }
    }
  }

  static __device__ __forceinline__ uint32_t piece_bytes(uint32_t i, uint32_t unit_bytes) {
    uint32_t start = i * kPieceBytes;
    return start < unit_bytes ? schedule::smaller(kPieceBytes, unit_bytes - start) : 0;
  }

  Cta<C> const& cta_;
  Tracer<C> trace_;
  uint32_t loaded_ = 0, stored_ = 0, counted_ = 0;  // pieces, pieces, units
};

}  // namespace entwine::sm90
