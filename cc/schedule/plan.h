// A plan is a schedule plus a launch shape. make_plan.h makes it.
#pragma once

#include "schedule/geometry.h"

namespace entwine::schedule {

// Of the workers that only move.
constexpr uint32_t kMaxMovers = 4096;

enum class Target : uint32_t { kHost = 0, kSm90 = 1 };

// Who stores a partial sum where. Pull: into the producer's own staging, and the owner fetches it over the link at the start
// of its own tile. Push: straight into the owner's staging.
enum class Transport : uint32_t { kPull = 0, kPush = 1 };

// How the work is cut: into tiles claimed from a queue, or, for few rows, as few_rows.h says (sm_90 only).
enum class Form : uint32_t { kTiles = 0, kFewRows = 1 };

struct Plan {
  uint32_t tile_m, tile_n;  // on sm_90: of a cluster of two CTAs stacked along m
  uint32_t raster;          // row blocks walked together
  uint32_t lead;            // reduce-scatter, all-reduce: remote tiles ahead of the first own one
  Transport transport;      // reduce-scatter, all-reduce: of partial sums; results of an all-reduce are always pushed
  // All-gather: workers (host) or clusters (sm_90) that push the own chunk beside the GEMM. Partial sums by push, sm_90: remote
  // tiles that may be on the link at once.
  uint32_t pushers;
  Form form = Form::kTiles;
  // Workers or clusters that copy the peers' chunks to the gathered result, where there is one. Those of reduce-scatter push
  // the own chunk of what it gathers beside, too.
  uint32_t copiers = 1;
  // Strategy "resident": workers or clusters that only move (movers.h), while there is something to move; `transport` means
  // nothing then. 0: strategy "fused".
  uint32_t movers = 0;
};

// sm_90: the tiles of a cluster that the kernels are built for. The first one multiplies fastest; the next ones fill the GPU
// with whole waves where it makes a wave and a bit, 160 of columns like 5120 = 32 x 160; the last two do with fewer rows and
// columns.
struct TileShape {
  uint32_t m, n;
};
constexpr TileShape kSm90Tiles[] = {{256, 256}, {256, 224}, {256, 192}, {256, 160}, {256, 128}, {128, 128}};
// Whether there are kernels of that tile for results of so many bytes: for float32 only those that results of few rows or
// columns need, to have fewer kernels. Gated products have both halves of a tile in one consumer, each in whole panels of 64
// columns.
constexpr bool is_sm90_tile(TileShape tile, uint32_t out_bytes, bool gated = false) {
  if (gated && tile.m != 256) return false;
  if (tile.n % 128 != 0 && (gated || out_bytes != 2)) return false;
  for (TileShape each : kSm90Tiles)
    if (each.m == tile.m && each.n == tile.n) return true;
  return false;
}
constexpr uint32_t kSm90Clusters = 66, kSm90Parts = 4;
// Host: small enough that test shapes have many tiles.
constexpr uint32_t kHostTileM = 32, kHostTileN = 32, kHostParts = 1;

// All-reduce: a chunk's rows are a multiple of this. On sm_90 a part of a tile is 64 rows, and lies in one chunk as a whole: it
// is stored or it isn't. That costs no tile, since tiles are multiples of that.
constexpr uint32_t chunk_unit(Target target) { return target == Target::kSm90 ? 64 : 1; }

// Measured on H200 (NVLink 18 links): sustained rates of the matmul and of one direction of the link.
constexpr double kSm90FlopsPerSecond = 750e12, kSm90LinkBytesPerSecond = 361e9;

}  // namespace entwine::schedule
