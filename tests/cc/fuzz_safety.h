// Whether what was decoded can be planned: sizes, arenas, signals, orders and tiles, computed once more in 128 bits.
#pragma once

#include <string>

#include "fuzz_input.h"
#include "host/call.h"
#include "schedule/make_plan.h"
#include "schedule/movers.h"
#include "schedule/tile_order.h"

namespace entwine::fuzz {

using Wide = unsigned __int128;

// What is wrong with a decoded call, "" if nothing is.
class Safety {
 public:
  Safety(Input const& in, Problem const& problem) : in_(in), p_(problem), g_(problem.geometry) {}

  std::string find(Random& random) {
    shape();
    uint32_t size = uint32_t(ffi::ByteWidth(p_.in)), out = p_.out == ffi::F32 ? 4 : 2;
    uint32_t parts = in_.target == Target::kHost ? schedule::kHostParts : schedule::kSm90Parts;
    bool kernel = in_.target == Target::kSm90;
    if (kernel && !schedule::is_sm90_tile({g_.tile_m, g_.tile_n}, out, p_.products.gated))
      return why_;  // kernel/sm90.cc refuses those
    // What it refuses or never runs as few rows is not looked at as few rows.
    bool few = kernel && p_.plan.form == schedule::Form::kFewRows && schedule::are_few_rows(p_.op, g_) && !in_.has_whole &&
               p_.products.count == 1;
    uint32_t element = p_.op == Op::kAllGatherMatmul ? size : out;
    arena(schedule::arena_demand(p_.op, g_, parts, element, p_.gathering), tiles_bytes(element), words(parts));
    if (p_.plan.movers != 0) outgoing(element, parts);
    if (few) few_rows(element);
    orders(random);
    products(random);
    gathered();
    planned(out);
    return why_;
  }

 private:
  void expect(bool holds, char const* what) {
    if (!holds && why_.empty()) why_ = what;
  }

  void shape() {
    bool gather = p_.op == Op::kAllGatherMatmul, replicate = p_.op == Op::kMatmulAllReduce;
    expect(g_.ranks == uint64_t(in_.attributes.team_size), "ranks");
    // What the products share, and the joined size of what each has of its own: whole tiles of columns, or all of k.
    Wide joined = 0;
    for (int64_t i = 0; i < in_.attributes.products; ++i) {
      Wide size = Wide(own_size(i));
      bool whole_tiles = gather && in_.attributes.products > 1 && !p_.products.gated;
      joined += whole_tiles ? (size + g_.tile_n - 1) / g_.tile_n * g_.tile_n : size;
    }
    expect(!p_.products.gated || in_.target == Target::kSm90 || g_.tile_n % 2 == 0, "halves of a tile");
    expect(gather ? g_.k == uint64_t(by_rows(in_.x)[2]) && g_.n == joined : g_.k == joined && g_.n == uint64_t(in_.y[2]),
           "n and k");
    Wide rows = Wide(in_.x[0]) * Wide(gather ? in_.x[1] * in_.attributes.team_size : by_rows(in_.x)[1]);
    expect(Wide(g_.ranks) * g_.batch * g_.m_shard - g_.missing == rows, "rows");
    expect(!replicate || (g_.batch == 1 && g_.missing < g_.ranks * uint64_t(g_.m_shard)), "missing rows");
    expect(Wide(g_.row_blocks()) * g_.tile_m >= g_.m_shard && Wide(g_.cols()) * g_.tile_n >= g_.n, "tiles cover");
    expect(g_.row_blocks() >= 1 && g_.cols() >= 1, "no tiles");
    tiles_ = Wide(g_.ranks) * g_.batch * g_.row_blocks() * g_.cols();
    expect(tiles_ * schedule::kSm90Parts < (Wide(1) << 31) && tiles_ == g_.tiles(), "tiles");
    // A worker's accumulators are one tile: not much more than there is of the result.
    expect(in_.target == Target::kSm90 || Wide(g_.tile_m) * g_.tile_n <= Wide(larger(g_.m_shard, 32)) * larger(g_.n, 32),
           "a tile larger than the result");
    expect(p_.plan.raster >= 1 && Wide(p_.plan.raster) * g_.cols() < (Wide(1) << 32), "raster");
  }
  static uint64_t larger(uint64_t a, uint64_t b) { return a < b ? b : a; }

