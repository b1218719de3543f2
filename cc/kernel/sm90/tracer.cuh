// Tracer: one single-thread role's notes of what happened when. Compiled to nothing where C::kTraced is false.
#pragma once

#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

template <class C>
class Tracer {
 public:
  // `writer` is the role's warp.
  __device__ __forceinline__ Tracer(Params const& params, uint32_t writer) {
    if constexpr (C::kTraced) {
      next_ = params.trace + uint64_t(blockIdx.x * schedule::kTraceWriters + writer) * params.trace_capacity;
      left_ = params.trace_capacity;
    }
  }

  __device__ __forceinline__ void mark(schedule::Mark mark, uint32_t tile) {
    if constexpr (C::kTraced) {
      if (left_ == 0) return;
      --left_;
      next_->ns = ptx::nanoseconds();
      next_->tile = tile;
      next_->mark = static_cast<uint32_t>(mark);
      ++next_;
    }
  }

 private:
  schedule::TraceEvent volatile* next_;
  uint32_t left_;
};

}  // namespace entwine::sm90
