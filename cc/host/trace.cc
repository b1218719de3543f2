#include "host/trace.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace entwine::host {
namespace {

struct Log {
  std::mutex mutex;
  std::atomic<bool> on{false};
  uint64_t room = 0;
  std::vector<TracedCall> calls;
};

Log& log() {
  static Log* const log = new Log;  // outlives every thread that works on calls
  return *log;
}

}  // namespace

bool trace_start(uint64_t bytes) {
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.on) return false;
  l.room = bytes;
  l.calls.clear();
  l.on = true;
  return true;
}

bool tracing() { return log().on.load(std::memory_order_relaxed); }

void trace_call(TracedCall call) {
  uint64_t bytes = 0;
  for (Notes const& notes : call.workers) bytes += notes.size() * sizeof(schedule::TraceEvent);
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (!l.on || bytes > l.room) return;
  l.room -= bytes;
  l.calls.push_back(std::move(call));
}

std::vector<TracedCall> trace_stop() {
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.on = false;
  return std::exchange(l.calls, {});
}

}  // namespace entwine::host