  // Dimensions of an x as (batch, rows, k), however it is stored.
  std::vector<int64_t> by_rows(std::vector<int64_t> x) const {
    if (p_.transpose_x) std::swap(x[1], x[2]);
    return x;
  }

  // n of a product of an all-gather, k of one of the others.
  uint64_t own_size(int64_t i) const {
    bool gather = in_.op == Op::kAllGatherMatmul;
    if (p_.products.gated) i = 0;
    if (gather) return uint64_t((i == 0 ? in_.y : in_.more[i - 1].y)[2]);
    return uint64_t(by_rows(i == 0 ? in_.x : in_.more[i - 1].x)[2]);
  }

  // That the buffers of product `i` go with each other, and with those of the first.
  void fits(uint32_t i) {
    bool gather = p_.op == Op::kAllGatherMatmul;
    std::vector<int64_t> first = by_rows(in_.x), x = i == 0 || gather ? first : by_rows(in_.more[i - 1].x);
    std::vector<int64_t> const& w = i == 0 ? in_.w : in_.more[i - 1].w;
    std::vector<int64_t> const& y = i == 0 || !gather || p_.products.gated ? in_.y : in_.more[i - 1].y;
    std::vector<int64_t> matrix = p_.transpose_w ? std::vector{y[2], x[2]} : std::vector{x[2], y[2]};
    expect(w == matrix && x[0] == first[0] && x[1] == first[1] && y[0] == in_.y[0] && y[1] == in_.y[1], "a product's shapes");
    bool biased = (gather || i == 0) && (in_.attributes.biased >> i & 1) != 0;
    std::vector<int64_t> const& bias = i == 0 ? in_.bias : in_.more[i - 1].bias;
    expect(!biased || bias == std::vector{y[2]}, "a product's bias");
  }

  // Which product a column tile or a k block is of.
  void products(Random& random) {
    schedule::Products const& all = p_.products;
    expect(all.count == uint64_t(in_.attributes.products) && all.count <= schedule::kMaxProducts, "products");
    if (!why_.empty()) return;
    bool gather = p_.op == Op::kAllGatherMatmul;
    uint32_t whole = gather ? g_.n : g_.k, block = gather ? g_.tile_n : 64;  // 64: the kernels' k block
    schedule::Beginnings begin = schedule::beginnings(all, whole, block);
    if (all.gated) {
      fits(0);
      fits(1);
      uint32_t at = uint32_t(random.below(g_.cols()));
      expect(begin.at[0] == 0 && begin.at[1] == g_.cols() && begin.of(at) == 0, "tiles of both products");
      expect(all.find(at, block).block == at && all.find(at, block).product == 0, "the place of a tile of both");
      return;
    }
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < all.count; ++i) {
      fits(i);
      expect(all.size(i, whole) == own_size(i), "the size of a product");
      expect(begin.at[i] == blocks, "where a product begins");
      blocks += (own_size(i) + block - 1) / block;
    }
    expect(begin.at[all.count] == blocks && blocks < (uint64_t{1} << 31), "where products end");
    expect(!gather || blocks == g_.cols(), "tiles of products");
    for (int i = 0; i < 6 && why_.empty(); ++i) {
      uint32_t at = i == 0 ? 0 : i == 1 ? uint32_t(blocks - 1) : uint32_t(random.below(blocks)), of = begin.of(at);
      expect(of < all.count && begin.at[of] <= at && at < begin.at[of + 1], "the product of a block");
      if (all.count == 1) continue;
      schedule::Products::Place place = all.find(at, block);
      expect(place.product == of && place.block == at - begin.at[of], "the place of a block");
    }
  }

