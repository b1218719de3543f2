// A rank's view of the team's arenas; Params and FewRowsParams have the same names for where they lie.
#pragma once

#include <cstdint>

#include "kernel/sm90/params.h"
#include "schedule/signals.h"

namespace entwine::sm90 {

template <class AnyParams>
struct ArenaView {
  AnyParams const& params;
  uint32_t epoch;

  __device__ __forceinline__ uint32_t parity() const { return epoch & 1; }
  __device__ __forceinline__ Control* control() const { return reinterpret_cast<Control*>(params.arena[params.rank]); }
  __device__ __forceinline__ uint8_t* staging(uint32_t rank) const {
    return params.arena[rank] + params.staging_offset + parity() * params.staging_half;
  }
  // Word `index` that `source` raises at `destination`.
  __device__ __forceinline__ uint32_t* signal(uint32_t destination, uint32_t source, uint32_t index) const {
    return reinterpret_cast<uint32_t*>(params.arena[destination] + params.signals_offset) +
           schedule::signal_word(source, params.words_per_source, index);
  }
};

}  // namespace entwine::sm90
