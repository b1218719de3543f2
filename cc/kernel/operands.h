// What x and w are made of, as the kernels multiply it.
#pragma once

#include <cstdint>

namespace entwine {

enum class Operands : uint8_t { kBf16, kF16 };

constexpr Operands kAllOperands[] = {Operands::kBf16, Operands::kF16};

}  // namespace entwine
