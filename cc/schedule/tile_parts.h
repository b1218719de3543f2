// sm_90: the four parts of a cluster's tile, one of each consumer warpgroup of its two CTAs. A part has 64 rows: of 128 rows of
// a CTA each consumer takes one half, with all columns; 64 rows they share, and each takes half of the columns.
#pragma once

#include "schedule/plan.h"

namespace entwine::schedule {

constexpr uint32_t kSm90PartRows = 64;
static_assert(chunk_unit(Target::kSm90) == kSm90PartRows, "a part of an all-reduce's tile lies in one chunk");

struct TileParts {
  TileShape tile;

  ENTWINE_HOST_DEVICE constexpr bool stacked() const { return tile.m / 2 == 2 * kSm90PartRows; }
  ENTWINE_HOST_DEVICE constexpr uint32_t cols() const { return stacked() ? tile.n : tile.n / 2; }
  // Where part `part` begins in its tile.
  ENTWINE_HOST_DEVICE constexpr uint32_t row(uint32_t part) const {
    return part / 2 * (tile.m / 2) + (stacked() ? part % 2 * kSm90PartRows : 0);
  }
  ENTWINE_HOST_DEVICE constexpr uint32_t col(uint32_t part) const { return stacked() ? 0 : part % 2 * cols(); }
};

// The column of a part at which an image of it begins. Where images don't divide the columns, the last one repeats some of
// those of the one before it, so that all are loaded, sent and stored alike.
ENTWINE_HOST_DEVICE constexpr uint32_t image_begin(uint32_t cols, uint32_t image_cols, uint32_t image) {
  uint32_t begin = image * image_cols;
  return cols % image_cols != 0 && begin + image_cols > cols ? cols - image_cols : begin;
}

// All-reduce: what of a part is inside y (rows x n): its first row and column there, and how many of its images, `image_cols`
// columns each, have a column. None, if no row of the part is in its chunk and in y.
struct PartInside {
  uint32_t row, col, images;
};
ENTWINE_HOST_DEVICE constexpr PartInside part_inside(TileParts const& parts, Tile const& t, uint32_t part, uint32_t m_shard,
                                                     uint32_t rows, uint32_t n, uint32_t image_cols) {
  uint32_t in_chunk = t.row * parts.tile.m + parts.row(part);
  uint32_t row = t.owner * m_shard + in_chunk, col = t.col * parts.tile.n + parts.col(part);
  bool out = in_chunk >= m_shard || row >= rows || col >= n;
  return {row, col, out ? 0 : ceil_div(smaller(parts.cols(), n - col), image_cols)};
}

}  // namespace entwine::schedule
