// Strategy "signal": its matmul and its transfers, group by group, as the search for groups has them (schedule/group_search.h),
// on this machine.
#pragma once

#include <algorithm>

#include "schedule/group_search.h"
#include "simulate/predict.h"

namespace entwine::simulate {

// What the groups' parts do when, by the same numbers.
class GroupSpans {
 public:
  GroupSpans(schedule::Op op, schedule::Geometry const& g, uint32_t ranks, schedule::Groups const& groups, uint32_t raster,
             schedule::GroupCost const& c, uint32_t element_bytes, Spans& spans)
      : op_(op), g_(g), ranks_(ranks), groups_(groups), c_(c), bytes_(element_bytes), spans_(spans) {
    raster_ = {g.chunk_rows(), g.cols(), schedule::smaller(raster, g.chunk_rows())};
    spans_.bin_us = Link::kBin;
    if (op == schedule::Op::kAllGatherMatmul)
      rows();
    else
      sums();
  }

 private:
  void sums() {
    schedule::CellOrder order{raster_, g_.ranks};
    double done = tiles(c_.start_us, order.size(), [&](uint32_t position) { return order.at(position); }), before = 0;
    double to_y = double(g_.tile_m) * g_.tile_n * bytes_ / c_.copy_bytes_per_us;
    uint32_t last = groups_.count - 1;
    for (uint32_t i = 0; i <= last; ++i) {
      uint32_t waves = schedule::ceil_div(groups_.ends[i] * g_.ranks, c_.clusters);
      double begin = std::max(before, c_.start_us + waves * c_.wave_us), end = transfer(i, begin);
      if (i == last) {  // all others go to y meanwhile
        double others = std::max(before, done), copied = others;
        if (last > 0) copied += c_.finish_us + groups_.begin(i) * to_y;
        if (last > 0) copies(0, others, copied);
        double from = std::max(end, copied);
        copies(i, from, from + c_.finish_us + groups_.size(i) * to_y);
      }
      before = end;
    }
  }

  void rows() {
    schedule::RowsOrder own{raster_, 0, ranks_, 0, 1};
    double there = 0, free = tiles(c_.start_us, own.size(), [&](uint32_t position) { return own.at(position); });
    for (uint32_t i = 0; i < groups_.count; ++i) {
      there = transfer(i, there);
      schedule::Raster raster{groups_.size(i), g_.cols(), schedule::smaller(raster_.group, groups_.size(i))};
      schedule::RowsOrder order{raster, groups_.begin(i), ranks_, 1, ranks_ - 1};
      free = tiles(std::max(free, there) + c_.launch_us, order.size(), [&](uint32_t position) { return order.at(position); });
    }
  }

  // A launch, wave by wave; its end.
  template <class At>
  double tiles(double start, uint32_t count, At at) {
    for (uint32_t i = 0; i < count; ++i) {
      double begin = start + i / c_.clusters * c_.wave_us;
      spans_.add(Role::kMultiply, i % c_.clusters, begin, begin + c_.wave_us, at(i));
    }
    return start + schedule::ceil_div(count, c_.clusters) * c_.wave_us;
  }

  double transfer(uint32_t group, double begin) {
    double bytes = schedule::groups::sent(op_, g_, ranks_, groups_.size(group), bytes_, c_.one_shot);
    double first = begin + c_.transfer_us, end = first + bytes / c_.bytes_per_us;
    spans_.add(Role::kTransfer, schedule::kSm90Clusters, begin, end, {0, group, 0});
    auto bins = static_cast<size_t>(end / Link::kBin) + 1;
    if (spans_.link_bytes.size() < bins) spans_.link_bytes.resize(bins);
    for (size_t bin = static_cast<size_t>(first / Link::kBin); bin < bins; ++bin) {
      double us = std::min(end, (bin + 1) * Link::kBin) - std::max(first, bin * Link::kBin);
      if (us > 0) spans_.link_bytes[bin] += us * c_.bytes_per_us;
    }
    return end;
  }

  void copies(uint32_t group, double begin, double end) {
    for (uint32_t cluster = 0; cluster < schedule::kSm90Clusters; ++cluster)
      spans_.add(Role::kCopy, cluster, begin, end, {0, group, 0});
  }

  schedule::Op op_;
  schedule::Geometry const& g_;
  uint32_t ranks_;
  schedule::Groups const& groups_;
  schedule::GroupCost const& c_;
  uint32_t bytes_;
  Spans& spans_;
  schedule::Raster raster_;
};

// `g` has the plan's tile; `raster` is for spans alone.
inline Times signal(schedule::Op op, schedule::Geometry const& g, schedule::SignalPlan const& plan, uint32_t element_bytes,
                    Machine const& machine, uint32_t raster = 1, Spans* spans = nullptr) {
  constexpr Machine kMeasured{};
  schedule::Geometry grouped = schedule::grouped(op, g);
  schedule::GroupCost c = schedule::sm90_group_cost(op, grouped, g.ranks, plan, schedule::kSm90Multiprocessors);
  c.wave_us *= kMeasured.flops_per_us / machine.flops_per_us;
  c.start_us = machine.launch_us;
  if (plan.engines())
    c.bytes_per_us *= machine.link_bytes_per_us / kMeasured.link_bytes_per_us;
  else if (op == schedule::Op::kMatmulAllReduce)
    c.bytes_per_us *= machine.nccl_all_reduce_bytes_per_us / kMeasured.nccl_all_reduce_bytes_per_us;
  else
    c.bytes_per_us *= machine.nccl_bytes_per_us / kMeasured.nccl_bytes_per_us;
  double cells = schedule::cells(op, grouped);
  double link_us = schedule::groups::sent(op, grouped, g.ranks, cells, element_bytes, c.one_shot) / c.bytes_per_us;
  double multiply_us = schedule::ceil_div(grouped.tiles(), c.clusters) * c.wave_us;
  schedule::Grouping made = schedule::make_groups(op, grouped, g.ranks, c, plan.group_waves, element_bytes);
  if (spans != nullptr) GroupSpans(op, grouped, g.ranks, made.groups, raster, c, element_bytes, *spans);
  double us = std::max(made.us, machine.launch_us + least_us(op, g, element_bytes, machine));
  return {us, link_us, multiply_us, 0, 0, 0};
}

}  // namespace entwine::simulate
