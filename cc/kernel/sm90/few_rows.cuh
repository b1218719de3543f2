// The kernel for few rows (decode). schedule/few_rows.h says how the work is cut.
//
//   warp 0       loader      streams its slice of w's columns, and x's rows beside it; of both CTAs nobody else's
//   warps 1-3                wait for the end
//   warps 4-11   consumers   all-gather: first they copy the own chunk of x to every rank's staging. Then wgmma with w as the
//                            left operand, so that 64 of its columns meet any number of rows: y^T = w^T x^T
//
// After the last k block the CTAs of a cluster trade float32 sums through each other's shared memory, where the stages were:
// each finishes one portion of the rows for all 128 columns, adding slices in their order. Reduce-scatter and all-reduce then
// store rounded sums to the peers that need them, signal, wait for theirs, and add in rank order. Of very few rows they send
// packets, and each thread waits for those that it adds.
//
// Memory order. Copies of x and sums travel by generic stores; after them a barrier of the consumers, then one thread's
// st.release.sys (all-gather: system fences, and an arrival counter, acq_rel). x is read by TMA, so its writers fence the
// asynchronous proxy, and so does the loader after it acquired the signal. Sums are read past L1. A packet is one store and one
// load of 8 bytes, both relaxed: with the flag the data is there, and nothing else depends on it.
//
// Why it can't deadlock. Copying x waits for nobody, and a CTA copies until there is nothing left to claim before it waits for
// anyone; one resident cluster copies all. Tiles are claimed in order; a cluster stores and signals its sums of a tile before
// it waits for the peers' sums of the same tile. So the lowest tile at which any rank waits has been claimed by every rank that
// is to signal it, or will be, by a cluster that waits at no lower tile. Waits inside a cluster are barriers that all its
// threads reach.
#pragma once

#include "kernel/sm90/few_rows_consumer.cuh"
#include "kernel/sm90/few_rows_loader.cuh"
#include "kernel/sm90/scheduler.cuh"

namespace entwine::sm90 {

template <class C>
__device__ __forceinline__ void few_rows_matmul(FewRowsParams const& params) {
  extern __shared__ uint8_t memory[];
  FewRowsCta<C> cta{{params, 0}, (ptx::shared_address(memory) + 1023) & ~1023u, ptx::cta_in_cluster()};
  uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), tiles = params.shape.tiles;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&params.x[0]);
    ptx::prefetch_map(&params.w);
    for (uint32_t s = 0; s < C::kStages; ++s) {
      ptx::mbarrier_init(cta.full(s), 1);
      ptx::mbarrier_init(cta.empty(s), kConsumers * 4);
    }
    ptx::mbarrier_init_fence();
  }
  // One thread of the leader CTA claims for the cluster.
  auto claim_tile = [&] {
    if (threadIdx.x != 0 || cta.slice != 0) return;
    Claim mine = claim(params, cta.control());
    for (uint32_t i = 0; i < params.shape.slices; ++i) {
      ptx::store_shared_at_cta(cta.claimed_tile(), i, mine.position);
      ptx::store_shared_at_cta(cta.claimed_tile() + 4, i, mine.epoch);
    }
  };
  __syncwarp();
  ptx::cluster_sync();  // all CTAs run
  claim_tile();
  __syncwarp();
  ptx::cluster_sync();
  cta.epoch = ptx::load_shared(cta.claimed_tile() + 4);
  uint32_t tile = ptx::load_shared(cta.claimed_tile());

  if (warp < 4) {
    ptx::registers_shrink<kRoleRegisters>();
    FewRowsLoader<C> loader(cta);
    while (tile < tiles) {
      if (threadIdx.x == 0) loader.load(tile);
      __syncwarp();
      ptx::cluster_sync();  // all products are done: sums may take the stages' place
      ptx::cluster_sync();  // all sums have been handed over
      claim_tile();
      __syncwarp();
      ptx::cluster_sync();  // this tile is finished, the next one known
      tile = ptx::load_shared(cta.claimed_tile());
    }
  } else {
    ptx::registers_grow<kConsumerRegisters>();
    FewRowsConsumer<C> consumer(cta, threadIdx.x - 128);
    if constexpr (C::kGather) consumer.gather();
    while (tile < tiles) {
      consumer.multiply();
      __syncwarp();
      ptx::cluster_sync();
      consumer.trade();
      __syncwarp();
      ptx::cluster_sync();
      consumer.finish(tile);
      ptx::fence_proxy_async_shared();  // the loader's next stages go where the sums were
      __syncwarp();
      ptx::cluster_sync();
      tile = ptx::load_shared(cta.claimed_tile());
    }
  }
}

}  // namespace entwine::sm90
