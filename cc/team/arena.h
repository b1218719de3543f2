// Arenas: a team's peer-mapped memory, one NCCL window a rank. Layout and protocol: schedule/arena_layout.h.
//
// An arena is made by all ranks together, in XLA's Initialize stage, before any kernel of the program spins. It is kept for the
// life of the process, since captured CUDA graphs hold its addresses. A call uses the first arena that is large enough: every
// rank makes the same calls in the same order, so every rank picks the same one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "schedule/arena_layout.h"
#include "team/nccl.h"
#include "team/team_memory.h"
#include "team/watch.h"

namespace entwine::team {

struct Arena {
  schedule::ArenaLayout layout;
  uint8_t* base[schedule::kMaxRanks];  // every rank's, mapped on this device
};

// One rank's view of a team; one per communicator.
class Team {
 public:
  // The team of a communicator lent by XLA; made at the first call. Null and `why` if NCCL can't be used.
  static Team* of(NcclComm communicator, int device, std::string* why);
  // Of all teams that there are. Waits while an arena is being made.
  static std::vector<TeamMemory> memory();

  int rank() const { return rank_; }
  int size() const { return size_; }

  // The first arena that holds `demand`; null if none does.
  Arena const* find(schedule::ArenaDemand const& demand);
  // The same, but makes one if none does. Collective, and peers are waited for as long as `patience` has it. Null and `why` on
  // failure, which is then the same on every rank.
  Arena const* find_or_make(schedule::ArenaDemand const& demand, Patience const& patience, std::string* why);

 private:
  Team(Nccl const* nccl, NcclComm communicator, int device) : nccl_(nccl), communicator_(communicator), device_(device) {}
  bool start(std::string* why);
  bool make(schedule::ArenaLayout const& layout, Patience const& patience, std::string* why);
  bool all_ok(bool ok, char const* others, Patience const& patience, std::string* why);

  Nccl const* nccl_;
  NcclComm communicator_;
  int device_;
  int rank_ = 0, size_ = 0;
  cudaStream_t stream_ = nullptr;
  int* vote_ = nullptr;  // device memory
  Watch watch_;
  std::mutex mutex_;
  std::deque<Arena> arenas_;  // addresses stay
};

}  // namespace entwine::team
