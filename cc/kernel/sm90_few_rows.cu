// All three ops for few rows on Hopper, bf16 operands, float32 accumulation: sm90/few_rows.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/few_rows.cuh"

namespace entwine::sm90 {
namespace {

using schedule::Op;

template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_few_rows_bf16(__grid_constant__ const FewRowsParams params) {
  few_rows_matmul<C>(params);
}

template <Op kOp, uint32_t kRows, bool kTransposedW, typename Out>
FewRowsKernel kernel_of(int* shared_bytes) {
  using C = FewRowsConfig<kOp, kRows, kTransposedW, Out>;
  *shared_bytes = C::kAllocated;
  return sm90_few_rows_bf16<C>;
}

template <Op kOp, uint32_t kRows>
FewRowsKernel pick(Variant const& v, int* shared_bytes) {
  if (v.float_out)
    return v.transposed_w ? kernel_of<kOp, kRows, true, float>(shared_bytes)
                          : kernel_of<kOp, kRows, false, float>(shared_bytes);
  return v.transposed_w ? kernel_of<kOp, kRows, true, __nv_bfloat16>(shared_bytes)
                        : kernel_of<kOp, kRows, false, __nv_bfloat16>(shared_bytes);
}

template <Op kOp>
FewRowsKernel pick(Variant const& v, uint32_t rows, int* shared_bytes) {
  if (rows == 16) return pick<kOp, 16>(v, shared_bytes);
  return rows == 64 ? pick<kOp, 64>(v, shared_bytes) : pick<kOp, 128>(v, shared_bytes);
}

}  // namespace

FewRowsKernel few_rows_kernel(Op op, Variant const& variant, uint32_t rows, int* shared_bytes) {
  if (op == Op::kAllGatherMatmul) return pick<Op::kAllGatherMatmul>(variant, rows, shared_bytes);
  if (op == Op::kMatmulReduceScatter) return pick<Op::kMatmulReduceScatter>(variant, rows, shared_bytes);
  return pick<Op::kMatmulAllReduce>(variant, rows, shared_bytes);
}

}  // namespace entwine::sm90
