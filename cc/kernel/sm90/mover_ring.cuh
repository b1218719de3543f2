// A ring of shared memory through which one thread moves bytes, from its own GPU's memory to anywhere, all of it asynchronous.
//
// A slot is loaded, stored when its bytes have come, and free when they have been read; they land later, and then its note is
// delivered. Notes lie in shared memory, for a single thread has few registers. `kAhead` loads are under way before the first
// store. Up to `kLanding` stores have yet to land: what fills a link is bytes on it, its rate times its latency, more than a
// ring's slots hold.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

template <class C>
class MoverRing {
 public:
  // Of kMoverSlots slots of so many bytes.
  __device__ __forceinline__ MoverRing(Shared<C> const& shared, uint32_t memory, uint32_t slot_bytes)
      : shared_(shared), memory_(memory), slot_bytes_(slot_bytes) {}

  __device__ __forceinline__ uint32_t slot_bytes() const { return slot_bytes_; }

  // Moves `bytes` > 0, of a slot's at most, to `to` and, if it isn't null, to `copy` as well; once they have landed calls
  // landed(note), unless the note is 0.
  template <class Landed>
  __device__ __forceinline__ void move(uint8_t const* from, uint8_t* to, uint8_t* copy, uint32_t bytes, uint64_t note,
                                       Landed landed) {
    if (loaded_ >= kSlots) ptx::bulk_wait_read<kSlots - 1 - kAhead>();  // the slot's last store has left it
    uint32_t at = shared_.mover_way(slot_);
    ptx::store_shared_64(at, reinterpret_cast<uint64_t>(to));
    ptx::store_shared_64(at + 8, reinterpret_cast<uint64_t>(copy));
    ptx::store_shared(at + 16, bytes);
    ptx::store_shared_64(shared_.mover_note(loaded_), note);
    ptx::mbarrier_arrive_expect(shared_.mover_loaded(slot_), bytes);
    ptx::bulk_load(memory_ + slot_ * slot_bytes_, from, bytes, shared_.mover_loaded(slot_));
    ++loaded_;
    if (++slot_ == kSlots) slot_ = 0;
    if (loaded_ - stored_ > kAhead) store(landed);
  }

  // Until all has landed and all notes are delivered. The ring begins anew then.
  template <class Landed>
  __device__ __forceinline__ void drain(Landed landed) {
    while (stored_ != loaded_) store(landed);
    ptx::bulk_wait<0>();
    for (uint32_t i = schedule::smaller(stored_, kLanding); i != 0; --i) deliver(stored_ - i, landed);
    loaded_ = stored_ = 0;
  }

 private:
  static constexpr uint32_t kSlots = Shared<C>::kMoverSlots, kAhead = 2, kLanding = 8;
  static_assert(kLanding + kAhead < Shared<C>::kMoverNoteCount, "a note is delivered before its place is taken");

  template <class Landed>
  __device__ __forceinline__ void deliver(uint32_t number, Landed landed) const {
    uint64_t note = ptx::load_shared_64(shared_.mover_note(number));
    if (note != 0) landed(note);
  }

  // The oldest slot that isn't stored yet, as a bulk group of its own.
  template <class Landed>
  __device__ __forceinline__ void store(Landed landed) {
    if (stored_ >= kLanding) {
      ptx::bulk_wait<kLanding - 1>();
      deliver(stored_ - kLanding, landed);
    }
    uint32_t at = shared_.mover_way(out_), from = memory_ + out_ * slot_bytes_, bytes = ptx::load_shared(at + 16);
    uint64_t copy = ptx::load_shared_64(at + 8);
    ptx::mbarrier_wait(shared_.mover_loaded(out_), phase_);
    ptx::bulk_store(reinterpret_cast<uint8_t*>(ptx::load_shared_64(at)), from, bytes);
    if (copy != 0) ptx::bulk_store(reinterpret_cast<uint8_t*>(copy), from, bytes);
    ptx::bulk_commit();
    ++stored_;
    if (++out_ == kSlots) {
      out_ = 0;
      phase_ ^= 1;
    }
  }

  Shared<C> const& shared_;
  uint32_t memory_, slot_bytes_;
  uint32_t loaded_ = 0, stored_ = 0;  // since the ring was empty
  uint32_t slot_ = 0, out_ = 0, phase_ = 0;
};

}  // namespace entwine::sm90
