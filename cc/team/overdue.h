// What a stream has under way, by one number that the stream itself writes, and whether it takes too long.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "schedule/geometry.h"

namespace entwine::team {

// For whom, and how long, peers are waited for at most; 0: without end.
struct Patience {
  schedule::Op op;
  uint64_t timeout_ns;
};

// One thread begins and ends, in the stream's order; another looks.
class Overdue {
 public:
  explicit Overdue(uint32_t number = 0) : number_(number) {}

  struct Awaited {
    uint32_t number;
    Patience patience;
    std::string what;
  };

  // What the stream is to write where the next thing begins, and where it ends. They wrap around, after some weeks.
  uint32_t begin(Patience const& patience, std::string what) {
    ++number_;
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_.push_back({number_, patience, std::move(what)});
    return 2 * number_ - 1;
  }
  uint32_t end() const { return 2 * number_; }

  // The stream has come to `at`, `milliseconds` after the last look: what is overdue, once.
  std::optional<Awaited> look(uint32_t at, uint64_t milliseconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!awaited_.empty() && static_cast<int32_t>(at - 2 * awaited_.front().number) >= 0) awaited_.pop_front();
    bool under_way = !awaited_.empty() && at == 2 * awaited_.front().number - 1;
    waited_ms_ = under_way && at == seen_ ? waited_ms_ + milliseconds : 0;
    seen_ = at;
    if (!under_way) return std::nullopt;
    uint64_t most = awaited_.front().patience.timeout_ns;
    if (most == 0 || waited_ms_ * 1'000'000 <= most) return std::nullopt;
    Awaited first = std::move(awaited_.front());
    awaited_.pop_front();
    return first;
  }

 private:
  uint32_t number_;  // of the last that has begun
  std::mutex mutex_;
  std::deque<Awaited> awaited_;  // not seen to have ended
  uint32_t seen_ = 0;
  uint64_t waited_ms_ = 0;
};

}  // namespace entwine::team
