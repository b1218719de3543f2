// An array that a call gathers: every rank has a chunk (batch, rows, columns) of it, and all of them together are
// (batch, ranks * rows, columns). all_gather_matmul gathers x; matmul_reduce_scatter may gather some other array beside its
// matmul. Nothing is computed with it here, so all that counts is bytes.
//
// A chunk is cut into row blocks, as geometry.h cuts x; each has a signal word. A block's rows are contiguous, in a chunk and
// in the whole.
#pragma once

#include "schedule/integers.h"

namespace entwine::schedule {

struct Gathering {
  uint32_t batch = 0, rows = 0;  // of a chunk; no rows: nothing is gathered
  uint64_t row_bytes = 0;
  uint32_t block_rows = 1;

  ENTWINE_HOST_DEVICE constexpr bool any() const { return rows != 0; }
  ENTWINE_HOST_DEVICE constexpr uint32_t batch_blocks() const { return ceil_div(rows, block_rows); }  // of one batch
  ENTWINE_HOST_DEVICE constexpr uint32_t blocks() const { return batch * batch_blocks(); }            // of a chunk
  ENTWINE_HOST_DEVICE constexpr uint64_t chunk_bytes() const { return uint64_t(batch) * rows * row_bytes; }

  ENTWINE_HOST_DEVICE constexpr uint64_t block_bytes(uint32_t block) const {
    return smaller(block_rows, rows - first_row(block)) * row_bytes;
  }
  // Where a block begins in its chunk, and in the whole array if it is rank `source`'s.
  ENTWINE_HOST_DEVICE constexpr uint64_t offset(uint32_t block) const {
    return (uint64_t(batch_of(block)) * rows + first_row(block)) * row_bytes;
  }
  ENTWINE_HOST_DEVICE constexpr uint64_t whole_offset(uint32_t block, uint32_t source, uint32_t ranks) const {
    return ((uint64_t(batch_of(block)) * ranks + source) * rows + first_row(block)) * row_bytes;
  }

 private:
  ENTWINE_HOST_DEVICE constexpr uint32_t batch_of(uint32_t block) const { return block / batch_blocks(); }
  ENTWINE_HOST_DEVICE constexpr uint32_t first_row(uint32_t block) const { return block % batch_blocks() * block_rows; }
};

}  // namespace entwine::schedule
