// Compile-time shape of a kernel and its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernel/operands.h"
#include "kernel/ptx/matrix.cuh"
#include "kernel/sm90/arena_view.cuh"
#include "kernel/sm90/params.h"
#include "kernel/sm90/shape.h"
#include "schedule/tile_parts.h"

namespace entwine::sm90 {

template <schedule::Op kOp_, uint32_t kTileM_, uint32_t kTileN_, Operands kOperands_, bool kTransposedW_, bool kFloatOut_,
          bool kTraced_>
struct Config {
  static constexpr schedule::Op kOp = kOp_;
  static constexpr bool kGather = kOp == schedule::Op::kAllGatherMatmul;
  static constexpr bool kReplicate = kOp == schedule::Op::kMatmulAllReduce;
  // A CTA has half of the cluster's rows. Of 128 rows each consumer takes 64 with all columns, of 64 rows each takes half the
  // columns.
  static constexpr uint32_t kTileM = kTileM_, kTileN = kTileN_, kCtaM = kTileM / kCtas;
  static constexpr bool kStacked = kCtaM == 128;
  static_assert(kStacked || kCtaM == 64, "a consumer has 64 rows");
  static constexpr uint32_t kConsumerN = kStacked ? kTileN : kTileN / kConsumers;
  static constexpr int kAccumulators = kConsumerN / 2;  // of a thread
  static constexpr Operands kOperands = kOperands_;
  static constexpr bool kFloat8 = is_float8(kOperands);
  static constexpr uint32_t kBlockK = kBlockBytes / operand_bytes(kOperands);
  static constexpr bool kTransposedW = kTransposedW_;  // w is stored (n, k)
  static_assert(kTransposedW || !kFloat8, "8-bit operands are contiguous in k");
  static constexpr bool kTurnsX = !kGather && !kFloat8;  // takes x stored transposed, if a launch says so
  static constexpr bool kFloatOut = kFloatOut_;
  // Whether a launch may be gated (schedule/products.h): the first half of a thread's accumulators is gate then, the second up.
  static constexpr bool kGates = kGather && kStacked && !kFloat8 && kTileN % 128 == 0;
  using Pair =
      std::conditional_t<kOperands == Operands::kF16, ptx::F16Pair, ptx::Bf16Pair>;  // of the result, if it isn't float32
  static constexpr bool kTraced = kTraced_;                                          // takes notes: tracer.cuh

  // w as (k, n) is loaded in panels of 64 columns, half of them by the first CTA: of the last one, tiles of 224 and 160 use
  // half.
  static constexpr int kPanels = (kTileN + 63) / 64;
  static constexpr int kABytes = kCtaM * kBlockBytes;
  static constexpr int kBBytes = (kTransposedW ? int(kTileN) : kPanels * 64) * kBlockBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // Large tiles: three stages are as fast as four. The rest of shared memory holds partials in flight, the pusher's or the
  // collector's ring. The smaller a tile the more it waits for loads rather than for the tensor cores: what is in flight counts
  // for more than that rest (a stage more: k blocks of 160 columns in 0.50 us rather than 0.58, of 192 in 0.59 for 0.61).
  static constexpr bool kNarrow = kStacked && kTileN <= 192;
  static constexpr int kStages = kNarrow ? (kTileN > 128 ? 4 : 5) : kStacked ? 3 : kGather ? 6 : 7;
  static constexpr int kBuffers = kGather || !kStacked ? 2 : kNarrow ? 3 : 4;  // C buffers of a warpgroup
  static constexpr int kPieces = !kGather ? 2 : kNarrow ? 4 : 6;               // in that ring

  static constexpr int kImageCols = kFloatOut ? 32 : 64;
  static constexpr int kImages = (kConsumerN + kImageCols - 1) / kImageCols;  // images in a warpgroup's part of a tile
  static constexpr int kPartBytes = kImages * kImageBytes;
  // The column at which an image begins: the last one may repeat some of those of the one before it.
  ENTWINE_HOST_DEVICE static constexpr uint32_t image_begin(uint32_t image) {
    return schedule::image_begin(kConsumerN, kImageCols, image);
  }
};

// Offsets into shared memory, from a 1024-byte-aligned base.
template <class C>
struct Shared {
  uint32_t base;

