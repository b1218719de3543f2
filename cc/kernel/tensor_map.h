// TMA descriptors.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace entwine {

// A row-major array of up to four dimensions, innermost first; `pitch[i]` is the distance in bytes between neighbours along
// dimension i + 1. Base and pitches are multiples of 16.
struct TensorView {
  void const* data;
  uint32_t element_bytes;  // 1, 2 or 4: what copies bits need not know more
  uint32_t rank;
  uint64_t size[4];
  uint64_t pitch[3];
  uint32_t box[4];  // what one copy moves; its inner dimension is 128 bytes, swizzled as 128-byte rows
};

// False if the driver refuses the view.
bool encode_tensor_map(TensorView const& view, CUtensorMap* map);

}  // namespace entwine
