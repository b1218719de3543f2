// A ring of shared memory through which one thread moves bytes, from its own GPU's memory to anywhere, all of it asynchronous.
//
// A slot is loaded, stored when its bytes have come, and free when they have landed: then its note is delivered. Notes lie in
// shared memory, for a single thread has few registers. `kAhead` loads are under way before the first store, which leaves
// kSlots - kAhead slots to stores: what fills a link is bytes on it, its rate times its latency, some 128 KB for one of eight
// movers.
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
    if (loaded_ >= kSlots) {
      ptx::bulk_wait<kSlots - 1 - kAhead>();  // what this slot held has landed
      deliver(slot_, landed);
    }
    uint32_t at = shared_.mover_note(slot_);
    ptx::store_shared_64(at, reinterpret_cast<uint64_t>(to));
    ptx::store_shared_64(at + 8, reinterpret_cast<uint64_t>(copy));
    ptx::store_shared_64(at + 16, note);
    ptx::store_shared(at + 24, bytes);
    ptx::mbarrier_arrive_expect(shared_.mover_loaded(slot_), bytes);
    ptx::bulk_load(memory_ + slot_ * slot_bytes_, from, bytes, shared_.mover_loaded(slot_));
    ++loaded_;
    if (++slot_ == kSlots) slot_ = 0;
    if (loaded_ - stored_ > kAhead) store();
  }

  // Until all has landed and all notes are delivered. The ring begins anew then.
  template <class Landed>
  __device__ __forceinline__ void drain(Landed landed) {
    while (stored_ != loaded_) store();
    ptx::bulk_wait<0>();
    uint32_t held = schedule::smaller(loaded_, kSlots), slot = slot_ >= held ? slot_ - held : slot_ + kSlots - held;
    for (uint32_t i = 0; i < held; ++i) {
      deliver(slot, landed);
      if (++slot == kSlots) slot = 0;
    }
    loaded_ = stored_ = 0;
  }

 private:
  static constexpr uint32_t kSlots = Shared<C>::kMoverSlots, kAhead = 2;

  template <class Landed>
  __device__ __forceinline__ void deliver(uint32_t slot, Landed landed) const {
    uint64_t note = ptx::load_shared_64(shared_.mover_note(slot) + 16);
    if (note != 0) landed(note);
  }

  // The oldest slot that isn't stored yet, as a bulk group of its own.
  __device__ __forceinline__ void store() {
    uint32_t at = shared_.mover_note(out_), from = memory_ + out_ * slot_bytes_, bytes = ptx::load_shared(at + 24);
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
