#include "signal_groups.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <vector>

#include "exact_cases.h"
#include "expectation.h"
#include "kernel/signal.h"

namespace teams {
namespace {

using namespace entwine;
using schedule::Groups;
using sm90::SignalCall;

struct Setup {
  Op op;
  Operands operands;
  bool transposed_w, transposed_x, finishes, engines;
  schedule::TileShape tile;
  uint32_t waves;     // a group; 0: what the search finds
  uint32_t clusters;  // that multiply
};

struct Buffers {
  uint8_t *x, *w, *scratch, *summed, *whole, *theirs, *landed;
  uint32_t* words;
  float *bias, *want;
  Guarded y;
  Verdict* verdict;
};

// Where every rank has the same tiles.
struct Everyones {
  uint8_t const* tiles[schedule::kMaxRanks];
  uint32_t ranks;
};

__device__ float number(uint16_t bits, bool f16) {
  return f16 ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}

// Of `count` elements from `first` on, which a group's collective would add up.
__global__ void add_up(Everyones from, uint64_t first, uint64_t count, bool f16, uint8_t* to) {
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    float sum = 0;
    for (uint32_t r = 0; r < from.ranks; ++r) sum += number(reinterpret_cast<uint16_t const*>(from.tiles[r])[first + i], f16);
    reinterpret_cast<uint16_t*>(to)[first + i] =
        f16 ? __half_as_ushort(__float2half_rn(sum)) : __bfloat16_as_ushort(__float2bfloat16_rn(sum));
  }
}

// The last there is: signals wrap around.
constexpr uint32_t kEpoch = ~0u, kValue = schedule::signal_value(kEpoch);

class Case {
 public:
  Case(EmulatedTeam& team, Setup const& setup, Geometry const& shape, uint32_t seed)
      : team_(team), s_(setup), g_(shape), seed_(seed), buffers_(team.size()) {
    g_.tile_m = s_.tile.m;
    g_.tile_n = s_.tile.n;
    if (s_.transposed_x)
      g_ = turned_geometry(s_.op, g_);
    else if (s_.op == Op::kMatmulAllReduce)
      g_ = schedule::all_reduce_geometry(g_.ranks, g_.ranks * g_.batch * g_.m_shard - 1, g_.n, g_.k, g_.tile_m, g_.tile_n,
                                         schedule::chunk_unit(schedule::Target::kSm90));
    schedule::SignalPlan plan{s_.engines ? 0u : 2u, s_.waves, false};
    groups_ = schedule::make_groups(s_.op, schedule::Target::kSm90, g_, plan, 2 * s_.clusters + plan.comm_sms, 2).groups;
  }

  std::string fault() {
    Progress::at("team of " + std::to_string(team_.size()) + ", " + name());
    team_.each([&](Rank& rank) { prepare(rank, buffers_[rank.number]); });
    team_.finish();
    if (gather())
      team_.each([&](Rank& rank) { gather_rows(rank, buffers_[rank.number]); });
    else if (s_.engines)
      push_tiles();
    else
      sum_tiles();
    std::string fault;
    team_.each([&](Rank& rank) {
      if (fault.empty()) fault = check(rank, buffers_[rank.number]);
    });
    return fault;
  }

 private:
  bool gather() const { return s_.op == Op::kAllGatherMatmul; }
  bool f16() const { return s_.operands == Operands::kF16; }
  std::string name() const {
    return std::string("signal ") + schedule::op_name(s_.op) + (f16() ? ", f16" : ", bf16") + (s_.transposed_x ? ", x.T" : "") +
           (s_.transposed_w ? ", w.T" : "") + (s_.finishes ? ", bias and relu" : "") +
           (s_.engines ? ", copy engines, " : ", ") + to_string(g_) + ", " + std::to_string(groups_.count) + " groups";
  }

  SignalCall call(Rank const& rank, Buffers const& b) const {
    SignalCall c{};
    c.op = s_.op;
    c.geometry = schedule::grouped(s_.op, g_);
    c.raster = 2;
    c.operands = s_.operands;
    c.transposed_w = s_.transposed_w;
    c.transposed_x = s_.transposed_x;
    c.x = b.x;
    c.w = b.w;
    c.y = b.y.y();
    c.bias = s_.finishes ? b.bias : nullptr;
    c.activation = s_.finishes ? schedule::Activation::kRelu : schedule::Activation::kNone;
    c.groups = groups_;
    c.scratch = b.scratch;
    c.whole = b.whole;
    c.ranks = team_.size();
    c.rank = rank.number;
    if (s_.engines && !gather()) c.landed = b.landed;
    return c;
  }

