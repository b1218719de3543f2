// All three ops for few rows on Hopper, operands of 16 or 8 bits, float32 accumulation: sm90/few_rows.cuh.
#include "kernel/sm90.h"
#include "kernel/sm90/few_rows.cuh"

namespace entwine::sm90 {
namespace {

using schedule::Op;

// By name, for profiles.
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_few_rows_bf16(__grid_constant__ const FewRowsParams params) {
  few_rows_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_few_rows_f16(__grid_constant__ const FewRowsParams params) {
  few_rows_matmul<C>(params);
}
template <class C>
__global__ void __launch_bounds__(kThreads, 1) sm90_few_rows_f8(__grid_constant__ const FewRowsParams params) {
  few_rows_matmul<C>(params);
}

template <Op kOp, uint32_t kRows, Operands kOperands, bool kTransposedW, bool kFloatOut>
FewRowsKernel kernel_of(int* shared_bytes) {
  using C = FewRowsConfig<kOp, kRows, kOperands, kTransposedW, kFloatOut>;
  *shared_bytes = C::kAllocated;
  if constexpr (C::kFloat8)
    return sm90_few_rows_f8<C>;
  else if constexpr (kOperands == Operands::kF16)
    return sm90_few_rows_f16<C>;
  else
    return sm90_few_rows_bf16<C>;
}

template <Op kOp, uint32_t kRows, Operands kOperands>
FewRowsKernel pick(Variant const& v, int* shared_bytes) {
  if (v.float_out)
    return v.transposed_w ? kernel_of<kOp, kRows, kOperands, true, true>(shared_bytes)
                          : kernel_of<kOp, kRows, kOperands, false, true>(shared_bytes);
  return v.transposed_w ? kernel_of<kOp, kRows, kOperands, true, false>(shared_bytes)
                        : kernel_of<kOp, kRows, kOperands, false, false>(shared_bytes);
}

template <Op kOp, uint32_t kRows>
FewRowsKernel pick(Variant const& v, int* shared_bytes) {
  if (is_float8(v.operands))
    return v.float_out ? kernel_of<kOp, kRows, Operands::kE4m3, true, true>(shared_bytes)
                       : kernel_of<kOp, kRows, Operands::kE4m3, true, false>(shared_bytes);
  return v.operands == Operands::kF16 ? pick<kOp, kRows, Operands::kF16>(v, shared_bytes)
                                      : pick<kOp, kRows, Operands::kBf16>(v, shared_bytes);
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
