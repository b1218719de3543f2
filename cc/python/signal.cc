// Strategy "signal": its plan, its groups, and what memory it takes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "python/arguments.h"
#include "schedule/group_search.h"

namespace entwine {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using namespace schedule;

nb::dict signal_plan(std::string const& op, std::string const& target, uint32_t ranks, uint32_t batch, uint32_t m_shard,
                     uint32_t n, uint32_t k, uint32_t missing, bool far, uint32_t element_bytes) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  SignalChoice made = make_signal_plan(op_of(op), target_of(target), g, far, element_bytes);
  nb::dict d;
  d["tile_m"] = made.tile.m;
  d["tile_n"] = made.tile.n;
  d["raster"] = made.raster;
  d["comm_sms"] = made.plan.comm_sms;
  d["us"] = made.us;
  d["xla_us"] = xla_us(op_of(op), g, far, element_bytes);
  return d;
}

// A host tile that is larger than a chunk is as one that isn't: see ffi/problem.cc.
Geometry signal_geometry(Target target, Geometry g) {
  if (target == Target::kHost) {
    g.tile_m = smaller(g.tile_m, larger(g.m_shard, kHostTileM));
    g.tile_n = smaller(g.tile_n, larger(g.n, kHostTileN));
  } else if (!is_signal_tile(g.tile_m, g.tile_n)) {
    throw std::invalid_argument("the plan is not of strategy \"signal\" on sm_90");
  }
  return g;
}

std::vector<uint32_t> signal_groups(std::string const& op, std::string const& target, uint32_t ranks, uint32_t batch,
                                    uint32_t m_shard, uint32_t n, uint32_t k, uint32_t missing, uint32_t tile_m,
                                    uint32_t tile_n, uint32_t comm_sms, uint32_t group_waves, bool far,
                                    uint32_t element_bytes) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, tile_m, tile_n, missing);
  g = signal_geometry(target_of(target), g);
  SignalPlan plan{comm_sms, group_waves, far};
  Groups made = make_groups(op_of(op), target_of(target), g, plan, kSm90Multiprocessors, element_bytes).groups;
  return {made.ends, made.ends + made.count};
}

uint64_t signal_scratch_bytes(std::string const& op, std::string const& target, uint32_t ranks, uint32_t batch,
                              uint32_t m_shard, uint32_t n, uint32_t k, uint32_t missing, uint32_t tile_m, uint32_t tile_n,
                              uint32_t element_bytes, bool gathers) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, tile_m, tile_n, missing);
  g = signal_geometry(target_of(target), g);
  return scratch_bytes(op_of(op), grouped(op_of(op), g), element_bytes, gathers);
}

// Of a rank's arena, where copy engines move.
uint64_t signal_arena_bytes(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k,
                            uint32_t missing, uint32_t tile_m, uint32_t tile_n, uint32_t element_bytes) {
  Geometry g = signal_geometry(Target::kSm90, geometry_of(ranks, batch, m_shard, n, k, tile_m, tile_n, missing));
  ArenaDemand demand = landing_demand(op_of(op), grouped(op_of(op), g), ranks, element_bytes);
  return exactly(ranks, demand).bytes();
}

}  // namespace

void define_signal(nb::module_& m) {
  nb::list signal_tiles;
  for (TileShape tile : kSignalTiles) signal_tiles.append(nb::make_tuple(tile.m, tile.n));
  m.attr("SIGNAL_TILES") = nb::tuple(signal_tiles);
  m.def("make_signal_plan", &signal_plan, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
        "missing"_a = 0, "far"_a, "element_bytes"_a,
        "The default plan of strategy \"signal\", and predicted microseconds on sm_90, its own and XLA's.");
  m.def("signal_groups", &signal_groups, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
        "missing"_a = 0, "tile_m"_a, "tile_n"_a, "comm_sms"_a, "group_waves"_a, "far"_a, "element_bytes"_a,
        "Where the groups of strategy \"signal\" end, in tiles of a chunk (sums) or row blocks of one (all-gather).");
  m.def("signal_scratch_bytes", &signal_scratch_bytes, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a,
        "n"_a, "k"_a, "missing"_a = 0, "tile_m"_a, "tile_n"_a, "element_bytes"_a, "gathers"_a,
        "Bytes of the scratch of one call of strategy \"signal\".");
  m.def("signal_arena_bytes", &signal_arena_bytes, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
        "missing"_a = 0, "tile_m"_a, "tile_n"_a, "element_bytes"_a,
        "Bytes of the smallest arena in which copy engines land one call of strategy \"signal\".");
}

}  // namespace entwine
