// GEMM + reduce-scatter on Hopper, bf16 operands, float32 accumulation: y_r = chunk_r(sum_q x_q @ w_q).
//
// A tile of another rank's chunk is a partial sum: it goes to staging (the own one for pull, the owner's for push) and a signal
// to the owner. A tile of the own chunk adds the peers' partials to its accumulators in float32, in rank order, and writes y.
// Deterministic to the bit. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"

namespace entwine::sm90 {
namespace {

template <bool kTransposedW, typename Out, bool kTraced>
using ReduceScatterConfig = Config<schedule::Op::kMatmulReduceScatter, kTransposedW, Out, kTraced>;

template <bool kTransposedW, typename Out, bool kTraced>
__global__ void __launch_bounds__(kThreads, 1) sm90_matmul_reduce_scatter_bf16(__grid_constant__ const Params params) {
  collective_matmul<ReduceScatterConfig<kTransposedW, Out, kTraced>>(params);
}

template <bool kTransposedW, typename Out, bool kTraced>
Kernel pick(int* shared_bytes) {
  *shared_bytes = Shared<ReduceScatterConfig<kTransposedW, Out, kTraced>>::kAllocated;
  return sm90_matmul_reduce_scatter_bf16<kTransposedW, Out, kTraced>;
}

template <bool kTransposedW, typename Out>
Kernel pick(bool traced, int* shared_bytes) {
  return traced ? pick<kTransposedW, Out, true>(shared_bytes) : pick<kTransposedW, Out, false>(shared_bytes);
}

}  // namespace

Kernel matmul_reduce_scatter_kernel(Variant const& v, int* shared_bytes) {
  if (v.float_out) return v.transposed_w ? pick<true, float>(v.traced, shared_bytes) : pick<false, float>(v.traced, shared_bytes);
  return v.transposed_w ? pick<true, __nv_bfloat16>(v.traced, shared_bytes)
                        : pick<false, __nv_bfloat16>(v.traced, shared_bytes);
}

}  // namespace entwine::sm90
