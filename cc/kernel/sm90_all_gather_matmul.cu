// all-gather + GEMM on Hopper, bf16 operands, float32 accumulation: y = concat_r(x_r) @ w.
//
// The own chunk is read from x at once; a tile of another chunk first waits for its row block, which that chunk's owner pushes
// over NVLink from the idle warps of its own GEMM. Roles, barriers, memory order and the progress argument: sm90/body.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/body.cuh"

namespace entwine::sm90 {
namespace {

template <bool kTransposedW, typename Out, bool kTraced>
using AllGatherConfig = Config<schedule::Op::kAllGatherMatmul, kTransposedW, Out, kTraced>;

template <bool kTransposedW, typename Out, bool kTraced>
__global__ void __launch_bounds__(kThreads, 1) sm90_all_gather_matmul_bf16(__grid_constant__ const Params params) {
  collective_matmul<AllGatherConfig<kTransposedW, Out, kTraced>>(params);
}

template <bool kTransposedW, typename Out, bool kTraced>
Kernel pick(int* shared_bytes) {
  *shared_bytes = Shared<AllGatherConfig<kTransposedW, Out, kTraced>>::kAllocated;
  return sm90_all_gather_matmul_bf16<kTransposedW, Out, kTraced>;
}

template <bool kTransposedW, typename Out>
Kernel pick(bool traced, int* shared_bytes) {
  return traced ? pick<kTransposedW, Out, true>(shared_bytes) : pick<kTransposedW, Out, false>(shared_bytes);
}

}  // namespace

Kernel all_gather_matmul_kernel(Variant const& v, int* shared_bytes) {
  if (v.float_out) return v.transposed_w ? pick<true, float>(v.traced, shared_bytes) : pick<false, float>(v.traced, shared_bytes);
  return v.transposed_w ? pick<true, __nv_bfloat16>(v.traced, shared_bytes)
                        : pick<false, __nv_bfloat16>(v.traced, shared_bytes);
}

}  // namespace entwine::sm90
