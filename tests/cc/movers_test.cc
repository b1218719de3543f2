// The schedule of strategy "resident" (schedule/movers.h), by exhaustion over small shapes and teams of 2 to 8.
#include <ostream>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "schedule/arena_layout.h"
#include "schedule/movers.h"

namespace entwine::schedule {
namespace {

struct Case {
  Geometry g;
  Raster raster;
  uint32_t rank, lead;
};

std::ostream& operator<<(std::ostream& out, Case const& c) {
  return out << "ranks " << c.g.ranks << ", rank " << c.rank << ", raster " << c.raster.rows << " x " << c.raster.cols
             << ", lead " << c.lead;
}

template <typename Check>
void for_all_cases(Check check) {
  std::mt19937 random{1};
  auto upto = [&](uint32_t most) { return static_cast<uint32_t>(1 + random() % most); };
  for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
    for (uint32_t i = 0; i < 2000; ++i) {
      uint32_t tile_m = upto(8), tile_n = upto(8);
      Geometry g{ranks, upto(3), upto(4 * tile_m), upto(4 * tile_n), 1, tile_m, tile_n};
      check(Case{g,
                 {g.chunk_rows(), g.cols(), upto(6)},
                 static_cast<uint32_t>(random() % ranks),
                 static_cast<uint32_t>(random() % (g.tiles() + 3))});
    }
}

// However claims fall to workers, every tile is one's, and the last claim of all is where it is said to be.
void positions_are_tickets_or_tiles() {
  for (uint32_t count : {0u, 1u, 2u, 5u})
    for (uint32_t tiles : {1u, 2u, 7u})
      for (uint32_t workers : {1u, 2u, 3u, 9u})
        for (uint32_t skew = 0; skew < 3; ++skew) {
          Movers movers{count};
          std::set<uint32_t> made;
          uint32_t queue = 0, moving = 0, finished = 0;
          std::vector<uint32_t> claims(workers, 0);
          std::vector<bool> done(workers, false);
          bool idle_half = false;
          uint32_t ticket_0 = 0;
          for (uint32_t turn = 0; finished < workers; ++turn) {
            uint32_t w = skew == 0 ? turn % workers : skew == 1 ? 0 : (turn / 3) % workers;
            while (done[w]) w = (w + 1) % workers;
            uint32_t position = queue++;
            if (position == 0) ticket_0 = w;
            if (++claims[w] == 2 && w == ticket_0) idle_half = position == 1;
            if (movers.reserved(position)) {
              if (claims[w] == 1) ++moving;
            } else if (uint32_t tile = movers.tile(position); tile < tiles) {
              CHECK_THAT(made.insert(tile).second, "tile " << tile << " twice");
            } else {
              done[w] = true;
              ++finished;
            }
          }
          CHECK_THAT(made.size() == tiles, made.size() << " of " << tiles << " tiles");
          CHECK_THAT(queue - 1 == movers.last_claim(tiles, workers), queue - 1);
          CHECK_THAT(count == 0 || moving > 0 || idle_half, "nobody moves");
        }
}

// Every partial sum to its owner once, every finished tile to each peer once.
void move_order_is_complete() {
  for_all_cases([](Case const& c) {
    for (bool results : {false, true}) {
      MoveOrder order{c.raster, c.g.ranks, c.rank, c.lead, results};
      std::set<std::tuple<uint32_t, uint32_t, bool>> jobs;
      for (uint32_t i = 0; i < order.size(); ++i) {
        MoveOrder::Job job = order.at(i);
        CHECK_THAT(job.peer != c.rank && job.peer < c.g.ranks && job.index < c.g.chunk_tiles(), c);
        CHECK_THAT(results || !job.result, c);
        jobs.insert({job.peer, job.index, job.result});
      }
      CHECK_THAT(jobs.size() == order.size(), c << ": each once");
      CHECK_THAT(order.size() == (c.g.tiles() - c.g.chunk_tiles()) * (results ? 2 : 1), c);
    }
  });
}

// The jobs of a tile come before those of tiles at later positions of the order of tiles.
void move_order_is_that_of_tiles() {
  for_all_cases([](Case const& c) {
    ReduceScatterOrder tiles{c.raster, c.g.ranks, c.rank, c.lead};
    for (bool results : {false, true}) {
      MoveOrder order{c.raster, c.g.ranks, c.rank, c.lead, results};
      uint32_t job = 0;
      for (uint32_t position = 0; position < tiles.size(); ++position) {
        Tile t = tiles.at(position);
        bool own = t.owner == c.rank;
        if (own && !results) continue;
        for (uint32_t i = 0; i < (own ? c.g.ranks - 1 : 1); ++i) {
          MoveOrder::Job next = order.at(job++);
          CHECK_THAT(next.index == c.raster.index(t.row, t.col) && next.result == own && (own || next.peer == t.owner),
                     c << ", position " << position);
        }
      }
      CHECK_THAT(job == order.size(), c);
    }
  });
}

// What movers have yet to take, and its flags, lies apart from all that a call of "fused" has, one place each.
void outgoing_tiles_have_places() {
  for_all_cases([](Case const& c) {
    constexpr uint32_t kParts = 4, kBytes = 2;
    for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
      Gathering beside{};
      if (op == Op::kMatmulReduceScatter && c.lead % 2 == 0) beside = {1, 3 + c.lead, 16, 4};
      ArenaDemand fused = arena_demand(op, c.g, kParts, kBytes, beside),
                  moved = arena_demand(op, c.g, kParts, kBytes, beside, true);
      CHECK_THAT(moved.words_per_source >= fused.words_per_source, c);
      CHECK_THAT(outgoing_offset(op, c.g, kBytes, beside) == fused.staging_half, c);
      if (op == Op::kAllGatherMatmul) {
        CHECK_THAT(moved.staging_half == fused.staging_half, c << ": rows are there from the start");
        continue;
      }
      std::set<uint32_t> flags, sets;
      for (uint32_t owner = 0; owner < c.g.ranks; ++owner) {
        if (owner == c.rank && op != Op::kMatmulAllReduce) continue;
        uint32_t set = outgoing_set(c.g.ranks, c.rank, owner);
        sets.insert(set);
        uint64_t end = fused.staging_half + (set + 1) * partials_bytes(c.g, kBytes);
        CHECK_THAT(end <= moved.staging_half, c << ", owner " << owner);
        for (uint32_t tile = 0; tile < c.g.chunk_tiles(); ++tile)
          for (uint32_t part = 0; part < kParts; ++part) {
            uint32_t flag = finished_flag(c.g.chunk_tiles(), set, tile, part, kParts);
            CHECK_THAT(flag < moved.words_per_source && flags.insert(flag).second, c << ", flag " << flag);
          }
      }
      CHECK_THAT(sets.size() == outgoing_sets(op, c.g), c);
    }
  });
}

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return check::run({{"positions are tickets or tiles", positions_are_tickets_or_tiles},
                     {"move order is complete", move_order_is_complete},
                     {"move order is that of tiles", move_order_is_that_of_tiles},
                     {"outgoing tiles have places", outgoing_tiles_have_places}});
}
