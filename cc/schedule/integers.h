// Integer helpers shared by host and device code. Everything under schedule/ is pure integer mathematics: no memory, no
// threads.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ENTWINE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ENTWINE_HOST_DEVICE inline
#endif

namespace entwine::schedule {

ENTWINE_HOST_DEVICE constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
ENTWINE_HOST_DEVICE constexpr uint64_t ceil_div64(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
ENTWINE_HOST_DEVICE constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
ENTWINE_HOST_DEVICE constexpr uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
ENTWINE_HOST_DEVICE constexpr uint64_t round_up(uint64_t a, uint64_t to) { return ceil_div64(a, to) * to; }

}  // namespace entwine::schedule
