#include "ffi/cpu_handlers.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffi/problem.h"
#include "ffi/signal_call.h"
#include "host/team.h"
#include "team/first_epoch.h"

namespace entwine {
namespace {

namespace ffi = xla::ffi;
namespace nb = nanobind;
using schedule::Op;

constexpr int64_t kMaxWorkers = 64;

// entwine_jax/_threads.py has the reason, and prevents it where it can.
constexpr char kNoThread[] =
    " If there is neither, and many calls are in flight, XLA has no thread left for that rank: import entwine_jax before the"
    " first use of a device, or set PJRT_NPROC to (1 + threads that dispatch) x CPU devices or more; several threads must not "
    "dispatch 32 programs ahead in all.";

// One custom call of one executable; XLA makes one for all virtual devices when it compiles the program. Devices come to it on
// different threads and, with several calls in a program, in different orders: `next` says which of its calls a device is at.
struct CallSite {
  static ffi::TypeId id;

  uint64_t const number = [] {
    static std::atomic<uint64_t> sites{0};
    return sites.fetch_add(1);
  }();

  // The key of this rank's next call here. XLA:CPU runs a program on several devices as a whole, one after another.
  host::CallKey next(int64_t run, int64_t team, uint32_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    Place& place = places_[{team, rank}];
    if (place.run != run) place = {run, 0};
    return {number, run, place.count++};
  }

 private:
  struct Place {
    int64_t run = -1;
    uint64_t count = 0;
  };
  std::mutex mutex_;
  std::map<std::pair<int64_t, uint32_t>, Place> places_;
};
ffi::TypeId CallSite::id = XLA_FFI_UNKNOWN_TYPE_ID;

// By the logical ids of their ranks. Never destroyed: their threads may outlive main().
struct Teams {
  std::mutex mutex;
  std::map<std::vector<int64_t>, std::unique_ptr<host::Team>> of;
};

Teams& teams() {
  static auto* const teams = new Teams;
  return *teams;
}

host::Team& team_of(std::vector<int64_t> const& ids) {
  Teams& all = teams();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unique_ptr<host::Team>& team = all.of[ids];
  if (!team) team = std::make_unique<host::Team>(static_cast<uint32_t>(ids.size()), team::first_epoch());
  return *team;
}

std::optional<host::Element> element(ffi::DataType type) {
  switch (type) {
    case ffi::BF16:
      return host::Element::kBf16;
    case ffi::F16:
      return host::Element::kF16;
    case ffi::F32:
      return host::Element::kF32;
    case ffi::F8E4M3FN:
      return host::Element::kE4m3;
    case ffi::F8E5M2:
      return host::Element::kE5m2;
    default:
      return std::nullopt;
  }
}

template <typename... Words>
ffi::Error failure(ffi::ErrorCode code, Op op, Words const&... words) {
  std::ostringstream text;
  text << "entwine_jax." << op_name(op) << ": ";
  (text << ... << words);
  return ffi::Error(code, text.str());
}
template <typename... Words>
ffi::Error invalid(Op op, Words const&... words) {
  return failure(ffi::ErrorCode::kInvalidArgument, op, words...);
}

ffi::ErrorOr<host::CallSpec> decode_spec(Op op, CallAttributes const& a, Buffers const& buffers) {
  ffi::ErrorOr<Problem> problem = decode_problem(op, schedule::Target::kHost, a, buffers);
  if (problem.has_error()) return ffi::Unexpected(problem.error());
  auto in = element(problem->in), out = element(problem->out);
  auto same = in && is_float8(*in) ? host::Element::kBf16 : in;
  if (!in || !out || (out != same && out != host::Element::kF32))
    return ffi::Unexpected(invalid(op,
                                   "on CPU x and w must be bfloat16, float16 or float32 and the result the same or float32, or "
                                   "float8 and the result bfloat16 or float32, not ",
                                   problem->in, " and ", problem->out, "; use strategy=\"xla\""));
  if (a.workers < 1 || a.workers > kMaxWorkers)
    return ffi::Unexpected(invalid(op, "workers must be 1 to ", kMaxWorkers, ", not ", a.workers));

  host::CallSpec spec{op_name(op), op,   problem->geometry,  problem->plan,    problem->transpose_w,
                      *in,         *out, problem->gathering, problem->products};
  spec.transpose_x = problem->transpose_x;
  std::copy_n(problem->activation, schedule::kMaxProducts, spec.activation);
  spec.workers = static_cast<uint32_t>(a.workers);
  spec.timeout = host::Timeout(a.timeout_ms);
  spec.stall_us = static_cast<uint32_t>(a.stall_us);
  spec.stall_seed = static_cast<uint64_t>(a.stall_seed);
  spec.absent = kNoThread;
  return spec;
}

ffi::ErrorOr<host::CallSpec> decode_spec(Op op, SignalAttributes const& a, Buffers const& buffers,
                                         Buffers::Optional const& scratch, std::byte** memory) {
  ffi::ErrorOr<SignalProblem> problem = decode_signal(op, schedule::Target::kHost, a, buffers, scratch);
  if (problem.has_error()) return ffi::Unexpected(problem.error());
  ffi::ErrorOr<host::CallSpec> spec = decode_spec(op, a, buffers);
  if (spec.has_error()) return spec;
  spec->grouped = true;
  spec->signal = problem->plan;
  *memory = reinterpret_cast<std::byte*>(problem->scratch);
  return spec;
}

// Puts the call in its team's hands; `promise` is kept when this rank's part is done.
ffi::Error start(Op op, CallSite* site, int64_t run, CallAttributes const& a, ffi::ErrorOr<host::CallSpec> const& spec,
                 Buffers const& buffers, std::byte* scratch, ffi::BufferR1<ffi::S32> where, ffi::Promise promise) {
  if (spec.has_error()) return spec.error();
  if (where.element_count() != 2) return invalid(op, "where must hold a team index and a rank");
  int64_t team = where.typed_data()[0], rank = where.typed_data()[1], teams = a.groups.size() / a.team_size;
  if (team < 0 || team >= teams || rank < 0 || rank >= a.team_size)
    return invalid(op, "rank ", rank, " of team ", team, " does not exist: there are ", teams, " teams of ", a.team_size);

  int64_t const* ids = a.groups.begin() + team * a.team_size;
  auto done = [promise](std::string const* error) mutable {
    if (error == nullptr)
      promise.SetAvailable();
    else
      promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *error));
  };
  try {
    uint32_t r = static_cast<uint32_t>(rank);
    host::Operands operands{buffers.x_data(0),       buffers.w_data(0),    buffers.y_data(0),    buffers.z_data(),
                            buffers.gathered_data(), buffers.bias_data(0), buffers.scale_data(), scratch};
    for (uint32_t i = 1; i < spec->products.count; ++i)
      operands.more[i - 1] = {buffers.x_data(i), buffers.w_data(i), buffers.y_data(i), buffers.bias_data(i)};
    team_of({ids, ids + a.team_size}).submit(r, site->next(run, team, r), *spec, operands, done);
  } catch (std::bad_alloc const&) {
    return failure(ffi::ErrorCode::kResourceExhausted, op, "no memory for arenas with two halves of ",
                   spec->demand().staging_half, " bytes for each of ", a.team_size,
                   " ranks; use smaller operands or strategy=\"xla\"");
  }
  return ffi::Error::Success();
}

