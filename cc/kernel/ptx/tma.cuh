// TMA: asynchronous bulk copies. Loads complete on an mbarrier; stores belong to the issuing thread's bulk groups.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace entwine::ptx {

__device__ __forceinline__ void prefetch_map(CUtensorMap const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(CUtensorMap const* map, uint32_t to, uint32_t barrier, uint32_t x, uint32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// To the same place in each of `ctas` (a mask).
__device__ __forceinline__ void tma_load_2d(CUtensorMap const* map, uint32_t to, uint32_t barrier, uint32_t x, uint32_t y,
                                            uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
      "[%2], "
      "%5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(CUtensorMap const* map, uint32_t to, uint32_t barrier, uint32_t x, uint32_t y,
                                            uint32_t z, uint32_t u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u)
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(CUtensorMap const* map, uint32_t from, uint32_t x, uint32_t y, uint32_t z,
                                             uint32_t u) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z), "r"(u)
               : "memory");
}

__device__ __forceinline__ void bulk_load(uint32_t to, void const* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// `to` may be a peer's memory.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the last `kPending` groups have *left shared memory*: buffers may be reused, nothing may be signalled.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the last `kPending` groups have *landed*: a signal may follow.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace entwine::ptx
