// all-gather + GEMM on Hopper, operands of 16 or 8 bits, float32 accumulation: y = concat_r(x_r) @ w.
//
// The own chunk is read from x at once; a tile of another chunk first waits for its row block, which that chunk's owner pushes
// over NVLink from the idle warps of its own GEMM. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"
#include "kernel/sm90/pick.cuh"

namespace entwine::sm90 {
namespace {

// By name, for profiles.
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_all_gather_matmul_bf16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_all_gather_matmul_f16(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_all_gather_matmul_f8(__grid_constant__ const Params params) {
  collective_matmul<C>(params);
}

template <class C>
Kernel kernel_of(int* shared_bytes) {
  *shared_bytes = Shared<C>::kAllocated;
  if constexpr (C::kFloat8)
    return sm90_all_gather_matmul_f8<C>;
  else if constexpr (C::kOperands == Operands::kF16)
    return sm90_all_gather_matmul_f16<C>;
  else
    return sm90_all_gather_matmul_bf16<C>;
}

}  // namespace

Kernel all_gather_matmul_kernel(Variant const& variant, int* shared_bytes) {
  return pick<schedule::Op::kAllGatherMatmul>(variant, [&](auto config) { return kernel_of<decltype(config)>(shared_bytes); });
}

}  // namespace entwine::sm90
