// A second stream of a device, on which NCCL or copy engines move groups beside the matmul on XLA's stream (strategy "signal").
//
// One for each communicator, which serves this strategy alone, and on which all collectives are enqueued on this one stream, in
// the order of calls: the same on all ranks, since XLA locks a clique for a run. Nothing here blocks the host but the first
// collective of its kind and size, and that is made in Initialize.
//
// Copy engines write into the peers' arenas, and signal with a copy of the call's number behind each group's own. Epochs are
// counted here, arena by arena: such calls aren't recorded into CUDA graphs, so the host sees each of them. A half of staging
// is written again two calls later, as arena_layout.h has it: a rank's copies follow its stream, which has waited for all
// peers' signals of the call before.
//
// A group's transfer follows a wait of the stream itself (cuStreamWaitValue32) for the group's counter. No kernel that spins:
// it would take a multiprocessor that NCCL is waiting for, and poll through the same L2 as the matmul. And no bound is needed,
// as what is waited for is the own device's matmul, which is enqueued before and waits for nobody. NCCL waits for peers: its
// transfers are between begin() and end(), and are bounded by watch.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schedule/tile_groups.h"
#include "team/arena.h"
#include "team/nccl.h"
#include "team/watch.h"

namespace entwine::team {

// Functions return "", or what went wrong.
class Beside {
 public:
  // That of a communicator lent by XLA; made at the first call. Null and `why` if NCCL or the driver can't do it.
  static Beside* of(NcclComm communicator, int device, std::string* why);

  NcclComm communicator() const { return communicator_; }  // whose team has the arenas that copy engines write to
  int rank() const { return rank_; }
  int size() const { return size_; }
  cudaStream_t stream() const { return stream_; }

  // Held while a call is enqueued: events and communicator are used by one call at a time.
  std::unique_lock<std::mutex> alone() { return std::unique_lock<std::mutex>(mutex_); }

  // Collective, in Initialize: collectives of an op on these numbers of elements, of those that weren't made yet, so that NCCL
  // connects, allocates and loads before a call relies on it.
  std::string warm_up(Patience const& patience, std::vector<size_t> const& counts, int type);

  // What is enqueued here from now on follows what `main` has by now.
  std::string follow(cudaStream_t main);
  // `main` follows what is enqueued here by now; `event` is any below kMaxGroups + 1, used once a call.
  std::string mark(uint32_t event);
  std::string join(cudaStream_t main, uint32_t event);

  // What follows waits until the counter has come to that.
  std::string await(uint32_t const* counter, uint32_t value);

  // NCCL's transfers lie between these two: so long is waited for peers at most.
  std::string begin(Patience const& patience, std::string what);
  std::string end();
  uint32_t next_call() { return ++calls_; }  // the number of a call by NCCL, for what is said about it

  // In place, of all ranks' `count` elements at `tiles`; and of size() times as many, of which this rank gets the rank()th
  // part.
  std::string sum(void* tiles, size_t count, int type);
  std::string sum_and_scatter(void* tiles, size_t count, int type);
  // Everyone's `count` elements, in rank order.
  std::string gather(void const* own, void* whole, size_t count, int type);
  // The same piece by piece, each to a place of its own. Between pieces(true) and pieces(false), not too many at a time.
  std::string pieces(bool begin);
  std::string exchange(void const* own, void* theirs, size_t count, int type, int peer);
  // Own rows to their place in what is gathered.
  std::string copy(void* to, size_t to_pitch, void const* from, size_t from_pitch, size_t bytes, size_t rows);

  // Copy engines: the number of a call on this arena, then its copies, each of which may be to a peer's memory, and its
  // signals.
  uint32_t next_epoch(Arena const* arena);
  std::string stamp(uint32_t value);
  std::string push(void* to, void const* from, size_t bytes);
  std::string raise(uint32_t* word);

  static constexpr int kF16 = 6, kBf16 = 9;  // NCCL's types

 private:
  Beside(Nccl const* nccl, NcclComm communicator, int device) : nccl_(nccl), communicator_(communicator), device_(device) {}
  std::string start();
  std::string try_out(schedule::Op op, uint8_t* memory, size_t count, int type);
  std::string done(char const* what, int nccl) const;

  Nccl const* nccl_;
  NcclComm communicator_;
  int device_;
  int rank_ = 0, size_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, events_[schedule::kMaxGroups + 1] = {};
  int* vote_ = nullptr;        // device memory
  uint32_t* stamp_ = nullptr;  // the same: what signals are copies of
  Watch watch_;
  Patience patience_{};  // of what was begun last
  std::mutex mutex_;
  uint32_t calls_ = 0;
  std::map<Arena const*, uint32_t> epochs_;  // of the next call
  std::set<std::pair<schedule::Op, size_t>> warm_;
};

}  // namespace entwine::team
