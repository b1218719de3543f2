// 8x8 matrices of 16-bit elements between registers and shared memory, and pairs of such elements.
#pragma once

#include <cstdint>

namespace entwine::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Two elements in one register.
struct Bf16Pair {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  }
  static __device__ __forceinline__ void add(float& low, float& high, uint32_t packed) {
    low += __uint_as_float(packed << 16);
    high += __uint_as_float(packed & 0xffff0000u);
  }
};

struct F16Pair {
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t packed) {
    float2 pair;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
  }
  static __device__ __forceinline__ void add(float& low, float& high, uint32_t packed) {
    float2 pair = unpack(packed);
    low += pair.x;
    high += pair.y;
  }
};

__device__ __forceinline__ void store_shared_f32(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared_u32x2(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_shared_f32x2(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void load_shared_f32x2(uint32_t address, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ float4 load_shared_f32x4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

}  // namespace entwine::ptx
