// The kernels themselves, without JAX and NCCL, in teams of 2 to 8 ranks that share the GPUs which are there.
//
//   teams_test [RANKS ...]      teams of these sizes, by default all
//
// Exact: every shape, op, transport, layout and type against a naive expectation, with staging and y poisoned before each call.
// Stress: many calls back to back on one arena, of all ops and two shapes, with ranks delayed at random, with few clusters
// (the progress rule) and with epochs that wrap around.
//
// Exit status: 0 all passed, 1 something failed, 2 no GPU that can run this, 3 a hang.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "exact_cases.h"
#include "several_products.h"
#include "signal_groups.h"
#include "tests.h"
#include "transposed_x.h"

namespace teams {
namespace {

using namespace entwine;
using schedule::Transport;

constexpr uint64_t kPoolBytes = 768ull << 20;

// The one that every call of the team's tests fits into.
schedule::ArenaLayout layout_of(uint32_t ranks) {
  schedule::ArenaLayout layout{ranks, 0, 0};
  std::vector<Geometry> shapes = exact_shapes(ranks);
  for (Geometry const& g : stress_shapes(ranks)) shapes.push_back(g);
  for (Geometry const& g : shapes)
    for (Op op : kOps)
      for (uint32_t i = 0; i <= std::size(schedule::kSm90Tiles); ++i) {
        Variant variant{op,
                        Transport::kPull,
                        false,
                        true,
                        0,
                        1,
                        schedule::kSm90Tiles[i % std::size(schedule::kSm90Tiles)],
                        i == 0,
                        i != 0 && op != Op::kMatmulAllReduce};
        if (i != 0) variant.movers = 1;
        schedule::ArenaDemand demand = demand_of(variant, tiled(geometry_for(op, g), variant));
        layout.words_per_source = schedule::larger(layout.words_per_source, demand.words_per_source);
        if (layout.staging_half < demand.staging_half) layout.staging_half = demand.staging_half;
        if (layout.packets_half < demand.packets_half) layout.packets_half = demand.packets_half;
      }
  return layout;
}

void test_team(uint32_t ranks, int devices) {
  Progress::at("team of " + std::to_string(ranks) + ": memory");
  EmulatedTeam team(ranks, devices, layout_of(ranks), kPoolBytes, kScale);
  Watchdog watchdog([&team] { team.describe(); });
  exact(team);
  several_products(team, kScale);
  transposed_x(team);
  signal_groups(team);
  if (setting("TEAMS_SHAPES", 0) != 0 || each_once()) return;  // for compute-sanitizer
  for (uint32_t i = 0; i < std::size(kStresses); ++i) stress(team, kStresses[i], i);
}

int run(int count, char** arguments) {
  // One hardware queue a stream: kernels of ranks that share a GPU must not wait for each other to be launched. And nothing may
  // be loaded while kernels spin. Both are read when CUDA starts.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int devices = prepare_devices();
  if (devices == 0) {
    std::printf("no GPU of compute capability 9.0\n");
    return 2;
  }
  std::printf("%d GPU%s\n", devices, devices == 1 ? "" : "s");
  std::vector<uint32_t> sizes;
  for (int i = 1; i < count; ++i) sizes.push_back(static_cast<uint32_t>(std::atoi(arguments[i])));
  if (sizes.empty()) sizes = {2, 3, 4, 5, 6, 7, 8};
  for (uint32_t ranks : sizes) {
    if (ranks < 2 || ranks > schedule::kMaxRanks) {
      std::printf("teams have 2 to %u ranks\n", schedule::kMaxRanks);
      return 1;
    }
    test_team(ranks, devices);
  }
  return conclude();
}

}  // namespace
}  // namespace teams

int main(int count, char** arguments) { return teams::run(count, arguments); }
