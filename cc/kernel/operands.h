// What x and w are made of, as the kernels multiply it.
#pragma once

#include <cstdint>

#include "schedule/integers.h"

namespace entwine {

// Of 8 bits, w is e4m3 and the name is x's; both must be contiguous in k, and the product has a scale.
enum class Operands : uint8_t { kBf16, kF16, kE4m3, kE5m2 };

constexpr Operands kAllOperands[] = {Operands::kBf16, Operands::kF16, Operands::kE4m3, Operands::kE5m2};

ENTWINE_HOST_DEVICE constexpr bool is_float8(Operands operands) {
  return operands == Operands::kE4m3 || operands == Operands::kE5m2;
}
constexpr uint32_t operand_bytes(Operands operands) { return is_float8(operands) ? 1 : 2; }

}  // namespace entwine
