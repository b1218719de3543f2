// Arenas: the parts of a layout never overlap, and growth always makes room.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "host/arena.h"

namespace entwine {
namespace {

using namespace schedule;

std::mt19937 random_{3};
uint32_t upto(uint32_t most) { return 1 + random_() % most; }

Geometry geometry() {
  uint32_t tile_m = upto(64), tile_n = upto(64);
  return {1 + upto(7), upto(3), upto(200), upto(200), upto(200), tile_m, tile_n};
}

void parts_of_a_layout_are_disjoint() {
  for (int i = 0; i < 5000; ++i) {
    Geometry g = geometry();
    Op op = static_cast<Op>(i / 3 % 3);
    Gathering beside{i % 5 ? 0 : upto(3), i % 5 ? 0 : upto(200), upto(100), upto(64)};
    ArenaDemand demand = arena_demand(op, g, upto(4), i % 3 ? 2 : 4, beside);
    demand.packets_half = i % 2 ? 0 : 1024 * upto(50);
    ArenaLayout a = exactly(g.ranks, demand);
    CHECK(a.fits(demand));
    uint64_t words = uint64_t(g.ranks) * a.words_per_source * 4;
    struct Span {
      uint64_t begin, end;
    };
    std::vector<Span> spans = {{0, ArenaLayout::kHeaderBytes},
                               {a.arrivals_offset(), a.arrivals_offset() + words},
                               {a.signals_offset(), a.signals_offset() + words},
                               {a.packets_offset(), a.packets_offset() + 2 * a.packets_half},
                               {a.staging_offset(0), a.staging_offset(0) + a.staging_half},
                               {a.staging_offset(1), a.staging_offset(1) + a.staging_half}};
    for (size_t s = 0; s < spans.size(); ++s) {
      CHECK_EQ(spans[s].begin % 1024, 0u);
      CHECK(spans[s].end <= (s + 1 < spans.size() ? spans[s + 1].begin : a.bytes()));
    }
  }
}

// What a call stages fits into its half: as many whole chunks, or sets of tile images, as there are peers; and what
// reduce-scatter gathers beside lies after its partials.
void staging_holds_what_peers_send() {
  for (int i = 0; i < 5000; ++i) {
    Geometry g = geometry();
    uint32_t bytes = i % 2 ? 2 : 4, peers = g.ranks - 1;
    uint64_t chunk = uint64_t(g.batch) * g.m_shard * g.k * bytes;
    CHECK(arena_demand(Op::kAllGatherMatmul, g, 1, bytes).staging_half >= peers * chunk);
    uint64_t images = uint64_t(g.chunk_tiles()) * g.tile_m * g.tile_n * bytes;
    CHECK(arena_demand(Op::kMatmulReduceScatter, g, 1, bytes).staging_half >= peers * images);
    Gathering beside{upto(3), upto(200), upto(100), upto(64)};
    uint64_t offset = gathered_offset(Op::kMatmulReduceScatter, g, bytes);
    CHECK(offset >= peers * images && offset % 1024 == 0);
    ArenaDemand demand = arena_demand(Op::kMatmulReduceScatter, g, 3, bytes, beside);
    CHECK(demand.staging_half >= offset + peers * beside.chunk_bytes());
    CHECK_EQ(demand.words_per_source, g.chunk_tiles() * 3 + beside.blocks());
    CHECK_EQ(gathered_offset(Op::kAllGatherMatmul, g, bytes), 0u);
    // all-gather's own x is in its geometry.
    CHECK(arena_demand(Op::kAllGatherMatmul, g, 1, bytes, beside).staging_half ==
          arena_demand(Op::kAllGatherMatmul, g, 1, bytes).staging_half);
    CHECK(results_offset(g, bytes) >= peers * images);
    CHECK(arena_demand(Op::kMatmulAllReduce, g, 1, bytes).staging_half >= results_offset(g, bytes) + peers * images);
  }
}

void growth_makes_room_and_is_geometric() {
  for (int round = 0; round < 200; ++round) {
    ArenaLayout last{upto(8), 0, 0};
    for (int i = 0; i < 20; ++i) {
      ArenaDemand demand{upto(1u << upto(16)), round_up(uint64_t(upto(1u << 12)) << upto(14), 1024),
                         i % 3 ? 0 : round_up(upto(1u << 20), 1024)};
      if (last.fits(demand)) continue;
      ArenaLayout next = grown(last, demand);
      CHECK(next.fits(demand));
      CHECK(next.words_per_source >= 2 * last.words_per_source && next.staging_half >= 2 * last.staging_half);
      CHECK(next.packets_half == last.packets_half || next.packets_half >= 2 * last.packets_half);
      CHECK_EQ(next.ranks, last.ranks);
      last = next;
    }
  }
}

void a_new_arena_is_quiet_and_poisoned() {
  for (uint32_t first_epoch : {0u, 1u, 0xfffffff0u, 0xffffffffu}) {
    ArenaLayout layout{3, 5, 2048};
    host::Arena arena(layout, first_epoch);
    for (uint32_t word = 0; word < 15; ++word) {
      CHECK_EQ(arena.arrivals(word).load(), 0u);
      CHECK(!signal_reached(arena.signal(word).load(), signal_value(first_epoch)));
      CHECK(!signal_reached(arena.signal(word).load(), signal_value(first_epoch + 1)));
    }
    for (uint32_t epoch : {0u, 1u})
      CHECK(std::all_of(arena.staging(epoch), arena.staging(epoch) + 2048, [](std::byte b) { return b == std::byte{0xff}; }));
    CHECK(arena.staging(first_epoch) != arena.staging(first_epoch + 1));
    CHECK(arena.staging(first_epoch) == arena.staging(first_epoch + 2));
  }
}

}  // namespace
}  // namespace entwine

int main() {
  using namespace entwine;
  return check::run({{"parts of a layout are disjoint", parts_of_a_layout_are_disjoint},
                     {"staging holds what peers send", staging_holds_what_peers_send},
                     {"growth makes room and is geometric", growth_makes_room_and_is_geometric},
                     {"a new arena is quiet and poisoned", a_new_arena_is_quiet_and_poisoned}});
}