template <Op op, class Attributes>
ffi::Future execute(CallSite* site, ffi::RunId run, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::BufferR1<ffi::S32> where,
                    ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets also, Attributes attributes) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::byte* scratch = nullptr;
  ffi::Error error;
  if constexpr (std::is_same_v<Attributes, SignalAttributes>) {
    Buffers buffers = all_buffers(op, x, w, *y, attributes, more, also, 0, 1);
    auto second = also.get<ffi::AnyBuffer>(0);
    auto spec = decode_spec(op, attributes, buffers, second ? Buffers::Optional(**second) : std::nullopt, &scratch);
    error = start(op, site, run.run_id, attributes, spec, buffers, scratch, where, promise);
  } else {
    Buffers buffers = all_buffers(op, x, w, *y, attributes, more, also);
    error = start(op, site, run.run_id, attributes, decode_spec(op, attributes, buffers), buffers, scratch, where, promise);
  }
  if (error.failure()) promise.SetError(error);
  return future;
}

template <Op op, class Attributes>
XLA_FFI_Error* execute_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::State<CallSite>>()
                             .Ctx<ffi::RunId>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::BufferR1<ffi::S32>>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .RemainingRets()
                             .template Attrs<Attributes>()
                             .To(execute<op, Attributes>)
                             .release();
  return handler->Call(frame);
}

template <class Attributes>
ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate(Attributes) {
  return std::make_unique<CallSite>();
}

// The state's type must be known to XLA before the handler is; XLA's first question, for the handler's metadata, brings the
// API.
XLA_FFI_Error* register_call_site(XLA_FFI_CallFrame* frame) {
  static constexpr ffi::TypeInfo info = ffi::MakeTypeInfo<CallSite>();
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (CallSite::id.type_id != XLA_FFI_UNKNOWN_TYPE_ID.type_id) return nullptr;
  return ffi::Ffi::RegisterTypeId(frame->api, "entwine_jax.CallSite", &CallSite::id, &info);
}

template <class Attributes>
XLA_FFI_Error* instantiate_handler(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_call_site(frame)) return error;
  static auto* handler = ffi::Ffi::BindInstantiate().Attrs<Attributes>().To(instantiate<Attributes>).release();
  return handler->Call(frame);
}

template <Op op, class Attributes>
nb::dict stages() {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate_handler<Attributes>));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute_handler<op, Attributes>));
  return stages;
}

}  // namespace

nb::dict cpu_registrations() {
  nb::dict targets;
  targets["entwine_all_gather_matmul"] = stages<Op::kAllGatherMatmul, CallAttributes>();
  targets["entwine_signal_all_gather_matmul"] = stages<Op::kAllGatherMatmul, SignalAttributes>();
  targets["entwine_matmul_reduce_scatter"] = stages<Op::kMatmulReduceScatter, CallAttributes>();
  targets["entwine_signal_matmul_reduce_scatter"] = stages<Op::kMatmulReduceScatter, SignalAttributes>();
  targets["entwine_matmul_all_reduce"] = stages<Op::kMatmulAllReduce, CallAttributes>();
  targets["entwine_signal_matmul_all_reduce"] = stages<Op::kMatmulAllReduce, SignalAttributes>();
  return targets;
}

std::vector<team::TeamMemory> cpu_memory() {
  std::vector<team::TeamMemory> memory;
  Teams& all = teams();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto const& [ids, team] : all.of) {
    uint32_t ranks = static_cast<uint32_t>(ids.size());
    std::vector<uint64_t> arenas = team->arenas();
    for (uint32_t rank = 0; rank < ranks; ++rank) memory.push_back({ids[rank], rank, ranks, arenas});
  }
  return memory;
}

}  // namespace entwine
