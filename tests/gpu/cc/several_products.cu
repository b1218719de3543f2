#include "several_products.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "exact_cases.h"
#include "fill.cuh"

namespace teams {
namespace {

using namespace entwine;
using schedule::Geometry;
using schedule::Op;
using schedule::Products;
using schedule::Transport;

constexpr uint32_t kMost = schedule::kMaxProducts;

// Of one rank's array in one case: x, w and bias of product 0, then those of product 1, ...; and what is gathered beside.
__host__ __device__ uint32_t seed_of(uint32_t seed, uint32_t rank, uint32_t product, uint32_t what) {
  return ((seed * 8 + rank) * kMost + product) * 4 + what;
}
constexpr uint32_t kX = 0, kW = 1, kBias = 2, kBeside = 3;

__global__ void fill(uint8_t* to, Operands type, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) put(to, type, i, element(seed, i));
}
// (k, n), or (n, k).
__global__ void fill_matrix(uint8_t* w, Operands type, uint32_t n, uint32_t k, bool transposed, uint32_t seed) {
  for (uint32_t i = first_index(); i < n * k; i += index_step()) {
    uint32_t row = i / n, col = i - row * n;
    put(w, type, transposed ? col * k + row : i, element(seed, i));
  }
}
__global__ void fill_numbers(float* to, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) to[i] = static_cast<float>(3 * element(seed, i));
}

struct Sum {
  Op op;
  Geometry geometry;
  Products products;
  uint32_t seed, rank, product;  // product: of all-gather
  float scale;
  bool finishes;   // bias and relu
  bool up_biased;  // of gated products
};

// Row `row` of x_rank's x times column `col` of w_rank's w; all-gather has one x.
__device__ int product_of(Sum const& s, uint32_t product, uint32_t k, uint32_t n, uint32_t x_rank, uint32_t row,
                          uint32_t w_rank, uint32_t col) {
  uint32_t x = seed_of(s.seed, x_rank, s.op == Op::kAllGatherMatmul ? 0 : product, kX);
  uint32_t w = seed_of(s.seed, w_rank, product, kW);
  int sum = 0;
  for (uint32_t p = 0; p < k; ++p) sum += element(x, row * k + p) * element(w, p * n + col);
  return sum;
}

__device__ float wanted(Sum const& s, uint32_t n, uint32_t index) {
  Geometry const& g = s.geometry;
  uint32_t row = index / n, col = index - row * n, chunk = row / g.m_shard, in_chunk = row - chunk * g.m_shard;
  int sum = 0;
  if (s.op == Op::kAllGatherMatmul) {
    uint32_t batch = chunk / g.ranks, owner = chunk - batch * g.ranks;
    sum = product_of(s, s.product, g.k, n, owner, batch * g.m_shard + in_chunk, s.rank, col);
  } else {
    uint32_t x_row = s.op == Op::kMatmulAllReduce ? row : (chunk * g.ranks + s.rank) * g.m_shard + in_chunk;
    for (uint32_t r = 0; r < g.ranks; ++r) {
      int partial = 0;  // travels in y's type, which holds integers up to 256
      for (uint32_t i = 0; i < s.products.count; ++i) partial += product_of(s, i, s.products.sizes[i], n, r, x_row, r, col);
      if (partial > 256 || partial < -256) return 1e30f;  // what no kernel can give: the case is a bad one
      sum += partial;
    }
  }
  float y = static_cast<float>(sum) * s.scale;
  uint32_t of = s.op == Op::kAllGatherMatmul ? s.rank : 0;
  auto bias = [&](uint32_t product) { return static_cast<float>(3 * element(seed_of(s.seed, of, product, kBias), col)); };
  if (s.finishes) y = fmaxf(y + bias(s.product), 0);
  if (!s.products.gated) return y;
  uint32_t batch = chunk / g.ranks, owner = chunk - batch * g.ranks;
  float up = static_cast<float>(product_of(s, 1, g.k, n, owner, batch * g.m_shard + in_chunk, s.rank, col));
  return y * (s.up_biased ? up + bias(1) : up) + 0.0f;  // no negative zero
}

struct Verdict {
  unsigned long long bad, first;  // first: ~(index counted from the guard) << 32 | bits
};
__device__ void judge(Verdict* verdict, uint32_t index, uint32_t got, bool right) {
  if (right) return;
  atomicAdd(&verdict->bad, 1ull);
  atomicMax(&verdict->first, static_cast<unsigned long long>(~index) << 32 | got);
}

