// Random calls for problem_fuzz_test.cc: ones that would decode, and ways to spoil them.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "ffi/problem.h"
#include "schedule/plan.h"

namespace entwine::fuzz {

namespace ffi = xla::ffi;
using schedule::Op;
using schedule::Target;

constexpr ffi::DataType kTypes[] = {
    ffi::DataType::INVALID, ffi::DataType::PRED,   ffi::DataType::S1,       ffi::DataType::S4,       ffi::DataType::S8,
    ffi::DataType::S16,     ffi::DataType::S64,    ffi::DataType::U2,       ffi::DataType::U32,      ffi::DataType::F16,
    ffi::DataType::F32,     ffi::DataType::F64,    ffi::DataType::BF16,     ffi::DataType::C64,      ffi::DataType::C128,
    ffi::DataType::TOKEN,   ffi::DataType::F8E5M2, ffi::DataType::F8E4M3FN, ffi::DataType::F4E2M1FN, ffi::DataType::F8E8M0FNU};

struct Random {
  std::mt19937_64 engine;
  uint64_t below(uint64_t n) { return engine() % n; }
  int64_t from(int64_t least, int64_t most) { return least + int64_t(below(uint64_t(most - least + 1))); }
  bool one_in(uint64_t n) { return below(n) == 0; }
  // What breaks programs: edges of types, powers of two and their neighbours; and plain small numbers.
  int64_t odd() {
    switch (below(6)) {
      case 0:
        return from(-2, 3);
      case 1:
        return from(1, 300);
      case 2:
        return int64_t((uint64_t{1} << below(64)) + uint64_t(from(-1, 1)));
      case 3:
        return (int64_t{1} << 31) + from(-2, 1);
      case 4:
        return below(2) == 0 ? INT64_MAX - from(0, 2) : INT64_MIN + from(0, 2);
      default:
        return int64_t(engine());
    }
  }
};

struct Input {
  Op op;
  Target target;
  std::vector<int64_t> x, w, y, z, whole, bias, scale, groups;  // z, whole: beside or gathered, if they are there
  bool has_z = false, has_whole = false, has_bias = false, has_scale = false;
  ffi::DataType x_type, w_type, y_type, z_type, whole_type, bias_type = ffi::F32, scale_type = ffi::F32;
  struct More {  // of a product after the first
    std::vector<int64_t> x, w, y, bias;
    bool has_x = false, has_w = false, has_y = false, has_bias = false;
    ffi::DataType x_type = ffi::F32, w_type = ffi::F32, y_type = ffi::F32, bias_type = ffi::F32;
  } more[schedule::kMaxProducts - 1];
  CallAttributes attributes{};

  Buffers buffers() {
    attributes.groups = {groups.data(), groups.size()};
    describe(0, x, x_type);
    describe(1, w, w_type);
    describe(2, y, y_type);
    describe(3, z, z_type);
    describe(4, whole, whole_type);
    describe(5, bias, bias_type);
    describe(6, scale, scale_type);
    Buffers all{ffi::AnyBuffer(&buffer_[0]), ffi::AnyBuffer(&buffer_[1]), ffi::AnyBuffer(&buffer_[2]), {}, {}, {}, {}, {}};
    if (has_bias) all.bias = ffi::AnyBuffer(&buffer_[5]);
    if (has_scale) all.scale = ffi::AnyBuffer(&buffer_[6]);
    if (has_z) all.z = ffi::AnyBuffer(&buffer_[3]);
    if (has_whole) all.gathered = ffi::AnyBuffer(&buffer_[4]);
    int at = 7;
    auto optional = [&](bool there, std::vector<int64_t>& dims, ffi::DataType type) {
      describe(at, dims, type);
      return there ? std::optional(ffi::AnyBuffer(&buffer_[at++])) : (++at, std::nullopt);
    };
    for (uint32_t i = 0; i + 1 < schedule::kMaxProducts; ++i) {
      More& m = more[i];
      all.more[i].x = optional(m.has_x, m.x, m.x_type);
      all.more[i].w = optional(m.has_w, m.w, m.w_type);
      all.more[i].y = optional(m.has_y, m.y, m.y_type);
      all.more[i].bias = optional(m.has_bias, m.bias, m.bias_type);
    }
    return all;
  }

