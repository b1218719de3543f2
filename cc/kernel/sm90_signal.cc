#include "kernel/signal.h"
#include "kernel/sm90/shape.h"
#include "kernel/sm90/signal_params.h"
#include "kernel/sm90_launch.h"
#include "kernel/tensor_map.h"

namespace entwine::sm90 {
namespace {

using schedule::Geometry;
using schedule::Op;

constexpr uint32_t kElementBytes = 2, kImageRows = kImageBytes / 128;

bool encode(void const* data, uint64_t inner, uint64_t rows, uint64_t third, uint64_t fourth, uint64_t third_rows,
            uint64_t fourth_rows, uint32_t box_rows, CUtensorMap* map) {
  uint64_t row = inner * kElementBytes;
  TensorView view{data,
                  kElementBytes,
                  4,
                  {inner, rows, third, fourth},
                  {row, third_rows * row, fourth_rows * row},
                  {128 / kElementBytes, box_rows, 1, 1}};
  return encode_tensor_map(view, map);
}

// Which rows a launch multiplies, and where its x is.
struct Rows {
  void const* x;
  uint32_t chunks;      // in x
  uint32_t rank;        // whose chunk alone x is, or kNoRank
  uint32_t first, end;  // row blocks of each chunk
  uint32_t first_owner, owners;
  uint32_t claims;  // this launch's number
};

cudaError_t launch(SignalCall const& call, Rows const& rows, uint32_t clusters, cudaStream_t stream) {
  Geometry const& g = call.geometry;
  bool gather = call.op == Op::kAllGatherMatmul;
  SignalParams params{};
  Params& p = params.tiles;
  // x as (k, row, batch, chunk), or stored transposed (row, k, 0, batch): the rows of a batch are the chunks in rank order.
  uint64_t batch_rows = uint64_t(g.m_shard) * rows.chunks;
  CUtensorMap* x = rows.rank == kNoRank ? &p.gathered[0] : &p.x[0];
  bool ok = call.transposed_x ? encode(call.x, batch_rows, g.k, 1, g.batch, g.k, g.k, kBlockK, x)
                              : encode(rows.x, g.k, g.m_shard, g.batch, rows.chunks, batch_rows,
                                       rows.chunks == 1 ? batch_rows * g.batch : g.m_shard, g.tile_m / kCtas, x);
  TensorView w = call.transposed_w
                     ? TensorView{call.w, kElementBytes, 2, {g.k, g.n}, {uint64_t(g.k) * 2}, {kBlockK, g.tile_n / 2}}
                     : TensorView{call.w, kElementBytes, 2, {g.n, g.k}, {uint64_t(g.n) * 2}, {64, kBlockK}};
  ok = ok && encode_tensor_map(w, &p.w[0]);
  // y as (n, row, chunk, batch).
  if (gather)
    ok = ok && encode(call.y, g.n, g.m_shard, g.ranks, g.batch, g.m_shard, uint64_t(g.m_shard) * g.ranks, kImageRows, &p.y[0]);
  if (!ok) return cudaErrorInvalidValue;

  p.begin = schedule::beginnings({}, g.n, g.tile_n);
  p.raster = {rows.end - rows.first, g.cols(), schedule::smaller(call.raster, rows.end - rows.first)};
  p.ranks = g.ranks;
  p.rank = rows.rank;
  p.row_blocks = g.row_blocks();
  p.k_blocks = schedule::ceil_div(g.k, kBlockK);
  p.m_shard = g.m_shard;
  p.transposed_x = call.transposed_x;
  p.n[0] = g.n;
  p.epilogue[0] = gather ? epilogue_of(call.bias, call.activation) : epilogue_of(nullptr, schedule::Activation::kNone);
  params.groups = call.groups;
  params.scratch = gather ? nullptr : call.tiles();
  params.claims = call.counters() + schedule::kClaimWord + rows.claims;
  params.finished = call.finished(0);
  params.count = rows.owners * p.raster.size();
  params.owners = rows.owners;
  params.first_owner = rows.first_owner;
  params.first_row = rows.first;
  params.clusters = p.clusters = schedule::larger(schedule::smaller(clusters, params.count), 1);
  int shared_bytes = 0;
  if (call.trace != nullptr) {
    SignalTraceShape notes = signal_trace_shape(call);
    p.trace = call.trace + uint64_t(rows.claims) * notes.ctas * schedule::kTraceWriters * notes.capacity;
    p.trace_capacity = notes.capacity;
  }
  SignalKernel kernel = signal_kernel({g.tile_n, call.operands, call.transposed_w, call.trace != nullptr}, &shared_bytes);
  return launch_clusters(kernel, params, kCtas, shared_bytes, stream);
}

}  // namespace

std::string unsupported(SignalCall const& call) {
  Geometry const& g = call.geometry;
  if (!schedule::is_signal_tile(g.tile_m, g.tile_n))
    return "config tile_m " + std::to_string(g.tile_m) + ", tile_n " + std::to_string(g.tile_n) +
           ": strategy \"signal\" has tiles of 256 x 256 and 256 x 128; use one of these or leave both unset";
  if (is_float8(call.operands)) return "8-bit operands: pass strategy=\"fused\"";
  if (call.transposed_x && call.op == Op::kAllGatherMatmul)
    return "x stored transposed is for rows that needn't be gathered: pass it as (rows, k)";
  if (std::string why = unaligned_chunks(call); !why.empty()) return why;
  uint64_t x_pitch = uint64_t(call.transposed_x ? g.all_rows() : g.k) * 2;
  if (x_pitch % 16 != 0) return unaligned_rows("x", x_pitch);
  if (call.transposed_w && g.k * 2 % 16 != 0) return unaligned_rows("w", uint64_t(g.k) * 2);
  if (g.n * 2 % 16 != 0) return unaligned_rows("the result", uint64_t(g.n) * 2);
  if (reinterpret_cast<uintptr_t>(call.bias) % 16 != 0) return "bias doesn't begin at a multiple of 16 bytes: copy it";
  if (g.chunk_rows() > kMaxRowBlocks || g.cols() > kMaxCols)
    return "a chunk of " + std::to_string(g.chunk_rows()) + " x " + std::to_string(g.cols()) + " tiles is past the limit of " +
           std::to_string(kMaxRowBlocks) + " x " + std::to_string(kMaxCols) + ": split the matmul or pass strategy=\"xla\"";
  return "";
}

cudaError_t load_signal_kernels() {
  auto load = [](auto* kernel) {
    cudaFuncAttributes attributes;  // asking for them loads it
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<void const*>(kernel));
  };
  for (Operands operands : {Operands::kBf16, Operands::kF16}) {
    for (bool transposed_w : {false, true})
      for (bool traced : {false, true})
        for (schedule::TileShape tile : schedule::kSignalTiles) {
          int shared_bytes = 0;
          SignalKernel kernel = signal_kernel({tile.n, operands, transposed_w, traced}, &shared_bytes);
          cudaError_t error = allow_shared(kernel, shared_bytes);
          if (error != cudaSuccess) return error;
        }
    if (cudaError_t error = load(finish_kernel(operands)); error != cudaSuccess) return error;
  }
  cudaError_t error = load(await_kernel());
  return error == cudaSuccess ? load(clock_kernel()) : error;
}

