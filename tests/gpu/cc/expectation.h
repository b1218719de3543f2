// What the kernels must compute, naively and in integers. Operands are functions of a seed, so an expectation reads no memory
// that a kernel under test could have spoilt, and needs no peer.
#pragma once

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

// The scale of 8-bit operands.
constexpr float kScale = 0.25f;

// y has guards of poison on both sides, as has the gathered array.
constexpr uint32_t kGuardBytes = 256;
constexpr uint8_t kPoison = 0xff;  // a byte of a NaN of either type

struct Guarded {
  uint8_t* begin;  // of the first guard
  uint64_t bytes;
  void* y() const { return begin + kGuardBytes; }
};

enum class Result : uint8_t { kBf16, kF16, kFloat32, kE4m3, kE5m2 };
inline uint32_t bytes_of(Result result) {
  return result == Result::kFloat32 ? 4 : result == Result::kE4m3 || result == Result::kE5m2 ? 1 : 2;
}

// All zeros if everything is right; else how many elements are not, and ~position << 32 | bits of the first of them, what it is
// and what it should be. Positions count from the start of the guard.
struct Verdict {
  unsigned long long bad, got, want;
};

// What is to be made of an expected sum: its product with a scale, and with that nothing more, or relu with a bias for each of
// so many columns.
struct Finish {
  float scale = 1;
  uint32_t columns = 0, seed = 0;  // 0 columns: no bias
};

// Small kernels on the rank's stream. Elements of x, w and what is gathered are -1, 0 or 1.
void fill_x(Rank const& rank, uint8_t* x, Operands operands, uint32_t count, uint32_t seed);
// The same x as (batch, k, rows).
void fill_turned_x(Rank const& rank, uint8_t* x, Operands operands, uint32_t rows, uint32_t k, uint32_t batch, uint32_t seed);
// As (k, n), or as (n, k).
void fill_w(Rank const& rank, uint8_t* w, Operands operands, uint32_t n, uint32_t k, bool transposed, uint32_t seed);
void fill_bias(Rank const& rank, float* bias, uint32_t count, uint32_t seed);
// All of y.
void fill_expected(Rank const& rank, float* want, Question const& question);
// All of the gathered array: (batch, rank, row, column).
void fill_gathered(Rank const& rank, float* want, Op op, Chunk const& chunk, uint32_t ranks, uint32_t seed);
// Bit for bit, but for the sign of a zero.
void compare(Rank const& rank, Guarded const& y, float const* want, Finish finish, uint32_t count, Result result,
             Verdict* verdict);
void delay(Rank const& rank, uint64_t nanoseconds);

}  // namespace teams
