// What Python's arguments say, and who defines what in entwine_jax._core.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "schedule/geometry.h"
#include "schedule/plan.h"

namespace entwine {

void define_schedule(nanobind::module_& m);
void define_signal(nanobind::module_& m);
void define_simulation(nanobind::module_& m);
void define_trace(nanobind::module_& m);

inline schedule::Op op_of(std::string const& name) {
  for (schedule::Op op : {schedule::Op::kAllGatherMatmul, schedule::Op::kMatmulReduceScatter, schedule::Op::kMatmulAllReduce})
    if (name == schedule::op_name(op)) return op;
  throw std::invalid_argument("op \"" + name + "\" is unknown");
}

inline schedule::Target target_of(std::string const& name) {
  if (name == "host") return schedule::Target::kHost;
  if (name == "sm90") return schedule::Target::kSm90;
  throw std::invalid_argument("target must be \"host\" or \"sm90\", not \"" + name + "\"");
}

// `missing`: see schedule/geometry.h.
inline schedule::Geometry geometry_of(uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k, uint32_t tile_m,
                                      uint32_t tile_n, uint32_t missing = 0) {
  if (ranks < 1 || ranks > schedule::kMaxRanks || batch < 1 || m_shard < 1 || n < 1 || k < 1 || tile_m < 1 || tile_n < 1)
    throw std::invalid_argument("sizes must be at least 1 and a team at most " + std::to_string(schedule::kMaxRanks) +
                                " ranks");
  if (missing >= ranks * m_shard) throw std::invalid_argument("there must be a row");
  return {ranks, batch, m_shard, n, k, tile_m, tile_n, missing};
}

}  // namespace entwine
