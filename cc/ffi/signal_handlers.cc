// Strategy "signal" on GPUs: the matmul on XLA's stream, transfers on a second one, group by group.
//
// Sums. The matmul counts the finished tiles of each group; the second stream waits for each count and has NCCL sum the group
// in place. When the matmul is done, XLA's stream takes all groups but the last to y while the last is being summed, then that.
// Gathered rows. NCCL brings them to their place on the second stream; XLA's stream multiplies the own rows meanwhile, then
// each group's when the stream beside has it: by events between launches, not by tiles that look at flags, since a matmul that
// waits while it fills the GPU keeps NCCL's blocks from ever starting.
//
// Copy engines, where peers' memory can be reached, do the same without a multiprocessor: a group's tiles go to their owners'
// arenas (an all-reduce's to all), who add them up on the way to y; rows to everybody's. What XLA's stream waits for are peers'
// signals then, which a launch of one block awaits, within the bound of ENTWINE_TIMEOUT_S.
//
// Why it can't deadlock: of our kernels only that block waits, and for matmuls and copies of peers that wait for nobody. NCCL's
// wait for each other; each rank enqueues them in one order on one stream, and what they follow, a matmul or an event, is
// enqueued before and ends by itself. So it is the same with one multiprocessor.
//
// Not to be recorded into CUDA graphs: a wait for a counter has no place in one (branches of a graph may run one after the
// other, a waiting one first), so the handlers don't say that they can be.
//
// The scratch is a result of the call, so XLA accounts for it, and hands it out again after this call on its own stream, which
// has joined the other by then.
#include "ffi/signal_handlers.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/signal_call.h"
#include "kernel/signal.h"
#include "team/arena.h"
#include "team/beside.h"
#include "team/clique.h"
#include "team/device_scope.h"
#include "team/stuck.h"
#include "team/trace.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
using schedule::Op;
using Clique = ffi::Extension<team::Collectives>;

constexpr uint32_t kJoin = schedule::kMaxGroups;  // the event; those below are of groups
constexpr uint32_t kElementBytes = 2;

ffi::Error failed(Op op, std::string const& why, ffi::ErrorCode code = ffi::ErrorCode::kFailedPrecondition) {
  return ffi::Error(code, std::string("entwine_jax.") + op_name(op) + ": " + why);
}

// Multiprocessors of the current device; its kernels are loaded at the first call. Negative: a CUDA error.
int ready_device(int device) {
  static std::mutex mutex;
  static std::map<int, int> ready;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = ready.find(device);
  if (found != ready.end()) return found->second;
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = sm90::load_signal_kernels();
  if (error != cudaSuccess) return -static_cast<int>(error);
  return ready[device] = multiprocessors;
}

struct Call {
  sm90::SignalCall kernel;
  uint32_t clusters, all_clusters;  // of a matmul beside NCCL, and of one alone
  uint32_t multiprocessors;
  int type;  // NCCL's
  // Copy engines.
  bool engines;
  schedule::ArenaDemand demand;
  uint64_t timeout_ns;
  // If notes are taken.
  schedule::Geometry geometry;  // of the whole call
  std::shared_ptr<team::Moments> moments;
};

