// The kernels themselves, without JAX and NCCL, in teams of 2 to 8 ranks that share the GPUs which are there.
//
//   teams_test [RANKS ...]      teams of these sizes, by default all
//
// Exact: every shape, op, transport, layout and type against a naive expectation, with staging and y poisoned before each call.
// Stress: many calls back to back on one arena, of all ops and two shapes, with ranks delayed at random, with few clusters
// (the progress rule) and with epochs that wrap around.
//
// Exit status: 0 all passed, 1 something failed, 2 no GPU that can run this, 3 a hang.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "emulated_team.h"
#include "expectation.cuh"

namespace teams {
namespace {

using namespace entwine;
using schedule::Transport;

constexpr uint32_t kThreads = 256;
constexpr uint64_t kPoolBytes = 448ull << 20;

uint32_t blocks_for(uint32_t count) { return schedule::smaller(schedule::ceil_div(count, kThreads), 4096); }

Geometry geometry_of(uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k) {
  return {ranks, batch, m_shard, n, k, schedule::kSm90Tiles[0].m, schedule::kSm90Tiles[0].n};
}

constexpr Op kOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce};

// A shape as an op has it. An all-reduce has about as many rows as the other ops' larger side, which no team can share evenly.
Geometry geometry_for(Op op, Geometry const& g) {
  if (op != Op::kMatmulAllReduce) return g;
  uint32_t rows = g.batch * g.m_shard * g.ranks - (g.ranks - 1);
  return schedule::all_reduce_geometry(g.ranks, rows, g.n, g.k, g.tile_m, g.tile_n,
                                       schedule::chunk_unit(schedule::Target::kSm90));
}

struct Guarded {
  uint8_t* begin;  // of the first guard
  uint64_t bytes;
  void* y() const { return begin + kGuardBytes; }
};

Guarded take_y(Pool& pool, Op op, Geometry const& g, bool float_out) {
  uint64_t bytes = uint64_t{y_elements(op, g)} * (float_out ? 4 : 2) + 2 * kGuardBytes;
  return {pool.take(bytes), bytes};
}

// What a call gathers, and what must come of it.
struct Gathered {
  uint8_t* z;
  Guarded whole;
};

Gathered take_gathered(Pool& pool, Chunk const& chunk, uint32_t ranks, Operands operands) {
  uint64_t chunk_bytes = uint64_t{chunk.elements()} * operand_bytes(operands);
  uint8_t* z = pool.take(chunk_bytes);
  uint64_t bytes = chunk_bytes * ranks + 2 * kGuardBytes;
  return {z, {pool.take(bytes), bytes}};
}

Result gathered_of(Variant const& v) {
  constexpr Result kResults[] = {Result::kBf16, Result::kF16, Result::kE4m3, Result::kE5m2};
  return kResults[static_cast<uint32_t>(v.operands)];
}
Result result_of(Variant const& v) {
  if (v.float_out) return Result::kFloat32;
  return v.operands == Operands::kF16 ? Result::kF16 : Result::kBf16;
}
float scale_of(Variant const& v) { return is_float8(v.operands) ? kScale : 1; }
uint32_t bytes_of(Result result) {
  return result == Result::kFloat32 ? 4 : result == Result::kE4m3 || result == Result::kE5m2 ? 1 : 2;
}
// Rows of x are a multiple of 16 bytes. Shapes that 8-bit operands can have are for these alone: exact_shapes().
bool meant_for(Variant const& v, Geometry const& g) { return (g.k % 16 == 0) == is_float8(v.operands); }

Finish finish_of(Variant const& v, Geometry const& g, uint32_t seed, uint32_t rank) {
  Finish finish{scale_of(v)};
  if (v.finishes) {
    finish.columns = g.n;
    finish.seed = bias_seed(v.op, seed, rank);
  }
  return finish;
}

void enqueue_compare(Rank const& rank, Guarded const& y, float const* want, Finish finish, uint32_t count, Result result,
                     Verdict* verdict) {
  if (result == Result::kFloat32)
    compare<<<blocks_for(count), kThreads, 0, rank.stream>>>(reinterpret_cast<uint32_t const*>(y.begin), want, finish, count,
                                                             result, verdict);
  else if (bytes_of(result) == 1)
    compare<<<blocks_for(count), kThreads, 0, rank.stream>>>(y.begin, want, finish, count, result, verdict);
  else
    compare<<<blocks_for(count), kThreads, 0, rank.stream>>>(reinterpret_cast<uint16_t const*>(y.begin), want, finish, count,
                                                             result, verdict);
  CHECK_CUDA(cudaGetLastError());
}

float value_of(uint32_t bits, Result result) {
  if (result == Result::kE5m2) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits << 8)));
  if (result == Result::kE4m3) return bits == 0 ? 0.0f : bits == 0x38 ? 1.0f : bits == 0xb8 ? -1.0f : NAN;  // all there is
  if (result == Result::kF16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  if (result == Result::kBf16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// "" or what is wrong with one rank's gathered array.
std::string gathered_fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v) {
  if (verdict.bad == 0) return "";
  Chunk chunk = chunk_of(v.op, g);
  int64_t index = static_cast<int64_t>(~static_cast<uint32_t>(verdict.got >> 32)) - kGuardBytes / bytes_of(gathered_of(v));
  int64_t row = index / chunk.cols, part = row / chunk.rows;
  char first[160];
  std::snprintf(
      first, sizeof first, "gathered[%d, rank %d, row %d, %d] is %g (%#x), should be %g", static_cast<int>(part / g.ranks),
      static_cast<int>(part % g.ranks), static_cast<int>(row % chunk.rows), static_cast<int>(index % chunk.cols),
      static_cast<double>(value_of(static_cast<uint32_t>(verdict.got), gathered_of(v))), static_cast<uint32_t>(verdict.got),
      static_cast<double>(value_of(static_cast<uint32_t>(verdict.want), gathered_of(v))));
  return to_string(v) + ", " + to_string(g) + ", rank " + std::to_string(rank) + ": " + first + ", the first of " +
         std::to_string(verdict.bad);
}

// "" or what is wrong with one rank's y.
std::string fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v) {
  if (verdict.bad == 0) return "";
  auto got = static_cast<uint32_t>(verdict.got), want = static_cast<uint32_t>(verdict.want);
  uint32_t count = y_elements(v.op, g), rows = count / g.n / g.batch;
  uint32_t index = ~static_cast<uint32_t>(verdict.got >> 32) - kGuardBytes / (v.float_out ? 4 : 2);
  char first[160];
  if (index >= count)
    std::snprintf(first, sizeof first, "y overrun at element %d of %u, now %#x", static_cast<int>(index), count, got);
  else
    std::snprintf(first, sizeof first, "y[%u, %u, %u] is %g (%#x), should be %g (%#x)", index / g.n / rows, index / g.n % rows,
                  index % g.n, static_cast<double>(value_of(got, result_of(v))), got,
                  static_cast<double>(value_of(want, result_of(v))), want);
  return to_string(v) + ", " + to_string(g) + ", rank " + std::to_string(rank) + ": " + first + ", the first of " +
         std::to_string(verdict.bad);
}

