#include "kernel/sm90.h"

#include "kernel/sm90/params.h"
#include "kernel/sm90/shape.h"
#include "kernel/sm90_launch.h"
#include "kernel/tensor_map.h"
#include "schedule/few_rows.h"

namespace entwine::sm90 {
namespace {

using schedule::Geometry;
using schedule::Op;

constexpr uint32_t kImageRows = kImageBytes / 128;

// x or y as (inner, row, chunk, batch): the rows of a batch are the chunks in rank order.
TensorView whole_view(void const* data, uint64_t inner, Geometry const& g, uint32_t element_bytes) {
  uint64_t row = inner * element_bytes, chunk = g.m_shard * row;
  return {data, element_bytes, 4, {inner, g.m_shard, g.ranks, g.batch}, {row, chunk, chunk * g.ranks}, {}};
}
// One or several chunks as (inner, row, batch, chunk).
TensorView chunk_view(void const* data, uint64_t inner, Geometry const& g, uint64_t chunks, uint32_t element_bytes) {
  uint64_t row = inner * element_bytes, batch = g.m_shard * row;
  return {data, element_bytes, 4, {inner, g.m_shard, g.batch, chunks}, {row, batch, batch * g.batch}, {}};
}

// x or y of an all-reduce as (inner, row, 0, 0).
TensorView matrix_view(void const* data, uint64_t inner, Geometry const& g, uint32_t element_bytes) {
  uint64_t row = inner * element_bytes, all = g.all_rows() * row;
  return {data, element_bytes, 4, {inner, g.all_rows(), 1, 1}, {row, all, all}, {}};
}

// x stored transposed, as (row, k, 0, batch): chunks are just rows.
TensorView turned_view(void const* data, uint64_t k, Geometry const& g, uint32_t element_bytes) {
  uint64_t pitch = uint64_t(g.all_rows()) * element_bytes, batch = k * pitch;
  return {data, element_bytes, 4, {g.all_rows(), k, 1, g.batch}, {pitch, batch, batch}, {}};
}

bool encode(TensorView view, uint32_t inner, uint32_t rows, CUtensorMap* map) {
  view.box[0] = inner;
  view.box[1] = rows;
  view.box[2] = view.box[3] = 1;
  return encode_tensor_map(view, map);
}

Gather gather_of(Call const& call) {
  if (!call.gathering.any()) return {};
  bool gather = call.op == Op::kAllGatherMatmul;
  Gather g{};
  g.shape = call.gathering;
  g.own = static_cast<uint8_t const*>(gather ? call.x[0] : call.z);
  g.whole = static_cast<uint8_t*>(call.gathered);
  g.pushers = !gather ? call.plan.copiers : call.plan.movers != 0 ? 0 : call.plan.pushers;
  g.copiers = call.plan.copiers;
  g.units_per_block = static_cast<uint32_t>(schedule::ceil_div64(g.shape.block_bytes(0), kUnitBytes));
  g.first_word = schedule::first_gathered_signal(call.op, call.geometry, schedule::kSm90Parts);
  g.staging_offset = schedule::gathered_offset(call.op, call.geometry, gather || !call.float_out ? 2 : 4);
  return g;
}

Kernel pick_kernel(Op op, Variant const& variant, int* shared_bytes) {
  if (op == Op::kAllGatherMatmul) return all_gather_matmul_kernel(variant, shared_bytes);
  if (op == Op::kMatmulReduceScatter) return matmul_reduce_scatter_kernel(variant, shared_bytes);
  return matmul_all_reduce_kernel(variant, shared_bytes);
}

// n and k of one product.
uint32_t columns(Call const& call, uint32_t i) { return schedule::columns(call.op, call.geometry, call.products, i); }
uint32_t contraction(Call const& call, uint32_t i) { return schedule::contraction(call.op, call.geometry, call.products, i); }

uint32_t clusters_of(Call const& call) {
  return schedule::smaller(call.multiprocessors / kCtas, call.geometry.tiles() + call.plan.movers);
}

}  // namespace

std::string unsupported(Call const& call) {
  Geometry const& g = call.geometry;
  uint64_t out = call.float_out ? 4 : 2, in = operand_bytes(call.operands);
  auto has = [&](schedule::TileShape tile) {
    return schedule::is_sm90_tile(tile, static_cast<uint32_t>(out), call.products.gated);
  };
  if (!has({g.tile_m, g.tile_n})) {
    std::string tiles;
    for (schedule::TileShape tile : schedule::kSm90Tiles)
      if (has(tile)) tiles += (tiles.empty() ? "" : ", ") + std::to_string(tile.m) + " x " + std::to_string(tile.n);
    return "config tile_m " + std::to_string(g.tile_m) + ", tile_n " + std::to_string(g.tile_n) + ": the sm_90 kernels of " +
           (call.products.gated ? "gated products" : schedule::op_name(call.op)) + (out == 4 ? " in float32" : "") +
           " have tiles of " + tiles + "; use one of these or leave both unset";
  }
  if (call.products.gated && is_float8(call.operands)) return "gated products have 16-bit operands: cast float8 ones";
  if (call.plan.form == schedule::Form::kFewRows && call.gathered != nullptr)
    return "config few_rows: these kernels give no gathered array; leave it unset";
  if (call.plan.form == schedule::Form::kFewRows && !schedule::are_few_rows(call.op, g))
    return "config few_rows: a call of more than " + std::to_string(schedule::kFewRowsMost) +
           " rows isn't one of few; leave it unset";
  if (is_float8(call.operands) && !call.transposed_w) return "8-bit operands: w must be stored transposed, (n, k)";
  if (call.plan.form == schedule::Form::kFewRows && call.products.count > 1)
    return "config few_rows: these kernels take one product; leave it unset";
  if (call.transposed_x && (call.op == Op::kAllGatherMatmul || is_float8(call.operands)))
    return "x stored transposed is for 16-bit operands, and for rows that needn't be gathered: pass it as (rows, k)";
  if (call.transposed_x && call.plan.form == schedule::Form::kFewRows)
    return "config few_rows: these kernels take x as (rows, k); leave it unset";
  if (std::string why = unaligned_chunks(call); !why.empty()) return why;
  for (uint32_t i = 0; i < call.products.count; ++i) {
    uint64_t n = columns(call, i), k = contraction(call, i);
    uint64_t of_x = call.transposed_x ? g.all_rows() : k, of_w = call.transposed_w ? k : n;
    if (of_x * in % 16 != 0) return unaligned_rows("x", of_x * in);
    if (of_w * in % 16 != 0) return unaligned_rows("w", of_w * in);
    if (n * out % 16 != 0) return unaligned_rows("the result", n * out);
    if (reinterpret_cast<uintptr_t>(call.bias[i]) % 16 != 0) return "bias doesn't begin at a multiple of 16 bytes: copy it";
  }
  if (call.gathering.row_bytes % 16 != 0) return unaligned_rows("the array gathered beside", call.gathering.row_bytes);
  if (g.chunk_rows() > kMaxRowBlocks || g.cols() > kMaxCols)
    return "a chunk of " + std::to_string(g.chunk_rows()) + " x " + std::to_string(g.cols()) + " tiles is past the limit of " +
           std::to_string(kMaxRowBlocks) + " x " + std::to_string(kMaxCols) + ": split the matmul or pass strategy=\"xla\"";
  return "";
}

cudaError_t load_kernels() {
  for (Op op : {Op::kAllGatherMatmul, Op::kMatmulReduceScatter, Op::kMatmulAllReduce})
    for (Operands operands : kAllOperands)
      for (bool transposed_w : {false, true})
        for (bool float_out : {false, true})
          for (bool traced : {false, true})
            for (schedule::TileShape tile : schedule::kSm90Tiles) {
              if (!schedule::is_sm90_tile(tile, float_out ? 4 : 2)) continue;
              int shared_bytes = 0;
              Variant variant{tile.m, tile.n, operands, transposed_w, float_out, traced};
              Kernel kernel = pick_kernel(op, variant, &shared_bytes);
              cudaError_t error = allow_shared(kernel, shared_bytes);
              if (error != cudaSuccess) return error;
            }
  return load_few_rows_kernels();
}

TraceShape trace_shape(Call const& call) {
  if (call.plan.form == schedule::Form::kFewRows || call.operands != Operands::kBf16) return {};
  if (call.geometry.tile_m != 256 || call.geometry.tile_n != 256) return {};
  // A storer notes five things a tile, a pusher one a unit, a collector one a part of a tile; clusters share tiles almost
  // evenly, pushers units less so.
  uint32_t clusters = clusters_of(call), multiply = clusters > call.plan.movers ? clusters - call.plan.movers : 1;
  uint32_t tiles = schedule::ceil_div(call.geometry.tiles(), multiply);
  return {kCtas * clusters, 256 + 16 * tiles, kUnitBytes};
}

namespace {

// The tensor maps of one product, and of what is gathered, which the first one has.
bool encode_maps(Call const& call, uint32_t i, Params& p) {
  Geometry const& g = call.geometry;
  bool gather = call.op == Op::kAllGatherMatmul;
  uint32_t out = call.float_out ? 4 : 2, in = operand_bytes(call.operands), block_k = kBlockBytes / in;
  uint32_t rows = g.tile_m / kCtas;  // of a CTA
  uint32_t image_cols = 128 / out;
  uint64_t n = columns(call, i), k = contraction(call, i);
  TensorView w = call.transposed_w ? TensorView{call.w[i], in, 2, {k, n}, {k * in}, {block_k, g.tile_n / 2}}
                                   : TensorView{call.w[i], 2, 2, {n, k}, {n * 2}, {64, kBlockK}};
  bool ok = encode_tensor_map(w, &p.w[i]);
  if (gather && i == 0) {
    ok = ok && encode(chunk_view(call.x[0], k, g, 1, in), block_k, rows, &p.x[0]);
    for (uint32_t parity = 0; parity < 2; ++parity)
      ok = ok && encode(chunk_view(call.arenas[call.rank] + call.arena.staging_offset(parity), k, g,
                                   schedule::larger(g.ranks - 1, 1), in),
                        block_k, rows, &p.gathered[parity]);
  }
  if (gather && i >= call.products.results()) return ok;
  if (gather) return ok && encode(whole_view(call.y[i], n, g, out), image_cols, kImageRows, &p.y[i]);
  bool replicate = call.op == Op::kMatmulAllReduce;
  if (call.transposed_x) {
    ok = ok && encode(turned_view(call.x[i], k, g, in), 64, block_k, &p.x[i]);
  } else {
    TensorView x = replicate ? matrix_view(call.x[i], k, g, in) : whole_view(call.x[i], k, g, in);
    ok = ok && encode(x, block_k, rows, &p.x[i]);
  }
  TensorView y = replicate ? matrix_view(call.y[0], n, g, out) : chunk_view(call.y[0], n, g, 1, out);
  return ok && (i != 0 || encode(y, image_cols, kImageRows, &p.y[0]));
}

}  // namespace

cudaError_t launch(Call const& call, cudaStream_t stream) {
  if (call.plan.form == schedule::Form::kFewRows) return launch_few_rows(call, stream);
  Geometry const& g = call.geometry;
  bool gather = call.op == Op::kAllGatherMatmul;
  Params p{};
  uint32_t block_k = kBlockBytes / operand_bytes(call.operands);
  p.begin = gather ? schedule::beginnings(call.products, g.n, g.tile_n) : schedule::beginnings(call.products, g.k, block_k);
  for (uint32_t i = 0; i < call.products.count; ++i) {
    if (!encode_maps(call, i, p)) return cudaErrorInvalidValue;
    p.n[i] = columns(call, i);
    p.epilogue[i] = epilogue_of(call.bias[i], call.activation[i]);
  }

  p.raster = {g.chunk_rows(), g.cols(), call.plan.raster};
  p.ranks = g.ranks;
  p.row_blocks = g.row_blocks();
  p.k_blocks = gather ? schedule::ceil_div(g.k, block_k) : p.begin.at[call.products.count];
  p.clusters = clusters_of(call);
  p.movers = {call.plan.movers};
  p.last = p.movers.last_claim(p.ranks * p.raster.size(), p.clusters);
  p.lead = call.plan.lead;
  p.pull = call.plan.transport == schedule::Transport::kPull || call.plan.movers != 0;
  p.outgoing_offset = schedule::outgoing_offset(call.op, g, call.float_out ? 4 : 2, call.gathering);
  p.pushers = call.plan.pushers;
  p.rows = g.all_rows();
  p.results_offset = schedule::results_offset(g, call.float_out ? 4 : 2);
  p.m_shard = g.m_shard;
  p.transposed_x = call.transposed_x;
  p.scale = call.scale;
  p.gated = call.products.gated;
  p.gather = gather_of(call);
  set_arena(call, p);
  p.arrivals_offset = call.arena.arrivals_offset();
  if (call.trace != nullptr) {
    p.trace = call.trace;
    p.trace_capacity = trace_shape(call).capacity;
  }

  int shared_bytes = 0;
  Variant variant{g.tile_m, g.tile_n, call.operands, call.transposed_w, call.float_out, call.trace != nullptr};
  Kernel kernel = pick_kernel(call.op, variant, &shared_bytes);
  return launch_clusters(kernel, p, kCtas, shared_bytes, stream);
}

}  // namespace entwine::sm90
