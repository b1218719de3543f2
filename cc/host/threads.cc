#include "host/threads.h"

#include <utility>

namespace entwine::host {

Crew::~Crew() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Crew::run(uint32_t workers, std::function<void(uint32_t)> const& work) {
  if (workers > 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = &work;
    workers_ = workers;
    running_ = workers - 1;
    ++round_;
    while (helpers_.size() + 1 < workers) {
      uint32_t worker = static_cast<uint32_t>(helpers_.size() + 1);
      helpers_.emplace_back([this, worker] { help(worker); });
    }
    changed_.notify_all();
  }
  work(0);
  if (workers > 1) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
    workers_ = 0;
  }
}

void Crew::help(uint32_t worker) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (round_ != seen && worker < workers_); });
    if (stop_) return;
    seen = round_;
    std::function<void(uint32_t)> const& work = *work_;
    lock.unlock();
    work(worker);
    lock.lock();
    if (--running_ == 0) changed_.notify_all();
  }
}

Errands::Errands() : thread_([this] { serve(); }) {}

Errands::~Errands() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Errands::send(std::function<void()> errand) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    errands_.push_back(std::move(errand));
  }
  changed_.notify_all();
}

void Errands::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !errands_.empty(); });
    if (errands_.empty()) return;
    std::function<void()> errand = std::move(errands_.front());
    errands_.pop_front();
    lock.unlock();
    errand();
    errand = nullptr;  // what it holds is freed outside the lock
    lock.lock();
  }
}

}  // namespace entwine::host
