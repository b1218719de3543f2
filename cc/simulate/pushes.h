// When the row blocks that an all-gather brings are there: the pushers of one rank work through the real PushOrder. Ranks are
// alike and the orders are the same for all but for a rotation, so what a rank receives from `step` ranks on comes when its own
// push of that step lands.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "schedule/arena_layout.h"
#include "schedule/plan.h"
#include "schedule/tile_order.h"
#include "simulate/link.h"
#include "simulate/machine.h"
#include "simulate/spans.h"

namespace entwine::simulate {

class Pushes {
 public:
  // Without pushers nothing is brought. `worker_of(pusher)` is whose span a unit's way is.
  template <class WorkerOf>
  Pushes(schedule::Geometry const& g, uint32_t pushers, double bytes_per_us, double element_bytes, Machine const& machine,
         Link& link, Spans* spans, WorkerOf worker_of)
      : blocks_(g.chunk_rows()), landed_((g.ranks - 1) * blocks_), done_(pushers) {
    if (pushers == 0) return;
    uint64_t row_bytes = static_cast<uint64_t>(g.k * element_bytes);
    uint32_t units = static_cast<uint32_t>(schedule::ceil_div64(g.rows(0) * row_bytes, machine.unit_bytes));
    schedule::PushOrder order{g.ranks, 0, blocks_, units};
    using Free = std::pair<double, uint32_t>;  // when a pusher takes its next unit
    std::priority_queue<Free, std::vector<Free>, std::greater<Free>> next;
    for (uint32_t pusher = 0; pusher < pushers; ++pusher) next.push({0, pusher});
    struct Moved {
      uint32_t place;
      double end;
    };
    std::vector<std::vector<Moved>> moved(pushers);
    for (uint32_t i = 0; i < order.size(); ++i) {
      auto [start, pusher] = next.top();
      next.pop();
      auto unit = order.at(i);
      double block = double(g.rows(unit.row)) * row_bytes, before = unit.piece * machine.unit_bytes;
      double bytes = std::clamp(block - before, 0.0, machine.unit_bytes);
      double end = link.move(start, bytes, bytes_per_us);
      if (spans != nullptr) spans->add(Role::kMove, worker_of(pusher), start, end, {unit.destination, unit.row, 0});
      moved[pusher].push_back({i / units, end});
      next.push({end, pusher});
    }
    // A pusher counts a unit as landed when it has moved two more, or all.
    for (uint32_t pusher = 0; pusher < pushers; ++pusher) {
      auto const& mine = moved[pusher];
      if (mine.empty()) continue;
      done_[pusher] = mine.back().end;
      for (size_t j = 0; j < mine.size(); ++j) {
        double counted = (j + 2 < mine.size() ? mine[j + 2] : mine.back()).end;
        double& at = landed_[mine[j].place];
        at = std::max(at, std::max(counted, mine[j].end + machine.land_us) + machine.signal_us);
      }
    }
  }

  // When row block `row` of the rank `step` >= 1 on is there.
  double landed(uint32_t step, uint32_t row) const { return landed_[(step - 1) * blocks_ + row]; }
  bool pushes(uint32_t cluster, double us) const { return cluster < done_.size() && us < done_[cluster]; }
  // When all that `pusher` has taken has left.
  double done(uint32_t pusher) const { return done_[pusher]; }

 private:
  uint32_t blocks_;
  std::vector<double> landed_, done_;
};

}  // namespace entwine::simulate
