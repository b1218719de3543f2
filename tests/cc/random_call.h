// Calls of random shapes and plans, with the operands and results of all their ranks, and what these results must be.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

#include "host/call.h"
#include "host/element.h"

namespace entwine::host {

using schedule::Geometry;
using schedule::Op;
using schedule::Transport;

inline float to_float8(uint8_t bits, Element e) { return e == Element::kE4m3 ? to_float(E4m3{bits}) : to_float(E5m2{bits}); }

// What w is made of beside an x of these.
inline Element of_w(Element x) { return x == Element::kE5m2 ? Element::kE4m3 : x; }

// Of 8 bits only what they hold exactly.
inline std::vector<std::byte> encode(std::vector<float> const& values, Element e) {
  std::vector<std::byte> bytes(values.size() * element_bytes(e));
  for (size_t i = 0; i < values.size(); ++i) {
    if (is_float8(e)) {
      uint32_t bits = 0;
      while (to_float8(static_cast<uint8_t>(bits), e) != values[i]) ++bits;
      bytes[i] = static_cast<std::byte>(bits);
      continue;
    }
    if (e == Element::kF32) std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    uint16_t narrow = e == Element::kBf16 ? from_float<Bf16>(values[i]).bits : from_float<F16>(values[i]).bits;
    if (e != Element::kF32) std::memcpy(bytes.data() + 2 * i, &narrow, 2);
  }
  return bytes;
}

inline float decode(std::vector<std::byte> const& bytes, size_t i, Element e) {
  if (is_float8(e)) return to_float8(static_cast<uint8_t>(bytes[i]), e);
  if (e == Element::kF32) {
    float v;
    std::memcpy(&v, bytes.data() + 4 * i, 4);
    return v;
  }
  uint16_t narrow;
  std::memcpy(&narrow, bytes.data() + 2 * i, 2);
  return e == Element::kBf16 ? to_float(Bf16{narrow}) : to_float(F16{narrow});
}

// One call with the operands and results of all its ranks.
class Product {
 public:
  // `draw` gives the elements of x and w. If spec says that something is gathered, all-gather returns the gathered x, and
  // reduce-scatter gathers bytes of that shape beside. With an activation it has a bias too.
  template <typename Draw>
  Product(CallSpec const& spec, Draw draw) : spec_(spec), g_(spec.geometry) {
    size_t x_rows = replicate() ? g_.all_rows() : size_t(g_.batch) * g_.m_shard * (gather() ? 1 : g_.ranks);
    size_t y_rows = replicate() ? g_.all_rows() : size_t(g_.batch) * g_.m_shard * (gather() ? g_.ranks : 1);
    gathers_ = spec.gathering.any() && g_.ranks > 1 && !replicate();
    schedule::Gathering& z = spec_.gathering;
    if (gather()) z = {g_.batch, g_.m_shard, uint64_t(g_.k) * element_bytes(spec.in), g_.tile_m};
    if (!gather()) z.block_rows = g_.tile_m;
    if (!gather() && !gathers_) z = {};
    for (uint32_t r = 0; r < g_.ranks; ++r) {
      for (uint32_t p = 0; p < spec.products.count; ++p) {
        std::vector<float> x(gather() && p > 0 ? 0 : x_rows * spec.k(p)), w(size_t(spec.k(p)) * spec.n(p));
        for (float& v : x) v = draw();
        for (float& v : w) v = draw();
        x_.push_back(encode(x, spec.in));
        w_.push_back(encode(w, of_w(spec.in)));
        y_.emplace_back(p >= results() ? 0 : y_rows * spec.n(p) * element_bytes(spec.out), std::byte{0xff});
        bias_.emplace_back();
        bool biased =
            spec.activation[p] != schedule::Activation::kNone || (spec.products.gated && p == 1 && spec.k(p) % 2 != 0);
        if (biased && (p == 0 || gather()))
          for (uint32_t j = 0; j < spec.n(p); ++j)  // that of an all-reduce is the same on all ranks
            bias_.back().push_back(r == 0 || !replicate() ? static_cast<float>(noise() % 64) - 32 : bias_[0][j]);
      }
      if (gathers_ && gather()) z_.push_back(x_[at(r, 0)]);
      if (gathers_ && !gather()) {
        z_.emplace_back(z.chunk_bytes());
        for (std::byte& b : z_.back()) b = static_cast<std::byte>(noise());
      }
      if (gathers_) whole_.emplace_back(z.chunk_bytes() * g_.ranks, std::byte{0xff});
      uint64_t scratch = 0;
      if (spec.grouped)
        scratch = schedule::scratch_bytes(spec.op, schedule::grouped(spec.op, g_), element_bytes(spec.in), gathers_);
      scratch_.emplace_back(scratch, std::byte{0xff});
    }
  }

