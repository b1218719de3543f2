// entwine_jax._core: the registrations of the custom calls, what their teams hold, and a window on the schedule.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/cpu_handlers.h"
#include "python/arguments.h"
#ifdef ENTWINE_WITH_CUDA
#include "ffi/cuda_handlers.h"
#include "ffi/problem.h"
#include "team/arena.h"
#include "team/nccl.h"
#include "team/trace.h"
#endif

namespace entwine {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

nb::dict registrations() {
  nb::dict platforms;
  platforms["cpu"] = cpu_registrations();
#ifdef ENTWINE_WITH_CUDA
  platforms["CUDA"] = cuda_registrations();
#endif
  return platforms;
}

// (platform, device, rank, ranks, bytes of each arena).
using RankMemory = std::tuple<std::string, int64_t, uint32_t, uint32_t, std::vector<uint64_t>>;

std::vector<RankMemory> memory() {
  std::vector<RankMemory> every;
  auto add = [&](char const* platform, std::vector<team::TeamMemory> const& teams) {
    for (team::TeamMemory const& team : teams) every.emplace_back(platform, team.device, team.rank, team.ranks, team.arenas);
  };
  add("cpu", cpu_memory());
#ifdef ENTWINE_WITH_CUDA
  add("cuda", team::Team::memory());
#endif
  return every;
}

bool cuda_built() {
#ifdef ENTWINE_WITH_CUDA
  return true;
#else
  return false;
#endif
}

#ifdef ENTWINE_WITH_CUDA
void start_trace(uint64_t bytes) {
  std::string why = team::trace_start(bytes);
  if (!why.empty()) throw std::runtime_error(why);
}

// {version, path, ""}, or as far as known and why NCCL can't be used.
std::tuple<std::string, std::string, std::string> nccl() {
  std::string why;
  team::Nccl const* bound = team::bind_nccl(&why);
  return {bound == nullptr ? "" : team::dotted(bound->version), bound == nullptr ? "" : bound->path, why};
}

// One dict a launch; "events" are the bytes of schedule::TraceEvent[ctas][writers][capacity].
nb::list stop_trace() {
  nb::list launches;
  for (team::TracedLaunch const& launch : team::trace_stop()) {
    nb::dict d;
    d["op"] = schedule::op_name(launch.op);
    d["device"] = launch.device;
    d["rank"] = launch.rank;
    d["ranks"] = launch.geometry.ranks;
    d["m_shard"] = launch.geometry.m_shard;
    d["n"] = launch.geometry.n;
    d["k"] = launch.geometry.k;
    d["out_bytes"] = launch.out_bytes;
    d["ctas"] = launch.ctas;
    d["writers"] = schedule::kTraceWriters;
    d["capacity"] = launch.capacity;
    d["events"] = nb::bytes(reinterpret_cast<char const*>(launch.events),
                            uint64_t(launch.ctas) * schedule::kTraceWriters * launch.capacity * sizeof(schedule::TraceEvent));
    launches.append(d);
  }
  return launches;
}
#endif

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The compiled part of entwine_jax.";
  m.def("registrations", &registrations, "FFI handlers: {platform: {target: {stage: capsule}}}.");
  // An arena may be in the making meanwhile, by a thread that wants to have Python too.
  m.def("memory", &memory, nb::call_guard<nb::gil_scoped_release>(),
        "What arenas take, of each rank of each team here: (platform, device, rank, ranks, bytes of each arena).");
  m.def("cuda_built", &cuda_built, "Whether the CUDA kernels are compiled in.");
  define_schedule(m);
  define_signal(m);
  define_simulation(m);
#ifdef ENTWINE_WITH_CUDA
  m.def("hopper", &hopper, "device_ordinals"_a, "Empty if these GPUs are all sm_90, else why not.");
  m.def("peer_access", &peer_access, "device_ordinals"_a,
        "Empty if these GPUs are all sm_90 and see each other's memory, else why not.");
  m.def("nccl", &nccl, "Version and path of the NCCL in this process, and why it can't be used: empty if it can.");
  m.def("start_trace", &start_trace, "bytes"_a, "From now on launches note what happens to their tiles.");
  m.def("stop_trace", &stop_trace, "The launches since start_trace, as dicts.");
#endif
}

}  // namespace entwine