  // Elements of a tile as it travels: images of 64 columns.
  Wide staged() const { return Wide(g_.tile_m) * (g_.tile_n > 128 ? (Wide(g_.tile_n) + 63) / 64 * 64 : g_.tile_n); }
  Wide tiles_bytes(uint32_t element) const {
    Wide chunk = p_.op == Op::kAllGatherMatmul ? Wide(g_.batch) * g_.m_shard * g_.k * element
                                               : Wide(g_.batch) * g_.row_blocks() * g_.cols() * staged() * element;
    Wide beside = p_.op == Op::kMatmulReduceScatter ? chunk_of(p_.gathering) : 0;
    return (chunk * (p_.op == Op::kMatmulAllReduce ? 2 : 1) + beside) * (g_.ranks - 1);
  }
  // Strategy "resident": what movers have yet to take, and its flags.
  void outgoing(uint32_t element, uint32_t parts) {
    Wide sets = p_.op == Op::kAllGatherMatmul ? 0 : p_.op == Op::kMatmulAllReduce ? g_.ranks : g_.ranks - 1;
    Wide tiles = tiles_ / g_.ranks, flags = sets * tiles * parts, all = words(parts);
    arena(schedule::arena_demand(p_.op, g_, parts, element, p_.gathering, true),
          tiles_bytes(element) + sets * tiles * staged() * element, flags < all ? all : flags);
    Wide at = schedule::outgoing_offset(p_.op, g_, element, p_.gathering);
    expect(at >= tiles_bytes(element) && at <= tiles_bytes(element) + 4096, "where outgoing tiles begin");
    schedule::MoveOrder order{
        {g_.chunk_rows(), g_.cols(), p_.plan.raster}, g_.ranks, 0, p_.plan.lead, p_.op == Op::kMatmulAllReduce};
    expect(Wide(tiles) * (g_.ranks - 1) * (order.results ? 2 : 1) == order.size(), "jobs of movers");
  }
  Wide words(uint32_t parts) const {
    Wide blocks = p_.gathering.any() ? Wide(p_.gathering.batch) * blocks_of(p_.gathering) : 0;
    if (p_.op == Op::kAllGatherMatmul) return blocks;
    Wide tiles = tiles_ / g_.ranks * parts;
    return p_.op == Op::kMatmulAllReduce ? 2 * tiles : tiles + blocks;
  }
  static Wide chunk_of(schedule::Gathering const& z) { return Wide(z.batch) * z.rows * z.row_bytes; }
  static Wide blocks_of(schedule::Gathering const& z) { return (Wide(z.rows) + z.block_rows - 1) / z.block_rows; }

  // `bytes` and `words` are what is needed at the least.
  void arena(schedule::ArenaDemand const& demand, Wide bytes, Wide words, Wide packets = 0) {
    constexpr Wide kMost = Wide(1) << 62;
    expect(bytes < kMost, "more staging than can be addressed");
    expect(demand.staging_half >= bytes && demand.staging_half <= bytes + 4096, "staging");
    expect(demand.packets_half >= packets && demand.packets_half <= packets + 4096, "packets");
    expect(demand.words_per_source == words, "signal words");
    schedule::ArenaLayout layout{g_.ranks, 0, 0};
    for (int growth = 0; growth < 3; ++growth) {
      layout = schedule::grown(layout, demand);
      expect(layout.fits(demand), "the arena doesn't fit");
      Wide all = Wide(layout.ranks) * layout.words_per_source;
      expect(all < (Wide(1) << 32), "a signal's word isn't a 32-bit number");
      expect(layout.signals_offset() >= layout.arrivals_offset() + all * 4, "arrivals overlap signals");
      expect(layout.packets_offset() >= layout.signals_offset() + all * 4, "signals overlap packets");
      expect(layout.staging_offset(0) >= layout.packets_offset() + Wide(2) * packets, "packets overlap staging");
      expect(layout.bytes() >= layout.staging_offset(0) + Wide(2) * layout.staging_half && layout.bytes() < kMost, "bytes");
    }
  }

