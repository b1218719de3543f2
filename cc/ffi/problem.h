// What both platforms' handlers decode and check before any work: the attributes of a call and the shapes of its buffers.
#pragma once

#include <cstdint>

#include "schedule/plan.h"
#include "xla/ffi/api/ffi.h"

namespace entwine {

// Every attribute of all custom calls, by the names that entwine_jax/_lowering.py writes.
struct CallAttributes {
  xla::ffi::Span<const int64_t> groups;  // logical device ids, [groups][team_size], of every team along the axis
  int64_t team_size;
  int64_t transpose_w;  // w is stored (n, k)
  // The plan; see schedule/plan.h.
  int64_t tile_m, tile_n, raster, lead, transport, pushers, few_rows;
  // Bound on any one wait, 0 for none.
  int64_t timeout_ms;
  // Host executor only: workers a rank; a random stall of up to stall_us before each claim and signal.
  int64_t workers, stall_us, stall_seed;
};

struct Problem {
  schedule::Op op;
  schedule::Geometry geometry;
  schedule::Plan plan;
  bool transpose_w;
  xla::ffi::DataType in, out;  // of x and w; of y
};

using schedule::op_name;

// x (batch, rows, k), w (k, n) or (n, k), y (batch, rows', n). An error names the op, the argument, both values.
xla::ffi::ErrorOr<Problem> decode_problem(schedule::Op op, schedule::Target target, CallAttributes const& attributes,
                                          xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer w, xla::ffi::AnyBuffer y);

}  // namespace entwine

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(entwine::CallAttributes, xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
                                      xla::ffi::StructMember<int64_t>("team_size"),
                                      xla::ffi::StructMember<int64_t>("transpose_w"), xla::ffi::StructMember<int64_t>("tile_m"),
                                      xla::ffi::StructMember<int64_t>("tile_n"), xla::ffi::StructMember<int64_t>("raster"),
                                      xla::ffi::StructMember<int64_t>("lead"), xla::ffi::StructMember<int64_t>("transport"),
                                      xla::ffi::StructMember<int64_t>("pushers"), xla::ffi::StructMember<int64_t>("few_rows"),
                                      xla::ffi::StructMember<int64_t>("timeout_ms"), xla::ffi::StructMember<int64_t>("workers"),
                                      xla::ffi::StructMember<int64_t>("stall_us"),
                                      xla::ffi::StructMember<int64_t>("stall_seed"));
