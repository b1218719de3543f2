// Conversions, against every value of the narrow types.
#include <cmath>
#include <cstdint>

#include "check.h"
#include "host/element.h"

namespace entwine::host {
namespace {

template <typename T>
double value(uint32_t bits) {
  return to_float(T{static_cast<uint16_t>(bits)});
}

// `first` to `last` are the bits of all positive finite values, in order of value.
template <typename T>
void check_rounding(uint32_t last) {
  for (uint32_t bits = 0; bits <= last; ++bits)
    for (uint32_t sign : {0u, 0x8000u}) {
      double v = value<T>(bits | sign);
      CHECK_EQ(from_float<T>(static_cast<float>(v)).bits, (bits | sign));
      if (bits == last) continue;
      double next = value<T>((bits + 1) | sign), middle = (v + next) / 2;  // exact in float for both types
      CHECK_THAT(std::fabs(next) > std::fabs(v), bits);
      uint32_t even = bits % 2 ? bits + 1 : bits;
      CHECK_EQ(from_float<T>(static_cast<float>(middle)).bits, (even | sign));
      CHECK_EQ(from_float<T>(std::nextafter(static_cast<float>(middle), static_cast<float>(v))).bits, (bits | sign));
      CHECK_EQ(from_float<T>(std::nextafter(static_cast<float>(middle), static_cast<float>(next))).bits, ((bits + 1) | sign));
    }
}

void bf16_rounds_to_nearest_even() {
  check_rounding<Bf16>(0x7f7f);
  CHECK_EQ(from_float<Bf16>(3.4028235e38f).bits, 0x7f80);  // over the largest: infinity
  CHECK_EQ(from_float<Bf16>(INFINITY).bits, 0x7f80);
  CHECK_EQ(from_float<Bf16>(-INFINITY).bits, 0xff80);
  for (uint32_t bits : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu})
    CHECK(std::isnan(to_float(from_float<Bf16>(bits_float(bits)))));
}

void f16_rounds_to_nearest_even() {
  check_rounding<F16>(0x7bff);
  CHECK_EQ(value<F16>(0x7bff), 65504.0);
  CHECK_EQ(value<F16>(0x0001), 0x1p-24);
  CHECK_EQ(value<F16>(0x3c00), 1.0);
  CHECK_EQ(from_float<F16>(65519.996f).bits, 0x7bff);
  CHECK_EQ(from_float<F16>(65520.0f).bits, 0x7c00);
  CHECK_EQ(from_float<F16>(-1e10f).bits, 0xfc00);
  CHECK_EQ(from_float<F16>(-0.0f).bits, 0x8000);
  CHECK(std::isinf(to_float(F16{0x7c00})) && std::isnan(to_float(F16{0x7c01})));
  for (uint32_t bits : {0x7f800001u, 0xffffffffu}) CHECK(std::isnan(to_float(from_float<F16>(bits_float(bits)))));
}

}  // namespace
}  // namespace entwine::host

int main() {
  using namespace entwine::host;
  return check::run({{"bfloat16 rounds to nearest even", bf16_rounds_to_nearest_even},
                     {"float16 rounds to nearest even", f16_rounds_to_nearest_even}});
}
