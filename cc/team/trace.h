// What traced launches have noted, in pinned host memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/geometry.h"
#include "schedule/trace_event.h"

namespace entwine::team {

struct TracedLaunch {
  schedule::Op op;
  schedule::Geometry geometry;
  uint32_t rank;
  uint32_t out_bytes;  // of an element of y
  int device;
  uint32_t ctas, capacity;
  schedule::TraceEvent const* events;  // [CTA][writer][capacity]
};

// From now until trace_stop(), launches take notes, in `bytes` of memory that the process keeps from then on (a CUDA graph that
// was captured meanwhile writes there for ever). "" or why not.
std::string trace_start(uint64_t bytes);

// Whether launches are to take notes: no more than a look, for every launch asks.
bool tracing();

// Room for one launch's notes; null if nothing is traced or no room is left. `launch.events` is ignored. Allocates nothing, so
// that it may be called while peers spin.
schedule::TraceEvent* trace_launch(TracedLaunch launch);

// What has been launched since trace_start(), in that order; to be read once the devices are done.
std::vector<TracedLaunch> trace_stop();

}  // namespace entwine::team
