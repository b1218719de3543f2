#include "team/trace.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "team/device_scope.h"

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

Moments::~Moments() {
  DeviceScope scope(device_);
  for (Moment const& moment : moments_) cudaEventDestroy(moment.event);
}

std::string Moments::mark(cudaStream_t stream, schedule::Mark mark, uint32_t group) {
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreate(&event);
  if (error == cudaSuccess) {
    moments_.push_back({event, mark, group});
    error = cudaEventRecord(event, stream);
  }
  return error == cudaSuccess ? "" : std::string("an event for the trace: ") + cudaGetErrorString(error);
}

std::vector<schedule::TraceEvent> Moments::events(uint64_t ns) const {
  DeviceScope scope(device_);
  std::vector<schedule::TraceEvent> events;
  for (size_t i = 1; i < moments_.size(); ++i) {
    float ms = 0;
    if (cudaEventElapsedTime(&ms, moments_[0].event, moments_[i].event) != cudaSuccess) continue;
    events.push_back({ns + static_cast<uint64_t>(static_cast<double>(ms) * 1e6),
                      schedule::traced_tile({0, moments_[i].group, 0}), static_cast<uint32_t>(moments_[i].mark)});
  }
  return events;
}

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
  uint64_t events = launch.count() + (launch.moments ? 1 : 0);
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
