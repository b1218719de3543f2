// What the kernels must compute, naively and in integers. Operands are functions of a seed, so an expectation reads no memory
// that a kernel under test could have spoilt, and needs no peer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "emulated_team.h"
#include "schedule/geometry.h"

namespace teams {

using entwine::Operands;
using entwine::schedule::Geometry;
using entwine::schedule::Op;

// -1, 0 or 1.
ENTWINE_HOST_DEVICE int element(uint32_t seed, uint32_t index) {
  uint32_t h = index * 0x9e3779b9u + seed * 0x85ebca6bu;
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x846ca68bu;
  h ^= h >> 16;
  return static_cast<int>(uint64_t{h} * 3 >> 32) - 1;
}

// Seeds of one rank's operands in one call.
ENTWINE_HOST_DEVICE uint32_t x_seed(uint32_t seed, uint32_t rank) { return seed * 16 + rank; }
ENTWINE_HOST_DEVICE uint32_t w_seed(uint32_t seed, uint32_t rank) { return seed * 16 + 8 + rank; }

// Of what reduce-scatter gathers beside; all-gather gathers its x.
ENTWINE_HOST_DEVICE uint32_t gathered_seed(Op op, uint32_t seed, uint32_t rank) {
  return op == Op::kAllGatherMatmul ? x_seed(seed, rank) : x_seed(seed + (1u << 20), rank);
}

// A bias is the same on all ranks but for an all-gather, whose ranks have columns of their own.
ENTWINE_HOST_DEVICE uint32_t bias_seed(Op op, uint32_t seed, uint32_t rank) {
  return x_seed(seed + (1u << 21), op == Op::kAllGatherMatmul ? rank : 0);
}
// -13 to 13.
ENTWINE_HOST_DEVICE int bias_element(uint32_t seed, uint32_t column) {
  return element(seed, 3 * column) + 3 * element(seed, 3 * column + 1) + 9 * element(seed, 3 * column + 2);
}

struct Question {
  Op op;
  Geometry geometry;
  uint32_t seed, rank;
};

ENTWINE_HOST_DEVICE uint32_t y_elements(Op op, Geometry const& g) {
  if (op == Op::kMatmulAllReduce) return g.all_rows() * g.n;
  return g.batch * g.m_shard * g.n * (op == Op::kAllGatherMatmul ? g.ranks : 1);
}
ENTWINE_HOST_DEVICE uint32_t x_elements(Op op, Geometry const& g) {
  if (op == Op::kMatmulAllReduce) return g.all_rows() * g.k;
  return g.batch * g.m_shard * g.k * (op == Op::kAllGatherMatmul ? 1 : g.ranks);
}

// Row `row` of x_rank's x times column `col` of w_rank's w.
ENTWINE_HOST_DEVICE int product(Question const& q, uint32_t x_rank, uint32_t row, uint32_t w_rank, uint32_t col) {
  Geometry const& g = q.geometry;
  uint32_t x = x_seed(q.seed, x_rank), w = w_seed(q.seed, w_rank);
  int sum = 0;
  for (uint32_t p = 0; p < g.k; ++p) sum += element(x, row * g.k + p) * element(w, p * g.n + col);
  return sum;
}

// Partial sums travel in the result's type. Sums of some hundred such terms are far below 256, up to which any holds integers;
// one that isn't would make the expectation wrong, so it gives what no kernel can.
constexpr int kExact = 256;
constexpr float kNoExpectation = 1e30f;

// Element `index` of y, before it is rounded to y's type.
ENTWINE_HOST_DEVICE float expected(Question const& q, uint32_t index) {
  Geometry const& g = q.geometry;
  uint32_t row = index / g.n, col = index - row * g.n, chunk = row / g.m_shard, in_chunk = row - chunk * g.m_shard;
  int sum = 0;
  if (q.op == Op::kAllGatherMatmul) {  // y's chunks: (batch, owner)
    uint32_t batch = chunk / g.ranks, owner = chunk - batch * g.ranks;
    sum = product(q, owner, batch * g.m_shard + in_chunk, q.rank, col);
  } else {  // y has one chunk a batch, x has (batch, owner); of an all-reduce both have all rows
    bool scatter = q.op == Op::kMatmulReduceScatter;
    for (uint32_t r = 0; r < g.ranks; ++r) {
      int partial = product(q, r, scatter ? (chunk * g.ranks + q.rank) * g.m_shard + in_chunk : row, r, col);
      if (partial > kExact || partial < -kExact) return kNoExpectation;
      sum += partial;
    }
  }
  return static_cast<float>(sum);
}

__device__ __forceinline__ uint32_t first_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ uint32_t index_step() { return gridDim.x * blockDim.x; }

// The scale of 8-bit operands.
constexpr float kScale = 0.25f;

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

static __global__ void fill_x(uint8_t* x, Operands operands, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) put(x, operands, i, element(seed, i));
}

