// Numbers that the kernels and their host side share.
#pragma once

#include "schedule/plan.h"

namespace entwine::sm90 {

// A cluster is two CTAs stacked along m, sharing the columns of w by TMA multicast. Its tile: schedule/plan.h, kSm90Tiles.
constexpr uint32_t kCtas = 2;
constexpr uint32_t kBlockBytes = 128;  // of k a stage has so much, and kBlockK 16-bit elements
constexpr uint32_t kBlockK = kBlockBytes / 2;
constexpr uint32_t kThreads = 384;                                 // one warpgroup of single-thread roles, two of consumers
constexpr uint32_t kConsumers = 2;                                 // warpgroups
constexpr uint32_t kRoleRegisters = 56, kConsumerRegisters = 224;  // 40 and 232 spill in the storer
constexpr uint32_t kImageBytes =
    8192;  // 64 rows x 128 bytes, 128-byte-swizzled: what one TMA store of y or one partial copy moves
constexpr uint32_t kClaimAhead = 8;     // k blocks before a tile's last load at which the loader asks for the next tile
constexpr uint32_t kUnitBytes = 98304;  // what a pusher claims at once
constexpr uint32_t kPieceBytes = 8192;  // and copies at once; all-reduce: an image
constexpr uint32_t kSharedLimit = 232448;
static_assert(kPieceBytes == kImageBytes, "one ring for either");

// A claimed tile travels in 32 bits: owner 3, row block 15, column 14. All ones is no tile, so the last column is not used.
constexpr uint32_t kRowBits = 15, kColBits = 14;
constexpr uint32_t kMaxRowBlocks = 1u << kRowBits, kMaxCols = (1u << kColBits) - 1;

}  // namespace entwine::sm90
