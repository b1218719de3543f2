// A model check of strategy "resident" (schedule/movers.h): every interleaving of small teams over several calls, with the real
// orders, tickets and flags, as protocol_test.cc has it for "fused".
//
// A rank is some workers, and the idle half of ticket 0's. Memory is cells, each holding the mark of what was last written
// there; a step is one claim, one write, one signal, one look at a signal that lets somebody go on, or one read. Found are a
// state in which nobody can go on and somebody isn't finished, and a read of something else than this call's bytes.
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "check.h"
#include "explore.h"
#include "schedule/movers.h"
#include "schedule/signals.h"

namespace entwine::schedule {
namespace {

constexpr uint32_t kFirstEpoch = 0xfffffffeu;  // wraps within three calls
constexpr uint32_t kMostRanks = 3, kMostWorkers = 2, kMostTiles = 2;

enum class Call : uint8_t { kGather, kScatter, kAllReduce };
enum class Fault { kNone, kIdleHalfRests, kNothingReserved, kResultsFirst, kSignalBeforeWrite };

struct Program {
  uint32_t ranks, workers, movers, tiles;  // tiles of a chunk; an all-gather's row blocks too
  std::vector<Call> calls;
  uint32_t lead;
  Fault fault;
};

struct Step {
  enum Kind : uint8_t { kWrite, kSignal, kAwait, kRead } kind;
  bool own;  // of what waits for this rank's movers, and its flags; else of what a peer has, or has sent
  uint8_t peer, tile;
  uint8_t result;  // of a finished tile rather than of a partial sum or gathered rows
};

enum class Role : uint8_t { kNew, kTiles, kMoves, kDone };

struct Agent {
  Role role;
  uint8_t claims, ticket_0, busy, job;  // busy with a job of movers, or else a tile
  uint8_t number, step;
};

struct Rank {
  uint8_t call, queue, moves;
  Agent agents[kMostWorkers + 1];  // the last one in use is the idle half
  // [half][result][peer][tile]: one plus the call that wrote it; what has come from peers, and what is to go to them.
  uint8_t staging[2][2][kMostRanks][kMostTiles], outgoing[2][2][kMostRanks][kMostTiles];
  uint8_t words[2][kMostRanks][kMostTiles], flags[2][kMostRanks][kMostTiles];
};

struct State {
  Rank ranks[kMostRanks];
};

std::ostream& operator<<(std::ostream& out, Program const& p) {
  return out << p.ranks << " ranks, " << p.workers << " workers, " << p.movers << " movers, lead " << p.lead;
}

class Model {
 public:
  explicit Model(Program const& program) : program_(program) {}