  void few_rows(uint32_t element) {
    schedule::FewRows f = schedule::few_rows(p_.op, g_);
    expect(f.rows >= 1 && f.rows <= f.room && f.room <= schedule::kFewRowsMost, "few rows");
    expect(Wide(f.tiles) * schedule::kFewRowsTileN >= f.n && f.slices >= 1 && f.slices <= schedule::kFewRowsSlicesMost, "cut");
    expect(Wide(f.octets) * schedule::kOctet >= f.rows && f.pieces >= 1, "octets and pieces");
    bool gather = p_.op == Op::kAllGatherMatmul;
    Wide sums = Wide(f.tiles) * schedule::kFewRowsTileN * f.octets * schedule::kOctet * element;
    Wide bytes = gather ? Wide(f.packets ? f.rows - f.chunk_rows : f.rows) * f.k * element : Wide(g_.ranks - 1) * sums;
    schedule::ArenaDemand demand =
        schedule::call_demand(p_.op, schedule::Form::kFewRows, g_, schedule::kSm90Parts, element, p_.gathering);
    if (f.packets)
      arena(demand, 0, 0, 2 * bytes);
    else
      arena(demand, bytes, Wide(gather ? f.pieces : f.tiles) * f.slices);
  }

  void orders(Random& random) {
    schedule::Raster raster{g_.chunk_rows(), g_.cols(), p_.plan.raster};
    uint32_t rank = uint32_t(random.below(g_.ranks));
    auto look = [&](auto const& order) {
      expect(order.size() == tiles_, "positions");
      for (int i = 0; i < 6; ++i) {
        uint32_t at = i == 0 ? 0 : i == 1 ? order.size() - 1 : uint32_t(random.below(order.size()));
        schedule::Tile t = order.at(at);
        expect(t.owner < g_.ranks && t.row < g_.chunk_rows() && t.col < g_.cols(), "a tile that doesn't exist");
        expect(raster.index(t.row, t.col) < raster.size(), "a tile's index");
        expect(g_.first_row(t.row) < g_.m_shard && g_.batch_of(t.row) < g_.batch, "a row that doesn't exist");
        expect(p_.op == Op::kMatmulAllReduce || g_.rows(t.row) >= 1, "a row block without rows");
      }
    };
    if (!why_.empty()) return;
    if (p_.op == Op::kAllGatherMatmul)
      look(schedule::AllGatherOrder{raster, g_.ranks, rank});
    else
      look(schedule::ReduceScatterOrder{raster, g_.ranks, rank, p_.plan.lead});
  }

  void gathered() {
    schedule::Gathering const& z = p_.gathering;
    if (!z.any() || !why_.empty()) return;
    expect(z.row_bytes >= 1 && z.block_rows >= 1, "nothing to gather");
    expect(Wide(z.batch) * blocks_of(z) == z.blocks() && z.blocks() < (1u << 24), "row blocks");
    expect(chunk_of(z) == z.chunk_bytes() && chunk_of(z) * g_.ranks < (Wide(1) << 62), "chunk");
    uint32_t last = z.blocks() - 1;
    expect(z.offset(last) + z.block_bytes(last) == z.chunk_bytes(), "the last block's end");
    expect(z.whole_offset(last, g_.ranks - 1, g_.ranks) + z.block_bytes(last) == z.chunk_bytes() * g_.ranks, "the whole's end");
    // Units as the host and, of 96 KB, the kernels cut them.
    Wide units = in_.target == Target::kHost ? host::kUnitsPerBlock : (Wide(z.block_bytes(0)) + 98303) / 98304;
    expect(units >= 1 && units * z.blocks() * (g_.ranks - 1) < (Wide(1) << 32) - 256, "units");
  }

  void planned(uint32_t out) {
    if (!why_.empty()) return;
    schedule::Plan plan = schedule::make_plan(p_.op, in_.target, g_, out);
    expect(plan.raster >= 1 && plan.pushers >= 1 && plan.copiers >= 1 && plan.lead + 1 >= g_.ranks, "make_plan");
    expect(in_.target == Target::kHost || schedule::is_sm90_tile({plan.tile_m, plan.tile_n}, out), "make_plan's tile");
    for (bool tiles_only : {false, true}) {
      schedule::Prediction us = schedule::predict(p_.op, g_, out, tiles_only);
      expect(us.fused_us > 0 && us.fused_us < 1e30 && us.xla_us > 0 && us.xla_us < 1e30, "predict");
    }
  }

  Input const& in_;
  Problem const& p_;
  schedule::Geometry const& g_;
  Wide tiles_ = 0;
  std::string why_;
};

}  // namespace entwine::fuzz
