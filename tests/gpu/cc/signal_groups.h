// Strategy "signal" without NCCL: its kernels, and in place of the collectives copies and sums of the test's own.
#pragma once

#include "emulated_team.h"

namespace teams {

void signal_groups(EmulatedTeam& team);

}  // namespace teams
