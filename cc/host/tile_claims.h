// A worker's claims of its rank's tile queue, and by its ticket what else it is (schedule/movers.h).
//
// Under strategy "resident" a worker has an idle half, as a cluster has an idle warp. Only ticket 0's is ever used, so there is
// one more thread a rank, which stands by until ticket 0 is told what position it claims second.
#pragma once

#include <utility>

#include "host/worker.h"
#include "schedule/movers.h"

namespace entwine::host {

class TileClaims {
 public:
  TileClaims(Seat const& seat, Stalls& stalls)
      : own_(*(*seat.arenas)[seat.rank]), stalls_(stalls), movers_{seat.spec->plan.movers}, ticket_(claim()) {}

  bool moves() const { return movers_.reserved(ticket_); }

  // The tile's number in the order of tiles; past the last one if there is none left.
  uint32_t next() {
    uint32_t position = std::exchange(first_, false) ? ticket_ : claim();
    while (movers_.reserved(position)) position = claim();
    return movers_.tile(position);
  }

  // For ticket 0's idle half, on a thread of its own: whether it is to move. False, too, if the call is off.
  static bool idle_half_moves(Seat const& seat) {
    Arena& own = *(*seat.arenas)[seat.rank];
    own.bell().wait(Timeout(0), [&] { return own.idle_half().load() != kUnknown || seat.off->load(); });
    return own.idle_half().load() == kMoves;
  }

 private:
  enum IdleHalf : uint32_t { kUnknown, kMoves, kRests };

  uint32_t claim() {
    stalls_.maybe();
    uint32_t position = own_.tile_queue().fetch_add(1);
    if (++claims_ == 2 && ticket_ == 0 && movers_.count != 0) {
      own_.idle_half().store(position == 1 ? kMoves : kRests);
      own_.bell().ring();
    }
    return position;
  }

  Arena& own_;
  Stalls& stalls_;
  schedule::Movers movers_;
  uint32_t claims_ = 0;
  bool first_ = true;
  uint32_t ticket_;  // last: it is claimed
};

}  // namespace entwine::host
