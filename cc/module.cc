// entwine_jax._core: the registrations of the custom calls, and a window on the schedule for plans and tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/cpu_handlers.h"
#include "schedule/arena_layout.h"
#include "schedule/group_search.h"
#include "schedule/make_plan.h"
#include "schedule/plan.h"
#include "schedule/tile_order.h"
#include "simulate/predict.h"
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
using namespace schedule;

Op op_of(std::string const& name) {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    if (name == op_name(op)) return op;
  throw std::invalid_argument("op \"" + name + "\" is unknown");
}

Target target_of(std::string const& name) {
  if (name == "host") return Target::kHost;
  if (name == "sm90") return Target::kSm90;
  throw std::invalid_argument("target must be \"host\" or \"sm90\", not \"" + name + "\"");
}

// `missing`: see schedule/geometry.h.
Geometry geometry_of(uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k, uint32_t tile_m, uint32_t tile_n,
                     uint32_t missing = 0) {
  if (ranks < 1 || ranks > kMaxRanks || batch < 1 || m_shard < 1 || n < 1 || k < 1 || tile_m < 1 || tile_n < 1)
    throw std::invalid_argument("sizes must be at least 1 and a team at most " + std::to_string(kMaxRanks) + " ranks");
  if (missing >= ranks * m_shard) throw std::invalid_argument("there must be a row");
  return {ranks, batch, m_shard, n, k, tile_m, tile_n, missing};
}

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

nb::dict dict_of(Plan const& p) {
  nb::dict d;
  d["tile_m"] = p.tile_m;
  d["tile_n"] = p.tile_n;
  d["raster"] = p.raster;
  d["lead"] = p.lead;
  d["transport"] = static_cast<uint32_t>(p.transport);
  d["pushers"] = p.pushers;
  d["few_rows"] = p.form == Form::kFewRows;
  d["copiers"] = p.copiers;
  d["movers"] = p.movers;
  return d;
}

nb::dict plan(std::string const& op, std::string const& target, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n,
              uint32_t k, uint32_t missing, uint32_t out_bytes, uint32_t in_bytes, bool gated) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  return dict_of(make_plan(op_of(op), target_of(target), g, out_bytes, in_bytes, gated));
}

// And the microseconds that are predicted of it.
std::pair<nb::dict, double> resident_plan(std::string const& op, std::string const& target, uint32_t ranks, uint32_t batch,
                                          uint32_t m_shard, uint32_t n, uint32_t k, uint32_t missing, uint32_t out_bytes,
                                          uint32_t in_bytes, bool gated) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  ResidentChoice made = make_resident_plan(op_of(op), target_of(target), g, out_bytes, in_bytes, gated);
  return {dict_of(made.plan), made.us};
}

std::pair<double, double> predicted(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n,
                                    uint32_t k, uint32_t missing, uint32_t out_bytes, bool tiles_only, uint32_t in_bytes,
                                    bool gated) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  Prediction p = predict(op_of(op), g, out_bytes, tiles_only, in_bytes, gated);
  return {p.fused_us, p.xla_us};
}

// The measured machine with some numbers replaced.
simulate::Machine machine_of(nb::dict const& numbers) {
  simulate::Machine machine;
  size_t known = 0;
  simulate::for_each_number(machine, [&](char const* name, double& number) {
    if (!numbers.contains(name)) return;
    number = nb::cast<double>(numbers[name]);
    ++known;
    // Rates that are next to nothing would make the simulation next to endless.
    double least = std::string(name).find("_per_us") != std::string::npos || std::string(name) == "unit_bytes" ? 1e3 : 0;
    if (!(number >= least && number <= 1e12))
      throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(uint32_t(least)) + " to 1e12");
  });
  if (known != numbers.size()) throw std::invalid_argument("the numbers of a machine have other names");
  return machine;
}

nb::dict machine() {
  nb::dict d;
  simulate::Machine machine;
  simulate::for_each_number(machine, [&](char const* name, double number) { d[name] = number; });
  return d;
}

nb::dict times_of(simulate::Times const& times) {
  nb::dict d;
  d["us"] = times.us;
  d["link_us"] = times.link_us;
  d["multiply_us"] = times.multiply_us;
  d["wait_rows_us"] = times.wait_rows_us;
  d["wait_sums_us"] = times.wait_sums_us;
  d["wait_buffers_us"] = times.wait_buffers_us;
  return d;
}

// `plan` as make_plan gives it.
nb::dict simulate_fused(std::string const& op, nb::dict const& plan, uint32_t ranks, uint32_t batch, uint32_t m_shard,
                        uint32_t n, uint32_t k, uint32_t missing, uint32_t out_bytes, uint32_t in_bytes,
                        nb::dict const& machine) {
  auto number = [&](char const* name) { return nb::cast<uint32_t>(plan[name]); };
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  Plan p{number("tile_m"),
         number("tile_n"),
         number("raster"),
         number("lead"),
         static_cast<Transport>(number("transport")),
         number("pushers"),
         nb::cast<bool>(plan["few_rows"]) ? Form::kFewRows : Form::kTiles,
         number("copiers"),
         number("movers")};
  if (!is_sm90_tile(p.tile_m, p.tile_n) || p.raster < 1) throw std::invalid_argument("the plan is not of sm_90");
  return times_of(simulate::fused(op_of(op), g, p, out_bytes, in_bytes, machine_of(machine)));
}

