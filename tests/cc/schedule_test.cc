// Proofs by exhaustion, over thousands of shapes and teams of 1 to 8, of what the executors rely on.
#include <ostream>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "schedule/few_rows.h"
#include "schedule/gathering.h"
#include "schedule/make_plan.h"
#include "schedule/products.h"
#include "schedule/signals.h"
#include "schedule/tile_order.h"
#include "schedule/tile_parts.h"

namespace entwine::schedule {

std::ostream& operator<<(std::ostream& out, Geometry const& g) {
  return out << "ranks " << g.ranks << ", batch " << g.batch << ", m_shard " << g.m_shard << ", n " << g.n << ", tile "
             << g.tile_m << " x " << g.tile_n;
}

namespace {

// Small shapes, where every kind of tail occurs often.
struct Shapes {
  std::mt19937 random{1};
  uint32_t upto(uint32_t most) { return 1 + random() % most; }

  Geometry geometry(uint32_t ranks) {
    uint32_t tile_m = upto(8), tile_n = upto(8);
    return {ranks, upto(3), upto(5 * tile_m), upto(5 * tile_n), upto(20), tile_m, tile_n};
  }
  Raster raster(Geometry const& g) { return {g.chunk_rows(), g.cols(), upto(6)}; }
};

template <typename Check>
void for_all_shapes(uint32_t first_team, uint32_t shapes_per_team, Check check) {
  Shapes shapes;
  for (uint32_t ranks = first_team; ranks <= kMaxRanks; ++ranks)
    for (uint32_t i = 0; i < shapes_per_team; ++i) {
      Geometry g = shapes.geometry(ranks);
      check(g, shapes.raster(g), shapes);
    }
}

void geometry_covers_every_row_and_column() {
  for_all_shapes(1, 3000, [](Geometry const& g, Raster const&, Shapes&) {
    std::vector<uint32_t> rows(g.batch * g.m_shard);
    for (uint32_t row = 0; row < g.chunk_rows(); ++row) {
      CHECK_THAT(g.rows(row) >= 1 && g.rows(row) <= g.tile_m && g.first_row(row) + g.rows(row) <= g.m_shard,
                 g << " row block " << row);
      for (uint32_t i = 0; i < g.rows(row); ++i) ++rows[g.batch_of(row) * g.m_shard + g.first_row(row) + i];
    }
    for (uint32_t times : rows) CHECK_THAT(times == 1, g);
    CHECK_THAT(g.cols() * g.tile_n >= g.n && (g.cols() - 1) * g.tile_n < g.n, g);
    CHECK_THAT(g.tiles() == g.ranks * g.chunk_rows() * g.cols(), g);
  });
}

// Whatever the number of rows: each is some chunk's, a tile's part of `unit` rows lies in one chunk, and rounding chunks up to
// that costs no row block of a multiple of it.
void all_reduce_chunks_cover_every_row() {
  Shapes shapes;
  for (uint32_t ranks = 1; ranks <= kMaxRanks; ++ranks)
    for (uint32_t i = 0; i < 3000; ++i) {
      uint32_t unit = shapes.upto(4), tile_m = unit * shapes.upto(4), rows = shapes.upto(6 * ranks * tile_m);
      Geometry g = all_reduce_geometry(ranks, rows, 1, 1, tile_m, 1, unit);
      CHECK_THAT(g.all_rows() == rows && g.batch == 1 && g.m_shard % unit == 0, g);
      CHECK_THAT(g.row_blocks() == ceil_div(ceil_div(rows, ranks), tile_m), g << ", " << rows << " rows");
      std::vector<uint32_t> covered(rows);
      for (uint32_t owner = 0; owner < ranks; ++owner)
        for (uint32_t row = 0; row < g.chunk_rows(); ++row) {
          Tile t{owner, row, 0};
          for (uint32_t j = 0; j < g.rows(t); ++j) ++covered[owner * g.m_shard + g.first_row(row) + j];
        }
      for (uint32_t times : covered) CHECK_THAT(times == 1, g << ", " << rows << " rows");
    }
}

// sm_90's all-reduce, whatever its tile: the images that owners store and peers collect are those of y, each once.
void images_of_tile_parts_cover_y_once() {
  Shapes shapes;
  for (TileShape tile : kSm90Tiles)
    for (uint32_t ranks = 1; ranks <= kMaxRanks; ++ranks)
      for (uint32_t i = 0; i < 60; ++i) {
        if (!is_sm90_tile(tile, i % 2 ? 4 : 2)) continue;
        uint32_t image_cols = i % 2 ? 32 : 64, rows = shapes.upto(i % 3 ? 4000 : 200), n = shapes.upto(1200);
        Geometry g = all_reduce_geometry(ranks, rows, n, 1, tile.m, tile.n, chunk_unit(Target::kSm90));
        // y in blocks of half an image: only where images don't divide a part's columns its last one repeats such a block.
        uint32_t half = image_cols / 2, down = ceil_div(rows, kSm90PartRows), across = ceil_div(n, half);
        uint32_t cols = TileParts{tile}.cols(), most = cols % image_cols ? 2 : 1;
        std::vector<uint32_t> covered(down * across);
        for (uint32_t owner = 0; owner < ranks; ++owner)
          for (uint32_t row = 0; row < g.chunk_rows(); ++row)
            for (uint32_t col = 0; col < g.cols(); ++col)
              for (uint32_t part = 0; part < kSm90Parts; ++part) {
                PartInside at = part_inside({tile}, {owner, row, col}, part, g.m_shard, g.all_rows(), n, image_cols);
                for (uint32_t image = 0; image < at.images; ++image) {
                  uint32_t begin = image_begin(cols, image_cols, image), first = at.col + begin;
                  CHECK_THAT(at.row % kSm90PartRows == 0 && at.row < rows && first % half == 0 && first < n, g);
                  CHECK_THAT(begin + image_cols <= cols, g);
                  for (uint32_t col : {first, first + half})
                    if (col < n) ++covered[at.row / kSm90PartRows * across + col / half];
                }
              }
        for (uint32_t times : covered) CHECK_THAT(times >= 1 && times <= most, g << ", " << rows << " rows: " << times);
      }
}

// The row blocks of all ranks' chunks cover the whole array once, and each is where its rows are.
void gatherings_cover_every_row() {
  for_all_shapes(2, 2000, [](Geometry const& g, Raster const&, Shapes& shapes) {
    Gathering z{g.batch, g.m_shard, shapes.upto(9), shapes.upto(8)};
    CHECK(z.any() && !Gathering{}.any());
    CHECK_EQ(Gathering{}.blocks(), 0u);
    std::vector<uint32_t> chunk(z.chunk_bytes()), whole(z.chunk_bytes() * g.ranks);
    for (uint32_t block = 0; block < z.blocks(); ++block) {
      CHECK(z.block_bytes(block) >= z.row_bytes && z.block_bytes(block) <= z.block_rows * z.row_bytes);
      for (uint64_t i = 0; i < z.block_bytes(block); ++i) {
        ++chunk[z.offset(block) + i];
        for (uint32_t source = 0; source < g.ranks; ++source) {
          ++whole[z.whole_offset(block, source, g.ranks) + i];
          uint64_t row = (z.offset(block) + i) / z.row_bytes, batch = row / z.rows, in_batch = row % z.rows;
          CHECK_EQ((z.whole_offset(block, source, g.ranks) + i) / z.row_bytes, (batch * g.ranks + source) * z.rows + in_batch);
        }
      }
    }
    for (uint32_t times : chunk) CHECK_THAT(times == 1, g);
    for (uint32_t times : whole) CHECK_THAT(times == 1, g);
    // all-gather's x is cut as the matmul cuts it.
    Gathering x{g.batch, g.m_shard, g.k, g.tile_m};
    CHECK_EQ(x.blocks(), g.chunk_rows());
    for (uint32_t row = 0; row < g.chunk_rows(); ++row) {
      CHECK_EQ(x.block_bytes(row), uint64_t(g.rows(row)) * g.k);
      CHECK_EQ(x.offset(row), (uint64_t(g.batch_of(row)) * g.m_shard + g.first_row(row)) * g.k);
    }
  });
}

void peer_slots_number_all_peers() {
  for (uint32_t ranks = 1; ranks <= kMaxRanks; ++ranks)
    for (uint32_t self = 0; self < ranks; ++self) {
      std::set<uint32_t> slots;
      for (uint32_t peer = 0; peer < ranks; ++peer) {
        if (peer == self) continue;
        slots.insert(peer_slot(self, peer));
        CHECK_EQ(peer_of_slot(self, peer_slot(self, peer)), peer);
        CHECK(peer_slot(self, peer) < ranks - 1);
      }
      CHECK_EQ(slots.size(), ranks - 1);
    }
}

void raster_index_is_the_inverse_of_at() {
  for (uint32_t rows = 1; rows <= 13; ++rows)
    for (uint32_t cols = 1; cols <= 9; ++cols)
      for (uint32_t group = 1; group <= 15; ++group) {
        Raster raster{rows, cols, group};
        std::set<std::pair<uint32_t, uint32_t>> cells;
        for (uint32_t i = 0; i < raster.size(); ++i) {
          Raster::Cell cell = raster.at(i);
          CHECK(cell.row < rows && cell.col < cols);
          CHECK_EQ(raster.index(cell.row, cell.col), i);
          cells.insert({cell.row, cell.col});
        }
        CHECK_EQ(cells.size(), raster.size());
      }
}

// positions[owner][index]: where `order` has the tile of that raster index of that owner's chunk.
template <typename Order>
std::vector<std::vector<uint32_t>> positions(Geometry const& g, Raster const& raster, Order const& order) {
  constexpr uint32_t kNowhere = ~0u;
  std::vector<std::vector<uint32_t>> positions(g.ranks, std::vector<uint32_t>(g.chunk_tiles(), kNowhere));
  CHECK_THAT(order.size() == g.tiles(), g);
  for (uint32_t p = 0; p < order.size(); ++p) {
    Tile t = order.at(p);
    CHECK_THAT(t.owner < g.ranks && t.row < g.chunk_rows() && t.col < g.cols(), g);
    uint32_t& at = positions[t.owner][raster.index(t.row, t.col)];
    CHECK_THAT(at == kNowhere, g << ": a tile at both " << at << " and " << p);
    at = p;
  }
  return positions;  // as many tiles as positions, none twice: each exactly once
}

// The invariant behind progress, for any op: number each rank's jobs in the order in which it claims them. If whoever waits at
// position p waits only for jobs at positions < p of their ranks, then the lowest position at which anybody waits is served:
// the job it wants stands lower, so nobody waits before it on its rank, and it gets claimed and finished with one worker a
// rank. Jobs that others wait for need not be free of waiting themselves for that; here they are.
void reduce_scatter_order_is_complete_and_never_deadlocks() {
  for_all_shapes(1, 3000, [](Geometry const& g, Raster const& raster, Shapes& shapes) {
    uint32_t lead = shapes.random() % 3 == 0 ? 0 : shapes.random() % (g.tiles() + 3);
    std::vector<std::vector<std::vector<uint32_t>>> at;  // [rank][owner][index]
    for (uint32_t r = 0; r < g.ranks; ++r) at.push_back(positions(g, raster, ReduceScatterOrder{raster, g.ranks, r, lead}));
    for (uint32_t r = 0; r < g.ranks; ++r)
      for (uint32_t i = 0; i < g.chunk_tiles(); ++i)
        for (uint32_t peer = 0; peer < g.ranks; ++peer)
          if (peer != r) CHECK_THAT(at[peer][r][i] < at[r][r][i], g << ", lead " << lead << ", tile " << i);
  });
}

// All-reduce: a rank's jobs are its tiles, as for reduce-scatter, and then what it collects, which waits for tiles; so any
// order of collecting will do, as long as it is complete.
void collect_order_is_complete_and_as_tiles_are_made() {
  for_all_shapes(1, 3000, [](Geometry const& g, Raster const& raster, Shapes& shapes) {
    uint32_t parts = shapes.upto(4), r = shapes.random() % g.ranks;
    CollectOrder order{raster, g.ranks, r, parts};
    CHECK_THAT(order.size() == (g.ranks - 1) * g.chunk_tiles() * parts, g);
    std::set<std::vector<uint32_t>> jobs;
    uint32_t last = 0;
    for (uint32_t i = 0; i < order.size(); ++i) {
      CollectOrder::Job job = order.at(i);
      CHECK_THAT(job.owner != r && job.owner < g.ranks && job.index < g.chunk_tiles() && job.part < parts, g);
      CHECK_THAT(job.index >= last, g << ": raster index outermost, as owners make their tiles");
      last = job.index;
      jobs.insert({job.owner, job.index, job.part});
    }
    CHECK_THAT(jobs.size() == order.size(), g << ": each once");
  });
}

void reduce_scatter_order_is_paced() {
  for_all_shapes(2, 3000, [](Geometry const& g, Raster const& raster, Shapes& shapes) {
    uint32_t peers = g.ranks - 1, lead = shapes.random() % (g.tiles() + 3), r = shapes.random() % g.ranks;
    ReduceScatterOrder order{raster, g.ranks, r, lead};
    uint32_t remote = 0, own = 0;
    for (uint32_t p = 0; p < order.size(); ++p) {
      Tile t = order.at(p);
      if (t.owner == r) {
        CHECK_THAT(raster.index(t.row, t.col) == own, g << ": own tiles in raster order");
        ++own;
      } else {
        CHECK_THAT(t.owner == (r + 1 + remote % peers) % g.ranks, g << ": remote tiles go round the owners");
        CHECK_THAT(raster.index(t.row, t.col) == remote / peers, g << ": raster index outermost");
        ++remote;
      }
      // From the lead to the last group, remote tiles stay `lead` ahead of the own ones.
      uint32_t ahead = smaller(larger(lead, peers), g.chunk_tiles() * peers);
      if (remote + peers > g.chunk_tiles() * peers) continue;
      CHECK_THAT(remote <= ahead + own * peers, g << ": no burst");
      if (own > 0) CHECK_THAT(remote >= ahead + (own - 1) * peers, g << ": no gap");
    }
  });
}

// All-gather: a rank's jobs are its pushes, which never wait, and then its tiles. A host worker claims a tile earlier than
// that, but waits for a row block only after the last push is claimed.
void all_gather_order_is_complete_and_never_deadlocks() {
  for_all_shapes(1, 3000, [](Geometry const& g, Raster const& raster, Shapes& shapes) {
    uint32_t units = shapes.upto(4);
    std::vector<PushOrder> pushes;
    for (uint32_t r = 0; r < g.ranks; ++r) pushes.push_back({g.ranks, r, g.chunk_rows(), units});
    // pushed[source][destination][row]: the job at which the row block's last piece is pushed.
    std::vector pushed(g.ranks, std::vector(g.ranks, std::vector<uint32_t>(g.chunk_rows())));
    for (uint32_t r = 0; r < g.ranks; ++r) {
      std::vector pieces(g.ranks, std::vector(g.chunk_rows(), std::vector<uint32_t>(units)));
      std::vector kept(g.chunk_rows(), std::vector<uint32_t>(units));
      for (uint32_t u = 0; u < pushes[r].size(); ++u) {
        PushOrder::Unit unit = pushes[r].at(u);
        CHECK_THAT(unit.destination != r && unit.destination < g.ranks && unit.row < g.chunk_rows() && unit.piece < units, g);
        ++pieces[unit.destination][unit.row][unit.piece];
        kept[unit.row][unit.piece] += unit.first;
        pushed[r][unit.destination][unit.row] = u;
      }
      for (uint32_t d = 0; d < g.ranks; ++d)
        for (auto const& row : pieces[d])
          for (uint32_t times : row) CHECK_THAT(times == (d == r ? 0 : 1), g << ": each piece once to each peer");
      for (auto const& row : kept)
        for (uint32_t times : row) CHECK_THAT(times == (g.ranks > 1), g << ": each piece is kept once");
    }
    for (uint32_t r = 0; r < g.ranks; ++r) {
      AllGatherOrder order{raster, g.ranks, r};
      positions(g, raster, order);
      for (uint32_t p = 0; p < order.size(); ++p) {
        Tile t = order.at(p);
        CHECK_THAT((t.owner == r) == (p < g.chunk_tiles()), g << ": the own chunk comes first");
        if (t.owner != r) CHECK_THAT(pushed[t.owner][r][t.row] < pushes[r].size() + p, g << ": row block " << t.row);
      }
    }
  });
}

// Copies: each piece of each peer's chunk once, and the chunks in the order in which they come.
void copies_are_complete_and_in_the_order_of_pushes() {
  for_all_shapes(2, 1000, [](Geometry const& g, Raster const&, Shapes& shapes) {
    uint32_t units = shapes.upto(4), r = shapes.random() % g.ranks;
    CopyOrder order{g.ranks, r, g.chunk_rows(), units};
    std::set<std::vector<uint32_t>> seen;
    uint32_t last = 0;
    for (uint32_t u = 0; u < order.size(); ++u) {
      auto [source, row, piece] = order.at(u);
      CHECK_THAT(source != r && source < g.ranks && row < g.chunk_rows() && piece < units, g);
      CHECK_THAT(seen.insert({source, row, piece}).second, g << ": a piece twice");
      // The unit that pushes it: sources keep the same pace, so later copies are of later pushes.
      PushOrder pushes{g.ranks, source, g.chunk_rows(), units};
      uint32_t push = 0;
      for (;; ++push) {
        PushOrder::Unit p = pushes.at(push);
        if (p.destination == r && p.row == row && p.piece == piece) break;
      }
      CHECK_THAT(u == 0 || push > last, g << ": copy " << u << " is of push " << push << " after " << last);
      last = push;
    }
    CHECK_EQ(seen.size(), size_t(g.ranks - 1) * g.chunk_rows() * units);
  });
}

// A chunk is pushed to the peers in the order in which they get to it.
void pushes_come_in_the_order_of_need() {
  for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
    for (uint32_t r = 0; r < ranks; ++r) {
      Raster raster{3, 2, 2};
      PushOrder pushes{ranks, r, 3, 2};
      for (uint32_t u = 0; u < pushes.size(); ++u) {
        PushOrder::Unit unit = pushes.at(u);
        uint32_t step = u / (3 * 2);
        CHECK_EQ(unit.row, u / 2 % 3);
        CHECK_EQ((AllGatherOrder{raster, ranks, unit.destination}.at((step + 1) * raster.size()).owner), r);
      }
    }
}

// Every word of an arena has one writer, is raised once a call, and is waited for.
void signal_words_have_one_writer_and_all_are_awaited() {
  for_all_shapes(2, 3000, [](Geometry const& g, Raster const& raster, Shapes& shapes) {
    uint32_t parts = shapes.upto(4);
    for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
      bool gather = op == Op::kAllGatherMatmul, replicate = op == Op::kMatmulAllReduce;
      bool scatter = op == Op::kMatmulReduceScatter;
      Gathering beside{shapes.upto(2), shapes.upto(20) - 1, 8, shapes.upto(8)};
      if (beside.rows == 0) beside = {};
      uint32_t used = signals_per_source(op, g, parts, beside), first_gathered = first_gathered_signal(op, g, parts);
      uint32_t words_per_source = used + shapes.random() % 5;
      std::vector<int> writer(g.ranks * words_per_source, -1);
      uint32_t destination = shapes.random() % g.ranks, raised = 0, awaited = 0;
      for (uint32_t source = 0; source < g.ranks; ++source) {
        if (source == destination) continue;
        auto raise = [&](uint32_t index) {
          CHECK_THAT(index < used, g << ": word " << index << " of " << used);
          int& w = writer[signal_word(source, words_per_source, index)];
          CHECK_THAT(w == -1, g << ": a word of both " << w << " and " << source);
          w = static_cast<int>(source);
          ++raised;
        };
        if (gather) {
          for (uint32_t row = 0; row < g.chunk_rows(); ++row) raise(gathered_signal(first_gathered, row));
        } else {
          for (uint32_t b = 0; b < beside.blocks() && scatter; ++b) raise(gathered_signal(first_gathered, b));
          ReduceScatterOrder order{raster, g.ranks, source, 2 * g.ranks};
          for (uint32_t p = 0; p < order.size(); ++p) {
            Tile t = order.at(p);
            for (uint32_t part = 0; part < parts && t.owner == destination; ++part)
              raise(partial_signal(raster.index(t.row, t.col), part, parts));
            for (uint32_t part = 0; part < parts && replicate && t.owner == source; ++part)
              raise(result_signal(g.chunk_tiles(), raster.index(t.row, t.col), part, parts));
          }
        }
      }
      // What the destination waits for, once for each word.
      std::set<uint32_t> waits;
      auto await = [&](uint32_t source, uint32_t index) {
        uint32_t word = signal_word(source, words_per_source, index);
        CHECK_THAT(writer[word] == static_cast<int>(source), g << ": a wait for word " << word << " that nobody raises");
        if (waits.insert(word).second) ++awaited;
      };
      for (uint32_t p = 0; p < g.tiles(); ++p) {
        if (gather) {
          Tile t = AllGatherOrder{raster, g.ranks, destination}.at(p);
          if (t.owner != destination) await(t.owner, gathered_signal(first_gathered, t.row));
        } else {
          Tile t = ReduceScatterOrder{raster, g.ranks, destination, 2 * g.ranks}.at(p);
          if (t.owner != destination) continue;
          for (uint32_t source = 0; source < g.ranks; ++source)
            for (uint32_t part = 0; source != destination && part < parts; ++part)
              await(source, partial_signal(raster.index(t.row, t.col), part, parts));
        }
      }
      CollectOrder collect{raster, g.ranks, destination, parts};
      for (uint32_t i = 0; i < collect.size() && replicate; ++i) {
        CollectOrder::Job job = collect.at(i);
        await(job.owner, result_signal(g.chunk_tiles(), job.index, job.part, parts));
      }
      CopyOrder copies{g.ranks, destination, scatter ? beside.blocks() : 0, 1};
      for (uint32_t u = 0; u < copies.size(); ++u)
        await(copies.at(u).source, gathered_signal(first_gathered, copies.at(u).row));
      CHECK_THAT(raised == (g.ranks - 1) * used && awaited == raised,
                 g << ": " << raised << " raised, " << awaited << " awaited");
    }
  });
}

void epochs_wrap_around() {
  for (uint32_t epoch : {0u, 1u, 0x7ffffffeu, 0x7fffffffu, 0x80000000u, 0xfffffffeu, 0xffffffffu}) {
    uint32_t wanted = signal_value(epoch);
    CHECK(signal_reached(signal_value(epoch), wanted));
    CHECK(signal_reached(signal_value(epoch + 1), wanted));  // a peer that is one call ahead
    for (uint32_t ago = 1; ago < 1000; ++ago)
      CHECK_THAT(!signal_reached(signal_value(epoch - ago), wanted), ago << " calls ago");
    for (uint32_t bit = 0; bit < 32; ++bit) CHECK_THAT(!signal_reached(signal_value(epoch - (1u << bit)), wanted), "2^" << bit);
    CHECK(!signal_reached(signal_value(epoch - 0xfffffffeu), wanted));  // 2^32 - 2 calls ago
  }
}

void few_rows_are_cut_completely() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
      for (uint32_t batch : {1u, 3u})
        for (uint32_t m_shard : {1u, 5u, 16u, 64u})
          for (uint32_t n : {8u, 1792u, 4096u, 8192u, 28672u})
            for (uint32_t k : {8u, 520u, 3584u, 8192u}) {
              Geometry g{ranks, batch, m_shard, n, k, 1, 1};
              if (op == Op::kMatmulAllReduce)
                g = all_reduce_geometry(ranks, batch * m_shard, n, k, 1, 1, chunk_unit(Target::kSm90));
              if (!are_few_rows(op, g)) continue;
              FewRows f = few_rows(op, g);
              CHECK(f.rows == (op == Op::kMatmulAllReduce ? batch * m_shard : ranks * batch * m_shard));
              CHECK(f.room >= f.rows && f.room <= kFewRowsMost && f.tiles * kFewRowsTileN >= n);
              // Portions of a tile's rows are a power of two, and clusters no larger than a GPU takes.
              CHECK(f.slices >= 1 && f.slices <= kFewRowsSlicesMost && (f.slices & (f.slices - 1)) == 0 &&
                    f.room % f.slices == 0);
              CHECK(f.slices == 1 || f.tiles <= clusters_at_once(f.slices));
              ArenaDemand demand = call_demand(op, Form::kFewRows, g, kSm90Parts, 2);
              CHECK(f.octets * kOctet >= f.rows && f.octets * kOctet < f.rows + kOctet);
              // Packets: x of up to 16 rows, where a CTA has room for its slice; 512 KiB of sums in bfloat16, of which the
              // kernel of the largest room knows none.
              bool gather = op == Op::kAllGatherMatmul;
              if (gather) CHECK_EQ(f.packets, f.rows <= 16 && ceil_div(ceil_div(k, 64), f.slices) <= 64);
              if (!gather && f.room == kFewRowsMost) CHECK(!f.packets);
              if (op == Op::kMatmulAllReduce && f.room != kFewRowsMost && ranks == 2) CHECK_EQ(f.packets, f.rows * n <= 262144);
              if (f.packets) {  // half of each is data, and there is nothing else
                CHECK(demand.words_per_source == 0 && demand.staging_half == 0);
                demand = {0, demand.packets_half / 2};
              } else {
                CHECK(demand.words_per_source == f.slices * (gather ? f.pieces : f.tiles));
              }
              // Peers' rows of x, the own ones beside them where TMA reads all; peers' sums of whole octets and tiles.
              uint64_t values = gather ? uint64_t(f.packets ? f.rows - f.chunk_rows : f.rows) * k
                                       : uint64_t(ranks - 1) * f.octets * kOctet * f.tiles * kFewRowsTileN;
              CHECK(demand.staging_half >= values * 2 && demand.staging_half < values * 2 + 1024);
            }
}