// ---------------------------------------------------------------------------------------------------------------- exact

constexpr uint32_t kBatches[] = {1, 3}, kRows[] = {1, 100, 129, 300}, kColumns[] = {8, 136, 520}, kDepths[] = {8, 72, 520};

std::vector<Geometry> exact_shapes(uint32_t ranks) {
  std::vector<Geometry> shapes;
  for (uint32_t batch : kBatches)
    for (uint32_t m_shard : kRows)
      for (uint32_t n : kColumns)
        for (uint32_t k : kDepths) shapes.push_back(geometry_of(ranks, batch, m_shard, n, k));
  // For operands of 8 bits, whose rows must be a multiple of 16 long.
  for (uint32_t m_shard : kRows)
    for (uint32_t n : kColumns)
      for (uint32_t k : {16u, 144u, 528u}) shapes.push_back(geometry_of(ranks, m_shard == 129 ? 3 : 1, m_shard, n, k));
  // Deep enough for few rows to be cut into up to eight slices, the last of which is short.
  for (uint32_t m_shard : {2u, 13u, 31u})
    for (uint32_t n : {136u, 1160u})
      for (uint32_t k : {1032u, 4168u}) shapes.push_back(geometry_of(ranks, m_shard == 2 ? 3 : 1, m_shard, n, k));
  return shapes;
}

