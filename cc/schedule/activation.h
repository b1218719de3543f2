// What becomes of each element of y last, after its sum is whole and the bias added.
#pragma once

#include <cstdint>

namespace entwine::schedule {

// In the order of ACTIVATIONS in entwine_jax/_config.py.
enum class Activation : uint32_t {
  kNone,
  kRelu,
  kGelu,      // x Phi(x), Phi the normal distribution
  kGeluTanh,  // the same with Phi(x) = 1 / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
  kSilu,      // x / (1 + exp(-x))
};
constexpr uint32_t kActivations = 5;

}  // namespace entwine::schedule
