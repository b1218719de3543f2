// mbarrier: transaction barriers in shared memory. Addresses are 32-bit shared-window addresses.
#pragma once

#include <cstdint>

namespace entwine::ptx {

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The address of the same shared-memory location in CTA `cta` of the cluster.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, uint32_t cta) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
  return mapped;
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the cluster and to the asynchronous proxy.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Default semantics on purpose: .release.cluster would cost a MEMBAR.GPU on every k block.
__device__ __forceinline__ void mbarrier_arrive_at_cta(uint32_t barrier, uint32_t cta) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_to_cta(barrier, cta)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same, acquiring what threads of the whole cluster released.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Writes one word into CTA `cta`'s shared memory and completes its barrier with the word's four bytes.
__device__ __forceinline__ void post_word(uint32_t slot, uint32_t barrier, uint32_t cta, uint32_t value) {
  uint32_t remote_slot = map_to_cta(slot, cta), remote_barrier = map_to_cta(barrier, cta);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], 4;" ::"r"(remote_barrier) : "memory");
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote_slot), "r"(value),
               "r"(remote_barrier)
               : "memory");
}

// The same for two words, eight bytes.
__device__ __forceinline__ void post_words(uint32_t slot, uint32_t barrier, uint32_t cta, uint32_t first, uint32_t second) {
  uint32_t remote_slot = map_to_cta(slot, cta), remote_barrier = map_to_cta(barrier, cta);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], 8;" ::"r"(remote_barrier) : "memory");
  asm volatile(
      "{\n"
      ".reg .b64 both;\n"
      "mov.b64 both, {%1, %2};\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], both, [%3];\n"
      "}" ::"r"(remote_slot),
      "r"(first), "r"(second), "r"(remote_barrier)
      : "memory");
}

// Four numbers, whose 16 bytes CTA `cta`'s barrier expects.
__device__ __forceinline__ void send_to_cta(uint32_t address, uint32_t barrier, uint32_t cta, float const* values) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   map_to_cta(address, cta)),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(map_to_cta(barrier, cta))
               : "memory");
}

}  // namespace entwine::ptx
