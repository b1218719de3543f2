// The kernel for few rows (decode). schedule/few_rows.h says how the work is cut.
//
//   warp 0       loader      claims tiles for the cluster (in its leader CTA); streams its slice of w's columns, and x's rows
//                            beside it where they don't stay
//   warps 4-11   consumers   all-gather: first they send the own chunk of x to every rank. Then wgmma with w as the left
//                            operand, so that 64 of its columns meet any number of rows: y^T = w^T x^T
//
// After the last k block the CTAs of a cluster send float32 sums to each other's shared memory: each finishes one portion of
// the rows for all 128 columns, adding slices in their order. Reduce-scatter and all-reduce then store rounded sums to the
// peers that need them, signal, wait for theirs, and add in rank order. Of very few rows they send packets, and each thread
// waits for those that it adds. Meanwhile w of the next tile streams in.
//
//   full, empty, full_x   of a stage: w (and x) have come; all consumer warps have read them; x has come, where it comes later
//   claim_told            a claim has come from the leader CTA, into one of two slots
//   sums_come, sums_read  of a tile: all slices' sums; in all CTAs the consumers are done with them, and all have got the next
//                         claim, so that the one after it may take the slot of this
//
// Memory order. Within a cluster sums and claims are asynchronous stores that complete a barrier of their destination, which
// costs no fence; that a warp has read sums is told after it has used them. Copies of x and sums travel by generic stores;
// after them a barrier of the consumers, then one thread's st.release.sys for each rank. x is read by TMA, so its writers fence
// the asynchronous proxy, and so does the loader after it acquired the signal. Sums are read past L1. A packet is one store and
// one load of 8 bytes, both relaxed: with the flag the data is there, and nothing else depends on it.
//
// Why it can't deadlock. Copying x waits for nobody, and a CTA copies until there is nothing left to claim before it waits for
// anyone; one resident cluster copies all. Tiles are claimed in order; a cluster stores and signals its sums of a tile before
// it waits for the peers' sums of the same tile. So the lowest tile at which any rank waits has been claimed by every rank that
// is to signal it, or will be, by a cluster that waits at no lower tile (it may have claimed a higher one). Waits inside a
// cluster are for a claim, which waits for nobody; for sums, which each CTA sends before it waits at a tile; and for their
// readers, which wait for peers at a lower tile at most. Nothing is sent to a CTA that may have ended: it ends at a claim past
// the last tile, when it has got all sums of its portion, and nobody tells of reading the last tile's.
#pragma once

#include "kernel/sm90/few_rows_consumer.cuh"
#include "kernel/sm90/few_rows_gather.cuh"
#include "kernel/sm90/few_rows_loader.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

template <class C>
__device__ __forceinline__ void few_rows_matmul(FewRowsParams const& params) {
  extern __shared__ uint8_t memory[];
  FewRowsCta<C> cta{{params, 0}, (ptx::shared_address(memory) + 1023) & ~1023u, ptx::cta_in_cluster()};
  uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), tiles = params.shape.tiles;
  // One thread of the leader CTA claims for the cluster. The first time while the CTAs start.
  bool claims = threadIdx.x == 0 && cta.slice == 0;
  Claim mine{};
  if (claims) mine = claim(params, cta.control());
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&params.x[0]);
    ptx::prefetch_map(&params.w);
    for (uint32_t s = 0; s < params.stages; ++s) {
      ptx::mbarrier_init(cta.full(s), 1);
      ptx::mbarrier_init(cta.empty(s), kConsumers * 4);
      if constexpr (C::kGather) ptx::mbarrier_init(cta.full_x(s), 1);
    }
    for (uint32_t s = 0; s < kClaimSlots; ++s) ptx::mbarrier_init(cta.claim_told(s), 1);
    ptx::mbarrier_init(cta.sums_come(), 1);
    ptx::mbarrier_init(cta.sums_read(), (kConsumers * 4 + 1) * params.shape.slices);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  ptx::cluster_sync_relaxed();  // all CTAs run, with barriers

  ClaimedTiles<C> claimed(cta);
  if (warp < 4) {
    ptx::registers_shrink<kRoleRegisters>();
    if (warp != 0) return;
    FewRowsLoader<C> loader(cta);
    for (uint32_t told = 0;; ++told) {
      uint32_t slot = told % kClaimSlots;
      if (claims) {
        if (told >= kClaimSlots) ptx::mbarrier_wait(cta.sums_read(), (told - kClaimSlots) & 1);
        for (uint32_t i = 0; i < params.shape.slices; ++i)
          ptx::post_words(cta.claimed(slot), cta.claim_told(slot), i, mine.position, mine.epoch);
      }
      uint32_t tile = claimed.next();
      if (tile >= tiles) return;
      if (told != 0 && threadIdx.x < params.shape.slices) ptx::mbarrier_arrive_at_cta(cta.sums_read(), threadIdx.x);
      loader.load(tile);  // while the consumers finish the tile before
      if (claims) mine = claim(params, cta.control());
      __syncwarp();
    }
  }

  ptx::registers_grow<kConsumerRegisters>();
  FewRowsConsumer<C> consumer(cta, threadIdx.x - 128);
  uint32_t tile = claimed.next();
  if constexpr (C::kGather) {
    FewRowsGather<C> gather(cta, threadIdx.x - 128);
    gather.send();
    if (cta.resident() && tile < tiles) gather.collect();
  }
  while (tile < tiles) {
    consumer.multiply();
    consumer.trade();
    consumer.finish(tile);
    tile = claimed.next();
    if (tile < tiles) consumer.tell_read();
  }
}

}  // namespace entwine::sm90
