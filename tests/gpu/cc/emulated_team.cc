#include "emulated_team.h"

#include <algorithm>
#include <cstring>

#include "kernel/sm90/params.h"
#include "schedule/few_rows.h"
#include "schedule/make_plan.h"
#include "team/stuck.h"

namespace teams {

using namespace entwine;
using schedule::Op;
using schedule::Transport;

namespace {

constexpr uint64_t kGap = 1024;
constexpr int kPoison = 0xff;
// All ranks' kernels are resident at once, and something is left for the tests' own small kernels.
constexpr uint32_t kSpareMultiprocessors = 4;

schedule::Gathering gathering_of(Variant const& v, schedule::Geometry const& geometry) {
  if (v.op != Op::kAllGatherMatmul && !v.gathers) return {};
  Chunk chunk = chunk_of(v.op, geometry);
  return {chunk.batch, chunk.rows, uint64_t{chunk.cols} * v.element_bytes(), geometry.tile_m};
}

}  // namespace

std::string to_string(Variant const& v) {
  bool gather = v.op == Op::kAllGatherMatmul;
  std::string text = schedule::op_name(v.op);
  if (!gather) text += v.transport == Transport::kPull ? " pull" : " push";
  constexpr char const* kNames[] = {", bfloat16", ", float16", ", e4m3", ", e5m2"};
  text += kNames[static_cast<uint32_t>(v.operands)];
  if (v.float_out) text += " to float32";
  if (v.transposed_x) text += ", x transposed";
  if (v.transposed_w) text += ", w transposed";
  if (v.finishes) text += ", bias and relu";
  if (v.few_rows) return text + ", few rows";
  if (v.movers != 0) text += ", movers " + std::to_string(v.movers);
  if (v.gathers) text += gather ? ", x gathered" : ", gathering beside";
  text += ", tile " + std::to_string(v.tile.m) + " x " + std::to_string(v.tile.n) + ", pushers " + std::to_string(v.pushers);
  return gather ? text : text + ", lead " + std::to_string(v.lead);
}

schedule::Geometry tiled(schedule::Geometry geometry, Variant const& variant) {
  geometry.tile_m = variant.tile.m;
  geometry.tile_n = variant.tile.n;
  return geometry;
}

std::string to_string(schedule::Geometry const& g) {
  return "batch " + std::to_string(g.batch) + ", m_shard " + std::to_string(g.m_shard) +
         (g.missing != 0 ? " (" + std::to_string(g.missing) + " missing)" : "") + ", n " + std::to_string(g.n) + ", k " +
         std::to_string(g.k);
}

int prepare_devices() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
  for (; usable < count; ++usable) {
    int major = 0, minor = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, usable));
    CHECK_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, usable));
    int reachable = major == 9 && minor == 0;
    for (int peer = 0; peer < usable && reachable; ++peer) {
      CHECK_CUDA(cudaDeviceCanAccessPeer(&reachable, usable, peer));
      if (reachable) CHECK_CUDA(cudaDeviceCanAccessPeer(&reachable, peer, usable));
    }
    if (!reachable) break;
  }
  for (int device = 0; device < usable; ++device) {
    CHECK_CUDA(cudaSetDevice(device));
    for (int peer = 0; peer < usable; ++peer)
      if (peer != device) CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
    CHECK_CUDA(sm90::load_kernels());
  }
  return usable;
}

void Pool::allocate(uint64_t bytes) {
  CHECK_CUDA(cudaMalloc(&base_, bytes));
  size_ = bytes;
  used_ = 0;
}

void Pool::free() { CHECK_CUDA(cudaFree(base_)); }

uint8_t* Pool::take(uint64_t bytes) {
  uint8_t* taken = base_ + used_ + kGap;
  used_ += schedule::round_up(bytes, kGap) + 2 * kGap;
  if (used_ > size_) {
    std::printf("BAD: the pool is too small at %s\n", Progress::where().c_str());
    ++failed;
    std::_Exit(conclude());
  }
  return taken;
}

