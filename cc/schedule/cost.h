// What a call should take, fused and on XLA. Pure functions of op and geometry, fitted to measurements on two H200s
// (benchmarks/results): good to some ten percent, which is enough to pick a tile and to tell where fusing can't win.
#pragma once

#include "schedule/few_rows.h"

namespace entwine::schedule::cost {

// Fused: launch, prologue, first loads, drain; then waves of tiles. A tile costs the same however little of it is inside the
// matrix. Where most rows of a tile are outside, w streams in more slowly than it is multiplied.
constexpr double kLaunchUs = 8, kLinkBytesPerUs = kSm90LinkBytesPerSecond * 1e-6;
// All-reduce: from the last finished tile's landing to its place in every y; what a storer takes for a tile at the least, most
// of it latency (partial sums in, or out, then the finished part's landing at the peers); and how much of the shorter of
// matmul and link isn't hidden under the longer one.
constexpr double kCollectUs = 6, kAllReduceTileUs = 9.4, kAllReduceExposed = 0.15;
// XLA: a GEMM of any tile shape at cuBLAS' rate or memory's, and NCCL before or after it.
constexpr double kGemmUs = 8, kGemmFlopsPerUs = 720e6, kMemoryBytesPerUs = 4.2e6, kNcclUs = 24, kNcclBytesPerUs = 0.205e6;
// Per byte that a rank sends, NCCL's all-reduce is a bit faster than its halves.
constexpr double kNcclAllReduceBytesPerUs = 0.24e6;

constexpr double kFewRowsLaunchUs = 12, kPacketsSaveUs = 3.5, kFewRowsStreamBytesPerUs = 3.7e6, kFewRowsRowUs = 0.035;

constexpr double larger(double a, double b) { return a < b ? b : a; }

// A cluster's tile: microseconds a k block of 128 bytes, and for the rest of it; w's bytes a microsecond for the GPU if the
// tile isn't full.
struct TileCost {
  double k_block_us, rest_us, stream;
};
constexpr TileCost tile_cost(uint32_t tile_m, uint32_t tile_n) {
  if (tile_m == 128) return {0.27, 1.5, 1.15e6};
  if (tile_n == 128) return {0.395, 2.0, 0.68e6};
  if (tile_n == 160) return {0.485, 2.2, 0.7e6};
  if (tile_n == 192) return {0.567, 2.3, 0.72e6};
  if (tile_n == 224) return {0.66, 2.4, 0.75e6};
  return {2.0 * 256 * 256 * 64 / (kSm90FlopsPerSecond * 1e-6 / kSm90Clusters), 2.5, 0.75e6};
}

// `in_bytes` are those of an operand's element: with 8 bits a k block has twice the elements and takes as long. `beside` are
// the bytes of an array that each rank sends to each peer beside the product's.
constexpr double fused_us(Op op, Geometry const& g, double out_bytes, uint32_t in_bytes = 2, double beside = 0) {
  TileCost tile = tile_cost(g.tile_m, g.tile_n);
  double tile_us = tile.rest_us + ceil_div(g.k * in_bytes, 128) * tile.k_block_us;
  if (op == Op::kMatmulAllReduce) tile_us = larger(tile_us, kAllReduceTileUs);
  double waves = ceil_div(g.tiles(), kSm90Clusters), compute_us = waves * tile_us;
  double per_peer = op == Op::kAllGatherMatmul ? chunk_bytes(g, in_bytes) : partials_bytes(g, 1) * out_bytes;
  double link_us = (per_peer + beside) * (g.ranks - 1) / kLinkBytesPerUs;
  // In a single wave there is nothing to do while rows or partial sums are on their way.
  double exposed_us = waves == 1 ? link_us : 0, after_us = 0;
  // The tiles of the rows that come last begin when these have come.
  if (op == Op::kAllGatherMatmul) link_us += tile_us;
  if (op == Op::kMatmulAllReduce) {
    // Finished tiles travel too, and those of the last wave when nothing else is left to do.
    double finished_us = double(g.all_rows()) / g.ranks * g.n * out_bytes * (g.ranks - 1) / kLinkBytesPerUs;
    after_us = kCollectUs + finished_us / larger(1, double(g.tiles()) / kSm90Clusters);
    link_us += finished_us;
    after_us += kAllReduceExposed * (link_us < compute_us ? link_us : compute_us);
  }
  double stream_us = g.m_shard < g.tile_m ? double(in_bytes) * g.n * g.k / tile.stream : 0;
  return kLaunchUs + larger(larger(compute_us + exposed_us, stream_us), link_us) + after_us;
}

// Strategy "resident": some multiprocessors move, each so many bytes a microsecond, and multiply when there is nothing left to
// move; what is finished begins its way a little later. In 15 calls on two H200s a mover's CTA moved 21 to 22 KB a microsecond
// where the link was what they waited for: half of what one stores that doesn't wait until its bytes have landed.
constexpr double kMoverBytesPerUs = 22e3, kMoverJobUs = 0.5, kMoverUnitBytes = 98304, kMoveUs = 3;
constexpr double resident_us(Op op, Geometry const& g, double out_bytes, uint32_t in_bytes, uint32_t movers) {
  TileCost tile = tile_cost(g.tile_m, g.tile_n);
  double tile_us = tile.rest_us + ceil_div(g.k * in_bytes, 128) * tile.k_block_us, tiles = g.tiles();
  bool gather = op == Op::kAllGatherMatmul;
  double job_bytes = gather ? kMoverUnitBytes : double(staged_elements(g)) * out_bytes;
  double rate = 2 * movers * job_bytes / (job_bytes / kMoverBytesPerUs + kMoverJobUs);
  if (rate > kLinkBytesPerUs) rate = kLinkBytesPerUs;
  double clusters = double(kSm90Clusters) - movers;
  double per_peer = gather ? chunk_bytes(g, in_bytes) : partials_bytes(g, 1) * out_bytes;
  double link_us = per_peer * (g.ranks - 1) / rate, after_us = kMoveUs;
  if (op == Op::kMatmulAllReduce) {
    double finished_us = double(g.all_rows()) / g.ranks * g.n * out_bytes * (g.ranks - 1) / rate;
    after_us += kCollectUs + finished_us / larger(1, tiles / clusters);
    link_us += finished_us;
  }
  double waves = ceil_div(g.tiles(), uint32_t(clusters)), compute_us = waves * tile_us;
  if (gather && waves > 1) {  // the movers' clusters take tiles, too, once rows have moved
    double whole = ceil_div(g.tiles(), kSm90Clusters) * tile_us, joined = (tiles * tile_us + movers * link_us) / kSm90Clusters;
    compute_us = larger(whole, joined < compute_us ? joined : compute_us);
  }
  double exposed_us = waves == 1 ? link_us : 0, stream_us = 0;
  if (gather) link_us += tile_us;
  if (g.m_shard < g.tile_m) stream_us = double(in_bytes) * g.n * g.k / tile.stream;
  return kLaunchUs + larger(larger(compute_us + exposed_us, stream_us), link_us) + after_us;
}

// Few rows: w streams in once, faster the more CTAs there are; each row adds to the exchange within and between GPUs, half of
// what it did when this was fitted on two GPUs, as seen on one since.
constexpr double few_rows_us(Op op, Geometry const& g, double out_bytes, uint32_t in_bytes = 2) {
  FewRows f = few_rows(op, g);
  double sent =
      (op == Op::kAllGatherMatmul ? double(f.chunk_rows) * g.k * in_bytes : double(f.rows) * g.n * out_bytes) * (g.ranks - 1);
  double ctas = f.slices * (f.tiles < clusters_at_once(f.slices) ? f.tiles : clusters_at_once(f.slices));
  double stream_us = double(in_bytes) * g.n * g.k / (kFewRowsStreamBytesPerUs * (ctas < 112 ? ctas / 112 : 1));
  double us = kFewRowsLaunchUs + stream_us + f.rows * kFewRowsRowUs + sent / kLinkBytesPerUs;
  return f.packets ? us - kPacketsSaveUs + sent / kLinkBytesPerUs : us;
}

// What an all-gather takes of so many bytes of each rank.
constexpr double xla_gather_us(double bytes, uint32_t ranks) { return kNcclUs + bytes * (ranks - 1) / kNcclBytesPerUs; }

constexpr double xla_us(Op op, Geometry const& g, double out_bytes, uint32_t in_bytes = 2) {
  double m = double(g.ranks) * g.batch * g.m_shard - g.missing, n = g.n, k = g.k;
  double flops_per_us = kGemmFlopsPerUs * (2.0 / in_bytes);
  double gemm =
      kGemmUs + larger(2 * m * n * k / flops_per_us, ((m + n) * k * in_bytes + m * n * out_bytes) / kMemoryBytesPerUs);
  double per_peer = m / g.ranks * (op == Op::kAllGatherMatmul ? k * in_bytes : n * out_bytes);
  if (op == Op::kMatmulAllReduce) return gemm + kNcclUs + 2 * per_peer * (g.ranks - 1) / kNcclAllReduceBytesPerUs;
  return gemm + xla_gather_us(per_peer, g.ranks);  // a reduce-scatter takes as long
}

// What XLA's kernel takes that reads the gate and up, written before, and writes y.
constexpr double gate_us(Geometry const& g, double out_bytes) {
  return 1.5 * g.ranks * g.batch * g.m_shard * g.n * out_bytes / kMemoryBytesPerUs;
}

}  // namespace entwine::schedule::cost
