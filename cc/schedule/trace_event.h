// What a traced call writes down: who did what to which tile, and when.
#pragma once

#include <cstdint>

#include "schedule/tile_order.h"

namespace entwine::schedule {

// In the order in which they happen to a tile. entwine_jax/_trace.py has the same names.
enum class Mark : uint32_t {
  kClaimed = 0,     // scheduler: the cluster has claimed it
  kPosted = 1,      // scheduler: its rows are there, all roles may take it
  kFirstLoad = 2,   // loader: the first k block is asked for
  kLastLoad = 3,    // loader: the last one is
  kAwaited = 4,     // storer: looks for the peers' partial sums
  kArrived = 5,     // storer: they have all been signalled
  kMultiplied = 6,  // storer: the first image is finished
  kRounded = 7,     // storer: the last one is
  kLanded = 8,  // storer: a partial sum, or a finished part of a tile, lies where whoever comes next looks for it: the owner,
                // all peers, the own rank's movers, or whoever moves its group
  kPushed = 9,  // pusher, mover: a unit of the own chunk has landed
  kCollected = 10,  // collector: a part of a peer's finished tile is there, and is copied now
  kMoving = 11,     // mover: a tile is there, and is copied now. `tile` has where to as its owner
  kMoved = 12,      // mover: the longest-ago of what it has begun to copy has landed, and is signalled. `tile` is 0
  kSending = 13,    // strategy "signal": a group is there, and its bytes begin to move. `tile` has the group as its row block
  kSent = 14,       // they have landed, or NCCL has summed them
  kCopying = 15,    // groups up to this one are there, and begin to be copied to y
  kCopied = 16,
};

// A writer's events lie in the order of their time; ns 0 ends them. `tile` packs owner, row block and column as below; for
// kPushed, it is destination and row block, above 24 bits and in these.
struct TraceEvent {
  uint64_t ns;  // %globaltimer of the GPU; on CPU devices a steady clock
  uint32_t tile, mark;
};

// Owner 3 bits, row block 15, column 14.
constexpr uint32_t traced_tile(Tile const& t) { return t.owner << 29 | t.row << 14 | t.col; }

// Writers of a CTA: loader, two storers, and one that is scheduler, pusher, collector and mover. A worker of a CPU device is
// one.
constexpr uint32_t kTraceWriters = 4;

}  // namespace entwine::schedule