EmulatedTeam::EmulatedTeam(uint32_t ranks, int devices, schedule::ArenaLayout const& layout, uint64_t pool_bytes, float scale)
    : layout_(layout) {
  CHECK_CUDA(cudaSetDevice(0));
  stuck_ = team::stuck_report();
  if (stuck_ == nullptr) CHECK_CUDA(cudaErrorMemoryAllocation);
  for (uint32_t r = 0; r < ranks; ++r) {
    Rank rank{};
    rank.number = r;
    rank.device = static_cast<int>(r) % devices;
    CHECK_CUDA(cudaSetDevice(rank.device));
    CHECK_CUDA(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamCreateWithFlags(&rank.probe, cudaStreamNonBlocking));
    CHECK_CUDA(cudaMalloc(&rank.arena, layout_.bytes()));
    float scales[schedule::kMaxProducts];
    for (uint32_t i = 0; i < schedule::kMaxProducts; ++i) scales[i] = scale_of_product(scale, i);
    CHECK_CUDA(cudaMalloc(&rank.scale, sizeof scales));
    CHECK_CUDA(cudaMemcpy(rank.scale, scales, sizeof scales, cudaMemcpyHostToDevice));
    rank.pool.allocate(pool_bytes);
    int multiprocessors = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, rank.device));
    uint32_t sharers = 0;
    for (uint32_t other = 0; other < ranks; ++other) sharers += static_cast<int>(other) % devices == rank.device;
    rank.multiprocessors = (static_cast<uint32_t>(multiprocessors) - kSpareMultiprocessors) / sharers & ~1u;
    ranks_.push_back(rank);
    arenas_.push_back(rank.arena);
  }
}

EmulatedTeam::~EmulatedTeam() {
  each([](Rank& rank) {
    CHECK_CUDA(cudaStreamDestroy(rank.stream));
    CHECK_CUDA(cudaStreamDestroy(rank.probe));
    CHECK_CUDA(cudaFree(rank.arena));
    CHECK_CUDA(cudaFree(rank.scale));
    rank.pool.free();
  });
}

void EmulatedTeam::finish() {
  each([](Rank& rank) { CHECK_CUDA(cudaStreamSynchronize(rank.stream)); });
}

void EmulatedTeam::start_epochs(uint32_t epoch) {
  uint64_t head = layout_.staging_offset(0), signals = layout_.signals_offset();
  std::vector<uint32_t> words(head / 4);
  sm90::Control control{};
  control.queue = uint64_t{epoch} << 32;
  std::memcpy(words.data(), &control, sizeof control);
  // What the call before has raised; of epoch 0 that is the zero of a new arena.
  std::fill(words.begin() + static_cast<std::ptrdiff_t>(signals / 4), words.end(), schedule::signal_value(epoch - 1));
  finish();
  each([&](Rank& rank) {
    CHECK_CUDA(cudaMemcpyAsync(rank.arena, words.data(), head, cudaMemcpyHostToDevice, rank.stream));
    CHECK_CUDA(cudaMemsetAsync(rank.arena + head, kPoison, layout_.bytes() - head, rank.stream));
    rank.epoch = epoch;
  });
  finish();
}

void EmulatedTeam::poison_staging(schedule::ArenaDemand const& demand) {
  each([&](Rank& rank) {
    for (uint32_t parity = 0; parity < 2; ++parity)
      CHECK_CUDA(cudaMemsetAsync(rank.arena + layout_.staging_offset(parity), kPoison, demand.staging_half, rank.stream));
  });
  finish();
}

void EmulatedTeam::launch(Rank& rank, schedule::Geometry const& geometry, Variant const& variant, void const* x, void const* w,
                          void* y, float const* bias, void const* z, void* gathered, uint32_t multiprocessors,
                          std::function<void(sm90::Call&)> const& change) {
  sm90::Call call{};
  call.op = variant.op;
  call.geometry = tiled(geometry, variant);
  call.plan =
      schedule::make_plan(variant.op, schedule::Target::kSm90, geometry, variant.float_out ? 4 : 2, variant.element_bytes());
  call.plan.tile_m = variant.tile.m;
  call.plan.tile_n = variant.tile.n;
  call.plan.form = form_of(variant, geometry);
  call.plan.lead = variant.lead;
  call.plan.transport = variant.transport;
  call.plan.pushers = variant.pushers;
  call.plan.movers = call.plan.form == schedule::Form::kTiles ? variant.movers : 0;
  if (variant.pushers == 1) call.plan.copiers = 1;
  call.operands = variant.operands;
  call.transposed_w = variant.transposed_w;
  call.transposed_x = variant.transposed_x;
  call.float_out = variant.float_out;
  call.x[0] = x;
  call.w[0] = w;
  call.y[0] = y;
  if (is_float8(variant.operands)) call.scale = rank.scale;
  if (variant.finishes) {
    call.bias[0] = bias;
    call.activation[0] = schedule::Activation::kRelu;
  }
  call.gathering = gathering_of(variant, call.geometry);
  if (variant.gathers) {
    call.z = variant.op == Op::kAllGatherMatmul ? nullptr : z;
    call.gathered = gathered;
  }
  call.arena = layout_;
  call.arenas = arenas_.data();
  call.rank = rank.number;
  call.multiprocessors = multiprocessors == 0 ? rank.multiprocessors : schedule::smaller(multiprocessors, rank.multiprocessors);
  call.timeout_ns = patience() * uint64_t{250'000'000};  // sooner than the watchdog: the kernel knows what it waits for
  call.stuck = stuck_;
  if (change) change(call);
  std::string why = sm90::unsupported(call);
  if (why.empty() && !layout_.fits(demand_of(variant, call.geometry))) why = "the arena is too small";
  if (!why.empty()) {
    std::printf("BAD: a call that the kernels don't take: %s; at %s\n", why.c_str(), Progress::where().c_str());
    ++failed;
    std::_Exit(conclude());
  }
  CHECK_CUDA(sm90::launch(call, rank.stream));
  ++rank.epoch;
  ++launches;
}

