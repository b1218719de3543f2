#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "calls.h"
#include "tests.h"

namespace teams {

using namespace entwine;
using schedule::Transport;

// One with many tiles, whatever the team, one that is all tails.
std::vector<Geometry> stress_shapes(uint32_t ranks) {
  return {geometry_of(ranks, 1, 4500 / ranks, 1160, 144), geometry_of(ranks, 3, 129, 136, 80)};
}

namespace {

constexpr uint32_t kStressCalls = 30;

struct StressCall {
  Geometry geometry;
  Variant variant;
  uint32_t seed;
  struct Buffers {
    uint8_t *x, *w;
    float* bias;
    Guarded y;
    Gathered gathered;
  };
  std::vector<Buffers> rank;
};

}  // namespace

void stress(EmulatedTeam& team, Stress const& stress, uint32_t run) {
  std::string name = "team of " + std::to_string(team.size()) + ", stress, " + stress.name;
  Progress::at(name + ": operands");
  std::minstd_rand random(1 + run * 64 + team.size());
  auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() >> 8) % n; };

  std::vector<Geometry> shapes = stress_shapes(team.size());
  std::vector<StressCall> calls(kStressCalls);
  for (uint32_t i = 0; i < kStressCalls; ++i) {
    StressCall& call = calls[i];
    // In 18 calls, either half of the staging sees each op with each shape, and each op comes after each.
    constexpr uint32_t kTurns[] = {0, 0, 1, 1, 2, 2, 0, 2, 1};
    Op op = kOps[kTurns[i % std::size(kTurns)]];
    call.geometry = geometry_for(op, shapes[i % 4 / 2]);
    call.variant = {op,
                    below(2) == 0 ? Transport::kPull : Transport::kPush,
                    below(2) == 0,
                    below(2) == 0,
                    kLeads[below(4)],
                    kPushers[below(4) != 0],
                    schedule::kSm90Tiles[below(std::size(schedule::kSm90Tiles))],
                    below(2) == 0,
                    false};
    if (!schedule::is_sm90_tile(call.variant.tile, call.variant.float_out ? 4 : 2)) call.variant.tile = schedule::kSm90Tiles[0];
    if (!call.variant.few_rows) call.variant.gathers = op != Op::kMatmulAllReduce && below(2) == 0;
    call.variant.operands = kAllOperands[below(std::size(kAllOperands))];
    if (is_float8(call.variant.operands)) call.variant.transposed_w = true;
    call.variant.finishes = below(2) == 0;
    // Strategy "resident" among "fused", on one arena.
    if (!call.variant.few_rows && below(2) == 0) call.variant.movers = 1 + below(4);
    if (op != Op::kAllGatherMatmul && !is_float8(call.variant.operands) && below(3) == 0) {
      call.variant.few_rows = false;
      call.variant.transposed_x = true;
      call.geometry = turned_geometry(op, shapes[i % 4 / 2]);
    }
    call.seed = 1000 + run * kStressCalls + i;
    call.rank.resize(team.size());
  }

  std::vector<float*> want(team.size());
  std::vector<Verdict*> verdicts(team.size());
  team.each([&](Rank& rank) {
    Pool& pool = rank.pool;
    pool.clear();
    uint32_t most = 0;
    for (StressCall& call : calls) {
      StressCall::Buffers& b = call.rank[rank.number];
      Geometry const& g = call.geometry;
      Variant const& v = call.variant;
      b.x = pool.take(uint64_t{x_elements(v.op, g)} * v.element_bytes());
      b.w = pool.take(uint64_t{g.n} * g.k * v.element_bytes());
      b.bias = reinterpret_cast<float*>(pool.take(uint64_t{g.n} * 4));
      b.y = take_y(pool, v.op, g, v.float_out);
      most = schedule::larger(most, y_elements(v.op, g));
      if (!v.gathers) continue;
      b.gathered = take_gathered(pool, chunk_of(v.op, g), g.ranks, v.operands);
      most = schedule::larger(most, chunk_of(v.op, g).elements() * g.ranks);
    }
    want[rank.number] = reinterpret_cast<float*>(pool.take(uint64_t{most} * 4));
    verdicts[rank.number] = reinterpret_cast<Verdict*>(pool.take(2 * kStressCalls * sizeof(Verdict)));
    CHECK_CUDA(cudaMemsetAsync(pool.base(), kPoison, pool.used(), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(verdicts[rank.number], 0, 2 * kStressCalls * sizeof(Verdict), rank.stream));
    for (StressCall const& call : calls) {
      StressCall::Buffers const& b = call.rank[rank.number];
      Geometry const& g = call.geometry;
      uint32_t x_count = x_elements(call.variant.op, g);
      Operands operands = call.variant.operands;
      if (call.variant.transposed_x)
        fill_turned_x(rank, b.x, operands, g.all_rows(), g.k, g.batch, x_seed(call.seed, rank.number));
      else
        fill_x(rank, b.x, operands, x_count, x_seed(call.seed, rank.number));
      fill_w(rank, b.w, operands, g.n, g.k, call.variant.transposed_w, w_seed(call.seed, rank.number));
      fill_bias(rank, b.bias, g.n, bias_seed(call.variant.op, call.seed, rank.number));
      uint32_t z_count = chunk_of(call.variant.op, g).elements();
      if (call.variant.gathers)
        fill_x(rank, b.gathered.z, operands, z_count, gathered_seed(call.variant.op, call.seed, rank.number));
    }
  });
  team.start_epochs(stress.first_epoch);

  // The host only enqueues; the ranks run apart as far as their delays and the protocol let them.
  Progress::at(name + ": launches");
  for (uint32_t i = 0; i < kStressCalls; ++i) {
    StressCall const& call = calls[i];
    team.each([&](Rank& rank) {
      if (below(10) < 3) delay(rank, below(200'000));
      StressCall::Buffers const& b = call.rank[rank.number];
      team.launch(rank, call.geometry, call.variant, b.x, b.w, b.y.y(), b.bias, b.gathered.z, b.gathered.whole.y(),
                  stress.multiprocessors);
    });
  }
  Progress::at(name + ": " + std::to_string(kStressCalls) + " calls are running");
  team.finish();

  Progress::at(name + ": comparison");
  std::string fault = team.arena_fault();
  team.each([&](Rank& rank) {
    for (uint32_t i = 0; i < kStressCalls; ++i) {
      StressCall const& call = calls[i];
      Geometry const& g = call.geometry;
      Op op = call.variant.op;
      fill_expected(rank, want[rank.number], {op, g, call.seed, rank.number});
      compare(rank, call.rank[rank.number].y, want[rank.number], finish_of(call.variant, g, call.seed, rank.number),
              y_elements(op, g), result_of(call.variant), &verdicts[rank.number][i]);
      if (!call.variant.gathers) continue;
      Chunk chunk = chunk_of(op, g);
      uint32_t count = chunk.elements() * g.ranks;
      fill_gathered(rank, want[rank.number], op, chunk, g.ranks, call.seed);
      compare(rank, call.rank[rank.number].gathered.whole, want[rank.number], {}, count, gathered_of(call.variant),
              &verdicts[rank.number][kStressCalls + i]);
    }
  });
  team.each([&](Rank& rank) {
    Verdict found[2 * kStressCalls];
    CHECK_CUDA(cudaMemcpyAsync(found, verdicts[rank.number], sizeof found, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    for (uint32_t i = 0; i < kStressCalls && fault.empty(); ++i) {
      fault = fault_of(found[i], rank.number, calls[i].geometry, calls[i].variant);
      if (fault.empty()) fault = gathered_fault_of(found[kStressCalls + i], rank.number, calls[i].geometry, calls[i].variant);
      if (!fault.empty()) fault = "call " + std::to_string(i) + ", " + fault;
    }
  });
  report(name + ", " + std::to_string(kStressCalls) + " calls", fault);
}

}  // namespace teams
