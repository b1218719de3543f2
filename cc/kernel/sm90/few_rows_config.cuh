// Compile-time shape of a kernel for few rows, and what each role of a CTA knows.
#pragma once

#include <type_traits>

#include "kernel/operands.h"
#include "kernel/ptx/matrix.cuh"
#include "kernel/sm90/arena_view.cuh"
#include "kernel/sm90/few_rows_params.h"
#include "kernel/sm90/shape.h"

namespace entwine::sm90 {

template <schedule::Op kOp_, uint32_t kRows_, Operands kOperands_, bool kTransposedW_, bool kFloatOut_>
struct FewRowsConfig {
  static constexpr schedule::Op kOp = kOp_;
  static constexpr bool kGather = kOp == schedule::Op::kAllGatherMatmul, kScatter = kOp == schedule::Op::kMatmulReduceScatter;
  static constexpr uint32_t kRows = kRows_;          // room for them
  static constexpr Operands kOperands = kOperands_;  // kE4m3 is both of 8 bits: FewRowsParams says which
  static constexpr bool kFloat8 = is_float8(kOperands);
  static constexpr uint32_t kElementBytes = operand_bytes(kOperands), kBlockK = kBlockBytes / kElementBytes;
  static constexpr bool kTransposedW = kTransposedW_;
  static_assert(kTransposedW || !kFloat8, "8-bit operands are contiguous in k");
  static constexpr bool kFloatOut = kFloatOut_;
  using Pair =
      std::conditional_t<kOperands == Operands::kF16, ptx::F16Pair, ptx::Bf16Pair>;  // of the result, if it isn't float32

  static constexpr uint32_t kTileN = schedule::kFewRowsTileN, kConsumerThreads = kConsumers * 128;
  static constexpr uint32_t kWBytes = kTileN * kBlockBytes, kXBytes = kRows * kBlockBytes, kStageBytes = kWBytes + kXBytes;
  static constexpr uint32_t kStages = kRows == 16 ? 10 : kRows == 64 ? 8 : 6;
  // Sums of one row and one slice; the padding spreads rows over the banks.
  static constexpr uint32_t kSumPitch = (kTileN + 4) * 4;
  static_assert(kRows * kSumPitch <= kStages * kStageBytes, "sums take the place of the stages");

  static constexpr uint32_t kBarriers = kStages * kStageBytes, kClaim = kBarriers + 16 * kStages;
  static constexpr uint32_t kAllocated = kClaim + 16 + 1024;  // room to align the base
  static_assert(kAllocated <= kSharedLimit, "shared memory of one CTA");
};

template <class C>
struct FewRowsCta : ArenaView<FewRowsParams> {
  static constexpr schedule::Op kOp = C::kOp;
  uint32_t base;   // of shared memory
  uint32_t slice;  // rank in the cluster

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + C::kBarriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return base + C::kBarriers + 8 * (C::kStages + stage); }
  __device__ __forceinline__ uint32_t w(uint32_t stage) const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ uint32_t x(uint32_t stage) const { return w(stage) + C::kWBytes; }
  // {tile, unit}: what has been claimed for all threads to see.
  __device__ __forceinline__ uint32_t claimed_tile() const { return base + C::kClaim; }
  __device__ __forceinline__ uint32_t claimed_unit() const { return base + C::kClaim + 8; }

  __device__ __forceinline__ uint64_t* packets(uint32_t rank) const {
    return reinterpret_cast<uint64_t*>(params.arena[rank] + params.packets_offset + this->parity() * params.packets_half);
  }

  __device__ __forceinline__ uint32_t first_block() const { return slice * params.slice_blocks; }
  __device__ __forceinline__ uint32_t blocks() const {
    uint32_t first = first_block();
    return first >= params.k_blocks ? 0 : schedule::smaller(params.slice_blocks, params.k_blocks - first);
  }
};

}  // namespace entwine::sm90
