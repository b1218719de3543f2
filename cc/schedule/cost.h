// What a call should take, fused and on XLA: what strategy "auto" decides by. Pure functions of op, geometry and plan, fitted
// to measurements on two H200s (benchmarks/results): good to some ten percent, which is enough to tell where fusing can't win.
#pragma once

#include "schedule/arena_layout.h"
#include "schedule/plan.h"

namespace entwine::schedule {

struct Prediction {
  double fused_us, xla_us;
};

namespace cost {

// A persistent kernel: launch, prologue, first loads, drain; each tile: k blocks at the cluster's sustained rate, and its
// epilogue. With few tiles the kernel is bound by how fast their columns of w stream in.
constexpr double kLaunchUs = 8, kTileUs = 2.5, kStreamBytesPerUs = 1.1e6;
// XLA: a GEMM of any tile shape at cuBLAS' rate or memory's, and NCCL before or after it.
constexpr double kGemmUs = 8, kGemmFlopsPerUs = 720e6, kMemoryBytesPerUs = 4.2e6, kNcclUs = 24, kNcclBytesPerUs = 0.205e6;
constexpr double kLinkBytesPerUs = kSm90LinkBytesPerSecond * 1e-6;

constexpr double larger(double a, double b) { return a < b ? b : a; }

constexpr double fused_us(Op op, Geometry const& g, double out_bytes) {
  // A tile costs the same however little of it is inside the matrix: few rows are what this kernel is slow at.
  double tile_us =
      kTileUs + ceil_div(g.k, 64) * (2.0 * g.tile_m * g.tile_n * 64 / (kSm90FlopsPerSecond * 1e-6 / kSm90Clusters));
  double waves = ceil_div(g.tiles(), kSm90Clusters);
  double per_peer = op == Op::kAllGatherMatmul ? chunk_bytes(g, 2) : partials_bytes(g, 1) * out_bytes;
  double stream_us = 2.0 * g.n * g.k / kStreamBytesPerUs;
  return kLaunchUs + larger(larger(waves * tile_us, stream_us), per_peer * (g.ranks - 1) / kLinkBytesPerUs);
}

constexpr double xla_us(Op op, Geometry const& g, double out_bytes) {
  double m = double(g.ranks) * g.batch * g.m_shard, n = g.n, k = g.k;
  double gemm = kGemmUs + larger(2 * m * n * k / kGemmFlopsPerUs, ((m + n) * k * 2 + m * n * out_bytes) / kMemoryBytesPerUs);
  double per_peer = double(g.batch) * g.m_shard * (op == Op::kAllGatherMatmul ? k * 2 : n * out_bytes);
  return gemm + kNcclUs + per_peer * (g.ranks - 1) / kNcclBytesPerUs;
}

}  // namespace cost

// On sm_90, for bfloat16 operands.
constexpr Prediction predict(Op op, Geometry const& g, uint32_t out_bytes) {
  return {cost::fused_us(op, g, out_bytes), cost::xla_us(op, g, out_bytes)};
}

}  // namespace entwine::schedule
