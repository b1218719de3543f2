// Notes of calls, taken and handed to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/trace.h"
#include "python/arguments.h"
#ifdef ENTWINE_WITH_CUDA
#include "team/trace.h"
#endif

namespace entwine {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

bool on_gpus(std::string const& platform) {
  if (platform != "cpu" && platform != "gpu")
    throw std::invalid_argument("platform must be \"cpu\" or \"gpu\", not \"" + platform + "\"");
#ifndef ENTWINE_WITH_CUDA
  if (platform == "gpu") throw std::invalid_argument("the CUDA kernels aren't compiled in");
#endif
  return platform == "gpu";
}

void start_trace(std::string const& platform, uint64_t bytes) {
  std::string why;
  if (!on_gpus(platform)) {
    if (!host::trace_start(bytes)) why = "a trace is being taken already";
  } else {
#ifdef ENTWINE_WITH_CUDA
    why = team::trace_start(bytes);
#endif
  }
  if (!why.empty()) throw std::runtime_error(why);
}

nb::bytes bytes_of(schedule::TraceEvent const* events, uint64_t count) {
  return nb::bytes(reinterpret_cast<char const*>(events), count * sizeof(schedule::TraceEvent));
}

nb::dict call_of(char const* strategy, schedule::Op op, schedule::Geometry const& geometry, int device, uint32_t rank,
                 uint32_t out_bytes) {
  nb::dict d;
  d["strategy"] = strategy;
  d["op"] = schedule::op_name(op);
  d["device"] = device;
  d["rank"] = rank;
  d["ranks"] = geometry.ranks;
  d["m_shard"] = geometry.m_shard;
  d["n"] = geometry.n;
  d["k"] = geometry.k;
  d["tile_bytes"] = uint64_t(geometry.tile_m) * geometry.tile_n * out_bytes;
  return d;
}

// A worker is a CTA with one writer, and its rank a device.
nb::dict call_of(host::TracedCall const& call) {
  host::CallSpec const& spec = call.spec;
  uint32_t out_bytes = host::element_bytes(spec.out);
  nb::dict d = call_of(spec.grouped            ? "signal"
                       : spec.plan.movers != 0 ? "resident"
                                               : "fused",
                       spec.op, spec.geometry, static_cast<int>(call.rank), call.rank, out_bytes);
  std::vector<uint64_t> group_bytes;
  if (spec.grouped) {
    schedule::Groups groups = spec.groups();
    schedule::Geometry tiles = schedule::grouped(spec.op, spec.geometry);
    for (uint32_t group = 0; group < groups.count; ++group) {
      uint64_t elements = schedule::group_elements(spec.op, tiles, groups, group);
      group_bytes.push_back(elements * (spec.gather() ? host::element_bytes(spec.in) : out_bytes) * (spec.geometry.ranks - 1));
    }
  }
  size_t capacity = 0;
  for (host::Notes const& notes : call.workers) capacity = std::max(capacity, notes.size());
  host::Notes events;
  for (host::Notes const& notes : call.workers) {
    events.insert(events.end(), notes.begin(), notes.end());
    events.resize(events.size() + capacity - notes.size());
  }
  d["parts"] = schedule::kHostParts;
  d["unit_bytes"] = spec.gathering.row_bytes == 0 ? 0 : spec.gathering.block_bytes(0) / host::kUnitsPerBlock;
  d["group_bytes"] = group_bytes;
  d["ctas"] = call.workers.size();
  d["writers"] = 1;
  d["capacity"] = capacity;
  d["events"] = bytes_of(events.data(), events.size());
  d["moments"] = bytes_of(nullptr, 0);
  return d;
}

#ifdef ENTWINE_WITH_CUDA
nb::dict call_of(team::TracedLaunch const& launch) {
  nb::dict d = call_of(launch.strategy, launch.op, launch.geometry, launch.device, launch.rank, launch.out_bytes);
  std::vector<schedule::TraceEvent> moments;
  if (launch.moments) moments = launch.moments->events(launch.events[launch.count()].ns);
  d["parts"] = schedule::kSm90Parts;
  d["unit_bytes"] = launch.unit_bytes;
  d["group_bytes"] = launch.group_bytes;
  d["ctas"] = launch.ctas;
  d["writers"] = schedule::kTraceWriters;
  d["capacity"] = launch.capacity;
  d["events"] = bytes_of(launch.events, launch.count());
  d["moments"] = bytes_of(moments.data(), moments.size());
  return d;
}
#endif

// One dict a call and rank. "events" are the bytes of schedule::TraceEvent[launches][ctas][writers][capacity], "moments" those
// of what no CTA has noted.
nb::list stop_trace(std::string const& platform) {
  nb::list calls;
  if (!on_gpus(platform)) {
    for (host::TracedCall const& call : host::trace_stop()) calls.append(call_of(call));
  } else {
#ifdef ENTWINE_WITH_CUDA
    for (team::TracedLaunch const& launch : team::trace_stop()) calls.append(call_of(launch));
#endif
  }
  return calls;
}

}  // namespace

void define_trace(nb::module_& m) {
  m.def("start_trace", &start_trace, "platform"_a, "bytes"_a, "From now on calls note what happens to their tiles.");
  m.def("stop_trace", &stop_trace, "platform"_a, "The calls since start_trace, as dicts.");
}

}  // namespace entwine
