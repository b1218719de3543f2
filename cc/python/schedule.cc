// Plans, predictions, tile orders and arenas, for plans and tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arguments.h"
#include "schedule/arena_layout.h"
#include "schedule/make_plan.h"
#include "schedule/plan.h"
#include "schedule/tile_order.h"

namespace entwine {
namespace {

namespace nb = nanobind;
using namespace nb::literals;
using namespace schedule;

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
                                    bool gated, double beside) {
  Geometry g = geometry_of(ranks, batch, m_shard, n, k, 1, 1, missing);
  Prediction p = predict(op_of(op), g, out_bytes, tiles_only, in_bytes, gated, beside);
  return {p.fused_us, p.xla_us};
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
  return exactly(ranks, demand).bytes();
}

nb::tuple sm90_tiles(uint32_t out_bytes, bool gated) {
  nb::list tiles;
  for (TileShape tile : kSm90Tiles)
    if (is_sm90_tile(tile, out_bytes, gated)) tiles.append(nb::make_tuple(tile.m, tile.n));
  return nb::tuple(tiles);
}

}  // namespace

void define_schedule(nb::module_& m) {
  m.def("sm90_tiles", &sm90_tiles, nb::kw_only(), "out_bytes"_a, "gated"_a = false,
        "The tiles of a cluster, (m, n), that the sm_90 kernels with such results are built for.");
  m.attr("FEW_ROWS_MOST") = kFewRowsMost;
  m.def("make_plan", &plan, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false,
        "The default plan of an op on \"host\" or \"sm90\"; of gated products, n is of both.");
  m.def("make_resident_plan", &resident_plan, "op"_a, "target"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a,
        "k"_a, "missing"_a = 0, "out_bytes"_a, "in_bytes"_a = 2, "gated"_a = false,
        "The default plan of strategy \"resident\", and its predicted microseconds on sm_90.");
  m.def("predict", &predicted, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "out_bytes"_a, "tiles_only"_a = false, "in_bytes"_a = 2, "gated"_a = false, "beside"_a = 0.0,
        "Predicted microseconds on sm_90, (fused, xla).");
  m.def("tile_order", &tile_order, "op"_a, nb::kw_only(), "ranks"_a, "rank"_a, "batch"_a, "m_shard"_a, "n"_a, "tile_m"_a,
        "tile_n"_a, "raster"_a, "lead"_a, "The tiles in the order in which `rank` claims them, as (owner, row, column).");
  m.def("chunk_rows", &chunk_rows, "target"_a, nb::kw_only(), "ranks"_a, "rows"_a,
        "How many rows a chunk of an all-reduce has, (m_shard, missing): see schedule/geometry.h.");
  m.def("arena_bytes", &arena_bytes, "op"_a, nb::kw_only(), "ranks"_a, "batch"_a, "m_shard"_a, "n"_a, "k"_a, "missing"_a = 0,
        "tile_m"_a, "tile_n"_a, "few_rows"_a, "moved"_a = false, "element_bytes"_a, "parts"_a,
        "beside"_a = std::tuple<uint32_t, uint32_t, uint64_t>{0, 0, 0},
        "Bytes of the smallest arena that holds one call; `beside` are batch, rows and row bytes of what it gathers beside.");
}

}  // namespace entwine