nb::dict simulate_xla(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k,
                      uint32_t missing, uint32_t out_bytes, uint32_t in_bytes, bool gated, nb::dict const& machine) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  return times_of(simulate::xla(op_of(op), g, out_bytes, in_bytes, machine_of(machine), gated));
}

std::pair<uint32_t, uint32_t> chunk_rows(std::string const& target, uint32_t ranks, uint32_t rows) {
  if (ranks < 1 || rows < 1) throw std::invalid_argument("ranks and rows must be at least 1");
  Geometry g = all_reduce_geometry(ranks, rows, 1, 1, 1, 1, chunk_unit(target_of(target)));
  return {g.m_shard, g.missing};
}

using OwnerRowCol = std::tuple<uint32_t, uint32_t, uint32_t>;

std::vector<OwnerRowCol> tile_order(std::string const& op, uint32_t ranks, uint32_t rank, uint32_t batch, uint32_t m_shard,
                                    uint32_t n, uint32_t tile_m, uint32_t tile_n, uint32_t raster, uint32_t lead) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, 1, tile_m, tile_n);
  if (rank >= ranks || raster < 1) throw std::invalid_argument("rank must be one of the team's and raster at least 1");
  std::vector<OwnerRowCol> tiles;
  auto list = [&](auto const& order) {
    for (uint32_t position = 0; position < order.size(); ++position) {
      Tile t = order.at(position);
      tiles.emplace_back(t.owner, t.row, t.col);
    }
  };
  Raster walk{g.chunk_rows(), g.cols(), raster};
  if (op_of(op) == Op::kAllGatherMatmul)
    list(AllGatherOrder{walk, ranks, rank});
  else
    list(ReduceScatterOrder{walk, ranks, rank, lead});
  return tiles;
}

uint64_t arena_bytes(std::string const& op, uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k,
                     uint32_t missing, uint32_t tile_m, uint32_t tile_n, bool few_rows, bool moved, uint32_t element_bytes,
                     uint32_t parts, std::tuple<uint32_t, uint32_t, uint64_t> beside) {
  auto [z_batch, z_rows, z_row_bytes] = beside;
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, tile_m, tile_n, missing);
  ArenaDemand demand = call_demand(op_of(op), few_rows ? Form::kFewRows : Form::kTiles, g, parts, element_bytes,
                                   Gathering{z_batch, z_rows, z_row_bytes, tile_m}, moved);
  return ArenaLayout{ranks, demand.words_per_source, demand.staging_half}.bytes();
}

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
    d["op"] = op_name(launch.op);
    d["device"] = launch.device;
    d["rank"] = launch.rank;
    d["ranks"] = launch.geometry.ranks;
    d["m_shard"] = launch.geometry.m_shard;
    d["n"] = launch.geometry.n;
    d["k"] = launch.geometry.k;
    d["out_bytes"] = launch.out_bytes;
    d["ctas"] = launch.ctas;
    d["writers"] = kTraceWriters;
    d["capacity"] = launch.capacity;
    d["events"] = nb::bytes(reinterpret_cast<char const*>(launch.events),
                            uint64_t(launch.ctas) * kTraceWriters * launch.capacity * sizeof(TraceEvent));
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
  nb::list tiles;
  for (TileShape tile : kSm90Tiles) tiles.append(nb::make_tuple(tile.m, tile.n));
  m.attr("SM90_TILES") = nb::tuple(tiles);
  m.attr("FEW_ROWS_MOST") = kFewRowsMost;
  m.def("make_plan", &plan, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false,
        "The default plan of an op on \"host\" or \"sm90\"; of gated products, n is of both.");
  m.def("make_resident_plan", &resident_plan, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a,
        "k"_a, "missing"_a = 0, "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false,
        "The default plan of strategy \"resident\", and its predicted microseconds on sm_90.");
  m.def("predict", &predicted, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "tiles_only"_a = false, "in_bytes"_a = 2, "gated"_a = false,
        "Predicted microseconds on sm_90, (fused, xla).");
  m.def("machine", &machine, "The numbers of the machine that is simulated: see simulate/machine.h.");
  m.def(
      "check_machine", [](nb::dict const& numbers) { machine_of(numbers); }, "numbers"_a,
      "ValueError if these can't be numbers of a machine.");
  m.def(
      "simulate_fused", &simulate_fused, "op"_a, "plan"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a,
      "missing"_a = 0, "out_bytes"_a, "in_bytes"_a = 2, "machine"_a,
      "Microseconds of a fused call on sm_90 and what they go into, by going through its schedule; `machine`: other numbers.");
  m.def("simulate_xla", &simulate_xla, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false, "machine"_a, "The same of XLA's collective and GEMM.");
  m.def("tile_order", &tile_order, "op"_a, nb::kw_only(), "ranks"_a, "rank"_a, "batch"_a, "m_shard"_a, "n"_a, "tile_m"_a,
        "tile_n"_a, "raster"_a, "lead"_a, "The tiles in the order in which `rank` claims them, as (owner, row, column).");
  m.def("chunk_rows", &chunk_rows, "target"_a, nb::kw_only(), "ranks"_a, "rows"_a,
        "How many rows a chunk of an all-reduce has, (m_shard, missing): see schedule/geometry.h.");
  m.def("arena_bytes", &arena_bytes, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "tile_m"_a, "tile_n"_a, "few_rows"_a, "moved"_a = false, "element_bytes"_a, "parts"_a,
        "beside"_a = std::tuple<uint32_t, uint32_t, uint64_t>{0, 0, 0},
        "Bytes of the smallest arena that holds one call; `beside` are batch, rows and row bytes of what it gathers beside.");
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