// TEAMS_SHAPES sets how many of them, and no stress then: for compute-sanitizer.
std::vector<Geometry> chosen(std::vector<Geometry> const& shapes) {
  uint32_t count = setting("TEAMS_SHAPES", 0);
  if (count == 0 || count >= shapes.size()) return shapes;
  std::vector<Geometry> some;
  for (uint32_t i = 0; i < count; ++i) some.push_back(shapes[i * shapes.size() / count]);
  return some;
}

constexpr uint32_t kLeads[] = {0, 3, 58, 1u << 20};  // 0: the schedule raises it; 1 << 20: all remote tiles first
constexpr uint32_t kPushers[] = {1, 24};
constexpr char const* kFamilies[] = {"all_gather_matmul",
                                     "matmul_reduce_scatter pull",
                                     "matmul_reduce_scatter push",
                                     "matmul_all_reduce pull",
                                     "matmul_all_reduce push",
                                     "all_gather_matmul few rows",
                                     "matmul_reduce_scatter few rows",
                                     "matmul_all_reduce few rows",
                                     "all_gather_matmul with the gathered x",
                                     "matmul_reduce_scatter pull gathering beside",
                                     "matmul_reduce_scatter push gathering beside",
                                     "all_gather_matmul with bias and relu",
                                     "matmul_reduce_scatter with bias and relu",
                                     "matmul_all_reduce with bias and relu",
                                     "float16",
                                     "float8"};
constexpr uint32_t kFamilyCount = std::size(kFamilies);
uint32_t family_of(Variant const& v) {
  if (v.operands != Operands::kBf16) return is_float8(v.operands) ? 15 : 14;
  if (v.finishes) return 11 + static_cast<uint32_t>(v.op);
  if (v.few_rows) return 5 + static_cast<uint32_t>(v.op);
  if (v.op == Op::kAllGatherMatmul) return v.gathers ? 8 : 0;
  if (v.gathers) return 9 + (v.transport == Transport::kPush);
  return (v.op == Op::kMatmulReduceScatter ? 1 : 3) + (v.transport == Transport::kPush);
}