ffi::ErrorOr<Call> decode_call(Op op, SignalAttributes const& attributes, Buffers const& buffers,
                               Buffers::Optional const& scratch, int multiprocessors) {
  auto decoded = decode_signal(op, schedule::Target::kSm90, attributes, buffers, scratch);
  if (!decoded) return ffi::Unexpected<ffi::Error>(decoded.error());
  Problem const& problem = decoded->problem;
  if (problem.in != ffi::DataType::BF16 && problem.in != ffi::DataType::F16)
    return ffi::Unexpected<ffi::Error>(
        failed(op, "the sm_90 kernels take bfloat16 or float16 x and w: cast, or pass strategy=\"xla\"",
               ffi::ErrorCode::kUnimplemented));
  Call call{};
  sm90::SignalCall& k = call.kernel;
  k.op = op;
  k.geometry = schedule::grouped(op, problem.geometry);
  k.raster = problem.plan.raster;
  k.operands = problem.in == ffi::DataType::F16 ? Operands::kF16 : Operands::kBf16;
  k.transposed_w = problem.transpose_w;
  k.x = buffers.x_data(0);
  k.w = buffers.w_data(0);
  k.y = buffers.y_data(0);
  k.bias = buffers.bias_data(0);
  k.activation = problem.activation[0];
  k.scratch = decoded->scratch;
  k.whole = buffers.gathered ? buffers.gathered_data() : k.tiles();
  std::string why = sm90::unsupported(k);
  if (!why.empty()) return ffi::Unexpected<ffi::Error>(failed(op, why, ffi::ErrorCode::kUnimplemented));
  call.multiprocessors = static_cast<uint32_t>(multiprocessors);
  // The same on every rank, whatever its GPU is.
  k.groups = schedule::make_groups(op, schedule::Target::kSm90, problem.geometry, decoded->plan, schedule::kSm90Multiprocessors,
                                   kElementBytes)
                 .groups;
  call.all_clusters = call.multiprocessors / 2;
  uint32_t left = schedule::smaller(decoded->plan.comm_sms, call.multiprocessors - 2);  // to NCCL
  call.clusters = (call.multiprocessors - left) / 2;
  call.type = k.operands == Operands::kF16 ? team::Beside::kF16 : team::Beside::kBf16;
  k.ranks = problem.geometry.ranks;
  call.geometry = problem.geometry;
  call.engines = decoded->plan.engines();
  call.demand = schedule::landing_demand(op, k.geometry, k.ranks, kElementBytes);
  call.timeout_ns = static_cast<uint64_t>(attributes.timeout_ms) * 1'000'000;
  return call;
}

ffi::ErrorOr<team::Beside*> find_beside(Op op, team::CliqueContext clique, SignalAttributes const& attributes, int device) {
  auto communicator =
      team::get_clique(clique, team::make_groups(attributes.groups, attributes.team_size), team::kSignalCommunicationId);
  if (!communicator) return ffi::Unexpected<ffi::Error>(communicator.error());
  std::string why;
  team::Beside* beside = team::Beside::of(*communicator, device, &why);
  if (beside == nullptr) return ffi::Unexpected<ffi::Error>(failed(op, why));
  if (beside->size() != attributes.team_size)
    return ffi::Unexpected<ffi::Error>(failed(op, "XLA's communicator has " + std::to_string(beside->size()) +
                                                      " ranks, the mesh axis " + std::to_string(attributes.team_size)));
  return beside;
}

// A group of row blocks lies in one piece in each batch that it has rows of.
struct Piece {
  uint32_t batch, row, rows;
};
std::vector<Piece> pieces_of(sm90::SignalCall const& k, uint32_t group) {
  schedule::Geometry const& g = k.geometry;
  std::vector<Piece> pieces;
  for (uint32_t block = k.groups.begin(group); block < k.groups.ends[group]; ++block) {
    uint32_t batch = g.batch_of(block), row = g.first_row(block);
    if (pieces.empty() || pieces.back().batch != batch) pieces.push_back({batch, row, 0});
    pieces.back().rows += g.rows(block);
  }
  return pieces;
}

// All of a chunk in one piece: then NCCL's own all-gather has everything where it belongs.
bool gathers_at_once(sm90::SignalCall const& k) { return k.groups.count == 1 && k.geometry.batch == 1; }

// Elements of every collective that the call makes.
std::vector<size_t> counts_of(Call const& call) {
  sm90::SignalCall const& k = call.kernel;
  std::set<size_t> counts;
  for (uint32_t group = 0; group < k.groups.count; ++group) {
    if (k.op != Op::kAllGatherMatmul) counts.insert(k.groups.size(group) * k.tile_elements());
    if (k.op == Op::kAllGatherMatmul)
      for (Piece const& piece : pieces_of(k, group)) counts.insert(size_t(piece.rows) * k.geometry.k);
  }
  return {counts.begin(), counts.end()};
}

// Enqueues what is given, step by step, up to the first that fails.
class Steps {
 public:
  void operator()(std::string const& why) {
    if (why_.empty()) why_ = why;
  }
  void operator()(cudaError_t error) {
    if (why_.empty() && error != cudaSuccess) why_ = std::string("launch: ") + cudaGetErrorString(error);
  }
  bool well() const { return why_.empty(); }
  std::string const& why() const { return why_; }

 private:
  std::string why_;
};

// Notes that `stream` has come to this.
void note(Call const& call, cudaStream_t stream, schedule::Mark mark, uint32_t group, Steps& then) {
  if (call.moments && then.well()) then(call.moments->mark(stream, mark, group));
}

