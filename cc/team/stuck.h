// Says on stderr what a kernel waited for when it gave up.
#pragma once

#include "kernel/sm90/params.h"

namespace entwine::team {

// The process's report in pinned memory, watched by a thread of its own from the first call on; null if there is no memory.
sm90::StuckReport* stuck_report();

}  // namespace entwine::team