std::vector<Variant> exact_variants() {
  std::vector<Variant> variants;
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (Op op : kOps)
        variants.push_back({op, Transport::kPull, transposed_w, float_out, 0, 1, schedule::kSm90Tiles[0], true});
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (schedule::TileShape tile : schedule::kSm90Tiles) {
        for (uint32_t pushers : kPushers)
          variants.push_back({Op::kAllGatherMatmul, Transport::kPull, transposed_w, float_out, kLeads[2], pushers, tile});
        for (Op op : {Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
          // How w lies is nothing to what an all-reduce adds: each type with one way will do.
          if (op == Op::kMatmulAllReduce && transposed_w != float_out) continue;
          variants.push_back({op, Transport::kPull, transposed_w, float_out, kLeads[0], 1, tile});
          variants.push_back({op, Transport::kPull, transposed_w, float_out, kLeads[3], 1, tile});
          for (uint32_t pushers : kPushers)
            variants.push_back({op, Transport::kPush, transposed_w, float_out, kLeads[pushers % 4], pushers, tile});
        }
        // What is gathered doesn't care how w lies and what y is, but staging and signals lie after those of y.
        if (transposed_w != float_out) continue;
        for (uint32_t pushers : kPushers) {
          variants.push_back(
              {Op::kAllGatherMatmul, Transport::kPull, transposed_w, float_out, kLeads[2], pushers, tile, false, true});
          for (Transport transport : {Transport::kPull, Transport::kPush})
            variants.push_back(
                {Op::kMatmulReduceScatter, transport, transposed_w, float_out, kLeads[2], pushers, tile, false, true});
        }
      }
  // Bias and relu don't care how w lies, but it is another kernel.
  for (bool float_out : {false, true})
    for (Op op : kOps) {
      for (bool transposed_w : {false, true})
        variants.push_back({op, Transport::kPull, transposed_w, float_out, 0, 1, schedule::kSm90Tiles[0], true, false, true});
      for (schedule::TileShape tile : schedule::kSm90Tiles)
        for (Transport transport : {Transport::kPull, Transport::kPush}) {
          bool gathers = op != Op::kMatmulAllReduce && transport == Transport::kPush;
          variants.push_back(
              {op, transport, transport == Transport::kPull, float_out, kLeads[2], kPushers[1], tile, false, gathers, true});
        }
    }
  // What doesn't depend on the type of operands has been looked at: each kernel once, and what is gathered.
  for (bool transposed_w : {false, true})
    for (bool float_out : {false, true})
      for (Op op : kOps) {
        Transport transport = transposed_w ? Transport::kPull : Transport::kPush;
        Variant few{op, transport, transposed_w, float_out, kLeads[2], kPushers[1], schedule::kSm90Tiles[0], true};
        few.operands = Operands::kF16;
        variants.push_back(few);
        for (schedule::TileShape tile : schedule::kSm90Tiles) {
          Variant tiles = few;
          tiles.few_rows = false;
          tiles.tile = tile;
          tiles.gathers = float_out && op != Op::kMatmulAllReduce;
          tiles.finishes = !float_out;
          variants.push_back(tiles);
          if (!transposed_w) continue;
          for (Operands operands : {Operands::kE4m3, Operands::kE5m2}) {
            tiles.operands = operands;
            tiles.transport = operands == Operands::kE4m3 ? Transport::kPull : Transport::kPush;
            variants.push_back(tiles);
          }
        }
      }
  return variants;
}

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

void exact(EmulatedTeam& team) {
  std::string team_name = "team of " + std::to_string(team.size()) + ", exact ";
  std::vector<Variant> variants = exact_variants();
  std::vector<Verdict> verdicts(variants.size()), gathered_verdicts(variants.size());
  std::string faults[kFamilyCount];
  uint32_t calls[kFamilyCount] = {}, seed = 1;
  team.start_epochs(0);
  for (Geometry const& g : chosen(exact_shapes(team.size()))) {
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
        fill_x<<<blocks_for(x_count), kThreads, 0, rank.stream>>>(b.x[type], operands, x_count, x_seed(seed, rank.number));
        for (bool transposed : {false, true})
          fill_w<<<blocks_for(w_count), kThreads, 0, rank.stream>>>(b.w[type][transposed], operands, g.n, g.k, transposed,
                                                                    w_seed(seed, rank.number));
        for (Op op : kGatheringOps) {
          uint32_t count = chunk_of(op, g).elements();
          fill_x<<<blocks_for(count), kThreads, 0, rank.stream>>>(b.gathered[static_cast<uint32_t>(op)][type].z, operands,
                                                                  count, gathered_seed(op, seed, rank.number));
        }
      }
      for (Op op : kOps) {
        Geometry shape = geometry_for(op, g);
        fill_bias<<<blocks_for(g.n), kThreads, 0, rank.stream>>>(b.bias[static_cast<uint32_t>(op)], g.n,
                                                                 bias_seed(op, seed, rank.number));
        fill_expected<<<blocks_for(y_elements(op, shape)), kThreads, 0, rank.stream>>>(b.want[static_cast<uint32_t>(op)],
                                                                                       {op, shape, seed, rank.number});
      }
      for (Op op : kGatheringOps) {
        Chunk chunk = chunk_of(op, g);
        uint32_t index = static_cast<uint32_t>(op), count = chunk.elements();
        fill_gathered<<<blocks_for(count * g.ranks), kThreads, 0, rank.stream>>>(b.want_gathered[index], op, chunk, g.ranks,
                                                                                 seed);
      }
      CHECK_CUDA(cudaGetLastError());
    });

    for (size_t i = 0; i < variants.size(); ++i) {
      Variant const& v = variants[i];
      Geometry shape = geometry_for(v.op, g);
      if (!meant_for(v, shape) || (v.few_rows && form_of(v, shape) != schedule::Form::kFewRows)) continue;
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
        enqueue_compare(rank, b.y, b.want[op], finish_of(v, g, seed, rank.number), y_elements(v.op, shape), result_of(v),
                        &b.verdicts[i]);
        if (v.gathers)
          enqueue_compare(rank, b.gathered[op][index_of(v.operands)].whole, b.want_gathered[op], {},
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
  for (uint32_t i = 0; i < kFamilyCount; ++i)
    report(team_name + kFamilies[i] + ", " + std::to_string(calls[i]) + " calls", faults[i]);
  report(team_name + "state of the arenas", team.arena_fault());
}

// --------------------------------------------------------------------------------------------------------------- stress

constexpr uint32_t kStressCalls = 30;

// One with many tiles, whatever the team, one that is all tails.
std::vector<Geometry> stress_shapes(uint32_t ranks) {
  return {geometry_of(ranks, 1, 4500 / ranks, 1160, 144), geometry_of(ranks, 3, 129, 136, 80)};
}

struct Stress {
  char const* name;
  uint32_t multiprocessors;  // 0: the rank's share
  uint32_t first_epoch;
};
constexpr Stress kStresses[] = {
    {"all clusters", 0, 0},
    {"1 cluster a rank", 2, 0},
    {"2 clusters a rank", 4, 0},
    {"epochs wrap", 0, 0xfffffffd},
    {"1 cluster a rank, epochs wrap", 2, 0xfffffffd},
};

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
                    schedule::kSm90Tiles[below(3)],
                    below(2) == 0,
                    false};
    if (!call.variant.few_rows) call.variant.gathers = op != Op::kMatmulAllReduce && below(2) == 0;
    call.variant.operands = kAllOperands[below(std::size(kAllOperands))];
    if (is_float8(call.variant.operands)) {
      call.variant.transposed_w = true;
      call.variant.few_rows = false;
    }
    call.variant.finishes = below(2) == 0;
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
      uint32_t x_count = x_elements(call.variant.op, g), w_count = g.n * g.k;
      Operands operands = call.variant.operands;
      fill_x<<<blocks_for(x_count), kThreads, 0, rank.stream>>>(b.x, operands, x_count, x_seed(call.seed, rank.number));
      fill_w<<<blocks_for(w_count), kThreads, 0, rank.stream>>>(b.w, operands, g.n, g.k, call.variant.transposed_w,
                                                                w_seed(call.seed, rank.number));
      fill_bias<<<blocks_for(g.n), kThreads, 0, rank.stream>>>(b.bias, g.n, bias_seed(call.variant.op, call.seed, rank.number));
      uint32_t z_count = chunk_of(call.variant.op, g).elements();
      if (call.variant.gathers)
        fill_x<<<blocks_for(z_count), kThreads, 0, rank.stream>>>(b.gathered.z, operands, z_count,
                                                                  gathered_seed(call.variant.op, call.seed, rank.number));
      CHECK_CUDA(cudaGetLastError());
    }
  });
  team.start_epochs(stress.first_epoch);

  // The host only enqueues; the ranks run apart as far as their delays and the protocol let them.
  Progress::at(name + ": launches");
  for (uint32_t i = 0; i < kStressCalls; ++i) {
    StressCall const& call = calls[i];
    team.each([&](Rank& rank) {
      if (below(10) < 3) delay<<<1, 1, 0, rank.stream>>>(below(200'000));
      CHECK_CUDA(cudaGetLastError());
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
      fill_expected<<<blocks_for(y_elements(op, g)), kThreads, 0, rank.stream>>>(want[rank.number],
                                                                                 {op, g, call.seed, rank.number});
      CHECK_CUDA(cudaGetLastError());
      enqueue_compare(rank, call.rank[rank.number].y, want[rank.number], finish_of(call.variant, g, call.seed, rank.number),
                      y_elements(op, g), result_of(call.variant), &verdicts[rank.number][i]);
      if (!call.variant.gathers) continue;
      Chunk chunk = chunk_of(op, g);
      uint32_t count = chunk.elements() * g.ranks;
      fill_gathered<<<blocks_for(count), kThreads, 0, rank.stream>>>(want[rank.number], op, chunk, g.ranks, call.seed);
      CHECK_CUDA(cudaGetLastError());
      enqueue_compare(rank, call.rank[rank.number].gathered.whole, want[rank.number], {}, count, gathered_of(call.variant),
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

// ---------------------------------------------------------------------------------------------------------------- teams

// The one that every call of the team's tests fits into.
schedule::ArenaLayout layout_of(uint32_t ranks) {
  schedule::ArenaLayout layout{ranks, 0, 0};
  std::vector<Geometry> shapes = exact_shapes(ranks);
  for (Geometry const& g : stress_shapes(ranks)) shapes.push_back(g);
  for (Geometry const& g : shapes)
    for (Op op : kOps)
      for (uint32_t i = 0; i <= std::size(schedule::kSm90Tiles); ++i) {
        Variant variant{op,
                        Transport::kPull,
                        false,
                        true,
                        0,
                        1,
                        schedule::kSm90Tiles[i % std::size(schedule::kSm90Tiles)],
                        i == 0,
                        i != 0 && op != Op::kMatmulAllReduce};
        schedule::ArenaDemand demand = demand_of(variant, tiled(geometry_for(op, g), variant));
        layout.words_per_source = schedule::larger(layout.words_per_source, demand.words_per_source);
        if (layout.staging_half < demand.staging_half) layout.staging_half = demand.staging_half;
      }
  return layout;
}

void test_team(uint32_t ranks, int devices) {
  Progress::at("team of " + std::to_string(ranks) + ": memory");
  EmulatedTeam team(ranks, devices, layout_of(ranks), kPoolBytes, kScale);
  Watchdog watchdog([&team] { team.describe(); });
  exact(team);
  if (setting("TEAMS_SHAPES", 0) != 0) return;
  for (uint32_t i = 0; i < std::size(kStresses); ++i) stress(team, kStresses[i], i);
}

int run(int count, char** arguments) {
  // One hardware queue a stream: kernels of ranks that share a GPU must not wait for each other to be launched. And nothing may
  // be loaded while kernels spin. Both are read when CUDA starts.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int devices = prepare_devices();
  if (devices == 0) {
    std::printf("no GPU of compute capability 9.0\n");
    return 2;
  }
  std::printf("%d GPU%s\n", devices, devices == 1 ? "" : "s");
  std::vector<uint32_t> sizes;
  for (int i = 1; i < count; ++i) sizes.push_back(static_cast<uint32_t>(std::atoi(arguments[i])));
  if (sizes.empty()) sizes = {2, 3, 4, 5, 6, 7, 8};
  for (uint32_t ranks : sizes) {
    if (ranks < 2 || ranks > schedule::kMaxRanks) {
      std::printf("teams have 2 to %u ranks\n", schedule::kMaxRanks);
      return 1;
    }
    test_team(ranks, devices);
  }
  return conclude();
}

}  // namespace
}  // namespace teams

int main(int count, char** arguments) { return teams::run(count, arguments); }
