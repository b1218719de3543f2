// From a launch's variant to the kernel's compile-time configuration.
#pragma once

#include "kernel/sm90.h"
#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

// use(Config{}) of the variant's configuration. Only large tiles have kernels that take notes.
template <schedule::Op kOp, uint32_t kTileM, uint32_t kTileN, typename Out, class Use>
auto pick(Variant const& v, Use use) {
  if constexpr (kTileM == 256 && kTileN == 256)
    if (v.traced)
      return v.transposed_w ? use(Config<kOp, kTileM, kTileN, true, Out, true>{})
                            : use(Config<kOp, kTileM, kTileN, false, Out, true>{});
  return v.transposed_w ? use(Config<kOp, kTileM, kTileN, true, Out, false>{})
                        : use(Config<kOp, kTileM, kTileN, false, Out, false>{});
}

template <schedule::Op kOp, typename Out, class Use>
auto pick(Variant const& v, Use use) {
  if (v.tile_m == 128) return pick<kOp, 128, 128, Out>(v, use);
  return v.tile_n == 128 ? pick<kOp, 256, 128, Out>(v, use) : pick<kOp, 256, 256, Out>(v, use);
}

template <schedule::Op kOp, class Use>
auto pick(Variant const& v, Use use) {
  return v.float_out ? pick<kOp, float>(v, use) : pick<kOp, __nv_bfloat16>(v, use);
}

}  // namespace entwine::sm90
