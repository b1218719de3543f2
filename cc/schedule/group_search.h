// How strategy "signal" cuts a call into groups, and what it should take: a pure function, the same on every rank.
//
// A *transfer* is what moves a group: a collective of NCCL's, or the copies of copy engines from rank to rank.
//
// The end of a call is predicted from the time of a wave of tiles, the link's rate, and what a collective takes however little
// it moves. Sums: a group's transfer begins when its last wave is done and the transfer before it; so the earliest end of
// all groups up to a wave follows from the earliest ends up to the waves before, and the best cut of all is found exactly, wave
// by wave; of the cuts that come close to it one of fewest groups. It comes out as one would wish: few waves first, so that the
// link gets to work, more in the middle, few last, so that little is left to move after the matmul. Gathered rows: the same, a
// group more at a time.
#pragma once

#include "schedule/cost.h"
#include "schedule/tile_groups.h"

namespace entwine::schedule {

// What the search knows of the machine.
struct GroupCost {
  uint32_t clusters;                    // that multiply
  double wave_us;                       // a tile of each
  double start_us;                      // before the first wave
  double transfer_us, bytes_per_us;     // of one transfer; what a rank sends
  double launch_us;                     // a further launch of the matmul
  double copy_bytes_per_us, finish_us;  // from what was moved to y; a launch for it
  bool one_shot = false;                // an all-reduce's partial sums go to all, who add them up
};

// What moves groups, chosen with the tile.
struct SignalPlan {
  uint32_t comm_sms;     // multiprocessors that the matmul leaves to NCCL; 0: copy engines move groups
  uint32_t group_waves;  // 0: what the search finds
  bool far;              // GPUs without peer access, which copy engines need

  ENTWINE_HOST_DEVICE constexpr bool engines() const { return comm_sms == 0; }
};

// Multiprocessors left to NCCL: what is tried, and with how many it reaches its rate (its kernels have as many blocks, which
// take a multiprocessor each). Beside a matmul that is half of what it moves alone.
constexpr uint32_t kCommSms[] = {0, 8, 16, 24}, kNcclSms = 24;
constexpr double kNcclBeside = 0.6;
// NCCL through host memory, where GPUs have no peer access.
constexpr double kFarBytesPerUs = 12e3;
// A group: waiting for its counter, and NCCL's launch and first bytes. Then y, at memory's rate.
constexpr double kGroupUs = 18, kMatmulLaunchUs = 6, kFinishUs = 5, kCopyBytesPerUs = 1.8e6;
// Copy engines take no multiprocessor and most of the link. Each peer's copy and signal, and a launch that awaits them.
constexpr double kEngineBytesPerUs = 350e3, kEngineCopyUs = 5, kAwaitUs = 4;
// The host executor has no clock: a machine on which small calls have several groups.
constexpr GroupCost kHostGroupCost{4, 10, 0, 4, 1e3, 1, 1e6, 0};

constexpr GroupCost sm90_group_cost(Op op, Geometry const& g, uint32_t ranks, SignalPlan const& plan,
                                    uint32_t multiprocessors) {
  cost::TileCost tile = cost::tile_cost(g.tile_m, g.tile_n);
  uint32_t left = multiprocessors > plan.comm_sms + 2 ? (multiprocessors - plan.comm_sms) / 2 : 1;
  GroupCost c{left,
              tile.rest_us + ceil_div(g.k * 2, 128) * tile.k_block_us,
              cost::kLaunchUs,
              kGroupUs,
              (op == Op::kMatmulAllReduce ? cost::kNcclAllReduceBytesPerUs : cost::kNcclBytesPerUs) * kNcclBeside,
              kMatmulLaunchUs,
              kCopyBytesPerUs,
              kFinishUs};
  if (plan.comm_sms < kNcclSms) c.bytes_per_us *= double(plan.comm_sms) / kNcclSms;
  if (plan.far) c.bytes_per_us = kFarBytesPerUs;
  if (!plan.engines()) return c;
  c.transfer_us = kEngineCopyUs * (ranks - 1) + kAwaitUs;
  c.bytes_per_us = kEngineBytesPerUs;
  c.launch_us += kAwaitUs;
  c.finish_us += kAwaitUs;
  c.copy_bytes_per_us *= 2.0 / (ranks + 1);  // every rank's sums are read
  c.one_shot = true;
  return c;
}

struct Grouping {
  Groups groups;
  double us;
};

namespace groups {

constexpr uint32_t kUnits = kMaxGroups;  // boundaries that are looked at
constexpr double kClose = 1.01;

// Bytes that a rank sends for so many cells; `ranks` are the team's.
constexpr double sent(Op op, Geometry const& g, uint32_t ranks, double cells, uint32_t element_bytes, bool one_shot) {
  if (op == Op::kAllGatherMatmul) return cells * g.tile_m * g.k * element_bytes * (ranks - 1);
  double tile = double(g.tile_m) * g.tile_n * element_bytes;
  bool two_shot = op == Op::kMatmulAllReduce && !one_shot;
  return two_shot ? cells * tile * 2 * (ranks - 1) / ranks : cells * tile * (ranks - 1);
}

// Cells that are whole after so many waves.
constexpr uint32_t whole(Geometry const& g, GroupCost const& c, uint32_t waves) {
  uint64_t tiles = uint64_t(waves) * c.clusters, most = g.tiles();
  return static_cast<uint32_t>((tiles < most ? tiles : most) / g.ranks);
}

// The end of a transfer of the cells between two boundaries, the last of which is done at `done`; the one before ends at
// `before`. After the last one, the end of the call: when the matmul is done all cells but its own go to y, then these.
struct Sums {
  Op op;
  Geometry const& g;
  uint32_t ranks, bytes;
  GroupCost const& c;
  uint32_t units = 0, cell[kUnits + 1] = {};
  double done[kUnits + 1] = {};

