#include "host/team.h"

#include <utility>

namespace entwine::host {

// One arena a rank, all alike, with their own epochs.
struct Team::ArenaSet {
  schedule::ArenaLayout layout;
  uint32_t next_epoch;
  std::vector<std::unique_ptr<Arena>> owned;
  std::vector<Arena*> arenas;

  ArenaSet(schedule::ArenaLayout const& layout, uint32_t first_epoch) : layout(layout), next_epoch(first_epoch) {
    for (uint32_t i = 0; i < layout.ranks; ++i) {
      owned.push_back(std::make_unique<Arena>(layout, first_epoch));
      arenas.push_back(owned.back().get());
    }
  }
};

// The arenas between two failures. After one, ranks disagree on what their arenas hold, so all of them are dropped.
struct Team::Generation {
  std::atomic<bool> off{false};
  std::string reason;  // why, once it is off
  std::vector<std::unique_ptr<ArenaSet>> sets;
};

struct Team::Call {
  struct Arrival {
    bool here = false;
    Operands operands{};
    Done done;
  };

  CallKey key;
  CallSpec spec;
  std::shared_ptr<Generation> generation;
  ArenaSet* set;
  uint32_t epoch;
  uint32_t missing;
  std::vector<Arrival> arrivals;
};

struct Team::Rank {
  std::deque<std::shared_ptr<Call>> calls;  // in the team's order
  std::condition_variable changed;
  Crew crew;
  Errands completions;  // not on the dispatcher: whoever waits for a result may go on working on the thread that brings it
  std::thread dispatcher;
};

Team::Team(uint32_t ranks, uint32_t first_epoch) : ranks_(ranks), first_epoch_(first_epoch) {
  for (uint32_t r = 0; r < ranks; ++r) rank_.push_back(std::make_unique<Rank>());
  for (uint32_t r = 0; r < ranks; ++r) rank_[r]->dispatcher = std::thread([this, r] { serve(r); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    for (auto& rank : rank_) rank->changed.notify_all();
  }
  for (auto& rank : rank_) rank->dispatcher.join();
}

void Team::submit(uint32_t rank, CallKey const& key, CallSpec const& spec, Operands const& operands, Done done) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto const& [run, why] : failed_runs_)
    if (run == key.run) {
      std::string reason = why;
      rank_[rank]->completions.send([done = std::move(done), reason = std::move(reason)] { done(&reason); });
      return;
    }
  std::shared_ptr<Call> call = open_call(key, spec);
  call->arrivals[rank] = {true, operands, std::move(done)};
  if (--call->missing == 0) open_.erase(key);
  rank_[rank]->changed.notify_all();
}

std::vector<uint64_t> Team::arenas() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint64_t> bytes;
  if (generation_)
    for (auto const& set : generation_->sets) bytes.push_back(set->layout.bytes());
  return bytes;
}

std::shared_ptr<Team::Call> Team::open_call(CallKey const& key, CallSpec const& spec) {
  if (auto found = open_.find(key); found != open_.end()) return found->second;
  if (!generation_) generation_ = std::make_shared<Generation>();
  ArenaSet& set = arenas_for(spec);  // may run out of memory: nothing has changed by then
  auto call = std::make_shared<Call>(Call{key, spec, generation_, &set, set.next_epoch++, ranks_, {}});
  call->arrivals.resize(ranks_);
  for (auto& rank : rank_) rank->calls.push_back(call);
  open_.emplace(key, call);
  return call;
}

// The first that fits. A call may use any arena as long as all ranks use the same one: each has its own epochs and signals.
Team::ArenaSet& Team::arenas_for(CallSpec const& spec) {
  schedule::ArenaDemand demand = spec.demand();
  auto& sets = generation_->sets;
  for (auto& set : sets)
    if (set->layout.fits(demand)) return *set;
  schedule::ArenaLayout last = sets.empty() ? schedule::ArenaLayout{ranks_, 0, 0} : sets.back()->layout;
  sets.push_back(std::make_unique<ArenaSet>(schedule::grown(last, demand), first_epoch_));
  return *sets.back();
}

// The loop of a rank's dispatcher.
void Team::serve(uint32_t rank) {
  Rank& self = *rank_[rank];
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    self.changed.wait(lock, [&] {
      if (stop_ || self.calls.empty()) return stop_;
      Call const& next = *self.calls.front();
      return next.arrivals[rank].here || next.generation->off.load();
    });
    if (stop_) return;
    std::shared_ptr<Call> call = std::move(self.calls.front());
    self.calls.pop_front();
    Call::Arrival& arrival = call->arrivals[rank];
    if (!arrival.here) continue;  // given up before this rank came; submit() will tell it
    lock.unlock();

    Generation& generation = *call->generation;
    Seat seat{&call->spec, rank, call->epoch, &call->set->arenas, arrival.operands, &generation.off, [&](std::string why) {
                give_up(*call, std::move(why));
              }};
    bool finished = !generation.off.load() && execute(seat, self.crew);

    lock.lock();
    std::string reason = finished ? "" : generation.reason;
    lock.unlock();
    self.completions.send(
        [finished, reason = std::move(reason), done = std::move(arrival.done)] { done(finished ? nullptr : &reason); });
    call.reset();
    lock.lock();
  }
}

// Ends every call of the generation: those under way and those that wait for their turn.
void Team::give_up(Call const& call, std::string why) {
  std::lock_guard<std::mutex> lock(mutex_);
  Generation& generation = *call.generation;
  if (generation.off.load()) return;  // somebody was here first
  bool absent = false;
  for (uint32_t r = 0; r < ranks_; ++r)
    if (!call.arrivals[r].here) {
      absent = true;
      why += "; rank " + std::to_string(r) + " has not come to this call at all";
    }
  why += ". Look for an error or a stall there, or raise ENTWINE_TIMEOUT_S if it is only slow.";
  if (absent) why += call.spec.absent;
  generation.reason = why;
  generation.off.store(true);
  for (auto& set : generation.sets)
    for (Arena* arena : set->arenas) arena->bell().ring();

  fail_run(call.key.run, why);
  for (auto& rank : rank_) {
    for (auto const& waiting : rank->calls) fail_run(waiting->key.run, why);
    rank->changed.notify_all();
  }
  open_.clear();
  generation_ = nullptr;
}

void Team::fail_run(int64_t run, std::string const& why) {
  for (auto const& failed : failed_runs_)
    if (failed.first == run) return;
  failed_runs_.emplace_back(run, why);
  if (failed_runs_.size() > 64) failed_runs_.pop_front();
}

}  // namespace entwine::host
