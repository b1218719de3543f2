// Loader for few rows: one thread a CTA, TMA loads of its slice of w's columns and, beside it, of x's rows.
//
// x coordinates: (k, row), all rows of all chunks. w coordinates: (n, k), or (k, n) when stored transposed.
#pragma once

#include "kernel/ptx/tma.cuh"
#include "kernel/sm90/few_rows_config.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

template <class C>
__device__ __forceinline__ void load_w(FewRowsCta<C> const& cta, uint32_t tile, uint32_t block, uint32_t stage) {
  uint32_t k = (cta.first_block() + block) * C::kBlockK, n = tile * C::kTileN;
  ptx::mbarrier_arrive_expect(cta.full(stage), C::kStageBytes);
  if constexpr (C::kTransposedW) {
    ptx::tma_load_2d(&cta.params.w, cta.w(stage), cta.full(stage), k, n);
  } else {
    for (uint32_t panel = 0; panel < C::kTileN / 64; ++panel)
      ptx::tma_load_2d(&cta.params.w, cta.w(stage) + panel * kImageBytes, cta.full(stage), n + panel * 64, k);
  }
}

template <class C>
__device__ __forceinline__ void load_x(FewRowsCta<C> const& cta, uint32_t block, uint32_t stage) {
  ptx::tma_load_2d(&cta.params.x[C::kGather ? cta.parity() : 0], cta.x(stage), cta.full(stage),
                   (cta.first_block() + block) * C::kBlockK, 0);
}

// w needs no peer: the stages fill with it while x is on its way.
template <class C>
class FewRowsLoader {
 public:
  __device__ __forceinline__ explicit FewRowsLoader(FewRowsCta<C> const& cta) : cta_(cta) {}

  __device__ __forceinline__ void load(uint32_t tile) {
    uint32_t blocks = cta_.blocks(), ahead = schedule::smaller(blocks, C::kStages), stage = stage_, phase = phase_;
    for (uint32_t block = 0; block < ahead; ++block) {
      ptx::mbarrier_wait(cta_.empty(stage), phase);
      load_w(cta_, tile, block, stage);
      next(stage, phase);
    }
    if constexpr (C::kGather) {
      if (!gathered_) {
        for (uint32_t source = 0; source < cta_.params.shape.ranks; ++source)
          wait_for_peer(cta_, cta_.signal(cta_.params.rank, source, cta_.slice), source, cta_.slice, 0);
        gathered_ = true;
      }
    }
    for (uint32_t block = 0; block < blocks; ++block) {
      if (block >= ahead) {
        ptx::mbarrier_wait(cta_.empty(stage_), phase_);
        load_w(cta_, tile, block, stage_);
      }
      load_x(cta_, block, stage_);
      next(stage_, phase_);
    }
  }

 private:
  static __device__ __forceinline__ void next(uint32_t& stage, uint32_t& phase) {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  FewRowsCta<C> const& cta_;
  uint32_t stage_ = 0, phase_ = 1;
  bool gathered_ = false;
};

}  // namespace entwine::sm90
