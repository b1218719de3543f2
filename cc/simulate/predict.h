// What every strategy should take.
#pragma once

#include <algorithm>

#include "schedule/few_rows.h"
#include "simulate/tiles.h"

namespace entwine::simulate {

// The power limit bounds the average rate, so time that no schedule can save.
inline double least_us(schedule::Op op, schedule::Geometry const& g, double in_bytes, Machine const& machine) {
  return 2.0 * schedule::rows_of(op, g) * g.n * g.k / (machine.sustained_flops_per_us * 2 / in_bytes);
}

inline Times fused(schedule::Op op, schedule::Geometry g, schedule::Plan const& plan, double out_bytes, double in_bytes,
                   Machine const& machine, Spans* spans = nullptr) {
  if (plan.form == schedule::Form::kFewRows) {
    // No tiles, no queue: schedule/cost.h has the sum of its parts.
    double us = schedule::cost::few_rows_us(op, g, out_bytes, static_cast<uint32_t>(in_bytes));
    return {us + machine.few_rows_us - schedule::cost::kFewRowsLaunchUs, 0, 0, 0, 0, 0};
  }
  g.tile_m = plan.tile_m;
  g.tile_n = plan.tile_n;
  Times times = Tiles(op, g, plan, out_bytes, in_bytes, machine, spans).run();
  times.us = std::max(times.us, machine.launch_us + least_us(op, g, in_bytes, machine));
  return times;
}

// XLA: a collective before or after a GEMM, and never sooner than the host has launched both. Gated products (to the fused call
// one of twice y's columns) are read and written once more.
inline Times xla(schedule::Op op, schedule::Geometry const& g, double out_bytes, double in_bytes, Machine const& machine,
                 bool gated = false) {
  double m = schedule::rows_of(op, g), n = g.n, k = g.k;
  double flops_us = 2 * m * n * k / (machine.gemm_flops_per_us * 2 / in_bytes);
  double memory_us = ((m + n) * k * in_bytes + m * n * out_bytes) / machine.memory_bytes_per_us;
  double multiply_us = machine.gemm_us + std::max(flops_us, memory_us);
  if (gated) multiply_us += 1.5 * m * n * out_bytes / machine.memory_bytes_per_us;
  bool all_reduce = op == schedule::Op::kMatmulAllReduce;
  double chunk = m / g.ranks * (op == schedule::Op::kAllGatherMatmul ? k * in_bytes : n * out_bytes);
  double bytes = chunk * (g.ranks - 1) * (all_reduce ? 2 : 1);
  double nccl_us = all_reduce ? machine.nccl_us + bytes / machine.nccl_all_reduce_bytes_per_us
                              : std::min(machine.nccl_us + bytes / machine.nccl_bytes_per_us,
                                         machine.nccl_long_us + bytes / machine.nccl_long_bytes_per_us);
  double us = std::max({machine.host_us, multiply_us + nccl_us, least_us(op, g, in_bytes, machine)});
  return {us, nccl_us - machine.nccl_us, multiply_us, 0, 0, 0};
}

}  // namespace entwine::simulate
