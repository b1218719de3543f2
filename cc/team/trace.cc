#include "team/trace.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <mutex>

namespace entwine::team {
namespace {

struct Log {
  std::mutex mutex;
  std::atomic<bool> on{false};
  schedule::TraceEvent* events = nullptr;  // the same address on the host and on all devices
  uint64_t size = 0, used = 0;
  std::vector<TracedLaunch> launches;
};

Log& log() {
  static Log* const log = new Log;  // outlives every thread that launches
  return *log;
}

}  // namespace

std::string trace_start(uint64_t bytes) {
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  if (l.on) return "a trace is being taken already";
  uint64_t size = bytes / sizeof(schedule::TraceEvent);
  if (size > l.size) {
    void* memory = nullptr;
    cudaError_t error =
        cudaHostAlloc(&memory, size * sizeof(schedule::TraceEvent), cudaHostAllocPortable | cudaHostAllocMapped);
    if (error != cudaSuccess) return std::string("pinned host memory: ") + cudaGetErrorString(error);
    l.events = static_cast<schedule::TraceEvent*>(memory);
    l.size = size;
  }
  std::memset(static_cast<void*>(l.events), 0, l.size * sizeof(schedule::TraceEvent));
  l.used = 0;
  l.launches.clear();
  l.on = true;
  return "";
}

bool tracing() { return log().on.load(std::memory_order_relaxed); }

schedule::TraceEvent* trace_launch(TracedLaunch launch) {
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  uint64_t events = uint64_t(launch.ctas) * schedule::kTraceWriters * launch.capacity;
  if (!l.on || l.size - l.used < events) return nullptr;
  schedule::TraceEvent* mine = l.events + l.used;
  l.used += events;
  launch.events = mine;
  l.launches.push_back(launch);
  return mine;
}

std::vector<TracedLaunch> trace_stop() {
  Log& l = log();
  std::lock_guard<std::mutex> lock(l.mutex);
  l.on = false;
  return std::move(l.launches);
}

}  // namespace entwine::team
