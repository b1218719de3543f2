// all-gather + GEMM on Hopper, bf16 operands, float32 accumulation: y = concat_r(x_r) @ w.
//
// The own chunk is read from x at once; a tile of another chunk first waits for its row block, which that chunk's owner pushes
// over NVLink from the idle warps of its own GEMM. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"

namespace entwine::sm90 {
namespace {

template <bool kTransposedW, typename Out>
using AllGatherConfig = Config<schedule::Op::kAllGatherMatmul, kTransposedW, Out>;

template <bool kTransposedW, typename Out>
__global__ void __launch_bounds__(kThreads, 1) sm90_all_gather_matmul_bf16(__grid_constant__ const Params params) {
  collective_matmul<AllGatherConfig<kTransposedW, Out>>(params);
}

template <bool kTransposedW, typename Out>
Kernel pick(int* shared_bytes) {
  *shared_bytes = Shared<AllGatherConfig<kTransposedW, Out>>::kAllocated;
  return sm90_all_gather_matmul_bf16<kTransposedW, Out>;
}

}  // namespace

Kernel all_gather_matmul_kernel(bool transposed_w, bool float_out, int* shared_bytes) {
  if (float_out) return transposed_w ? pick<true, float>(shared_bytes) : pick<false, float>(shared_bytes);
  return transposed_w ? pick<true, __nv_bfloat16>(shared_bytes) : pick<false, __nv_bfloat16>(shared_bytes);
}

}  // namespace entwine::sm90