  CallSpec const& spec() const { return spec_; }
  Operands operands(uint32_t rank) {
    uint32_t i = at(rank, 0);
    auto bias = [&](uint32_t i) { return bias_[i].empty() ? nullptr : bias_[i].data(); };
    Operands operands{x_[i].data(),
                      w_[i].data(),
                      y_[i].data(),
                      gathers_ && !gather() ? z_[rank].data() : nullptr,
                      gathers_ ? whole_[rank].data() : nullptr,
                      bias(i),
                      is_float8(spec_.in) ? scale_ : nullptr,
                      scratch_[rank].data()};
    for (uint32_t p = 1; p < spec_.products.count; ++p) {
      ++i;
      operands.more[p - 1] = {x_[i].data(), w_[i].data(), y_[i].data(), bias(i)};
    }
    return operands;
  }
  std::vector<std::byte> const& y(uint32_t rank) const { return y_[at(rank, 0)]; }

  bool exact() const { return worst(0) == 0 && gathered(); }

  // Whether every rank has every rank's chunk, byte for byte.
  bool gathered() const {
    if (!gathers_) return true;
    schedule::Gathering const& z = spec_.gathering;
    size_t batch_bytes = z.rows * z.row_bytes;
    for (auto const& whole : whole_)
      for (uint32_t b = 0; b < z.batch; ++b)
        for (uint32_t r = 0; r < g_.ranks; ++r)
          if (std::memcmp(&whole[(size_t(b) * g_.ranks + r) * batch_bytes], &z_[r][b * batch_bytes], batch_bytes) != 0)
            return false;
    return true;
  }

  // The largest error of a result, less `relative` times the sum of the absolute values of its terms.
  double worst(double relative) const {
    double worst = 0;
    uint32_t rows = replicate() ? g_.all_rows() : gather() ? g_.ranks * g_.m_shard : g_.m_shard;
    for (uint32_t r = 0; r < g_.ranks; ++r)
      for (uint32_t p = 0; p < results(); ++p)
        for (uint32_t b = 0; b < g_.batch; ++b)
          for (uint32_t i = 0; i < rows; ++i)
            for (uint32_t j = 0; j < spec_.n(p); ++j) {
              double want = 0, size = 0;
              if (gather()) {
                add(i / g_.m_shard, 0, size_t(b) * g_.m_shard + i % g_.m_shard, r, p, j, want, size);
              } else {
                size_t first = replicate() ? 0 : (size_t(b) * g_.ranks + r) * g_.m_shard;
                for (uint32_t q = 0; q < g_.ranks; ++q)
                  for (uint32_t pair = 0; pair < spec_.products.count; ++pair) add(q, pair, first + i, q, pair, j, want, size);
              }
              if (is_float8(spec_.in)) want *= scale_[p];  // a sum has the first
              if (!bias_[at(r, p)].empty()) want += bias_[at(r, p)][j];
              if (spec_.activation[p] == schedule::Activation::kRelu) want = std::max(want, 0.0);
              if (spec_.products.gated) {
                double up = bias_[at(r, 1)].empty() ? 0 : bias_[at(r, 1)][j];
                add(i / g_.m_shard, 0, size_t(b) * g_.m_shard + i % g_.m_shard, r, 1, j, up, size);
                want = decode(encode({static_cast<float>(want * up)}, spec_.out), 0, spec_.out);  // too large to be exact
              }
              double error = std::abs(decode(y_[at(r, p)], (size_t(b) * rows + i) * spec_.n(p) + j, spec_.out) - want);
              if (!(error <= relative * size)) worst = std::max(worst, error == error ? error - relative * size : 1e30);
            }
    return worst;
  }

 private:
  bool gather() const { return spec_.op == Op::kAllGatherMatmul; }
  bool replicate() const { return spec_.op == Op::kMatmulAllReduce; }
  uint32_t results() const { return gather() ? spec_.products.results() : 1; }
  // Of one product of a rank: all-gather has one x.
  uint32_t at(uint32_t rank, uint32_t product) const { return rank * spec_.products.count + product; }
  // `x_product` of x_rank's x's row times column `col` of `product` of w_rank's w.
  void add(uint32_t x_rank, uint32_t x_product, size_t x_row, uint32_t w_rank, uint32_t product, uint32_t col, double& sum,
           double& size) const {
    uint32_t k = spec_.k(product), n = spec_.n(product);
    for (uint32_t p = 0; p < k; ++p) {
      size_t place = spec_.transpose_w ? size_t(col) * k + p : size_t(p) * n + col;
      size_t all = g_.all_rows(), x_place = spec_.transpose_x ? (x_row / all * k + p) * all + x_row % all : x_row * k + p;
      double term =
          double(decode(x_[at(x_rank, x_product)], x_place, spec_.in)) * decode(w_[at(w_rank, product)], place, of_w(spec_.in));
      sum += term;
      size += std::abs(term);
    }
  }

  // Another byte each time, so that no call's array is another's.
  static uint32_t noise() {
    static thread_local std::minstd_rand engine{5};
    return engine() >> 8;
  }

