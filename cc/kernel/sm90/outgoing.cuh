// Strategy "resident", reduce-scatter and all-reduce: where a rank keeps what its tiles have finished and its movers have yet
// to take, and the flags that tell them (schedule/movers.h).
#pragma once

#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

// Where the first image of a part of a tile lies in set `set`.
template <class C>
__device__ __forceinline__ uint8_t* outgoing(Cta<C> const& cta, uint32_t set, uint32_t index, uint32_t part) {
  uint64_t tile = uint64_t(set) * cta.params.raster.size() + index;
  return cta.staging(cta.params.rank) + cta.params.outgoing_offset + (tile * schedule::kSm90Parts + part) * C::kPartBytes;
}
template <class C>
__device__ __forceinline__ uint32_t* outgoing_flag(Cta<C> const& cta, uint32_t set, uint32_t index, uint32_t part) {
  uint32_t flag = schedule::finished_flag(cta.params.raster.size(), set, index, part, schedule::kSm90Parts);
  return cta.signal(cta.params.rank, cta.params.rank, flag);
}

}  // namespace entwine::sm90
