// Pusher (all-gather): one otherwise idle thread in each of some clusters. They claim units of the own chunk in PushOrder and
// copy them to the peers through a small ring in shared memory, all of it asynchronous; they never wait for a peer.
//
// A row block is pushed by several pushers. Each adds its landed units to the block's arrival counter; the last one resets the
// counter and raises the block's one signal, so that the word keeps its single writer (the acq_rel additions chain the others'
// landed bytes to that release).
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

template <class C>
class Pusher {
 public:
  __device__ __forceinline__ explicit Pusher(Cta<C> const& cta)
      : cta_(cta),
        trace_(cta.params, 3),
        order_{cta.params.ranks, cta.params.rank, cta.params.raster.rows, cta.params.units_per_block} {}

  __device__ __forceinline__ void run() {
    uint32_t* queue = &cta_.control()->push[cta_.parity()];
    for (uint32_t unit = ptx::add_relaxed(queue, 1), next; unit < order_.size(); unit = next) {
      next = ptx::add_relaxed(queue, 1);
      push(unit);
    }
    finish();
  }

 private:
  static constexpr uint32_t kPieces = C::kPieces, kAhead = kPieces / 2;  // loads run `kAhead` pieces before stores
  static constexpr uint32_t kPiecesPerUnit = kUnitBytes / kPieceBytes;
  static constexpr uint32_t kLag = 16;  // pieces in flight over the link before an arrival is looked for
  static_assert((kLag + kAhead) / kPiecesPerUnit + 2 <= kUnitsInFlight, "a unit is remembered until it has been counted");

  __device__ __forceinline__ void push(uint32_t unit) {
    Params const& p = cta_.params;
    schedule::PushOrder::Unit u = order_.at(unit);
    uint32_t batch = u.row / p.row_blocks, first = (u.row - batch * p.row_blocks) * C::kTileM;
    uint64_t rows = schedule::smaller(C::kTileM, p.m_shard - first);
    uint64_t offset = (uint64_t(batch) * p.m_shard + first) * p.row_bytes, start = uint64_t(u.piece) * kUnitBytes;
    uint64_t left = rows * p.row_bytes;  // a short row block leaves its last units empty: they only count
    uint32_t bytes = start >= left ? 0 : left - start < kUnitBytes ? uint32_t(left - start) : uint32_t(kUnitBytes);
    uint64_t chunk = uint64_t(p.raster.rows / p.row_blocks) * p.m_shard * p.row_bytes;
    uint8_t const* from = p.x_data + offset + start;
    uint8_t* to = cta_.staging(u.destination) + schedule::peer_slot(u.destination, p.rank) * chunk + offset + start;
    uint32_t entry = cta_.shared.unit(loaded_ / kPiecesPerUnit);
    ptx::store_shared_64(entry, reinterpret_cast<uint64_t>(to));
    ptx::store_shared(entry + 8, u.destination << 24 | u.row);
    ptx::store_shared(entry + 12, bytes);

    for (uint32_t i = 0; i < kPiecesPerUnit; ++i) {
      if (loaded_ >= kPieces) ptx::bulk_wait_read<kPieces - kAhead - 1>();  // the slot's last store has left it
      uint32_t slot = loaded_ % kPieces, n = piece_bytes(i, bytes);
      ptx::mbarrier_arrive_expect(cta_.shared.piece_loaded(slot), n);
      if (n != 0) ptx::bulk_load(cta_.shared.piece(slot), from + i * kPieceBytes, n, cta_.shared.piece_loaded(slot));
      ++loaded_;
      while (stored_ + kAhead < loaded_) store();
      if (stored_ >= kLag) {
        ptx::bulk_wait<kLag>();
        count(stored_ - kLag);
      }
    }
  }

  __device__ __forceinline__ void finish() {
    while (stored_ < loaded_) store();
    ptx::bulk_wait<0>();
    count(stored_);
  }

  // One piece onto the link, as a bulk group of its own (also when it is empty: groups are counted).
  __device__ __forceinline__ void store() {
    uint32_t slot = stored_ % kPieces, i = stored_ % kPiecesPerUnit, entry = cta_.shared.unit(stored_ / kPiecesPerUnit);
    uint32_t n = piece_bytes(i, ptx::load_shared(entry + 12));
    ptx::mbarrier_wait(cta_.shared.piece_loaded(slot), (stored_ / kPieces) & 1);
    if (n != 0)
      ptx::bulk_store(reinterpret_cast<uint8_t*>(ptx::load_shared_64(entry)) + i * kPieceBytes, cta_.shared.piece(slot), n);
    ptx::bulk_commit();
    ++stored_;
  }

  // The first `landed` pieces have landed: counts their units, signals the row blocks that are complete.
  __device__ __forceinline__ void count(uint32_t landed) {
    Params const& p = cta_.params;
    for (; (counted_ + 1) * kPiecesPerUnit <= landed; ++counted_) {
      uint32_t block = ptx::load_shared(cta_.shared.unit(counted_) + 8), destination = block >> 24, row = block & 0xffffff;
      trace_.mark(schedule::Mark::kPushed, block);
      uint32_t* arrivals = reinterpret_cast<uint32_t*>(p.arena[p.rank] + p.arrivals_offset) +
                           schedule::signal_word(destination, p.words_per_source, schedule::gathered_signal(row));
      if (ptx::add_acquire_release(arrivals, 1) == p.units_per_block - 1) {
        ptx::store_relaxed(arrivals, 0);
        ptx::store_release_system(cta_.signal(destination, p.rank, schedule::gathered_signal(row)),
                                  schedule::signal_value(cta_.epoch));
      }
    }
  }

  static __device__ __forceinline__ uint32_t piece_bytes(uint32_t i, uint32_t unit_bytes) {
    uint32_t start = i * kPieceBytes;
    return start < unit_bytes ? schedule::smaller(kPieceBytes, unit_bytes - start) : 0;
  }

  Cta<C> const& cta_;
  Tracer<C> trace_;
  schedule::PushOrder order_;
  uint32_t loaded_ = 0, stored_ = 0, counted_ = 0;  // pieces, pieces, units
};

}  // namespace entwine::sm90
