// One rank's arena in ordinary memory, laid out as on a GPU (schedule/arena_layout.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "host/signal.h"
#include "schedule/arena_layout.h"

namespace entwine::host {

class Arena {
 public:
  using Word = std::atomic<uint32_t>;

  // `first_epoch` is the number of the first call; words start as if the call before it had raised them.
  Arena(schedule::ArenaLayout const& layout, uint32_t first_epoch) : layout_(layout), memory_(allocate(layout.bytes())) {
    uint64_t words = uint64_t(layout.ranks) * layout.words_per_source;
    make_words(kTileQueue, 1, 0);
    make_words(kPushQueue, 1, 0);
    make_words(kCopyQueue, 1, 0);
    make_words(kMoveQueue, 1, 0);
    make_words(kIdleHalf, 1, 0);
    make_words(layout.arrivals_offset(), words, 0);
    make_words(layout.signals_offset(), words, first_epoch);
    // All ones is a NaN in every element type: what is read before it was written shows.
    std::memset(memory_.get() + layout.staging_offset(0), 0xff, 2 * layout.staging_half);
  }

  schedule::ArenaLayout const& layout() const { return layout_; }

  // Control, touched by this rank's workers only.
  Word& tile_queue() { return word(kTileQueue, 0); }
  Word& push_queue() { return word(kPushQueue, 0); }
  Word& copy_queue() { return word(kCopyQueue, 0); }
  Word& move_queue() { return word(kMoveQueue, 0); }
  Word& idle_half() { return word(kIdleHalf, 0); }  // what ticket 0's is to do: tile_claims.h
  Word& arrivals(uint64_t index) { return word(layout_.arrivals_offset(), index); }

  Word& signal(uint64_t index) { return word(layout_.signals_offset(), index); }
  std::byte* staging(uint32_t epoch) { return memory_.get() + layout_.staging_offset(epoch % 2); }
  Bell& bell() { return bell_; }

 private:
  // Offsets in the header, a cache line apart.
  static constexpr uint64_t kTileQueue = 0, kPushQueue = 64, kCopyQueue = 128, kMoveQueue = 192, kIdleHalf = 256;
  static constexpr std::align_val_t kAlignment{1024};
  static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
  };
  static std::byte* allocate(uint64_t bytes) { return static_cast<std::byte*>(::operator new(bytes, kAlignment)); }

  void make_words(uint64_t offset, uint64_t count, uint32_t value) {
    for (uint64_t i = 0; i < count; ++i) new (memory_.get() + offset + i * sizeof(Word)) Word(value);
  }
  Word& word(uint64_t offset, uint64_t index) {
    return *std::launder(reinterpret_cast<Word*>(memory_.get() + offset + index * sizeof(Word)));
  }

  schedule::ArenaLayout layout_;
  std::unique_ptr<std::byte, Free> memory_;
  Bell bell_;
};

}  // namespace entwine::host