void plans_are_sound() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (Target target : {Target::kHost, Target::kSm90})
      for (uint32_t ranks = 2; ranks <= kMaxRanks; ++ranks)
        for (uint32_t rows : {1u, 100u, 512u, 8192u})
          for (uint32_t n : {8u, 1792u, 8192u})
            for (uint32_t k : {8u, 512u, 1024u, 4096u, 16384u})
              for (uint32_t bytes : {2u, 4u}) {
                Plan plan = make_plan(op, target, {ranks, 1, rows, n, k, 1, 1}, bytes);
                CHECK(plan.raster >= 1 && plan.pushers >= 1 && plan.copiers >= 1);
                CHECK(target == Target::kHost ? plan.tile_m >= 1 && plan.tile_n >= 1
                                              : is_sm90_tile({plan.tile_m, plan.tile_n}, bytes));
                CHECK_THAT(plan.lead >= ranks - 1, plan.lead);
              }
}

// Each block of each product once, in order, and the two ways to find it agree.
void products_lie_one_after_another() {
  Shapes shapes;
  for (int i = 0; i < 2000; ++i) {
    uint32_t block = shapes.upto(8), at = 0;
    Products products{shapes.upto(kMaxProducts), {}};
    for (uint32_t p = 0; p < products.count; ++p) products.sizes[p] = shapes.upto(40);
    uint32_t whole = static_cast<uint32_t>(products.joined(block));
    Beginnings begin = beginnings(products, products.count == 1 ? products.sizes[0] : whole, block);
    for (uint32_t p = 0; p < products.count; ++p) {
      CHECK_EQ(begin.at[p], at);
      for (uint32_t b = 0; b < ceil_div(products.sizes[p], block); ++b, ++at) {
        CHECK_EQ(begin.of(at), p);
        Products::Place place = products.find(at, block);
        CHECK(place.product == p && place.block == b);
      }
    }
    CHECK_EQ(begin.at[products.count], at);
    CHECK_EQ(whole, at * block);
    CHECK(products.count == 1 || products.size(1, whole) == products.sizes[1]);
    CHECK_EQ(Products{}.size(0, whole), whole);
  }
}