// Bit for bit, but for the sign of a zero; and the guards.
__global__ void compare(uint8_t const* guarded, Sum s, uint32_t n, uint32_t count, bool float_out, bool f16, Verdict* verdict) {
  uint32_t bytes = float_out ? 4 : 2, guard = kGuardBytes / bytes;
  for (uint32_t i = first_index(); i < count + 2 * guard; i += index_step()) {
    bool inside = i >= guard && i < guard + count;
    float want = inside ? wanted(s, n, i - guard) : 0;
    uint32_t got = float_out ? reinterpret_cast<uint32_t const*>(guarded)[i] : reinterpret_cast<uint16_t const*>(guarded)[i];
    uint32_t right = float_out ? ~0u : 0xffffu;
    if (inside)
      right = float_out ? __float_as_uint(want)
              : f16     ? __half_as_ushort(__float2half_rn(want))
                        : __bfloat16_as_ushort(__float2bfloat16_rn(want));
    uint32_t zero = float_out ? 0x80000000u : 0x8000u;
    judge(verdict, i, got, got == right || (inside && got == zero && right == 0));
  }
}
// What was gathered: (batch, rank, row, column), each rank's with a seed of its own.
__global__ void compare_gathered(uint8_t const* guarded, Operands type, Chunk chunk, uint32_t ranks, uint32_t seed,
                                 uint32_t what, Verdict* verdict) {
  uint32_t bytes = is_float8(type) ? 1 : 2, guard = kGuardBytes / bytes, part = chunk.rows * chunk.cols;
  uint32_t count = chunk.elements() * ranks;
  for (uint32_t i = first_index(); i < count + 2 * guard; i += index_step()) {
    uint32_t got = bytes == 1 ? guarded[i] : reinterpret_cast<uint16_t const*>(guarded)[i], right = bytes == 1 ? 0xff : 0xffff;
    if (i >= guard && i < guard + count) {
      uint32_t at = i - guard, batch = at / part / ranks, source = at / part - batch * ranks;
      alignas(2) uint8_t holds[2];
      put(holds, type, 0, element(seed_of(seed, source, 0, what), batch * part + at % part));
      right = bytes == 1 ? holds[0] : holds[0] | holds[1] << 8;
    }
    judge(verdict, i, got, got == right);
  }
}

struct Shape {
  uint32_t batch, m_shard, other;  // other: the size that all products have, k of all-gather and n of the others
  std::vector<uint32_t> sizes;
  bool gated = false;
};
// Ends of tiles and of k blocks within and at the ends of products; products shorter than one; two, three and four. All are
// smaller than shapes of the other tests, for whose arena they are.
std::vector<Shape> shapes_of(bool gather, bool float8) {
  if (gather) {
    uint32_t k = float8 ? 144 : 72;
    std::vector<Shape> shapes{
        {1, 100, k, {136, 8}}, {3, 129, k, {8, 520, 264}}, {1, 300, k, {256, 40, 8, 128}}, {1, 1, k, {264, 264}}};
    // Gated: less than half a tile, and one column of eight or all of the next; one k block, and several.
    if (!float8)
      for (Shape const& gated :
           {Shape{1, 300, k, {136, 136}}, {2, 129, 264, {520, 520}}, {1, 260, 8, {40, 40}}, {1, 1, k, {128, 128}}})
        shapes.push_back({gated.batch, gated.m_shard, gated.other, gated.sizes, true});
    return shapes;
  }
  if (float8) return {{1, 100, 136, {144, 16}}, {3, 129, 264, {16, 272, 128}}, {1, 300, 520, {128, 48, 16, 128}}};
  return {{1, 100, 136, {72, 8}}, {3, 129, 264, {8, 264, 64}}, {1, 300, 520, {64, 40, 8, 128}}, {1, 1, 8, {128, 128}}};
}

struct Buffers {
  uint8_t *x[kMost], *w[kMost], *y[kMost], *beside, *whole;  // y and whole: of the guard
  float* bias[kMost];
  Verdict* verdicts;  // of each y, then of the whole
};

class Case {
 public:
  Case(EmulatedTeam& team, Variant const& variant, Shape const& shape, uint32_t seed, float scale)
      : team_(team), v_(variant), seed_(seed), scale_(scale), buffers_(team.size()) {
    products_.count = static_cast<uint32_t>(shape.sizes.size());
    std::copy(shape.sizes.begin(), shape.sizes.end(), products_.sizes);
    products_.gated = shape.gated;
    uint32_t joined = static_cast<uint32_t>(products_.joined(gather() ? v_.tile.n : 1));
    uint32_t n = gather() ? joined : shape.other, k = gather() ? shape.other : joined;
    g_ = {team.size(), shape.batch, shape.m_shard, n, k, v_.tile.m, v_.tile.n};
    if (v_.op == Op::kMatmulAllReduce) {
      uint32_t rows = g_.batch * g_.m_shard * g_.ranks - (g_.ranks - 1);
      g_ = schedule::all_reduce_geometry(g_.ranks, rows, n, k, v_.tile.m, v_.tile.n,
                                         schedule::chunk_unit(schedule::Target::kSm90));
    }
    results_ = gather() ? products_.results() : 1;
  }

