// What traced launches have noted, in pinned host memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schedule/geometry.h"
#include "schedule/trace_event.h"

namespace entwine::team {

// When a stream came to what no kernel notes, copies and NCCL's collectives: CUDA's events, put on the clock of the notes.
class Moments {
 public:
  explicit Moments(int device) : device_(device) {}
  ~Moments();
  Moments(Moments const&) = delete;
  Moments& operator=(Moments const&) = delete;

  // "" or what went wrong. The first one is when a kernel has just written down the GPU's clock.
  std::string mark(cudaStream_t stream, schedule::Mark mark, uint32_t group);

  // All but the first, once the device is done; that one was at `ns`.
  std::vector<schedule::TraceEvent> events(uint64_t ns) const;

 private:
  struct Moment {
    cudaEvent_t event;
    schedule::Mark mark;
    uint32_t group;
  };
  int device_;
  std::vector<Moment> moments_;
};

struct TracedLaunch {
  char const* strategy;
  schedule::Op op;
  schedule::Geometry geometry;
  uint32_t rank;
  uint32_t out_bytes;   // of an element of y
  uint32_t unit_bytes;  // of what a pusher claims at once
  int device;
  uint32_t launches = 1, ctas, capacity;
  std::vector<uint64_t> group_bytes;   // strategy "signal": of each group, to all peers
  std::shared_ptr<Moments> moments;    // null: none
  schedule::TraceEvent const* events;  // [launch][CTA][writer][capacity], and then, if there are moments, the clock
  uint64_t count() const { return uint64_t(launches) * ctas * schedule::kTraceWriters * capacity; }
};

// From now until trace_stop(), launches take notes, in `bytes` of memory that the process keeps from then on (a CUDA graph that
// was captured meanwhile writes there for ever). "" or why not.
std::string trace_start(uint64_t bytes);

// Whether launches are to take notes: no more than a look, for every launch asks.
bool tracing();

// Room for one call's notes; null if nothing is traced or no room is left. `launch.events` is ignored. Allocates nothing, so
// that it may be called while peers spin.
schedule::TraceEvent* trace_launch(TracedLaunch launch);

// What has been launched since trace_start(), in that order; to be read once the devices are done.
std::vector<TracedLaunch> trace_stop();

}  // namespace entwine::team