  // "" or what went wrong first.
  std::string explore() {
    uint32_t each = program_.workers + 1;
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

  Movers movers() const { return {program_.fault == Fault::kNothingReserved ? 0 : program_.movers}; }
  bool ticket_moves(uint32_t position) const { return Movers{program_.movers}.reserved(position); }
  Raster raster() const { return {program_.tiles, 1, 1}; }

  // What an all-reduce collects counts as standing after all tiles.
  uint32_t positions(Call op) const {
    uint32_t collects = op == Call::kAllReduce ? (program_.ranks - 1) * program_.tiles : 0;
    return movers().count + program_.ranks * program_.tiles + collects;
  }
  MoveOrder moves(uint32_t rank, Call op) const {
    return {raster(), program_.ranks, rank, program_.lead, op == Call::kAllReduce};
  }
  uint32_t jobs(uint32_t rank, Call op) const {
    return op == Call::kGather ? PushOrder{program_.ranks, rank, program_.tiles, 1}.size() : moves(rank, op).size();
  }

  static Step step(Step::Kind kind, bool own, uint32_t peer, uint32_t tile, uint32_t result = 0) {
    return {kind, own, uint8_t(peer), uint8_t(tile), uint8_t(result)};
  }
  void send(std::vector<Step>& steps, bool own, uint32_t peer, uint32_t tile, uint32_t result = 0) const {
    Step write = step(Step::kWrite, own, peer, tile, result), signal = step(Step::kSignal, own, peer, tile, result);
    bool early = program_.fault == Fault::kSignalBeforeWrite;
    steps.push_back(early ? signal : write);
    steps.push_back(early ? write : signal);
  }
  static void take(std::vector<Step>& steps, bool own, uint32_t peer, uint32_t tile, uint32_t result = 0) {
    steps.push_back(step(Step::kAwait, own, peer, tile, result));
    steps.push_back(step(Step::kRead, own, peer, tile, result));
  }

  std::vector<Step> of_job(uint32_t rank, Call op, uint32_t number) const {
    std::vector<Step> steps;
    if (op == Call::kGather) {
      PushOrder::Unit u = PushOrder{program_.ranks, rank, program_.tiles, 1}.at(number);
      send(steps, false, u.destination, u.row);
      return steps;
    }
    MoveOrder order = moves(rank, op);
    uint32_t half = order.size() / 2, results = op == Call::kAllReduce && program_.fault == Fault::kResultsFirst;
    MoveOrder::Job job = order.at(number);
    if (results)  // the same jobs, those of finished tiles before the others
      for (uint32_t i = 0, seen = 0; i < order.size(); ++i)
        if (order.at(i).result == (number < half) && seen++ == number % half) job = order.at(i);
    take(steps, true, job.result ? rank : job.peer, job.index, job.result);
    send(steps, false, job.peer, job.index, job.result);
    return steps;
  }

  std::vector<Step> of_tile(uint32_t rank, Call op, uint32_t number) const {
    std::vector<Step> steps;
    if (op == Call::kGather) {
      Tile t = AllGatherOrder{raster(), program_.ranks, rank}.at(number);
      if (t.owner != rank) take(steps, false, t.owner, t.row);
      return steps;
    }
    ReduceScatterOrder order{raster(), program_.ranks, rank, program_.lead};
    if (number >= order.size()) {
      CollectOrder::Job job = CollectOrder{raster(), program_.ranks, rank, 1}.at(number - order.size());
      take(steps, false, job.owner, job.index, 1);
      return steps;
    }
    Tile t = order.at(number);
    if (t.owner != rank) {
      send(steps, true, t.owner, t.row);
      return steps;
    }
    for (uint32_t source = 0; source < program_.ranks; ++source)
      if (source != rank) take(steps, false, source, t.row);
    if (op == Call::kAllReduce) send(steps, true, rank, t.row, 1);
    return steps;
  }

  // A claim of somebody who has nothing to do; false if there is nothing to claim.
  bool claim(Rank& rank, uint32_t r, uint32_t a, Call op) {
    Agent& agent = rank.agents[a];
    if (agent.role == Role::kDone) return end(rank);
    if (agent.role == Role::kMoves) {
      if (rank.moves == jobs(r, op)) {
        agent.role = a == program_.workers ? Role::kDone : Role::kTiles;
      } else {
        agent.busy = agent.job = 1;
        agent.number = rank.moves++;
      }
      return true;
    }
    if (a == program_.workers) return false;  // nobody has told it yet
    uint8_t position = rank.queue;
    if (position < positions(op)) ++rank.queue;
    bool first = agent.role == Role::kNew;
    agent.role = first && ticket_moves(position) ? Role::kMoves : Role::kTiles;
    if (first) agent.ticket_0 = position == 0;
    if (agent.claims < 2 && ++agent.claims == 2 && agent.ticket_0) {
      bool moves = position == 1 && program_.fault != Fault::kIdleHalfRests;
      rank.agents[program_.workers].role = moves ? Role::kMoves : Role::kDone;
    }
    if (agent.role == Role::kMoves || movers().reserved(position)) return true;
    if (position == positions(op)) {
      agent.role = Role::kDone;
      return true;
    }
    agent.busy = 1;
    agent.number = uint8_t(movers().tile(position));
    return true;
  }

  bool end(Rank& rank) {
    for (uint32_t i = 0; i <= program_.workers; ++i)
      if (rank.agents[i].role != Role::kDone) return false;
    ++rank.call;
    rank.queue = rank.moves = 0;
    std::memset(static_cast<void*>(rank.agents), 0, sizeof rank.agents);
    return true;
  }

  // One step of a worker or of the idle half; false if it has none to make.
  bool move(State& s, uint32_t r, uint32_t a) {
    Rank& rank = s.ranks[r];
    if (rank.call == program_.calls.size()) return false;
    Call op = program_.calls[rank.call];
    Agent& agent = rank.agents[a];
    if (!agent.busy) return claim(rank, r, a, op);
    std::vector<Step> todo = agent.job ? of_job(r, op, agent.number) : of_tile(r, op, agent.number);
    if (todo.empty()) {
      agent.busy = agent.job = agent.number = 0;
      return true;
    }
    Step now = todo[agent.step];
    uint8_t mark = uint8_t(rank.call + 1);
    uint32_t half = (kFirstEpoch + rank.call) & 1;
    Rank& peer = s.ranks[now.peer];
    switch (now.kind) {
      case Step::kWrite:
        (now.own ? rank.outgoing[half][now.result][now.peer] : peer.staging[half][now.result][r])[now.tile] = mark;
        break;
      case Step::kSignal:
        (now.own ? rank.flags[now.result][now.peer] : peer.words[now.result][r])[now.tile] = mark;
        break;
      case Step::kAwait: {
        uint8_t raised = (now.own ? rank.flags : rank.words)[now.result][now.peer][now.tile];
        uint32_t seen = signal_value(kFirstEpoch + raised - 1);  // at first as an earlier call left it
        if (!signal_reached(seen, signal_value(kFirstEpoch + rank.call))) return false;
        break;
      }
      case Step::kRead: {
        uint8_t found = (now.own ? rank.outgoing : rank.staging)[half][now.result][now.peer][now.tile];
        if (found != mark) fault_ = "rank " + std::to_string(r) + " read other bytes in call " + std::to_string(rank.call);
        break;
      }
    }
    if (++agent.step == todo.size()) agent.busy = agent.job = agent.number = agent.step = 0;
    return true;
  }

  Program program_;
  std::string fault_;
  size_t states_ = 0;
};

std::vector<Program> programs(Fault fault) {
  constexpr Call g = Call::kGather, s = Call::kScatter, a = Call::kAllReduce;
  std::vector<Program> all;
  for (std::vector<Call> const& calls : {std::vector<Call>{s, s, s}, {g, g, g}, {a, a}, {s, g, s}})
    for (uint32_t lead : {0u, 9u}) all.push_back({2, 1, 1, 2, calls, lead, fault});
  for (std::vector<Call> const& calls : {std::vector<Call>{s, s, s}, {g, g}, {a}, {s, g}})
    all.push_back({2, 2, 1, 1, calls, 0, fault});
  all.push_back({2, 1, 2, 2, {a, s}, 1, fault});
  all.push_back({2, 2, 2, 1, {s}, 0, fault});
  for (Call each : {s, g, a}) all.push_back({3, 1, 1, 1, {each}, 0, fault});
  return all;
}

void nothing_goes_wrong() { explore::nothing_goes_wrong<Model>(programs(Fault::kNone), 100'000); }

bool goes_wrong(Fault fault, std::string const& words) { return explore::goes_wrong<Model>(programs(fault), words); }

void one_worker_needs_an_idle_half() { CHECK(goes_wrong(Fault::kIdleHalfRests, "deadlock")); }
// A mover's ticket takes a tile away.
void tickets_must_be_reserved() { CHECK(goes_wrong(Fault::kNothingReserved, "deadlock")); }
void finished_tiles_first_deadlock() { CHECK(goes_wrong(Fault::kResultsFirst, "deadlock")); }
void a_flag_before_its_bytes_is_found() { CHECK(goes_wrong(Fault::kSignalBeforeWrite, "other bytes")); }

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return explore::report(check::run({{"nothing goes wrong", nothing_goes_wrong},
                                     {"one worker needs an idle half", one_worker_needs_an_idle_half},
                                     {"tickets must be reserved", tickets_must_be_reserved},
                                     {"finished tiles first deadlock", finished_tiles_first_deadlock},
                                     {"a flag before its bytes is found", a_flag_before_its_bytes_is_found}}));
}
