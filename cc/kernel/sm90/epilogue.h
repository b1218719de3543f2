// What a launch hands the kernel for the epilogue: y = activation(sum + bias), in float32, rounded once.
#pragma once

#include <cstdint>

#include "schedule/activation.h"

namespace entwine::sm90 {

// How the activation is computed: epilogue.cuh.
enum class Curve : uint32_t { kNone, kRelu, kNormal, kLogistic };

struct Epilogue {
  float const* bias;  // one for each column of y; null: none
  Curve curve;
  // Logistic: Phi(-t) = 1 / (1 + 2^(t (linear + cubic t^2))), for t up to `limit`, where it is as good as zero.
  float limit, linear, cubic;
};

inline Epilogue epilogue_of(void const* bias, schedule::Activation activation) {
  constexpr float kLog2e = 1.44269504f, kTwoRootTwoOverPi = 1.59576912f;
  auto of = [&](Curve curve, float limit, float linear, float cubic) {
    return Epilogue{static_cast<float const*>(bias), curve, limit, linear, cubic};
  };
  switch (activation) {
    case schedule::Activation::kRelu:
      return of(Curve::kRelu, 0, 0, 0);
    case schedule::Activation::kGelu:
      return of(Curve::kNormal, 0, 0, 0);
    case schedule::Activation::kGeluTanh:  // both limits are where the power is about 2^58, whose square is a float32
      return of(Curve::kLogistic, 7.2f, kTwoRootTwoOverPi * kLog2e, kTwoRootTwoOverPi * kLog2e * 0.044715f);
    case schedule::Activation::kSilu:
      return of(Curve::kLogistic, 40.0f, kLog2e, 0);
    case schedule::Activation::kNone:
      break;
  }
  return of(Curve::kNone, 0, 0, 0);
}

}  // namespace entwine::sm90
