// Waiting for signals: threads sleep, since spinning virtual devices starve each other on a small machine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace entwine::host {

using Timeout = std::chrono::milliseconds;  // zero: none

// Wakes the threads of one rank that wait for words in its arena. `ready` must read atomics with sequential consistency, and
// they must be written so before ring(): then either the waiter sees the write or the writer sees the waiter.
class Bell {
 public:
  void ring() {
    if (waiters_.load() == 0) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }  // a waiter between its check and its sleep must not miss this
    rung_.notify_all();
  }

  // Sleeps until ready(); false if that took longer than `timeout`.
  template <typename Ready>
  bool wait(Timeout timeout, Ready ready) {
    if (ready()) return true;
    waiters_.fetch_add(1);
    bool in_time = true;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (timeout.count() == 0)
        rung_.wait(lock, ready);
      else
        in_time = rung_.wait_until(lock, std::chrono::steady_clock::now() + timeout, ready);
    }
    waiters_.fetch_sub(1);
    return in_time;
  }

 private:
  std::atomic<uint32_t> waiters_{0};
  std::mutex mutex_;
  std::condition_variable rung_;
};

}  // namespace entwine::host
