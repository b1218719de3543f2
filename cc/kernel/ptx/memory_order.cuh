// Loads, stores and fences that order memory between threads, GPUs and proxies.
#pragma once

#include <cstdint>

namespace entwine::ptx {

__device__ __forceinline__ uint32_t load_acquire_system(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Many stores after one release: fence, then relaxed stores.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void store_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// Many loads before one acquire.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_acquire_release(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ uint64_t add_acquire_release_64(uint64_t* word, uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}

__device__ __forceinline__ void store_relaxed_64(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ uint32_t add_relaxed(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}

__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void count_relaxed(uint32_t* word) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}

// Counts for whoever waits on another stream, with what this thread has done before.
__device__ __forceinline__ void count_release_system(uint32_t* word) {
  asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}

// Passes on to the cluster what this thread has acquired, with whatever it writes next.
__device__ __forceinline__ void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

// What this thread acquired through generic loads becomes visible to its later TMA reads of global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What this thread wrote to shared memory becomes visible to TMA stores that another thread issues after a barrier.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Two words of 8 bytes at once, each of which is whole for whoever reads it: four bytes of data, and a flag.
struct Packets {
  uint32_t first, first_flag, second, second_flag;
  __device__ __forceinline__ bool are(uint32_t flag) const { return first_flag == flag && second_flag == flag; }
};
__device__ __forceinline__ void store_packets(uint64_t* to, uint32_t first, uint32_t second, uint32_t flag) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%1, %3};\nmov.b64 b, {%2, %3};\nst.relaxed.sys.global.v2.b64 [%0], {a, b};\n}" ::"l"(to),
      "r"(first), "r"(second), "r"(flag)
      : "memory");
}
__device__ __forceinline__ Packets load_packets(uint64_t const* from) {
  Packets p;
  asm volatile("{\n.reg .b64 a, b;\nld.relaxed.sys.global.v2.b64 {a, b}, [%4];\nmov.b64 {%0, %1}, a;\nmov.b64 {%2, %3}, b;\n}"
               : "=r"(p.first), "=r"(p.first_flag), "=r"(p.second), "=r"(p.second_flag)
               : "l"(from)
               : "memory");
  return p;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Shared memory by 32-bit address.
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_shared_64(uint32_t address) {
  uint64_t value;
  asm volatile("ld.volatile.shared.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_64(uint32_t address, uint64_t value) {
  asm volatile("st.volatile.shared.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

}  // namespace entwine::ptx
