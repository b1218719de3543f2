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
// {version, path, ""}, or as far as known and why NCCL can't be used.
std::tuple<std::string, std::string, std::string> nccl() {
  std::string why;
  team::Nccl const* bound = team::bind_nccl(&why);
  return {bound == nullptr ? "" : team::dotted(bound->version), bound == nullptr ? "" : bound->path, why};
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
  define_trace(m);
#ifdef ENTWINE_WITH_CUDA
  m.def("hopper", &hopper, "device_ordinals"_a, "Empty if these GPUs are all sm_90, else why not.");
  m.def("peer_access", &peer_access, "device_ordinals"_a,
        "Empty if these GPUs are all sm_90 and see each other's memory, else why not.");
  m.def("nccl", &nccl, "Version and path of the NCCL in this process, and why it can't be used: empty if it can.");
#endif
}

}  // namespace entwine
