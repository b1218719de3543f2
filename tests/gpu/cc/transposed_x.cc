#include "transposed_x.h"

#include <string>
#include <vector>

#include "exact_cases.h"

namespace teams {

using namespace entwine;
using schedule::Transport;

namespace {

// One k block and less, whole ones, a tail; chunks of one row or some, of several tiles, and with tails; batches.
std::vector<Geometry> shapes_of(uint32_t ranks, bool transposed_w) {
  std::vector<Geometry> shapes;
  for (uint32_t k : {1u, 64u, 197u, 523u})
    for (uint32_t m_shard : {1u, 100u, 129u, 300u})
      shapes.push_back(geometry_of(ranks, m_shard == 129 || k == 1 ? 3 : 1, m_shard,
                                   k == 64          ? 8
                                   : m_shard == 300 ? 520
                                                    : 136,
                                   // A row of w as (n, k) must be a multiple of 16 bytes.
                                   transposed_w ? schedule::ceil_div(k, 8) * 8 : k));
  return shapes;
}

std::vector<Variant> variants_of(Op op) {
  std::vector<Variant> variants;
  for (Operands operands : {Operands::kBf16, Operands::kF16})
    for (bool transposed_w : {false, true})
      for (bool float_out : {false, true})
        for (schedule::TileShape tile : schedule::kSm90Tiles)
          for (uint32_t turn = 0; turn < 3; ++turn) {
            Transport transport = turn == 0 ? Transport::kPull : Transport::kPush;
            if (!schedule::is_sm90_tile(tile, float_out ? 4 : 2)) continue;
            Variant v{op, transport, transposed_w, float_out, kLeads[turn], kPushers[turn % 2], tile};
            v.operands = operands;
            v.transposed_x = true;
            v.movers = turn == 2 ? 2 : 0;
            v.finishes = turn == 1;
            v.gathers = turn == 2 && op == Op::kMatmulReduceScatter;
            variants.push_back(v);
          }
  return variants;
}

struct TurnedBuffers {
  uint8_t *x, *w;
  float *want, *bias, *want_gathered;
  Guarded y;
  Gathered gathered;
  Verdict *verdict, *gathered_verdict;
};

std::string fault_of(EmulatedTeam& team, Variant const& v, Geometry const& g, uint32_t seed) {
  Progress::at("team of " + std::to_string(team.size()) + ", " + to_string(v) + ", " + to_string(g));
  std::vector<TurnedBuffers> all(team.size());
  Chunk chunk = chunk_of(v.op, g);
  team.each([&](Rank& rank) {
    TurnedBuffers& b = all[rank.number];
    Pool& pool = rank.pool;
    pool.clear();
    b.x = pool.take(uint64_t{x_elements(v.op, g)} * v.element_bytes());
    b.w = pool.take(uint64_t{g.n} * g.k * v.element_bytes());
    b.want = reinterpret_cast<float*>(pool.take(uint64_t{y_elements(v.op, g)} * 4));
    b.bias = reinterpret_cast<float*>(pool.take(uint64_t{g.n} * 4));
    b.y = take_y(pool, v.op, g, v.float_out);
    b.gathered = take_gathered(pool, chunk, g.ranks, v.operands);
    b.want_gathered = reinterpret_cast<float*>(pool.take(uint64_t{chunk.elements()} * g.ranks * 4));
    b.verdict = reinterpret_cast<Verdict*>(pool.take(sizeof(Verdict)));
    b.gathered_verdict = reinterpret_cast<Verdict*>(pool.take(sizeof(Verdict)));
    CHECK_CUDA(cudaMemsetAsync(pool.base(), kPoison, pool.used(), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(b.verdict, 0, sizeof(Verdict), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(b.gathered_verdict, 0, sizeof(Verdict), rank.stream));
    fill_turned_x(rank, b.x, v.operands, g.all_rows(), g.k, g.batch, x_seed(seed, rank.number));
    fill_w(rank, b.w, v.operands, g.n, g.k, v.transposed_w, w_seed(seed, rank.number));
    fill_bias(rank, b.bias, g.n, bias_seed(v.op, seed, rank.number));
    fill_x(rank, b.gathered.z, v.operands, chunk.elements(), gathered_seed(v.op, seed, rank.number));
    fill_expected(rank, b.want, {v.op, g, seed, rank.number});
    fill_gathered(rank, b.want_gathered, v.op, chunk, g.ranks, seed);
  });
  team.poison_staging(demand_of(v, tiled(g, v)));
  team.each([&](Rank& rank) {
    TurnedBuffers const& b = all[rank.number];
    team.launch(rank, g, v, b.x, b.w, b.y.y(), b.bias, b.gathered.z, b.gathered.whole.y());
  });
  team.each([&](Rank& rank) {
    TurnedBuffers const& b = all[rank.number];
    compare(rank, b.y, b.want, finish_of(v, g, seed, rank.number), y_elements(v.op, g), result_of(v), b.verdict);
    if (v.gathers)
      compare(rank, b.gathered.whole, b.want_gathered, {}, chunk.elements() * g.ranks, gathered_of(v), b.gathered_verdict);
  });
  std::string fault;
  team.each([&](Rank& rank) {
    Verdict verdict{}, gathered{};
    TurnedBuffers const& b = all[rank.number];
    CHECK_CUDA(cudaMemcpyAsync(&verdict, b.verdict, sizeof verdict, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaMemcpyAsync(&gathered, b.gathered_verdict, sizeof gathered, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    if (fault.empty()) fault = teams::fault_of(verdict, rank.number, g, v);
    if (fault.empty()) fault = gathered_fault_of(gathered, rank.number, g, v);
  });
  return fault;
}

}  // namespace

void transposed_x(EmulatedTeam& team) {
  std::string team_name = "team of " + std::to_string(team.size()) + ", x transposed, ";
  team.start_epochs(0);
  uint32_t seed = 2000;
  for (Op op : {Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    uint32_t calls = 0;
    std::string fault;
    Kernels kernels;
    for (Variant const& variant : variants_of(op))
      for (Geometry const& g : shapes_of(team.size(), variant.transposed_w)) {
        Variant v = variant;
        if (g.k % 8 != 0) v.gathers = false;  // an array of so many columns
        ++seed;
        // All tails for a sanitizer: several tiles, and a k block that isn't full.
        bool enough = g.m_shard != 300 || g.k < 500;
        if ((each_once() && (enough || !kernels.first(v, g))) || out_of_time()) continue;
        if (fault.empty()) fault = fault_of(team, v, turned_geometry(op, g), seed);
        ++calls;
      }
    report(team_name + schedule::op_name(op) + ", " + std::to_string(calls) + " calls", fault);
  }
  report(team_name + "state of the arenas", team.arena_fault());
}

}  // namespace teams
