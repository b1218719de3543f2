// The epilogue's arithmetic, without a function call, and the bias of a consumer's columns. Which activation it is, all threads
// of a launch agree on.
//
// gelu and silu are x Phi(x) with Phi(-t) = 1 - Phi(t), hence max(x, 0) - t Phi(-t), t = |x|: no cancellation on either side,
// and what is needed is the tail Phi(-t) of t >= 0. The special function units give a power or a reciprocal in the time of
// eight other instructions, so they are what counts: one power for the normal distribution, whose tail's logarithm is fitted by
// a polynomial (gelu's error is 3e-7, or 2e-5 of the value down to x = -4); for the logistic one a power and, for two elements
// at once, a reciprocal.
#pragma once

#include "kernel/sm90/params.h"

namespace entwine::sm90 {

namespace epilogue {

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A NaN stays one.
__device__ __forceinline__ float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float normal(float x) {
  float t = fminf(fabsf(x), 10.0f), log2 = 3.51984971e-5f;
  log2 = fmaf(log2, t, -7.82589449e-4f);
  log2 = fmaf(log2, t, 8.10047555e-3f);
  log2 = fmaf(log2, t, -5.33891527e-2f);
  log2 = fmaf(log2, t, -0.458843162f);
  log2 = fmaf(log2, t, -1.15115558f);
  log2 = fmaf(log2, t, -1.0f);
  return fmaf(-t, power_of_2(log2), relu(x));
}

__device__ __forceinline__ void logistic(Epilogue const& e, float& a, float& b) {
  float s = fminf(fabsf(a), e.limit), t = fminf(fabsf(b), e.limit);
  float u = 1.0f + power_of_2(s * fmaf(e.cubic, s * s, e.linear)), v = 1.0f + power_of_2(t * fmaf(e.cubic, t * t, e.linear));
  float inverse = reciprocal(u * v);
  a = fmaf(-s, inverse * v, relu(a));
  b = fmaf(-t, inverse * u, relu(b));
}

}  // namespace epilogue

// kCount values in place, an even number.
template <int kCount>
__device__ __forceinline__ void activate(Epilogue const& e, float* values) {
  if (e.curve == Curve::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = epilogue::relu(values[i]);
  }
  if (e.curve == Curve::kNormal) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = epilogue::normal(values[i]);
  }
  if (e.curve == Curve::kLogistic) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) epilogue::logistic(e, values[i], values[i + 1]);
  }
}

// A warp's bias for the columns of its part of a tile. Loaded before the matmul, so that nobody waits for memory after it: each
// lane keeps a share, and all get all by shuffles. Lanes 4 i + c, of all i, hold accumulators of the same columns.
template <class C>
class ColumnBias {
 public:
  // `column`: the part's first, of n.
  __device__ __forceinline__ void load(Epilogue const& e, uint32_t column, uint32_t n, uint32_t lane) {
    if (e.bias != nullptr) load<false>(e.bias, column, n, lane);
  }
  // Of a gated tile: lanes of the first half have the gate's columns, the others the same ones of up.
  __device__ __forceinline__ void load(Epilogue const& gate, Epilogue const& up, uint32_t column, uint32_t n, uint32_t lane) {
    if (gate.bias == nullptr && up.bias == nullptr) return;
    bool second = lane >= 16;
    load<true>(second ? up.bias : gate.bias, column - (second ? C::kConsumerN / 2 : 0), n, lane);
  }

  // To accumulators of kGroups groups of eight columns, from group kFirst on, if there is a bias.
  template <int kFirst, int kGroups>
  __device__ __forceinline__ void add(float* values, uint32_t lane) const {
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      int group = kFirst + j;
      uint32_t holder = group / kPairs * 4 + lane % 4;
      float first = __shfl_sync(~0u, first_[group % kPairs], holder),
            second = __shfl_sync(~0u, second_[group % kPairs], holder);
      values[j * 4] += first;
      values[j * 4 + 1] += second;
      values[j * 4 + 2] += first;
      values[j * 4 + 3] += second;
    }
  }

 private:
  template <bool kMayLack>
  __device__ __forceinline__ void load(float const* bias, uint32_t column, uint32_t n, uint32_t lane) {
    column += lane / 4 * (kPairs * 8) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      first_[i] = second_[i] = 0;
      if (column + i * 8 < n && !(kMayLack && bias == nullptr))  // n is even
        asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(first_[i]), "=f"(second_[i]) : "l"(bias + column + i * 8));
    }
  }

  static constexpr int kPairs = (C::kConsumerN + 63) / 64;
  float first_[kPairs], second_[kPairs];
};

}  // namespace entwine::sm90
