// Makes the plan of a call: a pure function of op, sizes and target, so that every rank makes the same one.
#pragma once

#include "schedule/cost.h"
#include "schedule/few_rows.h"
#include "schedule/plan.h"

namespace entwine::schedule {

// The tile that cost.h predicts to be the fastest for these sizes; one that isn't clearly faster than a larger one isn't taken,
// since large calls are limited by power, and the larger a tile the fewer bytes it reads.
constexpr double kClearlyFaster = 0.98;
constexpr TileShape pick_sm90_tile(Op op, Geometry g, uint32_t out_bytes, uint32_t in_bytes, bool gated = false) {
  TileShape best = kSm90Tiles[0];
  double best_us = 0;
  for (TileShape tile : kSm90Tiles) {
    if (!is_sm90_tile(tile, out_bytes, gated)) continue;
    g.tile_m = tile.m;
    g.tile_n = tile.n;
    double us = cost::fused_us(op, g, out_bytes, in_bytes);
    if (best_us == 0 || us < kClearlyFaster * best_us) {
      best = tile;
      best_us = us;
    }
  }
  return best;
}

// With the tile that is best among tiles.
constexpr Form pick_form(Op op, Geometry const& g, uint32_t out_bytes, uint32_t in_bytes) {
  if (!are_few_rows(op, g)) return Form::kTiles;
  bool few = cost::few_rows_us(op, g, out_bytes, in_bytes) < cost::fused_us(op, g, out_bytes, in_bytes);
  return few ? Form::kFewRows : Form::kTiles;
}

// `g`'s own tile is ignored. The bytes are those of an element of y and of x.
constexpr Plan plan_of_tile(Op op, Geometry g, TileShape tile, uint32_t out_bytes, uint32_t in_bytes, bool gated) {
  g.tile_m = tile.m;
  g.tile_n = tile.n;
  bool gather = op == Op::kAllGatherMatmul;
  bool replicate = op == Op::kMatmulAllReduce;
  // Time of the link over time of the matmul; m and n cancel out. An all-reduce moves sums back, too.
  double link = double(g.ranks - 1) / g.ranks * out_bytes * (replicate ? 2 : 1) / kSm90LinkBytesPerSecond;
  double matmul = 1.0 * in_bytes * g.k / kSm90FlopsPerSecond;
  bool push = !gather && link > 0.8 * matmul;
  // Measured: all-gather is fastest with row groups of 8 large tiles, reduce-scatter with 2.
  uint32_t raster = (gather ? 8 : 2) * kSm90Tiles[0].m / tile.m;
  // Measured: a lead of 0.9 waves for pull, 0.7 for push; under half a wave own tiles stall, over 1.5 the link bursts. But
  // where a cluster has but two tiles, an own one that waits in the first wave is late in the last too.
  // An all-reduce's last `lead` own tiles come in a burst for which all peers wait: fewer of them.
  uint32_t lead = g.tiles() <= 2 * kSm90Clusters ? kSm90Clusters : replicate ? 40 : push ? 44 : 58;
  // Measured: a pusher moves some 16 GB/s beside a matmul and holds up its own cluster's loads a bit. 18 bring rows in time for
  // the second half of the tiles if these take as long as the link; where the link takes longer, or all tiles are in flight at
  // once and those of other chunks only wait, 33 fill it. Of partial sums, 10 tiles are what is on its way over the link.
  double rows_over_tiles = double(g.ranks - 1) / g.ranks * kSm90FlopsPerSecond / (g.n * kSm90LinkBytesPerSecond);
  bool hurry = rows_over_tiles > 0.75 || g.tiles() <= kSm90Clusters;
  uint32_t pushers = gather ? (hurry ? 33 : 18) : 10;
  // Copies stay within a GPU: twice as many clusters, so that half of them follow the link while the others push.
  // Reduce-scatter's rings are a third as large, and all its clusters have one.
  uint32_t copiers = gather ? 48 : kSm90Clusters;
  return {tile.m,
          tile.n,
          raster,
          larger(lead, g.ranks - 1),
          push ? Transport::kPush : Transport::kPull,
          pushers,
          gated ? Form::kTiles : pick_form(op, g, out_bytes, in_bytes),
          copiers};
}
constexpr Plan make_plan(Op op, Target target, Geometry const& g, uint32_t out_bytes, uint32_t in_bytes = 2,
                         bool gated = false) {
  if (target == Target::kHost) return {kHostTileM, kHostTileN, 4, 2 * g.ranks, Transport::kPull, 1, Form::kTiles, 1};
  return plan_of_tile(op, g, pick_sm90_tile(op, g, out_bytes, in_bytes, gated), out_bytes, in_bytes, gated);
}

// Of strategy "resident": tile and multiprocessors that move, two a cluster, together, by what cost.h predicts.
struct ResidentChoice {
  Plan plan;
  double us;  // sm_90
};
constexpr uint32_t kMoverSms[] = {2, 4, 6, 8, 12, 16, 20, 24};
constexpr ResidentChoice make_resident_plan(Op op, Target target, Geometry g, uint32_t out_bytes, uint32_t in_bytes = 2,
                                            bool gated = false) {
  if (target == Target::kHost) {
    Plan plan = make_plan(op, target, g, out_bytes, in_bytes, gated);
    plan.movers = 1;
    return {plan, 0};
  }
  ResidentChoice best{};
  for (TileShape tile : kSm90Tiles) {
    if (!is_sm90_tile(tile, out_bytes, gated)) continue;
    g.tile_m = tile.m;
    g.tile_n = tile.n;
    for (uint32_t sms : kMoverSms) {
      double us = cost::resident_us(op, g, out_bytes, in_bytes, sms / 2);
      bool another = best.plan.tile_m != tile.m || best.plan.tile_n != tile.n;
      if (best.us != 0 && us >= (another ? kClearlyFaster : 1) * best.us) continue;
      best = {plan_of_tile(op, g, tile, out_bytes, in_bytes, gated), us};
      best.plan.form = Form::kTiles;
      best.plan.movers = sms / 2;
    }
  }
  // Partial sums come by way of a mover: as far ahead of their use as by pull, in waves of fewer clusters.
  uint32_t clusters = kSm90Clusters - best.plan.movers;
  if (op == Op::kMatmulReduceScatter && best.plan.lead < kSm90Clusters) best.plan.lead = larger(58, g.ranks - 1);
  if (best.plan.lead > clusters) best.plan.lead = larger(clusters, g.ranks - 1);
  return best;
}

// Predicted microseconds on sm_90, with the plan's tile and on XLA: what strategy "auto" decides by. Some
// calls are for tiles only, as gated ones are; on XLA these have one more kernel. `beside` are the bytes of each rank's array
// that a call for tiles gathers beside its product.
struct Prediction {
  double fused_us, xla_us;
};
constexpr Prediction predict(Op op, Geometry g, uint32_t out_bytes, bool tiles_only, uint32_t in_bytes = 2, bool gated = false,
                             double beside = 0) {
  TileShape tile = pick_sm90_tile(op, g, out_bytes, in_bytes, gated);
  g.tile_m = tile.m;
  g.tile_n = tile.n;
  bool few = !tiles_only && !gated && pick_form(op, g, out_bytes, in_bytes) == Form::kFewRows;
  return {few ? cost::few_rows_us(op, g, out_bytes, in_bytes) : cost::fused_us(op, g, out_bytes, in_bytes, beside),
          cost::xla_us(op, g, out_bytes, in_bytes) + (gated ? cost::gate_us(g, out_bytes) : 0) +
              (beside > 0 ? cost::xla_gather_us(beside, g.ranks) : 0)};
}

}  // namespace entwine::schedule
