// Loader for few rows: one warp a CTA, TMA loads of its slice of w's columns and, beside it, of x's rows where these don't
// stay.
//
// x coordinates: (k, row), all rows of all chunks. w coordinates: (n, k), or (k, n) when stored transposed.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/few_rows_config.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

// w needs no peer: the stages fill with it while x is on its way. But only so many loads are on their way at once as keep
// memory busy; with more of them all else that this multiprocessor asks for waits behind them.
template <class C>
class FewRowsLoader {
 public:
  __device__ __forceinline__ explicit FewRowsLoader(FewRowsCta<C> const& cta) : cta_(cta) {}

  // A warp's; its first lane loads.
  __device__ __forceinline__ void load(uint32_t tile) {
    bool loads = threadIdx.x == 0;
    uint32_t blocks = cta_.blocks(), ahead = 0;
    if constexpr (C::kGather) {
      if (!gathered_ && !cta_.resident()) {
        ahead = schedule::smaller(blocks, cta_.params.stages);
        if (loads)
          for (uint32_t block = 0; block < ahead; ++block) load_w(tile, block);
        await_x();
        gathered_ = true;
      }
    }
    if (loads)
      for (uint32_t block = 0; block < blocks; ++block) {
        if (block >= ahead) load_w(tile, block);
        if (!cta_.resident()) load_x(block);
      }
    __syncwarp();
  }

 private:
  // A lane for each piece of the slice, of all ranks.
  __device__ __forceinline__ void await_x() const {
    schedule::FewRows const& s = cta_.params.shape;
    __syncwarp();
    for (uint32_t source = 0; source < s.ranks; ++source)
      for (uint32_t piece = threadIdx.x; piece < s.pieces; piece += 32)
        wait_for_peer(cta_, cta_.signal(cta_.params.rank, source, cta_.slice * s.pieces + piece), source, cta_.slice, piece);
    __syncwarp();
  }

  __device__ __forceinline__ void load_w(uint32_t tile, uint32_t block) {
    if (in_flight_ == kFewRowsInFlight) {
      ptx::mbarrier_wait(cta_.full(landing_.stage), landing_.phase);
      landing_.next(cta_.params.stages);
    } else {
      ++in_flight_;
    }
    ptx::mbarrier_wait(cta_.empty(w_.stage), w_.phase);
    uint32_t k = (cta_.first_block() + block) * C::kBlockK, n = tile * C::kTileN, to = cta_.w(w_.stage),
             full = cta_.full(w_.stage);
    ptx::mbarrier_arrive_expect(full, C::kGather ? C::kWBytes : C::kWBytes + C::kXBytes);
    if constexpr (C::kTransposedW) {
      ptx::tma_load_2d(&cta_.params.w, to, full, k, n);
    } else {
      for (uint32_t panel = 0; panel < C::kTileN / 64; ++panel)
        ptx::tma_load_2d(&cta_.params.w, to + panel * kImageBytes, full, n + panel * 64, k);
    }
    w_.next(cta_.params.stages);
  }

  __device__ __forceinline__ void load_x(uint32_t block) {
    uint32_t full = C::kGather ? cta_.full_x(x_.stage) : cta_.full(x_.stage);
    if constexpr (C::kGather) ptx::mbarrier_arrive_expect(full, C::kXBytes);
    ptx::tma_load_2d(&cta_.params.x[C::kGather ? cta_.parity() : 0], cta_.x(x_.stage), full,
                     (cta_.first_block() + block) * C::kBlockK, 0);
    x_.next(cta_.params.stages);
  }

  FewRowsCta<C> const& cta_;
  StageCursor w_{0, 1}, x_{0, 1}, landing_{0, 0};
  uint32_t in_flight_ = 0;
  bool gathered_ = false;
};

}  // namespace entwine::sm90
