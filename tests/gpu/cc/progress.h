// Says where the program is, so that a failure or a hang can be told with its place; ends the program in either case.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace teams {

// Lines of the output, one a case group; launches of kernels, one a rank; calls that TEAMS_SECONDS left no time for.
inline int passed = 0, failed = 0;
inline uint64_t launches = 0, left_out = 0;
inline void report(std::string const& group, std::string const& fault) {
  ++(fault.empty() ? passed : failed);
  std::printf("%s%s%s\n", group.c_str(), fault.empty() ? ": ok" : ": BAD: ", fault.c_str());
}
inline int conclude() {
  std::printf("count launches %llu\ncount left_out %llu\n%d passed, %d failed\n", static_cast<unsigned long long>(launches),
              static_cast<unsigned long long>(left_out), passed, failed);
  std::fflush(stdout);
  return failed == 0 ? 0 : 1;
}

// The program has got this far.
class Progress {
 public:
  static void at(std::string where) {
    std::lock_guard<std::mutex> lock(mutex_);
    where_ = std::move(where);
    since_ = std::chrono::steady_clock::now();
  }
  static std::string where() {
    std::lock_guard<std::mutex> lock(mutex_);
    return where_;
  }
  static double seconds() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count();
  }

 private:
  static inline std::mutex mutex_;
  static inline std::string where_ = "start";
  static inline std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

// An error of CUDA leaves nothing to go on with.
inline void check_cuda(cudaError_t error, char const* what, char const* file, int line) {
  if (error == cudaSuccess) return;
  std::string where = Progress::where();
  std::printf("BAD: %s:%d: %s: %s; at %s\n", file, line, what, cudaGetErrorString(error), where.c_str());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // for the thread that prints what a kernel waited for
  ++failed;
  std::_Exit(conclude());
}
#define CHECK_CUDA(call) teams::check_cuda((call), #call, __FILE__, __LINE__)

// A setting from the environment.
inline uint32_t setting(char const* name, uint32_t otherwise) {
  char const* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::atoi(text));
}

// Whether a call is to be left out: TEAMS_SECONDS, counted from the first question, are over.
inline bool out_of_time() {
  static auto const start = std::chrono::steady_clock::now();
  uint32_t most = setting("TEAMS_SECONDS", 0);
  bool over = most != 0 && std::chrono::steady_clock::now() - start > std::chrono::seconds(most);
  left_out += over;
  return over;
}

// Seconds without progress that are a hang: more under compute-sanitizer, which is slow.
inline uint32_t patience() { return setting("TEAMS_PATIENCE", 20); }

// Ends the program when it makes no progress, after asking for what is known.
class Watchdog {
 public:
  explicit Watchdog(std::function<void()> describe) : describe_(std::move(describe)), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(500), [this] { return stop_; }))
      if (Progress::seconds() > patience()) hang();
  }
  void hang() {
    std::printf("BAD: no progress for %u s at %s\n", patience(), Progress::where().c_str());
    std::fflush(stdout);
    std::thread(describe_).detach();  // asks the devices, and may hang as well
    std::this_thread::sleep_for(std::chrono::seconds(2));
    ++failed;
    conclude();
    std::_Exit(3);
  }

  std::function<void()> describe_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace teams
