// What a launch for few rows hands the kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernel/sm90/params.h"
#include "schedule/few_rows.h"

namespace entwine::sm90 {

struct FewRowsParams {
  // x (rows, k): the operand, or what has been gathered, by epoch parity. w (k, n) or (n, k).
  CUtensorMap x[2], w;

  schedule::FewRows shape;
  uint32_t rank;
  uint32_t k_blocks, slice_blocks;  // of 128 bytes: all, and a slice's
  uint32_t stages;                  // few_rows_stages.h
  uint32_t clusters;                // launched
  uint8_t const* x_data;
  uint8_t* y;

  uint8_t* arena[schedule::kMaxRanks];  // every rank's, mapped here
  uint64_t signals_offset, packets_offset, packets_half, staging_offset, staging_half;
  uint32_t words_per_source;

  uint64_t timeout_ns;
  schedule::StuckReport* stuck;

  Epilogue epilogue;
  float const* scale;  // 8-bit operands: what their product is multiplied by, before it travels or is rounded
  bool e5m2;           // 8-bit operands: x is e5m2, not e4m3

  // As in Params.
  ENTWINE_HOST_DEVICE uint32_t last_claim() const { return shape.tiles + clusters - 1; }
};

}  // namespace entwine::sm90
