// A team of ranks in one process: puts their calls into one order, gives each call an arena and an epoch, and runs every rank's
// part of it on threads of that rank.
//
// Ranks reach calls in orders of their own, on threads that must not be held up. A call gets its place when the first rank
// comes to it; each rank then runs its parts in that order. No deadlock: if call B needs the result of call A, somebody came to
// A before anybody could come to B, so A stands before B.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "host/executor.h"

namespace entwine::host {

// Which call: the `count`th one of a run of the program at one place of it.
struct CallKey {
  uint64_t site;
  int64_t run;
  uint64_t count;
  bool operator<(CallKey const& o) const { return std::tie(site, run, count) < std::tie(o.site, o.run, o.count); }
};

class Team {
 public:
  // Called once, on a thread that may be kept: with nothing, or with why the call was given up.
  using Done = std::function<void(std::string const* error)>;

  explicit Team(uint32_t ranks, uint32_t first_epoch = 0);
  ~Team();  // all calls must be done

  // `rank` has come to a call. All ranks must give the same spec.
  void submit(uint32_t rank, CallKey const& key, CallSpec const& spec, Operands const& operands, Done done);

  // Bytes of each arena that a rank has, in the order in which they were made; all ranks have the same.
  std::vector<uint64_t> arenas();

 private:
  struct ArenaSet;
  struct Generation;
  struct Call;
  struct Rank;

  std::shared_ptr<Call> open_call(CallKey const& key, CallSpec const& spec);
  ArenaSet& arenas_for(CallSpec const& spec);
  void serve(uint32_t rank);
  void give_up(Call const& call, std::string why);
  void fail_run(int64_t run, std::string const& why);

  uint32_t const ranks_, first_epoch_;
  std::mutex mutex_;
  std::shared_ptr<Generation> generation_;
  std::map<CallKey, std::shared_ptr<Call>> open_;  // calls that some rank hasn't come to yet
  // Runs that were given up, so that late ranks hear of it at once; only the newest are kept.
  std::deque<std::pair<int64_t, std::string>> failed_runs_;
  bool stop_ = false;
  std::vector<std::unique_ptr<Rank>> rank_;
};

}  // namespace entwine::host
