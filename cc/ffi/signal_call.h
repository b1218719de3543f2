// What both platforms' handlers of strategy "signal" decode and check: a call as ffi/problem.h has it, and its groups.
#pragma once

#include "ffi/problem.h"
#include "schedule/group_search.h"

namespace entwine {

struct SignalAttributes : CallAttributes {
  // schedule/group_search.h, SignalPlan.
  int64_t comm_sms, group_waves, far;
};

struct SignalProblem {
  Problem problem;
  schedule::SignalPlan plan;
  uint8_t* scratch;
};

// `scratch` is the second result, bytes; what is gathered is the third.
xla::ffi::ErrorOr<SignalProblem> decode_signal(schedule::Op op, schedule::Target target, SignalAttributes const& attributes,
                                               Buffers const& buffers, Buffers::Optional const& scratch);

}  // namespace entwine

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    entwine::SignalAttributes, xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<int64_t>("team_size"), xla::ffi::StructMember<int64_t>("transpose_w"),
    xla::ffi::StructMember<int64_t>("transpose_x"), xla::ffi::StructMember<int64_t>("products"),
    xla::ffi::StructMember<int64_t>("gated"), xla::ffi::StructMember<int64_t>("biased"),
    xla::ffi::StructMember<int64_t>("activation"), xla::ffi::StructMember<int64_t>("scaled"),
    xla::ffi::StructMember<int64_t>("tile_m"), xla::ffi::StructMember<int64_t>("tile_n"),
    xla::ffi::StructMember<int64_t>("raster"), xla::ffi::StructMember<int64_t>("lead"),
    xla::ffi::StructMember<int64_t>("transport"), xla::ffi::StructMember<int64_t>("pushers"),
    xla::ffi::StructMember<int64_t>("copiers"), xla::ffi::StructMember<int64_t>("few_rows"),
    xla::ffi::StructMember<int64_t>("movers"), xla::ffi::StructMember<int64_t>("timeout_ms"),
    xla::ffi::StructMember<int64_t>("workers"), xla::ffi::StructMember<int64_t>("stall_us"),
    xla::ffi::StructMember<int64_t>("stall_seed"), xla::ffi::StructMember<int64_t>("comm_sms"),
    xla::ffi::StructMember<int64_t>("group_waves"), xla::ffi::StructMember<int64_t>("far"));
