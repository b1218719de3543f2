// How the tests' own kernels go over an array, and write operands.
#pragma once

#include "expectation.h"

namespace teams {

constexpr uint32_t kThreads = 256;

inline uint32_t blocks_for(uint32_t count) {
  return entwine::schedule::smaller(entwine::schedule::ceil_div(count, kThreads), 4096);
}
__device__ __forceinline__ uint32_t first_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint32_t index_step() { return gridDim.x * blockDim.x; }

// Element `i` of an array of elements of the type that x has: -1, 0 or 1.
__device__ __forceinline__ void put(uint8_t* to, Operands type, uint32_t i, int value) {
  if (is_float8(type)) {
    uint8_t one = type == Operands::kE5m2 ? 0x3c : 0x38;
    to[i] = value == 0 ? 0 : value < 0 ? 0x80 | one : one;
  } else {
    uint16_t one = type == Operands::kF16 ? 0x3c00 : 0x3f80;
    reinterpret_cast<uint16_t*>(to)[i] = value == 0 ? 0 : value < 0 ? 0x8000 | one : one;
  }
}

}  // namespace teams