std::string EmulatedTeam::arena_fault() {
  finish();
  std::string fault;
  std::vector<uint32_t> words(layout_.signals_offset() / 4);
  each([&](Rank& rank) {
    CHECK_CUDA(cudaMemcpyAsync(words.data(), rank.arena, words.size() * 4, cudaMemcpyDeviceToHost, rank.stream));
    CHECK_CUDA(cudaStreamSynchronize(rank.stream));
    if (!fault.empty()) return;
    sm90::Control control;
    std::memcpy(&control, words.data(), sizeof control);
    std::string where = "the arena of rank " + std::to_string(rank.number) + ": ";
    if (control.queue != uint64_t{rank.epoch} << 32)
      fault = where + "epoch " + std::to_string(control.queue >> 32) + ", claims " +
              std::to_string(static_cast<uint32_t>(control.queue)) + " in place of epoch " + std::to_string(rank.epoch) +
              ", claims 0";
    else if (control.push[rank.epoch & 1] != 0)
      fault = where + "the next call's push queue is at " + std::to_string(control.push[rank.epoch & 1]);
    else if (control.counts[rank.epoch & 1].landed != 0)
      fault = where + "the next call's count of what has landed is " + std::to_string(control.counts[rank.epoch & 1].landed);
    else if (control.counts[rank.epoch & 1].copied != 0)
      fault = where + "the next call's copy queue is at " + std::to_string(control.counts[rank.epoch & 1].copied);
    else if (std::any_of(words.begin() + layout_.arrivals_offset() / 4, words.end(), [](uint32_t count) { return count != 0; }))
      fault = where + "arrivals are left";
  });
  return fault;
}

void EmulatedTeam::describe() const {
  for (Rank const& rank : ranks_) {
    if (cudaSetDevice(rank.device) != cudaSuccess) return;
    bool idle = cudaStreamQuery(rank.stream) == cudaSuccess;
    sm90::Control control;
    cudaError_t error = cudaMemcpyAsync(&control, rank.arena, sizeof control, cudaMemcpyDeviceToHost, rank.probe);
    if (error == cudaSuccess) error = cudaStreamSynchronize(rank.probe);
    std::printf("rank %u: stream %s, next epoch to launch %u", rank.number, idle ? "idle" : "busy", rank.epoch);
    if (error == cudaSuccess)
      std::printf(", at epoch %u, claims %u\n", static_cast<uint32_t>(control.queue >> 32),
                  static_cast<uint32_t>(control.queue));
    else
      std::printf(", %s\n", cudaGetErrorString(error));
    std::fflush(stdout);
  }
}

schedule::Form form_of(Variant const& v, schedule::Geometry const& geometry) {
  return v.few_rows && schedule::are_few_rows(v.op, geometry) ? schedule::Form::kFewRows : schedule::Form::kTiles;
}

schedule::ArenaDemand demand_of(Variant const& v, schedule::Geometry const& geometry) {
  uint32_t element_bytes = v.op == Op::kAllGatherMatmul ? v.element_bytes() : v.float_out ? 4 : 2;
  return schedule::call_demand(v.op, form_of(v, geometry), geometry, schedule::kSm90Parts, element_bytes,
                               gathering_of(v, geometry), v.movers != 0);
}

}  // namespace teams
