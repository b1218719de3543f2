// GEMM + reduce-scatter on Hopper, operands of 16 or 8 bits, float32 accumulation: y_r = chunk_r(sum_q x_q @ w_q).
//
// A tile of another rank's chunk is a partial sum: it goes to staging (the own one for pull, the owner's for push) and a signal
// to the owner. A tile of the own chunk adds the peers' partials to its accumulators in float32, in rank order, and writes y.
// Deterministic to the bit. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"
#include "kernel/sm90/pick.cuh"

namespace entwine::sm90 {
namespace {

// By name, for profiles.
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_reduce_scatter_bf16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_reduce_scatter_f16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_reduce_scatter_f8(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}

template <class C>
Kernel kernel_of(int* shared_bytes) {
  *shared_bytes = Shared<C>::kAllocated;
  if constexpr (C::kFloat8)
    return sm90_matmul_reduce_scatter_f8<C>;
  else if constexpr (C::kOperands == Operands::kF16)
    return sm90_matmul_reduce_scatter_f16<C>;
  else
    return sm90_matmul_reduce_scatter_bf16<C>;
}

}  // namespace

Kernel matmul_reduce_scatter_kernel(Variant const& variant, int* shared_bytes) {
  return pick<schedule::Op::kMatmulReduceScatter>(variant,
                                                  [&](auto config) { return kernel_of<decltype(config)>(shared_bytes); });
}

}  // namespace entwine::sm90