// Of a group, to all peers.
std::vector<uint64_t> group_bytes(Call const& call) {
  sm90::SignalCall const& k = call.kernel;
  std::vector<uint64_t> bytes;
  for (uint32_t group = 0; group < k.groups.count; ++group) {
    uint64_t elements = k.groups.size(group) * k.tile_elements();
    if (k.op == Op::kAllGatherMatmul) {
      elements = 0;
      for (Piece const& piece : pieces_of(k, group)) elements += uint64_t(piece.rows) * k.geometry.k;
    }
    bytes.push_back(elements * kElementBytes * (k.ranks - 1));
  }
  return bytes;
}

// Room for a call's notes, if they are taken and there is some left.
void take_notes(Call& call, int device, cudaStream_t stream, Steps& then) {
  sm90::SignalCall& k = call.kernel;
  if (!team::tracing() || !then.well()) return;
  k.trace_clusters = call.all_clusters;
  sm90::SignalTraceShape shape = sm90::signal_trace_shape(k);
  if (shape.events() == 0) return;
  auto moments = std::make_shared<team::Moments>(device);
  team::TracedLaunch traced{};
  traced.strategy = "signal";
  traced.op = k.op;
  traced.geometry = call.geometry;
  traced.rank = k.rank;
  traced.out_bytes = kElementBytes;
  traced.device = device;
  traced.launches = shape.launches;
  traced.ctas = shape.ctas;
  traced.capacity = shape.capacity;
  traced.group_bytes = group_bytes(call);
  traced.moments = moments;
  k.trace = team::trace_launch(std::move(traced));
  if (k.trace == nullptr) return;
  then(sm90::launch_clock(&k.trace[shape.events()].ns, stream));
  call.moments = moments;
  note(call, stream, schedule::Mark::kClaimed, 0, then);
}

// The last copies of groups `first` to `end`.
void finish(Call const& call, uint32_t first, uint32_t end, cudaStream_t stream, Steps& then) {
  note(call, stream, schedule::Mark::kCopying, end - 1, then);
  if (then.well()) then(sm90::launch_finish(call.kernel, first, end, call.multiprocessors, stream));
  note(call, stream, schedule::Mark::kCopied, end - 1, then);
}

void sum_groups(Call const& call, team::Beside& beside, cudaStream_t stream, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  uint32_t last = k.groups.count - 1;
  if (then.well()) then(sm90::launch_sums(k, call.clusters, stream));
  for (uint32_t group = 0; group <= last && then.well(); ++group) {
    then(beside.await(k.finished(group), k.parts(group)));
    size_t count = k.groups.size(group) * k.tile_elements();
    uint8_t* tiles = k.tiles() + uint64_t(k.geometry.ranks) * k.groups.begin(group) * k.tile_elements() * 2;
    note(call, beside.stream(), schedule::Mark::kSending, group, then);
    if (then.well())
      then(k.op == Op::kMatmulAllReduce ? beside.sum(tiles, count, call.type)
                                        : beside.sum_and_scatter(tiles, count, call.type));
    note(call, beside.stream(), schedule::Mark::kSent, group, then);
    if (group + 1 == last && then.well()) then(beside.mark(0));
  }
  if (last > 0 && then.well()) {
    then(beside.join(stream, 0));
    finish(call, 0, last, stream, then);
  }
}

// One NCCL group is of so many pieces at most.
constexpr size_t kPiecesAtOnce = 64;

void gather_group(Call const& call, team::Beside& beside, uint32_t group, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  schedule::Geometry const& g = k.geometry;
  auto const* own = static_cast<uint16_t const*>(k.x);
  auto* whole = static_cast<uint16_t*>(k.whole);
  if (gathers_at_once(k)) return then(beside.gather(own, whole, size_t(g.m_shard) * g.k, call.type));
  std::vector<Piece> pieces = pieces_of(k, group);
  for (size_t first = 0; first < pieces.size() && then.well(); first += kPiecesAtOnce) {
    then(beside.pieces(true));
    if (!then.well()) return;
    for (size_t i = first; i < std::min(first + kPiecesAtOnce, pieces.size()); ++i) {
      Piece const& piece = pieces[i];
      for (uint32_t step = 1; step < g.ranks && then.well(); ++step) {
        uint32_t peer = (k.rank + step) % g.ranks;
        uint64_t mine = (uint64_t(piece.batch) * g.m_shard + piece.row) * g.k;
        uint64_t theirs = ((uint64_t(piece.batch) * g.ranks + peer) * g.m_shard + piece.row) * g.k;
        then(beside.exchange(own + mine, whole + theirs, size_t(piece.rows) * g.k, call.type, static_cast<int>(peer)));
      }
    }
    then(beside.pieces(false));
  }
}