// w as (k, n), or as (n, k).
static __global__ void fill_w(uint8_t* w, Operands operands, uint32_t n, uint32_t k, bool transposed, uint32_t seed) {
  for (uint32_t i = first_index(); i < n * k; i += index_step()) {
    uint32_t row = i / n, col = i - row * n;
    put(w, operands == Operands::kE5m2 ? Operands::kE4m3 : operands, transposed ? col * k + row : i, element(seed, i));
  }
}

static __global__ void fill_expected(float* want, Question q) {
  uint32_t count = y_elements(q.op, q.geometry);
  for (uint32_t i = first_index(); i < count; i += index_step()) want[i] = expected(q, i);
}

static __global__ void fill_bias(float* bias, uint32_t count, uint32_t seed) {
  for (uint32_t i = first_index(); i < count; i += index_step()) bias[i] = static_cast<float>(bias_element(seed, i));
}

// All of the gathered array: (batch, rank, row, column).
static __global__ void fill_gathered(float* want, Op op, Chunk chunk, uint32_t ranks, uint32_t seed) {
  uint32_t part = chunk.rows * chunk.cols;
  for (uint32_t i = first_index(); i < chunk.elements() * ranks; i += index_step()) {
    uint32_t batch = i / part / ranks, source = i / part - batch * ranks;
    want[i] = static_cast<float>(element(gathered_seed(op, seed, source), batch * part + i % part));
  }
}

// y has guards of poison on both sides, as has the gathered array.
constexpr uint32_t kGuardBytes = 256;
constexpr uint8_t kPoison = 0xff;  // a byte of a NaN of either type

// All zeros if everything is right; else how many elements are not, and ~position << 32 | bits of the first of them, what it is
// and what it should be. Positions count from the start of the guard.
struct Verdict {
  unsigned long long bad, got, want;
};

enum class Result : uint8_t { kBf16, kF16, kFloat32, kE4m3, kE5m2 };

__device__ __forceinline__ uint32_t bits_of(float value, Result result) {
  if (result == Result::kFloat32) return __float_as_uint(value);
  if (result == Result::kE4m3 || result == Result::kE5m2) {  // -1, 0 and 1
    uint32_t one = result == Result::kE5m2 ? 0x3c : 0x38;
    return value == 0 ? 0 : value < 0 ? 0x80 | one : one;
  }
  return result == Result::kF16 ? __half_as_ushort(__float2half_rn(value)) : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// What is to be made of an expected sum: its product with a scale, and with that nothing more, or relu with a bias for each of
// so many columns.
struct Finish {
  float scale = 1;
  uint32_t columns = 0, seed = 0;  // 0 columns: no bias
  __device__ __forceinline__ float operator()(float sum, uint32_t index) const {
    sum *= scale;
    return columns == 0 ? sum : fmaxf(sum + static_cast<float>(bias_element(seed, index % columns)), 0);
  }
};

// Bit for bit, but for the sign of a zero. Bits is uint32_t for float32, uint16_t for 16-bit types, uint8_t for those of 8.
template <typename Bits>
static __global__ void compare(Bits const* guarded, float const* want, Finish finish, uint32_t count, Result result,
                               Verdict* verdict) {
  constexpr uint32_t kGuard = kGuardBytes / sizeof(Bits);
  for (uint32_t i = first_index(); i < count + 2 * kGuard; i += index_step()) {
    bool inside = i >= kGuard && i < kGuard + count;
    uint32_t got = guarded[i],
             right = inside ? bits_of(finish(want[i - kGuard], i - kGuard), result) : uint32_t{static_cast<Bits>(~Bits())};
    if (inside && got == 1u << (8 * sizeof(Bits) - 1)) got = 0;
    if (got == right) continue;
    unsigned long long position = static_cast<unsigned long long>(~i) << 32;
    atomicAdd(&verdict->bad, 1ull);
    atomicMax(&verdict->got, position | got);
    atomicMax(&verdict->want, position | right);
  }
}

static __global__ void delay(uint64_t nanoseconds) {
  auto now = [] {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  };
  for (uint64_t start = now(); now() - start < nanoseconds;) __nanosleep(500);
}

}  // namespace teams
