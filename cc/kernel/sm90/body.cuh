// The kernel body that all ops share: roles, barriers, memory order.
//
//   warp 0      loader      TMA loads of x and w into the pipeline
//   warps 1, 2  storers     own the C buffers of consumers 0 and 1: partials in, images out, signals
//   warp 3      scheduler   (CTA 0) claims tiles and posts them to both CTAs; all-gather: once their rows have landed
//               pusher      (CTA 1, if anything is gathered) copies the own chunk to the peers, then theirs to the result
//               collector   (CTA 1, all-reduce) copies the peers' finished tiles to y
//               mover       (strategy "resident", both CTAs of some clusters) takes what tiles have finished to the peers
//   warps 4-11  consumers   two warpgroups: wgmma, reduction, rounding
//
// Single-thread roles run in lane 0 of their warp.
//
// Memory order. A producer's bulk stores have landed (wait_group 0) before it raises a signal with st.release.sys; whoever
// waits reads it with ld.acquire.sys and then fences the asynchronous proxy before its first TMA read; the all-gather scheduler
// waits for both CTAs' loaders, passes on what it acquired by a cluster fence and its post, and they fence the proxy.
// Shared-memory buffers change hands through mbarriers, with a proxy fence where a consumer's stores are read by TMA.
//
// Why it can't deadlock. Tiles are claimed in queue order from one counter; schedule/tile_order.h shows that a tile waits only
// for tiles at earlier positions of their producers' queues, and tiles of other owners, like pushers, wait for no peer. A
// cluster works its tiles in the order of its claims, and a storer signals what it has finished before it waits. So take the
// lowest queue position at which any rank waits: what it waits for has been claimed by a resident cluster which is not itself
// waiting at an earlier position, hence will be signalled. This holds with any number >= 1 of resident clusters a rank: no role
// depends on a CTA that might not be resident, except a cluster's two CTAs on each other, and they are scheduled together. The
// pusher of the rank's first ticket always runs, and alone it pushes everything, before it waits for any row block to copy; for
// its copies nobody waits. With movers, schedule/movers.h has the argument. Waits inside a CTA are for roles of the same
// cluster only.
#pragma once

#include "kernel/sm90/collector.cuh"
#include "kernel/sm90/consumer.cuh"
#include "kernel/sm90/loader.cuh"
#include "kernel/sm90/mover.cuh"
#include "kernel/sm90/pusher.cuh"
#include "kernel/sm90/scheduler.cuh"
#include "kernel/sm90/storer.cuh"

namespace entwine::sm90 {

template <class C>
__device__ __forceinline__ void init_barriers(Shared<C> const& shared) {
  for (int s = 0; s < C::kStages; ++s) {
    ptx::mbarrier_init(shared.full(s), 1);
    ptx::mbarrier_init(shared.empty(s), kCtas * kConsumers * 4);  // consumer warps of both CTAs
  }
  for (int c = 0; c < kConsumers; ++c)
    for (int b = 0; b < C::kBuffers; ++b) {
      ptx::mbarrier_init(shared.buffer_ready(c, b), 1);
      ptx::mbarrier_init(shared.buffer_done(c, b), 128);
    }
  ptx::mbarrier_init(shared.tile_ready(), 1);
  ptx::mbarrier_init(shared.tile_taken(), kTakers);
  for (int i = 0; i < C::kPieces; ++i) ptx::mbarrier_init(shared.piece_loaded(i), 1);
  for (int i = 0; i < Shared<C>::kMoverSlots; ++i) ptx::mbarrier_init(shared.mover_loaded(i), 1);
  ptx::mbarrier_init(shared.mover_told(), 1);
  ptx::mbarrier_init_fence();
}

template <class C>
__device__ __forceinline__ void collective_matmul(Params const& params) {
  extern __shared__ uint8_t memory[];
  Shared<C> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, in_cluster = ptx::cta_in_cluster();
  auto* control = reinterpret_cast<Control*>(params.arena[params.rank]);

  if (threadIdx.x == 0) {
    ptx::prefetch_map(&params.x[0]);
    ptx::prefetch_map(&params.w[0]);
    ptx::prefetch_map(&params.y[0]);
    init_barriers(shared);
  }
  Claim first{};
  bool leader = threadIdx.x == 32 && in_cluster == 0;
  if (leader) first = claim(params, control);
  __syncwarp();
  ptx::cluster_sync();  // barriers are initialised; the other CTA runs
  if (leader)
    for (uint32_t i = 0; i < kCtas; ++i) {
      ptx::store_shared_at_cta(shared.first_claim(), i, first.position);
      ptx::store_shared_at_cta(shared.epoch(), i, first.epoch);
    }
  __syncwarp();
  ptx::cluster_sync();
  uint32_t first_claim = ptx::load_shared(shared.first_claim());
  Cta<C> cta{{params, ptx::load_shared(shared.epoch())}, shared, in_cluster, first_claim};

  if (warp < 4) {
    ptx::registers_shrink<kRoleRegisters>();
    if (lane == 0) {
      if (warp == 0) {
        load_operands(cta);
      } else if (warp < 3) {
        store_tiles(cta, warp - 1);
      } else {
        Tracer<C> trace(params, 3);
        move_first(cta, trace);
        if (in_cluster == 0) {
          schedule_tiles(cta, trace);
        } else if constexpr (C::kReplicate) {
          Collector<C>(cta, trace).run();
        } else if (params.gather.own != nullptr) {
          Pusher<C>(cta, trace).run();
        }
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