// Half of each tile's columns are one's and half the other's, so that these cover y; and plans have tiles whose halves meet in
// a thread.
void gated_products_share_tiles() {
  Shapes shapes;
  for (int i = 0; i < 500; ++i) {
    uint32_t half = shapes.upto(8), n = shapes.upto(60);
    Products products{2, {n, n}, true};
    Geometry g{shapes.upto(8), 1, shapes.upto(3000), static_cast<uint32_t>(products.joined(2 * half)), 64, 8, 2 * half};
    CHECK(products.results() == 1 && g.cols() == ceil_div(n, half));
    CHECK(columns(Op::kAllGatherMatmul, g, products, 0) == n && columns(Op::kAllGatherMatmul, g, products, 1) == n);
    Beginnings begin = beginnings(products, g.n, g.tile_n);
    CHECK_EQ(begin.at[1], g.cols());
    for (uint32_t at = 0; at < g.cols(); ++at) CHECK(begin.of(at) == 0 && products.find(at, g.tile_n).block == at);
    for (uint32_t bytes : {2u, 4u}) {
      Plan plan = make_plan(Op::kAllGatherMatmul, Target::kSm90, g, bytes, 2, true);
      CHECK(is_sm90_tile({plan.tile_m, plan.tile_n}, bytes, true) && plan.form == Form::kTiles);
      // XLA reads and writes once more.
      CHECK(predict(Op::kAllGatherMatmul, g, bytes, true, 2, true).xla_us >
            predict(Op::kAllGatherMatmul, g, bytes, true).xla_us);
      // What is gathered beside costs the kernel a part of the link, and XLA a collective more.
      Prediction alone = predict(Op::kMatmulReduceScatter, g, bytes, true),
                 beside = predict(Op::kMatmulReduceScatter, g, bytes, true, 2, false, 1e8);
      CHECK(beside.fused_us >= alone.fused_us && beside.xla_us > alone.xla_us);
    }
  }
}

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return check::run(
      {{"geometry covers every row and column", geometry_covers_every_row_and_column},
       {"all-reduce chunks cover every row", all_reduce_chunks_cover_every_row},
       {"images of tile parts cover y once", images_of_tile_parts_cover_y_once},
       {"peer slots number all peers", peer_slots_number_all_peers},
       {"raster index is the inverse of at", raster_index_is_the_inverse_of_at},
       {"reduce-scatter order is complete and never deadlocks", reduce_scatter_order_is_complete_and_never_deadlocks},
       {"reduce-scatter order is paced", reduce_scatter_order_is_paced},
       {"collect order is complete and as tiles are made", collect_order_is_complete_and_as_tiles_are_made},
       {"all-gather order is complete and never deadlocks", all_gather_order_is_complete_and_never_deadlocks},
       {"pushes come in the order of need", pushes_come_in_the_order_of_need},
       {"gatherings cover every row", gatherings_cover_every_row},
       {"copies are complete and in the order of pushes", copies_are_complete_and_in_the_order_of_pushes},
       {"signal words have one writer and all are awaited", signal_words_have_one_writer_and_all_are_awaited},
       {"epochs wrap around", epochs_wrap_around},
       {"products lie one after another", products_lie_one_after_another},
       {"gated products share tiles", gated_products_share_tiles},
       {"few rows are cut completely", few_rows_are_cut_completely},
       {"plans are sound", plans_are_sound}});
}
