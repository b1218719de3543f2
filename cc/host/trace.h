// What traced calls of the host executor have noted, by the kernels' names for it.
#pragma once

#include <chrono>
#include <vector>

#include "host/call.h"
#include "schedule/trace_event.h"

namespace entwine::host {

using Notes = std::vector<schedule::TraceEvent>;

struct TracedCall {
  CallSpec spec;
  uint32_t rank;
  std::vector<Notes> workers;
};

// From now until trace_stop() calls take notes, up to so many bytes of them in all. False: they do already.
bool trace_start(uint64_t bytes);
bool tracing();
// Dropped if there is no room left.
void trace_call(TracedCall call);
std::vector<TracedCall> trace_stop();

// One worker's pen.
class Tracer {
 public:
  explicit Tracer(Notes* notes) : notes_(notes) {}

  void mark(schedule::Mark mark, schedule::Tile const& t) const { write(mark, schedule::traced_tile(t)); }
  void mark_unit(uint32_t destination, uint32_t row) const { write(schedule::Mark::kPushed, destination << 24 | row); }
  void mark_group(schedule::Mark mark, uint32_t group) const { write(mark, schedule::traced_tile({0, group, 0})); }

 private:
  void write(schedule::Mark mark, uint32_t tile) const {
    if (notes_ == nullptr) return;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    notes_->push_back({static_cast<uint64_t>(std::chrono::nanoseconds(now).count()), tile, static_cast<uint32_t>(mark)});
  }

  Notes* notes_;
};

}  // namespace entwine::host
