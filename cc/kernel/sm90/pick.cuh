// From a launch's variant to the kernel's compile-time configuration.
#pragma once

#include "kernel/sm90.h"
#include "kernel/sm90/config.cuh"

namespace entwine::sm90 {

// use(Config{}) of the variant's configuration. Only large tiles of bf16 have kernels that take notes.
template <schedule::Op kOp, uint32_t kTileM, uint32_t kTileN, Operands kOperands, bool kFloatOut, class Use>
auto pick(Variant const& v, Use use) {
  if constexpr (kTileM == 256 && kTileN == 256 && kOperands == Operands::kBf16)
    if (v.traced)
      return v.transposed_w ? use(Config<kOp, kTileM, kTileN, kOperands, true, kFloatOut, true>{})
                            : use(Config<kOp, kTileM, kTileN, kOperands, false, kFloatOut, true>{});
  if constexpr (!is_float8(kOperands))
    if (!v.transposed_w) return use(Config<kOp, kTileM, kTileN, kOperands, false, kFloatOut, false>{});
  return use(Config<kOp, kTileM, kTileN, kOperands, true, kFloatOut, false>{});
}

template <schedule::Op kOp, Operands kOperands, bool kFloatOut, class Use>
auto pick(Variant const& v, Use use) {
  if (v.tile_m == 128) return pick<kOp, 128, 128, kOperands, kFloatOut>(v, use);
  if constexpr (!kFloatOut) {
    if (v.tile_n == 224) return pick<kOp, 256, 224, kOperands, kFloatOut>(v, use);
    if (v.tile_n == 192) return pick<kOp, 256, 192, kOperands, kFloatOut>(v, use);
    if (v.tile_n == 160) return pick<kOp, 256, 160, kOperands, kFloatOut>(v, use);
  }
  return v.tile_n == 128 ? pick<kOp, 256, 128, kOperands, kFloatOut>(v, use)
                         : pick<kOp, 256, 256, kOperands, kFloatOut>(v, use);
}

template <schedule::Op kOp, Operands kOperands, class Use>
auto pick(Variant const& v, Use use) {
  return v.float_out ? pick<kOp, kOperands, true>(v, use) : pick<kOp, kOperands, false>(v, use);
}

template <schedule::Op kOp, class Use>
auto pick(Variant const& v, Use use) {
  switch (v.operands) {
    case Operands::kF16:
      return pick<kOp, Operands::kF16>(v, use);
    case Operands::kE4m3:
      return pick<kOp, Operands::kE4m3>(v, use);
    case Operands::kE5m2:
      return pick<kOp, Operands::kE5m2>(v, use);
    default:
      return pick<kOp, Operands::kBf16>(v, use);
  }
}

}  // namespace entwine::sm90
