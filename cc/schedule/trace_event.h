// What a traced kernel writes down: who did what to which tile, and when.
#pragma once

#include <cstdint>

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
  kLanded = 8,      // storer: a partial sum lies where its owner looks for it, or a finished part at all peers; signalled
  kPushed = 9,      // pusher: a unit of the own chunk has landed
  kCollected = 10,  // collector: a part of a peer's finished tile is there, and is copied now
};

// A writer's events lie in the order of their time; ns 0 ends them. `tile` packs owner, row block and column
// (kernel/sm90/shape.h); for kPushed, it is destination and row block.
struct TraceEvent {
  uint64_t ns;  // %globaltimer of the GPU
  uint32_t tile, mark;
};

// Writers of a CTA: loader, two storers, scheduler, pusher or collector.
constexpr uint32_t kTraceWriters = 4;

}  // namespace entwine::schedule
