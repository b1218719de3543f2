// The tile queue: one claim counter a rank, one scheduler thread a cluster, one slot in each CTA's shared memory.
#pragma once

#include "kernel/ptx/cluster.cuh"
#include "kernel/ptx/memory_order.cuh"
#include "kernel/sm90/config.cuh"
#include "kernel/sm90/tracer.cuh"
#include "kernel/sm90/wait.cuh"

namespace entwine::sm90 {

constexpr uint32_t kNoTile = 0xffffffffu;

__device__ __forceinline__ uint32_t pack_tile(schedule::Tile tile) {
  return tile.owner << (kRowBits + kColBits) | tile.row << kColBits | tile.col;
}
static_assert(kRowBits == 15 && kColBits == 14, "traced_tile() in schedule/trace_event.h packs alike");
__device__ __forceinline__ schedule::Tile unpack_tile(uint32_t packed) {
  return {packed >> (kRowBits + kColBits), packed >> kColBits & ((1u << kRowBits) - 1), packed & ((1u << kColBits) - 1)};
}

// Roles that take each tile, and so arrive on tile_taken: in each CTA the loader, the storers and the consumers' eight warps.
constexpr uint32_t kTakers = kCtas * (1 + kConsumers + 8);

// One role's view of the tiles that the cluster works on.
template <class C>
class TileStream {
 public:
  __device__ __forceinline__ explicit TileStream(Shared<C> const& shared) : shared_(shared), phase_(0) {}

  // Waits for the next tile. One thread or warp calls taken() for it later, once: at that point this role needs the slot no
  // more.
  __device__ __forceinline__ uint32_t next() {
    ptx::mbarrier_wait_cluster(shared_.tile_ready(), phase_);
    phase_ ^= 1;
    return ptx::load_shared(shared_.tile_slot());
  }
  __device__ __forceinline__ void taken() const { ptx::mbarrier_arrive_at_cta(shared_.tile_taken(), 0); }

 private:
  Shared<C> const& shared_;
  uint32_t phase_;
};

struct Claim {
  uint32_t position, epoch;
};

// Claims the next queue position for a cluster. Each cluster claims until it gets one past the end; the launch's last claim
// leaves the queue ready for the next call on this arena.
template <class AnyParams>
__device__ __forceinline__ Claim claim(AnyParams const& params, Control* control) {
  uint64_t before = ptx::add_acquire_release_64(&control->queue, 1);
  Claim mine{static_cast<uint32_t>(before), static_cast<uint32_t>(before >> 32)};
  if (mine.position == params.last_claim()) {
    ptx::store_relaxed(&control->push[~mine.epoch & 1], 0);
    ptx::store_relaxed_64(reinterpret_cast<uint64_t*>(&control->counts[~mine.epoch & 1]), 0);
    ptx::store_relaxed_64(&control->queue, uint64_t(mine.epoch + 1) << 32);
  }
  return mine;
}

template <class C>
__device__ __forceinline__ schedule::Tile tile_at(Params const& params, uint32_t position) {
  if constexpr (C::kGather) {
    return schedule::AllGatherOrder{params.raster, params.ranks, params.rank}.at(position);
  } else {
    return schedule::ReduceScatterOrder{params.raster, params.ranks, params.rank, params.lead}.at(position);
  }
}

// All-gather: a tile of another chunk is posted once its row block has landed. The tile was claimed some k blocks ahead of its
// first load, which hides the look at the signal. (Always the block's own signal: blocks may land out of order.)
template <class C>
__device__ __forceinline__ void await_rows(Cta<C> const& cta, schedule::Tile tile) {
  uint32_t rank = cta.params.rank;
  if (tile.owner == rank) return;
  wait_for_peer(cta, cta.signal(rank, tile.owner, schedule::gathered_signal(0, tile.row)), tile.owner, tile.row, tile.col);
  ptx::fence_cluster();
}

// One thread of the leader CTA: posts a tile to both CTAs, waits until all roles have taken it, claims the next.
template <class C>
__device__ __forceinline__ void schedule_tiles(Cta<C> const& cta, Tracer<C>& trace) {
  schedule::Movers movers = cta.params.movers;
  uint32_t tiles = cta.params.ranks * cta.params.raster.size(), position = cta.first_claim, phase = 0;
  bool tell = movers.count != 0 && position == 0;
  for (;;) {
    if (!movers.reserved(position)) {
      uint32_t number = movers.tile(position), packed = kNoTile;
      bool more = number < tiles;
      if (more) {
        schedule::Tile tile = tile_at<C>(cta.params, number);
        packed = pack_tile(tile);
        trace.mark(schedule::Mark::kClaimed, packed);
        if constexpr (C::kGather) await_rows(cta, tile);
        trace.mark(schedule::Mark::kPosted, packed);
      }
      for (uint32_t i = 0; i < kCtas; ++i) ptx::post_word(cta.shared.tile_slot(), cta.shared.tile_ready(), i, packed);
      if (!more) return;
      ptx::mbarrier_wait(cta.shared.tile_taken(), phase);
      phase ^= 1;
    }
    position = claim(cta.params, cta.control()).position;
    if (tell) ptx::post_word(cta.shared.mover_word(), cta.shared.mover_told(), 1, position == 1);  // mover.cuh
    tell = false;
  }
}

}  // namespace entwine::sm90
