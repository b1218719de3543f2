// The threads of one rank.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace entwine::host {

// Runs one function on several threads and waits for all of them; the threads are kept for the next time.
class Crew {
 public:
  ~Crew();
  // work(0) .. work(workers - 1), work(0) on the calling thread. One caller at a time.
  void run(uint32_t workers, std::function<void(uint32_t)> const& work);

 private:
  void help(uint32_t worker);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(uint32_t)> const* work_ = nullptr;
  uint32_t workers_ = 0, running_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
  std::vector<std::thread> helpers_;
};

// Runs closures one by one, in order, on a thread of its own.
class Errands {
 public:
  Errands();
  ~Errands();  // runs what is left
  void send(std::function<void()> errand);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> errands_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace entwine::host
