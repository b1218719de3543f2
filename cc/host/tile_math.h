// The arithmetic of one tile: x rows times w columns, accumulated in float in the order of k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "host/element.h"
#include "schedule/geometry.h"

namespace entwine::host {

// Rows of x as they lie: element p of row i is first[i * row + p * element].
template <typename In>
struct Rows {
  In const* first;
  size_t row, element;
};

// One worker's accumulators and packing buffers.
template <typename In>
class TileProduct {
 public:
  using W = typename Weights<In>::Element;

  TileProduct(schedule::Geometry const& g, bool transpose_w)
      : transpose_w_(transpose_w),
        pitch_(static_cast<uint32_t>(schedule::round_up(g.tile_n, kLanes))),
        sums_(size_t(g.tile_m) * pitch_),
        x_(size_t(g.tile_m) * kDepth),
        w_(size_t(pitch_) * kDepth) {}

  // Row `i` of the accumulators.
  float* row(uint32_t i) { return sums_.data() + size_t(i) * pitch_; }

  void clear() { std::fill(sums_.begin(), sums_.end(), 0.0f); }

  // Adds `rows` rows of x times `cols` columns from `first_col` on of a w of k x n.
  void multiply(Rows<In> const& x, uint32_t rows, W const* w, uint32_t n, uint32_t k, uint32_t first_col, uint32_t cols) {
    n_ = n;
    k_ = k;
    for (uint32_t k0 = 0; k0 < k_; k0 += kDepth) {
      uint32_t depth = schedule::smaller(kDepth, k_ - k0);
      pack_x(x, rows, k0, depth);
      pack_w(w, first_col, cols, k0, depth);
      for (uint32_t i = 0; i < rows; ++i)
        for (uint32_t j = 0; j < cols; j += kLanes) accumulate(row(i) + j, x_.data() + i * kDepth, w_.data() + j, depth);
    }
  }

 private:
  static constexpr uint32_t kLanes = 32;   // sums kept in vector registers
  static constexpr uint32_t kDepth = 128;  // packed at a time, to stay in the first-level cache

  void pack_x(Rows<In> const& x, uint32_t rows, uint32_t k0, uint32_t depth) {
    for (uint32_t i = 0; i < rows; ++i)
      for (uint32_t p = 0; p < depth; ++p) x_[i * kDepth + p] = to_float(x.first[i * x.row + (k0 + p) * x.element]);
  }
  // Columns past `cols` keep what they held, finite or not: their sums are never read.
  void pack_w(W const* w, uint32_t first_col, uint32_t cols, uint32_t k0, uint32_t depth) {
    if (transpose_w_) {
      for (uint32_t j = 0; j < cols; ++j)
        for (uint32_t p = 0; p < depth; ++p) w_[p * pitch_ + j] = to_float(w[size_t(first_col + j) * k_ + k0 + p]);
    } else {
      for (uint32_t p = 0; p < depth; ++p)
        for (uint32_t j = 0; j < cols; ++j) w_[p * pitch_ + j] = to_float(w[size_t(k0 + p) * n_ + first_col + j]);
    }
  }
  void accumulate(float* sums, float const* x, float const* w, uint32_t depth) const {
    float s[kLanes];
    for (uint32_t j = 0; j < kLanes; ++j) s[j] = sums[j];
    for (uint32_t p = 0; p < depth; ++p)
      for (uint32_t j = 0; j < kLanes; ++j) s[j] += x[p] * w[size_t(p) * pitch_ + j];
    for (uint32_t j = 0; j < kLanes; ++j) sums[j] = s[j];
  }

  bool transpose_w_;
  uint32_t pitch_, n_ = 0, k_ = 0;
  std::vector<float> sums_, x_, w_;
};

}  // namespace entwine::host
