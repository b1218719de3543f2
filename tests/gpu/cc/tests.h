// The tests of a team; each reports by report() of progress.h.
#pragma once

#include <cstdint>
#include <vector>

#include "emulated_team.h"

namespace teams {

// Every shape, op, transport, layout and type against a naive expectation, staging and y poisoned before each call.
void exact(EmulatedTeam& team);

// Many calls back to back on one arena, of all ops and two shapes, ranks delayed at random.
struct Stress {
  char const* name;
  uint32_t multiprocessors;  // 0: the rank's share
  uint32_t first_epoch;
};
inline constexpr Stress kStresses[] = {
    {"all clusters", 0, 0},
    {"1 cluster a rank", 2, 0},
    {"2 clusters a rank", 4, 0},
    {"epochs wrap", 0, 0xfffffffd},
    {"1 cluster a rank, epochs wrap", 2, 0xfffffffd},
};

void stress(EmulatedTeam& team, Stress const& stress, uint32_t run);
std::vector<entwine::schedule::Geometry> stress_shapes(uint32_t ranks);

}  // namespace teams