  float const scale_[schedule::kMaxProducts] = {0.25f, 2, 0.5f, 4};
  CallSpec spec_;
  Geometry g_;
  bool gathers_ = false;
  std::vector<std::vector<std::byte>> x_, w_, y_;            // by rank and product
  std::vector<std::vector<float>> bias_;                     // likewise
  std::vector<std::vector<std::byte>> z_, whole_, scratch_;  // by rank
};

struct Random {
  std::minstd_rand engine;
  explicit Random(uint32_t seed) : engine(seed * 2 + 1) {}
  uint32_t below(uint32_t n) { return engine() % n; }
  uint32_t upto(uint32_t most) { return 1 + below(most); }
  float integer() { return static_cast<float>(below(3)) - 1; }  // sums of a few hundred stay exact in every type
  float real() { return static_cast<float>(below(2000001)) / 1e6f - 1; }
};

// Several products in place of one, up to as wide or as deep each.
inline void become_several(CallSpec& spec, Random& random) {
  Geometry& g = spec.geometry;
  uint32_t& size = spec.gather() ? g.n : g.k;
  spec.products.count = 2 + random.below(schedule::kMaxProducts - 1);
  for (uint32_t i = 0; i < spec.products.count; ++i) spec.products.sizes[i] = random.upto(size);
  size = static_cast<uint32_t>(spec.products.joined(spec.gather() ? g.tile_n : 1));
  for (uint32_t i = 1; i < schedule::kMaxProducts; ++i)
    if (random.below(2) == 0) spec.activation[i] = schedule::Activation::kRelu;
}

// Two products of as many columns, and one y, whose tile is half as wide.
inline void become_gated(CallSpec& spec) {
  Geometry& g = spec.geometry;
  spec.products = {2, {g.n, g.n}, true};
  g.n *= 2;
  g.tile_n = spec.plan.tile_n = g.tile_n + g.tile_n % 2;
}

// Strategy "signal": one product of operands of 16 or 32 bits and a result of the same, and nothing is gathered beside.
inline void become_grouped(CallSpec& spec, Random& random) {
  spec.grouped = true;
  spec.signal = {1, random.below(2) == 0 ? 0 : random.upto(3), false};
  if (is_float8(spec.in)) spec.in = Element::kBf16;
  spec.out = spec.in;
  if (spec.products.count > 1) (spec.gather() ? spec.geometry.n : spec.geometry.k) = spec.products.sizes[0];
  spec.products = {};
  if (!spec.gather()) spec.gathering = {};
}

// A call of random shape and plan, small, with tails.
inline CallSpec random_spec(Random& random, uint32_t ranks) {
  static constexpr Element kTypes[][2] = {
      {Element::kBf16, Element::kBf16}, {Element::kBf16, Element::kF32},  {Element::kF16, Element::kF16},
      {Element::kF16, Element::kF32},   {Element::kF32, Element::kF32},   {Element::kE4m3, Element::kBf16},
      {Element::kE4m3, Element::kF32},  {Element::kE5m2, Element::kBf16}, {Element::kE5m2, Element::kF32}};
  auto const& types = kTypes[random.below(std::size(kTypes))];
  Op op = static_cast<Op>(random.below(3));
  uint32_t tile_m = random.upto(12), tile_n = random.upto(12);
  CallSpec spec{schedule::op_name(op),
                op,
                {ranks, random.upto(2), random.upto(3 * tile_m), random.upto(3 * tile_n), random.upto(24), tile_m, tile_n},
                {tile_m, tile_n, random.upto(4), random.below(40), random.below(2) == 0 ? Transport::kPull : Transport::kPush,
                 random.upto(3)},
                random.below(2) == 0,
                types[0],
                types[1]};
  spec.plan.copiers = random.upto(3);
  if (random.below(2) == 0) spec.gathering = {random.upto(2), random.upto(3 * tile_m), random.upto(40)};
  spec.workers = random.upto(4);
  if (random.below(3) == 0) spec.activation[0] = schedule::Activation::kRelu;
  spec.timeout = Timeout(60000);
  if (op == Op::kMatmulAllReduce) {  // any number of rows, in chunks of a multiple of some
    Geometry& g = spec.geometry;
    uint32_t rows = random.upto(ranks * g.m_shard);
    g = schedule::all_reduce_geometry(ranks, rows, g.n, g.k, tile_m, tile_n, random.upto(3));
  }
  if (random.below(2) == 0) {
    become_several(spec, random);
  } else if (spec.gather() && !is_float8(spec.in) && random.below(2) == 0) {
    become_gated(spec);
  }
  if (ranks > 1 && random.below(3) == 0)
    become_grouped(spec, random);
  else if (ranks > 1 && random.below(2) == 0)
    spec.plan.movers = random.upto(3);  // strategy "resident"
  if (!spec.gather() && !is_float8(spec.in)) spec.transpose_x = random.below(2) == 0;
  return spec;
}

}  // namespace entwine::host