void gather_groups(Call const& call, team::Beside& beside, cudaStream_t stream, bool wanted, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  schedule::Geometry const& g = k.geometry;
  uint32_t count = k.groups.count;
  for (uint32_t group = 0; group < count && then.well(); ++group) {
    note(call, beside.stream(), schedule::Mark::kSending, group, then);
    gather_group(call, beside, group, then);
    note(call, beside.stream(), schedule::Mark::kSent, group, then);
    if (then.well()) then(beside.mark(group));
    if (group == 0 && then.well()) then(sm90::launch_own_rows(k, call.clusters, stream));
  }
  if (wanted && !gathers_at_once(k) && then.well()) {
    size_t bytes = size_t(g.m_shard) * g.k * 2;
    auto* to = static_cast<uint8_t*>(k.whole) + k.rank * bytes;
    then(beside.copy(to, bytes * g.ranks, k.x, bytes, bytes, g.batch));
  }
  for (uint32_t group = 0; group < count && then.well(); ++group) {
    then(beside.join(stream, group));
    if (then.well()) then(sm90::launch_group_rows(k, group, group + 1 < count ? call.clusters : call.all_clusters, stream));
  }
}

// Where a call by copy engines lands, in each rank's arena.
class Landing {
 public:
  Landing(Call const& call, team::Arena const& arena, uint32_t epoch)
      : k_(call.kernel), arena_(arena), epoch_(epoch), timeout_ns_(call.timeout_ns) {}

  uint32_t value() const { return schedule::signal_value(epoch_); }
  uint8_t* staging(uint32_t rank) const { return arena_.base[rank] + arena_.layout.staging_offset(epoch_ & 1); }
  // Sums of the own cells from `source` on.
  uint8_t* sums(uint32_t rank, uint32_t source, uint32_t cell) const {
    return staging(rank) + schedule::peer_slot(rank, source) * schedule::partials_bytes(k_.geometry, kElementBytes) +
           cell * k_.tile_elements() * kElementBytes;
  }
  uint32_t* word(uint32_t rank, uint32_t source, uint32_t group) const {
    return words(rank) + schedule::signal_word(source, arena_.layout.words_per_source, schedule::group_signal(group));
  }
  cudaError_t await(uint32_t first, uint32_t end, cudaStream_t stream) const {
    return sm90::launch_await(k_, {words(k_.rank), arena_.layout.words_per_source, epoch_, timeout_ns_, team::stuck_report()},
                              first, end, stream);
  }

 private:
  uint32_t* words(uint32_t rank) const {
    return reinterpret_cast<uint32_t*>(arena_.base[rank] + arena_.layout.signals_offset());
  }

  sm90::SignalCall const& k_;
  team::Arena const& arena_;
  uint32_t epoch_;
  uint64_t timeout_ns_;
};

void push_sums(Call const& call, Landing const& landing, team::Beside& beside, cudaStream_t stream, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  uint32_t last = k.groups.count - 1, owners = k.geometry.ranks;
  then(sm90::launch_sums(k, call.clusters, stream));
  for (uint32_t group = 0; group <= last && then.well(); ++group) {
    then(beside.await(k.finished(group), k.parts(group)));
    note(call, beside.stream(), schedule::Mark::kSending, group, then);
    uint32_t first = k.groups.begin(group);
    size_t bytes = k.groups.size(group) * k.tile_elements() * kElementBytes;
    for (uint32_t step = 1; step < k.ranks && then.well(); ++step) {
      uint32_t peer = (k.rank + step) % k.ranks;
      uint64_t tile = k.groups.slot(owners, owners == 1 ? 0 : peer, first);
      then(beside.push(landing.sums(peer, k.rank, first), k.tiles() + tile * k.tile_elements() * kElementBytes, bytes));
      if (then.well()) then(beside.raise(landing.word(peer, k.rank, group)));
    }
    note(call, beside.stream(), schedule::Mark::kSent, group, then);
  }
  if (last > 0 && then.well()) then(landing.await(0, last, stream));
  if (last > 0) finish(call, 0, last, stream, then);
  if (then.well()) then(landing.await(last, last + 1, stream));
}

