// What one rank's arenas take, for entwine_jax.memory_stats().
#pragma once

#include <cstdint>
#include <vector>

namespace entwine::team {

struct TeamMemory {
  int64_t device;  // a GPU's ordinal; of a virtual CPU device, its place in the program's device assignment
  uint32_t rank, ranks;
  std::vector<uint64_t> arenas;  // bytes of each, in the order in which they were made
};

}  // namespace entwine::team
