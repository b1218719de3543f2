// What the tests' calls have in common: shapes, buffers, results, and words for what is wrong with them.
#pragma once

#include <cstdint>
#include <string>

#include "expectation.h"

namespace teams {

constexpr Op kOps[] = {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce};
constexpr uint32_t kLeads[] = {0, 3, 58, 1u << 20};  // 0: the schedule raises it; 1 << 20: all remote tiles first
constexpr uint32_t kPushers[] = {1, 24};

inline Geometry geometry_of(uint32_t ranks, uint32_t batch, uint32_t m_shard, uint32_t n, uint32_t k) {
  return {ranks, batch, m_shard, n, k, entwine::schedule::kSm90Tiles[0].m, entwine::schedule::kSm90Tiles[0].n};
}

// A shape as an op has it. An all-reduce has about as many rows as the other ops' larger side, which no team can share evenly.
Geometry geometry_for(Op op, Geometry const& g);

// The same for an x that is stored transposed: all of its rows are a multiple of eight.
Geometry turned_geometry(Op op, Geometry const& g);

Guarded take_y(Pool& pool, Op op, Geometry const& g, bool float_out);

// What a call gathers, and what must come of it.
struct Gathered {
  uint8_t* z;
  Guarded whole;
};

Gathered take_gathered(Pool& pool, Chunk const& chunk, uint32_t ranks, Operands operands);

// The types of y and of the gathered array.
Result result_of(Variant const& v);
Result gathered_of(Variant const& v);
Finish finish_of(Variant const& v, Geometry const& g, uint32_t seed, uint32_t rank);

// "" or what is wrong with one rank's y, or with its gathered array.
std::string fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v);
std::string gathered_fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v);

}  // namespace teams
