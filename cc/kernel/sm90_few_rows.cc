// Launches the kernels for few rows.
#include "kernel/sm90.h"
#include "kernel/sm90/few_rows_params.h"
#include "kernel/sm90/few_rows_stages.h"
#include "kernel/sm90/shape.h"
#include "kernel/sm90_launch.h"
#include "kernel/tensor_map.h"

namespace entwine::sm90 {

using schedule::Geometry;
using schedule::Op;

cudaError_t load_few_rows_kernels() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (Operands operands : kAllOperands)
      for (bool transposed_w : {false, true})
        for (bool float_out : {false, true})
          for (uint32_t rows : schedule::kFewRowsRoom) {
            int shared_bytes = 0;
            FewRowsKernel kernel = few_rows_kernel(op, {0, 0, operands, transposed_w, float_out, false}, rows, &shared_bytes);
            cudaError_t error = allow_shared(kernel, shared_bytes);
            if (error != cudaSuccess) return error;
          }
  return cudaSuccess;
}

cudaError_t launch_few_rows(Call const& call, cudaStream_t stream) {
  Geometry const& g = call.geometry;
  FewRowsParams p{};
  p.shape = schedule::few_rows(call.op, g);

  uint32_t in = operand_bytes(call.operands), block_k = kBlockBytes / in;
  uint64_t row = g.k * uint64_t{in};
  bool ok = true;
  for (uint32_t parity = 0; parity < 2; ++parity) {
    void const* x = call.op == Op::kAllGatherMatmul ? call.arenas[call.rank] + call.arena.staging_offset(parity) : call.x[0];
    ok = ok && encode_tensor_map({x, in, 2, {g.k, p.shape.rows}, {row}, {block_k, p.shape.room}}, &p.x[parity]);
  }
  TensorView w = call.transposed_w ? TensorView{call.w[0], in, 2, {g.k, g.n}, {row}, {block_k, schedule::kFewRowsTileN}}
                                   : TensorView{call.w[0], 2, 2, {g.n, g.k}, {g.n * uint64_t{2}}, {64, kBlockK}};
  ok = ok && encode_tensor_map(w, &p.w);
  if (!ok) return cudaErrorInvalidValue;

  p.k_blocks = schedule::ceil_div(g.k, block_k);
  p.slice_blocks = schedule::ceil_div(p.k_blocks, p.shape.slices);
  bool resident = p.shape.packets && call.op == Op::kAllGatherMatmul;
  p.stages = few_rows_stages(p.shape.room, p.shape.slices, resident ? p.slice_blocks : 0);
  p.clusters = schedule::smaller(schedule::larger(call.multiprocessors / p.shape.slices, 1), p.shape.tiles);
  p.x_data = static_cast<uint8_t const*>(call.x[0]);
  p.y = static_cast<uint8_t*>(call.y[0]);
  p.epilogue = epilogue_of(call.bias[0], call.activation[0]);
  p.scale = call.scale;
  p.e5m2 = call.operands == Operands::kE5m2;
  set_arena(call, p);
  p.packets_offset = call.arena.packets_offset();
  p.packets_half = call.arena.packets_half;

  int shared_bytes = 0;
  Variant variant{0, 0, call.operands, call.transposed_w, call.float_out, false};
  FewRowsKernel kernel = few_rows_kernel(call.op, variant, p.shape.room, &shared_bytes);
  return launch_clusters(kernel, p, p.shape.slices, shared_bytes, stream);
}

}  // namespace entwine::sm90
