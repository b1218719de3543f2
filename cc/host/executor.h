// Runs one rank's part of one call on the rank's threads.
#pragma once

#include "host/call.h"
#include "host/threads.h"

namespace entwine::host {

// False if the call was given up. No worker is left running either way.
bool execute(Seat const& seat, Crew& crew);

}  // namespace entwine::host
