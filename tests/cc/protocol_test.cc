// A model check of the protocol: every interleaving of small teams over several calls, with the real orders and signals.
//
// A rank is some workers that claim positions of its queue, one call after the other; the next call starts when all of them
// have found the queue empty, as a kernel's end and the next one's start. Staging is cells, each holding the mark of what was
// last written there; a step is one claim, one write, one signal, one look at a signal that lets a worker go on, or one read.
// Explored depth first over all states. Found are: a state in which nobody can go on and somebody isn't finished, a read of
// something else than this call's bytes (stale, or overwritten before it was read), and, in broken variants, that the check
// finds these.
#include <ostream>
#include <string>
#include <vector>

#include "check.h"
#include "explore.h"
#include "schedule/signals.h"
#include "schedule/tile_order.h"

namespace entwine::schedule {
namespace {

constexpr uint32_t kFirstEpoch = 0xfffffffeu;  // wraps within three calls
constexpr uint32_t kMostRanks = 3, kMostWorkers = 2, kMostTiles = 2;

// kFewRows: sums in one shot, to all; a tile's are sent and then added.
enum class Call : uint8_t { kGather, kScatter, kAllReduce, kFewRows };
enum class Fault { kNone, kOneBuffer, kOwnTilesFirst, kSignalBeforeWrite, kHearsOneNeighbour };

struct Program {
  uint32_t ranks, workers, tiles;  // tiles of a chunk; an all-gather's row blocks too
  std::vector<Call> calls;
  uint32_t lead;
  Fault fault;
};

// What a worker is to do, one after the other.
struct Step {
  enum Kind : uint8_t { kWrite, kSignal, kAwait, kRead } kind;
  uint8_t peer, tile;
  uint8_t result = 0;  // of a finished tile, which an all-reduce sends on, rather than of a partial sum or gathered rows
};

struct Worker {
  uint8_t position, step;  // of the queue, past its end if it is done with the call; of the position's steps
  uint8_t claimed;
};

struct Rank {
  uint8_t call, queue;
  Worker workers[kMostWorkers];
  // [half][result][source or owner][tile]: one plus the call that wrote it. Raised words: one plus the call.
  uint8_t staging[2][2][kMostRanks][kMostTiles];
  uint8_t words[2][kMostRanks][kMostTiles];
};

struct State {
  Rank ranks[kMostRanks];
};

std::ostream& operator<<(std::ostream& out, Program const& p) {
  return out << p.ranks << " ranks, " << p.workers << " workers, lead " << p.lead;
}

class Model {
 public:
  explicit Model(Program const& program) : program_(program) {}

  // "" or what went wrong first.
  std::string explore() {
    uint32_t each = program_.workers;
    return explore::all_states<State>(
        program_.ranks * each, fault_, states_, [&](State& s, uint32_t i) { return move(s, i / each, i % each); },
        [&](State const& s) { return finished(s); });
  }
  size_t states() const { return states_; }

 private:
  bool finished(State const& s) const {
    for (uint32_t r = 0; r < program_.ranks; ++r)
      if (s.ranks[r].call < program_.calls.size()) return false;
    return true;
  }

  // Positions of a call: an all-gather's pushes stand before its tiles, for they are claimed from a queue of their own by warps
  // that do nothing else.
  uint32_t pushes(Call op) const { return op == Call::kGather ? (program_.ranks - 1) * program_.tiles : 0; }
  uint32_t size(Call op) const {
    if (op == Call::kFewRows) return program_.tiles;
    // What an all-reduce collects counts as standing after all tiles.
    uint32_t collects = op == Call::kAllReduce ? (program_.ranks - 1) * program_.tiles : 0;
    return pushes(op) + program_.ranks * program_.tiles + collects;
  }

  std::vector<Step> steps(uint32_t rank, Call op, uint32_t position) const {
    Raster raster{program_.tiles, 1, 1};
    if (op == Call::kGather) {
      if (position < pushes(op)) {
        PushOrder::Unit u = PushOrder{program_.ranks, rank, program_.tiles, 1}.at(position);
        return sent(u.destination, u.row);
      }
      Tile t = AllGatherOrder{raster, program_.ranks, rank}.at(position - pushes(op));
      if (t.owner == rank) return {};
      return {{Step::kAwait, uint8_t(t.owner), uint8_t(t.row)}, {Step::kRead, uint8_t(t.owner), uint8_t(t.row)}};
    }
    if (op == Call::kFewRows) {
      std::vector<Step> steps;
      for (uint32_t peer = 0; peer < program_.ranks; ++peer)
        if (peer != rank) append(steps, sent(peer, position));
      append(steps, added(rank, position));
      return steps;
    }
    if (position >= program_.ranks * program_.tiles) {
      CollectOrder::Job job = CollectOrder{raster, program_.ranks, rank, 1}.at(position - program_.ranks * program_.tiles);
      return {{Step::kAwait, uint8_t(job.owner), uint8_t(job.index), 1},
              {Step::kRead, uint8_t(job.owner), uint8_t(job.index), 1}};
    }
    ReduceScatterOrder order{raster, program_.ranks, rank, program_.lead};
    uint32_t own = program_.tiles;
    if (program_.fault == Fault::kOwnTilesFirst) {
      // The same tiles, the own ones before the others'.
      if (position < own) return added(rank, position);
      uint32_t i = position - own, peers = program_.ranks - 1;
      return sent((rank + 1 + i % peers) % program_.ranks, i / peers);
    }
    Tile t = order.at(position);
    if (t.owner != rank) return sent(t.owner, t.row);
    std::vector<Step> steps = added(rank, t.row);
    for (uint32_t peer = 0; op == Call::kAllReduce && peer < program_.ranks; ++peer)
      if (peer != rank) append(steps, sent(peer, t.row, 1));
    return steps;
  }
  static void append(std::vector<Step>& steps, std::vector<Step> const& more) {
    steps.insert(steps.end(), more.begin(), more.end());
  }
  std::vector<Step> sent(uint32_t destination, uint32_t tile, uint8_t result = 0) const {
    Step write{Step::kWrite, uint8_t(destination), uint8_t(tile), result};
    Step signal{Step::kSignal, uint8_t(destination), uint8_t(tile), result};
    if (program_.fault == Fault::kSignalBeforeWrite) return {signal, write};
    return {write, signal};
  }
  std::vector<Step> added(uint32_t rank, uint32_t tile) const {
    std::vector<Step> steps;
    for (uint32_t source = 0; source < program_.ranks; ++source) {
      if (source == rank) continue;
      if (program_.fault == Fault::kHearsOneNeighbour && source != (rank + 1) % program_.ranks) continue;
      steps.push_back({Step::kAwait, uint8_t(source), uint8_t(tile)});
      steps.push_back({Step::kRead, uint8_t(source), uint8_t(tile)});
    }
    return steps;
  }

