#include "team/arena.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "team/first_epoch.h"
#include "team/vote.h"

namespace entwine::team {
namespace {

std::string cuda_error(char const* what, cudaError_t error) { return std::string(what) + ": " + cudaGetErrorString(error); }

// Until 2.29 offers ncclGetPeerDevicePointer, the window's own head in device memory tells: the same from 2.28.0 to 2.28.9.
struct WindowHead {
  void* host;
  uint8_t* base;  // of rank 0
  int32_t local_rank, world_rank;
  uint32_t stride_4g;
};

struct Teams {
  std::mutex mutex;
  std::map<NcclComm, std::unique_ptr<Team>> of;
};

Teams& teams() {
  static auto* const teams = new Teams;  // never destroyed: XLA may outlive statics
  return *teams;
}

}  // namespace

Team* Team::of(NcclComm communicator, int device, std::string* why) {
  Teams& all = teams();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.of.find(communicator);
  if (found != all.of.end()) return found->second.get();
  Nccl const* nccl = bind_nccl(why);
  if (nccl == nullptr) return nullptr;
  std::unique_ptr<Team> team(new Team(nccl, communicator, device));
  if (!team->start(why)) return nullptr;
  return (all.of[communicator] = std::move(team)).get();
}

std::vector<TeamMemory> Team::memory() {
  // They are never destroyed. One that makes an arena is locked until all its ranks do, each of which may yet have to be found:
  // not here with all teams locked.
  std::vector<Team*> found;
  {
    Teams& all = teams();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (auto const& [communicator, team] : all.of) found.push_back(team.get());
  }
  std::vector<TeamMemory> memory;
  for (Team* team : found) {
    std::lock_guard<std::mutex> lock(team->mutex_);
    memory.push_back({team->device_, static_cast<uint32_t>(team->rank_), static_cast<uint32_t>(team->size_), {}});
    for (Arena const& arena : team->arenas_) memory.back().arenas.push_back(arena.layout.bytes());
  }
  return memory;
}

bool Team::start(std::string* why) {
  int count = nccl_->comm_count(communicator_, &size_), user = nccl_->comm_user_rank(communicator_, &rank_);
  if (count != 0 || user != 0) {
    *why = std::string("XLA's communicator can't be read: ") + nccl_->error_string(count != 0 ? count : user);
    return false;
  }
  cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMalloc(&vote_, sizeof(int));
  *why = error != cudaSuccess ? cuda_error("a stream for the team", error) : watch_.start(device_, rank_, size_);
  return why->empty();
}

Arena const* Team::find(schedule::ArenaDemand const& demand) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Arena const& arena : arenas_)
    if (arena.layout.fits(demand)) return &arena;
  return nullptr;
}

Arena const* Team::find_or_make(schedule::ArenaDemand const& demand, Patience const& patience, std::string* why) {
  if (Arena const* arena = find(demand)) return arena;
  std::lock_guard<std::mutex> lock(mutex_);
  schedule::ArenaLayout last{static_cast<uint32_t>(size_), 0, 0};
  if (!arenas_.empty()) last = arenas_.back().layout;
  *why = watch_.begin(stream_, patience, "the arena of a call that needs a larger one");
  bool made = why->empty() && make(schedule::grown(last, demand), patience, why);
  std::string ended = watch_.end(stream_);
  if (why->empty()) *why = ended;
  return made ? &arenas_.back() : nullptr;
}

// `others`: what to say if only another one failed.
bool Team::all_ok(bool ok, char const* others, Patience const& patience, std::string* why) {
  bool all = ok;
  std::string apart = vote(*nccl_, communicator_, stream_, vote_, patience.timeout_ns, &all);
  if (!apart.empty()) *why = apart;
  if (apart.empty() && ok && !all) *why = others;
  return apart.empty() && all;
}

bool Team::make(schedule::ArenaLayout const& layout, Patience const& patience, std::string* why) {
  size_t bytes = layout.bytes();
  void* memory = nullptr;
  int nccl = nccl_->mem_alloc(&memory, bytes);
  cudaError_t error = cudaSuccess;
  if (nccl == 0) {
    // Control starts as zeros but for the epoch, in the upper half of the queue's word; signals as the call before has raised
    // them, and packets as if it had sent them. Staging needs no start value.
    uint32_t epoch = first_epoch();
    std::vector<uint32_t> head(layout.staging_offset(0) / 4);
    head[1] = epoch;
    std::fill(head.begin() + static_cast<std::ptrdiff_t>(layout.signals_offset() / 4), head.end(),
              schedule::signal_value(epoch - 1));
    error = cudaMemcpyAsync(memory, head.data(), head.size() * 4, cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
  } else {
    cudaGetLastError();
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    *why = "an arena of " + std::to_string(bytes >> 20) + " MiB doesn't fit into the " + std::to_string(free >> 20) +
           " MiB that are free on device " + std::to_string(device_) +
           " outside XLA's own pool: lower XLA_PYTHON_CLIENT_MEM_FRACTION, split the matmul, or pass strategy=\"xla\"";
  }
  if (error != cudaSuccess) *why = cuda_error("clearing the arena", error);
  if (!all_ok(nccl == 0 && error == cudaSuccess, "another rank of the team failed to make its arena", patience, why)) {
    if (memory != nullptr) nccl_->mem_free(memory);
    return false;
  }

  // All are here now; on the host NCCL waits for them once more, in its own way, which ends if one of them dies.
  NcclWindow window = nullptr;
  nccl = nccl_->window_register(communicator_, memory, bytes, &window, 0);
  Arena arena{layout, {}};
  bool mapped = nccl == 0 && window != nullptr;
  if (!mapped) {
    *why =
        nccl != 0
            ? std::string("ncclCommWindowRegister: ") + nccl_->error_string(nccl)
            : "NCCL can't map the team's GPUs into each other (no NVLink or peer access between them): pass strategy=\"xla\"";
  } else if (nccl_->peer_pointer != nullptr) {
    for (int r = 0; r < size_ && mapped; ++r) {
      void* base = nullptr;
      mapped = nccl_->peer_pointer(window, 0, r, &base) == 0 && base != nullptr;
      arena.base[r] = static_cast<uint8_t*>(base);
    }
  } else {
    WindowHead head{};
    error = cudaMemcpyAsync(&head, window, sizeof head, cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    mapped = error == cudaSuccess && head.local_rank == rank_;  // else the team spans NVLink domains
    for (int r = 0; r < size_; ++r) arena.base[r] = head.base + (uint64_t{head.stride_4g} << 32) * static_cast<uint64_t>(r);
  }
  char const* apart = "the team's GPUs are not in one NVLink domain: pass strategy=\"xla\", or a mesh axis whose devices are";
  if (!mapped && why->empty()) *why = apart;
  if (!all_ok(mapped, apart, patience, why)) return false;  // the window stays: deregistering would be one more collective
  arenas_.push_back(arena);
  return true;
}

}  // namespace entwine::team
