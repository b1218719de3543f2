// Thread block clusters and register budgets.
#pragma once

#include <cstdint>

#include "kernel/ptx/mbarrier.cuh"

namespace entwine::ptx {

__device__ __forceinline__ uint32_t cta_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of the cluster must come, its warp converged.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same for threads that have written nothing but barriers, and fenced these: without a wait for memory.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A plain store into CTA `cta`'s shared memory; a cluster_sync() makes it visible.
__device__ __forceinline__ void store_shared_at_cta(uint32_t address, uint32_t cta, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(map_to_cta(address, cta)), "r"(value) : "memory");
}

// Among `threads` threads of the CTA.
__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A warpgroup gives registers up or takes them; ignored without __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace entwine::ptx
