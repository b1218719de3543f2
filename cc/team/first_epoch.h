// The number of an arena's first call.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace entwine::team {

// 0, unless ENTWINE_FIRST_EPOCH says otherwise: epochs wrap around after 2^32 calls, which tests can't wait for. All processes
// must agree.
inline uint32_t first_epoch() {
  char const* text = std::getenv("ENTWINE_FIRST_EPOCH");
  return text == nullptr ? 0 : static_cast<uint32_t>(std::strtoull(text, nullptr, 10));
}

}  // namespace entwine::team
