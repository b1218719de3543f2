#include <iterator>
#include <string>
#include <vector>

#include "exact_cases.h"
#include "tests.h"

namespace teams {

using namespace entwine;

namespace {

struct ExactBuffers {
  // By type; w by whether it is transposed, too. The other ops' x is the front of matmul_reduce_scatter's.
  uint8_t *x[std::size(kAllOperands)], *w[std::size(kAllOperands)][2];
  float* want[3];                                 // by op
  float* bias[3];                                 // by op
  Guarded y;                                      // room for any variant's
  Gathered gathered[2][std::size(kAllOperands)];  // by op and type
  float* want_gathered[2];
  Verdict *verdicts, *gathered_verdicts;
};
constexpr uint32_t index_of(Operands operands) { return static_cast<uint32_t>(operands); }
constexpr Op kGatheringOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter};

}  // namespace

void exact(EmulatedTeam& team) {
  std::string team_name = "team of " + std::to_string(team.size()) + ", exact ";
  std::vector<Variant> variants = exact_variants();
  std::vector<Verdict> verdicts(variants.size()), gathered_verdicts(variants.size());
  std::string faults[std::size(kFamilies)];
  uint32_t calls[std::size(kFamilies)] = {}, seed = 1;
  Kernels kernels;
  team.start_epochs(0);
  for (Geometry const& g : chosen_shapes(team.size())) {
    Progress::at(team_name + to_string(g) + ": operands and expectations");
    ++seed;
    std::vector<ExactBuffers> all(team.size());
    team.each([&](Rank& rank) {
      ExactBuffers& b = all[rank.number];
      Pool& pool = rank.pool;
      pool.clear();
      uint32_t x_count = x_elements(Op::kMatmulReduceScatter, g), w_count = g.n * g.k;
      for (Operands operands : kAllOperands) {
        uint32_t type = index_of(operands);
        b.x[type] = pool.take(uint64_t{x_count} * operand_bytes(operands));
        for (uint8_t*& w : b.w[type]) w = pool.take(uint64_t{w_count} * operand_bytes(operands));
      }
      for (float*& bias : b.bias) bias = reinterpret_cast<float*>(pool.take(uint64_t{g.n} * 4));
      b.y = take_y(pool, Op::kAllGatherMatmul, g, true);
      for (Op op : kOps)
        b.want[static_cast<uint32_t>(op)] =
            reinterpret_cast<float*>(pool.take(uint64_t{y_elements(op, geometry_for(op, g))} * 4));
      for (Op op : kGatheringOps) {
        Chunk chunk = chunk_of(op, g);
        for (Operands operands : kAllOperands)
          b.gathered[static_cast<uint32_t>(op)][index_of(operands)] = take_gathered(pool, chunk, g.ranks, operands);
        b.want_gathered[static_cast<uint32_t>(op)] =
            reinterpret_cast<float*>(pool.take(uint64_t{chunk.elements()} * g.ranks * 4));
      }
      b.verdicts = reinterpret_cast<Verdict*>(pool.take(variants.size() * sizeof(Verdict)));
      b.gathered_verdicts = reinterpret_cast<Verdict*>(pool.take(variants.size() * sizeof(Verdict)));
      // What lies around the operands is poison.
      CHECK_CUDA(cudaMemsetAsync(pool.base(), kPoison, pool.used(), rank.stream));
      CHECK_CUDA(cudaMemsetAsync(b.verdicts, 0, variants.size() * sizeof(Verdict), rank.stream));
      CHECK_CUDA(cudaMemsetAsync(b.gathered_verdicts, 0, variants.size() * sizeof(Verdict), rank.stream));
      for (Operands operands : kAllOperands) {
        uint32_t type = index_of(operands);
        fill_x(rank, b.x[type], operands, x_count, x_seed(seed, rank.number));
        for (bool transposed : {false, true})
          fill_w(rank, b.w[type][transposed], operands, g.n, g.k, transposed, w_seed(seed, rank.number));
        for (Op op : kGatheringOps) {
          uint32_t count = chunk_of(op, g).elements();
          fill_x(rank, b.gathered[static_cast<uint32_t>(op)][type].z, operands, count, gathered_seed(op, seed, rank.number));
        }
      }
      for (Op op : kOps) {
        Geometry shape = geometry_for(op, g);
        fill_bias(rank, b.bias[static_cast<uint32_t>(op)], g.n, bias_seed(op, seed, rank.number));
        fill_expected(rank, b.want[static_cast<uint32_t>(op)], {op, shape, seed, rank.number});
      }
      for (Op op : kGatheringOps) {
        fill_gathered(rank, b.want_gathered[static_cast<uint32_t>(op)], op, chunk_of(op, g), g.ranks, seed);
      }
    });

    for (size_t i = 0; i < variants.size(); ++i) {
      Variant const& v = variants[i];
      Geometry shape = geometry_for(v.op, g);
      if (!meant_for(v, shape) || (v.few_rows && form_of(v, shape) != schedule::Form::kFewRows)) continue;
      if ((each_once() && !kernels.first(v, shape)) || out_of_time()) continue;
      Progress::at(team_name + to_string(v) + ", " + to_string(shape));
      ++calls[family_of(v)];
      team.each([&](Rank& rank) {
        ExactBuffers const& b = all[rank.number];
        CHECK_CUDA(cudaMemsetAsync(b.y.begin, kPoison, b.y.bytes, rank.stream));
        if (!v.gathers) return;
        Guarded const& whole = b.gathered[static_cast<uint32_t>(v.op)][index_of(v.operands)].whole;
        CHECK_CUDA(cudaMemsetAsync(whole.begin, kPoison, whole.bytes, rank.stream));
      });
      team.poison_staging(demand_of(v, tiled(shape, v)));
      team.each([&](Rank& rank) {
        ExactBuffers const& b = all[rank.number];
        Gathered gathered{};
        uint32_t type = index_of(v.operands);
        if (v.gathers) gathered = b.gathered[static_cast<uint32_t>(v.op)][type];
        team.launch(rank, shape, v, b.x[type], b.w[type][v.transposed_w], b.y.y(), b.bias[static_cast<uint32_t>(v.op)],
                    gathered.z, gathered.whole.y());
      });
      team.each([&](Rank& rank) {
        ExactBuffers const& b = all[rank.number];
        uint32_t op = static_cast<uint32_t>(v.op);
        compare(rank, b.y, b.want[op], finish_of(v, g, seed, rank.number), y_elements(v.op, shape), result_of(v),
                &b.verdicts[i]);
        if (v.gathers)
          compare(rank, b.gathered[op][index_of(v.operands)].whole, b.want_gathered[op], {},
                  chunk_of(v.op, g).elements() * g.ranks, gathered_of(v), &b.gathered_verdicts[i]);
      });
      team.finish();
    }
    team.each([&](Rank& rank) {
      CHECK_CUDA(cudaMemcpyAsync(verdicts.data(), all[rank.number].verdicts, verdicts.size() * sizeof(Verdict),
                                 cudaMemcpyDeviceToHost, rank.stream));
      CHECK_CUDA(cudaMemcpyAsync(gathered_verdicts.data(), all[rank.number].gathered_verdicts,
                                 variants.size() * sizeof(Verdict), cudaMemcpyDeviceToHost, rank.stream));
      CHECK_CUDA(cudaStreamSynchronize(rank.stream));
      for (size_t i = 0; i < variants.size(); ++i) {
        std::string& fault = faults[family_of(variants[i])];
        if (fault.empty()) fault = fault_of(verdicts[i], rank.number, geometry_for(variants[i].op, g), variants[i]);
        if (fault.empty()) fault = gathered_fault_of(gathered_verdicts[i], rank.number, g, variants[i]);
      }
    });
  }
  for (uint32_t i = 0; i < std::size(kFamilies); ++i)
    report(team_name + kFamilies[i] + ", " + std::to_string(calls[i]) + " calls", faults[i]);
  report(team_name + "state of the arenas", team.arena_fault());
}

}  // namespace teams
