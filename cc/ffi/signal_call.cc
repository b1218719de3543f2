#include "ffi/signal_call.h"

#include <sstream>

namespace entwine {

namespace ffi = xla::ffi;

namespace {

template <typename... Words>
ffi::Unexpected<ffi::Error> invalid(schedule::Op op, Words const&... words) {
  std::ostringstream text;
  text << "entwine_jax." << op_name(op) << ": ";
  (text << ... << words);
  return ffi::Unexpected(ffi::Error::InvalidArgument(text.str()));
}

}  // namespace

ffi::ErrorOr<SignalProblem> decode_signal(schedule::Op op, schedule::Target target, SignalAttributes const& a,
                                          Buffers const& buffers, Buffers::Optional const& scratch) {
  ffi::ErrorOr<Problem> problem = decode_problem(op, target, a, buffers);
  if (problem.has_error()) return ffi::Unexpected(problem.error());
  if (problem->products.count != 1 || buffers.scale || buffers.z || problem->plan.form != schedule::Form::kTiles)
    return invalid(op, "strategy 'signal' takes one product of tiles, without a scale, and gathers nothing beside");
  if (problem->in != problem->out)
    return invalid(op, "strategy 'signal' gives a result of x's dtype ", problem->in, ", not ", problem->out);
  constexpr int64_t kLimit = int64_t{1} << 20;
  // Copy engines are a GPU's, and need peer access.
  int64_t least = target == schedule::Target::kSm90 && a.far == 0 ? 0 : 1;
  if (a.comm_sms < least || a.comm_sms >= kLimit || a.group_waves < 0 || a.group_waves >= kLimit || a.far < 0 || a.far > 1)
    return invalid(op, "the plan (comm_sms ", a.comm_sms, ", group_waves ", a.group_waves, ", far ", a.far,
                   ") is out of range");
  uint64_t bytes = schedule::scratch_bytes(op, schedule::grouped(op, problem->geometry),
                                           static_cast<uint32_t>(ffi::ByteWidth(problem->in)), buffers.gathered.has_value());
  if (!scratch || scratch->element_type() != ffi::DataType::U8 || scratch->element_count() < bytes)
    return invalid(op, "the second result must be scratch, ", bytes, " bytes");
  schedule::SignalPlan plan{static_cast<uint32_t>(a.comm_sms), static_cast<uint32_t>(a.group_waves), a.far != 0};
  return SignalProblem{*problem, plan, static_cast<uint8_t*>(scratch->untyped_data())};
}

}  // namespace entwine
