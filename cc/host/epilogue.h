// What comes between the sum of an element and its rounding: the bias and the activation, in float.
#pragma once

#include <cmath>

#include "schedule/activation.h"

namespace entwine::host {

inline float activated(float x, schedule::Activation activation) {
  switch (activation) {
    case schedule::Activation::kNone:
      return x;
    case schedule::Activation::kRelu:
      return x < 0 ? 0 : x;
    case schedule::Activation::kGelu:
      return 0.5f * x * std::erfc(-x * 0.707106781f);
    case schedule::Activation::kGeluTanh:
      return x / (1 + std::exp(-1.59576912f * (x + 0.044715f * x * x * x)));
    case schedule::Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

}  // namespace entwine::host
