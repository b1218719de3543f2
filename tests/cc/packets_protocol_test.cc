// A model check of few rows' sums: every interleaving of small teams over several calls, by packets and by staging and signals.
//
// A rank is some clusters, each with a tile of its own in every call: it sends the tile's sums to each peer, then takes each
// peer's. A kernel begins when all clusters have left the one before. Cells hold the mark of the call that wrote them. Found
// are deadlocks, sums of another call, and, in variants that are broken on purpose, that the check finds these.
#include <ostream>
#include <string>
#include <vector>

#include "check.h"
#include "explore.h"
#include "schedule/signals.h"

namespace entwine::schedule {
namespace {

constexpr uint32_t kFirstEpoch = 0xfffffffeu;  // wraps within three calls
constexpr uint32_t kMostRanks = 3, kMostClusters = 2;
constexpr uint8_t kBytes = 0xff;  // the mark of bytes that are nobody's sums

enum class Call : uint8_t { kPackets, kStaged };
enum class Fault { kNone, kOneHalf, kFlagFirst, kInStaging };

struct Program {
  uint32_t ranks, clusters;
  std::vector<Call> calls;
  Fault fault;
};

struct Step {
  // To `peer`, or of its: a packet, or its two halves one by one; staged sums and their signal; and what is awaited.
  enum Kind : uint8_t { kBegin, kPacket, kFlag, kData, kStage, kRaise, kTake, kAwait, kRead } kind;
  uint8_t call, peer;
};

struct Packet {
  uint8_t flag, data;  // one plus the call
};

struct Rank {
  uint8_t at[kMostClusters];  // steps made
  Packet packets[2][kMostRanks][kMostClusters];
  uint8_t staging[2][kMostRanks][kMostClusters], words[kMostRanks][kMostClusters];
};

struct State {
  Rank ranks[kMostRanks];
};

std::ostream& operator<<(std::ostream& out, Program const& p) {
  return out << p.ranks << " ranks, " << p.clusters << " clusters, " << p.calls.size() << " calls";
}

class Model : public explore::InOrder<State, Step> {
 public:
  explicit Model(Program const& program) : InOrder(program.ranks, program.clusters), program_(program) {
    for (uint32_t rank = 0; rank < program.ranks; ++rank)
      for (uint32_t cluster = 0; cluster < program.clusters; ++cluster)
        for (uint8_t call = 0; call < program.calls.size(); ++call) add_call(rank, call, steps(rank, cluster));
  }

 private:
  void add_call(uint32_t rank, uint8_t call, std::vector<Step>& steps) const {
    bool packets = program_.calls[call] == Call::kPackets, apart = program_.fault == Fault::kFlagFirst;
    auto of_peers = [&](std::vector<Step::Kind> const& kinds) {
      for (uint8_t peer = 0; peer < program_.ranks; ++peer)
        for (Step::Kind kind : kinds)
          if (peer != rank) steps.push_back({kind, call, peer});
    };
    steps.push_back({Step::kBegin, call, 0});
    if (packets) {
      of_peers(apart ? std::vector<Step::Kind>{Step::kFlag, Step::kData} : std::vector<Step::Kind>{Step::kPacket});
      of_peers({Step::kTake});
    } else {
      of_peers({Step::kStage});
      of_peers({Step::kRaise});
      of_peers({Step::kAwait});
      of_peers({Step::kRead});
    }
  }

  uint32_t half(uint32_t call) const { return program_.fault == Fault::kOneHalf ? 0 : (kFirstEpoch + call) & 1; }
  void expect(uint8_t mark, uint32_t rank, Step const& step) {
    if (mark != step.call + 1)
      fault_ = "rank " + std::to_string(rank) + " took " +
               (mark == kBytes ? "staged bytes" : "call " + std::to_string(mark - 1) + "'s sums") + " in call " +
               std::to_string(step.call);
  }
  static uint32_t value(uint8_t mark) { return signal_value(kFirstEpoch + mark - 1); }

  bool make(State& s, uint32_t r, uint32_t cluster, Step const& step) override {
    Rank& rank = s.ranks[r];
    auto mark = static_cast<uint8_t>(step.call + 1);
    Rank& peer = s.ranks[step.peer];
    switch (step.kind) {
      case Step::kBegin:  // clusters make the same steps: none is before this one
        for (uint32_t other = 0; other < program_.clusters; ++other)
          if (rank.at[other] < rank.at[cluster]) return false;
        break;
      case Step::kPacket:
        peer.packets[half(step.call)][r][cluster] = {mark, mark};
        break;
      case Step::kFlag:
        peer.packets[half(step.call)][r][cluster].flag = mark;
        break;
      case Step::kData:
        peer.packets[half(step.call)][r][cluster].data = mark;
        break;
      case Step::kStage:
        peer.staging[half(step.call)][r][cluster] = mark;
        // Bytes may be anything, the flag of the half's next call too.
        if (program_.fault == Fault::kInStaging)
          peer.packets[half(step.call)][r][cluster] = {static_cast<uint8_t>(mark + 2), kBytes};
        break;
      case Step::kRaise:
        peer.words[r][cluster] = mark;
        break;
      case Step::kTake: {
        Packet const& packet = rank.packets[half(step.call)][step.peer][cluster];
        if (value(packet.flag) != value(mark)) return false;
        expect(packet.data, r, step);
        break;
      }
      case Step::kAwait:
        if (!signal_reached(value(rank.words[step.peer][cluster]), value(mark))) return false;
        break;
      case Step::kRead:
        expect(rank.staging[half(step.call)][step.peer][cluster], r, step);
        break;
    }
    return true;
  }

  Program program_;
};

std::vector<Program> programs(Fault fault) {
  constexpr Call p = Call::kPackets, s = Call::kStaged;
  std::vector<Program> all;
  for (uint32_t clusters : {1u, 2u})
    for (std::vector<Call> const& calls : {std::vector<Call>{p, p, p}, {p, s, p}, {s, p, s}, {s, p, p}, {p, p, s}})
      all.push_back({2, clusters, calls, fault});
  all.push_back({2, 1, {p, s, p, p, s, p}, fault});
  for (std::vector<Call> const& calls : {std::vector<Call>{p, p, p}, {s, p, p}, {p, s, p}}) all.push_back({3, 1, calls, fault});
  all.push_back({3, 2, {p, p}, fault});
  return all;
}

void nothing_goes_wrong() { explore::nothing_goes_wrong<Model>(programs(Fault::kNone), 40'000); }

bool goes_wrong(Fault fault, std::string const& words) { return explore::goes_wrong<Model>(programs(fault), words); }

// A rank that is a call ahead writes over what has yet to be taken, and that never comes again.
void one_half_is_not_enough() { CHECK(goes_wrong(Fault::kOneHalf, "deadlock")); }
void a_packet_is_one_store() { CHECK(goes_wrong(Fault::kFlagFirst, "'s sums in call")); }
void packets_lie_apart_from_staging() { CHECK(goes_wrong(Fault::kInStaging, "took staged bytes")); }

}  // namespace
}  // namespace entwine::schedule

int main() {
  using namespace entwine::schedule;
  return explore::report(check::run({{"nothing goes wrong", nothing_goes_wrong},
                                     {"one half is not enough", one_half_is_not_enough},
                                     {"a packet is one store", a_packet_is_one_store},
                                     {"packets lie apart from staging", packets_lie_apart_from_staging}}));
}
