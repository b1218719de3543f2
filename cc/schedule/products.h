// Several products in one call. All-gather multiplies one x by several w, whose columns may be of different numbers, to a y of
// each; the other ops add the products of several pairs, whose contractions may be of different lengths, to one y.
//
// To the schedule they are one. All-gather: the column tiles of the first product, then those of the second, and so on; each
// may end in a tile that is partly empty, so the geometry's n is a sum of multiples of tile_n. The others: k is the sum of all.
//
// Gated: all-gather's two products, gate and up, of as many columns, have one y = activation(gate) * up. A tile has the gate's
// tile_n / 2 columns and then the same ones of up, so the geometry's n is twice that of y, and y's tile half as wide.
#pragma once

#include "schedule/geometry.h"

namespace entwine::schedule {

constexpr uint32_t kMaxProducts = 4;

struct Products {
  uint32_t count = 1;
  uint32_t sizes[kMaxProducts] = {};  // of several: n of each (all-gather), or k of each; a single one's is the geometry's
  bool gated = false;

  // All-gather's y: one of each product, or of all.
  constexpr uint32_t results() const { return gated ? 1 : count; }

  // Of product `i`, if `whole` is the geometry's.
  constexpr uint32_t size(uint32_t i, uint32_t whole) const { return count == 1 ? whole : sizes[i]; }

  // The geometry's n or k of several, where each takes whole blocks of so many columns or elements.
  constexpr uint64_t joined(uint32_t block) const {
    if (gated) return uint64_t{2} * sizes[0];
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; ++i) sum += round_up(sizes[i], block);
    return sum;
  }

  // Where block `at` lies: in which product, and which of its own blocks it is.
  struct Place {
    uint32_t product, block;
  };
  constexpr Place find(uint32_t at, uint32_t block) const {
    Place place{0, at};
    if (gated) return place;
    for (; place.product + 1 < count && place.block >= ceil_div(sizes[place.product], block); ++place.product)
      place.block -= ceil_div(sizes[place.product], block);
    return place;
  }
};

// n and k of one product.
constexpr uint32_t columns(Op op, Geometry const& g, Products const& products, uint32_t product) {
  return op == Op::kAllGatherMatmul ? products.size(product, g.n) : g.n;
}
constexpr uint32_t contraction(Op op, Geometry const& g, Products const& products, uint32_t product) {
  return op == Op::kAllGatherMatmul ? g.k : products.size(product, g.k);
}

// Where products begin, in blocks, and after the last one where all end; one that isn't there begins nowhere.
struct Beginnings {
  uint32_t at[kMaxProducts + 1];

  // The product that a block belongs to.
  ENTWINE_HOST_DEVICE constexpr uint32_t of(uint32_t block) const {
    uint32_t product = 0;
    for (uint32_t i = 1; i < kMaxProducts; ++i) product += block >= at[i];
    return product;
  }
};
// Of products that take whole blocks of so many columns or elements; `whole` is the geometry's number of these. Gated ones
// begin together.
constexpr Beginnings beginnings(Products const& products, uint32_t whole, uint32_t block) {
  Beginnings begin{};
  for (uint32_t i = 0; i <= kMaxProducts; ++i) begin.at[i] = i == 0 ? 0 : ~0u;
  if (products.gated) begin.at[1] = ceil_div(whole, block);
  for (uint32_t i = 1; i <= products.count && !products.gated; ++i)
    begin.at[i] = begin.at[i - 1] + ceil_div(products.size(i - 1, whole), block);
  return begin;
}

}  // namespace entwine::schedule