  std::string fault() {
    Progress::at("team of " + std::to_string(team_.size()) + ", " + name());
    team_.each([&](Rank& rank) { prepare(rank, buffers_[rank.number]); });
    team_.poison_staging(demand_of(v_, g_));
    team_.each([&](Rank& rank) { launch(rank, buffers_[rank.number]); });
    team_.each([&](Rank& rank) { check(rank, buffers_[rank.number]); });
    std::string fault;
    team_.each([&](Rank& rank) {
      Verdict found[kMost + 1];
      CHECK_CUDA(cudaMemcpyAsync(found, buffers_[rank.number].verdicts, sizeof found, cudaMemcpyDeviceToHost, rank.stream));
      CHECK_CUDA(cudaStreamSynchronize(rank.stream));
      for (uint32_t i = 0; i <= kMost && fault.empty(); ++i)
        if (found[i].bad != 0)
          fault = name() + ", rank " + std::to_string(rank.number) + ": " + std::to_string(found[i].bad) + " elements of " +
                  (i == kMost ? "the gathered array" : "y of product " + std::to_string(i)) + ", the first at " +
                  std::to_string(static_cast<int64_t>(~static_cast<uint32_t>(found[i].first >> 32)) -
                                 kGuardBytes / (i == kMost ? v_.element_bytes() : out_bytes()));
    });
    return fault;
  }

 private:
  bool gather() const { return v_.op == Op::kAllGatherMatmul; }
  uint32_t n(uint32_t i) const { return gather() ? products_.sizes[i] : g_.n; }
  uint32_t k(uint32_t i) const { return gather() ? g_.k : products_.sizes[i]; }
  uint32_t out_bytes() const { return v_.float_out ? 4 : 2; }
  uint32_t rows(bool of_y) const {
    if (v_.op == Op::kMatmulAllReduce) return g_.all_rows();
    return g_.batch * g_.m_shard * (of_y == gather() ? g_.ranks : 1);
  }
  // Of several results, every other one has a bias and relu.
  bool finishes(uint32_t i) const { return v_.finishes && i % 2 == 0; }
  // Of gated ones the second has a bias with and without the first.
  bool up_biased() const { return products_.gated && seed_ % 2 == 0; }
  std::string name() const {
    std::string text = to_string(v_) + ", " + to_string(g_) + (products_.gated ? ", gated" : "") + ", products of";
    for (uint32_t i = 0; i < products_.count; ++i) text += " " + std::to_string(products_.sizes[i]);
    return text;
  }