void push_rows(Call const& call, Landing const& landing, team::Beside& beside, cudaStream_t stream,
               Buffers::Optional const& gathered, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  schedule::Geometry const& g = k.geometry;
  auto const* own = static_cast<uint8_t const*>(k.x);
  size_t row_bytes = size_t(g.k) * kElementBytes, chunk = g.m_shard * row_bytes;
  uint32_t count = k.groups.count;
  for (uint32_t group = 0; group < count && then.well(); ++group) {
    note(call, beside.stream(), schedule::Mark::kSending, group, then);
    for (uint32_t step = 1; step < k.ranks && then.well(); ++step) {
      uint32_t peer = (k.rank + step) % k.ranks;
      for (Piece const& piece : pieces_of(k, group)) {
        size_t batch = piece.batch, at = piece.row * row_bytes;
        uint8_t* to = landing.staging(peer) + (batch * k.ranks + k.rank) * chunk + at;
        if (then.well()) then(beside.push(to, own + batch * chunk + at, piece.rows * row_bytes));
      }
      if (then.well()) then(beside.raise(landing.word(peer, k.rank, group)));
    }
    note(call, beside.stream(), schedule::Mark::kSent, group, then);
  }
  if (then.well()) then(sm90::launch_own_rows(k, call.clusters, stream));
  for (uint32_t group = 0; group < count && then.well(); ++group) {
    then(landing.await(group, group + 1, stream));
    if (gathered && group + 1 == count && then.well()) then(beside.follow(stream));
    if (then.well()) then(sm90::launch_group_rows(k, group, call.clusters, stream));
  }
  if (!gathered) return;
  // All are there: the gathered x is copied beside the last matmul.
  auto* whole = static_cast<uint8_t*>(gathered->untyped_data());
  for (uint32_t rank = 0; rank < k.ranks && then.well(); ++rank)
    then(rank == k.rank ? beside.copy(whole + rank * chunk, chunk * k.ranks, own, chunk, chunk, g.batch)
                        : beside.copy(whole + rank * chunk, chunk * k.ranks, landing.staging(k.rank) + rank * chunk,
                                      chunk * k.ranks, chunk, g.batch));
}

template <Op op>
ffi::Error prepare(team::CliqueContext clique, ffi::RemainingArgs, ffi::RemainingRets, SignalAttributes attributes) {
  return team::request_clique(clique, team::make_groups(attributes.groups, attributes.team_size), team::kSignalCommunicationId);
}

Buffers::Optional second_result(ffi::RemainingRets results, size_t index) {
  auto scratch = results.get<ffi::AnyBuffer>(index);
  return scratch ? Buffers::Optional(**scratch) : std::nullopt;
}

template <Op op>
ffi::Error initialize(team::CliqueContext clique, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                      SignalAttributes attributes) {
  auto x = arguments.get<ffi::AnyBuffer>(0), w = arguments.get<ffi::AnyBuffer>(1);
  auto y = results.get<ffi::AnyBuffer>(0);
  if (!x || !w || !y) return failed(op, "XLA gave Initialize no buffers", ffi::ErrorCode::kInternal);
  team::DeviceScope scope(device);
  int multiprocessors = ready_device(device);
  if (multiprocessors < 0)
    return failed(op, cudaGetErrorString(static_cast<cudaError_t>(-multiprocessors)), ffi::ErrorCode::kInternal);
  Buffers buffers = all_buffers(op, *x, *w, **y, attributes, arguments, results, 2, 2);
  auto call = decode_call(op, attributes, buffers, second_result(results, 1), multiprocessors);
  if (!call) return call.error();
  auto beside = find_beside(op, clique, attributes, device);
  if (!beside) return beside.error();
  std::string why;
  if (!call->engines) {
    why = (*beside)->warm_up(op, counts_of(*call), call->type);
    return why.empty() ? ffi::Error::Success() : failed(op, why, ffi::ErrorCode::kInternal);
  }
  if (team::stuck_report() == nullptr) return failed(op, "no pinned host memory", ffi::ErrorCode::kResourceExhausted);
  team::Team* team = team::Team::of((*beside)->communicator(), device, &why);
  if (team == nullptr || team->find_or_make(call->demand, &why) == nullptr)
    return failed(op, why, ffi::ErrorCode::kResourceExhausted);
  return ffi::Error::Success();
}