  double end(double before, uint32_t i, uint32_t j) const {
    double cells = double(cell[i]) - cell[j], begin = before < done[i] ? done[i] : before;
    double after = begin + c.transfer_us + sent(op, g, ranks, cells, bytes, c.one_shot) / c.bytes_per_us;
    if (i < units) return after;
    double to_y = double(g.tile_m) * g.tile_n * bytes / c.copy_bytes_per_us;
    if (double others = begin + c.finish_us + cell[j] * to_y; j > 0 && others > after) after = others;
    return after + c.finish_us + cells * to_y;
  }
};

inline Grouping of_sums(Op op, Geometry const& g, uint32_t ranks, GroupCost const& c, uint32_t waves_a_group, uint32_t bytes) {
  uint32_t waves = ceil_div(g.tiles(), c.clusters);
  // Of very many waves several are looked at together.
  uint32_t step = larger(larger(waves_a_group, 1), ceil_div(waves, kUnits));
  Sums sums{op, g, ranks, bytes, c};
  uint32_t units = sums.units = ceil_div(waves, step);
  for (uint32_t i = 1; i <= units; ++i) {
    sums.cell[i] = whole(g, c, smaller(i * step, waves));
    sums.done[i] = c.start_us + smaller(i * step, waves) * c.wave_us;
  }
  // The earliest end there is: of everything up to each boundary, with any number of groups.
  double least[kUnits + 1] = {};
  for (uint32_t i = 1; i <= units; ++i)
    for (uint32_t j = waves_a_group != 0 ? i - 1 : 0; j < i; ++j) {
      double end = sums.end(least[j], i, j);
      if (least[i] == 0 || end < least[i]) least[i] = end;
    }
  // Then as few groups as come close to it.
  double end[kUnits + 1][kUnits + 1] = {};  // with so many groups; 0: it can't be
  uint32_t from[kUnits + 1][kUnits + 1] = {}, count = 0;
  while (count == 0 || end[count][units] == 0 || (count < units && end[count][units] > kClose * least[units])) {
    ++count;
    for (uint32_t i = count; i <= units; ++i)
      for (uint32_t j = waves_a_group != 0 ? i - 1 : count - 1; j < i; ++j) {
        if ((j == 0) != (count == 1) || (count > 1 && end[count - 1][j] == 0)) continue;
        double after = sums.end(end[count - 1][j], i, j);
        if (end[count][i] == 0 || after < end[count][i]) {
          end[count][i] = after;
          from[count][i] = j;
        }
      }
  }
  uint32_t order[kUnits] = {};
  for (uint32_t i = units, left = count; left > 0; i = from[left][i], --left) order[left - 1] = sums.cell[i];
  Grouping made{{}, end[count][units]};
  for (uint32_t i = 0; i < count; ++i)  // a wave that completes no cell makes no group
    if (order[i] > (made.groups.count == 0 ? 0 : made.groups.ends[made.groups.count - 1]))
      made.groups.ends[made.groups.count++] = order[i];
  return made;
}

// Row blocks in so many groups at most.
constexpr uint32_t kGatherGroups = 8, kGatherUnits = 16;

inline Grouping of_rows(Op op, Geometry const& g, GroupCost const& c, uint32_t waves_a_group, uint32_t bytes) {
  uint32_t blocks = g.chunk_rows(), cols = g.cols(), peers = g.ranks - 1;
  auto launch = [&](uint32_t tiles) { return ceil_div(tiles, c.clusters) * c.wave_us; };
  uint32_t step = ceil_div(blocks, kGatherUnits);
  if (waves_a_group != 0)
    step = larger(ceil_div(waves_a_group * c.clusters, cols * larger(peers, 1)), ceil_div(blocks, kMaxGroups));
  uint32_t units = ceil_div(blocks, step);
  double own = c.start_us + launch(blocks * cols);
  auto rows_at = [&](uint32_t unit) { return smaller(unit * step, blocks); };
  auto there = [&](uint32_t unit, uint32_t count) {
    return count * c.transfer_us + sent(op, g, g.ranks, rows_at(unit), bytes, false) / c.bytes_per_us;
  };
  if (waves_a_group != 0) {
    Grouping made{{}, own};
    for (uint32_t i = 1; i <= units; ++i) {
      made.groups.ends[made.groups.count++] = rows_at(i);
      double ready = there(i, i);
      made.us = (made.us < ready ? ready : made.us) + c.launch_us + launch((rows_at(i) - rows_at(i - 1)) * cols * peers);
    }
    return made;
  }
  double end[kGatherGroups + 1][kGatherUnits + 1] = {};
  uint32_t from[kGatherGroups + 1][kGatherUnits + 1] = {}, best = 0;
  end[0][0] = own;
  for (uint32_t count = 1; count <= kGatherGroups && count <= units; ++count)
    for (uint32_t i = count; i <= units; ++i) {
      end[count][i] = -1;
      for (uint32_t j = count == 1 ? 0 : count - 1; j < (count == 1 ? 1 : i); ++j) {
        double ready = there(i, count), before = end[count - 1][j];
        double after = (before < ready ? ready : before) + c.launch_us + launch((rows_at(i) - rows_at(j)) * cols * peers);
        if (end[count][i] < 0 || after < end[count][i]) {
          end[count][i] = after;
          from[count][i] = j;
        }
      }
      if (i == units && (best == 0 || end[count][units] < end[best][units])) best = count;
    }
  Grouping made{{}, end[best][units]};
  made.groups.count = best;
  for (uint32_t count = best, i = units; count > 0; --count) {
    made.groups.ends[count - 1] = rows_at(i);
    i = from[count][i];
  }
  return made;
}

}  // namespace groups

// `g` is grouped(), `ranks` the team's; bytes are those of an element of x (all-gather) or y. `waves_a_group`: of all groups,
// in place of what the search finds; 0 leaves it that.
inline Grouping make_groups(Op op, Geometry const& g, uint32_t ranks, GroupCost const& c, uint32_t waves_a_group,
                            uint32_t element_bytes) {
  return op == Op::kAllGatherMatmul ? groups::of_rows(op, g, c, waves_a_group, element_bytes)
                                    : groups::of_sums(op, g, ranks, c, waves_a_group, element_bytes);
}

constexpr uint32_t kSm90Multiprocessors = 2 * kSm90Clusters;

inline Grouping make_groups(Op op, Target target, Geometry const& whole, SignalPlan const& plan, uint32_t multiprocessors,
                            uint32_t element_bytes) {
  Geometry g = grouped(op, whole);
  GroupCost c = target == Target::kHost ? kHostGroupCost : sm90_group_cost(op, g, whole.ranks, plan, multiprocessors);
  return make_groups(op, g, whole.ranks, c, plan.group_waves, element_bytes);
}

// The tile and what moves groups that are predicted to be the fastest; `g`'s own tile is ignored.
struct SignalChoice {
  TileShape tile;
  uint32_t raster;
  SignalPlan plan;
  double us;
};
constexpr TileShape kSignalTiles[] = {{256, 256}, {256, 128}};
constexpr bool is_signal_tile(uint32_t m, uint32_t n) {
  for (TileShape tile : kSignalTiles)
    if (tile.m == m && tile.n == n) return true;
  return false;
}

inline SignalChoice make_signal_plan(Op op, Target target, Geometry g, bool far, uint32_t element_bytes) {
  if (target == Target::kHost) return {{kHostTileM, kHostTileN}, 4, {1, 0, far}, 0};
  SignalChoice best{};
  uint32_t raster = op == Op::kMatmulReduceScatter ? 2 : op == Op::kMatmulAllReduce ? 4 : 8;  // the former of every owner's
  for (TileShape tile : kSignalTiles)
    for (uint32_t sms : kCommSms) {
      if (sms == 0 && far) continue;
      g.tile_m = tile.m;
      g.tile_n = tile.n;
      SignalPlan plan{sms, 0, far};
      double us = make_groups(op, target, g, plan, kSm90Multiprocessors, element_bytes).us;
      if (best.us == 0 || us < best.us) best = {tile, raster, plan, us};
    }
  return best;
}

// XLA's own time, with or without peer access; bytes as above.
constexpr double xla_us(Op op, Geometry const& g, bool far, uint32_t element_bytes) {
  double us = cost::xla_us(op, g, element_bytes, element_bytes);
  if (!far) return us;
  double rows = double(g.ranks) * g.batch * g.m_shard - g.missing;
  double bytes = rows / g.ranks * (op == Op::kAllGatherMatmul ? g.k : g.n) * element_bytes * (g.ranks - 1);
  bool twice = op == Op::kMatmulAllReduce;
  double rate = twice ? cost::kNcclAllReduceBytesPerUs : cost::kNcclBytesPerUs;
  return us + (twice ? 2 : 1) * bytes * (1 / kFarBytesPerUs - 1 / rate);
}

}  // namespace entwine::schedule
