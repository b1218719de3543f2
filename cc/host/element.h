// The element types that the host executor takes. Everything is computed in float; an element is rounded to nearest even once.
#pragma once

#include <cstdint>
#include <cstring>

namespace entwine::host {

// Of 8 bits are operands only: x is either, w is e4m3.
enum class Element : uint8_t { kBf16, kF16, kF32, kE4m3, kE5m2 };

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4m3 {  // float8_e4m3fn: no infinity
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

constexpr bool is_float8(Element e) { return e == Element::kE4m3 || e == Element::kE5m2; }
constexpr uint32_t element_bytes(Element e) { return e == Element::kF32 ? 4 : is_float8(e) ? 1 : 2; }

// What w is made of beside an x of these.
template <typename X>
struct Weights {
  using Element = X;
};
template <>
struct Weights<E5m2> {
  using Element = E4m3;
};

inline uint32_t float_bits(float v) {
  uint32_t b;
  std::memcpy(&b, &v, 4);
  return b;
}
inline float bits_float(uint32_t b) {
  float v;
  std::memcpy(&v, &b, 4);
  return v;
}

inline float to_float(float v) { return v; }
inline float to_float(Bf16 v) { return bits_float(uint32_t(v.bits) << 16); }
inline float to_float(F16 v) {
  uint32_t sign = uint32_t(v.bits & 0x8000) << 16, rest = v.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  if (rest >= 0x400) return bits_float(sign | ((rest << 13) + (112u << 23)));       // exponent bias 127 instead of 15
  return bits_float(sign | float_bits(float(rest) * 0x1p-24f));                     // subnormal
}

inline float to_float(E5m2 v) { return to_float(F16{uint16_t(v.bits << 8)}); }  // a float16 cut short
inline float to_float(E4m3 v) {
  uint32_t sign = uint32_t(v.bits & 0x80) << 24, rest = v.bits & 0x7f;
  if (rest == 0x7f) return bits_float(sign | 0x7fc00000);                  // NaN
  if (rest >= 8) return bits_float(sign | ((rest << 20) + (120u << 23)));  // exponent bias 127 instead of 7
  return bits_float(sign | float_bits(float(rest) * 0x1p-9f));             // subnormal
}

template <typename T>
T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline Bf16 from_float<Bf16>(float v) {
  uint32_t b = float_bits(v);
  if ((b & 0x7fffffff) > 0x7f800000) return {uint16_t(b >> 16 | 0x40)};  // rounding must not turn a NaN into infinity
  return {uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
template <>
inline F16 from_float<F16>(float v) {
  uint32_t b = float_bits(v), sign = b >> 16 & 0x8000;
  b &= 0x7fffffff;
  if (b > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (b >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // from 65520 on, the nearest is infinity
  // Below the normal range: 0.5f has the step of the subnormals, so the addition rounds to it.
  if (b < 0x38800000) return {uint16_t(sign | (float_bits(bits_float(b) + 0.5f) - float_bits(0.5f)))};
  return {uint16_t(sign | (b - (112u << 23) + 0xfff + (b >> 13 & 1)) >> 13)};
}

}  // namespace entwine::host
