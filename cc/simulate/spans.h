// What a simulated call did when: for pictures (entwine_jax.simulate_tiles).
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/tile_order.h"

namespace entwine::simulate {

// entwine_jax/_simulate.py has the same names. What a cluster does; the last but one is a copy engine's or NCCL's.
enum class Role : uint32_t { kMultiply = 0, kWaitRows = 1, kWaitSums = 2, kMove = 3, kTransfer = 4, kCopy = 5 };

struct Span {
  double begin, end;  // microseconds from the launch on
  uint32_t worker;    // a cluster; kSm90Clusters: none
  uint32_t role;
  uint32_t owner, row, column;  // of the tile, or whose rows move; of a transfer or a copy the group is `row`
};

class Spans {
 public:
  // Of a worker that has something to do, and for some time.
  void add(Role role, uint32_t worker, double begin, double end, schedule::Tile tile) {
    if (end > begin) all.push_back({begin, end, worker, static_cast<uint32_t>(role), tile.owner, tile.row, tile.col});
  }
  std::vector<Span> all;
  std::vector<double> link_bytes;  // sent in each `bin_us`
  double bin_us = 0;
};

}  // namespace entwine::simulate
