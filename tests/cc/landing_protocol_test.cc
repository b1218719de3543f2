// A model check of strategy "signal" by copy engines: every interleaving of small teams over several calls.
//
// A rank is two streams, each of which makes its steps in order (ffi/signal_handlers.cc enqueues them): its own, with the
// matmul, the waits for peers' signals and the last copies; and the one beside, with copies to peers and their signals. Scratch
// and staging are cells, each holding the mark of the call that wrote it. A step is one group multiplied, one copy, one signal,
// one look at what lets a stream go on, or one read. Found are deadlocks, reads of another call's bytes, and, in variants that
// are broken on purpose, that the check finds these.
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "check.h"
#include "explore.h"
#include "schedule/signals.h"

namespace entwine::schedule {
namespace {

constexpr uint32_t kFirstEpoch = 0xfffffffeu;  // wraps within three calls
constexpr uint32_t kMostRanks = 3, kMostGroups = 2;

enum class Call : uint8_t { kSums, kRows };
enum class Fault { kNone, kOneHalf, kDoesNotFollow, kDoesNotJoin, kSignalBeforeCopy };

struct Program {
  uint32_t ranks, groups;
  std::vector<Call> calls;
  Fault fault;
};

struct Step {
  // kBegin: counts are zeroed, and the stream beside may follow. kCopy and kRaise are to `peer`, kAwait and kRead of its.
  enum Kind : uint8_t { kBegin, kMultiply, kAwait, kRead, kJoin, kOwn, kFollow, kCount, kCopy, kRaise, kMark } kind;
  uint8_t call, peer, group;
};

struct Rank {
  uint8_t at[2];                 // steps made by each stream
  uint8_t began, marked;         // calls whose begin, and whose copies' end, the other stream may go on from
  uint8_t scratch[kMostGroups];  // one plus the call that multiplied it
  uint8_t counted[kMostGroups];
  uint8_t staging[2][kMostRanks][kMostGroups], words[kMostRanks][kMostGroups];  // one plus the call
};

struct State {
  Rank ranks[kMostRanks];
};

std::ostream& operator<<(std::ostream& out, Program const& p) { return out << p.ranks << " ranks, " << p.groups << " groups"; }

class Model : public explore::InOrder<State, Step> {
 public:
  explicit Model(Program const& program) : InOrder(program.ranks, 2), program_(program) {
    for (uint32_t rank = 0; rank < program.ranks; ++rank)
      for (uint32_t call = 0; call < program.calls.size(); ++call) add_call(rank, uint8_t(call));
  }

 private:
  void add_call(uint32_t rank, uint8_t call) {
    std::vector<Step>&own = steps(rank, 0), &beside = steps(rank, 1);
    bool sums = program_.calls[call] == Call::kSums;
    auto groups = static_cast<uint8_t>(program_.groups), ranks = static_cast<uint8_t>(program_.ranks);
    auto of_peers = [&](std::vector<Step>& steps, Step::Kind kind, uint8_t group) {
      for (uint8_t peer = 0; peer < ranks; ++peer)
        if (peer != rank) steps.push_back({kind, call, peer, group});
    };
    own.push_back({Step::kBegin, call, 0, 0});
    for (uint8_t group = 0; group < groups && sums; ++group) own.push_back({Step::kMultiply, call, 0, group});
    // Of sums, all groups but the last go to y before that is awaited; of rows, each is multiplied when it is there.
    for (uint8_t group = 0; group < groups; ++group) {
      of_peers(own, Step::kAwait, group);
      if (sums && group + 1 == groups && program_.fault != Fault::kDoesNotJoin) own.push_back({Step::kJoin, call, 0, 0});
      of_peers(own, Step::kRead, group);
      if (sums) own.push_back({Step::kOwn, call, 0, group});
    }
    if (!sums && program_.fault != Fault::kDoesNotJoin) own.push_back({Step::kJoin, call, 0, 0});

    if (program_.fault != Fault::kDoesNotFollow) beside.push_back({Step::kFollow, call, 0, 0});
    for (uint8_t group = 0; group < groups; ++group) {
      if (sums) beside.push_back({Step::kCount, call, 0, group});
      for (uint8_t peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
        Step copy{Step::kCopy, call, peer, group}, raise{Step::kRaise, call, peer, group};
        bool early = program_.fault == Fault::kSignalBeforeCopy;
        beside.push_back(early ? raise : copy);
        beside.push_back(early ? copy : raise);
      }
    }
    beside.push_back({Step::kMark, call, 0, 0});
  }

