// The matmul of strategy "signal": roles, pipeline and shared memory of body.cuh, but no peer: no signals are waited for and
// nothing is raised elsewhere. Sums: a storer counts what it has stored, in one counter a group, for the stream beside.
//
// Memory order. A storer's bulk stores have landed (wait_group 0) before it counts them, by a release at system scope. Whoever
// sees the group's full count sees all of it: the additions form one release sequence. That is the stream beside, whose wait
// for the count comes before NCCL's kernel, and a kernel begins by acquiring.
//
// Progress: a tile waits for nothing but its own cluster.
#pragma once

#include "kernel/sm90/body.cuh"
#include "kernel/sm90/signal_params.h"

namespace entwine::sm90 {

// Nothing is pushed or collected, so there is no ring.
template <uint32_t kTileN_, Operands kOperands_, bool kTransposedW_, bool kTraced_>
struct SignalConfig
    : Config<schedule::Op::kAllGatherMatmul, 256, kTileN_, kOperands_, kTransposedW_, /*kFloatOut=*/false, kTraced_> {
  static constexpr int kBuffers = 4;
  static constexpr int kPieces = 0;
  static constexpr bool kGates = false;
  static constexpr bool kTurnsX = true;
};

__device__ __forceinline__ schedule::Tile signal_tile(SignalParams const& s, uint32_t position) {
  if (s.scratch != nullptr) return schedule::CellOrder{s.tiles.raster, s.owners}.at(position);
  return schedule::RowsOrder{s.tiles.raster, s.first_row, s.tiles.ranks, s.first_owner, s.owners}.at(position);
}

// Scheduler: one thread of the leader CTA.
template <class C>
__device__ __forceinline__ void schedule_signal_tiles(Cta<C> const& cta, SignalParams const& s, uint32_t position) {
  uint32_t phase = 0;
  Tracer<C> trace(s.tiles, 3);
  for (;;) {
    bool more = position < s.count;
    uint32_t packed = more ? pack_tile(signal_tile(s, position)) : kNoTile;
    if (more) trace.mark(schedule::Mark::kClaimed, packed);
    for (uint32_t i = 0; i < kCtas; ++i) ptx::post_word(cta.shared.tile_slot(), cta.shared.tile_ready(), i, packed);
    if (!more) return;
    ptx::mbarrier_wait(cta.shared.tile_taken(), phase);
    phase ^= 1;
    position = ptx::add_relaxed(s.claims, 1);
  }
}

// Storer: one thread a consumer. Images of y by TMA, which clips them; images of sums as they are, to the tile's slot.
template <class C>
__device__ __forceinline__ void store_signal_tiles(Cta<C> const& cta, SignalParams const& s, uint32_t consumer) {
  Params const& p = s.tiles;
  Shared<C> const& shared = cta.shared;
  TileStream<C> tiles(shared);
  Tracer<C> trace(p, 1 + consumer);
  uint32_t part = cta.rank_in_cluster * kConsumers + consumer;
  uint32_t used = 0;   // C buffers used by finished tiles
  uint32_t armed = 0;  // of the tile at hand: buffers handed to the consumer
  auto arm = [&](uint32_t up_to) {
    for (; armed < C::kImages && armed < up_to; ++armed)
      ptx::mbarrier_arrive(shared.buffer_ready(consumer, (used + armed) % C::kBuffers));
  };
  for (uint32_t packed = tiles.next(); packed != kNoTile;) {
    tiles.taken();
    schedule::Tile tile = unpack_tile(packed);
    uint32_t batch = tile.row / p.row_blocks, col = tile.col * C::kTileN;
    uint32_t row = (tile.row - batch * p.row_blocks) * C::kTileM + cta.rank_in_cluster * C::kCtaM + consumer * 64;
    uint8_t* to = nullptr;
    uint32_t* finished = nullptr;
    if (s.scratch != nullptr) {
      uint32_t cell = p.raster.index(tile.row, tile.col);
      finished = s.finished + s.groups.of(cell);
      uint64_t slot = s.groups.slot(s.owners, tile.owner, cell);
      to = s.scratch + (slot * schedule::kSm90Parts + part) * C::kPartBytes;
    }
    for (uint32_t image = 0; image < C::kImages; ++image) {
      if (armed < C::kImages && armed < image + C::kBuffers) {
        ptx::bulk_wait_read<0>();  // what was stored from these buffers has left them
        arm(image + C::kBuffers);
      }
      uint32_t use = used + image, from = shared.image(consumer, use % C::kBuffers);
      ptx::mbarrier_wait(shared.buffer_done(consumer, use % C::kBuffers), (use / C::kBuffers) & 1);
      if (image == 0) trace.mark(schedule::Mark::kMultiplied, packed);
      if (image == C::kImages - 1) trace.mark(schedule::Mark::kRounded, packed);
      if (to != nullptr)
        ptx::bulk_store(to + image * kImageBytes, from, kImageBytes);
      else
        ptx::tma_store_4d(&p.y[0], from, col + image * C::kImageCols, row, tile.owner, batch);
      ptx::bulk_commit();
    }
    used += C::kImages;
    armed = 0;
    uint32_t stored = packed;
    packed = tiles.next();
    if (finished != nullptr) {
      // Buffers are free before their writes have landed: let the consumer go on.
      ptx::bulk_wait_read<0>();
      if (packed != kNoTile) arm(C::kBuffers);
      ptx::bulk_wait<0>();
      ptx::count_release_system(finished);
      trace.mark(schedule::Mark::kLanded, stored);
    }
  }
  ptx::bulk_wait<0>();
}

template <class C>
__device__ __forceinline__ void signal_matmul(SignalParams const& params) {
  extern __shared__ uint8_t memory[];
  Shared<C> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, in_cluster = ptx::cta_in_cluster();
  Params const& tiles = params.tiles;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(tiles.rank == kNoRank ? &tiles.gathered[0] : &tiles.x[0]);
    ptx::prefetch_map(&tiles.w[0]);
    if (params.scratch == nullptr) ptx::prefetch_map(&tiles.y[0]);
    init_barriers(shared);
  }
  bool scheduler = threadIdx.x == 96 && in_cluster == 0;
  uint32_t first = 0;
  if (scheduler) first = ptx::add_relaxed(params.claims, 1);
  __syncwarp();
  ptx::cluster_sync();  // barriers are initialised; the other CTA runs
  Cta<C> cta{{tiles, 0}, shared, in_cluster, 0};

  if (warp < 4) {
    ptx::registers_shrink<kRoleRegisters>();
    if (lane == 0) {
      if (warp == 0) {
        load_operands(cta);
      } else if (warp < 3) {
        store_signal_tiles(cta, params, warp - 1);
      } else if (in_cluster == 0) {
        schedule_signal_tiles(cta, params, first);
      }
    }
    __syncwarp();
  } else {
    ptx::registers_grow<kConsumerRegisters>();
    Consumer<C>(cta, warp / 4 - 1, warp % 4, lane).run();
  }
  ptx::cluster_sync();  // the other CTA may still post to this one's shared memory
}

}  // namespace entwine::sm90