template <Op op>
ffi::Error execute(team::CliqueContext clique, cudaStream_t stream, int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets also,
                   SignalAttributes attributes) {
  team::DeviceScope scope(device);
  Buffers buffers = all_buffers(op, x, w, *y, attributes, more, also, 0, 1);
  auto call = decode_call(op, attributes, buffers, second_result(also, 0), ready_device(device));
  if (!call) return call.error();
  auto found = find_beside(op, clique, attributes, device);
  if (!found) return found.error();
  team::Beside& beside = **found;
  sm90::SignalCall& k = call->kernel;
  k.rank = static_cast<uint32_t>(beside.rank());

  team::Arena const* arena = nullptr;
  if (call->engines) {
    std::string why;
    team::Team* team = team::Team::of(beside.communicator(), device, &why);
    if (team == nullptr) return failed(op, why);
    arena = team->find(call->demand);
    if (arena == nullptr) return failed(op, "no arena was made in Initialize", ffi::ErrorCode::kInternal);
  }

  Steps then;
  auto lock = beside.alone();
  then(cudaMemsetAsync(k.scratch, 0, schedule::kScratchHead, stream));
  take_notes(*call, device, stream, then);
  if (then.well()) then(beside.follow(stream));
  if (arena != nullptr) {
    Landing landing(*call, *arena, beside.next_epoch(arena));
    if (then.well()) then(beside.stamp(landing.value()));
    if (op == Op::kAllGatherMatmul) {
      k.whole = landing.staging(k.rank);
      push_rows(*call, landing, beside, stream, buffers.gathered, then);
    } else {
      k.landed = landing.staging(k.rank);
      push_sums(*call, landing, beside, stream, then);
    }
  } else if (op == Op::kAllGatherMatmul)
    gather_groups(*call, beside, stream, buffers.gathered.has_value(), then);
  else
    sum_groups(*call, beside, stream, then);
  // Also after a failure: nothing of this call runs on when XLA goes on.
  std::string why = beside.mark(kJoin);
  if (why.empty()) why = beside.join(stream, kJoin);
  then(why);
  if (op != Op::kAllGatherMatmul) finish(*call, k.groups.count - 1, k.groups.count, stream, then);
  return then.well() ? ffi::Error::Success() : failed(op, then.why(), ffi::ErrorCode::kInternal);
}

template <Op op>
nanobind::dict stages() {
  static auto prepare_handler =
      ffi::Ffi::BindPrepare().Ctx<Clique>().RemainingArgs().RemainingRets().Attrs<SignalAttributes>().To(prepare<op>);
  static auto initialize_handler = ffi::Ffi::BindInitialize()
                                       .Ctx<Clique>()
                                       .Ctx<ffi::DeviceOrdinal>()
                                       .RemainingArgs()
                                       .RemainingRets()
                                       .Attrs<SignalAttributes>()
                                       .To(initialize<op>);
  static auto execute_handler = ffi::Ffi::Bind()
                                    .Ctx<Clique>()
                                    .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                    .Ctx<ffi::DeviceOrdinal>()
                                    .Arg<ffi::AnyBuffer>()
                                    .Arg<ffi::AnyBuffer>()
                                    .RemainingArgs()
                                    .Ret<ffi::AnyBuffer>()
                                    .RemainingRets()
                                    .Attrs<SignalAttributes>()
                                    .To(execute<op>);
  auto capsule = [](XLA_FFI_Handler* handler) { return nanobind::capsule(reinterpret_cast<void*>(handler)); };
  nanobind::dict stages;
  stages["prepare"] = capsule(+[](XLA_FFI_CallFrame* frame) { return prepare_handler->Call(frame); });
  stages["initialize"] = capsule(+[](XLA_FFI_CallFrame* frame) { return initialize_handler->Call(frame); });
  stages["execute"] = capsule(+[](XLA_FFI_CallFrame* frame) { return execute_handler->Call(frame); });
  return stages;
}

}  // namespace

nanobind::dict signal_registrations() {
  nanobind::dict targets;
  targets["entwine_signal_all_gather_matmul"] = stages<Op::kAllGatherMatmul>();
  targets["entwine_signal_matmul_reduce_scatter"] = stages<Op::kMatmulReduceScatter>();
  targets["entwine_signal_matmul_all_reduce"] = stages<Op::kMatmulAllReduce>();
  return targets;
}

}  // namespace entwine
