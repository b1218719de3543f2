// Groups of tiles: every tile has one slot and comes once, groups fill up in order, and the search finds the best cut there is.
#include <ostream>
#include <random>
#include <vector>

#include "check.h"
#include "schedule/group_search.h"

namespace entwine::schedule {

std::ostream& operator<<(std::ostream& out, Geometry const& g) {
  return out << "ranks " << g.ranks << ", batch " << g.batch << ", m_shard " << g.m_shard << ", n " << g.n << ", k " << g.k
             << ", tile " << g.tile_m << " x " << g.tile_n;
}

namespace {

constexpr Op kOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce};

struct Random {
  std::mt19937 engine{1};
  uint32_t upto(uint32_t most) { return 1 + engine() % most; }
  Geometry geometry(Op op, uint32_t ranks) {
    uint32_t tile_m = upto(8), tile_n = upto(8), rows = upto(9 * tile_m), n = upto(9 * tile_n), k = upto(500);
    if (op == Op::kMatmulAllReduce) return all_reduce_geometry(ranks, upto(ranks * rows), n, k, tile_m, tile_n, upto(3));
    return {ranks, upto(3), rows, n, k, tile_m, tile_n};
  }
  GroupCost cost() {
    return {upto(9), double(upto(50)), double(upto(20)), double(upto(40)), double(upto(4000)), double(upto(9)), 1e4,
            1,       upto(2) == 1};
  }
};

template <typename Check>
void for_all(uint32_t shapes, Check check) {
  Random random;
  for (Op op : kOps)
    for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
      for (uint32_t i = 0; i < shapes; ++i) check(op, random.geometry(op, ranks), random);
}

void groups_cover_every_cell() {
  for_all(400, [](Op op, Geometry const& whole, Random& random) {
    Geometry g = grouped(op, whole);
    uint32_t waves = random.upto(3) == 1 ? random.upto(4) : 0;
    Groups groups = make_groups(op, g, whole.ranks, random.cost(), waves, 2).groups;
    CHECK_THAT(groups.count >= 1 && groups.count <= kMaxGroups, op_name(op) << ", " << whole);
    uint32_t end = 0;
    for (uint32_t i = 0; i < groups.count; ++i) {
      CHECK_THAT(groups.ends[i] > end, op_name(op) << ", " << whole << ", group " << i);
      CHECK_THAT(groups.begin(i) == end && groups.size(i) == groups.ends[i] - end, whole);
      for (uint32_t cell = end; cell < groups.ends[i]; ++cell) CHECK_THAT(groups.of(cell) == i, whole << ", cell " << cell);
      end = groups.ends[i];
    }
    CHECK_THAT(end == cells(op, g), op_name(op) << ", " << whole << ": " << end << " of " << cells(op, g));
  });
}

// Of sums: all tiles once, group after group; a slot of its own for each, groups and in them owners one after the other.
void tiles_of_sums_have_slots() {
  for_all(200, [](Op op, Geometry const& whole, Random& random) {
    if (op == Op::kAllGatherMatmul) return;
    Geometry g = grouped(op, whole);
    Groups groups = make_groups(op, g, whole.ranks, random.cost(), 0, 2).groups;
    Raster raster{g.chunk_rows(), g.cols(), random.upto(6)};
    CellOrder order{raster, g.ranks};
    CHECK_THAT(order.size() == g.tiles(), whole);
    std::vector<uint32_t> slots(g.tiles());
    uint32_t group = 0;
    for (uint32_t position = 0; position < order.size(); ++position) {
      Tile t = order.at(position);
      uint32_t cell = raster.index(t.row, t.col), slot = groups.slot(g.ranks, t.owner, cell);
      CHECK_THAT(groups.of(cell) >= group, whole << ": a tile of an earlier group at " << position);
      group = groups.of(cell);
      CHECK_THAT(slot < g.tiles() && slots[slot]++ == 0, whole << ", slot " << slot);
      uint32_t first = g.ranks * groups.begin(group);
      CHECK_THAT(slot >= first && slot < first + g.ranks * groups.size(group), whole << ", slot " << slot);
      CHECK_THAT((slot - first) / groups.size(group) == t.owner, whole << ", slot " << slot);
    }
  });
}

void tiles_of_rows_come_once() {
  for_all(200, [](Op op, Geometry const& g, Random& random) {
    if (op != Op::kAllGatherMatmul) return;
    Groups groups = make_groups(op, g, g.ranks, random.cost(), 0, 2).groups;
    uint32_t rank = random.upto(g.ranks) - 1;
    std::vector<uint32_t> times(g.tiles());
    auto all_of = [&](RowsOrder const& order, uint32_t first, uint32_t end) {
      for (uint32_t position = 0; position < order.size(); ++position) {
        Tile t = order.at(position);
        CHECK_THAT(t.row >= first && t.row < end &&
                       (t.owner == rank) == (order.owners == 1 && first == 0 && order.first_owner == rank),
                   g << ", position " << position);
        ++times[(t.owner * g.chunk_rows() + t.row) * g.cols() + t.col];
      }
    };
    all_of({{g.chunk_rows(), g.cols(), random.upto(6)}, 0, g.ranks, rank, 1}, 0, g.chunk_rows());
    for (uint32_t i = 0; i < groups.count; ++i) {
      Raster raster{groups.size(i), g.cols(), random.upto(6)};
      all_of({raster, groups.begin(i), g.ranks, (rank + 1) % g.ranks, g.ranks - 1}, groups.begin(i), groups.ends[i]);
    }
    for (uint32_t each : times) CHECK_THAT(each == 1, g);
  });
}

// Every cut of few waves, by going through them all.
double best_cut_of_sums(Op op, Geometry const& g, uint32_t ranks, GroupCost const& c) {
  uint32_t waves = ceil_div(g.tiles(), c.clusters);
  double best = 0;
  for (uint32_t cuts = 0; cuts < (1u << (waves - 1)); ++cuts) {
    double end = 0, to_y = double(g.tile_m) * g.tile_n * 2 / c.copy_bytes_per_us;
    uint32_t from = 0;
    for (uint32_t wave = 1; wave <= waves; ++wave) {
      if (wave < waves && (cuts >> (wave - 1) & 1) == 0) continue;
      double cells = double(groups::whole(g, c, wave)) - groups::whole(g, c, from), done = c.start_us + wave * c.wave_us;
      double bytes = cells * g.tile_m * g.tile_n * 2;
      bool two_shot = op == Op::kMatmulAllReduce && !c.one_shot;
      double sent = two_shot ? bytes * 2 * (ranks - 1) / ranks : bytes * (ranks - 1), begin = end < done ? done : end;
      end = begin + c.transfer_us + sent / c.bytes_per_us;
      if (wave == waves) {  // then the last cells go to y, once the others have
        double others = from > 0 ? begin + c.finish_us + groups::whole(g, c, from) * to_y : 0;
        end = (end < others ? others : end) + c.finish_us + cells * to_y;
      }
      from = wave;
    }
    if (best == 0 || end < best) best = end;
  }
  return best;
}

void the_search_finds_the_best_cut() {
  uint32_t compared = 0, several = 0;
  for_all(200, [&](Op op, Geometry const& whole, Random& random) {
    if (op == Op::kAllGatherMatmul) return;
    Geometry g = grouped(op, whole);
    GroupCost c = random.cost();
    if (ceil_div(g.tiles(), c.clusters) > 12) return;
    Grouping found = make_groups(op, g, whole.ranks, c, 0, 2);
    double best = best_cut_of_sums(op, g, whole.ranks, c);
    CHECK_THAT(found.us >= 0.9999 * best && found.us <= groups::kClose * 1.0001 * best,
               op_name(op) << ", " << whole << ": " << found.us << " us, not " << best);
    ++compared;
    several += found.groups.count > 1;
  });
  CHECK_THAT(compared > 300 && several > 100, compared << " compared, of several groups " << several);
}

// As the paper has it: few waves first where the link is the longer part, few last where the matmul is.
void large_products_have_several_groups() {
  for (Op op : {Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (uint32_t k : {1024u, 8192u}) {
      Geometry g{2, 1, 4096, 8192, k, 256, 256};
      if (op == Op::kMatmulAllReduce) g = all_reduce_geometry(2, 8192, 8192, k, 256, 256, 64);
      Grouping found = make_groups(op, Target::kSm90, g, {16, 0, false}, kSm90Multiprocessors, 2);
      Groups const& groups = found.groups;
      CHECK_THAT(groups.count >= 3, op_name(op) << " " << k << ": " << groups.count << " groups");
      uint32_t last = groups.count - 1;
      CHECK_THAT(k > 4096 ? groups.size(last) < groups.size(0) || groups.count > 8 : groups.size(0) < groups.ends[last] / 4,
                 op_name(op) << " " << k << ": " << groups.size(0) << " first, " << groups.size(last) << " last");
      double far = make_groups(op, Target::kSm90, g, {16, 0, true}, kSm90Multiprocessors, 2).us;
      CHECK_THAT(far > 3 * found.us, far << " us without peer access, " << found.us << " with it");
      Grouping engines = make_groups(op, Target::kSm90, g, {0, 0, false}, kSm90Multiprocessors, 2);
      CHECK_THAT(engines.us < found.us && engines.groups.count >= 2, op_name(op) << " " << k << ": " << engines.us << " us");
      CHECK_THAT(engines.us < xla_us(op, g, false, 2) && far < 1.05 * xla_us(op, g, true, 2), op_name(op) << " " << k);
    }
}

void scratch_has_room() {
  for_all(200, [](Op op, Geometry const& whole, Random&) {
    Geometry g = grouped(op, whole);
    uint64_t bytes = scratch_bytes(op, g, 2, false) - kScratchHead;
    if (op == Op::kAllGatherMatmul)
      CHECK_THAT(bytes == uint64_t(g.ranks) * chunk_bytes(g, 2) && scratch_bytes(op, g, 2, true) == kScratchHead, whole);
    else
      CHECK_THAT(bytes == uint64_t(g.tiles()) * g.tile_m * g.tile_n * 2, whole);
  });
}

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return check::run({{"groups cover every cell", groups_cover_every_cell},
                     {"tiles of sums have slots", tiles_of_sums_have_slots},
                     {"tiles of rows come once", tiles_of_rows_come_once},
                     {"the search finds the best cut", the_search_finds_the_best_cut},
                     {"large products have several groups", large_products_have_several_groups},
                     {"scratch has room", scratch_has_room}});
}