  static constexpr int kA = 0, kB = kA + C::kStages * C::kABytes, kC = kB + C::kStages * C::kBBytes;
  static constexpr int kRing = kC + kConsumers * C::kBuffers * kImageBytes;
  static constexpr int kBarriers = kRing + C::kPieces * kPieceBytes;
  static constexpr int kEmpty = kBarriers + 8 * C::kStages;
  static constexpr int kBufferReady = kEmpty + 8 * C::kStages;
  static constexpr int kBufferDone = kBufferReady + 8 * kConsumers * C::kBuffers;
  static constexpr int kTileReady = kBufferDone + 8 * kConsumers * C::kBuffers;
  static constexpr int kTileTaken = kTileReady + 8;
  static constexpr int kPieceLoaded = kTileTaken + 8;
  static constexpr int kTileSlot = kPieceLoaded + 8 * C::kPieces;
  static constexpr int kFirstClaim = kTileSlot + 4, kEpoch = kTileSlot + 8;
  // Strategy "resident": mover.cuh.
  static constexpr int kMoverSlots = 6, kMoverSlotBytes = 32768, kMoverWayBytes = 32, kMoverNoteCount = 16;
  static constexpr int kSmallSlotBytes = C::kPieces * int(kPieceBytes) / kMoverSlots / 1024 * 1024;
  static_assert(kMoverSlots * kMoverSlotBytes <= kBarriers, "a wide ring takes the place of all that tiles need");
  static constexpr int kMoverLoaded = kTileSlot + 16;
  static constexpr int kMoverTold = kMoverLoaded + 8 * kMoverSlots;
  static constexpr int kMoverWord = kMoverTold + 8;
  static constexpr int kMoverWays = kMoverWord + 8;
  static constexpr int kMoverNotes = kMoverWays + kMoverSlots * kMoverWayBytes;
  static constexpr int kBytes = kMoverNotes + kMoverNoteCount * 8;
  static constexpr int kAllocated = kBytes + 1024;  // room to align the base
  static_assert(kAllocated <= kSharedLimit, "shared memory of one CTA");

  __device__ __forceinline__ uint32_t a(uint32_t stage) const { return base + kA + stage * C::kABytes; }
  __device__ __forceinline__ uint32_t b(uint32_t stage) const { return base + kB + stage * C::kBBytes; }
  __device__ __forceinline__ uint32_t image(uint32_t consumer, uint32_t buffer) const {
    return base + kC + (consumer * C::kBuffers + buffer) * kImageBytes;
  }
  __device__ __forceinline__ uint32_t piece(uint32_t slot) const { return base + kRing + slot * kPieceBytes; }
  // Loader -> consumers: a stage's bytes have come. Consumers of both CTAs -> loader: its operands have been read.
  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + kBarriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return base + kEmpty + 8 * stage; }
  // Storer -> its consumer: the buffer is free, or holds a partial. Consumer -> storer: the buffer holds what to store, or its
  // partial has been added.
  __device__ __forceinline__ uint32_t buffer_ready(uint32_t consumer, uint32_t buffer) const {
    return base + kBufferReady + 8 * (consumer * C::kBuffers + buffer);
  }
  __device__ __forceinline__ uint32_t buffer_done(uint32_t consumer, uint32_t buffer) const {
    return base + kBufferDone + 8 * (consumer * C::kBuffers + buffer);
  }
  // Scheduler -> all roles of both CTAs: the slot holds the next tile. Roles -> scheduler (leader CTA): taken.
  __device__ __forceinline__ uint32_t tile_ready() const { return base + kTileReady; }
  __device__ __forceinline__ uint32_t tile_taken() const { return base + kTileTaken; }
  __device__ __forceinline__ uint32_t tile_slot() const { return base + kTileSlot; }
  __device__ __forceinline__ uint32_t first_claim() const { return base + kFirstClaim; }
  __device__ __forceinline__ uint32_t epoch() const { return base + kEpoch; }
  // Mover, to itself: a slot's bytes have come; and what becomes of them. One CTA to the other: mover.cuh.
  __device__ __forceinline__ uint32_t mover_loaded(uint32_t slot) const { return base + kMoverLoaded + 8 * slot; }
  __device__ __forceinline__ uint32_t mover_way(uint32_t slot) const { return base + kMoverWays + kMoverWayBytes * slot; }
  // Of the ring's so many'th load.
  __device__ __forceinline__ uint32_t mover_note(uint32_t number) const {
    return base + kMoverNotes + 8 * (number % kMoverNoteCount);
  }
  __device__ __forceinline__ uint32_t mover_told() const { return base + kMoverTold; }
  __device__ __forceinline__ uint32_t mover_word() const { return base + kMoverWord; }
  // Pusher or collector, to itself: a piece has come.
  __device__ __forceinline__ uint32_t piece_loaded(uint32_t slot) const { return base + kPieceLoaded + 8 * slot; }
};

// What every role of a CTA knows.
template <class C>
struct Cta : ArenaView<Params> {
  static constexpr schedule::Op kOp = C::kOp;
  Shared<C> shared;
  uint32_t rank_in_cluster;
  uint32_t first_claim;  // the cluster's ticket
};

}  // namespace entwine::sm90
