#include "team/watch.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "team/device_scope.h"
#include "team/stream_values.h"
#include "team/trap.h"

namespace entwine::team {
namespace {

struct Watches {
  std::mutex mutex;
  std::vector<Watch*> all;
};

Watches& watches() {
  static auto* const watches = new Watches;  // never destroyed: its thread runs until the process ends
  return *watches;
}

void look_again_and_again() {
  using Clock = std::chrono::steady_clock;
  constexpr uint64_t kPauseMs = 100, kMostMs = 2 * kPauseMs;  // longer pauses are those of a process that was stopped
  for (auto before = Clock::now();;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMs));
    auto now = Clock::now();
    auto passed = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now - before).count());
    before = now;
    Watches& them = watches();
    std::lock_guard<std::mutex> lock(them.mutex);
    for (Watch* watch : them.all) watch->look(std::min(passed, kMostMs));
  }
}

}  // namespace

std::string Watch::start(int device, int rank, int ranks) {
  if (std::string why = stream_values_unsupported(); !why.empty()) return why;
  device_ = device, rank_ = rank, ranks_ = ranks;
  // A page of the process's own, only registered with CUDA: at exit it stays readable for the thread, however CUDA unwinds.
  constexpr size_t kPage = 4096;
  void* page = std::aligned_alloc(kPage, kPage);
  if (page == nullptr) return "no host memory";
  std::memset(page, 0, kPage);
  void* mapped = nullptr;
  cudaError_t error = cudaHostRegister(page, kPage, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&mapped, page, 0);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&trapped_, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = load_trap();
  if (error != cudaSuccess) return std::string("what bounds waits in NCCL: ") + cudaGetErrorString(error);
  at_ = static_cast<uint32_t const volatile*>(page);
  written_ = static_cast<uint32_t*>(mapped);
  Watches& them = watches();
  std::lock_guard<std::mutex> lock(them.mutex);
  them.all.push_back(this);
  if (them.all.size() == 1) std::thread(look_again_and_again).detach();
  return "";
}

// No lock is held while CUDA is called, which may wait for room in the stream: the thread must be able to end that.
std::string Watch::begin(cudaStream_t stream, Patience const& patience, std::string what) {
  return write_value(stream, written_, overdue_.begin(patience, std::move(what)));
}

std::string Watch::end(cudaStream_t stream) { return write_value(stream, written_, overdue_.end()); }

void Watch::look(uint64_t milliseconds) {
  if (auto awaited = overdue_.look(*at_, milliseconds)) give_up(*awaited);
}

void Watch::give_up(Overdue::Awaited const& awaited) {
  std::string peers = ranks_ == 2 ? "rank " + std::to_string(1 - rank_) : "any of its " + std::to_string(ranks_ - 1) + " peers";
  std::fprintf(stderr,
               "entwine_jax.%s: rank %d waited too long for %s: %s, in NCCL. Did every rank make the same calls in the same "
               "order? ENTWINE_TIMEOUT_S sets the bound.\n",
               schedule::op_name(awaited.patience.op), rank_, peers.c_str(), awaited.what.c_str());
  std::fflush(stderr);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  DeviceScope scope(device_);
  cudaError_t error = launch_trap(trapped_);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "entwine_jax: the wait can't be ended: %s\n", cudaGetErrorString(error));
    std::fflush(stderr);
  }
}

}  // namespace entwine::team
