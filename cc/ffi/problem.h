// What both platforms' handlers decode and check before any work: the attributes of a call and the shapes of its buffers.
#pragma once

#include <cstdint>
#include <optional>

#include "schedule/activation.h"
#include "schedule/gathering.h"
#include "schedule/plan.h"
#include "schedule/products.h"
#include "xla/ffi/api/ffi.h"

namespace entwine {

// Every attribute of all custom calls, by the names that entwine_jax/_lowering.py writes.
struct CallAttributes {
  xla::ffi::Span<const int64_t> groups;  // logical device ids, [groups][team_size], of every team along the axis
  int64_t team_size;
  int64_t transpose_w;  // w is stored (n, k)
  int64_t transpose_x;  // x is stored (batch, k, rows); not all-gather's
  int64_t products;     // 1 to kMaxProducts: schedule/products.h
  int64_t gated;        // all-gather's two products have one y: schedule/products.h
  int64_t biased;       // bit i: there is a bias of product i among the optional operands
  int64_t activation;   // schedule/activation.h, a byte for each product
  int64_t scaled;       // the operands have 8 bits, and scales are among the optional ones
  // The plan; see schedule/plan.h.
  int64_t tile_m, tile_n, raster, lead, transport, pushers, copiers, few_rows, movers;
  // Bound on any one wait, 0 for none.
  int64_t timeout_ms;
  // Host executor only: workers a rank; a random stall of up to stall_us before each claim and signal.
  int64_t workers, stall_us, stall_seed;
};

struct Problem {
  schedule::Op op;
  schedule::Geometry geometry;
  schedule::Plan plan;
  bool transpose_w, transpose_x;
  schedule::Products products;
  schedule::Activation activation[schedule::kMaxProducts];  // of each y
  xla::ffi::DataType in, out;                               // of x, and of w but that it is e4m3 beside x of e5m2; of y
  schedule::Gathering gathering;                            // x of all-gather; what reduce-scatter gathers beside, if anything
};

// The buffers of a call: x (batch, rows, k) or (batch, k, rows), w (k, n) or (n, k), y (batch, rows', n). Reduce-scatter has z
// (z_batch, z_rows, columns) if it gathers that beside; `gathered` is all of z, or of all-gather's x if that is wanted. bias
// (n) is added to every row of y. 8-bit operands have a `scale`: a number, or (products) of several products of an all-gather.
// Several products have more of them: all-gather a w and a y each, with or without bias, the other ops an x and a w. Gated ones
// have one y.
struct Buffers {
  using Optional = std::optional<xla::ffi::AnyBuffer>;
  xla::ffi::AnyBuffer x, w, y;
  Optional bias, scale, z, gathered;
  struct More {
    Optional x, w, y, bias;
  } more[schedule::kMaxProducts - 1];

  // Of product `i`, null where it has none.
  void const* x_data(uint32_t i) const { return i == 0 ? x.untyped_data() : data(more[i - 1].x); }
  void const* w_data(uint32_t i) const { return i == 0 ? w.untyped_data() : data(more[i - 1].w); }
  void* y_data(uint32_t i) const { return i == 0 ? y.untyped_data() : data(more[i - 1].y); }
  float const* bias_data(uint32_t i) const { return static_cast<float const*>(data(i == 0 ? bias : more[i - 1].bias)); }
  float const* scale_data() const { return static_cast<float const*>(data(scale)); }
  void const* z_data() const { return data(z); }
  void* gathered_data() const { return data(gathered); }

 private:
  static void* data(Optional const& buffer) { return buffer ? buffer->untyped_data() : nullptr; }
};

// Of `more`, the operands that follow those that every call has: x (but of all-gather) and w of each product after the first,
// biases and scale, where the attributes say that there is one, then z; and of `also`, the results that follow y: all-gather's
// others, then `gathered`. The first `first_more` and `first_also` are none of these.
Buffers all_buffers(schedule::Op op, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer w, xla::ffi::AnyBuffer y,
                    CallAttributes const& attributes, xla::ffi::RemainingArgs more, xla::ffi::RemainingRets also,
                    size_t first_more = 0, size_t first_also = 0);

using schedule::op_name;

// An error names the op, the argument, both values.
xla::ffi::ErrorOr<Problem> decode_problem(schedule::Op op, schedule::Target target, CallAttributes const& attributes,
                                          Buffers const& buffers);

}  // namespace entwine

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(entwine::CallAttributes, xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
                                      xla::ffi::StructMember<int64_t>("team_size"),
                                      xla::ffi::StructMember<int64_t>("transpose_w"),
                                      xla::ffi::StructMember<int64_t>("transpose_x"),
                                      xla::ffi::StructMember<int64_t>("products"), xla::ffi::StructMember<int64_t>("gated"),
                                      xla::ffi::StructMember<int64_t>("biased"), xla::ffi::StructMember<int64_t>("activation"),
                                      xla::ffi::StructMember<int64_t>("scaled"), xla::ffi::StructMember<int64_t>("tile_m"),
                                      xla::ffi::StructMember<int64_t>("tile_n"), xla::ffi::StructMember<int64_t>("raster"),
                                      xla::ffi::StructMember<int64_t>("lead"), xla::ffi::StructMember<int64_t>("transport"),
                                      xla::ffi::StructMember<int64_t>("pushers"), xla::ffi::StructMember<int64_t>("copiers"),
                                      xla::ffi::StructMember<int64_t>("few_rows"), xla::ffi::StructMember<int64_t>("movers"),
                                      xla::ffi::StructMember<int64_t>("timeout_ms"), xla::ffi::StructMember<int64_t>("workers"),
                                      xla::ffi::StructMember<int64_t>("stall_us"),
                                      xla::ffi::StructMember<int64_t>("stall_seed"));
