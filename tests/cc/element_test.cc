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

// A sign, `exponent_bits` and `fraction_bits`, as IEEE 754 reads them.
double ieee(uint32_t bits, uint32_t exponent_bits, uint32_t fraction_bits) {
  uint32_t fraction = bits & ((1u << fraction_bits) - 1), exponent = bits >> fraction_bits & ((1u << exponent_bits) - 1);
  int bias = (1 << (exponent_bits - 1)) - 1, power = (exponent == 0 ? 1 : static_cast<int>(exponent)) - bias;
  double value = (fraction * std::ldexp(1.0, -static_cast<int>(fraction_bits)) + (exponent != 0)) * std::ldexp(1.0, power);
  return bits >> 7 ? -value : value;
}

void float8_is_read_exactly() {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    float e4m3 = to_float(E4m3{static_cast<uint8_t>(bits)}), e5m2 = to_float(E5m2{static_cast<uint8_t>(bits)});
    if ((bits & 0x7f) == 0x7f)
      CHECK_THAT(std::isnan(e4m3), bits);
    else
      CHECK_THAT(e4m3 == ieee(bits, 4, 3) && std::signbit(e4m3) == (bits >= 0x80), bits);
    if ((bits & 0x7f) > 0x7c)
      CHECK_THAT(std::isnan(e5m2), bits);
    else if ((bits & 0x7f) == 0x7c)
      CHECK_THAT(std::isinf(e5m2) && std::signbit(e5m2) == (bits >= 0x80), bits);
    else
      CHECK_THAT(e5m2 == ieee(bits, 5, 2) && std::signbit(e5m2) == (bits >= 0x80), bits);
  }
  CHECK_EQ(to_float(E4m3{0x7e}), 448.0f);
  CHECK_EQ(to_float(E5m2{0x7b}), 57344.0f);
}

}  // namespace
}  // namespace entwine::host

int main() {
  using namespace entwine::host;
  return check::run({{"bfloat16 rounds to nearest even", bf16_rounds_to_nearest_even},
                     {"float16 rounds to nearest even", f16_rounds_to_nearest_even},
                     {"float8 is read exactly", float8_is_read_exactly}});
}
