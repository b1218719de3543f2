// GEMM + reduce-scatter on Hopper, bf16 operands, float32 accumulation: y_r = chunk_r(sum_q x_q @ w_q).
//
// A tile of another rank's chunk is a partial sum: it goes to staging (the own one for pull, the owner's for push) and a signal
// to the owner. A tile of the own chunk adds the peers' partials to its accumulators in float32, in rank order, and writes y.
// Deterministic to the bit. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"

namespace entwine::sm90 {
namespace {

template <bool kTransposedW, typename Out>
using ReduceScatterConfig = Config<schedule::Op::kMatmulReduceScatter, kTransposedW, Out>;

template <bool kTransposedW, typename Out>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_reduce_scatter_bf16(__grid_constant__ const Params params) {
  collective_matmul<ReduceScatterConfig<kTransposedW, Out>>(params);
}

template <bool kTransposedW, typename Out>
Kernel pick(int* shared_bytes) {
  *shared_bytes = Shared<ReduceScatterConfig<kTransposedW, Out>>::kAllocated;
  return sm90_matmul_reduce_scatter_bf16<kTransposedW, Out>;
}

}  // namespace

Kernel matmul_reduce_scatter_kernel(bool transposed_w, bool float_out, int* shared_bytes) {
  if (float_out) return transposed_w ? pick<true, float>(shared_bytes) : pick<false, float>(shared_bytes);
  return transposed_w ? pick<true, __nv_bfloat16>(shared_bytes) : pick<false, __nv_bfloat16>(shared_bytes);
}

}  // namespace entwine::sm90
