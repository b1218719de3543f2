// Several products in one launch, exact.
#pragma once

#include "emulated_team.h"

namespace teams {

// All ops, types, layouts and tiles with two to four products of different sizes, in a team whose scale of 8-bit operands is
// `scale`, or scale_of_product() for each of an all-gather's.
void several_products(EmulatedTeam& team, float scale);

}  // namespace teams
