// What a wait for a peer waited for when it gave up.
#pragma once

#include <cstdint>

namespace entwine::schedule {

// Lies in pinned host memory, which outlives the kernel that ends itself.
struct StuckReport {
  uint32_t written;  // last
  uint32_t op, rank, peer, row, col, epoch, seen, wanted;
};

// As a column: what is waited for is a group of tiles or rows of strategy "signal", number `row`.
constexpr uint32_t kGroupColumn = ~0u;

}  // namespace entwine::schedule