 private:
  void describe(int i, std::vector<int64_t>& dims, ffi::DataType type) {
    buffer_[i] = {};
    buffer_[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer_[i].dtype = static_cast<XLA_FFI_DataType>(type);
    buffer_[i].rank = static_cast<int64_t>(dims.size());
    buffer_[i].dims = dims.data();
  }
  XLA_FFI_Buffer buffer_[7 + 4 * (schedule::kMaxProducts - 1)];
};

// The products after the first of one that decodes.
inline void add_products(Input& in, Random& random, int64_t most) {
  auto& a = in.attributes;
  bool gather = in.op == Op::kAllGatherMatmul;
  a.products = random.one_in(2) ? 1 : random.from(2, schedule::kMaxProducts);
  a.gated = gather && a.products == 2 && !in.has_scale && random.one_in(2);
  for (int64_t i = 1; i < a.products; ++i) {
    Input::More& m = in.more[i - 1];
    int64_t size = a.gated != 0 ? in.y[2] : random.from(1, most), n = gather ? size : in.y[2], k = gather ? in.x[2] : size;
    m.has_w = true;
    m.has_x = !gather;
    m.has_y = gather && a.gated == 0;
    m.x = {in.x[0], in.x[1], k};
    m.w = a.transpose_w != 0 ? std::vector{n, k} : std::vector{k, n};
    m.y = {in.y[0], in.y[1], n};
    m.bias = {n};
    m.x_type = in.x_type;
    m.w_type = in.w_type;
    m.y_type = in.y_type;
    if (!gather) continue;
    m.has_bias = random.one_in(3);
    a.biased |= int64_t(m.has_bias) << i;
    if (a.gated == 0) a.activation |= random.from(0, schedule::kActivations - 1) << (8 * i);
  }
}

// One that decodes: mostly small, sometimes of a large model or larger.
inline Input good(Random& random) {
  Input in;
  in.op = static_cast<Op>(random.below(3));
  in.target = random.one_in(2) ? Target::kHost : Target::kSm90;
  bool gather = in.op == Op::kAllGatherMatmul, replicate = in.op == Op::kMatmulAllReduce, host = in.target == Target::kHost;
  int64_t most = random.one_in(4) ? random.from(1, 1 << 20) : 96;
  int64_t team = random.from(2, 8), batch = random.from(1, 3), n = random.from(1, most), k = random.from(1, most);
  int64_t m_shard = random.from(1, most), rows = m_shard * team;
  auto& a = in.attributes;
  a.team_size = team;
  a.transpose_w = int64_t(random.below(2));
  for (int64_t i = 0; i < team * random.from(1, 2); ++i) in.groups.push_back(i);
  in.x = {batch, gather ? m_shard : rows, k};
  in.w = a.transpose_w != 0 ? std::vector{n, k} : std::vector{k, n};
  in.y = {batch, gather || replicate ? rows : m_shard, n};
  in.x_type = in.w_type = in.y_type = random.one_in(2) ? ffi::BF16 : random.one_in(2) ? ffi::F16 : ffi::F32;
  in.has_scale = random.one_in(5);
  if (in.has_scale) {
    in.x_type = random.one_in(2) ? ffi::DataType::F8E4M3FN : ffi::DataType::F8E5M2;
    in.w_type = ffi::DataType::F8E4M3FN;
    in.y_type = ffi::BF16;
    if (random.one_in(2)) in.scale = {1};
  }
  if (random.one_in(3)) in.y_type = ffi::F32;
  in.has_bias = random.one_in(3);
  in.bias = {n};
  a.scaled = in.has_scale;
  a.biased = in.has_bias;
  a.activation = random.from(0, schedule::kActivations - 1);
  add_products(in, random, most);
  if (in.has_scale && gather && a.products > 1) in.scale = {a.products};
  in.z_type = in.whole_type = gather ? in.x_type : kTypes[1 + random.below(std::size(kTypes) - 1)];
  in.z = {random.from(1, 3), random.from(1, most), random.from(1, most)};
  in.has_whole = !replicate && random.one_in(2);
  in.has_z = in.has_whole && !gather;
  std::vector<int64_t> const& chunk = gather ? in.x : in.z;
  in.whole = {chunk[0], chunk[1] * team, chunk[2]};
  auto tile = schedule::kSm90Tiles[random.below(3)];
  a.tile_m = host ? random.from(1, 64) : tile.m;
  a.tile_n = host ? random.from(1, 64) : tile.n;
  a.raster = random.from(1, 9);
  a.lead = random.from(0, 70);
  a.transport = int64_t(random.below(2));
  a.pushers = random.from(1, 66);
  a.copiers = random.from(1, 66);
  a.few_rows = !host && random.one_in(3);
  a.movers = a.few_rows == 0 && random.one_in(3) ? random.from(1, 9) : 0;
  a.transpose_x = !gather && !in.has_scale && a.few_rows == 0 && !(replicate && batch > 1) && random.one_in(3);
  if (a.transpose_x != 0) {
    std::swap(in.x[1], in.x[2]);
    for (int64_t i = 1; i < a.products; ++i) std::swap(in.more[i - 1].x[1], in.more[i - 1].x[2]);
  }
  a.workers = random.from(1, 3);
  a.timeout_ms = 60000;
  return in;
}

inline void spoil(Input& in, Random& random) {
  auto& a = in.attributes;
  int64_t* attributes[] = {&a.team_size, &a.transpose_w, &a.products, &a.tile_m,  &a.tile_n,     &a.raster, &a.lead,
                           &a.transport, &a.pushers,     &a.copiers,  &a.biased,  &a.activation, &a.gated,  &a.scaled,
                           &a.few_rows,  &a.timeout_ms,  &a.stall_us, &a.workers, &a.stall_seed, &a.movers, &a.transpose_x};
  std::vector<std::vector<int64_t>*> dims = {&in.x, &in.w, &in.y, &in.z, &in.whole, &in.bias, &in.scale};
  std::vector<ffi::DataType*> types = {&in.x_type,     &in.w_type,    &in.y_type,    &in.z_type,
                                       &in.whole_type, &in.bias_type, &in.scale_type};
  std::vector<bool*> there = {&in.has_z, &in.has_whole, &in.has_bias, &in.has_scale};
  // Of the other products where there are any, and now and then where there are none.
  for (int64_t i = 1; i < (random.one_in(8) ? schedule::kMaxProducts : a.products); ++i) {
    if (i >= schedule::kMaxProducts) break;
    Input::More& m = in.more[i - 1];
    dims.insert(dims.end(), {&m.x, &m.w, &m.y, &m.bias});
    types.insert(types.end(), {&m.x_type, &m.w_type, &m.y_type, &m.bias_type});
    there.insert(there.end(), {&m.has_x, &m.has_w, &m.has_y, &m.has_bias});
  }
  switch (random.below(8)) {
    case 0:
    case 1:
      *attributes[random.below(std::size(attributes))] = random.odd();
      break;
    case 2: {  // one size alone
      auto& some = *dims[random.below(dims.size())];
      if (!some.empty()) some[random.below(some.size())] = random.odd();
      break;
    }
    case 3: {  // one size wherever it stands
      auto& some = *dims[random.below(dims.size())];
      if (some.empty()) break;
      int64_t old = some[random.below(some.size())], now = random.odd();
      int64_t scaled = int64_t(uint64_t(now) * uint64_t(a.team_size)), whole = int64_t(uint64_t(old) * uint64_t(a.team_size));
      for (auto* each : dims)
        for (int64_t& d : *each) d = d == old ? now : d == whole ? scaled : d;
      break;
    }
    case 4: {  // a rank
      auto& some = *dims[random.below(dims.size())];
      if (random.one_in(2) && !some.empty())
        some.pop_back();
      else
        some.push_back(random.one_in(2) ? 1 : random.odd());
      break;
    }
    case 5:
      *types[random.below(types.size())] = kTypes[random.below(std::size(kTypes))];
      break;
    case 6:
      *there[random.below(there.size())] = random.one_in(2);
      break;
    default:
      in.groups.resize(random.below(20), random.odd());
      if (!in.groups.empty()) in.groups[random.below(in.groups.size())] = random.odd();
  }
}

}  // namespace entwine::fuzz
