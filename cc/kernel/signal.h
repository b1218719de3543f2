// Host interface of the sm_90a kernels of strategy "signal": a matmul that knows nothing of peers, and what brings summed tiles
// to y. Who calls them moves groups of tiles, or of rows, by NCCL or copy engines meanwhile: ffi/signal_handlers.cc.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernel/operands.h"
#include "schedule/activation.h"
#include "schedule/group_search.h"
#include "schedule/stuck_report.h"
#include "schedule/trace_event.h"

namespace entwine::sm90 {

struct SignalCall {
  schedule::Op op;
  schedule::Geometry geometry;  // as schedule::grouped() has it
  uint32_t raster;
  Operands operands;                // of 16 bits; y is of the same
  bool transposed_w, transposed_x;  // the latter of sums
  void const *x, *w;
  void* y;
  float const* bias;  // one number for each column; null: none
  schedule::Activation activation;
  schedule::Groups groups;
  uint8_t* scratch;  // schedule/tile_groups.h
  void* whole;       // all-gather: all of x
  uint32_t ranks, rank;
  uint8_t const* landed;        // sums by copy engines: schedule::landing_demand(); else null
  schedule::TraceEvent* trace;  // null: no notes. Else signal_trace_shape().events() of them, zeroed, mapped here
  uint32_t trace_clusters;      // that shape's, the most of any launch

  uint32_t owner() const { return op == schedule::Op::kMatmulReduceScatter ? rank : 0; }  // sums: of the tiles that become y
  uint8_t* tiles() const { return scratch + schedule::kScratchHead; }
  uint32_t* counters() const { return reinterpret_cast<uint32_t*>(scratch); }
  uint32_t* finished(uint32_t group) const { return counters() + schedule::kFinishedWord + group; }
  // What finished() has when a group is whole.
  uint32_t parts(uint32_t group) const { return groups.size(group) * geometry.ranks * schedule::kSm90Parts; }
  uint64_t tile_elements() const { return uint64_t(geometry.tile_m) * geometry.tile_n; }
};

// "" or why the kernels can't take this call.
std::string unsupported(SignalCall const& call);

// Loads the kernels on the current device: once a device.
cudaError_t load_signal_kernels();

// Each enqueues one kernel; the counters must have been zeroed. Clusters of two multiprocessors, at most so many.
// Sums: all tiles to scratch.
cudaError_t launch_sums(SignalCall const& call, uint32_t clusters, cudaStream_t stream);
// Sums: y of the cells of groups `first` to `end`, which have been summed.
cudaError_t launch_finish(SignalCall const& call, uint32_t first, uint32_t end, uint32_t multiprocessors, cudaStream_t stream);
// All-gather: y of the own rows; of the peers' rows of a group, which are in `whole`.
cudaError_t launch_own_rows(SignalCall const& call, uint32_t clusters, cudaStream_t stream);
cudaError_t launch_group_rows(SignalCall const& call, uint32_t group, uint32_t clusters, cudaStream_t stream);
// Copy engines: until every peer has signalled groups `first` to `end`. One block, so peers that share the GPU go on.
struct AwaitCall {
  uint32_t const* words;  // of the own arena
  uint32_t words_per_source, epoch;
  uint64_t timeout_ns;
  schedule::StuckReport* stuck;
};
cudaError_t launch_await(SignalCall const& call, AwaitCall const& await, uint32_t first, uint32_t end, cudaStream_t stream);

// Notes of one traced call: those of each launch's CTAs after the other's, each writer's as many as `capacity`.
struct SignalTraceShape {
  uint32_t launches, ctas, capacity;
  uint64_t events() const { return uint64_t(launches) * ctas * schedule::kTraceWriters * capacity; }
};
SignalTraceShape signal_trace_shape(SignalCall const& call);
// Enqueues a kernel that writes what %globaltimer shows.
cudaError_t launch_clock(uint64_t* ns, cudaStream_t stream);

// Of the .cu file.
struct SignalVariant {
  uint32_t tile_n;
  Operands operands;
  bool transposed_w, traced;
};
using SignalKernel = void (*)(struct SignalParams);
SignalKernel signal_kernel(SignalVariant const& variant, int* shared_bytes);
using FinishKernel = void (*)(struct FinishParams);
FinishKernel finish_kernel(Operands operands);
using AwaitKernel = void (*)(struct AwaitParams);
AwaitKernel await_kernel();
using ClockKernel = void (*)(uint64_t*);
ClockKernel clock_kernel();

}  // namespace entwine::sm90
