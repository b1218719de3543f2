// What a call of strategy "signal" enqueues on its two streams.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernel/signal.h"
#include "team/arena.h"
#include "team/beside.h"
#include "team/trace.h"
#include "team/watch.h"

namespace entwine {

constexpr uint32_t kSignalElementBytes = 2;

struct SignalStreams {
  sm90::SignalCall kernel;
  uint32_t clusters, all_clusters;  // of a matmul beside NCCL, and of one alone
  uint32_t multiprocessors;
  int type;  // NCCL's
  uint64_t timeout_ns;
  // Copy engines.
  bool engines;
  schedule::ArenaDemand demand;
  // If notes are taken.
  int device;
  schedule::Geometry geometry;  // of the whole call
  std::shared_ptr<team::Moments> moments;

  team::Patience patience() const { return {kernel.op, timeout_ns}; }

  // Elements of every collective that the call has NCCL make.
  std::vector<size_t> counts() const;

  // On `stream`, which is XLA's, and beside it; with an arena by copy engines. `gathered`: where the whole of x goes; null if
  // it isn't wanted. "" or what went wrong; what was enqueued before then runs.
  std::string enqueue(team::Beside& beside, team::Arena const* arena, cudaStream_t stream, void* gathered);
};

}  // namespace entwine
