// Host interface of the sm_90a kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernel/operands.h"
#include "schedule/activation.h"
#include "schedule/arena_layout.h"
#include "schedule/plan.h"
#include "schedule/products.h"
#include "schedule/stuck_report.h"
#include "schedule/trace_event.h"

namespace entwine::sm90 {

struct Call {
  schedule::Op op;
  schedule::Geometry geometry;
  schedule::Plan plan;
  Operands operands;
  bool transposed_w, float_out;  // the result is float32, else of 16-bit operands' type, bf16 of 8-bit ones
  bool transposed_x;             // not all-gather, 16-bit operands: each x is stored (batch, k, rows)
  schedule::Products products;
  // By product; all-gather has one x (and, gated, one y and one activation), the other ops one y, bias and activation.
  void const *x[schedule::kMaxProducts], *w[schedule::kMaxProducts];
  void* y[schedule::kMaxProducts];
  float const* bias[schedule::kMaxProducts];  // one number for each column; null: none
  schedule::Activation activation[schedule::kMaxProducts];
  float const* scale;             // 8-bit operands: of each product of an all-gather, else one, of their sum
  schedule::Gathering gathering;  // x of all-gather; what reduce-scatter gathers beside, if anything
  void const* z;                  // reduce-scatter: the own chunk of that
  void* gathered;                 // the whole of it; null if all-gather's isn't wanted
  schedule::ArenaLayout arena;
  uint8_t* const* arenas;  // every rank's, mapped here
  uint32_t rank;
  uint32_t multiprocessors;
  uint64_t timeout_ns;  // of any one wait for a peer; 0: none
  schedule::StuckReport* stuck;
  schedule::TraceEvent* trace;  // null: no notes. Else trace_shape().events() of them, zeroed, mapped here
};

// "" or why the kernels can't take this call: dtypes are checked by the caller.
std::string unsupported(Call const& call);

// Loads every kernel of this file set on the current device and sets their attributes: once a device, before anything spins.
cudaError_t load_kernels();

// Enqueues one kernel; nothing else happens on the device or the host.
cudaError_t launch(Call const& call, cudaStream_t stream);

// Notes of one traced launch: its CTAs, and how many events each of a CTA's writers has room for (what is beyond is dropped).
// None for kernels of small tiles or of operands other than bf16, which can't.
struct TraceShape {
  uint32_t ctas, capacity;
  uint32_t unit_bytes;  // of a push
  uint64_t events() const { return uint64_t(ctas) * schedule::kTraceWriters * capacity; }
};
TraceShape trace_shape(Call const& call);

// The same two for plans of the form kFewRows; called by those above.
cudaError_t load_few_rows_kernels();
cudaError_t launch_few_rows(Call const& call, cudaStream_t stream);

// One .cu file an op; picked by launch() and load_kernels().
struct Variant {
  uint32_t tile_m, tile_n;
  Operands operands;
  bool transposed_w, float_out, traced;
};
using Kernel = void (*)(struct Params);
Kernel all_gather_matmul_kernel(Variant const& variant, int* shared_bytes);
Kernel matmul_reduce_scatter_kernel(Variant const& variant, int* shared_bytes);
Kernel matmul_all_reduce_kernel(Variant const& variant, int* shared_bytes);
// All ops, with room for so many rows; of the variant, the tile doesn't matter.
using FewRowsKernel = void (*)(struct FewRowsParams);
FewRowsKernel few_rows_kernel(schedule::Op op, Variant const& variant, uint32_t rows, int* shared_bytes);

}  // namespace entwine::sm90
