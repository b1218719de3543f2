#include "calls.h"

#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstring>

namespace teams {

using namespace entwine;

Geometry geometry_for(Op op, Geometry const& g) {
  if (op != Op::kMatmulAllReduce) return g;
  uint32_t rows = g.batch * g.m_shard * g.ranks - (g.ranks - 1);
  return schedule::all_reduce_geometry(g.ranks, rows, g.n, g.k, g.tile_m, g.tile_n,
                                       schedule::chunk_unit(schedule::Target::kSm90));
}

Geometry turned_geometry(Op op, Geometry const& g) {
  Geometry turned = g;
  turned.m_shard = static_cast<uint32_t>(schedule::round_up(g.m_shard, 8));
  if (op != Op::kMatmulAllReduce) return turned;
  uint32_t rows = g.batch * turned.m_shard * g.ranks;
  return schedule::all_reduce_geometry(g.ranks, rows > 8 ? rows - 8 : rows, g.n, g.k, g.tile_m, g.tile_n,
                                       schedule::chunk_unit(schedule::Target::kSm90));
}

Guarded take_y(Pool& pool, Op op, Geometry const& g, bool float_out) {
  uint64_t bytes = uint64_t{y_elements(op, g)} * (float_out ? 4 : 2) + 2 * kGuardBytes;
  return {pool.take(bytes), bytes};
}

Gathered take_gathered(Pool& pool, Chunk const& chunk, uint32_t ranks, Operands operands) {
  uint64_t chunk_bytes = uint64_t{chunk.elements()} * operand_bytes(operands);
  uint8_t* z = pool.take(chunk_bytes);
  uint64_t bytes = chunk_bytes * ranks + 2 * kGuardBytes;
  return {z, {pool.take(bytes), bytes}};
}

Result gathered_of(Variant const& v) {
  constexpr Result kResults[] = {Result::kBf16, Result::kF16, Result::kE4m3, Result::kE5m2};
  return kResults[static_cast<uint32_t>(v.operands)];
}
Result result_of(Variant const& v) {
  if (v.float_out) return Result::kFloat32;
  return v.operands == Operands::kF16 ? Result::kF16 : Result::kBf16;
}

Finish finish_of(Variant const& v, Geometry const& g, uint32_t seed, uint32_t rank) {
  Finish finish{is_float8(v.operands) ? kScale : 1};
  if (v.finishes) {
    finish.columns = g.n;
    finish.seed = bias_seed(v.op, seed, rank);
  }
  return finish;
}

namespace {

float value_of(uint32_t bits, Result result) {
  if (result == Result::kE5m2) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits << 8)));
  if (result == Result::kE4m3) return bits == 0 ? 0.0f : bits == 0x38 ? 1.0f : bits == 0xb8 ? -1.0f : NAN;  // all there is
  if (result == Result::kF16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  if (result == Result::kBf16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

std::string gathered_fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v) {
  if (verdict.bad == 0) return "";
  Chunk chunk = chunk_of(v.op, g);
  int64_t index = static_cast<int64_t>(~static_cast<uint32_t>(verdict.got >> 32)) - kGuardBytes / bytes_of(gathered_of(v));
  int64_t row = index / chunk.cols, part = row / chunk.rows;
  char first[160];
  std::snprintf(
      first, sizeof first, "gathered[%d, rank %d, row %d, %d] is %g (%#x), should be %g", static_cast<int>(part / g.ranks),
      static_cast<int>(part % g.ranks), static_cast<int>(row % chunk.rows), static_cast<int>(index % chunk.cols),
      static_cast<double>(value_of(static_cast<uint32_t>(verdict.got), gathered_of(v))), static_cast<uint32_t>(verdict.got),
      static_cast<double>(value_of(static_cast<uint32_t>(verdict.want), gathered_of(v))));
  return to_string(v) + ", " + to_string(g) + ", rank " + std::to_string(rank) + ": " + first + ", the first of " +
         std::to_string(verdict.bad);
}

std::string fault_of(Verdict const& verdict, uint32_t rank, Geometry const& g, Variant const& v) {
  if (verdict.bad == 0) return "";
  auto got = static_cast<uint32_t>(verdict.got), want = static_cast<uint32_t>(verdict.want);
  uint32_t count = y_elements(v.op, g), rows = count / g.n / g.batch;
  uint32_t index = ~static_cast<uint32_t>(verdict.got >> 32) - kGuardBytes / (v.float_out ? 4 : 2);
  char first[160];
  if (index >= count)
    std::snprintf(first, sizeof first, "y overrun at element %d of %u, now %#x", static_cast<int>(index), count, got);
  else
    std::snprintf(first, sizeof first, "y[%u, %u, %u] is %g (%#x), should be %g (%#x)", index / g.n / rows, index / g.n % rows,
                  index % g.n, static_cast<double>(value_of(got, result_of(v))), got,
                  static_cast<double>(value_of(want, result_of(v))), want);
  return to_string(v) + ", " + to_string(g) + ", rank " + std::to_string(rank) + ": " + first + ", the first of " +
         std::to_string(verdict.bad);
}

}  // namespace teams