  uint32_t half(uint32_t call) const { return program_.fault == Fault::kOneBuffer ? 0 : (kFirstEpoch + call) & 1; }

  // One step of a worker; false if it has none to make.
  bool move(State& s, uint32_t r, uint32_t w) {
    Rank& rank = s.ranks[r];
    if (rank.call == program_.calls.size()) return false;
    Call op = program_.calls[rank.call];
    Worker& worker = rank.workers[w];
    if (!worker.claimed) {
      worker = {rank.queue, 0, 1};
      if (rank.queue < size(op)) ++rank.queue;
      return true;
    }
    if (worker.position >= size(op)) {  // waits for the call's end, which its last worker brings about
      for (uint32_t i = 0; i < program_.workers; ++i)
        if (!rank.workers[i].claimed || rank.workers[i].position < size(op)) return false;
      ++rank.call;
      rank.queue = 0;
      for (Worker& each : rank.workers) each = {0, 0, 0};
      return true;
    }
    std::vector<Step> todo = steps(r, op, worker.position);
    if (worker.step == todo.size()) {
      worker = {0, 0, 0};
      return true;
    }
    Step step = todo[worker.step];
    uint8_t mark = uint8_t(rank.call + 1);
    switch (step.kind) {
      case Step::kWrite:
        s.ranks[step.peer].staging[half(rank.call)][step.result][r][step.tile] = mark;
        break;
      case Step::kSignal:
        s.ranks[step.peer].words[step.result][r][step.tile] = mark;
        break;
      case Step::kAwait: {
        uint8_t raised = rank.words[step.result][step.peer][step.tile];
        uint32_t seen = signal_value(kFirstEpoch + raised - 1);  // at first as an earlier call left it
        if (!signal_reached(seen, signal_value(kFirstEpoch + rank.call))) return false;
        break;
      }
      case Step::kRead:
        if (rank.staging[half(rank.call)][step.result][step.peer][step.tile] != mark)
          fault_ = "rank " + std::to_string(r) + " read call " +
                   std::to_string(rank.staging[half(rank.call)][step.result][step.peer][step.tile] - 1) + "'s bytes in call " +
                   std::to_string(rank.call);
        break;
    }
    ++worker.step;
    return true;
  }

  Program program_;
  std::string fault_;
  size_t states_ = 0;
};

std::vector<Program> programs(Fault fault) {
  constexpr Call g = Call::kGather, s = Call::kScatter, a = Call::kAllReduce, f = Call::kFewRows;
  std::vector<Program> all;
  for (uint32_t lead : {0u, 1u, 9u})
    for (uint32_t workers : {1u, 2u})
      for (std::vector<Call> const& calls :
           {std::vector<Call>{s, s, s}, {g, g, g}, {a, a, a}, {f, f, f}, {s, g, a}, {g, f, s}, {f, a, g}})
        all.push_back({2, workers, workers == 1 ? 2u : 1u, calls, lead, fault});
  for (std::vector<Call> const& calls : {std::vector<Call>{s, s, s}, {g, g, g}, {f, f, f}, {s, g, f}, {a, a}})
    all.push_back({3, 1, 1, calls, 0, fault});
  all.push_back({2, 2, 2, {s, g, s}, 1, fault});
  all.push_back({3, 2, 1, {f, f, f}, 0, fault});
  return all;
}

void nothing_goes_wrong() { explore::nothing_goes_wrong<Model>(programs(Fault::kNone), 500'000); }

bool goes_wrong(Fault fault, std::string const& words) { return explore::goes_wrong<Model>(programs(fault), words); }

void one_buffer_is_not_enough() { CHECK(goes_wrong(Fault::kOneBuffer, "bytes in call")); }
void own_tiles_first_deadlock() { CHECK(goes_wrong(Fault::kOwnTilesFirst, "deadlock")); }
void a_signal_before_its_bytes_is_found() { CHECK(goes_wrong(Fault::kSignalBeforeWrite, "bytes in call")); }
// A rank runs two calls ahead of one that it doesn't hear from; what that one waits for is gone.
void all_must_hear_from_all() { CHECK(goes_wrong(Fault::kHearsOneNeighbour, "deadlock")); }

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return explore::report(check::run({{"nothing goes wrong", nothing_goes_wrong},
                                     {"one buffer is not enough", one_buffer_is_not_enough},
                                     {"own tiles first deadlock", own_tiles_first_deadlock},
                                     {"a signal before its bytes is found", a_signal_before_its_bytes_is_found},
                                     {"all must hear from all", all_must_hear_from_all}}));
}