  uint32_t half(uint32_t call) const { return program_.fault == Fault::kOneHalf ? 0 : (kFirstEpoch + call) & 1; }
  void expect(uint8_t mark, uint32_t rank, Step const& step, char const* what) {
    if (mark != step.call + 1)
      fault_ = "rank " + std::to_string(rank) + " " + what + " call " + std::to_string(mark - 1) + "'s bytes in call " +
               std::to_string(step.call);
  }

  bool make(State& s, uint32_t r, uint32_t, Step const& step) override {
    Rank& rank = s.ranks[r];
    auto mark = static_cast<uint8_t>(step.call + 1);
    switch (step.kind) {
      case Step::kBegin:
        std::memset(rank.counted, 0, sizeof rank.counted);
        rank.began = mark;
        break;
      case Step::kMultiply:
        rank.scratch[step.group] = mark;
        rank.counted[step.group] = 1;
        break;
      case Step::kAwait: {
        uint32_t seen = signal_value(kFirstEpoch + rank.words[step.peer][step.group] - 1);
        if (!signal_reached(seen, signal_value(kFirstEpoch + step.call))) return false;
        break;
      }
      case Step::kRead:
        expect(rank.staging[half(step.call)][step.peer][step.group], r, step, "read");
        break;
      case Step::kOwn:
        expect(rank.scratch[step.group], r, step, "added");
        break;
      case Step::kJoin:
        if (rank.marked < mark) return false;
        break;
      case Step::kFollow:
        if (rank.began < mark) return false;
        break;
      case Step::kCount:
        if (rank.counted[step.group] == 0) return false;
        break;
      case Step::kCopy:
        if (program_.calls[step.call] == Call::kSums) expect(rank.scratch[step.group], r, step, "sent");
        s.ranks[step.peer].staging[half(step.call)][r][step.group] = mark;
        break;
      case Step::kRaise:
        s.ranks[step.peer].words[r][step.group] = mark;
        break;
      case Step::kMark:
        rank.marked = mark;
        break;
    }
    return true;
  }

  Program program_;
};

std::vector<Program> programs(Fault fault) {
  constexpr Call s = Call::kSums, r = Call::kRows;
  std::vector<Program> all;
  for (uint32_t groups : {1u, 2u})
    for (std::vector<Call> const& calls : {std::vector<Call>{s, s, s}, {r, r, r}, {s, r, s}, {r, s, r}, {s, s, r}, {r, r, s}})
      all.push_back({2, groups, calls, fault});
  for (std::vector<Call> const& calls : {std::vector<Call>{s, s, s}, {r, r, r}, {s, r, s}}) all.push_back({3, 1, calls, fault});
  all.push_back({3, 2, {r, s}, fault});
  return all;
}

void nothing_goes_wrong() { explore::nothing_goes_wrong<Model>(programs(Fault::kNone), 100'000); }

bool goes_wrong(Fault fault, std::string const& words) { return explore::goes_wrong<Model>(programs(fault), words); }

void one_half_is_not_enough() { CHECK(goes_wrong(Fault::kOneHalf, "read call")); }
// Counts of the call before let copies go that nobody has multiplied anything for.
void copies_follow_the_call() { CHECK(goes_wrong(Fault::kDoesNotFollow, "sent call")); }
// Scratch is multiplied into again while it is copied.
void the_call_joins_its_copies() { CHECK(goes_wrong(Fault::kDoesNotJoin, "sent call")); }
void a_signal_before_its_copy_is_found() { CHECK(goes_wrong(Fault::kSignalBeforeCopy, "read call")); }

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return explore::report(check::run({{"nothing goes wrong", nothing_goes_wrong},
                                     {"one half is not enough", one_half_is_not_enough},
                                     {"copies follow the call", copies_follow_the_call},
                                     {"the call joins its copies", the_call_joins_its_copies},
                                     {"a signal before its copy is found", a_signal_before_its_copy_is_found}}));
}
