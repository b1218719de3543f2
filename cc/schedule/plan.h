// A plan is a schedule plus a launch shape: a pure function of op, geometry and target, so that every rank makes the same one.
#pragma once

#include "schedule/geometry.h"

namespace entwine::schedule {

enum class Target : uint32_t { kHost = 0, kSm90 = 1 };

// Who stores a partial sum where. Pull: into the producer's own staging, and the owner fetches it over the link at the start
// of its own tile. Push: straight into the owner's staging.
enum class Transport : uint32_t { kPull = 0, kPush = 1 };

struct Plan {
  uint32_t tile_m, tile_n;  // on sm_90: of a cluster of two CTAs stacked along m
  uint32_t raster;          // row blocks walked together
  uint32_t lead;            // reduce-scatter: remote tiles ahead of the first own one
  Transport transport;      // reduce-scatter
  // All-gather: workers (host) or clusters (sm_90) that push the own chunk beside the GEMM. Reduce-scatter by push, sm_90: remote
  // tiles that may be on the link at once.
  uint32_t pushers;
};

// sm_90: the one tile shape that the kernels are built for.
constexpr uint32_t kSm90TileM = 256, kSm90TileN = 256, kSm90Clusters = 66, kSm90Parts = 4, kSm90Pushers = 24;
// Host: small enough that test shapes have many tiles.
constexpr uint32_t kHostTileM = 32, kHostTileN = 32, kHostParts = 1;

// Measured on H200 (NVLink 18 links): sustained rates of the matmul and of one direction of the link.
constexpr double kSm90FlopsPerSecond = 750e12, kSm90LinkBytesPerSecond = 361e9;

constexpr Plan make_plan(Op op, Target target, uint32_t ranks, uint32_t k, uint32_t partial_bytes) {
  if (target == Target::kHost) return {kHostTileM, kHostTileN, 4, 2 * ranks, Transport::kPull, 1};
  // Time of the link over time of the matmul, for reduce-scatter; m and n cancel out.
  double link = double(ranks - 1) / ranks * partial_bytes / kSm90LinkBytesPerSecond;
  double matmul = 2.0 * k / kSm90FlopsPerSecond;
  bool link_bound = link > 0.8 * matmul;
  // Measured: reduce-scatter is 1 % faster with 2 than with 4 or 8.
  uint32_t raster = op == Op::kAllGatherMatmul ? 8 : 2;
  // Measured: a lead of 0.9 waves for pull, 0.7 for push; under half a wave own tiles stall, over 1.5 the link bursts.
  uint32_t lead = link_bound ? 44 : 58;
  return {kSm90TileM,  kSm90TileN, raster, larger(lead, ranks - 1), link_bound ? Transport::kPush : Transport::kPull,
          kSm90Pushers};
}

}  // namespace entwine::schedule
