// Says on stderr what a kernel waited for when it gave up.
#pragma once

#include "schedule/stuck_report.h"

namespace entwine::team {

// Where the devices write the process's report, watched by a thread of its own from the first call on; null if there is no
// memory.
schedule::StuckReport* stuck_report();

}  // namespace entwine::team
