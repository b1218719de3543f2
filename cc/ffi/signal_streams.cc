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
// wait for each other (within the same bound, by team/watch.h); each rank enqueues them in one order on one stream, and what
// they follow, a matmul or an event, is enqueued before and ends by itself. So it is the same with one multiprocessor.
//
// Not to be recorded into CUDA graphs: a wait for a counter has no place in one (branches of a graph may run one after the
// other, a waiting one first), so the handlers don't say that they can be.
//
// The scratch is a result of the call, so XLA accounts for it, and hands it out again after this call on its own stream, which
// has joined the other by then.
#include "ffi/signal_streams.h"

#include <algorithm>
#include <set>
#include <utility>

#include "team/stuck.h"

namespace entwine {
namespace {

using schedule::Op;

constexpr uint32_t kJoin = schedule::kMaxGroups;  // the event; those below are of groups

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
void note(SignalStreams const& call, cudaStream_t stream, schedule::Mark mark, uint32_t group, Steps& then) {
  if (call.moments && then.well()) then(call.moments->mark(stream, mark, group));
}

// Of a group, to all peers.
std::vector<uint64_t> group_bytes(SignalStreams const& call) {
  sm90::SignalCall const& k = call.kernel;
  std::vector<uint64_t> bytes;
  for (uint32_t group = 0; group < k.groups.count; ++group) {
    uint64_t elements = schedule::group_elements(k.op, k.geometry, k.groups, group);
    bytes.push_back(elements * kSignalElementBytes * (k.ranks - 1));
  }
  return bytes;
}

// Room for a call's notes, if they are taken and there is some left.
void take_notes(SignalStreams& call, cudaStream_t stream, Steps& then) {
  sm90::SignalCall& k = call.kernel;
  if (!team::tracing() || !then.well()) return;
  k.trace_clusters = call.all_clusters;
  sm90::SignalTraceShape shape = sm90::signal_trace_shape(k);
  if (shape.events() == 0) return;
  auto moments = std::make_shared<team::Moments>(call.device);
  team::TracedLaunch traced{};
  traced.strategy = "signal";
  traced.op = k.op;
  traced.geometry = call.geometry;
  traced.rank = k.rank;
  traced.out_bytes = kSignalElementBytes;
  traced.device = call.device;
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

// Has NCCL move a group, in so much time.
template <class Transfer>
void move(SignalStreams const& call, team::Beside& beside, uint32_t group, uint32_t number, Steps& then, Transfer transfer) {
  note(call, beside.stream(), schedule::Mark::kSending, group, then);
  if (!then.well()) return;
  then(beside.begin(call.patience(), "group " + std::to_string(group) + ", epoch " + std::to_string(number)));
  if (then.well()) transfer();
  then(beside.end());  // also after a failure
  note(call, beside.stream(), schedule::Mark::kSent, group, then);
}

// The last copies of groups `first` to `end`.
void finish(SignalStreams const& call, uint32_t first, uint32_t end, cudaStream_t stream, Steps& then) {
  note(call, stream, schedule::Mark::kCopying, end - 1, then);
  if (then.well()) then(sm90::launch_finish(call.kernel, first, end, call.multiprocessors, stream));
  note(call, stream, schedule::Mark::kCopied, end - 1, then);
}

void sum_groups(SignalStreams const& call, team::Beside& beside, cudaStream_t stream, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  uint32_t last = k.groups.count - 1, number = beside.next_call();
  if (then.well()) then(sm90::launch_sums(k, call.clusters, stream));
  for (uint32_t group = 0; group <= last && then.well(); ++group) {
    then(beside.await(k.finished(group), k.parts(group)));
    size_t count = k.groups.size(group) * k.tile_elements();
    uint8_t* tiles = k.tiles() + uint64_t(k.geometry.ranks) * k.groups.begin(group) * k.tile_elements() * 2;
    move(call, beside, group, number, then, [&] {
      then(k.op == Op::kMatmulAllReduce ? beside.sum(tiles, count, call.type)
                                        : beside.sum_and_scatter(tiles, count, call.type));
    });
    if (group + 1 == last && then.well()) then(beside.mark(0));
  }
  if (last > 0 && then.well()) {
    then(beside.join(stream, 0));
    finish(call, 0, last, stream, then);
  }
}

// One NCCL group is of so many pieces at most.
constexpr size_t kPiecesAtOnce = 64;

void gather_group(SignalStreams const& call, team::Beside& beside, uint32_t group, Steps& then) {
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

void gather_groups(SignalStreams const& call, team::Beside& beside, cudaStream_t stream, bool wanted, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  schedule::Geometry const& g = k.geometry;
  uint32_t count = k.groups.count, number = beside.next_call();
  for (uint32_t group = 0; group < count && then.well(); ++group) {
    move(call, beside, group, number, then, [&] { gather_group(call, beside, group, then); });
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
  Landing(SignalStreams const& call, team::Arena const& arena, uint32_t epoch)
      : k_(call.kernel), arena_(arena), epoch_(epoch), timeout_ns_(call.timeout_ns) {}

  uint32_t value() const { return schedule::signal_value(epoch_); }
  uint8_t* staging(uint32_t rank) const { return arena_.base[rank] + arena_.layout.staging_offset(epoch_ & 1); }
  // Sums of the own cells from `source` on.
  uint8_t* sums(uint32_t rank, uint32_t source, uint32_t cell) const {
    return staging(rank) + schedule::peer_slot(rank, source) * schedule::partials_bytes(k_.geometry, kSignalElementBytes) +
           cell * k_.tile_elements() * kSignalElementBytes;
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

void push_sums(SignalStreams const& call, Landing const& landing, team::Beside& beside, cudaStream_t stream, Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  uint32_t last = k.groups.count - 1, owners = k.geometry.ranks;
  then(sm90::launch_sums(k, call.clusters, stream));
  for (uint32_t group = 0; group <= last && then.well(); ++group) {
    then(beside.await(k.finished(group), k.parts(group)));
    note(call, beside.stream(), schedule::Mark::kSending, group, then);
    uint32_t first = k.groups.begin(group);
    size_t bytes = k.groups.size(group) * k.tile_elements() * kSignalElementBytes;
    for (uint32_t step = 1; step < k.ranks && then.well(); ++step) {
      uint32_t peer = (k.rank + step) % k.ranks;
      uint64_t tile = k.groups.slot(owners, owners == 1 ? 0 : peer, first);
      then(beside.push(landing.sums(peer, k.rank, first), k.tiles() + tile * k.tile_elements() * kSignalElementBytes, bytes));
      if (then.well()) then(beside.raise(landing.word(peer, k.rank, group)));
    }
    note(call, beside.stream(), schedule::Mark::kSent, group, then);
  }
  if (last > 0 && then.well()) then(landing.await(0, last, stream));
  if (last > 0) finish(call, 0, last, stream, then);
  if (then.well()) then(landing.await(last, last + 1, stream));
}

void push_rows(SignalStreams const& call, Landing const& landing, team::Beside& beside, cudaStream_t stream, void* gathered,
               Steps& then) {
  sm90::SignalCall const& k = call.kernel;
  schedule::Geometry const& g = k.geometry;
  auto const* own = static_cast<uint8_t const*>(k.x);
  size_t row_bytes = size_t(g.k) * kSignalElementBytes, chunk = g.m_shard * row_bytes;
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
    if (gathered != nullptr && group + 1 == count && then.well()) then(beside.follow(stream));
    if (then.well()) then(sm90::launch_group_rows(k, group, call.clusters, stream));
  }
  if (gathered == nullptr) return;
  // All are there: the gathered x is copied beside the last matmul.
  auto* whole = static_cast<uint8_t*>(gathered);
  for (uint32_t rank = 0; rank < k.ranks && then.well(); ++rank)
    then(rank == k.rank ? beside.copy(whole + rank * chunk, chunk * k.ranks, own, chunk, chunk, g.batch)
                        : beside.copy(whole + rank * chunk, chunk * k.ranks, landing.staging(k.rank) + rank * chunk,
                                      chunk * k.ranks, chunk, g.batch));
}
}  // namespace

std::vector<size_t> SignalStreams::counts() const {
  std::set<size_t> counts;
  for (uint32_t group = 0; group < kernel.groups.count; ++group) {
    if (kernel.op != Op::kAllGatherMatmul) counts.insert(kernel.groups.size(group) * kernel.tile_elements());
    if (kernel.op == Op::kAllGatherMatmul)
      for (Piece const& piece : pieces_of(kernel, group)) counts.insert(size_t(piece.rows) * kernel.geometry.k);
  }
  return {counts.begin(), counts.end()};
}

std::string SignalStreams::enqueue(team::Beside& beside, team::Arena const* arena, cudaStream_t stream, void* gathered) {
  sm90::SignalCall& k = kernel;
  bool gather = k.op == Op::kAllGatherMatmul;
  Steps then;
  auto lock = beside.alone();
  then(cudaMemsetAsync(k.scratch, 0, schedule::kScratchHead, stream));
  take_notes(*this, stream, then);
  if (then.well()) then(beside.follow(stream));
  if (arena != nullptr) {
    Landing landing(*this, *arena, beside.next_epoch(arena));
    if (then.well()) then(beside.stamp(landing.value()));
    if (gather) {
      k.whole = landing.staging(k.rank);
      push_rows(*this, landing, beside, stream, gathered, then);
    } else {
      k.landed = landing.staging(k.rank);
      push_sums(*this, landing, beside, stream, then);
    }
  } else if (gather) {
    gather_groups(*this, beside, stream, gathered != nullptr, then);
  } else {
    sum_groups(*this, beside, stream, then);
  }
  // Also after a failure: nothing of this call runs on when XLA goes on.
  std::string why = beside.mark(kJoin);
  if (why.empty()) why = beside.join(stream, kJoin);
  then(why);
  if (!gather) finish(*this, k.groups.count - 1, k.groups.count, stream, then);
  return then.why();
}

}  // namespace entwine
