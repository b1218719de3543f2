// Compile-time shape of a kernel for few rows, and what each role of a CTA knows.
#pragma once

#include <type_traits>

#include "kernel/operands.h"
#include "kernel/ptx/matrix.cuh"
#include "kernel/ptx/mbarrier.cuh"
#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/arena_view.cuh"
#include "kernel/sm90/few_rows_params.h"
#include "kernel/sm90/few_rows_stages.h"
#include "kernel/sm90/shape.h"

namespace entwine::sm90 {

constexpr uint32_t kClaimSlots = 2;

template <schedule::Op kOp_, uint32_t kRows_, Operands kOperands_, bool kTransposedW_, bool kFloatOut_>
struct FewRowsConfig {
  static constexpr schedule::Op kOp = kOp_;
  static constexpr bool kGather = kOp == schedule::Op::kAllGatherMatmul, kScatter = kOp == schedule::Op::kMatmulReduceScatter;
  static constexpr uint32_t kRows = kRows_, kOctets = kRows / schedule::kOctet;  // room for them
  static constexpr Operands kOperands = kOperands_;  // kE4m3 is both of 8 bits: FewRowsParams says which
  static constexpr bool kFloat8 = is_float8(kOperands);
  static constexpr uint32_t kElementBytes = operand_bytes(kOperands), kBlockK = kBlockBytes / kElementBytes;
  static constexpr bool kTransposedW = kTransposedW_;
  static_assert(kTransposedW || !kFloat8, "8-bit operands are contiguous in k");
  static constexpr bool kFloatOut = kFloatOut_;
  using Pair =
      std::conditional_t<kOperands == Operands::kF16, ptx::F16Pair, ptx::Bf16Pair>;  // of the result, if it isn't float32
  // Whether sums, or x, may travel as packets.
  static constexpr bool kPackets = kGather ? kRows == schedule::kResidentRows : kRows < schedule::kFewRowsMost;
  static constexpr bool kResident = kGather && kPackets;  // and x then stays in shared memory

  static constexpr uint32_t kTileN = schedule::kFewRowsTileN, kConsumerThreads = kConsumers * 128;
  static constexpr uint32_t kWBytes = kFewRowsWBytes, kXBytes = kRows * kBlockBytes;
  static constexpr uint32_t kBarriers = kFewRowsBytes, kClaims = kBarriers + 24 * kFewRowsStagesMost,
                            kHomes = kClaims + 16 * kClaimSlots + 32;
  static constexpr uint32_t kAllocated = kHomes + 4 * kRows + 1024;  // room to align the base
  static_assert(kAllocated <= kSharedLimit, "shared memory of one CTA");
};

template <class C>
struct FewRowsCta : ArenaView<FewRowsParams> {
  static constexpr schedule::Op kOp = C::kOp;
  uint32_t base;   // of shared memory
  uint32_t slice;  // rank in the cluster

  __device__ __forceinline__ bool resident() const { return C::kResident && params.shape.packets; }
  __device__ __forceinline__ uint32_t w(uint32_t stage) const { return base + stage * C::kWBytes; }
  // A stage's, or the slice's block if x is resident.
  __device__ __forceinline__ uint32_t x(uint32_t i) const { return base + params.stages * C::kWBytes + i * C::kXBytes; }
  __device__ __forceinline__ uint32_t sums() const {
    return base + kFewRowsBytes - few_rows_sums_bytes(C::kRows, params.shape.slices);
  }
  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return base + C::kBarriers + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return full(kFewRowsStagesMost + stage); }
  // All-gather: of x, where it isn't resident.
  __device__ __forceinline__ uint32_t full_x(uint32_t stage) const { return full(2 * kFewRowsStagesMost + stage); }
  // {tile, epoch} that the cluster has claimed, in turn, and their barriers.
  __device__ __forceinline__ uint32_t claimed(uint32_t slot) const { return base + C::kClaims + 16 * slot; }
  __device__ __forceinline__ uint32_t claim_told(uint32_t slot) const { return claimed(slot) + 8; }
  // A tile's sums of all slices have come; those of the tile before have been read, in all CTAs.
  __device__ __forceinline__ uint32_t sums_come() const { return claimed(kClaimSlots); }
  __device__ __forceinline__ uint32_t sums_read() const { return sums_come() + 8; }
  // The unit that this CTA's copiers have claimed.
  __device__ __forceinline__ uint32_t claimed_unit() const { return sums_come() + 16; }
  // Of each row: y's row, and the rank that adds it up.
  __device__ __forceinline__ uint32_t home(uint32_t row) const { return base + C::kHomes + 4 * row; }

  __device__ __forceinline__ uint64_t* packets(uint32_t rank) const {
    return reinterpret_cast<uint64_t*>(params.arena[rank] + params.packets_offset + parity() * params.packets_half);
  }

  __device__ __forceinline__ uint32_t first_block() const { return slice * params.slice_blocks; }
  __device__ __forceinline__ uint32_t blocks() const {
    uint32_t first = first_block();
    return first >= params.k_blocks ? 0 : schedule::smaller(params.slice_blocks, params.k_blocks - first);
  }
};

// A stage and the parity of its barriers.
struct StageCursor {
  uint32_t stage, phase;
  __device__ __forceinline__ void next(uint32_t stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One role's view of the tiles that its cluster has claimed.
template <class C>
class ClaimedTiles {
 public:
  __device__ __forceinline__ explicit ClaimedTiles(FewRowsCta<C>& cta) : cta_(cta) {}

  // Waits for the next one, and tells the view its epoch.
  __device__ __forceinline__ uint32_t next() {
    uint32_t slot = seen_ % kClaimSlots;
    ptx::mbarrier_wait_cluster(cta_.claim_told(slot), seen_ / kClaimSlots & 1);
    ++seen_;
    cta_.epoch = ptx::load_shared(cta_.claimed(slot) + 4);
    return ptx::load_shared(cta_.claimed(slot));
  }

 private:
  FewRowsCta<C>& cta_;
  uint32_t seen_ = 0;
};

}  // namespace entwine::sm90
