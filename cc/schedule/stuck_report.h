// What a wait for a peer waited for when it gave up.
#pragma once

#include <cstdint>

namespace entwine::schedule {

// Lies in pinned host memory, which outlives the kernel that ends itself.
struct StuckReport {
  uint32_t written;  // last
  uint32_t op, rank, peer, row, col, epoch, seen, wanted;
};

}  // namespace entwine::schedule
