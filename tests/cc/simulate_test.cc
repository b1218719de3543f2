// The simulation of calls: bounds that no schedule can beat, what orders and windows do to the link, and that one rank may
// stand for all.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "kernel/sm90/shape.h"
#include "simulate/predict.h"

namespace entwine::simulate {
namespace {

using namespace schedule;

constexpr Op kOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce};

Geometry geometry(Op op, uint32_t ranks, uint32_t m, uint32_t n, uint32_t k) {
  if (op == Op::kMatmulAllReduce) return all_reduce_geometry(ranks, m, n, k, 256, 256, chunk_unit(Target::kSm90));
  return {ranks, 1, m / ranks, n, k, 256, 256};
}

Plan planned(Op op, Geometry const& g, uint32_t out_bytes = 2, uint32_t in_bytes = 2) {
  Plan plan = make_plan(op, Target::kSm90, g, out_bytes, in_bytes);
  plan.form = Form::kTiles;
  return plan;
}

void a_link_moves_what_it_can() {
  Link alone(100);
  CHECK_EQ(alone.move(3, 1000, 1e9), 13);
  CHECK(std::abs(Link(100).move(3.25, 1000, 50) - 23.25) < 1e-9);
  // Two at once share it, and what comes later but starts earlier finds what is left.
  Link shared(100);
  CHECK(std::abs(shared.move(10, 500, 50) - 20) < 1e-9);
  CHECK(std::abs(shared.move(10, 500, 50) - 20) < 1e-9);
  CHECK(shared.move(0, 1500, 100) >= 25 - 1e-9);
  CHECK(std::abs(shared.busy_us() - 25) < 1e-9);
}

// In any order of starts, never more than the rate in any stretch of time that is full from its beginning.
void a_link_moves_no_more() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Link link(100);
    double bytes = 0, last = 0;
    for (int i = 0; i < 50; ++i) {
      double start = random() % 40, some = 1 + random() % 400, most = 10 + random() % 200, end = link.move(start, some, most);
      bytes += some;
      last = std::max(last, end);
      CHECK_THAT(end >= start + some / std::min(most, 100.0) - 0.5, start << " " << some << " " << end);
    }
    CHECK_THAT(last >= bytes / 100 - 1e-6, last << " us for " << bytes << " bytes");
  }
}

// Strategy "resident": nothing is faster than its movers, the fewer there are the slower, and bytes are those of "fused".
void movers_move_what_they_can() {
  for (Op op : kOps)
    for (uint32_t ranks : {2u, 8u}) {
      bool gather = op == Op::kAllGatherMatmul;
      Geometry g = geometry(op, ranks, 8192, gather ? 1024 : 8192, gather ? 8192 : 1024);
      Plan plan = make_resident_plan(op, Target::kSm90, g, 2).plan;
      plan.tile_m = plan.tile_n = 256;
      Machine machine;
      double pushed = fused(op, g, planned(op, g), 2, 2, machine).link_us, last = 0;
      for (uint32_t movers : {4u, 2u, 1u}) {
        plan.movers = movers;
        Times times = fused(op, g, plan, 2, 2, machine);
        double least_us = times.link_us * machine.link_bytes_per_us / (2 * movers * machine.mover_bytes_per_us);
        CHECK_THAT(times.us >= least_us && times.us > last, op_name(op) << ", " << movers << " movers: " << times.us);
        CHECK_THAT(std::abs(times.link_us - pushed) < 0.15 * pushed, op_name(op) << ": " << times.link_us << ", " << pushed);
        last = times.us;
      }
    }
}

// The n-th remote tile that a rank claims has ordinal n, and an own tile waits for ordinals that are all claimed before it by
// the ranks that are alike: what lets tiles be gone through in order, on one rank.
void one_rank_stands_for_all() {
  std::mt19937 random(2);
  for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
    for (int round = 0; round < 50; ++round) {
      Raster raster{1 + uint32_t(random() % 7), 1 + uint32_t(random() % 7), 1 + uint32_t(random() % 4)};
      ReduceScatterOrder order{raster, ranks, 0, uint32_t(random() % 20)};
      uint32_t claimed = 0;
      for (uint32_t position = 0; position < order.size(); ++position) {
        Tile tile = order.at(position);
        uint32_t index = raster.index(tile.row, tile.col);
        if (tile.owner != 0) {
          CHECK_EQ(remote_ordinal(ranks, 0, tile.owner, index), claimed++);
          continue;
        }
        std::set<uint32_t> wanted;
        for (uint32_t source = 1; source < ranks; ++source) wanted.insert(remote_ordinal(ranks, source, 0, index));
        CHECK_EQ(wanted.size(), ranks - 1);
        CHECK_EQ(*wanted.begin(), index * (ranks - 1));
        CHECK_EQ(*wanted.rbegin() + 1, (index + 1) * (ranks - 1));
        CHECK(*wanted.rbegin() < claimed);
      }
    }
}