SignalTraceShape signal_trace_shape(SignalCall const& call) {
  if (call.operands != Operands::kBf16 || call.geometry.tile_n != 256) return {0, 0, 0};
  // A storer notes three things a tile; clusters share tiles almost evenly.
  uint32_t launches = call.op == Op::kAllGatherMatmul ? 1 + call.groups.count : 1;
  uint32_t clusters = call.trace_clusters;
  return {launches, kCtas * clusters, 64 + 8 * schedule::ceil_div(call.geometry.tiles(), clusters)};
}

cudaError_t launch_clock(uint64_t* ns, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, clock_kernel(), ns);
}

cudaError_t launch_sums(SignalCall const& call, uint32_t clusters, cudaStream_t stream) {
  Geometry const& g = call.geometry;
  return launch(call, {call.x, g.ranks, kNoRank, 0, g.chunk_rows(), 0, g.ranks, 0}, clusters, stream);
}

cudaError_t launch_own_rows(SignalCall const& call, uint32_t clusters, cudaStream_t stream) {
  return launch(call, {call.x, 1, call.rank, 0, call.geometry.chunk_rows(), call.rank, 1, 0}, clusters, stream);
}

cudaError_t launch_group_rows(SignalCall const& call, uint32_t group, uint32_t clusters, cudaStream_t stream) {
  Geometry const& g = call.geometry;
  schedule::Groups const& groups = call.groups;
  Rows rows{call.whole,  g.ranks,  kNoRank, groups.begin(group), groups.ends[group], (call.rank + 1) % g.ranks,
            g.ranks - 1, 1 + group};
  return launch(call, rows, clusters, stream);
}

cudaError_t launch_finish(SignalCall const& call, uint32_t first, uint32_t end, uint32_t multiprocessors, cudaStream_t stream) {
  Geometry const& g = call.geometry;
  FinishParams p{};
  p.groups = call.groups;
  p.raster = {g.chunk_rows(), g.cols(), schedule::smaller(call.raster, g.chunk_rows())};
  p.scratch = call.tiles();
  p.y = call.y;
  p.landed = call.landed;
  p.landed_bytes = schedule::partials_bytes(g, kElementBytes);
  p.ranks = call.ranks;
  p.rank = call.rank;
  p.first = call.groups.begin(first);
  p.end = call.groups.ends[end - 1];
  p.owners = g.ranks;
  p.owner = call.owner();
  p.tile_m = g.tile_m;
  p.tile_n = g.tile_n;
  p.row_blocks = g.row_blocks();
  p.m_shard = g.m_shard;
  p.n = g.n;
  p.epilogue = epilogue_of(call.bias, call.activation);
  uint32_t units = (p.end - p.first) * schedule::kSm90Parts;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(schedule::smaller(units, multiprocessors * 8));
  config.blockDim = dim3(kFinishThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, finish_kernel(call.operands), p);
}

cudaError_t launch_await(SignalCall const& call, AwaitCall const& await, uint32_t first, uint32_t end, cudaStream_t stream) {
  AwaitParams p{await.words, await.words_per_source,         call.ranks,  call.rank,        first,
                end,         static_cast<uint32_t>(call.op), await.epoch, await.timeout_ns, await.stuck};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(call.ranks * schedule::kMaxGroups);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, await_kernel(), p);
}

}  // namespace entwine::sm90