  void prepare(Rank& rank, Buffers& b) {
    Pool& pool = rank.pool;
    pool.clear();
    Geometry whole = schedule::grouped(s_.op, g_);
    uint64_t scratch = schedule::scratch_bytes(s_.op, whole, 2, true), x_bytes = uint64_t{x_elements(s_.op, g_)} * 2;
    if (!gather()) scratch = schedule::scratch_bytes(s_.op, whole, 2, false);
    uint32_t count = y_elements(s_.op, g_);
    b.x = pool.take(x_bytes);
    b.w = pool.take(uint64_t{g_.n} * g_.k * 2);
    b.scratch = pool.take(scratch);
    b.summed = pool.take(scratch);
    b.whole = pool.take(x_bytes * g_.ranks);
    b.theirs = pool.take(x_bytes);
    schedule::ArenaDemand landing = schedule::landing_demand(s_.op, whole, team_.size(), 2);
    b.landed = pool.take(gather() ? 16 : landing.staging_half);
    b.words = reinterpret_cast<uint32_t*>(pool.take(uint64_t{landing.words_per_source} * team_.size() * 4));
    b.bias = reinterpret_cast<float*>(pool.take(uint64_t{g_.n} * 4));
    b.want = reinterpret_cast<float*>(pool.take(uint64_t{count} * 4));
    b.y = {pool.take(uint64_t{count} * 2 + 2 * kGuardBytes), uint64_t{count} * 2 + 2 * kGuardBytes};
    b.verdict = reinterpret_cast<Verdict*>(pool.take(sizeof(Verdict)));
    CHECK_CUDA(cudaMemsetAsync(pool.base(), kPoison, pool.used(), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(b.verdict, 0, sizeof(Verdict), rank.stream));
    CHECK_CUDA(cudaMemsetAsync(b.scratch, 0, schedule::kScratchHead, rank.stream));
    if (s_.transposed_x)
      fill_turned_x(rank, b.x, s_.operands, g_.all_rows(), g_.k, g_.batch, x_seed(seed_, rank.number));
    else
      fill_x(rank, b.x, s_.operands, x_elements(s_.op, g_), x_seed(seed_, rank.number));
    fill_w(rank, b.w, s_.operands, g_.n, g_.k, s_.transposed_w, w_seed(seed_, rank.number));
    fill_bias(rank, b.bias, g_.n, bias_seed(s_.op, seed_, rank.number));
    fill_expected(rank, b.want, {s_.op, g_, seed_, rank.number});
  }

  // The matmuls of all ranks; then every group is added up as its collective would, and goes to y in two copies.
  void sum_tiles() {
    team_.each([&](Rank& rank) { CHECK_CUDA(sm90::launch_sums(call(rank, buffers_[rank.number]), s_.clusters, rank.stream)); });
    team_.finish();
    Everyones all{{}, team_.size()};
    for (uint32_t r = 0; r < team_.size(); ++r) all.tiles[r] = buffers_[r].scratch + schedule::kScratchHead;
    team_.each([&](Rank& rank) {
      SignalCall c = call(rank, buffers_[rank.number]);
      for (uint32_t group = 0; group < groups_.count; ++group) {
        uint64_t count = groups_.size(group) * c.tile_elements(), owners = c.geometry.ranks;
        uint64_t first = owners * groups_.begin(group) * c.tile_elements() + c.owner() * count;
        add_up<<<256, 256, 0, rank.stream>>>(all, first, count, f16(), buffers_[rank.number].summed + schedule::kScratchHead);
        CHECK_CUDA(cudaGetLastError());
      }
    });
    team_.finish();
    team_.each([&](Rank& rank) {
      SignalCall c = call(rank, buffers_[rank.number]);
      uint32_t last = groups_.count - 1;
      c.scratch = buffers_[rank.number].summed;
      if (last > 0) CHECK_CUDA(sm90::launch_finish(c, 0, last, rank.multiprocessors, rank.stream));
      CHECK_CUDA(sm90::launch_finish(c, last, groups_.count, rank.multiprocessors, rank.stream));
    });
  }

  // Each rank's groups go to their owners, or to all, with a signal behind each; the finishing kernel adds them up.
  void push_tiles() {
    team_.each([&](Rank& rank) {
      SignalCall c = call(rank, buffers_[rank.number]);
      CHECK_CUDA(sm90::launch_sums(c, s_.clusters, rank.stream));
      Geometry const& g = c.geometry;
      uint64_t tile_bytes = c.tile_elements() * 2, set = schedule::partials_bytes(g, 2);
      for (uint32_t group = 0; group < groups_.count; ++group)
        for (uint32_t peer = 0; peer < team_.size(); ++peer) {
          if (peer == rank.number) continue;
          Buffers const& theirs = buffers_[peer];
          uint32_t first = groups_.begin(group), source = rank.number;
          uint8_t* to = theirs.landed + schedule::peer_slot(peer, source) * set + first * tile_bytes;
          uint8_t const* from = c.tiles() + groups_.slot(g.ranks, g.ranks == 1 ? 0 : peer, first) * tile_bytes;
          CHECK_CUDA(cudaMemcpyAsync(to, from, groups_.size(group) * tile_bytes, cudaMemcpyDeviceToDevice, rank.stream));
          uint32_t* word = theirs.words + schedule::signal_word(source, schedule::kMaxGroups, schedule::group_signal(group));
          CHECK_CUDA(cudaMemcpyAsync(word, &kValue, 4, cudaMemcpyHostToDevice, rank.stream));
        }
    });
    team_.finish();
    team_.each([&](Rank& rank) {
      SignalCall c = call(rank, buffers_[rank.number]);
      uint32_t last = groups_.count - 1;
      sm90::AwaitCall await{buffers_[rank.number].words, schedule::kMaxGroups, kEpoch, 0, nullptr};
      if (last > 0) {
        CHECK_CUDA(sm90::launch_await(c, await, 0, last, rank.stream));
        CHECK_CUDA(sm90::launch_finish(c, 0, last, rank.multiprocessors, rank.stream));
      }
      CHECK_CUDA(sm90::launch_await(c, await, last, last + 1, rank.stream));
      CHECK_CUDA(sm90::launch_finish(c, last, groups_.count, rank.multiprocessors, rank.stream));
    });
  }

  // The own rows, while `whole` is still poison; then all ranks' come, and each group's.
  void gather_rows(Rank& rank, Buffers const& b) {
    SignalCall c = call(rank, b);
    CHECK_CUDA(sm90::launch_own_rows(c, s_.clusters, rank.stream));
    uint64_t part = uint64_t{g_.m_shard} * g_.k * 2;
    for (uint32_t source = 0; source < g_.ranks; ++source) {
      if (source == rank.number) continue;  // nobody reads these from there
      fill_x(rank, b.theirs, s_.operands, x_elements(s_.op, g_), x_seed(seed_, source));
      CHECK_CUDA(cudaMemcpy2DAsync(b.whole + source * part, part * g_.ranks, b.theirs, part, part, g_.batch,
                                   cudaMemcpyDeviceToDevice, rank.stream));
    }
    for (uint32_t group = 0; group < groups_.count; ++group)
      CHECK_CUDA(sm90::launch_group_rows(c, group, s_.clusters, rank.stream));
  }

  std::string check(Rank& rank, Buffers const& b) {
    Finish finish;
    if (s_.finishes) finish = {1, g_.n, bias_seed(s_.op, seed_, rank.number)};
    compare(rank, b.y, b.want, finish, y_elements(s_.op, g_), f16() ? Result::kF16 : Result::kBf16, b.verdict);
    Verdict verdict{};
    std::vector<uint32_t> counters(schedule::kScratchHead / 4);
    CHECK_CUDA(cudaMemcpyAsync(&verdict, b.verdict, sizeof verdict, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaMemcpyAsync(counters.data(), b.scratch, counters.size() * 4, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    std::string who = name() + ", rank " + std::to_string(rank.number) + ": ";
    SignalCall c = call(rank, b);
    for (uint32_t group = 0; group < groups_.count && !gather(); ++group)
      if (uint32_t seen = counters[schedule::kFinishedWord + group]; seen != c.parts(group))
        return who + "group " + std::to_string(group) + " counts " + std::to_string(seen) + " parts of " +
               std::to_string(c.parts(group));
    if (verdict.bad == 0) return "";
    return who + std::to_string(verdict.bad) + " elements are wrong, the first at " +
           std::to_string(static_cast<int64_t>(~static_cast<uint32_t>(verdict.got >> 32)) - kGuardBytes / 2);
  }

  EmulatedTeam& team_;
  Setup s_;
  Geometry g_;
  uint32_t seed_;
  std::vector<Buffers> buffers_;
  Groups groups_;
};

}  // namespace

void signal_groups(EmulatedTeam& team) {
  uint32_t ranks = team.size(), seed = 1000;
  team.each([](Rank&) { CHECK_CUDA(sm90::load_signal_kernels()); });
  // One tile a rank; tails in every direction; batches; several waves.
  std::vector<Geometry> shapes = {{ranks, 1, 1, 8, 8, 0, 0}, {ranks, 2, 130, 264, 136, 0, 0}, {ranks, 1, 700, 1032, 200, 0, 0}};
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce}) {
    uint32_t calls = 0;
    std::string fault;
    for (Operands operands : {Operands::kBf16, Operands::kF16})
      for (bool transposed_w : {false, true})
        for (schedule::TileShape tile : schedule::kSignalTiles)
          for (Geometry const& shape : shapes)
            for (uint32_t clusters : {1u, 5u}) {
              bool another = clusters == 1 || shape.batch == 1;  // than the one of each kernel
              if ((each_once() && another) || out_of_time()) continue;
              ++seed;
              bool engines = operands == Operands::kBf16 ? transposed_w : seed % 4 < 2;
              Setup setup{op, operands, transposed_w, false, seed % 2 == 0, engines, tile, seed % 3, clusters};
              if (fault.empty()) fault = Case(team, setup, shape, seed).fault();
              ++calls;
              if (op == Op::kAllGatherMatmul) continue;
              setup.transposed_x = true;
              if (fault.empty()) fault = Case(team, setup, shape, seed).fault();
              ++calls;
            }
    report("team of " + std::to_string(ranks) + ", signal, " + schedule::op_name(op) + ", " + std::to_string(calls) + " calls",
           fault);
  }
}

}  // namespace teams