void no_call_beats_its_bounds() {
  std::mt19937 random(3);
  Machine machine;
  for (int round = 0; round < 400; ++round) {
    Op op = kOps[random() % 3];
    uint32_t ranks = 2 + random() % 7, out_bytes = random() % 4 ? 2 : 4, in_bytes = random() % 4 ? 2 : 1;
    Geometry g = geometry(op, ranks, ranks * (1 + random() % 900), 8 + random() % 5000, 16 + random() % 3000);
    Plan plan = planned(op, g, out_bytes, in_bytes);
    plan.transport = random() % 2 ? Transport::kPush : Transport::kPull;
    plan.pushers = 1 + random() % 80;
    plan.lead = random() % 100;
    TileShape tile = kSm90Tiles[random() % std::size(kSm90Tiles)];
    if (!is_sm90_tile(tile, out_bytes)) continue;
    plan.tile_m = tile.m;
    plan.tile_n = tile.n;
    Times times = fused(op, g, plan, out_bytes, in_bytes, machine);
    g.tile_m = tile.m;
    g.tile_n = tile.n;
    double us = times.us - machine.launch_us, waves = double(g.tiles()) / kSm90Clusters;
    CHECK_THAT(std::isfinite(us) && us > 0, op_name(op) << " " << us);
    CHECK_THAT(us >= times.link_us, op_name(op) << " link " << times.link_us << " in " << us);
    CHECK_THAT(us >= times.multiply_us + times.wait_rows_us + waves * cost::tile_cost(tile.m, tile.n).rest_us - 1e-6,
               op_name(op) << " multiplies " << times.multiply_us << ", waits " << times.wait_rows_us << " in " << us);
    CHECK(times.wait_rows_us >= 0 && times.wait_sums_us >= 0 && times.wait_buffers_us >= 0);
    CHECK_THAT(times.us >= least_us(op, g, in_bytes, machine), op_name(op));
    // What moves: chunks of x, or partial sums, and finished tiles.
    if (op == Op::kAllGatherMatmul) {
      double sent = double(ranks - 1) * g.m_shard * g.k * in_bytes;
      CHECK_THAT(std::abs(times.link_us * machine.link_bytes_per_us - sent) < 1e-3 * sent + 1, sent);
    } else {
      double sent = double(ranks - 1) * g.chunk_tiles() * tile.m * round_up(tile.n, 64) * out_bytes;
      double finished = op == Op::kMatmulAllReduce ? sent : 0;
      double slower = plan.transport == Transport::kPull ? machine.link_bytes_per_us / machine.fetch_bytes_per_us : 1;
      CHECK_THAT(std::abs(times.link_us * machine.link_bytes_per_us - slower * sent - finished) < 1e-3 * sent + 1, sent);
    }
  }
}

// docs/design.md, "Order, seen": the link's pace at 8192, 8192, 1024. A tenth of what was measured.
void orders_and_windows_matter() {
  Machine cold;
  cold.flops_per_us *= 0.738 / 0.6;  // a single call, at high clocks
  cold.sustained_flops_per_us *= 2;
  Op op = Op::kMatmulReduceScatter;
  Geometry g = geometry(op, 2, 8192, 8192, 1024);
  Plan plan = planned(op, g), free = plan, naive = plan, narrow = plan;
  free.pushers = naive.pushers = naive.lead = 1 << 20;
  narrow.pushers = 4;
  CHECK(plan.transport == Transport::kPush && plan.pushers == 10);
  auto us = [&](Plan const& p) { return fused(op, g, p, 2, 2, cold).us; };
  double paced_us = us(plan), free_us = us(free), naive_us = us(naive), narrow_us = us(narrow);
  CHECK_THAT(std::abs(paced_us / 207 - 1) < 0.1, paced_us);
  CHECK_THAT(std::abs(free_us / 215 - 1) < 0.1, free_us);
  CHECK_THAT(std::abs(naive_us / 293 - 1) < 0.1, naive_us);
  CHECK_THAT(narrow_us > 1.3 * paced_us, narrow_us);
}

void slower_parts_make_slower_calls() {
  Machine machine;
  for (Op op : kOps) {
    Geometry g = geometry(op, 4, 4096, 4096, 1024);
    Plan plan = planned(op, g);
    double us = fused(op, g, plan, 2, 2, machine).us;
    auto slower = [&](double Machine::* number, double factor) {
      Machine other = machine;
      other.*number *= factor;
      return fused(op, g, plan, 2, 2, other).us > us;
    };
    CHECK_THAT(slower(&Machine::flops_per_us, 0.5), op_name(op));
    CHECK_THAT(slower(&Machine::sustained_flops_per_us, 0.2), op_name(op));
    CHECK_THAT(slower(&Machine::link_bytes_per_us, 0.1) || plan.transport == Transport::kPull, op_name(op));
    CHECK_THAT(slower(&Machine::launch_us, 2), op_name(op));
    if (op == Op::kAllGatherMatmul) CHECK(slower(&Machine::pusher_bytes_per_us, 0.1));
    if (op == Op::kMatmulAllReduce) CHECK(slower(&Machine::collect_us, 20));
    Machine other = machine;
    other.nccl_bytes_per_us = other.nccl_all_reduce_bytes_per_us = machine.link_bytes_per_us;
    CHECK(xla(op, g, 2, 2, other).us < xla(op, g, 2, 2, machine).us);
  }
}

// Numbers that the kernels have, too.
void the_kernels_numbers() {
  CHECK_EQ(Machine().unit_bytes, double(sm90::kUnitBytes));
  CHECK_EQ(cost::kMoverUnitBytes, double(sm90::kUnitBytes));
}

}  // namespace
}  // namespace entwine::simulate

int main() {
  using namespace entwine::simulate;
  return check::run({{"a_link_moves_what_it_can", a_link_moves_what_it_can},
                     {"a_link_moves_no_more", a_link_moves_no_more},
                     {"movers_move_what_they_can", movers_move_what_they_can},
                     {"one_rank_stands_for_all", one_rank_stands_for_all},
                     {"no_call_beats_its_bounds", no_call_beats_its_bounds},
                     {"orders_and_windows_matter", orders_and_windows_matter},
                     {"slower_parts_make_slower_calls", slower_parts_make_slower_calls},
                     {"the_kernels_numbers", the_kernels_numbers}});
}
