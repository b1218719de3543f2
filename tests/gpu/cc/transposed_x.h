// x stored (batch, k, rows), exact.
#pragma once

#include "emulated_team.h"

namespace teams {

// The ops that sum over ranks, both types of 16 bits, all tiles, transports and movers.
void transposed_x(EmulatedTeam& team);

}  // namespace teams