  void prepare(Rank& rank, Buffers& b) {
    Pool& pool = rank.pool;
    pool.clear();
    Chunk chunk = chunk_of(v_.op, g_);
    uint32_t bytes = v_.element_bytes(), xs = gather() ? 1 : products_.count;
    for (uint32_t i = 0; i < xs; ++i) b.x[i] = pool.take(uint64_t{rows(false)} * k(i) * bytes);
    for (uint32_t i = 0; i < products_.count; ++i) {
      b.w[i] = pool.take(uint64_t{n(i)} * k(i) * bytes);
      b.bias[i] = reinterpret_cast<float*>(pool.take(uint64_t{n(i)} * 4));
    }
    for (uint32_t i = 0; i < results_; ++i) b.y[i] = pool.take(uint64_t{rows(true)} * n(i) * out_bytes() + 2 * kGuardBytes);
    b.beside = pool.take(uint64_t{chunk.elements()} * bytes);
    b.whole = pool.take(uint64_t{chunk.elements()} * bytes * g_.ranks + 2 * kGuardBytes);
    b.verdicts = reinterpret_cast<Verdict*>(pool.take((kMost + 1) * sizeof(Verdict)));
    CHECK_CUDA(cudaMemsetAsync(pool.base(), kPoison, pool.used(), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(b.verdicts, 0, (kMost + 1) * sizeof(Verdict), rank.stream));
    Operands of_w = v_.operands == Operands::kE5m2 ? Operands::kE4m3 : v_.operands;
    for (uint32_t i = 0; i < xs; ++i) {
      uint32_t count = rows(false) * k(i);
      fill<<<blocks_for(count), kThreads, 0, rank.stream>>>(b.x[i], v_.operands, count, seed_of(seed_, rank.number, i, kX));
    }
    for (uint32_t i = 0; i < products_.count; ++i) {
      fill_matrix<<<blocks_for(n(i) * k(i)), kThreads, 0, rank.stream>>>(b.w[i], of_w, n(i), k(i), v_.transposed_w,
                                                                         seed_of(seed_, rank.number, i, kW));
      fill_numbers<<<blocks_for(n(i)), kThreads, 0, rank.stream>>>(b.bias[i], n(i),
                                                                   seed_of(seed_, gather() ? rank.number : 0, i, kBias));
    }
    uint32_t count = chunk.elements();
    fill<<<blocks_for(count), kThreads, 0, rank.stream>>>(b.beside, v_.operands, count,
                                                          seed_of(seed_, rank.number, 0, kBeside));
    CHECK_CUDA(cudaGetLastError());
  }

  void launch(Rank& rank, Buffers const& b) {
    team_.launch(rank, g_, v_, b.x[0], b.w[0], b.y[0] + kGuardBytes, b.bias[0], b.beside, b.whole + kGuardBytes, 0,
                 [&](sm90::Call& call) {
                   call.products = products_;
                   for (uint32_t i = 1; i < products_.count; ++i) {
                     call.w[i] = b.w[i];
                     if (!gather()) call.x[i] = b.x[i];
                     if (gather() && i < results_) call.y[i] = b.y[i] + kGuardBytes;
                     if (up_biased()) call.bias[i] = b.bias[i];
                     if (!gather() || !finishes(i)) continue;
                     call.bias[i] = b.bias[i];
                     call.activation[i] = schedule::Activation::kRelu;
                   }
                 });
  }

  void check(Rank& rank, Buffers const& b) {
    for (uint32_t i = 0; i < results_; ++i) {
      uint32_t count = rows(true) * n(i);
      float scale = is_float8(v_.operands) ? scale_of_product(scale_, i) : 1;  // of the first, if all are added
      Sum sum{v_.op, g_, products_, seed_, rank.number, i, scale, finishes(i), up_biased()};
      compare<<<blocks_for(count), kThreads, 0, rank.stream>>>(b.y[i], sum, n(i), count, v_.float_out,
                                                               v_.operands == Operands::kF16, b.verdicts + i);
    }
    Chunk chunk = chunk_of(v_.op, g_);
    if (v_.gathers)
      compare_gathered<<<blocks_for(chunk.elements() * g_.ranks), kThreads, 0, rank.stream>>>(
          b.whole, v_.operands, chunk, g_.ranks, seed_, gather() ? kX : kBeside, b.verdicts + kMost);
    CHECK_CUDA(cudaGetLastError());
  }

  EmulatedTeam& team_;
  Variant v_;
  uint32_t seed_, results_ = 1;
  float scale_;
  std::vector<Buffers> buffers_;
  Products products_;
  Geometry g_{};
};

}  // namespace

void several_products(EmulatedTeam& team, float scale) {
  std::string team_name = "team of " + std::to_string(team.size()) + ", several products, ";
  team.start_epochs(0);
  uint32_t seed = 1;
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    bool gather = op == Op::kAllGatherMatmul;
    uint32_t calls = 0;
    std::string fault;
    for (Operands operands : kAllOperands)
      for (bool transposed_w : {false, true})
        for (bool float_out : {false, true})
          for (schedule::TileShape tile : schedule::kSm90Tiles) {
            if (is_float8(operands) && !transposed_w) continue;
            for (Shape const& shape : shapes_of(gather, is_float8(operands))) {
              if (!schedule::is_sm90_tile(tile, float_out ? 4 : 2, shape.gated)) continue;
              ++seed;
              // Each kernel has been run: one with k blocks of several products is enough of each op and width, and a gated
              // one.
              bool fewer = shape.gated ? shape.batch == 1 : shape.sizes.size() != kMost;
              bool enough = float_out || tile.m * tile.n != 256 * 256 || fewer || operands == Operands::kF16 ||
                            operands == Operands::kE5m2 || transposed_w != is_float8(operands);
              if ((each_once() && enough) || out_of_time()) continue;
              Transport transport = seed % 2 == 0 ? Transport::kPull : Transport::kPush;
              Variant v{op, transport, transposed_w, float_out, seed % 3 == 0 ? 1u << 20 : 3u, seed % 4 == 0 ? 1u : 24u, tile};
              v.gathers = op != Op::kMatmulAllReduce && seed / 2 % 2 == 0;
              v.finishes = seed % 5 < 3;
              v.operands = operands;
              if (seed % 3 == 1) v.movers = 1 + seed % 2;  // strategy "resident"
              if (fault.empty()) fault = Case(team, v, shape, seed, scale).fault();
              ++calls;
            }
          }
    report(team_name + schedule::op_name(op) + ", " + std::to_string(calls) + " calls", fault);
  }
  report(team_name + "state of the arenas", team.arena_fault());
}

}  // namespace teams
