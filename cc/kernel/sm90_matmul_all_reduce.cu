// GEMM + all-reduce on Hopper, operands of 16 or 8 bits, float32 accumulation: y = sum_q x_q @ w_q, on every rank.
//
// A reduce-scatter whose owners send each finished tile on to all peers (two-shot): the storer that writes an image of y also
// stores it, raw, into every peer's results, from where the peer's collectors copy it to y. Summed and rounded once, by one
// rank: the same to the bit on every rank. Roles, barriers, memory order and the progress argument: sm90/body.cuh,
// sm90/collector.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"
#include "kernel/sm90/pick.cuh"

namespace entwine::sm90 {
namespace {

// By name, for profiles.
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_all_reduce_bf16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_all_reduce_f16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_all_reduce_f8(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}

template <class C>
Kernel kernel_of(int* shared_bytes) {
  *shared_bytes = Shared<C>::kAllocated;
  if constexpr (C::kFloat8)
    return sm90_matmul_all_reduce_f8<C>;
  else if constexpr (C::kOperands == Operands::kF16)
    return sm90_matmul_all_reduce_f16<C>;
  else
    return sm90_matmul_all_reduce_bf16<C>;
}

}  // namespace

Kernel matmul_all_reduce_kernel(Variant const& variant, int* shared_bytes) {
  return pick<schedule::Op::kMatmulAllReduce>(variant, [&](auto config) { return kernel_of<decltype(config)>(shared_bytes); });
}

}  // namespace entwine::sm90
