// What every launch on Hopper does: what TMA takes, the arena's part of the parameters, and a grid of clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernel/sm90.h"
#include "kernel/sm90/shape.h"

namespace entwine::sm90 {

// What TMA can't take: rows that don't begin at multiples of 16 bytes,
inline std::string unaligned_rows(char const* what, uint64_t bytes) {
  return std::string("rows of ") + what + " are " + std::to_string(bytes) +
         " bytes, not a multiple of 16: pad that dimension or pass strategy=\"xla\"";
}
// and loads that don't, as those of a chunk's rows where these are contiguous: an x of 16 bits that is stored transposed. "" if
// a Call or SignalCall has none.
template <class AnyCall>
std::string unaligned_chunks(AnyCall const& call) {
  uint32_t rows = call.geometry.m_shard;
  if (!call.transposed_x || call.op != schedule::Op::kMatmulReduceScatter || rows % 8 == 0) return "";
  return "a rank has " + std::to_string(rows) + " of the rows of x, which is stored transposed: pad them to a multiple of 8";
}

// Fills in where the ranks' arenas lie and how long to wait for a peer; Params and FewRowsParams have the same names for it.
template <class AnyParams>
void set_arena(Call const& call, AnyParams& p) {
  p.rank = call.rank;
  for (uint32_t r = 0; r < call.geometry.ranks; ++r) p.arena[r] = call.arenas[r];
  p.signals_offset = call.arena.signals_offset();
  p.staging_offset = call.arena.staging_offset(0);
  p.staging_half = call.arena.staging_half;
  p.words_per_source = call.arena.words_per_source;
  p.timeout_ns = call.timeout_ns;
  p.stuck = call.stuck;
}

// Lets a kernel have so much shared memory: once a device, before it is launched.
template <class AnyParams>
cudaError_t allow_shared(void (*kernel)(AnyParams), int shared_bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

template <class AnyParams>
cudaError_t launch_clusters(void (*kernel)(AnyParams), AnyParams const& p, uint32_t ctas, int shared_bytes,
                            cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas * p.clusters);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace entwine::sm90
